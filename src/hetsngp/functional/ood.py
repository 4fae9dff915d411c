"""OOD scores: the relative Mahalanobis distance of features, and tail probabilities of held-out values.

Let z have class means μ_c, one covariance Σ_w within classes and the covariance Σ_t = Σ_w + Σ_b of all
examples. The relative Mahalanobis distance (Ren et al. 2021) is

    min_c (z − μ_c)ᵀΣ_w⁻¹(z − μ_c) − (z − μ)ᵀΣ_t⁻¹(z − μ),

twice the log ratio of the density of all examples to that of the nearest class. With Vᵀ Σ_w V = I and
Vᵀ Σ_b V = diag(λ) every direction with λ = 0 cancels, so that at most K − 1 discriminants v = Vᵀ(z − μ) are
needed: min_c ‖v − m_c‖² − Σ_i v_i²/(1 + λ_i), m_c = Vᵀ(μ_c − μ).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Directions with a smaller share of the largest λ do not separate classes beyond rounding.
SMALLEST_SHARE = 1e-9
# Share of the values that the exponential tail is fitted to.
TAIL = 0.1
# Fewest values of the tail, and between two levels of the table below it.
FEWEST = 5
# Most levels of the table.
LEVELS = 64
# Narrowest piece of a table, relative to the width of its upper half, and as a multiple of the error of the
# values: a steeper one multiplies errors and rounding.
NARROWEST = 1e-3
ERRORS = 3


class ClassSums(NamedTuple):
    """Sums over labelled features z (n, D), in float64."""

    sums: Tensor
    """(K, 1 + D): for each class the number of examples (or their weight), and the sum of z."""
    squares: Tensor
    """(D, D): Σ zzᵀ."""

    @staticmethod
    def of(z: Tensor, targets: Tensor, num_classes: int, weight: Tensor | None = None) -> ClassSums:
        """Sums of a batch; targets: class indices (B,), or the shares of the classes (B, K)."""
        weight = z.new_ones(len(z)) if weight is None else weight.to(z)
        rows = weight.unsqueeze(1) * torch.cat([torch.ones_like(z[:, :1]), z], dim=1)
        if targets.dim() == 2:
            return ClassSums(targets.to(z).mT @ rows, rows[:, 1:].mT @ z)
        sums = z.new_zeros(num_classes, rows.shape[1]).index_add_(0, targets, rows)
        return ClassSums(sums, rows[:, 1:].mT @ z)


class Discriminants(NamedTuple):
    """What the relative Mahalanobis distance is computed from, for r ≤ min(K − 1, D) discriminants."""

    center: Tensor
    """μ: (D,)."""
    projection: Tensor
    """V: (D, r)."""
    class_means: Tensor
    """m_c of every class that has examples: (K', r)."""
    precisions: Tensor
    """1/(1 + λ), of the discriminants of all examples: (r,)."""


def discriminants(total: ClassSums) -> Discriminants:
    """Linear discriminants of classes that share one covariance, from sums over the training examples."""
    sums, squares = total
    counts = sums[:, 0]
    known = counts > 0
    counts, sums = counts[known], sums[known, 1:]
    number = counts.sum()
    center = sums.sum(0) / number
    means = sums / counts.unsqueeze(1) - center
    between = (means.mT * (counts / number)) @ means
    within = squares / number - torch.outer(center, center) - between
    # The error of a covariance is of the order of D/n of its mean variance, and all of it where n < D.
    ridge = (len(center) / number).clamp_max(1.0) * within.diagonal().mean().clamp_min(0)
    within.diagonal().add_(ridge + 1e-9 * between.diagonal().mean())
    if not bool(within.diagonal().mean() > 0):  # one point, many times
        within = torch.eye(len(center)).to(within)
    values, vectors = torch.linalg.eigh(within)
    whitener = vectors / values.clamp_min(values[-1] * torch.finfo(values.dtype).eps).sqrt()
    white = (counts / number).sqrt().unsqueeze(1) * (means @ whitener)
    _, roots, directions = torch.linalg.svd(white, full_matrices=False)
    lambdas = roots.square()
    kept = lambdas > SMALLEST_SHARE * lambdas.amax().clamp_min(torch.finfo(lambdas.dtype).tiny)
    projection = whitener @ directions[kept].mT
    return Discriminants(center, projection, means @ projection, 1 / (1 + lambdas[kept]))


def relative_mahalanobis(z: Tensor, found: Discriminants) -> Tensor:
    """Relative Mahalanobis distance of z: (B, D) → (B,), O(B·r·(D + K)).

    >>> z, y = torch.tensor([[0.0], [1.0], [4.0], [5.0]]).double(), torch.tensor([0, 0, 1, 1])
    >>> found = discriminants(ClassSums.of(z, y, 2))
    >>> near, between, far = relative_mahalanobis(torch.tensor([[0.5], [2.5], [20.0]]).double(), found)
    >>> bool(near < between < far)
    True
    """
    v = (z - found.center) @ found.projection
    # ‖v − m_c‖² − ‖v‖² finds the nearest class. The distance itself would lose its digits in that difference.
    nearest = torch.addmm(found.class_means.square().sum(1), v, found.class_means.mT, alpha=-2).argmin(1)
    return (v - found.class_means[nearest]).square().sum(1) - (v.square() * found.precisions).sum(1)


class TailTable(NamedTuple):
    """Piecewise linear functions s ↦ −log P(S ≥ s), one for each of several scores; flat below the first knot
    and exponential, that is linear, beyond the last.
    """

    knots: Tensor
    """(S, L), ascending in each row."""
    slopes: Tensor
    """(S, L) of the pieces that begin at the knots."""


def tail_table(
    values: Tensor, weight: Tensor | None = None, *, errors: Sequence[float] | None = None
) -> TailTable:
    """Table of −log P(S ≥ s) from values (n, S) of held-out in-distribution examples; weight: (n,);
    ``errors``: of each score, relative to its values or to one, whichever is larger (1e-6).

    Shares of examples up to the highest tenth, and an exponential tail with the median excess of those: one
    example that is far from all others must not flatten it. On the CPU, in float64.
    """
    values = values.cpu().double().mT.contiguous()
    weight = torch.ones_like(values[0]) if weight is None else weight.to(values)
    count = values.shape[1]
    tail = min(max(TAIL, FEWEST / count), 0.5)
    number = min(LEVELS, max(2, count // FEWEST))
    levels = torch.linspace(0, 1 - tail, number, dtype=values.dtype)
    heights = -torch.log1p(-levels)
    knots, slopes = [], []
    for each, error in zip(values, [1e-6] * len(values) if errors is None else errors, strict=True):
        ordered, order = each.sort()
        below = weight[order].cumsum(0) - weight[order]  # of examples that are smaller
        rows = torch.searchsorted(below / weight.sum(), levels, right=True).sub_(1).clamp_(0, count - 1)
        knot = ordered[rows]
        beyond = ordered >= knot[-1]
        passed = weight[order][beyond].cumsum(0)
        median = ordered[beyond][int(torch.searchsorted(passed, passed[-1] / 2))]
        half = knot[-1] - knot[number // 2]
        narrowest = NARROWEST * half + ERRORS * error * knot[-1].abs().clamp_min(1.0)
        tail_slope = math.log(2) / (median - knot[-1]).maximum(narrowest)
        knot = torch.cat([knot, knot[-1:] + narrowest])
        width, rise = knot.diff(), heights.diff().tolist()
        # A step, of nearly equal values, is climbed by the next piece that is wide enough, or at the tail.
        slope = tail_slope.expand_as(knot).clone()
        carried = 0.0
        for j, height in enumerate(rise):
            carried += height
            wide = float(width[j]) > float(narrowest)
            slope[j], carried = (carried / width[j], 0.0) if wide else (0.0, carried)
        if carried:
            slope[-2] = carried / narrowest
        knots.append(knot)
        slopes.append(slope)
    return TailTable(torch.stack(knots), torch.stack(slopes))


def tail_score(values: Tensor, table: TailTable) -> Tensor:
    """Σ −log P(S ≥ s) over the scores, Fisher's combination of tail probabilities: (B, S) → (B,).

    About −log 0.05 = 3 from one score alone at the highest twentieth of the held-out examples; without end
    further away.

    >>> table = tail_table(torch.arange(1000.0).unsqueeze(1))
    >>> [round(float(tail_score(torch.tensor([[s]]), table)), 1) for s in (-5.0, 500.0, 950.0, 2000.0)]
    [0.0, 0.7, 3.0, 17.9]
    """
    knots, slopes = table
    ends = torch.cat([knots[:, 1:], torch.full_like(knots[:, :1], math.inf)], dim=1)
    pieces = values.unsqueeze(-1).clamp(knots, ends) - knots
    return (slopes * pieces).sum((-2, -1))
