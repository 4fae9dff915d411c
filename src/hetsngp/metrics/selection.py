"""Selective prediction: errors that remain when only the most certain examples are answered."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hetsngp._moved import renamed_arguments
from hetsngp.metrics.probabilities import check_correct
from hetsngp.validation import check_real_tensors

_renamed = renamed_arguments(doubt="uncertainty")


@_renamed
def risks(uncertainty: Tensor, correct: Tensor) -> Tensor:
    """Share of errors among the k examples of least ``uncertainty``, for k = 1 … n: (n,) float64.

    Examples of equal uncertainty come in random order, and this is the mean over all such orders: of m equal
    ones with e errors the first j have e·j/m on average.

    >>> risks(torch.tensor([0.1, 0.5, 0.5]), torch.tensor([True, False, True]))
    tensor([0.0000, 0.2500, 0.3333], dtype=torch.float64)
    """
    check_real_tensors(uncertainty=uncertainty, correct=correct)
    check_correct(correct)
    uncertainty, correct = uncertainty.cpu().double(), correct.cpu()
    if uncertainty.dim() != 1 or correct.shape != uncertainty.shape or len(uncertainty) == 0:
        raise ValueError(
            f"uncertainty and correct must both be (n,), got {tuple(uncertainty.shape)} and "
            f"{tuple(correct.shape)}"
        )
    if not bool(uncertainty.isfinite().all()):
        raise ValueError("uncertainty must be finite")
    _, group, size = uncertainty.unique(return_inverse=True, return_counts=True)
    errors = torch.bincount(group, 1 - correct.double(), minlength=len(size))
    before, before_errors = size.cumsum(0) - size, errors.cumsum(0) - errors
    of = torch.repeat_interleave(size)  # the group of the k-th example
    k = torch.arange(1, len(uncertainty) + 1, dtype=torch.float64)
    return (before_errors[of] + errors[of] * (k - before[of]) / size[of]) / k


@_renamed
def aurc(uncertainty: Tensor, correct: Tensor) -> float:
    """Area under risk–coverage: the mean of :func:`risks` over k. Lower is better.

    Without any order it is the share of errors; ties as in :func:`risks`.

    >>> round(aurc(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([True, True, False])), 4)
    0.1111
    """
    return float(risks(uncertainty, correct).mean())


@_renamed
def excess_aurc(uncertainty: Tensor, correct: Tensor) -> float:
    """:func:`aurc` less that of the best order, every correct prediction before every wrong one: 0 is best.

    It compares orders between models of different accuracy, which ``aurc`` mixes with the order.

    >>> excess_aurc(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([True, True, False]))
    0.0
    """
    check_real_tensors(uncertainty=uncertainty, correct=correct)
    return aurc(uncertainty, correct) - aurc(~correct.bool(), correct)


@_renamed
def accuracy_at_coverage(uncertainty: Tensor, correct: Tensor, coverage: float) -> float:
    """Accuracy on the most certain examples, at least a share ``coverage`` of all; ties as in :func:`risks`.

    >>> accuracy_at_coverage(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([True, True, False]), 0.6)
    1.0
    """
    if not isinstance(coverage, int | float) or isinstance(coverage, bool) or not 0 < coverage <= 1:
        raise ValueError(f"coverage must be a share in (0, 1], got {coverage!r}")
    return 1 - float(risks(uncertainty, correct)[math.ceil(coverage * len(uncertainty) - 1e-9) - 1])
