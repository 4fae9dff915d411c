"""Progress of training and of passes over data: a bar of rich at a terminal, printed lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from hetsngp.fitting.loop import EpochResult

# Without a terminal: a line for each tenth of the epochs, or after so many seconds.
LINES, SECONDS = 10, 10.0


class Progress:
    """Progress of training; call it with each :class:`EpochResult`, of the folds, then of the final model.

    Silent unless ``show``.
    """

    def __init__(self, epochs: int, folds: int, show: bool) -> None:
        self.epochs, self.folds, self.show = epochs, folds, show
        self.stage = 0
        self.bar = _rich_bar() if show else None
        self.task: Any = None
        self.printed = self.last = ""
        self.when = time.monotonic()

    def __enter__(self) -> Progress:
        if self.bar is not None:
            self.bar.start()
            self.task = self.bar.add_task("training", total=self.epochs * (self.folds + 1))
        return self

    def __call__(self, result: EpochResult) -> None:
        if not self.show:
            return
        if result.epoch == 1:
            self._end_of_stage()
            self.stage += 1
        in_folds = self.folds > 0 and self.stage == 1
        text = "" if not self.folds else f"{self.folds} folds  " if in_folds else "all examples  "
        text += f"epoch {result.epoch}/{result.epochs}  loss {result.loss:.4f}"
        if result.held_out is not None:
            text += f"  held-out NLL {result.held_out:.4f}"
        self.last = text
        if self.bar is not None:
            done = result.epoch * self.folds if in_folds else self.epochs * self.folds + result.epoch
            self.bar.update(self.task, completed=done, description=text)
        elif (
            result.epoch == 1
            or result.epoch % max(1, self.epochs // LINES) == 0
            or time.monotonic() > self.when + SECONDS
        ):
            self._print()

    def within(self, epoch: int, share: float, loss: float) -> None:
        """Show the share of an epoch that is done, and its loss so far."""
        if not self.show:
            return
        self.last = f"epoch {epoch}/{self.epochs}  {share:.0%}  loss {loss:.4f}"
        if self.bar is not None:
            self.bar.update(self.task, completed=epoch - 1 + share, description=self.last)
        elif time.monotonic() > self.when + SECONDS:
            self._print()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is None:
            self._end_of_stage()
            return
        if error is None:
            self.bar.update(self.task, completed=self.epochs * (self.folds + 1))
        self.bar.stop()

    def say(self, text: str) -> None:
        """Print a line after the epochs."""
        if self.show:
            print(text, flush=True)

    def _end_of_stage(self) -> None:
        if self.bar is None and self.last != self.printed:  # where training stopped early
            self._print()

    def _print(self) -> None:
        self.printed, self.when = self.last, time.monotonic()
        print(self.last, flush=True)


class ExampleProgress:
    """Progress of a pass over data of so many ``batches`` (None: unknown), or other equal parts, that counts
    what ``unit`` names. Silent unless ``show``.
    """

    def __init__(self, title: str, batches: int | None, show: bool, unit: str = "examples") -> None:
        self.title, self.batches, self.show, self.unit = title, batches, show, unit
        self.bar = _rich_bar() if show else None
        self.task: Any = None
        self.done = self.examples = 0
        self.when = time.monotonic()

    def __enter__(self) -> ExampleProgress:
        if self.bar is not None:
            self.bar.start()
            self.task = self.bar.add_task(self.title, total=self.batches)
        return self

    def add(self, examples: int) -> None:
        """Count a batch of so many ``examples``."""
        self.done, self.examples = self.done + 1, self.examples + examples
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done, description=self._text)
        elif self.show and time.monotonic() > self.when + SECONDS:
            self.when = time.monotonic()
            print(self._text, flush=True)

    @property
    def _text(self) -> str:
        return f"{self.title}  {self.examples} {self.unit}" + (
            f" ({self.done / self.batches:.0%})" if self.batches else ""
        )

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def at_a_terminal() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def _rich_bar() -> Any:
    """A progress bar of rich, or None where it is not installed or there is no terminal."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None
    console = Console()
    if not console.is_terminal:
        return None
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(compact=True), console=console
    )
