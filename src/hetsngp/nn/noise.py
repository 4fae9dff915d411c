"""f → u: input-dependent label noise, as modules.

Every kind maps h to the variances of a diagonal part and a factor of the rest. With M members each has its
own noise: B·M rows, as for the latents.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetsngp.functional import noise as functional
from hetsngp.functional.features import clip_length
from hetsngp.nn.initialization import overwritten_linear
from hetsngp.nn.latent import (
    FeatureNormalizer,
    LinearLatent,
    NormalizerStatistics,
    RandomFeatureGP,
    member_rows,
)
from hetsngp.types import AnyFactor

# Features are clipped to this multiple of their typical length: otherwise the noise would grow without bound
# far from the data, where it exceeds the GP's variance.
LONGEST = 2.0
# Standard deviation of V(x) at initialisation, small compared with trained logits.
INITIAL_STD = 0.1
# Initial bias of d, about the size of V: softplus(−2) ≈ 0.13.
INITIAL_DIAGONAL = -2.0


class Noise(nn.Module):
    """Base: standardised input and initial values of the layers."""

    def __init__(self, num_features: int, rank: int, members: int) -> None:
        super().__init__()
        self.rank, self.members = rank, members
        # Inputs z have typical length one: an SGD step changes V(x) by lr·‖z‖², and noise that is learned
        # faster than the mean would explain all labels.
        self.length, self.longest = math.sqrt(num_features), LONGEST
        self.normalizer = FeatureNormalizer(num_features, "rms", measures_distance=False)

    def _start(self, generator: torch.Generator | None) -> None:
        for layer in (m for m in self.modules() if isinstance(m, nn.Linear)):
            nn.init.normal_(layer.weight, std=INITIAL_STD, generator=generator)
            nn.init.zeros_(layer.bias)
        assert isinstance(self.diagonal, nn.Linear)
        nn.init.constant_(self.diagonal.bias, INITIAL_DIAGONAL)

    def _standardised(self, h: Tensor) -> tuple[Tensor, NormalizerStatistics]:
        z, statistics = self.normalizer.with_statistics(h)
        return clip_length(z / self.length, self.longest), statistics

    def forward(self, h: Tensor, latent: LinearLatent | RandomFeatureGP) -> tuple[Tensor, AnyFactor]:
        """h (B, D), and the latent whose logits are noisy → d² (B·M, K) and a factor."""
        raise NotImplementedError


class LowRankNoise(Noise):
    """Σ(x) = VVᵀ + diag(d²), V (K, R) and d (K,) affine in the standardised h (d through softplus)."""

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        rank: int,
        *,
        members: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(num_features, rank, members)
        self.diagonal = overwritten_linear(num_features, members * num_classes, generator)
        self._make_factor(num_features, num_classes, generator)
        self._start(generator)

    def _make_factor(self, num_features: int, num_classes: int, generator: torch.Generator | None) -> None:
        self.factor = overwritten_linear(num_features, self.members * num_classes * self.rank, generator)

    def _factor(self, z: Tensor) -> AnyFactor:
        return functional.low_rank_factor(member_rows(_affine(self.factor, z), self.members), self.rank)

    def forward(self, h: Tensor, latent: LinearLatent | RandomFeatureGP) -> tuple[Tensor, AnyFactor]:
        z, _ = self._standardised(h)
        raw = member_rows(_affine(self.diagonal, z), self.members)
        return functional.diagonal_variance(raw), self._factor(z)


class ParameterEfficientNoise(LowRankNoise):
    """V(x) = v(x)1ᵀ ⊙ V₀ with v affine in h and V₀ (K, R) free: D·K + K·R parameters instead of D·K·R.

    Members have their own v and share V₀.
    """

    def _make_factor(self, num_features: int, num_classes: int, generator: torch.Generator | None) -> None:
        self.row = overwritten_linear(num_features, self.members * num_classes, generator)
        self.basis = nn.Parameter(
            torch.randn(num_classes, self.rank, generator=generator) / math.sqrt(self.rank)
        )

    def _factor(self, z: Tensor) -> AnyFactor:
        row = member_rows(_affine(self.row, z), self.members)
        return functional.parameter_efficient_factor(row, self.basis.to(z))


class FeatureNoise(Noise):
    """Noise on the features Φ from which the logits are computed, as in HET-XL: u = βᵀ(φ + ε), so that u − f
    has the covariance βᵀΣ′(x)β. Σ′ = V′V′ᵀ + diag(d′²) with V′(x) = v(x)1ᵀ ⊙ V₀; v and d′ (m,) are affine in
    h: 2·D·m + m·R parameters, whatever the number of classes.

    In HET-XL the noise is on the pre-logits h, as here with a linear latent, but V′(x) is unrestricted, with
    D·m·R parameters. V′ and d′ are in units of the features' typical size.
    """

    def __init__(
        self,
        num_features: int,
        noisy_features: int,
        rank: int,
        *,
        unit: float | None = None,
        members: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        """``noisy_features``: m; ``unit``: their typical size, None: the running size of h."""
        super().__init__(num_features, rank, members)
        self.unit = unit
        self.diagonal = overwritten_linear(num_features, noisy_features, generator)
        self.row = overwritten_linear(num_features, noisy_features, generator)
        self.basis = nn.Parameter(torch.randn(noisy_features, rank, generator=generator) / math.sqrt(rank))
        self._start(generator)

    def forward(self, h: Tensor, latent: LinearLatent | RandomFeatureGP) -> tuple[Tensor, AnyFactor]:
        z, statistics = self._standardised(h)
        unit = statistics.mean_square.sqrt().to(z) if self.unit is None else self.unit
        std = unit * functional.diagonal_variance(_affine(self.diagonal, z)).sqrt()
        row = unit * _affine(self.row, z)
        readout = latent.readout.to(z).unflatten(1, (self.members, -1))
        factor = functional.feature_factor(readout, std, row, self.basis.to(z))
        return z.new_zeros(z.shape[0] * self.members, readout.shape[-1]), factor


def _affine(layer: nn.Linear, z: Tensor) -> Tensor:
    """Apply the layer in the precision of z: in a half-precision model the head still computes in float32."""
    return F.linear(z, layer.weight.to(z), layer.bias.to(z))


CLASS_NOISES: dict[str, type[LowRankNoise]] = {
    "low_rank": LowRankNoise,
    "parameter_efficient": ParameterEfficientNoise,
}
"""Kinds of noise whose number of parameters depends on the classes."""
