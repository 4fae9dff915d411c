"""reproduce(): train the rows of a table, measure its columns, and show ours beside the paper's."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetsngp.data.datasets.roots import ENVIRONMENT
from hetsngp.evaluation.cache import code_fingerprint
from hetsngp.fitting.progress import RowProgress
from hetsngp.paper.measurements import Candidate, Measuring, value_of
from hetsngp.paper.plots import draw
from hetsngp.paper.results import Asked, Result
from hetsngp.paper.runs import FINISHED, TO_DO, TableRun, all_runs, check_changes, merge, runs_of, train
from hetsngp.paper.sets import Probe, Sets, all_probes, find_sets
from hetsngp.paper.synthetic.table import FIRST_SEED, reproduce_synthetic, synthetic_states
from hetsngp.paper.tables import TABLES, PaperPart, PaperRow
from hetsngp.validation import check_choice, check_positive


def reproduce(
    table: str,
    *,
    out: str | Path,
    seeds: int | None = None,
    methods: Sequence[str] | None = None,
    changes: Sequence[str] = (),
    far: str = "places365",
    root: str | Path | None = None,
    show: bool = True,
    say: Callable[[str], None] = print,
) -> Any:
    """Run a table of the paper; the same call goes on where an earlier one stopped.

    Args:
        table: A name of :data:`TABLES`.
        out: Folder for runs and results. Tables in one folder share runs.
        seeds: Runs of each row; None: as many as the paper's.
        methods: Some rows only, by method (of the ablations: parts); None: all.
        changes: Of every recipe, as "schedule.epochs=3". The title of the table says them.
        far: The set that is far from CIFAR-100.
        root: Where data sets lie; None: the environment variable HETSNGP_DATA.
        show: Show how far a training or a measurement is.
        say: Called with what there is to say, line by line, the table last.
    """
    asked, out = ask(table, seeds, methods, changes), Path(out)
    if table == "runtime":
        from hetsngp.paper.runtime.measurement import measure_runtime

        return measure_runtime(changes=asked.changes, out=out, show=show, say=say)
    if table == "synthetic":
        return reproduce_synthetic(asked, out, say)
    with _data_in(root), _each_warning_once():
        return _reproduce(asked, out, far, show, say)


def plan_of(
    table: str,
    *,
    out: str | Path,
    seeds: int | None = None,
    methods: Sequence[str] | None = None,
    changes: Sequence[str] = (),
    far: str = "places365",
) -> list[tuple[Any, str]]:
    """What :func:`reproduce` would train, and how far each is: "finished", "begun", "to do"."""
    asked = ask(table, seeds, methods, changes)
    if table == "runtime":
        return _runtime_states(asked.changes, Path(out))
    if table == "synthetic":
        return list(synthetic_states(asked, Path(out)))
    return [(run, run.state(Path(out))) for run in all_runs(asked.table, asked.changes, len(asked.seeds))]


def _runtime_states(changes: Sequence[str], out: Path) -> list[tuple[Any, str]]:
    from hetsngp.paper.runtime.measurement import Job
    from hetsngp.paper.runtime.tables import NETWORKS

    code = code_fingerprint("hetsngp.training.images", "hetsngp.paper.measurements")
    jobs = {
        f"{name}: {row}": Job.of(name, row, network, changes, code, out)
        for name, network in NETWORKS.items()
        for row in network.rows
    }
    return [(name, TO_DO if job.read() is None else FINISHED) for name, job in jobs.items()]


def ask(
    table: str, seeds: int | None = None, methods: Sequence[str] | None = None, changes: Sequence[str] = ()
) -> Asked:
    """What is asked for, checked: the table is known, its rows are, and so is every key of a change."""
    whole = TABLES[check_choice("table", table, TABLES)]
    if table == "runtime" and (methods is not None or seeds is not None):
        raise ValueError("the runtime table is measured whole and once: leave out --methods and --seeds")
    count = whole.seeds if seeds is None else int(check_positive("seeds", seeds, integer=True))
    chosen, changes = whole.only(methods), merge(changes)
    check_changes(chosen, changes)
    first = FIRST_SEED if table == "synthetic" else 0
    asked = Asked(chosen, tuple(range(first, first + count)), changes)
    if table != "synthetic":
        for run in all_runs(chosen, changes, 1):
            run.read()  # or an error, before the long part
    return asked


@contextmanager
def _data_in(root: str | Path | None) -> Iterator[None]:
    """By the environment, where loaders' and Fabric's processes find it too."""
    if root is None:
        yield
        return
    before = os.environ.get(ENVIRONMENT)
    os.environ[ENVIRONMENT] = str(root)
    try:
        yield
    finally:
        if before is None:
            del os.environ[ENVIRONMENT]
        else:
            os.environ[ENVIRONMENT] = before


@contextmanager
def _each_warning_once() -> Iterator[None]:
    """Many runs look at the same data: what is odd about it is said once."""
    with warnings.catch_warnings():
        show, seen = warnings.showwarning, set[str]()

        def once(message: Warning | str, *rest: Any, **more: Any) -> None:
            if str(message) not in seen:
                seen.add(str(message))
                show(message, *rest, **more)

        warnings.showwarning = once
        yield


def _reproduce(asked: Asked, out: Path, far: str, show: bool, say: Callable[[str], None]) -> Result:
    from hetsngp.training.engine import Engine

    runs = list(all_runs(asked.table, asked.changes, len(asked.seeds)))
    missing = [run for run in runs if run.state(out) != FINISHED]
    sets = find_sets(asked.table, dict.fromkeys(run.read().task.data for run in missing), far)
    recipe, note = runs[0].read().on_this_machine()
    engine = Engine(recipe.hardware)
    speak = say if engine.is_main else _silent
    if note is not None:
        speak(note)
    if len(missing) < len(runs):
        speak(f"{len(runs) - len(missing)} of {len(runs)} runs are finished already")
    result = Result(asked, notes=(*asked.table.notes, *sets.notes(asked.table)))
    work = _Work(result, out, engine, sets, show, speak, len(runs))
    for seed in asked.seeds:
        for part in asked.table.parts:
            for row in part.rows:
                work.fill(part, row, seed)
    return work.finish()


def _silent(text: str) -> None:
    pass


@dataclass(frozen=True, eq=False)
class _Work:
    """A table on its way from cell to cell."""

    result: Result
    out: Path
    engine: Any
    sets: Sets
    show: bool
    say: Callable[[str], None]
    runs: int
    """All that the table needs."""

    def fill(self, part: PaperPart, row: PaperRow, seed: int) -> None:
        """A row of one seed: train what it needs, measure what is missing, keep the table as it is."""
        runs = runs_of(row, self.result.asked.changes, seed)
        for run in runs:
            self._train(run)
        candidate = self._candidate(row, runs)
        found = self._measure(candidate, all_probes(part.columns, self.sets, candidate.data))
        for column in part.columns:
            value = value_of(column, self.sets, candidate.data, found)
            if value is not None:
                self.result.add(part, row, column, seed, value)
        if self.engine.is_main:
            self.result.save(self.out)

    def finish(self) -> Result:
        """The picture, and all of it in words."""
        if self.engine.is_main:
            files = [*self.result.save(self.out), self.out / f"{self.result.asked.name}.png"]
            draw(self.result, files[-1])
            self.say(str(self.result))
            self.say(f"wrote {', '.join(map(str, files))}")
        return self.result

    def _train(self, run: TableRun) -> None:
        if run.name in self.result.runs:
            return
        if run.state(self.out) != FINISHED:
            self.say(f"{run.name}: training, run {len(self.result.runs) + 1} of {self.runs}")
            if self.engine.hardware.compile:
                torch.compiler.reset()  # what was compiled for other networks counts towards a limit
        summary = train(run, self.out, self.engine, self.show and self.engine.is_main)
        self.result.runs[run.name] = {
            "recipe": run.recipe,
            "changes": list(run.changes),
            "seed": run.seed,
            "settings": summary["recipe"],
            "seconds": summary["seconds"],
            "epochs": summary["epochs"],
            "held_out": summary["held_out"],
            "posterior": summary["posterior"],
        }

    def _candidate(self, row: PaperRow, runs: Sequence[TableRun]) -> Candidate:
        folders = tuple(run.folder(self.out) for run in runs)
        home = folders[0]
        if len(runs) > 1:
            home = self.out / "ensembles" / f"{runs[0].name}-to-{runs[-1].seed}"
        return Candidate(folders, home / "measured", runs[0].read().task.data)

    def _measure(self, candidate: Candidate, probes: Sequence[Probe]) -> dict[Probe, Any]:
        """Sets are dealt out over processes."""
        fabric = self.engine.fabric
        measuring = Measuring(candidate, probes)
        todo = measuring.to_do()
        fabric.barrier()  # all have seen the same files before the first new one
        begun = time.perf_counter()
        if todo:
            home = candidate.measured.parent.relative_to(self.out)
            mine = todo[fabric.global_rank :: fabric.world_size]
            with RowProgress(f"measuring {home}", len(mine), self.show and self.engine.is_main) as progress:
                for rows in measuring.measure(mine, self.engine.device):
                    progress.add(rows)
            fabric.barrier()
            self.say(f"{home}: measured on {len(todo)} sets in {time.perf_counter() - begun:.0f} s")
        return {probe: measuring.read(probe) for probe in probes}
