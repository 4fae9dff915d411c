"""Probabilities (n, K) against labels, votes of people, or multi-label targets.

``*_terms`` are the values of each example that a metric is the mean of, so that a pass over many examples and
classes need not keep the probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from hetsngp.validation import check_num_bins, check_real_tensors


def torchmetrics() -> ModuleType:
    """``torchmetrics.functional.classification``, or an error that names the extra."""
    try:
        from torchmetrics.functional import classification
    except ImportError as error:
        raise ImportError("metrics need torchmetrics: pip install 'hetsngp[eval]'") from error
    return classification


TINY = torch.finfo(torch.float32).tiny
"""Value for a probability that underflowed: 87 nats, whatever the precision."""

# Rounding of half precision.
ROUNDED = 0.01
CHUNK = 2**22
"""Values that are widened at once: 32 MiB in float64."""


# --- single-label ---------------------------------------------------------------------------------------


def accuracy(probs: Tensor, labels: Tensor) -> float:
    """Share of labels (n,) that are the most probable class of probs (n, K).

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    0.5
    """
    labels = _check_labels(probs, labels)
    _refuse_nan(probs)
    score = torchmetrics().multiclass_accuracy(probs.argmax(-1), labels, probs.shape[-1], average="micro")
    return float(score)


def nll(probs: Tensor, labels: Tensor) -> float:
    """Mean −log p(label), nats. A probability that underflowed to 0 counts as float32's smallest, 87 nats.

    >>> round(nll(torch.tensor([[0.5, 0.5]]), torch.tensor([0])), 4)
    0.6931
    """
    terms = nll_terms(probs, labels)
    _refuse_nan(probs)
    return float(terms.mean())


def nll_terms(probs: Tensor, labels: Tensor) -> Tensor:
    """Values of −log p(label), one for each example: (n,)."""
    labels = _check(probs, labels)
    return -_wide(probs.gather(1, labels[:, None]).squeeze(1)).clamp_min(TINY).log()


def soft_nll_terms(probs: Tensor, targets: Tensor) -> Tensor:
    """Values of −Σ_k t_k log p_k for soft targets t (n, K), one for each example: (n,)."""
    check_real_tensors(probs=probs, targets=targets)
    if targets.shape != probs.shape:
        raise ValueError(
            f"probs and targets must both be (n, K), got {tuple(probs.shape)} and {tuple(targets.shape)}"
        )
    check_probs(probs)
    return -(_wide(targets) * _wide(probs).clamp_min(TINY).log()).sum(-1)


def brier(probs: Tensor, labels: Tensor) -> float:
    """Mean of Σ_k (p_k − [k = label])²: 0 is perfect, 2 is certain of a wrong class. Some halve it.

    >>> round(brier(torch.tensor([[0.8, 0.2], [0.0, 1.0]]), torch.tensor([0, 0])), 4)
    1.04
    """
    terms = brier_terms(probs, labels)
    _refuse_nan(probs)
    return float(terms.mean())


def brier_terms(probs: Tensor, labels: Tensor) -> Tensor:
    """Values of Σ_k (p_k − [k = label])², one for each example: (n,)."""
    labels = _check(probs, labels)
    given = probs.gather(1, labels[:, None]).squeeze(1)
    # Not Σp² − 2p + 1, which cancels where the model is correct and confident.
    squares = probs.square() if probs.element_size() >= 4 else probs.float().square()
    others = squares.scatter(1, labels[:, None], 0.0).sum(-1)
    return _wide(others) + (1 - _wide(given)).square()


def ece(probs: Tensor, labels: Tensor, num_bins: int = 15) -> float:
    """Expected calibration error: mean of |accuracy − confidence| over equal-width bins, by their share.

    >>> round(ece(torch.tensor([[0.95, 0.05], [1.0, 0.0]]), torch.tensor([0, 1]), num_bins=10), 4)
    0.475
    """
    labels = _check(probs, labels)
    return calibration_error(probs.amax(-1), probs.argmax(-1) == labels, num_bins)


def calibration_error(confidence: Tensor, correct: Tensor, num_bins: int = 15) -> float:
    """:func:`ece` from the confidence of each prediction (n,) and whether it is correct (n,).

    A bin has its lower edge, and the last one also its upper: torchmetrics counts a confidence of exactly 1
    in a bin by itself (issue 3510, there in 1.9.0).
    """
    _check_confidence(confidence, correct, num_bins)
    # In float64: torchmetrics adds one by one, and a million float32 sums drift.
    below_one = _wide(confidence).clamp(0.0, 1 - torch.finfo(_wide(confidence).dtype).eps / 2)
    return float(torchmetrics().binary_calibration_error(below_one, correct.long(), n_bins=num_bins))


@dataclass(frozen=True, eq=False)
class Reliability:
    """Bins of equal width over [0, 1], (num_bins,) each; confidence and accuracy are NaN where count is 0."""

    count: Tensor
    confidence: Tensor
    """Mean over the examples of the bin."""
    accuracy: Tensor


def reliability_bins(confidence: Tensor, correct: Tensor, num_bins: int = 15) -> Reliability:
    """Bins of :func:`calibration_error`, which is Σ count · |accuracy − confidence| / n.

    >>> reliability_bins(torch.tensor([0.9, 1.0]), torch.tensor([True, False]), num_bins=2).count
    tensor([0, 2])
    """
    _check_confidence(confidence, correct, num_bins)
    confidence = confidence.double().cpu()
    edges = torch.linspace(0, 1, num_bins + 1, dtype=torch.float64)
    index = (torch.bucketize(confidence, edges, right=True) - 1).clamp(0, num_bins - 1)
    count, confidences, corrects = (
        torch.bincount(index, weight, minlength=num_bins)
        for weight in (None, confidence, correct.double().cpu())
    )
    return Reliability(count, confidences / count, corrects / count)


# --- votes ----------------------------------------------------------------------------------------------


def vote_nll(probs: Tensor, counts: Tensor) -> float:
    """Mean of −Σ_k s_k log p_k, nats; s is the share of the votes ``counts`` (n, K) for each class.

    Mean of :func:`nll` if the label of an example were that of a random voter. Its least value is the mean
    entropy of the votes; :func:`vote_kl` is the difference.

    >>> round(vote_nll(torch.tensor([[0.5, 0.5]]), torch.tensor([[30, 20]])), 4)
    0.6931
    """
    share = _shares(probs, counts)
    return float(-(share * _wide(probs).clamp_min(TINY).log()).sum(-1).mean())


def vote_kl(probs: Tensor, counts: Tensor) -> float:
    """Mean of KL(s ‖ p) = Σ_k s_k log(s_k / p_k), nats: 0 where the model predicts the votes.

    >>> round(vote_kl(torch.tensor([[0.5, 0.5]]), torch.tensor([[30, 20]])), 4)
    0.0201
    """
    return vote_nll(probs, counts) - float(torch.special.entr(_shares(probs, counts)).sum(-1).mean())


def _shares(probs: Tensor, counts: Tensor) -> Tensor:
    check_real_tensors(probs=probs, counts=counts)
    _refuse_nan(probs)
    if probs.dim() != 2 or counts.shape != probs.shape or len(probs) == 0:
        raise ValueError(
            f"probs and counts of votes must both be (n, K), got {tuple(probs.shape)} and "
            f"{tuple(counts.shape)}"
        )
    check_probs(probs)
    wide = _wide(counts)
    total = wide.sum(-1, keepdim=True)
    if bool((wide < 0).any()) or not bool((total > 0).all()):
        raise ValueError("counts of votes must not be negative, and every example needs at least one vote")
    return wide / total


# --- multi-label ----------------------------------------------------------------------------------------


def precision_at_1(probs: Tensor, labels: Tensor) -> float:
    """Share of examples whose most probable class is among their labels, multi-hot (n, K).

    >>> precision_at_1(torch.tensor([[0.9, 0.8], [0.6, 0.1]]), torch.tensor([[1, 1], [0, 1]]))
    0.5
    """
    hits = has_top_class(probs, labels)
    _refuse_nan(probs)
    return float(hits.double().mean())


def has_top_class(probs: Tensor, labels: Tensor) -> Tensor:
    """Whether the most probable class of each example is among its labels (n, K): (n,) bool."""
    _check_multi_hot(probs, labels)
    return labels.gather(1, probs.argmax(-1, keepdim=True)).squeeze(1) > 0.5


def multi_label_nll(probs: Tensor, labels: Tensor) -> float:
    """Mean over examples of −Σ_k [y_k log p_k + (1 − y_k) log(1 − p_k)], nats; labels multi-hot (n, K).

    >>> round(multi_label_nll(torch.tensor([[0.5, 0.5]]), torch.tensor([[1, 0]])), 4)
    1.3863
    """
    terms = binary_nll_terms(probs, labels)
    _refuse_nan(probs)
    return float(terms.mean())


def binary_nll_terms(probs: Tensor, labels: Tensor) -> Tensor:
    """Sum over classes of :func:`multi_label_nll`, one for each example: (n,)."""
    _check_multi_hot(probs, labels)
    check_probs(probs, total="any")
    size = max(1, CHUNK // probs.shape[1])
    pairs = zip(probs.split(size), labels.split(size), strict=True)
    return torch.cat([_binary_nll(_wide(p), y) for p, y in pairs])


def _binary_nll(probs: Tensor, labels: Tensor) -> Tensor:
    yes, no = probs.clamp_min(TINY).log(), (1 - probs).clamp_min(TINY).log()
    return -torch.lerp(no, yes, labels.to(probs)).sum(-1)


# --- checks ---------------------------------------------------------------------------------------------


def _wide(values: Tensor) -> Tensor:
    """Values in float64, or in float32 on Apple's GPUs, which have no float64."""
    return values.float() if values.device.type == "mps" else values.double()


def check_probs(probs: Tensor, total: str = "part") -> None:
    """Check that each is in [0, 1] and that they sum to at most 1 ("part"), to 1 ("one") or to "any" number.

    NaN passes.
    """
    if probs.dim() != 2 or len(probs) == 0:
        raise ValueError(f"probs must be (n, K) with an example at least, got {tuple(probs.shape)}")
    sums = probs.sum(-1, dtype=torch.float32)
    ends = [torch.aminmax(probs), torch.aminmax(sums)]
    low, high, least, most = torch.stack([end.float() for pair in ends for end in pair]).tolist()
    if low < -ROUNDED / 10 or high > 1 + ROUNDED:
        raise ValueError(
            f"probs are from {low:.3g} to {high:.3g}, so they are no probabilities: of logits make them with "
            "logits.softmax(-1), of log-probabilities with .exp()"
        )
    if total != "any" and (most > 1 + ROUNDED or (total == "one" and least < 1 - ROUNDED)):
        raise ValueError(
            f"the probs of an example add up to {most if most > 1 + ROUNDED else least:.3g}, but with one "
            "label an example needs a sum of 1: use softmax, or probs / probs.sum(-1, keepdim=True); for "
            "multi-label data give multi-hot labels (n, K)"
        )


def _refuse_nan(probs: Tensor) -> None:
    """Refuse NaN, of which there is no mean; the ``*_terms`` of single examples are NaN there."""
    if bool(probs.isnan().any()):
        first = int(probs.isnan().reshape(len(probs), -1).any(1).int().argmax())
        raise ValueError(
            f"probs are NaN, first of example {first}: look where it comes from, or leave it out"
        )


def check_correct(correct: Tensor) -> None:
    """Check that values say whether predictions are correct: bool, or 0 and 1."""
    if correct.dtype != torch.bool and not bool(((correct == 0) | (correct == 1)).all()):
        raise ValueError("correct says whether a prediction is correct: give bool, or 0 and 1")


def _check(probs: Tensor, labels: Tensor) -> Tensor:
    labels = _check_labels(probs, labels)
    check_probs(probs)
    return labels


def _check_labels(probs: Tensor, labels: Tensor) -> Tensor:
    """Labels as int64, checked."""
    check_real_tensors(probs=probs, labels=labels)
    if probs.dim() != 2 or labels.shape != probs.shape[:1] or len(probs) == 0:
        raise ValueError(
            f"probs must be (n, K) and labels (n,), got {tuple(probs.shape)} and {tuple(labels.shape)}"
        )
    if probs.shape[1] < 2:
        raise ValueError(
            "probs has one class only: of p, the probability of yes (n, 1), make both, "
            "torch.cat([1 - p, p], 1)"
        )
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be whole class numbers, got {labels.dtype}: give labels.long()")
    low, high = torch.stack(torch.aminmax(labels)).tolist()
    if low < 0 or high >= probs.shape[1]:
        raise ValueError(
            f"labels are from {low} to {high}, but probs have the classes 0 … {probs.shape[1] - 1}: renumber "
            "the labels, or leave examples of other classes out"
        )
    return labels.long()


def _check_confidence(confidence: Tensor, correct: Tensor, num_bins: int) -> None:
    check_num_bins(num_bins)
    check_real_tensors(confidence=confidence, correct=correct)
    if confidence.dim() != 1 or correct.shape != confidence.shape or len(confidence) == 0:
        raise ValueError(
            f"confidence and correct must both be (n,), got {tuple(confidence.shape)} and "
            f"{tuple(correct.shape)}: the confidence is probs.amax(-1)"
        )
    check_correct(correct)
    low, high = torch.stack(torch.aminmax(confidence)).tolist()
    if not (low >= -ROUNDED / 10 and high <= 1 + ROUNDED):  # also where one is NaN
        raise ValueError(
            f"confidences must be probabilities in [0, 1], got {low:.3g} to {high:.3g}: of logits make them "
            "with logits.softmax(-1).amax(-1), and look where a NaN comes from"
        )


def _check_multi_hot(probs: Tensor, labels: Tensor) -> None:
    check_real_tensors(probs=probs, labels=labels)
    if probs.dim() != 2 or labels.shape != probs.shape or len(probs) == 0:
        raise ValueError(
            f"probs and multi-hot labels must both be (n, K), got {tuple(probs.shape)} and "
            f"{tuple(labels.shape)}"
        )
