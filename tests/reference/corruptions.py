"""The standard corruptions one image at a time in float64 NumPy: loops, colorsys, SciPy and Pillow, no torch.

The definitions are those of Hendrycks & Dietterich (2019) as their published sets were made. Random numbers
come by stream name from `hetsngp.data.corruptions.CounterRNG`, so that pictures compare number by number.
"""

from __future__ import annotations

import colorsys
import math
from typing import Any

import numpy as np
from scipy.stats import poisson
from tests.reference import corruption_jpeg
from tests.reference import corruption_shapes as shapes

CIFAR: dict[str, list[Any]] = {
    "gaussian_noise": [0.04, 0.06, 0.08, 0.09, 0.10],
    "shot_noise": [500, 250, 100, 75, 50],
    "impulse_noise": [0.01, 0.02, 0.03, 0.05, 0.07],
    "defocus_blur": [(0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)],
    "glass_blur": [(0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)],
    "motion_blur": [(6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)],
    "zoom_blur": [np.arange(1, end, 0.01) for end in (1.06, 1.11, 1.16, 1.21, 1.26)],
    "snow": [
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ],
    "frost": [(1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)],
    "fog": [(0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)],
    "brightness": [0.05, 0.1, 0.15, 0.2, 0.3],
    "contrast": [0.75, 0.5, 0.4, 0.3, 0.15],
    "elastic_transform": [
        (0, 0, 0.08),
        (0.05, 0.2, 0.07),
        (0.08, 0.06, 0.06),
        (0.1, 0.04, 0.05),
        (0.1, 0.03, 0.03),
    ],
    "pixelate": [0.95, 0.9, 0.85, 0.75, 0.65],
    "jpeg_compression": [80, 65, 58, 50, 40],
    "speckle_noise": [0.06, 0.1, 0.12, 0.16, 0.2],
    "gaussian_blur": [0.4, 0.6, 0.7, 0.8, 1],
    "saturate": [(0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)],
}
IMAGENET: dict[str, list[Any]] = {
    "gaussian_noise": [0.08, 0.12, 0.18, 0.26, 0.38],
    "shot_noise": [60, 25, 12, 5, 3],
    "impulse_noise": [0.03, 0.06, 0.09, 0.17, 0.27],
    "defocus_blur": [(3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)],
    "glass_blur": [(0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)],
    "motion_blur": [(10, 3), (15, 5), (15, 8), (15, 12), (20, 15)],
    "zoom_blur": [
        np.arange(1, 1.11, 0.01),
        np.arange(1, 1.16, 0.01),
        np.arange(1, 1.21, 0.02),
        np.arange(1, 1.26, 0.02),
        np.arange(1, 1.31, 0.03),
    ],
    "snow": [
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ],
    "frost": [(1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)],
    "fog": [(1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)],
    "brightness": [0.1, 0.2, 0.3, 0.4, 0.5],
    "contrast": [0.4, 0.3, 0.2, 0.1, 0.05],
    "elastic_transform": [
        (2, 0.7, 0.1),
        (2, 0.08, 0.2),
        (0.05, 0.01, 0.02),
        (0.07, 0.01, 0.02),
        (0.12, 0.01, 0.02),
    ],
    "pixelate": [0.6, 0.5, 0.4, 0.3, 0.25],
    "jpeg_compression": [25, 18, 15, 10, 7],
    "speckle_noise": [0.15, 0.2, 0.35, 0.45, 0.6],
    "gaussian_blur": [1, 2, 3, 4, 6],
    "saturate": [(0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)],
}


CONSTANTS = {"cifar": CIFAR, "imagenet": IMAGENET}


class OneImage:
    """The draws of image number `index` of a batch, as NumPy arrays without the batch axis."""

    def __init__(self, draws: Any, index: int) -> None:
        self.draws, self.index = draws, index

    def uniform(self, stream: str, *shape: int) -> np.ndarray:
        return self.draws.uniform(stream, *shape)[self.index].numpy()

    def normal(self, stream: str, *shape: int) -> np.ndarray:
        return self.draws.normal(stream, *shape)[self.index].numpy()

    def integers(self, stream: str, low: int, high: int, *shape: int) -> np.ndarray:
        return self.draws.integers(stream, low, high, *shape)[self.index].numpy()


def corrupted(
    images: np.ndarray,
    name: str,
    severity: int,
    draws: Any,
    constants: str = "cifar",
    overlays: list[np.ndarray] | None = None,
) -> np.ndarray:
    """(B, 3, H, W) in [0, 1] → the same, corrupted and clipped; `overlays`: frosts (3, h, w) in bytes."""
    value = CONSTANTS[constants][name][severity - 1]
    result = []
    for index, x in enumerate(images):
        draw = OneImage(draws, index)
        if name == "elastic_transform":
            y = shapes.elastic(x, np.multiply(value, min(x.shape[1:]) if constants == "cifar" else 244), draw)
        elif name == "frost":
            assert overlays is not None
            y = frost(x, value, draw, overlays, 0.2 if constants == "cifar" else 1.0)
        else:
            y = CORRUPTIONS[name](x, value, draw)
        result.append(np.clip(y, 0, 1))
    return np.stack(result)


def gaussian_noise(x: np.ndarray, std: float, draw: OneImage) -> np.ndarray:
    return x + std * draw.normal("noise", *x.shape)


def speckle_noise(x: np.ndarray, std: float, draw: OneImage) -> np.ndarray:
    return x + x * std * draw.normal("noise", *x.shape)


def shot_noise(x: np.ndarray, rate: float, draw: OneImage) -> np.ndarray:
    """The smallest k whose distribution function exceeds u (SciPy's ppf takes "reaches", and −1 at u = 0)."""
    u = draw.uniform("noise", *x.shape)
    counts = np.empty_like(x)
    for level in np.unique(x):
        at = x == level
        # 60 standard deviations and 60 counts above the mean leave less than 1e-300.
        table = poisson.cdf(np.arange(int(rate * level + 60 * math.sqrt(rate * level)) + 60), rate * level)
        counts[at] = np.searchsorted(table, u[at], side="right")
    return counts / rate


def impulse_noise(x: np.ndarray, amount: float, draw: OneImage) -> np.ndarray:
    flip, salt = draw.uniform("flip", *x.shape), draw.uniform("salt", *x.shape)
    y = x.copy()
    for at in np.argwhere(flip < amount):
        y[tuple(at)] = 1.0 if salt[tuple(at)] < 0.5 else 0.0
    return y


def snow(x: np.ndarray, value: tuple[float, ...], draw: OneImage) -> np.ndarray:
    mean, std, zoom, threshold, radius, sigma, blend = value
    layer = shapes.clipped_zoom(mean + std * draw.normal("flakes", *x.shape[1:]), zoom)
    layer[layer < threshold] = 0
    layer = shapes.streak(
        shapes.cut(layer), int(radius), sigma, math.radians(-135 + 90 * float(draw.uniform("angle")))
    )
    grey = 0.299 * x[0] + 0.587 * x[1] + 0.114 * x[2]
    x = blend * x + (1 - blend) * np.maximum(x, 1.5 * grey + 0.5)
    return x + layer + layer[::-1, ::-1]


def frost(
    x: np.ndarray, value: tuple[float, float], draw: OneImage, overlays: list[np.ndarray], scale: float
) -> np.ndarray:
    height, width = x.shape[1:]
    overlay = overlays[int(draw.integers("overlay", 0, 5))].astype(float)
    if scale != 1:
        overlay = shapes.shrink(overlay, scale)
    top = math.floor(float(draw.uniform("top")) * (overlay.shape[1] - height))
    left = math.floor(float(draw.uniform("left")) * (overlay.shape[2] - width))
    return value[0] * x + value[1] * overlay[:, top : top + height, left : left + width] / 255


def plasma(side: int, decay: float, draw: OneImage) -> np.ndarray:
    """Diamond-square on a torus, cell by cell: (side, side) from 0 to 1; side is a power of two."""
    grid = np.zeros((side, side))
    step, wibble = side, 100.0
    while step >= 2:
        half, n = step // 2, side // step

        def at(row: int, column: int) -> float:
            return float(grid[row % side, column % side])

        def shake(stream: str, step: int = step, n: int = n, wibble: float = wibble) -> np.ndarray:
            return wibble * (-wibble + 2 * wibble * draw.uniform(f"{stream}_{step}", n, n))

        cells = [(i, j, i * step, j * step) for i in range(n) for j in range(n)]
        square, diamond_a, diamond_b = shake("square"), shake("diamond_a"), shake("diamond_b")
        for i, j, r, c in cells:
            corners = at(r, c) + at(r + step, c) + at(r, c + step) + at(r + step, c + step)
            grid[r + half, c + half] = corners / 4 + square[i, j]
        for i, j, r, c in cells:
            around = at(r + half, c + half) + at(r - half, c + half) + at(r, c) + at(r, c + step)
            grid[r, c + half] = around / 4 + diamond_a[i, j]
        for i, j, r, c in cells:
            around = at(r + half, c + half) + at(r + half, c - half) + at(r, c) + at(r + step, c)
            grid[r + half, c] = around / 4 + diamond_b[i, j]
        step, wibble = half, wibble / decay
    grid -= grid.min()
    return grid / grid.max()


def fog(x: np.ndarray, value: tuple[float, float], draw: OneImage) -> np.ndarray:
    amount, decay = value
    height, width = x.shape[1:]
    side = 1
    while side < max(height, width):
        side *= 2
    return (x + amount * plasma(side, decay, draw)[:height, :width]) * x.max() / (x.max() + amount)


def in_hsv(x: np.ndarray, change: Any) -> np.ndarray:
    """Each pixel through Python's colorsys: `change` maps (h, s, v) to new ones."""
    y = np.empty_like(x)
    for row, column in np.ndindex(*x.shape[1:]):
        y[:, row, column] = colorsys.hsv_to_rgb(*change(*colorsys.rgb_to_hsv(*x[:, row, column])))
    return y


def brightness(x: np.ndarray, add: float, draw: OneImage) -> np.ndarray:
    return in_hsv(x, lambda h, s, v: (h, s, min(max(v + add, 0), 1)))


def saturate(x: np.ndarray, value: tuple[float, float], draw: OneImage) -> np.ndarray:
    return in_hsv(x, lambda h, s, v: (h, min(max(s * value[0] + value[1], 0), 1), v))


def contrast(x: np.ndarray, factor: float, draw: OneImage) -> np.ndarray:
    mean = np.array([channel.mean() for channel in x])[:, None, None]
    return (x - mean) * factor + mean


CORRUPTIONS: dict[str, Any] = {
    "gaussian_noise": gaussian_noise,
    "speckle_noise": speckle_noise,
    "shot_noise": shot_noise,
    "impulse_noise": impulse_noise,
    "defocus_blur": shapes.defocus_blur,
    "gaussian_blur": shapes.gaussian_blur,
    "glass_blur": shapes.glass_blur,
    "motion_blur": shapes.motion_blur,
    "zoom_blur": shapes.zoom_blur,
    "snow": snow,
    "fog": fog,
    "brightness": brightness,
    "saturate": saturate,
    "contrast": contrast,
    "pixelate": shapes.pixelate,
    "jpeg_compression": corruption_jpeg.jpeg,
}
