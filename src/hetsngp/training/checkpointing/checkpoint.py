"""Checkpoint of a run: everything that the rest of the run depends on, as one nested state."""

from __future__ import annotations

import errno
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hetsngp.fitting.early_stopping import EpochResult
from hetsngp.fitting.loop import TrainState
from hetsngp.io.storage import ArtifactError
from hetsngp.limits import is_out_of_memory
from hetsngp.training.checkpointing.checkpoint_files import has_state, read_state
from hetsngp.training.checkpointing.state_checks import check_finite_weights, check_randomness, check_state
from hetsngp.training.checkpointing.state_dicts import STATISTICS, full_tensors, load_model, load_optimizer
from hetsngp.training.config import CheckpointConfig
from hetsngp.training.logs import COLUMNS, MetricsRow
from hetsngp.training.recipes.keys import current_config
from hetsngp.training.same_data import FINGERPRINTS, check_same_data, with_paths_now

if TYPE_CHECKING:
    from hetsngp.training.run import TrainingRun

CHECKPOINT, PREVIOUS = "checkpoint", "checkpoint-previous"
"""Folders of the last checkpoint and of the one before it."""
NONE, UNREADABLE = 2, 3
"""What a process has found where it is not the number of a generation."""


def best_folder(epoch: int) -> str:
    """Name of the folder with the weights of the best epoch."""
    return f"best-{epoch:05d}"


AMPLITUDE, GIVEN_AMPLITUDE = "amplitude", "options.amplitude"
"""Keys of the amplitude that a run has, and of the one that was given."""
AMPLITUDE_0_1 = 10.0
"""Default of release 0.1, which its checkpoints do not name."""


def read_rows(folder: Path) -> list[MetricsRow]:
    """Rows of metrics.csv from the checkpoint of a run."""
    state = read_state(folder / CHECKPOINT)
    try:
        check_state(state)
    except ValueError as error:
        raise ArtifactError(f"{folder / CHECKPOINT} is damaged: {error}") from error
    return _rows(state["rows"], state["watched"])


def read_about(folder: Path) -> dict[str, Any] | None:
    """Description of data and model that the run in ``folder`` began with; None without a checkpoint."""
    for name in (CHECKPOINT, PREVIOUS):
        try:
            return _with_amplitude(dict(read_state(folder / name)["about"]))
        except (OSError, ArtifactError, KeyError, TypeError, ValueError):
            continue
    return None


def _with_amplitude(about: dict[str, Any]) -> dict[str, Any]:
    return {AMPLITUDE: about.get(GIVEN_AMPLITUDE, AMPLITUDE_0_1), **about}


class Checkpointer:
    """Makes the state of a run for a checkpoint, and restores a run from it."""

    def __init__(self, run: TrainingRun) -> None:
        self.run, self.fabric = run, run.fabric
        self.generation: int | None = None
        """Checkpoint that the run was resumed from: 0, or 1 for the one before it; None: it begins."""
        self.best = 0
        """Best epoch whose weights belong to that checkpoint, in a folder of their own; 0: none."""

    # --- to a state -------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """State of the run, with the keys that release 0.1 wrote; a collective call."""
        run, gradients, ema = self.run, self.run.gradients, self.run.gradients.ema
        now = run.data.loader.randomness()
        at_start = now if run.state.batches == 0 else run.data.loader.rng_at_epoch_start
        model = run.model.state_dict()
        return {
            "plan": run.config.describe(),
            "about": self._about(),
            FINGERPRINTS: run.data.fingerprints,
            "world_size": self.fabric.world_size,
            "batch": run.data.loader.batch_size,
            "place": {**vars(run.state), "total": gradients.mean_total(run.state)},
            "rate": run.lr,
            "rows": _table(run.rows),
            "watched": run.data.held_out is not None,
            "best": run.best.epoch,
            "finished": run.finished,
            "model": full_tensors(model),
            # How a multi-input network (MIMO) takes its inputs, which the first batch decides.
            "entrance": getattr(run.model, "_stacked_inputs", None),
            "optimizer": full_tensors(gradients.optimizer.state_dict()),
            "average": None if ema is None else {"steps": ema.steps, "state": full_tensors(ema.state)},
            "statistics": [self._gather(_statistics(s)) for s in (model, ema.state if ema else {})],
            "scaler": None if gradients.scaler is None else gradients.scaler.state_dict(),
            "points": gradients.points.get_state(),
            "rng": self._gather(now["rng"]),
            "epoch_rng": self._gather(at_start["rng"]),
            "loader": at_start["generators"],
        }

    def _about(self) -> dict[str, Any]:
        """Description of data and model, which a resumed run cannot change."""
        assert self.run.checkpoints is not None
        return {**self.run.data.about, **self.run.checkpoints.about}

    def _gather(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Stack each tensor over processes: (processes, …)."""
        if self.fabric.world_size == 1:
            return {name: value[None] for name, value in state.items()}
        return {name: self.fabric.all_gather(value.to(self.fabric.device)) for name, value in state.items()}

    # --- from a state -----------------------------------------------------------------------------------

    def resume(self, checkpoints: CheckpointConfig) -> None:
        """Restore the run from the checkpoint in the folder, if there is one; a collective call.

        Where it is damaged the one before it is taken, with a warning.
        """
        folders = [checkpoints.folder / name for name in (CHECKPOINT, PREVIOUS)]
        generation, state, problems = self._newest(folders, 0)
        if self.fabric.world_size > 1:
            found = self.fabric.all_gather(torch.tensor(generation, device=self.fabric.device))
            if bool((found == NONE).any()) and not bool((found == NONE).all()):
                raise ValueError(
                    f"some processes find a checkpoint in {folders[0]} and some do not: all need the same "
                    "folder, on a file system that nodes share"
                )
            if int(found.amax()) != generation:
                elsewhere = ArtifactError(f"another process cannot read {folders[generation]}")
                generation, state, problems = self._newest(folders, int(found.amax()))
                problems.insert(0, elsewhere)
        if generation == UNREADABLE:
            raise problems[0]
        if state is None:
            return
        if problems and self.fabric.is_global_zero:
            warnings.warn(
                f"{problems[0]}; resuming from the checkpoint before it, {folders[1].name}, with "
                f"{state['place']['updates']} updates",
                stacklevel=2,
            )
        self.generation = generation
        try:
            self._resume(state, checkpoints)
        except (LookupError, TypeError, AttributeError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            raise ArtifactError(
                f"{folders[generation]} cannot be resumed: {type(error).__name__}: {str(error)[:300]}"
            ) from error

    def _newest(
        self, folders: list[Path], first: int
    ) -> tuple[int, dict[str, Any] | None, list[ArtifactError | OSError]]:
        """Newest state of the generations ``first`` and later that can be read, with its number.

        Without one, the number is NONE, or UNREADABLE where there are damaged ones, which are in the list.
        """
        problems: list[ArtifactError | OSError] = []
        there = [has_state(folder) for folder in folders]
        for generation in range(first, len(folders)):
            folder = folders[generation]
            if any(there[generation:]):
                try:
                    return generation, self._read(folder), problems
                except (ArtifactError, FileNotFoundError) as error:
                    problems.append(error)
                except OSError as error:
                    problems.append(error)
                    if error.errno != errno.EIO:  # anything but a damaged disk can be mended
                        break
        return UNREADABLE if problems or first > NONE else NONE, None, problems

    def _read(self, folder: Path) -> dict[str, Any]:
        """Read and check a checkpoint, with the weights of its best epoch as ``best_model``."""
        state, model = read_state(folder), self.run.model
        names = [name for name, _ in model.named_parameters()]
        try:
            check_state(state)
            state["plan"] = current_config(state["plan"])
            for weights in (state["model"], (state["average"] or {}).get("state", {})):
                check_finite_weights(weights, names)
            if state["world_size"] == self.fabric.world_size:
                check_randomness(state, self.fabric.global_rank, self.fabric.device)
            if state["best"] and state["plan"].get("best", True) and not state["finished"]:
                best = read_state(folder.parent / best_folder(state["best"]))
                check_finite_weights(best["model"], names)
                state["best_model"] = best["model"]
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, ArtifactError):
                raise
            raise ArtifactError(f"{folder} is damaged: {error}") from error
        return state

    def _resume(self, state: dict[str, Any], checkpoints: CheckpointConfig) -> None:
        run, gradients = self.run, self.run.gradients
        self._check(state, checkpoints)
        load_model(run.model, state["model"])
        if state["entrance"] is not None:
            run.model._stacked_inputs = state["entrance"]
        if state["plan"]["schedule"]["optimizer"] == run.config.schedule.optimizer:
            load_optimizer(gradients.optimizer, state["optimizer"])
        if gradients.ema is not None and state["average"] is not None:
            gradients.ema.load(state["average"]["steps"], state["average"]["state"])
        if gradients.scaler is not None and state["scaler"] is not None:
            gradients.scaler.load_state_dict(state["scaler"])
        gradients.points.set_state(state["points"])
        run.state, run.lr = TrainState(**state["place"]), state["rate"]
        run.state.total = state["place"]["total"].to(self.fabric.device)
        run.resumed = gradients.updates = run.state.updates
        run.rows = _rows(state["rows"], state["watched"])
        last = run.config.schedule.last
        run.history = [EpochResult(r["epoch"], last, r["loss"], r["held_out"]) for r in run.rows]  # type: ignore[arg-type]
        run.finished, run.best.epoch = state["finished"], state["best"]
        if "best_model" in state:
            self.best = run.best.epoch
            run.best.states = [state["best_model"]] if run.config.best else None
        if state["world_size"] == self.fabric.world_size:
            self._restore_process(state)
        else:
            self._rescale(run.state, state["world_size"], state.get("batch"))

    def _rescale(self, state: TrainState, processes: int, batch: int | None) -> None:
        """Convert the counts of ``state``, those of one of ``processes``, to the number of processes now.

        ``batch``: examples that a process had in a batch.
        """
        now = self.fabric.world_size
        state.seen = state.seen * processes // now
        state.total = state.total * processes / now
        if not self.run.data.loader.is_device_loader:  # a batch of a DeviceLoader is one of all processes
            group, size = self.run.config.accumulate, self.run.data.loader.batch_size
            then, of_now = (processes * batch, now * size) if batch and size else (processes, now)
            state.batches = state.batches * then // of_now // group * group

    def _check(self, state: dict[str, Any], checkpoints: CheckpointConfig) -> None:
        folder = checkpoints.folder
        now = self._about()
        before = dict(state["about"])
        if AMPLITUDE in now:  # it decides, whether it was given or the default
            now, before = ({**about, GIVEN_AMPLITUDE: None} for about in (now, _with_amplitude(before)))
        if checkpoints.fingerprints is not None and FINGERPRINTS in state:
            before = with_paths_now(before, now)  # contents are compared
        # First, because it says which part of the data differs.
        check_same_data(folder, state.get(FINGERPRINTS), self.run.data.fingerprints)
        changes = differences(now, before)
        if changes:
            raise ValueError(
                f"{folder} holds a run on other data ({'; '.join(changes)}): resume with those it "
                "began with, or give another folder"
            )
        changes = differences(self.run.config.describe(), state["plan"])
        if changes and state["finished"]:
            raise ValueError(
                f"{folder} holds a finished run with another configuration ({'; '.join(changes)}): "
                "give another folder"
            )
        if changes and not checkpoints.changed:
            raise ValueError(
                f"{folder} holds a run with another configuration ({'; '.join(changes)}): give "
                "another folder, or CheckpointConfig(..., changed=True), or --changed, to use the new one"
            )
        if self.run.config.best and state["best"] and not state["plan"].get("best", True):
            raise ValueError(
                f"the run in {folder} did not keep the weights of its best epoch, number "
                f"{state['best']}: go on with best=False, as it began, or give another folder"
            )

    def _restore_process(self, state: dict[str, Any]) -> None:
        """Restore the random numbers and BatchNorm statistics of this process."""
        run, mine = self.run, self.fabric.global_rank
        begun, run.rng_at_checkpoint = (
            {name: value[mine] for name, value in state[key].items()} for key in ("epoch_rng", "rng")
        )
        run.rng_at_epoch_start = {"rng": begun, "generators": state["loader"]}
        ema = run.gradients.ema
        owners = (run.model.state_dict(), {} if ema is None else ema.state)
        for own, saved in zip(owners, state["statistics"], strict=True):
            for name, value in saved.items():
                if name in own:
                    own[name].copy_(value[mine])


def check_finite(model: nn.Module, state: TrainState, lr: float) -> None:
    """Raise if weights are not finite, which must not replace a good checkpoint; a collective call."""
    sums = full_tensors([p.detach().sum().float() for p in model.parameters()])
    if not bool(torch.stack(sums).isfinite().all()):
        raise FloatingPointError(
            f"the weights are not finite after update {state.updates}, in epoch {state.epoch}: lower lr "
            f"(now {lr:g})"
        )


def _statistics(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name.endswith(STATISTICS)}


def _table(rows: list[MetricsRow]) -> Tensor:
    """Rows of metrics.csv as a tensor (epochs, columns) in float64; NaN for None."""
    values = [
        [float("nan") if row[name] is None else float(row[name] or 0) for name in COLUMNS] for row in rows
    ]
    return torch.tensor(values, dtype=torch.float64).reshape(len(rows), len(COLUMNS))


def _rows(table: Tensor, has_held_out: bool) -> list[MetricsRow]:
    rows: list[MetricsRow] = []
    for values in table.tolist():
        row: MetricsRow = dict(zip(COLUMNS, values, strict=True))
        row |= {name: int(row[name] or 0) for name in ("epoch", "updates")}
        rows.append(row if has_held_out else {**row, "held_out": None})
    return rows


def differences(new: dict[str, Any], old: dict[str, Any]) -> list[str]:
    """Fields that differ, as text."""
    found = []
    for name in sorted(new.keys() | old.keys()):
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(b, a)
        elif a != b:
            found.append(f"{name} {a!r}, now {b!r}")
    return found
