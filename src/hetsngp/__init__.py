"""Two honest kinds of doubt for any PyTorch classifier: noisy labels, and inputs unlike the training data."""

from typing import TYPE_CHECKING, Any

from hetsngp.conversion.conversion import Conversion, convert
from hetsngp.frozen.features import FeatureSet, extract_features, forget_features
from hetsngp.frozen.head import fit_head
from hetsngp.io.artifact import ArtifactError, load, save
from hetsngp.models.classifier import Classifier
from hetsngp.models.ensemble import Ensemble
from hetsngp.models.methods import build, build_ensemble
from hetsngp.models.multi_input import MultiInput
from hetsngp.posterior.fit import PosteriorReport, fit_posterior
from hetsngp.types import LatentNormal, Prediction, UtilityNormal
from hetsngp.validation import PosteriorNotFittedError

if TYPE_CHECKING:
    from hetsngp.estimator import HetSNGPClassifier as HetSNGPClassifier
    from hetsngp.evaluation import evaluate as evaluate

__version__ = "0.1.0"

# Without HetSNGPClassifier: `from hetsngp import *` must work where scikit-learn is not installed.
__all__ = [
    "ArtifactError",
    "Classifier",
    "Conversion",
    "Ensemble",
    "FeatureSet",
    "LatentNormal",
    "MultiInput",
    "PosteriorNotFittedError",
    "PosteriorReport",
    "Prediction",
    "UtilityNormal",
    "build",
    "build_ensemble",
    "convert",
    "evaluate",
    "extract_features",
    "fit_head",
    "fit_posterior",
    "forget_features",
    "load",
    "save",
]


def __getattr__(name: str) -> Any:
    """What is imported when it is asked for: the estimator needs scikit-learn, and evaluating is rare."""
    if name == "HetSNGPClassifier":
        from hetsngp.estimator import HetSNGPClassifier

        return HetSNGPClassifier
    if name == "evaluate":
        from hetsngp.evaluation import evaluate

        return evaluate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "HetSNGPClassifier", "evaluate"})
