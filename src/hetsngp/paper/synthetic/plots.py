"""Figures 1 and 2 of the paper, with data and model uncertainty, which it does not show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hetsngp.data.datasets.synthetic import SyntheticTask
from hetsngp.evaluation.figures import COLORS, RED, new_figure, save_figure
from hetsngp.models.methods import METHODS

# Points on grey, which no class has. The OOD cluster has red crosses, so that colour alone does not tell it.
MOST_POINTS, MOST_OOD = 600, 80
Maps = Mapping[str, Mapping[str, np.ndarray]]
"""method → name of a map → its values."""


def draw_uncertainty(task: SyntheticTask, maps: Maps, path: Path) -> None:
    """A column for each method: 1 − confidence as in the paper, data uncertainty, model uncertainty."""
    most = math.log(task.num_classes)
    panels = (
        (
            "one_minus_confidence",
            "Predictive uncertainty\n(as in the paper)",
            "1 − largest class probability",
            1 - 1 / task.num_classes,
        ),
        ("data_uncertainty", "Data uncertainty\n(ambiguous, noisy labels)", "nats", most),
        ("model_uncertainty", "Model uncertainty\n(far from the training data)", "nats", most),
    )
    greys = _greys()
    figure = new_figure(max(2.2 * len(maps) + 1.2, 6.0), 3 * 2.3 + 0.9)
    axes = figure.subplots(len(panels), len(maps), squeeze=False)
    for column, (method, values) in enumerate(maps.items()):
        for ax, (name, _, _, highest) in zip(axes[:, column], panels, strict=True):
            _background(ax, task, values[name], cmap=greys, vmin=0, vmax=highest, interpolation="bilinear")
            _points(ax, task, task.train.y, size=1.5, most=MOST_POINTS)
            _ood_points(ax, task)
        axes[0, column].set_title(METHODS[method].title, fontsize=12)
    for row, (_, title, unit, highest) in zip(axes, panels, strict=True):
        row[0].set_ylabel(title, fontsize=10)
        bar = figure.colorbar(row[-1].images[0], ax=row, location="right", shrink=0.9, aspect=20, pad=0.01)
        bar.set_label(f"{unit}\n(at most {highest:.2f})", fontsize=8)
        bar.ax.tick_params(labelsize=8)
    figure.suptitle(task.title, fontsize=14)
    _legend(figure, task)
    save_figure(figure, path)


def draw_labels(task: SyntheticTask, maps: Maps, accuracies: Mapping[str, float], path: Path) -> None:
    """Draw clean labels, noisy labels, and the labels that each method predicts, with its accuracy."""
    from matplotlib.colors import ListedColormap

    count = 2 + len(maps)
    columns = min(3, count)
    rows = math.ceil(count / columns)
    figure = new_figure(9.0, 3.1 * rows + 0.9)
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax, (title, labels) in zip(
        axes.flat,
        (("Clean labels", task.train.clean), ("Noisy labels, as given", task.train.y)),
        strict=False,
    ):
        _points(ax, task, labels, size=4)
        ax.set_title(title, fontsize=11)
    colours = ListedColormap(COLORS[: task.num_classes])
    for ax, (method, values) in zip(axes.flat[2:], maps.items(), strict=False):
        highest = task.num_classes - 1
        _background(
            ax,
            task,
            _finer_labels(values["probs"]),
            cmap=colours,
            vmin=0,
            vmax=highest,
            interpolation="nearest",
            alpha=0.75,
        )
        ax.set_title(f"{METHODS[method].title}: accuracy {accuracies[method]:.3f}", fontsize=11)
    for ax in axes.flat[count:]:
        ax.set_visible(False)
    for ax in axes.flat[:count]:
        _rings(ax)
    figure.suptitle(f"{task.title}: labels given, and predicted (accuracy on clean test labels)", fontsize=14)
    _legend(figure, task, rings=True)
    save_figure(figure, path)


# --- pieces ---------------------------------------------------------------------------------------------


def _background(ax: Any, task: SyntheticTask, values: np.ndarray, **style: Any) -> None:
    """Draw values, the outermost on the edges of the frame, so that their pixels reach half a step beyond."""
    left, right, bottom, top = task.frame
    half = (right - left) / (values.shape[1] - 1) / 2
    extent = (left - half, right + half, bottom - half, top + half)
    ax.imshow(values, origin="lower", extent=extent, aspect="equal", **style)


def _points(ax: Any, task: SyntheticTask, labels: Any, size: float = 2.5, most: int | None = None) -> None:
    """Draw training points in random order, so that no class covers the others; at most ``most``."""
    order = np.random.default_rng(0).permutation(len(labels))[:most]
    colours = np.array(COLORS)[labels.numpy()[order]]
    x = task.train.x.numpy()[order]
    ax.scatter(x[:, 0], x[:, 1], s=size, c=colours, linewidths=0)
    ax.set(xlim=task.frame[:2], ylim=task.frame[2:], xticks=[], yticks=[], aspect="equal")


def _finer_labels(probs: np.ndarray) -> np.ndarray:
    """Labels of interpolated probabilities (K, n, n): boundaries without steps."""
    finer = F.interpolate(torch.from_numpy(probs)[None], scale_factor=5, mode="bilinear", align_corners=True)
    return finer[0].argmax(0).numpy()


def _ood_points(ax: Any, task: SyntheticTask) -> None:
    if task.ood is not None:
        x = task.ood[:MOST_OOD].numpy()
        ax.scatter(x[:, 0], x[:, 1], s=5, c=RED, marker="x", linewidths=0.6)


def _rings(ax: Any) -> None:
    """Draw the best boundaries, half-way between the circles."""
    from matplotlib.patches import Circle

    for radius in (1.5, 2.5):
        ax.add_patch(Circle((0, 0), radius, fill=False, color="black", linestyle="--", linewidth=0.9))
    ax.set(xlim=(-4, 4), ylim=(-4, 4), xticks=[], yticks=[], aspect="equal")


def _legend(figure: Any, task: SyntheticTask, rings: bool = False) -> None:
    from matplotlib.lines import Line2D

    def mark(colour: str, label: str, marker: str = "o") -> Line2D:
        return Line2D([], [], color=colour, marker=marker, linestyle="", markersize=5, label=label)

    handles = [mark(COLORS[k], f"class {k}") for k in range(task.num_classes)]
    if rings:
        handles.append(Line2D([], [], color="black", linestyle="--", linewidth=0.9, label="best boundary"))
    elif task.ood is not None:
        handles.append(mark(RED, "OOD cluster", "x"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=10)


def _greys() -> Any:
    """Colours from white to dark grey: black would hide points."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps["Greys"](np.linspace(0, 0.8, 256)))
