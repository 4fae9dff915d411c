"""Operator norms by power iteration, and the soft spectral bound W·min(1, c/σ).

State is explicit: a vector v goes in, (σ, v) comes out. All in float32 or better, also under autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv1d_weight, conv2d_weight

Size = int | Sequence[int]

_CONV: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d}
_CONV_TRANSPOSE: dict[int, Callable[..., Tensor]] = {1: F.conv_transpose1d, 2: F.conv_transpose2d}
_CONV_WEIGHT: dict[int, Callable[..., Tensor]] = {1: conv1d_weight, 2: conv2d_weight}


def start_vector(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Fixed Gaussian vector from which the power iteration starts.

    Drawn with a fixed seed on the CPU: the global generator is left alone, and every rank and every resumed
    run starts from the same vector on every device.
    """
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tuple(shape), generator=generator, dtype=dtype, device="cpu").to(device)


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype that norms of x are measured in: its own, or float32 where that is lower."""
    return torch.promote_types(x.dtype, torch.float32)


def linear_norm(weight: Tensor, v: Tensor, iterations: int = 1) -> tuple[Tensor, Tensor]:
    """Largest singular value of a matrix: σ = uᵀWv with u ∝ Wv, v ∝ Wᵀu.

    weight: (out, in); v: (in,), not zero. Returns (σ scalar, v of unit length and without gradient);
    ∂σ/∂W = uvᵀ, u and v held fixed. The original lets no gradient through σ: it overwrites the kernel.

    >>> sigma, v = linear_norm(torch.diag(torch.tensor([3.0, 1.0])), torch.ones(2), iterations=20)
    >>> round(sigma.item(), 4), [round(x, 4) for x in v.tolist()]
    (3.0, [1.0, 0.0])
    """
    with torch.autocast(weight.device.type, enabled=False):
        norms, _, v = _power_iteration(_matrix(weight), v, iterations)
    return norms.amax(), v


def conv_norm(
    weight: Tensor,
    v: Tensor,
    iterations: int = 1,
    *,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
) -> tuple[Tensor, Tensor]:
    """Operator norm of a convolution, padding included, on inputs of one spatial size.

    σ = max ‖conv(v)‖ / ‖v‖, by the convolution A and its exact adjoint Aᵀ (not by the kernel reshaped to a
    matrix, whose norm can be too small by a factor √(kernel size)).

    weight: (out, in/groups, *kernel), one or two kernel dimensions; v: (in, *spatial), which sets the input
    size. The other arguments are those of `torch.nn.Conv2d`. Returns (σ scalar, v) as `linear_norm` does.

    With groups the operator is block diagonal: each group iterates by itself and σ is the largest, because a
    common vector would die out in the smaller groups and never see them grow.

    >>> kernel = torch.full((1, 1, 3), 1 / 3)                     # a moving average
    >>> sigma, _ = conv_norm(kernel, torch.ones(1, 64), 200, padding=1, padding_mode="circular")
    >>> round(sigma.item(), 4)
    1.0
    """
    with torch.autocast(weight.device.type, enabled=False):
        operator = _convolution(weight, v, stride, padding, dilation, groups, padding_mode)
        norms, _, v = _power_iteration(operator, v, iterations)
    return norms.amax(), v


@torch.no_grad()
def linear_direction(weight: Tensor, v: Tensor, iterations: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """(σ, v) as from `linear_norm`, and G = ∂σ/∂W = uvᵀ, (out, in), for `cached_norm`.

    >>> sigma, v, direction = linear_direction(torch.diag(torch.tensor([3.0, 1.0])), torch.ones(2), 20)
    >>> cached_norm(torch.tensor([[3.1, 0.1], [0.0, 1.0]]), direction).round(decimals=4)  # the weight moved
    tensor(3.1000)
    """
    with torch.autocast(weight.device.type, enabled=False):
        return _with_direction(_matrix(weight), v, iterations)


@torch.no_grad()
def conv_direction(
    weight: Tensor, v: Tensor, iterations: int = 1, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(σ, v) as from `conv_norm` with the same options, and G, of the weight's shape, for `cached_norm`.

    G is the gradient of ⟨u, conv(v; W)⟩ in W, the correlation of v with u. Each group has its own part of
    it, also where another's σ is larger: that may change before the next power iteration.
    """
    with torch.autocast(weight.device.type, enabled=False):
        return _with_direction(_convolution(weight, v, **options), v, iterations)


def cached_norm(weight: Tensor, direction: Tensor, groups: int = 1) -> Tensor:
    """σ ≈ ⟨W, G⟩, the largest of the groups, of a weight that has changed since G was computed.

    weight and direction: (out, in/groups, ...); returns a scalar, float32 or better. ⟨W, G⟩ = ⟨u, Av⟩ with
    unit vectors: equal to σ at the weight of G (σ is homogeneous of degree one), exact to first order in the
    change of W where σ is simple, and never above the true norm. ∂/∂W is that of `linear_norm` and
    `conv_norm`, which hold u and v fixed: G, of the largest group.
    """
    product = _wide(weight) * direction
    if groups == 1:  # fewer kernel launches
        return product.sum()
    return product.reshape(groups, -1).sum(dim=1).amax()


def soft_bound(weight: Tensor, sigma: Tensor, bound: Tensor | float) -> Tensor:
    """Weight with its norm bounded by c: W·min(1, c/σ).

    weight: any shape, returned in its own dtype; sigma: scalar; bound: c > 0. Where σ ≤ c the weight passes
    unchanged to the bit and no gradient reaches σ; σ = 0 is allowed.

    >>> soft_bound(torch.tensor([[4.0]]), torch.tensor(4.0), 0.5)
    tensor([[0.5000]])
    """
    c = torch.as_tensor(bound, dtype=sigma.dtype, device=sigma.device)
    # c/max(σ, c) is min(1, c/σ) without the 0·∞ in its gradient at σ = 0.
    return (_wide(weight) * (c / torch.maximum(sigma, c))).to(weight.dtype)


class _Operator(NamedTuple):
    """x ↦ Ax, linear in a weight W too and block diagonal in ``groups`` of channels."""

    apply: Callable[[Tensor], Tensor]
    adjoint: Callable[[Tensor], Tensor]
    direction: Callable[[Tensor, Tensor], Tensor]
    """u, v ↦ ∂⟨u, Av⟩/∂W."""
    groups: int = 1


def _matrix(weight: Tensor) -> _Operator:
    w = _wide(weight)
    return _Operator(lambda x: w @ x, lambda y: w.T @ y, torch.outer)


def _convolution(
    weight: Tensor,
    v: Tensor,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
) -> _Operator:
    dims, size, kernel = weight.dim() - 2, tuple(v.shape[1:]), tuple(weight.shape[2:])
    if dims not in _CONV or len(size) != dims:
        raise ValueError(
            f"a convolution's norm takes the weight of a Conv1d or Conv2d and v of shape (in, *spatial); "
            f"got weight {tuple(weight.shape)} and v {tuple(v.shape)}"
        )
    steps, dilations = _per_axis(stride, dims), _per_axis(dilation, dims)
    pads = _pads(padding, kernel, dilations)
    mode = "constant" if padding_mode == "zeros" else padding_mode
    flat_pads = [p for pair in reversed(pads) for p in pair]
    options: dict[str, Any] = {"stride": steps, "dilation": dilations, "groups": groups}
    w = _wide(weight)

    def padded(x: Tensor) -> Tensor:
        return F.pad(x[None], flat_pads, mode=mode)

    def apply(x: Tensor) -> Tensor:
        return _CONV[dims](padded(x), w, **options)[0]

    def adjoint(y: Tensor) -> Tensor:
        # Inputs past the last whole stride are read by no kernel: output_padding gives them back as zeros.
        rest = [
            (n + sum(pad) - d * (k - 1) - 1) % s
            for n, pad, d, k, s in zip(size, pads, dilations, kernel, steps, strict=True)
        ]
        x = _CONV_TRANSPOSE[dims](y[None], w, output_padding=rest, **options)
        return _pad_adjoint(x[0], size, pads, mode)

    def direction(u: Tensor, v: Tensor) -> Tensor:
        return _CONV_WEIGHT[dims](padded(v), w.shape, u[None], **options)

    return _Operator(apply, adjoint, direction, groups)


def _power_iteration(operator: _Operator, v: Tensor, iterations: int) -> tuple[Tensor, Tensor, Tensor]:
    """σ of each group (groups,), u and v."""
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    apply, adjoint, _, groups = operator
    v = _wide(v)
    with torch.no_grad():
        for _ in range(iterations - 1):
            v = _unit(adjoint(_unit(apply(v), groups)), groups, otherwise=v)
        u = _unit(apply(v), groups)
    # σ = ⟨Aᵀu, v⟩ carries the gradient through the adjoint, so one iteration costs one A and one Aᵀ.
    back = adjoint(u)
    with torch.no_grad():
        v = _unit(back, groups, otherwise=v)
    return (back * v).reshape(groups, -1).sum(dim=1), u, v


def _with_direction(operator: _Operator, v: Tensor, iterations: int) -> tuple[Tensor, Tensor, Tensor]:
    norms, u, v = _power_iteration(operator, v, iterations)
    return norms.amax(), v, operator.direction(u, v)


def _unit(x: Tensor, groups: int, otherwise: Tensor | None = None) -> Tensor:
    """Each group of channels at unit length; a group of zeros (a layer may start so) gives `otherwise`."""
    blocks = x.reshape(groups, -1)
    norm = torch.linalg.vector_norm(blocks, dim=1, keepdim=True)
    tiny = torch.finfo(x.dtype).tiny
    fallback = blocks if otherwise is None else otherwise.reshape(groups, -1)
    return torch.where(norm > tiny, blocks / norm.clamp_min(tiny), fallback).reshape(x.shape)


def _wide(x: Tensor) -> Tensor:
    return x.to(wide_dtype(x))


def _per_axis(value: Size, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else list(value)


def _pads(padding: Size | str, kernel: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, int]]:
    """(before, after) for each spatial axis, as torch.nn.Conv2d pads."""
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if isinstance(padding, str):
        raise ValueError(f'padding must be "same", "valid" or numbers, got {padding!r}')
    return [(p, p) for p in _per_axis(padding, len(kernel))]


def _pad_adjoint(y: Tensor, size: Sequence[int], pads: Sequence[tuple[int, int]], mode: str) -> Tensor:
    """Adjoint of F.pad: zeros are cut off, copies are added to the elements they were copied from."""
    for axis, (n, pad) in enumerate(zip(size, pads, strict=True), start=1):
        if mode == "constant":
            y = y.narrow(axis, pad[0], n)
        elif any(pad):
            index = torch.arange(n, dtype=y.dtype, device=y.device)
            source = F.pad(index[None, None], pad, mode=mode)[0, 0].long()
            shape = [*y.shape[:axis], n, *y.shape[axis + 1 :]]
            y = y.new_zeros(shape).index_add(axis, source, y)
    return y
