"""Reading files within limits: only regular files, and no more bytes than a limit allows."""

from __future__ import annotations

import io
import stat
from pathlib import Path
from typing import IO, Any

from hetsngp.limits import Limit


def check_regular(file: Path) -> int:
    """Size of a file in bytes; an error for what may never end, such as a pipe or a device."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{file} is a folder, a pipe or a device: give a file")
    return status.st_size


def read_file(file: Path, limit: Limit) -> bytes:
    """Content of a file of at most ``limit`` bytes."""
    limit.check(check_regular(file), str(file))
    return file.read_bytes()


class BoundedReader(io.RawIOBase):
    """Binary stream that raises :class:`~hetsngp.limits.LimitExceeded` once it gave more than ``limit``.

    A decompressor behind it expands as far as it is read, so that a small file cannot fill the memory.
    """

    def __init__(self, stream: IO[bytes] | Any, limit: Limit, name: str, *, least: int = 0) -> None:
        """``least``: bytes that are allowed even if ``limit`` is below, such as the size of the file."""
        super().__init__()
        self.stream, self.limit, self.name = stream, limit, name
        self.left = max(limit.value, least)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = self.stream.read(len(buffer))
        self.left -= len(part)
        if self.left < 0:
            self.limit.check(self.limit.value + 1, self.name)
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self.stream.close()
        super().close()


def buffered(stream: IO[bytes] | Any, limit: Limit, name: str, *, least: int = 0) -> io.BufferedReader:
    """:class:`BoundedReader` with a buffer."""
    return io.BufferedReader(BoundedReader(stream, limit, name, least=least), 2**18)
