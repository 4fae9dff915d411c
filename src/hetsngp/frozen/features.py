"""Features h of a data set from one pass of the backbone, on which any number of heads can be fitted."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hetsngp.files import replace_file, write_tensors
from hetsngp.models.classifier import Classifier, evaluating
from hetsngp.posterior.fit import feature_batches


@dataclass(frozen=True)
class FeatureSet:
    """Features of a data set: h (n, D), labels y (n,) or (n, K), weight (n,) or None."""

    h: Tensor
    y: Tensor
    weight: Tensor | None = None

    def __post_init__(self) -> None:
        for name, values in (("h", self.h), ("y", self.y), ("weight", self.weight)):
            if values is None and name == "weight":
                continue
            if not isinstance(values, Tensor) or values.dim() == 0:
                raise TypeError(
                    f"{name} of a FeatureSet must be a tensor, an example first, got {values!r:.100}"
                )
        for name, values in (("labels", self.y), ("weights", self.weight)):
            if values is not None and len(values) != len(self.h):
                raise ValueError(f"there are {name} of {len(values)} examples, but features of {len(self.h)}")

    def __len__(self) -> int:
        return len(self.h)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, atomically."""
        tensors = {"h": self.h, "y": self.y} | ({} if self.weight is None else {"weight": self.weight})
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: t.contiguous() for name, t in tensors.items()}
        replace_file(file, lambda temporary: write_tensors(tensors, temporary))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> FeatureSet:
        """Read a file of :meth:`save`."""
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"path must be the name of a file, got {type(path).__name__}")
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no file {str(path)!r}: FeatureSet.save(path) writes one")
        try:
            return FeatureSet(**load_file(Path(path)))
        except (SafetensorError, TypeError, ValueError) as error:
            raise ValueError(f"{path} was not written by FeatureSet.save: {error}") from error


def extract_features(
    model: Classifier,
    loader: Iterable[Any],
    *,
    progress: Callable[[int], None] | None = None,
    where: str = "loader",
) -> FeatureSet:
    """Run the backbone over ``loader``, which yields (x, y) or (x, y, weight), once and in eval mode.

    ``progress`` is called with the number of examples of each batch; ``where`` is the loader's name in
    errors. :func:`hetsngp.fit_head` takes the result in place of a loader, and ``model.on_features()``
    predicts from its ``h``.
    """
    if not isinstance(model, Classifier):
        raise TypeError(f"extract_features takes one model of this library, got {type(model).__name__}")
    model.on_features()  # refuses a model whose inputs share their features
    parts: list[tuple[Tensor, Tensor, Tensor | None]] = []
    with evaluating(model):
        for h, y, weight in feature_batches(model, loader, where):
            parts.append((h.cpu(), y.cpu(), None if weight is None else weight.cpu()))
            if progress is not None:
                progress(len(h))
    weights = [torch.ones(len(h)) if weight is None else weight.float() for h, _, weight in parts]
    weighted = any(weight is not None for _, _, weight in parts)
    return FeatureSet(
        torch.cat([h for h, _, _ in parts]),
        torch.cat([y for _, y, _ in parts]),
        torch.cat(weights) if weighted else None,
    )


def forget_features(model: Classifier) -> None:
    """Do nothing, with a warning: :func:`hetsngp.fit_head` no longer keeps features between calls."""
    warnings.warn(
        "forget_features does nothing: fit_head keeps no features. To compute them once for several heads, "
        "pass fit_head the result of hetsngp.extract_features(model, loader)",
        DeprecationWarning,
        stacklevel=2,
    )
