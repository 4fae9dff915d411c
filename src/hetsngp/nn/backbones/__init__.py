"""Networks x → h (B, D) with `num_features` = D and `config`, the arguments that rebuild them.

>>> rebuilt = BACKBONES["ResidualMLP"](**ResidualMLP(in_features=2, width=8).config)
>>> rebuilt.num_features
8
"""

from __future__ import annotations

from torch import nn

from hetsngp.nn.backbones.residual_mlp import ResidualMLP
from hetsngp.nn.backbones.wide_resnet import WideResNet

BACKBONES: dict[str, type[nn.Module]] = {"ResidualMLP": ResidualMLP, "WideResNet": WideResNet}

__all__ = ["BACKBONES", "ResidualMLP", "WideResNet"]
