"""Sums over data that a posterior is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Statistics:
    """Sums over data: ``count``, their weight; ``sums`` of w·φφᵀ (m, m) or (K, m, m); ``fisher`` (K, K)."""

    count: float
    sums: Tensor
    fisher: Tensor

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(self.count + other.count, self.sums + other.sums, self.fisher + other.fisher)

    def reduced(self, reduce: Callable[[Tensor], Tensor]) -> Statistics:
        """The sum over processes, in one call: ``reduce`` adds up a tensor, in place or not."""
        parts = (self.sums.new_tensor([self.count]), self.sums, self.fisher)
        total = reduce(torch.cat([part.flatten().to(self.sums) for part in parts]))
        count, sums, fisher = total.split([part.numel() for part in parts])
        return Statistics(float(count), sums.view_as(self.sums), fisher.view_as(self.fisher).to(self.fisher))
