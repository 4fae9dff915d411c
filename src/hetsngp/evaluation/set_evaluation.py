"""Predictions and numbers of one data set after another, each computed once and cached."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hetsngp.evaluation.cache import ResultCache, fingerprint_of
from hetsngp.evaluation.fingerprints import data_fingerprint, environment_fingerprint
from hetsngp.evaluation.predictors import Predictor
from hetsngp.evaluation.scores import CorruptedSet, Quality, mean_scores, quality
from hetsngp.evaluation.set_predictions import EvaluationBatches, SetPredictions, predict_batches
from hetsngp.fitting.progress import ExampleProgress
from hetsngp.models.loader_counts import num_batches


@dataclass(frozen=True)
class SetEvaluator:
    """A model on one set after another. What ``cache`` holds of an earlier call is not computed again."""

    predictor: Predictor
    cache: ResultCache | None
    model_fingerprint: str | None
    """None where models cannot be compared: nothing is cached."""
    seed: int | None
    num_bins: int
    fresh: bool
    """Whether results of earlier calls are computed again."""
    progress: EvaluationProgress

    def predictions(self, loader: Any, name: str, *, labelled: bool) -> SetPredictions:
        """Predictions of every example of ``loader``."""
        batches = EvaluationBatches(loader, name)
        fingerprint = self._fingerprint(name, batches)
        found = None
        if self.cache is not None and not self.fresh:
            found = self.cache.read_arrays(name, fingerprint)
        if found is not None:
            predictions = SetPredictions.of_arrays(found)
            self.progress.skip(name, len(predictions))
            return predictions
        predictions = self._predict(batches, labelled=labelled)
        if self.cache is not None:
            self.cache.write_arrays(name, fingerprint, predictions.arrays())
        return predictions

    def corrupted(
        self, sets: Mapping[tuple[str, int], Any], key: tuple[str, int], uncertainty: bool
    ) -> CorruptedSet:
        """Numbers of a corrupted set; predictions of every example of 75 sets would fill the disk."""
        corruption, severity = key[0], operator.index(key[1])  # NumPy's are no int
        name = f"corrupted[{corruption!r}, {severity}]"
        # A mapping with this method need not make a set to say which it is.
        method = getattr(sets, "fingerprint", None)
        known = method(key) if callable(method) else None
        # No name for the loader here: it must be gone before the next is made.
        data: str | EvaluationBatches = EvaluationBatches(sets[key], name) if known is None else str(known)
        fingerprint = self._fingerprint(name, data, self.num_bins, uncertainty)
        numbers = None
        if self.cache is not None and not self.fresh:
            numbers = self.cache.read(name, fingerprint)
        if numbers is not None:
            self.progress.skip(name, numbers["quality"]["examples"])
        else:
            batches = EvaluationBatches(sets[key], name) if isinstance(data, str) else data
            predictions = self._predict(batches, labelled=True, uncertainty=uncertainty)
            numbers = {
                "quality": asdict(quality(predictions, self.num_bins)),
                "scores": mean_scores(predictions),
            }
            if self.cache is not None:
                self.cache.write(name, fingerprint, numbers)
        return CorruptedSet(corruption, severity, Quality(**numbers["quality"]), numbers["scores"])

    def _fingerprint(
        self,
        name: str,
        data: EvaluationBatches | str,
        num_bins: int | None = None,
        uncertainty: bool = True,
    ) -> str | None:
        """Hash of all that decides the result of a set, or None; a string stands for its data."""
        if self.cache is None or self.model_fingerprint is None:
            return None
        of_data = data if isinstance(data, str) else data_fingerprint(data)
        if of_data is None:
            return None
        settings = [self.predictor.num_samples, self.seed, num_bins, uncertainty]
        return fingerprint_of(environment_fingerprint(), self.model_fingerprint, settings, name, of_data)

    def _predict(
        self, batches: EvaluationBatches, *, labelled: bool, uncertainty: bool = True
    ) -> SetPredictions:
        self.progress.begin(batches.where, num_batches(batches.loader))
        predictions = predict_batches(
            self.predictor,
            batches,
            labelled=labelled,
            uncertainty=uncertainty,
            generator=self._generator(batches.where),
            on_batch=self.progress.batch,
        )
        self.progress.add(0)
        return predictions

    def _generator(self, name: str) -> torch.Generator | None:
        """A generator for each set, so that a set that is skipped changes no other."""
        if self.seed is None:
            return None
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


class EvaluationProgress(ExampleProgress):
    """Sets that are done, and how far the current one is. Silent unless ``show``."""

    def __init__(self, sets: int, show: bool) -> None:
        super().__init__("evaluating", sets, show)
        self._num_batches: int | None = None
        self._batches_done = 0

    def begin(self, name: str, batches: int | None) -> None:
        """Start the next set, of so many ``batches``."""
        self.title, self._num_batches, self._batches_done = name, batches, 0

    def batch(self, examples: int) -> None:
        """Count a batch."""
        self.examples, self._batches_done = self.examples + examples, self._batches_done + 1
        if self.bar is not None:
            share = min(1.0, self._batches_done / self._num_batches) if self._num_batches else 0.0
            self.bar.update(self.task, completed=self.done + share, description=self._text)

    def skip(self, name: str, examples: int) -> None:
        """Count a set that was cached."""
        self.title = f"{name} (cached)"
        self.add(examples)
