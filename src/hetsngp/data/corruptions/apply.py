"""Apply any corruption at any severity to a batch of images, bytes to bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetsngp.data.corruptions import blur, digital, jpeg, noise, weather
from hetsngp.data.corruptions.constants import CONSTANTS, FAMILIES, SEVERITIES
from hetsngp.data.corruptions.counter_rng import CounterRNG
from hetsngp.validation import check_choice

Corruption = Callable[..., Tensor]

CORRUPTIONS: dict[str, Corruption] = {
    "gaussian_noise": noise.gaussian_noise,
    "shot_noise": noise.shot_noise,
    "impulse_noise": noise.impulse_noise,
    "defocus_blur": blur.defocus_blur,
    "glass_blur": blur.glass_blur,
    "motion_blur": blur.motion_blur,
    "zoom_blur": blur.zoom_blur,
    "snow": weather.snow,
    "frost": weather.frost,
    "fog": weather.fog,
    "brightness": weather.brightness,
    "contrast": digital.contrast,
    "elastic_transform": digital.elastic_transform,
    "pixelate": digital.pixelate,
    "jpeg_compression": jpeg.jpeg_compression,
}
"""The 15 standard corruptions, in the order of the benchmark's tables."""
EXTRA: dict[str, Corruption] = {
    "speckle_noise": noise.speckle_noise,
    "gaussian_blur": blur.gaussian_blur,
    "saturate": digital.saturate,
}
"""Three of the benchmark's four extra corruptions; spatter is left out."""
ELASTIC_SIDE = 244
"""Pixels by which ImageNet-C multiplies its elastic constants: meant was 224, but its images have 244."""
# Values of a chunk: the noises take some hundred bytes for each.
CHUNK = 2**23


def corrupt(
    images: Tensor,
    name: str,
    severity: int,
    *,
    seed: int = 0,
    first: int = 0,
    constants: str = "cifar",
    frost: Sequence[Tensor] | None = None,
) -> Tensor:
    """Corrupt ``images`` (N, 3, H, W) uint8 by corruption ``name`` at ``severity`` 1 … 5, on their device.

    Image i is number ``first + i`` of its set, and its random numbers follow from that number and ``seed``
    alone: batches may be cut anywhere. ``constants``: those of CIFAR-C or of ImageNet-C. ``frost``: the
    overlays of :func:`load_frost`, for that corruption.

    >>> grey = torch.full((2, 3, 32, 32), 128, dtype=torch.uint8)
    >>> corrupt(grey, "brightness", 5)[0, 0, 0, 0]
    tensor(204, dtype=torch.uint8)
    """
    check_images(images)
    check(name, severity, constants, frost)
    if name == "frost" and frost is not None:
        frost = prepared_frost(frost, constants, images.device)
    rows = max(1, CHUNK // images[0].numel())
    out = torch.empty_like(images)
    for begin in range(0, len(images), rows):
        part = images[begin : begin + rows]
        rng = CounterRNG(seed, name, severity, first + begin, len(part), images.device)
        x = corrupt_float(part.float() / 255, name, severity, rng, constants=constants, frost=frost)
        out[begin : begin + rows] = blur.to_bytes(x).to(torch.uint8)
    return out


def corrupt_float(
    x: Tensor,
    name: str,
    severity: int,
    rng: CounterRNG,
    *,
    constants: str = "cifar",
    frost: Sequence[Tensor] | None = None,
) -> Tensor:
    """Corrupt (B, 3, H, W) in [0, 1], without rounding to bytes; ``frost``: of :func:`prepared_frost`.

    >>> x = torch.full((1, 3, 2, 2), 0.5)
    >>> float(corrupt_float(x, "brightness", 1, CounterRNG(0, "brightness", 1))[0, 0, 0, 0])
    0.550000011920929
    """
    check(name, severity, constants, frost)
    fn = CORRUPTIONS[name] if name in CORRUPTIONS else EXTRA[name]
    values: Any = CONSTANTS[name][constants][severity - 1]
    if name == "elastic_transform":
        side = min(x.shape[-2:]) if constants == "cifar" else ELASTIC_SIDE
        values = tuple(side * value for value in values)
    more = {"overlays": frost} if name == "frost" else {}
    return fn(x, values, rng, **more).clamp(0, 1)


def prepared_frost(overlays: Sequence[Tensor], constants: str, device: torch.device | str) -> list[Tensor]:
    """Overlays (3, H, W) uint8 → [0, 1] on ``device``; for CIFAR at a fifth of their size."""
    out = [overlay.to(device).float() / 255 for overlay in overlays]
    return [weather.shrunk(overlay, weather.CIFAR_FROST) for overlay in out] if constants == "cifar" else out


def check(name: str, severity: int, constants: str, frost: Sequence[Tensor] | None) -> None:
    """Raise where the arguments of a corruption are invalid."""
    check_choice("corruption", name, (*CORRUPTIONS, *EXTRA))
    check_choice("constants", constants, FAMILIES)
    if not isinstance(severity, int | np.integer) or isinstance(severity, bool) or severity not in SEVERITIES:
        raise ValueError(f"severity must be 1, 2, 3, 4 or 5, got {severity!r}")
    if name == "frost" and (frost is None or len(frost) < weather.OVERLAYS):
        raise ValueError(
            "frost lays pictures of frost over the images: pass frost=load_frost(), which reads the six from "
            "the folder frost of data sets, or leave this corruption out"
        )


def check_images(images: Tensor) -> None:
    """Raise unless images are bytes with three channels."""
    if not isinstance(images, Tensor) or images.dtype != torch.uint8:
        kind = images.dtype if isinstance(images, Tensor) else type(images).__name__
        raise TypeError(
            f"images must be bytes (torch.uint8), got {kind}: corruptions come before normalisation; for "
            "values in [0, 1] pass (255 * images).round().to(torch.uint8)"
        )
    if images.dim() != 4 or images.shape[1] != 3 or 0 in images.shape:
        raise ValueError(
            f"images must be (N, 3, H, W), got {tuple(images.shape)}: give grey images three channels with "
            "images.expand(-1, 3, -1, -1)"
        )
