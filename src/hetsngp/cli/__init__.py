"""The command line: parses and checks the arguments; the other packages do the work."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

NEEDS = ("typer", "rich", "matplotlib", "torchmetrics")
COMMANDS = ("demo", "train", "evaluate", "predict", "audit", "reproduce", "recipes", "data")
"""Each has a module ``<name>_command`` in this package with a function ``add(app)``."""


def main() -> None:
    """Entry point of ``hetsngp`` and of ``python -m hetsngp``."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        print(f"the command line needs {names}: pip install 'hetsngp[cli]'", file=sys.stderr)
        raise SystemExit(1)
    from hetsngp.cli.errors import print_stopped

    try:
        make_app()()
    except KeyboardInterrupt:  # while the commands are imported; later it is caught where one is run
        print_stopped(None)
        raise SystemExit(130) from None


def make_app() -> Any:
    """Build the typer application."""
    import typer

    from hetsngp.cli.errors import make_group_class

    app = typer.Typer(
        cls=make_group_class(),
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            print(f"hetsngp {importlib.import_module('hetsngp').__version__}")
            raise typer.Exit

    @app.callback(
        epilog="Example: hetsngp train cifar10-cpu, then hetsngp predict runs/cifar10-cpu photo.jpg"
    )
    def top(
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Show the version and exit."
        ),
        debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    ) -> None:
        """Train, evaluate and use image classifiers that separate data uncertainty from model uncertainty."""

    for name in COMMANDS:
        importlib.import_module(f"hetsngp.cli.{name}_command").add(app)
    return app
