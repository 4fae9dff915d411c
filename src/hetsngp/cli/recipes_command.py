"""``hetsngp recipes``."""

# No `from __future__ import annotations`: typer reads the annotations, which name a local import.
from typing import Annotated, Any


def add(app: Any) -> None:
    """Add the command to the application."""
    import typer

    @app.command(epilog="Example: hetsngp recipes cifar100/hetsngp > mine.toml")
    def recipes(
        name: Annotated[
            str | None, typer.Argument(metavar="NAME", help="Recipe to print; default: list all.")
        ] = None,
    ) -> None:
        """List the recipes that come with hetsngp, or print one."""
        from hetsngp.training.recipes.recipe import recipe_file, recipe_names

        if name is not None:
            print(recipe_file(name)[1].read_text(encoding="utf-8"), end="")
            return
        width = max(map(len, recipe_names()))
        for known in recipe_names():
            first = recipe_file(known)[1].read_text(encoding="utf-8").splitlines()[0]
            print(f"{known:{width}}  {first.lstrip('# ')}")
