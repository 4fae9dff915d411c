"""restrict(): a model of many classes as one of some of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hetsngp.data.class_maps import NORMALISE, ClassMap
from hetsngp.evaluation.kept_parts import model_fingerprint
from hetsngp.evaluation.predictors import device_of, has_several_labels
from hetsngp.types import Prediction
from hetsngp.validation import check_choice


@dataclass(frozen=True)
class Restricted:
    """Made by :func:`restrict`."""

    model: Any
    class_map: ClassMap
    normalise: str

    def predict(self, x: Any, **how: Any) -> Prediction:
        """The model's, with ``probs`` and ``clean_probs`` of the classes of the map."""
        prediction = self.model.predict(x, **how)
        probs, clean = (
            self.class_map.apply(values, normalise=self.normalise)
            for values in (prediction.probs, prediction.clean_probs)
        )
        return replace(prediction, probs=probs, clean_probs=clean)

    def predict_probs(self, x: Any, **how: Any) -> Tensor:
        """``predict(x).probs`` alone: (B, K'), without the cost of doubt where the model has such a way."""
        cheap = getattr(self.model, "predict_probs", None)
        probs = self.model.predict(x, **how).probs if cheap is None else cheap(x, **how)
        return self.class_map.apply(probs, normalise=self.normalise)

    @property
    def num_classes(self) -> int:
        """Those of the map."""
        return self.class_map.num_classes

    @property
    def device(self) -> torch.device:
        """The model's."""
        return device_of(self.model)

    def fingerprint(self) -> str | None:
        """For :func:`hetsngp.evaluate`: of the model and of the map."""
        inner = model_fingerprint(self.model)
        if inner is None:
            return None
        own = f"{inner} {self.class_map.index.tolist()} {self.normalise}"
        return hashlib.sha256(own.encode()).hexdigest()


def restrict(model: Any, class_map: ClassMap, *, normalise: str | None = None) -> Restricted:
    """``model`` as one that chooses among the classes of ``class_map``, to be evaluated.

    For test sets with some of the training classes (ImageNet-A and -R have 200 of 1,000), or with other
    numbers for them (ImageNet-1k for a network of the 21k classes). How the probabilities that are left add
    up to one again is ``normalise``, see :meth:`hetsngp.data.class_maps.ClassMap.apply`; None: by the model's
    link. The measures of doubt stay the model's own, over all its classes.

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
        normalise = "sigmoid" if has_several_labels(model) else "softmax"
    return Restricted(model, class_map, check_choice("normalise", normalise, NORMALISE))
