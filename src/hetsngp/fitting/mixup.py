"""Mixup: convex combinations of the examples of a batch (Zhang et al. 2018, arXiv:1710.09412)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hetsngp.functional.sampling import draw_seed
from hetsngp.models.classifier import Classifier, map_batch
from hetsngp.validation import check_multi_hot, check_targets, check_weight


def mixed_batch(
    model: Classifier,
    x: Any,
    y: Tensor,
    weight: Tensor | None,
    alpha: float,
    generator: torch.Generator | None = None,
) -> tuple[Any, Tensor, Tensor | None]:
    """Mix a batch for ``model`` with a permutation of itself: x̃_i = λ·x_i + (1 − λ)·x_j, the labels alike.

    One λ for the batch: the larger of λ and 1 − λ for λ ~ Beta(α, α). The pairs are the same as with λ, each
    from its other end, and as α → 0 the batch becomes itself. Class numbers become soft targets (B, K). The
    mixture of two examples counts as much as both do: w̃ = λ·w_i + (1 − λ)·w_j, and its target is that of an
    example drawn from them by weight, (λ·w_i·y_i + (1 − λ)·w_j·y_j)/w̃.

    ``generator`` gives one seed a batch, and the rest is drawn on the CPU: the same on every device.
    Processes with equal generators have equal λ, and each mixes its own part of the batch.
    """
    rows = y.shape[0]
    targets = (check_multi_hot if model.head.sigmoid else check_targets)(y, model.num_classes, rows)
    if targets.dim() == 1:
        targets = F.one_hot(targets, model.num_classes)
    targets = targets if targets.is_floating_point() else targets.float()
    own = torch.Generator().manual_seed(draw_seed(generator))
    share = beta_share(alpha, own)
    # Pageable memory is copied before the call returns, so non_blocking is safe.
    partner = torch.randperm(rows, generator=own).to(y.device, non_blocking=True)

    def mixed(part: Any) -> Any:
        if not isinstance(part, Tensor) or part.dim() == 0:
            return part
        if not part.is_floating_point():
            raise TypeError(
                f"mixup cannot mix x of {part.dtype}, such as token ids or masks: train with mixup=0; of "
                "pixels as whole numbers give x.float()"
            )
        return torch.lerp(part[partner], part, share)

    x = map_batch(x, mixed)
    if weight is None:
        return x, torch.lerp(targets[partner], targets, share), None
    weight = check_weight(weight, rows).to(targets)
    both = torch.lerp(weight[partner], weight, share)
    first = torch.where(both > 0, share * weight / both, share)
    return x, torch.lerp(targets[partner], targets, first.unsqueeze(1)), both


def beta_share(alpha: float, generator: torch.Generator) -> float:
    """The larger of λ and 1 − λ for λ ~ Beta(α, α).

    λ = g/(g + g′) for two draws from Gamma(α). In logarithms, as Gamma(α + 1)·U^{1/α}: for a small α both
    would be rounded to zero.
    """
    shape = torch.full((2,), alpha + 1.0, dtype=torch.float64)
    uniform = torch.rand(2, dtype=torch.float64, generator=generator)
    logs = torch._standard_gamma(shape, generator=generator).log() + torch.log1p(-uniform) / alpha
    return float(torch.sigmoid((logs[0] - logs[1]).abs()))
