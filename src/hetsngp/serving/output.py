"""Predictions as an aligned table or as JSON lines, printed while they are made."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

from hetsngp._moved import renamed_arguments
from hetsngp.data.datasets.registry import DATASETS
from hetsngp.data.images.folders import ENDINGS, image_names
from hetsngp.data.text.files import is_text_file
from hetsngp.data.text.preprocessing import TextPreprocessing
from hetsngp.data.text.texts import check_texts, shorten
from hetsngp.serving.bundle import ServedModel, image_inputs, text_inputs
from hetsngp.serving.contact_sheet import MAX_IMAGES, check_contact_sheet, draw_contact_sheet
from hetsngp.serving.decisions import unused_verdicts
from hetsngp.serving.predictions import (
    BATCH_SIZE,
    PredictionRecord,
    image_files,
    open_to_predict,
    predict_files,
    predict_set,
    predict_texts,
)
from hetsngp.serving.text_tables import align_rows, printable

__all__ = ["PredictionRecord", "as_json", "as_text", "predict_and_show", "predict_files", "predict_set"]

MAX_LABEL, MAX_TEXT = 28, 48
"""Letters of a label and of a text in the table."""
STDIN = "-"
"""Source that stands for the lines of standard input."""
HEADINGS = ("file", "label", "given", "confidence", "data", "model", "verdict")
GIVEN, NUMERIC = 2, (3, 4, 5)


@renamed_arguments(sheet="contact_sheet")
def predict_and_show(
    served: ServedModel,
    sources: Sequence[str],
    *,
    as_json: bool = False,
    contact_sheet: Path | None = None,
    limit: int | None = None,
    batch_size: int = BATCH_SIZE,
    texts: Sequence[str] = (),
    column: str | None = None,
) -> None:
    """Print a line for each input of ``sources`` as soon as its batch is predicted.

    A source is an image file, a folder of images, or a data set: its name (./cifar10 is a folder, cifar10 the
    set) or a .npz file. Of a model of texts it is a file (.txt with a text on each line, .csv, .jsonl,
    .parquet), "-" for the lines of standard input, or the name of a data set; ``texts`` are predicted first,
    and ``column`` is the one of the texts in files. ``limit``: the most images to take from each set (evenly
    spaced), from each folder (the first in alphabetical order), and of the files given one by one.
    ``contact_sheet``: PNG file of the first 64 inputs, written at the end. Verdicts that no input can get are
    reported on stderr.
    """
    if contact_sheet is not None:
        image_inputs(served)
        check_contact_sheet(contact_sheet)
    pictures = 0 if contact_sheet is None else MAX_IMAGES
    if isinstance(served.inputs, TextPreprocessing) or texts or column is not None:
        parts = _text_parts(served, sources, texts, column, limit, batch_size)
    else:
        parts = _image_parts(served, sources, limit, batch_size, pictures)
    first: list[PredictionRecord] = []

    def records() -> Iterator[PredictionRecord]:
        for record in chain.from_iterable(parts):
            if len(first) < pictures:
                first.append(record)
            yield record

    for line in map(_to_json, records()) if as_json else as_text(records(), batch_size):
        print(line, flush=True)
    notes = [] if served.note is None else [served.note]
    for note in notes + ([] if served.thresholds is None else unused_verdicts(served.thresholds)):
        print(f"note: {note}", file=sys.stderr)
    if contact_sheet is not None:
        draw_contact_sheet(first, [record.pixels for record in first], contact_sheet)
        print(f"contact sheet: {contact_sheet}", file=sys.stderr)


def _image_parts(
    served: ServedModel, sources: Sequence[str], limit: int | None, batch_size: int, pictures: int
) -> list[Iterator[PredictionRecord]]:
    """Open all sources of images, before the first line is printed."""
    parts: list[Iterator[PredictionRecord]] = []
    named = 0
    for is_set, group in groupby(sources, _is_set):
        if is_set:
            parts += [predict_set(served, spec, limit, batch_size, pictures=pictures) for spec in group]
            continue
        files: list[Path] = []
        for source in group:
            if is_text_file(source):
                text_inputs(served)  # raises
            alone = not Path(source).is_dir()
            files += image_files([source])[: _remaining(limit, named if alone else 0)]
            named += alone
        if files:
            parts.append(predict_files(served, files, batch_size, pictures=pictures))
    return parts


def _text_parts(
    served: ServedModel,
    sources: Sequence[str],
    texts: Sequence[str],
    column: str | None,
    limit: int | None,
    batch_size: int,
) -> list[Iterator[PredictionRecord]]:
    """Open all sources of texts, before the first line is printed."""
    text_inputs(served)  # raises for a model of images
    parts = []
    if texts:
        check_texts(texts, "--text")
        parts.append(predict_texts(served, texts, batch_size))
    for source in sources:
        if source == STDIN:
            lines = [line.rstrip("\r\n") for line in sys.stdin if line.strip()][:limit]
            check_texts(lines, "standard input")
            names = [f"stdin[{row}]" for row in range(len(lines))]
            parts.append(predict_texts(served, lines, batch_size, names=names))
            continue
        if _is_of_images(Path(source)):
            image_inputs(served)  # raises
        data, names = open_to_predict(served, source, column, limit)
        parts.append(predict_texts(served, data, batch_size, names=names))
    return parts


@renamed_arguments(lines="records")
def as_text(records: Iterable[PredictionRecord], block: int = BATCH_SIZE) -> Iterator[str]:
    """Lines of an aligned table with a heading; columns are aligned over ``block`` records at a time.

    >>> uncertainty = {"data_uncertainty": 0.1, "model_uncertainty": 0.02, "ood_score": 0.02}
    >>> verdict = {"verdict": "confident", "text": "confident"}
    >>> for line in as_text([PredictionRecord("a.jpg", "cat", 0.97, **uncertainty, **verdict, top=())]):
    ...     print(line)
    file   label  confidence   data  model  verdict
    a.jpg  cat         0.970  0.100  0.020  confident
    """
    remaining, widths, labelled = iter(records), dict.fromkeys(range(len(HEADINGS)), 0), False
    widths[GIVEN] = len(HEADINGS[GIVEN])  # labels may first appear after the heading
    heading: list[tuple[str, ...]] | None = None
    while part := list(islice(remaining, block)):
        if heading is None:
            heading = [HEADINGS if part[0].input is None else ("text", *HEADINGS[1:])]
        labelled = labelled or any(record.given is not None for record in part)
        rows = heading + [_cells(record) for record in part]
        shown = [index for index in range(len(HEADINGS)) if index != GIVEN or labelled]
        lines, found = align_rows(
            [[row[index] for index in shown] for row in rows],
            right=[shown.index(index) for index in NUMERIC],
            min_widths=[widths[index] for index in shown],  # columns only ever get wider
        )
        widths |= zip(shown, found, strict=True)
        yield from lines
        heading = []


@renamed_arguments(line="record")
def as_json(record: PredictionRecord) -> str:
    """Strict JSON on one line; numbers that are not finite become null.

    >>> uncertainty = {"data_uncertainty": 0.1, "model_uncertainty": 0.02, "ood_score": 0.02}
    >>> verdict = {"verdict": "confident", "text": "confident"}
    >>> record = PredictionRecord("a.jpg", "cat", 1.0, **uncertainty, **verdict, top=(("cat", 1.0),))
    >>> print(as_json(record)[:52])
    {"name": "a.jpg", "label": "cat", "confidence": 1.0,
    """
    values: dict[str, Any] = {
        name: _number(value) if isinstance(value, float) else value
        for name, value in vars(record).items()
        if name != "pixels" and not (name == "input" and value is None)
    }
    values["top"] = [{"label": label, "probability": _number(p)} for label, p in record.top]
    return json.dumps(values, allow_nan=False)


_to_json = as_json  # the argument of predict_and_show hides the name as_json


def _remaining(limit: int | None, taken: int) -> int | None:
    return None if limit is None else max(0, limit - taken)


def _is_of_images(path: Path) -> bool:
    """Whether ``path`` is an image file, or a folder with images and no file of texts."""
    if path.is_dir():
        has_texts = any(is_text_file(file) for file in path.iterdir())
        return not has_texts and any(image_names(path, deep=True))
    return path.suffix.lower() in ENDINGS and not is_text_file(path)


def _is_set(source: str) -> bool:
    return str(source).partition(":")[0] in DATASETS or Path(source).suffix == ".npz"


def _cells(record: PredictionRecord) -> tuple[str, ...]:
    numbers = (record.confidence, record.data_uncertainty, record.model_uncertainty)
    label, given = (_shorten(printable(text)) for text in (record.label, record.given or ""))
    text = printable(record.text)
    name = record.name if record.input is None else shorten(record.input, MAX_TEXT)
    return (printable(name), label, given, *(f"{number:.3f}" for number in numbers), text)


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_LABEL else f"{text[: MAX_LABEL - 1]}…"


def _number(value: float) -> float | None:
    """Round to the digits of float32; None where the value is not finite."""
    return float(f"{value:.7g}") if math.isfinite(value) else None
