"""How a training went, in one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetsngp.evaluation.plots import CLASSES, UNSEEN, new_figure, save_figure


def draw_curves(rows: Sequence[Mapping[str, Any]], best: int, path: Path) -> None:
    """Loss and held-out NLL by epoch, the epoch whose weights were taken, and the rate below."""
    epochs = [row["epoch"] for row in rows]
    figure = new_figure(6.0, 4.5)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    marker = "o" if len(rows) < 30 else None
    upper.plot(epochs, [row["loss"] for row in rows], color=CLASSES[0], marker=marker, label="training loss")
    held_out = [row["held_out"] for row in rows]
    if None not in held_out:
        upper.plot(epochs, held_out, color=CLASSES[1], marker=marker, label="held-out NLL")
        upper.axvline(best, color=UNSEEN, linewidth=1, linestyle=":", label=f"epoch {best}, the best")
    upper.set_ylabel("nats")
    upper.legend(fontsize=9)
    lower.plot(epochs, [row["rate"] for row in rows], color="black", linewidth=1)
    lower.set_ylabel("learning\nrate")
    lower.set_xlabel("epoch")
    lower.xaxis.get_major_locator().set_params(integer=True)
    save_figure(figure, path)
