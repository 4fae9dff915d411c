"""Features h of a data set, from one pass of the backbone: kept, so that heads are fitted without it."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hetsngp.model import Classifier, evaluating
from hetsngp.posterior import feature_batches

# Data sets whose features are remembered for a backbone: training, calibration, and one of each more.
REMEMBERED = 4


@dataclass(frozen=True)
class FeatureSet:
    """What a backbone made of a data set: h (n, D), labels y (n,) or (n, K), weight (n,) or None."""

    h: Tensor
    y: Tensor
    weight: Tensor | None = None

    def __len__(self) -> int:
        return len(self.h)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, whole or not at all."""
        tensors = {"h": self.h, "y": self.y} | ({} if self.weight is None else {"weight": self.weight})
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.writing-{os.getpid()}")
        try:
            save_file({name: t.contiguous() for name, t in tensors.items()}, temporary)
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> FeatureSet:
        """What :meth:`save` wrote."""
        try:
            return FeatureSet(**load_file(Path(path)))
        except (SafetensorError, TypeError) as error:
            raise ValueError(f"{path} is no file of FeatureSet.save: {error}") from error


def extract_features(
    model: Classifier, loader: Iterable[Any], *, progress: Callable[[int], None] | None = None
) -> FeatureSet:
    """Run the backbone over ``loader``, which yields (x, y) or (x, y, weight), once and in eval mode.

    ``progress`` is called with the number of rows of each batch. :func:`hetsngp.fit_head` takes the result in
    place of a loader; ``model.on_features().predict(features.h)`` predicts from it.
    """
    model.on_features()  # refuses a model whose inputs share their features
    parts: list[tuple[Tensor, Tensor, Tensor | None]] = []
    with evaluating(model):
        for h, y, weight in feature_batches(model, loader, "loader"):
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


_Entry = tuple[Any, tuple[tuple[int, int], ...], FeatureSet]
_REMEMBERED: WeakKeyDictionary[nn.Module, OrderedDict[int, _Entry]] = WeakKeyDictionary()


def remembered_features(
    model: Classifier, loader: Any, extract: Callable[[], FeatureSet] | None = None
) -> FeatureSet:
    """The features of ``loader``, the very object; from an earlier call if the backbone is as it was.

    The last few are kept for as long as the backbone lives; :func:`forget_features` lets them go.
    """
    kept = _REMEMBERED.setdefault(model.backbone, OrderedDict())
    state = _state(model.backbone)
    loaded, seen, features = kept.get(id(loader), (None, (), None))
    if features is None or loaded is not loader or seen != state:
        features = extract_features(model, loader) if extract is None else extract()
        # With the loader itself, so that no other object gets its id.
        kept[id(loader)] = (loader, state, features)
    kept.move_to_end(id(loader))
    while len(kept) > REMEMBERED:
        kept.popitem(last=False)
    return features


def forget_features(model: Classifier) -> None:
    """Let go of what :func:`hetsngp.fit_head` remembers of the model's backbone."""
    _REMEMBERED.pop(model.backbone, None)


def _state(backbone: nn.Module) -> tuple[tuple[int, int], ...]:
    """Changes with every tensor that is replaced or written into (except through ``.data``)."""
    tensors = (*backbone.parameters(), *backbone.buffers())
    return tuple((id(t), 0 if t.is_inference() else t._version) for t in tensors)
