"""Every file operation of this process below a folder, one after another, to be counted, killed or failed.

Python's audit events announce open, rename, link, remove, mkdir and truncate; fsync, write and close have no
event and are replaced by functions that announce them. Installed in a fork: an audit hook stays for ever.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

EVENTS = {
    "open": "open",
    "os.rename": "rename",
    "os.link": "link",
    "os.remove": "unlink",
    "os.mkdir": "mkdir",
    "os.rmdir": "rmdir",
    "os.truncate": "truncate",
}
Act = Callable[[int, str, str, Any], None]
"""Called with the number of an operation, its kind, its path, and a function that does half of a write."""


class Operations:
    """Announces operations that change something below ``folder``, before they are done, to ``act``.

    TensorBoard's thread writes at any moment, so that the numbers of operations would differ from run to run:
    ``thread`` chooses whether its operations, or those of everything else, are announced.
    """

    def __init__(self, folder: Path, act: Act, *, thread: bool = False) -> None:
        self.folder, self.act, self.thread = str(folder.resolve()), act, thread
        self.count, self.busy = 0, False
        self.main = threading.get_ident()

    def install(self) -> None:
        """Begin; there is no end."""
        sys.addaudithook(self._audit)
        for name in ("fsync", "write"):
            setattr(os, name, self._of_descriptor(name, getattr(os, name)))
        real = io.open

        def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if isinstance(file, int) or not set("wax") & set(mode) or self._path(file) is None:
                return real(file, mode, *args, **options)
            return self._opened(file, mode, *args, **options)

        builtins.open = io.open = opened  # type: ignore[assignment]
        import safetensors.torch as library

        save_file = library.save_file

        def save(tensors: Any, filename: Any, metadata: Any = None) -> None:
            def part() -> None:
                save_file(tensors, filename, metadata)
                os.truncate(filename, os.path.getsize(filename) // 2)

            self._announce("write", filename, part)
            save_file(tensors, filename, metadata)

        library.save_file = save

    def _opened(self, file: Any, mode: str, buffering: int = -1, *args: Any, **options: Any) -> Any:
        raw: Any = _Announced(file, mode.replace("b", "").replace("t", ""), self)
        if buffering == 0:
            return raw
        buffered = io.BufferedWriter(raw) if "+" not in mode else io.BufferedRandom(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **options)

    def _of_descriptor(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def announced(descriptor: int, *args: Any) -> Any:
            try:
                path: Any = os.readlink(f"/proc/self/fd/{descriptor}")
            except OSError:
                path = None
            if path is not None:
                self._announce(name, path, lambda: None)
            return function(descriptor, *args)

        return announced

    def _path(self, path: Any) -> str | None:
        """Absolute path if it is below the folder."""
        try:
            absolute = os.path.abspath(os.fsdecode(path))
        except (TypeError, ValueError):
            return None
        return absolute if absolute.startswith(self.folder) else None

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        kind = EVENTS.get(event)
        if kind is None or self.busy:
            return
        if kind == "open" and not _changes(args[1], args[2]):
            return
        if kind == "truncate" and isinstance(args[0], int):
            args = (os.readlink(f"/proc/self/fd/{args[0]}"),)
        self._announce(kind, args[0], lambda: None)

    def _announce(self, kind: str, path: Any, part: Callable[[], None]) -> None:
        found = None if self.busy else self._path(path)
        of_log = found is not None and "/tensorboard" in found
        if found is None or of_log != self.thread:
            return
        self.busy = True
        try:
            self.count += 1
            self.act(self.count, kind, found, part)
        finally:
            self.busy = False


class _Announced(io.FileIO):
    def __init__(self, file: Any, mode: str, operations: Operations) -> None:
        super().__init__(file, mode)
        self.operations = operations

    def write(self, data: Any) -> int:
        def part() -> None:
            io.FileIO.write(self, bytes(data)[: len(data) // 2])

        self.operations._announce("write", self.name, part)
        return super().write(data)

    def close(self) -> None:
        if not self.closed:
            try:
                self.operations._announce("close", self.name, lambda: None)
            finally:
                super().close()


def _changes(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return bool(set("wax+") & set(mode))
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
