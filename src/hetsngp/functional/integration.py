"""Expectations of the softmax of independent Gaussians by one one-dimensional integral, without sampling.

For f_k ~ N(μ_k, σ_k²) let −t be the largest of f_k + Gumbel noise; its class is a draw of softmax(f). Class k
alone stays below −t with probability φ_k(t) = E exp(−e^{f_k + t}). In the words of survival analysis Λ_k =
−log φ_k is a cumulative hazard, r_k = Λ_k′ its rate, and t has the density r e^{−Λ}, with r = Σ r_k and
Λ = Σ Λ_k. Therefore, with expectations over t,

* E p_k   = E[r_k/r],
* E p_k²  = E[(r_k + r_k² − r_k′)/r],
* E log Z = −E t − γ, with Euler's constant γ,
* E H(p)  = −γ − E[Σ x̂_k r_k/r], x̂_k being the mean of x = f_k + t
  under the density ∝ N(x; μ_k + t, σ_k²) e^{x − e^x}.

The integral is a trapezoid sum, whose weights are normalised to one. Its ends are where log Λ has given
values, found by Newton steps; from the upper end, where a narrow class may make the density sharp, the
distance of the nodes grows. log Λ_k and x̂_k depend on (μ_k + t, σ_k) alone and are tabulated: a polynomial
in μ_k + t for each σ_k. Hazards stay logarithms until they are summed, so nothing underflows, whatever the
number of classes.

With a factor F, u = μ + Fε + σ ⊙ ε′, all this is conditional on points ε of the factor's coordinates, which
give each row several means.
"""

from __future__ import annotations

import functools
import math
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from hetsngp.functional.constants import constant

EULER = 0.5772156649015329
# Largest standard deviation of the table. A row with a larger one is scaled down, mean and all: its softmax
# is an argmax but for a share of 1/σ, and an argmax does not depend on the scale.
LARGEST = 40.0
# Degree of the tabulated polynomials; at many points, whose errors average, a lower one is enough.
# Where nodes are placed, what is wrong with a place is mended by its weight.
DEGREE, COARSE_DEGREE, PLACING_DEGREE = 12, 8, 4


class Grid(NamedTuple):
    """Rule for the nodes: their number, the values of log Λ at the ends, Newton steps, and the largest
    distance of the first two nodes.
    """

    nodes: int
    low: float
    high: float
    steps: int
    first: float


FINE = Grid(nodes=20, low=-11.0, high=2.4, steps=2, first=0.9)
# For each of several points of a factor, whose nodes differ in place so that errors average, and for the loss
# of a label of many classes. What the upper end cuts off does not average: the gradient in σ needs it.
COARSE = Grid(nodes=6, low=-5.5, high=2.2, steps=1, first=2.0)
ROUGH = Grid(nodes=4, low=-4.5, high=1.8, steps=1, first=1.6)
MANY_CLASSES = 64
# Elements of a working chunk on a CPU and on a GPU.
_CHUNK, _CHUNK_ON_GPU = 2**19, 2**26
# Elements up to which memory is kept from call to call.
_KEPT = 2**23


# --- tables ----------------------------------------------------------------------------------------------

# Knots of the fit, and of the straight lines between them that are read.
_KNOTS, _STEPS = 64, 64
_HALF = 2.0  # standard deviation in the middle of the table


def _frame(std: Tensor) -> tuple[Tensor, Tensor]:
    """Centre and half width of the interval of μ + t in which log Λ is between about −13 and 2.6."""
    var = std.square()
    return -1.6 - 3.6 / (1 + 0.6 * var), (60.84 + 24.0 * var).sqrt()


def _exact(x: Tensor, std: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log Λ, its slope and x̂ at μ + t = x, by the trapezoid rule in float64: (s, n), (s,) → (s, n) each."""
    z = torch.arange(-10.5, 13.5, min(0.2, 0.4 / float(std.max())), dtype=torch.float64)
    log_weight = torch.log_softmax(-0.5 * z.square(), 0)
    at = x.unsqueeze(-1) + std.view(-1, 1, 1) * z
    exp = at.clamp_max(600).exp()
    above = log_weight - exp
    below = (-torch.expm1(-exp) * log_weight.exp()).sum(-1)
    log_phi = torch.where(below < 0.5, torch.log1p(-below), above.logsumexp(-1))
    tilted = above + at
    slope = (tilted.logsumexp(-1) - log_phi).exp() / -log_phi
    return (-log_phi).log(), slope, (torch.softmax(tilted, -1) * at).sum(-1)


@functools.lru_cache(maxsize=3)
def _lines(degree: int) -> Tensor:
    """Coefficients of log Λ and of x̂ at equidistant v = σ/(σ + 2), and their rise to the next v, in float64:
    (2, 2·(degree + 1), n).

    Polynomials in (μ + t − centre)/width, from the highest power, fitted by least squares to values and
    slopes in relative units, with less weight where a hazard is negligible or certain.
    """
    count = 3 * degree
    angle = (torch.arange(count, dtype=torch.float64) + 0.5) / count * math.pi
    order = torch.arange(degree + 1, dtype=torch.float64)
    values = torch.cos(angle.unsqueeze(1) * order)
    slopes = order * torch.sin(angle.unsqueeze(1) * order) / angle.sin().unsqueeze(1)
    to_powers = torch.linalg.lstsq(torch.cos(angle).unsqueeze(1) ** order, values).solution
    tables = []
    for v in torch.linspace(0, LARGEST / (LARGEST + _HALF), _KNOTS, dtype=torch.float64).split(4):
        std = (_HALF * v / (1 - v)).clamp_min(1e-3)
        centre, width = (part.unsqueeze(1) for part in _frame(std))
        log_hazard, slope, residual = _exact(centre + width * angle.cos(), std)
        weight = torch.exp(-(log_hazard - 1.2).clamp_min(0) - (-12 - log_hazard).clamp_min(0)).clamp_min(1e-2)
        both = torch.cat(
            [values * weight.unsqueeze(-1), slopes * (weight / (slope * width)).unsqueeze(-1)], dim=1
        )
        target = torch.cat([log_hazard * weight, weight], 1)
        first = torch.linalg.pinv(both) @ target.unsqueeze(-1)
        second = torch.linalg.pinv(values * weight.unsqueeze(-1)) @ (residual * weight).unsqueeze(-1)
        tables.append(torch.cat([(to_powers @ part).squeeze(-1).flip(1) for part in (first, second)], 1))
    # Rounded far above the last bits, which least squares do not have in common from process to process.
    table = (torch.cat(tables) * 2**24).round() / 2**24
    rise = torch.cat([table[1:2] - table[:1], (table[2:] - table[:-2]) / 2, table[-1:] - table[-2:-1]])
    start, change, leave, arrive = table[:-1], table[1:] - table[:-1], rise[:-1], rise[1:]
    share = torch.arange(_STEPS, dtype=torch.float64).view(-1, 1) / _STEPS
    bend, twist = 3 * change - 2 * leave - arrive, leave + arrive - 2 * change
    pieces = (part.unsqueeze(1) for part in (twist, bend, leave, start))
    fine = functools.reduce(lambda total, part: total * share + part, pieces).flatten(0, 1)
    fine = torch.cat([fine, table[-1:]]).T
    return torch.stack([fine[:, :-1], fine.diff(dim=1)]).contiguous()


@functools.cache  # never dropped: a CUDA graph reads it where it is
def _lines_on(degree: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return _lines(degree).to(device, dtype)


_table = constant(_lines_on)


# --- hazards ---------------------------------------------------------------------------------------------


class Curves(NamedTuple):
    """Tabulated functions at the standard deviations of a batch, with dimensions for points and nodes."""

    var: Tensor  # (B, K, 1)
    centre: Tensor  # (B, K, 1, 1)
    scale: Tensor  # (B, K, 1, 1), one over the width
    hazard: Tensor  # (degree + 1, B, K, 1, 1)
    residual: Tensor  # (degree + 1, B, K, 1, 1)

    @staticmethod
    def of(std: Tensor, degree: int = DEGREE, *, residual: bool = True) -> Curves:
        """Curves of standard deviations (B, K) that are at most :data:`LARGEST`."""
        table = _table(degree, std.device, std.dtype)[:, : (2 if residual else 1) * (degree + 1)]
        at = std / (std + _HALF) * (table.shape[-1] * (LARGEST + _HALF) / LARGEST)
        knot = at.detach().long().clamp_(0, table.shape[-1] - 1)
        start, rise = (part.index_select(1, knot.flatten()).view(-1, *std.shape) for part in table)
        columns = torch.addcmul(start, rise, at - knot)[..., None, None].split(degree + 1)
        centre, width = _frame(std[..., None, None])
        return Curves(std.square().unsqueeze(-1), centre, 1 / width, columns[0], columns[-1])

    def rows(self, index: slice) -> Curves:
        """Curves of some rows of the batch."""
        return Curves(*(part[index] for part in self[:3]), *(part[:, index] for part in self[3:]))

    def argument(self, mean: Tensor, time: Tensor, memory: Memory | None = None) -> tuple[Tensor, Tensor]:
        """Argument of the polynomials for means (B, K, S) and times (B, S, T), and the part of it outside of
        their interval: (B, K, S, T) each.
        """
        shape = (*mean.shape, time.shape[-1])
        scale = self.scale.squeeze(-1)
        origin = -self.centre.squeeze(-1) * scale
        start = torch.addcmul(origin, mean, scale, out=_part(memory, "start", mean.shape))
        first, second = _part(memory, "inside", shape), _part(memory, "outside", shape)
        x = torch.addcmul(start.unsqueeze(-1), time.unsqueeze(1), self.scale, out=second)
        inside = torch.clamp(x, -1, 1, out=first)
        return inside, torch.sub(x, inside, out=second)

    def log_hazard(
        self, mean: Tensor, time: Tensor, derivatives: int = 1, memory: Memory | None = None
    ) -> list[Tensor]:
        """log Λ and its derivatives in t; outside of the interval, its tangent: (B, K, S, T) each."""
        inside, outside = self.argument(mean, time, memory)
        value, *slopes = parts = horner(self.hazard, inside, derivatives, memory)
        outs: list[Tensor | None] = [None] * len(parts) if memory is None else [*parts]
        out = [torch.addcmul(value, slopes[0], outside, out=outs[0])]
        for order, slope in enumerate(slopes, 1):
            out.append(torch.mul(slope, math.factorial(order) * self.scale**order, out=outs[order]))
        return out


def chunk_of_rows(like: Tensor, elements: int) -> int:
    """Number of rows of so many elements that are computed together."""
    return max(1, (_CHUNK if like.device.type == "cpu" else _CHUNK_ON_GPU) // elements)


class Memory:
    """Tensors that every chunk of a loop writes to: fresh memory costs more than the operations on it.

    On a CPU a thread keeps them from call to call.
    """

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.parts: dict[str, Tensor] = {}

    @staticmethod
    def of(like: Tensor) -> Memory | None:
        """None where a compiler plans the memory."""
        if torch.compiler.is_compiling():
            return None
        if like.device.type != "cpu" or like.dtype != torch.float32:
            return Memory(like)
        if not hasattr(_kept, "memory"):
            _kept.memory = Memory(like.new_empty(0))
        kept: Memory = _kept.memory
        return kept

    def part(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Tensor of this name, with whatever values."""
        size = math.prod(shape)
        if size > _KEPT:
            return self.like.new_empty(shape)
        part = self.parts.get(name)
        if part is None or part.numel() < size:
            with torch.inference_mode(False):  # or it could not be written to outside of that mode
                part = self.parts[name] = self.like.new_empty(size)
        return part[:size].view(shape)


_kept = threading.local()


def _part(memory: Memory | None, name: str, shape: tuple[int, ...]) -> Tensor | None:
    """Tensor of this name and shape, to be passed as ``out``; None without memory."""
    if memory is None:
        return None
    batch, classes, *others = shape
    if math.prod(others) > classes:  # the longer loop is the inner one
        return memory.part(name, shape)
    return memory.part(name, (batch, *others, classes)).movedim(-1, 1)


def scratch(like: Tensor, name: str, shape: tuple[int, ...]) -> Tensor | None:
    """Tensor to be passed as ``out``, overwritten by the next call of the same name in this thread; None
    where a compiler plans the memory.
    """
    memory = Memory.of(like)
    return None if memory is None else memory.part(name, shape)


def horner(coefficients: Tensor, x: Tensor, derivatives: int, memory: Memory | None = None) -> list[Tensor]:
    """Polynomial at x and its derivatives, the j-th over j!; coefficients (n, …) of decreasing powers."""
    outs = [_part(memory, f"derivative {j}", x.shape) for j in range(derivatives + 1)]
    parts = [coefficients[0]]
    for coefficient in coefficients[1:]:
        more = len(parts) <= derivatives
        for j in range(len(parts) - 1, -1, -1):
            parts[j] = torch.addcmul(parts[j - 1] if j else coefficient, parts[j], x, out=outs[j])
        if more:  # what the last part was before: this, so far
            parts.append(coefficients[0])
    return parts


# --- nodes -----------------------------------------------------------------------------------------------

_GOLDEN = 0.6180339887498949
# Exponents θ of the bounds from which the search for the ends starts.
_TILTS = (1.0, 0.35, 0.1)


def _time_of(log_hazard: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """Times at which log Λ is about ``log_hazard`` (n,), for means (B, K, S): (B, S, n).

    Λ(t) is at most about Σ E e^{θ(f + t)} for every θ in (0, 1], Chernoff's bound, and where θσ is large it
    is smaller by θσ√2π, by Mills's ratio.
    """
    tilt = _numbers(_TILTS, mean)[:, None, None, None]
    exponent = torch.addcmul(tilt * mean, 0.5 * tilt.square(), var)  # (tilts, B, K, S)
    top = exponent.amax(2, keepdim=True)
    share = exponent.sub_(top).exp_()
    total = share.sum(2)
    spread = share.mul_(var).sum(2) / total
    tilt = tilt.squeeze(-1)
    # The bound of θ = 1 is near as it is.
    mills = torch.log1p(2 * math.pi * (tilt < 1) * tilt.square() * spread)
    bound = total.log() + top.squeeze(2) - 0.5 * mills
    return ((log_hazard - bound.unsqueeze(-1)) / tilt.unsqueeze(-1)).amax(0)


@functools.cache
def _row(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Tensor of these numbers, kept on the device: a copy to a GPU would wait for it, and a CUDA graph reads
    it where it is.
    """
    with torch.inference_mode(False):
        return torch.tensor(values, device=device, dtype=dtype)


def _numbers(values: tuple[float, ...], like: Tensor) -> Tensor:
    """Numbers (n,) of the dtype and on the device of ``like``."""
    if torch.compiler.is_compiling():
        return torch.tensor(values, device=like.device, dtype=like.dtype)
    return _row(values, like.device, like.dtype)


def _ends(mean: Tensor, curves: Curves, grid: Grid, memory: Memory | None) -> Tensor:
    """Times at which log Λ is ``grid.low`` and ``grid.high``, at several points about: (B, S, 2).

    Newton steps find them for one point, or for the mean of several; the others' differ from these by about
    as much as Chernoff's bound does whose θ is the slope of log Λ at the upper end, and one more step there.
    log Λ is concave, so that it ends too early rather than too late, where rates have no limit.
    """
    centre = mean if mean.shape[2] == 1 else mean.mean(2, keepdim=True)
    wanted = _numbers((grid.low, grid.high), mean)
    time, tilt = _solve(centre, wanted, curves, grid.steps, memory)
    if mean.shape[2] == 1:
        return time
    tilt = tilt[..., 1:]
    spread = 0.5 * tilt.square() * curves.var
    own, middle = (torch.addcmul(spread, tilt, m).logsumexp(1) for m in (mean, centre))
    low, high = (time + ((middle - own) / tilt.squeeze(-1)).unsqueeze(-1)).split(1, -1)
    latest = _latest(mean, curves)
    high, _ = _newton_step(mean, torch.minimum(high, latest), wanted[1:], curves, memory)
    return torch.cat([low, torch.minimum(high, latest)], -1)


def _solve(
    mean: Tensor, wanted: Tensor, curves: Curves, steps: int, memory: Memory | None
) -> tuple[Tensor, Tensor]:
    """Times at which log Λ is ``wanted`` (n,) for means (B, K, S), and its slopes near them: (B, S, n)."""
    latest = _latest(mean, curves)
    time = torch.minimum(_time_of(wanted, mean, curves.var), latest)
    for _ in range(steps):
        time, tilt = _newton_step(mean, time, wanted, curves, memory)
        time = torch.minimum(time, latest)
    return time, tilt


def _latest(mean: Tensor, curves: Curves) -> Tensor:
    """Time at which the hazard of one class alone is past the upper end: (B, S, 1)."""
    return ((curves.centre + 1 / curves.scale).squeeze(-1) - mean).amin(1).unsqueeze(-1)


def _newton_step(
    mean: Tensor, time: Tensor, wanted: Tensor, curves: Curves, memory: Memory | None
) -> tuple[Tensor, Tensor]:
    """Times (B, S, n) at which log Λ is nearer to ``wanted`` (n,), and its slopes before."""
    value, slope = curves.log_hazard(mean, time, memory=memory)
    hazard = torch.exp(value, out=None if memory is None else value)
    total = hazard.sum(1)
    tilt = torch.mul(hazard, slope, out=None if memory is None else slope).sum(1) / total
    return time + (wanted - total.log()) / tilt, tilt


@torch.no_grad()
def place(mean: Tensor, curves: Curves, grid: Grid, memory: Memory | None = None) -> tuple[Tensor, Tensor]:
    """Times of the nodes for means (B, K, S), and the logarithms of their distances: (B, S, T) each.

    The distances are those of sinh(a·v), v from 0 at the upper end to 1: all equal for a → 0.
    """
    low, high = _ends(mean, curves, grid, memory).unbind(-1)
    length = (high - low).clamp_min(grid.nodes / 4).unsqueeze(-1)
    growth = (length / (grid.first * (grid.nodes - 1))).clamp_min(1.002)
    a = torch.log(2 * growth) + 1
    for _ in range(4):  # sinh(a)/a = growth
        a = torch.asinh(growth * a)
    v = torch.linspace(0, 1, grid.nodes, device=mean.device, dtype=mean.dtype)
    # Between the points of a row the nodes are shifted by parts of their distance, so that errors cancel.
    number = torch.arange(mean.shape[2], device=v.device, dtype=v.dtype)
    shift = (number * _GOLDEN + 0.5) % 1 - 0.5
    v = v + shift.unsqueeze(-1) / (grid.nodes - 1)
    part = length / torch.sinh(a)
    return high.unsqueeze(-1) - part * torch.sinh(a * v), torch.log(part * a * torch.cosh(a * v))


class Rates(NamedTuple):
    """Hazards at the nodes of a batch of S points each."""

    location: Tensor  # (B, K, S): μ
    time: Tensor  # (B, S, T)
    log_hazard: list[Tensor]  # (B, K, S, T): log Λ_k and its derivatives
    rate: Tensor  # (B, K, S, T): r_k
    total: Tensor  # (B, S, T): r
    weight: Tensor  # (B, S, T): of the density of t, sums to one over T

    @staticmethod
    def of(
        mean: Tensor,
        curves: Curves,
        grid: Grid,
        derivatives: int = 1,
        memory: Memory | None = None,
    ) -> Rates:
        """Hazards for means (B, K, S). With ``memory`` they are overwritten by the next call that has it."""
        if mean.shape[2] * grid.nodes > mean.shape[1]:
            # What broadcasts along points and nodes is then a number in the inner loop.
            mean = mean.contiguous()
        time, log_step = place(mean, curves, grid, memory)
        parts = curves.log_hazard(mean, time, derivatives, memory)
        hazard = torch.exp(parts[0], out=_part(memory, "hazard", parts[0].shape))
        summed = hazard.sum(1)
        rate = torch.mul(hazard, parts[1], out=None if memory is None else hazard)
        total = rate.sum(1)
        # Not by softmax, which takes ten times as long along a dimension of a few nodes.
        log_density = total.log() - summed + log_step
        density = torch.exp(log_density - log_density.detach().amax(-1, keepdim=True))
        weight = density / density.sum(-1, keepdim=True)
        return Rates(mean, time, parts, rate, total, weight)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over points and nodes of values/r: (B, K, S, T) → (B, K)."""
        share = (self.weight / (self.total * self.weight.shape[1])).flatten(1).unsqueeze(1)
        return (share @ values.movedim(1, 3).flatten(1, 2)).squeeze(1)

    def entropy(self, curves: Curves, memory: Memory | None = None) -> Tensor:
        """E H(p) of each point: (B, S)."""
        inside, outside = curves.argument(self.location, self.time, memory)
        value, slope = horner(curves.residual, inside, 1, memory)
        residual = torch.addcmul(value, slope, outside, out=None if memory is None else value)
        product = torch.mul(residual, self.rate, out=None if memory is None else residual)
        at = product.sum(1) / self.total
        mean = (self.weight * at).sum(-1)
        # Beyond the last node, half of the distance to the one before it away, Λ is about e^t and small, and
        # x̂ falls with t: that part has the weight Λ and is lower by one on average.
        half = (self.time[..., -2] - self.time[..., -1]) / 2
        tail = self.total[..., -1] * torch.exp(-half)
        return -EULER - torch.lerp(mean, at[..., -1] - half - 1, tail)


# --- one node for each point of a factor -----------------------------------------------------------------

# Values of log Λ at which the mean of the points has its times found; between them a polynomial is taken.
_LEVELS = (-6.3, -3.5, -1.2, 0.4, 1.9)


@functools.lru_cache(maxsize=16)
def _levels_to_powers(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Coefficients, from the highest power, of the polynomial with given values at the levels: (n, n)."""
    levels = torch.tensor(_LEVELS, dtype=torch.float64)
    return torch.linalg.inv(torch.linalg.vander(levels)).flip(0).to(device, dtype)


_interpolation = constant(_levels_to_powers)


class Quantiles(NamedTuple):
    """One node for each point of a factor.

    Λ(t) is an exponential variable. Its logarithm is one more coordinate of the points, their level: each has
    one node, at which log Λ is about that, and E p_k is the mean of r_k/r over points. Weights, all of which
    are near one, make up for the difference between log Λ and the level.
    """

    origin: Tensor
    """Argument of the polynomials at μ + t = 0: (B, K, 1)."""
    scale: Tensor
    """Its slope: (B, K, 1)."""
    hazard: Tensor
    """Polynomials of log Λ: (degree + 1, B, K, 1)."""
    rough: Tensor
    """Those that place the nodes."""
    times: Tensor
    """Coefficients of the times of the mean as a polynomial in the level, from the highest power: (B, n)."""
    tilt: Tensor
    """θ of Chernoff's bound: (B, 1, 1)."""
    offset: Tensor
    """θ²σ²/2 less the logarithm of the bound of the mean: (B, K, 1)."""

    @staticmethod
    def of(mean: Tensor, std: Tensor) -> Quantiles:
        """Nodes of points around ``mean`` (B, K); standard deviations (B, K) within the table."""
        curves, rough = (Curves.of(std, d, residual=False) for d in (COARSE_DEGREE, PLACING_DEGREE))
        wanted, mean = _numbers(_LEVELS, mean), mean.sub(mean.amax(1, keepdim=True)).unsqueeze(-1)
        time, tilt = _solve(mean, wanted, rough, 2, Memory.of(std))
        times = time.squeeze(1) @ _interpolation(mean.device, mean.dtype).mT
        tilt = tilt[..., len(_LEVELS) // 2].unsqueeze(-1)
        spread = 0.5 * tilt.square() * rough.var
        bound = torch.addcmul(spread, tilt, mean).logsumexp(1, keepdim=True)
        scale = rough.scale.squeeze(-1)
        origin = -rough.centre.squeeze(-1) * scale
        fine, coarse = curves.hazard.squeeze(-1), rough.hazard.squeeze(-1)
        return Quantiles(origin, scale, fine, coarse, times, tilt, spread - bound)

    def rows(self, index: slice) -> Quantiles:
        """Nodes of some rows of the batch."""
        return Quantiles(*(part[:, index] if part.dim() == 4 else part[index] for part in self))

    def probs(self, means: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted sum of E p over points with means (B, K, S) and levels (S,), and the sum of the weights:
        (B, K), (B, 1). Overwrites the means.
        """
        memory = Memory.of(means)
        # Numbers near zero keep their digits; the softmax does not change.
        means.sub_(means.amax(1, keepdim=True))
        out = _part(memory, "start", means.shape)
        start = torch.addcmul(self.origin, means, self.scale, out=out)
        time = self._times(means, start, level, memory).unsqueeze(1)
        out = _part(memory, "outside", means.shape)
        x = torch.addcmul(start, time, self.scale, out=out)
        inside = torch.clamp(x, -1, 1, out=_part(memory, "inside", means.shape))
        value, slope = horner(self.hazard, inside, 1, memory)
        value = torch.addcmul(value, slope, x.sub_(inside), out=None if memory is None else value)
        hazard = value.exp_()
        total = hazard.sum(1, keepdim=True)  # (B, 1, S)
        rate = hazard.mul_(slope)  # but for the scale
        weight = total * torch.exp(level.exp() - level - total)
        share = weight / (self.scale.mT @ rate)
        return (rate @ share.mT * self.scale).squeeze(-1), weight.sum(-1)

    def _times(self, means: Tensor, start: Tensor, level: Tensor, memory: Memory | None) -> Tensor:
        """Times at which log Λ is about ``level`` (S,), for means (B, K, S): (B, S).

        Those of the mean, shifted by the difference of Chernoff's bounds, and two Newton steps: where a wide
        class comes before narrow ones log Λ is convex, and the first goes too far.
        """
        time = horner(self.times.mT.unsqueeze(-1), level, 0)[0]
        out = _part(memory, "inside", means.shape)
        ratio = torch.addcmul(self.offset, self.tilt, means, out=out).exp_().sum(1)
        time = time - ratio.log() / self.tilt.squeeze(-1)
        for _ in range(2):
            x = torch.addcmul(start, time.unsqueeze(1), self.scale, out=out).clamp_(-1, 1)
            value, slope = horner(self.rough, x, 1, memory)
            hazard = value.exp_()
            total = hazard.sum(1)
            tilt = (self.scale.mT @ hazard.mul_(slope)).squeeze(1) / total
            time = time + (level - total.log()) / tilt
        return time


# --- moments of independent Gaussians --------------------------------------------------------------------


class Moments(NamedTuple):
    """Expectations under independent Gaussian logits."""

    probs: Tensor
    """E p: (B, K)."""
    squares: Tensor
    """E p²: (B, K)."""
    log_normalizer: Tensor
    """E log Σ exp(f): (B,)."""
    entropy: Tensor
    """E H(p): (B,)."""


def softmax_moments(mean: Tensor, var: Tensor, grid: Grid = FINE) -> Moments:
    """Moments of p = softmax(f), f_k ~ N(mean_k, var_k) independent: (B, K), (B, K) → :class:`Moments`.

    Differentiable once, in ``var`` where it is positive. The errors are at most 1e-3 for standard deviations
    up to 4, and 5e-3 up to 20.

    >>> moments = softmax_moments(torch.zeros(1, 4), torch.full((1, 4), 9.0))
    >>> moments.probs, moments.entropy
    (tensor([[0.2500, 0.2500, 0.2500, 0.2500]]), tensor([0.5592]))
    """
    mean, std, shrink = within_table(mean, var)
    curves = Curves.of(std)
    rates = Rates.of(mean.unsqueeze(-1), curves, grid, 2)
    _, slope, bend = rates.log_hazard
    # r′ = r·(g′ + g″/g′) for g = log Λ.
    second = rates.rate * (1 + rates.rate - slope - bend / slope)
    log_normalizer = -(rates.weight * rates.time).sum((1, 2)) - EULER
    entropy = rates.entropy(curves).squeeze(1)
    return Moments(rates.mean(rates.rate), rates.mean(second), log_normalizer * shrink.squeeze(1), entropy)


@torch.no_grad()
def probs_and_entropy(mean: Tensor, var: Tensor, *, entropy: bool = True) -> tuple[Tensor, Tensor]:
    """E p (B, K) and E H(p) (B,) as of :func:`softmax_moments`, in bounded memory.

    Without ``entropy`` the second is NaN.
    """
    memory = Memory.of(mean)
    if memory is None:
        return _probs_and_entropy(mean, var, entropy, None)
    probs, given = torch.empty_like(mean), torch.full_like(mean[:, 0], torch.nan)
    size = chunk_of_rows(mean, FINE.nodes * mean.shape[1])
    for start in range(0, len(mean), size):
        rows = slice(start, start + size)
        probs[rows], given[rows] = _probs_and_entropy(mean[rows], var[rows], entropy, memory)
    return probs, given


def _probs_and_entropy(
    mean: Tensor, var: Tensor, entropy: bool, memory: Memory | None
) -> tuple[Tensor, Tensor]:
    mean, std, _ = within_table(mean, var)
    curves = Curves.of(std)
    rates = Rates.of(mean.unsqueeze(-1), curves, FINE, 1, memory)
    probs = rates.mean(rates.rate)
    given = rates.entropy(curves, memory).squeeze(1) if entropy else torch.full_like(mean[:, 0], torch.nan)
    return probs, given


def within_table(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Means (B, K) or (B, K, S) and standard deviations (B, K), and the factor (B, 1) that divided both."""
    std = var.clamp_min(torch.finfo(var.dtype).tiny).sqrt()
    shrink = (std.detach().amax(-1, keepdim=True) / LARGEST).clamp_min(1)
    return mean / shrink.view(-1, *[1] * (mean.dim() - 1)), std / shrink, shrink
