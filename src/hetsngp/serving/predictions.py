"""Predictions and verdicts for image files, texts and data sets, batch by batch."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetsngp.data.images.files import ImageFiles
from hetsngp.data.images.folders import ENDINGS, image_names
from hetsngp.data.images.multi_label import MultiLabelFiles
from hetsngp.data.preprocessing import Images, Preprocessing
from hetsngp.data.shards.streams import ShardedImages
from hetsngp.data.sources import UNLABELLED
from hetsngp.data.text.sources import is_name
from hetsngp.data.text.texts import LabelledTexts
from hetsngp.models.classifier import to_device
from hetsngp.serving.bundle import ServedModel, image_inputs, text_inputs
from hetsngp.serving.decisions import Verdict, most_probable, verdicts
from hetsngp.types import Prediction
from hetsngp.validation import check_positive

BATCH_SIZE = 64
BATCH_BYTES = 2**28
"""Largest size of a batch of inputs in float32: 445 images of 224 pixels."""


@dataclass(frozen=True)
class PredictionRecord:
    """Prediction for one input; uncertainties in nats."""

    name: str
    """Path of the file, or data set and index: "cifar10[0]"; of a text "text[0]"."""
    label: str
    confidence: float
    data_uncertainty: float
    model_uncertainty: float
    ood_score: float
    verdict: str
    """confident, ambiguous or unfamiliar; "" where there are no thresholds."""
    text: str
    """Verdict for readers: "ambiguous (cat or dog)"."""
    top: tuple[tuple[str, float], ...]
    """The two most probable classes and their probabilities."""
    given: str | None = None
    """Label in the data set, if any; several labels as "cat + dog"."""
    input: str | None = None
    """The text, of a model of texts."""
    pixels: Tensor | None = field(default=None, repr=False, compare=False)
    """Image after resizing and cropping, (C, H, W) uint8; kept where ``pictures`` asks for it."""


def predict_files(
    served: ServedModel, files: Iterable[str | Path], batch_size: int = BATCH_SIZE, *, pictures: int = 0
) -> Iterator[PredictionRecord]:
    """Predict image files, and folders of them, which are searched in alphabetical order.

    Missing paths raise at once; a file that is not an image raises when its batch is read. The first
    ``pictures`` records keep their pixels.
    """
    inputs = image_inputs(served)
    batch_size = _bounded(batch_size, inputs)
    found = image_files(files)

    def batches() -> Iterator[Iterator[PredictionRecord]]:
        for begin in range(0, len(found), batch_size):
            part = found[begin : begin + batch_size]
            pixels = inputs.read(part)
            records = _records(served, pixels, map(str, part))
            yield _with_pixels(records, inputs, pixels[: max(pictures - begin, 0)])

    return (record for batch in batches() for record in batch)


def predict_set(
    served: ServedModel,
    spec: str,
    limit: int | None = None,
    batch_size: int = BATCH_SIZE,
    *,
    split: str = "test",
    root: str | Path | None = None,
    pictures: int = 0,
) -> Iterator[PredictionRecord]:
    """Predict a data set given by name, folder or .npz file, with its labels.

    ``limit``: number of images, evenly spaced over the set.
    """
    inputs = image_inputs(served)
    batch_size = _bounded(batch_size, inputs)
    data, names = _take(inputs.open(spec, split, root=root), spec, limit)
    # Several processes would return the images of shards in random order.
    workers = 0 if isinstance(data, ShardedImages) else None
    loader = inputs.loader(data, batch_size, device=served.device, num_workers=workers)

    def batches() -> Iterator[Iterator[PredictionRecord]]:
        done = 0
        for x, y in loader:
            records = _records(served, x, names, given=_given_labels(y, data.class_names))
            yield _with_pixels(records, inputs, x[: max(pictures - done, 0)])
            done += len(x)

    return islice((record for batch in batches() for record in batch), limit)


def predict_texts(
    served: ServedModel,
    texts: LabelledTexts | Sequence[str],
    batch_size: int = BATCH_SIZE,
    *,
    names: Sequence[str] | None = None,
) -> Iterator[PredictionRecord]:
    """Predict texts; those with classes of the model keep them as given labels.

    ``names``: one for each, to show; None: "text[0]", "text[1]", …
    """
    inputs = text_inputs(served)
    data = texts if isinstance(texts, LabelledTexts) else LabelledTexts.unlabelled(texts)
    called = iter([f"text[{row}]" for row in range(len(data))] if names is None else names)
    loader = inputs.loader(data, int(check_positive("batch_size", batch_size, integer=True)))

    def records() -> Iterator[PredictionRecord]:
        for x, y in loader:
            given = [None] * len(y) if y.dim() == 2 else _given_labels(y, data.class_names)
            yield from _records(served, x, called, given=given)

    return (replace(record, input=text) for record, text in zip(records(), data.texts, strict=True))


def open_to_predict(
    served: ServedModel, spec: str, column: str | None = None, limit: int | None = None
) -> tuple[LabelledTexts, list[str]]:
    """Texts of a data set by name, or of a file, to predict, and what to call each: "a.csv[0]".

    Texts of a data set have their labels. ``limit``: number of texts, evenly spaced.
    """
    inputs = text_inputs(served)
    data = inputs.open(spec, labelled=is_name(spec), column=column, say=tell)
    count = len(data) if limit is None else min(limit, len(data))
    rows = [row * len(data) // count for row in range(count)]
    return data.take(rows), [f"{spec}[{row}]" for row in rows]


def tell(sentence: str) -> None:
    """Print a note on stderr, as results are printed on stdout."""
    print(f"note: {sentence}", file=sys.stderr)


def image_files(files: Iterable[str | Path]) -> list[Path]:
    """List the files; a folder stands for all images in it and below, in alphabetical order."""
    if isinstance(files, str | Path):
        files = [files]
    found: list[Path] = []
    for path in map(Path, files):
        if path.is_dir():
            images = [path / name for name in sorted(image_names(path, deep=True))]
            if not images:
                raise FileNotFoundError(f"{path} has no images ({', '.join(ENDINGS)}): give another folder")
            found += images
        elif path.is_file():
            found.append(path)
        else:
            raise FileNotFoundError(f"there is no file {path}: give image files, or folders of them")
    if not found:
        raise ValueError("there is nothing to predict: give at least one image file")
    return found


# --- batches --------------------------------------------------------------------------------------------


def _bounded(batch_size: int, inputs: Preprocessing) -> int:
    """``batch_size``, or as many images as fit into ``BATCH_BYTES``, at least one."""
    check_positive("batch_size", batch_size, integer=True)
    return min(batch_size, max(1, BATCH_BYTES // (4 * inputs.channels * math.prod(inputs.size))))


def _records(
    served: ServedModel, x: Any, names: Iterator[str], *, given: Sequence[str | None] = ()
) -> Iterator[PredictionRecord]:
    """Predict a batch of b inputs, consuming b ``names``."""
    prediction: Prediction = served.model.predict(to_device(x, served.device))
    classes = served.inputs.class_names
    best = torch.stack(most_probable(prediction.probs), 1)
    top = zip(best.tolist(), prediction.probs.gather(1, best).tolist(), strict=True)
    columns = ("confidence", "data_uncertainty", "model_uncertainty", "ood_score")
    rows = zip(*(getattr(prediction, name).tolist() for name in columns), strict=True)
    if served.thresholds is None:
        found = [Verdict("", classes[label], (), "–") for label in best[:, 0].tolist()]
    else:
        found = verdicts(prediction, served.thresholds, classes)
    for index, (verdict, (labels, probs), numbers) in enumerate(zip(found, top, rows, strict=True)):
        yield PredictionRecord(
            name=next(names),
            label=verdict.label,
            **dict(zip(columns, numbers, strict=True)),
            verdict=verdict.kind,
            text=verdict.text,
            top=tuple((classes[label], p) for label, p in zip(labels, probs, strict=True)),
            given=given[index] if given else None,
        )


def _with_pixels(
    records: Iterable[PredictionRecord], inputs: Preprocessing, x: Tensor
) -> Iterator[PredictionRecord]:
    """Add the pixels of ``x`` (n, C, H, W) to the first n records."""
    pixels = list(_pixels(inputs, x.cpu()))
    for index, record in enumerate(records):
        yield replace(record, pixels=pixels[index]) if index < len(pixels) else record


def _pixels(inputs: Preprocessing, x: Tensor) -> Tensor:
    """Convert (x − mean)/std back to bytes."""
    mean, std = (torch.tensor(value)[:, None, None] for value in (inputs.mean, inputs.std))
    return (255 * (x.float() * std + mean)).round().clamp(0, 255).byte()


def _take(data: Images, spec: str, limit: int | None) -> tuple[Images, Iterator[str]]:
    """Take ``limit`` images, evenly spaced, and name each; the caller takes the first ones of shards."""
    indices: Sequence[int] = range(len(data))
    if limit is not None:
        check_positive("limit", limit, integer=True)
    if limit is not None and limit < len(data) and not isinstance(data, ShardedImages):
        indices = [index * len(data) // limit for index in range(limit)]
        data = data.take(indices)
    if isinstance(data, ImageFiles):
        return data, map(str, data.files)
    if isinstance(data, MultiLabelFiles):
        return data, (str(data.file(index)) for index in range(len(data)))
    return data, (f"{spec}[{index}]" for index in indices)


def _given_labels(y: Tensor, class_names: Sequence[str]) -> list[str | None]:
    if tuple(class_names) == UNLABELLED:
        return [None] * len(y)
    if y.dim() == 2:
        return [
            " + ".join(class_names[k] for k in row.nonzero().flatten().tolist()) or None for row in y.cpu()
        ]
    return [class_names[label] for label in y.tolist()]
