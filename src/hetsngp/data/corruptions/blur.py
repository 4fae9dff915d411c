"""Defocus, glass, motion, zoom and Gaussian blur. ``x``: (B, 3, H, W) in [0, 1]; the caller clips."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hetsngp.data.corruptions.counter_rng import CounterRNG
from hetsngp.data.corruptions.filters import (
    correlate,
    gaussian_weights,
    zoomed,
)
from hetsngp.data.corruptions.filters import gaussian_blur as blurred
from hetsngp.data.corruptions.filters import motion_blur as trailed

NUDGE = 1e-4
"""Added before rounding down, so that a byte v computed as slightly less stays v."""


def gaussian_blur(x: Tensor, sigma: float, rng: CounterRNG) -> Tensor:
    """Gaussian blur of scikit-image."""
    return blurred(x, sigma)


def defocus_blur(x: Tensor, constants: tuple[float, float], rng: CounterRNG) -> Tensor:
    """Correlation with a disk with a soft edge."""
    return correlate(x, disk(*constants))


def disk(radius: float, sigma: float) -> np.ndarray:
    """All pixels whose centre is within ``radius``, then blurred by 3×3 or, beyond radius 8, 5×5 pixels."""
    reach, blur = (8, 1) if radius <= 8 else (int(radius), 2)
    offsets = np.arange(-reach, reach + 1)
    inside = (offsets[:, None] ** 2 + offsets**2 <= radius**2).astype(float)
    soft = np.zeros_like(inside)
    padded = np.pad(inside / inside.sum(), blur, mode="reflect")
    weights = gaussian_weights(sigma, blur)
    for i, down in enumerate(weights):
        for j, right in enumerate(weights):
            soft += down * right * padded[i : i + len(soft), j : j + len(soft)]
    return soft


def motion_blur(x: Tensor, constants: tuple[int, float], rng: CounterRNG) -> Tensor:
    """A trail at an angle of −45° to 45°."""
    return trailed(x, *constants, degrees=-45 + 90 * rng.uniform("angle"))


def zoom_blur(x: Tensor, factors: Sequence[float], rng: CounterRNG) -> Tensor:
    """The mean of x and of x zoomed by every factor."""
    out = x.clone()
    for factor in factors:
        out += zoomed(x, factor)
    return out / (len(factors) + 1)


def glass_blur(x: Tensor, constants: tuple[float, int, int], rng: CounterRNG) -> Tensor:
    """Blurred, pixels replaced by near ones, blurred again.

    The published code means to swap two pixels, but its NumPy views make it a copy: the second pixel stays
    unchanged. So it does here, as in the published images.
    """
    sigma, reach, rounds = constants
    x = to_bytes(blurred(x, sigma)) / 255
    for number in range(rounds):
        shifts = rng.integers(f"shift_{number}", -reach, reach, 2, *x.shape[-2:])
        source = _scattered(shifts, reach)[:, None].expand(-1, x.shape[1], -1)
        x = x.flatten(2).gather(2, source).view_as(x)
    return blurred(x, sigma)


def _scattered(shifts: Tensor, reach: int) -> Tensor:
    """(B, H·W): where each pixel's value comes from after a round of copies, last pixel first.

    A copy from a pixel that was written before takes its new value: a forest, whose roots are found by
    doubling instead of one step for each pixel. ``shifts``: (B, 2, H, W), down and right.
    """
    height, width = shifts.shape[-2:]
    row, column = (torch.arange(side, device=shifts.device) for side in (height, width))
    position = row[:, None] * width + column
    moved = ((row > reach) & (row <= height - reach))[:, None] & (column > reach) & (column <= width - reach)
    near = position + shifts[:, 0] * width + shifts[:, 1]
    source = torch.where(moved, near, position).flatten(1)
    # Pixels are written in descending order, so a source further on has been written already.
    written = moved.flatten()[source] & (source > position.flatten())
    while bool(written.any()):
        next_source, next_written = source.gather(1, source), written.gather(1, source)
        source = torch.where(written, next_source, source)
        written = written & next_written
    return source


def to_bytes(x: Tensor) -> Tensor:
    """⌊255·x⌋ of x clipped to [0, 1], in the dtype of x: as published, rounded down."""
    return (255 * x.clamp(0, 1)).add_(NUDGE).floor_()
