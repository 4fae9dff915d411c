"""Errors of a command as one line and exit code 2; ``--debug`` shows the traceback."""

from __future__ import annotations

import errno
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from hetsngp.limits import is_out_of_memory

EXPECTED = (
    *(ValueError, TypeError, OSError, ImportError, RuntimeError, ArithmeticError, MemoryError),
    SystemError,  # of Python, where native code fails without a reason, as it may without memory
)
"""Raised by the library for wrong input, with a message that names the fix, or by the system."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
RESUMABLE = ("demo", "train", "evaluate", "audit", "reproduce")
"""Commands that skip finished work when they are run again."""


def one_line(text: object) -> str:
    """Text without line breaks; the name of its type where it is empty."""
    return " ".join(str(text).split()) or type(text).__name__


def describe_error(error: BaseException, command: str | None) -> str:
    """What is wrong and what to do, for errors of the system too, which do not say it.

    >>> describe_error(OSError(28, "No space left on device", "runs/a/model"), "train")
    'runs/a/model: No space left on device: free some space; run the same command again to resume'
    """
    again = "; run the same command again to resume" if command in RESUMABLE else ""
    if is_out_of_memory(error):
        smaller = {
            "train": "--set batch_size=…",
            "evaluate": "--batch-size",
            "audit": "--batch-size",
            "demo": "--jobs 1",
        }
        how = f" (smaller batches take less: {smaller[command]})" if command in smaller else ""
        return f"out of memory: {one_line(error)[:300]}{how}{again}"
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        where = "" if error.filename is None else f"{error.filename}: "
        full = ": free some space" if error.errno in FULL else ""
        return f"{where}{error.strerror}{full}{again}"
    return one_line(error)


def print_error(text: object) -> None:
    """Print one line to stderr."""
    print(f"hetsngp: {one_line(text)}", file=sys.stderr)


def print_stopped(command: str | None) -> None:
    """Print a line after Ctrl-C."""
    if sys.stderr.isatty():
        print(file=sys.stderr)  # the line has ^C in it, or an unfinished progress bar
    resume = "; run the same command again to resume" if command in RESUMABLE else ""
    print_error(f"stopped{resume}")


def make_group_class() -> Any:
    """Class of the application's command group; a function, because typer is an optional package."""
    import typer
    from typer.core import TyperGroup

    # typer uses click, or since version 0.2x its own copy of click: this finds the one in use.
    click_exception: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

    class OneLineErrors(TyperGroup):
        """Command group that turns an error into one line and an exit code."""

        def main(self, *args: Any, **options: Any) -> Any:
            options["standalone_mode"] = False
            typed = options.get("args") or (args[0] if args else None) or sys.argv[1:]
            self._command = None
            debug = "--debug" in typed
            with warnings.catch_warnings(), nullcontext() if debug else _thread_errors_in_one_line():
                warnings.showwarning = _print_warning
                try:
                    code = self._run(args, options, debug=debug)
                except BrokenPipeError:  # the reader of our output has closed it, as head does
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                    code = 1
            raise SystemExit(code)

        def invoke(self, ctx: Any) -> Any:
            # Caught here because versions of typer handle these two differently.
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                print_stopped(ctx.invoked_subcommand)
                raise typer.Exit(130) from None
            except EOFError as error:
                raise ValueError(f"unexpected end of a file: {error}") from error
            finally:
                self._command = ctx.invoked_subcommand

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
                print_error(error.format_message() + help_)
                return 2
            except typer.Abort:
                print_stopped(None)
                return 130
            except EXPECTED as error:
                if debug or isinstance(error, BrokenPipeError):
                    raise
                print_error(describe_error(error, self._command))
                return 2

    return OneLineErrors


@contextmanager
def _thread_errors_in_one_line() -> Iterator[None]:
    """Print the error of a thread, as that of TensorBoard's log on a full disk, without its traceback."""
    before = threading.excepthook
    threading.excepthook = lambda arguments: _print_warning(one_line(arguments.exc_value))
    try:
        yield
    finally:
        threading.excepthook = before


def _print_warning(message: Warning | str, *rest: Any, **more: Any) -> None:
    print(f"warning: {one_line(message)}", file=sys.stderr)
