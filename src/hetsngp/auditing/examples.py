"""Examples as a person sees them: pictures, texts, or rows of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.decoding import image_ops, open_picture, pillow
from hetsngp.data.images.files import ImageFiles


class Examples(Protocol):
    """N examples in the order of their labels. ``content(i)`` is by ``kind`` an RGB image of Pillow, a text,
    or the values of a row by the names of their columns.
    """

    @property
    def kind(self) -> Literal["image", "text", "table"]: ...

    def __len__(self) -> int: ...

    def content(self, index: int) -> Any: ...


class ImageExamples:
    """Images in memory or on disk; those on disk are decoded when they are asked for."""

    kind: Literal["image"] = "image"

    def __init__(self, data: ImageArrays | ImageFiles) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def content(self, index: int) -> Any:
        if isinstance(self.data, ImageFiles):
            file = self.data.files[index]
            return _as_held(open_picture(file, str(file)))
        pixels = self.data.images[index].cpu()
        shown = pixels[:3] if len(pixels) >= 3 else pixels[:1].expand(3, -1, -1)  # without alpha; grey as RGB
        return pillow().fromarray(shown.permute(1, 2, 0).contiguous().numpy())


def _as_held(picture: Any) -> Any:
    """Picture as the camera was held when it was taken; networks see the pixels as they are stored."""
    try:
        return image_ops().exif_transpose(picture)
    except Exception:  # Pillow raises nearly anything on malformed Exif data, which say nothing then
        return picture


class TextExamples:
    """Texts.

    >>> TextExamples(["good", "bad"]).content(1)
    'bad'
    """

    kind: Literal["text"] = "text"

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def content(self, index: int) -> str:
        return str(self.texts[index])


class TableExamples:
    """Rows of a table, given as columns by name or as one mapping for each row.

    >>> TableExamples({"height": [1.7, 1.8], "city": ["Oslo", "Rome"]}).content(1)
    {'height': 1.8, 'city': 'Rome'}
    >>> TableExamples([{"height": 1.7}]).content(0)
    {'height': 1.7}
    """

    kind: Literal["table"] = "table"

    def __init__(self, rows: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]) -> None:
        self.rows = rows
        if isinstance(rows, Mapping):
            lengths = {name: len(column) for name, column in rows.items()}
            if len(set(lengths.values())) != 1:
                raise ValueError(f"columns must have the same length, at least one column, got {lengths}")

    def __len__(self) -> int:
        return len(next(iter(self.rows.values()))) if isinstance(self.rows, Mapping) else len(self.rows)

    def content(self, index: int) -> dict[str, Any]:
        if isinstance(self.rows, Mapping):
            return {str(name): column[index] for name, column in self.rows.items()}
        return {str(name): value for name, value in self.rows[index].items()}
