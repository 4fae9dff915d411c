"""Wide residual network for small images (Zagoruyko and Komodakis, 2016)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetsngp.nn.initialization import uninitialized


class WideResNetBlock(nn.Module):
    """Pre-activation block: a = relu(bn(x)), x ↦ shortcut + conv(dropout(relu(bn(conv(a))))).

    x: (B, in, H, W), returned as (B, out, H/stride, W/stride). Where the shape changes, the shortcut is a 1×1
    convolution of a; elsewhere it is x.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        stride: int,
        dropout: float,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = _conv(in_channels, out_channels, 3, stride, generator)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = _conv(out_channels, out_channels, 3, 1, generator)
        self.shortcut: nn.Conv2d | None = None
        if stride != 1 or in_channels != out_channels:
            self.shortcut = _conv(in_channels, out_channels, 1, stride, generator)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, in, H, W) → (B, out, H/stride, W/stride)."""
        active = F.relu(self.norm1(x))
        shortcut: Tensor = x if self.shortcut is None else self.shortcut(active)
        inner = F.relu(self.norm2(self.conv1(active)))
        return shortcut + self.conv2(self.dropout(inner))


class WideResNet(nn.Module):
    """WRN-depth-width: x (B, in_channels, H, W) → pooled features h (B, 64·width); depth = 6n + 4.

    BatchNorm has no bounded norm, so even spectrally bounded this network is not proved distance preserving.

    >>> backbone = WideResNet(depth=10, width=1)
    >>> backbone(torch.randn(2, 3, 32, 32)).shape, backbone.num_features
    (torch.Size([2, 64]), 64)
    """

    def __init__(
        self,
        depth: int = 28,
        width: int = 10,
        in_channels: int = 3,
        dropout: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"depth must be 6n + 4 (10, 16, 22, 28, 34, 40, ...), got {depth}")
        self.config: dict[str, Any] = {
            "depth": depth,
            "width": width,
            "in_channels": in_channels,
            "dropout": dropout,
        }
        self.num_features = 64 * width
        self.stem = _conv(in_channels, 16, 3, 1, generator)
        blocks: list[nn.Module] = []
        channels = 16
        for out_channels, stride in ((16 * width, 1), (32 * width, 2), (64 * width, 2)):
            for index in range((depth - 4) // 6):
                first = stride if index == 0 else 1
                blocks.append(WideResNetBlock(channels, out_channels, first, dropout, generator))
                channels = out_channels
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, in_channels, H, W) → h: (B, 64·width)."""
        h = F.relu(self.norm(self.blocks(self.stem(x))))
        return h.mean(dim=(-2, -1))


def _conv(
    in_channels: int, out_channels: int, kernel: int, stride: int, generator: torch.Generator | None
) -> nn.Conv2d:
    options = {"stride": stride, "padding": kernel // 2, "bias": False}
    layer = uninitialized(nn.Conv2d, in_channels, out_channels, kernel, **options)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu", generator=generator)
    return layer
