"""Log-probabilities under a Gaussian over logits, with their gradients, the diagonal integrated.

u = μ_s + σ ⊙ ε at means μ_s (B, K, S), one for each point of the factor's coordinates. The integral over the
diagonal is that of :mod:`hetsngp.functional.integration`, p_k = E[r_k/r] over t. Its derivatives are taken
before the nodes are placed, under the integral of r_k e^{−Λ} dt: −r_j r_k e^{−Λ} in μ_j, and in σ_j², by the
heat equation, half of the second derivative in μ_j. Losses compute their gradient in the pass that computes
their value; all log-probabilities compute the hazards again instead of storing them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hetsngp.functional.integration import (
    COARSE,
    COARSE_DEGREE,
    DEGREE,
    EULER,
    FINE,
    MANY_CLASSES,
    ROUGH,
    Curves,
    Grid,
    Memory,
    Rates,
    chunk_of_rows,
    horner,
    within_table,
)

# E log Z is a mean of t, and needs the ends of its range more than a mean of probabilities does.
_WIDE = Grid(10, -9.0, 2.2, 2, 1.2)
# Mean variance of a logit under F at which the path has half of the weight in the gradient of a label.
_WIDE_SPREAD = 2.0
# Part of the gradient of log p(y) by which the points of a label's loss are moved, about that of Laplace's
# method, and the longest move.
TOWARDS, LONGEST = 0.6, 1.25


class Diagonal(NamedTuple):
    """What the integral needs of a batch of variances; it carries no gradient."""

    curves: Curves
    shrink: Tensor
    """(B, 1): rows beyond the table are divided by it, mean and all."""

    @staticmethod
    @torch.no_grad()
    def of(var: Tensor, points: int) -> Diagonal:
        """For variances (B, K) and so many points of each row."""
        _, std, shrink = within_table(var, var)
        return Diagonal(Curves.of(std, DEGREE if points == 1 else COARSE_DEGREE, residual=False), shrink)

    def parts(self, means: Tensor, grid: Grid) -> Iterator[tuple[slice, Tensor, Curves, Tensor]]:
        """Rows that are computed together, their means (b, K, S), curves, and factor (b, 1)."""
        batch, classes, points = means.shape
        size = chunk_of_rows(means, points * grid.nodes * classes)
        for start in range(0, batch, size):
            rows = slice(start, start + size)
            own = means[rows] / self.shrink[rows].unsqueeze(-1)
            yield rows, own, self.curves.rows(rows), self.shrink[rows]


def _grid(points: int, several: Grid) -> Grid:
    """Nodes for each of so many points: errors at several points average."""
    return FINE if points == 1 else several


# --- one label -------------------------------------------------------------------------------------------


LabelLoss = Callable[
    [Tensor, Tensor, Tensor | None, Tensor, Tensor | None, bool], tuple[Tensor, tuple[Tensor | None, ...]]
]
"""Type of :func:`label_loss`."""


@torch.no_grad()
def label_loss(
    mean: Tensor, var: Tensor, factor: Tensor | None, y: Tensor, eps: Tensor | None, gradients: bool
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Mean, var (B, K), F (B, K, R), labels y (B,), points ε of a standard normal (S, R) or (B, S, R)
    → −log E softmax(mean + Fε + σ ⊙ ε′)_y: (B,), and its gradients in mean, var and F; none of them without
    ``gradients``. Without noise in a factor F, ε and the last gradient are None.

    The gradient in F is along the path where the noise of F is wide, E[g εᵀ] with the gradient g of log p in
    the mean, and where it is mild by Price's theorem, E[H] F with the Hessian H of p over p: that has far
    less variance there, and with few points a bias that would widen a wide F further.
    """
    d_mean, d_var, d_factor = torch.empty_like(mean), torch.empty_like(var), None
    if factor is None or eps is None:
        means, log_weight = mean.unsqueeze(-1), torch.zeros_like(mean[:, :1])
    else:
        eps, log_weight = _towards_label(mean, var, factor, y, eps)
        means, d_factor = (mean.unsqueeze(1) + eps @ factor.mT).mT, torch.empty_like(factor)
    points = means.shape[2]
    diagonal = Diagonal.of(var, points)
    grid = _grid(points, COARSE if means.shape[1] < MANY_CLASSES else ROUGH)
    nll, derivatives = torch.empty_like(mean[:, 0]), 2 if gradients else 1
    memory = Memory.of(means)
    for rows, own, curves, shrink in diagonal.parts(means, grid):
        rates = Rates.of(own, curves, grid, derivatives, memory)
        label = _label_hazard(rates, curves, y[rows], derivatives)
        nll[rows], weight = _of_label(rates, label, log_weight[rows])
        if not gradients:
            continue
        by_mean, by_var, residual = _label_gradient(rates, label, y[rows], weight)
        d_mean[rows], d_var[rows] = by_mean.sum(-1) / shrink, by_var / shrink.square()
        if factor is not None and eps is not None and d_factor is not None:
            found = by_mean, by_var, residual
            _by_factor(found, weight, factor[rows], eps[rows], shrink, d_factor[rows])
    return nll, (d_mean, d_var, d_factor) if gradients else ()


class WithGradients(torch.autograd.Function):
    """Values (B,), inputs mean, var (B, K) and F (B, K, R) or None, and the gradients of the values in these
    inputs → the values, with these gradients.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, *inputs_and_gradients: Tensor | None) -> Tensor:
        ctx.save_for_backward(*inputs_and_gradients[3:])
        return values.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_mean, d_var, d_factor = ctx.saved_tensors
        by_factor = None if d_factor is None else grad[:, None, None] * d_factor
        return None, grad[:, None] * d_mean, grad[:, None] * d_var, by_factor, None, None, None


def _towards_label(
    mean: Tensor, var: Tensor, factor: Tensor, y: Tensor, eps: Tensor
) -> tuple[Tensor, Tensor]:
    """Points moved to where the label is probable: (B, S, R), and the logarithms of their weights: (B, S).

    The expectation is the same for every move; its error is least for that of Laplace's method. A probit
    approximation of the gradient is near enough.
    """
    flat = torch.softmax(mean / (1 + math.pi / 8 * var).sqrt(), -1)
    rise = F.one_hot(y, flat.shape[-1]) - flat
    move = TOWARDS * (rise.unsqueeze(1) @ factor)
    # A long move would leave all weight to one point.
    move = move * (LONGEST / move.norm(dim=-1, keepdim=True).clamp_min(LONGEST))
    log_weight = -(eps * move).sum(-1) - 0.5 * move.square().sum(-1) - math.log(eps.shape[-2])
    return eps + move, log_weight


def _of_label(rates: Rates, label: list[Tensor], log_weight: Tensor) -> tuple[Tensor, Tensor]:
    """−log p̄(y), and the weight of each node in its derivatives: (B,), (B, S, T)."""
    value, slope, *_ = label
    terms = value + (slope / rates.total * rates.weight).log() + log_weight.unsqueeze(-1)
    nll = -terms.flatten(1).logsumexp(1)
    return nll, torch.exp(terms + nll[:, None, None])


def _label_gradient(
    rates: Rates, hazard: list[Tensor], y: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of −log p̄(y) in the means (B, K, S) and variances (B, K), and that of −log(r_y e^{−Λ}) in the
    means at the nodes (B, K, S, T). Overwrites ``rates``.

    A common shift of the means changes nothing, so the label's derivatives are minus the sums of the others':
    of second order, −∫ r₋ (r_y² − r_y′) e^{−Λ} dt with the rate r₋ of all others. Nothing is left where the
    label is certain, whatever the error of the nodes.
    """
    value, slope, bend = hazard
    _, slopes, bends = rates.log_hazard
    rise = bends.div_(slopes).add_(slopes).sub_(rates.rate).mul_(rates.rate)  # r′ − r²
    by_var = 0.5 * _weighted(rise, weight)
    rate = value.exp() * slope
    others = (rates.total - rate).clamp_min(0)
    first = slope + bend / slope - rate  # r_y′/r_y − r_y
    own = (weight * others * first).sum((1, 2))
    by_var.scatter_(1, y.unsqueeze(1), -0.5 * own.unsqueeze(1))
    label = y[:, None, None, None].expand(-1, 1, *weight.shape[1:])
    residual = rates.rate.scatter_(1, label, -first.unsqueeze(1))
    if residual.shape[1] < MANY_CLASSES:
        by_mean = (residual * weight.unsqueeze(1)).sum(-1)  # (B, K, S)
    else:
        by_mean = (residual.movedim(1, 3).mT @ weight.unsqueeze(-1)).squeeze(-1).movedim(1, 2).contiguous()
    return by_mean.scatter_add_(1, label[..., 0], -by_mean.sum(1, keepdim=True)), by_var, residual


def _by_factor(
    gradients: tuple[Tensor, Tensor, Tensor],
    weight: Tensor,
    factor: Tensor,
    eps: Tensor,
    shrink: Tensor,
    out: Tensor,
) -> None:
    """Gradient of −log p̄(y) in F from those of :func:`_label_gradient`, the last of which it overwrites, into
    ``out`` (B, K, R).

    At a node H is the outer product of the residual with itself but for its diagonal, whose mean is −2 times
    the gradient in the variances.
    """
    by_mean, by_var, residual = gradients
    spread = factor.square().sum((1, 2)).div(len(factor[0])).view(-1, 1, 1)
    along = spread.square() / (spread.square() + _WIDE_SPREAD**2)
    price = (1 - along) / shrink.square().unsqueeze(-1)
    path = along / shrink.unsqueeze(-1) * eps
    if residual.shape[1] < MANY_CLASSES:
        outer = (residual * weight.unsqueeze(1)).flatten(2) @ residual.flatten(2).mT  # (B, K, K)
        torch.sub(by_mean @ path, price * (outer @ factor), out=out)
    else:
        nodes = residual.movedim(1, 3).flatten(1, 2)  # (B, S·T, K)
        points = path.repeat_interleave(weight.shape[2], 1)
        torch.bmm(nodes.mT, weight.flatten(1).unsqueeze(-1) * (points - price * (nodes @ factor)), out=out)
    diagonal = _weighted(residual.square_(), weight) + 2 * by_var
    out.addcmul_(factor, price * diagonal.unsqueeze(-1))


def _weighted(values: Tensor, weight: Tensor) -> Tensor:
    """Σ over points and nodes: (B, K, S, T), (B, S, T) → (B, K)."""
    if values.stride(1) == 1:
        return (weight.flatten(1).unsqueeze(1) @ values.movedim(1, -1).flatten(1, 2)).squeeze(1)
    return (values.flatten(2) @ weight.flatten(1).unsqueeze(-1)).squeeze(-1)


def _label_hazard(rates: Rates, curves: Curves, y: Tensor, derivatives: int) -> list[Tensor]:
    """log Λ of the label's class and its derivatives: (B, S, T) each. Beyond the table it is straight."""
    row = torch.arange(len(y), device=y.device)
    centre, scale = curves.centre[row, y], curves.scale[row, y]  # (B, 1, 1)
    at = (rates.location[row, y].unsqueeze(-1) + rates.time - centre) * scale
    inside = at.clamp(-1, 1)
    value, *slopes = horner(curves.hazard[:, row, y], inside, derivatives)
    outside = at - inside
    value = torch.addcmul(value, slopes[0], outside)
    bends = [torch.where(outside == 0, part, 0) for part in slopes[1:]]
    units = (math.factorial(order) * scale**order for order in range(1, derivatives + 1))
    return [value, *(part * unit for part, unit in zip([slopes[0], *bends], units, strict=True))]


def _ratio(log_hazard: list[Tensor]) -> tuple[Tensor, Tensor]:
    """r′/r and, with three derivatives of g = log Λ, r″/r: r = Λg′."""
    _, slope, bend, *third = log_hazard
    first = slope + bend / slope
    return first, (slope.square() + 3 * bend + third[0] / slope if third else first)


# --- all classes -----------------------------------------------------------------------------------------


class SoftNLL(torch.autograd.Function):
    """Means (B, K, S), var (B, K), targets (B, K) → −Σ_k target_k log mean_s E softmax(u)_k: (B,)."""

    @staticmethod
    def forward(ctx: Any, means: Tensor, var: Tensor, targets: Tensor, diagonal: Diagonal) -> Tensor:
        grid = _grid(means.shape[2], COARSE)
        log_probs = torch.empty_like(var)
        d_means, d_var = torch.empty_like(means), torch.empty_like(var)
        for rows, own, curves, shrink in diagonal.parts(means, grid):
            rates = Rates.of(own, curves, grid, 3)
            log_probs[rows] = _log_probs(rates)
            grads = _gradients(rates, log_probs[rows], -targets[rows])
            d_means[rows], d_var[rows] = grads[0] / shrink.unsqueeze(-1), grads[1] / shrink.square()
        ctx.save_for_backward(d_means, d_var, log_probs)
        return -(targets * log_probs).sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_means, d_var, log_probs = ctx.saved_tensors
        by_target = -grad[:, None] * log_probs if ctx.needs_input_grad[2] else None
        return grad[:, None, None] * d_means, grad[:, None] * d_var, by_target, None


class LogProbs(torch.autograd.Function):
    """Means (B, K, S), var (B, K) → log mean_s E softmax(u): (B, K)."""

    @staticmethod
    def forward(ctx: Any, means: Tensor, var: Tensor, diagonal: Diagonal) -> Tensor:
        grid = _grid(means.shape[2], COARSE)
        out = torch.empty_like(var)
        for rows, own, curves, _ in diagonal.parts(means, grid):
            out[rows] = _log_probs(Rates.of(own, curves, grid))
        ctx.save_for_backward(means, out)
        ctx.diagonal = diagonal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        means, out = ctx.saved_tensors
        grid = _grid(means.shape[2], COARSE)
        d_means, d_var = torch.empty_like(means), torch.empty_like(out)
        for rows, own, curves, shrink in ctx.diagonal.parts(means, grid):
            grads = _gradients(Rates.of(own, curves, grid, 3), out[rows], grad[rows])
            d_means[rows], d_var[rows] = grads[0] / shrink.unsqueeze(-1), grads[1] / shrink.square()
        return d_means, d_var, None


def _log_probs(rates: Rates) -> Tensor:
    """log of the mean over points of E softmax(u): (B, K)."""
    return _log_terms(rates).flatten(2).logsumexp(2) - math.log(rates.time.shape[1])


def _log_terms(rates: Rates) -> Tensor:
    """log of weight · r_k/r: (B, K, S, T)."""
    value, slope = rates.log_hazard[:2]
    return value + slope.log() + (rates.weight.log() - rates.total.log()).unsqueeze(1)


def _gradients(rates: Rates, log_probs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients in the means (B, K, S) and variances (B, K) from that in the log-probabilities (B, K)."""
    log_sum = log_probs + math.log(rates.time.shape[1])
    weight = grad[..., None, None] * torch.exp(_log_terms(rates) - log_sum[..., None, None])  # (B, K, S, T)
    first, second = _ratio(rates.log_hazard)
    rate, total = rates.rate, weight.sum(1, keepdim=True)
    by_mean = (weight * first - rate * total).sum(3)
    by_others = rate * (rate - first) * (total - weight)
    by_own = weight * (second - 3 * rate * first + rate.square())
    return by_mean, 0.5 * (by_others + by_own).sum((2, 3))


class LogNormalizer(torch.autograd.Function):
    """Means (B, K, S), var (B, K) → mean_s E log Σ exp(u): (B,).

    Its gradient in μ is E p, and in σ², by the heat equation, ½ E[p − p²].
    """

    @staticmethod
    def forward(ctx: Any, means: Tensor, var: Tensor, diagonal: Diagonal) -> Tensor:
        points = means.shape[2]
        grid = _grid(points, _WIDE)
        out = torch.empty_like(means[:, 0, 0])
        d_means, d_var = torch.empty_like(means), torch.empty_like(var)
        for rows, own, curves, shrink in diagonal.parts(means, grid):
            rates = Rates.of(own, curves, grid, 2)
            out[rows] = shrink.squeeze(-1) * (-(rates.weight * rates.time).sum(-1).mean(1) - EULER)
            d_means[rows] = (rates.rate * (rates.weight / rates.total).unsqueeze(1)).sum(-1) / points
            rise = rates.rate * (_ratio(rates.log_hazard)[0] - rates.rate)
            d_var[rows] = 0.5 * rates.mean(rise) / shrink
        ctx.save_for_backward(d_means, d_var)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_means, d_var = ctx.saved_tensors
        return grad[:, None, None] * d_means, grad[:, None] * d_var, None
