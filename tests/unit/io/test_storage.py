"""The files of a saved model: their checksums, one writer, readers beside it, and errors of the system."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from hetsngp import files
from hetsngp.files import with_checksum
from hetsngp.io import storage
from hetsngp.io.storage import ArtifactError
from hetsngp.locking import LOCK, FolderInUse, one_writer

VALUES: dict[str, Any] = {"text": "é", "numbers": [1, 2.5, float("inf")], "keys": {1: {"deep": None}}}


def tensors(value: float = 1.0, size: int = 3) -> dict[str, Tensor]:
    return {"a": torch.full((size,), value), "half": torch.tensor([value]).bfloat16()}


def content(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def put(folder: Path, value: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(value))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    storage.write(tmp_path / "saved", VALUES, tensors())
    return tmp_path / "saved"


# --- checksum -----------------------------------------------------------------------------------------------


def test_what_is_read_is_what_was_written(saved: Path) -> None:
    config, read = storage.read(saved)
    assert {name: config[name] for name in VALUES} == json.loads(json.dumps(VALUES))
    assert "checksum" not in config
    assert all(torch.equal(read[name], t) and read[name].dtype == t.dtype for name, t in tensors().items())
    assert read["a"].data_ptr() % 64 == 0
    put(saved, dict(reversed(content(saved).items())))  # formatted anew
    assert storage.read(saved)[0] == config


def changes(value: Any) -> list[Any]:
    """``value`` with one leaf changed, added or removed, for every leaf."""
    if isinstance(value, dict):
        found = [{**value, "more": 1}]
        for name, inner in value.items():
            found.append({key: v for key, v in value.items() if key != name})
            found += [{**value, name: changed} for changed in changes(inner)]
        return found
    if isinstance(value, list):
        nested = [[*value[:i], c, *value[i + 1 :]] for i, v in enumerate(value) for c in changes(v)]
        return [*nested, [*value, 1], value[1:]]
    return [[value], 7 if value != 7 else 8]


def test_every_change_of_the_content_is_noticed(saved: Path) -> None:
    before = content(saved)
    every = changes(before)
    assert len(every) > 30
    for changed in every:
        put(saved, changed)
        with pytest.raises(ArtifactError):
            storage.read(saved)
    put(saved, before)
    storage.read(saved)


def test_a_new_file_needs_its_checksum_and_an_old_one_may_have_it(saved: Path) -> None:
    config = {name: value for name, value in content(saved).items() if name != "checksum"}
    put(saved, config)
    with pytest.raises(ArtifactError, match=r"lost its checksum; copy it again"):
        storage.read(saved)
    put(saved, {**config, "version": 1})
    with pytest.warns(UserWarning, match="has no checksum"):
        storage.read(saved)
    put(saved, with_checksum({**config, "version": 1}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        storage.read(saved)
    put(saved, {**with_checksum({**config, "version": 1}), "text": "other"})
    with pytest.raises(ArtifactError, match=r"not that of its checksum; copy it again"):
        storage.read(saved)


def test_the_warning_is_shown_once(saved: Path) -> None:
    config = {name: value for name, value in content(saved).items() if name != "checksum"}
    put(saved, {**config, "version": 1})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            storage.read(saved)
    assert len(caught) == 1


def test_nested_without_end(saved: Path) -> None:
    text = (saved / "config.json").read_text().rstrip().removesuffix("}")
    (saved / "config.json").write_text(text + ', "deep": ' + "[" * 900 + "]" * 900 + "}")
    with pytest.raises(ArtifactError):
        storage.read(saved)


def test_a_pipe_is_not_waited_for(saved: Path) -> None:
    weights = saved / content(saved)["weights"]
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(ArtifactError, match="is missing"):
        storage.read(saved)
    (saved / "config.json").unlink()
    os.mkfifo(saved / "config.json")
    with pytest.raises(FileNotFoundError, match="no model"):
        storage.read(saved)


# --- one writer, and readers beside it ----------------------------------------------------------------------


def test_a_save_waits_for_another_writer(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "WAIT_SECONDS", 0.2)
    entered, leave, errors = threading.Event(), threading.Event(), []

    def other() -> None:
        with one_writer(saved):
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait(30)
    try:
        storage.write(saved, VALUES, tensors(2.0))
    except FolderInUse as error:
        errors.append(str(error))
    leave.set()
    thread.join()
    assert f"process {os.getpid()}" in errors[0]
    assert float(storage.read(saved)[1]["a"][0]) == 1.0
    monkeypatch.setattr(storage, "WAIT_SECONDS", 30.0)
    storage.write(saved, VALUES, tensors(2.0))
    assert float(storage.read(saved)[1]["a"][0]) == 2.0
    assert not (saved / LOCK).exists()


def test_leftovers_of_killed_saves_are_removed(saved: Path) -> None:
    (saved / ".saving-0123456789abcdef").write_text("part of a file")
    (saved / "model-0123456789abcdef.safetensors").write_text("of a save that was killed before its config")
    storage.write(saved, VALUES, tensors(2.0))
    assert sorted(os.listdir(saved)) == sorted(["config.json", content(saved)["weights"]])


def test_weights_that_a_newer_save_removed_are_not_waited_for(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole save happens between the read of the config and that of the weights, three times."""
    left = [4.0, 3.0, 2.0]
    original = storage._map_weights

    def late(folder: Path, config: dict[str, Any]) -> Any:
        if left:
            storage.write(folder, VALUES, tensors(left.pop()))
        return original(folder, config)

    monkeypatch.setattr(storage, "_map_weights", late)
    assert float(storage.read(saved)[1]["a"][0]) == 4.0
    monkeypatch.setattr(storage, "_READ_ATTEMPTS", 2)
    left[:] = [1.0, 2.0, 3.0, 5.0]
    with pytest.raises(ArtifactError, match="saved again and again"):
        storage.read(saved)


def test_a_reader_needs_no_permission_to_write(saved: Path) -> None:
    files_before = sorted(os.listdir(saved))
    saved.chmod(0o555)
    try:
        storage.read(saved)
        assert sorted(os.listdir(saved)) == files_before
    finally:
        saved.chmod(0o755)


def test_weights_that_go_and_come_back_while_they_are_opened(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models are saved in turn. safetensors opens the file, then torch does, which may find it gone."""
    left = [1, 1, 1]

    def late(file: Path, framework: str) -> Any:
        if left:
            left.pop()
            storage.write(saved, VALUES, tensors(2.0))
            with pytest.raises(RuntimeError) as caught:
                torch.UntypedStorage.from_file(str(file), False, 4)
            storage.write(saved, VALUES, tensors(1.0))
            raise caught.value
        return safe_open(file, framework=framework)

    monkeypatch.setattr(storage, "safe_open", late)
    assert float(storage.read(saved)[1]["a"][0]) == 1.0
    assert left == []


def _save_rounds(folder: Path, value: float, rounds: int) -> None:
    for i in range(rounds):
        storage.write(folder, {"value": value, "round": i}, tensors(value, 2000))


@pytest.mark.slow
def test_two_writers_and_a_reader(tmp_path: Path) -> None:
    """Every state that the reader sees is complete, and so is the last."""
    folder = tmp_path / "model"
    storage.write(folder, {"value": 0.0}, tensors(0.0, 2000))
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_save_rounds, args=(folder, float(v), 40)) for v in (1, 2)]
    for writer in writers:
        writer.start()
    seen = []
    while any(writer.is_alive() for writer in writers):
        config, read = storage.read(folder)
        assert bool((read["a"] == config["value"]).all())
        seen.append(config["value"])
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    config, read = storage.read(folder)
    assert bool((read["a"] == config["value"]).all())
    assert len(seen) > 5
    assert sorted(os.listdir(folder)) == sorted(["config.json", content(folder)["weights"]])


# --- errors of the system -----------------------------------------------------------------------------------


def failing(function: Callable[..., Any], at: int, number: int) -> Callable[..., Any]:
    calls = []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise OSError(number, os.strerror(number))
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    ("where", "name", "at"),
    [
        *((os, "fsync", at) for at in (1, 2, 3, 4)),
        *((os, "replace", at) for at in (1, 2)),
        (Path, "write_text", 1),
        (storage, "write_tensors", 1),
    ],
)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_an_error_of_the_system_is_one_line_and_nothing_is_lost(
    where: Any, name: str, at: int, number: int, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(where, name, failing(getattr(where, name), at, number))
        with pytest.raises(OSError, match=r"cannot save into") as caught:
            storage.write(saved, VALUES, tensors(2.0))
    assert caught.value.errno == number
    text = str(caught.value)
    assert str(saved) in text
    assert os.strerror(number) in text
    assert "\n" not in text
    read = storage.read(saved)[1]
    assert float(read["a"][0]) in (1.0, 2.0)  # 2: the folder could not be synced after the last rename
    assert [n for n in os.listdir(saved) if n.startswith(".")] == []
    storage.write(saved, VALUES, tensors(3.0))
    assert sorted(os.listdir(saved)) == sorted(["config.json", content(saved)["weights"]])


def test_a_full_disk_as_safetensors_says_it(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import SafetensorError

    def full(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match=rf"cannot save into {saved}: No space left on device") as caught:
        storage.write(saved, VALUES, tensors(2.0))
    assert caught.value.errno == errno.ENOSPC
    assert float(storage.read(saved)[1]["a"][0]) == 1.0


def test_a_full_disk(tmp_path: Path) -> None:
    """The system's own full device, where there is one."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")

    def full(tensors: Any, file: Path) -> None:
        with open("/dev/full", "wb") as handle:
            handle.write(b"x" * 100_000)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "write_tensors", full)
        with pytest.raises(OSError, match="No space left on device: free some space"):
            storage.write(tmp_path / "model", VALUES, tensors())


def test_directory_entries_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights and their entry are on disk before the config names them, its entry before old ones go."""
    order: list[str] = []

    def note(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            target = Path(args[-1] if name == "replace" else args[0]).name
            order.append(f"{name} {target.partition('-')[0]}")
            return function(*args, **kwargs)

        return wrapper

    folder = tmp_path / "model"
    storage.write(folder, VALUES, tensors())
    monkeypatch.setattr(os, "replace", note("replace", os.replace))
    monkeypatch.setattr(files, "sync_folder", note("sync", files.sync_folder))
    monkeypatch.setattr(storage, "sync_file", note("sync file", storage.sync_file))
    monkeypatch.setattr(Path, "unlink", note("unlink", Path.unlink))
    storage.write(folder, VALUES, tensors(2.0))
    kept = [step for step in order if step not in ("unlink .saving", "unlink .lock")]
    assert kept == [
        "replace .saving",  # out of the folder in which safetensors wrote it
        "sync file .saving",
        "replace model",
        "sync model",
        "replace config.json",
        "sync model",
        "unlink model",
    ]


def test_a_file_that_cannot_be_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    monkeypatch.setattr(hashlib, "file_digest", failing(hashlib.file_digest, 1, errno.EIO))
    with pytest.raises(OSError, match=r"cannot read .*safetensors: Input/output error"):
        storage.read(saved)


def test_a_save_does_not_wait_for_its_own_folder(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "WAIT_SECONDS", 0.0)
    with one_writer(saved):
        storage.write(saved, VALUES, tensors(2.0))
    assert float(storage.read(saved)[1]["a"][0]) == 2.0


def test_without_locks_the_files_of_another_writer_stay(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system has no locks, a temporary file may belong to a process that lives."""
    from hetsngp import locking

    def no_locks(descriptor: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    other = files.temporary_file(saved)
    other.write_bytes(b"half")
    monkeypatch.setattr(locking, "_lock", no_locks)
    with pytest.warns(UserWarning, match="has no locks"):
        storage.write(saved, VALUES, tensors(2.0))
    assert other.read_bytes() == b"half"
