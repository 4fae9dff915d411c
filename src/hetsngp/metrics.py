"""Numbers for predictions, on torchmetrics where it has the metric.

torchmetrics guesses from the values whether it was given probabilities or logits, and counts a confidence of
exactly 1 in a bin of its own (issue 3510, there in 1.9.0). Both are guarded here. Needs
``pip install 'hetsngp[cli]'``.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor


def accuracy(probs: Tensor, labels: Tensor) -> float:
    """Share of labels (n,) that are the most probable class of probs (n, K).

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    0.5
    """
    _check(probs, labels)
    score = _torchmetrics().multiclass_accuracy(probs.argmax(-1), labels, probs.shape[-1], average="micro")
    return float(score)


def nll(probs: Tensor, labels: Tensor) -> float:
    """Mean −log p(label), nats. A probability that underflowed to 0 counts as float32's smallest, 87 nats.

    >>> round(nll(torch.tensor([[0.5, 0.5]]), torch.tensor([0])), 4)
    0.6931
    """
    _check(probs, labels)
    given = probs.double().gather(1, labels[:, None]).clamp_min(torch.finfo(torch.float32).tiny)
    return float(-given.log().mean())


def ece(probs: Tensor, labels: Tensor, num_bins: int = 15) -> float:
    """Expected calibration error: mean of |accuracy − confidence| over equal-width bins, by their share.

    >>> round(ece(torch.tensor([[0.95, 0.05], [1.0, 0.0]]), torch.tensor([0, 1]), num_bins=10), 4)
    0.475
    """
    _check(probs, labels)
    # In float32, as torchmetrics computes. Just below 1 the last bin has it; rounded above 1 it would read as
    # a logit.
    below_one = 1 - torch.finfo(torch.float32).eps / 2
    probs = probs.float().clamp(0.0, below_one)
    score = _torchmetrics().multiclass_calibration_error(probs, labels, probs.shape[-1], n_bins=num_bins)
    return float(score)


def auroc(inside: Tensor, outside: Tensor) -> float:
    """P(an outside score exceeds an inside one), ties counted half: outside is positive, higher is further.

    >>> auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 30.0]))
    0.875
    """
    return float(_torchmetrics().binary_auroc(*_ranked(inside, outside)))


def fpr95(inside: Tensor, outside: Tensor) -> float:
    """Share of inside rows called outside by the strictest threshold that finds 95 % of the outside ones.

    Outside is positive, and a row is called outside where its score is at or above the threshold. Papers that
    take inside as positive report another number.

    >>> fpr95(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.35, 0.9]))
    0.25
    """
    false_positive, true_positive, _ = _torchmetrics().binary_roc(*_ranked(inside, outside))
    found = true_positive.double() * len(outside) >= 0.95 * len(outside) - 1e-3  # whole numbers, rounded
    return float(false_positive[found].min())


def _ranked(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """Scores as ranks in [0, 1] and 1 for outside: torchmetrics would squash other values, making ties."""
    if len(inside) == 0 or len(outside) == 0:
        raise ValueError("scores inside and outside must both have rows")
    scores = torch.cat([inside, outside]).double()
    if not bool(scores.isfinite().all()):
        raise ValueError("scores must be finite")
    _, rank = scores.unique(return_inverse=True)
    target = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))]).long()
    return rank.double() / max(1, int(rank.max())), target.to(rank.device)


def _check(probs: Tensor, labels: Tensor) -> None:
    if probs.dim() != 2 or labels.shape != probs.shape[:1] or len(probs) == 0:
        raise ValueError(
            f"probs must be (n, K) and labels (n,), got {tuple(probs.shape)} and {tuple(labels.shape)}"
        )


def _torchmetrics() -> ModuleType:
    try:
        from torchmetrics.functional import classification
    except ImportError as error:
        raise ImportError("metrics need torchmetrics: pip install 'hetsngp[cli]'") from error
    return classification
