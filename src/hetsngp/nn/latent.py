"""h → f: a linear layer, or a random-feature Gaussian process with a posterior.

With M members there are M functions of the same h: the logits of an input fill M rows, one after another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetsngp.functional import features
from hetsngp.nn.inducing import LENGTH_RATIO, MOST_POINTS, InducingFeatures, RowMemory
from hetsngp.nn.linear import seeded_linear
from hetsngp.nn.normalization import FeatureNormalizer
from hetsngp.nn.posteriors import POSTERIOR_TYPES
from hetsngp.types import LatentNormal

# Numbers that may be kept of rows that come again: a gigabyte.
MOST_REMEMBERED = 2**28
# Rows at a time through the kernel: their distances to all inducing points are in memory.
KERNEL_ROWS = 1024
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
    ``features="inducing"``, for frozen backbones, are not random: :class:`InducingFeatures`.
    Members have a β each and share φ, and with it the posterior covariance: that of the curvature averaged
    over members, who are exchangeable.
    """

    frequencies: Tensor
    phases: Tensor
    memory: RowMemory | None = None

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
        width = self.normalizer.out_features
        self.inducing = InducingFeatures(width, m) if kernel.features == "inducing" else None
        if self.inducing is None:
            draw = features.orthogonal_frequencies if kernel.orthogonal else features.gaussian_frequencies
            rows = m // 2 if kernel.features == "sincos" else m
            self.register_buffer("frequencies", draw(rows, width, generator=generator))
        if kernel.features == "cosine":
            self.register_buffer("phases", 2 * math.pi * torch.rand(m, generator=generator))
        std = INITIAL_LOGIT_STD / kernel.amplitude
        self.beta = nn.Parameter(torch.randn(m, members * num_classes, generator=generator) * std)
        self.posterior = POSTERIOR_TYPES[posterior](num_classes, m, link)

    @property
    def length_scale(self) -> Tensor:
        """ℓ in the units of the normalised features (typical length √D)."""
        if self.inducing is not None:
            return self.inducing.length_scale
        if self.kernel.length_scale is None:
            return self.normalizer.distance
        return torch.full_like(self.normalizer.distance, self.kernel.length_scale)

    @torch.no_grad()
    def adapt(self, h: Tensor, also: Sequence[Tensor] = (), generator: torch.Generator | None = None) -> None:
        """Make inducing features from training features h (n, D); random ones need nothing of the kind.

        Those of h and of ``also`` are kept until :meth:`forget_rows`.
        """
        if self.inducing is None:
            return
        mixed = h[torch.randperm(len(h), generator=generator).to(h.device)]
        self.normalizer.settle(mixed)
        z = self.normalizer.normalized(mixed[:MOST_POINTS])
        given = self.kernel.length_scale
        self.inducing.adapt(z, LENGTH_RATIO * self.normalizer.distance if given is None else given)
        self.memory = None
        rows = torch.cat([h, *also])
        if len(rows) * self.kernel.random_features <= MOST_REMEMBERED:
            phi = torch.cat([self.features(part) for part in rows.split(KERNEL_ROWS)])
            self.memory = RowMemory(rows, phi)

    def forget_rows(self) -> None:
        """Let go of what :meth:`adapt` kept."""
        self.memory = None

    def features(self, h: Tensor) -> Tensor:
        """φ: (B, D) → (B, m), ‖φ‖² the prior variance a²; of inducing features :meth:`whole` adds a part."""
        if self.inducing is not None:
            known = None if self.memory is None else self.memory.find(h)
            if known is not None:
                return known
            return self.kernel.amplitude * self.inducing(self.normalizer.normalized(h))
        z = self.normalizer(h)
        z = z / self.length_scale.to(z)
        if self.kernel.features == "sincos":
            phi = features.sincos_features(z, self.frequencies.to(z))
        else:
            phi = features.cosine_features(z, self.frequencies.to(z), self.phases.to(z))
        return self.kernel.amplitude * phi

    def whole(self, phi: Tensor) -> Tensor:
        """φ with ‖φ‖² = a², for variances."""
        return phi if self.inducing is None else self.inducing.with_rest(phi, self.kernel.amplitude)

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
        var, factor = self.posterior.covariance(self.whole(phi))
        return LatentNormal(mean, var, factor).repeated(self.members)

    def familiarity(self, h: Tensor) -> Tensor:
        """(B, D) → (B,) in [0, 1]: how far the training inputs have narrowed the prior here."""
        return self.posterior.familiarity(self.whole(self.features(h)))

    def prior_penalty(self) -> Tensor:
        """−log p(β) up to a constant: ½‖β‖²."""
        return 0.5 * self.beta.square().sum()
