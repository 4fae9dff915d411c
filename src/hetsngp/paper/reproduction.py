"""reproduce(): train the rows of a table, measure its columns, and show our numbers beside the paper's."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hetsngp.data.datasets.dataset import ENVIRONMENT
from hetsngp.evaluation.cache import WAIT, clean_writer
from hetsngp.fitting.progress import ExampleProgress
from hetsngp.paper.definitions import TABLES, PaperColumn, PaperPart, PaperRow, PaperTable
from hetsngp.paper.intervals import Resamples, paired_interval, resampled_columns
from hetsngp.paper.measurements import ModelMeasurements, TrainedModel
from hetsngp.paper.plots import draw
from hetsngp.paper.results import PLACES, Result, TableRequest, value_of
from hetsngp.paper.runs import FINISHED, TO_DO, TableRun, all_runs, check_changes, check_recipe, merge, train
from hetsngp.paper.sets import AvailableSets, EvaluationSet, all_evaluation_sets, find_sets
from hetsngp.paper.synthetic.table import FIRST_SEED, reproduce_synthetic, synthetic_states
from hetsngp.training.checkpointing.checkpoint import AMPLITUDE, AMPLITUDE_0_1
from hetsngp.training.main_process import on_main
from hetsngp.validation import check_choice, check_positive


def reproduce(
    table: str,
    *,
    out: str | Path,
    seeds: int | None = None,
    methods: Sequence[str] | None = None,
    changes: Sequence[str] = (),
    recipe: str | None = None,
    one_seed: Sequence[str] = (),
    far: str = PLACES,
    root: str | Path | None = None,
    show: bool = True,
    say: Callable[[str], None] = print,
) -> Any:
    """Reproduce a table of the paper; the same call continues where an earlier one stopped.

    Args:
        table: A name of :data:`TABLES`.
        out: Folder for runs and results. Tables in one folder share runs.
        seeds: Runs of each row; None: as many as the paper's.
        methods: Some rows only, by method (of the ablations: parts); None: all.
        changes: Changes of every recipe, as "schedule.epochs=3". The title of the table names them.
        recipe: A recipe, by name or file, that trains the method of every row in place of the row's own
            recipe; it must be of the same data. Changes apply to it.
        one_seed: Rows that are trained with the first seed only, by method; not of the ablations.
        far: The far-OOD set of CIFAR-100.
        root: Folder of data sets; None: the environment variable HETSNGP_DATA.
        show: Show the progress of a training or a measurement.
        say: Called with every line of output, the table last.
    """
    request = check_request(table, seeds, methods, changes, recipe=recipe, one_seed=one_seed, far=far)
    out = Path(out)
    if table == "runtime":
        from hetsngp.paper.runtime.measurement import measure_runtime

        return measure_runtime(changes=request.changes, out=out, show=show, say=say)
    if table == "synthetic":
        return reproduce_synthetic(request, out, say)
    with _data_in(root), _each_warning_once():
        return _reproduce(request, out, show, say)


def plan_of(
    table: str,
    *,
    out: str | Path,
    seeds: int | None = None,
    methods: Sequence[str] | None = None,
    changes: Sequence[str] = (),
    recipe: str | None = None,
    one_seed: Sequence[str] = (),
    far: str = PLACES,
) -> list[tuple[Any, str]]:
    """Runs that :func:`reproduce` would train, and the state of each: "finished", "begun", "to do"."""
    request = check_request(table, seeds, methods, changes, recipe=recipe, one_seed=one_seed, far=far)
    if table == "runtime":
        return _runtime_states(request.changes, Path(out))
    if table == "synthetic":
        return list(synthetic_states(request, Path(out)))
    return [(run, run.state(Path(out))) for run in all_runs(request)]


def _runtime_states(changes: Sequence[str], out: Path) -> list[tuple[Any, str]]:
    from hetsngp.paper.runtime.definitions import NETWORKS
    from hetsngp.paper.runtime.measurement import Job

    jobs = {
        f"{name}: {row}": Job.of(name, row, network, changes, out)
        for name, network in NETWORKS.items()
        for row in network.rows
    }
    return [(name, TO_DO if job.read() is None else FINISHED) for name, job in jobs.items()]


def check_request(
    table: str,
    seeds: int | None = None,
    methods: Sequence[str] | None = None,
    changes: Sequence[str] = (),
    *,
    recipe: str | None = None,
    one_seed: Sequence[str] = (),
    far: str = PLACES,
) -> TableRequest:
    """Make a request; raises where the table, one of its rows or a key of a change is unknown."""
    complete = TABLES[check_choice("table", table, TABLES)]
    if table == "runtime" and (methods is not None or seeds is not None):
        raise ValueError("the runtime table is measured whole and once: leave out --methods and --seeds")
    if table in ("runtime", "synthetic") and (recipe is not None or one_seed):
        raise ValueError(f"the rows of the table {table} are no recipes: leave out --recipe and --one-seed")
    count = complete.seeds if seeds is None else int(check_positive("seeds", seeds, integer=True))
    chosen, changes = complete.only(methods), merge(changes)
    check_changes(chosen, changes)
    first = FIRST_SEED if table == "synthetic" else 0
    if recipe is not None:
        check_recipe(chosen, recipe)
    few = _check_one_seed(chosen, one_seed)
    request = TableRequest(
        *(chosen, tuple(range(first, first + count)), changes),
        recipe=recipe,
        one_seed=few if count > 1 else (),
        far=far,
    )
    if table != "synthetic":
        for run in all_runs(replace(request, seeds=request.seeds[:1])):
            run.read()  # or an error, before the long part
    return request


def _check_one_seed(table: PaperTable, names: Sequence[str]) -> tuple[str, ...]:
    """Check the names of the rows of one seed; returns them in the order of the table."""
    if names and len(TABLES[table.name].parts) > 1:
        raise ValueError(
            f"the table {table.name} has several parts, and --one-seed names rows of one: leave it out, or "
            "reproduce parts with other --seeds by --methods"
        )
    for name in names:
        check_choice(f"row of {table.name} in --one-seed", name, table.choices)
    return tuple(name for name in table.choices if name in names)


@contextmanager
def _data_in(root: str | Path | None) -> Iterator[None]:
    """Set the environment variable, which worker processes of loaders and Fabric inherit."""
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
    """Show each warning once: many runs open the same data."""
    with warnings.catch_warnings():
        show, seen = warnings.showwarning, set[str]()

        def once(message: Warning | str, *rest: Any, **more: Any) -> None:
            if str(message) not in seen:
                seen.add(str(message))
                show(message, *rest, **more)

        warnings.showwarning = once
        yield


def _reproduce(request: TableRequest, out: Path, show: bool, say: Callable[[str], None]) -> Result:
    from hetsngp.training.engine import Engine

    runs = list(all_runs(request))
    missing = [run for run in runs if run.state(out) != FINISHED]
    sets = find_sets(request.table, dict.fromkeys(run.read().task.data for run in missing), request.far)
    recipe, note = runs[0].read().on_this_machine()
    engine = Engine(recipe.hardware)
    speak = say if engine.is_main else _silent
    if note is not None:
        speak(note)
    if len(missing) < len(runs):
        speak(f"{len(runs) - len(missing)} of {len(runs)} runs are finished already")
    result = Result(request, notes=(*request.table.notes, *sets.notes(request.table)))
    work = _Work(result, out, engine, sets, show, speak, len(runs), missing)
    for seed, part, row in request.rows_by_seed():
        work.fill(part, row, seed)
    return work.finish()


def _silent(text: str) -> None:
    pass


@dataclass(frozen=True, eq=False)
class _Work:
    """Work on a table, row by row."""

    result: Result
    out: Path
    engine: Any
    sets: AvailableSets
    show: bool
    say: Callable[[str], None]
    runs: int
    """Number of runs that the table needs."""
    missing: Sequence[TableRun]
    """Those that are not finished."""
    corrupted: dict[str, Any] = field(default_factory=dict)
    """Corrupted sets that are open."""
    measured: dict[tuple[str, str, int], ModelMeasurements] = field(default_factory=dict)
    """(part, row, seed) → measurements."""

    def fill(self, part: PaperPart, row: PaperRow, seed: int) -> None:
        """Train and measure a row of one seed as far as it is missing, and save the unfinished table."""
        runs = self.result.request.runs_of(row, seed)
        for run in runs:
            self._train(run)
        model = self._model(runs)
        needed = all_evaluation_sets(part.columns, self.sets, model.data)
        measurements = ModelMeasurements(model, needed)
        self.measured[part.name, row.name, seed] = measurements
        found = self._measure(measurements)
        for column in part.columns:
            value = value_of(column, self.sets, model.data, found)
            if value is not None:
                self.result.add(part, row, column, seed, value)
        if self.engine.is_main:
            self.result.save(self.out)

    def finish(self) -> Result:
        """Compare the rows, draw the figure, save and print the table."""
        if self.engine.is_main:
            self._check_amplitudes()
            for part in self.result.table.parts:
                self._compare(part)
            files = [*self.result.save(self.out), self.out / f"{self.result.request.name}.png"]
            with clean_writer(self.out, wait=WAIT):
                draw(self.result, files[-1])
            self.say(str(self.result))
            self.say(f"wrote {', '.join(map(str, files))}")
        return self.result

    def _compare(self, part: PaperPart) -> None:
        """Add the differences from the part's baseline, with their intervals."""
        base = part.baseline
        if base is None or len(part.rows) < 2:
            return
        resamples = Resamples()
        columns: dict[tuple[str, int], dict[str, Any]] = {}
        for (name, method, seed), measurements in self.measured.items():
            if name == part.name:
                columns[method, seed] = resampled_columns(
                    part.columns, self.sets, measurements.model.data, measurements.examples, resamples
                )

        def of(row: PaperRow, column: PaperColumn) -> dict[int, tuple[float, Any]]:
            values = self.result.cell(part, row, column).values
            return {
                seed: (values[seed], found[column.name])
                for (name, seed), found in columns.items()
                if name == row.name and column.name in found
            }

        for row in part.rows:
            for column in part.columns if row is not base else ():
                interval = paired_interval(of(row, column), of(base, column), resamples)
                if interval is not None:
                    self.result.intervals[part.name, row.name, column.name] = interval

    def _check_amplitudes(self) -> None:
        """Say where runs of one recipe have different amplitudes: the default has changed since 0.1."""
        found: dict[tuple[str, tuple[str, ...]], dict[float, str]] = {}
        for name, run in self.result.runs.items():
            found.setdefault((run["recipe"], tuple(run["changes"])), {})[run["amplitude"]] = name
        for names in found.values():
            if len(names) > 1:
                which = " and ".join(f"{name} ({amplitude:g})" for amplitude, name in sorted(names.items()))
                self.say(
                    f"amplitudes differ: {which}. The default was 10 in release 0.1: train again in another "
                    "--out, or --set options.amplitude=10"
                )

    def _train(self, run: TableRun) -> None:
        if run.name in self.result.runs:
            return
        if run in self.missing:
            self.say(f"{run.name}: training, run {len(self.result.runs) + 1} of {self.runs}")
            if self.engine.hardware.compile:
                torch.compiler.reset()  # code compiled for other networks counts towards a limit
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
            "amplitude": summary.get(AMPLITUDE, AMPLITUDE_0_1),
        }

    def _model(self, runs: Sequence[TableRun]) -> TrainedModel:
        folders = tuple(run.folder(self.out) for run in runs)
        folder = folders[0]
        if len(runs) > 1:
            folder = self.out / "ensembles" / f"{runs[0].name}-to-{runs[-1].seed}"
        return TrainedModel(folders, folder / "measured", runs[0].read().task.data)

    def _measure(self, measurements: ModelMeasurements) -> dict[EvaluationSet, Any]:
        """Measure what is missing; processes share the sets."""
        fabric = self.engine.fabric
        on_main(fabric, measurements.cache.clean)
        missing = measurements.missing()
        fabric.barrier()  # all processes have read the same files before the first new one
        begun = time.perf_counter()
        if missing:
            folder = measurements.model.measured.parent.relative_to(self.out)
            mine = missing[fabric.global_rank :: fabric.world_size]
            show = self.show and self.engine.is_main
            with ExampleProgress(f"measuring {folder}", len(mine), show) as progress:
                for examples in measurements.measure(mine, self.engine.device, opened=self.corrupted):
                    progress.add(examples)
            fabric.barrier()
            self.say(f"{folder}: measured on {len(missing)} sets in {time.perf_counter() - begun:.0f} s")
        return {each: measurements.read(each) for each in measurements.sets}
