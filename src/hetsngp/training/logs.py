"""Logs of a run: a progress bar, metrics.csv, TensorBoard."""

from __future__ import annotations

import csv
import importlib.util
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from hetsngp.files import replace_file
from hetsngp.fitting.loop import EpochResult
from hetsngp.fitting.progress import Progress
from hetsngp.training.config import CheckpointConfig

COLUMNS = ("epoch", "updates", "loss", "held_out", "lr", "seconds", "examples_per_second")

MetricsRow = dict[str, float | int | None]

CLOSING_SECONDS = 5.0
METRICS = "metrics.csv"
LOG_ERRORS = (OSError, ValueError, RuntimeError)
"""What TensorBoard raises in place of its thread, or where its file is closed already."""


class Logs:
    """Logs of the main process; the others write none. ``show``: whether to draw a bar, or print lines."""

    def __init__(
        self, checkpoints: CheckpointConfig | None, epochs: int, *, show: bool, main: bool, updates: int = 0
    ) -> None:
        self.folder = checkpoints.folder if checkpoints is not None and main else None
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        self.progress = Progress(epochs, 0, show and main)
        self.checkpoints, self.updates = checkpoints if main else None, updates
        self.writer: Any = None
        self.incomplete = False
        """Whether the last rows of metrics.csv could not be written."""

    def __enter__(self) -> Logs:
        if self.checkpoints is not None:
            try:
                self.writer = _writer(self.checkpoints, self.updates)
            except OSError as error:
                self._warn("tensorboard", error)
        self.progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.__exit__(kind, error, trace)
        if self.writer is not None:
            try:
                _close(self.writer, wait=None if error is None else CLOSING_SECONDS)
            except LOG_ERRORS as failed:
                self._warn("tensorboard", failed)

    def within(self, epoch: int, share: float, updates: int, loss: float, lr: float) -> None:
        """Log the loss so far, every so many updates."""
        self.progress.within(epoch, share, loss)
        self._scalars(updates, {"within epoch/loss": loss, "within epoch/lr": lr})

    def epoch(self, result: EpochResult, rows: list[MetricsRow]) -> None:
        """Log an epoch; ``rows``: those of all epochs so far, which a resumed run writes again."""
        self.progress(result)
        last = rows[-1]
        values = {f"epoch/{name}": last[name] for name in COLUMNS[2:] if last[name] is not None}
        self._scalars(int(last["updates"] or 0), values)
        if self.folder is not None:
            try:
                write_csv(self.folder / METRICS, rows)
                self.incomplete = False
            except OSError as error:
                self.incomplete = True
                self._warn(METRICS, error)

    def complete(self, rows: list[MetricsRow]) -> None:
        """Write metrics.csv at the end of a run where it is missing, or could not be written before."""
        if self.folder is not None and (self.incomplete or not _has_rows(self.folder / METRICS, len(rows))):
            write_csv(self.folder / METRICS, rows)

    def _scalars(self, updates: int, values: dict[str, Any]) -> None:
        if self.writer is not None:
            try:
                for name, value in values.items():
                    self.writer.add_scalar(name, value, updates)
            except LOG_ERRORS as error:  # its thread could not write, perhaps some time ago
                self.writer = None
                self._warn("tensorboard", error)

    def _warn(self, what: str, error: Exception) -> None:
        """Say that a log cannot be written: the training goes on, which is worth more."""
        assert self.folder is not None
        goes_on = (
            "written again after the next epoch" if what == METRICS else "the training goes on without it"
        )
        warnings.warn(f"{self.folder / what} cannot be written ({error}): {goes_on}", stacklevel=3)


def _close(writer: Any, wait: float | None) -> None:
    """Close the writer; after an error within ``wait`` seconds, in a thread that ends with the process: an
    interrupt may leave TensorBoard's queue locked, and close would never return.
    """
    if wait is None:
        writer.close()
        return

    def close() -> None:
        with suppress(*LOG_ERRORS):  # the error that ends the training is the one to show
            writer.close()

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(wait)


def write_csv(file: Path, rows: list[MetricsRow]) -> None:
    """Write all rows, replacing the file."""

    def write(temporary: Path) -> None:
        with open(temporary, "w", encoding="utf-8", newline="") as handle:
            writer = csv.DictWriter(handle, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)

    replace_file(file, write)


def _has_rows(file: Path, count: int) -> bool:
    """Whether the file is there, with so many rows."""
    try:
        with open(file, encoding="utf-8", newline="") as handle:
            return sum(1 for _ in csv.reader(handle)) == count + 1
    except (OSError, ValueError, csv.Error):
        return False


def _writer(checkpoints: CheckpointConfig, updates: int) -> Any:
    """Writer of TensorBoard; what a run that was killed had logged after ``updates`` is purged."""
    installed = importlib.util.find_spec("tensorboard") is not None
    if checkpoints.tensorboard and not installed:
        raise ImportError("TensorBoard is not installed: pip install 'hetsngp[train]', or tensorboard=False")
    if checkpoints.tensorboard is False or not installed:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(checkpoints.folder / "tensorboard"), purge_step=updates + 1)
