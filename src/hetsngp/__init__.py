"""Two honest kinds of doubt for any PyTorch classifier: noisy labels, and inputs unlike the training data."""

from hetsngp.artifact import ArtifactError, load, save
from hetsngp.model import Classifier, Ensemble
from hetsngp.posterior import PosteriorReport, fit_posterior
from hetsngp.recipes import build
from hetsngp.types import LatentNormal, Prediction, UtilityNormal
from hetsngp.validation import PosteriorNotFittedError

__version__ = "0.1.0"

__all__ = [
    "ArtifactError",
    "Classifier",
    "Ensemble",
    "LatentNormal",
    "PosteriorNotFittedError",
    "PosteriorReport",
    "Prediction",
    "UtilityNormal",
    "build",
    "fit_posterior",
    "load",
    "save",
]
