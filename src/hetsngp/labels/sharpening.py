"""The sharpening of probabilities that were learned from noisy labels, chosen by the given labels alone."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from hetsngp.labels.transition import TransitionFit, fit_transition

# Sharpenings 2^(i/2), i from −4 to 10: every second one is tried, then those around the best.
LEAST, MOST = -4, 10
# Examples × classes that the sharpening is chosen by; more are drawn from at random.
SEARCH_CELLS = 2**22
# Standard errors of the difference by which a sharpening is measurably worse than the best.
MEASURABLE = 2.0


def sharpened(log_probs: Tensor, sharpening: float) -> Tensor:
    """log P(true | x) ∝ s·log probs: (N, K)."""
    return torch.log_softmax(sharpening * log_probs, 1)


def sample(count: int, num_classes: int) -> Tensor:
    """Rows to choose by: all, or so many at random that the choice takes seconds."""
    most = max(1, SEARCH_CELLS // num_classes)
    if count <= most:
        return torch.arange(count)
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))[:most].sort().values


def choose_sharpening(log_probs: Tensor, given: Tensor) -> tuple[float, dict[float, TransitionFit]]:
    """The chosen s, and the fits of all s that explain the labels about as well.

    ``log_probs``: (N, K); ``given``: (N, A).

    By −log P(given | x) = −log Σ_k P(k | x) T[k, given], with T estimated without the example: too small an s
    cannot say that a label is wrong, too large an s contradicts labels that are correct. Chosen is the best
    s, or the next larger one where that is not measurably worse: noise that depends on more than the class
    looks like a smaller s, and too small an s is the worse mistake (experiments/label_noise).
    """
    fits: dict[int, TransitionFit] = {}

    def fit(powers: Iterable[int]) -> None:
        for power in powers:
            if power not in fits and LEAST <= power <= MOST:
                fits[power] = fit_transition(sharpened(log_probs, _power(power)), given)

    # The loss may have two minima: no noise with probs as they are, and noise with sharp ones.
    fit(range(LEAST, MOST + 1, 2))
    while True:
        best = min(fits, key=lambda power: float(fits[power].loss.mean()))
        worse = {power: each.loss - fits[best].loss for power, each in fits.items()}
        as_good = {power for power, d in worse.items() if float(d.mean()) <= MEASURABLE * standard_error(d)}
        before = len(fits)
        fit(power + step for power in as_good for step in (-1, 1))
        if len(fits) == before:
            break
    chosen = best + 1 if best + 1 in as_good else best
    return _power(chosen), {_power(power): fits[power] for power in as_good}


def _power(index: int) -> float:
    return float(2.0 ** (index / 2))


def standard_error(values: Tensor) -> float:
    """Standard error of the mean of ``values`` (n,)."""
    return float(values.std() / math.sqrt(len(values))) if len(values) > 1 else 0.0
