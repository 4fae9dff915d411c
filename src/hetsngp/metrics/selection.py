"""Selective prediction: how many errors are left when only the rows of least doubt are answered."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def risks(doubt: Tensor, correct: Tensor) -> Tensor:
    """Share of errors among the k rows of least ``doubt``, for k = 1 … n: (n,) float64.

    Rows of equal doubt come in random order, and this is the mean over all such orders: of m equal rows with
    e errors the first j have e·j/m on average.

    >>> risks(torch.tensor([0.1, 0.5, 0.5]), torch.tensor([True, False, True]))
    tensor([0.0000, 0.2500, 0.3333], dtype=torch.float64)
    """
    doubt, correct = doubt.cpu().double(), correct.cpu()
    if doubt.dim() != 1 or correct.shape != doubt.shape or len(doubt) == 0:
        raise ValueError(
            f"doubt and correct must both be (n,), got {tuple(doubt.shape)} and {tuple(correct.shape)}"
        )
    if not bool(doubt.isfinite().all()):
        raise ValueError("doubt must be finite")
    _, group, size = doubt.unique(return_inverse=True, return_counts=True)
    errors = torch.bincount(group, 1 - correct.double(), minlength=len(size))
    before_rows, before_errors = size.cumsum(0) - size, errors.cumsum(0) - errors
    of = torch.repeat_interleave(size)  # the group of the k-th row
    k = torch.arange(1, len(doubt) + 1, dtype=torch.float64)
    return (before_errors[of] + errors[of] * (k - before_rows[of]) / size[of]) / k


def aurc(doubt: Tensor, correct: Tensor) -> float:
    """Area under risk–coverage: the mean of :func:`risks` over k. Lower is better.

    Without any order it is the share of errors; ties as in :func:`risks`.

    >>> round(aurc(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([True, True, False])), 4)
    0.1111
    """
    return float(risks(doubt, correct).mean())


def excess_aurc(doubt: Tensor, correct: Tensor) -> float:
    """:func:`aurc` less that of the best order, every right answer before every wrong one: 0 is best.

    It compares orders between models of different accuracy, which ``aurc`` mixes with the order.

    >>> excess_aurc(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([True, True, False]))
    0.0
    """
    return aurc(doubt, correct) - aurc(~correct.bool(), correct)


def accuracy_at_coverage(doubt: Tensor, correct: Tensor, coverage: float) -> float:
    """Accuracy on the rows of least doubt that are at least ``coverage`` of all; ties as in :func:`risks`.

    >>> accuracy_at_coverage(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([True, True, False]), 0.6)
    1.0
    """
    if not 0 < coverage <= 1:
        raise ValueError(f"coverage must be a share in (0, 1], got {coverage!r}")
    return 1 - float(risks(doubt, correct)[math.ceil(coverage * len(doubt) - 1e-9) - 1])
