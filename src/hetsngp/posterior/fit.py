"""fit_posterior(): the posterior from one pass over the training data, and calibration on held-out data."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor

from hetsngp.models.classifier import Classifier, evaluating, to_device
from hetsngp.models.ensemble import Ensemble
from hetsngp.nn.posteriors import Statistics
from hetsngp.posterior.calibration import (
    TOLERANCE,
    HeldOut,
    can_score_ood,
    choose_joint_temperature,
    choose_scale,
    choose_temperature,
    fit_ood_tables,
    held_out_fisher,
    posterior_of,
)
from hetsngp.validation import (
    check_batch,
    check_held_out,
    check_inputs,
    check_loader,
    check_multi_hot,
    check_repeatable,
    check_targets,
    check_weight,
)

# Largest share of calibration examples that may occur in the training data: few distinct inputs may repeat.
MAX_SHARED = 0.5


@dataclass(frozen=True)
class PosteriorReport:
    """Result of ``fit_posterior``; its fields are also in ``model.calibration``."""

    temperature: float
    posterior: str = "none"
    """Kind of posterior."""
    count: float = 0
    """Number of training examples, or their total weight; 0 where they were not read."""
    scale: float = 1.0
    """Factor on the posterior variance."""
    held_out: float = 0
    """Number of held-out examples, or their total weight; 0 without calibration."""
    left_out: float = 0
    """Number of training examples that the temperature was set by too, by leave-one-out; or their weight."""
    nll_before: float | None = None
    """Held-out NLL at the MAP estimate and the training temperature."""
    mode_temperature: float | None = None
    """Best temperature at the MAP estimate; ``temperature`` is the best with the posterior."""
    nll_mode: float | None = None
    """Held-out NLL at the MAP estimate and ``mode_temperature``."""
    nll: float | None = None
    """Held-out NLL with the posterior, at the chosen scale and ``temperature``."""
    standard_error: float | None = None
    """Standard error of ``nll_mode``."""
    allowance: float | None = None
    """Largest cost of the chosen scale, in nats: one standard error of the difference from the best
    scale, example by example, and at least a tolerance."""
    scale_grid: tuple[tuple[float, float], ...] = ()
    """(scale, held-out NLL at the best temperature for it) of every scale tried."""

    def __str__(self) -> str:
        has_posterior = self.posterior != "none"
        text = (
            f"posterior {self.posterior} from {_number(self.count)} examples"
            if has_posterior
            else "no posterior"
        )
        if not self.held_out:
            return text + ", not calibrated"
        text += f"; on {_number(self.held_out)} held-out examples "
        if self.left_out:
            text += f"and {_number(self.left_out)} training examples by leave-one-out "
        text += "chose "
        if has_posterior:
            text += (
                f"posterior scale {self.scale:.3g}, the largest that costs at most {self.allowance:.4f}, and "
            )
        return f"{text}temperature {self.temperature:.3g}: NLL {self.nll_before:.4f} → {self.nll:.4f}"


def _number(count: float) -> str:
    """Format a number of examples, or a total weight with at most two decimals."""
    return f"{count:.2f}".rstrip("0").rstrip(".")


@overload
def fit_posterior(
    model: Classifier,
    loader: Iterable[Any],
    calibration: Iterable[Any] | None = ...,
    *,
    tolerance: float = ...,
    progress: Callable[[int], None] | None = ...,
    reduce: Callable[[Tensor], Tensor] | None = ...,
) -> PosteriorReport: ...


@overload
def fit_posterior(
    model: Ensemble,
    loader: Iterable[Any],
    calibration: Iterable[Any] | None = ...,
    *,
    tolerance: float = ...,
    progress: Callable[[int], None] | None = ...,
    reduce: Callable[[Tensor], Tensor] | None = ...,
) -> list[PosteriorReport]: ...


def fit_posterior(
    model: Classifier | Ensemble,
    loader: Iterable[Any],
    calibration: Iterable[Any] | None = None,
    *,
    tolerance: float = TOLERANCE,
    progress: Callable[[int], None] | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> PosteriorReport | list[PosteriorReport]:
    """Fit the posterior in one pass over ``loader`` and calibrate on ``calibration``.

    Both yield (x, y), or (x, y, weight) where an example counts ``weight`` times (any number ≥ 0).

    The pass runs in eval mode without gradients, at the weights the model has now. ``calibration`` must be
    held out from training (never training, never out-of-distribution data): it sets the temperature by NLL,
    gives the Kronecker posterior its output Hessian, picks the largest posterior scale whose NLL is as good
    as the best, sets the temperature again for predictions under that posterior, and gives ``ood_score`` its
    tail probabilities. As good is worse by no more than a standard error or ``tolerance`` nats: a smaller
    tolerance calibrates ID inputs better, a larger one separates OOD inputs better. The pass also gives
    ``ood_score`` its density, where there are at least 20 examples to calibrate on and a covariance of the
    features has at most 200 MB; without posterior and ``calibration`` ``loader`` is not read.
    ``progress`` is called with the number of examples after each batch. For an ensemble the result is a list;
    its members are calibrated one by one, and then their temperatures are multiplied by a common factor that
    the NLL of the mixture chooses (softmax only).
    ``reduce`` adds up a tensor over processes that each have a part of the data in ``loader``, and all of
    ``calibration``.
    """
    if not isinstance(model, Classifier | Ensemble):
        raise TypeError(
            f"fit_posterior takes a model made by hetsngp.build or hetsngp.convert, or an Ensemble, got "
            f"{type(model).__name__}"
        )
    if isinstance(tolerance, bool) or not isinstance(tolerance, numbers.Real) or not tolerance >= 0:
        raise ValueError(f"tolerance is nats of held-out NLL and must be at least 0, got {tolerance!r:.100}")
    if isinstance(model, Ensemble):
        check_repeatable(len(model.members), loader=loader, calibration=calibration)
    check_held_out(loader, calibration)
    reports = []
    for member in model.members:
        reports.append(
            fit_and_calibrate(
                member, loader, calibration, tolerance=tolerance, progress=progress, reduce=reduce
            )
        )
    if isinstance(model, Ensemble) and calibration is not None:
        reports = _calibrate_jointly(model, calibration, reports)
    return reports if isinstance(model, Ensemble) else reports[0]


def _calibrate_jointly(
    ensemble: Ensemble, calibration: Iterable[Any], reports: list[PosteriorReport]
) -> list[PosteriorReport]:
    """Set the temperatures of the members once more, by the NLL of their mixture.

    Not for one member, and not under the sigmoid, whose held-out NLL is of all labels of an example
    together where the mixture averages each label's probability.
    """
    members = ensemble.members
    if len(members) == 1 or members[0].head.sigmoid:
        return reports
    with ExitStack() as stack:
        for member in members:
            stack.enter_context(restore_on_error(member))
        held_out = _collect_together(members, calibration)
        pairs = list(zip(members, held_out, strict=True))
        found = choose_joint_temperature(pairs)
        for member, own in pairs:
            fit_ood_tables(member, [(member, own)])
    reports = [replace(report, **each) for report, each in zip(reports, found, strict=True)]
    return [record_report(member, report) for member, report in zip(members, reports, strict=True)]


def fit_and_calibrate(
    model: Classifier,
    loader: Iterable[Any],
    calibration: Iterable[Any] | None,
    *,
    leave_one_out: HeldOut | None = None,
    tolerance: float = TOLERANCE,
    progress: Callable[[int], None] | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> PosteriorReport:
    """Fit the posterior of one model and calibrate it. ``leave_one_out``: training examples that the
    temperature is set by too; ``tolerance``: nats that a larger posterior scale may cost in any case.
    """
    model.check_weights()
    with restore_on_error(model):
        report = _fit_and_calibrate(model, loader, calibration, leave_one_out, tolerance, progress, reduce)
    return record_report(model, report)


@contextmanager
def restore_on_error(model: Classifier) -> Iterator[None]:
    """Run in eval mode and full precision; restore the buffers of the head on an error."""
    # Large buffers are replaced by a fit, never written into, so keeping them costs nothing.
    before = {name: t.clone() if t.numel() == 1 else t for name, t in model.head.named_buffers()}
    try:
        # In full precision whatever the caller's autocast: this pass is short, and exactness is its point.
        with evaluating(model), torch.autocast(_device(model).type, enabled=False):
            yield
    except BaseException:
        for name, tensor in before.items():
            owner, _, attribute = name.rpartition(".")
            setattr(model.head.get_submodule(owner), attribute, tensor)
        raise


def record_report(model: Classifier, report: PosteriorReport) -> PosteriorReport:
    """Mark the model as fitted and store the report in it."""
    model.mark_fitted()
    model.calibration = asdict(report)
    return report


def _fit_and_calibrate(
    model: Classifier,
    loader: Iterable[Any],
    calibration: Iterable[Any] | None,
    leave_one_out: HeldOut | None,
    tolerance: float,
    progress: Callable[[int], None] | None,
    reduce: Callable[[Tensor], Tensor] | None,
) -> PosteriorReport:
    held_out = None if calibration is None else collect_held_out(model, calibration)
    further = [] if leave_one_out is None else [(model, leave_one_out)]
    model.head.reset_calibration()
    chosen = {} if held_out is None else choose_temperature([(model, held_out)], further)
    scored = held_out is not None and can_score_ood(model, [(model, held_out)])
    if model.head.has_posterior or scored:
        total = collect_statistics(model, loader, progress, held_out, reduce, with_classes=scored)
        chosen["count"] = total.count
        if model.head.has_posterior:
            posterior = posterior_of(model)
            posterior.scale.fill_(1.0)
            posterior.fit(total, None if held_out is None else held_out_fisher(model, held_out))
            chosen["posterior"] = posterior.name
            if held_out is not None:
                chosen |= choose_scale([(model, held_out)], further, tolerance)
        if held_out is not None and scored:
            fit_ood_density(model, total)
            fit_ood_tables(model, [(model, held_out)])
    return PosteriorReport(temperature=float(model.temperature), **chosen)


def fit_ood_density(model: Classifier, total: Statistics) -> None:
    """Set the density of the OOD score, where the model has one."""
    if model.head.ood_score is not None and total.classes is not None:
        model.head.ood_score.fit_density(total.classes)


def _device(model: Classifier) -> torch.device:
    return model.temperature.device


def feature_batches(model: Classifier, loader: Iterable[Any], where: str) -> Any:
    """Yield (h, y, weight or None) in full precision; examples of weight zero are left out."""
    check_loader(loader, where)
    empty = weightless = True
    for batch in loader:
        h, y, weight = _batch_features(model, batch, where)
        empty = False
        if len(h):
            weightless = False
            yield h, y, weight
    if empty:
        raise ValueError(
            f"{where} is empty: it yielded no batch; give a loader with data, not a used-up iterator"
        )
    if weightless:
        raise ValueError(f"every weight of {where} is zero: give some examples a positive weight")


def _batch_features(model: Classifier, batch: Any, where: str) -> tuple[Tensor, Tensor, Tensor | None]:
    x, y, weight = check_batch(batch, where)
    check_inputs(x)
    device = _device(model)
    h = model.finite_features(to_device(x, device))
    check = check_multi_hot if model.head.sigmoid else check_targets
    y = check(to_device(y, device), model.num_classes, h.shape[0])
    h = h.float() if h.dtype in (torch.float16, torch.bfloat16) else h
    if weight is not None:
        weight = check_weight(to_device(weight, device), h.shape[0])
        counts = weight > 0
        h, y, weight = h[counts], y[counts], weight[counts]
    return h, y, weight


def collect_statistics(
    model: Classifier,
    loader: Iterable[Any],
    progress: Callable[[int], None] | None,
    held_out: HeldOut | None,
    reduce: Callable[[Tensor], Tensor] | None = None,
    *,
    with_classes: bool = True,
) -> Statistics:
    """Sum the statistics of the posterior; warn where the held-out examples are among the training data.

    ``with_classes``: also those of the density of the OOD score, which only calibrated models have.
    """
    total: Statistics | None = None
    found = torch.zeros(0, dtype=torch.bool)
    if held_out is not None:
        # Compared by the backbone's features alone: kernel features amplify rounding.
        held_out = replace(held_out, h=model.head.backbone_features(held_out.h))
        found = torch.zeros_like(held_out.keys).bool()
    seen = 0
    for h, y, weight in feature_batches(model, loader, "loader"):
        piece = model.head.statistics(h, weight)
        if with_classes:
            piece = replace(piece, classes=model.head.class_sums(h, y, weight))
        if total is None:
            total = piece
        else:
            total += piece
        if held_out is not None:
            found |= held_out.contained_in(model.head.backbone_features(h))
        seen += len(h)
        if progress is not None:
            progress(seen)
    assert total is not None
    if reduce is not None:
        total = total.reduced(reduce)
        found = reduce(found.to(total.sums)) > 0
    share = float(found.float().mean()) if held_out is not None else 0.0
    if share > MAX_SHARED:
        warnings.warn(
            f"{share:.0%} of the calibration examples are also in the training data: calibrate "
            "on examples the model was not trained on, e.g. from torch.utils.data.random_split",
            stacklevel=5,
        )
    return total


def collect_held_out(model: Classifier, calibration: Iterable[Any]) -> HeldOut:
    """Collect features, labels and weights of the held-out data in one pass."""
    held_out = _join_batches(list(feature_batches(model, calibration, "calibration")))
    if len(held_out.h) < 2:
        raise ValueError("calibration holds one example; a standard error needs at least two")
    return held_out


def _collect_together(members: Sequence[Classifier], calibration: Iterable[Any]) -> list[HeldOut]:
    """Collect the held-out data of all members in one pass: a loader that shuffles has another order in the
    next.
    """
    batches: list[list[tuple[Tensor, Tensor, Tensor | None]]] = [[] for _ in members]
    for batch in calibration:
        for member, found in zip(members, batches, strict=True):
            found.append(_batch_features(member, batch, "calibration"))
    return [_join_batches(found) for found in batches]


def _join_batches(batches: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> HeldOut:
    h, y = torch.cat([h for h, _, _ in batches]), torch.cat([y for _, y, _ in batches])
    weights = [torch.ones_like(h[:, 0]) if weight is None else weight.to(h) for h, _, weight in batches]
    weighted = any(weight is not None for _, _, weight in batches)
    return HeldOut(h, y, torch.cat(weights) if weighted else None)
