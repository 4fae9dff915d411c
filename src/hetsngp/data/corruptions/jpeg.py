"""JPEG compression of a batch, on CPU or CUDA: the loss of libjpeg's encoder, by matrix products.

Entropy coding is lossless and left out. Rounding follows libjpeg, whose integer transforms differ
from ours in the last bit.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hetsngp.data.corruptions.counter_rng import CounterRNG
from hetsngp.data.corruptions.filters import along

# ITU-T T.81, Annex K: tables for brightness and colour at quality 50.
LUMINANCE = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
CHROMINANCE = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *((99,) * 8,) * 4,
)
TO_YCC = (
    (0.299, 0.587, 0.114),
    (-0.168735892, -0.331264108, 0.5),
    (0.5, -0.418687589, -0.081312411),
)
TO_RGB = ((1.0, 0.0, 1.402), (1.0, -0.344136286, -0.714136286), (1.0, 1.772, 0.0))
TIE = 1e-4
"""Added before rounding, so that a half computed as slightly less is rounded up too."""


def jpeg_compression(x: Tensor, quality: int, rng: CounterRNG) -> Tensor:
    """Encode and decode at ``quality``, colour at half resolution: Pillow's defaults."""
    height, width = x.shape[-2:]
    # To the right libjpeg repeats the picture's last column, below the last row of the halved colour.
    y = F.pad(255 * x, (0, -width % 16, 0, height % 2), mode="replicate")
    y = _mixed(y, TO_YCC)
    y[:, 1:] += 128
    y = (y + 0.5 + TIE).floor()
    light = _coded(_to_blocks(y[:, :1]), LUMINANCE, quality)
    colour = _coded(_to_blocks(_halved(y[:, 1:])), CHROMINANCE, quality)
    colour = colour[:, :, : math.ceil(height / 2), : math.ceil(width / 2)]
    light, colour = light[:, :, :height, :width], _doubled(colour)[:, :, :height, :width]
    return (_mixed(torch.cat([light, colour - 128], 1), TO_RGB) + 0.5 + TIE).floor().clamp(0, 255) / 255


def quantisation(base: tuple[tuple[int, ...], ...], quality: int) -> np.ndarray:
    """Quantisation table at ``quality``, as libjpeg scales it.

    >>> quantisation(LUMINANCE, 50)[0, :3], quantisation(LUMINANCE, 10)[0, :3]
    (array([16, 11, 10]), array([80, 55, 50]))
    """
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    return ((np.array(base) * scale + 50) // 100).clip(1, 255)


def _mixed(x: Tensor, matrix: tuple[tuple[float, ...], ...]) -> Tensor:
    """Mix channels by a 3×3 matrix, without a matrix product, which might be rounded to TF32."""
    rows = [sum(weight * x[:, i] for i, weight in enumerate(row)) for row in matrix]
    return torch.stack(rows, 1)  # type: ignore[arg-type]


@functools.cache
def _cosines(blocks: int) -> np.ndarray:
    """(8·blocks, 8·blocks): the orthonormal DCT of each 8 values."""
    k, n = np.arange(8)[:, None], np.arange(8)
    matrix = np.cos((2 * n + 1) * k * math.pi / 16) / 2
    matrix[0] /= math.sqrt(2)
    return np.kron(np.eye(blocks), matrix)


def _to_blocks(x: Tensor) -> Tensor:
    """Pad sides to multiples of 8 by repeating the edge."""
    return F.pad(x, (0, -x.shape[-1] % 8, 0, -x.shape[-2] % 8), mode="replicate")


def _coded(x: Tensor, base: tuple[tuple[int, ...], ...], quality: int) -> Tensor:
    """Bytes → coefficients, rounded to the table's steps → bytes. Sides are multiples of 8."""
    rows, columns = (_cosines(side // 8) for side in x.shape[-2:])
    steps = torch.from_numpy(quantisation(base, quality)).to(x)
    steps = steps.repeat(x.shape[-2] // 8, x.shape[-1] // 8)
    # libjpeg's transform gives whole eighths; a half of a step is rounded away from zero.
    eighths = (8 * along(x - 128, rows, columns)).round()
    levels = eighths.sign() * ((eighths.abs() + 4 * steps) / (8 * steps)).floor()
    return (along(levels * steps, rows.T, columns.T) + 128 + 0.5 + TIE).floor().clamp(0, 255)


def _halved(x: Tensor) -> Tensor:
    """Means of 2×2, rounded down after adding 1, 2, 1, 2 … quarters along a row, so that no bias remains."""
    total = F.avg_pool2d(x, 2) * 4
    bias = 1 + torch.arange(total.shape[-1], device=x.device) % 2
    return ((total + bias) / 4 + TIE).floor()


def _doubled(x: Tensor) -> Tensor:
    """Three parts of the near pixel and one of the next, along columns and then rows ("fancy upsampling")."""
    tall = _interleaved(x, -2)
    wide = _interleaved(tall, -1)
    odd = torch.arange(wide.shape[-1], device=x.device) % 2
    return ((wide + 8 - odd) / 16 + TIE).floor()


def _interleaved(x: Tensor, dim: int) -> Tensor:
    """Double the size along ``dim``, −1 or −2."""
    size = x.shape[dim]
    before = torch.cat([x.narrow(dim, 0, 1), x.narrow(dim, 0, size - 1)], dim)
    after = torch.cat([x.narrow(dim, 1, size - 1), x.narrow(dim, size - 1, 1)], dim)
    return torch.stack([3 * x + before, 3 * x + after], dim).flatten(dim - 1, dim)
