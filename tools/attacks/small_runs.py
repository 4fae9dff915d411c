"""Small commands of hetsngp in forks of a process that has everything imported, and their results."""

from __future__ import annotations

import csv
import functools
import hashlib
import importlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TIMES = ("seconds", "examples_per_second", "training_seconds")
MODULES = (
    "lightning.fabric",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "safetensors.torch",
    "torch._inductor.cudagraph_trees",  # torch imports it at the first step of a training
    "torch.utils.tensorboard",
    "torchmetrics",
    "hetsngp.evaluation.run_evaluation",
    "hetsngp.paper.synthetic.demo",
    "hetsngp.training.images",
)
RECIPE = """
network = "wrn-10-1"
method = "hetsngp"
batch_size = 12
held_out = 0.25
workers = 0
[options]
random_features = 8
rank = 1
[schedule]
epochs = 2
[training]
ema_decay = 0.9
[hardware]
accelerator = "cpu"
"""


def warm_up() -> None:
    """Import all that the commands import, so that a fork does not."""
    for name in MODULES:
        importlib.import_module(name)
    importlib.import_module("PIL.Image").init()
    importlib.import_module("hetsngp.cli").make_app()


def write_data(folder: Path) -> Path:
    """Write 32 training and 8 test images of 8 × 8 pixels, and a recipe for them; returns the recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for split, count in (("train", 32), ("test", 8)):
        labels = np.arange(count) % 2
        pixels = draw.integers(0, 128, (count, 8, 8, 3), dtype=np.uint8)
        arrays |= {f"x_{split}": pixels + 100 * labels[:, None, None, None].astype(np.uint8)}
        arrays |= {f"y_{split}": labels}
    np.savez(folder / "images.npz", **arrays)
    (folder / "small.toml").write_text(f"data = '{folder / 'images.npz'}'\n{RECIPE}", encoding="utf-8")
    return folder / "small.toml"


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    returncode: int
    """Exit code; of a signal, its negative number."""
    stderr: str
    hung: bool = False


def run_command(
    arguments: list[str], prepare: Callable[[], None] = lambda: None, *, seconds: float = 60.0
) -> Ended:
    """Run ``hetsngp`` with ``arguments`` in a fork, after ``prepare`` was called there."""
    read, write = os.pipe()  # it takes 64 KiB, more than any message, and no limit on files concerns it
    process = os.fork()
    if process == 0:
        os.close(read)
        _child(arguments, prepare, write)
    os.close(write)
    end = time.monotonic() + seconds
    ended, status = os.waitpid(process, os.WNOHANG)
    while not ended and time.monotonic() < end:
        time.sleep(0.002)
        ended, status = os.waitpid(process, os.WNOHANG)
    if not ended:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    with os.fdopen(read, "rb") as errors:
        text = errors.read().decode(errors="replace")
    return Ended(os.waitstatus_to_exitcode(status), text, hung=not ended)


def _child(arguments: list[str], prepare: Callable[[], None], errors: int) -> None:
    """Run the command and end the process."""
    code: Any = 1
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(errors, 2)
        import hetsngp.cli
        import hetsngp.training

        # A checkpoint after every update, where the command would write one each minute.
        hetsngp.training.CheckpointConfig = functools.partial(  # type: ignore[misc,assignment]
            hetsngp.training.CheckpointConfig, seconds=0
        )
        prepare()
        hetsngp.cli.make_app()(arguments)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        import traceback

        os.write(2, traceback.format_exc().encode())
    os._exit(code or 0)


def digest_of(folder: Path) -> dict[str, str]:
    """What a command wrote, by file: its content without times, or its hash. TensorBoard's logs, whose names
    have a time, and checkpoints, which hold the times of the epochs, do not count.
    """
    found = {}
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        if not file.is_file() or name.startswith(("tensorboard", "checkpoint", "best-")):
            continue
        if file.suffix == ".json":
            content: Any = _without_times(json.loads(file.read_text(encoding="utf-8")))
            found[name] = json.dumps(content, sort_keys=True)
        elif file.suffix == ".csv":
            with open(file, newline="", encoding="utf-8") as handle:
                found[name] = repr([_without_times(row) for row in csv.DictReader(handle)])
        elif file.suffix in (".md", ".npz"):
            found[name] = "there"  # the report has the seconds in it
        else:
            found[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def _without_times(value: Any) -> Any:
    """Values without those that differ from run to run: times, and checksums of what holds them."""
    left_out = (*TIMES, "checksum", "files", "seconds_of")
    if isinstance(value, dict):
        return {name: _without_times(v) for name, v in value.items() if name not in left_out}
    return [_without_times(v) for v in value] if isinstance(value, list) else value


def leftovers(folder: Path) -> list[str]:
    """Temporary files, locks, and weights that no config names."""
    found = [str(file.relative_to(folder)) for file in folder.rglob(".*")]
    for config in folder.rglob("config.json"):
        named = json.loads(config.read_text(encoding="utf-8"))["weights"]
        found += [str(f.relative_to(folder)) for f in config.parent.glob("*.safetensors") if f.name != named]
    return found
