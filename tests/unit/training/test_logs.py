"""What a run leaves behind and says: metrics.csv, TensorBoard, lines where somebody watches."""

from __future__ import annotations

import csv
import io
import logging
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract import toy

from hetsngp.fitting import progress
from hetsngp.fitting.loop import EpochResult
from hetsngp.fitting.progress import Progress
from hetsngp.training import CheckpointConfig, Engine, Hardware, Schedule, TrainConfig, Trained, logs, run
from hetsngp.training.logs import COLUMNS, write_csv

pytest.importorskip("lightning")

X, Y = toy.blobs(3, 8, flip=0.3)
HELD_OUT = [toy.blobs(3, 6, flip=0.3, seed=1)]
CONFIG = TrainConfig(Schedule(3, 0.05, warmup=1, smooth=True))


class Died(BaseException):
    pass


class Loader:
    """4 batches an epoch; dies at one of them."""

    def __init__(self, dies: int | None = None) -> None:
        self.dies, self.seen = dies, 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        for batch in zip(X.split(6), Y.split(6), strict=True):
            self.seen += 1
            if self.seen == self.dies:
                raise Died
            yield batch


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(Hardware(accelerator="cpu"))


def train(
    engine: Engine,
    checkpoints: Any,
    *,
    dies: int | None = None,
    config: TrainConfig = CONFIG,
    method: str = "sngp",
    **options: Any,
) -> Trained:
    return engine.train(toy.build(method), Loader(dies), config, checkpoints=checkpoints, **options)


def die(engine: Engine, checkpoints: CheckpointConfig, batch: int, **options: Any) -> None:
    """Some time ago: by their names TensorBoard puts files in order, those of one second not always."""
    with pytest.raises(Died):
        train(engine, checkpoints, dies=batch, **options)
    for file in checkpoints.folder.glob("tensorboard/events.*"):
        file.rename(file.with_name(file.name.replace("tfevents.", "tfevents.0")))


# --- metrics.csv ----------------------------------------------------------------------------------------


def table(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", encoding="utf-8", newline="") as handle:
        reader = csv.DictReader(handle)
        rows = list(reader)
    assert tuple(reader.fieldnames or ()) == COLUMNS
    return rows


@pytest.mark.parametrize("held_out", [None, HELD_OUT])
def test_a_row_for_each_epoch(held_out: Any, engine: Engine, tmp_path: Path) -> None:
    trained = train(engine, tmp_path, held_out=held_out)
    rows = table(tmp_path)
    assert [(int(row["epoch"]), int(row["updates"])) for row in rows] == [(1, 4), (2, 8), (3, 12)]
    assert [float(row["loss"]) for row in rows] == [r.loss for r in trained.history]
    if held_out is None:
        assert {row["held_out"] for row in rows} == {""}
    else:
        assert [float(row["held_out"]) for row in rows] == [r.held_out for r in trained.history]
    # Learning rate of the last update of an epoch: full after the warm-up, then a cosine at 7/4 and 11/4.
    expected = [
        0.05,
        *(0.05 * (1 + math.cos(math.pi * (done - 1) / 2)) / 2 for done in (7 / 4, 11 / 4)),
    ]
    assert [float(row["lr"]) for row in rows] == pytest.approx(expected, rel=1e-12)
    assert all(float(row["seconds"]) > 0 for row in rows)
    for row, kept in zip(rows, trained.rows, strict=True):
        assert float(row["examples_per_second"]) == pytest.approx(24 / float(row["seconds"]), rel=1e-12)
        assert {k: None if v == "" else float(v) for k, v in row.items()} == kept
    assert not list(tmp_path.glob(".saving-*"))


@pytest.mark.parametrize("batch", [2, 5, 6, 9, 12])
def test_after_a_death_every_epoch_has_one_row(batch: int, engine: Engine, tmp_path: Path) -> None:
    checkpoints = CheckpointConfig(tmp_path, seconds=0, tensorboard=False)
    die(engine, checkpoints, batch)
    before = table(tmp_path) if (tmp_path / "metrics.csv").exists() else []
    assert len(before) == (batch - 1) // 4
    trained = train(engine, checkpoints)
    rows = table(tmp_path)
    assert [(int(row["epoch"]), int(row["updates"])) for row in rows] == [(1, 4), (2, 8), (3, 12)]
    assert rows[: len(before)] == before  # with the seconds they took then
    assert [float(row["loss"]) for row in rows] == [r.loss for r in trained.history]


def test_rows_after_the_last_checkpoint_are_made_anew(engine: Engine, tmp_path: Path) -> None:
    """A file may be ahead of the checkpoint: it has two epochs, and nothing remembers them."""
    checkpoints = CheckpointConfig(tmp_path, seconds=1e9, tensorboard=False)
    die(engine, checkpoints, 10)
    assert len(table(tmp_path)) == 2
    assert train(engine, checkpoints).resumed == 0
    assert [int(row["epoch"]) for row in table(tmp_path)] == [1, 2, 3]


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row: Any = dict.fromkeys(COLUMNS, 1)
    write_csv(tmp_path / "metrics.csv", [row])
    monkeypatch.setattr("hetsngp.io.storage.os.replace", None)
    with pytest.raises(TypeError):
        write_csv(tmp_path / "metrics.csv", [row, row])
    assert len(table(tmp_path)) == 1
    assert [f.name for f in tmp_path.iterdir()] == ["metrics.csv"]


# --- TensorBoard ----------------------------------------------------------------------------------------


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(update, value) of each scalar, as TensorBoard shows them."""
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    accumulator = module.EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def assert_events_are(found: dict[str, list[tuple[int, float]]], trained: Trained) -> None:
    for name in ("loss", "held_out", "lr", "seconds", "examples_per_second"):
        steps, values = zip(*found[f"epoch/{name}"], strict=True)
        assert steps == (4, 8, 12), name
        assert values == pytest.approx([row[name] for row in trained.rows], rel=1e-6), name  # float32


def test_epochs_and_what_is_within(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "CHECK_EVERY", 3)
    trained = train(engine, CheckpointConfig(tmp_path), held_out=HELD_OUT)
    found = events(tmp_path)
    assert_events_are(found, trained)
    assert [step for step, _ in found["within epoch/loss"]] == [3, 6, 9, 12]
    assert [step for step, _ in found["within epoch/lr"]] == [3, 6, 9, 12]
    # At the end of an epoch the two are of the same batches.
    assert found["within epoch/loss"][-1] == found["epoch/loss"][-1]
    assert found["within epoch/lr"][0][1] == pytest.approx(0.75 * 0.05)
    assert len(found) == 7


@pytest.mark.parametrize("seconds", [0, 1e9])
@pytest.mark.parametrize("batch", [6, 9, 10])
def test_after_a_death_every_epoch_is_shown_once(
    batch: int, seconds: float, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it went on from a checkpoint (0) or began anew (1e9)."""
    monkeypatch.setattr(run, "CHECK_EVERY", 1)
    checkpoints = CheckpointConfig(tmp_path, seconds=seconds)
    die(engine, checkpoints, batch, held_out=HELD_OUT)
    trained = train(engine, checkpoints, held_out=HELD_OUT)
    assert trained.resumed == (batch - 1 if seconds == 0 else 0)
    found = events(tmp_path)
    assert_events_are(found, trained)
    assert [step for step, _ in found["within epoch/loss"]] == list(range(1, 13))


def test_what_came_after_the_checkpoint_is_purged(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The curve of the run that died went on for 3 updates after its last checkpoint, at the 4th."""
    monkeypatch.setattr(run, "CHECK_EVERY", 1)
    checkpoints = CheckpointConfig(tmp_path, seconds=0)
    with monkeypatch.context() as patch:
        patch.setattr(
            run.TrainingRun, "_save_in_time", lambda self: self._save() if self.state.updates == 4 else None
        )
        die(engine, checkpoints, 8, held_out=HELD_OUT)
    assert [step for step, _ in events(tmp_path)["within epoch/loss"]] == list(range(1, 8))
    trained = train(engine, checkpoints, held_out=HELD_OUT)
    assert trained.resumed == 4
    found = events(tmp_path)
    assert [step for step, _ in found["within epoch/loss"]] == list(range(1, 13))
    assert_events_are(found, trained)


def test_tensorboard_is_for_those_who_want_it(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(engine, CheckpointConfig(tmp_path / "none", tensorboard=False))
    assert not (tmp_path / "none" / "tensorboard").exists()
    assert len(table(tmp_path / "none")) == 3
    monkeypatch.setattr(logs.importlib.util, "find_spec", lambda name: None)
    train(engine, CheckpointConfig(tmp_path / "not installed"))
    assert not (tmp_path / "not installed" / "tensorboard").exists()
    with pytest.raises(ImportError, match=r"TensorBoard is not installed.*tensorboard=False"):
        train(engine, CheckpointConfig(tmp_path / "asked for", tensorboard=True))


def test_without_a_folder_nothing_is_written(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(train(engine, None).rows) == 3
    assert list(tmp_path.iterdir()) == []


# --- lines ----------------------------------------------------------------------------------------------


def test_nothing_is_printed_where_nobody_watches(
    engine: Engine, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "CHECK_EVERY", 1)
    monkeypatch.setattr(progress, "SECONDS", -1.0)
    for show in (None, False):
        train(engine, tmp_path / str(show), show=show, held_out=HELD_OUT)
        train(engine, tmp_path / str(show), show=show, held_out=HELD_OUT)  # finished
    assert capfd.readouterr() == ("", "")


def test_a_line_for_each_epoch(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    trained = train(engine, None, show=True, held_out=HELD_OUT)
    lines = [f"epoch {r.epoch}/3  loss {r.loss:.4f}  held-out NLL {r.held_out:.4f}" for r in trained.history]
    assert capsys.readouterr().out.splitlines() == lines


def test_somebody_at_a_terminal_is_shown(
    engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetsngp.training.engine.at_a_terminal", lambda: True)
    train(engine, None)
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"epoch {epoch}/3" for epoch in (1, 2, 3)
    ]
    train(engine, None, show=False)
    assert capsys.readouterr().out == ""


def test_a_long_epoch_says_where_it_is(
    engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "CHECK_EVERY", 2)
    monkeypatch.setattr(progress, "SECONDS", -1.0)  # a line whenever there is something to say
    config = TrainConfig(Schedule(2, 1e-9))
    model, lines = toy.build("deterministic"), []
    with torch.no_grad():
        losses = [float(model.loss(x, y)) for x, y in Loader()]
    so_far = [sum(losses[:2]) / 2, sum(losses) / 4]  # with such a learning rate they stay
    for epoch in (1, 2):
        lines += [
            f"epoch {epoch}/2  50%  loss {so_far[0]:.4f}",
            f"epoch {epoch}/2  100%  loss {so_far[1]:.4f}",
        ]
        lines += [f"epoch {epoch}/2  loss {so_far[1]:.4f}"]
    train(engine, None, show=True, config=config, method="deterministic")
    assert capsys.readouterr().out.splitlines() == lines


class Bar:
    """rich's, without a terminal."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, str]] = []

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def add_task(self, *args: Any, **kwargs: Any) -> int:
        return 0

    def update(self, task: int, completed: float, description: str = "") -> None:
        self.calls.append((completed, description))


def test_within_moves_the_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    bar = Bar()
    monkeypatch.setattr(progress, "_rich_bar", lambda: bar)
    with Progress(4, 0, show=True) as shown:
        shown.within(1, 0.5, 1.25)
        shown(EpochResult(1, 4, 1.0))
        shown.within(2, 0.25, 0.5)
    assert bar.calls == [
        (0.5, "epoch 1/4  50%  loss 1.2500"),
        (1, "epoch 1/4  loss 1.0000"),
        (1.25, "epoch 2/4  25%  loss 0.5000"),
        (4, ""),
    ]
    assert capsys.readouterr().out == ""


def test_within_waits_for_its_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    quiet, shown = Progress(4, 0, show=False), Progress(4, 0, show=True)
    for seconds, share in ((100.0, 0.1), (105.0, 0.2), (111.0, 0.3), (115.0, 0.4), (122.0, 0.5)):
        now = seconds
        for one in (quiet, shown):
            one.within(1, share, 2.0)
    assert capsys.readouterr().out == "epoch 1/4  30%  loss 2.0000\nepoch 1/4  50%  loss 2.0000\n"
    quiet.__exit__(None, None, None)
    assert capsys.readouterr().out == ""


def test_stdout_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under pythonw, or as a service."""
    monkeypatch.setattr("sys.stdout", None)
    assert not progress.at_a_terminal()
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert not progress.at_a_terminal()


def test_a_writer_that_an_interrupt_has_locked_does_not_hold_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As TensorBoard's is where the interrupt comes in the middle of its queue."""
    monkeypatch.setattr(logs, "CLOSING_SECONDS", 0.05)
    locked, closed = threading.Event(), threading.Event()

    class Writer:
        def close(self) -> None:
            locked.wait(30)
            closed.set()

    kept = logs.Logs(CheckpointConfig(tmp_path, tensorboard=False), 1, show=False, main=True, updates=0)
    kept.__enter__()
    kept.writer = Writer()
    kept.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert not closed.is_set()
    locked.set()
    assert closed.wait(10)
    closed.clear()
    with kept:
        kept.writer = Writer()
    assert closed.is_set()  # where nothing went wrong it is waited for


# --- logs that cannot be written ------------------------------------------------------------------------


def full_disk(monkeypatch: pytest.MonkeyPatch, calls: set[int]) -> None:
    """At those calls, counted from 1, of the function that writes metrics.csv."""
    seen, real = 0, logs.replace_file

    def replace_file(file: Path, write: Any) -> None:
        nonlocal seen
        seen += 1
        if seen in calls:
            raise OSError(28, "No space left on device")
        real(file, write)

    monkeypatch.setattr(logs, "replace_file", replace_file)


@pytest.mark.parametrize("calls", [{1}, {2, 3}])
def test_a_table_that_cannot_be_written_does_not_end_the_training(
    calls: set[int], engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, calls)
    with pytest.warns(UserWarning, match=r"metrics\.csv cannot be written \(.*No space left"):
        trained = train(engine, CheckpointConfig(tmp_path, tensorboard=False))
    assert [int(row["epoch"]) for row in table(tmp_path)] == [1, 2, 3]
    assert trained.history == train(engine, None).history


def test_a_table_that_is_missing_at_the_end_is_an_error_and_nothing_is_lost(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = CheckpointConfig(tmp_path, tensorboard=False)
    with monkeypatch.context() as patch:
        full_disk(patch, {1, 2, 3, 4})
        with (
            pytest.warns(UserWarning, match="cannot be written"),
            pytest.raises(OSError, match="No space left"),
        ):
            train(engine, checkpoints)
    assert not (tmp_path / "metrics.csv").exists()
    again = train(engine, checkpoints)
    assert (again.resumed, len(table(tmp_path))) == (12, 3)


@pytest.mark.parametrize("call", [1, 2, 5, 12])
def test_tensorboard_on_a_full_disk_is_a_warning(
    call: int, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = pytest.importorskip("tensorboard.summary.writer.record_writer")
    seen, real = 0, writer.RecordWriter.write

    def write(self: Any, data: bytes) -> None:
        nonlocal seen
        seen += 1
        if seen >= call:
            raise OSError(28, "No space left on device")
        real(self, data)

    monkeypatch.setattr(writer.RecordWriter, "write", write)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    with pytest.warns(UserWarning, match="tensorboard cannot be written .*: the training goes on without it"):
        trained = train(engine, CheckpointConfig(tmp_path, tensorboard=True))
    assert trained.history == train(engine, None).history
    assert len(table(tmp_path)) == 3
