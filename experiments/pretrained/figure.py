"""Draw images.png and text.png from the results beside this file.

python experiments/pretrained/figure.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from common import COVERAGES

HERE = Path(__file__).parent
COLOURS = {"softmax": "tab:gray", "deterministic": "black", "sngp": "tab:blue", "hetsngp": "tab:red"}


def risk(axis: Any, mean: dict[str, Any], title: str) -> None:
    """Errors among the most confident test examples."""
    for name, colour in COLOURS.items():
        if name in mean:
            errors = [100 * mean[name][f"error_at_{percent}"][0] for percent in COVERAGES]
            axis.plot(COVERAGES, errors, "o-", ms=3, color=colour, label=name)
    axis.set(title=title, xlabel="answered, %", ylim=(0, None))
    axis.legend(frameon=False, fontsize=8)


def detection(axis: Any, mean: dict[str, Any], sets: dict[str, str], title: str) -> None:
    """AUROC of our scores and of those of a softmax, on each OOD set."""
    rows = [("hetsngp", "ood_score"), ("sngp", "ood_score"), ("deterministic", "ood_score")]
    rows += [("softmax", score) for score in ("energy", "msp", "relative mahalanobis", "mahalanobis", "knn")]
    rows = [row for row in rows if row[0] in mean]
    for number, (name, score) in enumerate(rows[::-1]):
        for marker, key in zip("os^", sets, strict=False):
            value, error = mean[name][f"{key}/{score}/auroc"]
            axis.errorbar(value, number, xerr=error or 0.0, fmt=marker, ms=4, color=COLOURS[name])
    names = [name if score == "ood_score" else f"softmax, {score}" for name, score in rows[::-1]]
    axis.set_yticks(range(len(rows)), names)
    for marker, label in zip("os^", sets.values(), strict=False):
        axis.plot([], [], marker, color="gray", label=label)
    axis.legend(frameon=False, fontsize=8, loc="lower left")
    axis.set(title=title, xlabel="AUROC")


def images() -> None:
    content = json.loads((HERE / "images.json").read_text())
    results = content["results"]["efficientnet-lite0"]
    tasks = [task for task in results if task != "scenes"]
    figure, axes = plt.subplots(1, len(tasks) + 1, figsize=(4 * len(tasks) + 4.5, 3.8), layout="constrained")
    for axis, task in zip(axes, tasks, strict=False):
        risk(axis, results[task]["mean"], task)
    axes[0].set_ylabel("errors among the answers, %")
    sets = {"cifar100": "near: CIFAR-100", "scenes": "far: scenes", "imagenet": "ImageNet"}
    detection(axes[-1], results["cifar10"]["mean"], sets, "OOD detection, cifar10")
    figure.suptitle(
        f"Heads on frozen EfficientNet-Lite0, 5,000 labels (means of {len(content['seeds'])} seeds)"
    )
    figure.savefig(HERE / "images.png", dpi=110)


def text() -> None:
    content = json.loads((HERE / "text-frozen.json").read_text())
    results = content["results"]
    figure, axes = plt.subplots(1, 2 * len(results), figsize=(9 * len(results), 3.8), layout="constrained")
    for number, (condition, found) in enumerate(results.items()):
        risk(axes[2 * number], found["mean"], f"CLINC150, labels {condition}")
        detection(axes[2 * number + 1], found["mean"], {"oos": "out of scope"}, f"labels {condition}")
    axes[0].set_ylabel("errors among the answers, %")
    figure.suptitle(f"Heads on frozen MiniLM (means of {len(content['seeds'])} seeds)")
    figure.savefig(HERE / "text.png", dpi=110)


if __name__ == "__main__":
    for draw, file in ((images, "images.json"), (text, "text-frozen.json")):
        if (HERE / file).is_file():
            draw()
