"""A contact sheet: what the network saw, and below each picture what it says of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hetsngp.files import replace_file
from hetsngp.serving.predictions import Line

MOST = 64
"""Pictures on a sheet."""
COLUMNS, LETTERS = 8, 24
# Inches: of a picture with its text, of the picture alone, of what is above it; and of the legend.
CELL, SIDE, TOP, NARROWEST = (1.7, 2.45), 1.45, 0.3, 4.2
# Okabe and Ito's colours, told apart by colour-blind eyes, and the word stands below each picture besides.
COLOURS = {"confident": "#0072B2", "ambiguous": "#E69F00", "unfamiliar": "#D00000"}
MEANINGS = {
    "confident": "confident: as sure as held-out images it was right about",
    "ambiguous": "ambiguous: may be another class",
    "unfamiliar": "unfamiliar: unlike the held-out images",
}


def draw_lines(lines: Sequence[Line], images: Sequence[Any], path: str | Path) -> None:
    """Write a PNG file with the first 64 ``lines`` below their ``images``, each (C, H, W) uint8, C 1 or 3.

    ``predict_files(…, pictures=64)`` keeps them: give ``[line.pixels for line in lines]``.
    """
    lines, images = lines[:MOST], images[:MOST]
    if not lines or len(lines) != len(images):
        raise ValueError(f"{len(lines)} lines and {len(images)} images: give one image for each line")
    columns = min(COLUMNS, math.ceil(math.sqrt(len(lines))))
    rows = math.ceil(len(lines) / columns)
    # The legend's entries stand beside each other where there is room.
    across = len(COLOURS) if columns > 6 else 1
    width, foot = max(columns * CELL[0], NARROWEST), 0.3 + 0.2 * (len(COLOURS) - across)
    height = rows * CELL[1] + foot
    figure = _figure_class()(figsize=(width, height))
    for place, (line, image) in enumerate(zip(lines, images, strict=True)):
        row, column = divmod(place, columns)
        left = (column + 0.5) * CELL[0] - SIDE / 2 + (width - columns * CELL[0]) / 2
        bottom = height - row * CELL[1] - TOP - SIDE
        # Placed by hand: constrained layout takes seconds for so many axes.
        ax = figure.add_axes((left / width, bottom / height, SIDE / width, SIDE / height))
        _picture(ax, line, image)
    _legend(figure, [kind for kind in COLOURS if kind in {line.verdict for line in lines}], across)
    replace_file(Path(path), lambda file: figure.savefig(file, dpi=110, format="png"))


def check_sheet(path: str | Path) -> None:
    """Before the work of an hour: matplotlib is there, and so is the folder."""
    _figure_class()
    if not Path(path).parent.is_dir():
        raise FileNotFoundError(f"there is no folder {Path(path).parent} for the sheet {path}: make it first")


def _figure_class() -> Any:
    """Of matplotlib without pyplot, whose state belongs to the caller's session."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("sheets need matplotlib: pip install 'hetsngp[eval]'") from error
    return Figure


def _picture(ax: Any, line: Line, image: Any) -> None:
    pixels = torch.as_tensor(image)
    if pixels.dtype != torch.uint8 or pixels.dim() != 3 or len(pixels) not in (1, 3):
        raise ValueError(
            f"images must be (C, H, W) uint8 with C 1 or 3, got {tuple(pixels.shape)} {pixels.dtype}"
        )
    ax.set(xticks=[], yticks=[])
    ax.imshow(pixels.permute(1, 2, 0).expand(-1, -1, 3).cpu().numpy(), interpolation="nearest")
    for spine in ax.spines.values():
        spine.set(color=COLOURS[line.verdict], linewidth=3)
    ax.set_title(_cut(_last(line.name), LETTERS), fontsize=7, color="0.35", pad=4)
    below = [f"{_cut(line.label, LETTERS - 5)} {line.confidence:.2f}", *_wrapped(line.text)]
    if line.given is not None:
        below.append(_cut(f"given: {line.given}", LETTERS))
    ax.set_xlabel("\n".join(below), fontsize=8, labelpad=4)


def _legend(figure: Any, kinds: Sequence[str], across: int) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=COLOURS[kind], label=MEANINGS[kind]) for kind in kinds]
    figure.legend(handles=handles, loc="lower center", ncols=across, frameon=False, fontsize=9)


def _wrapped(text: str) -> list[str]:
    """On one line, or the classes on a second."""
    if len(text) <= LETTERS:
        return [text]
    return [_cut(part, LETTERS) for part in text.split(" ", 1)]


def _last(name: str) -> str:
    return Path(name).name or name


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: letters - 1]}…"
