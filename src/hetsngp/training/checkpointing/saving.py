"""All that the rest of a run depends on, as a state to be written, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hetsngp.fitting.early_stopping import EpochResult
from hetsngp.fitting.loop import TrainState
from hetsngp.training.checkpointing.states import STATISTICS, load_model, load_optimizer, whole
from hetsngp.training.checkpointing.storage import has_state, read_state
from hetsngp.training.config import CheckpointConfig
from hetsngp.training.logs import COLUMNS, Row
from hetsngp.training.recipes.keys import current_config

if TYPE_CHECKING:
    from hetsngp.training.run import TrainingRun

CHECKPOINT = "checkpoint"


def best_folder(epoch: int) -> str:
    """Where the weights of the best epoch are kept."""
    return f"best-{epoch:05d}"


class Saving:
    """Between a run and its states."""

    def __init__(self, run: TrainingRun) -> None:
        self.run, self.fabric = run, run.fabric

    # --- to a state -------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """A call of all processes."""
        run, gradients, average = self.run, self.run.gradients, self.run.gradients.average
        now = run.data.feed.randomness()
        begun_with = now if run.place.batches == 0 else run.data.feed.before
        model = run.model.state_dict()
        return {
            "plan": run.plan.describe(),
            "about": self._about(),
            "world_size": self.fabric.world_size,
            "batch": run.data.feed.rows,
            "place": {**vars(run.place), "total": gradients.mean_total(run.place)},
            "rate": run.rate,
            "rows": _table(run.rows),
            "watched": run.data.held_out is not None,
            "best": run.best.epoch,
            "finished": run.finished,
            "model": whole(model),
            # How inputs enter a network of several (MIMO), which is tried out at the first batch.
            "entrance": getattr(run.model, "_entrance", None),
            "optimizer": whole(gradients.optimizer.state_dict()),
            "average": None if average is None else {"steps": average.steps, "state": whole(average.state)},
            "statistics": [self._of_all(_statistics(s)) for s in (model, average.state if average else {})],
            "scaler": None if gradients.scaler is None else gradients.scaler.state_dict(),
            "points": gradients.points.get_state(),
            "rng": self._of_all(now["rng"]),
            "epoch_rng": self._of_all(begun_with["rng"]),
            "loader": begun_with["generators"],
        }

    def _about(self) -> dict[str, Any]:
        """What a run cannot change: its data."""
        assert self.run.keep is not None
        return {**self.run.data.about, **self.run.keep.about}

    def _of_all(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """(processes, ·) of each tensor."""
        if self.fabric.world_size == 1:
            return {name: value[None] for name, value in state.items()}
        return {name: self.fabric.all_gather(value.to(self.fabric.device)) for name, value in state.items()}

    # --- from a state -----------------------------------------------------------------------------------

    def resume(self, keep: CheckpointConfig) -> None:
        """Go on from the checkpoint in the folder, if there is one."""
        folder = keep.folder / CHECKPOINT
        there = has_state(folder)
        if self.fabric.world_size > 1:
            seen = self.fabric.all_gather(torch.tensor(float(there), device=self.fabric.device))
            if bool(seen.amin() != seen.amax()):
                raise ValueError(
                    f"some processes find a checkpoint in {folder} and some do not: all need the same "
                    "folder, on a file system that nodes share"
                )
        if there:
            self._resume(read_state(folder), keep)

    def _resume(self, state: dict[str, Any], keep: CheckpointConfig) -> None:
        run, gradients = self.run, self.run.gradients
        state["plan"] = current_config(state["plan"])
        self._check(state, keep)
        load_model(run.model, state["model"])
        if state["entrance"] is not None:
            run.model._entrance = state["entrance"]
        if state["plan"]["schedule"]["optimizer"] == run.plan.schedule.optimizer:
            load_optimizer(gradients.optimizer, state["optimizer"])
        if gradients.average is not None and state["average"] is not None:
            gradients.average.load(state["average"]["steps"], state["average"]["state"])
        if gradients.scaler is not None and state["scaler"] is not None:
            gradients.scaler.load_state_dict(state["scaler"])
        gradients.points.set_state(state["points"])
        run.place, run.rate = TrainState(**state["place"]), state["rate"]
        run.place.total = state["place"]["total"].to(self.fabric.device)
        run.resumed = gradients.updates = run.place.updates
        run.rows = _rows(state["rows"], state["watched"])
        last = run.plan.schedule.last
        run.history = [EpochResult(r["epoch"], last, r["loss"], r["held_out"]) for r in run.rows]  # type: ignore[arg-type]
        run.finished, run.best.epoch = state["finished"], state["best"]
        if run.best.epoch and run.plan.best and not run.finished:
            run.best.states = [read_state(keep.folder / best_folder(run.best.epoch))["model"]]
        if state["world_size"] == self.fabric.world_size:
            self._restore_own(state)
        else:
            self._share_anew(run.place, state["world_size"], state.get("batch"))

    def _share_anew(self, place: TrainState, processes: int, batch: int | None) -> None:
        """A place counts what one process has seen: of so many then, of others now; ``batch``: the rows that
        a process had in a batch, which may be fewer where there are more of them.
        """
        now = self.fabric.world_size
        place.seen = place.seen * processes // now
        place.total = place.total * processes / now
        if not self.run.data.feed.ours:  # a batch of ours is one of all processes
            group, rows = self.run.plan.accumulate, self.run.data.feed.rows
            then, of_now = (processes * batch, now * rows) if batch and rows else (processes, now)
            place.batches = place.batches * then // of_now // group * group

    def _check(self, state: dict[str, Any], keep: CheckpointConfig) -> None:
        changes = _differences(self._about(), state["about"])
        if changes:
            raise ValueError(
                f"{keep.folder} holds a run on other data ({'; '.join(changes)}): resume with those it began "
                "with, or give another folder"
            )
        changes = _differences(self.run.plan.describe(), state["plan"])
        if changes and state["finished"]:
            raise ValueError(
                f"{keep.folder} holds a finished run by another plan ({'; '.join(changes)}): give "
                "another folder"
            )
        if changes and not keep.changed:
            raise ValueError(
                f"{keep.folder} holds a run by another plan ({'; '.join(changes)}): give another "
                "folder, or Keep(..., changed=True), or --changed, to go on by the new plan"
            )
        if self.run.plan.best and state["best"] and not state["plan"].get("best", True):
            raise ValueError(
                f"the run in {keep.folder} did not keep the weights of its best epoch, number "
                f"{state['best']}: go on with best=False, as it began, or give another folder"
            )

    def _restore_own(self, state: dict[str, Any]) -> None:
        """What each process has for itself."""
        run, mine = self.run, self.fabric.global_rank
        begun, run.then = (
            {name: value[mine] for name, value in state[key].items()} for key in ("epoch_rng", "rng")
        )
        run.begun_with = {"rng": begun, "generators": state["loader"]}
        average = run.gradients.average
        owners = (run.model.state_dict(), {} if average is None else average.state)
        for own, saved in zip(owners, state["statistics"], strict=True):
            for name, value in saved.items():
                if name in own:
                    own[name].copy_(value[mine])


def check_finite(model: nn.Module, place: TrainState, rate: float) -> None:
    """Weights that are not numbers must not take the place of a good checkpoint; a call of all processes."""
    sums = whole([p.detach().sum().float() for p in model.parameters()])
    if not bool(torch.stack(sums).isfinite().all()):
        raise FloatingPointError(
            f"the weights are not finite after update {place.updates}, in epoch {place.epoch}: lower lr "
            f"(now {rate:g})"
        )


def _statistics(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name.endswith(STATISTICS)}


def _table(rows: list[Row]) -> Tensor:
    """(epochs, columns) in float64; NaN for None."""
    values = [
        [float("nan") if row[name] is None else float(row[name] or 0) for name in COLUMNS] for row in rows
    ]
    return torch.tensor(values, dtype=torch.float64).reshape(len(rows), len(COLUMNS))


def _rows(table: Tensor, watched: bool) -> list[Row]:
    rows: list[Row] = []
    for values in table.tolist():
        row: Row = dict(zip(COLUMNS, values, strict=True))
        row |= {name: int(row[name] or 0) for name in ("epoch", "updates")}
        rows.append(row if watched else {**row, "held_out": None})
    return rows


def _differences(new: dict[str, Any], old: dict[str, Any]) -> list[str]:
    """What has changed."""
    found = []
    for name in sorted(new.keys() | old.keys()):
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(b, a)
        elif a != b:
            found.append(f"{name} {a!r}, now {b!r}")
    return found
