"""The library as a scikit-learn classifier."""

from hetsngp.estimator.classifier import HetSNGPClassifier

__all__ = ["HetSNGPClassifier"]
