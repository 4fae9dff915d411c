"""How well a score tells outside rows from inside ones. Outside is positive: higher is further out."""

from __future__ import annotations

import torch
from torch import Tensor

from hetsngp.metrics.probabilities import torchmetrics


def auroc(inside: Tensor, outside: Tensor) -> float:
    """P(an outside score exceeds an inside one), ties counted half: outside is positive, higher is further.

    >>> auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 30.0]))
    0.875
    """
    return float(torchmetrics().binary_auroc(*_ranked(inside, outside)))


def auroc_standard_error(inside: Tensor, outside: Tensor) -> float | None:
    """Of :func:`auroc`, for other rows of the same kinds (DeLong, DeLong & Clarke-Pearson 1988).

    The variance of each row's own share of the pairs, over its number of rows, for both sides. None where a
    side has one row; 0 where no pair is in doubt, which is no promise for the next row.

    >>> auroc_standard_error(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 2.0]))
    0.3535...
    """
    inside, outside = _finite(inside, outside)
    if len(inside) < 2 or len(outside) < 2:
        return None
    variance = torch.zeros((), dtype=torch.float64)
    for rows, others in ((inside, outside), (outside, inside)):
        ordered = others.sort().values
        below, upto = (torch.searchsorted(ordered, rows, right=right).double() for right in (False, True))
        variance += ((below + upto) / (2 * len(others))).var() / len(rows)
    return float(variance.sqrt())


def aupr(inside: Tensor, outside: Tensor) -> float:
    """Average precision with outside as positive: Σ (recall_i − recall_{i−1}) · precision_i, as scikit-learn.

    Over distinct thresholds, so that ties count as one, and without interpolation. A score that tells nothing
    gets the share of outside rows, so values of sets of other sizes do not compare. With inside as positive
    it is ``aupr(-outside, -inside)``.

    >>> round(aupr(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 30.0])), 4)
    0.8333
    """
    return float(torchmetrics().binary_average_precision(*_ranked(inside, outside)))


def fpr95(inside: Tensor, outside: Tensor) -> float:
    """Share of inside rows called outside by the strictest threshold that finds 95 % of the outside ones.

    Outside is positive, and a row is called outside where its score is at or above the threshold. Papers that
    take inside as positive report another number.

    >>> fpr95(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.35, 0.9]))
    0.25
    """
    false_positive, true_positive = roc(inside, outside)
    found = (true_positive * len(outside)).round()  # whole numbers again, which torchmetrics rounded
    return float(false_positive[found >= 0.95 * len(outside) - 1e-6].min())


def roc(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """Share of the inside and of the outside rows at or above each threshold, from the strictest on."""
    false_positive, true_positive, _ = torchmetrics().binary_roc(*_ranked(inside, outside))
    return false_positive.double(), true_positive.double()


def _ranked(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """Scores as ranks in [0, 1] and 1 for outside: torchmetrics would squash other values, making ties."""
    inside, outside = _finite(inside, outside)
    _, rank = torch.cat([inside, outside]).unique(return_inverse=True)
    target = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))]).long()
    return rank.double() / max(1, int(rank.max())), target


def _finite(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    if inside.dim() != 1 or outside.dim() != 1:
        raise ValueError(
            f"scores inside and outside must be (n,) and (m,), one a row, got {tuple(inside.shape)} and "
            f"{tuple(outside.shape)}: of probs take e.g. 1 - probs.amax(-1)"
        )
    if len(inside) == 0 or len(outside) == 0:
        raise ValueError("scores inside and outside must both have rows")
    # On the CPU: Apple's GPUs have no float64, and a sort is all there is to do.
    inside, outside = inside.cpu().double(), outside.cpu().double()
    if not bool(inside.isfinite().all() and outside.isfinite().all()):
        raise ValueError("scores must be finite")
    return inside, outside
