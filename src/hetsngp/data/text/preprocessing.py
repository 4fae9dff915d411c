"""Preprocessing of texts, saved with a model so that prediction repeats what training did."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetsngp.data.preprocessing import subset
from hetsngp.data.text.loader import TextLoader
from hetsngp.data.text.sources import open_texts
from hetsngp.data.text.texts import LabelledTexts
from hetsngp.data.text.tokenizer import TextTokenizer
from hetsngp.files import write_text

KIND = "text"
TOKENIZER = "tokenizer.json"
"""File of the tokenizer, beside the model."""
KEYS = ("kind", "class_names", "max_length", "inputs", "pad_id", "tokenizer", "text_column", "label_column")
"""Keys of :meth:`TextPreprocessing.to_dict`."""


@dataclass(frozen=True)
class TextPreprocessing:
    """Texts → batches of token numbers, and the names of the classes."""

    tokenizer: TextTokenizer
    class_names: tuple[str, ...]
    text_column: str | None = None
    """Column of the texts in the training data; files that have it are read by it."""
    label_column: str | None = None
    """Column of the classes in the training data."""

    multi_label = False
    """Whether a text may have any number of classes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "class_names", tuple(self.class_names))
        if len(self.class_names) < 2 or not all(isinstance(name, str) for name in self.class_names):
            raise ValueError(f"class_names are two or more words, got {self.class_names!s:.200}")
        for name in ("text_column", "label_column"):
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"{name} is the name of a column, got {getattr(self, name)!r:.50}")

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON; the tokenizer itself is a file, of which they have the SHA-256."""
        return {
            "kind": KIND,
            "class_names": list(self.class_names),
            "max_length": self.tokenizer.max_length,
            "inputs": list(self.tokenizer.inputs),
            "pad_id": self.tokenizer.pad_id,
            "tokenizer": self.tokenizer.sha256,
            "text_column": self.text_column,
            "label_column": self.label_column,
        }

    def write_files(self, folder: Path) -> None:
        """Write the tokenizer into ``folder``, atomically."""
        write_text(folder / TOKENIZER, self.tokenizer.definition)

    @staticmethod
    def from_dict(values: Mapping[str, Any], folder: Path) -> TextPreprocessing:
        """Inverse of :meth:`to_dict` and :meth:`write_files`."""
        if not isinstance(values, Mapping) or set(values) != set(KEYS):
            raise ValueError(f"inputs of texts are described by {', '.join(KEYS)}, got {values!r:.200}")
        for name in ("class_names", "inputs"):
            if not isinstance(values[name], list):
                raise ValueError(f"{name} is a list, got {values[name]!r:.50}")
        tokenizer = TextTokenizer.read(
            folder / TOKENIZER, values["max_length"], values["inputs"], values["pad_id"]
        )
        if tokenizer.sha256 != values["tokenizer"]:
            raise ValueError(f"{folder / TOKENIZER} is another tokenizer than the model was trained with")
        return TextPreprocessing(
            tokenizer, values["class_names"], values["text_column"], values["label_column"]
        )

    # --- sets -------------------------------------------------------------------------------------------

    def open(
        self,
        spec: str | Path,
        split: str = "test",
        *,
        limit: int | None = None,
        root: str | Path | None = None,
        labelled: bool = True,
        column: str | None = None,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> LabelledTexts:
        """Texts by name, file or folder, as :func:`hetsngp.data.text.sources.open_texts` opens them.

        A file that has the column of the training data is read by it. Classes are numbered as the model's.
        ``limit``: number of texts to take, stratified by class. ``column``: name of the column of texts.
        """
        found = open_texts(
            spec,
            split,
            text=column or self.text_column,
            label=self.label_column,
            labelled=labelled,
            class_names=self.class_names,
            guess_missing=column is None,
            root=root,
            say=say,
        )
        return subset(found, limit)

    def open_corrupted(self, spec: str, **options: Any) -> Any:
        """Raise a ValueError: there are no corrupted texts."""
        raise ValueError(f"{spec} has corrupted images, and this model takes texts: leave out --corrupted")

    def loader(
        self,
        data: LabelledTexts,
        batch_size: int,
        *,
        device: torch.device | str | None = None,
        num_workers: int | None = None,
        resize: int | None = None,
    ) -> TextLoader:
        """Batches (x, y) of all texts, in order; ``num_workers`` and ``resize`` are for images."""
        loader = TextLoader(self.tokenizer.encode(data), batch_size)
        return loader if device is None else loader.to(device)

    def read(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Batch x of texts."""
        return self.tokenizer.batch(texts)
