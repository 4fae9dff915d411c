"""``hetsngp data``."""

# No `from __future__ import annotations`: typer reads the annotations, which name a local import.
from typing import Annotated, Any


def add(app: Any) -> None:
    """Add the command to the application."""
    import typer

    @app.command(epilog="Example: hetsngp data cifar100 imagenet-c")
    def data(
        names: Annotated[
            list[str] | None, typer.Argument(metavar="NAME", help="Names of data sets; default: all.")
        ] = None,
    ) -> None:
        """List the data sets that hetsngp knows by name.

        For each: its splits, the files it is read from and where to download them. Data sets are looked for
        in the folder that the environment variable HETSNGP_DATA names.
        """
        from hetsngp.data.datasets.registry import describe

        print(describe(*(names or [])))
