"""The plain-torch training loop: knows only ``loss``. The distributed engine wraps the same steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hetsngp.model import Classifier, Ensemble, to_device
from hetsngp.validation import check_batch, check_positive


@dataclass(frozen=True)
class EpochResult:
    """What the callback of :func:`train` gets."""

    epoch: int
    epochs: int
    loss: float


def train(
    model: Classifier | Ensemble,
    loader: Iterable[Any],
    *,
    epochs: int,
    lr: float = 1e-3,
    weight_decay: float = 1e-4,
    generator: torch.Generator | None = None,
    on_epoch: Callable[[EpochResult], None] | None = None,
) -> list[float]:
    """AdamW on ``model.loss`` with a cosine schedule; returns the mean loss of each epoch.

    Where a model has no ``dataset_size`` it gets the loader's, so that the prior has its weight.
    """
    check_positive("epochs", epochs, integer=True)
    check_positive("lr", lr)
    optimizer = torch.optim.AdamW(model.parameter_groups(weight_decay), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    _set_dataset_size(model, loader)
    device = model.members[0].temperature.device
    model.train()
    history: list[float] = []
    for epoch in range(epochs):
        total, seen = 0.0, 0
        for batch in loader:
            x, y = check_batch(batch, "loader")
            x, y = to_device(x, device), to_device(y, device)
            optimizer.zero_grad(set_to_none=True)
            loss = model.loss(x, y, generator=generator)
            loss.backward()
            optimizer.step()
            value = float(loss.detach())
            if value != value:
                raise FloatingPointError(f"the loss is NaN in epoch {epoch + 1}: lower lr (now {lr:g})")
            total, seen = total + value * len(y), seen + len(y)
        if seen == 0:
            raise ValueError("loader is empty: it yielded no batch")
        schedule.step()
        history.append(total / seen)
        if on_epoch is not None:
            on_epoch(EpochResult(epoch + 1, epochs, history[-1]))
    model.eval()
    return history


def _set_dataset_size(model: Classifier | Ensemble, loader: Iterable[Any]) -> None:
    """From a loader that knows its size; for a stream the loss says that it leaves the prior out."""
    data: Any = getattr(loader, "dataset", loader)
    if not hasattr(data, "__len__"):
        return
    size = len(data) if data is not loader else sum(len(check_batch(b, "loader")[1]) for b in data)
    for member in model.members:
        if member.dataset_size is None:
            member.dataset_size = size
