"""From a standardised table to a trained and calibrated model: with one held-out part, or in folds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetsngp.fitting.lbfgs import LOGITS_AT_A_TIME, ROWS_AT_A_TIME, descend
from hetsngp.fitting.loop import EpochResult, best_epoch, follow, train_folds
from hetsngp.fitting.progress import Progress
from hetsngp.fitting.schedule import Schedule
from hetsngp.models.classifier import Classifier
from hetsngp.nn.extractor import Features
from hetsngp.nn.heads import GaussianHead
from hetsngp.nn.latent import RandomFeatureGP
from hetsngp.posterior.calibration import TOLERANCE
from hetsngp.posterior.cross_fitting import cross_fit_posterior
from hetsngp.posterior.fit import PosteriorReport, finish, fit_and_calibrate
from hetsngp.posterior.leave_one_out import left_out

# Held-out rows that are enough to stop and to calibrate by. With fewer the best epoch is mostly chance, and
# chance stops too early: then folds decide, which together hold out every row.
ENOUGH_HELD_OUT = 100
MOST_FOLDS = 5
# With fewer rows in all folds together a temperature is a guess.
FEWEST_HELD_OUT = 20


@dataclass(frozen=True)
class TrainingTable:
    """``x`` (n, d); class numbers ``y`` (n,), or multi-hot labels (n, K); positive weights and numbers of
    equal x: (n,) each.
    """

    x: Any
    y: Any
    weight: Any
    group: Any

    def rows(self, index: Any) -> TrainingTable:
        return TrainingTable(self.x[index], self.y[index], self.weight[index], self.group[index])

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

    @property
    def strata(self) -> Any:
        """What a split keeps in proportion: the class (n,), one and the same for multi-hot labels."""
        return self.y if self.y.ndim == 1 else np.zeros(len(self.y), dtype=np.int64)

    @property
    def alone(self) -> Tensor:
        """Rows that no other is equal to in x: (n,) bool."""
        _, place, count = np.unique(self.group, return_inverse=True, return_counts=True)
        return torch.from_numpy(count[place.reshape(-1)] == 1)

    def standardised(self, mean: Any, scale: Any) -> TrainingTable:
        return replace(self, x=(self.x - mean) / scale)

    def of_mean_weight_one(self) -> TrainingTable:
        return replace(self, weight=self.weight / self.weight.mean())

    def batches(self, like: Tensor, size: int, generator: torch.Generator | None = None) -> TableBatches:
        """Batches in the dtype and on the device of ``like``."""
        y = torch.as_tensor(self.y, dtype=torch.long if self.y.ndim == 1 else like.dtype).to(like.device)
        x, weight = (torch.as_tensor(part).to(like.dtype).to(like.device) for part in (self.x, self.weight))
        return TableBatches(x, y, weight, size, generator)


def merge_copies(x: Any, y: Any, weight: Any) -> TrainingTable:
    """Equal rows of one class become one row, their weights added, in an order that the values decide.

    So a weight and that many copies are the same data to all that follows, whatever order they came in. Rows
    of weight zero are not there.
    """
    counts = weight > 0
    x, y, weight = np.ascontiguousarray(x[counts]) + 0.0, y[counts], weight[counts]  # −0.0 becomes 0.0
    as_bytes = x.view(np.dtype((np.void, x.itemsize * x.shape[1]))).ravel()
    group = np.unique(as_bytes, return_inverse=True)[1].reshape(-1)
    pair = group * (int(y.max()) + 1) + y
    _, first, row = np.unique(pair, return_index=True, return_inverse=True)
    return TrainingTable(x[first], y[first], np.bincount(row.reshape(-1), weights=weight), group[first])


def split(table: TrainingTable, fraction: float, seed: int) -> list[tuple[TrainingTable, TrainingTable]]:
    """(training, held-out) pairs, the classes in proportion as far as that goes; none leaves training.

    One pair where ``fraction`` makes a held-out part large enough to stop and to calibrate by; on a small
    table as many as it takes for every row to be held out once, five at most; an empty list where even that
    is too little. Rows with the same x stay together whatever their class: alone in training, one would
    teach the opposite of what its twin is asked.
    """
    rng = np.random.default_rng(seed)
    strata = table.strata
    heaviest = np.lexsort((strata, -table.weight, table.group))
    groups, first = np.unique(table.group[heaviest], return_index=True)
    label = strata[heaviest][first]  # of each group: the class with most weight in it
    # Groups of a class stand evenly on the line from 0 to 1, in random order; a fold is a piece of it.
    place = np.empty(len(groups))
    for each in np.unique(label):
        members = rng.permutation(np.flatnonzero(label == each))
        place[members] = (np.arange(len(members)) + rng.random()) / len(members)
    order = groups[np.argsort(place, kind="stable")]
    count = round(fraction * len(groups))
    if count == 0:
        return []
    if count >= ENOUGH_HELD_OUT:
        pieces = [order[:count]]
    else:
        pieces = np.array_split(order, min(MOST_FOLDS, max(2, round(1 / fraction))))
    pairs = [_hold_out(table, piece) for piece in pieces]
    held_out = np.concatenate([strata[:0], *(part.strata for _, part in pairs)])
    one_class = len(np.unique(held_out)) < min(2, len(np.unique(strata)))
    if len(held_out) < FEWEST_HELD_OUT or one_class or any(len(p.y) < 2 for _, p in pairs):
        return []
    return pairs


def _hold_out(table: TrainingTable, groups: Any) -> tuple[TrainingTable, TrainingTable]:
    held_out = np.isin(table.group, groups)
    lost = ~np.isin(table.strata, table.strata[~held_out])  # rows of a class that training would not meet
    held_out &= ~np.isin(table.group, table.group[lost])
    return table.rows(~held_out), table.rows(held_out)


class TableBatches:
    """Batches (x, y, weight) of nearly equal size, in a new order each time where there is a generator.

    Plain slices of tensors: a DataLoader takes longer to collate a batch than a small network to learn it.
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
        # Nearly equal: a last batch of one row would have no spread to normalise by.
        return zip(*(t.tensor_split(self.count) for t in tensors), strict=True)


# Rows at a time where there is no gradient: the posterior's pass and predictions.
EVAL_ROWS = 1024
# Kernel features that may be computed once for all data: a gigabyte.
MOST_PRECOMPUTED = 2**28
# The GP's weights have a natural size of one, a network's about 1/√width; Adam moves both by the same step.
GP_LEARNING_RATE = 3.0

Fitted = tuple[Classifier, list[EpochResult], PosteriorReport]


@dataclass(frozen=True)
class TableFit:
    """``make`` gives a new model, the same each time; ``seeds``: the order of rows, integration points."""

    make: Callable[[], Classifier]
    schedule: Schedule
    batch_size: int
    patience: int | None
    seeds: tuple[int, int]
    double: bool = True
    """Whether the model ends in float64: between batches a prediction then differs by 1e-12, not by 1e-5."""
    to_the_mode: bool = False
    """Whether to descend to the mode, all rows at once; of the schedule only the weight decay counts then."""
    tolerance: float = TOLERANCE
    """Nats of held-out NLL that a larger posterior scale may cost in any case."""

    def with_one_part(self, training: TrainingTable, held_out: TrainingTable, progress: Progress) -> Fitted:
        """One model, stopped (if by steps) and calibrated by one held-out part."""
        model, view, (training, held_out) = self._prepare(training, held_out)
        history = self._train(view, training, self.schedule, progress, held_out)
        rows = _rows(view, training)
        witnesses = left_out(view, rows, training.alone) if self.to_the_mode else None
        report = fit_and_calibrate(
            view, rows, _rows(view, held_out), left_out=witnesses, tolerance=self.tolerance
        )
        return model.eval(), history, finish(model, report)

    def in_folds(
        self, table: TrainingTable, pairs: Sequence[tuple[TrainingTable, TrainingTable]], progress: Progress
    ) -> Fitted:
        """A model of all rows, trained for as long as served the models of the folds, and calibrated by them;
        without folds for all epochs, and not calibrated.
        """
        if not pairs:
            model, view, (table,) = self._prepare(table)
            history = self._train(view, table, self.schedule, progress)
            report = fit_and_calibrate(view, _rows(view, table), None)
            return model.eval(), history, finish(model, report)
        prepared = [self._prepare(*pair) for pair in pairs]
        models, pairs = [view for _, view, _ in prepared], [(a, b) for _, _, (a, b) in prepared]
        batches = [self._batches(m, training) for m, (training, _) in zip(models, pairs, strict=True)]
        held_out = [_rows(m, part) for m, (_, part) in zip(models, pairs, strict=True)]
        schedule = self.schedule
        if self.to_the_mode:
            found = self._descend(models, batches, held_out, progress)
        else:
            points = [self._points() for _ in pairs]
            found = train_folds(
                models,
                batches,
                held_out,
                schedule,
                generators=points,
                patience=self.patience,
                on_epoch=progress,
            )
            schedule = replace(schedule, stop_after=best_epoch(found))
        model, view, (table,) = self._prepare(table)
        history = self._train(view, table, schedule, progress)
        # The folds may have gone on for a while after the best epoch.
        history = [replace(one, held_out=fold.held_out) for one, fold in zip(history, found, strict=False)]
        folds = [
            (self._precise(m), _rows(m, training), _rows(m, part))
            for m, (training, part) in zip(models, pairs, strict=True)
        ]
        report = cross_fit_posterior(view, _rows(view, table), folds, tolerance=self.tolerance)
        return model.eval(), history, finish(model, report)

    def _train(
        self,
        model: Classifier,
        training: TrainingTable,
        schedule: Schedule,
        progress: Progress,
        held_out: TrainingTable | None = None,
    ) -> list[EpochResult]:
        batches = self._batches(model, training)
        watched = None if held_out is None else _rows(model, held_out)
        if self.to_the_mode:
            history = self._descend([model], [batches], [] if watched is None else [watched], progress)
        else:
            history = follow(
                model,
                batches,
                schedule,
                generator=self._points(),
                on_epoch=progress,
                validation=watched,
                patience=None if held_out is None else self.patience,
            )
        self._precise(model)
        return history

    def _descend(
        self,
        models: Sequence[Classifier],
        batches: Sequence[TableBatches],
        held_out: Sequence[TableBatches],
        progress: Progress,
    ) -> list[EpochResult]:
        return descend(
            models,
            batches,
            weight_decay=self.schedule.weight_decay,
            seed=self.seeds[1],
            validation=held_out,
            on_epoch=progress,
        )

    def _prepare(self, *tables: TrainingTable) -> tuple[Classifier, Classifier, tuple[TrainingTable, ...]]:
        """A new model for the first table; what is trained, the model itself or a view of it; and the tables
        as that one takes them.

        Where the model takes features, its head sees those for training first. Kernel features that do not
        change after that are computed once for all tables: the view takes them with the features.
        """
        model, training = self.make(), tables[0]
        model.dataset_size = float(training.weight.sum())
        model.class_counts = training.class_weights(model.num_classes)
        if not isinstance(model.backbone, Features):
            return model, model, tables
        h = [torch.as_tensor(table.x).to(model.temperature) for table in tables]
        model.head.adapt(h[0], torch.Generator().manual_seed(self.seeds[0]))
        if not can_precompute(model, sum(map(len, h))):
            return model, model, tables
        view, x = precomputed(model, h)
        return model, view, tuple(replace(table, x=part) for table, part in zip(tables, x, strict=True))

    def _batches(self, model: Classifier, training: TrainingTable) -> TableBatches:
        # Of mean one, so that a step does not depend on the unit of the weights.
        training = training.of_mean_weight_one()
        if self.to_the_mode:
            size = min(ROWS_AT_A_TIME, max(1, LOGITS_AT_A_TIME // model.num_classes))
            return training.batches(model.temperature, size)
        order = torch.Generator().manual_seed(self.seeds[0])
        return training.batches(model.temperature, self.batch_size, order)

    def _precise(self, model: Classifier) -> Classifier:
        no_float64 = model.temperature.device.type == "mps"
        return model.double() if self.double and not no_float64 else model

    def _points(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seeds[1])


def _rows(model: Classifier, table: TrainingTable) -> TableBatches:
    return table.batches(model.temperature, EVAL_ROWS)


def can_precompute(model: Classifier, examples: int) -> bool:
    """Whether the model is a GP on features made from the training data, and so few ``examples`` in all that
    these features fit in memory.
    """
    latent = model.head.latent if isinstance(model.head, GaussianHead) else None
    if not isinstance(latent, RandomFeatureGP) or latent.inducing is None:
        return False
    return examples * latent.kernel.random_features <= MOST_PRECOMPUTED


def precomputed(model: Classifier, h: Sequence[Tensor]) -> tuple[Classifier, tuple[Tensor, ...]]:
    """View of a GP ``model`` that takes [h, φ] (n, D + m), and these for each of ``h``, (n, D).

    The view shares the parameters, buffers and posterior of the model, and computes no kernel.
    """
    head = model.head
    assert isinstance(head, GaussianHead)
    assert isinstance(head.latent, RandomFeatureGP)
    x = head.latent.with_features(torch.cat(list(h)))
    width = x.shape[1]
    view = Classifier(
        Features(width), head.on_precomputed(), num_features=width, dataset_size=model.dataset_size
    )
    return view, x.split([len(part) for part in h])
