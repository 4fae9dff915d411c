"""Integration points, and streamed sums over them in O(B·K) memory.

:class:`IntegrationPoints` draws blocks of normal points that can be drawn again. Sums over points use one
block at a time, and the backward pass draws the same blocks again instead of storing them, so a gradient
costs no more memory than a value, whatever the number of points. :class:`TaylorControl` is the control
variate of mild noise.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hetsngp.functional.constants import constant
from hetsngp.types import Factor, FactorSum, UtilityNormal

# In more coordinates than these a Sobol net of a few hundred points is no better than a Latin hypercube.
SOBOL_DIMENSIONS = 128
# A scramble costs milliseconds: a few are cached, and the digital shift makes each use of them unbiased.
SCRAMBLES = 16
LATIN_SCRAMBLES = 4
_BITS = 30  # resolution of torch's Sobol engine
# Most points in memory at a time: a block takes BLOCK·(K + R) numbers, whatever the number of points.
BLOCK = 256
# Largest variance of a logit for which the Taylor expansion reduces the error.
MILD_VARIANCE = 1.5
# Elements of a working chunk: a few MiB, so that it stays in a CPU's cache; more for a GPU.
CPU_CHUNK, GPU_CHUNK = 2**18, 2**24


# --- integration points ---------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _sobol(dimension: int, count: int, scramble: int) -> Tensor:
    """The first ``count`` points of a scrambled sequence, as integers below 2³⁰: (count, dimension)."""
    engine = torch.quasirandom.SobolEngine(dimension, scramble=True, seed=scramble)
    return (engine.draw(count, dtype=torch.float64) * 2**_BITS).round().int()


def _normal_from_uniform(x: Tensor) -> Tensor:
    """Φ⁻¹(x), with x clamped away from 0 and 1, where it is infinite."""
    tiny = torch.finfo(x.dtype).eps / 2
    return torch.special.ndtri(x.clamp(tiny, 1 - 2 * tiny))


@functools.lru_cache(maxsize=8)
def _strata(count: int, dimension: int, scramble: int, device: torch.device) -> Tensor:
    """A permutation of 0 … count−1 in every column: (count, dimension)."""
    generator = torch.Generator().manual_seed(scramble)
    return torch.rand(count, dimension, generator=generator).argsort(0).to(device, torch.int16)


def _latin_hypercube(
    count: int, dimension: int, scramble: int, generator: torch.Generator, like: Tensor
) -> Tensor:
    """(count, dimension) uniform points with one point in each of ``count`` strata of every coordinate.

    Sorting is slow, so a few sets of permutations are cached; rotating every column by a random shift makes
    each use unbiased.
    """
    kind: dict[str, Any] = {"generator": generator, "device": like.device}
    turn = torch.randint(count, (dimension,), dtype=torch.int16, **kind)
    jitter = torch.rand(count, dimension, dtype=like.dtype, **kind)
    return ((_strata(count, dimension, scramble, like.device) + turn) % count + jitter) / count


@dataclass(frozen=True)
class IntegrationPoints:
    """Reproducible stream of normal points: equal fields and indices give equal points.

    ``rank``: coordinates of the factor (R); ``diagonal``: coordinates of the diagonal (K, or 0). Replicates
    are independent randomisations, which is what makes an error estimate possible. ``part``: (i, n) if the
    examples are the i-th (from 0) of n equal parts of a batch, whose random signs they then have.
    """

    sampler: str
    rank: int
    diagonal: int
    seed: int
    part: tuple[int, int] = (0, 1)

    def _generator(self, device: torch.device, *index: int) -> torch.Generator:
        seed = self.seed
        for i in index:  # splitmix64's increment keeps neighbouring indices apart
            seed = (seed * 6364136223846793005 + (i + 1) * 0x9E3779B97F4A7C15) % 2**63
        return torch.Generator(device=device).manual_seed(seed)

    def block(self, start: int, count: int, *, like: Tensor, replicate: int = 0) -> tuple[Tensor, Tensor]:
        """Points ``start … start+count−1``: ε of the factor (count, R) and of the diagonal (count, K)."""
        generator = self._generator(like.device, replicate, start, count)
        if self.sampler == "sobol":
            return self._quasi(start, count, replicate, generator, like)
        half = count if self.sampler == "mc" else math.ceil(count / 2)
        shape = (half, self.rank + self.diagonal)
        eps = torch.randn(shape, generator=generator, device=like.device, dtype=like.dtype)
        if self.sampler == "antithetic":
            eps = torch.cat([eps, -eps])[:count]
        return eps[:, : self.rank], eps[:, self.rank :]

    def _quasi(
        self, start: int, count: int, replicate: int, generator: torch.Generator, like: Tensor
    ) -> tuple[Tensor, Tensor]:
        total = self.rank + self.diagonal
        sobol = min(self.rank if total > SOBOL_DIMENSIONS else total, SOBOL_DIMENSIONS)
        latin = total - sobol
        columns = []
        if sobol:
            # One shift per replicate, so that later blocks continue the same sequence.
            shift_rng = self._generator(torch.device("cpu"), replicate)
            shift = torch.randint(2**_BITS, (sobol,), generator=shift_rng, dtype=torch.int32)
            # Rounded up to a power of four so that the cache holds few entries.
            length = 4 ** math.ceil(math.log2(start + count) / 2)
            net = _sobol(sobol, length, (self.seed + replicate) % SCRAMBLES)[start : start + count]
            # Pageable memory is copied before the call returns, so non_blocking is safe.
            uniform = ((net ^ shift).double() / 2**_BITS).to(like.dtype)
            columns.append(uniform.to(like.device, non_blocking=True))
        if latin:
            # Blocks and replicates differ by their shifts, nearby ones also by their permutations.
            scramble = (self.seed + replicate + start // max(count, 1)) % LATIN_SCRAMBLES
            columns.append(_latin_hypercube(count, latin, scramble, generator, like))
        if not columns:
            empty = like.new_zeros(count, 0)
            return empty, empty
        eps = _normal_from_uniform(torch.cat(columns, dim=1))
        return eps[:, : self.rank], eps[:, self.rank :]

    def replicated_block(
        self, start: int, count: int, replicates: int, *, like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same block of several replicates, one after another: (replicates·count, ·)."""
        blocks = [self.block(start, count, like=like, replicate=r) for r in range(replicates)]
        return torch.cat([b[0] for b in blocks]), torch.cat([b[1] for b in blocks])


def _block_of(
    sampler: str, dimension: int, start: int, count: int, seed: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Points ``start … start+count−1`` of all coordinates alike: (count, dimension)."""
    like = torch.zeros((), device=device, dtype=dtype)
    return IntegrationPoints(sampler, dimension, 0, seed).block(start, count, like=like)[0]


_random_points = constant(_block_of)


@functools.lru_cache(maxsize=64)
def _constant_points(
    count: int, dimension: int, seed: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    return _block_of("sobol", dimension, 0, count, seed, device, dtype)


_known_points = constant(_constant_points)


def constant_points(count: int, dimension: int, seed: int, like: Tensor) -> Tensor:
    """Quasi-random normal points (count, dimension), kept for the next call."""
    return _known_points(count, dimension, seed, like.device, like.dtype)


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw a seed for :class:`IntegrationPoints` from ``generator``, or from torch's default generator."""
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**62, (), generator=generator, device=device).item())


# --- control variate ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaylorControl:
    """Second-order expansion of softmax(u) around the mean, whose expectation is known.

    ``probs``: softmax at the mean (B, K). ``expectation``: that of the expansion minus ``probs`` (B, K).
    """

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
        """Expansions of some examples of the batch."""
        return TaylorControl(self.probs[index], self.expectation[index])

    def deviation(self, delta: Tensor) -> Tensor:
        """p·(c + ½(c² − v)) at δ (B, n, K), less its expectation: mean zero, sum over classes zero."""
        p = self.probs.unsqueeze(-2)
        centred = delta - (p * delta).sum(-1, keepdim=True)
        square = centred.square()
        spread = (p * square).sum(-1, keepdim=True)
        return p * (centred + 0.5 * (square - spread)) - self.expectation.unsqueeze(-2)


# --- draws and streamed sums ----------------------------------------------------------------------------


def num_coordinates(utility: UtilityNormal) -> tuple[int, int]:
    """(rank, diagonal): numbers of normal coordinates of this utility; (0, 0) without variance."""
    form = utility.form
    # Values cannot be read under tracing, and reading them makes the host wait for the device: a diagonal is
    # assumed there, and where it has a gradient.
    diagonal = torch.compiler.is_compiling() or utility.var.requires_grad or bool(utility.var.any())
    return (0 if form is None else form.rank), (utility.mean.shape[-1] if diagonal else 0)


def draw(
    utility: UtilityNormal, std: Tensor, eps_factor: Tensor, eps_diagonal: Tensor, out: Tensor | None = None
) -> Tensor:
    """u = mean + std ⊙ ε_K + F ε_R, Eq. (4): (b, n, K) for points (n, ·) or (b, n, ·), into ``out``, which
    needs a diagonal.
    """
    u = utility.mean.unsqueeze(-2)
    if eps_diagonal.shape[-1]:
        u = torch.addcmul(u, std.unsqueeze(-2), eps_diagonal, out=out)
    form = utility.form
    if form is None:
        return u
    if out is not None or (isinstance(form, Factor) and form.is_dense):
        eps = eps_factor.expand(u.shape[0], -1, -1)
        return torch.baddbmm(u, eps, form.dense().expand(u.shape[0], -1, -1).mT, out=out)
    return u + form.matmul(eps_factor)


def row_chunks(mean: Tensor, points: int) -> list[slice]:
    """Slices of the rows of mean (B, K) that are processed at a time."""
    batch, classes = mean.shape
    if torch.compiler.is_compiling():  # the number of slices would be that of the traced batch
        return [slice(None)]
    budget = CPU_CHUNK if mean.device.type == "cpu" else GPU_CHUNK
    rows = max(1, min(batch, budget // (min(points, 32) * classes)))
    return [slice(i, min(i + rows, batch)) for i in range(0, batch, rows)]


def point_chunks(points: int, rows: int, classes: int, device: torch.device) -> list[slice]:
    """Slices of the points that ``rows`` rows are evaluated at together."""
    if torch.compiler.is_compiling():
        return [slice(None)]
    budget = CPU_CHUNK if device.type == "cpu" else GPU_CHUNK
    step = max(1, min(points, budget // max(1, rows * classes)))
    return [slice(i, min(i + step, points)) for i in range(0, points, step)]


def pack(utility: UtilityNormal) -> list[Tensor | None]:
    """Utility as a flat list of tensors: mean, std, then basis, row, column of each factor."""
    form = utility.form
    parts = () if form is None else form.parts if isinstance(form, FactorSum) else (form,)
    tensors: list[Tensor | None] = [utility.mean, utility.var.sqrt()]
    for part in parts:
        tensors += [part.basis, part.row, part.column]
    return tensors


def unpack(tensors: list[Tensor | None]) -> tuple[UtilityNormal, Tensor]:
    """Utility of a flat list, with a placeholder as its ``var``, and its std."""
    mean, std = tensors[:2]
    assert mean is not None
    assert std is not None
    parts = []
    for i in range(2, len(tensors), 3):
        basis = tensors[i]
        assert basis is not None
        parts.append(Factor(basis, tensors[i + 1], tensors[i + 2]))
    return UtilityNormal(mean, std, FactorSum(tuple(parts)) if parts else None), std


def sample(utility: UtilityNormal, count: int, *, seed: int = 0, out: Tensor | None = None) -> Tensor:
    """Draws of u at quasi-random points of all coordinates, all in memory: (B, count, K), into ``out``."""
    rank = 0 if utility.form is None else utility.form.rank
    eps = constant_points(count, rank + utility.mean.shape[-1], seed, utility.mean)
    return draw(utility, utility.var.sqrt(), eps[:, :rank], eps[:, rank:], out)


class StreamedLogSoftmax(torch.autograd.Function):
    """log mean_s softmax(u_s), or mean_s log softmax(u_s): (B, K).

    With q_s = softmax(u_s), p̄ = mean q_s and g the gradient of log p̄:
    du_s = r_s − q_s Σ_c r_sc with r_sc = g_c q_sc / (S p̄_c), every factor of which is bounded.
    """

    @staticmethod
    def forward(
        ctx: Any,
        points: IntegrationPoints,
        count: int,
        likelihood: str,
        flip: Tensor | None,
        *tensors: Tensor | None,
    ) -> Tensor:
        utility, std = unpack(list(tensors))
        batch, classes = utility.mean.shape
        start = -math.inf if likelihood == "log_mean" else 0.0
        out = utility.mean.new_full((batch, classes), start)
        for eps_factor, eps_diagonal, rows, part in stream(utility, points, count, flip):
            log_q = torch.log_softmax(draw(part, std[rows], eps_factor, eps_diagonal), -1)
            if likelihood == "log_mean":
                out[rows] = torch.logaddexp(out[rows], log_q.logsumexp(1))
            else:
                out[rows] += log_q.sum(1)
        out = out - math.log(count) if likelihood == "log_mean" else out / count
        ctx.points, ctx.count, ctx.likelihood = points, count, likelihood
        ctx.present = [t is not None for t in tensors]
        ctx.save_for_backward(
            out, *([flip] if flip is not None else []), *[t for t in tensors if t is not None]
        )
        ctx.flipped = flip is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, *rest = ctx.saved_tensors
        flip = rest.pop(0) if ctx.flipped else None
        tensors: list[Tensor | None] = [rest.pop(0) if present else None for present in ctx.present]
        grads = [None if t is None else torch.zeros_like(t) for t in tensors]
        utility, _ = unpack(tensors)
        for eps_factor, eps_diagonal, rows, _ in stream(utility, ctx.points, ctx.count, flip):
            with torch.enable_grad():
                leaves = [
                    None if t is None else _rows_of(t, i, rows).detach().requires_grad_()
                    for i, t in enumerate(tensors)
                ]
                part, std = unpack(leaves)
                u = draw(part, std, eps_factor, eps_diagonal)
            log_q = torch.log_softmax(u.detach(), -1)
            weight = grad[rows].unsqueeze(1) / ctx.count
            if ctx.likelihood == "log_mean":
                weight = weight * torch.exp(log_q - out[rows].unsqueeze(1))
            d_u = weight - torch.exp(log_q) * weight.sum(-1, keepdim=True)
            wanted = [leaf for leaf in leaves if leaf is not None]
            pieces = iter(torch.autograd.grad(u, wanted, d_u, allow_unused=True))
            for i, leaf in enumerate(leaves):
                piece = None if leaf is None else next(pieces)
                total = grads[i]
                if piece is not None and total is not None:
                    _rows_of(total, i, rows).add_(piece)
        return (None, None, None, None, *grads)


def _rows_of(tensor: Tensor, position: int, rows: slice) -> Tensor:
    """Rows of a packed tensor; a basis of two dimensions is shared by the batch."""
    shared = position >= 2 and (position - 2) % 3 == 0 and tensor.dim() == 2
    return tensor if shared else tensor[rows]


def stream(
    utility: UtilityNormal, points: IntegrationPoints, count: int, flip: Tensor | None
) -> Iterator[Any]:
    """Yield (ε_R, ε_K, rows, utility of the rows), every row with every point once."""
    for start in range(0, count, BLOCK):
        size = min(BLOCK, count - start)
        eps_factor, eps_diagonal = points.block(start, size, like=utility.mean)
        for rows in row_chunks(utility.mean, size):
            part = utility.rows(rows)
            batch, classes = part.mean.shape
            for chunk in point_chunks(size, batch, classes, part.mean.device):
                e_factor, e_diagonal = eps_factor[chunk], eps_diagonal[chunk]
                if flip is not None:
                    signs = flip[rows].unsqueeze(1)
                    e_factor = e_factor * signs[..., : points.rank]
                    e_diagonal = e_diagonal * signs[..., points.rank :]
                yield e_factor, e_diagonal, rows, part


def random_signs(points: IntegrationPoints, batch: int, like: Tensor) -> Tensor:
    """Random signs of the coordinates of every example: errors of examples become uncorrelated."""
    generator = torch.Generator(device=like.device).manual_seed(points.seed)
    index, parts = points.part
    shape = (parts * batch, points.rank + points.diagonal)
    signs = torch.randint(0, 2, shape, generator=generator, device=like.device)
    return signs[index * batch : (index + 1) * batch].to(like) * 2 - 1


@torch.no_grad()
def controlled_mean(utility: UtilityNormal, sampler: str, count: int, seed: int) -> Tensor:
    """Mean of softmax(u) over ``count`` points in all coordinates: (B, K).

    For quasi-random points the zero-mean deviation of the Taylor control is subtracted where noise is mild.
    """
    classes = utility.mean.shape[-1]
    std, rank = utility.var.sqrt(), 0 if utility.form is None else utility.form.rank
    control = TaylorControl.of(utility)
    mild = (utility.marginal_variance().amax(-1) <= MILD_VARIANCE).to(std)[:, None, None]
    out = torch.zeros_like(utility.mean)
    for start in range(0, count, BLOCK):
        eps = _points_of(sampler, rank + classes, start, min(BLOCK, count - start), seed, utility.mean)
        for rows in row_chunks(utility.mean, len(eps)):
            part = utility.rows(rows)
            for chunk in point_chunks(len(eps), part.mean.shape[0], classes, part.mean.device):
                u = draw(part, std[rows], eps[chunk, :rank], eps[chunk, rank:])
                q = torch.softmax(u, -1)
                if sampler == "sobol":
                    deviation = control.rows(rows).deviation(u - part.mean.unsqueeze(-2))
                    q = torch.addcmul(q, mild[rows], deviation, value=-1)
                out[rows] += q.sum(1) / count
    out = out.clamp_min(0)  # the control may have moved it below
    return out / out.sum(-1, keepdim=True)


def _points_of(sampler: str, dimension: int, start: int, count: int, seed: int, like: Tensor) -> Tensor:
    if sampler == "sobol":
        return constant_points(count, dimension, seed + start, like)
    return _random_points(sampler, dimension, start, count, seed, like.device, like.dtype)
