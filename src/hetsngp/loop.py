"""The plain-torch training loop: knows only ``loss``. The distributed engine wraps the same steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hetsngp.model import Classifier, Ensemble
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
    groups = [group for member in model.members for group in member.parameter_groups(weight_decay)]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    _set_dataset_size(model, loader)
    device = model.members[0].temperature.device
    model.train()
    history: list[float] = []
    for epoch in range(epochs):
        total, seen = 0.0, 0
        for batch in loader:
            x, y = check_batch(batch, "loader")
            x, y = x.to(device), y.to(device)
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
    size = len(data) if (data := getattr(loader, "dataset", None)) is not None else None
    for member in model.members:
        if member.dataset_size is None:
            member.dataset_size = size if size is not None else sum(len(y) for _, y in loader)
