"""The plain-torch training loop: knows only ``loss``. The distributed engine wraps the same steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hetsngp.ensemble import Ensemble
from hetsngp.model import Classifier, evaluating, to_device
from hetsngp.validation import check_batch, check_positive


@dataclass(frozen=True)
class EpochResult:
    """What the callback of :func:`train` gets; ``held_out`` is the NLL on ``validation``, if any."""

    epoch: int
    epochs: int
    loss: float
    held_out: float | None = None


@dataclass(frozen=True)
class Schedule:
    """How the weights move: AdamW, the rate following a cosine from ``lr`` to zero in ``epochs``.

    ``gp_lr`` is a factor on the rate of the GP's weights, whose natural size is one where a network's is
    1/√width. ``stop_after`` ends it after so many of the ``epochs``.
    """

    epochs: int
    lr: float = 1e-3
    weight_decay: float = 1e-4
    gp_lr: float = 1.0
    stop_after: int | None = None

    def __post_init__(self) -> None:
        check_positive("epochs", self.epochs, integer=True)
        check_positive("lr", self.lr)
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
    that the prior has its weight. With ``validation`` the model ends with the weights of the epoch whose NLL
    was lowest there, and training stops after ``patience`` epochs that brought nothing lower. ``gp_lr`` and
    ``stop_after``: see :class:`Schedule`.
    """
    if patience is not None and validation is None:
        raise ValueError("patience needs a validation loader to watch: train(..., validation=held_out)")
    schedule = Schedule(epochs, lr, weight_decay, gp_lr, stop_after)
    run = _epochs(model, loader, schedule, generator)

    def held_out() -> float | None:
        return None if validation is None else mean_nll(model, validation)

    return _watch([model], ((loss, held_out()) for loss in run), schedule, patience, on_epoch)


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
            sums = [_nll_sums(m, held_out) for m, held_out in zip(models, validation, strict=True)]
            total, weight = (sum(part) for part in zip(*sums, strict=True))
            yield sum(losses) / len(losses), total / weight

    return _watch(models, results(), schedule, patience, on_epoch)


def _watch(
    models: Sequence[Classifier | Ensemble],
    results: Iterator[tuple[float, float | None]],
    schedule: Schedule,
    patience: int | None,
    on_epoch: Callable[[EpochResult], None] | None,
) -> list[EpochResult]:
    """Run through (loss, held-out NLL) of the epochs, and leave the models at the best of them."""
    if patience is not None:
        check_positive("patience", patience, integer=True)
    history: list[EpochResult] = []
    best, states = 0, None
    for epoch, (loss, held_out) in enumerate(results, 1):
        history.append(EpochResult(epoch, schedule.last, loss, held_out))
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
    """The epoch of lowest held-out NLL, the first of equals; the last where nothing was held out."""
    watched = [(r.held_out, r.epoch) for r in history if r.held_out is not None and r.held_out == r.held_out]
    return min(watched)[1] if watched else history[-1].epoch


def _epochs(
    model: Classifier | Ensemble, loader: Iterable[Any], schedule: Schedule, generator: torch.Generator | None
) -> Iterator[float]:
    """Train an epoch each time the next loss is asked for."""
    groups = [
        {**group, "lr": schedule.lr * (schedule.gp_lr if group.get("has_prior") else 1.0)}
        for group in model.parameter_groups(schedule.weight_decay)
    ]
    optimizer = torch.optim.AdamW(groups, lr=schedule.lr)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=schedule.epochs)
    _set_dataset_size(model, loader)
    model.train()
    for epoch in range(1, schedule.last + 1):
        loss = _one_epoch(model, loader, optimizer, generator, epoch)
        cosine.step()
        yield loss


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


def mean_nll(model: Classifier | Ensemble, loader: Iterable[Any]) -> float:
    """Held-out −log p(y) at the posterior mode, averaged over (weighted) examples."""
    total, weight = _nll_sums(model, loader)
    return total / weight


def _nll_sums(model: Classifier | Ensemble, loader: Iterable[Any]) -> tuple[float, float]:
    """The sum over examples, and of their weights."""
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
    return total, seen


def _set_dataset_size(model: Classifier | Ensemble, loader: Iterable[Any]) -> None:
    """From a loader that knows its size; for a stream the loss says that it leaves the prior out."""
    data: Any = getattr(loader, "dataset", loader)
    if not hasattr(data, "__len__"):
        return
    size = len(data) if data is not loader else sum(len(check_batch(b, "loader")[1]) for b in data)
    for member in model.members:
        if member.dataset_size is None:
            member.dataset_size = size
