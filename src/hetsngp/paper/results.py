"""Results of a table: every value, its mean and standard error over seeds, and the paper's number."""

from __future__ import annotations

import importlib
import math
import os
import platform
import shlex
import statistics
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hetsngp import metrics
from hetsngp.evaluation.cache import WAIT, clean_writer
from hetsngp.files import write_atomically, write_json
from hetsngp.paper.definitions import (
    FAR,
    NO_MATTER,
    SOURCE,
    TABLES,
    PaperColumn,
    PaperPart,
    PaperRow,
    PaperTable,
    printed,
)
from hetsngp.paper.intervals import LEVEL, RESAMPLES, Interval
from hetsngp.paper.runs import TableRun, runs_of
from hetsngp.paper.sets import DETECTION, AvailableSets, EvaluationSet

PLACES = "places365"
"""Far-OOD set of the paper's CIFAR-100 table."""
# Tolerance of a difference between numbers of three digits, so that equal ones are equal.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Cell:
    """Number of a row and column, over seeds.

    >>> cell = Cell({0: 0.80, 1: 0.82}, paper=(0.808, 0.001))
    >>> round(cell.mean, 3), round(cell.standard_error, 3)
    (0.81, 0.01)
    """

    values: Mapping[int, float]
    """Values by seed; empty where nothing is measured yet."""
    paper: tuple[float, float | None] | None = None

    @property
    def mean(self) -> float | None:
        """Mean over seeds; None without values."""
        return statistics.fmean(self.values.values()) if self.values else None

    @property
    def standard_error(self) -> float | None:
        """Standard error of the mean; None for fewer than two values."""
        if len(self.values) < 2:
            return None
        return statistics.stdev(self.values.values()) / math.sqrt(len(self.values))


@dataclass(frozen=True)
class TableRequest:
    """A table to reproduce: rows, seeds and changes of the recipes."""

    table: PaperTable
    """Table with the chosen rows."""
    seeds: tuple[int, ...]
    changes: tuple[str, ...] = ()
    """Changes of every recipe."""
    recipe: str | None = None
    """Recipe that trains every row's method; None: the rows' own recipes."""
    one_seed: tuple[str, ...] = ()
    """Rows that are trained with the first seed only, by name."""
    far: str = PLACES
    """Far-OOD set of the tables of CIFAR-100."""

    def seeds_of(self, row: PaperRow) -> tuple[int, ...]:
        """Seeds of a row: all, or the first."""
        return self.seeds[:1] if row.name in self.one_seed else self.seeds

    def rows_by_seed(self) -> Iterator[tuple[int, PaperPart, PaperRow]]:
        """Each row with each of its seeds, the first seed of every row first."""
        for seed in self.seeds:
            for part in self.table.parts:
                for row in part.rows:
                    if seed in self.seeds_of(row):
                        yield seed, part, row

    def runs_of(self, row: PaperRow, seed: int) -> tuple[TableRun, ...]:
        """Training runs of a row: one, or one for each member of its ensemble."""
        return runs_of(row, self.changes, seed, self.recipe)

    @property
    def command(self) -> str:
        """Command that reproduces this table, without the folder of its files.

        >>> TableRequest(TABLES["cifar100"], (0, 1), ("schedule.epochs=3",), far="scenes").command
        'hetsngp reproduce cifar100 --seeds 2 --far scenes --set schedule.epochs=3'
        """
        words = ["hetsngp", "reproduce", self.table.name]
        words += ["--recipe", self.recipe] if self.recipe is not None else []
        words += ["--seeds", str(len(self.seeds))] if len(self.seeds) != self.table.seeds else []
        words += ["--one-seed", ",".join(self.one_seed)] if self.one_seed else []
        words += ["--methods", ",".join(self.chosen)] if self.chosen else []
        has_far = any(column.data == FAR for part in self.table.parts for column in part.columns)
        words += ["--far", self.far] if has_far and self.far != PLACES else []
        return shlex.join([*words, *(word for change in self.changes for word in ("--set", change))])

    @property
    def chosen(self) -> tuple[str, ...]:
        """Rows (of the ablations: parts) by the names that ``--methods`` takes; empty for all."""
        complete = TABLES[self.table.name]
        has_parts = len(complete.parts) > 1
        names = tuple(
            name
            for part in self.table.parts
            for name in (
                [part.name.removeprefix(f"{complete.name}-")] if has_parts else [r.name for r in part.rows]
            )
        )
        return () if names == complete.choices else names

    @property
    def name(self) -> str:
        """Name of its files: a table of some rows does not replace that of all."""
        return "-".join([self.table.name, *(["+".join(self.chosen)] if self.chosen else [])])

    def title(self) -> str:
        """Title, with all differences to the paper's table."""
        ensembles = any(row.members > 1 for part in self.table.parts for row in part.rows)
        of = "ensemble" if ensembles else "seed"
        count = f"{len(self.seeds)} {of}{'s' if len(self.seeds) != 1 else ''}"
        if len(self.seeds) != self.table.seeds and self.table.in_paper:
            count += f" (the paper: {self.table.seeds})"
        if self.one_seed:
            count += f", 1 {of} of {', '.join(self.one_seed)}"
        changes = [text for text in self.changes if not text.startswith(NO_MATTER)]
        changed = f"; changed: {', '.join(changes)}" if changes else ""
        some = f" ({', '.join(self.chosen)} alone)" if self.chosen else ""
        recipe = "" if self.recipe is None else f"; recipe {self.recipe}"
        return f"{self.table.title}{some}, {count}{recipe}{changed}"


@dataclass(frozen=True)
class Result:
    """A table with numbers; it may be unfinished."""

    request: TableRequest
    values: dict[tuple[str, str, str], dict[int, float]] = field(default_factory=dict)
    """(part, row, column) → seed → number."""
    notes: tuple[str, ...] = ()
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings and seconds of every training run."""
    intervals: dict[tuple[str, str, str], Interval] = field(default_factory=dict)
    """(part, row, column) → difference from the part's baseline."""

    @property
    def table(self) -> PaperTable:
        """Table that was requested."""
        return self.request.table

    def add(self, part: PaperPart, row: PaperRow, column: PaperColumn, seed: int, value: float) -> None:
        """Add a number."""
        self.values.setdefault((part.name, row.name, column.name), {})[seed] = value

    def cell(self, part: PaperPart, row: PaperRow, column: PaperColumn) -> Cell:
        """Our values and the paper's number."""
        found = self.values.get((part.name, row.name, column.name), {})
        return Cell(dict(sorted(found.items())), printed(part.name, row.name, column.name))

    def best(self, part: PaperPart, column: PaperColumn) -> set[str]:
        """Rows within one standard error of the best row, which the paper prints in bold.

        For single runs it is the best alone.
        """
        cells = {row.name: self.cell(part, row, column) for row in part.rows}
        means = {name: (cell.mean, cell.standard_error) for name, cell in cells.items()}
        return within_one_error({n: (m, e) for n, (m, e) in means.items() if m is not None}, column.sign)

    @property
    def is_finished(self) -> bool:
        """Whether every cell has a number of every seed of its row."""
        return all(
            len(self.cell(part, row, column).values) == len(self.request.seeds_of(row))
            for part in self.table.parts
            for row in part.rows
            for column in part.columns
        )

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        seconds = [run.get("seconds") for run in self.runs.values()]
        return {
            "table": self.table.name,
            "title": self.request.title(),
            "finished": self.is_finished,
            "methods": list(self.request.chosen) or None,
            "seeds": list(self.request.seeds),
            "seeds_of_the_paper": self.table.seeds if self.table.in_paper else None,
            "one_seed": list(self.request.one_seed),
            "recipe": self.request.recipe,
            "changes": list(self.request.changes),
            "far": self.request.far,
            "command": self.request.command,
            "notes": list(self.notes),
            "paper": SOURCE,
            "parts": {part.name: self._part(part) for part in self.table.parts},
            "runs": self.runs,
            "seconds": sum(s for s in seconds if s is not None),
            "versions": versions(),
        }

    def _part(self, part: PaperPart) -> dict[str, Any]:
        columns = {c.name: {"title": c.title, "metric": c.metric, "data": c.data} for c in part.columns}
        rows = {}
        for row in part.rows:
            cells = {
                column.name: _cell(
                    self.cell(part, row, column), self.intervals.get((part.name, row.name, column.name))
                )
                for column in part.columns
            }
            about = {"title": row.title, "recipe": row.recipe, "changes": list(row.changes)}
            rows[row.name] = {**about, "members": row.members, "cells": cells}
        content: dict[str, Any] = {"title": part.title, "columns": columns, "rows": rows}
        if part.baseline is not None:
            content["differences"] = {
                "from": part.baseline.name,
                "level": LEVEL,
                "resamples": RESAMPLES,
                "over": "examples and seeds, paired",
            }
        return content

    def save(self, out: Path) -> list[Path]:
        """Write ``NAME.json`` and ``NAME.md``; NAME is the table's, with the rows where they are not all."""
        from hetsngp.paper.text import markdown

        files = [out / f"{self.request.name}.json", out / f"{self.request.name}.md"]
        text = markdown(self)
        with clean_writer(out, wait=WAIT):
            write_json(files[0], self.to_dict())
            write_atomically(files[1], lambda file: file.write(text.encode()))
        return files

    def __str__(self) -> str:
        from hetsngp.paper.text import plain_text

        return plain_text(self)


def has_paper(result: Result) -> bool:
    """Whether the paper has a number for any cell of the table."""
    cells = (
        result.cell(part, row, column)
        for part in result.table.parts
        for row in part.rows
        for column in part.columns
    )
    return any(cell.paper is not None for cell in cells)


def within_one_error(means: Mapping[str, tuple[float, float | None]], sign: int) -> set[str]:
    """Names whose mean is within the best one's standard error of the best; ``sign`` −1: lower is better.

    >>> sorted(within_one_error({"a": (0.506, 0.006), "b": (0.501, 0.020), "c": (0.493, 0.011)}, 1))
    ['a', 'b']
    """
    if not means:
        return set()
    best, error = max(means.values(), key=lambda each: sign * each[0])
    return {name for name, (mean, _) in means.items() if sign * (best - mean) <= (error or 0.0) + ROUNDING}


def _cell(cell: Cell, interval: Interval | None = None) -> dict[str, Any]:
    return {
        "values": {str(seed): value for seed, value in cell.values.items()},
        "mean": cell.mean,
        "standard_error": cell.standard_error,
        "n": len(cell.values),
        "paper": None if cell.paper is None else list(cell.paper),
        **({} if interval is None else {"difference": interval._asdict()}),
    }


def versions() -> dict[str, str | None]:
    """Versions of the software."""
    return {
        "commit": commit(),
        "hetsngp": importlib.import_module("hetsngp").__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def commit() -> str | None:
    """Commit of this package where it runs from a checkout; else what HETSNGP_COMMIT says, or None."""
    told = os.environ.get("HETSNGP_COMMIT")
    if told:
        return told
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def value_of(
    column: PaperColumn, sets: AvailableSets, data: str, found: Mapping[EvaluationSet, Any]
) -> float | None:
    """Number of a column from the measurements ``found``; None where a set is missing.

    For corrupted sets it is the mean, each counted once.
    """
    needed = sets.evaluation_sets(column, data)
    parts = [found[each] for each in needed if found.get(each) is not None]
    if len(parts) < len(needed):
        return None
    if column.metric in DETECTION:
        id_scores, ood_scores = (torch.tensor(part["ood_score"], dtype=torch.float64) for part in parts)
        if column.metric == "auroc":
            return metrics.auroc(id_scores, ood_scores)
        return metrics.fpr95(id_scores, ood_scores, positive="id")
    return math.fsum(part[column.metric] for part in parts) / len(parts)
