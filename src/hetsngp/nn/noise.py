"""f → u: input-dependent label noise, as modules."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetsngp.functional import noise as functional
from hetsngp.functional.features import clip_length
from hetsngp.nn.normalization import FeatureNormalizer
from hetsngp.types import Factor

# Features longer than this many times the typical length are read at that length: the noise is learned
# on the data and held constant beyond it, or it would grow without bound and drown the GP far away.
LONGEST = 2.0
# Standard deviation of V(x) at initialisation, small against the logits to come.
INITIAL_STD = 0.1


class LowRankNoise(nn.Module):
    """Σ(x) = VVᵀ + diag(d²), V (K, R) and d (K,) affine in the standardised h (d through softplus)."""

    def __init__(
        self, num_features: int, num_classes: int, rank: int, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.rank = rank
        # Typical length one: an SGD step moves V(x) by lr·‖z‖², and noise that is learned faster than the
        # mean explains the labels away.
        self.length, self.longest = math.sqrt(num_features), LONGEST
        self.normalizer = FeatureNormalizer(num_features, "rms")
        self.diagonal = nn.Linear(num_features, num_classes)
        self._make_factor(num_features, num_classes, generator)
        for layer in (m for m in self.modules() if isinstance(m, nn.Linear)):
            nn.init.normal_(layer.weight, std=INITIAL_STD, generator=generator)
            nn.init.zeros_(layer.bias)
        # d starts where V does: softplus(−2) ≈ 0.13.
        nn.init.constant_(self.diagonal.bias, -2.0)

    def _make_factor(self, num_features: int, num_classes: int, generator: torch.Generator | None) -> None:
        self.factor = nn.Linear(num_features, num_classes * self.rank)

    def _factor(self, z: Tensor) -> Factor:
        return functional.low_rank_factor(_affine(self.factor, z), self.rank)

    def forward(self, h: Tensor) -> tuple[Tensor, Factor]:
        """(B, D) → d² (B, K) and the factor V(x)."""
        z = clip_length(self.normalizer(h) / self.length, self.longest)
        return functional.diagonal_variance(_affine(self.diagonal, z)), self._factor(z)


class ParameterEfficientNoise(LowRankNoise):
    """V(x) = v(x)1ᵀ ⊙ V₀ with v affine in h and V₀ (K, R) free: D·K + K·R parameters instead of D·K·R."""

    def _make_factor(self, num_features: int, num_classes: int, generator: torch.Generator | None) -> None:
        self.row = nn.Linear(num_features, num_classes)
        self.basis = nn.Parameter(
            torch.randn(num_classes, self.rank, generator=generator) / math.sqrt(self.rank)
        )

    def _factor(self, z: Tensor) -> Factor:
        return functional.parameter_efficient_factor(_affine(self.row, z), self.basis.to(z))


def _affine(layer: nn.Linear, z: Tensor) -> Tensor:
    """The layer in the precision of z: under half precision the heads still compute in float32."""
    return F.linear(z, layer.weight.to(z), layer.bias.to(z))


NOISE_TYPES: dict[str, type[LowRankNoise]] = {
    "low_rank": LowRankNoise,
    "parameter_efficient": ParameterEfficientNoise,
}
