"""The runtime tables as text and as a figure, ours beside the paper's."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hetsngp.evaluation.figures import new_figure, save_figure
from hetsngp.serving.text_tables import markdown_table, plain_table

WIDTH = 100
OURS, PAPERS = "#0072B2", "#E69F00"
HATCHED: dict[str, Any] = {"facecolor": "white", "edgecolor": OURS, "hatch": "////"}
LARGEST = 8.0
"""Length of the longest bar, so that the others can be told apart."""
PHASES = {"train": "a training step", "eval": "a prediction"}
NOTES = (
    "Times are medians of an image's share of its batch; × is the ratio to the deterministic network, timed "
    "in the same process right before and right after, so that the × of the deterministic row tells how well "
    "times repeat. A prediction is of probabilities, as in the paper; with unc., of probabilities and "
    "both uncertainties. A training step is forward, loss, backward and optimiser.",
    "GFLOP count matrix products and convolutions, a multiply-add as two, forward or forward and backward. "
    "Under the sigmoid, probabilities are integrals in one dimension, done by quadrature: no samples, and "
    "no matrix products for them.",
    "Networks are not trained, images are random; the number of points does not depend on the values.",
    "The paper: ViT-B/16 on 32 cores of TPU v3; for ResNet-50 it does not say on what.",
)
TextRows = list[list[str]]


def plain_text(tables: Mapping[str, Any]) -> str:
    """Tables for a terminal of 100 columns."""
    blocks = []
    for title, cells in _sections(tables):
        blocks.append(f"{title}\n{plain_table(cells[0], cells[1:])}")
    return "\n\n".join([*blocks, *(textwrap.fill(note, WIDTH) for note in NOTES)])


def markdown(tables: Mapping[str, Any], picture: str) -> str:
    """Tables in Markdown, with a link to ``picture`` in the same folder."""
    blocks = [f"# Runtime\n\n{tables['device']}, torch {tables['torch']}.", f"![ratios]({picture})"]
    for title, cells in _sections(tables):
        blocks += [f"## {title}", markdown_table(cells[0], cells[1:])]
    return "\n\n".join([*blocks, *NOTES]) + "\n"


def _sections(tables: Mapping[str, Any]) -> Iterator[tuple[str, TextRows]]:
    """Yield the title and the cells, headings first, of each network and phase."""
    for table in tables["networks"].values():
        about = f"{table['network']}, batches of {table['batch_size']}, {table['precision']}"
        for kind in table["kinds"]:
            title = f"{table['title']}: {PHASES[kind]} ({about}, {tables['device']})"
            yield title, _cells(table, kind)


def _cells(table: Mapping[str, Any], kind: str) -> TextRows:
    headings = ["", "ms/image", "×", "paper", "×"]
    if table["counted"]:
        headings += ["GFLOP/image", "×", "paper", "×"]
    sampled = kind == "eval" and any(row["points"] for row in table["rows"].values())
    if kind == "eval":
        headings += ["ms with unc.", "×", *(["points"] if sampled else [])]
    cells = [headings]
    for row in table["rows"].values():
        ours, paper = row["numbers"], row["paper"]
        line = [row["title"], *_pair(ours, f"ms_{kind}"), *_pair(paper, f"ms_{kind}")]
        if table["counted"]:
            line += [*_pair(ours, f"gflop_{kind}"), *_pair(paper, f"gflop_{kind}")]
        if kind == "eval":
            line += _pair(ours, "ms_predict")
            line += [f"{row['points']:,.0f}" if row["points"] else "–"] if sampled else []
        cells.append(line)
    return cells


def _pair(numbers: Mapping[str, float], name: str) -> list[str]:
    if name not in numbers:
        return ["–", "–"]
    value, share = numbers[name], numbers[f"{name}_ratio"]
    # GFLOP of the methods differ in the fourth digit.
    if name.startswith("gflop"):
        return [f"{value:.2f}", f"{share:.3f}"]
    return [f"{value:.0f}" if value >= 100 else f"{value:.3g}", f"{share:.2f}"]


# --- figure ---------------------------------------------------------------------------------------------


def draw_runtime(tables: Mapping[str, Any], path: Path) -> None:
    """Draw the ratios to the deterministic network, ours and the paper's: a panel for each column."""
    panels = [
        (table, kind, unit)
        for table in tables["networks"].values()
        for unit in (("ms", "gflop") if table["counted"] else ("ms",))
        for kind in table["kinds"]
    ]
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    most = max(len(table["rows"]) for table, _, _ in panels)
    figure = new_figure(max(6.5, 5.0 * columns), (1.2 + 0.45 * most) * lines + 0.8)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for ax, (table, kind, unit) in zip(axes, panels, strict=False):
        _panel(ax, table, f"{unit}_{kind}")
        what = "time of" if unit == "ms" else "GFLOP of"
        ax.set_title(f"{table['title']} ({table['network']})\n{what} {PHASES[kind]}", fontsize=10)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    figure.suptitle(
        f"Cost of an image by that of the deterministic network ({tables['device']})", fontsize=12
    )
    _legend(figure, uncertainty=any(kind == "eval" and unit == "ms" for _, kind, unit in panels))
    save_figure(figure, path)


def _panel(ax: Any, table: Mapping[str, Any], column: str) -> None:
    from matplotlib.patheffects import withStroke

    rows = list(table["rows"].values())
    halo = [withStroke(linewidth=2, foreground="white")]  # where the line at 1 passes behind a number
    ax.axvline(1, color="black", linewidth=0.8, zorder=0)
    for place, row in enumerate(rows):
        bars = [(row["numbers"][f"{column}_ratio"], {"color": OURS})]
        if column == "ms_eval":
            bars.append((row["numbers"]["ms_predict_ratio"], HATCHED))
        if f"{column}_ratio" in row["paper"]:
            bars.append((row["paper"][f"{column}_ratio"], {"color": PAPERS}))
        height = 0.8 / max(len(bars), 2)
        for index, (value, look) in enumerate(bars):
            at = place + (index - (len(bars) - 1) / 2) * height
            ax.barh(at, min(value, LARGEST), 0.9 * height, **look)
            text = f"{value:.{3 if column.startswith('gflop') else 2}f}"
            text = f"→ {value:.1f}" if value > LARGEST else text
            beside = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 7}
            ax.annotate(text, (min(value, LARGEST), at), path_effects=halo, **beside)
    ax.set_yticks(range(len(rows)), [row["title"] for row in rows], fontsize=8)
    ax.invert_yaxis()
    ax.margins(x=0.15)
    ax.set_xlim(left=0)
    ax.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _legend(figure: Any, *, uncertainty: bool) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=OURS, label="ours")]
    if uncertainty:
        handles.append(Patch(label="ours, with both uncertainties", **HATCHED))
    handles.append(Patch(color=PAPERS, label="the paper's"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
