"""Means and standard errors over seeds, for JSON and as a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from hetsngp.paper.definitions import PAPER as PAPER_TABLES
from hetsngp.paper.synthetic.experiment import SyntheticRun
from hetsngp.serving.text_tables import rich_table

PAPER = {
    "noisy_circles": {
        method: {"accuracy": cells["circles_acc"][0]} for method, cells in PAPER_TABLES["synthetic"].items()
    }
}
"""Task → method → number, where the paper has one: the accuracies in the caption of its Figure 2. Its circles
have other radii and noise, which it does not give: the order of the methods can be compared, the values
cannot. Figure 1 (moons, mixture) has no numbers."""

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
    "clean_probs, with the label noise removed. Beside it the paper's accuracy, on other circles; for the "
    "other two tasks it prints no numbers. NLL and ECE (15 bins) are of probs on test labels drawn like "
    "the training labels, so noisy where those are. AUROC and FPR95 are of ood_score, the OOD cluster "
    "against the test points, FPR95 where 95 % of the cluster is flagged; the circles have no such cluster. "
    "For deterministic, heteroscedastic and MIMO half of it is the distance between features, which the maps "
    "of the uncertainties do not show. "
    "CPU s: to train and to fit the posterior."
)


def summarise(results: Iterable[tuple[SyntheticRun, dict[str, Any]]]) -> Summary:
    """Summarise every number of the runs over seeds."""
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
    """Make a rich table with a section for each task; ± is one standard error over seeds."""
    from rich import box

    rows: list[list[str]] = []
    for task, methods in summary.items():
        rows.append([task.replace("_", " ")])
        for method, cell in methods.items():
            rows.append([f"  {method}", *(_cell(task, method, name, cell) for name in COLUMNS)])
    style = {"box": box.SIMPLE_HEAD, "padding": (0, 0, 0, 1), "pad_edge": False}  # 80 columns are enough
    return rich_table(
        ["method", *COLUMNS.values()], rows, title=title, caption=CAPTION, caption_justify="left", **style
    )


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
