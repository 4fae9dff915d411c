"""What damage does to accuracy, calibration and doubt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hetsngp.evaluation.figures import new_figure
from hetsngp.evaluation.panels import FAMILIAR, legend_under, score_style, within
from hetsngp.evaluation.report_text import label

if TYPE_CHECKING:
    from hetsngp.evaluation.report import Report

NATS = ("total_uncertainty", "data_uncertainty", "model_uncertainty")
TITLES = {"accuracy": "Accuracy", "nll": "NLL", "ece": "ECE"}
UNITS = {"accuracy": "% right", "nll": "nats", "ece": "ECE"}


def draw_corrupted(report: Report) -> Any:
    """Accuracy, NLL, ECE and mean doubt by severity; and the accuracy of every set."""
    assert report.corrupted is not None
    kinds = len(report.corrupted.by_corruption)
    figure = new_figure(13.5, max(7.0, 0.3 * kinds + 2.2))
    grid = figure.add_gridspec(2, 3, width_ratios=(1, 1, 1.1))
    for place, name in zip((grid[0, 0], grid[0, 1], grid[1, 0]), TITLES, strict=True):
        severity_panel(figure.add_subplot(place), report, name)
    if _in_nats(report):
        _doubt_panel(figure.add_subplot(grid[1, 1]), report)
    _table_panel(figure.add_subplot(grid[:, 2]), report)
    return figure


def severity_panel(ax: Any, report: Report, name: str) -> None:
    """One number by severity: each corruption, their mean, and ``id`` at 0."""
    by = report.corrupted
    assert by is not None
    factor = 100 if name == "accuracy" else 1
    clean = factor * getattr(report.id, name)
    for index, kind in enumerate(by.by_corruption):
        found = sorted((s.severity, getattr(s.quality, name)) for s in by.sets if s.corruption == kind)
        x, y = zip(*found, strict=True)
        look = {"color": "0.75", "linewidth": 0.8, "label": "one corruption" if index == 0 else None}
        ax.plot((0, *x), (clean, *(factor * v for v in y)), **look)
    means = [factor * getattr(mean, name) for mean in by.by_severity.values()]
    ax.plot((0, *by.by_severity), (clean, *means), color=FAMILIAR, marker="o", linewidth=2, label="mean")
    _severities(ax, report)
    within(ax, *((1.0, 100.0) if name == "accuracy" else (0.01,)))
    ax.set(ylabel=UNITS[name], title=f"{TITLES[name]} under corruption")
    legend_under(ax)


def _doubt_panel(ax: Any, report: Report) -> None:
    by = report.corrupted
    assert by is not None
    for score in _in_nats(report):
        means = [mean.scores[score] for mean in by.by_severity.values()]
        ax.plot(
            (0, *by.by_severity),
            (report.mean_scores[score], *means),
            marker="o",
            label=label(score),
            **score_style(score),
        )
    _severities(ax, report)
    ax.set(ylabel="nats", title="Mean doubt under corruption")
    ax.set_ylim(bottom=0)
    legend_under(ax, columns=3)


def _in_nats(report: Report) -> list[str]:
    assert report.corrupted is not None
    known = report.corrupted.mean.scores  # of probabilities alone there is less
    return [score for score in NATS if score in report.scores and score in known]


def _severities(ax: Any, report: Report) -> None:
    assert report.corrupted is not None
    found = list(report.corrupted.by_severity)
    ax.set_xticks([0, *found], ["id", *map(str, found)])
    ax.set_xlabel("severity")


def _table_panel(ax: Any, report: Report) -> None:
    """Accuracy of every set, in per cent."""
    by = report.corrupted
    assert by is not None
    kinds, severities = list(by.by_corruption), list(by.by_severity)
    values = np.full((len(kinds), len(severities)), np.nan)
    for each in by.sets:
        values[kinds.index(each.corruption), severities.index(each.severity)] = 100 * each.quality.accuracy
    best = max(100 * report.id.accuracy, float(np.nanmax(values)), 1.0)
    ax.imshow(values, cmap="cividis", aspect="auto", vmin=0, vmax=best)
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            ax.text(
                column,
                row,
                f"{value:.0f}",
                ha="center",
                va="center",
                color="white" if value < 0.55 * best else "black",
            )
    ax.set_yticks(range(len(kinds)), [kind.replace("_", " ") for kind in kinds], fontsize=9)
    ax.set_xticks(range(len(severities)), [str(severity) for severity in severities])
    ax.set(xlabel="severity", title="% right")
