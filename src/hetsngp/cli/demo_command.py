"""``hetsngp demo``."""

# No `from __future__ import annotations`: typer reads the annotations, which name a local import.
import sys
from pathlib import Path
from typing import Annotated, Any

from hetsngp.choices import METHOD_NAMES

# Repeated here, and compared with the definitions by a test: those import torch, which --help does without.
TASKS = ("two_moons", "gaussian_mixture", "noisy_circles")


def add(app: Any) -> None:
    """Add the command to the application."""
    import typer

    @app.command(epilog="Example: hetsngp demo --tasks two_moons --methods sngp,hetsngp --seeds 3")
    def demo(
        methods: Annotated[
            str, typer.Option(help=f"Methods, separated by commas, or 'all': {', '.join(METHOD_NAMES)}.")
        ] = "all",
        tasks: Annotated[
            str, typer.Option(help=f"Tasks, separated by commas, or 'all': {', '.join(TASKS)}.")
        ] = "all",
        seeds: Annotated[
            int, typer.Option(min=1, help="Number of seeds, for means and standard errors.")
        ] = 1,
        seed: Annotated[int, typer.Option(min=0, help="First seed; the figures show this one.")] = 0,
        out: Annotated[
            Path, typer.Option(help="Folder for figures, results and finished runs.", file_okay=False)
        ] = Path("out/demo"),
        label_noise: Annotated[
            float, typer.Option(help="Share of labels to flip, below 0.5; noisy_circles has fixed noise.")
        ] = 0.0,
        jobs: Annotated[
            int | None, typer.Option(min=1, help="Number of processes; default: one per core, at most 8.")
        ] = None,
        epochs: Annotated[
            int | None, typer.Option(min=1, help="Number of epochs instead of the default, for a quick look.")
        ] = None,
    ) -> None:
        """Train the paper's methods on its synthetic tasks.

        Prints a table and writes figures. Finished runs are kept in OUT and not repeated: run the same
        command again to resume.
        """
        from rich.console import Console

        from hetsngp.models.methods import METHODS
        from hetsngp.paper.synthetic.demo import DemoConfig, run_demo

        chosen_tasks = _chosen("task", tasks, TASKS)
        chosen_methods = _chosen("method", methods, tuple(METHODS))
        _check_label_noise(label_noise, chosen_tasks)
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(
                f"cannot create the folder {out}: {error.strerror}", param_hint="--out"
            ) from None
        config = DemoConfig(
            chosen_tasks, chosen_methods, tuple(range(seed, seed + seeds)), label_noise, epochs
        )
        try:
            run_demo(config, out, jobs, Console())
        except RuntimeError as error:
            print(error, file=sys.stderr)
            raise typer.Exit(1) from None


def _chosen(name: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Names in a list separated by commas, each once; all ``known`` ones for "all"."""
    import typer

    from hetsngp.validation import check_choice

    names = dict.fromkeys(part.strip() for part in text.split(",") if part.strip())
    if "all" in names:
        return known
    try:
        if not names:
            raise ValueError(f"give at least one of {', '.join(known)}, or all")
        return tuple(check_choice(name, part, known) for part in names)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=f"--{name}s") from None


def _check_label_noise(label_noise: float, tasks: tuple[str, ...]) -> None:
    import typer

    from hetsngp.data.datasets.synthetic import FIXED_NOISE

    if not 0 <= label_noise < 0.5:
        message = f"must be at least 0 and below 0.5, got {label_noise:g}: 0.2 flips every fifth label"
        raise typer.BadParameter(message, param_hint="--label-noise")
    if label_noise and not set(tasks) - set(FIXED_NOISE):
        message = f"{', '.join(tasks)} has fixed noise: leave --label-noise out, or add another task"
        raise typer.BadParameter(message, param_hint="--label-noise")
