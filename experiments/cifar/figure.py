"""One figure of the CIFAR-100 table: what a GP head changes, on the same network with the same budget.

python experiments/cifar/figure.py            # reads cifar100.json and scores.json, writes overview.png
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from hetsngp.evaluation.figures import new_figure, save_figure

HERE = Path(__file__).parent
METHODS = {
    "deterministic": "Deterministic",
    "heteroscedastic": "Heteroscedastic",
    "sngp": "SNGP",
    "hetsngp": "HetSNGP",
}
PANELS = {
    "id_acc": "Accuracy",
    "corr_acc": "Accuracy on\ncorrupted images",
    "id_nll": "Negative log-likelihood\n(lower is better)",
    "near_auroc": "OOD detection, AUROC:\nCIFAR-10 (near)",
    "far_auroc": "OOD detection, AUROC:\nscenes (far)",
}
# Okabe and Ito's blue and vermilion: with and without a GP.
WITH, WITHOUT = "#0072B2", "#D55E00"
BASELINE = "entropy"


def draw(table: dict[str, Any], scores: dict[str, Any], path: Path) -> None:
    rows = table["parts"]["cifar100"]["rows"]
    figure = new_figure(13.0, 3.3)
    axes = figure.subplots(1, len(PANELS))
    for ax, (column, title) in zip(axes, PANELS.items(), strict=True):
        for y, method in enumerate(reversed(METHODS)):
            cell = rows[method]["cells"][column]
            values, color = list(cell["values"].values()), WITH if "sngp" in method else WITHOUT
            mean = statistics.fmean(values)
            ax.plot(values, [y] * len(values), "|", color=color, markersize=9, alpha=0.6)
            ax.plot(mean, y, "o", color=color, markersize=9)
            text = f"{mean:.3f}".lstrip("0")
            ax.annotate(text, (mean, y), (0, 8), textcoords="offset points", ha="center", fontsize=9)
            if column.endswith("auroc"):
                other = scores["means"][method]["auroc"][column.removesuffix("_auroc")][BASELINE]
                ax.plot(other, y, "D", color=color, markerfacecolor="white", markersize=6)
        ax.set_title(title, fontsize=10)
        ax.set_ylim(-0.5, len(METHODS) - 0.3)
        ax.margins(x=0.18)
        ax.set_yticks(range(len(METHODS)), list(reversed(METHODS.values())) if ax is axes[0] else [])
        ax.locator_params(axis="x", nbins=4)
        ax.tick_params(axis="x", labelsize=8)
        ax.grid(axis="x", color="0.92")
        ax.set_axisbelow(True)
    for style, label in (("o", "by ood_score"), ("D", "by the entropy of the same networks")):
        axes[-1].plot(
            [], [], style, color="0.4", markerfacecolor=None if style == "o" else "white", label=label
        )
    figure.legend(loc="outside lower right", ncols=2, frameon=False, fontsize=9)
    count = len(rows["hetsngp"]["cells"]["id_acc"]["values"])
    figure.suptitle(
        f"WRN-16-8 on CIFAR-100, the same training for all, {count} seeds (bars: each seed); "
        "blue: with a Gaussian process",
        fontsize=11,
    )
    save_figure(figure, path)


def main() -> None:
    table, scores = (json.loads((HERE / name).read_text()) for name in ("cifar100.json", "scores.json"))
    draw(table, scores, HERE / "overview.png")


if __name__ == "__main__":
    main()
