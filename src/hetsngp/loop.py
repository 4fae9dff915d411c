"""The plain-torch training loop: knows only ``loss``. The distributed engine wraps the same steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hetsngp.counting import class_counts, dataset_size
from hetsngp.ensemble import Ensemble
from hetsngp.model import Classifier, evaluating, to_device
from hetsngp.validation import check_batch, check_positive, check_repeatable


@dataclass(frozen=True)
class EpochResult:
    """What the callback of :func:`train` gets; ``held_out`` is the NLL on ``validation``, if any.

    ``member`` of ``members``, from 1: the members of an ensemble are trained one after another.
    """

    epoch: int
    epochs: int
    loss: float
    held_out: float | None = None
    member: int = 1
    members: int = 1


@dataclass(frozen=True)
class Schedule:
    """How the weights move: AdamW, the rate following a cosine from ``lr`` to zero in ``epochs``.

    ``gp_lr`` is a factor on the rate of what has a natural size of one, the GP's weights and a flow's, where
    a network's is 1/√width. ``stop_after`` ends it after so many of the ``epochs``.
    """

    epochs: int
    lr: float = 1e-3
    weight_decay: float = 1e-4
    gp_lr: float = 1.0
    stop_after: int | None = None

    def __post_init__(self) -> None:
        check_positive("epochs", self.epochs, integer=True)
        check_positive("lr", self.lr)
        if not 0 <= self.weight_decay < float("inf"):
            raise ValueError(f"weight_decay must be at least 0 and finite, got {self.weight_decay!r}")
        if self.stop_after is not None:
            check_positive("stop_after", self.stop_after, integer=True)

    @property
    def last(self) -> int:
        """The epoch after which it ends."""
        return self.epochs if self.stop_after is None else min(self.stop_after, self.epochs)


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
    stop_after: int | None = None,
) -> list[EpochResult]:
    """AdamW on ``model.loss`` with a cosine schedule; returns the loss of each epoch.

    Loaders yield (x, y) or (x, y, weight). Where a model has no ``dataset_size`` it gets the loader's, so
    that the prior has its weight; one that weighs classes by their numbers of examples gets those. With
    ``validation`` the model ends with the weights of the epoch whose NLL was lowest there, and training stops
    after ``patience`` epochs that brought nothing lower. ``gp_lr`` and ``stop_after``: see :class:`Schedule`.

    The members of an ensemble are trained one after another, each as if it were alone: with an optimiser and
    a best epoch of its own, in orders that the loader draws anew. The results come in the same order.
    """
    if patience is not None and validation is None:
        raise ValueError("patience needs a validation loader to watch: train(..., validation=held_out)")
    schedule = Schedule(epochs, lr, weight_decay, gp_lr, stop_after)
    members = model.members
    check_repeatable(len(members), loader=loader, validation=validation)
    history: list[EpochResult] = []
    for number, member in enumerate(members, 1):
        run = _epochs(member, loader, schedule, generator)
        results = _with_held_out(member, run, validation)
        history += _watch([member], results, schedule, patience, on_epoch, (number, len(members)))
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

    return _watch(models, results(), schedule, patience, on_epoch)


def _with_held_out(
    model: Classifier, losses: Iterator[float], validation: Iterable[Any] | None
) -> Iterator[tuple[float, float | None]]:
    for loss in losses:
        yield loss, None if validation is None else mean_nll(model, validation)


def _watch(
    models: Sequence[Classifier],
    results: Iterator[tuple[float, float | None]],
    schedule: Schedule,
    patience: int | None,
    on_epoch: Callable[[EpochResult], None] | None,
    member: tuple[int, int] = (1, 1),
) -> list[EpochResult]:
    """Run through (loss, held-out NLL) of the epochs, and leave the models at the best of them."""
    if patience is not None:
        check_positive("patience", patience, integer=True)
    history: list[EpochResult] = []
    best, states = 0, None
    for epoch, (loss, held_out) in enumerate(results, 1):
        history.append(EpochResult(epoch, schedule.last, loss, held_out, *member))
        if on_epoch is not None:
            on_epoch(history[-1])
        if held_out is None:
            continue
        if held_out == held_out and best_epoch(history) == epoch:
            best, states = epoch, None  # the old ones go before the new ones come
            states = [{k: t.clone() for k, t in model.state_dict().items()} for model in models]
        if patience is not None and epoch - best >= patience:
            break
    if states is not None:
        for model, state in zip(models, states, strict=True):
            model.load_state_dict(state)
    for model in models:
        model.eval()
    return history


def best_epoch(history: Sequence[EpochResult]) -> int:
    """The epoch of lowest held-out NLL, the first of equals; the last where nothing was held out.

    Of one model: from the history of an ensemble take a member, ``[r for r in history if r.member == 2]``.
    """
    if len({r.member for r in history}) > 1:
        raise ValueError(
            "history is of several members, each with a best epoch of its own: "
            "best_epoch([r for r in history if r.member == 1])"
        )
    watched = [(r.held_out, r.epoch) for r in history if r.held_out is not None and r.held_out == r.held_out]
    return min(watched)[1] if watched else history[-1].epoch


def _epochs(
    model: Classifier, loader: Iterable[Any], schedule: Schedule, generator: torch.Generator | None
) -> Iterator[float]:
    """Train an epoch each time the next loss is asked for."""
    groups = [
        {**group, "lr": schedule.lr * (schedule.gp_lr if group.get("natural_size_one") else 1.0)}
        for group in model.parameter_groups(schedule.weight_decay)
    ]
    optimizer = torch.optim.AdamW(groups, lr=schedule.lr)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=schedule.epochs)
    _count(model, loader)
    model.train()
    try:
        for epoch in range(1, schedule.last + 1):
            loss = _one_epoch(model, loader, optimizer, generator, epoch)
            cosine.step()
            yield loss
    finally:
        # Optimiser and scheduler refer to each other: their memory would wait for the garbage collector.
        optimizer.state.clear()
        optimizer.zero_grad(set_to_none=True)


def _one_epoch(
    model: Classifier,
    loader: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator | None,
    epoch: int,
) -> float:
    device = model.temperature.device
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


def mean_nll(model: Classifier | Ensemble, loader: Iterable[Any]) -> float:
    """Held-out −log p(y) at the posterior mode, averaged over (weighted) examples."""
    total, weight = nll_sums(model, loader)
    return total / weight


def nll_sums(model: Classifier | Ensemble, loader: Iterable[Any]) -> tuple[float, float]:
    """The sum over examples, and of their weights."""
    device = model.members[0].temperature.device
    sigmoid = model.members[0].head.sigmoid
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
    return total, seen


def _count(model: Classifier, loader: Iterable[Any]) -> None:
    """Tell the model what it was not told; from a stream it cannot be had, and the loss warns of it."""
    if model.dataset_size is None:
        model.dataset_size = dataset_size(loader)
    if model.wants_class_counts:
        counts = class_counts(loader, model.num_classes)
        if counts is not None:
            model.class_counts = counts
