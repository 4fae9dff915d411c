"""Early stopping: the best epoch by held-out NLL, its weights, and when to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from hetsngp.fitting.schedule import Schedule
from hetsngp.models.classifier import Classifier
from hetsngp.validation import check_positive


@dataclass(frozen=True)
class EpochResult:
    """Result of an epoch, passed to ``on_epoch``; ``held_out`` is the NLL on ``validation``, if there is one.

    ``member`` of ``members``, from 1: the members of an ensemble are trained one after another.
    """

    epoch: int
    epochs: int
    loss: float
    held_out: float | None = None
    member: int = 1
    members: int = 1


class BestWeights:
    """Copies of the weights of the best epoch so far."""

    def __init__(self, models: Sequence[Classifier]) -> None:
        self.models = models
        self.epoch = 0
        self.states: list[dict[str, Tensor]] | None = None

    def keep(self, epoch: int) -> None:
        """Copy the current weights, those of ``epoch``."""
        self.epoch, self.states = epoch, None  # free the old copies before the new ones are made
        self.states = [{k: t.clone() for k, t in model.state_dict().items()} for model in self.models]

    def restore(self) -> None:
        """Load the weights of the best epoch into the models, if there was one."""
        for model, state in zip(self.models, self.states or [], strict=self.states is not None):
            model.load_state_dict(state)


def run_with_early_stopping(
    best: BestWeights,
    results: Iterator[tuple[float, float | None]],
    schedule: Schedule,
    patience: int | None,
    on_epoch: Callable[[EpochResult], None] | None,
    member: tuple[int, int] = (1, 1),
    history: Sequence[EpochResult] = (),
) -> list[EpochResult]:
    """Run the epochs after ``history`` (loss, held-out NLL) with early stopping; keep the best weights."""
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
    """Return the epoch of lowest held-out NLL, the first of equals; the last where nothing was held out.

    ``history`` is that of one model: for a member of an ensemble ``[r for r in history if r.member == 2]``.
    """
    if len({r.member for r in history}) > 1:
        raise ValueError(
            "history has several members, and each has its own best epoch: "
            "best_epoch([r for r in history if r.member == 1])"
        )
    measured = [(r.held_out, r.epoch) for r in history if r.held_out is not None and r.held_out == r.held_out]
    return min(measured)[1] if measured else history[-1].epoch
