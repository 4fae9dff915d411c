"""The pictures of a report: one at a glance, and one for each question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetsngp.evaluation.corrupted_plots import draw_corrupted, severity_panel
from hetsngp.evaluation.figures import new_figure, save_figure
from hetsngp.evaluation.panels import (
    auroc_panel,
    legend_below,
    reliability_panel,
    risk_panel,
    roc_panel,
    score_panel,
    set_handles,
)
from hetsngp.evaluation.report_text import label, verdict

if TYPE_CHECKING:
    from hetsngp.evaluation.report import Report


def draw_report(report: Report, folder: Path) -> dict[str, Path]:
    """Write all pictures that there are data for; their names and files. Those of an earlier report that this
    one has no data for are removed.
    """
    outside, damaged = bool(report.ood and report.scores), report.corrupted is not None
    drawings: dict[str, tuple[bool, Callable[[Report], Any]]] = {
        "overview": (True, draw_overview),
        "reliability": (True, draw_reliability),
        "risk_coverage": (True, draw_risk_coverage),
        "roc": (outside, draw_roc),
        "scores": (outside, draw_scores),
        "corrupted": (damaged, draw_corrupted),
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
    """Accuracy, calibration, OOD and damage in one picture, with the numbers above it."""
    panels: list[Callable[[Any], None]] = [lambda ax: risk_panel(ax, report, _two_scores(report))]
    if report.ood and report.scores:
        score = "ood_score" if "ood_score" in report.scores else report.scores[0]
        panels += [
            lambda ax: auroc_panel(ax, report),
            lambda ax: _titled(ax, f"{label(score)}: familiar and not", report, score),
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
    """Accuracy against confidence, and how many rows stand behind each bin."""
    figure = new_figure(5.2, 5.8)
    _reliability(figure, figure.add_gridspec(1, 1)[0], report)
    return figure


def draw_risk_coverage(report: Report) -> Any:
    """Errors left when only the surest rows are answered, for each score."""
    figure = new_figure(6.4, 5.4)
    risk_panel(figure.subplots(), report, list(report.selection), legend=False)
    legend_below(figure)
    return figure


def draw_roc(report: Report) -> Any:
    """A panel an OOD set, a curve a score."""
    figure, axes = _grid(len(report.ood), columns=3)
    for ax, name in zip(axes, report.ood, strict=False):
        roc_panel(ax, report, [(name, score) for score in report.scores], by="score")
        ax.set_title(name)
    legend_below(figure)
    return figure


def draw_scores(report: Report) -> Any:
    """A panel a score: the rows of ``id`` and of each OOD set."""
    figure, axes = _grid(len(report.scores), columns=3, height=3.1)
    for ax, score in zip(axes, report.scores, strict=False):
        score_panel(ax, report, score)
    legend_below(figure)
    return figure


# --- pieces ---------------------------------------------------------------------------------------------


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
    """Lines of at most so many ``letters``; the numbers wrap, names are cut."""
    q = report.id
    kind = "precision@1" if report.several_labels else "accuracy"
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
