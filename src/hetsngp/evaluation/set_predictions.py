"""Predictions of a data set, reduced to a few numbers for each example, whatever the number of classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetsngp import metrics
from hetsngp.evaluation.predictors import Predictor
from hetsngp.functional.uncertainty import binary_entropy, entropy
from hetsngp.metrics.probabilities import check_probs
from hetsngp.types import Prediction
from hetsngp.validation import check_batch, check_loader, is_device_loader

SCORES = (
    "ood_score",
    "total_uncertainty",
    "data_uncertainty",
    "model_uncertainty",
    "function_uncertainty",
    "member_uncertainty",
    "latent_variance",
    "one_minus_confidence",
)
"""Every uncertainty score of a :class:`hetsngp.Prediction`; higher is more uncertain."""
OF_PROBS = ("total_uncertainty", "one_minus_confidence")
"""Scores that follow from the probabilities; for a restricted model only the second."""


@dataclass(frozen=True, eq=False)
class SetPredictions:
    """Values of n examples in order, each (n,), in float64 on the CPU; None without such labels."""

    num_classes: int
    confidence: Tensor
    scores: Mapping[str, Tensor]
    """By the names in :data:`SCORES`; of probabilities alone only those in :data:`OF_PROBS`."""
    correct: Tensor | None = None
    """Whether the most probable class is the label, or among the labels: bool."""
    nll: Tensor | None = None
    """−log p(label); for multi-label data the sum over classes."""
    brier: Tensor | None = None
    """Σ_k (p_k − [k = label])²; None for multi-label data."""

    def __len__(self) -> int:
        return len(self.confidence)

    def arrays(self) -> dict[str, np.ndarray]:
        """Arrays for a file."""
        values = {"confidence": self.confidence, "correct": self.correct, "nll": self.nll}
        values |= {"brier": self.brier, **{f"score.{name}": score for name, score in self.scores.items()}}
        found = {name: value.numpy() for name, value in values.items() if value is not None}
        return {"num_classes": np.array(self.num_classes), **found}

    @staticmethod
    def of_arrays(arrays: Mapping[str, np.ndarray]) -> SetPredictions:
        """Predictions from the result of :meth:`arrays`."""
        scores = {name: torch.from_numpy(arrays[f"score.{name}"]) for name in SCORES}
        rest = {
            name: torch.from_numpy(arrays[name]) if name in arrays else None
            for name in ("correct", "nll", "brier")
        }
        confidence = torch.from_numpy(arrays["confidence"])
        return SetPredictions(int(arrays["num_classes"]), confidence, scores, **rest)


class EvaluationBatches:
    """Batches of a loader, of which the first is read before anything is predicted.

    ``where`` names the loader in errors. A loader of ours that augments gives its images unaugmented.
    """

    def __init__(self, loader: Any, where: str) -> None:
        check_loader(loader, where)
        self.loader = loader.clean() if is_device_loader(loader) else loader
        self.where = where
        self._rest = iter(self.loader)
        try:
            self.first = next(self._rest)
        except StopIteration:
            raise ValueError(
                f"{where} is empty: it yielded no batch; give a loader with data, not a used-up iterator"
            ) from None

    def labelled(self) -> Iterator[tuple[Any, Any]]:
        """Yield (x, y) of each batch, once."""
        for batch in self._all():
            x, y, weight = check_batch(batch, self.where)
            if weight is not None:
                raise ValueError(
                    f"{self.where} yields weights, but evaluate counts each example once: give (x, y)"
                )
            yield x, y

    def inputs(self) -> Iterator[tuple[Any, None]]:
        """Yield (x, None) of each batch, once; batches are x, or (x, y) whose labels are ignored."""
        for batch in self._all():
            if isinstance(batch, Mapping):
                yield {k: v for k, v in batch.items() if k not in ("labels", "label", "label_ids")}, None
            else:
                yield batch[0] if isinstance(batch, tuple | list) else batch, None

    def _all(self) -> Iterator[Any]:
        yield self.first
        yield from self._rest


def predict_batches(
    predictor: Predictor,
    batches: EvaluationBatches,
    *,
    labelled: bool,
    uncertainty: bool = True,
    generator: torch.Generator | None = None,
    on_batch: Callable[[int], None] = lambda examples: None,
) -> SetPredictions:
    """Predict all batches; ``on_batch`` gets the number of examples of each.

    Without ``uncertainty`` the probabilities alone are predicted.
    """
    parts: list[dict[str, Tensor]] = []
    classes: int | None = None
    for x, y in batches.labelled() if labelled else batches.inputs():
        try:
            prediction = predictor.predict(x, generator) if uncertainty else None
            probs = predictor.probs(x, generator) if prediction is None else prediction.probs
            labels = predictor.labels(y, probs) if labelled else None
            check_probs(probs, total=predictor.total(labels))
            values = _reduce(probs, labels)
            if prediction is not None:
                values |= _uncertainties(prediction)
            elif not predictor.is_restricted:
                values["total_uncertainty"] = _entropy(probs, labels)
            parts.append(values)
        except Exception as error:
            if error.args and isinstance(error.args[0], str):  # another type of error keeps its arguments
                error.args = (f"{batches.where}: {error.args[0]}", *error.args[1:])
            raise
        classes = classes or probs.shape[-1]
        on_batch(len(probs))
    assert classes is not None
    values = {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}
    values = {name: v if v.dtype == torch.bool else v.double() for name, v in values.items()}
    # In float64: with many classes float32 would make ties of small confidences.
    values["one_minus_confidence"] = 1 - values["confidence"]
    _check(values, batches.where)
    scores = {name: values.pop(name) for name in SCORES if name in values}
    return SetPredictions(classes, scores=scores, **values)


def _uncertainties(prediction: Prediction) -> dict[str, Tensor]:
    # Copies: a column of a larger tensor would keep all of it.
    return {name: getattr(prediction, name).clone() for name in SCORES[:-1]}


def _entropy(probs: Tensor, labels: Tensor | None) -> Tensor:
    return binary_entropy(probs) if labels is not None and labels.dim() == 2 else entropy(probs)


def _reduce(probs: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
    if labels is None:
        return {"confidence": probs.amax(-1)}
    values = metrics.example_terms(probs, labels)._asdict()
    return values if labels.dim() == 2 else values | {"brier": metrics.brier_terms(probs, labels)}


def _check(values: Mapping[str, Tensor], where: str) -> None:
    for name, value in values.items():
        bad = ~value.double().isfinite()
        if bool(bad.any()):
            raise ValueError(
                f"{where}: {name} is NaN or infinite, first in example {int(bad.int().argmax())}: check "
                "that input, and whether training diverged; after a repair fit the posterior again"
            )
