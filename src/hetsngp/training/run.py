"""One training, from its beginning or its last checkpoint, to its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hetsngp.fitting.early_stopping import Best, watch
from hetsngp.fitting.loop import CHECK_EVERY, EpochResult, TrainState, checked_loss, nll_sums, run_epoch
from hetsngp.models.classifier import Classifier
from hetsngp.models.loaders import num_batches
from hetsngp.training.checkpointing.randomness import set_rng_state
from hetsngp.training.checkpointing.saving import CHECKPOINT, Saving, best_folder, check_finite
from hetsngp.training.checkpointing.states import load_model, whole
from hetsngp.training.checkpointing.storage import has_state, remove_states, write_state
from hetsngp.training.config import CheckpointConfig, TrainConfig
from hetsngp.training.feeds import Feed
from hetsngp.training.gradients import FabricGradients
from hetsngp.training.logs import Logs, Row


def samples_beta(model: Classifier) -> bool:
    """Whether the loss is to count the posterior of β: where the option is set, and there is one."""
    return bool(getattr(model.head, "sample_beta", False)) and model.head.has_posterior


class Refit:
    """The posterior at the weights as they are, by ``fit``, which passes over the data; all else stays.

    Within an epoch the weights move on and the covariance does not: it is a pass over the data behind.
    """

    def __init__(self, model: Classifier, fit: Callable[[], object]) -> None:
        self.model, self.fit = model, fit

    @torch.no_grad()
    def __call__(self) -> None:
        """A call of all processes."""
        calibration, temperatures = self.model.calibration, self.model.head.temperatures
        before = [temperature.clone() for temperature in temperatures]
        with torch.compiler.set_stance("force_eager"):  # a last batch has a shape of its own
            self.fit()
        self.model.calibration = calibration
        for temperature, value in zip(temperatures, before, strict=True):
            temperature.copy_(value)

    def forget(self) -> None:
        """Of a trained model it is out of date, and with averaged weights no covariance at all."""
        posterior = self.model.head.posterior
        assert posterior is not None
        fresh = type(posterior)(posterior.num_classes, posterior.num_features, posterior.link)
        posterior.load_state_dict(fresh.to(posterior.scale.dtype).state_dict())
        self.model.mark_fitted()  # nothing is left that could be stale


@dataclass(frozen=True)
class Data:
    """Batches to train on, and what is held out: this process's part of it, or all."""

    feed: Feed
    held_out: Iterable[Any] | None
    held_out_in_parts: bool
    about: dict[str, Any]
    """How much there is to train on: a run that goes on must have the same."""
    refit: Refit | None = None
    """Between epochs, where the loss counts the posterior."""


class _Best(Best):
    """The weights of an epoch, or their average."""

    def __init__(self, gradients: FabricGradients) -> None:
        super().__init__([gradients.model])
        self.gradients = gradients

    def keep(self, epoch: int) -> None:
        if not self.gradients.plan.best:
            self.epoch = epoch  # patience counts from it
            return
        average = self.gradients.average
        if average is None:
            super().keep(epoch)
        else:
            self.epoch, self.states = epoch, [{name: t.clone() for name, t in average.state.items()}]

    def restore(self) -> None:
        if self.states is not None:
            load_model(self.models[0], whole(self.states[0]))


class TrainingRun:
    """The epochs of a plan: where they are, what they found, and the folder that remembers both."""

    def __init__(
        self,
        fabric: Any,
        gradients: FabricGradients,
        data: Data,
        plan: TrainConfig,
        keep: CheckpointConfig | None,
        show: bool,
    ) -> None:
        self.fabric, self.gradients, self.data, self.plan, self.keep = fabric, gradients, data, plan, keep
        self.model = gradients.model
        self.place, self.rate = TrainState(), 0.0
        self.history: list[EpochResult] = []
        self.rows: list[Row] = []
        self.best = _Best(gradients)
        self.finished = False
        self.resumed = 0
        """Updates that had been made before."""
        # Of the checkpoint: random numbers at the beginning of its epoch, and at its own time.
        self.begun_with: dict[str, Any] | None = None
        self.then: dict[str, Any] = {}
        self.saving = Saving(self)
        if keep is not None:
            self.saving.resume(keep)
        self._saved, self._best_on_disk = time.monotonic(), self.best.epoch
        self.logs = Logs(
            keep, plan.schedule.last, show=show, main=fabric.is_global_zero, updates=self.place.updates
        )

    def go(self) -> None:
        """To the end, if it has not come."""
        if self.finished:
            self.model.eval()
            return
        schedule, patience = self.plan.schedule, self.plan.patience
        try:
            with self.logs:
                results = self._epochs()
                self.history = watch(self.best, results, schedule, patience, self._tell, history=self.history)
            if self.gradients.average is not None and self.best.states is None:
                self.gradients.average.apply()
            self._forget_posterior()
            self.finished = True
            self._save()
        except FloatingPointError as error:
            raise FloatingPointError(f"{error}{self._way_back()}") from None
        finally:
            self._forget_posterior()

    def _forget_posterior(self) -> None:
        if self.data.refit is not None:
            self.data.refit.forget()

    def _way_back(self) -> str:
        if self.keep is None or not has_state(self.keep.folder / CHECKPOINT):
            return "; no checkpoint was made before"
        return (
            f"; the last good checkpoint is in {self.keep.folder / CHECKPOINT}: train with a lower rate "
            "and Keep(..., changed=True), or --changed, to go on from there"
        )

    # --- epochs -----------------------------------------------------------------------------------------

    def _epochs(self) -> Iterator[tuple[float, float | None]]:
        """(loss, held-out NLL) of each epoch; when the next one is asked for, the last is over and done."""
        place = self.place
        self.model.train()
        while place.epoch <= self.plan.schedule.last:
            batches = self.data.feed.begin(place.epoch, place.batches, self.begun_with)
            if self.begun_with is not None and place.batches:  # otherwise they are drawn as ever
                set_rng_state(self.then, self.fabric.device)
            self.begun_with = None
            length = num_batches(batches)
            begun, before = time.perf_counter(), place.seen
            loss = run_epoch(
                self.gradients,
                batches,
                self.plan.schedule,
                place,
                accumulate=self.plan.accumulate,
                on_update=partial(self._after_update, length),
            )
            self.gradients.level()
            seconds, seen = time.perf_counter() - begun, place.seen - before
            row: Row = {"epoch": place.epoch, "updates": place.updates, "loss": loss}
            row |= {"held_out": self._held_out(), "rate": self.rate}
            seconds += self._refit()
            row["seconds"] = seconds
            self.rows.append({**row, "examples_per_second": self.fabric.world_size * seen / seconds})
            place.turn()
            yield row["loss"], row["held_out"]  # type: ignore[misc]
            self._save_in_time()

    def _refit(self) -> float:
        """The posterior that the next epoch is trained under, if it is; seconds that this took.

        Here and not when that epoch begins: a checkpoint between the two has it, and a run that goes on from
        there is where it was. After the average was held against data: it has no such tensors yet.
        """
        begun = time.perf_counter()
        if self.data.refit is not None and self.place.epoch < self.plan.schedule.last:
            self.data.refit()
        return time.perf_counter() - begun

    def _tell(self, result: EpochResult) -> None:
        self.history.append(result)
        self.logs.epoch(result, self.rows)

    def _after_update(self, length: int | None, rate: float) -> None:
        place, self.rate = self.place, rate
        check = place.updates % CHECK_EVERY == 0
        if check:
            loss = checked_loss(self.gradients, place, rate)
            share = place.batches / length if length else 0.0
            self.logs.within(place.epoch, share, place.updates, loss, rate)
        # At the end of an epoch its held-out data come first.
        if (check or (self.keep is not None and self.keep.seconds == 0)) and place.batches != length:
            self._save_in_time()

    def _held_out(self) -> float | None:
        """NLL of the weights as they will be used: of their average where there is one."""
        if self.data.held_out is None:
            return None
        if self.gradients.average is None:
            return self._held_out_nll(self.data.held_out)
        with self.gradients.average.applied():
            return self._held_out_nll(self.data.held_out)

    def _held_out_nll(self, held_out: Iterable[Any]) -> float:
        # ddp would exchange buffers at each call, and parts may differ by a batch; fsdp must be called.
        in_parts = self.data.held_out_in_parts
        log_probs_of = self.model if in_parts else self.gradients.module
        # The last batch has a shape of its own, not worth compiling for.
        with self.fabric.autocast(), torch.compiler.set_stance("force_eager"):
            total, weight = nll_sums(self.model, held_out, log_probs_of)
        if in_parts and self.fabric.world_size > 1:
            sums = torch.tensor([total, weight], dtype=torch.float64, device=self.fabric.device)
            total, weight = self.fabric.all_reduce(sums, reduce_op="sum").tolist()
        return total / weight

    # --- the folder -------------------------------------------------------------------------------------

    def _save_in_time(self) -> None:
        if self.keep is None:
            return
        due = time.monotonic() - self._saved >= self.keep.seconds
        if self.fabric.broadcast(due) if self.fabric.world_size > 1 else due:
            self._save()

    def _save(self) -> None:
        if self.keep is None:
            return
        checked_loss(self.gradients, self.place, self.rate)
        check_finite(self.model, self.place, self.rate)
        state, best = self.saving.state(), None if self.finished else whole(self.best.states)
        if self.fabric.is_global_zero:
            folder = self.keep.folder
            of_best = folder / best_folder(self.best.epoch)
            if best is not None and self.best.epoch != self._best_on_disk:
                write_state(of_best, {"model": best[0]})
            write_state(folder / CHECKPOINT, state)
            remove_states([old for old in folder.glob("best-*") if self.finished or old != of_best])
        self._best_on_disk = self.best.epoch
        self.fabric.barrier()
        self._saved = time.monotonic()
