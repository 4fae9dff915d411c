"""Radial flows (Rezende & Mohamed 2015), one for each class, side by side: log q(z | c) for all c at once.

A layer moves z along the line through a centre c: z′ = z + βh·(z − c), h = 1/(α + r), r = ‖z − c‖. With
α = softplus(α′) and β = −α + b, b = softplus(β′), it is invertible. βh tends to −1 where b and r are small,
and the log1p(βh) of the original code then has no digits left; here every term is a sum of positive ones:
1 + βh = rh + bh, and the slope along the line is 1 + βh − βh²r = rh(1 + αh) + αh·bh.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def radial(z: Tensor, centre: Tensor, raw_alpha: Tensor, raw_beta: Tensor) -> tuple[Tensor, Tensor]:
    """One layer for every class: z′ (B, K, L) and log|∂z′/∂z| = (L − 1) log(1 + βh) + log(slope) (B, K).

    z: (B, K, L), or (B, 1, L) where the classes start from the same points; centre: (K, L); raw_alpha,
    raw_beta: (K,). Here one class pulls in, one has β = 0 and leaves all as it is, one pushes out:

    >>> z, centre, raw_beta = torch.tensor([[[2.0, 0.0]]]), torch.zeros(3, 2), torch.tensor([-9.0, 0.0, 9.0])
    >>> radial(z, centre, torch.zeros(3), raw_beta)[0]
    tensor([[[1.4853, 0.0000],
             [2.0000, 0.0000],
             [8.1690, 0.0000]]])
    """
    alpha, b = F.softplus(raw_alpha), F.softplus(raw_beta)
    offset = z - centre
    # torch takes the norm's gradient at zero as zero: finite, and exact for z′, whose own there is b/α.
    r = torch.linalg.vector_norm(offset, dim=-1)
    h = 1 / (alpha + r)
    stretch = (r + b) * h
    slope = r * h * (1 + alpha * h) + alpha * h * (b * h)
    log_det = (z.shape[-1] - 1) * stretch.log() + slope.log()
    return centre + stretch.unsqueeze(-1) * offset, log_det


def log_density(z: Tensor, centres: Tensor, raw_alphas: Tensor, raw_betas: Tensor) -> Tensor:
    """log q(z | c) = log N(z_F; 0, I) + Σ log-dets, z_F the image of z under F layers: (B, L) → (B, K).

    centres: (F, K, L); raw_alphas, raw_betas: (F, K). The layers run from data to latent, so a density costs
    one pass, O(B·F·K·L), and no inverse.

    >>> log_density(torch.zeros(1, 2), torch.ones(4, 3, 2), torch.zeros(4, 3), torch.zeros(4, 3))
    tensor([[-1.8379, -1.8379, -1.8379]])
    """
    latent = z.unsqueeze(1)
    total = z.new_full((z.shape[0], centres.shape[1]), -0.5 * z.shape[-1] * math.log(2 * math.pi))
    for centre, raw_alpha, raw_beta in zip(centres, raw_alphas, raw_betas, strict=True):
        latent, log_det = radial(latent, centre, raw_alpha, raw_beta)
        total = total + log_det
    return total - 0.5 * latent.square().sum(-1)
