"""One writer to a folder: processes, threads, forks, and the death of the holder."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from hetsngp import locking
from hetsngp.locking import LOCK, FolderInUse, check_lock, one_writer

HOLD = """
import sys, time
from pathlib import Path
from hetsngp.locking import one_writer
with one_writer(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def start_holder(folder: Path, code: str = HOLD) -> subprocess.Popen[str]:
    """Start a process that holds the lock until its standard input is closed."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


def test_another_process_is_refused_and_the_holder_is_named(tmp_path: Path) -> None:
    holder = start_holder(tmp_path)
    try:
        name = f"process {holder.pid} on {socket.gethostname()}"
        with pytest.raises(FolderInUse, match=name), one_writer(tmp_path):
            pass
    finally:
        holder.communicate("")
    with one_writer(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
    assert not (tmp_path / LOCK).exists()


def test_a_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    holder = start_holder(tmp_path)
    holder.kill()
    holder.wait()
    assert (tmp_path / LOCK).exists()
    with one_writer(tmp_path):
        pass


FORK_AND_HOLD = """
import os, sys, time
from pathlib import Path
from hetsngp.locking import one_writer
with one_writer(Path(sys.argv[1])):
    if os.fork() == 0:
        print(os.getpid(), flush=True)  # by the worker: it has left the fork, and with it the descriptor
        time.sleep(600)
    sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_worker_does_not_keep_the_lock(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", FORK_AND_HOLD, str(tmp_path)]
    holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert holder.stdout is not None
    worker = int(holder.stdout.readline())
    try:
        holder.kill()
        holder.wait()
        os.kill(worker, 0)  # the worker lives on
        with one_writer(tmp_path):
            pass
    finally:
        os.kill(worker, 9)


def test_reading_and_copying_the_folder_does_not_give_the_lock_up(tmp_path: Path) -> None:
    """As record locks do, which a process loses with any descriptor of the file that it closes."""
    folder = tmp_path / "run"
    with one_writer(folder):
        assert json.loads((folder / LOCK).read_text())["process"] == os.getpid()
        shutil.copytree(folder, tmp_path / "copy")
        refused = subprocess.run([sys.executable, "-c", HOLD, str(folder)], capture_output=True, text=True)
        assert f"process {os.getpid()}" in refused.stderr


def test_a_writer_waits_for_the_other_to_end(tmp_path: Path) -> None:
    holder = start_holder(tmp_path)
    assert holder.stdin is not None
    threading.Timer(0.3, holder.stdin.close).start()
    with one_writer(tmp_path, wait=60):
        assert holder.wait(60) == 0


def test_threads_exclude_each_other_and_one_thread_may_enter_twice(tmp_path: Path) -> None:
    inside, most = 0, 0
    link = tmp_path / "link"
    (tmp_path / "folder").mkdir()
    link.symlink_to(tmp_path / "folder")

    def write(folder: Path) -> None:
        nonlocal inside, most
        with one_writer(folder, wait=60), one_writer(folder):
            inside += 1
            most = max(most, inside)
            time.sleep(0.02)
            inside -= 1

    threads = [threading.Thread(target=write, args=[folder]) for folder in (link, tmp_path / "folder") * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_another_thread_is_refused_at_once(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def write() -> None:
        try:
            with one_writer(tmp_path):
                pass
        except FolderInUse as error:
            errors.append(error)

    with one_writer(tmp_path):
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    assert f"process {os.getpid()}" in str(errors[0])


def _try_in_child(folder: Path, answers: multiprocessing.Queue[str]) -> None:
    try:
        with one_writer(folder):
            answers.put("entered")
    except FolderInUse:
        answers.put("refused")


def test_a_forked_child_is_another_writer(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with one_writer(tmp_path):
        child = context.Process(target=_try_in_child, args=(tmp_path, answers))
        child.start()
        assert answers.get(timeout=60) == "refused"
        child.join()
    # The table of the parent was not touched, and its lock has ended.
    with one_writer(tmp_path):
        pass


def test_many_processes_count_without_loss(tmp_path: Path) -> None:
    """Read, add one, write: an increment is lost wherever two are inside at once."""
    code = """
import sys
from pathlib import Path
from hetsngp.locking import one_writer
folder = Path(sys.argv[1])
for _ in range(50):
    with one_writer(folder, wait=100):
        count = int((folder / "count").read_text())
        (folder / "count").write_text(str(count + 1))
"""
    (tmp_path / "count").write_text("0")
    processes = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(4)]
    assert [process.wait(120) for process in processes] == [0] * 4
    assert (tmp_path / "count").read_text() == "200"


def test_a_folder_that_was_made_for_the_lock_alone_is_removed(tmp_path: Path) -> None:
    with one_writer(tmp_path / "run") as locked:
        assert locked
    assert not (tmp_path / "run").exists()
    with one_writer(tmp_path / "run"):
        (tmp_path / "run" / "model").write_text("")
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["file", "file/inside"])
def test_a_file_is_no_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(NotADirectoryError, match="give a folder"), one_writer(tmp_path / name):
        pass
    assert (tmp_path / "file").read_text() == "kept"


def test_a_link_in_place_of_the_lock_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "other").write_text("kept")
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic link"), one_writer(tmp_path / "run"):
        pass
    assert (tmp_path / "other").read_text() == "kept"


def test_a_name_that_cannot_be_written_keeps_nobody_locked_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk: the lock is taken without a name in it, and given back."""

    def full(*args: object) -> int:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with one_writer(tmp_path) as locked:
            assert locked
            refused = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], capture_output=True)
            assert b"process unknown on another host" in refused.stderr
    start_holder(tmp_path).communicate("")


def test_without_locks_of_the_file_system_there_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locking, "_lock", no_locks)
    with ExitStack() as stack:
        with pytest.warns(UserWarning, match="has no locks"):
            locked = stack.enter_context(one_writer(tmp_path))
        assert not locked
        check_lock(tmp_path)


@pytest.mark.parametrize("removed", ["lock", "folder"])
def test_a_lock_that_was_removed_is_taken_again_or_refused(removed: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def remove() -> None:
        (folder / LOCK).unlink()
        if removed == "folder":
            folder.rmdir()

    with one_writer(folder):
        check_lock(folder)
        remove()
        check_lock(folder)
        assert json.loads((folder / LOCK).read_text())["process"] == os.getpid()
        remove()
        holder = start_holder(folder)
        with pytest.raises(FolderInUse, match=f"process {holder.pid}"):
            check_lock(folder)
    assert (folder / LOCK).exists()  # it is the other's now
    holder.communicate("")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_an_error_of_the_system(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError), one_writer(tmp_path):
            pass
    finally:
        tmp_path.chmod(0o700)


def test_the_lock_of_another_is_not_removed_at_the_end(tmp_path: Path) -> None:
    with one_writer(tmp_path):
        (tmp_path / LOCK).unlink()
        holder = start_holder(tmp_path)
    try:
        with pytest.raises(FolderInUse, match=f"process {holder.pid}"), one_writer(tmp_path):
            pass
    finally:
        holder.communicate("")
