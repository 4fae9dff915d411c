"""A contact sheet of the most suspicious images of an audit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from hetsngp.auditing.examples import Examples
from hetsngp.auditing.page import other_classes
from hetsngp.labels import LabelErrors
from hetsngp.serving.contact_sheet import MAX_IMAGES, MAX_LETTERS, SheetCell, draw_sheet
from hetsngp.serving.text_tables import printable

# Okabe and Ito's colours, which colour-blind readers can tell apart; the probability is also written below.
WRONG, OTHER = "#D55E00", "#0072B2"
MEANINGS = {WRONG: "more probably wrong than correct", OTHER: "more probably correct than wrong"}
LARGEST = 256
"""Pixels of the longer side; a larger image is made smaller, as it is drawn at 160."""


def draw_suspicious(
    path: str | Path,
    errors: LabelErrors,
    examples: Examples,
    *,
    class_names: Sequence[str],
    names: Sequence[str],
) -> None:
    """Write a PNG file with the 64 images whose labels are most probably wrong: given → suggested class, and
    the probability that the given label is wrong. Where no other class is suggested the given one stands
    alone. A class with a question mark is the most probable one but
    for the given label, which is more probable still.
    """
    if examples.kind != "image":
        raise ValueError(f"a contact sheet shows images, not a {examples.kind}: write the page of the audit")
    cells, others = [], other_classes(errors)
    for i in errors.order[:MAX_IMAGES].tolist():
        try:
            picture = examples.content(i)
            picture.thumbnail((LARGEST, LARGEST))
            pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        except (OSError, ValueError):  # removed since: an empty cell, as on the page
            pixels = torch.full((3, 1, 1), 224, dtype=torch.uint8)
        mark = " ?" if others[i] != errors.suggested[i] else ""
        change = [class_names[errors.labels[i]]]
        if others[i] != errors.labels[i]:
            change.append(f"→ {class_names[others[i]]}{mark}")
        wrong = f"P(wrong) {_probability(errors.wrong_probability[i])}"
        name = _end(printable(names[i]))
        cells.append(SheetCell(pixels, name, [*change, wrong], WRONG if errors.is_wrong[i] else OTHER))
    colours = {cell.colour for cell in cells}
    draw_sheet(cells, {c: text for c, text in MEANINGS.items() if c in colours}, path)


def _probability(p: float) -> str:
    """Two digits; "> 0.99" and "< 0.01" are not certain.

    >>> _probability(0.99996), _probability(0.9), _probability(0.001)
    ('> 0.99', '0.90', '< 0.01')
    """
    return "> 0.99" if p >= 0.995 else "< 0.01" if p < 0.005 else f"{p:.2f}"


def _end(name: str) -> str:
    """End of a path, which has the folder of the class where it is short, and the number of the file."""
    return name if len(name) <= MAX_LETTERS else f"…{name[1 - MAX_LETTERS :]}"
