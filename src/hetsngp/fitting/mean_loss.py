"""MAP estimate of the GP's weights β without label noise: convex, with a gradient in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetsngp.models.classifier import Classifier
from hetsngp.nn.heads import GaussianHead
from hetsngp.nn.latent import PrecomputedGP, RandomFeatureGP

Batch = tuple[Tensor, ...]
"""x (n, D), y (n,) or (n, K), weight (n,)."""

# Typical curvature of −log p(y) in a logit: 0.09 for ten equally likely classes, 0 for a certain label. Of K
# classes, more than ten, it is less by (10/K)²: most of them are certainly not the label.
CURVATURE = 0.03
# Fewest features × classes where the first rounds are of the largest features alone; their share; and the
# gain of a round, in nats per example, after which all take part.
COARSE_WEIGHTS, COARSE_SHARE, COARSE_GAIN = 2**16, 0.125, 1e-3

Descent = Callable[[list[nn.Parameter], Callable[[], Tensor], float], Iterator[float]]


class MeanLoss:
    """Loss of a model without its noise, as a function of β: mean of w·(−log softmax(φᵀβ/τ)_y) + ½‖β‖²/N."""

    def __init__(self, model: Classifier, batches: Sequence[Batch]) -> None:
        head = model.head
        assert isinstance(head, GaussianHead)
        assert isinstance(head.latent, RandomFeatureGP)
        self.beta, self.temperature = head.latent.beta, float(head.training_temperature)
        with torch.no_grad():
            self.batches = [(head.latent.features(x), y, weight.to(x)) for x, y, weight in batches]
            self.squares = torch.stack([w @ phi.square() for phi, _, w in self.batches]).sum(0)
        self.count = sum(len(y) for _, y, _ in batches)
        self.prior = 0.0 if model.dataset_size is None else 1 / model.dataset_size

    @staticmethod
    def serves(model: Classifier) -> bool:
        """Whether the loss of the model's mean is this one, of features that stay the same."""
        head = model.head
        if not isinstance(head, GaussianHead) or not isinstance(head.latent, RandomFeatureGP):
            return False
        fixed = isinstance(head.latent, PrecomputedGP) or head.latent.inducing is not None
        return fixed and not head.sigmoid and not head.sample_beta and head.num_members == 1

    def minimize(self, descend: Descent, enough: float) -> Iterator[float]:
        """Set β; yield the loss after each round in all of its coordinates."""
        largest = self.squares.argsort(descending=True, stable=True)
        start = self.beta.detach().clone()
        if self.beta.numel() > COARSE_WEIGHTS:
            rows = largest[: math.ceil(COARSE_SHARE * len(largest))].sort().values
            coarse = [(phi[:, rows], y, weight) for phi, y, weight in self.batches]
            variable, evaluate, size = self._problem(coarse, start[rows], self.squares[rows])
            for _ in descend([variable], evaluate, COARSE_GAIN):
                pass
            start[rows] = variable.detach() * size
        variable, evaluate, size = self._problem(self.batches, start, self.squares)
        for loss in descend([variable], evaluate, enough):
            with torch.no_grad():
                self.beta.copy_(variable * size)
            yield loss

    def _problem(
        self, batches: Sequence[tuple[Tensor, Tensor, Tensor]], start: Tensor, squares: Tensor
    ) -> tuple[nn.Parameter, Callable[[], Tensor], Tensor]:
        """β in units of 1/√(expected curvature), a function for loss and gradient, and the units."""
        size = mean_units(squares, self.beta.shape[1])
        variable = nn.Parameter(start / size)

        @torch.no_grad()
        def evaluate() -> Tensor:
            beta = variable * size
            value, gradient = 0.5 * self.prior * beta.square().sum(), self.prior * beta
            for phi, y, weight in batches:
                log_p = torch.log_softmax(phi @ beta / self.temperature, 1)
                target = y.to(log_p) if y.dim() == 2 else F.one_hot(y, log_p.shape[1])
                share = weight / self.count
                if y.dim() == 2:
                    value = value - share @ (target * log_p).sum(1)
                else:
                    value = value - share @ log_p.gather(1, y.unsqueeze(1)).squeeze(1)
                residual = log_p.exp_().sub_(target).mul_((share / self.temperature).unsqueeze(1))
                gradient.addmm_(phi.mT, residual)
            variable.grad = gradient.mul_(size)
            return value

        return variable, evaluate, size


def mean_curvature(classes: int) -> float:
    """Typical curvature of −log p(y) in a logit."""
    return CURVATURE * min(1.0, 10 / classes) ** 2


def mean_units(squares: Tensor, classes: int) -> Tensor:
    """1/√(expected curvature) of β, from the sums of squares of its features (m,): (m, 1).

    The features of a GP are principal components, hardly correlated and of very different sizes.
    """
    return (1 + mean_curvature(classes) * squares).rsqrt().unsqueeze(1)
