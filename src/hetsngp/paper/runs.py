"""Training runs of a table: each in its folder, trained once, shared by all tables that need it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetsngp.paper.definitions import NO_MATTER, PaperRow, PaperTable

FINISHED, BEGUN, TO_DO, OTHER = "finished", "begun", "to do", "finished with other settings"
OF_THE_TABLE = ("data", "method", "seed")
"""Keys of a recipe that the table sets."""


@dataclass(frozen=True)
class TableRun:
    """A recipe, with changes, and a seed."""

    recipe: str
    changes: tuple[str, ...]
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder: "imagenet-hetsngp-1a2b3c4d/seed0"; with a hash only where something changed."""
        decides = sorted(text for text in self.changes if not text.startswith(NO_MATTER))
        changed = f"-{hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:8]}" if decides else ""
        return f"{self.recipe.replace('/', '-')}{changed}/seed{self.seed}"

    def __str__(self) -> str:
        changed = f", {', '.join(self.changes)}" if self.changes else ""
        return f"{self.recipe}, seed {self.seed}{changed}"

    def folder(self, out: Path) -> Path:
        """Folder of the run."""
        return out / "runs" / self.name

    def read(self) -> Any:
        """Read its :class:`hetsngp.training.recipes.recipe.Recipe`."""
        from hetsngp.training.recipes.recipe import read_recipe

        return read_recipe(self.recipe, (*self.changes, f"seed={self.seed}"))

    def state(self, out: Path) -> str:
        """State of the run: one of the four words above."""
        from hetsngp.training.images import finished

        folder = self.folder(out)
        summary = finished(folder)
        if summary is None:
            return BEGUN if (folder / "checkpoint").exists() else TO_DO
        return FINISHED if summary["recipe"] == described(self.read()) else OTHER


def described(recipe: Any) -> dict[str, Any]:
    """All settings, as read back from JSON."""
    found: dict[str, Any] = json.loads(json.dumps(recipe.describe()))
    return found


def runs_of(row: PaperRow, changes: Sequence[str], seed: int) -> tuple[TableRun, ...]:
    """Runs of a row: one, or one for each member of its ensemble, each with another seed.

    >>> row = PaperRow("sngp", "SNGP Ensemble", "imagenet/sngp", members=4)
    >>> [run.seed for run in runs_of(row, (), seed=1)]
    [4, 5, 6, 7]
    """
    merged = merge((*changes, *row.changes))
    first = seed * row.members
    return tuple(TableRun(row.recipe, merged, first + member) for member in range(row.members))


def merge(changes: Sequence[str]) -> tuple[str, ...]:
    """Keep each key once, with the last of its values.

    >>> merge(["options.rank = 2", "seed=1", "options.rank=3"])
    ('options.rank=3', 'seed=1')
    """
    found: dict[str, str] = {}
    for change in changes:
        key, _, value = change.partition("=")
        found[key.strip()] = value.strip()
    return tuple(f"{key}={value}" for key, value in found.items())


def check_changes(table: PaperTable, changes: Sequence[str]) -> None:
    """Refuse changes of keys that the table sets."""
    varied = {text.partition("=")[0] for part in table.parts for row in part.rows for text in row.changes}
    for change in changes:
        key = change.partition("=")[0].strip()
        if key in OF_THE_TABLE or key in varied:
            raise ValueError(
                f"{key} is set by the table {table.name}: leave out {change!r}, or train by itself, "
                f"hetsngp train RECIPE --set {change}"
            )


def all_runs(table: PaperTable, changes: Sequence[str], seeds: int) -> Iterator[TableRun]:
    """Every run once, the first seed of every row first, so that there is soon a table to look at."""
    seen: set[TableRun] = set()
    for seed in range(seeds):
        for part in table.parts:
            for row in part.rows:
                for run in runs_of(row, changes, seed):
                    if run not in seen:
                        seen.add(run)
                        yield run


def train(run: TableRun, out: Path, engine: Any, show: bool | None) -> dict[str, Any]:
    """Train what is missing of a run and return its summary; a finished run is not changed."""
    from hetsngp.training.config import CheckpointConfig
    from hetsngp.training.images import train_images

    summary: dict[str, Any] = train_images(run.read(), engine, CheckpointConfig(run.folder(out)), show=show)
    return summary
