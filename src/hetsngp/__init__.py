"""Calibrated classifiers with two separate uncertainties: noisy labels, and inputs unlike the training data.

Every name is imported when it is first used: ``import hetsngp`` loads nothing, and the command line can print
its help without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hetsngp import _moved

if TYPE_CHECKING:
    from hetsngp.conversion import Conversion as Conversion
    from hetsngp.conversion import convert as convert
    from hetsngp.estimator import HetSNGPClassifier as HetSNGPClassifier
    from hetsngp.evaluation import evaluate as evaluate
    from hetsngp.frozen import FeatureSet as FeatureSet
    from hetsngp.frozen import correct_labels as correct_labels
    from hetsngp.frozen import extract_features as extract_features
    from hetsngp.frozen import fit_head as fit_head
    from hetsngp.frozen import forget_features as forget_features
    from hetsngp.frozen import out_of_sample_probs as out_of_sample_probs
    from hetsngp.io import ArtifactError as ArtifactError
    from hetsngp.io import load as load
    from hetsngp.io import save as save
    from hetsngp.labels import LabelErrors as LabelErrors
    from hetsngp.labels import class_confusions as class_confusions
    from hetsngp.labels import find_label_errors as find_label_errors
    from hetsngp.models import Classifier as Classifier
    from hetsngp.models import Ensemble as Ensemble
    from hetsngp.models import MultiInput as MultiInput
    from hetsngp.models import build as build
    from hetsngp.models import build_ensemble as build_ensemble
    from hetsngp.posterior import PosteriorReport as PosteriorReport
    from hetsngp.posterior import fit_posterior as fit_posterior
    from hetsngp.types import LatentNormal as LatentNormal
    from hetsngp.types import Prediction as Prediction
    from hetsngp.types import UtilityNormal as UtilityNormal
    from hetsngp.validation import PosteriorNotFittedError as PosteriorNotFittedError

__version__ = "0.1.0"

_HOMES = {
    "ArtifactError": "io",
    "Classifier": "models",
    "Conversion": "conversion",
    "Ensemble": "models",
    "FeatureSet": "frozen",
    "HetSNGPClassifier": "estimator",
    "LabelErrors": "labels",
    "LatentNormal": "types",
    "MultiInput": "models",
    "PosteriorNotFittedError": "validation",
    "PosteriorReport": "posterior",
    "Prediction": "types",
    "UtilityNormal": "types",
    "build": "models",
    "build_ensemble": "models",
    "class_confusions": "labels",
    "convert": "conversion",
    "correct_labels": "frozen",
    "evaluate": "evaluation",
    "extract_features": "frozen",
    "find_label_errors": "labels",
    "fit_head": "frozen",
    "fit_posterior": "posterior",
    "forget_features": "frozen",
    "load": "io",
    "out_of_sample_probs": "frozen",
    "save": "io",
}

# Without HetSNGPClassifier: `from hetsngp import *` must work where scikit-learn is not installed.
__all__ = [
    "ArtifactError",
    "Classifier",
    "Conversion",
    "Ensemble",
    "FeatureSet",
    "LabelErrors",
    "LatentNormal",
    "MultiInput",
    "PosteriorNotFittedError",
    "PosteriorReport",
    "Prediction",
    "UtilityNormal",
    "build",
    "build_ensemble",
    "class_confusions",
    "convert",
    "correct_labels",
    "evaluate",
    "extract_features",
    "find_label_errors",
    "fit_head",
    "fit_posterior",
    "forget_features",
    "load",
    "out_of_sample_probs",
    "save",
]

_moved.install()


if not TYPE_CHECKING:  # or a type checker would accept every name

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            value = getattr(importlib.import_module(f"hetsngp.{_HOMES[name]}"), name)
            globals()[name] = value
            return value
        return _moved.submodule(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
