"""h → f: a linear layer, or a random-feature Gaussian process with a posterior.

With M members there are M functions of the same h: the logits of an input fill M rows, one after another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetsngp.functional import features
from hetsngp.nn.linear import seeded_linear
from hetsngp.nn.normalization import FeatureNormalizer
from hetsngp.nn.posteriors import POSTERIOR_TYPES
from hetsngp.types import LatentNormal

# Spread of the logits at initialisation: β starts as a narrow draw from the prior's shape.
INITIAL_LOGIT_STD = 0.5


@dataclass(frozen=True)
class Kernel:
    """The GP's prior: amplitude a (standard deviation of a logit), length scale ℓ, features, what it sees."""

    random_features: int = 1024
    amplitude: float = 10.0
    length_scale: float | None = None
    normalization: str = "rms"
    features: str = "sincos"
    orthogonal: bool = True


def member_rows(outputs: Tensor, members: int) -> Tensor:
    """(B, M·K) → (B·M, K)."""
    return outputs if members == 1 else outputs.reshape(outputs.shape[0] * members, -1)


class LinearLatent(nn.Module):
    """f = Wh + b, no doubt about it."""

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        *,
        members: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.members = members
        self.linear = seeded_linear(num_features, members * num_classes, generator)

    def forward(self, h: Tensor, *, posterior: bool) -> LatentNormal:
        """(B, D) → f: mean (B·M, K), zero variance."""
        bias = self.linear.bias.to(h)
        mean = member_rows(F.linear(h, self.linear.weight.to(h), bias), self.members)
        return LatentNormal(mean, torch.zeros_like(mean))

    @property
    def readout(self) -> Tensor:
        """What features are multiplied with to give logits: (D, M·K)."""
        return self.linear.weight.mT

    def familiarity(self, h: Tensor) -> Tensor:
        """(B, D) → (B,): a linear layer knows no distance, so everything is familiar."""
        return h.new_ones(h.shape[0])

    def prior_penalty(self) -> Tensor | None:
        """No prior: weight decay is the optimiser's business."""
        return None


class RandomFeatureGP(nn.Module):
    """f_c = φᵀβ_c, β_c ~ N(0, I), φ = a·Φ(z/ℓ) random features of the normalised h, Eq. (4).

    With ``length_scale`` None, ℓ is the running median distance of training features. Sine–cosine pairs by
    default: ‖φ‖ = a for every input, where the paper's cosines give the prior variance only on average.
    Members have a β each and share φ, and with it the posterior covariance: that of the curvature averaged
    over members, who are exchangeable.
    """

    frequencies: Tensor
    phases: Tensor

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        kernel: Kernel,
        *,
        posterior: str = "kronecker",
        link: str = "softmax",
        members: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.members = members
        m = kernel.random_features
        self.normalizer = FeatureNormalizer(num_features, kernel.normalization)
        draw = features.orthogonal_frequencies if kernel.orthogonal else features.gaussian_frequencies
        rows = m // 2 if kernel.features == "sincos" else m
        self.register_buffer("frequencies", draw(rows, self.normalizer.out_features, generator=generator))
        if kernel.features == "cosine":
            self.register_buffer("phases", 2 * math.pi * torch.rand(m, generator=generator))
        std = INITIAL_LOGIT_STD / kernel.amplitude
        self.beta = nn.Parameter(torch.randn(m, members * num_classes, generator=generator) * std)
        self.posterior = POSTERIOR_TYPES[posterior](num_classes, m, link)

    @property
    def length_scale(self) -> Tensor:
        """ℓ in the units of the normalised features (typical length √D)."""
        if self.kernel.length_scale is None:
            return self.normalizer.distance
        return torch.full_like(self.normalizer.distance, self.kernel.length_scale)

    def features(self, h: Tensor) -> Tensor:
        """φ: (B, D) → (B, m), ‖φ‖² the prior variance a²."""
        z = self.normalizer(h)
        z = z / self.length_scale.to(z)
        if self.kernel.features == "sincos":
            phi = features.sincos_features(z, self.frequencies.to(z))
        else:
            phi = features.cosine_features(z, self.frequencies.to(z), self.phases.to(z))
        return self.kernel.amplitude * phi

    def mean(self, phi: Tensor) -> Tensor:
        """û = φᵀβ̂: (B, m) → (B·M, K)."""
        return member_rows(phi @ self.beta.to(phi), self.members)

    @property
    def readout(self) -> Tensor:
        """What features are multiplied with to give logits: (m, M·K)."""
        return self.beta

    def forward(self, h: Tensor, *, posterior: bool) -> LatentNormal:
        """(B, D) → f of B·M rows; without ``posterior`` the variance is zero, as in training (MAP)."""
        phi = self.features(h)
        mean = self.mean(phi)
        if not posterior:
            return LatentNormal(mean, torch.zeros_like(mean))
        var, factor = self.posterior.covariance(phi)
        return LatentNormal(mean, var, factor).repeated(self.members)

    def familiarity(self, h: Tensor) -> Tensor:
        """(B, D) → (B,) in [0, 1]: how far the training inputs have narrowed the prior here."""
        return self.posterior.familiarity(self.features(h))

    def prior_penalty(self) -> Tensor:
        """−log p(β) up to a constant: ½‖β‖²."""
        return 0.5 * self.beta.square().sum()
