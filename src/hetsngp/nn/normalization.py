"""Running statistics of the features, so that the kernel and the noise see them on a known scale."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hetsngp.functional.features import median_distance, normalize, signed_root

# Rows of a batch that the median distance is taken over: 8,128 pairs.
DISTANCE_ROWS = 128
# Features that do not vary at all have no scale; this one keeps them finite.
_SMALLEST = 1e-12


class FeatureNormalizer(nn.Module):
    """Centre and scale features by statistics gathered while training; see :func:`normalize` for the kinds.

    The statistics are plain averages for the first hundred steps and move with weight 0.01 after that. They
    change in training mode only, so they stand still while a posterior is fitted and from then on.
    ``gather`` (b, D) → (B, D) brings the rows of other processes, where each has a part of the batch.
    """

    gather: Callable[[Tensor], Tensor] | None = None

    mean: Tensor
    mean_square: Tensor
    log_length: Tensor
    log_variance: Tensor
    distance: Tensor
    steps: Tensor

    def __init__(self, num_features: int, kind: str, momentum: float = 0.01) -> None:
        super().__init__()
        self.kind = kind
        self.momentum = momentum
        self.out_features = num_features + (kind == "polar")
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("mean_square", torch.ones(()))
        self.register_buffer("log_length", torch.tensor(0.5 * math.log(num_features)))
        self.register_buffer("log_variance", torch.ones(()))
        # Independent points of length √D lie √(2D) apart: the value before any data is seen.
        self.register_buffer("distance", torch.tensor(math.sqrt(2 * num_features)))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, h: Tensor) -> Tensor:
        """(B, D) → (B, D), or (B, D+1) for polar."""
        if self.training:
            seen = h.detach()
            self._update(seen if self.gather is None else self.gather(seen))
        return self.normalized(h)

    def settle(self, h: Tensor) -> None:
        """Take the statistics of h (n, D), all there is, in random order."""
        self.steps.zero_()
        self._update(h)

    def normalized(self, h: Tensor) -> Tensor:
        """By the statistics as they are."""
        rms = self.mean_square.to(h.dtype).sqrt().clamp_min(_SMALLEST)
        spread = self.log_variance.to(h.dtype).sqrt().clamp_min(1e-3)
        return normalize(h, self.kind, self.mean.to(h), rms, self.log_length.to(h.dtype), spread)

    @torch.no_grad()
    def _update(self, h: Tensor) -> None:
        # Rows that are all alike have no spread: as a first batch they would make the scale zero.
        varied = (h - h[:1]).abs().amax() > 1e-5 * h.abs().amax()
        self.steps += varied
        weight = torch.clamp(1 / self.steps.clamp_min(1), min=self.momentum).to(h.dtype) * varied
        seen = signed_root(h) if self.kind == "power" else h
        self._move(self.mean, seen.mean(0), weight)
        centred = seen - self.mean.to(h)
        self._move(self.mean_square, centred.square().mean(), weight)
        log_length = centred.norm(dim=1).clamp_min(_SMALLEST).log()
        self._move(self.log_length, log_length.mean(), weight)
        self._move(self.log_variance, (log_length - self.log_length.to(h)).square().mean(), weight)
        distance = median_distance(self.normalized(h[:DISTANCE_ROWS])).to(self.distance)
        self._move(self.distance, torch.where(distance.isnan(), self.distance, distance), weight)

    @staticmethod
    def _move(buffer: Tensor, value: Tensor, weight: Tensor) -> None:
        buffer.lerp_(value.to(buffer), weight.to(buffer.dtype))
