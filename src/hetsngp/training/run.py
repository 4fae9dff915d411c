"""One training run, from its beginning or its last checkpoint to its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from hetsngp.fitting.early_stopping import BestWeights, run_with_early_stopping
from hetsngp.fitting.loop import CHECK_EVERY, EpochResult, TrainState, checked_loss, nll_sums, run_epoch
from hetsngp.locking import check_lock
from hetsngp.models.classifier import Classifier
from hetsngp.models.loader_counts import num_batches
from hetsngp.training.checkpointing.checkpoint import (
    CHECKPOINT,
    PREVIOUS,
    Checkpointer,
    best_folder,
    check_finite,
)
from hetsngp.training.checkpointing.checkpoint_files import copy_state, has_state, remove_states, write_state
from hetsngp.training.checkpointing.randomness import set_rng_state
from hetsngp.training.checkpointing.state_dicts import full_tensors, load_model
from hetsngp.training.config import CheckpointConfig, TrainConfig
from hetsngp.training.gradients import FabricGradients
from hetsngp.training.loaders import ResumableLoader
from hetsngp.training.logs import Logs, MetricsRow
from hetsngp.training.main_process import on_main


def samples_beta(model: Classifier) -> bool:
    """Whether the loss integrates over the posterior of β: the option is set, and there is a posterior."""
    return bool(getattr(model.head, "sample_beta", False)) and model.head.has_posterior


class PosteriorRefit:
    """Fits the posterior between epochs by ``fit``, a pass over the data; temperatures and calibration stay.

    Within an epoch the weights change and the covariance does not.
    """

    def __init__(self, model: Classifier, fit: Callable[[], object]) -> None:
        self.model, self.fit = model, fit

    @torch.no_grad()
    def __call__(self) -> None:
        """Fit the posterior at the present weights; a collective call."""
        calibration, temperatures = self.model.calibration, self.model.head.temperatures
        before = [temperature.clone() for temperature in temperatures]
        with torch.compiler.set_stance("force_eager"):  # the last batch has another shape
            self.fit()
        self.model.calibration = calibration
        for temperature, value in zip(temperatures, before, strict=True):
            temperature.copy_(value)

    def reset(self) -> None:
        """Remove the posterior: it is that of earlier weights, and an averaged one is no covariance."""
        posterior = self.model.head.posterior
        assert posterior is not None
        fresh = type(posterior)(posterior.num_classes, posterior.num_features, posterior.link)
        posterior.load_state_dict(fresh.to(posterior.scale.dtype).state_dict())
        self.model.mark_fitted()  # no stale posterior is left


@dataclass(frozen=True)
class RunData:
    """Training batches and held-out data of this process."""

    loader: ResumableLoader
    held_out: Iterable[Any] | None
    held_out_is_sharded: bool
    """Whether ``held_out`` is the part of this process, or all of it."""
    about: dict[str, Any]
    """Size of the training data: a resumed run must have the same."""
    refit: PosteriorRefit | None = None
    """Called between epochs where the loss integrates over the posterior."""
    fingerprints: dict[str, Any] = field(default_factory=dict)
    """Fingerprints of the data of all processes: a resumed run must have the same."""


class _BestOrAveragedWeights(BestWeights):
    """Weights of the best epoch, or their moving average."""

    def __init__(self, gradients: FabricGradients) -> None:
        super().__init__([gradients.model])
        self.gradients = gradients

    def keep(self, epoch: int) -> None:
        if not self.gradients.config.best:
            self.epoch = epoch  # early stopping counts from it
            return
        ema = self.gradients.ema
        if ema is None:
            super().keep(epoch)
        else:
            self.epoch, self.states = epoch, [{name: t.clone() for name, t in ema.state.items()}]

    def restore(self) -> None:
        if self.states is not None:
            load_model(self.models[0], full_tensors(self.states[0]))


class TrainingRun:
    """The epochs of a training: state, results, and the folder of checkpoints and logs."""

    def __init__(
        self,
        fabric: Any,
        gradients: FabricGradients,
        data: RunData,
        config: TrainConfig,
        checkpoints: CheckpointConfig | None,
        show: bool,
    ) -> None:
        self.fabric, self.gradients, self.data = fabric, gradients, data
        self.config, self.checkpoints = config, checkpoints
        self.model = gradients.model
        self.state, self.lr = TrainState(), 0.0
        self.history: list[EpochResult] = []
        self.rows: list[MetricsRow] = []
        self.best = _BestOrAveragedWeights(gradients)
        self.finished = False
        self.resumed = 0
        """Number of updates that earlier calls had made."""
        # Random states of the checkpoint that is resumed: when its epoch began, and when it was written.
        self.rng_at_epoch_start: dict[str, Any] | None = None
        self.rng_at_checkpoint: dict[str, Any] = {}
        self.checkpointer = Checkpointer(self)
        if checkpoints is not None:
            self.checkpointer.resume(checkpoints)
        self._saved, self._best_on_disk = time.monotonic(), self.checkpointer.best
        # Whether the checkpoint on disk can become the one before the next: not where it is damaged.
        self._has_checkpoint = self.checkpointer.generation == 0
        self.logs = Logs(
            checkpoints,
            config.schedule.last,
            show=show,
            main=fabric.is_global_zero,
            updates=self.state.updates,
        )

    def go(self) -> None:
        """Train the remaining epochs."""
        if self.finished:
            self.model.eval()
            on_main(self.fabric, lambda: self.logs.complete(self.rows))
            return
        schedule, patience = self.config.schedule, self.config.patience
        try:
            with self.logs:
                results = self._epochs()
                self.history = run_with_early_stopping(
                    self.best, results, schedule, patience, self._log_epoch, history=self.history
                )
            if self.gradients.ema is not None and self.best.states is None:
                self.gradients.ema.apply()
            self._reset_posterior()
            self.finished = True
            self._save()
            on_main(self.fabric, lambda: self.logs.complete(self.rows))
        except FloatingPointError as error:
            raise FloatingPointError(f"{error}{self._resume_hint()}") from None
        finally:
            self._reset_posterior()

    def _reset_posterior(self) -> None:
        if self.data.refit is not None:
            self.data.refit.reset()

    def _resume_hint(self) -> str:
        if self.checkpoints is None or not has_state(self.checkpoints.folder / CHECKPOINT):
            return "; no checkpoint was made before"
        return (
            f"; the last good checkpoint is in {self.checkpoints.folder / CHECKPOINT}: train with a lower lr "
            "and CheckpointConfig(..., changed=True), or --changed, to go on from there"
        )

    # --- epochs -----------------------------------------------------------------------------------------

    def _epochs(self) -> Iterator[tuple[float, float | None]]:
        """Yield (loss, held-out NLL) of each epoch; asking for the next one may write a checkpoint."""
        state = self.state
        self.model.train()
        while state.epoch <= self.config.schedule.last:
            batches = self.data.loader.begin(state.epoch, state.batches, self.rng_at_epoch_start)
            # At the beginning of an epoch the random numbers go on from there by themselves.
            if self.rng_at_epoch_start is not None and state.batches:
                set_rng_state(self.rng_at_checkpoint, self.fabric.device)
            self.rng_at_epoch_start = None
            length = num_batches(batches)
            begun, before = time.perf_counter(), state.seen
            loss = run_epoch(
                self.gradients,
                batches,
                self.config.schedule,
                state,
                accumulate=self.config.accumulate,
                on_update=partial(self._after_update, length),
            )
            self.gradients.average_statistics()
            seconds, seen = time.perf_counter() - begun, state.seen - before
            row: MetricsRow = {"epoch": state.epoch, "updates": state.updates, "loss": loss}
            row |= {"held_out": self._held_out(), "lr": self.lr}
            seconds += self._refit_posterior()
            row["seconds"] = seconds
            self.rows.append({**row, "examples_per_second": self.fabric.world_size * seen / seconds})
            state.start_next_epoch()
            yield row["loss"], row["held_out"]  # type: ignore[misc]
            self._save_in_time()

    def _refit_posterior(self) -> float:
        """Fit the posterior that the next epoch is trained under, if there is one; returns its seconds.

        Called at the end of an epoch, so that a checkpoint between two epochs has it, and after the moving
        average was evaluated, which has no such tensors yet.
        """
        begun = time.perf_counter()
        if self.data.refit is not None and self.state.epoch < self.config.schedule.last:
            self.data.refit()
        return time.perf_counter() - begun

    def _log_epoch(self, result: EpochResult) -> None:
        self.history.append(result)
        self.logs.epoch(result, self.rows)

    def _after_update(self, length: int | None, lr: float) -> None:
        state, self.lr = self.state, lr
        check = state.updates % CHECK_EVERY == 0
        if check:
            loss = checked_loss(self.gradients, state, lr)
            share = state.batches / length if length else 0.0
            self.logs.within(state.epoch, share, state.updates, loss, lr)
        # At the end of an epoch a checkpoint waits for the evaluation on held-out data.
        if (
            check or (self.checkpoints is not None and self.checkpoints.seconds == 0)
        ) and state.batches != length:
            self._save_in_time()

    def _held_out(self) -> float | None:
        """Held-out NLL of the moving average where there is one, else of the weights."""
        if self.data.held_out is None:
            return None
        if self.gradients.ema is None:
            return self._held_out_nll(self.data.held_out)
        with self.gradients.ema.applied():
            return self._held_out_nll(self.data.held_out)

    def _held_out_nll(self, held_out: Iterable[Any]) -> float:
        # ddp would exchange buffers at each call, and processes may differ by a batch; under fsdp the wrapper
        # must be called.
        is_sharded = self.data.held_out_is_sharded
        log_probs_of = self.model if is_sharded else self.gradients.module
        # The last batch has another shape, not worth compiling for.
        with self.fabric.autocast(), torch.compiler.set_stance("force_eager"):
            total, weight = nll_sums(self.model, held_out, log_probs_of)
        if is_sharded and self.fabric.world_size > 1:
            sums = torch.tensor([total, weight], dtype=torch.float64, device=self.fabric.device)
            total, weight = self.fabric.all_reduce(sums, reduce_op="sum").tolist()
        return total / weight

    # --- checkpoints ------------------------------------------------------------------------------------

    def _save_in_time(self) -> None:
        if self.checkpoints is None:
            return
        due = time.monotonic() - self._saved >= self.checkpoints.seconds
        if self.fabric.broadcast(due) if self.fabric.world_size > 1 else due:
            self._save()

    def _save(self) -> None:
        if self.checkpoints is None:
            return
        checked_loss(self.gradients, self.state, self.lr)
        check_finite(self.model, self.state, self.lr)
        state, best = self.checkpointer.state(), None if self.finished else full_tensors(self.best.states)
        epoch = 0 if best is None else self.best.epoch
        on_main(self.fabric, lambda: self._write(state, epoch, best))
        self._best_on_disk, self._has_checkpoint = epoch, True
        self._saved = time.monotonic()

    def _write(self, state: dict[str, Any], epoch: int, best: Any) -> None:
        """Write the checkpoint and keep the one before it, each with the weights of its best epoch."""
        assert self.checkpoints is not None
        folder = self.checkpoints.folder
        check_lock(folder)
        if epoch not in (0, self._best_on_disk):
            write_state(folder / best_folder(epoch), {"model": best[0]})
        if self._has_checkpoint:
            # Where somebody has damaged or removed it meanwhile, the one before it stays.
            with suppress(FileNotFoundError, ValueError, LookupError, TypeError):
                copy_state(folder / CHECKPOINT, folder / PREVIOUS)
        write_state(folder / CHECKPOINT, state)
        needed = {best_folder(each) for each in (epoch, self._best_on_disk)}
        remove_states([old for old in folder.glob("best-*") if old.name not in needed])
