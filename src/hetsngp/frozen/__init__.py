"""Heads on frozen backbones: features are computed once, and the head is fitted on them."""

from hetsngp.frozen.features import FeatureSet, extract_features, forget_features
from hetsngp.frozen.head import fit_head
from hetsngp.frozen.label_noise import FrozenCorrection, OutOfSample, correct_labels, out_of_sample_probs

__all__ = [
    "FeatureSet",
    "FrozenCorrection",
    "OutOfSample",
    "correct_labels",
    "extract_features",
    "fit_head",
    "forget_features",
    "out_of_sample_probs",
]
