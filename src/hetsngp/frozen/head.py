"""fit_head(): a new head on an unchanged backbone, from features that are computed once."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Unpack

import numpy as np
import torch

from hetsngp.choices import MethodName
from hetsngp.fitting.lbfgs import MAX_ROUNDS
from hetsngp.fitting.loop import Schedule
from hetsngp.fitting.progress import ExampleProgress, Progress, at_a_terminal
from hetsngp.fitting.table_trainer import GP_LR_MULTIPLIER, TableTrainer, TrainingTable, can_precompute, split
from hetsngp.frozen.features import FeatureSet, extract_features
from hetsngp.models.classifier import Classifier
from hetsngp.models.components import kind_of
from hetsngp.models.methods import check_method, check_options, make_head, options_to_save
from hetsngp.models.options import HeadOptions, Options
from hetsngp.nn.extractor import Extractor, Features
from hetsngp.nn.multi_input import NoInputLayerError
from hetsngp.posterior.calibration import feature_keys
from hetsngp.posterior.fit import PosteriorReport
from hetsngp.validation import (
    check_held_out,
    check_multi_hot,
    check_not_negative,
    check_plain,
    check_positive,
    check_seed,
    check_targets,
    check_weight,
)

# Defaults on a frozen backbone; those of build are for networks that are trained with the head. Chosen by
# held-out NLL on frozen features (docs/decisions.md).
FROZEN_DEFAULTS: dict[str, Any] = {"features": "inducing", "random_features": 2048, "amplitude": 5.0}
# Components where examples × classes exceed MANY_LOGITS: held-out NLL is hardly worse with three quarters.
MANY_COMPONENTS, MANY_LOGITS = 1536, 2**20
FROZEN_NORMALIZATION = {"convolutional": "power"}

# Nats of held-out NLL that a larger posterior scale may cost. Frozen features lie far from each other, so
# that the posterior variance is large everywhere: 0.01 nats would already harm the calibration.
FROZEN_TOLERANCE = 0.001

# Fewest steps of AdamW: a head on few examples needs as many as one on some thousands.
MIN_STEPS = 1000

# Options that are applied when the backbone is made, and cannot change with the head alone.
BACKBONE_OPTIONS = ("method", "spectral_bound")


def fit_head(
    model: Classifier,
    loader: Iterable[Any] | FeatureSet,
    calibration: Iterable[Any] | FeatureSet | float | None = 0.1,
    *,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    weight_decay: float = 1e-4,
    patience: int | None = 10,
    seed: int = 0,
    progress: bool | None = None,
    **options: Unpack[HeadOptions],
) -> PosteriorReport:
    """Train a new head on ``model``'s features, fit its posterior, calibrate it; the backbone is left alone.

    The backbone runs once over ``loader`` and once over ``calibration``, in eval mode; augmentation in a
    loader is applied once. To fit several heads run it once for all of them:
    ``features = hetsngp.extract_features(model, loader)``, and pass ``features`` in place of the loader. On a
    frozen backbone options that were never given have other defaults than in ``build``: a GP has
    ``features="inducing"``, 2,048 of them (1,536 where examples × classes exceed a million), and amplitude 5,
    and sees ``normalization="power"`` of a convolutional network.

    A GP is brought to the MAP estimate by L-BFGS on all examples at once, and its training examples help
    to set the temperature, by leave-one-out. Everything else is trained by AdamW; and the GP too if
    ``epochs``, ``batch_size`` or ``lr`` is given, or if there are very many examples.

    Args:
        model: Made by :func:`hetsngp.convert` or :func:`hetsngp.build`; its head is replaced at the end.
        loader: Yields (x, y) or (x, y, weight); or features, from :func:`hetsngp.extract_features`.
        calibration: Held-out data of the same kind, for calibration and for early stopping of AdamW; or the
            share of the examples to hold out at random. Where that is fewer than 100 examples every example
            is held out once, in folds, as the scikit-learn estimator does. None, or fewer than 20 examples in
            all: nothing is calibrated (``report.held_out`` is 0), and AdamW runs all epochs.
        epochs: Largest number of passes of AdamW over the features; the learning rate follows a cosine to
            zero over them. None: 50, or as many as make 1,000 steps.
        batch_size: Examples in a step of AdamW. None: 128.
        lr: Learning rate of AdamW; three times this for the weights of a GP. None: 0.001.
        weight_decay: For parameters without a prior.
        patience: Epochs of AdamW without a lower held-out NLL after which it stops (a fifth of them all where
            ``epochs`` is None and that is more); the best epoch is kept in either case. None: never.
        seed: Seed of the head's initial values, the split, the order of batches and the integration points.
        progress: Whether to show progress; None: at a terminal.
        **options: Options to change (:class:`hetsngp.models.options.HeadOptions`); the others keep the values
            of the last ``build``, ``convert`` or ``fit_head``.

    >>> import hetsngp, torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> x = torch.randn(400, 2)
    >>> model = hetsngp.convert(net, example_input=x[:2], freeze=True)
    >>> features = hetsngp.extract_features(model, [(x, (x[:, 0] > 0).long())])
    >>> report = fit_head(model, features, epochs=5)
    >>> report = fit_head(model, features, epochs=5, method="sngp", amplitude=3.0)
    >>> model.predict(x).probs.shape
    torch.Size([400, 2])
    """
    method, changed = check_head_options(model, options)
    share = _share(calibration)
    by_steps = not (epochs is batch_size is lr is None)
    batch_size, lr = 128 if batch_size is None else batch_size, 1e-3 if lr is None else lr
    check_positive("batch_size", batch_size, integer=True)
    if epochs is not None:
        check_positive("epochs", epochs, integer=True)
    check_positive("lr", lr)
    check_not_negative("weight_decay", weight_decay)
    if patience is not None:
        check_positive("patience", patience, integer=True)
    check_seed(seed)
    check_held_out(loader, calibration)
    show = at_a_terminal() if progress is None else progress
    seeds = np.random.default_rng(seed).integers(2**31, size=4).tolist()
    # Options that cannot be used are errors before the backbone runs.
    sample = view_of(model, method, changed, 0)
    table = table_of(sample, features_of(model, sample, loader, "loader", show), "loader")
    if share is not None:
        pairs = split(table, share, seeds[0])
    else:
        held_out = features_of(model, sample, calibration, "calibration", show)
        pairs = [(table, table_of(sample, held_out, "calibration"))]
    given = {*model.config["given"], *options} - {"method"}
    if "random_features" not in given:
        changed = limit_components(len(table.y), model.num_classes, changed)
    make = functools.partial(view_of, model, method, changed, seeds[1])
    steps = math.ceil(len(table.y) / batch_size)
    schedule = Schedule(epochs or max(50, math.ceil(MIN_STEPS / steps)), lr, weight_decay, GP_LR_MULTIPLIER)
    if patience is not None and epochs is None:
        patience = max(patience, schedule.epochs // 5)
    examples = len(table.y) + sum(len(part.y) for _, part in pairs)
    map_by_lbfgs = not by_steps and can_precompute(sample, examples)
    trainer = TableTrainer(
        make, schedule, batch_size, patience, (seeds[2], seeds[3]), False, map_by_lbfgs, FROZEN_TOLERANCE
    )
    length = MAX_ROUNDS if map_by_lbfgs else schedule.epochs
    with Progress(length, 0 if len(pairs) == 1 else len(pairs), show) as shown:
        if len(pairs) == 1:
            view, _, report = trainer.fit_with_held_out(*pairs[0], shown)
        else:
            view, _, report = trainer.fit_in_folds(table, pairs, shown)
    shown.say(str(report))
    _replace_head(model, view, method, changed, sorted(given))
    return report


def check_head_options(model: Classifier, options: HeadOptions) -> tuple[MethodName, Options]:
    """Return the method and all options of the new head: those of the model where they are not given."""
    if not isinstance(model, Classifier) or not model.config:
        raise TypeError(
            f"this takes a model made by hetsngp.convert or hetsngp.build, got {type(model).__name__}"
        )
    model.on_features()  # refuses a model whose inputs share their features
    frozen = isinstance(model.backbone, Extractor) and model.backbone.frozen
    for name in BACKBONE_OPTIONS:
        if name in options and not frozen:
            raise ValueError(
                f"{name} decides how a backbone that is to be trained is prepared, and cannot change with "
                "the head alone: hetsngp.convert(network, freeze=True) leaves the backbone unchanged"
            )
    method = check_method(options.pop("method", model.config["method"]))
    given = {*model.config["given"], *options}
    defaults = {**FROZEN_DEFAULTS, "normalization": FROZEN_NORMALIZATION.get(kind_of(model.backbone))}
    unset = {name: value for name, value in defaults.items() if frozen and name not in given}
    return method, check_options({**model.config["options"], **unset, **options})


def limit_components(examples: int, classes: int, options: Options) -> Options:
    """Limit the number of inducing features: there is one component for each example at most, and fewer save
    time where there are many examples and classes.
    """
    if options.features != "inducing":
        return options
    most = MANY_COMPONENTS if examples * classes > MANY_LOGITS else options.random_features
    return replace(options, random_features=min(most, options.random_features, examples + 2 + examples % 2))


def _share(calibration: Any) -> float | None:
    """Return the share of the examples to hold out; None: ``calibration`` is data."""
    if calibration is None:
        return 0.0
    if not isinstance(calibration, numbers.Real | str):
        return None
    if isinstance(calibration, bool | str) or not 0 <= float(calibration) < 1:
        raise ValueError(
            f"calibration must be held-out data, or a share of the examples to hold out (from 0 to below 1), "
            f"not {calibration!r}"
        )
    return float(calibration)


def features_of(model: Classifier, sample: Classifier, data: Any, where: str, show: bool) -> FeatureSet:
    """Features of ``data``, from the backbone unless it is a FeatureSet; labels checked for ``sample``."""
    if isinstance(data, FeatureSet):
        return data
    try:
        batches = len(data)
    except TypeError:  # a stream
        batches = None
    checked = Classifier(model.backbone, sample.head, num_features=model.num_features)
    checked.training = model.training
    with ExampleProgress(f"features of {where}", batches, show) as shown:
        return extract_features(checked, data, progress=shown.add, where=where)


def table_of(sample: Classifier, features: FeatureSet, where: str) -> TrainingTable:
    """Check features and make a table of them; examples with equal features form a group."""
    check_plain("h", features.h)
    h, weight = features.h.detach().cpu(), features.weight
    if not h.is_floating_point():
        raise TypeError(f"the features of {where} are {h.dtype}: give real numbers, h.float()")
    h = h.float() if h.dtype in (torch.float16, torch.bfloat16) else h
    if h.dim() != 2 or h.shape[1] != sample.num_features:
        raise ValueError(
            f"the features of {where} have shape {tuple(h.shape)}, but this model's are "
            f"(n, {sample.num_features}): extract them with this model's backbone"
        )
    if len(h) == 0:
        raise ValueError(f"{where} is empty: it has no example")
    if not bool(torch.isfinite(h).all()):
        raise ValueError(
            f"the backbone made NaN or infinite features of {where}: check its weights, or run it in float32"
        )
    check = check_multi_hot if sample.head.sigmoid else check_targets
    y = check(features.y, sample.num_classes, len(h))
    weights = torch.ones(len(h)) if weight is None else check_weight(weight, len(h))
    keys = feature_keys(h, 1e-4 * h.square().mean().sqrt().clamp_min(1e-12))
    group = np.unique(keys.numpy(), return_inverse=True)[1].reshape(-1)
    soft = y.dim() == 2 and not sample.head.sigmoid
    label = y.argmax(1).cpu().numpy() if soft else None
    table = TrainingTable(h.numpy(), y.cpu().numpy(), weights.cpu().double().numpy(), group, label)
    table = table.rows(table.weight > 0)
    if len(table.y) == 0:
        raise ValueError(f"every weight of {where} is zero: give some examples a positive weight")
    return table


def view_of(model: Classifier, method: MethodName, options: Options, seed: int) -> Classifier:
    """A new head on features, on the device and in the precision of the model's head."""
    generator = torch.Generator().manual_seed(seed)
    backbone = Features(model.num_features, kind_of(model.backbone))
    try:
        head = make_head(method, backbone, model.num_classes, options, generator)
    except NoInputLayerError as error:
        raise ValueError(
            f"method {method!r} takes several inputs through the backbone at once, and cannot be fitted "
            "on features of single ones: convert with this method and train the whole network"
        ) from error
    like = model.temperature
    head.to(like.device, torch.promote_types(like.dtype, torch.float32))
    return Classifier(backbone, head, num_features=model.num_features)


def _replace_head(
    model: Classifier, view: Classifier, method: str, options: Options, given: list[str]
) -> None:
    """Replace the head of the model by the fitted one."""
    model.head = view.head.train(model.training)
    model.config = {**model.config, "method": method, "options": options_to_save(options), "given": given}
    if model.conversion is not None:
        model.conversion = replace(model.conversion, method=method, kept_readout=False)
    model._dataset_size = view.dataset_size
    model.calibration = view.calibration
    model.mark_fitted()
