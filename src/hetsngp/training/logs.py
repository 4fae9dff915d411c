"""What a run tells while it runs: a bar, a CSV file, TensorBoard."""

from __future__ import annotations

import csv
import importlib.util
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from hetsngp.files import replace_file
from hetsngp.fitting.loop import EpochResult
from hetsngp.fitting.progress import Progress
from hetsngp.training.config import CheckpointConfig

COLUMNS = ("epoch", "updates", "loss", "held_out", "rate", "seconds", "examples_per_second")

Row = dict[str, float | int | None]

CLOSING_SECONDS = 5.0


class Logs:
    """Of the main process; the others say nothing. ``show``: whether to draw a bar, or print lines."""

    def __init__(
        self, keep: CheckpointConfig | None, epochs: int, *, show: bool, main: bool, updates: int = 0
    ) -> None:
        self.folder = keep.folder if keep is not None and main else None
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        self.progress = Progress(epochs, 0, show and main)
        self.keep, self.updates = keep if main else None, updates
        self.writer: Any = None

    def __enter__(self) -> Logs:
        self.writer = None if self.keep is None else _writer(self.keep, self.updates)
        self.progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.__exit__(kind, error, trace)
        if self.writer is not None:
            _close(self.writer, wait=None if error is None else CLOSING_SECONDS)

    def within(self, epoch: int, share: float, updates: int, loss: float, rate: float) -> None:
        """Every so many updates."""
        self.progress.within(epoch, share, loss)
        self._scalars(updates, {"within epoch/loss": loss, "within epoch/rate": rate})

    def epoch(self, result: EpochResult, rows: list[Row]) -> None:
        """After each epoch; ``rows``: those of all epochs so far, so that a resumed run has them too."""
        self.progress(result)
        last = rows[-1]
        values = {f"epoch/{name}": last[name] for name in COLUMNS[2:] if last[name] is not None}
        self._scalars(int(last["updates"] or 0), values)
        if self.folder is not None:
            write_csv(self.folder / "metrics.csv", rows)

    def _scalars(self, updates: int, values: dict[str, Any]) -> None:
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(name, value, updates)


def _close(writer: Any, wait: float | None) -> None:
    """An interrupt in the middle of TensorBoard's queue leaves it locked, and its close would never return:
    after an error it gets ``wait`` seconds, in a thread that ends with the process.
    """
    if wait is None:
        writer.close()
        return
    closing = threading.Thread(target=writer.close, daemon=True)
    closing.start()
    closing.join(wait)


def write_csv(file: Path, rows: list[Row]) -> None:
    """All rows, in place of what the file held."""

    def write(temporary: Path) -> None:
        with open(temporary, "w", encoding="utf-8", newline="") as handle:
            writer = csv.DictWriter(handle, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)

    replace_file(file, write)


def _writer(keep: CheckpointConfig, updates: int) -> Any:
    """TensorBoard's; what it was told after ``updates``, by a run that was killed later, is purged."""
    installed = importlib.util.find_spec("tensorboard") is not None
    if keep.tensorboard and not installed:
        raise ImportError("TensorBoard is not installed: pip install 'hetsngp[train]', or tensorboard=False")
    if keep.tensorboard is False or not installed:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(keep.folder / "tensorboard"), purge_step=updates + 1)
