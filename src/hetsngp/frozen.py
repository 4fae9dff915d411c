"""fit_head(): a new head on a backbone as it is, from features that are computed once."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hetsngp.calibration import row_keys
from hetsngp.features import FeatureSet, extract_features, remembered_features
from hetsngp.fitting import GP_LEARNING_RATE, Fit
from hetsngp.loop import Schedule
from hetsngp.model import Classifier
from hetsngp.nn.extractor import Extractor, Features
from hetsngp.options import Options
from hetsngp.parts import kind_of
from hetsngp.posterior import PosteriorReport
from hetsngp.progress import Progress, RowProgress, at_a_terminal
from hetsngp.recipes import METHODS, check_options, make_head, options_to_save
from hetsngp.table import Table, split
from hetsngp.validation import check_choice, check_positive

# What is decided when the backbone is made: a head alone cannot change it.
OF_THE_BACKBONE = ("method", "spectral_bound")


def fit_head(
    model: Classifier,
    loader: Iterable[Any] | FeatureSet,
    calibration: Iterable[Any] | FeatureSet | float | None = 0.1,
    *,
    epochs: int = 50,
    batch_size: int = 128,
    lr: float = 1e-3,
    weight_decay: float = 1e-4,
    patience: int | None = 10,
    seed: int = 0,
    progress: bool | None = None,
    **options: Any,
) -> PosteriorReport:
    """Train a new head on ``model``'s features, fit its posterior, calibrate it; the backbone is left alone.

    The backbone runs once over ``loader`` and once over ``calibration``, in eval mode; the head never needs
    it again, and neither does another call with the same loaders: with other ``options`` (those of
    :class:`hetsngp.options.Options`; for a frozen backbone also ``method``) a second head takes seconds.
    Augmentation in a loader is seen once.

    Args:
        model: Made by :func:`hetsngp.convert` or :func:`hetsngp.build`; its head is replaced at the end.
        loader: Yields (x, y) or (x, y, weight); or features, from :func:`hetsngp.extract_features`.
        calibration: Held-out data of the same kind, to stop and to calibrate by; or the share of the rows to
            hold out at random (fewer than 100 rows: by folds, as the scikit-learn estimator does); None: all
            epochs are run, and nothing is calibrated.
        epochs: Passes over the features, at most; the learning rate follows a cosine to zero over them.
        batch_size: Rows a step.
        lr: Learning rate of AdamW; three times this for the weights of a GP.
        weight_decay: Of AdamW, for what has no prior of its own.
        patience: Epochs without a better held-out NLL after which training stops; the best epoch is kept in
            either case. None: never.
        seed: Of the head's initial values, the split, the order of batches and the integration points.
        progress: Show how far it is; None: at a terminal.
        **options: Options to change; the others stay as the model was made with.

    >>> import hetsngp, torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> x = torch.randn(400, 2)
    >>> model = hetsngp.convert(net, example_input=x[:2], freeze=True)
    >>> report = fit_head(model, [(x, (x[:, 0] > 0).long())], epochs=5)
    >>> report = fit_head(model, [(x, (x[:, 0] > 0).long())], epochs=5, method="sngp", amplitude=3.0)
    >>> model.predict(x).probs.shape
    torch.Size([400, 2])
    """
    method, changed = _check_options(model, options)
    schedule = Schedule(epochs, lr, weight_decay, GP_LEARNING_RATE)
    check_positive("batch_size", batch_size, integer=True)
    show = at_a_terminal() if progress is None else progress
    seeds = np.random.default_rng(seed).integers(2**31, size=4).tolist()
    table = _table(model, _features(model, loader, "training data", show))
    make = functools.partial(_view, model, method, changed, seeds[1])
    fit = Fit(make, schedule, batch_size, patience, (seeds[2], seeds[3]), double=False)
    if calibration is None or isinstance(calibration, int | float):
        pairs = split(table, _check_share(calibration), seeds[0])
    else:
        pairs = [(table, _table(model, _features(model, calibration, "calibration data", show)))]
    with Progress(schedule.epochs, 0 if len(pairs) == 1 else len(pairs), show) as watch:
        if len(pairs) == 1:
            view, _, report = fit.with_one_part(*pairs[0], watch)
        else:
            view, _, report = fit.in_folds(table, pairs, watch)
    watch.say(str(report))
    _put(model, view, method, changed)
    return report


def _check_options(model: Classifier, options: dict[str, Any]) -> tuple[str, Options]:
    """The method and all options of the new head: the model's own, where they are not given."""
    model.on_features()  # refuses a model whose inputs share their features
    frozen = isinstance(model.backbone, Extractor) and model.backbone.frozen
    for name in OF_THE_BACKBONE:
        if name in options and not frozen:
            raise ValueError(
                f"{name} decides how a backbone that is to be trained is prepared, and cannot change with "
                "the head alone: hetsngp.convert(network, freeze=True) leaves the backbone as it is"
            )
    if not model.config:
        raise TypeError("fit_head takes a model made by hetsngp.convert or hetsngp.build")
    method = check_choice("method", options.pop("method", model.config["method"]), METHODS)
    return method, check_options({**model.config["options"], **options})


def _check_share(share: Any) -> float:
    if share is None:
        return 0.0
    if isinstance(share, bool) or not 0 <= share < 1:
        raise ValueError(
            f"calibration must be held-out data, or a share of the rows to hold out (from 0 to below 1), "
            f"not {share}"
        )
    return float(share)


def _features(model: Classifier, data: Any, title: str, show: bool) -> FeatureSet:
    if isinstance(data, FeatureSet):
        return data

    def extract() -> FeatureSet:
        batches = len(data) if hasattr(data, "__len__") else None
        with RowProgress(f"features of the {title}", batches, show) as rows:
            return extract_features(model, data, progress=rows.add)

    return remembered_features(model, data, extract)


def _table(model: Classifier, features: FeatureSet) -> Table:
    """Rows as the fit takes them; equal ones are known by their features."""
    h, weight = features.h, features.weight
    if h.dim() != 2 or h.shape[1] != model.num_features:
        raise ValueError(
            f"the features have shape {tuple(h.shape)}, but this model's are (n, {model.num_features}): "
            "extract them with this model's backbone"
        )
    keys = row_keys(h, 1e-4 * h.square().mean().sqrt().clamp_min(1e-12))
    group = np.unique(keys.numpy(), return_inverse=True)[1].reshape(-1)
    weights = np.ones(len(h)) if weight is None else weight.double().numpy()
    return Table(h.numpy(), features.y.numpy(), weights, group)


def _view(model: Classifier, method: str, options: Options, seed: int) -> Classifier:
    """A fresh head on features, in the place and precision of the model's."""
    generator = torch.Generator().manual_seed(seed)
    backbone = Features(model.num_features, kind_of(model.backbone))
    with torch.random.fork_rng(devices=[]):  # layers draw torch's initial values before they get ours
        head = make_head(method, backbone, model.num_classes, options, generator)
    return Classifier(backbone, head.to(model.temperature.device), num_features=model.num_features)


def _put(model: Classifier, view: Classifier, method: str, options: Options) -> None:
    """Give the model the fitted head."""
    mode = model.training
    model.head = view.head
    model.train(mode)
    model.config = {**model.config, "method": method, "options": options_to_save(replace(options))}
    model._dataset_size = view.dataset_size
    model.calibration = view.calibration
    model.mark_fitted()
