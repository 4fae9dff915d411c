"""The training loop in plain torch: knows only ``loss``, and ``model(x)`` where something is held out.

``training`` puts the same loop on Lightning Fabric: its gradients in place of :class:`Gradients`.
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
from hetsngp.fitting.early_stopping import Best, EpochResult, best_epoch, watch
from hetsngp.fitting.schedule import Schedule
from hetsngp.models.classifier import Classifier, evaluating, to_device
from hetsngp.models.ensemble import Ensemble
from hetsngp.models.loaders import num_batches, tell_counts
from hetsngp.validation import check_batch, check_repeatable

__all__ = ["EpochResult", "Schedule", "best_epoch", "follow", "mean_nll", "nll_sums", "train", "train_folds"]

# Updates between two looks at the loss: a look makes the host wait for the device.
CHECK_EVERY = 50


@dataclass
class TrainState:
    """Where a run is: the epoch under way (from 1), how much of it is done, and its loss so far."""

    epoch: int = 1
    batches: int = 0
    updates: int = 0
    """In all epochs."""
    seen: int = 0
    total: Tensor | float = 0.0
    """Loss times examples; a tensor on the device, which nobody has to wait for."""

    def add(self, loss: Tensor, rows: int) -> None:
        """A batch more."""
        wide = torch.float32 if loss.device.type == "mps" else torch.float64
        self.total = self.total + loss.detach().to(wide) * rows
        self.seen, self.batches = self.seen + rows, self.batches + 1

    def turn(self) -> None:
        """To the next epoch."""
        self.epoch, self.batches, self.seen, self.total = self.epoch + 1, 0, 0, 0.0


class Gradients:
    """The steps of an optimiser over a model, on the device that the model is on."""

    def __init__(
        self, model: Classifier, optimizer: torch.optim.Optimizer, generator: torch.Generator | None = None
    ) -> None:
        self.model, self.optimizer, self.generator = model, optimizer, generator

    @property
    def device(self) -> torch.device:
        return self.model.temperature.device

    def add(self, x: Any, y: Tensor, weight: Tensor | None, *, group: int, complete: bool) -> Tensor:
        """Add the gradient of one of ``group`` batches that share a step; ``complete``: that step is next.

        Returns the batch's own loss.
        """
        loss = self.model.loss(x, y, generator=self.generator, weight=weight)
        (loss / group if group > 1 else loss).backward()
        return loss

    def mean_loss(self, place: TrainState) -> float:
        """Over the examples of the epoch so far."""
        return float(place.total) / place.seen

    def step(self) -> None:
        """Move the weights by the gradients added since the last step."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def run_epoch(
    gradients: Gradients,
    loader: Iterable[Any],
    schedule: Schedule,
    place: TrainState,
    *,
    accumulate: int = 1,
    on_update: Callable[[float], None] | None = None,
) -> float:
    """The rest of an epoch, which ``loader`` begins after ``place.batches`` batches; returns the mean loss.

    A step is made after every ``accumulate`` batches, and after the last one. ``on_update`` is called after
    each with its rate, and should look at the loss every now and then.
    """
    length = num_batches(loader)
    if length is None and (schedule.smooth or accumulate > 1):
        raise TypeError(
            "loader has no len(), and a rate that moves with every update, or accumulation, needs it: "
            "give a loader of known length"
        )
    rate = 0.0
    began = place.batches
    for batch in loader:
        x, y, weight = check_batch(batch, "loader")
        x, y = to_device(x, gradients.device), to_device(y, gradients.device)
        weight = None if weight is None else to_device(weight, gradients.device)
        first = place.batches // accumulate * accumulate
        group = accumulate if length is None else min(accumulate, length - first)
        if place.batches in (first, began):  # taken up by another plan, a group may have been begun
            share = (place.batches / length, group / length) if length else (0.0, 1.0)
            rate = schedule.set_rate(gradients.optimizer, place.epoch - 1 + share[0], share[1])
        complete = place.batches + 1 == first + group
        place.add(gradients.add(x, y, weight, group=group, complete=complete), len(y))
        if complete:
            gradients.step()
            place.updates += 1
            if on_update is not None:
                on_update(rate)
            elif place.updates % CHECK_EVERY == 0:
                checked_loss(gradients, place, rate)
    if place.seen == 0:
        raise ValueError("loader is empty: it yielded no batch")
    return checked_loss(gradients, place, rate)


def checked_loss(gradients: Gradients, place: TrainState, rate: float) -> float:
    """The mean loss of the epoch so far; NaN and infinity are errors."""
    loss = gradients.mean_loss(place)
    if not math.isfinite(loss):
        kind = "NaN" if loss != loss else "infinite"
        raise FloatingPointError(f"the loss is {kind} in epoch {place.epoch}: lower lr (now {rate:g})")
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
) -> list[EpochResult]:
    """AdamW on ``model.loss`` with a cosine schedule; returns the loss of each epoch.

    Loaders yield (x, y) or (x, y, weight). Where a model has no ``dataset_size`` it gets the loader's, so
    that the prior has its weight; one that weighs classes by their numbers of examples gets those. With
    ``validation`` the model ends with the weights of the epoch whose NLL was lowest there, and training stops
    after ``patience`` epochs that brought nothing lower. ``gp_lr_multiplier`` and ``stop_after``: see
    :class:`Schedule`.

    The members of an ensemble are trained one after another, each as if it were alone: with an optimiser and
    a best epoch of its own, in orders that the loader draws anew. The results come in the same order.
    """
    return follow(
        model,
        loader,
        Schedule(epochs, lr, weight_decay, gp_lr_multiplier, stop_after),
        generator=generator,
        on_epoch=on_epoch,
        validation=validation,
        patience=patience,
    )


def follow(
    model: Classifier | Ensemble,
    loader: Iterable[Any],
    schedule: Schedule,
    *,
    generator: torch.Generator | None = None,
    on_epoch: Callable[[EpochResult], None] | None = None,
    validation: Iterable[Any] | None = None,
    patience: int | None = None,
) -> list[EpochResult]:
    """:func:`train` by any schedule."""
    if patience is not None and validation is None:
        raise ValueError("patience needs a validation loader to watch: train(..., validation=held_out)")
    members = model.members
    check_repeatable(len(members), loader=loader, validation=validation)
    history: list[EpochResult] = []
    for number, member in enumerate(members, 1):
        run = _epochs(member, loader, schedule, generator)
        results = _with_held_out(member, run, validation)
        history += watch(Best([member]), results, schedule, patience, on_epoch, (number, len(members)))
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
) -> list[EpochResult]:
    """Train a model a fold, epoch by epoch side by side, and stop all by the NLL of all that is held out.

    One fold holds out too little to tell a good epoch by; together they hold out everything. Results are
    means over the folds, ``held_out`` the mean over examples. The models end with the weights of one epoch:
    that of the lowest value.
    """
    runs = [_epochs(m, x, schedule, g) for m, x, g in zip(models, loaders, generators, strict=True)]

    def results() -> Iterator[tuple[float, float | None]]:
        for losses in zip(*runs, strict=True):
            sums = [nll_sums(m, held_out) for m, held_out in zip(models, validation, strict=True)]
            total, weight = (sum(part) for part in zip(*sums, strict=True))
            yield sum(losses) / len(losses), total / weight

    return watch(Best(models), results(), schedule, patience, on_epoch)


def _with_held_out(
    model: Classifier, losses: Iterator[float], validation: Iterable[Any] | None
) -> Iterator[tuple[float, float | None]]:
    for loss in losses:
        yield loss, None if validation is None else mean_nll(model, validation)


def _epochs(
    model: Classifier, loader: Iterable[Any], schedule: Schedule, generator: torch.Generator | None
) -> Iterator[float]:
    """Train an epoch each time the next loss is asked for."""
    optimizer = schedule.make_optimizer(model)
    gradients, place = Gradients(model, optimizer, generator), TrainState()
    tell_counts(model, loader)
    optimizer.zero_grad(set_to_none=True)
    model.train()
    try:
        while place.epoch <= schedule.last:
            loss = run_epoch(gradients, loader, schedule, place)
            place.turn()
            yield loss
    finally:
        # Parameters and their states refer to each other: memory would wait for the garbage collector.
        optimizer.state.clear()
        optimizer.zero_grad(set_to_none=True)


def mean_nll(model: Classifier | Ensemble, loader: Iterable[Any]) -> float:
    """Held-out −log p(y) at the posterior mode, averaged over (weighted) examples."""
    total, weight = nll_sums(model, loader)
    return total / weight


def nll_sums(
    model: Classifier | Ensemble,
    loader: Iterable[Any],
    log_probs_of: Callable[[Any], Tensor] | None = None,
) -> tuple[float, float]:
    """The sum over examples, and of their weights. ``log_probs_of``: in place of ``model(x)``."""
    device = model.members[0].temperature.device
    sigmoid = model.members[0].head.sigmoid
    total, seen = 0.0, 0.0
    with evaluating(model):
        for batch in loader:
            x, y, weight = check_batch(batch, "validation")
            log_probs, y = (log_probs_of or model)(to_device(x, device)), to_device(y, device)
            if sigmoid:
                nll = F.binary_cross_entropy_with_logits(log_probs, y.to(log_probs), reduction="none").sum(1)
            else:
                nll = F.nll_loss(log_probs, y.long(), reduction="none")
            weight = torch.ones_like(nll) if weight is None else to_device(weight, device)
            total, seen = total + float((weight * nll).sum()), seen + float(weight.sum())
    if seen == 0:
        raise ValueError("validation is empty: it yielded no batch, or weights of zero only")
    return total, seen
