"""JPEG and back in a float64 loop over blocks of 8×8, as libjpeg does it at its default 4:2:0 chroma."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

# ITU-T T.81, Annex K.1.
LUMA = np.array(
    [
        [16, 11, 10, 16, 24, 40, 51, 61],
        [12, 12, 14, 19, 26, 58, 60, 55],
        [14, 13, 16, 24, 40, 57, 69, 56],
        [14, 17, 22, 29, 51, 87, 80, 62],
        [18, 22, 37, 56, 68, 109, 103, 77],
        [24, 35, 55, 64, 81, 104, 113, 92],
        [49, 64, 78, 87, 103, 121, 120, 101],
        [72, 92, 95, 98, 112, 100, 103, 99],
    ]
)
CHROMA = np.full((8, 8), 99)
CHROMA[:4, :4] = [[17, 18, 24, 47], [18, 21, 26, 66], [24, 26, 56, 99], [47, 66, 99, 99]]

# basis[k, n] = c(k)/2 · cos((2n + 1)kπ/16), orthonormal; the two-dimensional DCT is basis · block · basisᵀ.
BASIS = np.array(
    [
        [math.cos((2 * n + 1) * k * math.pi / 16) / (2 if k else 2 * math.sqrt(2)) for n in range(8)]
        for k in range(8)
    ]
)


def steps(table: np.ndarray, quality: int) -> np.ndarray:
    """libjpeg's scaling of a table, in whole numbers."""
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    return np.clip((table * scale + 50) // 100, 1, 255)


def nearest(x: np.ndarray) -> np.ndarray:
    """Halves go away from zero, also those that rounding noise has brought 1e-4 below."""
    return np.sign(x) * np.floor(np.abs(x) + 0.5 + 1e-4)


def through_blocks(plane: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Quantise and restore each block of a plane (h, w) of bytes whose sides are multiples of 8."""
    result = np.empty_like(plane)
    for r in range(0, plane.shape[0], 8):
        for c in range(0, plane.shape[1], 8):
            # libjpeg's forward transform yields whole eighths.
            eighths = nearest(8 * BASIS @ (plane[r : r + 8, c : c + 8] - 128) @ BASIS.T)
            coefficients = np.sign(eighths) * ((np.abs(eighths) + 4 * table) // (8 * table)) * table
            result[r : r + 8, c : c + 8] = BASIS.T @ coefficients @ BASIS + 128
    return np.clip(nearest(result), 0, 255)


def halved(plane: np.ndarray) -> np.ndarray:
    """Means of 2×2; libjpeg rounds with a bias that alternates by column, 1 then 2 quarters."""
    total = plane[::2, ::2] + plane[1::2, ::2] + plane[::2, 1::2] + plane[1::2, 1::2]
    return np.floor((total + np.resize([1, 2], total.shape[1])) / 4)


def doubled(plane: np.ndarray) -> np.ndarray:
    """libjpeg's "fancy" upsampling: each new sample ¾ of the nearer and ¼ of the farther, both ways."""
    for axis in (0, 1):
        padded = np.concatenate([plane.take([0], axis), plane, plane.take([-1], axis)], axis)
        n = plane.shape[axis]
        before, after = padded.take(range(n), axis), padded.take(range(2, n + 2), axis)
        pairs = np.stack([0.75 * plane + 0.25 * before, 0.75 * plane + 0.25 * after], axis + 1)
        plane = pairs.reshape([2 * n if a == axis else s for a, s in enumerate(plane.shape)])
    # Sixteenths are rounded with 8 in even columns and 7 in odd ones.
    return np.floor(plane + np.resize([8, 7], plane.shape[1]) / 16)


def to_blocks(plane: np.ndarray) -> np.ndarray:
    """Repeat the last row and column until both sides are multiples of 8."""
    return np.pad(plane, [(0, -side % 8) for side in plane.shape], mode="edge")


def jpeg(x: np.ndarray, quality: int, draw: Any) -> np.ndarray:
    """(3, H, W) in [0, 1], multiples of 1/255 → the same after compression.

    Below the image libjpeg repeats the last row of the halved chroma, not that of the picture; to the right
    it repeats the picture's last column before halving.
    """
    height, width = x.shape[1:]
    r, g, b = np.pad(np.rint(255 * x), [(0, 0), (0, height % 2), (0, -width % 16)], mode="edge")
    luma = nearest(0.299 * r + 0.587 * g + 0.114 * b)
    blue = nearest((b - (0.299 * r + 0.587 * g + 0.114 * b)) / 1.772 + 128)
    red = nearest((r - (0.299 * r + 0.587 * g + 0.114 * b)) / 1.402 + 128)
    luma = through_blocks(to_blocks(luma), steps(LUMA, quality))[:height, :width]
    rows, columns = -(-height // 2), -(-width // 2)
    blue, red = (
        # Only samples of the picture take part in the upsampling, not those of the padding.
        doubled(through_blocks(to_blocks(halved(c)), steps(CHROMA, quality))[:rows, :columns]) - 128
        for c in (blue, red)
    )
    blue, red = blue[:height, :width], red[:height, :width]
    r = luma + 1.402 * red
    b = luma + 1.772 * blue
    g = luma - (0.299 * 1.402 * red + 0.114 * 1.772 * blue) / 0.587
    return np.clip(np.floor(np.stack([r, g, b]) + 0.5), 0, 255) / 255
