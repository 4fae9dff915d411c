"""Both runtime tables of the paper: the cost of a prediction and of a training step, by method.

Networks are built from the recipes and not trained; images are random numbers, so that no data are needed. A
time means little on another machine: what counts is its ratio to the deterministic network's, timed in the
same process right before and right after.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetsngp.evaluation.cache import WAIT, ResultCache, clean_writer, code_fingerprint, fingerprint_of
from hetsngp.files import write_atomically, write_json
from hetsngp.limits import is_out_of_memory
from hetsngp.paper.runtime.definitions import BASELINE, NETWORKS, RuntimeNetwork, RuntimeRow
from hetsngp.paper.runtime.text import draw_runtime, markdown, plain_text
from hetsngp.paper.runtime.timing import Pace, TimedModel, ratio
from hetsngp.training.recipes.recipe import Recipe, read_recipe
from hetsngp.training.recipes.task import ImageTask

CPU_BATCH = 4
SIZE = 224
FOLDER = "runtime"


@dataclass(frozen=True)
class RuntimeResult:
    """Tables as a value for JSON, and the files they were written to."""

    tables: dict[str, Any]
    files: tuple[Path, ...]

    def text(self) -> str:
        """Tables as text for a terminal."""
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

    ``changes`` are those of a recipe ("batch_size=64", "options.rank=2"), for every row. Each row is cached
    in ``out/runtime`` with the deterministic times around it, and not measured again where device, torch,
    code and settings are the same. ``say`` gets the tables; with ``show`` also the progress.
    """
    out, tell = Path(out), say if show else _nothing
    pace = Pace() if pace is None else pace
    # All of them before any is measured: a wrong change is an error at once.
    jobs = {
        name: [Job.of(name, row, network, changes, out) for row in network.rows]
        for name, network in networks.items()
    }
    ResultCache(out / FOLDER).clean()
    tables: dict[str, Any] = {}
    for name, network in networks.items():
        _measure_missing(network, jobs[name], pace, tell)
        tables[name] = _table(network, jobs[name])
    device = next(iter(jobs.values()))[0].device
    about = {"device": _device_name(device), "torch": torch.__version__, "code": measuring_code()}
    return _written({**about, "networks": tables}, out, say)


def _nothing(text: str) -> None:
    """Say nothing."""


# --- one row --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A row on this machine: all that decides its numbers, and the cache of these."""

    name: str
    row: RuntimeRow
    recipe: Recipe
    num_classes: int
    batch: int
    device: torch.device
    key: str
    """Name of its file in ``cache``."""
    cache: ResultCache

    @staticmethod
    def of(table: str, name: str, network: RuntimeNetwork, changes: Sequence[str], out: Path) -> Job:
        """Job of the row ``name`` of ``network``."""
        row = network.rows[name]
        recipe = _recipe(network, row, changes)
        on_cpu = recipe.hardware.accelerator == "cpu" or not torch.cuda.is_available()
        given = any(change.partition("=")[0].strip() == "batch_size" for change in changes)
        batch = recipe.task.batch_size if given else CPU_BATCH if on_cpu else network.batch
        device = torch.device("cpu" if on_cpu else "cuda")
        cache = ResultCache(out / FOLDER)
        return Job(name, row, recipe, network.num_classes, batch, device, f"{table}-{name}", cache)

    @property
    def size(self) -> int:
        """Pixels along a side of an image."""
        task = self.recipe.task
        assert isinstance(task, ImageTask)
        return SIZE if task.size is None else task.size

    def decides(self) -> dict[str, Any]:
        """Settings that decide the numbers, for JSON."""
        hardware = self.recipe.hardware
        return {
            "device": _device_name(self.device),
            "threads": torch.get_num_threads() if self.device.type == "cpu" else None,
            "torch": torch.__version__,
            "code": measuring_code(),
            "precision": hardware.precision,
            "channels_last": hardware.channels_last,
            "batch_size": self.batch,
            "num_classes": self.num_classes,
            "size": self.size,
            "recipe": self.recipe.describe(),
            "changes": list(self.recipe.changes),
        }

    def fingerprint(self) -> str:
        """Hash of all that decides the numbers."""
        return fingerprint_of(self.decides())

    def timed_model(self, *, trains: bool) -> TimedModel:
        """Make the model, and images for it."""
        return TimedModel(self.recipe, self.num_classes, self.size, self.batch, self.device, trains=trains)

    def read(self) -> dict[str, Any] | None:
        """Cached numbers of the same settings, or None."""
        return self.cache.read(self.key, self.fingerprint())


def measuring_code() -> str:
    """Fingerprint of the code that is timed and that times it."""
    return code_fingerprint("hetsngp.paper.runtime.timing")


def _recipe(network: RuntimeNetwork, row: RuntimeRow, changes: Sequence[str]) -> Recipe:
    """Recipe with the row's changes last, which define the row."""
    recipe = read_recipe(f"{network.recipes}/{row.method}", [*changes, *row.changes])
    return recipe.on_this_machine()[0]


def _measure_missing(
    network: RuntimeNetwork, jobs: Sequence[Job], pace: Pace, say: Callable[[str], Any]
) -> None:
    """Measure rows that are not cached; the deterministic network is timed between the others."""
    todo = [job for job in jobs if job.read() is None]
    if len(todo) < len(jobs):
        done = f"{len(jobs) - len(todo)} of {len(jobs)} rows"
        say(f"{network.title}: {done} are in {jobs[0].cache.folder} already")
    if not todo:
        return
    base_job = next(job for job in jobs if job.name == BASELINE)
    where = f"{_device_name(base_job.device)}, batches of {base_job.batch}"
    say(f"{network.title}: {len(todo)} rows to measure on {where}")
    job, trains = base_job, "train" in network.kinds
    try:
        base = base_job.timed_model(trains=trains)
        gflop = base.gflop(network.kinds) if network.counted else {}
        before = base.times(network.kinds, pace)
        for job in todo:
            timed = base if job is base_job else job.timed_model(trains=trains)
            found: dict[str, Any] = {"seconds": timed.times((*network.kinds, "predict"), pace)}
            found["gflop"] = timed.gflop(network.kinds) if network.counted else {}
            found["points"] = timed.num_points()
            del timed  # its memory is for the next
            after = base.times(network.kinds, pace)
            found[BASELINE] = {"before": before, "after": after, "gflop": gflop}
            job.cache.write(job.key, job.fingerprint(), {"decides": job.decides(), **found})
            before = after
            numbers = _numbers(found, job.batch)
            say(
                f"  {job.row.title}: {numbers['ms_eval']:.4g} ms an image, "
                f"{numbers['ms_eval_ratio']:.2f} × deterministic"
            )
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise RuntimeError(
            f"{network.title}, {job.row.title}: out of memory with batches of {job.batch}: take smaller "
            f"ones, --set batch_size={max(1, job.batch // 2)}; finished rows are not measured again"
        ) from error


# --- results --------------------------------------------------------------------------------------------


def _numbers(found: Mapping[str, Any], batch: int) -> dict[str, float]:
    """Milliseconds and GFLOP of an image, and their ratios to the deterministic network's.

    The ratio of "predict", with both uncertainties, is to deterministic probabilities too.
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
            raise RuntimeError(
                f"{job.key} in {job.cache.folder} changed while it was in use: run the same command again"
            )
        rows[job.name] = {
            "title": job.row.title,
            "ours": job.row.ours,
            "numbers": _numbers(found, job.batch),
            "points": found["points"],
            "paper": network.printed(job.name),
            "fingerprint": job.fingerprint(),
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
    with clean_writer(out, wait=WAIT):
        write_json(files[0], tables)
        write_atomically(files[1], lambda file: file.write(markdown(tables, files[2].name).encode()))
        draw_runtime(tables, files[2])
    result = RuntimeResult(tables, files)
    say("\n" + result.text())
    say("\n".join(f"wrote {file}" for file in files))
    return result


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
