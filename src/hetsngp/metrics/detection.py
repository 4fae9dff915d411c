"""Detection of out-of-distribution (OOD) examples by a score. OOD is positive: higher is further out.

:func:`fpr95` also takes in-distribution as positive, as the paper does.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hetsngp._moved import renamed_arguments
from hetsngp.metrics.probabilities import torchmetrics
from hetsngp.validation import check_choice, check_real_tensors

_renamed = renamed_arguments(inside="id_scores", outside="ood_scores")


@_renamed
def auroc(id_scores: Tensor, ood_scores: Tensor) -> float:
    """P(an OOD score exceeds an in-distribution one), ties counted half.

    >>> auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 30.0]))
    0.875
    """
    return float(torchmetrics().binary_auroc(*_ranked(id_scores, ood_scores)))


@_renamed
def auroc_standard_error(id_scores: Tensor, ood_scores: Tensor) -> float | None:
    """Standard error of :func:`auroc` for other examples of the same kinds (DeLong, DeLong & Clarke-Pearson
    1988).

    The variance of each example's share of the pairs, over the number of examples, for both sides. None where
    a side has one example; 0 where the scores separate both sides, which promises nothing for more examples.

    >>> auroc_standard_error(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 2.0]))
    0.3535...
    """
    id_scores, ood_scores = _finite(id_scores, ood_scores)
    if len(id_scores) < 2 or len(ood_scores) < 2:
        return None
    variance = torch.zeros((), dtype=torch.float64)
    for scores, others in ((id_scores, ood_scores), (ood_scores, id_scores)):
        ordered = others.sort().values
        below, upto = (torch.searchsorted(ordered, scores, right=right).double() for right in (False, True))
        variance += ((below + upto) / (2 * len(others))).var() / len(scores)
    return float(variance.sqrt())


@_renamed
def aupr(id_scores: Tensor, ood_scores: Tensor) -> float:
    """Average precision with OOD as positive: Σ (recall_i − recall_{i−1}) · precision_i, as scikit-learn.

    Over distinct thresholds, so that ties count as one, and without interpolation. An uninformative
    score gets the share of OOD examples, so values for sets of other sizes do not compare. With
    in-distribution as positive it is ``aupr(-ood_scores, -id_scores)``.

    >>> round(aupr(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 30.0])), 4)
    0.8333
    """
    return float(torchmetrics().binary_average_precision(*_ranked(id_scores, ood_scores)))


@_renamed
def fpr95(id_scores: Tensor, ood_scores: Tensor, *, positive: Literal["ood", "id"] = "ood") -> float:
    """Share of in-distribution examples flagged by the strictest threshold that flags 95 % of the OOD ones.

    OOD is positive, and an example is flagged where its score is at or above the threshold. With ``positive``
    "id" it is the share of OOD examples taken for in-distribution, those at or below the lowest threshold
    that keeps 95 % of the in-distribution ones: the definition of the paper and of Fort et al. (2021).

    >>> known, unknown = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.35, 0.9])
    >>> fpr95(known, unknown), fpr95(known, unknown, positive="id")
    (0.25, 0.5)
    """
    if check_choice("positive", positive, ("ood", "id")) == "id":
        id_scores, ood_scores = _finite(id_scores, ood_scores)
        return fpr95(-ood_scores, -id_scores)
    false_positive, true_positive = roc(id_scores, ood_scores)
    found = (true_positive * len(ood_scores)).round()  # whole numbers again, which torchmetrics rounded
    return float(false_positive[found >= 0.95 * len(ood_scores) - 1e-6].min())


@_renamed
def roc(id_scores: Tensor, ood_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Shares of in-distribution and of OOD examples at or above each threshold, from the strictest on."""
    false_positive, true_positive, _ = torchmetrics().binary_roc(*_ranked(id_scores, ood_scores))
    return false_positive.double(), true_positive.double()


def _ranked(id_scores: Tensor, ood_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Scores as ranks in [0, 1] and 1 for OOD: torchmetrics would squash other values, making ties."""
    id_scores, ood_scores = _finite(id_scores, ood_scores)
    _, rank = torch.cat([id_scores, ood_scores]).unique(return_inverse=True)
    target = torch.cat([torch.zeros(len(id_scores)), torch.ones(len(ood_scores))]).long()
    return rank.double() / max(1, int(rank.max())), target


def _finite(id_scores: Tensor, ood_scores: Tensor) -> tuple[Tensor, Tensor]:
    check_real_tensors(id_scores=id_scores, ood_scores=ood_scores)
    if id_scores.dim() != 1 or ood_scores.dim() != 1:
        raise ValueError(
            "id_scores and ood_scores must be (n,) and (m,), one for each example, got "
            f"{tuple(id_scores.shape)} and {tuple(ood_scores.shape)}: of probs take e.g. 1 - probs.amax(-1)"
        )
    if len(id_scores) == 0 or len(ood_scores) == 0:
        raise ValueError("id_scores and ood_scores must both have values")
    # On the CPU: Apple's GPUs have no float64, and a sort is all there is to do.
    id_scores, ood_scores = id_scores.cpu().double(), ood_scores.cpu().double()
    if not bool(id_scores.isfinite().all() and ood_scores.isfinite().all()):
        raise ValueError("scores must be finite")
    return id_scores, ood_scores
