"""From a standardised table to a trained and calibrated model: with one held-out part, or in folds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from hetsngp.fitting.lbfgs import LOGITS_AT_A_TIME, ROWS_AT_A_TIME, descend
from hetsngp.fitting.loop import EpochResult, best_epoch, follow, train_folds
from hetsngp.fitting.progress import Progress
from hetsngp.fitting.schedule import Schedule
from hetsngp.fitting.table import Batches, Table
from hetsngp.models.classifier import Classifier
from hetsngp.nn.extractor import Features
from hetsngp.posterior.calibration import TOLERANCE
from hetsngp.posterior.cross_fitting import cross_fit_posterior
from hetsngp.posterior.fit import PosteriorReport, fit_and_calibrate
from hetsngp.posterior.leave_one_out import left_out

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
    to_the_mode: bool = False
    """Whether to descend to the mode, all rows at once; of the schedule only the weight decay counts then."""
    tolerance: float = TOLERANCE
    """Nats of held-out NLL that a larger posterior scale may cost in any case."""

    def with_one_part(self, training: Table, held_out: Table, progress: Progress) -> Fitted:
        """One model, stopped (if by steps) and calibrated by one held-out part."""
        model, history = self._train(training, self.schedule, progress, held_out)
        rows = _rows(model, training)
        witnesses = left_out(model, rows, training.alone) if self.to_the_mode else None
        report = fit_and_calibrate(
            model, rows, _rows(model, held_out), left_out=witnesses, tolerance=self.tolerance
        )
        return model, history, report

    def in_folds(self, table: Table, pairs: Sequence[tuple[Table, Table]], progress: Progress) -> Fitted:
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
        self, training: Table, schedule: Schedule, progress: Progress, held_out: Table | None = None
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
        batches: Sequence[Batches],
        held_out: Sequence[Batches],
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


def _rows(model: Classifier, table: Table) -> Batches:
    return table.batches(model.temperature, EVAL_ROWS)
