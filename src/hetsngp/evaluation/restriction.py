"""restrict(): a model of many classes that chooses among some of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hetsngp.data.class_maps import NORMALISE, ClassMap
from hetsngp.evaluation.fingerprints import model_fingerprint
from hetsngp.evaluation.predictors import device_of, is_multi_label
from hetsngp.types import Prediction
from hetsngp.validation import check_choice


@dataclass(frozen=True)
class Restricted:
    """Result of :func:`restrict`."""

    model: Any
    class_map: ClassMap
    normalise: str

    def predict(self, x: Any, **how: Any) -> Prediction:
        """Prediction of the model, with ``probs`` and ``clean_probs`` of the classes of the map."""
        prediction = self.model.predict(x, **how)
        probs, clean = (
            self.class_map.apply(values, normalise=self.normalise)
            for values in (prediction.probs, prediction.clean_probs)
        )
        return replace(prediction, probs=probs, clean_probs=clean)

    def predict_probs(self, x: Any, **how: Any) -> Tensor:
        """Probabilities ``predict(x).probs`` alone: (B, K'), without uncertainties if possible."""
        cheap = getattr(self.model, "predict_probs", None)
        probs = self.model.predict(x, **how).probs if cheap is None else cheap(x, **how)
        return self.class_map.apply(probs, normalise=self.normalise)

    @property
    def num_classes(self) -> int:
        """Number of classes of the map."""
        return self.class_map.num_classes

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return device_of(self.model)

    def fingerprint(self) -> str | None:
        """Fingerprint of the model and the map, for :func:`hetsngp.evaluate`."""
        inner = model_fingerprint(self.model)
        if inner is None:
            return None
        own = f"{inner} {self.class_map.index.tolist()} {self.normalise}"
        return hashlib.sha256(own.encode()).hexdigest()


def restrict(model: Any, class_map: ClassMap, *, normalise: str | None = None) -> Restricted:
    """Make ``model`` choose among the classes of ``class_map``, to be evaluated.

    For test sets with some of the training classes (ImageNet-A and -R have 200 of 1,000), or with other
    numbers for them (ImageNet-1k for a network of the 21k classes). How the probabilities that are left add
    up to one again is ``normalise``, see :meth:`hetsngp.data.class_maps.ClassMap.apply`; None: by the model's
    link. Uncertainties stay those over all classes of the model.

    >>> import hetsngp, torch
    >>> from hetsngp.nn.backbones import ResidualMLP
    >>> model = hetsngp.build("deterministic", ResidualMLP(2, width=8, depth=1), 3)
    >>> some = restrict(model, ClassMap(torch.tensor([2, 0]), ("owl", "cat"), num_inputs=3))
    >>> some.predict(torch.zeros(4, 2)).probs.shape
    torch.Size([4, 2])
    """
    if not isinstance(class_map, ClassMap):
        raise TypeError(
            "restrict takes a hetsngp.data.class_maps.ClassMap, e.g. ClassMap.between(names of the model, "
            f"names of the data), got {type(class_map).__name__}"
        )
    if not callable(getattr(model, "predict", None)) or hasattr(model, "predict_uncertainty"):
        raise TypeError(f"restrict takes a model with predict(x) -> Prediction, got {type(model).__name__}")
    if normalise is None:
        normalise = "sigmoid" if is_multi_label(model) else "softmax"
    return Restricted(model, class_map, check_choice("normalise", normalise, NORMALISE))
