"""Accuracy, NLL and calibration error from three numbers for each example.

A pass over a loader keeps :func:`example_terms` of each batch and gives them to :func:`quality` at its end:
the probabilities of many examples and classes need not be kept.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hetsngp.metrics.probabilities import (
    binary_nll_terms,
    calibration_error,
    has_top_class,
    nll_terms,
    soft_nll_terms,
)
from hetsngp.validation import check_real_tensors


class ExampleTerms(NamedTuple):
    """Values of n examples, each (n,)."""

    confidence: Tensor
    """Probability of the most probable class."""
    correct: Tensor
    """Whether that class is the label or, for multi-label data, among the labels."""
    nll: Tensor
    """−log p(label); for multi-label data the sum over classes."""


def example_terms(probs: Tensor, labels: Tensor, *, soft: bool = False) -> ExampleTerms:
    """Confidence, correctness and NLL of each example; labels are class numbers (n,) or multi-hot (n, K).

    ``soft``: labels (n, K) are soft targets, of which the most probable class is the correct one; the NLL is
    the mean over their classes, −Σ_k t_k log p_k.
    """
    check_real_tensors(probs=probs, labels=labels)
    if labels.dim() == 2 and soft:
        nll, correct = soft_nll_terms(probs, labels), probs.argmax(-1) == labels.argmax(-1)
    elif labels.dim() == 2:
        nll, correct = binary_nll_terms(probs, labels), has_top_class(probs, labels)
    else:
        nll, correct = nll_terms(probs, labels), probs.argmax(-1) == labels
    return ExampleTerms(probs.amax(-1), correct, nll)


def quality(confidence: Tensor, correct: Tensor, nll: Tensor, num_bins: int = 15) -> dict[str, float]:
    """Accuracy (precision@1 for multi-label data), mean NLL in nats, ECE, and the number of examples.

    >>> import torch
    >>> terms = example_terms(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    >>> {name: round(value, 4) for name, value in quality(*terms).items()}
    {'accuracy': 0.5, 'nll': 0.5108, 'ece': 0.35, 'examples': 2}
    """
    check_real_tensors(confidence=confidence, correct=correct, nll=nll)
    return {
        "accuracy": float(correct.double().mean()),
        "nll": float(nll.double().mean()),
        "ece": calibration_error(confidence, correct.bool(), num_bins),
        "examples": len(nll),
    }
