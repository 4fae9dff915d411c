"""What goes wrong is said in one line, with exit code 2; ``--debug`` shows where it came from."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

EXPECTED = (ValueError, TypeError, OSError, ImportError, RuntimeError, ArithmeticError)
"""What the library raises where an input is wrong: each message names the fix."""
GO_ON = ("demo", "train", "evaluate", "reproduce")
"""Commands that keep what is finished."""


def one_line(text: object) -> str:
    """Without line breaks; something in any case."""
    return " ".join(str(text).split()) or type(text).__name__


def say_error(text: object) -> None:
    """To the people."""
    print(f"hetsngp: {one_line(text)}", file=sys.stderr)


def say_stopped(command: str | None) -> None:
    """After Ctrl-C."""
    if sys.stderr.isatty():
        print(file=sys.stderr)  # the terminal has shown ^C, or half a bar
    goes_on = "; the same command goes on from what is finished" if command in GO_ON else ""
    say_error(f"stopped{goes_on}")


def one_line_group() -> Any:
    """The group class of the application; typer is known by now."""
    import typer
    from typer.core import TyperGroup

    # typer has click, or since its version 0.2x a copy of it: this way it is the right one.
    click_exception: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

    class OneLineGroup(TyperGroup):
        """Runs a command; an error becomes a line and an exit code."""

        def main(self, *args: Any, **options: Any) -> Any:
            options["standalone_mode"] = False
            typed = options.get("args") or (args[0] if args else None) or sys.argv[1:]
            with warnings.catch_warnings():
                warnings.showwarning = _say_warning
                try:
                    code = self._run(args, options, debug="--debug" in typed)
                except BrokenPipeError:  # whoever read what we print has seen enough
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                    code = 1
            raise SystemExit(code)

        def invoke(self, ctx: Any) -> Any:
            # Here, for what typer makes of these two differs from version to version.
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                say_stopped(ctx.invoked_subcommand)
                raise typer.Exit(130) from None
            except EOFError as error:
                raise ValueError(f"a file ends too soon: {error}") from error

        def _run(self, args: Any, options: dict[str, Any], *, debug: bool) -> int:
            try:
                result = super().main(*args, **options)
                return result if isinstance(result, int) else 0
            except click_exception as error:
                if type(error).__name__ == "NoArgsIsHelpError":
                    print(error.format_message())
                    return 2
                context = getattr(error, "ctx", None)
                help_ = f" ({context.command_path} --help)" if context is not None else ""
                say_error(error.format_message() + help_)
                return 2
            except typer.Abort:
                say_stopped(None)
                return 130
            except EXPECTED as error:
                if debug or isinstance(error, BrokenPipeError):
                    raise
                say_error(error)
                return 2

    return OneLineGroup


def _say_warning(message: Warning | str, *rest: Any, **more: Any) -> None:
    print(f"warning: {one_line(message)}", file=sys.stderr)
