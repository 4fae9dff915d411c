"""Make and save figures; training curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetsngp.files import write_figure

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLORS = ("#0072B2", "#E69F00", "#009E73")
RED = "#D00000"


def new_figure(width: float, height: float) -> Any:
    """Make a figure without pyplot, whose state belongs to the caller's session."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'hetsngp[eval]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write a PNG file atomically."""
    write_figure(figure, path, dpi=110)


def draw_curves(rows: Sequence[Mapping[str, Any]], best: int, path: Path) -> None:
    """Loss and held-out NLL by epoch, the epoch whose weights were taken, and the rate below."""
    epochs = [row["epoch"] for row in rows]
    figure = new_figure(6.0, 4.5)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    marker = "o" if len(rows) < 30 else None
    upper.plot(epochs, [row["loss"] for row in rows], color=COLORS[0], marker=marker, label="training loss")
    held_out = [row["held_out"] for row in rows]
    if None not in held_out:
        upper.plot(epochs, held_out, color=COLORS[1], marker=marker, label="held-out NLL")
        upper.axvline(best, color=RED, linewidth=1, linestyle=":", label=f"epoch {best}, the best")
    upper.set_ylabel("nats")
    upper.legend(fontsize=9)
    lower.plot(epochs, [row["lr"] for row in rows], color="black", linewidth=1)
    lower.set_ylabel("learning\nrate")
    lower.set_xlabel("epoch")
    lower.xaxis.get_major_locator().set_params(integer=True)
    save_figure(figure, path)
