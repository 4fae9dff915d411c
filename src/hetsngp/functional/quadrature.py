"""Expectations of the logistic function under a normal, to rounding error, by two trapezoid rules.

For x ~ N(m, s²) there are two ways to write E σ(x) as an integral of an analytic function over the line,
and the trapezoid rule converges exponentially on both (Trefethen & Weideman 2014):

- narrow, s ≤ 1.5:  ∫ σ(m + s z) φ(z) dz. The poles of σ lie at distance π/s.
- wide,   s > 1.5:  ∫ σ′(l) Φ((m − l)/s) dl, since σ is the distribution function of a logistic variable.
  The poles of σ′ lie at distance π, and Φ(·/s) is entire.

In the lower tail m < −s²/2 the mass leaves the nodes; tilting the normal brings it back:
E σ(x) = exp(m + s²/2) · E σ(−x′),  x′ ~ N(m + s², s²).

All nodes of a piece of the tensor are evaluated at once, and the derivatives with the values, so that tensors
of the size of the result are all that is saved for the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

WIDE = 1.5  # where the two rules are equally good
_LOG_2PI = math.log(2 * math.pi)

# (half range, step) of the nodes: error bounds exp(−2π·π/(s·step)) and exp(−2π²/step + π²/(2s²)), the
# tails e^{−range²/2} and e^{−range}; below 1e-14 for float64 and 1e-9 for float32.
_NARROW = {torch.float64: (10.0, 0.36), torch.float32: (7.5, 0.6)}
_LOGISTIC = {torch.float64: (38.0, 0.5), torch.float32: (21.0, 0.75)}
# Elements × nodes evaluated at a time: what fits into a CPU's cache, or keeps a GPU busy (128 MiB in
# float32).
PIECE, PIECE_ON_GPU = 2**20, 2**25


def _nodes(rule: dict[torch.dtype, tuple[float, float]], like: Tensor) -> tuple[Tensor, float]:
    """Nodes as a column (n, 1), and their distance."""
    half, step = rule[like.dtype]
    count = math.floor(half / step)
    return (step * torch.arange(-count, count + 1, device=like.device, dtype=like.dtype)).unsqueeze(1), step


def _log_gauss(z: Tensor) -> Tensor:
    return -0.5 * z.square() - 0.5 * _LOG_2PI


def _log_logistic(x: Tensor) -> Tensor:
    return -x.abs() - 2 * torch.log1p(torch.exp(-x.abs()))


def _log_sigmoid_mean_narrow(m: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log E σ and its derivatives in m and s, by nodes in z; m, s: (n,)."""
    z, step = _nodes(_NARROW, m)
    x = m + s * z
    log_sigmoid = F.logsigmoid(x)
    terms = log_sigmoid + (_log_gauss(z) + math.log(step))
    value = terms.logsumexp(0)
    slope = torch.exp(terms + (log_sigmoid - x) - value)  # σ′/E σ, since log σ(−x) = log σ(x) − x
    return value, slope.sum(0), (slope * z).sum(0)


def _log_sigmoid_mean_wide(m: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log E σ and its derivatives, by nodes in the logistic variable, tilted in the lower tail."""
    tilt = m < -0.5 * s.square()
    mean = torch.where(tilt, -(m + s.square()), m)
    node, step = _nodes(_LOGISTIC, m)
    a = (mean - node) / s
    weight = _log_logistic(node) + math.log(step)
    value = (torch.special.log_ndtr(a) + weight).logsumexp(0)
    slope = torch.exp(_log_gauss(a) + weight - value) / s
    d_mean, d_s = slope.sum(0), -(slope * a).sum(0)
    value = torch.where(tilt, value + m + 0.5 * s.square(), value)
    d_s = torch.where(tilt, d_s + s - 2 * s * d_mean, d_s)
    return value, torch.where(tilt, 1 - d_mean, d_mean), d_s


def _mean_log_sigmoid_narrow(m: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E log σ and its derivatives, by nodes in z."""
    z, step = _nodes(_NARROW, m)
    weight = step * _log_gauss(z).exp()
    x = m + s * z
    slope = weight * torch.sigmoid(-x)
    return (weight * F.logsigmoid(x)).sum(0), slope.sum(0), (slope * z).sum(0)


def _mean_log_sigmoid_wide(m: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """−E softplus(−x) = −E_l[(−x − l)₊], l logistic: s φ(a) + (−m − l) Φ(a), a = (−m − l)/s."""
    node, step = _nodes(_LOGISTIC, m)
    weight = step * _log_logistic(node).exp()
    a = (-m - node) / s
    density, below = weight * torch.exp(_log_gauss(a)), weight * torch.special.ndtr(a)
    return -s * (density + a * below).sum(0), below.sum(0), -density.sum(0)


def _sigmoid_mean_narrow(m: Tensor, s: Tensor) -> tuple[Tensor]:
    """E σ alone, by nodes in z."""
    z, step = _nodes(_NARROW, m)
    return ((step * _log_gauss(z).exp() * torch.sigmoid(m + s * z)).sum(0),)


def _sigmoid_mean_wide(m: Tensor, s: Tensor) -> tuple[Tensor]:
    """E σ alone, by nodes in the logistic variable."""
    node, step = _nodes(_LOGISTIC, m)
    return ((step * _log_logistic(node).exp() * torch.special.ndtr((m - node) / s)).sum(0),)


_QuadratureRule = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
_RULES: dict[str, tuple[_QuadratureRule, _QuadratureRule]] = {
    "mean": (_sigmoid_mean_narrow, _sigmoid_mean_wide),
    "log_mean": (_log_sigmoid_mean_narrow, _log_sigmoid_mean_wide),
    "mean_log": (_mean_log_sigmoid_narrow, _mean_log_sigmoid_wide),
}


def _in_pieces(m: Tensor, s: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    if torch.compiler.is_compiling():  # the number of pieces would be that of the traced batch
        return (m.reshape(-1),), (s.reshape(-1),)
    size = (PIECE_ON_GPU if m.is_cuda else PIECE) // 128
    return m.reshape(-1).split(size), s.reshape(-1).split(size)


def _piece(m: Tensor, s: Tensor, kind: str) -> tuple[Tensor, ...]:
    narrow, wide = _RULES[kind]
    is_wide = s > WIDE
    look = not torch.compiler.is_compiling()
    if look and not bool(is_wide.any()):
        return narrow(m, s)
    parts_wide = wide(m, s.clamp_min(WIDE))
    if look and bool(is_wide.all()):
        return parts_wide
    parts = zip(parts_wide, narrow(m, s.clamp_max(WIDE)), strict=True)
    return tuple(torch.where(is_wide, w, n) for w, n in parts)


class _LogisticExpectation(torch.autograd.Function):
    """Value and both derivatives in one pass; two tensors of the result's size are saved."""

    @staticmethod
    def forward(ctx: Any, m: Tensor, var: Tensor, kind: str) -> Tensor:
        s = var.sqrt()
        pieces = [_piece(a, b, kind) for a, b in zip(*_in_pieces(m, s), strict=True)]
        value, d_m, d_s = (torch.cat(part).view_as(m) for part in zip(*pieces, strict=True))
        value = value.clamp_max(0)  # both are logarithms of probabilities; rounding may lift them above
        # d/ds² = (d/ds)/(2s); at s = 0 the limit is finite but not needed: a zero variance is a constant.
        d_var = torch.where(s > 0, d_s / (2 * s), torch.zeros_like(s))
        ctx.save_for_backward(d_m, d_var)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        d_m, d_var = ctx.saved_tensors
        return grad * d_m, grad * d_var, None


def _expectation(mean: Tensor, var: Tensor, kind: str) -> Tensor:
    if mean.dtype not in _NARROW:
        mean, var = mean.float(), var.float()
    mean, var = torch.broadcast_tensors(mean, var)
    out: Tensor = _LogisticExpectation.apply(mean, var, kind)
    return out


def log_expected_sigmoid(mean: Tensor, var: Tensor) -> Tensor:
    """log E σ(x), x ~ N(mean, var), elementwise and accurate in both tails.

    >>> log_expected_sigmoid(torch.tensor(0.0), torch.tensor(100.0)).exp()
    tensor(0.5000)
    """
    return _expectation(mean, var, "log_mean")


def expected_log_sigmoid(mean: Tensor, var: Tensor) -> Tensor:
    """E log σ(x), x ~ N(mean, var), elementwise.

    >>> expected_log_sigmoid(torch.tensor(0.0), torch.tensor(0.0))
    tensor(-0.6931)
    """
    return _expectation(mean, var, "mean_log")


def expected_sigmoid(mean: Tensor, var: Tensor) -> Tensor:
    """E σ(x), x ~ N(mean, var), elementwise, by the rules of :func:`log_expected_sigmoid`. Cheaper than its
    exponential: there are no derivatives, and only the absolute error is small.

    >>> expected_sigmoid(torch.tensor([0.0, 2.0]), torch.tensor([100.0, 0.0]))
    tensor([0.5000, 0.8808])
    """
    if mean.dtype not in _NARROW:
        mean, var = mean.float(), var.float()
    mean, std = torch.broadcast_tensors(mean, var.sqrt())
    pieces = [_piece(m, s, "mean")[0] for m, s in zip(*_in_pieces(mean, std), strict=True)]
    return torch.cat(pieces).view(mean.shape).clamp(0, 1)
