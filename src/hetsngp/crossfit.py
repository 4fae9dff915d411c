"""Calibration where too few examples can be held out: each is held out once, by a model made for that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from hetsngp.calibration import HeldOut, choose_scale, choose_temperature, gp_of, held_out_fisher
from hetsngp.model import Classifier, evaluating
from hetsngp.posterior import PosteriorReport, collect, pass_over

Fold = tuple[Classifier, Iterable[Any], Iterable[Any]]
"""A model, the loader it was trained on, and the loader of what was held out from it."""


def cross_fit_posterior(model: Classifier, loader: Iterable[Any], folds: Sequence[Fold]) -> PosteriorReport:
    """:func:`hetsngp.fit_posterior` of ``model``, trained on all data, calibrated by models of the folds.

    Temperature, output Hessian and posterior scale are those that suit the fold models on what they have not
    seen, pooled over the folds: every example bears witness once, and none is lost to training.
    """
    if not folds:
        raise ValueError("folds is empty: give at least one, or call hetsngp.fit_posterior(model, loader)")
    with torch.no_grad(), torch.autocast(model.temperature.device.type, enabled=False):
        pairs = []
        for fold_model, _, held_out in folds:
            fold_model.head.temperature.copy_(fold_model.head.training_temperature)
            with evaluating(fold_model):
                pairs.append((fold_model, collect(fold_model, held_out)))
            fold_model.eval()
        chosen = choose_temperature(pairs)
        model.head.temperature.copy_(pairs[0][0].temperature)
        if model.head.has_posterior:
            chosen |= _fit_posteriors(pairs, [training for _, training, _ in folds])
            with evaluating(model):
                total = pass_over(model, loader, None, None)
            posterior = gp_of(model).posterior
            posterior.fit(total, mean_fisher(pairs))
            posterior.scale.fill_(chosen["scale"])
            chosen |= {"posterior": posterior.name, "count": total.count}
    report = PosteriorReport(temperature=float(model.temperature), **chosen)
    model.mark_fitted()
    model.calibration = asdict(report)
    return report


def _fit_posteriors(
    pairs: list[tuple[Classifier, HeldOut]], loaders: Sequence[Iterable[Any]]
) -> dict[str, Any]:
    """Those of the fold models, and the scale that suits them."""
    fisher = mean_fisher(pairs)
    for (model, held_out), loader in zip(pairs, loaders, strict=True):
        posterior = gp_of(model).posterior
        posterior.fit(pass_over(model, loader, None, held_out), fisher)
        model.mark_fitted()
    return choose_scale(pairs)


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
