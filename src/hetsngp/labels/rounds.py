"""Rounds of correction: predict out of sample, find wrong labels, train on the corrected targets, repeat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hetsngp.labels.label_errors import (
    LabelErrors,
    errors_of_folds,
    nll_of_given,
    warn_of_poor_probs,
)
from hetsngp.validation import check_positive, check_seed

# Share of the examples whose labels only compare rounds, and the fewest of them.
VALIDATION, FEWEST_VALIDATION = 0.1, 200
# Fewest examples for more than one round: with fewer, these labels are too many to go without.
FEWEST_EXAMPLES = 1000
# Fewest such labels by which the sharpening of later rounds is chosen, and its value where they are fewer:
# models of corrected targets predict the true class, nearly as certain as they should be (docs/decisions.md).
ENOUGH_TO_SHARPEN, LATER_SHARPENING = 1000, 2**0.5

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
        """Probabilities (N, K) of the chosen round, each by a model that was not trained on the example.

        In a round after the first the targets of other examples may have learned from its given label,
        unless it is a validation example.
        """
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
    examples, with T estimated without the example. These are a tenth of the examples, at least 200, drawn by
    ``seed``. No model is trained on their given labels, and from the second round on T is estimated from them
    alone: the labels of all others have entered the targets, and would reward memorising wrong labels. Their
    own targets come from the models that predicted them. Sharpening too is chosen by them from the second
    round on, where they are a thousand or more; with fewer it is √2. Below 1,000 examples there is one round,
    on all of them.
    """
    check_positive("rounds", rounds, integer=True)
    check_seed(seed)
    given = np.asarray(given)
    if given.ndim != 1 or given.dtype.kind not in "iu" or given.size == 0 or given.min() < 0:
        raise ValueError(
            f"given must be class numbers (N,), got {given.dtype} of shape {given.shape}: of names "
            "class_names, given = numpy.unique(given, return_inverse=True)"
        )
    validation, rounds = _validation(len(given), seed), most_rounds(len(given), rounds)
    compared = validation if validation.any() else ~validation
    sharpening = None if validation.sum() >= ENOUGH_TO_SHARPEN else LATER_SHARPENING

    def by_all(probs: Any) -> float:
        return nll_of_given(given, probs)

    def by_validation(probs: Any) -> float:
        return nll_of_given(given[validation], probs[validation], sharpening)

    targets, best, losses = given, None, []
    for number in range(1, rounds + 1):
        if number == 1:
            probs = cross_fit(targets, ~validation, by_all)
            errors = errors_of_folds(given, probs)
            losses.append(nll_of_given(given[compared], probs[compared]))
        else:
            probs = cross_fit(targets, ~validation, by_validation)
            errors = errors_of_folds(given, probs, sharpening=sharpening, estimate_from=validation)
            losses.append(by_validation(probs))
        if on_round is not None:
            on_round(number, errors, losses[-1])
        if best is not None and losses[-1] >= losses[best.round - 1]:
            break
        best = Correction(errors, number)
        targets = errors.clean_probs
    assert best is not None
    warn_of_poor_probs(best.errors, "train longer, or on better features", 3)
    return Correction(best.errors, best.round, tuple(losses))


def most_rounds(examples: int, rounds: int) -> int:
    """Largest number of rounds for so many examples where ``rounds`` are wanted."""
    return rounds if examples >= FEWEST_EXAMPLES else 1


def _validation(count: int, seed: int) -> Any:
    """Examples (count,) bool whose labels compare rounds; none where there are too few examples."""
    chosen = np.zeros(count, dtype=bool)
    if count >= FEWEST_EXAMPLES:
        number = max(round(VALIDATION * count), FEWEST_VALIDATION)
        chosen[np.random.default_rng(seed).permutation(count)[:number]] = True
    return chosen
