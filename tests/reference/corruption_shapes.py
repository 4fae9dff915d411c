"""The corruptions that move pixels or mix neighbours, one float64 image (3, H, W) at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from scipy import ndimage


def cut(x: np.ndarray) -> np.ndarray:
    """To whole levels of 255, downwards, as published, but 1e-4 of a level below a whole one is that one.

    A blurred flat area is its level up to 1e-16, and float32 up to 1e-5: that must not cost a level.
    """
    return np.floor(255 * np.clip(x, 0, 1) + 1e-4) / 255


def disk(radius: float, alias: float) -> np.ndarray:
    """A filled disk of sum 1, its edge softened: OpenCV's GaussianBlur of 3×3 taps, 5×5 beyond radius 8."""
    reach, half = (8, 1) if radius <= 8 else (math.floor(radius), 2)
    grid = np.arange(-reach, reach + 1)
    kernel = (grid[:, None] ** 2 + grid[None, :] ** 2 <= radius**2).astype(float)
    kernel /= kernel.sum()
    taps = np.exp(-(np.arange(-half, half + 1) ** 2) / (2 * alias**2))
    taps /= taps.sum()
    # SciPy's "mirror" is OpenCV's default border, BORDER_REFLECT_101: the edge itself is not repeated.
    return ndimage.correlate(kernel, np.outer(taps, taps), mode="mirror")


def defocus_blur(x: np.ndarray, value: tuple[float, float], draw: Any) -> np.ndarray:
    kernel = disk(*value)
    return np.stack([ndimage.correlate(channel, kernel, mode="mirror") for channel in x])


def soft(x: np.ndarray, sigma: float) -> np.ndarray:
    """scikit-image's `gaussian`, which is SciPy's filter with the nearest border, cut at four σ."""
    return np.stack([ndimage.gaussian_filter(c, sigma, mode="nearest", truncate=4.0) for c in x])


def gaussian_blur(x: np.ndarray, sigma: float, draw: Any) -> np.ndarray:
    return soft(x, sigma)


def glass_blur(x: np.ndarray, value: tuple[float, int, int], draw: Any) -> np.ndarray:
    """The published exchange of two pixels is kept as NumPy does it: through views, so one is copied."""
    sigma, reach, iterations = value
    height, width = x.shape[1:]
    pixels = np.ascontiguousarray(cut(soft(x, sigma)).transpose(1, 2, 0))
    for i in range(iterations):
        shift = draw.integers(f"shift_{i}", -reach, reach, 2, height, width)
        for h in range(height - reach, reach, -1):
            for w in range(width - reach, reach, -1):
                there = (h + shift[0, h, w], w + shift[1, h, w])
                pixels[h, w], pixels[there] = pixels[there], pixels[h, w]
    return soft(pixels.transpose(2, 0, 1), sigma)


def streak(layer: np.ndarray, radius: int, sigma: float, angle: float) -> np.ndarray:
    """ImageMagick's motion blur of one channel (H, W): whole-pixel steps to one side, nearest border."""
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(2 * radius + 1)]
    rows, columns = np.indices(layer.shape)
    y = np.zeros(layer.shape)
    for i, weight in enumerate(weights):
        across, down = math.ceil(i * math.cos(angle) - 0.5), math.ceil(i * math.sin(angle) - 0.5)
        r = np.clip(rows + down, 0, layer.shape[0] - 1)
        c = np.clip(columns + across, 0, layer.shape[1] - 1)
        y += weight / sum(weights) * layer[r, c]
    return y


def motion_blur(x: np.ndarray, value: tuple[int, float], draw: Any) -> np.ndarray:
    angle = math.radians(-45 + 90 * float(draw.uniform("angle")))
    return np.stack([streak(channel, *value, angle) for channel in x])


def clipped_zoom(layer: np.ndarray, factor: float) -> np.ndarray:
    """The middle of one channel (H, W), enlarged by `factor` to the same size: SciPy's bilinear zoom."""
    sides = layer.shape
    crops = [math.ceil(side / factor) for side in sides]
    tops = [(side - crop) // 2 for side, crop in zip(sides, crops, strict=True)]
    window = tuple(slice(top, top + crop) for top, crop in zip(tops, crops, strict=True))
    # Mode "nearest": the last corner may lie 1e-16 outside, where the default border would give 0.
    large = ndimage.zoom(layer[window], factor, order=1, mode="nearest")
    trims = [(big - side) // 2 for big, side in zip(large.shape, sides, strict=True)]
    return large[tuple(slice(trim, trim + side) for trim, side in zip(trims, sides, strict=True))].copy()


def zoom_blur(x: np.ndarray, factors: Iterable[float], draw: Any) -> np.ndarray:
    pictures = [x] + [np.stack([clipped_zoom(channel, factor) for channel in x]) for factor in factors]
    return sum(pictures) / len(pictures)


def elastic(x: np.ndarray, value: np.ndarray, draw: Any) -> np.ndarray:
    """A random affine map, then a random smooth field of shifts; `value`: (α, σ, jitter) in pixels."""
    alpha, sigma, jitter = value
    height, width = x.shape[1:]
    middle, third = np.array([width // 2, height // 2], float), min(height, width) // 3  # x, y
    before = np.array([middle + third, [middle[0] + third, middle[1] - third], middle - third])
    after = before + jitter * (2 * draw.uniform("corners", 3, 2) - 1)
    homogeneous = np.hstack([before, np.ones((3, 1))])
    matrix = np.vstack([np.linalg.solve(homogeneous, after).T, [0, 0, 1]])  # (x, y, 1) before → after
    rows, columns = np.indices((height, width), float)
    places = np.linalg.solve(matrix, np.stack([columns.ravel(), rows.ravel(), np.ones(height * width)]))
    source = places[1::-1].reshape(2, height, width)  # row, column
    x = np.stack([ndimage.map_coordinates(channel, source, order=1, mode="mirror") for channel in x])

    def field(stream: str) -> np.ndarray:
        noise = 2 * draw.uniform(stream, height, width) - 1
        return alpha * (ndimage.gaussian_filter(noise, sigma, mode="reflect", truncate=3) if sigma else noise)

    moved = np.stack([rows + field("dy"), columns + field("dx")])
    return np.stack([ndimage.map_coordinates(channel, moved, order=1, mode="reflect") for channel in x])


def shrink(overlay: np.ndarray, scale: float) -> np.ndarray:
    """(C, h, w) → sides round(scale·side): bilinear, half-pixel centres, nearest border, no antialiasing."""
    for axis in (1, 2):
        side = overlay.shape[axis]
        small = round(scale * side)
        place = np.clip((np.arange(small) + 0.5) * side / small - 0.5, 0, side - 1)
        low = np.floor(place).astype(int)
        share = (place - low).reshape([-1 if a == axis else 1 for a in range(3)])
        high = np.minimum(low + 1, side - 1)
        overlay = (1 - share) * np.take(overlay, low, axis) + share * np.take(overlay, high, axis)
    return overlay


def pixelate(x: np.ndarray, factor: float, draw: Any) -> np.ndarray:
    from PIL import Image

    height, width = x.shape[1:]
    image = Image.fromarray(np.rint(255 * x).astype(np.uint8).transpose(1, 2, 0))
    image = image.resize((int(width * factor), int(height * factor)), Image.Resampling.BOX)
    return np.asarray(image.resize((width, height), Image.Resampling.BOX)).transpose(2, 0, 1) / 255.0
