"""Finished results on disk, so that an interrupted evaluation continues where it stopped.

A result is one file. It is read back only while its fingerprint, a hash of everything that decided the result
(code, versions, settings, model and data), is the same; otherwise it is computed again and replaced.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hetsngp.files import (
    CHECKSUM,
    has_checksum,
    remove_leftovers,
    with_checksum,
    write_atomically,
    write_json,
)
from hetsngp.locking import one_writer

WAIT = 30.0
"""Seconds to wait for another process that writes a few files into a folder."""
FINGERPRINT = "fingerprint"
"""Key of the fingerprint in a file; a result has no key of this name."""


@contextmanager
def clean_writer(folder: Path, *, wait: float = 0.0) -> Iterator[None]:
    """:func:`one_writer`, which first removes the temporary files that killed writers left in ``folder``."""
    with one_writer(folder, wait=wait) as locked:
        if locked:
            remove_leftovers(folder)
        yield


@dataclass(frozen=True)
class ResultCache:
    """Results in ``folder``, one file for each name: JSON for values, npz for arrays, both with checksums.

    A damaged file counts as missing. A fingerprint of None belongs to a result that cannot be compared with
    another: it is neither written nor read. Several processes may share the folder: a write takes its lock
    for a moment, and removes what killed writers left.
    """

    folder: Path

    def read(self, name: str, fingerprint: str | None) -> dict[str, Any] | None:
        """Value that :meth:`write` stored with this fingerprint, or None."""
        if fingerprint is None:
            return None
        try:
            content = json.loads(self.file(name, ".json").read_text(encoding="utf-8"))
            valid = (
                has_checksum(content) and content.pop(CHECKSUM) and content.pop(FINGERPRINT) == fingerprint
            )
            return content if valid else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, name: str, fingerprint: str | None, content: Mapping[str, Any]) -> None:
        """Store a value that strict JSON can hold."""
        if fingerprint is not None:
            # As it is read back, which the checksum is of.
            plain = json.loads(json.dumps({FINGERPRINT: fingerprint, **content}))
            with clean_writer(self.folder, wait=WAIT):
                write_json(self.file(name, ".json"), with_checksum(plain), indent=None)

    def read_arrays(self, name: str, fingerprint: str | None) -> dict[str, np.ndarray] | None:
        """Arrays that :meth:`write_arrays` stored with this fingerprint, or None."""
        file = self.file(name, ".npz")
        if fingerprint is None or not file.is_file():
            return None
        try:
            with np.load(file, allow_pickle=False) as archive:
                arrays = dict(archive)
            return arrays if str(arrays.pop(FINGERPRINT)) == fingerprint else None
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error):
            return None

    def write_arrays(self, name: str, fingerprint: str | None, arrays: Mapping[str, np.ndarray]) -> None:
        """Store arrays of numbers or text."""
        if fingerprint is not None:
            content: dict[str, Any] = {FINGERPRINT: np.array(fingerprint), **arrays}
            with clean_writer(self.folder, wait=WAIT):
                write_atomically(self.file(name, ".npz"), lambda file: np.savez_compressed(file, **content))

    def clean(self) -> None:
        """Remove what killed writers left, where there is something."""
        if any(self.folder.glob(".*")):
            with clean_writer(self.folder, wait=WAIT):
                pass

    def file(self, name: str, suffix: str) -> Path:
        """File of a result: readable, and different for different names."""
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[-60:]
        distinct = "" if plain == name else f"-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        return self.folder / f"{plain}{distinct}{suffix}"


PACKAGE = Path(__file__).parents[1]
DECIDES_NOTHING = ("_moved",)
"""Modules that change no result: names of earlier releases."""


def fingerprint_of(*decides: Any) -> str:
    """Hash of values that JSON can hold."""
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


@functools.cache
def code_fingerprint(*modules: str, package: Path = PACKAGE) -> str:
    """Hash of the source of ``modules`` and of all modules of this package that they import, directly or not.

    "hetsngp.data.*" stands for every module in ``hetsngp.data``. A name that does not exist is an error: a
    module that has moved must not drop out unnoticed. The ``__init__`` of a package from which a submodule
    alone is imported does not count. Read once in a process: the source may be edited while it runs.

    >>> code_fingerprint("hetsngp.functional.link") != code_fingerprint("hetsngp.functional.features")
    True
    """
    digest = hashlib.sha256()
    for name, file in sorted(imported_modules(*modules, package=package).items()):
        digest.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def imported_modules(*modules: str, package: Path = PACKAGE) -> dict[str, Path]:
    """Source files of ``modules`` and of every module of ``package`` that they import, by module name.

    Nothing is imported: modules are found by their files, and imports by parsing these. Imports for
    annotations alone (``if TYPE_CHECKING``) and :data:`DECIDES_NOTHING` do not count.
    """
    found: dict[str, Path] = {}
    waiting = [name for module in modules for name in _expanded(module, package)]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        file = _source_file(name, package)
        if file is None:
            raise ModuleNotFoundError(f"no module {name!r}: has it moved? Results depend on its code")
        found[name] = file
        ignored = {f"{package.name}.{module}" for module in DECIDES_NOTHING}
        waiting.extend(each for each in _imports(file, package) if each not in ignored)
    return found


def _expanded(module: str, package: Path) -> list[str]:
    """Name of a module, or the names of all modules in a package for "PACKAGE.*"."""
    if not module.endswith(".*"):
        return [module]
    parts = module.removesuffix(".*").split(".")
    folder = package.parent.joinpath(*parts)
    files = sorted(folder.rglob("*.py"))
    if not files:
        raise ModuleNotFoundError(f"no package {'.'.join(parts)!r}: has it moved? Results depend on its code")
    names = [".".join(file.relative_to(package.parent).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names]


def _source_file(name: str, package: Path) -> Path | None:
    """File of a module of ``package``; None where there is no such module."""
    base = package.parent.joinpath(*name.split("."))
    return next(
        (file for file in (base.with_name(f"{base.name}.py"), base / "__init__.py") if file.exists()), None
    )


def _imports(file: Path, package: Path) -> Iterator[str]:
    """Modules of ``package`` that a file imports when it runs, anywhere in its source."""
    root = package.name
    for node in _run_nodes(ast.parse(file.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{file} has a relative import: name the module from {root} on")
            for alias in node.names if f"{node.module}.".startswith(f"{root}.") else ():
                submodule = f"{node.module}.{alias.name}"
                names.append(str(node.module) if _source_file(submodule, package) is None else submodule)
        if root in names:  # it resolves names lazily, so that their modules could not be followed
            raise ValueError(f"{file} imports from {root} itself: name the module that has it")
        yield from (name for name in names if name.startswith(f"{root}."))


def _run_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """``ast.walk`` without the bodies of ``if TYPE_CHECKING``."""
    yield node
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        children: Iterable[ast.AST] = node.orelse
    else:
        children = ast.iter_child_nodes(node)
    for child in children:
        yield from _run_nodes(child)
