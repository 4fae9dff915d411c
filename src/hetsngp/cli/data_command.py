"""``hetsngp data``."""

# No postponed annotations: typer reads them where the command is made, in a scope that has imported it.
from typing import Annotated, Any


def add(app: Any) -> None:
    """Enter the command."""
    import typer

    @app.command(epilog="Example: hetsngp data cifar100 imagenet-c")
    def data(
        names: Annotated[list[str] | None, typer.Argument(metavar="[NAME…]", help="All if none.")] = None,
    ) -> None:
        """The data sets hetsngp knows by name: what they are, where they should lie, where to get them.

        They are looked for in the folder that the environment variable HETSNGP_DATA names.
        """
        from hetsngp.data.datasets.registry import describe

        print(describe(*(names or [])))
