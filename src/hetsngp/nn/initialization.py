"""Layers whose initial values come from a given generator, while torch's global one is left alone."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
from torch import nn

Layer = TypeVar("Layer", bound=nn.Module)


def uninitialized(kind: type[Layer], *args: Any, **options: Any) -> Layer:
    """A layer whose parameters the caller has to fill; nothing is drawn."""
    layer = nn.utils.skip_init(kind, *args, **options, device=torch.get_default_device())
    assert isinstance(layer, kind)
    return layer


def seeded_linear(in_features: int, out_features: int, generator: torch.Generator | None) -> nn.Linear:
    """nn.Linear with its usual initial values, drawn from ``generator`` (on the CPU)."""
    layer = uninitialized(nn.Linear, in_features, out_features)
    bound = 1 / math.sqrt(in_features)
    nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
    nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
    return layer


def overwritten_linear(in_features: int, out_features: int, generator: torch.Generator | None) -> nn.Linear:
    """nn.Linear for a caller that draws its values from ``generator`` next.

    Without a generator torch's own initial values are drawn first, as in release 0.1, so that a global seed
    gives the same model.
    """
    if generator is None:
        return nn.Linear(in_features, out_features)
    return uninitialized(nn.Linear, in_features, out_features)
