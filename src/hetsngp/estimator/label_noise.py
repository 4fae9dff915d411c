"""Wrong labels of a table, by models that are trained in folds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hetsngp.fitting.progress import Progress
from hetsngp.fitting.table_trainer import TableTrainer, TrainingTable, fold_pairs, table_folds
from hetsngp.labels.label_errors import LabelErrors, errors_of_folds, warn_of_poor_probs
from hetsngp.labels.rounds import Correction, Score, correct_in_rounds

FOLDS = 5
# Calibration compares examples, so a fold has at least two.
FEWEST_IN_FOLD = 2
MAX_ROUNDS = 3


@dataclass(frozen=True)
class TableCrossFit:
    """Cross-fitting on a table with given labels: see :class:`hetsngp.labels.rounds.CrossFit`."""

    trainer: TableTrainer
    table: TrainingTable
    num_classes: int
    seed: int
    """Seed of the folds, and of the validation examples that compare rounds."""
    show: bool
    """Whether to show progress."""

    def find_errors(self) -> LabelErrors:
        """Label errors of the table, by models that were trained on the given labels."""
        if self.num_classes == 1:
            return _of_one_class(self.table)
        given = self.table.y
        errors = errors_of_folds(given, self(given, np.ones(len(given), dtype=bool)))
        warn_of_poor_probs(errors, "change the parameters, such as epochs and width", 4)
        return errors

    def correct(self) -> Correction:
        """Labels of the table, corrected in rounds."""
        if self.num_classes == 1:
            return Correction(_of_one_class(self.table), 1, (0.0,))
        return correct_in_rounds(
            self.table.y, self, rounds=MAX_ROUNDS, seed=self.seed, on_round=self._show_round
        )

    def __call__(self, targets: Any, trained: Any, score: Score | None = None) -> Any:
        """Probabilities (n, K) of the rows by models of the other folds; there is no setting to choose.

        Folds are those of the given labels, whatever the targets.
        """
        table = replace(self.table, y=np.asarray(targets))
        places = table_folds(self.table, self._folds, self.seed)
        pairs = fold_pairs(table, places, trained)
        with Progress(self.trainer.schedule.epochs, len(pairs), self.show) as progress:
            found = self.trainer.fold_probs(pairs, progress)
        probs = np.empty((len(table.y), self.num_classes), dtype=np.float32)
        for place, part in zip(places, found, strict=True):
            probs[place] = part.float().numpy()
        return probs

    @property
    def _folds(self) -> int:
        different = len(np.unique(self.table.group))
        folds = min(FOLDS, different // FEWEST_IN_FOLD)
        if folds < 2:
            raise ValueError(
                f"wrong labels are found in folds, of at least {2 * FEWEST_IN_FOLD} different examples of "
                f"positive weight, and X has {different}: give more, or fit with label_noise=None"
            )
        return folds

    def _show_round(self, number: int, errors: LabelErrors, loss: float) -> None:
        if self.show:
            print(
                f"round {number} of at most {MAX_ROUNDS}, NLL of given labels {loss:.4f}: {errors}",
                flush=True,
            )


def errors_of_examples(errors: LabelErrors, rows: Any, given: Any, classes: Any) -> LabelErrors:
    """Label errors of examples with labels ``given`` (N,), numbers of ``classes`` (K,), from those of their
    ``rows`` (N,) of a table.

    Examples in no row (−1), which have weight zero, keep their labels, with NaN for what is not known.
    """
    known = rows >= 0
    wrong = np.where(known, errors.wrong_probability[rows], np.nan)
    clean = errors.clean_probs[rows]
    clean[~known] = np.eye(clean.shape[1])[given[~known]]
    expected = float(np.nansum(wrong, dtype=np.float64))
    scale = expected / errors.expected_wrong if errors.expected_wrong > 0 else 1.0
    low, high = (min(scale * end, float(known.sum())) for end in errors.expected_wrong_interval)
    return replace(
        errors,
        labels=given,
        wrong_probability=wrong,
        suggested=np.where(known, errors.suggested[rows], given),
        clean_probs=clean,
        expected_wrong=expected,
        expected_wrong_interval=(low, high),
        losses=np.where(known, errors.losses[rows], np.nan),
        probs=np.where(known[:, None], errors.probs[rows], np.nan),
        class_names=tuple(map(str, classes)),
    )


def correction_of_examples(correction: Correction, rows: Any, given: Any, classes: Any) -> Correction:
    """Correction of examples, from that of their rows of a table, as :func:`errors_of_examples`."""
    return replace(correction, errors=errors_of_examples(correction.errors, rows, given, classes))


def _of_one_class(table: TrainingTable) -> LabelErrors:
    """Label errors where there is no other class that could be the true one."""
    zeros, ones = np.zeros(len(table.y)), np.ones((len(table.y), 1))
    return LabelErrors(
        labels=table.y,
        wrong_probability=zeros,
        suggested=table.y,
        clean_probs=ones,
        transition=np.ones((1, 1)),
        expected_wrong=0.0,
        expected_wrong_interval=(0.0, 0.0),
        sharpening=1.0,
        losses=zeros,
        probs=ones,
    )
