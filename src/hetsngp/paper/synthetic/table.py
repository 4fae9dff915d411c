"""The paper's synthetic tasks as a table: the runs and figures of ``hetsngp demo``, on other seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hetsngp.evaluation.cache import WAIT, clean_writer
from hetsngp.paper.plots import draw
from hetsngp.paper.results import Result, TableRequest
from hetsngp.paper.synthetic.demo import DemoConfig, draw_figures
from hetsngp.paper.synthetic.processes import Step, run_all
from hetsngp.paper.synthetic.store import Store

FIRST_SEED = 200
"""Settings were chosen on seeds 0 to 4 and 100: see hetsngp.paper.synthetic.experiment."""
EPOCHS = "schedule.epochs"
NUMBERS = {"accuracy": "accuracy", "auroc": "ood_auroc"}
"""Metric of a column → name in a run's numbers."""


def config_for(request: TableRequest) -> DemoConfig:
    """Runs of every task with every row, for every seed."""
    (part,) = request.table.parts
    tasks = tuple(column.data for column in part.columns)
    methods = tuple(row.recipe for row in part.rows)
    return DemoConfig(tasks, methods, request.seeds, epochs=_epochs(request.changes))


def synthetic_states(request: TableRequest, out: Path) -> list[tuple[str, str]]:
    """State of every run: its name, and "finished" or "to do"."""
    config, store = config_for(request), Store.open(out / "synthetic")
    return [
        (run.name, "finished" if store.has(run, maps=config.has_maps(run)) else "to do")
        for run in config.runs()
    ]


def reproduce_synthetic(
    request: TableRequest, out: Path, say: Callable[[str], None], jobs: int | None = None
) -> Result:
    """Train what is not in ``out/synthetic`` yet; the figures are of the first seed."""
    config, store = config_for(request), Store.open(out / "synthetic")
    runs = config.runs()
    todo = [run for run in runs if not store.has(run, maps=config.has_maps(run))]
    if len(todo) < len(runs):
        say(f"{len(runs) - len(todo)} of {len(runs)} runs are finished already")
    done = 0

    def on_step(step: Step) -> None:
        nonlocal done
        if step.kind == "done":
            done += 1
            say(f"{done}/{len(todo)}  {step.run.name}")

    run_all(todo, store, maps=config.has_maps, workers=jobs, on_step=on_step)
    results = store.results(runs)
    result = Result(request, notes=request.table.notes)
    (part,) = request.table.parts
    for run in sorted(runs, key=lambda run: (run.seed, run.name)):
        numbers = results[run]["numbers"]
        row = next(row for row in part.rows if row.recipe == run.method)
        column = next(column for column in part.columns if column.data == run.task)
        result.add(part, row, column, run.seed, float(numbers[NUMBERS[column.metric]]))
        result.runs[run.name] = {
            "settings": run.describe(),
            "seconds": numbers["seconds"],
            "numbers": numbers,
        }
    with clean_writer(store.out, wait=WAIT):
        figures = draw_figures(config, store, results)
    with clean_writer(out, wait=WAIT):
        files = [*figures, *result.save(out), out / f"{request.name}.png"]
        draw(result, files[-1])
    say(str(result))
    say(f"wrote {', '.join(str(file) for file in files)}")
    return result


def _epochs(changes: Sequence[str]) -> int | None:
    """The one thing that may be changed, for a quick look."""
    epochs = None
    for change in changes:
        key, _, value = change.partition("=")
        if key.strip() != EPOCHS or not value.strip().isdigit() or int(value) < 1:
            raise ValueError(f"of the synthetic tasks only {EPOCHS}=N can be changed, got {change!r}")
        epochs = int(value)
    return epochs
