"""−log E softmax(u)_y and its gradient in one pass over the points: the training loss needs one class only.

With q = softmax(u) at a point and w ∝ q_y over the points, the gradient of log E q_y is

* in the mean, e_y − E_w q;
* in the standard deviations d and the factor F, along the path: E_w (e_y − q)_c ε_c and E_w (e_y − q) εᵀ;
* or, by Price's theorem ∂E g/∂Σ = ½ E ∂²g/∂u², d ⊙ diag E_w H and E_w[H] F with
  H = (e_y − q)(e_y − q)ᵀ − diag(q) + qqᵀ.

Price's form has no ε in it: much less variance where the noise is mild, and more than the path's where it is
wide. Which form is used is decided for each example, for d and for F, by the variance of that part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hetsngp.functional.sampling import BLOCK, MILD_VARIANCE, IntegrationPoints, point_chunks, row_chunks

# Below this q_y is computed by its logarithm, before it underflows in float32.
_SMALLEST = 1e-30
# Elements of a gradient up to which a GPU computes both forms for all examples: it would be idle while the
# host waits for the number of examples of each form.
_SMALL = 2**22


class _ByPrice(NamedTuple):
    """Which gradients take Price's form; the others go along the path."""

    diagonal: bool
    factor: bool


@dataclass(frozen=True)
class _Gaussian:
    """u = mean + std ⊙ ε_K + F ε_R: (B, K), (B, K) or None, Fᵀ (B, R, K) or None."""

    mean: Tensor
    std: Tensor | None
    factor: Tensor | None

    @property
    def rank(self) -> int:
        return 0 if self.factor is None else self.factor.shape[1]

    def rows(self, index: Tensor | slice) -> _Gaussian:
        std = None if self.std is None else self.std[index]
        return _Gaussian(self.mean[index], std, None if self.factor is None else self.factor[index])

    def mild(self) -> tuple[Tensor, Tensor]:
        """Whether d, and whether F, adds little variance to every logit of an example: (B,) bool each."""
        none = torch.zeros_like(self.mean)
        each = (
            none if self.std is None else self.std.square(),
            none if self.factor is None else self.factor.square().sum(1),
        )
        diagonal, factor = (variance.amax(-1) <= MILD_VARIANCE for variance in each)
        return diagonal, factor

    def draw(self, eps_factor: Tensor, eps_diagonal: Tensor) -> Tensor:
        """(B, n, K) at points ε_R (n, R) and ε_K (n, K)."""
        u, batch, n = self.mean.unsqueeze(1), len(self.mean), len(eps_factor)
        u = u.expand(-1, n, -1) if self.std is None else torch.addcmul(u, self.std.unsqueeze(1), eps_diagonal)
        if self.factor is None:
            return u
        return torch.baddbmm(u, eps_factor.expand(batch, -1, -1), self.factor)


@dataclass
class _Sums:
    """Sums over points, all in units of exp(peak) so that those of an improbable label do not underflow."""

    peak: Tensor  # (B,) largest log q_y so far
    weight: Tensor  # (B,) Σ w
    classes: Tensor  # (B, 1 + R, K): Σ w q, and Σ w q times ε_R or (F_y − 2 qᵀF)
    diagonal: Tensor  # (B, K): Σ w q ε_K or Σ w q²
    label: Tensor  # (B, 1 + R): terms of the label's row only, of d and of F

    @staticmethod
    def zeros(mean: Tensor, rank: int) -> _Sums:
        batch, classes = mean.shape
        return _Sums(
            mean.new_full((batch,), -torch.inf),
            mean.new_zeros(batch),
            mean.new_zeros(batch, 1 + rank, classes),
            torch.zeros_like(mean),
            mean.new_zeros(batch, 1 + rank),
        )

    def add(self, rows: slice, log_qy: Tensor, q: Tensor, terms: Any) -> None:
        """``terms(w)``: (b, R, n) for the classes, (b, n, K) for the diagonal, (b, 1 + R) for the label."""
        peak = torch.maximum(self.peak[rows], log_qy.amax(1))
        old = torch.exp(self.peak[rows] - peak)
        w = torch.exp(log_qy - peak.unsqueeze(1))
        tail, diagonal, label = terms(w)
        self.peak[rows] = peak
        self.weight[rows] = self.weight[rows] * old + w.sum(1)
        fresh = torch.cat([w.unsqueeze(1), tail], 1) @ q
        self.classes[rows] = self.classes[rows] * old.view(-1, 1, 1) + fresh
        if diagonal is not None:
            fresh = (w.unsqueeze(1) @ diagonal).squeeze(1)
            self.diagonal[rows] = self.diagonal[rows] * old.unsqueeze(1) + fresh
        self.label[rows] = self.label[rows] * old.unsqueeze(1) + label


class LabelNLL(torch.autograd.Function):
    """(mean, std, factor) → −log E softmax(u)_y (B,), u = mean + std ⊙ ε_K + F ε_R; std or F may be None.

    ``factor`` is Fᵀ (B, R, K), so that products over classes are contiguous in memory. ``forward`` computes
    the gradient too; ``backward`` only scales it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        points: IntegrationPoints,
        count: int,
        y: Tensor,
        mean: Tensor,
        std: Tensor | None,
        factor: Tensor | None,
    ) -> Tensor:
        u = _Gaussian(mean, std, factor)
        small = mean.is_cuda and mean.numel() * (1 + u.rank) <= _SMALL
        nll, grads = (_by_both if small else _by_kind)(points, count, y, u)
        ctx.save_for_backward(*grads)
        ctx.present = (True, std is not None, factor is not None)
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        scaled = [next(saved) if present else None for present in ctx.present]
        out = [None if g is None else g * grad.view(-1, *[1] * (g.dim() - 1)) for g in scaled]
        return (None, None, None, *out)


def _by_kind(points: IntegrationPoints, count: int, y: Tensor, u: _Gaussian) -> tuple[Tensor, list[Tensor]]:
    """Value and gradients with the form that suits each example, examples of the same forms together."""
    mild_diagonal, mild_factor = u.mild()
    nll = torch.empty_like(u.mean[:, 0])
    grads = [torch.empty_like(t) for t in (u.mean, u.std, u.factor) if t is not None]
    kind = 2 * mild_diagonal.long() + mild_factor.long()
    for number, rows_of_kind in enumerate(torch.bincount(kind, minlength=4).tolist()):
        by_price = _ByPrice(diagonal=number >= 2, factor=number % 2 == 1)
        if rows_of_kind == len(nll):
            nll, grads = _value_and_gradient(points, count, y, u, by_price)
        elif rows_of_kind:
            rows = (kind == number).nonzero().squeeze(1)
            nll[rows], pieces = _value_and_gradient(points, count, y[rows], u.rows(rows), by_price)
            for total, piece in zip(grads, pieces, strict=True):
                total[rows] = piece
    return nll, grads


def _by_both(points: IntegrationPoints, count: int, y: Tensor, u: _Gaussian) -> tuple[Tensor, list[Tensor]]:
    """Value and gradients in both forms for every example, of which each takes its own: no host wait."""
    nll, along = _value_and_gradient(points, count, y, u, _ByPrice(diagonal=False, factor=False))
    _, price = _value_and_gradient(points, count, y, u, _ByPrice(diagonal=True, factor=True))
    choices = [mild for mild, part in zip(u.mild(), (u.std, u.factor), strict=True) if part is not None]
    pairs = zip(choices, price[1:], along[1:], strict=True)
    return nll, [along[0], *(torch.where(mild.view(-1, *[1] * (b.dim() - 1)), a, b) for mild, a, b in pairs)]


def _value_and_gradient(
    points: IntegrationPoints, count: int, y: Tensor, u: _Gaussian, by_price: _ByPrice
) -> tuple[Tensor, list[Tensor]]:
    sums = _Sums.zeros(u.mean, u.rank)
    classes, device = u.mean.shape[1], u.mean.device
    for start in range(0, count, BLOCK):
        size = min(BLOCK, count - start)
        eps_factor, eps_diagonal = points.block(start, size, like=u.mean)
        for rows in row_chunks(u.mean, size):
            part = u.rows(rows)
            for chunk in point_chunks(size, len(part.mean), classes, device):
                _add_chunk(sums, rows, y[rows], part, eps_factor[chunk], eps_diagonal[chunk], by_price)
    return _finish(sums, count, y, u, by_price)


def _add_chunk(
    sums: _Sums,
    rows: slice,
    y: Tensor,
    gaussian: _Gaussian,
    eps_factor: Tensor,
    eps_diagonal: Tensor,
    by_price: _ByPrice,
) -> None:
    std, factor = gaussian.std, gaussian.factor
    n = len(eps_factor)
    u = gaussian.draw(eps_factor, eps_diagonal)
    q = torch.softmax(u, -1)
    at = y.view(-1, 1, 1).expand(-1, n, 1)
    q_y = q.gather(2, at).squeeze(2)
    log_qy = q_y.log()
    if q_y.is_cuda or bool((q_y < _SMALLEST).any()):
        log_qy = u.gather(2, at).squeeze(2) - u.logsumexp(-1)

    def of_diagonal(w: Tensor) -> tuple[Tensor | None, Tensor]:
        if std is None:
            return None, torch.zeros_like(w[:, :1])
        if by_price.diagonal:
            return q.square(), (w * (1 - 2 * q_y)).sum(1, keepdim=True)
        return q * eps_diagonal, (w * eps_diagonal.T[y]).sum(1, keepdim=True)

    def of_factor(w: Tensor) -> tuple[Tensor, Tensor]:
        if factor is None or not by_price.factor:
            tail = w.unsqueeze(1) * eps_factor.T
            return tail, tail.sum(-1)
        product = factor @ q.mT
        from_label = factor.gather(2, y.view(-1, 1, 1).expand(-1, factor.shape[1], 1)) - product
        return w.unsqueeze(1) * (from_label - product), (w.unsqueeze(1) * from_label).sum(-1)

    def terms(w: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        diagonal, of_d = of_diagonal(w)
        tail, of_f = of_factor(w)
        return tail, diagonal, torch.cat([of_d, of_f], -1)

    sums.add(rows, log_qy, q, terms)


def _finish(
    sums: _Sums, count: int, y: Tensor, u: _Gaussian, by_price: _ByPrice
) -> tuple[Tensor, list[Tensor]]:
    std, factor = u.std, u.factor
    nll = -(sums.peak + torch.log(sums.weight / count))
    inverse = 1 / sums.weight
    classes = sums.classes * inverse.view(-1, 1, 1)
    diagonal, label = sums.diagonal * inverse.unsqueeze(1), sums.label * inverse.unsqueeze(1)
    average, tail = classes[:, 0], classes[:, 1:]
    row = torch.arange(len(y), device=y.device)
    grads = [average.clone()]
    grads[0][row, y] -= 1
    if std is not None:
        out = average - 2 * diagonal if by_price.diagonal else diagonal
        out[row, y] -= label[:, 0]
        grads.append(std * out if by_price.diagonal else out)
    if factor is not None:
        out = tail + average.unsqueeze(1) * factor if by_price.factor else tail.clone()
        out[row, :, y] -= label[:, 1:]
        grads.append(out)
    return nll, grads
