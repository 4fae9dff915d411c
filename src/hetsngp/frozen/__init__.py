"""Heads on frozen backbones: features are computed once, and the head is fitted on them."""

from hetsngp.frozen.features import FeatureSet, extract_features, forget_features
from hetsngp.frozen.head import fit_head

__all__ = ["FeatureSet", "extract_features", "fit_head", "forget_features"]
