"""``hetsngp reproduce``."""

# No postponed annotations: typer reads them where the command is made, in a scope that has imported it.
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
    """Enter the command."""
    import typer

    @app.command(
        epilog="Example: hetsngp reproduce cifar100 --seeds 3 --far scenes --set network=wrn-16-8 "
        "--set schedule.epochs=30"
    )
    def reproduce(
        table: Annotated[str, typer.Argument(help=f"{', '.join(TABLES)}.", metavar="TABLE")],
        out: Annotated[
            Path,
            typer.Option(
                help="Folder for runs and results; tables in one folder share runs.", file_okay=False
            ),
        ] = Path("runs/reproduce"),
        seeds: Annotated[
            int | None, typer.Option(min=1, help="Runs of each row; default: as many as the paper's.")
        ] = None,
        methods: Annotated[str | None, typer.Option(help="Some rows only: methods, commas between.")] = None,
        change: Annotated[
            list[str] | None,
            typer.Option(
                "--set",
                metavar="KEY=VALUE",
                help="Of every recipe, e.g. schedule.epochs=3; the table says so.",
            ),
        ] = None,
        far: Annotated[
            str,
            typer.Option(
                metavar="SET", help="Far-OOD set of cifar100; scenes where Places365 is not at hand."
            ),
        ] = "places365",
        dry_run: Annotated[
            bool, typer.Option("--dry-run", help="Say what would run and what is finished; train nothing.")
        ] = False,
    ) -> None:
        """Run a table of the paper, and print ours beside the paper's with standard errors.

        Recipes times seeds, each trained once and kept: interrupted, the same command goes on. Writes
        OUT/TABLE.md, TABLE.json and TABLE.png (of some rows TABLE-ROWS.md …). `hetsngp recipes` has the
        settings and what they cost.
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
