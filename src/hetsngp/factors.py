"""Factors F of a covariance FFᵀ, kept in a form that need not be written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Factor:
    """A factor F of a covariance FFᵀ, kept as row ⊙ basis ⊙ column so that it need not be written out.

    ``basis``: (K, R) shared by the batch, or (B, K, R). ``row``: (B, K) or None. ``column``: (B, R) or None.
    F[b, k, r] = row[b, k] · basis[(b,) k, r] · column[b, r].

    >>> f = Factor(torch.eye(2), column=torch.tensor([[1.0, 3.0]]))
    >>> f.dense()
    tensor([[[1., 0.],
             [0., 3.]]])
    """

    basis: Tensor
    row: Tensor | None = None
    column: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.basis.shape[-1]

    @property
    def is_dense(self) -> bool:
        """Whether it is a plain (B, K, R) already."""
        return self.basis.dim() == 3 and self.row is None and self.column is None

    def dense(self) -> Tensor:
        """F written out: (B, K, R)."""
        out = self.basis if self.basis.dim() == 3 else self.basis.unsqueeze(0)
        if self.row is not None:
            out = out * self.row.unsqueeze(-1)
        return out if self.column is None else out * self.column.unsqueeze(-2)

    def matmul(self, eps: Tensor) -> Tensor:
        """F ε for ε: (n, R) or (B, n, R) → (B, n, K), or (1, n, K) where nothing depends on the row."""
        if self.column is not None:
            eps = eps * self.column.unsqueeze(-2)
        out = eps @ self.basis.mT
        if out.dim() == 2:
            out = out.unsqueeze(0)
        return out if self.row is None else out * self.row.unsqueeze(-2)

    def project(self, x: Tensor) -> Tensor:
        """Fᵀ x for x: (B, K) → (B, R)."""
        if self.row is not None:
            x = x * self.row
        out = (x.unsqueeze(-2) @ self.basis).squeeze(-2)
        return out if self.column is None else out * self.column

    def variance(self) -> Tensor:
        """Diagonal of FFᵀ: (B, K), or (1, K) where nothing depends on the row."""
        square = self.basis.square()
        if self.column is not None:
            out = (square @ self.column.square().unsqueeze(-1)).squeeze(-1)
        else:
            out = square.sum(-1)
        if out.dim() == 1:
            out = out.unsqueeze(0)
        return out if self.row is None else out * self.row.square()

    def map(self, fn: Callable[[Tensor], Tensor]) -> Factor:
        """Apply ``fn`` to every tensor that has a batch dimension."""
        basis = fn(self.basis) if self.basis.dim() == 3 else self.basis
        return Factor(
            basis,
            None if self.row is None else fn(self.row),
            None if self.column is None else fn(self.column),
        )

    def scaled(self, by: Tensor | float) -> Factor:
        """The factor times a scalar."""
        return replace(self, basis=self.basis * by)

    def weighted(self, by: Tensor) -> Factor:
        """Each row of the batch times its own number; by: (B, 1)."""
        if self.is_dense:
            return Factor(self.basis * by.unsqueeze(-1))
        return replace(self, row=by if self.row is None else self.row * by)


@dataclass(frozen=True)
class FactorSum:
    """Several independent factors side by side: FFᵀ = Σ FᵢFᵢᵀ, R = Σ Rᵢ."""

    parts: tuple[Factor, ...]

    @property
    def rank(self) -> int:
        return sum(part.rank for part in self.parts)

    def dense(self) -> Tensor:
        """(B, K, R)."""
        dense = [part.dense() for part in self.parts]
        batch = max(d.shape[0] for d in dense)
        return torch.cat([d.expand(batch, -1, -1) for d in dense], dim=-1)

    def matmul(self, eps: Tensor) -> Tensor:
        """ε: (n, R) or (B, n, R) → (B, n, K)."""
        pieces = eps.split([part.rank for part in self.parts], dim=-1)
        out = self.parts[0].matmul(pieces[0])
        for part, piece in zip(self.parts[1:], pieces[1:], strict=True):
            out = out + part.matmul(piece)
        return out

    def project(self, x: Tensor) -> Tensor:
        """Fᵀ x for x: (B, K) → (B, R)."""
        return torch.cat([part.project(x) for part in self.parts], dim=-1)

    def variance(self) -> Tensor:
        """Diagonal of FFᵀ: (B, K)."""
        out = self.parts[0].variance()
        for part in self.parts[1:]:
            out = out + part.variance()
        return out

    def map(self, fn: Callable[[Tensor], Tensor]) -> FactorSum:
        return FactorSum(tuple(part.map(fn) for part in self.parts))

    def scaled(self, by: Tensor | float) -> FactorSum:
        return FactorSum(tuple(part.scaled(by) for part in self.parts))

    def weighted(self, by: Tensor) -> FactorSum:
        return FactorSum(tuple(part.weighted(by) for part in self.parts))


AnyFactor = Factor | FactorSum


def join_factors(*factors: AnyFactor | None) -> AnyFactor | None:
    """Factors of independent Gaussians that are added."""
    parts: list[Factor] = []
    for factor in factors:
        if factor is not None:
            parts.extend(factor.parts if isinstance(factor, FactorSum) else (factor,))
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else FactorSum(tuple(parts))
