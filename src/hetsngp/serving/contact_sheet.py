"""A contact sheet: images as the network sees them, each with its prediction below it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetsngp._moved import renamed_arguments
from hetsngp.files import write_figure
from hetsngp.serving.predictions import PredictionRecord
from hetsngp.serving.text_tables import printable

MAX_IMAGES = 64
COLUMNS, MAX_LETTERS, MOST_ACROSS = 8, 24, 3
# Inches: an image with its text, the image alone, the title above it, and the least width (of the legend).
CELL, SIDE, TOP, MIN_WIDTH = (1.7, 2.45), 1.45, 0.3, 4.2
# Okabe and Ito's colours, which colour-blind readers can tell apart; the verdict is also written below.
COLOURS = {"confident": "#0072B2", "ambiguous": "#E69F00", "unfamiliar": "#D00000"}
NO_VERDICT = "#808080"
MEANINGS = {
    "confident": "confident: held-out images like this were classified correctly",
    "ambiguous": "ambiguous: may be another class",
    "unfamiliar": "unfamiliar: unlike the held-out images",
}


@dataclass(frozen=True)
class SheetCell:
    """Image of a sheet: ``pixels`` (C, H, W) uint8, C 1 or 3, in a frame, ``title`` above and lines below."""

    pixels: Any
    title: str
    below: Sequence[str]
    colour: str


@renamed_arguments(lines="records")
def draw_contact_sheet(records: Sequence[PredictionRecord], images: Sequence[Any], path: str | Path) -> None:
    """Write a PNG file with the first 64 ``records`` below their ``images``, each (C, H, W) uint8, C 1 or 3.

    ``predict_files(…, pictures=64)`` keeps the images: give ``[record.pixels for record in records]``.
    """
    records, images = records[:MAX_IMAGES], images[:MAX_IMAGES]
    if not records or len(records) != len(images):
        raise ValueError(f"{len(records)} records and {len(images)} images: give one image for each record")
    kinds = {record.verdict for record in records}
    legend = {COLOURS[kind]: MEANINGS[kind] for kind in COLOURS if kind in kinds}
    draw_sheet([_cell(record, image) for record, image in zip(records, images, strict=True)], legend, path)


def draw_sheet(cells: Sequence[SheetCell], legend: Mapping[str, str], path: str | Path) -> None:
    """Write a PNG file with ``cells``; ``legend``: colours of frames and what they mean."""
    columns = min(COLUMNS, math.ceil(math.sqrt(len(cells))))
    rows = math.ceil(len(cells) / columns)
    # The entries of the legend are side by side where the figure is wide enough.
    across = MOST_ACROSS if columns > 6 else 1
    width, foot = max(columns * CELL[0], MIN_WIDTH), 0.3 + 0.2 * (MOST_ACROSS - across)
    height = rows * CELL[1] + foot
    figure = _figure_class()(figsize=(width, height))
    for index, cell in enumerate(cells):
        row, column = divmod(index, columns)
        left = (column + 0.5) * CELL[0] - SIDE / 2 + (width - columns * CELL[0]) / 2
        bottom = height - row * CELL[1] - TOP - SIDE
        # Placed by hand: constrained layout takes seconds for so many axes.
        ax = figure.add_axes((left / width, bottom / height, SIDE / width, SIDE / height))
        _draw_cell(ax, cell)
    _draw_legend(figure, legend, across)
    write_figure(figure, Path(path), dpi=110)


def check_contact_sheet(path: str | Path) -> None:
    """Raise before a long prediction where matplotlib or the folder is missing."""
    _figure_class()
    if not Path(path).parent.is_dir():
        raise FileNotFoundError(f"there is no folder {Path(path).parent} for {path}: create it first")


def _figure_class() -> Any:
    """matplotlib's Figure, without pyplot, whose state belongs to the caller's session."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("contact sheets need matplotlib: pip install 'hetsngp[eval]'") from error
    return Figure


def _cell(record: PredictionRecord, image: Any) -> SheetCell:
    below = [f"{_shorten(record.label, MAX_LETTERS - 5)} {record.confidence:.2f}", *_wrap(record.text)]
    if record.given is not None:
        below.append(f"given: {record.given}")
    return SheetCell(
        image, Path(record.name).name or record.name, below, COLOURS.get(record.verdict, NO_VERDICT)
    )


def _draw_cell(ax: Any, cell: SheetCell) -> None:
    pixels = torch.as_tensor(cell.pixels)
    if pixels.dtype != torch.uint8 or pixels.dim() != 3 or len(pixels) not in (1, 3):
        raise ValueError(
            f"images must be (C, H, W) uint8 with C 1 or 3, got {tuple(pixels.shape)} {pixels.dtype}"
        )
    ax.set(xticks=[], yticks=[])
    ax.imshow(pixels.permute(1, 2, 0).expand(-1, -1, 3).cpu().numpy(), interpolation="nearest")
    for spine in ax.spines.values():
        spine.set(color=cell.colour, linewidth=3)
    # A pair of $ in a name is no formula.
    plain = {"parse_math": False}
    ax.set_title(_shorten(cell.title, MAX_LETTERS), fontsize=7, color="0.35", pad=4, **plain)
    below = "\n".join(_shorten(line, MAX_LETTERS) for line in cell.below)
    ax.set_xlabel(below, fontsize=8, labelpad=4, **plain)


def _draw_legend(figure: Any, legend: Mapping[str, str], across: int) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=meaning) for colour, meaning in legend.items()]
    figure.legend(handles=handles, loc="lower center", ncols=across, frameon=False, fontsize=9)


def _wrap(text: str) -> list[str]:
    """One line, or two: the verdict and its classes."""
    return [text] if len(text) <= MAX_LETTERS else text.split(" ", 1)


def _shorten(text: str, letters: int) -> str:
    text = printable(text)
    return text if len(text) <= letters else f"{text[: letters - 1]}…"
