"""Sums over integration points in O(B·K) memory: a block is drawn, used and forgotten.

The backward pass draws the same blocks again instead of keeping them, so a gradient costs no more memory
than a value, whatever the number of points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hetsngp.functional.control import TaylorControl
from hetsngp.functional.points import BLOCK, Points
from hetsngp.types import Factor, FactorSum, UtilityNormal

# Elements of a working chunk: a few MiB, so that it stays in a CPU's cache; a GPU wants more at a time.
CPU_CHUNK, GPU_CHUNK = 2**18, 2**24


def spread(utility: UtilityNormal) -> tuple[int, int]:
    """(rank, diagonal): how many normal coordinates this utility needs. (0, 0): it is a point."""
    form = utility.form
    # Under tracing a value cannot be looked at, so the diagonal is taken to be there.
    # What a gradient flows into is there to be moved; a look at it would make the host wait for the device.
    diagonal = torch.compiler.is_compiling() or utility.var.requires_grad or bool(utility.var.any())
    return (0 if form is None else form.rank), (utility.mean.shape[-1] if diagonal else 0)


def _draw(utility: UtilityNormal, std: Tensor, eps_factor: Tensor, eps_diagonal: Tensor) -> Tensor:
    """u = mean + std ⊙ ε_K + F ε_R, Eq. (4): (b, n, K) for points (n, ·) or (b, n, ·)."""
    u = utility.mean.unsqueeze(-2)
    if eps_diagonal.shape[-1]:
        u = torch.addcmul(u, std.unsqueeze(-2), eps_diagonal)
    form = utility.form
    if form is None:
        return u
    if isinstance(form, Factor) and form.is_dense:
        eps = eps_factor.expand(u.shape[0], -1, -1)
        return torch.baddbmm(u, eps, form.basis.mT)
    return u + form.matmul(eps_factor)


def row_chunks(mean: Tensor, points: int) -> list[slice]:
    """Rows of mean (B, K) that are worked on at a time."""
    batch, classes = mean.shape
    budget = CPU_CHUNK if mean.device.type == "cpu" else GPU_CHUNK
    rows = max(1, min(batch, budget // (min(points, 32) * classes)))
    return [slice(i, min(i + rows, batch)) for i in range(0, batch, rows)]


def point_chunks(points: int, rows: int, classes: int, device: torch.device) -> list[slice]:
    """Points that those rows meet at a time."""
    budget = CPU_CHUNK if device.type == "cpu" else GPU_CHUNK
    step = max(1, min(points, budget // max(1, rows * classes)))
    return [slice(i, min(i + step, points)) for i in range(0, points, step)]


def pack(utility: UtilityNormal) -> list[Tensor | None]:
    """A utility as a flat list: mean, std, then basis, row, column of each factor."""
    form = utility.form
    parts = () if form is None else form.parts if isinstance(form, FactorSum) else (form,)
    tensors: list[Tensor | None] = [utility.mean, utility.var.sqrt()]
    for part in parts:
        tensors += [part.basis, part.row, part.column]
    return tensors


def unpack(tensors: list[Tensor | None]) -> tuple[UtilityNormal, Tensor]:
    """The utility of a flat list (its ``var`` is a placeholder) and its std."""
    mean, std = tensors[:2]
    assert mean is not None
    assert std is not None
    parts = []
    for i in range(2, len(tensors), 3):
        basis = tensors[i]
        assert basis is not None
        parts.append(Factor(basis, tensors[i + 1], tensors[i + 2]))
    return UtilityNormal(mean, std, FactorSum(tuple(parts)) if parts else None), std


def sample(utility: UtilityNormal, count: int, *, sampler: str = "sobol", seed: int = 0) -> Tensor:
    """Draws of u at ``count`` integration points: (B, count, K), held at once."""
    rank, diagonal = spread(utility)
    eps_factor, eps_diagonal = Points(sampler, rank, diagonal, seed).block(0, count, like=utility.mean)
    return _draw(utility, utility.var.sqrt(), eps_factor, eps_diagonal).expand(-1, count, -1)


class StreamedLogSoftmax(torch.autograd.Function):
    """log mean_s softmax(u_s), or mean_s log softmax(u_s): (B, K).

    With q_s = softmax(u_s), p̄ = mean q_s and g the gradient of log p̄:
    du_s = r_s − q_s Σ_c r_sc with r_sc = g_c q_sc / (S p̄_c), every factor of which is bounded.
    """

    @staticmethod
    def forward(
        ctx: Any, points: Points, count: int, likelihood: str, flip: Tensor | None, *tensors: Tensor | None
    ) -> Tensor:
        utility, std = unpack(list(tensors))
        batch, classes = utility.mean.shape
        start = -math.inf if likelihood == "log_mean" else 0.0
        out = utility.mean.new_full((batch, classes), start)
        for eps_factor, eps_diagonal, rows, part in stream(utility, points, count, flip):
            log_q = torch.log_softmax(_draw(part, std[rows], eps_factor, eps_diagonal), -1)
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
                u = _draw(part, std, eps_factor, eps_diagonal)
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
    """The rows of a packed tensor; a basis of two dimensions is shared by the batch."""
    shared = position >= 2 and (position - 2) % 3 == 0 and tensor.dim() == 2
    return tensor if shared else tensor[rows]


def stream(utility: UtilityNormal, points: Points, count: int, flip: Tensor | None) -> Iterator[Any]:
    """Yield (ε_R, ε_K, rows, utility of the rows) until every row has met every point once."""
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


def random_signs(points: Points, batch: int, like: Tensor) -> Tensor:
    """A random sign for every coordinate of every row: the rows' integration errors become uncorrelated."""
    generator = torch.Generator(device=like.device).manual_seed(points.seed)
    index, parts = points.part
    shape = (parts * batch, points.rank + points.diagonal)
    signs = torch.randint(0, 2, shape, generator=generator, device=like.device)
    return signs[index * batch : (index + 1) * batch].to(like) * 2 - 1


def replicate_sums(
    utility: UtilityNormal,
    points: Points,
    start: int,
    count: int,
    replicates: int,
    *,
    controlled: bool = False,
) -> Tensor:
    """Σ softmax(u) over points start … start+count−1 of each replicate: (B, replicates, K).

    ``controlled`` subtracts the zero-mean deviation of the Taylor control from every term.
    """
    batch, classes = utility.mean.shape
    out = utility.mean.new_zeros(batch, replicates, classes)
    std = utility.var.sqrt()
    control = TaylorControl.of(utility) if controlled else None
    step = max(1, BLOCK // replicates)
    for begin in range(start, start + count, step):
        size = min(step, start + count - begin)
        eps_factor, eps_diagonal = points.replicated_block(begin, size, replicates, like=utility.mean)
        for rows in row_chunks(utility.mean, size):
            part = utility.rows(rows)
            for r in range(replicates):
                for chunk in point_chunks(size, part.mean.shape[0], classes, part.mean.device):
                    here = slice(r * size + chunk.start, r * size + chunk.stop)
                    u = _draw(part, std[rows], eps_factor[here], eps_diagonal[here])
                    q = torch.softmax(u, -1)
                    if control is not None:
                        q = q - control.rows(rows).deviation(u - part.mean.unsqueeze(-2))
                    out[rows, r] += q.sum(1)
    return out
