"""From a standardised table to a trained and calibrated model: with one held-out part, or in folds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from hetsngp.crossfit import cross_fit_posterior
from hetsngp.loop import EpochResult, Schedule, best_epoch, train, train_folds
from hetsngp.model import Classifier
from hetsngp.nn.extractor import Features
from hetsngp.posterior import PosteriorReport, fit_posterior
from hetsngp.progress import Progress
from hetsngp.table import Batches, Table

# Rows at a time where there is no gradient: the posterior's pass and predictions.
EVAL_ROWS = 1024
# The GP's weights have a natural size of one, a network's about 1/√width; Adam moves both by the same step.
GP_LEARNING_RATE = 3.0

Fitted = tuple[Classifier, list[EpochResult], PosteriorReport]


@dataclass(frozen=True)
class Fit:
    """``make`` gives a new model, the same each time; ``seeds``: the order of rows, integration points."""

    make: Callable[[], Classifier]
    schedule: Schedule
    batch_size: int
    patience: int | None
    seeds: tuple[int, int]
    double: bool = True
    """Whether the model ends in float64: between batches a prediction then differs by 1e-12, not by 1e-5."""

    def with_one_part(self, training: Table, held_out: Table, progress: Progress) -> Fitted:
        """One model, stopped and calibrated by one held-out part."""
        model, history = self._train(training, self.schedule, progress, held_out)
        return model, history, fit_posterior(model, _rows(model, training), _rows(model, held_out))

    def in_folds(self, table: Table, pairs: Sequence[tuple[Table, Table]], progress: Progress) -> Fitted:
        """A model of all rows, trained for as long as served the models of the folds, and calibrated by them;
        without folds for all epochs, and not calibrated.
        """
        if not pairs:
            model, history = self._train(table, self.schedule, progress)
            return model, history, fit_posterior(model, _rows(model, table))
        models = [self._model(*pair) for pair in pairs]
        found = train_folds(
            models,
            [self._batches(m, training) for m, (training, _) in zip(models, pairs, strict=True)],
            [_rows(m, held_out) for m, (_, held_out) in zip(models, pairs, strict=True)],
            self.schedule,
            generators=[self._points() for _ in pairs],
            patience=self.patience,
            on_epoch=progress,
        )
        schedule = replace(self.schedule, stop_after=best_epoch(found))
        model, history = self._train(table, schedule, progress)
        # The folds may have gone on for a while after the best epoch.
        history = [replace(one, held_out=fold.held_out) for one, fold in zip(history, found, strict=False)]
        folds = [
            (self._precise(m), _rows(m, training), _rows(m, held_out))
            for m, (training, held_out) in zip(models, pairs, strict=True)
        ]
        return model, history, cross_fit_posterior(model, _rows(model, table), folds)

    def _train(
        self, training: Table, schedule: Schedule, progress: Progress, held_out: Table | None = None
    ) -> tuple[Classifier, list[EpochResult]]:
        model = self._model(training) if held_out is None else self._model(training, held_out)
        history = train(
            model,
            self._batches(model, training),
            **asdict(schedule),
            generator=self._points(),
            on_epoch=progress,
            validation=None if held_out is None else _rows(model, held_out),
            patience=None if held_out is None else self.patience,
        )
        return self._precise(model), history

    def _model(self, training: Table, *others: Table) -> Classifier:
        """A new model for ``training``; features that go straight into a head are looked at first."""
        model = self.make()
        model.dataset_size = float(training.weight.sum())
        model.class_counts = training.class_weights(model.num_classes)
        if isinstance(model.backbone, Features):
            h, *also = (torch.as_tensor(t.x).to(model.temperature) for t in (training, *others))
            model.head.adapt(h, also, torch.Generator().manual_seed(self.seeds[0]))
        return model

    def _batches(self, model: Classifier, training: Table) -> Batches:
        order = torch.Generator().manual_seed(self.seeds[0])
        # Of mean one, so that a step does not depend on the unit of the weights.
        return training.of_mean_weight_one().batches(model.temperature, self.batch_size, order)

    def _precise(self, model: Classifier) -> Classifier:
        no_float64 = model.temperature.device.type == "mps"
        return model.double() if self.double and not no_float64 else model

    def _points(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seeds[1])


def _rows(model: Classifier, table: Table) -> Batches:
    return table.batches(model.temperature, EVAL_ROWS)
