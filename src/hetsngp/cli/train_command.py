"""``hetsngp train``."""

# No `from __future__ import annotations`: typer reads the annotations, which name a local import.
import shlex
from pathlib import Path
from typing import Annotated, Any


def add(app: Any) -> None:
    """Add the command to the application."""
    import typer

    @app.command(
        epilog="Example: hetsngp train cifar100 --set schedule.epochs=10 --set options.rank=3 --out runs/a"
    )
    def train(
        recipe: Annotated[
            str,
            typer.Argument(help="A .toml file, or a name listed by `hetsngp recipes`.", metavar="RECIPE"),
        ],
        change: Annotated[
            list[str] | None,
            typer.Option(
                "--set",
                metavar="KEY=VALUE",
                help="Change a key of the recipe, e.g. schedule.epochs=3; docs/recipes.md lists all keys. "
                "May be repeated.",
            ),
        ] = None,
        out: Annotated[
            Path | None,
            typer.Option(
                help="Folder of the run; default: runs/RECIPE.",
                file_okay=False,
            ),
        ] = None,
        changed: Annotated[
            bool,
            typer.Option("--changed", help="Resume from a checkpoint that was made with another schedule."),
        ] = False,
        hash_all_data: Annotated[
            bool,
            typer.Option(
                "--hash-all-data",
                help="Compare all contents of data on disk when resuming, not a sample; reads every file "
                "once at the start.",
            ),
        ] = False,
    ) -> None:
        """Train a classifier on images by a recipe.

        Trains, fits the posterior, calibrates, and writes OUT/model (for evaluate, predict and hetsngp.load),
        summary.json, curves.png, metrics.csv and TensorBoard logs. The recipe frozen leaves a pretrained
        network as it is and fits the head alone, without curves and logs. Run the same command again to
        resume an interrupted training. For several GPUs or nodes add --set hardware.devices=4, or start it by
        torchrun or srun: docs/training.md.
        """
        from hetsngp.training.recipes.recipe import read_recipe

        chosen, note = read_recipe(recipe, change or []).on_this_machine()
        folder = out or Path("runs") / chosen.name.replace("/", "-")
        _train(chosen, folder, note, changed=changed, hash_all_data=hash_all_data)


def _train(recipe: Any, folder: Path, note: str | None, **checkpoints: Any) -> None:
    from hetsngp.training import CheckpointConfig, Engine
    from hetsngp.training.input_kinds import input_kind
    from hetsngp.training.recipe_run import train_recipe

    engine = Engine(recipe.hardware)
    if engine.is_main and note:
        print(note)
    summary = train_recipe(recipe, engine, CheckpointConfig(folder, **checkpoints), show=True)
    if not engine.is_main:
        return
    what = input_kind(recipe.task).examples
    if "labels" in summary:
        print(_corrected(what, **summary["labels"]))
    print(summary["posterior"])
    for part in ("held_out", "test"):
        if summary[part] is not None:
            by = " by the corrected labels" if part == "held_out" and "labels" in summary else ""
            print(_measured(part.replace("_", "-") + by, what, **summary[part]))
    if summary["no_test"]:
        print(f"not tested: {summary['no_test']}")
    print(_verdicts(what, **summary["thresholds"]))
    has_test = summary["test"] is not None and "fold" not in summary["recipe"]["task"]
    print(_next(folder, has_test=has_test))


def _next(folder: Path, *, has_test: bool) -> str:
    """Next commands, quoted for a shell."""
    run = shlex.quote(str(folder))
    data = "" if has_test else " --data SET"
    load = f"hetsngp.load({str(folder / 'model')!r})"
    return f"next: hetsngp evaluate {run}{data}, or hetsngp predict {run} FILE…; in Python {load}"


def _corrected(what: str, path: str, dropped: int, changed: int) -> str:
    return f"labels of {path}: {changed} {what} have another class than given, {dropped} are dropped"


def _measured(part: str, what: str, accuracy: float, nll: float, ece: float, examples: int) -> str:
    return f"{part}: accuracy {accuracy:.4f}, NLL {nll:.4f}, ECE {ece:.4f} on {examples} {what}"


def _verdicts(what: str, **thresholds: Any) -> str:
    from hetsngp.serving.decisions import Thresholds, unused_verdicts

    messages = unused_verdicts(Thresholds.from_dict(thresholds))
    if thresholds["confident"] is not None:
        text = f"{thresholds['coverage']:.0%} of the held-out {what} would be called confident"
        if thresholds["accuracy"] is not None:
            text += f", and {thresholds['accuracy']:.1%} of these are classified correctly"
        messages.insert(0, text)
    return "; ".join(messages)
