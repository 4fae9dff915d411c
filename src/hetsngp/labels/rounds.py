"""Rounds of correction: predict out of sample, find wrong labels, train on the corrected targets, repeat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hetsngp.labels.label_errors import LabelErrors, errors_of_folds, nll_of_given
from hetsngp.validation import check_positive, check_seed

# Share of the examples whose labels only compare rounds, and the fewest examples for that: with fewer they
# would be too few to compare by, and too many to go without.
VALIDATION, FEWEST_EXAMPLES = 0.1, 2000

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
    """Mean −log P(given label | x) of the validation examples after each round that was tried."""

    @property
    def probs(self) -> Any:
        """Out-of-sample probabilities (N, K) of the chosen round."""
        return self.errors.probs

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
    Rounds go on while they lower −log P(given | x) = −log Σ_k P(k | x) T[k, given] of the validation
    examples, with T estimated without the example. These are a tenth of the examples, drawn by ``seed``,
    whose given labels no model is trained on, and from the second round on sharpening and T are estimated
    from them alone: the labels of all others have entered the targets, and would reward memorising wrong
    labels. Their own targets come from the models that predicted them. With fewer than 2,000 examples all
    are validation examples, by models that were trained on the labels of the others.
    """
    check_positive("rounds", rounds, integer=True)
    check_seed(seed)
    given = np.asarray(given)
    if given.ndim != 1 or given.dtype.kind not in "iu" or given.size == 0 or given.min() < 0:
        raise ValueError(
            f"given must be class numbers (N,), got {given.dtype} of shape {given.shape}: of names "
            "class_names, given = numpy.unique(given, return_inverse=True)"
        )
    validation = _validation(len(given), seed)
    trained = ~validation if len(given) >= FEWEST_EXAMPLES else np.ones(len(given), dtype=bool)

    def by_all(probs: Any) -> float:
        return nll_of_given(given, probs)

    def by_validation(probs: Any) -> float:
        return nll_of_given(given[validation], probs[validation])

    targets, best, losses = given, None, []
    for number in range(1, rounds + 1):
        first = number == 1
        probs = cross_fit(targets, trained, by_all if first else by_validation)
        errors = errors_of_folds(given, probs, estimate_from=None if first else validation)
        losses.append(float(errors.losses.mean()) if validation.all() else by_validation(probs))
        if on_round is not None:
            on_round(number, errors, losses[-1])
        if best is not None and losses[-1] >= losses[best.round - 1]:
            break
        best = Correction(errors, number)
        targets = errors.clean_probs
    assert best is not None
    return Correction(best.errors, best.round, tuple(losses))


def _validation(count: int, seed: int) -> Any:
    """Examples (count,) bool whose labels compare rounds."""
    if count < FEWEST_EXAMPLES:
        return np.ones(count, dtype=bool)
    chosen = np.zeros(count, dtype=bool)
    chosen[np.random.default_rng(seed).permutation(count)[: round(VALIDATION * count)]] = True
    return chosen
