"""Posteriors of Sec. 3.3 as modules: from sums over data to a factorised covariance.

``statistics`` is additive, so batches, and processes that each saw part of the data, combine by ``+``;
``fit`` factorises; ``covariance`` evaluates. ``forward`` never updates anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hetsngp.functional import laplace
from hetsngp.functional.ood import ClassSums
from hetsngp.nn.precision import KeepsPrecision
from hetsngp.types import Factor
from hetsngp.validation import PosteriorNotFittedError


@dataclass(frozen=True)
class Statistics:
    """Sums over data: ``count``, their weight; ``sums`` of w·φφᵀ (m, m) or (K, m, m); ``fisher`` (K, K).

    Sums over batches are in float64: in float32 the errors of a million examples exceed small eigenvalues.
    """

    count: float
    sums: Tensor
    fisher: Tensor
    classes: ClassSums | None = None
    """Sums of labelled features, for the density of the OOD score."""

    def __add__(self, other: Statistics) -> Statistics:
        wide = _wide(self.sums)
        more = other.sums.to(wide.device)
        sums = wide + more if wide is self.sums else wide.add_(more)
        return self._with_sums(sums, other, torch.add)

    def __iadd__(self, other: Statistics) -> Statistics:
        # In the memory of the sums, K·m² for the exact posterior.
        if self.sums.dtype != torch.float64:
            return self + other
        return self._with_sums(self.sums.add_(other.sums.to(self.sums.device)), other, Tensor.add_)

    def _with_sums(
        self, sums: Tensor, other: Statistics, add: Callable[[Tensor, Tensor], Tensor]
    ) -> Statistics:
        classes = None
        if self.classes is not None and other.classes is not None:
            classes = ClassSums(*(add(a, b) for a, b in zip(self.classes, other.classes, strict=True)))
        return Statistics(self.count + other.count, sums, self.fisher + other.fisher, classes)

    def reduced(self, reduce: Callable[[Tensor], Tensor]) -> Statistics:
        """The sum over processes, in one call: ``reduce`` adds up a tensor, in place or not."""
        wide = _wide(self.sums)
        parts = (wide.new_tensor([self.count]), wide, self.fisher, *(self.classes or ()))
        total = reduce(torch.cat([part.flatten().to(wide) for part in parts]))
        pieces = zip(total.split([part.numel() for part in parts]), parts, strict=True)
        count, sums, fisher, *classes = [piece.view_as(part) for piece, part in pieces]
        return Statistics(
            float(count), sums, fisher.to(self.fisher), ClassSums(*classes) if classes else None
        )


# Full class correlations cost a K×K product for every integration point; past this many classes the
# Kronecker posterior keeps their diagonal (in the trial .01 AUROC behind near, equal far).
FULL_CLASSES = 256


def _wide(tensor: Tensor) -> Tensor:
    """float64, on the CPU where the device has none: small eigenvalues of ΣΦΦᵀ must be accurate to 1."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def example_count(phi: Tensor, weight: Tensor | None) -> float:
    """Number of examples in a batch, or their total weight."""
    return len(phi) if weight is None else float(_wide(weight).sum())


def _gram(phi: Tensor, weight: Tensor | None) -> Tensor:
    """Σ φφᵀ in float64: (m, m)."""
    return laplace.gram(_wide(phi), None if weight is None else _wide(weight))


def _contraction(var: Tensor, phi: Tensor) -> Tensor:
    """1 − var/‖φ‖², ‖φ‖² being the prior's variance: (B,)."""
    return (1 - var / phi.square().sum(-1)).clamp(0, 1)


class Posterior(KeepsPrecision):
    """Base of the posteriors: buffers in float32 or better, which load in any shape, and a scale set by
    calibration.
    """

    name = "none"
    needs_fit = True
    # Posteriors built from the likelihood's own curvature should not exceed the prior; w = 1 has no scale.
    largest_scale = 1.0
    fitted: Tensor
    scale: Tensor

    def __init__(self, num_classes: int, num_features: int, link: str) -> None:
        super().__init__()
        self.num_classes, self.num_features, self.link = num_classes, num_features, link
        self.register_buffer("fitted", torch.tensor(not self.needs_fit))
        self.register_buffer("scale", torch.ones(()))
        for buffer in self.shapes():
            self.register_buffer(buffer, torch.empty(0))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each buffer of a fitted posterior; buffers are empty before."""
        return {}

    @property
    def is_filled(self) -> bool:
        """Whether the posterior is fitted, without waiting for the device."""
        return not self.needs_fit or any(getattr(self, name).numel() > 0 for name in self.shapes())

    def statistics(
        self, phi: Tensor, probs: Tensor, temperature: Tensor, weight: Tensor | None = None
    ) -> Statistics:
        """Contribution of a batch: phi (B, m), noise-free probs (B·M, K) of M members, whose curvature is
        averaged; each example counts ``weight`` (B,) times.
        """
        raise NotImplementedError

    def fit(self, total: Statistics, fisher: Tensor | None = None) -> None:
        """Factorise the sums; ``fisher`` (K, K) replaces the mean output Hessian where one is used."""
        raise NotImplementedError

    def covariance(self, phi: Tensor) -> tuple[Tensor, Factor | None]:
        """Marginal variances (B, K) at phi (B, m), and a factor of the covariance where classes correlate."""
        self.check_fitted()
        return self._covariance(phi)

    def covariance_and_contraction(self, phi: Tensor) -> tuple[Tensor, Factor | None, Tensor]:
        """:meth:`covariance` and :meth:`posterior_contraction` at phi (B, m), from one projection of it."""
        self.check_fitted()
        return self._covariance_and_contraction(phi)

    def check_fitted(self) -> None:
        """Raise a :class:`hetsngp.PosteriorNotFittedError` where the posterior is not fitted."""
        if not self.is_filled:  # ``fitted`` is on the device, which a prediction would wait for
            raise PosteriorNotFittedError

    def _covariance(self, phi: Tensor) -> tuple[Tensor, Factor | None]:
        raise NotImplementedError

    def _covariance_and_contraction(self, phi: Tensor) -> tuple[Tensor, Factor | None, Tensor]:
        return (*self._covariance(phi), self.posterior_contraction(phi))

    def for_tracing(self) -> Posterior:
        """Posterior of the same predictions, without factorisations and triangular solves."""
        return self

    def posterior_contraction(self, phi: Tensor) -> Tensor:
        """1 − posterior/prior variance of a function observed at the training inputs with unit noise: (B,).

        Near one at the training data, zero far from all of them.
        """
        return phi.new_ones(phi.shape[0])

    def _store(self, **buffers: Tensor) -> None:
        for name, value in buffers.items():
            # Row-major, as in a file: another memory order would round differently than after a reload.
            value = value.to(device=self.scale.device, dtype=self.scale.dtype).contiguous()
            setattr(self, name, value)
        self.fitted.fill_(True)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name, shape in self.shapes().items():
            value = state_dict.get(prefix + name)
            if value is not None and tuple(value.shape) in (shape, (0,)):
                setattr(self, name, torch.empty_like(value, device=self.scale.device))
        super()._load_from_state_dict(state_dict, prefix, *args)


class NoPosterior(Posterior):
    """The MAP estimate β̂ without a covariance, as in the paper's ImageNet-21k runs."""

    needs_fit = False

    def _covariance(self, phi: Tensor) -> tuple[Tensor, Factor | None]:
        return phi.new_zeros(phi.shape[0], self.num_classes), None


class InvertedPosterior(Posterior):
    """Copy of an exact, shared or momentum posterior for predictions alone: L⁻¹ in place of L, P = LLᵀ.

    A product takes the place of a triangular solve, which is slow on a GPU and not in ONNX. P − I is positive
    semidefinite, so ‖L⁻¹‖ ≤ 1 and the product is as accurate.
    """

    inverse: Tensor

    def __init__(self, posterior: ExactPosterior | SharedPosterior) -> None:
        super().__init__(posterior.num_classes, posterior.num_features, posterior.link)
        self.scale = posterior.scale.clone()
        factor = posterior.cholesky if isinstance(posterior, ExactPosterior) else posterior.precision_factor()
        self._store(inverse=laplace.inverse_triangle(_wide(factor)).view(-1, *factor.shape[-2:]))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"inverse": (-1, self.num_features, self.num_features)}

    def _covariance(self, phi: Tensor) -> tuple[Tensor, Factor | None]:
        return self._covariance_and_contraction(phi)[:2]

    def posterior_contraction(self, phi: Tensor) -> Tensor:
        return self._covariance_and_contraction(phi)[2]

    def _covariance_and_contraction(self, phi: Tensor) -> tuple[Tensor, Factor | None, Tensor]:
        variance = (self.inverse.to(phi) @ phi.mT).square().sum(-2).mT  # (B, K), or (B, 1) of all classes
        classes = (self.scale.to(phi) * variance).expand(-1, self.num_classes)
        return classes, None, _contraction(variance.amin(-1), phi)


class ExactPosterior(Posterior):
    """Eq. (5): P_c = I + Σ p_c(1 − p_c)/τ² φφᵀ, one precision a class, no cross-class blocks: K·m² memory.

    Products of a batch are in the precision of φ, K·B·m² of them; their sum over batches is in float64.
    """

    name = "exact"
    cholesky: Tensor

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"cholesky": (self.num_classes, self.num_features, self.num_features)}

    def statistics(
        self, phi: Tensor, probs: Tensor, temperature: Tensor, weight: Tensor | None = None
    ) -> Statistics:
        weights = laplace.class_weights(probs, temperature).view(len(phi), -1, self.num_classes).mean(1)
        if weight is not None:
            weights = weights * weight.to(weights).unsqueeze(1)
        return Statistics(example_count(phi, weight), laplace.class_grams(phi, weights), phi.new_zeros(0))

    def fit(self, total: Statistics, fisher: Tensor | None = None) -> None:
        self._store(
            cholesky=torch.stack([laplace.precision_cholesky(s).to(self.scale.dtype) for s in total.sums])
        )

    def _covariance(self, phi: Tensor) -> tuple[Tensor, Factor | None]:
        return self.scale.to(phi) * self._variance(phi), None

    def for_tracing(self) -> Posterior:
        return InvertedPosterior(self)

    def posterior_contraction(self, phi: Tensor) -> Tensor:
        """Contraction of the class with the smallest variance: no precision with unit noise is stored."""
        return _contraction(self._variance(phi).amin(-1), phi)

    def _covariance_and_contraction(self, phi: Tensor) -> tuple[Tensor, Factor | None, Tensor]:
        variance = self._variance(phi)
        return self.scale.to(phi) * variance, None, _contraction(variance.amin(-1), phi)

    def _variance(self, phi: Tensor) -> Tensor:
        """Variances before the scale: (B, K)."""
        return laplace.cholesky_variance(self.cholesky.to(phi), phi)


class SharedPosterior(Posterior):
    """One precision I + Σ φφᵀ for all classes (w = 1), the original code's "gaussian" likelihood."""

    name = "shared"
    largest_scale = 100.0
    cholesky: Tensor

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"cholesky": (self.num_features, self.num_features)}

    def statistics(
        self, phi: Tensor, probs: Tensor, temperature: Tensor, weight: Tensor | None = None
    ) -> Statistics:
        sums = _gram(phi, weight)
        return Statistics(example_count(phi, weight), sums, phi.new_zeros(0))

    def fit(self, total: Statistics, fisher: Tensor | None = None) -> None:
        self._store(cholesky=laplace.precision_cholesky(total.sums))

    def precision_factor(self) -> Tensor:
        """Lower Cholesky factor of the precision: (m, m)."""
        return self.cholesky

    def for_tracing(self) -> Posterior:
        return InvertedPosterior(self)

    def _covariance(self, phi: Tensor) -> tuple[Tensor, Factor | None]:
        return self._of_classes(self._variance(phi)), None

    def posterior_contraction(self, phi: Tensor) -> Tensor:
        return _contraction(self._variance(phi), phi)

    def _covariance_and_contraction(self, phi: Tensor) -> tuple[Tensor, Factor | None, Tensor]:
        variance = self._variance(phi)
        return self._of_classes(variance), None, _contraction(variance, phi)

    def _variance(self, phi: Tensor) -> Tensor:
        """Variance before the scale, of any class: (B,)."""
        return laplace.cholesky_variance(self.precision_factor().to(phi), phi)

    def _of_classes(self, variance: Tensor) -> Tensor:
        return (self.scale.to(variance) * variance).unsqueeze(-1).expand(-1, self.num_classes)


class KroneckerPosterior(Posterior):
    """I + Λ ⊗ Σφφᵀ, Λ the mean softmax Hessian of held-out predictions: m² + K² memory, classes correlated.

    Equal to the full Hessian where all inputs share one p. A network that has memorised its data has p(1 − p)
    near zero there, which leaves Eq. (5) at its prior; held-out predictions do not.
    """

    name = "kronecker"
    vectors: Tensor
    values: Tensor
    basis: Tensor
    gamma: Tensor

    @property
    def diagonal(self) -> bool:
        """Whether class correlations are dropped: the sigmoid has none, very many classes cost too much."""
        return self.link == "sigmoid" or self.num_classes > FULL_CLASSES

    def shapes(self) -> dict[str, tuple[int, ...]]:
        m, k = self.num_features, self.num_classes
        if self.diagonal:
            return {"vectors": (m, m), "values": (m,), "gamma": (k,)}
        return {"vectors": (m, m), "values": (m,), "basis": (k, k - 1), "gamma": (k - 1,)}

    def statistics(
        self, phi: Tensor, probs: Tensor, temperature: Tensor, weight: Tensor | None = None
    ) -> Statistics:
        sums = _gram(phi, weight)
        return Statistics(example_count(phi, weight), sums, self.fisher(probs, temperature, weight, len(phi)))

    def fisher(
        self, probs: Tensor, temperature: Tensor, weight: Tensor | None = None, examples: int | None = None
    ) -> Tensor:
        """Sum over examples of output Hessians: (K, K), or its diagonal (K,) where only that is used.

        probs: (B·M, K), ``examples`` = B of them (None: all) with M members each, which are averaged.
        """
        members = 1 if examples is None else len(probs) // examples
        probs = _wide(probs)
        weight = None if weight is None else _wide(weight)
        if members > 1:
            ones = probs.new_ones(len(probs) // members)
            weight = ((ones if weight is None else weight) / members).repeat_interleave(members)
        if self.diagonal:
            diagonal = laplace.class_weights(probs, temperature)
            return (diagonal if weight is None else diagonal * weight.unsqueeze(1)).sum(0)
        return laplace.output_fisher(probs, temperature, weight)

    def fit(self, total: Statistics, fisher: Tensor | None = None) -> None:
        mean = total.fisher / total.count if fisher is None else fisher
        vectors, values, basis, gamma = laplace.kronecker_eigen(total.sums, mean)
        kept = {"vectors": vectors, "values": values, "basis": basis, "gamma": gamma}
        self._store(**{name: value for name, value in kept.items() if value is not None})

    def _covariance(self, phi: Tensor) -> tuple[Tensor, Factor | None]:
        return self._of_squares(self._squares(phi))

    def posterior_contraction(self, phi: Tensor) -> Tensor:
        return self._contraction_of(self._squares(phi), phi)

    def _covariance_and_contraction(self, phi: Tensor) -> tuple[Tensor, Factor | None, Tensor]:
        squares = self._squares(phi)
        return (*self._of_squares(squares), self._contraction_of(squares, phi))

    def _squares(self, phi: Tensor) -> Tensor:
        """(Qᵀφ)²: (B, m), O(B·m²), nearly all of the cost."""
        return (phi @ self.vectors.to(phi)).square()

    def _of_squares(self, squares: Tensor) -> tuple[Tensor, Factor | None]:
        values, gamma = self.values.to(squares), self.gamma.to(squares)
        scales = self.scale.to(squares) * laplace.kronecker_scales(squares, values, gamma)
        if self.diagonal:
            return scales, None
        factor = Factor(self.basis.to(squares), column=scales.sqrt(), contrasts=True)
        return factor.variance(), factor

    def _contraction_of(self, squares: Tensor, phi: Tensor) -> Tensor:
        unit = laplace.kronecker_scales(squares, self.values.to(phi), phi.new_ones(1))
        return _contraction(unit.squeeze(-1), phi)


class _LazyFactor:
    """Cholesky factor, and the average, its version and the number of examples it was made of.

    One assignment replaces all: threads that predict at the same time factorise at worst more than once. A
    copy of the model has none.
    """

    def __init__(self) -> None:
        self.known: tuple[Tensor, int | None, float, Tensor] | None = None

    def __deepcopy__(self, memo: Any) -> _LazyFactor:
        return _LazyFactor()

    def __reduce__(self) -> tuple[type[_LazyFactor], tuple[()]]:
        return _LazyFactor, ()


class MomentumPosterior(SharedPosterior):
    """Moving average of φφᵀ for streams without epochs, changed only by an explicit :meth:`update`.

    precision = I + N·M with M the average. The original has I + M, whose scale does not depend on the number
    of examples; here N is the number of examples seen, so that the limit is the shared posterior.

    M is in float64, since N multiplies its rounding errors. After an update the buffer ``cholesky`` is empty:
    the factor is computed at the first prediction, kept beside the buffers, which predictions do not write
    to, and saved as ``cholesky``.
    """

    name = "momentum"
    average: Tensor
    seen: Tensor
    steps: Tensor
    _count: float | None = None
    """N of the last update; None: the number of examples seen."""
    _lazy: _LazyFactor

    def __init__(self, num_classes: int, num_features: int, link: str, momentum: float = 0.999) -> None:
        super().__init__(num_classes, num_features, link)
        self.momentum = momentum
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self._lazy = _LazyFactor()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {**super().shapes(), "average": (self.num_features, self.num_features)}

    @torch.no_grad()
    def update(self, phi: Tensor, dataset_size: float | None = None) -> None:
        """Add a batch phi (B, m) to the average: O(B·m²). The next prediction factorises, O(m³)."""
        batch_mean = _gram(phi, None) / len(phi)
        self.steps += 1
        self.seen += len(phi)
        # Bias-corrected: a plain mean at first, weight 1 − momentum once that is larger than 1/steps.
        weight = max(1 - self.momentum, 1 / int(self.steps))
        average = (
            batch_mean if self.average.numel() == 0 else torch.lerp(_wide(self.average), batch_mean, weight)
        )
        self._count = int(self.seen) if dataset_size is None else dataset_size
        self._store(cholesky=torch.empty(0))
        self._store_average(average)

    def fit(self, total: Statistics, fisher: Tensor | None = None) -> None:
        """Fit the shared posterior of a whole pass, from which later updates start."""
        self.seen.fill_(round(total.count))
        self.steps.fill_(math.ceil(1 / (1 - self.momentum)))
        self._store(cholesky=laplace.precision_cholesky(total.sums))
        self._store_average(total.sums / total.count)

    def precision_factor(self) -> Tensor:
        if self.cholesky.numel() > 0 or self.average.numel() == 0:
            return self.cholesky
        count = int(self.seen) if self._count is None else self._count
        if torch.compiler.is_compiling():
            return self._factorise(count)
        average = self.average
        version = None if average.is_inference() else average._version
        known = self._lazy.known
        if known is None or known[0] is not average or known[1:3] != (version, count):
            known = (average, version, count, self._factorise(count))
            self._lazy.known = known
        return known[3]

    @torch.no_grad()
    def _factorise(self, count: float) -> Tensor:
        sums = count * _wide(self.average)
        try:
            factor = laplace.precision_cholesky(sums)
        except torch.linalg.LinAlgError:  # an average of release 0.1, which is in float32
            factor = laplace.precision_cholesky(laplace.nearest_semidefinite(sums))
        return factor.to(self.scale).contiguous()

    def _store_average(self, average: Tensor) -> None:
        average = average.to(self.scale.device) if self.scale.device.type != "mps" else average.to(self.scale)
        self.average = average.contiguous()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = self.average
        super()._apply(fn, recurse)
        self._lazy = _LazyFactor()
        after = self.average
        # Of a float64 average no precision is given up, but on mps, which has none.
        if before.dtype == torch.float64 != after.dtype and {
            before.device.type,
            after.device.type,
        }.isdisjoint({"mps", "meta"}):
            self.average = before.to(after.device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_filled and self.average.device.type != "meta":
            destination[prefix + "cholesky"] = self.precision_factor()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._count, self._lazy = None, _LazyFactor()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_lazy", _LazyFactor())  # pickles of 0.1 have none


POSTERIOR_TYPES: dict[str, type[Posterior]] = {
    kind.name: kind
    for kind in (KroneckerPosterior, ExactPosterior, SharedPosterior, MomentumPosterior, NoPosterior)
}


# --- weights that a posterior belongs to ----------------------------------------------------------------

Marks = tuple[tuple[int, int, int], ...]

_PLAIN = {nn.Parameter, nn.Buffer, Tensor}
# Values that are widened at once: 8 MiB.
_CHUNK = 2**20
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def marks_of(model: nn.Module) -> Marks | None:
    """Identity, version and address of every tensor: equal as long as none was written to or replaced.

    None where they cannot be read: while compiling, and for tensors that are sharded or made in inference
    mode. A write to ``parameter.data`` in place leaves no mark. 1 µs for each tensor.
    """
    if torch.compiler.is_compiling():
        return None
    found: list[tuple[int, int, int]] = []
    try:
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for tensor in tensors.values():
                    if type(tensor) in _PLAIN and not tensor.is_meta:  # type: ignore[union-attr]
                        found.append((id(tensor), tensor._version, tensor.data_ptr()))  # type: ignore[union-attr]
                    elif tensor is not None:
                        return None
    except RuntimeError:  # inference tensors have no version
        return None
    return tuple(found)


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """Checksum of the bits of a tensor, the same on any device and for any number of threads.

    The sum of all values, as integers, each times its odd position, modulo 2⁶⁴.

    >>> checksum(torch.tensor([1.0, 2.0])) == checksum(torch.tensor([2.0, 1.0]))
    False
    """
    bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    odd = torch.arange(1, 2 * min(_CHUNK, max(1, bits.numel())), 2, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        chunk = bits[start : start + _CHUNK].long()
        total += (chunk * (odd[: len(chunk)] + 2 * start)).sum()
    return int(total)


@dataclass(frozen=True)
class FittedWeights:
    """Checksums of the weights, and of posterior and OOD score that were fitted with them."""

    weights: dict[str, tuple[torch.dtype, int]]
    fitted: dict[str, int]

    @staticmethod
    def of(model: nn.Module, fitted: dict[str, Tensor]) -> FittedWeights:
        weights = {name: (p.dtype, checksum(p)) for name, p in model.named_parameters()}
        return FittedWeights(weights, {name: checksum(t) for name, t in fitted.items()})

    def differ_from(self, other: FittedWeights) -> bool:
        """Whether weights differ; those in another precision cannot be compared and count as equal."""
        if self.weights.keys() != other.weights.keys():
            return True
        pairs = ((self.weights[name], other.weights[name]) for name in self.weights)
        return any(own != found for own, found in pairs if own[0] == found[0])


@dataclass
class Seen:
    """Marks at the last comparison and at the last check of values; a copy of the model has no marks."""

    compared: Marks | None = None
    finite: Marks | None = None

    def __deepcopy__(self, memo: Any) -> Seen:
        return Seen()

    def __reduce__(self) -> tuple[type[Seen], tuple[()]]:
        return Seen, ()
