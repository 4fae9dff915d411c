"""Models (a backbone and a head, with ``loss`` and ``predict``) and the methods that :func:`build` knows."""

from hetsngp.models.classifier import Classifier
from hetsngp.models.ensemble import Ensemble
from hetsngp.models.methods import METHODS, build, build_ensemble
from hetsngp.models.multi_input import MultiInput

__all__ = ["METHODS", "Classifier", "Ensemble", "MultiInput", "build", "build_ensemble"]
