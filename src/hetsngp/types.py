"""Values that the package passes on: factors of covariances, Gaussians over logits, and predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "AnyFactor",
    "Factor",
    "FactorSum",
    "LatentNormal",
    "Prediction",
    "UtilityNormal",
    "join_factors",
]


# --- factors of covariances -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Factor:
    """Factor F of a covariance FFᵀ, stored as row ⊙ basis ⊙ column so that it need not be written out.

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
    contrasts: bool = False
    """Whether the basis is an orthonormal basis of the contrasts, the directions orthogonal to 1, with a
    ``column`` and no ``row``."""

    @property
    def rank(self) -> int:
        return self.basis.shape[-1]

    @property
    def is_dense(self) -> bool:
        """Whether it is a plain tensor (B, K, R)."""
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
            column = self.column.square()
            out = column @ square.mT if square.dim() == 2 else (square @ column.unsqueeze(-1)).squeeze(-1)
        else:
            out = square.sum(-1)
        if out.dim() == 1:
            out = out.unsqueeze(0)
        return out if self.row is None else out * self.row.square()

    def map(self, fn: Callable[[Tensor], Tensor]) -> Factor:
        """Apply ``fn`` to every tensor that has a batch dimension."""
        basis = fn(self.basis) if self.basis.dim() == 3 else self.basis
        return replace(
            self,
            basis=basis,
            row=None if self.row is None else fn(self.row),
            column=None if self.column is None else fn(self.column),
        )

    def scaled(self, by: Tensor | float) -> Factor:
        """Factor times a scalar."""
        if self.contrasts and self.column is not None:
            return replace(self, column=self.column * by)
        return replace(self, basis=self.basis * by)

    def weighted(self, by: Tensor) -> Factor:
        """Factor of each example times a number; by: (B, 1)."""
        if self.is_dense:
            return Factor(self.basis * by.unsqueeze(-1))
        if self.contrasts and self.column is not None:
            return replace(self, column=self.column * by)
        return replace(self, row=by if self.row is None else self.row * by)


@dataclass(frozen=True)
class FactorSum:
    """Concatenation of independent factors: FFᵀ = Σ FᵢFᵢᵀ, R = Σ Rᵢ."""

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
    """Factor of a sum of independent Gaussians, from the factors of each."""
    parts: list[Factor] = []
    for factor in factors:
        if factor is not None:
            parts.extend(factor.parts if isinstance(factor, FactorSum) else (factor,))
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else FactorSum(tuple(parts))


def _as_factor(factor: Tensor | AnyFactor | None) -> AnyFactor | None:
    return Factor(factor) if isinstance(factor, Tensor) else factor


# --- Gaussians over logits ------------------------------------------------------------------------------


@dataclass(frozen=True)
class LatentNormal:
    """f ~ N(mean, ·): the GP posterior of the logits at each input, before label noise.

    ``mean``: (B, K). ``var``: (B, K), always the marginal variance of each logit. Where classes are
    correlated (the Kronecker posterior) ``factor`` holds F with covariance FFᵀ, whose diagonal is ``var``;
    with ``factor`` None the covariance is diag(var).
    """

    mean: Tensor
    var: Tensor
    factor: AnyFactor | None = None

    def covariance(self) -> Tensor:
        """(B, K, K), written out."""
        return self.as_utility().covariance()

    def as_utility(self) -> UtilityNormal:
        """The same Gaussian in the form diag(var) + FFᵀ."""
        if self.factor is None:
            return UtilityNormal(self.mean, self.var, None)
        return UtilityNormal(self.mean, torch.zeros_like(self.mean), self.factor)

    def repeated(self, times: int) -> LatentNormal:
        """Repeat variance and factor of each row ``times`` times; the mean already has all rows."""
        if times == 1:
            return self
        factor = None if self.factor is None else self.factor.map(lambda t: t.repeat_interleave(times, 0))
        return LatentNormal(self.mean, self.var.repeat_interleave(times, 0), factor)

    def pooled(self, members: int) -> LatentNormal:
        """Mean and covariance of the mixture of every ``members`` consecutive rows: (B·M, K) → (B, K)."""
        if members == 1:
            return self
        utility = self.as_utility().pooled(members)
        form = utility.form
        if self.factor is None:
            eye = torch.eye(utility.mean.shape[-1]).to(utility.mean)
            form = join_factors(Factor(eye, column=utility.var.sqrt()), form)
        return LatentNormal(utility.mean, utility.marginal_variance(), form)


@dataclass(frozen=True)
class UtilityNormal:
    """u ~ N(mean, diag(var) + FFᵀ), the input of the link in every Gaussian method, Eq. (4).

    ``mean``: (B, K), not divided by the temperature. ``var``: (B, K), the class-independent part (GP
    variance where classes are uncorrelated, and d²). ``factor``: None, a tensor (B, K, R), or a factored
    form with ``.dense()``.

    >>> u = UtilityNormal(torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2, 1))
    >>> u.covariance()
    tensor([[[2., 1.],
             [1., 2.]]])
    """

    mean: Tensor
    var: Tensor
    factor: Tensor | AnyFactor | None = None

    @property
    def form(self) -> AnyFactor | None:
        """``factor`` with a plain tensor wrapped in :class:`Factor`."""
        return _as_factor(self.factor)

    def marginal_variance(self) -> Tensor:
        """(B, K): var + diag(FFᵀ)."""
        form = self.form
        return self.var if form is None else self.var + form.variance()

    def covariance(self) -> Tensor:
        """(B, K, K), written out."""
        out = torch.diag_embed(self.var)
        form = self.form
        if form is None:
            return out
        dense = form.dense()
        return out + dense @ dense.mT

    def tempered(self, temperature: Tensor | float) -> UtilityNormal:
        """The Gaussian of u/τ."""
        form = self.form
        return UtilityNormal(
            self.mean / temperature,
            self.var / temperature**2,
            None if form is None else form.scaled(1 / temperature),
        )

    def rows(self, index: Tensor | slice) -> UtilityNormal:
        """Gaussians of some rows of the batch."""
        form = self.form
        if form is not None:
            form = form.map(lambda t: t[index] if t.shape[0] == self.mean.shape[0] else t)
        return UtilityNormal(self.mean[index], self.var[index], form)

    def of_member(self, member: int, members: int) -> UtilityNormal:
        """Gaussians of one member, whose rows are every ``members``-th: (B·M, K) → (B, K)."""
        form = self.form

        def own(t: Tensor) -> Tensor:
            return t.unflatten(0, (-1, members))[:, member]

        return UtilityNormal(own(self.mean), own(self.var), None if form is None else form.map(own))

    def pooled(self, members: int) -> UtilityNormal:
        """Mean and covariance of the mixture of every ``members`` consecutive rows: (B·M, K) → (B, K).

        >>> pair = UtilityNormal(torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.ones(2, 2))
        >>> pair.pooled(2).mean, pair.pooled(2).covariance()
        (tensor([[1., 0.]]), tensor([[[2., 0.],
                 [0., 1.]]]))
        """
        if members == 1:
            return self
        means = self.mean.unflatten(0, (-1, members))
        mean, share = means.mean(1), members**-0.5
        between = Factor(((means - mean.unsqueeze(1)) * share).mT)
        within = [self.rows(slice(m, None, members)).form for m in range(members)]
        factor = join_factors(*(None if form is None else form.scaled(share) for form in within), between)
        return UtilityNormal(mean, self.var.unflatten(0, (-1, members)).mean(1), factor)


# --- predictions ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """Probabilities of each input's label, and both kinds of uncertainty, in nats.

    ``total_uncertainty`` = ``data_uncertainty`` + ``model_uncertainty`` exactly, and ``model_uncertainty`` =
    ``function_uncertainty`` + ``member_uncertainty``: the paper's three sources, where there are members. All
    fields have the batch first; they are tensors, or NumPy arrays after :meth:`numpy`.
    """

    probs: Any
    """(B, K) probability of the label as people would give it."""
    clean_probs: Any
    """(B, K) probability of the label without label noise (Σ = 0), under the GP posterior."""
    total_uncertainty: Any
    """(B,) entropy of ``probs``; under the sigmoid link the sum over classes."""
    data_uncertainty: Any
    """(B,) E_f[H(y | f)], which more data of this kind would not reduce."""
    model_uncertainty: Any
    """(B,) I(y; f), which knowing the function (and the member) would remove."""
    latent_variance: Any
    """(B,) mean GP variance over classes (Posterior Network: of its log-Gamma latents); grows with the
    distance from the training data."""
    ood_score: Any
    """(B,) higher = less like the training data. With held-out data: Σ −log of the shares of held-out
    examples whose energy, model uncertainty and distance from the classes are as high; of entropy and
    distance where there is no posterior. With fewer than 20 held-out examples, under the sigmoid and for more
    than 5,000 features: the model uncertainty, or the entropy. Posterior Network: −log of its evidence.
    Ensembles: their members' mean plus disagreement. Why: docs/decisions.md."""
    member_uncertainty: Any
    """(B,) the part of ``model_uncertainty`` that is disagreement between members, I(y; member); 0 for one.
    """
    num_points: Any
    """(B,) integration points used for each input; 0 for quadrature."""

    @property
    def function_uncertainty(self) -> Any:
        """(B,) ``model_uncertainty`` − ``member_uncertainty``: the members' mean I(y; f)."""
        return self.model_uncertainty - self.member_uncertainty

    @property
    def labels(self) -> Any:
        """(B,) most probable class."""
        return self.probs.argmax(-1)

    @property
    def confidence(self) -> Any:
        """(B,) probability of the most probable class."""
        return self.probs.max(-1) if not isinstance(self.probs, Tensor) else self.probs.amax(-1)

    def map(self, fn: Callable[[Any], Any]) -> Prediction:
        """Apply ``fn`` to every field."""
        return Prediction(**{f.name: fn(getattr(self, f.name)) for f in fields(self)})

    def numpy(self) -> Prediction:
        """Prediction of NumPy arrays."""
        return self.map(lambda t: t.detach().cpu().numpy())

    def to(self, *args: Any, **kwargs: Any) -> Prediction:
        """Move every field, as ``Tensor.to``."""
        return self.map(lambda t: t.to(*args, **kwargs))

    def __len__(self) -> int:
        return int(self.probs.shape[0])

    def __getitem__(self, index: Any) -> Prediction:
        try:
            return self.map(lambda t: t[index])
        except (IndexError, TypeError) as error:
            if isinstance(index, int):  # ends an iteration
                raise
            raise TypeError(
                f"a prediction is indexed by example: by a number, a slice, indices or a mask (B,), got "
                f"{type(index).__name__}: {error}"
            ) from error

    @staticmethod
    def cat(predictions: list[Prediction]) -> Prediction:
        """Concatenate predictions of consecutive batches."""
        kinds = (
            {type(part).__name__ for part in predictions} if isinstance(predictions, list | tuple) else None
        )
        if kinds != {"Prediction"} or not all(isinstance(part.probs, Tensor) for part in predictions):
            raise TypeError(
                "Prediction.cat takes a list of predictions of tensors, at least one, got "
                f"{type(predictions).__name__ if kinds is None else ', '.join(sorted(kinds)) or 'none'}"
            )
        names = [f.name for f in fields(Prediction)]
        return Prediction(**{n: torch.cat([getattr(p, n) for p in predictions]) for n in names})
