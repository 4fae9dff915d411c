"""Training loop in plain PyTorch; of a model it uses ``loss``, and ``model(x)`` for held-out data.

``hetsngp.training`` runs the same loop on Lightning Fabric, with its own subclass of :class:`Gradients`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hetsngp._moved import renamed_arguments
from hetsngp.fitting.early_stopping import BestWeights, EpochResult, best_epoch, run_with_early_stopping
from hetsngp.fitting.mixup import mixed_batch
from hetsngp.fitting.schedule import Schedule
from hetsngp.models.classifier import Classifier, evaluating, to_device
from hetsngp.models.ensemble import Ensemble
from hetsngp.models.loader_counts import num_batches, set_missing_counts
from hetsngp.validation import (
    check_batch,
    check_generator,
    check_loader,
    check_multi_hot,
    check_not_negative,
    check_repeatable,
    check_targets,
    check_weight,
)

__all__ = [
    "EpochResult",
    "Schedule",
    "best_epoch",
    "mean_nll",
    "nll_sums",
    "pooled_mean_nll",
    "train",
    "train_folds",
    "train_with_schedule",
]

# Updates between two checks of the loss: a check makes the host wait for the device.
CHECK_EVERY = 50


@dataclass
class TrainState:
    """State of a run: the current epoch (from 1), how much of it is done, and its loss so far."""

    epoch: int = 1
    batches: int = 0
    updates: int = 0
    """Updates in all epochs."""
    seen: int = 0
    total: Tensor | float = 0.0
    """Sum of loss times examples; a tensor on the device, so that the host does not wait for it."""

    def add(self, loss: Tensor, rows: int) -> None:
        """Count a batch of so many ``rows`` and its loss."""
        wide = torch.float32 if loss.device.type == "mps" else torch.float64
        self.total = self.total + loss.detach().to(wide) * rows
        self.seen, self.batches = self.seen + rows, self.batches + 1

    def start_next_epoch(self) -> None:
        """Begin the next epoch."""
        self.epoch, self.batches, self.seen, self.total = self.epoch + 1, 0, 0, 0.0


class Gradients:
    """Gradients and optimiser steps of a model, on the device of the model; ``mixup``: α, 0 for none."""

    def __init__(
        self,
        model: Classifier,
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator | None = None,
        mixup: float = 0.0,
    ) -> None:
        self.model, self.optimizer, self.generator = model, optimizer, generator
        self.mixup = check_not_negative("mixup", mixup)

    @property
    def device(self) -> torch.device:
        return self.model.temperature.device

    def add(self, x: Any, y: Tensor, weight: Tensor | None, *, group: int, complete: bool) -> Tensor:
        """Add the gradient of one of ``group`` batches that share a step; ``complete``: of the last of them.

        Returns the loss of the batch.
        """
        x, y, weight = self.mixed(x, y, weight)
        loss = self.model.loss(x, y, generator=self.generator, weight=weight)
        (loss / group if group > 1 else loss).backward()
        return loss

    def mixed(self, x: Any, y: Tensor, weight: Tensor | None) -> tuple[Any, Tensor, Tensor | None]:
        """The batch, mixed with a permutation of itself where there is mixup."""
        if self.mixup == 0:
            return x, y, weight
        return mixed_batch(self.model, x, y, weight, self.mixup, self.generator)

    def mean_loss(self, state: TrainState) -> float:
        """Mean loss over the examples of the epoch so far."""
        return float(state.total) / state.seen

    def step(self) -> None:
        """Update the weights by the gradients added since the last step."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def run_epoch(
    gradients: Gradients,
    loader: Iterable[Any],
    schedule: Schedule,
    state: TrainState,
    *,
    accumulate: int = 1,
    on_update: Callable[[float], None] | None = None,
) -> float:
    """Run the rest of an epoch; ``loader`` yields what follows the first ``state.batches`` batches.

    Returns the mean loss of the epoch.

    A step is made after every ``accumulate`` batches, and after the last one. ``on_update`` is called after
    each step with its learning rate, and should check the loss from time to time.
    """
    length = num_batches(loader)
    if length is None and (schedule.smooth or accumulate > 1):
        raise TypeError(
            "loader has no len(), which accumulation and a learning rate that changes at every update need: "
            "give a loader of known length"
        )
    lr = 0.0
    began = state.batches
    for batch in loader:
        x, y, weight = check_batch(batch, "loader")
        x, y = to_device(x, gradients.device), to_device(y, gradients.device)
        weight = None if weight is None else to_device(weight, gradients.device)
        first = state.batches // accumulate * accumulate
        group = accumulate if length is None else min(accumulate, length - first)
        if state.batches in (first, began):  # a resumed run may begin within a group
            share = (state.batches / length, group / length) if length else (0.0, 1.0)
            lr = schedule.set_lr(gradients.optimizer, state.epoch - 1 + share[0], share[1])
        complete = state.batches + 1 == first + group
        state.add(gradients.add(x, y, weight, group=group, complete=complete), len(y))
        if complete:
            gradients.step()
            state.updates += 1
            if on_update is not None:
                on_update(lr)
            elif state.updates % CHECK_EVERY == 0:
                checked_loss(gradients, state, lr)
    if state.seen == 0:
        raise ValueError("loader is empty: it yielded no batch")
    return checked_loss(gradients, state, lr)


def checked_loss(gradients: Gradients, state: TrainState, lr: float) -> float:
    """Return the mean loss of the epoch so far; NaN and infinity are errors."""
    loss = gradients.mean_loss(state)
    if not math.isfinite(loss):
        kind = "NaN" if loss != loss else "infinite"
        raise FloatingPointError(f"the loss is {kind} in epoch {state.epoch}: lower lr (now {lr:g})")
    return loss


@renamed_arguments(gp_lr="gp_lr_multiplier")
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
    gp_lr_multiplier: float = 1.0,
    stop_after: int | None = None,
    mixup: float = 0.0,
) -> list[EpochResult]:
    """Train with AdamW on ``model.loss``, with a cosine schedule; return the result of each epoch.

    Loaders yield (x, y) or (x, y, weight). Where a model has no ``dataset_size`` it gets the loader's, so
    that the prior has its weight; one that weighs classes by their numbers of examples gets those. With
    ``validation`` the model ends with the weights of the epoch of lowest NLL there, and training stops after
    ``patience`` epochs without a lower one. ``gp_lr_multiplier`` and ``stop_after``: see
    :class:`Schedule`. ``mixup``: α of :func:`~hetsngp.fitting.mixup.mixed_batch`, which mixes each training
    batch with a permutation of itself; 0: none.

    The members of an ensemble are trained one after another, independently: each has its own optimiser, best
    epoch, and order of examples as the loader draws it. The results come in the same order.
    """
    return train_with_schedule(
        model,
        loader,
        Schedule(epochs, lr, weight_decay, gp_lr_multiplier, stop_after),
        generator=generator,
        on_epoch=on_epoch,
        validation=validation,
        patience=patience,
        mixup=mixup,
    )


def train_with_schedule(
    model: Classifier | Ensemble,
    loader: Iterable[Any],
    schedule: Schedule,
    *,
    generator: torch.Generator | None = None,
    on_epoch: Callable[[EpochResult], None] | None = None,
    validation: Iterable[Any] | None = None,
    patience: int | None = None,
    mixup: float = 0.0,
) -> list[EpochResult]:
    """Train as :func:`train` does, with any schedule."""
    if patience is not None and validation is None:
        raise ValueError("patience needs a validation loader: train(..., validation=held_out)")
    members = _members(model)
    for where, data in (("loader", loader), ("validation", validation)):
        if data is not None or where == "loader":
            check_loader(data, where)
    check_generator(generator)
    check_repeatable(len(members), loader=loader, validation=validation)
    history: list[EpochResult] = []
    for number, member in enumerate(members, 1):
        run = _epochs(member, loader, schedule, generator, mixup)
        results = _with_held_out(member, run, validation)
        history += run_with_early_stopping(
            BestWeights([member]), results, schedule, patience, on_epoch, (number, len(members))
        )
    model.eval()
    return history


def train_folds(
    models: Sequence[Classifier],
    loaders: Sequence[Iterable[Any]],
    validation: Sequence[Iterable[Any]],
    schedule: Schedule,
    *,
    generators: Sequence[torch.Generator],
    on_epoch: Callable[[EpochResult], None] | None = None,
    patience: int | None = None,
    mixup: float = 0.0,
) -> list[EpochResult]:
    """Train one model per fold, an epoch of each at a time; stop early by the NLL of all held-out data.

    One fold holds out too little to find the best epoch; together they hold out everything. Results are
    means over the folds, ``held_out`` the mean over examples. All models end with the weights of the same
    epoch: that of the lowest value.
    """
    runs = [_epochs(m, x, schedule, g, mixup) for m, x, g in zip(models, loaders, generators, strict=True)]

    def results() -> Iterator[tuple[float, float | None]]:
        for losses in zip(*runs, strict=True):
            yield sum(losses) / len(losses), pooled_mean_nll(models, validation)

    return run_with_early_stopping(BestWeights(models), results(), schedule, patience, on_epoch)


def _with_held_out(
    model: Classifier, losses: Iterator[float], validation: Iterable[Any] | None
) -> Iterator[tuple[float, float | None]]:
    for loss in losses:
        yield loss, None if validation is None else mean_nll(model, validation)


def _epochs(
    model: Classifier,
    loader: Iterable[Any],
    schedule: Schedule,
    generator: torch.Generator | None,
    mixup: float,
) -> Iterator[float]:
    """Yield the loss of each epoch; an epoch is trained when its loss is asked for."""
    optimizer = schedule.make_optimizer(model)
    gradients, state = Gradients(model, optimizer, generator, mixup), TrainState()
    set_missing_counts(model, loader)
    optimizer.zero_grad(set_to_none=True)
    model.train()
    try:
        while state.epoch <= schedule.last:
            loss = run_epoch(gradients, loader, schedule, state)
            state.start_next_epoch()
            yield loss
    finally:
        # Parameters and their states refer to each other: memory would wait for the garbage collector.
        optimizer.state.clear()
        optimizer.zero_grad(set_to_none=True)


def _members(model: Any) -> list[Classifier]:
    if not isinstance(model, Classifier | Ensemble):
        raise TypeError(
            f"this takes a model made by hetsngp.build or hetsngp.convert, or an Ensemble, got "
            f"{type(model).__name__}"
        )
    return model.members


def mean_nll(model: Classifier | Ensemble, loader: Iterable[Any]) -> float:
    """Mean of −log p(y) at the MAP estimate over (weighted) held-out examples."""
    return pooled_mean_nll([model], [loader])


def pooled_mean_nll(models: Sequence[Classifier | Ensemble], loaders: Sequence[Iterable[Any]]) -> float:
    """Mean of −log p(y) over the (weighted) examples of all loaders, each with its own model."""
    sums = [nll_sums(model, loader) for model, loader in zip(models, loaders, strict=True)]
    return sum(total for total, _ in sums) / sum(weight for _, weight in sums)


def nll_sums(
    model: Classifier | Ensemble,
    loader: Iterable[Any],
    log_probs_of: Callable[[Any], Tensor] | None = None,
) -> tuple[float, float]:
    """Sum −log p(y) over (weighted) examples, and the weights. ``log_probs_of`` replaces ``model(x)``."""
    first = _members(model)[0]
    check_loader(loader, "validation")
    device, sigmoid = first.temperature.device, first.head.sigmoid
    check = check_multi_hot if sigmoid else check_targets
    total, seen = 0.0, 0.0
    with evaluating(model):
        for batch in loader:
            x, y, weight = check_batch(batch, "validation")
            log_probs, y = (log_probs_of or model)(to_device(x, device)), to_device(y, device)
            y = check(y, first.num_classes, len(log_probs))
            if sigmoid:
                nll = F.binary_cross_entropy_with_logits(log_probs, y.to(log_probs), reduction="none").sum(1)
            else:
                nll = F.cross_entropy(log_probs, y.to(log_probs) if y.dim() == 2 else y, reduction="none")
            weight = (
                torch.ones_like(nll)
                if weight is None
                else check_weight(to_device(weight, device), len(nll)).to(nll)
            )
            total, seen = total + float((weight * nll).sum()), seen + float(weight.sum())
    if seen == 0:
        raise ValueError("validation is empty: it yielded no batch, or weights of zero only")
    return total, seen
