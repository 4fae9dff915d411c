"""Atomic writes: an interrupted process leaves the old file or the new one, never a part."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_TEMPORARY = ".saving-"
CHECKSUM = "checksum"
"""Key of the checksum in a JSON file that has one."""


def replace_file(file: Path, write: Callable[[Path], Any]) -> None:
    """Have ``write`` write a temporary file, which replaces ``file`` once it is complete and on disk."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_file(file.parent)
    try:
        write(temporary)
        sync_file(temporary)
        rename(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def rename(old: Path, new: Path) -> None:
    """Rename a file, in place of one that may be there, and wait until the directory entry is on disk."""
    os.replace(old, new)
    sync_folder(new.parent)


def write_atomically(file: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """:func:`replace_file` for a ``write`` that takes an open binary file."""

    def into(temporary: Path) -> None:
        with open(temporary, "wb") as handle:
            write(handle)

    replace_file(file, into)


def write_text(file: Path, text: str) -> None:
    """Write ``text`` as UTF-8."""
    replace_file(file, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Rows as the text of a CSV file, whose lines end with a line feed."""
    lines: list[str] = []
    end = "\r\n"  # the writer quotes values that contain one of these two letters

    def add(line: str) -> None:
        lines.append(f"{line.removesuffix(end)}\n")

    csv.writer(SimpleNamespace(write=add), lineterminator=end).writerows(rows)
    return "".join(lines)


def write_figure(figure: Any, file: Path, dpi: int) -> None:
    """Write a figure of matplotlib's as PNG. Letters that its fonts lack are one warning, not one each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        write_atomically(file, lambda handle: figure.savefig(handle, dpi=dpi, format="png"))
    missing = [each for each in caught if str(each.message).startswith("Glyph ")]
    for each in caught:
        if each not in missing:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    if missing:
        warnings.warn(
            f"{file} shows boxes in place of some letters of names, which the fonts of matplotlib lack: set "
            "matplotlib.rcParams['font.family'] to a font that has them",
            stacklevel=3,
        )


def write_json(file: Path, content: Any, *, indent: int | None = 2) -> None:
    """Write strict JSON: NaN and infinity are refused, because other readers do not know them."""
    write_text(file, json.dumps(content, indent=indent, allow_nan=False) + "\n")


def with_checksum(content: dict[str, Any]) -> dict[str, Any]:
    """``content`` with a checksum of its values under the key ``checksum``.

    It does not depend on the order of the keys nor on white space: a file may be formatted anew.

    >>> content = with_checksum({"size": 3})
    >>> has_checksum(content), has_checksum({**content, "size": 4}), has_checksum({"size": 3})
    (True, False, None)
    """
    return {**content, CHECKSUM: _json_sha256(content)}


def has_checksum(content: dict[str, Any]) -> bool | None:
    """Whether the checksum in ``content`` is that of its values; None where it has none."""
    return None if CHECKSUM not in content else content[CHECKSUM] == _json_sha256(content)


def _json_sha256(content: dict[str, Any]) -> str:
    values = {name: value for name, value in content.items() if name != CHECKSUM}
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def write_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file with the permissions of the umask; safetensors gives the owner's alone."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # safetensors writes a temporary file of its own, whose name would not tell that it is ours.
    inside = temporary_file(file.parent)
    inside.mkdir()
    try:
        save_file(tensors, inside / file.name, metadata={"format": "pt"})
        os.replace(inside / file.name, file)
    except SafetensorError as error:
        code = re.search(r"\(os error (\d+)\)", str(error))
        if code is None:
            raise OSError(f"{file} cannot be written: {error}") from error
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(file)) from error
    finally:
        shutil.rmtree(inside, ignore_errors=True)
    mask = os.umask(0)
    os.umask(mask)
    file.chmod(0o666 & ~mask)


def temporary_file(folder: Path) -> Path:
    """Name of a new file in ``folder`` that no other process uses."""
    return folder / f"{_TEMPORARY}{secrets.token_hex(8)}"


def sync_file(file: Path) -> None:
    """Wait until the content of ``file`` is on disk."""
    with open(file, "rb") as handle:
        os.fsync(handle.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the entries of ``folder`` are on disk, where the system can open a folder."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of writers that were killed; only the one writer of ``folder`` may call this."""
    for left in folder.glob(f"{_TEMPORARY}*"):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def sha256_of(file: Path) -> str:
    """SHA-256 of the content of ``file``, in hexadecimal."""
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
