"""Expectations of the logistic function under a normal, to rounding error, by two trapezoid rules.

For x ~ N(m, s²) there are two ways to write E σ(x) as an integral of an analytic function over the line,
and the trapezoid rule converges exponentially on both (Trefethen & Weideman 2014):

- narrow, s ≤ 1.5:  ∫ σ(m + s z) φ(z) dz. The poles of σ lie at distance π/s.
- wide,   s > 1.5:  ∫ σ′(l) Φ((m − l)/s) dl, since σ is the distribution function of a logistic variable.
  The poles of σ′ lie at distance π, and Φ(·/s) is entire.

In the lower tail m < −s²/2 the mass leaves the nodes; tilting the normal brings it back:
E σ(x) = exp(m + s²/2) · E σ(−x′),  x′ ~ N(m + s², s²).

Both sums run node by node, so the memory is that of the result, forward and backward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

WIDE = 1.5  # where the two rules are equally good
_LOG_2PI = math.log(2 * math.pi)

# (half range, step) of the nodes: error bounds exp(−2π·π/(s·step)) and exp(−2π²/step + π²/(2s²)), the
# tails e^{−range²/2} and e^{−range}; below 1e-14 for float64 and 1e-9 for float32.
_NARROW = {torch.float64: (10.0, 0.36), torch.float32: (7.5, 0.6)}
_LOGISTIC = {torch.float64: (38.0, 0.5), torch.float32: (21.0, 0.75)}


def _nodes(rule: dict[torch.dtype, tuple[float, float]], dtype: torch.dtype) -> list[float]:
    half, step = rule[dtype]
    count = math.floor(half / step)
    return [step * j for j in range(-count, count + 1)]


def _log_gauss(z: float, step: float) -> float:
    return math.log(step) - 0.5 * z * z - 0.5 * _LOG_2PI


def _log_logistic(x: float, step: float) -> float:
    return math.log(step) - abs(x) - 2 * math.log1p(math.exp(-abs(x)))


def _log_phi(a: Tensor) -> Tensor:
    return -0.5 * a.square() - 0.5 * _LOG_2PI


def _log_sigmoid_mean_narrow(m: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log E σ and its derivatives in m and s, by nodes in z."""
    step = _NARROW[m.dtype][1]
    value = torch.full_like(m, -math.inf)
    for z in _nodes(_NARROW, m.dtype):
        value = torch.logaddexp(value, F.logsigmoid(m + s * z) + _log_gauss(z, step))
    d_m, d_s = torch.zeros_like(m), torch.zeros_like(m)
    for z in _nodes(_NARROW, m.dtype):
        x = m + s * z
        slope = torch.exp(F.logsigmoid(x) + F.logsigmoid(-x) + _log_gauss(z, step) - value)  # σ′/E σ
        d_m += slope
        d_s += slope * z
    return value, d_m, d_s


def _log_sigmoid_mean_wide(m: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log E σ and its derivatives, by nodes in the logistic variable, tilted in the lower tail."""
    tilt = m < -0.5 * s.square()
    mean = torch.where(tilt, -(m + s.square()), m)
    step = _LOGISTIC[m.dtype][1]
    value = torch.full_like(m, -math.inf)
    for node in _nodes(_LOGISTIC, m.dtype):
        value = torch.logaddexp(value, torch.special.log_ndtr((mean - node) / s) + _log_logistic(node, step))
    d_mean, d_s = torch.zeros_like(m), torch.zeros_like(m)
    for node in _nodes(_LOGISTIC, m.dtype):
        a = (mean - node) / s
        slope = torch.exp(_log_phi(a) + _log_logistic(node, step) - value) / s
        d_mean += slope
        d_s -= slope * a
    value = torch.where(tilt, value + m + 0.5 * s.square(), value)
    d_s = torch.where(tilt, d_s + s - 2 * s * d_mean, d_s)
    return value, torch.where(tilt, 1 - d_mean, d_mean), d_s


def _mean_log_sigmoid_narrow(m: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E log σ and its derivatives, by nodes in z."""
    step = _NARROW[m.dtype][1]
    value, d_m, d_s = torch.zeros_like(m), torch.zeros_like(m), torch.zeros_like(m)
    for z in _nodes(_NARROW, m.dtype):
        weight = math.exp(_log_gauss(z, step))
        x = m + s * z
        value += weight * F.logsigmoid(x)
        slope = weight * torch.sigmoid(-x)
        d_m += slope
        d_s += slope * z
    return value, d_m, d_s


def _mean_log_sigmoid_wide(m: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """−E softplus(−x) = −E_l[(−x − l)₊], l logistic: s φ(a) + (−m − l) Φ(a), a = (−m − l)/s."""
    step = _LOGISTIC[m.dtype][1]
    value, d_m, d_s = torch.zeros_like(m), torch.zeros_like(m), torch.zeros_like(m)
    for node in _nodes(_LOGISTIC, m.dtype):
        weight = math.exp(_log_logistic(node, step))
        a = (-m - node) / s
        density, below = torch.exp(_log_phi(a)), torch.special.ndtr(a)
        value -= weight * s * (density + a * below)
        d_m += weight * below
        d_s -= weight * density
    return value, d_m, d_s


_RULES = {
    "log_mean": (_log_sigmoid_mean_narrow, _log_sigmoid_mean_wide),
    "mean_log": (_mean_log_sigmoid_narrow, _mean_log_sigmoid_wide),
}


class _LogisticExpectation(torch.autograd.Function):
    """Value and both derivatives in one go: three tensors of the result's size are all that is kept."""

    @staticmethod
    def forward(ctx: Any, m: Tensor, var: Tensor, kind: str) -> Tensor:
        s = var.sqrt()
        narrow, wide = _RULES[kind]
        is_wide = s > WIDE
        if torch.compiler.is_compiling() or bool(is_wide.any()):
            parts_wide = wide(m, s.clamp_min(WIDE))
            parts = narrow(m, s.clamp_max(WIDE))
            value, d_m, d_s = (torch.where(is_wide, w, n) for w, n in zip(parts_wide, parts, strict=True))
        else:
            value, d_m, d_s = narrow(m, s)
        value = value.clamp_max(0)  # both are logarithms of probabilities; rounding may lift them above
        # d/ds² = (d/ds)/(2s); at s = 0 the limit is finite but not needed: a zero variance is a constant.
        d_var = torch.where(s > 0, d_s / (2 * s), torch.zeros_like(s))
        ctx.save_for_backward(d_m, d_var)
        return value

    @staticmethod
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


def normal_nodes(half_range: float = 8.0, step: float = 0.125, *, like: Tensor) -> tuple[Tensor, Tensor]:
    """Trapezoid nodes and weights for E g(z), z ~ N(0, 1); weights sum to one. Each (n,)."""
    count = math.floor(half_range / step)
    z = torch.arange(-count, count + 1, device=like.device, dtype=like.dtype) * step
    return z, torch.softmax(-0.5 * z.square(), 0)
