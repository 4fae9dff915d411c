"""``hetsngp reproduce``."""

# No `from __future__ import annotations`: typer reads the annotations, which name a local import.
from pathlib import Path
from typing import Annotated, Any

# Repeated here, and compared with hetsngp.paper by a test: that imports torch, which --help does without.
TABLES = (
    "synthetic",
    "cifar100",
    "cifar100-ensembles",
    "cifar100-ablations",
    "imagenet",
    "imagenet-r-v2",
    "imagenet21k",
    "ensembles",
    "runtime",
    "ablations",
)


def add(app: Any) -> None:
    """Add the command to the application."""
    import typer

    @app.command(
        epilog="Example: hetsngp reproduce cifar100 --recipe cifar100 --seeds 3 --one-seed mimo,hetsngp_mimo "
        "--far scenes"
    )
    def reproduce(
        table: Annotated[str, typer.Argument(help=f"One of {', '.join(TABLES)}.", metavar="TABLE")],
        out: Annotated[
            Path,
            typer.Option(
                help="Folder for runs and results; tables in the same folder share runs.", file_okay=False
            ),
        ] = Path("runs/reproduce"),
        seeds: Annotated[
            int | None, typer.Option(min=1, help="Number of seeds per row; default: as many as in the paper.")
        ] = None,
        methods: Annotated[
            str | None,
            typer.Option(help="Only the rows of these methods (of ablations: parts), separated by commas."),
        ] = None,
        recipe: Annotated[
            str | None,
            typer.Option(
                metavar="NAME_OR_FILE",
                help="Train the method of every row by this recipe, e.g. cifar100, instead of the row's own.",
            ),
        ] = None,
        one_seed: Annotated[
            str | None,
            typer.Option(metavar="ROWS", help="Train these rows, separated by commas, with one seed only."),
        ] = None,
        change: Annotated[
            list[str] | None,
            typer.Option(
                "--set",
                metavar="KEY=VALUE",
                help="Change a key of every recipe, e.g. schedule.epochs=3; the table lists the changes.",
            ),
        ] = None,
        far: Annotated[
            str,
            typer.Option(
                metavar="SET", help="Far-OOD set of the cifar100 tables; scenes where Places365 is missing."
            ),
        ] = "places365",
        dry_run: Annotated[
            bool,
            typer.Option("--dry-run", help="List the runs and whether they are finished; train nothing."),
        ] = False,
    ) -> None:
        """Reproduce a table of the paper.

        Trains every recipe of the table with every seed, and prints our results beside the paper's with
        standard errors. Finished runs are kept: run the same command again to resume. Writes OUT/TABLE.md,
        TABLE.json and TABLE.png (TABLE-ROWS.md … with --methods). `hetsngp recipes` shows the settings and
        their cost.
        """
        from hetsngp.paper import plan_of
        from hetsngp.paper import reproduce as run_table

        given: Any = {
            "out": out,
            "seeds": seeds,
            "methods": None if methods is None else _names(methods),
            "changes": change or [],
            "recipe": recipe,
            "one_seed": _names(one_seed or ""),
            "far": far,
        }
        if dry_run:
            for run, state in plan_of(table, **given):
                print(f"{state:10s}  {run}")
            return
        run_table(table, **given)


def _names(text: str) -> list[str]:
    """Names separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]
