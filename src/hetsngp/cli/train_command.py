"""``hetsngp train``."""

# No postponed annotations: typer reads them where the command is made, in a scope that has imported it.
import shlex
from pathlib import Path
from typing import Annotated, Any


def add(app: Any) -> None:
    """Enter the command."""
    import typer

    @app.command(
        epilog="Example: hetsngp train cifar100 --set schedule.epochs=10 --set options.rank=3 --out runs/a"
    )
    def train(
        recipe: Annotated[
            str,
            typer.Argument(help="A .toml file, or a name that `hetsngp recipes` lists.", metavar="RECIPE"),
        ],
        change: Annotated[
            list[str] | None,
            typer.Option(
                "--set",
                metavar="KEY=VALUE",
                help="In place of what the recipe says: schedule.epochs=3; docs/recipes.md has all keys.",
            ),
        ] = None,
        out: Annotated[
            Path | None,
            typer.Option(
                help="Folder of the run; default: runs/RECIPE. The same command goes on in it.",
                file_okay=False,
            ),
        ] = None,
        changed: Annotated[
            bool, typer.Option("--changed", help="Go on from a checkpoint made with another schedule.")
        ] = False,
    ) -> None:
        """Train on images, fit the posterior, calibrate, and save a model that predicts and is evaluated.

        Writes OUT/model (for hetsngp.load, evaluate and predict), summary.json, curves.png, metrics.csv and
        TensorBoard's files. Kill it, and the same command goes on. On several GPUs or nodes start it as it
        is, with --set hardware.devices=4, or by torchrun or srun: docs/training.md.
        """
        from hetsngp.training.recipes.recipe import read_recipe

        said, note = read_recipe(recipe, change or []).on_this_machine()
        folder = out or Path("runs") / said.name.replace("/", "-")
        _train(said, folder, note, changed)


def _train(recipe: Any, folder: Path, note: str | None, changed: bool) -> None:
    from hetsngp.training import CheckpointConfig, Engine
    from hetsngp.training.images import train_images

    engine = Engine(recipe.hardware)
    if engine.is_main and note:
        print(note)
    summary = train_images(recipe, engine, CheckpointConfig(folder, changed=changed), show=True)
    if not engine.is_main:
        return
    print(summary["posterior"])
    for part in ("held_out", "test"):
        if summary[part] is not None:
            print(_measured(part.replace("_", "-"), **summary[part]))
    if summary["no_test"]:
        print(f"not tested: {summary['no_test']}")
    print(_verdicts(**summary["thresholds"]))
    print(_next(folder, has_test=summary["test"] is not None))


def _next(folder: Path, *, has_test: bool) -> str:
    """To be copied into a shell."""
    run = shlex.quote(str(folder))
    data = "" if has_test else " --data SET"
    load = f"hetsngp.load({str(folder / 'model')!r})"
    return f"next: hetsngp evaluate {run}{data}, or hetsngp predict {run} FILE…; in Python {load}"


def _measured(part: str, accuracy: float, nll: float, ece: float, examples: int) -> str:
    return f"{part}: accuracy {accuracy:.4f}, NLL {nll:.4f}, ECE {ece:.4f} on {examples} images"


def _verdicts(**thresholds: Any) -> str:
    from hetsngp.serving.decisions import Thresholds, unused_verdicts

    never = unused_verdicts(Thresholds.of_dict(thresholds))
    if thresholds["confident"] is not None:
        said = f"{thresholds['coverage']:.0%} of the held-out images would be called confident"
        if thresholds["accuracy"] is not None:
            said += f", and {thresholds['accuracy']:.1%} of these are classified correctly"
        never.insert(0, said)
    return "; ".join(never)
