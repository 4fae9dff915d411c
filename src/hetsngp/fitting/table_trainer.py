"""Training and calibration on a table of examples: with one held-out part, or in folds.

The scikit-learn estimator fits a network to a standardised table, :func:`hetsngp.fit_head` a head to a table
of features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetsngp.fitting.lbfgs import MAX_EXAMPLES, MAX_LOGITS, fit_map
from hetsngp.fitting.loop import EpochResult, best_epoch, train_folds, train_with_schedule
from hetsngp.fitting.progress import Progress
from hetsngp.fitting.schedule import Schedule
from hetsngp.models.classifier import Classifier, evaluating
from hetsngp.nn.extractor import Features
from hetsngp.nn.heads import GaussianHead
from hetsngp.nn.latent import RandomFeatureGP
from hetsngp.posterior.calibration import TOLERANCE, choose_temperature
from hetsngp.posterior.cross_fitting import cross_fit_posterior
from hetsngp.posterior.fit import (
    PosteriorReport,
    collect_held_out,
    fit_and_calibrate,
    record_report,
)
from hetsngp.posterior.leave_one_out import leave_one_out_examples

# Fewest held-out examples for early stopping and calibration on one part. With fewer the best epoch is mostly
# chance, and chance stops too early: folds then hold out every example.
MIN_HELD_OUT_PART = 100
MAX_FOLDS = 5
# With fewer examples in all folds together a temperature is a guess.
MIN_HELD_OUT = 20
# Batch size where there is no gradient: the posterior's pass and predictions.
EVAL_BATCH_SIZE = 1024
# Largest number of kernel features that are computed once for all data: a gigabyte.
MAX_PRECOMPUTED = 2**28
# The GP's weights have a natural size of one, a network's about 1/√width; Adam moves both by the same step.
GP_LR_MULTIPLIER = 3.0


@dataclass(frozen=True)
class TrainingTable:
    """Examples: ``x`` (n, d); class numbers ``y`` (n,), soft targets or multi-hot labels (n, K); ``weight``
    (n,), positive except in the held-out parts of :func:`fold_pairs`; ``group`` (n,), a number that examples
    with equal x share; ``label`` (n,), class numbers by which soft targets are split.
    """

    x: Any
    y: Any
    weight: Any
    group: Any
    label: Any = None

    def rows(self, index: Any) -> TrainingTable:
        """Select examples by a mask or by indices."""
        label = None if self.label is None else self.label[index]
        return TrainingTable(self.x[index], self.y[index], self.weight[index], self.group[index], label)

    def moments(self) -> tuple[Any, Any]:
        """Weighted mean and standard deviation of each column, (d,) each; 1 for a column that is constant."""
        share = self.weight / self.weight.sum()
        mean = share @ self.x
        std = np.sqrt(share @ np.square(self.x - mean))
        rounding = 10 * np.finfo(np.float64).eps * np.abs(mean)
        varies = self.x.max(0) > self.x.min(0)  # the mean of many equal numbers may be off by more than that
        return mean, np.where(varies & (std > rounding), std, 1.0)

    def class_weights(self, num_classes: int) -> Any:
        """Total weight of each class: (K,)."""
        if self.y.ndim == 2:
            return self.weight @ self.y
        return np.bincount(self.y, weights=self.weight, minlength=num_classes)

    def with_class_weights(self, by_class: Any) -> TrainingTable:
        """Multiply the weights by those of the classes ``by_class`` (K,), and drop examples of weight zero.

        With soft targets q the loss −Σ_k w_k q_k log p_k has the weight Σ_k w_k q_k and the targets w_k q_k
        by that sum.
        """
        if self.y.ndim == 1:
            y, factor = self.y, by_class[self.y]
        else:
            y = self.y * by_class
            factor = y.sum(1)
            y = y / np.where(factor > 0, factor, 1.0)[:, None]
        return replace(self, y=y, weight=self.weight * factor).rows(factor > 0)

    @property
    def strata(self) -> Any:
        """Strata of a split (n,): the class; one stratum for multi-hot labels."""
        if self.label is not None:
            return self.label
        return self.y if self.y.ndim == 1 else np.zeros(len(self.y), dtype=np.int64)

    @property
    def unique(self) -> Tensor:
        """Whether no other example has the same x: (n,) bool."""
        _, inverse, count = np.unique(self.group, return_inverse=True, return_counts=True)
        return torch.from_numpy(count[inverse.reshape(-1)] == 1)

    def standardised(self, mean: Any, scale: Any) -> TrainingTable:
        """Subtract ``mean`` and divide by ``scale``, (d,) each."""
        return replace(self, x=(self.x - mean) / scale)

    def with_mean_weight_one(self) -> TrainingTable:
        """Scale the weights to mean one."""
        return replace(self, weight=self.weight / self.weight.mean())

    def batches(self, like: Tensor, size: int, generator: torch.Generator | None = None) -> TableBatches:
        """Batches in the dtype and on the device of ``like``."""
        y = torch.as_tensor(self.y, dtype=torch.long if self.y.ndim == 1 else like.dtype).to(like.device)
        x, weight = (torch.as_tensor(part).to(like.dtype).to(like.device) for part in (self.x, self.weight))
        return TableBatches(x, y, weight, size, generator)


class TableBatches:
    """Batches (x, y, weight) of nearly equal size, shuffled in each epoch where there is a generator.

    Plain slices of tensors: a DataLoader takes longer to collate a batch than a small network needs for a
    training step.
    """

    def __init__(
        self, x: Tensor, y: Tensor, weight: Tensor, size: int, generator: torch.Generator | None = None
    ) -> None:
        self.tensors, self.generator = (x, y, weight), generator
        self.count = math.ceil(len(y) / size)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        tensors: tuple[Tensor, ...] = self.tensors
        if self.generator is not None:
            order = torch.randperm(len(tensors[1]), generator=self.generator).to(tensors[1].device)
            tensors = tuple(t[order] for t in tensors)
        # Nearly equal: a last batch of one example would have no variance to normalise by.
        return zip(*(t.tensor_split(self.count) for t in tensors), strict=True)


def merge_duplicates(x: Any, y: Any, weight: Any) -> TrainingTable:
    """Merge equal examples of one class, adding their weights; the values determine the order.

    A weight and that many copies then give the same table, in whatever order they came. Examples of weight
    zero are dropped. ``y`` may be soft targets (n, K), of which equal ones are merged.
    """
    return merge_with_rows(x, y, weight)[0]


def merge_with_rows(x: Any, y: Any, weight: Any) -> tuple[TrainingTable, Any]:
    """Merge as :func:`merge_duplicates`; also the row of the table that each example is in, −1 for none."""
    counts = weight > 0
    x, y, weight = np.ascontiguousarray(x[counts]) + 0.0, y[counts], weight[counts]  # −0.0 becomes 0.0
    as_bytes = x.view(np.dtype((np.void, x.itemsize * x.shape[1]))).ravel()
    group = np.unique(as_bytes, return_inverse=True)[1].reshape(-1)
    # −y: one-hot targets come in the order of the classes.
    target = y if y.ndim == 1 else np.unique(-y, axis=0, return_inverse=True)[1].reshape(-1)
    pair = group * (int(target.max()) + 1) + target
    _, first, row = np.unique(pair, return_index=True, return_inverse=True)
    totals = np.bincount(row.reshape(-1), weights=weight)
    label = None if y.ndim == 1 else y[first].argmax(1)
    table = TrainingTable(x[first], y[first], totals, group[first], label)
    rows = np.full(len(counts), -1)
    rows[counts] = row.reshape(-1)
    return table, rows


def split(table: TrainingTable, fraction: float, seed: int) -> list[tuple[TrainingTable, TrainingTable]]:
    """Split into (training, held-out) pairs, stratified by class; each training part has all classes.

    One pair where ``fraction`` gives enough held-out examples for early stopping and calibration; on a small
    table up to five, which together hold out every example; an empty list where even that is too few.
    Examples with the same x stay together whatever their class: otherwise the training part would contain
    the input of a held-out example, perhaps with another label.
    """
    strata, order = table.strata, _stratified_order(table, seed)
    count = round(fraction * len(order))
    if count == 0:
        return []
    if count >= MIN_HELD_OUT_PART:
        pieces = [order[:count]]
    else:
        pieces = np.array_split(order, min(MAX_FOLDS, max(2, round(1 / fraction))))
    pairs = [_hold_out(table, piece) for piece in pieces]
    held_out = np.concatenate([strata[:0], *(part.strata for _, part in pairs)])
    one_class = len(np.unique(held_out)) < min(2, len(np.unique(strata)))
    if len(held_out) < MIN_HELD_OUT or one_class or any(len(p.y) < 2 for _, p in pairs):
        return []
    return pairs


def table_folds(table: TrainingTable, folds: int, seed: int) -> list[Any]:
    """Indices of the examples of each fold, stratified by class; examples with the same x are in one fold."""
    pieces = np.array_split(_stratified_order(table, seed), folds)
    return [np.flatnonzero(np.isin(table.group, piece)) for piece in pieces]


def fold_pairs(
    table: TrainingTable, places: Sequence[Any], trained: Any
) -> list[tuple[TrainingTable, TrainingTable]]:
    """(Training, held-out) pairs of the folds ``places``, trained on the examples ``trained`` (n,) bool.

    The others are in no training part. They are held out with weight zero, so that they are predicted and
    their targets choose neither a number of epochs nor a temperature.
    """
    pairs = []
    for place in places:
        others = np.array(trained)
        others[place] = False
        held_out = table.rows(place)
        pairs.append((table.rows(others), replace(held_out, weight=held_out.weight * trained[place])))
    return pairs


def _stratified_order(table: TrainingTable, seed: int) -> Any:
    """Groups of equal x in an order of which every interval has about the same share of each class."""
    rng = np.random.default_rng(seed)
    strata = table.strata
    heaviest = np.lexsort((strata, -table.weight, table.group))
    groups, first = np.unique(table.group[heaviest], return_index=True)
    label = strata[heaviest][first]  # the class with most weight in each group
    # The groups of each class lie evenly between 0 and 1, in random order; a fold is an interval.
    position = np.empty(len(groups))
    for each in np.unique(label):
        members = rng.permutation(np.flatnonzero(label == each))
        position[members] = (np.arange(len(members)) + rng.random()) / len(members)
    return groups[np.argsort(position, kind="stable")]


def _hold_out(table: TrainingTable, groups: Any) -> tuple[TrainingTable, TrainingTable]:
    """Split off the examples of ``groups``, except those of classes that would have no training example."""
    held_out = np.isin(table.group, groups)
    missing = ~np.isin(table.strata, table.strata[~held_out])  # classes without any training example
    held_out &= ~np.isin(table.group, table.group[missing])
    return table.rows(~held_out), table.rows(held_out)


Fitted = tuple[Classifier, list[EpochResult], PosteriorReport]


@dataclass(frozen=True)
class TableTrainer:
    """Trains a model on a table, fits its posterior and calibrates it."""

    make: Callable[[], Classifier]
    """Builds a new model, the same each time."""
    schedule: Schedule
    batch_size: int
    patience: int | None
    seeds: tuple[int, int]
    """Seeds of the order of examples and of the integration points."""
    double: bool = True
    """Whether the model ends in float64: a prediction in another batch then differs by 1e-12, not by 1e-5."""
    map_by_lbfgs: bool = False
    """Whether to find the MAP estimate by L-BFGS; of the schedule only the weight decay is used then."""
    tolerance: float = TOLERANCE
    """Nats of held-out NLL that a larger posterior scale may cost in any case."""
    mixup: float = 0.0
    """α of mixup, 0 for none; of AdamW, L-BFGS sees the examples as they are."""

    def fit_with_held_out(
        self, training: TrainingTable, held_out: TrainingTable, progress: Progress
    ) -> Fitted:
        """Train one model, with early stopping (of AdamW) and calibration on one held-out part."""
        model, view, (training, held_out) = self._prepare(training, held_out)
        history = self._train(view, training, self.schedule, progress, held_out)
        batches = _eval_batches(view, training)
        loo = leave_one_out_examples(view, batches, training.unique) if self.map_by_lbfgs else None
        report = fit_and_calibrate(
            view, batches, _eval_batches(view, held_out), leave_one_out=loo, tolerance=self.tolerance
        )
        return model.eval(), history, record_report(model, report)

    def fit_in_folds(
        self, table: TrainingTable, pairs: Sequence[tuple[TrainingTable, TrainingTable]], progress: Progress
    ) -> Fitted:
        """Train a model on all examples, for the number of epochs that was best for the models of the folds,
        and calibrate it with them; without folds for all epochs, and without calibration.
        """
        if not pairs:
            model, view, (table,) = self._prepare(table)
            history = self._train(view, table, self.schedule, progress)
            report = fit_and_calibrate(view, _eval_batches(view, table), None)
            return model.eval(), history, record_report(model, report)
        models, pairs, found = self._train_folds(pairs, progress)
        schedule = self.schedule
        if not self.map_by_lbfgs:
            schedule = replace(schedule, stop_after=best_epoch(found))
        model, view, (table,) = self._prepare(table)
        history = self._train(view, table, schedule, progress)
        # The folds may have continued after the best epoch.
        history = [replace(one, held_out=fold.held_out) for one, fold in zip(history, found, strict=False)]
        folds = [
            (self._final_precision(m), _eval_batches(m, training), _eval_batches(m, part))
            for m, (training, part) in zip(models, pairs, strict=True)
        ]
        report = cross_fit_posterior(view, _eval_batches(view, table), folds, tolerance=self.tolerance)
        return model.eval(), history, record_report(model, report)

    def fold_probs(
        self, pairs: Sequence[tuple[TrainingTable, TrainingTable]], progress: Progress
    ) -> list[Tensor]:
        """Probabilities of each held-out part by the model that was trained on the other examples.

        All models train for the number of epochs that is best for all held-out examples together, which also
        set one temperature; those of weight zero are only predicted.
        """
        models, pairs = self._train_folds(pairs, progress)[:2]
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(evaluating(model))
            batches = [(m, _eval_batches(m, part)) for m, (_, part) in zip(models, pairs, strict=True)]
            choose_temperature([(m, collect_held_out(m, part)) for m, part in batches])
            return [torch.cat([m(x).exp() for x, _, _ in part]).cpu() for m, part in batches]

    def _train_folds(
        self, pairs: Sequence[tuple[TrainingTable, TrainingTable]], progress: Progress
    ) -> tuple[list[Classifier], list[tuple[TrainingTable, TrainingTable]], list[EpochResult]]:
        """Models of the folds, the pairs with their inputs, and the results of the epochs."""
        prepared = [self._prepare(*pair) for pair in pairs]
        models, pairs = [view for _, view, _ in prepared], [(a, b) for _, _, (a, b) in prepared]
        batches = [self._batches(m, training) for m, (training, _) in zip(models, pairs, strict=True)]
        held_out = [_eval_batches(m, part) for m, (_, part) in zip(models, pairs, strict=True)]
        if self.map_by_lbfgs:
            return models, pairs, self._fit_map(models, batches, held_out, progress)
        found = train_folds(
            models,
            batches,
            held_out,
            self.schedule,
            generators=[self._integration_points() for _ in pairs],
            patience=self.patience,
            on_epoch=progress,
            mixup=self.mixup,
        )
        return models, pairs, found

    def _train(
        self,
        model: Classifier,
        training: TrainingTable,
        schedule: Schedule,
        progress: Progress,
        held_out: TrainingTable | None = None,
    ) -> list[EpochResult]:
        batches = self._batches(model, training)
        validation = None if held_out is None else _eval_batches(model, held_out)
        if self.map_by_lbfgs:
            history = self._fit_map([model], [batches], [] if validation is None else [validation], progress)
        else:
            history = train_with_schedule(
                model,
                batches,
                schedule,
                generator=self._integration_points(),
                on_epoch=progress,
                validation=validation,
                patience=None if held_out is None else self.patience,
                mixup=self.mixup,
            )
        self._final_precision(model)
        return history

    def _fit_map(
        self,
        models: Sequence[Classifier],
        batches: Sequence[TableBatches],
        held_out: Sequence[TableBatches],
        progress: Progress,
    ) -> list[EpochResult]:
        return fit_map(
            models,
            batches,
            weight_decay=self.schedule.weight_decay,
            seed=self.seeds[1],
            validation=held_out,
            on_epoch=progress,
        )

    def _prepare(self, *tables: TrainingTable) -> tuple[Classifier, Classifier, tuple[TrainingTable, ...]]:
        """Build a model for the first table; return it, the classifier to train (the model or a view of it),
        and the tables with the inputs of that classifier.

        Where the model takes features, its head is adapted to those of the first table. Kernel features that
        do not change after that are computed once, and are inputs of the view.
        """
        model, training = self.make(), tables[0]
        model.dataset_size = float(training.weight.sum())
        model.class_counts = training.class_weights(model.num_classes)
        if not isinstance(model.backbone, Features):
            return model, model, tables
        h = [torch.as_tensor(table.x).to(model.temperature) for table in tables]
        order = torch.Generator().manual_seed(self.seeds[0])
        model.head.adapt(h[0], order)
        latent = _gp_of(model)
        if latent is not None and latent.inducing is None:
            if not self.map_by_lbfgs:  # the statistics of random features move with the steps of AdamW
                return model, model, tables
            latent.set_statistics(h[0], order)
        if not can_precompute(model, sum(map(len, h))):
            return model, model, tables
        view, x = precomputed(model, h)
        return model, view, tuple(replace(table, x=part) for table, part in zip(tables, x, strict=True))

    def _batches(self, model: Classifier, training: TrainingTable) -> TableBatches:
        # Mean one, so that a step does not depend on the unit of the weights.
        training = training.with_mean_weight_one()
        if self.map_by_lbfgs:
            size = min(MAX_EXAMPLES, max(1, MAX_LOGITS // model.num_classes))
            return training.batches(model.temperature, size)
        order = torch.Generator().manual_seed(self.seeds[0])
        return training.batches(model.temperature, self.batch_size, order)

    def _final_precision(self, model: Classifier) -> Classifier:
        no_float64 = model.temperature.device.type == "mps"
        return model.double() if self.double and not no_float64 else model

    def _integration_points(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seeds[1])


def _eval_batches(model: Classifier, table: TrainingTable) -> TableBatches:
    return table.batches(model.temperature, EVAL_BATCH_SIZE)


def _gp_of(model: Classifier) -> RandomFeatureGP | None:
    latent = model.head.latent if isinstance(model.head, GaussianHead) else None
    return latent if isinstance(latent, RandomFeatureGP) else None


def has_inducing_features(model: Classifier) -> bool:
    """Whether the model is a GP on inducing features."""
    latent = _gp_of(model)
    return latent is not None and latent.inducing is not None


def can_precompute(model: Classifier, examples: int) -> bool:
    """Whether the model is a GP of which the kernel features of so many ``examples`` fit in memory, so that
    they can be computed once, after ``adapt``.
    """
    latent = _gp_of(model)
    return latent is not None and examples * latent.num_kernel_features <= MAX_PRECOMPUTED


def precomputed(model: Classifier, h: Sequence[Tensor]) -> tuple[Classifier, tuple[Tensor, ...]]:
    """Return a view of a GP ``model`` with inputs [h, φ] (n, D + m), and these inputs for each ``h`` (n, D).

    The view shares the parameters, buffers and posterior of the model, and computes no kernel.
    """
    head = model.head
    assert isinstance(head, GaussianHead)
    assert isinstance(head.latent, RandomFeatureGP)
    with evaluating(model):  # where statistics stand still
        x = head.latent.with_features(torch.cat(list(h)))
    width = x.shape[1]
    view = Classifier(
        Features(width), head.on_precomputed(), num_features=width, dataset_size=model.dataset_size
    )
    return view, x.split([len(part) for part in h])
