"""A density of the latent code for each class: radial flows, as a module."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hetsngp.functional import flows as functional
from hetsngp.nn.precision import KeepsPrecision

# softplus of this is one: a layer acts at about one standard deviation around its centre.
UNIT_ALPHA = math.log(math.e - 1)
# β′ starts so near to α′: almost the identity. At the identity itself the centres have no gradient.
INITIAL_STD = 0.01


class ClassFlows(KeepsPrecision):
    """q(z | c): F radial layers for each of K classes on a latent of L dimensions, near N(0, I) at first.

    Every class has its own random centres, so that classes part as soon as they are trained.

    >>> flows = ClassFlows(num_classes=3, latent_dim=2, layers=4)
    >>> flows(torch.zeros(5, 2)).shape
    torch.Size([5, 3])
    """

    def __init__(
        self, num_classes: int, latent_dim: int, layers: int, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(layers, num_classes, latent_dim, generator=generator))
        self.raw_alphas = nn.Parameter(torch.full((layers, num_classes), UNIT_ALPHA))
        noise = INITIAL_STD * torch.randn(layers, num_classes, generator=generator)
        self.raw_betas = nn.Parameter(UNIT_ALPHA + noise)

    def forward(self, z: Tensor) -> Tensor:
        """log q(z | c): (B, L) → (B, K)."""
        return functional.log_density(z, self.centres.to(z), self.raw_alphas.to(z), self.raw_betas.to(z))
