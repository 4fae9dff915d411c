"""Means and standard errors over seeds, as a value for JSON and as one table for people."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from hetsngp.paper.synthetic.experiment import PAPER, SyntheticRun

Summary = dict[str, dict[str, dict[str, dict[str, float | int | None]]]]
"""task → method → number → mean, standard_error, min, max, n."""

COLUMNS = {
    "accuracy": "accuracy",
    "clean_accuracy": "clean",
    "paper": "paper",
    "nll": "NLL",
    "ece": "ECE",
    "ood_auroc": "AUROC",
    "ood_fpr95": "FPR95",
    "seconds": "CPU s",
}
CAPTION = (
    "Accuracy is on clean labels: of probs, which predicts the label as people would give it, then of "
    "clean_probs, with the label noise removed. Beside it the paper's accuracy, on circles of its own; for "
    "the other two tasks it prints no numbers. NLL and ECE (15 bins) are of probs on test labels drawn like "
    "the training labels, so noisy where those are. AUROC and FPR95 are of ood_score, the unseen cluster "
    "against the test points, FPR95 where 95 % of the cluster is found; the circles have no such cluster. "
    "CPU s: to train and to fit the posterior."
)


def summarise(results: Iterable[tuple[SyntheticRun, dict[str, Any]]]) -> Summary:
    """Every single number of the runs, over seeds."""
    values: dict[str, dict[str, dict[str, list[float]]]] = {}
    for run, numbers in results:
        cell = values.setdefault(run.task, {}).setdefault(run.method, {})
        for name, value in numbers.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                cell.setdefault(name, []).append(float(value))
    return {
        task: {method: {name: _over_seeds(v) for name, v in cell.items()} for method, cell in methods.items()}
        for task, methods in values.items()
    }


def _over_seeds(values: Sequence[float]) -> dict[str, float | int | None]:
    n = len(values)
    error = statistics.stdev(values) / math.sqrt(n) if n > 1 else None
    mean = statistics.fmean(values)
    return {"mean": mean, "standard_error": error, "min": min(values), "max": max(values), "n": n}


def table(summary: Summary, title: str) -> Any:
    """A rich table, a section a task; ± is one standard error over seeds."""
    from rich import box
    from rich.table import Table

    look = {"box": box.SIMPLE_HEAD, "padding": (0, 0, 0, 1), "pad_edge": False}  # 80 columns are enough
    out = Table(title=title, caption=CAPTION, caption_justify="left", **look)
    out.add_column("method", no_wrap=True)
    for heading in COLUMNS.values():
        out.add_column(heading, justify="right", no_wrap=True)
    for task, methods in summary.items():
        out.add_row(task.replace("_", " "), style="bold")
        for method, cell in methods.items():
            shown = [_cell(task, method, name, cell) for name in COLUMNS]
            out.add_row(f"  {method}", *shown, end_section=method == list(methods)[-1])
    return out


def _cell(task: str, method: str, name: str, cell: dict[str, dict[str, float | int | None]]) -> str:
    if name == "paper":
        value = PAPER.get(task, {}).get(method, {}).get("accuracy")
        return "–" if value is None else f"{value:.3f}"
    if name not in cell:
        return "–"
    mean, error = cell[name]["mean"], cell[name]["standard_error"]
    digits = 1 if name == "seconds" else 3
    text = f"{mean:.{digits}f}"
    return text if error is None else f"{text}\n±{error:.{digits}f}".replace("±0.", "±.")
