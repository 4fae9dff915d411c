"""One line that tells how a fit is going: a bar in a terminal that rich can draw on, prints elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from hetsngp.loop import EpochResult

# Where there is no terminal to redraw: a line for each tenth of the epochs, or after so many seconds.
LINES, SECONDS = 10, 10.0


class Progress:
    """Call it with each :class:`EpochResult` of ``models`` trainings in a row; silent unless ``show``."""

    def __init__(self, epochs: int, models: int, show: bool) -> None:
        self.epochs, self.models, self.show = epochs, models, show
        self.model = 0
        self.bar = _rich_bar() if show else None
        self.task: Any = None
        self.printed = self.last = ""
        self.when = time.monotonic()

    def __enter__(self) -> Progress:
        if self.bar is not None:
            self.bar.start()
            self.task = self.bar.add_task("training", total=self.epochs * self.models)
        return self

    def __call__(self, result: EpochResult) -> None:
        if not self.show:
            return
        self.model += result.epoch == 1
        text = f"fold {self.model}/{self.models - 1}  " if self.model < self.models else ""
        text += f"epoch {result.epoch}/{result.epochs}  loss {result.loss:.4f}"
        if result.held_out is not None:
            text += f"  held-out NLL {result.held_out:.4f}"
        self.last = text
        if self.bar is not None:
            done = (self.model - 1) * self.epochs + result.epoch
            self.bar.update(self.task, completed=done, description=text)
        elif (
            result.epoch == 1
            or result.epoch % max(1, self.epochs // LINES) == 0
            or time.monotonic() > self.when + SECONDS
        ):
            self._print()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
        elif self.last != self.printed:  # where training stopped early
            self._print()

    def say(self, text: str) -> None:
        """A line of its own, after the epochs."""
        if self.show:
            print(text, flush=True)

    def _print(self) -> None:
        self.printed, self.when = self.last, time.monotonic()
        print(self.last, flush=True)


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
