"""The paper's fully connected residual network."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetsngp.nn.initialization import seeded_linear
from hetsngp.nn.multi_input import widened_isometry


class ResidualMLPBlock(nn.Module):
    """h ↦ h + dropout(relu(Wh + b)); h: (..., width), returned in the same shape.

    With ‖W‖ ≤ c < 1 and dropout off, every distance changes by a factor in [1−c, 1+c].
    """

    def __init__(self, width: int, dropout: float = 0.0, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.linear = seeded_linear(width, width, generator)
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor) -> Tensor:
        """h: (..., width) → (..., width)."""
        out: Tensor = h + self.dropout(F.relu(self.linear(h)))
        return out


class ResidualMLP(nn.Module):
    """x → embedding → `depth` residual blocks → h; x: (B, in_features), h: (B, width).

    The embedding is a fixed isometry Q (QᵀQ = I) where in_features ≤ width, so that it keeps every distance;
    the original draws a fixed Dense layer, which distorts them. Wider inputs pass through a trained linear
    layer. Not spectrally bounded: `hetsngp.build` or `bound_spectrally` does that. `generator`: on the CPU.

    >>> backbone = ResidualMLP(in_features=2, width=16, depth=2)
    >>> backbone(torch.randn(5, 2)).shape, backbone.num_features
    (torch.Size([5, 16]), 16)
    """

    isometry: Tensor

    def __init__(
        self,
        in_features: int,
        width: int = 128,
        depth: int = 4,
        dropout: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if min(in_features, width, depth) < 1:
            raise ValueError("in_features, width and depth must be at least 1")
        self.config: dict[str, Any] = {
            "in_features": in_features,
            "width": width,
            "depth": depth,
            "dropout": dropout,
        }
        self.num_features = width
        self.embedding: nn.Linear | None = None
        if in_features <= width:
            gaussian = torch.randn(width, in_features, generator=generator, dtype=torch.float64)
            isometry = torch.linalg.qr(gaussian).Q.to(torch.get_default_dtype())
            self.register_buffer("isometry", isometry)  # (width, in_features)
        else:
            self.embedding = seeded_linear(in_features, width, generator)
        self.blocks = nn.Sequential(*(ResidualMLPBlock(width, dropout, generator) for _ in range(depth)))

    def widen_inputs(self, num_inputs: int, generator: torch.Generator | None) -> Any:
        """Take M concatenated inputs: (B, M·in_features). M times the same x is still embedded as Qx.

        NotImplemented for a trained embedding, which is widened like any first layer.
        """
        if self.embedding is not None:
            return NotImplemented
        self.isometry = widened_isometry(self.isometry, num_inputs, generator)
        return -1

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, in_features) → h: (B, width)."""
        h = F.linear(x, self.isometry) if self.embedding is None else self.embedding(x)
        out: Tensor = self.blocks(h)
        return out
