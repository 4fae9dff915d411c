"""Figures of a report: an overview, and one each for calibration, selection, OOD detection and corruption."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hetsngp.evaluation.figures import new_figure, save_figure
from hetsngp.evaluation.panels import (
    ID_COLOR,
    auroc_panel,
    legend_below,
    legend_under,
    limit_y,
    reliability_panel,
    risk_panel,
    roc_panel,
    score_panel,
    score_style,
    set_handles,
)
from hetsngp.evaluation.report_text import label, verdict

if TYPE_CHECKING:
    from hetsngp.evaluation.report import Report


NATS = ("total_uncertainty", "data_uncertainty", "model_uncertainty")
TITLES = {"accuracy": "Accuracy", "nll": "NLL", "ece": "ECE"}
UNITS = {"accuracy": "% correct", "nll": "nats", "ece": "ECE"}


def draw_report(report: Report, folder: Path) -> dict[str, Path]:
    """Write all figures that there are data for, and remove those of an earlier report; name → file."""
    has_ood, has_corrupted = bool(report.ood and report.scores), report.corrupted is not None
    drawings: dict[str, tuple[bool, Callable[[Report], Any]]] = {
        "overview": (True, draw_overview),
        "reliability": (True, draw_reliability),
        "risk_coverage": (True, draw_risk_coverage),
        "roc": (has_ood, draw_roc),
        "scores": (has_ood, draw_scores),
        "corrupted": (has_corrupted, draw_corrupted),
    }
    written = {}
    for name, (has_data, draw) in drawings.items():
        path = folder / ("report.png" if name == "overview" else f"{name}.png")
        if has_data:
            save_figure(draw(report), path)
            written[name] = path
        else:
            path.unlink(missing_ok=True)
    return written


def draw_overview(report: Report) -> Any:
    """Accuracy, calibration, OOD detection and corruption in one figure, with the numbers above it."""
    panels: list[Callable[[Any], None]] = [lambda ax: risk_panel(ax, report, _two_scores(report))]
    if report.ood and report.scores:
        score = "ood_score" if "ood_score" in report.scores else report.scores[0]
        panels += [
            lambda ax: auroc_panel(ax, report),
            lambda ax: _titled(ax, f"Histogram of {label(score)}", report, score),
            lambda ax: roc_panel(ax, report, [(name, score) for name in report.ood], by="set"),
        ]
    if report.corrupted is not None:
        panels.append(lambda ax: severity_panel(ax, report, "accuracy"))
    columns = 2 if len(panels) < 3 else 3
    rows = -(-(1 + len(panels)) // columns)
    figure = new_figure(4.4 * columns, 4.1 * rows + 0.9)
    figure.get_layout_engine().set(h_pad=0.1, w_pad=0.08)
    grid = figure.add_gridspec(rows, columns)
    _reliability(figure, grid[0], report)
    for panel, place in zip(panels, list(grid)[1:], strict=False):
        panel(figure.add_subplot(place))
    figure.suptitle(_headline(report, letters=int(9.5 * figure.get_figwidth())), fontsize=12)
    if report.ood and report.scores:
        legend_below(figure, set_handles(report))
    return figure


def draw_reliability(report: Report) -> Any:
    """Accuracy against confidence, and the number of examples in each bin."""
    figure = new_figure(5.2, 5.8)
    _reliability(figure, figure.add_gridspec(1, 1)[0], report)
    return figure


def draw_risk_coverage(report: Report) -> Any:
    """Errors that remain when only the most certain examples are answered, for each score."""
    figure = new_figure(6.4, 5.4)
    risk_panel(figure.subplots(), report, list(report.selection), legend=False)
    legend_below(figure)
    return figure


def draw_roc(report: Report) -> Any:
    """A panel for each OOD set, a curve for each score."""
    figure, axes = _grid(len(report.ood), columns=3)
    for ax, name in zip(axes, report.ood, strict=False):
        roc_panel(ax, report, [(name, score) for score in report.scores], by="score")
        ax.set_title(name)
    legend_below(figure)
    return figure


def draw_scores(report: Report) -> Any:
    """A panel for each score: histograms of ``id`` and of each OOD set."""
    figure, axes = _grid(len(report.scores), columns=3, height=3.1)
    for ax, score in zip(axes, report.scores, strict=False):
        score_panel(ax, report, score)
    legend_below(figure)
    return figure


def draw_corrupted(report: Report) -> Any:
    """Accuracy, NLL, ECE and mean uncertainties by severity; and the accuracy of every set."""
    assert report.corrupted is not None
    kinds = len(report.corrupted.by_corruption)
    figure = new_figure(13.5, max(7.0, 0.3 * kinds + 2.2))
    grid = figure.add_gridspec(2, 3, width_ratios=(1, 1, 1.1))
    for place, name in zip((grid[0, 0], grid[0, 1], grid[1, 0]), TITLES, strict=True):
        severity_panel(figure.add_subplot(place), report, name)
    if _in_nats(report):
        _uncertainty_panel(figure.add_subplot(grid[1, 1]), report)
    _table_panel(figure.add_subplot(grid[:, 2]), report)
    return figure


# --- panels of corrupted sets ---------------------------------------------------------------------------


def severity_panel(ax: Any, report: Report, name: str) -> None:
    """Draw one number by severity: each corruption, their mean, and ``id`` at 0."""
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
    ax.plot((0, *by.by_severity), (clean, *means), color=ID_COLOR, marker="o", linewidth=2, label="mean")
    _severities(ax, report)
    limit_y(ax, *((1.0, 100.0) if name == "accuracy" else (0.01,)))
    ax.set(ylabel=UNITS[name], title=f"{TITLES[name]} under corruption")
    legend_under(ax)


def _uncertainty_panel(ax: Any, report: Report) -> None:
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
    ax.set(ylabel="nats", title="Mean uncertainty under corruption")
    ax.set_ylim(bottom=0)
    legend_under(ax, columns=3)


def _in_nats(report: Report) -> list[str]:
    assert report.corrupted is not None
    known = report.corrupted.mean.scores  # fewer where only probabilities were predicted
    return [score for score in NATS if score in report.scores and score in known]


def _severities(ax: Any, report: Report) -> None:
    assert report.corrupted is not None
    found = list(report.corrupted.by_severity)
    ax.set_xticks([0, *found], ["id", *map(str, found)])
    ax.set_xlabel("severity")


def _table_panel(ax: Any, report: Report) -> None:
    """Draw the accuracy of every set, in per cent."""
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
    ax.set(xlabel="severity", title="% correct")


# --- layout ---------------------------------------------------------------------------------------------


def _reliability(figure: Any, place: Any, report: Report) -> None:
    inner = place.subgridspec(2, 1, height_ratios=(3, 1), hspace=0.05)
    upper = figure.add_subplot(inner[0])
    reliability_panel(upper, figure.add_subplot(inner[1], sharex=upper), report)


def _grid(count: int, columns: int, height: float = 4.2) -> tuple[Any, list[Any]]:
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = new_figure(max(4.2 * columns, 5.5), height * rows + 0.8)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes[count:]:
        ax.set_visible(False)
    return figure, axes


def _two_scores(report: Report) -> Sequence[str]:
    return [name for name in ("one_minus_confidence", "ood_score") if name in report.selection]


def _titled(ax: Any, title: str, report: Report, score: str) -> None:
    score_panel(ax, report, score)
    ax.set_title(title)


def _headline(report: Report, letters: int) -> str:
    """Title and numbers in lines of at most so many ``letters``; the numbers wrap, names are cut."""
    q = report.id
    kind = "precision@1" if report.multi_label else "accuracy"
    numbers = f"{kind} {100 * q.accuracy:.1f} %  ·  NLL {q.nll:.3f}  ·  ECE {q.ece:.3f}"
    lines = [report.title]
    whole = f"{numbers} ({verdict(q)})"
    lines += [whole] if len(whole) <= letters else [numbers, verdict(q)]
    found = [
        f"{name} {each.scores['ood_score'].auroc:.3f}"
        for name, each in report.ood.items()
        if "ood_score" in each.scores
    ]
    if found:
        lines.append(f"AUROC of ood_score: {', '.join(found)}")
    return "\n".join(line if len(line) <= letters else f"{line[: letters - 2]} …" for line in lines)
