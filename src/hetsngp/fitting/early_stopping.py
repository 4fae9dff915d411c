"""Which epoch was the best by what is held out, and when to stop looking for a better one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from hetsngp.fitting.schedule import Schedule
from hetsngp.models.classifier import Classifier
from hetsngp.validation import check_positive


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


class Best:
    """The weights of the best epoch so far."""

    def __init__(self, models: Sequence[Classifier]) -> None:
        self.models = models
        self.epoch = 0
        self.states: list[dict[str, Tensor]] | None = None

    def keep(self, epoch: int) -> None:
        """As they are now."""
        self.epoch, self.states = epoch, None  # the old ones go before the new ones come
        self.states = [{k: t.clone() for k, t in model.state_dict().items()} for model in self.models]

    def restore(self) -> None:
        """Give the models the weights of that epoch, if there was one."""
        for model, state in zip(self.models, self.states or [], strict=self.states is not None):
            model.load_state_dict(state)


def watch(
    best: Best,
    results: Iterator[tuple[float, float | None]],
    schedule: Schedule,
    patience: int | None,
    on_epoch: Callable[[EpochResult], None] | None,
    member: tuple[int, int] = (1, 1),
    history: Sequence[EpochResult] = (),
) -> list[EpochResult]:
    """Run through (loss, held-out NLL) of the epochs after ``history``, and leave the models at the best."""
    if patience is not None:
        check_positive("patience", patience, integer=True)
    history = list(history)
    for epoch, (loss, held_out) in enumerate(results, len(history) + 1):
        history.append(EpochResult(epoch, schedule.last, loss, held_out, *member))
        if on_epoch is not None:
            on_epoch(history[-1])
        if held_out is None:
            continue
        if held_out == held_out and best_epoch(history) == epoch:
            best.keep(epoch)
        if patience is not None and epoch - best.epoch >= patience:
            break
    best.restore()
    for model in best.models:
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
