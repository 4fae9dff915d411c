"""``hetsngp recipes``."""

# No postponed annotations: typer reads them where the command is made, in a scope that has imported it.
from typing import Annotated, Any


def add(app: Any) -> None:
    """Enter the command."""
    import typer

    @app.command(epilog="Example: hetsngp recipes cifar100/hetsngp > mine.toml")
    def recipes(
        name: Annotated[str | None, typer.Argument(help="Print this one, to read or to copy.")] = None,
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
