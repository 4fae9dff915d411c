"""The plain-torch training loop: knows only ``loss``. The distributed engine wraps the same steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hetsngp.model import Classifier, Ensemble, evaluating, to_device
from hetsngp.validation import check_batch, check_positive


@dataclass(frozen=True)
class EpochResult:
    """What the callback of :func:`train` gets; ``held_out`` is the NLL on ``validation``, if any."""

    epoch: int
    epochs: int
    loss: float
    held_out: float | None = None


def train(
    model: Classifier | Ensemble,
    loader: Iterable[Any],
    *,
    epochs: int,
    lr: float = 1e-3,
    weight_decay: float = 1e-4,
    generator: torch.Generator | None = None,
    on_epoch: Callable[[EpochResult], None] | None = None,
    validation: Iterable[Any] | None = None,
    patience: int | None = None,
    gp_lr: float = 1.0,
) -> list[EpochResult]:
    """AdamW on ``model.loss`` with a cosine schedule; returns the loss of each epoch.

    Loaders yield (x, y) or (x, y, weight). Where a model has no ``dataset_size`` it gets the loader's, so
    that the prior has its weight. With ``validation`` the model ends with the weights of the epoch whose NLL
    was lowest there, and training stops after ``patience`` epochs that brought nothing lower. ``gp_lr`` is a
    factor on the rate of the GP's weights, whose natural size is one where a network's is 1/√width.
    """
    check_positive("epochs", epochs, integer=True)
    check_positive("lr", lr)
    if patience is not None:
        check_positive("patience", patience, integer=True)
        if validation is None:
            raise ValueError("patience needs a validation loader to watch: train(..., validation=held_out)")
    groups = [
        {**group, "lr": lr * (gp_lr if group.get("has_prior") else 1.0)}
        for group in model.parameter_groups(weight_decay)
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    _set_dataset_size(model, loader)
    best = _Best(model)
    model.train()
    history: list[EpochResult] = []
    for epoch in range(1, epochs + 1):
        loss = _one_epoch(model, loader, optimizer, generator, epoch)
        schedule.step()
        held_out = None if validation is None else mean_nll(model, validation)
        history.append(EpochResult(epoch, epochs, loss, held_out))
        if on_epoch is not None:
            on_epoch(history[-1])
        if held_out is not None:
            best.see(epoch, held_out)
            if patience is not None and epoch - best.epoch >= patience:
                break
    best.restore()
    model.eval()
    return history


def _one_epoch(
    model: Classifier | Ensemble,
    loader: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator | None,
    epoch: int,
) -> float:
    device = model.members[0].temperature.device
    total, seen = 0.0, 0
    for batch in loader:
        x, y, weight = check_batch(batch, "loader")
        x, y = to_device(x, device), to_device(y, device)
        weight = None if weight is None else to_device(weight, device)
        optimizer.zero_grad(set_to_none=True)
        loss = model.loss(x, y, generator=generator, weight=weight)
        loss.backward()
        optimizer.step()
        value = float(loss.detach())
        if value != value:
            lr = optimizer.param_groups[0]["lr"]
            raise FloatingPointError(f"the loss is NaN in epoch {epoch}: lower lr (now {lr:g})")
        total, seen = total + value * len(y), seen + len(y)
    if seen == 0:
        raise ValueError("loader is empty: it yielded no batch")
    return total / seen


class _Best:
    """The weights of the best epoch so far, kept aside."""

    def __init__(self, model: Classifier | Ensemble) -> None:
        self.model, self.epoch, self.value = model, 0, math.inf
        self.state: dict[str, Tensor] | None = None

    def see(self, epoch: int, value: float) -> None:
        if value < self.value:
            self.epoch, self.value = epoch, value
            self.state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def restore(self) -> None:
        if self.state is not None:
            self.model.load_state_dict(self.state)


def mean_nll(model: Classifier | Ensemble, loader: Iterable[Any]) -> float:
    """Held-out −log p(y) at the posterior mode, averaged over (weighted) examples."""
    device = model.members[0].temperature.device
    sigmoid = model.members[0].head.link.link == "sigmoid"
    total, seen = 0.0, 0.0
    with evaluating(model):
        for batch in loader:
            x, y, weight = check_batch(batch, "validation")
            log_probs, y = model(to_device(x, device)), to_device(y, device)
            if sigmoid:
                nll = F.binary_cross_entropy_with_logits(log_probs, y.to(log_probs), reduction="none").sum(1)
            else:
                nll = F.nll_loss(log_probs, y.long(), reduction="none")
            weight = torch.ones_like(nll) if weight is None else to_device(weight, device)
            total, seen = total + float((weight * nll).sum()), seen + float(weight.sum())
    if seen == 0:
        raise ValueError("validation is empty: it yielded no batch, or weights of zero only")
    return total / seen


def _set_dataset_size(model: Classifier | Ensemble, loader: Iterable[Any]) -> None:
    """From a loader that knows its size; for a stream the loss says that it leaves the prior out."""
    data: Any = getattr(loader, "dataset", loader)
    if not hasattr(data, "__len__"):
        return
    size = len(data) if data is not loader else sum(len(check_batch(b, "loader")[1]) for b in data)
    for member in model.members:
        if member.dataset_size is None:
            member.dataset_size = size
