"""Training runs of a table: each in its folder, trained once, shared by all tables that need it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetsngp.paper.definitions import NO_MATTER, PaperRow, PaperTable

if TYPE_CHECKING:
    from hetsngp.paper.results import TableRequest

FINISHED, BEGUN, TO_DO, OTHER = "finished", "begun", "to do", "finished with other settings"
OF_THE_TABLE = ("data", "method", "seed")
"""Keys of a recipe that the table sets."""
METHOD = "method="
"""Prefix of the change that trains a row's method by the recipe of the caller."""


@dataclass(frozen=True)
class TableRun:
    """A recipe, with changes, and a seed."""

    recipe: str
    changes: tuple[str, ...]
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder, with a hash only where more than the method changed.

        >>> TableRun("imagenet/hetsngp", (), 0).name, TableRun("cifar100", ("method=sngp",), 2).name
        ('imagenet-hetsngp/seed0', 'cifar100+sngp/seed2')
        """
        # A recipe file is named as its description is: without the folder.
        recipe = Path(self.recipe).stem if self.recipe.endswith(".toml") else self.recipe.replace("/", "-")
        method = "".join(f"+{text.removeprefix(METHOD)}" for text in self.changes if text.startswith(METHOD))
        decides = sorted(text for text in self.changes if not text.startswith((*NO_MATTER, METHOD)))
        changed = f"-{hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:8]}" if decides else ""
        return f"{recipe}{method}{changed}/seed{self.seed}"

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
        from hetsngp.training.finished_runs import finished

        folder = self.folder(out)
        summary = finished(folder)
        if summary is None:
            return BEGUN if (folder / "checkpoint").exists() else TO_DO
        return FINISHED if summary["recipe"] == described(self.read()) else OTHER


def described(recipe: Any) -> dict[str, Any]:
    """All settings, as read back from JSON."""
    found: dict[str, Any] = json.loads(json.dumps(recipe.describe()))
    return found


def runs_of(
    row: PaperRow, changes: Sequence[str], seed: int, recipe: str | None = None
) -> tuple[TableRun, ...]:
    """Runs of a row: one, or one for each member of its ensemble, each with another seed.

    ``recipe`` trains the row's method in place of the row's own recipe.

    >>> row = PaperRow("sngp", "SNGP Ensemble", "imagenet/sngp", members=4)
    >>> [run.seed for run in runs_of(row, (), seed=1)]
    [4, 5, 6, 7]
    >>> runs_of(PaperRow("sngp", "SNGP", "cifar100/sngp"), (), seed=0, recipe="cifar100")
    (TableRun(recipe='cifar100', changes=('method=sngp',), seed=0),)
    """
    method = () if recipe is None else (f"{METHOD}{_own_task(row).method}",)
    source = row.recipe if recipe is None else recipe
    merged = merge((*method, *changes))
    row_changes = _unequal(source, merged, row.changes) if row.drops_equal_changes else row.changes
    merged = merge((*merged, *row_changes))
    first = seed * row.members
    return tuple(TableRun(source, merged, first + member) for member in range(row.members))


def _own_task(row: PaperRow) -> Any:
    """Data and method of the row's own recipe."""
    from hetsngp.training.recipes.recipe import read_recipe

    return read_recipe(row.recipe).task


def _unequal(recipe: str, given: Sequence[str], changes: Sequence[str]) -> tuple[str, ...]:
    """Those of ``changes`` to values that the recipe, with the changes ``given``, does not have already."""
    before = _values(recipe, given)
    return tuple(change for change in changes if _values(recipe, (*given, change)) != before)


def _values(recipe: str, changes: Sequence[str]) -> dict[str, Any]:
    """All settings of a recipe, also the options that it leaves at their defaults."""
    from hetsngp.models.methods import check_options
    from hetsngp.training.recipes.recipe import read_recipe

    found = read_recipe(recipe, changes)
    values: dict[str, Any] = found.describe()
    values["task"]["options"] = asdict(check_options(found.task.options))
    return values


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


def check_recipe(table: PaperTable, recipe: str) -> None:
    """Refuse a recipe of other data than a row's own recipe."""
    from hetsngp.training.recipes.recipe import read_recipe

    for part in table.parts:
        for row in part.rows:
            own = _own_task(row)
            data = read_recipe(recipe, (f"{METHOD}{own.method}",)).task.data
            if data != own.data:
                raise ValueError(
                    f"the recipe {recipe} trains on {data}, the row {row.name} of the table {table.name} on "
                    f"{own.data}: name a recipe with data = {own.data!r}, or leave out --recipe"
                )


def all_runs(request: TableRequest) -> Iterator[TableRun]:
    """Every run once, the first seed of every row first, so that there is soon a table to look at."""
    seen: set[TableRun] = set()
    for seed, _, row in request.rows_by_seed():
        for run in request.runs_of(row, seed):
            if run not in seen:
                seen.add(run)
                yield run


def train(run: TableRun, out: Path, engine: Any, show: bool | None) -> dict[str, Any]:
    """Train what is missing of a run and return its summary; a finished run is not changed."""
    from hetsngp.training.config import CheckpointConfig
    from hetsngp.training.recipe_run import train_recipe

    summary: dict[str, Any] = train_recipe(run.read(), engine, CheckpointConfig(run.folder(out)), show=show)
    return summary
