"""Snow, frost, fog and brightness. ``x``: (B, 3, H, W) in [0, 1]; the caller clips."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hetsngp.data.corruptions.blur import to_bytes
from hetsngp.data.corruptions.counter_rng import CounterRNG
from hetsngp.data.corruptions.filters import along, linear_matrix, motion_blur, zoomed

GREY = (0.299, 0.587, 0.114)
OVERLAYS = 5
"""Number of overlays used: the published code draws among the first five of six."""
CIFAR_FROST = 0.2
"""Factor by which CIFAR-C shrinks the overlays."""


def snow(
    x: Tensor, constants: tuple[float, float, float, float, int, float, float], rng: CounterRNG
) -> Tensor:
    """Flakes that fall at an angle, and brightening."""
    mean, std, zoom, threshold, radius, sigma, weight = constants
    flakes = mean + std * rng.normal("flakes", 1, *x.shape[-2:])
    flakes = zoomed(flakes, zoom)
    flakes = to_bytes(torch.where(flakes < threshold, 0, flakes)) / 255
    flakes = motion_blur(flakes, radius, sigma, degrees=-135 + 90 * rng.uniform("angle"))
    grey = (x * x.new_tensor(GREY)[:, None, None]).sum(1, keepdim=True)
    lit = weight * x + (1 - weight) * torch.maximum(x, 1.5 * grey + 0.5)
    return lit + flakes + flakes.rot90(2, (-2, -1))


def frost(x: Tensor, constants: tuple[float, float], rng: CounterRNG, overlays: Sequence[Tensor]) -> Tensor:
    """A part of one of the overlays (3, Hf, Wf), in [0, 1], laid over each image."""
    weight, frost_weight = constants
    height, width = x.shape[-2:]
    number = rng.integers("overlay", 0, OVERLAYS)
    across, down = rng.uniform("left"), rng.uniform("top")
    out = torch.empty_like(x)
    row, column = (torch.arange(side, device=x.device) for side in (height, width))
    for index, overlay in enumerate(overlays[:OVERLAYS]):
        rows = (number == index).nonzero().flatten()
        if len(rows) == 0:
            continue
        tall, wide = overlay.shape[-2:]
        if tall < height or wide < width:
            raise ValueError(
                f"images of {height}×{width} pixels are larger than a frost overlay of {tall}×{wide}: "
                "resize them to 224 pixels, as ImageNet-C's are, or give larger overlays"
            )
        top, left = (down[rows] * (tall - height)).long(), (across[rows] * (wide - width)).long()
        at = (top[:, None] + row)[:, :, None] * wide + (left[:, None] + column)[:, None]
        taken = overlay.to(x).flatten(1)[:, at.flatten()].view(3, len(rows), height, width)
        out[rows] = weight * x[rows] + frost_weight * taken.transpose(0, 1)
    return out


def shrunk(overlay: Tensor, factor: float) -> Tensor:
    """Resize (3, H, W) by linear interpolation without smoothing, as OpenCV does by default."""
    matrices = []
    for side in overlay.shape[-2:]:
        target = round(factor * side)
        matrices.append(linear_matrix((np.arange(target) + 0.5) * side / target - 0.5, side))
    return along(overlay[None], *matrices)[0]


def fog(x: Tensor, constants: tuple[float, float], rng: CounterRNG) -> Tensor:
    """Add plasma, and scale the sum back to the largest value of the image."""
    amount, decay = constants
    height, width = x.shape[-2:]
    brightest = x.amax((1, 2, 3), keepdim=True)
    foggy = x + amount * plasma(max(height, width), decay, rng)[:, None, :height, :width]
    return foggy * brightest / (brightest + amount)


def plasma(least: int, decay: float, rng: CounterRNG) -> Tensor:
    """(B, m, m) in [0, 1]: a fractal on a torus by diamonds and squares, m the next power of two."""
    side = 1 << max(1, (least - 1).bit_length())
    out = torch.zeros(rng.count, side, side, dtype=rng.dtype, device=rng.device)
    step, wibble = side, 100.0
    while step >= 2:
        half, cells = step // 2, side // step

        def shaken(total: Tensor, stream: str, wibble: float = wibble, cells: int = cells) -> Tensor:
            return total / 4 + wibble * wibble * (2 * rng.uniform(stream, cells, cells) - 1)

        corner = out[:, ::step, ::step]
        pairs = corner + corner.roll(-1, 1)
        centre = shaken(pairs + pairs.roll(-1, 2), f"square_{step}")
        out[:, half::step, half::step] = centre
        across = centre + centre.roll(1, 1) + corner + corner.roll(-1, 2)
        down = centre + centre.roll(1, 2) + corner + corner.roll(-1, 1)
        out[:, ::step, half::step] = shaken(across, f"diamond_a_{step}")
        out[:, half::step, ::step] = shaken(down, f"diamond_b_{step}")
        step, wibble = half, wibble / decay
    out -= out.amin((1, 2), keepdim=True)
    return out / out.amax((1, 2), keepdim=True)


def brightness(x: Tensor, amount: float, rng: CounterRNG) -> Tensor:
    """Raise V of HSV, at most to 1. Hue and saturation stay, so the channels keep their proportions."""
    value = x.amax(1, keepdim=True)
    raised = (value + amount).clamp(0, 1)
    return torch.where(value > 0, x * raised / value.clamp_min(torch.finfo(x.dtype).tiny), raised)
