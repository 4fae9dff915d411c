"""Finished runs on disk: each is written once, whole, under a name that says what decided its numbers."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from hetsngp.evaluation.synthetic import Outcome, Run

PACKAGE = Path(__file__).parents[1]
# What runs and shows results, or measures other models, does not decide them.
SHOWS = {"__main__.py"} | {
    f"evaluation/{file.name}" for file in Path(__file__).parent.glob("*.py") if file.name != "synthetic.py"
}
SHOWING_ROOMS = ("cli", "serving", "reproduction")


@dataclass(frozen=True)
class Store:
    """The folder ``out``: runs/NAME.json, and maps/NAME.npz where maps were asked for.

    NAME ends in a fingerprint of settings, torch and ``code``: where one of them changed the run is repeated,
    and the file of the earlier one stays. Make it with :meth:`open`.
    """

    out: Path
    code: str

    @staticmethod
    def open(out: Path) -> Store:
        """The store in ``out`` for the code as it is now."""
        return Store(out, code_hash())

    def fingerprint(self, run: Run) -> str:
        """Of all that decides the numbers of ``run``."""
        decides = {"settings": run.settings(), "code": self.code, "torch": torch.__version__}
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]

    def file(self, run: Run) -> Path:
        """Where the numbers of ``run`` are, or will be."""
        return self.out / "runs" / f"{run.name}-{self.fingerprint(run)}.json"

    def maps_file(self, run: Run) -> Path:
        """Where its maps are, or will be."""
        return self.out / "maps" / f"{run.name}-{self.fingerprint(run)}.npz"

    def has(self, run: Run, *, maps: bool) -> bool:
        """Whether ``run`` was finished before, with its maps if they are needed."""
        return self.file(run).exists() and (self.maps_file(run).exists() or not maps)

    def write(self, run: Run, outcome: Outcome) -> None:
        """Maps first: the numbers say that the run is done."""
        if outcome.maps is not None:
            arrays: dict[str, Any] = outcome.maps
            write_atomically(self.maps_file(run), lambda file: np.savez_compressed(file, **arrays))
        decided = {"fingerprint": self.fingerprint(run), "settings": run.settings(), **self.versions()}
        write_json(self.file(run), {**decided, "numbers": outcome.numbers})

    def read(self, run: Run) -> dict[str, Any]:
        """What ``write`` wrote of the numbers."""
        found: dict[str, Any] = json.loads(self.file(run).read_text(encoding="utf-8"))
        return found

    def read_maps(self, run: Run) -> dict[str, np.ndarray]:
        """What ``write`` wrote of the maps."""
        with np.load(self.maps_file(run)) as arrays:
            return dict(arrays)

    def versions(self) -> dict[str, str]:
        """Of what ran."""
        return {
            "hetsngp": importlib.import_module("hetsngp").__version__,
            "code": self.code,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }


def code_hash(package: Path = PACKAGE) -> str:
    """Of every source file that can change a result."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if name not in SHOWS and name.partition("/")[0] not in SHOWING_ROOMS:
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def write_json(path: Path, content: Any) -> None:
    """Strict JSON (no NaN), atomically."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write beside ``path`` and rename, so that a file is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp lets only the owner read
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
