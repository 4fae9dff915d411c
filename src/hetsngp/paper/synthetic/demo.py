"""``hetsngp demo``: the paper's synthetic figures, with numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hetsngp.data.datasets.synthetic import FIXED_NOISE, make_task
from hetsngp.evaluation.cache import WAIT, clean_writer
from hetsngp.files import write_json
from hetsngp.models.methods import METHODS
from hetsngp.paper.synthetic.experiment import SETTINGS, SyntheticRun, SyntheticSettings
from hetsngp.paper.synthetic.plots import draw_labels, draw_uncertainty
from hetsngp.paper.synthetic.processes import Step, run_all
from hetsngp.paper.synthetic.store import Store
from hetsngp.paper.synthetic.summary import CAPTION, PAPER, Summary, summarise, table

MEASURING = 0.4
"""Time of measuring and drawing maps, relative to training."""


@dataclass(frozen=True)
class DemoConfig:
    """Runs of the demo: every task with every method and seed."""

    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    label_noise: float = 0.0
    epochs: int | None = None
    """Replaces the epochs of the settings, for a quick look."""

    def settings(self, task: str) -> SyntheticSettings:
        """Settings of every method on ``task``."""
        settings = SETTINGS[task]
        return settings if self.epochs is None else replace(settings, epochs=self.epochs)

    def run(self, task: str, method: str, seed: int) -> SyntheticRun:
        """A single run."""
        return SyntheticRun(task, method, seed, self.label_noise, self.settings(task))

    def runs(self) -> list[SyntheticRun]:
        """All runs, the most expensive methods first, so that no core is left with a long one at the end."""
        order = sorted(self.methods, key=list(METHODS).index, reverse=True)
        return [self.run(t, m, s) for s in self.seeds for m in order for t in reversed(self.tasks)]

    def has_maps(self, run: SyntheticRun) -> bool:
        """Whether maps are drawn for ``run``: the figures are of the first seed."""
        return run.seed == self.seeds[0]

    def title(self) -> str:
        """Title of the table."""
        first, last = self.seeds[0], self.seeds[-1]
        title = f"seed {first}" if first == last else f"seeds {first} to {last}, ± one standard error"
        noisy = [task.replace("_", " ") for task in self.tasks if task not in FIXED_NOISE]
        if self.label_noise:
            title += f", {100 * self.label_noise:g} % of labels flipped in {' and '.join(noisy)}"
        return f"Synthetic tasks, {title}"


def run_demo(config: DemoConfig, out: Path, jobs: int | None, console: Any) -> Summary:
    """Train what is not in ``out`` yet, print the table, draw the figures, and write it all as JSON."""
    store, runs = Store.open(out), config.runs()
    todo = [run for run in runs if not store.has(run, maps=config.has_maps(run))]
    if len(todo) < len(runs):
        done = f"{len(runs) - len(todo)} of {len(runs)} runs are in {out / 'runs'} already: skipped"
        console.print(done, highlight=False, soft_wrap=True)
    store.clean()
    if todo:
        start = time.perf_counter()
        with _progress(todo, console) as on_step:
            run_all(todo, store, maps=config.has_maps, workers=jobs, on_step=on_step)
        console.print(f"trained and measured in {time.perf_counter() - start:.0f} s", highlight=False)
    results = store.results(runs)
    order = [config.run(t, m, s) for t in config.tasks for m in config.methods for s in config.seeds]
    summary = summarise((run, results[run]["numbers"]) for run in order)
    content = {
        "plan": asdict(config),
        "versions": store.versions(),
        "notes": CAPTION,
        "paper": PAPER,
        "summary": summary,
        "runs": [results[run] for run in order],
    }
    with clean_writer(out, wait=WAIT):
        write_json(out / "results.json", content)
        figures = draw_figures(config, store, results)
    console.print(table(summary, config.title()))
    for text in sorted({text for run in order for text in results[run]["numbers"]["warnings"]}):
        console.print(f"warning: {text}", markup=False)
    for path in (*figures, out / "results.json"):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    return summary


def draw_figures(config: DemoConfig, store: Store, results: dict[SyntheticRun, dict[str, Any]]) -> list[Path]:
    """Draw the uncertainties of each task, and the predicted labels of the circles."""
    written = []
    for name in config.tasks:
        task = make_task(name, config.seeds[0], config.label_noise)
        runs = {method: config.run(name, method, config.seeds[0]) for method in config.methods}
        maps = {method: store.read_maps(run) or {} for method, run in runs.items()}
        written.append(store.out / f"{name}.png")
        draw_uncertainty(task, maps, written[-1])
        if name == "noisy_circles":
            written.append(store.out / f"{name}_labels.png")
            accuracies = {method: results[run]["numbers"]["accuracy"] for method, run in runs.items()}
            draw_labels(task, maps, accuracies, written[-1])
    return written


@contextmanager
def _progress(todo: list[SyntheticRun], console: Any) -> Iterator[Callable[[Step], None]]:
    """Show a bar over the epochs of all runs, and a line for each finished run."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    epochs = sum(run.settings.epochs for run in todo)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left"))
    seen = done = 0
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("starting", total=epochs * (1 + MEASURING))

        def on_step(step: Step) -> None:
            nonlocal seen, done
            if step.kind == "epoch":
                seen += 1
                bar.advance(task)
            else:
                done += 1
                bar.advance(task, MEASURING * step.run.settings.epochs)
                bar.console.print(f"{done:3d}/{len(todo)}  {step.run.name}", highlight=False)
            bar.update(task, description=f"{done}/{len(todo)} models, {seen}/{epochs} epochs")

        yield on_step
