"""Features h of a data set, from one pass of the backbone: kept, so that heads are fitted without it."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from hetsngp.files import replace_file, write_tensors
from hetsngp.models.classifier import Classifier, evaluating
from hetsngp.posterior.fit import feature_batches

# Data sets whose features are remembered for a backbone: training, calibration, and one of each more.
REMEMBERED = 4


@dataclass(frozen=True)
class FeatureSet:
    """What a backbone made of a data set: h (n, D), labels y (n,) or (n, K), weight (n,) or None."""

    h: Tensor
    y: Tensor
    weight: Tensor | None = None

    def __post_init__(self) -> None:
        for name, values in (("labels", self.y), ("weights", self.weight)):
            if values is not None and len(values) != len(self.h):
                raise ValueError(f"there are {name} for {len(values)} rows, but features of {len(self.h)}")

    def __len__(self) -> int:
        return len(self.h)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, whole or not at all."""
        tensors = {"h": self.h, "y": self.y} | ({} if self.weight is None else {"weight": self.weight})
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: t.contiguous() for name, t in tensors.items()}
        replace_file(file, lambda temporary: write_tensors(tensors, temporary))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> FeatureSet:
        """What :meth:`save` wrote."""
        try:
            return FeatureSet(**load_file(Path(path)))
        except (SafetensorError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no file of FeatureSet.save: {error}") from error


def extract_features(
    model: Classifier,
    loader: Iterable[Any],
    *,
    progress: Callable[[int], None] | None = None,
    where: str = "loader",
) -> FeatureSet:
    """Run the backbone over ``loader``, which yields (x, y) or (x, y, weight), once and in eval mode.

    ``progress`` is called with the number of rows of each batch; ``where`` is the loader's name in errors.
    :func:`hetsngp.fit_head` takes the result in place of a loader, and ``model.on_features()`` predicts from
    its ``h``.
    """
    if not isinstance(model, Classifier):
        raise TypeError(f"features are those of one model of ours, got {type(model).__name__}")
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


_State = list[tuple[Tensor, int, int]]
_Entry = tuple[Any, _State, FeatureSet]
_REMEMBERED: WeakKeyDictionary[nn.Module, OrderedDict[int, _Entry]] = WeakKeyDictionary()


def remembered_features(
    model: Classifier, loader: Any, extract: Callable[[], FeatureSet] | None = None
) -> FeatureSet:
    """The features of ``loader``, the very object; from an earlier call if the backbone is as it was.

    The last few are kept for as long as the backbone lives; :func:`forget_features` lets them go.
    """
    kept = _REMEMBERED.setdefault(model.backbone, OrderedDict())
    state = _state((*model.backbone.parameters(), *model.backbone.buffers(), *_tensors_in(loader)))
    loaded, seen, features = kept.get(id(loader), (None, [], None))
    if features is None or loaded is not loader or not _same(seen, state):
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


def _tensors_in(data: Any) -> Iterator[Tensor]:
    """Those of a list of batches, whatever they are packed in; the data of a DataLoader are not seen."""
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, list | tuple | Mapping):
        for part in data.values() if isinstance(data, Mapping) else data:
            yield from _tensors_in(part)


def _state(tensors: Iterable[Tensor]) -> _State:
    """The tensors themselves, so that no other gets their place, with what a write into them changes."""
    return [(t, t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors]


def _same(before: _State, now: _State) -> bool:
    """Whether no tensor was replaced or written into (a write through ``.data`` is not seen)."""
    if len(before) != len(now):
        return False
    return all(a[0] is b[0] and a[1:] == b[1:] for a, b in zip(before, now, strict=True))
