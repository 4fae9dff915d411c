"""One line an input, for people or for programs: label, confidence, both doubts and a verdict."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

from hetsngp.data.datasets.registry import DATASETS
from hetsngp.serving.bundle import Served
from hetsngp.serving.contact_sheet import MOST, check_sheet, draw_lines
from hetsngp.serving.decisions import never_said
from hetsngp.serving.predictions import ROWS, Line, image_files, predict_files, predict_set

__all__ = ["Line", "as_json", "as_text", "predict_and_show", "predict_files", "predict_set"]

LONGEST = 28
"""Letters of a label in a column."""
HEADINGS = ("file", "label", "given", "confidence", "data", "model", "verdict")
GIVEN, NUMBERS = 2, (3, 4, 5)


def predict_and_show(
    served: Served,
    sources: Sequence[str],
    *,
    as_json: bool = False,
    sheet: Path | None = None,
    limit: int | None = None,
    batch_size: int = ROWS,
) -> None:
    """Print a line for each input of ``sources``, as they are predicted.

    A source is an image file, a folder of images, or a set: its name (./cifar10 is a folder, cifar10 the set)
    or a .npz file. ``limit``: at most so many of each set (evenly spread), of each folder (the first by
    name), and of all files that are named one by one. ``sheet``: a PNG file of the first 64 inputs, written
    at the end. Words of a verdict that no input gets are said after the lines, on the standard error.
    """
    if sheet is not None:
        check_sheet(sheet)
    parts: list[Iterator[Line]] = []
    pictures, named = 0 if sheet is None else MOST, 0
    # All sources are opened before the first line is printed.
    for is_set, group in groupby(sources, _is_set):
        if is_set:
            parts += [predict_set(served, spec, limit, batch_size, pictures=pictures) for spec in group]
            continue
        files: list[Path] = []
        for source in group:
            alone = not Path(source).is_dir()
            files += image_files([source])[: _left(limit, named if alone else 0)]
            named += alone
        if files:
            parts.append(predict_files(served, files, batch_size, pictures=pictures))
    kept: list[Line] = []

    def shown() -> Iterator[Line]:
        for line in chain.from_iterable(parts):
            if sheet is not None and len(kept) < MOST:
                kept.append(line)
            yield line

    for text in map(_object, shown()) if as_json else as_text(shown(), batch_size):
        print(text, flush=True)
    for text in never_said(served.thresholds):
        print(f"note: {text}", file=sys.stderr)
    if sheet is not None:
        draw_lines(kept, [line.pixels for line in kept], sheet)
        print(f"sheet: {sheet}", file=sys.stderr)


def as_text(lines: Iterable[Line], block: int = ROWS) -> Iterator[str]:
    """Aligned columns under a heading, a string a line; ``block`` lines are waited for and aligned at a time.

    >>> doubt = {"data_uncertainty": 0.1, "model_uncertainty": 0.02, "ood_score": 0.02}
    >>> line = Line("a.jpg", "cat", 0.97, **doubt, verdict="confident", text="confident", top=())
    >>> for text in as_text([line]):
    ...     print(text)
    file   label  confidence   data  model  verdict
    a.jpg  cat         0.970  0.100  0.020  confident
    """
    rest, widths, labelled = iter(lines), [0] * len(HEADINGS), False
    heading: list[tuple[str, ...]] = [HEADINGS]
    while part := list(islice(rest, block)):
        labelled = labelled or any(line.given is not None for line in part)
        rows = heading + [_cells(line) for line in part]
        # Columns only ever get wider.
        widths = [
            max(width, *map(len, column))
            for width, column in zip(widths, zip(*rows, strict=True), strict=True)
        ]
        yield from (_aligned(row, widths, labelled) for row in rows)
        heading = []


def as_json(line: Line) -> str:
    """One object of strict JSON on one line; null for what is no finite number.

    >>> doubt = {"data_uncertainty": 0.1, "model_uncertainty": 0.02, "ood_score": 0.02}
    >>> line = Line("a.jpg", "cat", 1.0, **doubt, verdict="confident", text="confident", top=(("cat", 1.0),))
    >>> print(as_json(line)[:52])
    {"name": "a.jpg", "label": "cat", "confidence": 1.0,
    """
    values: dict[str, Any] = {
        name: _number(value) if isinstance(value, float) else value
        for name, value in vars(line).items()
        if name != "pixels"
    }
    values["top"] = [{"label": label, "probability": _number(p)} for label, p in line.top]
    return json.dumps(values, allow_nan=False)


_object = as_json
"""Under a name that the argument of :func:`predict_and_show` does not hide."""


def _left(limit: int | None, taken: int) -> int | None:
    return None if limit is None else max(0, limit - taken)


def _is_set(source: str) -> bool:
    return str(source).partition(":")[0] in DATASETS or Path(source).suffix == ".npz"


def _aligned(cells: Sequence[str], widths: Sequence[int], labelled: bool) -> str:
    padded = [
        cell.rjust(width) if place in NUMBERS else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        if place != GIVEN or labelled
    ]
    return "  ".join(padded).rstrip()


def _cells(line: Line) -> tuple[str, ...]:
    numbers = (line.confidence, line.data_uncertainty, line.model_uncertainty)
    label, given = (_short(_shown(text)) for text in (line.label, line.given or ""))
    return (_shown(line.name), label, given, *(f"{number:.3f}" for number in numbers), _shown(line.text))


def _shown(text: str) -> str:
    """On one line, of letters that any terminal takes: file names may hold anything."""
    return text if text.isprintable() else ascii(text)[1:-1]


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _number(value: float) -> float | None:
    """What float32 knows of it."""
    return float(f"{value:.7g}") if math.isfinite(value) else None
