"""Rounds of correction: predict out of sample, find wrong labels, train on the corrected targets, repeat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hetsngp.labels.label_errors import LabelErrors, errors_of_folds
from hetsngp.validation import check_positive, check_seed

# Share of the examples whose labels only compare rounds, and the fewest examples for that: with fewer they
# would be too few to compare by, and too many to go without.
JUDGES, FEWEST_EXAMPLES = 0.1, 2000

Score = Callable[[Any], float]
"""Mean −log P(given label | x) for probabilities (N, K), of examples whose labels no target has: lower is
better."""


class CrossFit(Protocol):
    """Training on some targets and prediction of every example by models that were not trained on it."""

    def __call__(self, targets: Any, trained: Any, score: Score) -> Any:
        """Return out-of-sample P(class | x) (N, K). Train on ``targets``, class numbers (N,) or soft targets
        (N, K), of the examples ``trained`` (N,) bool only; choose settings, if any, by ``score``.
        """


@dataclass(frozen=True, eq=False)
class Correction:
    """Labels as corrected by :func:`correct_in_rounds`."""

    errors: LabelErrors
    """Label errors after the chosen round; ``errors.clean_probs`` are the targets to train on."""
    round: int
    """Chosen round, from 1."""
    losses: tuple[float, ...] = ()
    """Mean −log P(given label | x) of the judges after each round that was tried."""
    probs: Any = None
    """Out-of-sample probabilities (N, K) of the chosen round."""

    def __str__(self) -> str:
        tried = ", ".join(f"{loss:.4f}" for loss in self.losses)
        return f"{self.errors}; round {self.round} (NLL of given labels after each round: {tried})"


def correct_in_rounds(
    given: Any,
    cross_fit: CrossFit,
    *,
    rounds: int = 3,
    seed: int = 0,
    on_round: Callable[[int, LabelErrors, float], None] | None = None,
) -> Correction:
    """Correct labels ``given`` (N,) in up to ``rounds`` rounds of ``cross_fit`` and find_label_errors.

    The first round trains on the given labels, each further one on the corrected targets of the one before.
    Rounds go on while they lower −log P(given | x) = −log Σ_k P(k | x) T[k, given] of the judges, with T
    estimated without the example. Judges are a tenth of the examples, drawn by ``seed``, whose given labels
    no model is trained on, and from the second round on sharpening and T are estimated from them alone: the
    labels of all others have entered the targets, and would reward learning wrong labels by heart. The
    judges' own targets come from the models that predicted them. With fewer than 2,000 examples all are
    judges, by models that were trained on the labels of the others.
    """
    check_positive("rounds", rounds, integer=True)
    check_seed(seed)
    given = np.asarray(given)
    if given.ndim != 1 or given.dtype.kind not in "iu" or given.size == 0 or given.min() < 0:
        raise ValueError(
            f"given must be class numbers (N,), got {given.dtype} of shape {given.shape}: of names "
            "class_names, given = numpy.unique(given, return_inverse=True)"
        )
    judges = _judges(len(given), seed)
    trained = ~judges if len(given) >= FEWEST_EXAMPLES else np.ones(len(given), dtype=bool)

    def judged(probs: Any) -> float:
        return float(errors_of_folds(given[judges], probs[judges]).losses.mean())

    def untrained(probs: Any) -> float:
        return float(errors_of_folds(given, probs).losses.mean())

    targets, best, losses = given, None, []
    for number in range(1, rounds + 1):
        first = number == 1
        probs = cross_fit(targets, trained, untrained if first else judged)
        errors = errors_of_folds(given, probs, estimate_from=None if first else judges)
        losses.append(judged(probs) if not judges.all() else float(errors.losses.mean()))
        if on_round is not None:
            on_round(number, errors, losses[-1])
        if best is not None and losses[-1] >= losses[best.round - 1]:
            break
        best = Correction(errors, number, probs=probs)
        targets = errors.clean_probs
    assert best is not None
    return Correction(best.errors, best.round, tuple(losses), best.probs)


def _judges(count: int, seed: int) -> Any:
    if count < FEWEST_EXAMPLES:
        return np.ones(count, dtype=bool)
    judges = np.zeros(count, dtype=bool)
    judges[np.random.default_rng(seed).permutation(count)[: round(JUDGES * count)]] = True
    return judges
