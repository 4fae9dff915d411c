"""``hetsngp reproduce``."""

# No `from __future__ import annotations`: typer reads the annotations, which name a local import.
from pathlib import Path
from typing import Annotated, Any

# Repeated here, and compared with hetsngp.paper by a test: that imports torch, which --help does without.
TABLES = (
    "synthetic",
    "cifar100",
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
        epilog="Example: hetsngp reproduce cifar100 --seeds 3 --far scenes --set network=wrn-16-8 "
        "--set schedule.epochs=30"
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
            str | None, typer.Option(help="Only the rows of these methods, separated by commas.")
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
                metavar="SET", help="Far-OOD set of the table cifar100; scenes where Places365 is missing."
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

        chosen = None if methods is None else [name.strip() for name in methods.split(",") if name.strip()]
        given: Any = {"out": out, "seeds": seeds, "methods": chosen, "changes": change or [], "far": far}
        if dry_run:
            for run, state in plan_of(table, **given):
                print(f"{state:10s}  {run}")
            return
        run_table(table, **given)
