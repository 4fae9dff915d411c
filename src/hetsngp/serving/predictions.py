"""From images to what is said of each: batch by batch, however many there are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from hetsngp.data.images.files import ImageFiles
from hetsngp.data.images.folders import ENDINGS, image_names
from hetsngp.data.images.multi_label import MultiLabelFiles
from hetsngp.data.preprocessing import Images, Inputs
from hetsngp.data.shards.streams import ShardedImages
from hetsngp.serving.bundle import Served
from hetsngp.serving.decisions import most_probable, verdicts
from hetsngp.types import Prediction
from hetsngp.validation import check_positive

ROWS = 64
"""Inputs at a time."""
UNLABELLED = ("unlabelled",)
"""The classes of images that lie in a folder by themselves."""


@dataclass(frozen=True)
class Line:
    """What is said of one input; doubts in nats."""

    name: str
    """The file, or the set and the place in it: "cifar10[0]"."""
    label: str
    confidence: float
    data_uncertainty: float
    model_uncertainty: float
    ood_score: float
    verdict: str
    """confident, ambiguous or unfamiliar."""
    text: str
    """The same for people: "ambiguous (cat or dog)"."""
    top: tuple[tuple[str, float], ...]
    """The two most probable classes and their probabilities."""
    given: str | None = None
    """The label it was given, where it has one; of several "cat + dog"."""
    pixels: Tensor | None = field(default=None, repr=False, compare=False)
    """(C, H, W) uint8: what the network saw, where pictures were asked for."""


def predict_files(
    served: Served, files: Iterable[str | Path], batch_size: int = ROWS, *, pictures: int = 0
) -> Iterator[Line]:
    """Of image files and of folders of them, which are walked in the order of their names.

    All paths are looked for at once; a file that is no image is an error when its batch is read. The first
    ``pictures`` lines keep their pixels.
    """
    check_positive("batch_size", batch_size, integer=True)
    found = image_files(files)

    def batches() -> Iterator[Iterator[Line]]:
        for begin in range(0, len(found), batch_size):
            part = found[begin : begin + batch_size]
            yield _lines(served, served.inputs.read(part), map(str, part), keep=pictures - begin)

    return (line for batch in batches() for line in batch)


def predict_set(
    served: Served,
    spec: str,
    limit: int | None = None,
    batch_size: int = ROWS,
    *,
    split: str = "test",
    root: str | Path | None = None,
    pictures: int = 0,
) -> Iterator[Line]:
    """Of a set by name, folder or .npz file, with the label of each; ``limit``: so many, evenly spread."""
    check_positive("batch_size", batch_size, integer=True)
    data = served.inputs.open(spec, split, root=root)
    data, names = _some(data, spec, limit)
    # Shards in several processes would come in no order.
    workers = 0 if isinstance(data, ShardedImages) else None
    loader = served.inputs.loader(data, batch_size, device=served.device, num_workers=workers)

    def batches() -> Iterator[Iterator[Line]]:
        done = 0
        for x, y in loader:
            yield _lines(served, x, names, given=_given(y, data.class_names), keep=pictures - done)
            done += len(x)

    return islice((line for batch in batches() for line in batch), limit)


def image_files(files: Iterable[str | Path]) -> list[Path]:
    """The files themselves, and in place of a folder all images in it and below, by name."""
    if isinstance(files, str | Path):
        files = [files]
    found: list[Path] = []
    for path in map(Path, files):
        if path.is_dir():
            inside = [path / name for name in sorted(image_names(path, deep=True))]
            if not inside:
                raise FileNotFoundError(f"{path} has no images ({', '.join(ENDINGS)}): give another folder")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise FileNotFoundError(f"there is no file {path}: give image files, or folders of them")
    if not found:
        raise ValueError("there is nothing to predict: name at least one image file")
    return found


# --- pieces ---------------------------------------------------------------------------------------------


def _lines(
    served: Served, x: Tensor, names: Iterator[str], *, given: Sequence[str | None] = (), keep: int = 0
) -> Iterator[Line]:
    """Of a batch (b, C, H, W), the first ``keep`` with their pixels; takes b of the ``names``."""
    prediction: Prediction = served.model.predict(x.to(served.device))
    classes = served.inputs.class_names
    found = verdicts(prediction, served.thresholds, classes)
    best = torch.stack(most_probable(prediction.probs), 1)
    top = zip(best.tolist(), prediction.probs.gather(1, best).tolist(), strict=True)
    doubts = ("confidence", "data_uncertainty", "model_uncertainty", "ood_score")
    columns = zip(*(getattr(prediction, name).tolist() for name in doubts), strict=True)
    pixels = list(_pixels(served.inputs, x[: max(keep, 0)].cpu()))
    for row, (verdict, (labels, probs), numbers) in enumerate(zip(found, top, columns, strict=True)):
        doubt = dict(zip(doubts, numbers, strict=True))
        yield Line(
            name=next(names),
            label=verdict.label,
            **doubt,
            verdict=verdict.kind,
            text=verdict.text,
            top=tuple((classes[label], p) for label, p in zip(labels, probs, strict=True)),
            given=given[row] if given else None,
            pixels=pixels[row] if row < len(pixels) else None,
        )


def _pixels(inputs: Inputs, x: Tensor) -> Tensor:
    """Back from (x − mean)/std to bytes."""
    mean, std = (torch.tensor(value)[:, None, None] for value in (inputs.mean, inputs.std))
    return (255 * (x.float() * std + mean)).round().clamp(0, 255).byte()


def _some(data: Images, spec: str, limit: int | None) -> tuple[Images, Iterator[str]]:
    """So many images of a set, evenly spread, and what each is called; of shards the first, by the caller."""
    rows: Sequence[int] = range(len(data))
    if limit is not None:
        check_positive("limit", limit, integer=True)
    if limit is not None and limit < len(data) and not isinstance(data, ShardedImages):
        rows = [row * len(data) // limit for row in range(limit)]
        data = data.take(rows)
    if isinstance(data, ImageFiles):
        return data, map(str, data.files)
    if isinstance(data, MultiLabelFiles):
        return data, (str(data.file(row)) for row in range(len(data)))
    return data, (f"{spec}[{row}]" for row in rows)


def _given(y: Tensor, class_names: Sequence[str]) -> list[str | None]:
    if tuple(class_names) == UNLABELLED:
        return [None] * len(y)
    if y.dim() == 2:
        return [
            " + ".join(class_names[k] for k in row.nonzero().flatten().tolist()) or None for row in y.cpu()
        ]
    return [class_names[label] for label in y.tolist()]
