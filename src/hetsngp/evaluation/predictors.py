"""One interface to everything that predicts: tensors out, class numbers for labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hetsngp.models.classifier import map_batch, to_device
from hetsngp.types import Prediction
from hetsngp.validation import check_class_labels, check_multi_hot


@dataclass(frozen=True)
class Predictor:
    """A model with ``predict(x) -> Prediction``, or our scikit-learn estimator, with prediction settings."""

    model: Any
    num_samples: int | None = None

    def __post_init__(self) -> None:
        if not self._is_estimator and not callable(getattr(self.model, "predict", None)):
            raise TypeError(
                f"evaluate needs a model with predict(x) that returns a hetsngp.Prediction, and "
                f"{type(self.model).__name__} has no predict: hetsngp.convert or hetsngp.build make one"
            )
        if self._is_estimator and self.num_samples is not None:
            raise TypeError("num_samples of an estimator is set when it is made: HetSNGPClassifier(...)")

    @property
    def _is_estimator(self) -> bool:
        return hasattr(self.model, "predict_uncertainty")

    @property
    def device(self) -> torch.device:
        """Device of its inputs."""
        return device_of(self.model)

    @property
    def multi_hot(self) -> bool | None:
        """Whether examples are multi-label, by the model's link; None: the labels decide."""
        return is_multi_label(self.model)

    def predict(self, x: Any, generator: torch.Generator | None = None) -> Prediction:
        """Predict a batch, as tensors; a network gets its NumPy arrays as tensors too."""
        if self._is_estimator:
            if generator is not None:
                raise TypeError("an estimator predicts at fixed points: leave generator out")
            inputs = x.numpy(force=True) if isinstance(x, Tensor) else x
            return self.model.predict_uncertainty(inputs).map(torch.as_tensor)
        prediction = self._ask("predict", x, generator)
        if not isinstance(prediction, Prediction):
            raise TypeError(
                f"{type(self.model).__name__}.predict must return a hetsngp.Prediction, got "
                f"{type(prediction).__name__}: hetsngp.convert or hetsngp.build make a model that does"
            )
        if not isinstance(prediction.probs, Tensor):
            prediction = prediction.map(torch.as_tensor)
        return prediction

    @property
    def has_probs(self) -> bool:
        """Whether the model predicts probabilities without uncertainties, which cost most."""
        return not self._is_estimator and callable(getattr(self.model, "predict_probs", None))

    @property
    def is_restricted(self) -> bool:
        """Whether classes were removed from the probabilities; uncertainties stay those over all classes."""
        return getattr(self.model, "normalise", None) is not None

    def probs(self, x: Any, generator: torch.Generator | None = None) -> Tensor:
        """Probabilities ``predict(x).probs`` of a batch alone: (B, K)."""
        return torch.as_tensor(self._ask("predict_probs", x, generator))

    def _ask(self, method: str, x: Any, generator: torch.Generator | None) -> Any:
        given = {"num_samples": self.num_samples, "generator": generator}
        given = {name: value for name, value in given.items() if value is not None}
        network = self.model if isinstance(self.model, nn.Module) else getattr(self.model, "model", None)
        if isinstance(network, nn.Module):  # itself, or the model given to restrict()
            x = _as_tensors(x, network)
        with torch.no_grad():
            return getattr(self.model, method)(to_device(x, self.device), **given)

    def labels(self, y: Any, probs: Tensor) -> Tensor:
        """Labels of the batch, on the device of its probabilities (B, K): (B,), or multi-hot (B, K)."""
        batch, classes = probs.shape
        if self._is_estimator:
            y = self._class_numbers(y)
        y = to_device(torch.as_tensor(y) if isinstance(y, np.ndarray) else y, probs.device)
        multi_hot = self.multi_hot
        if multi_hot is None:
            multi_hot = isinstance(y, Tensor) and y.dim() == 2
        elif not multi_hot and isinstance(y, Tensor) and y.dim() == 2:
            raise ValueError(
                f"y has shape {tuple(y.shape)}, but this model gives an example one label: class numbers "
                f"({batch},) are expected; for votes see hetsngp.metrics.vote_nll, for multi-label data "
                "build with link='sigmoid'"
            )
        return check_multi_hot(y, classes, batch) if multi_hot else check_class_labels(y, classes, batch)

    def total(self, labels: Tensor | None) -> str:
        """Sum of an example's probabilities: "one"; for multi-label data "any"; "part" of one where some
        classes were removed.
        """
        multi_hot = self.multi_hot if labels is None else labels.dim() == 2
        if multi_hot is None or multi_hot:
            return "any"
        return "part" if getattr(self.model, "normalise", None) == "none" else "one"

    def _class_numbers(self, y: Any) -> Tensor:
        """Class numbers of labels that the estimator was fitted with."""
        classes = self.model.classes_
        values = y.numpy(force=True) if isinstance(y, Tensor) else np.asarray(y)
        codes = np.searchsorted(classes, values).clip(max=len(classes) - 1)
        unknown = classes[codes] != values
        if unknown.any():
            raise ValueError(
                f"y holds {values[unknown][0]!r}, which is none of the estimator's classes_: leave such "
                "examples out, or give them as ood"
            )
        return torch.as_tensor(codes)


def _as_tensors(x: Any, network: nn.Module) -> Any:
    """NumPy arrays as tensors, floating-point ones in the dtype of the network's parameters."""
    dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), None)

    def as_tensor(part: Any) -> Any:
        if not isinstance(part, np.ndarray):
            return part
        if part.dtype.kind not in "biuf":
            raise TypeError(f"x is an array of {part.dtype}, which a network does not take: give it numbers")
        return torch.as_tensor(part, dtype=dtype if part.dtype.kind == "f" else None)

    return map_batch(x, as_tensor)


def is_multi_label(model: Any) -> bool | None:
    """Whether the model's link is the sigmoid; None where it has no head that says so."""
    members = getattr(model, "members", None)
    return getattr(getattr(members[0] if members else model, "head", None), "sigmoid", None)


def device_of(model: Any) -> torch.device:
    """Device of a network's tensors, or the attribute ``device`` of another object; else the CPU."""
    if isinstance(model, nn.Module):
        for tensor in (*model.parameters(), *model.buffers()):
            return tensor.device
    return torch.device(getattr(model, "device", None) or "cpu")
