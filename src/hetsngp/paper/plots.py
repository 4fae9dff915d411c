"""A table as a figure: a panel for each column, ours and the paper's numbers side by side."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hetsngp.evaluation.figures import new_figure, save_figure
from hetsngp.paper.definitions import PaperColumn, PaperPart
from hetsngp.paper.results import Cell, Result, has_paper

# Okabe and Ito's blue and vermilion; the paper's marks are hollow besides.
OURS, PAPERS = "#0072B2", "#D55E00"
MOST_PANELS = 4
"""Panels in a row."""
ARROWS = {1: "higher is better →", -1: "← lower is better"}
CHANCE = 0.5
"""AUROC of an uninformative score."""


def draw(result: Result, path: Path) -> None:
    """Draw every part of the table, its panels in rows of at most four."""
    panels = [(part, column) for part in result.table.parts for column in part.columns]
    several = len(result.table.parts) > 1
    across = len(panels) // len(result.table.parts) if several else _across(len(panels))
    down = math.ceil(len(panels) / across)
    heights = [_height(part) for part in result.table.parts] if several else [_height(panels[0][0])] * down
    figure = new_figure((3.8 if several else 3.1) * across + 1.0, sum(heights) + 1.1)
    axes = figure.subplots(down, across, squeeze=False, height_ratios=heights)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)  # 10 panels are three rows of four, and two places are empty
    for ax, (part, column) in zip(axes.flat, panels, strict=False):
        first = several and column is part.columns[0]
        ax.tick_params(labelsize=9)
        (_dots if part.axis is None else _line)(ax, result, part, column)
        ax.set_title(f"{part.title}: {column.title}" if first else column.title, fontsize=11, loc="left")
        ax.grid(color="0.92")
        ax.set_axisbelow(True)
    for ax in axes[:, 1:].flat if not several and panels[0][0].axis is None else ():
        ax.tick_params(labelleft=False)  # the rows are those of the first panel
    figure.suptitle(_wrapped(result.request.title(), int(9 * figure.get_figwidth())), fontsize=13)
    _legend(figure, result)
    save_figure(figure, path)


def _across(panels: int) -> int:
    """Number of panels in a row, for a grid that is nearly square: 9 are three rows of three."""
    rows = math.ceil(panels / MOST_PANELS)
    return math.ceil(panels / rows)


def _height(part: PaperPart) -> float:
    return 2.6 if part.axis is not None else max(1.6, 0.3 * len(part.rows) + 1.3)


def _dots(ax: Any, result: Result, part: PaperPart, column: PaperColumn) -> None:
    """Draw a row for each method, the first on top: ours filled above, the paper's hollow below."""
    count = len(part.rows)
    for index, row in enumerate(part.rows):
        cell, y = result.cell(part, row, column), count - 1 - index
        for mean, error, offset, style in _marks(cell):
            ax.errorbar(mean, y + offset, xerr=error, **style)
    ax.set_yticks(range(count), [row.title for row in reversed(part.rows)])
    ax.set_ylim(-0.6, count - 0.4)
    ax.set_xlabel(ARROWS[column.sign], fontsize=8, color="0.4")
    if column.metric == "auroc":
        ax.axvline(CHANCE, color="0.6", linewidth=1, linestyle=":")
    _few_ticks(ax.xaxis)


def _line(ax: Any, result: Result, part: PaperPart, column: PaperColumn) -> None:
    """Draw lines over the values of the rows, on a logarithmic axis."""
    rows = sorted(part.rows, key=lambda row: float(row.name))
    for whose in (0, 1):
        found = [(float(row.name), _marks(result.cell(part, row, column))) for row in rows]
        points = [(x, mark) for x, marks in found for mark in marks if (mark[2] < 0) == bool(whose)]
        if points:
            style = points[0][1][3]
            errors = [mark[1] or 0.0 for _, mark in points]
            means = [mark[0] for _, mark in points]
            style = {**style, "fmt": f"{style['fmt']}-", "linewidth": 1}
            ax.errorbar([x for x, _ in points], means, yerr=errors, **style)
    ax.set_xscale("log")
    ax.set_xticks([float(row.name) for row in rows], [f"{float(row.name):g}" for row in rows])
    ax.tick_params(axis="x", labelsize=8)  # 1.25 and 1.6 are near each other
    ax.minorticks_off()
    ax.set_xlabel(part.axis, fontsize=9)
    arrow = {1: "↑ higher is better", -1: "↓ lower is better"}[column.sign]
    ax.set_ylabel(arrow, fontsize=8, color="0.4")
    ax.yaxis.set_major_formatter("{x:g}")


def _marks(cell: Cell) -> list[tuple[float, float | None, float, dict[str, Any]]]:
    """(mean, standard error, offset within the row, style) of our and the paper's number, if there is one."""
    style: dict[str, Any] = {"fmt": "o", "markersize": 5.5, "capsize": 2.5, "linewidth": 1.2}
    marks: list[tuple[float, float | None, float, dict[str, Any]]] = []
    if cell.mean is not None:
        marks.append((cell.mean, cell.standard_error, 0.14, {**style, "color": OURS}))
    if cell.paper is not None:
        hollow = {"color": PAPERS, "markerfacecolor": "white"}
        marks.append((cell.paper[0], cell.paper[1], -0.14, {**style, **hollow, "fmt": "s"}))
    return marks


def _few_ticks(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(4))
    axis.set_major_formatter("{x:g}")


def _legend(figure: Any, result: Result) -> None:
    from matplotlib.lines import Line2D

    several = len(result.request.seeds) > 1
    ours = f"ours{' ± s. e.' if several else ''}"
    handles = [Line2D([], [], color=OURS, marker="o", linestyle="", label=ours)]
    if has_paper(result):
        style: dict[str, Any] = {"marker": "s", "markerfacecolor": "white", "linestyle": ""}
        handles.append(Line2D([], [], color=PAPERS, label="the paper's", **style))
    metrics = {column.metric for part in result.table.parts for column in part.columns if part.axis is None}
    if "auroc" in metrics:
        handles.append(Line2D([], [], color="0.6", linestyle=":", label="chance"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=10)


def _wrapped(text: str, width: int) -> str:
    import textwrap

    return textwrap.fill(text, width)
