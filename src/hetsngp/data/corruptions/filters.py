"""Linear maps along rows and columns, and taps at whole-pixel offsets. No convolutions: cuDNN would round
them to TF32.

``x`` is (B, C, H, W) throughout.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Places = TypeVar("Places", np.ndarray, Tensor)
BORDERS = ("nearest", "mirror", "reflect")
"""aaa|abcd, dcb|abcd (OpenCV's default) and cba|abcd (SciPy's "reflect")."""


def border_index(index: Places, size: int, border: str) -> Places:
    """Pixel of 0 … size − 1 at ``index``, which may lie beyond the border.

    >>> [border_index(np.arange(-2, 4), 3, border).tolist() for border in BORDERS]
    [[0, 0, 0, 1, 2, 2], [2, 1, 0, 1, 2, 1], [1, 0, 0, 1, 2, 2]]
    """
    if border == "nearest" or size == 1:
        return index.clip(0, size - 1)
    period = 2 * size - 2 if border == "mirror" else 2 * size
    turned = index % period
    back = period - turned if border == "mirror" else period - 1 - turned
    inside = turned < size
    return turned * inside + back * ~inside


def along(x: Tensor, rows: np.ndarray | None = None, columns: np.ndarray | None = None) -> Tensor:
    """rows · x · columnsᵀ for every channel; the matrices are (H′, H) and (W′, W), None the identity."""
    y = x.double()  # neither TF32 nor autocast rounds float64
    if columns is not None:
        y = y @ torch.from_numpy(np.ascontiguousarray(columns.T)).to(y)
    if rows is not None:
        y = torch.from_numpy(np.ascontiguousarray(rows)).to(y) @ y
    return y.to(x.dtype)


def gaussian_weights(sigma: float, radius: int) -> np.ndarray:
    """Gaussian weights (2·radius + 1,), sum 1."""
    offsets = np.arange(-radius, radius + 1)
    weights = np.exp(-(offsets**2) / (2 * sigma**2))
    return weights / weights.sum()


def gaussian_matrix(size: int, sigma: float, truncate: float, border: str) -> np.ndarray:
    """(size, size): a Gaussian blur of one dimension, cut off at ``truncate`` standard deviations."""
    radius = int(truncate * sigma + 0.5)
    matrix = np.zeros((size, size))
    if radius == 0:
        np.fill_diagonal(matrix, 1.0)
        return matrix
    for offset, weight in zip(range(-radius, radius + 1), gaussian_weights(sigma, radius), strict=True):
        places = border_index(np.arange(size) + offset, size, border)
        np.add.at(matrix, (np.arange(size), places), weight)
    return matrix


def gaussian_blur(x: Tensor, sigma: float, truncate: float = 4.0, border: str = "nearest") -> Tensor:
    """Gaussian blur with the defaults of scikit-image's ``gaussian``."""
    rows, columns = (gaussian_matrix(size, sigma, truncate, border) for size in x.shape[-2:])
    return along(x, rows, columns)


def correlate(x: Tensor, kernel: np.ndarray, border: str = "mirror") -> Tensor:
    """Σ kernel[i, j] · x[row + i − centre, column + j − centre], over the kernel's non-zero entries."""
    height, width = x.shape[-2:]
    reach = [side // 2 for side in kernel.shape]
    rows, columns = (
        torch.as_tensor(border_index(np.arange(-r, size + r), size, border), device=x.device)
        for r, size in zip(reach, (height, width), strict=True)
    )
    padded = x[:, :, rows][:, :, :, columns]
    out = torch.zeros_like(x)
    for i, j in zip(*np.nonzero(kernel), strict=True):
        out.add_(padded[:, :, i : i + height, j : j + width], alpha=float(kernel[i, j]))
    return out


def motion_blur(x: Tensor, radius: int, sigma: float, degrees: Tensor) -> Tensor:
    """A trail behind every pixel in direction ``degrees`` (B,), half a Gaussian long, as in ImageMagick.

    Tap i = 0 … 2·radius stands at the whole-pixel offset ⌈i·(cos, sin) − ½⌉ of columns and rows.
    """
    height, width = x.shape[-2:]
    taps = np.arange(2 * radius + 1)
    weights = np.exp(-(taps**2) / (2 * sigma**2))
    weights /= weights.sum()
    angle = degrees.double() * (math.pi / 180)
    row, column = (torch.arange(side, device=x.device) for side in (height, width))
    flat, out = x.flatten(2), torch.zeros_like(x)
    for i, weight in zip(taps.tolist(), weights.tolist(), strict=True):
        right, down = ((i * part - 0.5).ceil().long() for part in (angle.cos(), angle.sin()))
        rows = (row + down[:, None]).clamp(0, height - 1)
        columns = (column + right[:, None]).clamp(0, width - 1)
        index = (rows[:, :, None] * width + columns[:, None]).flatten(1)
        taken = flat.gather(2, index[:, None].expand(-1, x.shape[1], -1))
        out.add_(taken.view_as(x), alpha=weight)
    return out


def linear_matrix(places: np.ndarray, size: int) -> np.ndarray:
    """(n, size): linear interpolation at ``places`` (n,) in 0 … size − 1, clamped."""
    places = places.clip(0, size - 1)
    lower = np.floor(places).astype(int)
    share = places - lower
    matrix = np.zeros((len(places), size))
    rows = np.arange(len(places))
    np.add.at(matrix, (rows, lower), 1 - share)
    np.add.at(matrix, (rows, np.minimum(lower + 1, size - 1)), share)
    return matrix


def zoom_matrix(size: int, factor: float) -> np.ndarray:
    """(size, size): central ⌈size/factor⌉ pixels stretched by ``factor``, corners aligned, cut to size."""
    kept = math.ceil(size / factor)
    stretched = round(kept * factor)
    step = (kept - 1) / (stretched - 1) if stretched > 1 else 0.0
    begin, top = (stretched - size) // 2, (size - kept) // 2
    matrix = np.zeros((size, size))
    matrix[:, top : top + kept] = linear_matrix(np.arange(begin, begin + size) * step, kept)
    return matrix


def zoomed(x: Tensor, factor: float) -> Tensor:
    """Centre of x, enlarged by ``factor``, in the size of x."""
    return along(x, *(zoom_matrix(size, factor) for size in x.shape[-2:]))


def box_matrix(size: int, target: int) -> np.ndarray:
    """(target, size): Pillow's BOX filter: a pixel counts where its centre is within the target's."""
    scale = size / target
    wide = max(scale, 1.0)
    matrix = np.zeros((target, size))
    for i in range(target):
        centre = (i + 0.5) * scale
        low, high = max(0, int(centre - wide / 2 + 0.5)), min(size, int(centre + wide / 2 + 0.5))
        inside = [(j - centre + 0.5) / wide for j in range(low, high)]
        matrix[i, low:high] = [-0.5 < place <= 0.5 for place in inside]
    return matrix / matrix.sum(1, keepdims=True)


def sample_at(x: Tensor, rows: Tensor, columns: Tensor, border: str) -> Tensor:
    """x at real ``rows`` and ``columns`` (B, H, W), linear between pixels and beyond the border."""
    height, width = x.shape[-2:]
    top, left = rows.floor(), columns.floor()
    down, right = (rows - top)[:, None], (columns - left)[:, None]
    flat, out = x.flatten(2), torch.zeros_like(x)
    for i, by_row in ((0, 1 - down), (1, down)):
        for j, by_column in ((0, 1 - right), (1, right)):
            r = border_index(top.long() + i, height, border)
            c = border_index(left.long() + j, width, border)
            index = (r * width + c).flatten(1)[:, None].expand(-1, x.shape[1], -1)
            out += by_row * by_column * flat.gather(2, index).view_as(x)
    return out
