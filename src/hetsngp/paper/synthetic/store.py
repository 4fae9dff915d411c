"""Finished runs on disk: each is written once, whole, under a name that says what decided its numbers."""

from __future__ import annotations

import hashlib
import importlib
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetsngp.evaluation.cache import code_fingerprint
from hetsngp.files import write_atomically, write_json
from hetsngp.paper.synthetic.experiment import Outcome, SyntheticRun


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
        return Store(out, code_fingerprint("hetsngp.paper.synthetic.experiment"))

    def fingerprint(self, run: SyntheticRun) -> str:
        """Of all that decides the numbers of ``run``."""
        decides = {"settings": run.settings(), "code": self.code, "torch": torch.__version__}
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]

    def file(self, run: SyntheticRun) -> Path:
        """Where the numbers of ``run`` are, or will be."""
        return self.out / "runs" / f"{run.name}-{self.fingerprint(run)}.json"

    def maps_file(self, run: SyntheticRun) -> Path:
        """Where its maps are, or will be."""
        return self.out / "maps" / f"{run.name}-{self.fingerprint(run)}.npz"

    def has(self, run: SyntheticRun, *, maps: bool) -> bool:
        """Whether ``run`` was finished before, with its maps if they are needed."""
        return self.file(run).exists() and (self.maps_file(run).exists() or not maps)

    def write(self, run: SyntheticRun, outcome: Outcome) -> None:
        """Maps first: the numbers say that the run is done."""
        if outcome.maps is not None:
            arrays: dict[str, Any] = outcome.maps
            write_atomically(self.maps_file(run), lambda file: np.savez_compressed(file, **arrays))
        decided = {"fingerprint": self.fingerprint(run), "settings": run.settings(), **self.versions()}
        write_json(self.file(run), {**decided, "numbers": outcome.numbers})

    def read(self, run: SyntheticRun) -> dict[str, Any]:
        """What ``write`` wrote of the numbers."""
        found: dict[str, Any] = json.loads(self.file(run).read_text(encoding="utf-8"))
        return found

    def read_maps(self, run: SyntheticRun) -> dict[str, np.ndarray]:
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
