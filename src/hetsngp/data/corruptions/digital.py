"""Contrast, elastic transform, pixelate and saturate. ``x``: (B, 3, H, W) in [0, 1]; the caller clips."""

from __future__ import annotations

import torch
from torch import Tensor

from hetsngp.data.corruptions.counter_rng import CounterRNG
from hetsngp.data.corruptions.filters import along, box_matrix, gaussian_blur, sample_at


def contrast(x: Tensor, factor: float, rng: CounterRNG) -> Tensor:
    """Scaled about each channel's mean."""
    mean = x.mean((2, 3), keepdim=True)
    return (x - mean) * factor + mean


def saturate(x: Tensor, constants: tuple[float, float], rng: CounterRNG) -> Tensor:
    """S of HSV times a factor plus an offset, within [0, 1]. A grey pixel has hue 0, so its offset is red."""
    factor, offset = constants
    tiny = torch.finfo(x.dtype).tiny
    value = x.amax(1, keepdim=True)
    chroma = value - x.amin(1, keepdim=True)
    saturation = chroma / value.clamp_min(tiny)
    wanted = (saturation * factor + offset).clamp(0, 1)
    # A channel is V·(1 − S·k), k by hue alone.
    k = torch.where(
        chroma > 0, (value - x) / chroma.clamp_min(tiny), x.new_tensor([0.0, 1.0, 1.0])[:, None, None]
    )
    return value * (1 - wanted * k)


def elastic_transform(x: Tensor, constants: tuple[float, float, float], rng: CounterRNG) -> Tensor:
    """An affine map that moves three points, then smooth shifts; constants in pixels."""
    alpha, sigma, jitter = constants
    height, width = x.shape[-2:]
    row, column = torch.meshgrid(
        *(torch.arange(side, dtype=torch.float64, device=x.device) for side in (height, width)), indexing="ij"
    )
    grid = torch.stack([column, row, torch.ones_like(row)], -1).flatten(0, 1)
    source = (grid @ _inverse_affine(rng, height, width, jitter).mT).to(x.dtype)
    columns, rows = source.view(-1, height, width, 2).unbind(-1)
    x = sample_at(x, rows, columns, "mirror")
    across, down = (
        alpha * gaussian_blur(2 * rng.uniform(stream, 1, height, width) - 1, sigma, 3.0, "reflect")[:, 0]
        for stream in ("dx", "dy")
    )
    return sample_at(x, row.to(x) + down, column.to(x) + across, "reflect")


def _inverse_affine(rng: CounterRNG, height: int, width: int, jitter: float) -> Tensor:
    """(B, 2, 3) float64: from (x, y, 1) of the result back to (x, y) of the image."""
    x, y, reach = width // 2, height // 2, min(height, width) // 3
    points = [(x + reach, y + reach), (x + reach, y - reach), (x - reach, y - reach)]
    before = torch.tensor(points, dtype=torch.float64, device=rng.device)
    after = before + jitter * (2 * rng.uniform("corners", 3, 2).double() - 1)
    ones = torch.ones(*after.shape[:2], 1).to(after)
    return torch.linalg.solve(torch.cat([after, ones], 2), before.expand_as(after)).mT


def pixelate(x: Tensor, factor: float, rng: CounterRNG) -> Tensor:
    """Shrunk and stretched by boxes, rounded to bytes after each pass along rows or columns, as by Pillow."""
    size = tuple(x.shape[-2:])
    out = 255 * x
    for target in (tuple(max(1, int(side * factor)) for side in size), size):
        rows, columns = (box_matrix(a, b) for a, b in zip(out.shape[-2:], target, strict=True))
        out = _rounded(along(out, columns=columns))
        out = _rounded(along(out, rows=rows))
    return out / 255


def _rounded(x: Tensor) -> Tensor:
    return (x + 0.5 + 1e-4).floor()  # a half is rounded up, also where computed as slightly less
