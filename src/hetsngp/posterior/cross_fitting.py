"""Cross-fitting: where too few examples can be held out, each is held out once, from the model of a fold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from hetsngp.models.classifier import Classifier
from hetsngp.posterior.calibration import (
    TOLERANCE,
    HeldOut,
    can_score_ood,
    choose_scale,
    choose_temperature,
    fit_ood_tables,
    held_out_fisher,
    posterior_of,
)
from hetsngp.posterior.fit import (
    PosteriorReport,
    collect_held_out,
    collect_statistics,
    fit_ood_density,
    record_report,
    restore_on_error,
)

Fold = tuple[Classifier, Iterable[Any], Iterable[Any]]
"""A model, the loader of its training data, and the loader of the data held out from it."""


def cross_fit_posterior(
    model: Classifier, loader: Iterable[Any], folds: Sequence[Fold], *, tolerance: float = TOLERANCE
) -> PosteriorReport:
    """Fit the posterior of ``model``, trained on all data, and calibrate it with the models of the folds.

    Temperature, output Hessian and posterior scale are chosen for the fold models on the data held out from
    them, pooled over the folds: every example is a calibration example once, and none is lost to training.
    """
    if not folds:
        raise ValueError("folds is empty: give at least one, or call hetsngp.fit_posterior(model, loader)")
    with ExitStack() as stack:
        for each in (model, *(fold_model for fold_model, _, _ in folds)):
            stack.enter_context(restore_on_error(each))  # if one fails, all are restored
        pairs = []
        for fold_model, _, calibration in folds:
            fold_model.head.reset_calibration()
            pairs.append((fold_model, collect_held_out(fold_model, calibration)))
        model.head.reset_calibration()
        chosen = choose_temperature(pairs)
        for temperature in (model.head.temperature, model.head.mode_temperature):
            temperature.copy_(pairs[0][0].temperature)
        scored = can_score_ood(model, pairs)
        if model.head.has_posterior or scored:
            fisher = mean_fisher(pairs)
            for (fold_model, held_out), (_, training, _) in zip(pairs, folds, strict=True):
                _fit(fold_model, training, held_out, fisher, scored)
            chosen["count"] = _fit(model, loader, None, fisher, scored)
            if model.head.has_posterior:
                chosen["posterior"] = posterior_of(model).name
                chosen |= choose_scale(pairs, (), tolerance)
                posterior_of(model).scale.fill_(chosen["scale"])
                model.head.temperature.copy_(pairs[0][0].temperature)
            fit_ood_tables(model, pairs)
        report = PosteriorReport(temperature=float(model.temperature), **chosen)
    for fold_model, _, _ in folds:
        fold_model.mark_fitted()
    return record_report(model, report)


def _fit(
    model: Classifier,
    loader: Iterable[Any],
    held_out: HeldOut | None,
    fisher: Tensor | None,
    scored: bool,
) -> float:
    """Fit the posterior of ``model``, where it has one, with the output Hessian of all folds, and the density
    of its OOD score if ``scored``; return the number of examples.
    """
    total = collect_statistics(model, loader, None, held_out, with_classes=scored)
    if model.head.has_posterior:
        posterior_of(model).fit(total, fisher)
    fit_ood_density(model, total)
    return total.count


def mean_fisher(pairs: Sequence[tuple[Classifier, HeldOut]]) -> Tensor | None:
    """Λ over all examples, each with the model it was held out from."""
    total, count = None, 0.0
    for model, held_out in pairs:
        fisher = held_out_fisher(model, held_out)
        if fisher is None:
            return None
        part = fisher * held_out.total
        total = part if total is None else total + part
        count += held_out.total
    return None if total is None else total / count
