"""Finished results on disk, so that an interrupted evaluation continues where it stopped.

A result is one file. It is read back only while its fingerprint, a hash of everything that decided the result
(code, versions, settings, model and data), is the same; otherwise it is computed again and replaced.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hetsngp.files import write_atomically, write_json

FINGERPRINT = "fingerprint"
"""Key of the fingerprint in a file; a result has no key of this name."""


@dataclass(frozen=True)
class ResultCache:
    """Results in ``folder``, one file for each name: JSON for values, npz for arrays. A damaged file counts as
    missing.
    """

    folder: Path

    def read(self, name: str, fingerprint: str) -> dict[str, Any] | None:
        """Value that :meth:`write` stored with this fingerprint, or None."""
        try:
            content = json.loads(self.file(name, ".json").read_text(encoding="utf-8"))
            return content if content.pop(FINGERPRINT) == fingerprint else None
        except (OSError, ValueError, KeyError, AttributeError):
            return None

    def write(self, name: str, fingerprint: str, content: Mapping[str, Any]) -> None:
        """Store a value that strict JSON can hold."""
        write_json(self.file(name, ".json"), {FINGERPRINT: fingerprint, **content})

    def read_arrays(self, name: str, fingerprint: str) -> dict[str, np.ndarray] | None:
        """Arrays that :meth:`write_arrays` stored with this fingerprint, or None."""
        try:
            with np.load(self.file(name, ".npz"), allow_pickle=False) as file:
                arrays = dict(file)
            return arrays if str(arrays.pop(FINGERPRINT)) == fingerprint else None
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
            return None

    def write_arrays(self, name: str, fingerprint: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Store arrays of numbers or text."""
        content: dict[str, Any] = {FINGERPRINT: np.array(fingerprint), **arrays}
        write_atomically(self.file(name, ".npz"), lambda file: np.savez_compressed(file, **content))

    def file(self, name: str, suffix: str) -> Path:
        """File of a result: readable, and different for different names."""
        plain = re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-.")[-60:]
        distinct = "" if plain == name else f"-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        return self.folder / f"{plain}{distinct}{suffix}"


def fingerprint_of(*decides: Any) -> str:
    """Hash of values that JSON can hold."""
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


@functools.cache
def code_fingerprint(*modules: str) -> str:
    """Hash of the source of ``modules`` and of every module of this package that they import, directly or not.

    A name in ``modules`` that does not exist is an error: a module that has moved must not drop out unnoticed.
    The root package does not count, because it names everything; neither does the ``__init__`` of a package
    from which a submodule alone is imported.

    >>> code_fingerprint("hetsngp.functional.link") != code_fingerprint("hetsngp.functional.features")
    True
    """
    digest = hashlib.sha256()
    for name, file in sorted(imported_modules(*modules).items()):
        digest.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def imported_modules(*modules: str) -> dict[str, Path]:
    """Source files of ``modules`` and of every module of this package that they import, by module name."""
    found: dict[str, Path] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        file = _source_file(name)
        if file is None:
            raise ModuleNotFoundError(f"no module {name!r}: results that depend on it cannot be told apart")
        found[name] = file
        waiting.extend(_imports(file))
    return found


@functools.cache
def _source_file(name: str) -> Path | None:
    """File of a module of this package; None where there is no such module."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _imports(file: Path) -> Iterator[str]:
    """Modules of this package that a file imports, anywhere in its source."""
    root = __name__.partition(".")[0]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith(f"{root}."))
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                if node.module.startswith(root) and _source_file(submodule) is not None:
                    yield submodule
                elif node.module.startswith(f"{root}."):
                    yield node.module
