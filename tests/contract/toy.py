"""Small problems and small models that the contract tests share; everything is seeded."""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hetsngp
from hetsngp.models.methods import METHODS
from hetsngp.nn.backbones import ResidualMLP
from hetsngp.nn.extractor import Features
from hetsngp.nn.heads import GaussianHead, Head
from hetsngp.types import Prediction

TINY: dict[str, Any] = {"random_features": 32, "rank": 2}
FIELDS = tuple(f.name for f in fields(Prediction))


def blobs(
    classes: int = 3, per_class: int = 12, *, flip: float = 0.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Gaussian blobs on a circle of radius 3; ``flip`` of the labels are replaced by random ones."""
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(classes).repeat(per_class)
    angle = 2 * math.pi * y / classes
    x = 3 * torch.stack([angle.cos(), angle.sin()], 1) + 0.7 * torch.randn(len(y), 2, generator=g)
    noisy = torch.rand(len(y), generator=g) < flip
    return x, torch.where(noisy, torch.randint(classes, y.shape, generator=g), y)


def frozen(method: str = "sngp", classes: int = 3, **options: Any) -> hetsngp.Classifier:
    """Small frozen network, converted; the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, classes))
    every: dict[str, Any] = {"random_features": 64, "rank": 1, **options}
    every["generator"] = torch.Generator().manual_seed(0)
    return hetsngp.convert(net, method, torch.zeros(2, 2), num_classes=classes, freeze=True, **every)


def inducing(x: Tensor, method: str = "sngp", classes: int = 3, **options: Any) -> hetsngp.Classifier:
    """Model in float64 on inducing features made from x (n, D)."""
    every: dict[str, Any] = {"features": "inducing", "amplitude": 3.0, "normalization": None, "rank": 1}
    every |= {"generator": torch.Generator().manual_seed(0), "dataset_size": len(x), **options}
    model = hetsngp.build(method, Features(x.shape[1], "mlp"), classes, **every).double()
    model.head.adapt(x.double(), generator=torch.Generator().manual_seed(0))
    return model


def loader(x: Tensor, y: Tensor, batch_size: int = 12) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all tensors of a model."""
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def same_weights(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """:func:`same_weights`, with the names of those that differ."""
    assert a.keys() == b.keys()
    assert [name for name, t in a.items() if not torch.equal(t, b[name])] == []


def labels_for(y: Tensor, classes: int, options: dict[str, Any]) -> Tensor:
    """Labels in the form that the link takes."""
    return torch.nn.functional.one_hot(y, classes).float() if options.get("link") == "sigmoid" else y


def backbone(width: int = 16, depth: int = 1, inputs: int = 2) -> ResidualMLP:
    return ResidualMLP(inputs, width=width, depth=depth, generator=torch.Generator().manual_seed(1))


def build(method: str, classes: int = 3, **options: Any) -> hetsngp.Classifier:
    """A fresh tiny model; the same call gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return hetsngp.build(
            method, backbone(), num_classes=classes, **{**TINY, "dataset_size": 12 * classes, **options}
        )


def _noisy(head: Head) -> bool:
    return getattr(head, "noise", None) is not None


# What the methods are, as their heads say: a new one in METHODS is tested as what it is.
HEADS: dict[str, Head] = {method: build(method).head for method in METHODS}
GAUSSIAN = tuple(method for method, head in HEADS.items() if isinstance(head, GaussianHead))
GP = tuple(method for method, head in HEADS.items() if head.has_posterior)
NOISY = tuple(method for method, head in HEADS.items() if _noisy(head))
MIXTURES = tuple(method for method, head in HEADS.items() if head.num_members > 1)
LINKED = [*((method, "softmax") for method in METHODS), *((method, "sigmoid") for method in GAUSSIAN)]
"""Every method with every link it has."""


def alike(model: Any) -> Any:
    """Give all members of ``model`` the same inputs in training too, so that the loss is deterministic."""
    model.input_repetition = 1.0
    return model


def descend(model: Any, x: Tensor, y: Tensor, steps: int, lr: float = 0.02) -> list[float]:
    """Full-batch Adam on ``model.loss``; the losses on the way."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    g = torch.Generator().manual_seed(3)
    history = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model.loss(x, y, generator=g)
        loss.backward()
        optimizer.step()
        history.append(float(loss.detach()))
    return history


@functools.cache
def _trained(method: str, classes: int, fit: bool, flip: float, options: tuple[tuple[str, Any], ...]) -> Any:
    model = build(method, classes, **dict(options))
    x, y = blobs(classes, flip=flip)
    y = labels_for(y, classes, dict(options))
    descend(model, x, y, steps=25)
    if fit:
        hetsngp.fit_posterior(model, loader(x, y))
    return model.eval()


def trained(method: str, classes: int = 3, *, fit: bool = True, flip: float = 0.0, **options: Any) -> Any:
    """A copy of a model trained for a moment on :func:`blobs`, with its posterior (``fit``)."""
    return copy.deepcopy(_trained(method, classes, fit, flip, tuple(sorted(options.items()))))


def same_bits(a: Prediction, b: Prediction) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in FIELDS)
