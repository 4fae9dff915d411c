"""A contact sheet of the most suspicious images of an audit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from hetsngp.auditing.examples import Examples
from hetsngp.labels import LabelErrors
from hetsngp.serving.contact_sheet import MAX_IMAGES, SheetCell, draw_sheet

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
    the probability that the given label is wrong.
    """
    if examples.kind != "image":
        raise ValueError(f"a contact sheet shows images, not a {examples.kind}: write the page of the audit")
    cells = []
    for i in errors.order[:MAX_IMAGES].tolist():
        picture = examples.content(i)
        picture.thumbnail((LARGEST, LARGEST))
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        change = [class_names[errors.labels[i]], f"→ {class_names[errors.suggested[i]]}"]
        wrong = f"P(wrong) {errors.wrong_probability[i]:.2f}"
        name = Path(names[i]).name or names[i]
        cells.append(SheetCell(pixels, name, [*change, wrong], WRONG if errors.is_wrong[i] else OTHER))
    colours = {cell.colour for cell in cells}
    draw_sheet(cells, {c: text for c, text in MEANINGS.items() if c in colours}, path)
