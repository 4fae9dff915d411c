"""Calibration where too few examples can be held out: each is held out once, by a model made for that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from hetsngp.models.classifier import Classifier
from hetsngp.posterior.calibration import (
    TOLERANCE,
    HeldOut,
    choose_scale,
    choose_temperature,
    held_out_fisher,
    posterior_of,
)
from hetsngp.posterior.fit import PosteriorReport, collect, finish, fitting, pass_over

Fold = tuple[Classifier, Iterable[Any], Iterable[Any]]
"""A model, the loader it was trained on, and the loader of what was held out from it."""


def cross_fit_posterior(
    model: Classifier, loader: Iterable[Any], folds: Sequence[Fold], *, tolerance: float = TOLERANCE
) -> PosteriorReport:
    """:func:`hetsngp.fit_posterior` of ``model``, trained on all data, calibrated by models of the folds.

    Temperature, output Hessian and posterior scale are those that suit the fold models on what they have not
    seen, pooled over the folds: every example bears witness once, and none is lost to training.
    """
    if not folds:
        raise ValueError("folds is empty: give at least one, or call hetsngp.fit_posterior(model, loader)")
    with ExitStack() as stack:
        for each in (model, *(fold_model for fold_model, _, _ in folds)):
            stack.enter_context(fitting(each))  # if one fails, all are as they were
        pairs = []
        for fold_model, _, calibration in folds:
            fold_model.head.reset_calibration()
            pairs.append((fold_model, collect(fold_model, calibration)))
        chosen = choose_temperature(pairs)
        for temperature in (model.head.temperature, model.head.mode_temperature):
            temperature.copy_(pairs[0][0].temperature)
        if model.head.has_posterior:
            fisher = mean_fisher(pairs)
            for (fold_model, held_out), (_, training, _) in zip(pairs, folds, strict=True):
                _fit(fold_model, training, held_out, fisher)
            count = _fit(model, loader, None, fisher)
            chosen |= {
                "posterior": posterior_of(model).name,
                "count": count,
                **choose_scale(pairs, (), tolerance),
            }
            posterior_of(model).scale.fill_(chosen["scale"])
            model.head.temperature.copy_(pairs[0][0].temperature)
        report = PosteriorReport(temperature=float(model.temperature), **chosen)
    for fold_model, _, _ in folds:
        fold_model.mark_fitted()
    return finish(model, report)


def _fit(model: Classifier, loader: Iterable[Any], held_out: HeldOut | None, fisher: Tensor | None) -> float:
    """The posterior of ``model`` with the output Hessian of all folds; examples that went in."""
    total = pass_over(model, loader, None, held_out)
    posterior_of(model).fit(total, fisher)
    return total.count


def mean_fisher(pairs: Sequence[tuple[Classifier, HeldOut]]) -> Tensor | None:
    """Λ over all examples, each as the model sees it that has not met it."""
    total, count = None, 0.0
    for model, held_out in pairs:
        fisher = held_out_fisher(model, held_out)
        if fisher is None:
            return None
        part = fisher * held_out.total
        total = part if total is None else total + part
        count += held_out.total
    return None if total is None else total / count
