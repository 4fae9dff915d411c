"""A control variate for mild noise: the second-order Taylor expansion of the softmax, whose mean is known.

Around p = softmax(mean), with δ = u − mean, c = δ − Σ p δ and v = Σ p c²:
softmax(u) ≈ p + p·(c + ½(c² − v)). Sampling only what this leaves out takes about 6 times fewer points at 100
and 1,000 classes while the noise is mild (benchmarks/points.py); for wide noise the expansion is useless, and
the caller leaves it aside.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hetsngp.types import UtilityNormal

# Largest variance of a logit for which the expansion pays.
MILD_VARIANCE = 1.5


@dataclass(frozen=True)
class TaylorControl:
    """``probs``: softmax at the mean (B, K). ``expectation``: of the expansion's deviation from it (B, K)."""

    probs: Tensor
    expectation: Tensor

    @staticmethod
    def of(utility: UtilityNormal) -> TaylorControl:
        """E c_k² = Σ_kk − 2(Σp)_k + pᵀΣp for the covariance Σ; O(B·K·R), Σ is not written out.

        >>> u = UtilityNormal(torch.zeros(1, 2), torch.tensor([[1.0, 3.0]]))
        >>> TaylorControl.of(u).expectation     # by symmetry
        tensor([[0., 0.]])
        """
        p = torch.softmax(utility.mean, -1)
        product = utility.var * p
        form = utility.form
        if form is not None:
            product = product + form.matmul(form.project(p).unsqueeze(-2)).squeeze(-2)
        second = utility.marginal_variance() - 2 * product + (p * product).sum(-1, keepdim=True)
        return TaylorControl(p, 0.5 * p * (second - (p * second).sum(-1, keepdim=True)))

    def rows(self, index: slice) -> TaylorControl:
        """The expansions of some rows of the batch."""
        return TaylorControl(self.probs[index], self.expectation[index])

    def deviation(self, delta: Tensor) -> Tensor:
        """p·(c + ½(c² − v)) at δ (B, n, K), less its expectation: mean zero, sum over classes zero."""
        p = self.probs.unsqueeze(-2)
        centred = delta - (p * delta).sum(-1, keepdim=True)
        square = centred.square()
        spread = (p * square).sum(-1, keepdim=True)
        return p * (centred + 0.5 * (square - spread)) - self.expectation.unsqueeze(-2)
