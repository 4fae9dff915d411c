"""``hetsngp demo``."""

# No postponed annotations: typer reads them where the command is made, in a scope that has imported it.
import sys
from pathlib import Path
from typing import Annotated, Any

from hetsngp.choices import METHOD_NAMES

# Repeated here, and compared with the definitions by a test: those import torch, which --help does without.
TASKS = ("two_moons", "gaussian_mixture", "noisy_circles")


def add(app: Any) -> None:
    """Enter the command."""
    import typer

    @app.command(epilog="Example: hetsngp demo --tasks two_moons --methods sngp,hetsngp --seeds 3")
    def demo(
        methods: Annotated[
            str, typer.Option(help=f"Commas between, or 'all': {', '.join(METHOD_NAMES)}.")
        ] = "all",
        tasks: Annotated[str, typer.Option(help=f"Commas between, or 'all': {', '.join(TASKS)}.")] = "all",
        seeds: Annotated[int, typer.Option(min=1, help="Number of seeds: means and standard errors.")] = 1,
        seed: Annotated[int, typer.Option(min=0, help="First seed; the figures are of this one.")] = 0,
        out: Annotated[
            Path, typer.Option(help="Folder for figures, numbers and finished runs.", file_okay=False)
        ] = Path("out/demo"),
        label_noise: Annotated[
            float, typer.Option(help="Share of labels flipped, below 0.5; the circles have their own noise.")
        ] = 0.0,
        jobs: Annotated[
            int | None, typer.Option(min=1, help="Processes; default: one a core, at most 8.")
        ] = None,
        epochs: Annotated[
            int | None, typer.Option(min=1, help="In place of the recipe's, for a quick look.")
        ] = None,
    ) -> None:
        """Train the paper's methods on its synthetic tasks; write a table and the figures.

        Finished runs are kept in the folder and not repeated, so an interrupted demo goes on where it was.
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
                f"cannot make the folder {out}: {error.strerror}", param_hint="--out"
            ) from None
        plan = DemoConfig(chosen_tasks, chosen_methods, tuple(range(seed, seed + seeds)), label_noise, epochs)
        try:
            run_demo(plan, out, jobs, Console())
        except RuntimeError as error:
            print(error, file=sys.stderr)
            raise typer.Exit(1) from None


def _chosen(name: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The names in a list with commas, each once; "all" for all of them."""
    import typer

    from hetsngp.validation import check_choice

    names = dict.fromkeys(part.strip() for part in text.split(",") if part.strip())
    if "all" in names:
        return known
    try:
        if not names:
            raise ValueError(f"name at least one: {', '.join(known)}, or all")
        return tuple(check_choice(name, part, known) for part in names)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=f"--{name}s") from None


def _check_label_noise(label_noise: float, tasks: tuple[str, ...]) -> None:
    import typer

    from hetsngp.data.datasets.synthetic import NOISE_OF_ITS_OWN

    if not 0 <= label_noise < 0.5:
        message = f"must be at least 0 and below 0.5, got {label_noise:g}: 0.2 flips every fifth label"
        raise typer.BadParameter(message, param_hint="--label-noise")
    if label_noise and not set(tasks) - set(NOISE_OF_ITS_OWN):
        message = f"{', '.join(tasks)} has noise of its own: leave --label-noise out, or add another task"
        raise typer.BadParameter(message, param_hint="--label-noise")
