"""log E softmax(u) and E log softmax(u) by the trapezoid rule in all contrasts of the logits, differentiable.

A softmax depends on the K − 1 differences to the last logit alone, whose covariance is written out: so any
diagonal and any factor, of whatever rank, are K − 1 coordinates. float64; for K up to 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hetsngp.types import UtilityNormal


def nodes(dimension: int, half: float = 7.0, step: float = 0.4) -> tuple[Tensor, Tensor]:
    """Nodes (n, dimension) and logarithms of weights (n,) of a standard normal.

    The poles of a softmax are at a distance of π: for standard deviations σ the error is near
    exp(−2π²/(σ·step)), 1e-7 for σ = 3, beside that of the Gaussian, exp(−2π²/step²).
    """
    z = torch.arange(-half, half + step / 2, step, dtype=torch.float64)
    grid = torch.cartesian_prod(*[z] * dimension).view(-1, dimension)
    return grid, torch.log_softmax(-0.5 * grid.square().sum(1), 0)


def log_softmax_draws(utility: UtilityNormal, **grid: float) -> tuple[Tensor, Tensor]:
    """log softmax(u) at the nodes (B, n, K), and logarithms of their weights (n,)."""
    mean, covariance = utility.mean.double(), utility.covariance().double()
    eye = torch.eye(mean.shape[-1], dtype=torch.float64)
    contrast = eye[:-1] - eye[-1]
    # A variance of 1e-12 beside the others keeps the Cholesky factor, and its gradient, finite.
    small = 1e-12 * torch.eye(len(contrast), dtype=torch.float64)
    root = torch.linalg.cholesky(contrast @ covariance @ contrast.mT + small)
    z, log_weight = nodes(len(contrast), **grid)
    difference = (mean @ contrast.mT).unsqueeze(1) + z @ root.mT
    return torch.log_softmax(torch.nn.functional.pad(difference, (0, 1)), -1), log_weight


def log_mean(utility: UtilityNormal, **grid: float) -> Tensor:
    """log E softmax(u): (B, K)."""
    log_q, log_weight = log_softmax_draws(utility, **grid)
    return (log_q + log_weight.unsqueeze(-1)).logsumexp(1)


def mean_log(utility: UtilityNormal, **grid: float) -> Tensor:
    """E log softmax(u): (B, K)."""
    log_q, log_weight = log_softmax_draws(utility, **grid)
    return log_weight.exp() @ log_q
