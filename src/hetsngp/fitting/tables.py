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
from hetsngp.posterior.calibration import TOLERANCE
from hetsngp.posterior.cross_fitting import cross_fit_posterior
from hetsngp.posterior.fit import PosteriorReport, fit_and_calibrate
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
        model, history = self._train(training, self.schedule, progress, held_out)
        rows = _rows(model, training)
        witnesses = left_out(model, rows, training.alone) if self.to_the_mode else None
        report = fit_and_calibrate(
            model, rows, _rows(model, held_out), left_out=witnesses, tolerance=self.tolerance
        )
        return model, history, report

    def in_folds(
        self, table: TrainingTable, pairs: Sequence[tuple[TrainingTable, TrainingTable]], progress: Progress
    ) -> Fitted:
        """A model of all rows, trained for as long as served the models of the folds, and calibrated by them;
        without folds for all epochs, and not calibrated.
        """
        if not pairs:
            model, history = self._train(table, self.schedule, progress)
            return model, history, fit_and_calibrate(model, _rows(model, table), None)
        models = [self._model(*pair) for pair in pairs]
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
        model, history = self._train(table, schedule, progress)
        # The folds may have gone on for a while after the best epoch.
        history = [replace(one, held_out=fold.held_out) for one, fold in zip(history, found, strict=False)]
        folds = [
            (self._precise(m), _rows(m, training), _rows(m, part))
            for m, (training, part) in zip(models, pairs, strict=True)
        ]
        report = cross_fit_posterior(model, _rows(model, table), folds, tolerance=self.tolerance)
        return model, history, report

    def _train(
        self,
        training: TrainingTable,
        schedule: Schedule,
        progress: Progress,
        held_out: TrainingTable | None = None,
    ) -> tuple[Classifier, list[EpochResult]]:
        model = self._model(training) if held_out is None else self._model(training, held_out)
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
        return self._precise(model), history

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

    def _model(self, training: TrainingTable, *others: TrainingTable) -> Classifier:
        """A new model for ``training``; features that go straight into a head are looked at first."""
        model = self.make()
        model.dataset_size = float(training.weight.sum())
        model.class_counts = training.class_weights(model.num_classes)
        if isinstance(model.backbone, Features):
            h, *also = (torch.as_tensor(t.x).to(model.temperature) for t in (training, *others))
            model.head.adapt(h, also, torch.Generator().manual_seed(self.seeds[0]))
        return model

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
