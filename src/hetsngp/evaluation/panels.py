"""Panels: one set of axes each; the figures of a report are made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hetsngp import metrics
from hetsngp.evaluation.report_text import label
from hetsngp.evaluation.scores import wilson
from hetsngp.evaluation.set_predictions import SCORES

if TYPE_CHECKING:
    from hetsngp.evaluation.report import Report

# Okabe and Ito's colours, which colour-blind readers can tell apart; lines differ in dashes besides.
ID_COLOR = "#0072B2"
PALETTE = ("#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F3C8D", "#8C6D31")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)))
MARKERS = "osD^vPX*"
# Scores that fill more than two decades are shown on a logarithmic axis.
DECADES = 2.0
FEWEST_BINS, MOST_BINS = 10, 40
FIRST_EXAMPLES = 20
"""A share of errors among fewer examples is not drawn."""
LONGEST = 40
"""Letters of a name in a legend."""
POINTS = 400
"""Approximate number of points of a thinned curve."""


def style(index: int, **more: Any) -> dict[str, Any]:
    """Colour and dashes of the ``index``-th line."""
    which = index % len(PALETTE)
    return {"color": PALETTE[which], "linestyle": DASHES[which], "linewidth": 1.6, **more}


def score_style(score: str) -> dict[str, Any]:
    """Line style of a score, the same in every report; ``ood_score`` above others that may equal it."""
    weight = {"linewidth": 2.6, "zorder": 4} if score == "ood_score" else {"linewidth": 1.3}
    return style(SCORES.index(score), **weight)


def legend_under(ax: Any, columns: int = 2) -> None:
    """Add a legend below the axes, where it covers no data."""
    look: dict[str, Any] = {"ncols": columns, "frameon": False, "fontsize": 8, "columnspacing": 1.0}
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), borderaxespad=0.0, **look)


def legend_below(figure: Any, handles: Mapping[str, Any] | None = None) -> None:
    """Add one legend below all axes, each name once; or of the ``handles`` that are given."""
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

    handles: dict[str, Any] = {"in-distribution": Patch(color=ID_COLOR, alpha=0.4)}
    for index, name in enumerate(report.ood):
        handles[name] = Line2D([], [], marker=MARKERS[index % len(MARKERS)], markersize=5, **style(index))
    return handles


def reliability_panel(upper: Any, lower: Any, report: Report) -> None:
    """Draw the accuracy of each bin against its mean confidence, and below the number of examples."""
    bins = report.reliability
    count = bins.count.numpy()
    width = 1 / len(count)
    left = np.arange(len(count)) * width
    accuracy, confidence = bins.accuracy.numpy(), bins.confidence.numpy()
    full = count > 0
    for start in left[~full]:
        upper.axvspan(start, start + width, color="0.93", lw=0)
    upper.bar(left[full], accuracy[full], width, align="edge", color=ID_COLOR, alpha=0.35, edgecolor="white")
    mark = {"fmt": "o", "color": ID_COLOR, "markersize": 4, "capsize": 2, "linewidth": 1}
    error = _wilson(accuracy[full], count[full])
    upper.errorbar(confidence[full], accuracy[full], error, **mark)
    upper.plot([0, 1], [0, 1], color="black", linestyle="--", linewidth=1)
    upper.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="accuracy ± s. e.")
    upper.set_title(f"Reliability: ECE {report.id.ece:.3f}")
    upper.tick_params(labelbottom=False)
    lower.bar(left, count, width, align="edge", color="0.45", edgecolor="white")
    lower.set_yscale("log")
    lower.set_ylim(0.5, 2 * count.max())
    _plain_ticks(lower.yaxis)
    lower.set(xlabel="confidence (grey: empty bins)", ylabel="examples", xlim=(0, 1))


def _wilson(share: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Error bars (2, n) by Wilson's interval of one standard error, not 0 where all are correct."""
    middle, half = wilson(share, count)
    return np.clip(np.stack([share - (middle - half), middle + half - share]), 0, None)


def limit_y(ax: Any, least: float, most: float = np.inf) -> None:
    """Limit the y axis to [0, ``most``] with a margin; its upper end is at least ``least``, so that rounding
    does not fill the axes.
    """
    low, high = (float(np.clip(end, 0, most)) for end in ax.get_ylim())
    high = max(high, least)
    margin = 0.02 * (high - low)
    ax.set_ylim(low - margin, high + margin)


def _plain_ticks(axis: Any) -> None:
    """Label decades as 0.01, 1, 100: powers of ten need fonts that are not everywhere."""
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def risk_panel(ax: Any, report: Report, scores: Sequence[str], legend: bool = True) -> None:
    """Draw the errors among the most certain examples by the share answered."""
    predictions = report.predictions["id"]
    correct = predictions.correct
    assert correct is not None
    for score in scores:
        _risk(ax, predictions.scores[score], correct, label=label(score), **score_style(score))
    _risk(ax, ~correct, correct, label="best possible order", color="0.6", linewidth=1.2)
    ax.axhline(
        100 * (1 - report.id.accuracy), color="0.6", linewidth=1.2, linestyle=":", label="random order"
    )
    ax.set(xlim=(0, 100), xlabel="% of examples answered, most certain first", ylabel="% wrong among them")
    ax.set_ylim(bottom=0)
    limit_y(ax, 1.0, 100.0)
    ax.set_title("Risk and coverage")
    if legend:
        legend_under(ax)


def _risk(ax: Any, uncertainty: Tensor, correct: Tensor, **look: Any) -> None:
    risk = metrics.risks(uncertainty, correct).numpy()
    # Before that a few examples decide.
    first = min(max(FIRST_EXAMPLES, len(risk) // 100), len(risk))
    k = np.unique(np.linspace(first, len(risk), POINTS).round().astype(int))
    ax.plot(100 * k / len(risk), 100 * risk[k - 1], **look)


def roc_panel(ax: Any, report: Report, curves: Sequence[tuple[str, str]], by: str) -> None:
    """Draw ROC curves of (set, score); lines differ ``by`` "set" or "score"."""
    for index, (name, score) in enumerate(curves):
        found = metrics.roc(
            report.predictions["id"].scores[score], report.predictions[f"ood {name}"].scores[score]
        )
        false, true = (100 * _thinned(values) for values in found)
        named = name if by == "set" else label(score)
        ax.plot(false, true, label=named, **(style(index) if by == "set" else score_style(score)))
    ax.plot([0, 100], [0, 100], color="0.6", linewidth=1, linestyle=":")
    ax.axhline(95, color="0.75", linewidth=0.8)
    ax.set(
        xlim=(-1, 101),
        ylim=(-1, 101),
        xlabel="% of in-distribution examples flagged",
        ylabel="% of OOD examples flagged",
    )
    if by == "set":
        ax.set_title(f"ROC of {label(curves[0][1])}")


def _thinned(values: Tensor) -> np.ndarray:
    if len(values) <= 2 * POINTS:
        return values.numpy()
    index = torch.linspace(0, len(values) - 1, 2 * POINTS).round().long()
    return values[index].numpy()


def auroc_panel(ax: Any, report: Report) -> None:
    """Draw the AUROC of each score on each OOD set, with two standard errors."""
    scores = list(report.scores)[::-1]
    for index, (name, ood_set) in enumerate(report.ood.items()):
        found = [ood_set.scores[score] for score in scores]
        height = np.arange(len(scores)) + 0.14 * ((len(report.ood) - 1) / 2 - index)
        error = [2 * (each.auroc_standard_error or 0.0) for each in found]
        look = {"fmt": MARKERS[index % len(MARKERS)], "color": PALETTE[index % len(PALETTE)], "markersize": 5}
        ax.errorbar([each.auroc for each in found], height, xerr=error, label=name, linewidth=1, **look)
    ax.axvline(0.5, color="0.6", linewidth=1, linestyle=":")
    ax.set_yticks(range(len(scores)), [label(score) for score in scores], fontsize=8)
    ax.set(xlabel="AUROC ± 2 s. e. (0.5 is chance)", ylim=(-0.6, len(scores) - 0.4))
    ax.set_title("OOD detection by score")
    ax.grid(axis="y", color="0.92")
    ax.set_axisbelow(True)


def score_panel(ax: Any, report: Report, score: str) -> None:
    """Draw histograms of one score: ``id`` filled, each OOD set a line; shares of examples."""
    sets = {"id": report.predictions["id"]}
    sets |= {name: report.predictions[f"ood {name}"] for name in report.ood}
    values = {name: each.scores[score].numpy() for name, each in sets.items()}
    # As many bins as examples in each, in the smallest set.
    bins = int(np.clip(np.sqrt(min(map(len, values.values()))), FEWEST_BINS, MOST_BINS))
    edges, logarithmic = _edges(np.concatenate(list(values.values())), bins)
    for index, (name, value) in enumerate(values.items()):
        clipped = np.clip(value, edges[0], edges[-1])
        share = 100 * np.histogram(clipped, edges)[0] / len(value)
        if name == "id":
            ax.stairs(share, edges, fill=True, color=ID_COLOR, alpha=0.4, label="in-distribution")
        else:
            ax.stairs(share, edges, label=name, **style(index - 1))
    if logarithmic:
        ax.set_xscale("log")
        _plain_ticks(ax.xaxis)
    unit = "" if score in ("one_minus_confidence", "ood_score", "latent_variance") else " (nats)"
    ax.set(xlabel=f"{label(score)}{unit}", ylabel="% of examples")
    ax.set_ylim(bottom=0)


def _edges(values: np.ndarray, bins: int) -> tuple[np.ndarray, bool]:
    """Edges of bins over all but a thousandth at each end, and whether they are logarithmic."""
    low, high = np.quantile(values, [0.001, 0.999])
    low = low if low > 0 else np.quantile(values[values > 0], 0.001) if (values > 0).mean() > 0.99 else low
    if low > 0 and np.log10(high / low) > DECADES:
        return np.geomspace(low, high, bins + 1), True
    if high <= low:
        low, high = float(values.min()), float(values.max())
    return np.linspace(low, high if high > low else low + 1, bins + 1), False
