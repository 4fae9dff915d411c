"""A folder has one writer: a lock of the operating system, which the death of its process releases.

It is a lock of ``flock``, which belongs to an open file: worker processes that are forked close their
copies, so that an orphaned worker cannot keep a folder locked. (A record lock of ``fcntl`` belongs to a
process, but is lost when any part of it opens and closes the lock file, as a copy of the folder does.)
Threads of a process are told apart by a table in memory. Network file systems: NFS, Lustre (mounted with
``flock``), GPFS, CephFS and SMB pass these locks on to their server; where one has none, a warning is given
and the folder is not locked.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

LOCK = ".lock"
"""File in the folder that is locked. It names the holder, and is removed at the end."""
_HELD_ELSEWHERE = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_PAUSE = 0.05
_NAMING = 0.5
"""Seconds in which a process that has just taken the lock writes its name into the file."""


class FolderInUse(OSError):
    """Another process or thread writes into the folder."""


class _Holder:
    """Thread of this process that holds the lock of a folder, and how many times it took it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.thread, self.count = threading.get_ident(), 1
        self.descriptor: int | None = None
        """Descriptor of the locked file; None where the file system has no locks."""


_table = threading.Lock()
_holders: dict[tuple[int, int], _Holder] = {}
"""Locks of this process by (device, inode) of the folder, which are the same for every path to it."""


_descriptors: set[int] = set()
"""Open lock files of this process; opened under ``_table``, which a fork takes, so that it knows them all."""


def _forget_locks() -> None:
    """Close, in a forked process, the lock files of its parent: open files are what keeps them locked."""
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()
    _holders.clear()
    _table.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_table.acquire, after_in_parent=_table.release, after_in_child=_forget_locks)


@contextmanager
def one_writer(folder: Path, *, wait: float = 0.0) -> Iterator[bool]:
    """Context in which this thread alone may write into ``folder``, which is made if necessary.

    ``wait``: seconds to wait for another writer; then :class:`FolderInUse` names its process and host. The
    thread that holds the lock may take it again. Gives whether the folder is locked: False where the file
    system has no locks, so that temporary files in it may be those of a process that lives. A folder that was
    made for the lock and stays empty is removed.
    """
    made, key = _make(folder)
    end = time.monotonic() + wait
    while not _enter(key, folder):
        _wait_or_raise(folder, end, {"process": os.getpid(), "host": socket.gethostname()})
    holder, process = _holders[key], os.getpid()
    outermost = holder.count == 1
    try:
        if outermost:
            holder.descriptor = _lock_file(folder, end)
        yield holder.descriptor is not None
    finally:
        if os.getpid() == process:  # a forked process that leaves this context has no lock to give back
            if outermost and holder.descriptor is not None:
                _unlock_file(folder, holder.descriptor)
            _leave(key)
            if made:
                with suppress(OSError):
                    folder.rmdir()


def check_lock(folder: Path) -> None:
    """Take the lock of this process again where its file or ``folder`` was removed meanwhile.

    Raises :class:`FolderInUse` where another process has taken a folder of this path since. For a long run,
    before it writes.
    """
    me = threading.get_ident()
    with _table:
        holder = next((h for h in _holders.values() if h.thread == me and h.folder == folder), None)
    if holder is None or holder.descriptor is None or _is_in_folder(holder.descriptor, folder / LOCK):
        return
    _make(folder)
    lost, holder.descriptor = holder.descriptor, None
    _close(lost)
    holder.descriptor = _lock_file(folder, time.monotonic())


def _make(folder: Path) -> tuple[bool, tuple[int, int]]:
    """Make the folder where there is none; returns whether it was made, and its device and inode."""
    try:
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        status = folder.stat()
    except (FileExistsError, NotADirectoryError):
        raise NotADirectoryError(f"{folder} is a file, or inside one: give a folder to write into") from None
    return made, (status.st_dev, status.st_ino)


def _enter(key: tuple[int, int], folder: Path) -> bool:
    """Take the folder for this thread; False: another thread has it."""
    with _table:
        holder = _holders.get(key)
        if holder is None:
            _holders[key] = _Holder(folder)
            return True
        if holder.thread == threading.get_ident():
            holder.count += 1
            return True
        return False


def _leave(key: tuple[int, int]) -> None:
    with _table:
        _holders[key].count -= 1
        if _holders[key].count == 0:
            del _holders[key]


def _lock_file(folder: Path, end: float) -> int | None:
    """Lock the file in ``folder`` and return its descriptor; None where the file system has no locks."""
    file = folder / LOCK
    while True:
        descriptor = _open(folder)
        try:
            _lock(descriptor)
        except OSError as error:
            if error.errno in _HELD_ELSEWHERE:
                holder = _read_holder(descriptor)
                _close(descriptor)
                _wait_or_raise(folder, end, holder)
                continue
            _close(descriptor)
            if error.errno not in _NO_LOCKS:
                raise
            warnings.warn(
                f"the file system of {folder} has no locks ({error.strerror}): make sure that no other "
                "process writes into this folder",
                stacklevel=4,
            )
            return None
        if _is_in_folder(descriptor, file):
            _write_holder(descriptor)
            return descriptor
        _close(descriptor)  # the last holder removed this file after it was opened here


def _open(folder: Path) -> int:
    # Not through a link, which could point at a file whose content would be replaced by a name.
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    for last in (False, True):
        try:
            with _table:
                descriptor = os.open(folder / LOCK, flags, 0o666)
                _descriptors.add(descriptor)
            break
        except FileNotFoundError:  # the last holder had made the folder, and removed it again
            if last:
                raise
            _make(folder)
        except PermissionError:  # left by a process of another user: it can be locked, without a name in it
            if last:
                raise
            flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)
    return descriptor


def _close(descriptor: int) -> None:
    with _table:
        _descriptors.discard(descriptor)
        os.close(descriptor)


def _unlock_file(folder: Path, descriptor: int) -> None:
    # Removed while it is locked: a process that waits sees that the file is no longer in the folder. Where
    # somebody has removed it before, the file in its place is that of another holder.
    with suppress(OSError):  # Windows removes no file that is open
        if _is_in_folder(descriptor, folder / LOCK):
            (folder / LOCK).unlink()
    _close(descriptor)


def _is_in_folder(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    except FileNotFoundError:
        return False


def _wait_or_raise(folder: Path, end: float, holder: dict[str, Any]) -> None:
    if time.monotonic() >= end:
        raise FolderInUse(
            f"{folder} is being written by process {holder.get('process', 'unknown')} on "
            f"{holder.get('host', 'another host')}: wait until it ends, stop it, or give another folder"
        )
    time.sleep(_PAUSE)


def _write_holder(descriptor: int) -> None:
    text = json.dumps({"process": os.getpid(), "host": socket.gethostname()})
    with suppress(OSError):  # on a full disk the lock holds without a name in it
        os.ftruncate(descriptor, 0)
        os.write(descriptor, text.encode())


def _read_holder(descriptor: int) -> dict[str, Any]:
    """Name of the holder; waits a moment for one that has not written it yet."""
    end = time.monotonic() + _NAMING
    while True:
        try:
            os.lseek(descriptor, 0, os.SEEK_SET)
            holder = json.loads(os.read(descriptor, 4096))
        except (OSError, ValueError):
            holder = None
        if isinstance(holder, dict):
            return holder
        if time.monotonic() >= end:
            return {}
        time.sleep(_PAUSE)


if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        os.lseek(descriptor, 2**30, os.SEEK_SET)  # beyond the text, which others may then read
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        os.lseek(descriptor, 0, os.SEEK_SET)
else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
