"""Both runtime tables of the paper: what a prediction and a training step cost, by method.

Networks are built as the recipes say and not trained; images are random numbers, so that no data are needed.
A time means little on another machine: what counts is its ratio to the deterministic network's, timed in the
same process right before and right after.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetsngp.evaluation.cache import code_fingerprint
from hetsngp.files import write_atomically, write_json
from hetsngp.paper.runtime.tables import BASELINE, NETWORKS, RuntimeNetwork, RuntimeRow
from hetsngp.paper.runtime.text import draw_runtime, markdown, plain_text
from hetsngp.paper.runtime.timing import Pace, Subject, ratio
from hetsngp.training.recipes.recipe import Recipe, read_recipe

CPU_BATCH = 4
SIZE = 224
FOLDER = "runtime"


@dataclass(frozen=True)
class RuntimeResult:
    """The tables as a value for JSON, and the files they were written to."""

    tables: dict[str, Any]
    files: tuple[Path, ...]

    def text(self) -> str:
        """For a terminal."""
        return plain_text(self.tables)


def measure_runtime(
    *,
    changes: Sequence[str] = (),
    out: Path,
    show: bool = True,
    say: Callable[[str], Any] = print,
    networks: Mapping[str, RuntimeNetwork] = NETWORKS,
    pace: Pace | None = None,
) -> RuntimeResult:
    """Time every row of ``networks``; ``runtime.json``, ``runtime.md`` and ``runtime.png`` go to ``out``.

    ``changes`` are those of a recipe ("batch_size=64", "options.rank=2"), for every row. Each row is kept in
    ``out/runtime`` when it is measured, with the deterministic times around it, and not measured again where
    device, torch, code and settings are the same. ``say`` gets the tables; with ``show`` also how far it is.
    """
    out, tell = Path(out), say if show else _nothing
    pace = Pace() if pace is None else pace
    code = code_fingerprint("hetsngp.paper.runtime.timing")
    jobs = {
        name: [Job.of(name, row, network, changes, code, out) for row in network.rows]
        for name, network in networks.items()
    }  # all of them before any is measured: a wrong change is told at once
    tables: dict[str, Any] = {}
    for name, network in networks.items():
        _measure_missing(network, jobs[name], pace, tell)
        tables[name] = _table(network, jobs[name])
    device = next(iter(jobs.values()))[0].device
    about = {"device": _device_name(device), "torch": torch.__version__, "code": code}
    return _written({**about, "networks": tables}, out, say)


def _nothing(text: str) -> None:
    """In place of ``say``."""


# --- one row --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A row on this machine: all that decides its numbers, and the file they are kept in."""

    name: str
    row: RuntimeRow
    recipe: Recipe
    num_classes: int
    batch: int
    device: torch.device
    code: str
    """Hash of the source, taken once: it may be edited while this runs."""
    file: Path

    @staticmethod
    def of(
        table: str, name: str, network: RuntimeNetwork, changes: Sequence[str], code: str, out: Path
    ) -> Job:
        """The row ``name`` of ``network``."""
        row = network.rows[name]
        recipe = _recipe(network, row, changes)
        on_cpu = recipe.hardware.accelerator == "cpu" or not torch.cuda.is_available()
        asked = any(change.partition("=")[0].strip() == "batch_size" for change in changes)
        batch = recipe.task.batch_size if asked else CPU_BATCH if on_cpu else network.batch
        device = torch.device("cpu" if on_cpu else "cuda")
        file = out / FOLDER / f"{table}-{name}.json"
        return Job(name, row, recipe, network.num_classes, batch, device, code, file)

    @property
    def size(self) -> int:
        """Pixels of a side."""
        return SIZE if self.recipe.task.size is None else self.recipe.task.size

    def decides(self) -> dict[str, Any]:
        """For JSON."""
        hardware = self.recipe.hardware
        return {
            "device": _device_name(self.device),
            "threads": torch.get_num_threads() if self.device.type == "cpu" else None,
            "torch": torch.__version__,
            "code": self.code,
            "precision": hardware.precision,
            "channels_last": hardware.channels_last,
            "batch_size": self.batch,
            "num_classes": self.num_classes,
            "size": self.size,
            "recipe": self.recipe.describe(),
            "changes": list(self.recipe.changes),
        }

    def fingerprint(self) -> str:
        """Of all that decides."""
        return hashlib.sha256(json.dumps(self.decides(), sort_keys=True).encode()).hexdigest()[:12]

    def subject(self, *, trains: bool) -> Subject:
        """The model, and images for it."""
        return Subject(self.recipe, self.num_classes, self.size, self.batch, self.device, trains=trains)

    def read(self) -> dict[str, Any] | None:
        """What was measured before with the same settings; a damaged file counts as none."""
        try:
            found = json.loads(self.file.read_text(encoding="utf-8"))
            return found if found["fingerprint"] == self.fingerprint() else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _recipe(network: RuntimeNetwork, row: RuntimeRow, changes: Sequence[str]) -> Recipe:
    """With the row's own changes last: they are what makes it this row."""
    recipe = read_recipe(f"{network.book}/{row.method}", [*changes, *row.changes])
    return recipe.on_this_machine()[0]


def _measure_missing(
    network: RuntimeNetwork, jobs: Sequence[Job], pace: Pace, say: Callable[[str], Any]
) -> None:
    """The deterministic network stays, and is timed between the others."""
    todo = [job for job in jobs if job.read() is None]
    if len(todo) < len(jobs):
        say(
            f"{network.title}: {len(jobs) - len(todo)} of {len(jobs)} rows are in {jobs[0].file.parent}: kept"
        )
    if not todo:
        return
    base_job = next(job for job in jobs if job.name == BASELINE)
    where = f"{_device_name(base_job.device)}, batches of {base_job.batch}"
    say(f"{network.title}: {len(todo)} rows to measure on {where}")
    job, trains = base_job, "train" in network.kinds
    try:
        base = base_job.subject(trains=trains)
        gflop = base.gflop(network.kinds) if network.counted else {}
        before = base.times(network.kinds, pace)
        for job in todo:
            subject = base if job is base_job else job.subject(trains=trains)
            found: dict[str, Any] = {"seconds": subject.times((*network.kinds, "predict"), pace)}
            found["gflop"] = subject.gflop(network.kinds) if network.counted else {}
            found["points"] = subject.num_points()
            del subject  # its memory is for the next
            after = base.times(network.kinds, pace)
            found[BASELINE] = {"before": before, "after": after, "gflop": gflop}
            write_json(job.file, {"fingerprint": job.fingerprint(), "decides": job.decides(), **found})
            before = after
            numbers = _numbers(found, job.batch)
            say(
                f"  {job.row.title}: {numbers['ms_eval']:.4g} ms an image, "
                f"{numbers['ms_eval_ratio']:.2f} × deterministic"
            )
    except (RuntimeError, MemoryError) as error:
        if not _out_of_memory(error):
            raise
        raise RuntimeError(
            f"{network.title}, {job.row.title}: out of memory with batches of {job.batch}: take smaller "
            f"ones, --set batch_size={max(1, job.batch // 2)}; rows that are done are kept"
        ) from error


def _out_of_memory(error: BaseException) -> bool:
    """Of a GPU's, or of the CPU's allocator, which has no error of its own."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or "can't allocate memory" in str(error) or "not enough memory" in str(error)


# --- results --------------------------------------------------------------------------------------------


def _numbers(found: Mapping[str, Any], batch: int) -> dict[str, float]:
    """Milliseconds and GFLOP of an image, and their ratios to the deterministic network's.

    The ratio of "predict", both kinds of doubt, is to deterministic probabilities too.
    """
    out = {}
    base = found[BASELINE]
    for kind, times in found["seconds"].items():
        of = kind if kind in base["before"] else "eval"
        out[f"ms_{kind}"] = 1e3 * statistics.median(times) / batch
        out[f"ms_{kind}_ratio"] = ratio(times, base["before"][of], base["after"][of])
    for kind, gflop in found["gflop"].items():
        out[f"gflop_{kind}"] = gflop
        out[f"gflop_{kind}_ratio"] = gflop / base["gflop"][kind]
    return out


def _table(network: RuntimeNetwork, jobs: Sequence[Job]) -> dict[str, Any]:
    rows = {}
    for job in jobs:
        found = job.read()
        if found is None:
            raise RuntimeError(f"{job.file} changed while it was in use: run the same command again")
        rows[job.name] = {
            "title": job.row.title,
            "ours": job.row.ours,
            "numbers": _numbers(found, job.batch),
            "points": found["points"],
            "paper": network.printed(job.name),
            **found,
        }
    first = jobs[0]
    return {
        "title": network.title,
        "network": first.recipe.task.network,
        "num_classes": network.num_classes,
        "batch_size": first.batch,
        "precision": first.recipe.hardware.precision,
        "kinds": list(network.kinds),
        "counted": network.counted,
        "rows": rows,
    }


def _written(tables: dict[str, Any], out: Path, say: Callable[[str], Any]) -> RuntimeResult:
    files = tuple(out / f"runtime.{kind}" for kind in ("json", "md", "png"))
    write_json(files[0], tables)
    write_atomically(files[1], lambda file: file.write(markdown(tables, files[2].name).encode()))
    draw_runtime(tables, files[2])
    result = RuntimeResult(tables, files)
    say("\n" + result.text())
    say("\n".join(f"wrote {file}" for file in files))
    return result


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
