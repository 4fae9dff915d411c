"""Classifier: a backbone and a head, with the methods ``loss`` and ``predict`` that everything else calls."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hetsngp.models.prediction_module import PredictionModule
from hetsngp.nn.extractor import Features
from hetsngp.nn.heads import GaussianHead, Head
from hetsngp.nn.posteriors import FittedWeights, Marks, MomentumPosterior, Seen, marks_of
from hetsngp.types import LatentNormal, Prediction, UtilityNormal
from hetsngp.validation import (
    NotFiniteError,
    check_class_counts,
    check_features,
    check_generator,
    check_inputs,
    check_not_negative,
    check_num_samples,
    check_on_device,
    check_positive,
    check_weight,
    eager,
    explain_failure,
    first_non_finite,
)

# --- eval mode and training mode, by turns ---------------------------------------------------------------

# Whether a module is in training mode is one flag for all threads. Predictions share eval mode: the first one
# sets it, the last one restores what was before. Training passes wait for them, and they for training passes.
_turn = threading.Condition()
_held: dict[nn.Module, _Held] = {}
"""Modules that predictions hold in eval mode."""
_in_training: dict[nn.Module, list[int]] = {}
"""Modules that are in a training pass, and its threads."""


class _Held:
    """Mode that a module returns to, and the threads that hold it in eval mode."""

    def __init__(self, mode: bool) -> None:
        self.mode = mode
        self.threads: list[int] = []


def evaluating(model: nn.Module) -> AbstractContextManager[None]:
    """Context with eval mode and without gradients; the mode of every module is restored at the end.

    Contexts of several threads may overlap, also on models that share modules: a module returns to its mode
    when the last one ends. Training passes of other threads are waited for.
    """
    # A graph has no locks: what is compiled, in one thread, is compiled for the mode that it finds.
    if torch.compiler.is_compiling() and not any(module.training for module in model.modules()):
        return torch.no_grad()
    return _evaluating(model)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modules, me = list(model.modules()), threading.get_ident()
    with _turn:
        if not any(me in _held[module].threads for module in modules if module in _held):
            _turn.wait_for(lambda: not any(set(_in_training.get(m, ())) - {me} for m in modules))
        for module in modules:
            _held.setdefault(module, _Held(module.training)).threads.append(me)
    try:
        if any(module.training for module in modules):
            with _turn:
                model.eval()
        with torch.no_grad():
            yield
    finally:
        with _turn:
            _release(modules, me)


def training_pass(model: Classifier, *, always: bool = False) -> AbstractContextManager[None]:
    """Context in which no other thread holds ``model`` in eval mode, nor begins to; ``always``: also where it
    is not in training mode.
    """
    return nullcontext() if torch.compiler.is_compiling() else _training_pass(model, always)


@contextmanager
def _training_pass(model: Classifier, always: bool) -> Iterator[None]:
    modules, me = tuple(model.modules()), threading.get_ident()
    with _turn:
        held = [_held[module] for module in modules if module in _held]
        is_training = any(_held[m].mode if m in _held else m.training for m in modules)
        nested = any(me in each.threads for each in held)  # a loss on held-out data, in eval mode
        registered = modules if (is_training or always) and not nested else ()
        for module in registered:
            _in_training.setdefault(module, []).append(me)
    try:
        with _turn:  # predictions that begin from now on wait
            _turn.wait_for(lambda: not any(module in _held for module in registered))
        yield
    finally:
        with _turn:
            for module in registered:
                _in_training[module].remove(me)
                if not _in_training[module]:
                    del _in_training[module]
            _turn.notify_all()


def _release(modules: Iterable[nn.Module], thread: int) -> None:
    for module in modules:
        held = _held[module]
        held.threads.remove(thread)
        if not held.threads:
            del _held[module]
            if module.training != held.mode:
                module.training = held.mode
    _turn.notify_all()


def _keep_own_turn() -> None:
    """Release, in a forked process, what the threads held that it does not have."""
    global _turn
    _turn = threading.Condition()
    me = threading.get_ident()
    with _turn:
        for threads in _in_training.values():
            threads[:] = [thread for thread in threads if thread == me]
        for module, held in list(_held.items()):
            for thread in [thread for thread in held.threads if thread != me]:
                _release([module], thread)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_own_turn)


# --- batches --------------------------------------------------------------------------------------------


def to_device(x: Any, device: torch.device) -> Any:
    """Move a batch to ``device``: a tensor, a dict of them as Hugging Face's tokenizers give, or a tuple."""

    def move(part: Any) -> Any:
        if isinstance(part, Tensor) and device.type != "meta":
            check_on_device(part)
        return part.to(device) if hasattr(part, "to") else part

    return map_batch(x, move)


def map_batch(x: Any, fn: Callable[[Any], Any]) -> Any:
    """Apply ``fn`` to every element of a batch that is neither a dict, a list nor a tuple."""
    if isinstance(x, Mapping):
        return {name: map_batch(value, fn) for name, value in x.items()}
    if isinstance(x, tuple | list):
        parts = [map_batch(value, fn) for value in x]
        return parts if isinstance(x, list) else tuple(parts)
    return fn(x)


# --- the model ------------------------------------------------------------------------------------------

_STALE = (
    "the model was trained after fit_posterior: call hetsngp.fit_posterior(model, loader) again, with "
    "calibration data where it had any"
)


class Classifier(nn.Module):
    """A backbone x → h and a head h → f → u → p. Made by :func:`hetsngp.build`.

    A prediction after the weights have changed since ``fit_posterior`` warns once, in whatever mode they
    changed: by an optimiser, ``load_state_dict`` or an edit in place (not by one of ``parameter.data``,
    which torch does not record). Moving or converting the model does not count, nor does writing the same
    values.
    """

    _fitted_weights: FittedWeights | None = None
    """Weights that posterior and OOD score were fitted with; None: not known, or neither is fitted."""
    _known_stale = False
    """Whether weights were seen to change since."""

    def __init__(
        self,
        backbone: nn.Module,
        head: Head,
        *,
        num_features: int,
        dataset_size: float | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.num_features = num_features
        self._dataset_size = dataset_size
        self.config = config or {}
        """Arguments of ``build``, which ``save`` writes."""
        self.calibration: dict[str, Any] | None = None
        """Temperature and posterior scale that ``fit_posterior`` chose; None: not calibrated."""
        self.conversion: Any = None
        """Report of :func:`hetsngp.convert`, if it made this model; not saved."""
        self._warned: set[str] = set()
        self._seen = Seen()

    # --- training and prediction ------------------------------------------------------------------------

    def loss(
        self,
        x: Any,
        y: Tensor,
        generator: torch.Generator | None = None,
        weight: Tensor | None = None,
    ) -> Tensor:
        """Mean over the batch of −log p̄(y), plus the prior's ‖β‖²/(2N): a scalar.

        Algorithm 1 prints −‖β‖², a slip: minimisation needs +½‖β‖², over N because the rest is a mean.
        ``weight`` (B,) multiplies each example's term. The mean is still over B, so that a batch of light
        examples moves the model less: use weights of mean one over the data, and their total as N.
        """
        check_inputs(x)
        check_generator(generator)
        with training_pass(self):
            h, y, weight = self._training_batch(x, y, weight, generator)
            nll = self._in_full_precision(h, lambda h: self.head.nll(h, y, generator=generator))
        if weight is not None:
            nll = check_weight(weight, len(nll)).to(nll) * nll
        loss = nll.sum() / h.shape[0]
        if self.wants_class_counts and self.dataset_size is None:
            self._warn_once(
                "class_counts is not set, so every class counts as one example: "
                "build(..., class_counts=[...]) or model.class_counts = torch.bincount(train_labels)"
            )
        penalty = self.head.prior_penalty()
        if penalty is None:
            return loss
        if self.dataset_size is None:
            self._warn_once(
                "dataset_size is not set, so the loss leaves the prior on the GP weights out: "
                "build(..., dataset_size=len(train_set)) or model.dataset_size = len(train_set)"
            )
            return loss
        return loss + penalty.to(loss.dtype) / self.dataset_size

    def _training_batch(
        self, x: Any, y: Tensor, weight: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Features of the batch, and the labels and weights to train the head on them with."""
        return self._features(x), y, weight

    def predict(
        self, x: Any, num_samples: int | None = None, generator: torch.Generator | None = None
    ) -> Prediction:
        """Probabilities, data uncertainty and model uncertainty; the backbone runs once.

        Without ``generator`` the integration points are fixed: the same input gives the same answer, in any
        batch. Without label noise the integral is exact but for the correlations of classes under the
        posterior, and ``num_samples`` is the number of their draws. With label noise it is the number of
        points of the noise's factor; None: a fixed one, with which the largest error of a probability is
        0.001 to 0.005 for the noise of trained heads and about 0.01 for wide noise.

        Several threads may predict with one model at the same time, in training mode too: the model is in
        eval mode until the last of them has its answer, and then every module has its mode again. No buffer
        is written. ``loss``, ``model(x)`` in training mode and ``train()`` in another thread wait for that,
        and predictions for them. What changes weights or the posterior (an optimiser's step,
        ``fit_posterior``, ``load_state_dict``, ``to``) does not wait: predict with ``copy.deepcopy(model)``
        meanwhile.
        """
        self._check_prediction(x, num_samples, generator)
        with evaluating(self):
            return self._answer(
                x, lambda h: self.head.predict(h, num_samples=num_samples, generator=generator)
            )

    def predict_probs(
        self, x: Any, num_samples: int | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return ``predict(x).probs`` alone: (B, K). With label noise and three classes or more ``predict``
        takes two to four times as long, for the nested integral that splits the uncertainty.
        """
        self._check_prediction(x, num_samples, generator)
        with evaluating(self):
            return self._answer(x, lambda h: self.head.probs(h, num_samples=num_samples, generator=generator))

    def prediction_module(self) -> PredictionModule:
        """Module with a copy of this model that maps x to the fields of ``predict(x)``, a dict of tensors.

        For ``torch.export.export`` with a dynamic batch and ``torch.compile(fullgraph=True)``: one graph,
        with fixed integration points, without factorisations and without checks of values. Its answers are
        those of ``predict`` to rounding. The posterior must be fitted, as for ``predict``.

        >>> import hetsngp
        >>> from hetsngp.nn.backbones import ResidualMLP
        >>> model = hetsngp.build("deterministic", ResidualMLP(2, width=16, depth=2), num_classes=3)
        >>> batch = {0: torch.export.Dim("batch")}
        >>> module = model.prediction_module()
        >>> program = torch.export.export(module, (torch.randn(4, 2),), dynamic_shapes=(batch,))
        >>> hetsngp.Prediction(**program.module()(torch.zeros(7, 2))).labels.shape
        torch.Size([7])
        """
        self.check_predictable()
        return PredictionModule(self)

    def check_predictable(self) -> None:
        """Raise where weights are NaN or the posterior is not fitted; warn where it is stale."""
        if self._is_stale(self.check_weights()):
            self._warn_once(_STALE, stacklevel=4)
        if self.head.posterior is not None:
            self.head.posterior.check_fitted()

    def traceable_prediction(self, x: Any) -> Prediction:
        """Prediction without checks of values, in the mode that the model is in."""
        return self.prediction_of(self._features(x))

    def prediction_of(self, h: Tensor) -> Prediction:
        """Prediction for features h (B, D) without checks of values."""
        prediction: Prediction = self._in_full_precision(h, self.head.predict)
        return prediction

    def _check_prediction(
        self, x: Any, num_samples: int | None, generator: torch.Generator | None = None
    ) -> None:
        if num_samples is not None:
            check_num_samples(num_samples)
        check_generator(generator)
        check_inputs(x)
        if self._is_stale(self.check_weights()):
            self._warn_once(_STALE, stacklevel=4)

    def forward(self, x: Any) -> Tensor:
        """Log-probabilities (B, K) at the MAP estimate, so ``cross_entropy(model(x), y)`` trains.

        In eval mode an answer that is not finite is an error; in training mode it shows in the loss.

        That loss has no prior; ``model.loss`` has. Under ``link="sigmoid"`` these are log-odds, for
        ``binary_cross_entropy_with_logits``.
        """
        if not isinstance(x, Tensor) or x.device.type != "meta":
            check_inputs(x)
        with training_pass(self):
            if self.training:
                return self._in_full_precision(self._features(x), self.head.log_probs)
            return self._answer(x, self.head.log_probs)

    def train(self, mode: bool = True) -> Classifier:
        """Set training mode, or eval mode; waits for predictions in other threads, which need eval mode."""
        with training_pass(self, always=True):
            return super().train(mode)

    # --- latent, utility and state ----------------------------------------------------------------------

    def on_features(self) -> Classifier:
        """Classifier of features h (B, D) with the same head, for inputs whose features are known."""
        features = Features(self.num_features)
        view = Classifier(features, self.head, num_features=self.num_features, dataset_size=self.dataset_size)
        view.training = features.training = self.training
        view.calibration, view._trained_since_fit = self.calibration, self._trained_since_fit
        return view

    def latent(self, h: Tensor) -> LatentNormal:
        """Latent f at features h (B, D) under the fitted posterior; moments of the mixture of members."""
        check_inputs(h)
        check_features(h, self.num_features)
        self.check_weights()
        with evaluating(self):
            return self._finite_answer(h, self.head.latent_normal)

    def utility(self, x: Any) -> UtilityNormal:
        """Utility u at inputs x under the fitted posterior, before the temperature; with members, the moments
        of their mixture.
        """
        check_inputs(x)
        self.check_weights()
        with evaluating(self):
            return self._answer(x, self.head.utility_normal)

    @property
    def temperature(self) -> Tensor:
        """Temperature τ of predictions; setting it also sets that of ``model(x)`` and of training.

        ``ood_score`` goes on comparing with held-out examples at the temperature that calibration chose.
        """
        return self.head.temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        value = check_positive("temperature", value)
        for temperature in self.head.temperatures:
            temperature.fill_(value)

    @property
    def num_classes(self) -> int:
        """Number of classes K."""
        return self.head.num_classes

    @property
    def dataset_size(self) -> float | None:
        """Number N of training examples, or their total weight, by which the prior is scaled."""
        return self._dataset_size

    @dataset_size.setter
    def dataset_size(self, size: float | None) -> None:
        self._dataset_size = None if size is None else check_positive("dataset_size", size)
        if size is not None and self.wants_class_counts:
            self.head.set_uniform_counts(size)

    @property
    def class_counts(self) -> Tensor | None:
        """Training examples of each class (K,), for methods that weight by them; None: unknown, or unused."""
        return self.head.class_counts

    @class_counts.setter
    def class_counts(self, counts: Any) -> None:
        self.head.set_class_counts(check_class_counts(counts, self.num_classes))

    @property
    def wants_class_counts(self) -> bool:
        """Whether the method weights classes by their numbers of examples and these are not set."""
        return self.head.wants_class_counts

    @property
    def members(self) -> list[Classifier]:
        """List of the model itself, as in an ensemble of one."""
        return [self]

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Parameter groups for an optimiser, without frozen parameters.

        Parameters that have a prior (β), or belong to a density, are in a group without weight decay that is
        marked ``no_weight_decay``. Their natural size is one, so their learning rate has a multiplier.
        """
        weight_decay = check_not_negative("weight_decay", weight_decay)
        undecayed = [p for p in self.head.undecayed_parameters() if p.requires_grad]
        known = {id(p) for p in undecayed}
        decayed = [p for p in self.parameters() if p.requires_grad and id(p) not in known]
        groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": weight_decay}]
        if undecayed:
            groups.append({"params": undecayed, "weight_decay": 0.0, "no_weight_decay": True})
        return groups

    @torch.no_grad()
    def update_posterior(self, x: Any) -> None:
        """Update a ``momentum`` posterior with one batch: for streams that have no last epoch."""
        head = self.head
        if not isinstance(head, GaussianHead) or not isinstance(head.posterior, MomentumPosterior):
            raise TypeError(
                "update_posterior is for posterior='momentum'; other posteriors take one pass with "
                "hetsngp.fit_posterior(model, loader)"
            )
        check_inputs(x)
        self.check_weights()
        with evaluating(self):
            h = self.finite_features(x)
            self._in_full_precision(h, lambda h: head.update_posterior(h, self.dataset_size))
        self.mark_fitted()

    def mark_fitted(self) -> None:
        """Record that the posterior belongs to the present weights; later training makes it stale."""
        self._trained_since_fit = False
        self._record_weights()
        self._warned.discard(_STALE)

    # --- weights ----------------------------------------------------------------------------------------

    @property
    def _trained_since_fit(self) -> bool:
        """Whether weights have changed since ``fit_posterior``, also where no training was seen."""
        return self._is_stale(marks_of(self))

    @_trained_since_fit.setter
    def _trained_since_fit(self, trained: bool) -> None:
        self._known_stale = bool(trained)

    def _is_stale(self, marks: Marks | None) -> bool:
        if self._known_stale or not self._is_fitted:
            return self._known_stale
        if marks is None or marks == self._seen.compared or not eager(self.temperature):
            return False
        before, now = self._fitted_weights, self._weights_now()
        if before is None or before.fitted != now.fitted:
            self._fitted_weights = now  # these weights came with a fit of their own
        elif before.differ_from(now):
            self._trained_since_fit = True
            return True
        self._seen.compared = marks
        return False

    @property
    def _is_fitted(self) -> bool:
        """Whether the head has a posterior or an OOD score that was fitted with the weights."""
        posterior, score = self.head.posterior, self.head.ood_score
        if posterior is not None and posterior.needs_fit and posterior.is_filled:
            return True
        return score is not None and score.is_filled

    def _weights_now(self) -> FittedWeights:
        posterior, score = self.head.posterior, self.head.ood_score
        fitted = {} if posterior is None else {name: getattr(posterior, name) for name in posterior.shapes()}
        fitted |= {} if score is None else {f"ood.{name}": getattr(score, name) for name in score.names}
        return FittedWeights.of(self, fitted)

    def _record_weights(self) -> None:
        """Take the present weights for those that ``fit_posterior`` saw."""
        marks = marks_of(self)
        known = marks is not None and self._is_fitted
        self._fitted_weights = self._weights_now() if known else None
        self._seen.compared = marks

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load as any module does; the posterior of a new model belongs to the weights it comes with."""
        result = super().load_state_dict(*args, **kwargs)
        if self._fitted_weights is None and not self._trained_since_fit:
            self._record_weights()
        return result

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Pickles of release 0.1 have one attribute in place of these two.
        self.__dict__.setdefault("_seen", Seen())
        self._known_stale = bool(self.__dict__.pop("_trained_since_fit", self._known_stale))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Another precision or device is no training: compared before, recorded afterwards.
        fresh = self._fitted_weights is not None and not self._trained_since_fit
        super()._apply(fn, recurse)
        if fresh:
            self._record_weights()
        return self

    def check_weights(self) -> Marks | None:
        """Raise a ValueError that names a weight which is NaN or infinite; looks again only after changes.

        Returns the marks of the weights.
        """
        if not eager(self.temperature):
            return None
        if self.temperature.device.type == "meta":
            raise ValueError(
                "the model is on the meta device, so it has no weights: load them, or build it anew"
            )
        marks = marks_of(self)
        if marks is not None and marks == self._seen.finite:
            return marks
        self._refuse_non_finite((*self.named_parameters(), *self._own_buffers()))
        self._seen.finite = marks
        return marks

    def _own_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers that are always finite; those of a network may be infinite on purpose."""
        for name, tensor in self.named_buffers():
            if name.startswith("head.") or name.rpartition(".")[2].startswith("spectral_"):
                yield name, tensor

    def _refuse_non_finite(self, tensors: Any) -> None:
        name = first_non_finite(tensors)
        if name is not None:
            raise NotFiniteError(
                f"{name} has NaN or infinite values: training diverged, or the file is damaged; load weights "
                "from before, or train again with a lower lr"
            )

    # --- x → h ------------------------------------------------------------------------------------------

    def _features(self, x: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return check_features(self.backbone(x), self.num_features)
        if torch.is_grad_enabled():
            self._seen = Seen()  # a fused optimiser writes to the weights without a mark
            if self.training:
                self._trained_since_fit = self._is_fitted
        with explain_failure(x, self.backbone):
            h = self.backbone(x)
        rows = len(x) if self._keeps_rows and isinstance(x, Tensor) and x.dim() > 0 else None
        check_features(h, self.num_features, rows)
        if h.device != self.temperature.device:
            raise ValueError(
                f"the backbone returned features on {h.device}, but the head is on "
                f"{self.temperature.device}: move the whole model, model.to(device)"
            )
        return h

    _keeps_rows = True
    """Whether the backbone returns as many rows as it is given."""

    def finite_features(self, x: Any) -> Tensor:
        """Features h (B, D) of x; NaN or infinite ones raise a ValueError that says why."""
        h = self._features(x)
        if eager(h):
            self._check_features(h)
        return h

    def _answer(self, x: Any, fn: Callable[[Tensor], Any]) -> Any:
        """Result of ``fn`` at the features of x, finite."""
        return self._finite_answer(self._features(x), fn)

    def _finite_answer(self, h: Tensor, fn: Callable[[Tensor], Any]) -> Any:
        """Result of ``fn`` at features h; raises where they or it are not finite.

        Both are looked at together, at the end: the host would otherwise wait for the backbone on a GPU
        before it launches the head.
        """
        try:
            answer = self._in_full_precision(h, fn)
        except torch.linalg.LinAlgError:
            self._check_features(h)
            self._raise_not_finite(h.abs().amax(1) < h.abs().amax(), "prediction")
            raise
        found = [answer] if isinstance(answer, Tensor) else vars(answer).values()
        parts = [part for part in found if isinstance(part, Tensor) and part.is_floating_point()]
        if eager(h, *parts):
            rows = torch.cat([part.reshape(len(part), -1) for part in (h, *parts)], 1).isfinite().all(1)
            if not bool(rows.all()):
                self._check_features(h)
                self._raise_not_finite(rows, "prediction")
        return answer

    def _check_features(self, h: Tensor) -> None:
        if not bool(torch.isfinite(h).all()):
            self._raise_not_finite(torch.isfinite(h).all(1), "features")

    def _raise_not_finite(self, finite: Tensor, what: str) -> None:
        """Raise an error that names a weight, or the first example that is not ``finite`` (B,)."""
        others = [(name, t) for name, t in self.named_buffers() if t.is_floating_point() and t.isnan().any()]
        self._refuse_non_finite((*self.named_parameters(), *self._own_buffers(), *others))
        row = int((~finite).int().argmax())
        raise NotFiniteError(
            f"no finite {what} for x, first in row {row}: its values are too large for "
            f"{self.temperature.dtype}; standardise the inputs, or leave this one out"
        )

    @staticmethod
    def _in_full_precision(h: Tensor, fn: Any) -> Any:
        """Run the head in float32 or better: a variance is a small difference of large numbers."""
        h = h.float() if h.dtype in (torch.float16, torch.bfloat16) else h
        if not torch.is_autocast_enabled(h.device.type):  # a graph would have the context as a node
            return fn(h)
        with torch.autocast(h.device.type, enabled=False):
            return fn(h)

    def _warn_once(self, message: str, stacklevel: int = 3) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=stacklevel)
