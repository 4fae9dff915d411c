"""A linear layer whose initial values come from a given generator."""

from __future__ import annotations

import math

import torch
from torch import nn


def seeded_linear(in_features: int, out_features: int, generator: torch.Generator | None) -> nn.Linear:
    """nn.Linear with its usual initial values, drawn from ``generator`` (on the CPU)."""
    layer = nn.utils.skip_init(nn.Linear, in_features, out_features, device=torch.get_default_device())
    assert isinstance(layer, nn.Linear)
    bound = 1 / math.sqrt(in_features)
    nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
    nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
    return layer
