"""Finished runs of the demo on disk."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetsngp.evaluation.cache import ResultCache, code_fingerprint, fingerprint_of
from hetsngp.paper.synthetic.experiment import Outcome, SyntheticRun


@dataclass(frozen=True)
class Store:
    """Results of runs in ``out``: runs/NAME.json, and maps/NAME.npz for the figures.

    NAME ends in a fingerprint of settings, torch and ``code``: where one of them changed the run is repeated,
    and the earlier file stays. Worker processes get the ``code`` of their parent: the source may be edited
    meanwhile. Make it with :meth:`open`.
    """

    out: Path
    code: str

    @staticmethod
    def open(out: Path) -> Store:
        """Store in ``out`` for the current code."""
        return Store(out, code_fingerprint("hetsngp.paper.synthetic.experiment"))

    def fingerprint(self, run: SyntheticRun) -> str:
        """Hash of all that decides the numbers of ``run``."""
        return fingerprint_of({"settings": run.describe(), "code": self.code, "torch": torch.__version__})

    def has(self, run: SyntheticRun, *, maps: bool) -> bool:
        """Whether ``run`` is finished, with its maps if they are needed."""
        return self.read(run) is not None and (not maps or self.read_maps(run) is not None)

    def write(self, run: SyntheticRun, outcome: Outcome) -> None:
        """Store numbers and maps; maps first, because the numbers say that the run is finished."""
        if outcome.maps is not None:
            self._maps.write_arrays(self._name(run), self.fingerprint(run), outcome.maps)
        content = {"settings": run.describe(), **self.versions(), "numbers": outcome.numbers}
        self._numbers.write(self._name(run), self.fingerprint(run), content)

    def read(self, run: SyntheticRun) -> dict[str, Any] | None:
        """Settings, versions and numbers of ``run``, or None."""
        found = self._numbers.read(self._name(run), self.fingerprint(run))
        return None if found is None else {"fingerprint": self.fingerprint(run), **found}

    def read_maps(self, run: SyntheticRun) -> dict[str, np.ndarray] | None:
        """Maps of ``run``, or None."""
        return self._maps.read_arrays(self._name(run), self.fingerprint(run))

    def results(self, runs: Iterable[SyntheticRun]) -> dict[SyntheticRun, dict[str, Any]]:
        """Settings, versions and numbers of ``runs``, which are finished."""
        found = {}
        for run in runs:
            content = self.read(run)
            if content is None:
                raise RuntimeError(f"{run.name} in {self.out} changed while it was in use: run again")
            found[run] = content
        return found

    def clean(self) -> None:
        """Remove what killed writers left."""
        self._numbers.clean()
        self._maps.clean()

    @property
    def _numbers(self) -> ResultCache:
        return ResultCache(self.out / "runs")

    @property
    def _maps(self) -> ResultCache:
        return ResultCache(self.out / "maps")

    def _name(self, run: SyntheticRun) -> str:
        return f"{run.name}-{self.fingerprint(run)}"

    def versions(self) -> dict[str, str]:
        """Versions of the software."""
        return {
            "hetsngp": importlib.import_module("hetsngp").__version__,
            "code": self.code,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
