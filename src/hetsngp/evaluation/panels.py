"""One set of axes a question; the figures of a report are made of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hetsngp import metrics
from hetsngp.evaluation.predictions import SCORES
from hetsngp.evaluation.report_text import label
from hetsngp.evaluation.scores import wilson

if TYPE_CHECKING:
    from hetsngp.evaluation.report import Report

# Okabe and Ito's colours, told apart by colour-blind eyes; lines have dashes of their own besides.
FAMILIAR = "#0072B2"
PALETTE = ("#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F3C8D", "#8C6D31")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)))
MARKERS = "osD^vPX*"
# Scores that fill more than two decades are shown on a logarithmic axis.
DECADES = 2.0
FEWEST_BINS, MOST_BINS = 10, 40
FIRST_ROWS = 20
"""A share of errors among fewer rows is not drawn."""
LONGEST = 40
"""Letters of a name in a legend."""
POINTS = 400
"""A curve is thinned to about so many points."""


def style(index: int, **more: Any) -> dict[str, Any]:
    """Colour and dashes of the ``index``-th line."""
    which = index % len(PALETTE)
    return {"color": PALETTE[which], "linestyle": DASHES[which], "linewidth": 1.6, **more}


def score_style(score: str) -> dict[str, Any]:
    """The same in every report; ``ood_score`` above others, which may be equal to it."""
    weight = {"linewidth": 2.6, "zorder": 4} if score == "ood_score" else {"linewidth": 1.3}
    return style(SCORES.index(score), **weight)


def legend_under(ax: Any, columns: int = 2) -> None:
    """Below the axes, where it covers no data."""
    look: dict[str, Any] = {"ncols": columns, "frameon": False, "fontsize": 8, "columnspacing": 1.0}
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), borderaxespad=0.0, **look)


def legend_below(figure: Any, handles: Mapping[str, Any] | None = None) -> None:
    """One legend for all axes, under them, each name once; or of the ``handles`` that are given."""
    found: dict[str, Any] = dict(handles or {})
    for ax in figure.axes if handles is None else ():
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    names = [name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…" for name in found]
    inches = 0.7 + 0.08 * max(map(len, names))  # of an entry, in this size
    columns = max(1, min(len(names), 4, int(figure.get_figwidth() / inches)))
    figure.legend(found.values(), names, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def set_handles(report: Report) -> dict[str, Any]:
    """Colour, dashes and mark of ``id`` and of each OOD set."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: dict[str, Any] = {"id (familiar)": Patch(color=FAMILIAR, alpha=0.4)}
    for index, name in enumerate(report.ood):
        handles[name] = Line2D([], [], marker=MARKERS[index % len(MARKERS)], markersize=5, **style(index))
    return handles


def reliability_panel(upper: Any, lower: Any, report: Report) -> None:
    """Accuracy of each bin against its mean confidence, the diagonal, bins without rows; below, the rows."""
    bins = report.reliability
    count = bins.count.numpy()
    width = 1 / len(count)
    left = np.arange(len(count)) * width
    accuracy, confidence = bins.accuracy.numpy(), bins.confidence.numpy()
    full = count > 0
    for start in left[~full]:
        upper.axvspan(start, start + width, color="0.93", lw=0)
    upper.bar(left[full], accuracy[full], width, align="edge", color=FAMILIAR, alpha=0.35, edgecolor="white")
    mark = {"fmt": "o", "color": FAMILIAR, "markersize": 4, "capsize": 2, "linewidth": 1}
    error = _wilson(accuracy[full], count[full])
    upper.errorbar(confidence[full], accuracy[full], error, **mark)
    upper.plot([0, 1], [0, 1], color="black", linestyle="--", linewidth=1)
    upper.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="share right ± s. e.")
    upper.set_title(f"Reliability: ECE {report.id.ece:.3f}")
    upper.tick_params(labelbottom=False)
    lower.bar(left, count, width, align="edge", color="0.45", edgecolor="white")
    lower.set_yscale("log")
    lower.set_ylim(0.5, 2 * count.max())
    _plain_ticks(lower.yaxis)
    lower.set(xlabel="confidence (grey: bins without rows)", ylabel="rows", xlim=(0, 1))


def _wilson(share: np.ndarray, count: np.ndarray) -> np.ndarray:
    """(2, n) below and above: one standard error as Wilson's interval has it, not 0 where all are right."""
    middle, half = wilson(share, count)
    return np.clip(np.stack([share - (middle - half), middle + half - share]), 0, None)


def within(ax: Any, least: float, most: float = np.inf) -> None:
    """From 0 at the lowest to ``most`` at the highest, with room for a line at either; at least to ``least``,
    so that rounding does not fill the axes.
    """
    low, high = (float(np.clip(end, 0, most)) for end in ax.get_ylim())
    high = max(high, least)
    room = 0.02 * (high - low)
    ax.set_ylim(low - room, high + room)


def _plain_ticks(axis: Any) -> None:
    """Decades as 0.01, 1, 100: powers of ten would ask for fonts that are not everywhere."""
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def risk_panel(ax: Any, report: Report, scores: Sequence[str], legend: bool = True) -> None:
    """Errors among the surest rows by the share that is answered; the best order and none beside it."""
    inside = report.rows["id"]
    correct = inside.correct
    assert correct is not None
    for score in scores:
        _risk(ax, inside.scores[score], correct, label=label(score), **score_style(score))
    _risk(ax, ~correct, correct, label="best possible order", color="0.6", linewidth=1.2)
    ax.axhline(
        100 * (1 - report.id.accuracy), color="0.6", linewidth=1.2, linestyle=":", label="random order"
    )
    ax.set(xlim=(0, 100), xlabel="% of rows answered, surest first", ylabel="% wrong among them")
    ax.set_ylim(bottom=0)
    within(ax, 1.0, 100.0)
    ax.set_title("Risk and coverage")
    if legend:
        legend_under(ax)


def _risk(ax: Any, doubt: Tensor, correct: Tensor, **look: Any) -> None:
    risk = metrics.risks(doubt, correct).numpy()
    # Before that it is a matter of a few rows.
    first = min(max(FIRST_ROWS, len(risk) // 100), len(risk))
    k = np.unique(np.linspace(first, len(risk), POINTS).round().astype(int))
    ax.plot(100 * k / len(risk), 100 * risk[k - 1], **look)


def roc_panel(ax: Any, report: Report, curves: Sequence[tuple[str, str]], by: str) -> None:
    """OOD rows found against familiar rows flagged, for (set, score); lines differ ``by`` set or score."""
    for index, (name, score) in enumerate(curves):
        found = metrics.roc(report.rows["id"].scores[score], report.rows[f"ood {name}"].scores[score])
        false, true = (100 * _thinned(values) for values in found)
        named = name if by == "set" else label(score)
        ax.plot(false, true, label=named, **(style(index) if by == "set" else score_style(score)))
    ax.plot([0, 100], [0, 100], color="0.6", linewidth=1, linestyle=":")
    ax.axhline(95, color="0.75", linewidth=0.8)
    ax.set(
        xlim=(-1, 101), ylim=(-1, 101), xlabel="% of familiar rows flagged", ylabel="% of OOD rows flagged"
    )
    if by == "set":
        ax.set_title(f"ROC of {label(curves[0][1])}")


def _thinned(values: Tensor) -> np.ndarray:
    if len(values) <= 2 * POINTS:
        return values.numpy()
    index = torch.linspace(0, len(values) - 1, 2 * POINTS).round().long()
    return values[index].numpy()


def auroc_panel(ax: Any, report: Report) -> None:
    """A row a score, a mark an OOD set, with two standard errors."""
    scores = list(report.scores)[::-1]
    for index, (name, outside) in enumerate(report.ood.items()):
        found = [outside.scores[score] for score in scores]
        height = np.arange(len(scores)) + 0.14 * ((len(report.ood) - 1) / 2 - index)
        error = [2 * (each.auroc_standard_error or 0.0) for each in found]
        look = {"fmt": MARKERS[index % len(MARKERS)], "color": PALETTE[index % len(PALETTE)], "markersize": 5}
        ax.errorbar([each.auroc for each in found], height, xerr=error, label=name, linewidth=1, **look)
    ax.axvline(0.5, color="0.6", linewidth=1, linestyle=":")
    ax.set_yticks(range(len(scores)), [label(score) for score in scores], fontsize=8)
    ax.set(xlabel="AUROC ± 2 s. e. (0.5 is chance)", ylim=(-0.6, len(scores) - 0.4))
    ax.set_title("Which doubt finds what is unfamiliar")
    ax.grid(axis="y", color="0.92")
    ax.set_axisbelow(True)


def score_panel(ax: Any, report: Report, score: str) -> None:
    """Histograms of one score: ``id`` filled, each OOD set a line; shares of rows."""
    sets = {"id": report.rows["id"], **{name: report.rows[f"ood {name}"] for name in report.ood}}
    values = {name: rows.scores[score].numpy() for name, rows in sets.items()}
    # As many bins as rows in each, in the smallest set.
    bins = int(np.clip(np.sqrt(min(map(len, values.values()))), FEWEST_BINS, MOST_BINS))
    edges, logarithmic = _edges(np.concatenate(list(values.values())), bins)
    for index, (name, value) in enumerate(values.items()):
        inside = np.clip(value, edges[0], edges[-1])
        share = 100 * np.histogram(inside, edges)[0] / len(value)
        if name == "id":
            ax.stairs(share, edges, fill=True, color=FAMILIAR, alpha=0.4, label="id (familiar)")
        else:
            ax.stairs(share, edges, label=name, **style(index - 1))
    if logarithmic:
        ax.set_xscale("log")
        _plain_ticks(ax.xaxis)
    unit = "" if score in ("one_minus_confidence", "ood_score", "latent_variance") else " (nats)"
    ax.set(xlabel=f"{label(score)}{unit}", ylabel="% of rows")
    ax.set_ylim(bottom=0)


def _edges(values: np.ndarray, bins: int) -> tuple[np.ndarray, bool]:
    """Bins over all but a thousandth at each end, which the end bins hold; and whether by decades."""
    low, high = np.quantile(values, [0.001, 0.999])
    low = low if low > 0 else np.quantile(values[values > 0], 0.001) if (values > 0).mean() > 0.99 else low
    if low > 0 and np.log10(high / low) > DECADES:
        return np.geomspace(low, high, bins + 1), True
    if high <= low:
        low, high = float(values.min()), float(values.max())
    return np.linspace(low, high if high > low else low + 1, bins + 1), False
