"""Two processes do what one does, by ddp and by fsdp, and go on with what others began (processes.py)."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from tests.scripts import load_script
from torch import Tensor

pytest.importorskip("lightning", reason="pip install 'hetsngp[train]'")
pytestmark = pytest.mark.slow

SCRIPT, ROOT = Path(__file__).with_name("processes.py"), Path(__file__).parents[2]
# Processes that wait for each other would do so for half an hour.
TIMEOUT = 150


script = load_script("tests/integration/processes.py")
CASES = script.CASES
IN_TWO = [(kind, name) for kind in ("ddp", "fsdp") for name in CASES if kind == "ddp" or CASES[name].fsdp]
# BatchNorm takes its statistics over the part of a batch that a process has (docs/training.md).
AS_ONE = [case for case in IN_TWO if case[1] not in ("posterior_network", "deterministic, batch norm")]


def launch(*command: str) -> None:
    """The script in new processes, on CPUs; what was started ends with it."""
    ours = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src")}
    of_others = ("WORLD_SIZE", "LOCAL_", "RANK", "NODE_", "GROUP_", "MASTER_", "SLURM_", "TORCHELASTIC_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(of_others)}
    done = subprocess.run(
        [sys.executable, *command], env=env | ours, cwd=ROOT, timeout=TIMEOUT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-5000:]


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all processes wrote; workers of pytest that run side by side share it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "processes"
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            (folder / "one").mkdir(parents=True)
            launch(str(SCRIPT), str(folder))
            launch(
                *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
                *(str(SCRIPT), str(folder)),
            )
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("CUDA_VISIBLE_DEVICES", "")
                script.in_one(folder)
            (folder / "done").touch()
    return folder


def state(out: Path, name: str, rank: int = 0) -> dict[str, Tensor]:
    return load_file(out / f"{name}.{rank}.safetensors")


def about(out: Path, name: str, rank: int = 0) -> Any:
    return json.loads((out / f"{name}.{rank}.json").read_text())


def assert_bits(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


def assert_states(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    """Relative to the largest number of each tensor; for eigenvectors, without a sign, predictions stand."""
    assert got.keys() == want.keys()
    far = {}
    for name in (name for name in want if not name.endswith("posterior.vectors")):
        assert got[name].shape == want[name].shape, name
        assert got[name].dtype == want[name].dtype, name
        if want[name].numel():
            error = (got[name].double() - want[name].double()).abs().max()
            far[name] = float(error / want[name].double().abs().max().clamp_min(1e-3))
    assert {name: error for name, error in far.items() if not error <= tolerance} == {}


def assert_numbers(got: Any, want: Any, tolerance: float) -> None:
    """Nests of dicts and lists."""
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        got, want = list(got.values()), list(want.values())
    if isinstance(want, list):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert_numbers(a, b, tolerance)
    elif isinstance(want, float):
        assert got == pytest.approx(want, rel=tolerance, abs=tolerance)
    else:
        assert got == want


def tolerance(name: str) -> float:
    return 1e-3 if "float32" in name else 1e-9


# --- two are one ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), AS_ONE)
def test_the_same_global_batches_give_the_same_weights(out: Path, kind: str, name: str) -> None:
    """Also averages, running statistics, losses, learning rates and held-out NLL."""
    got, want = f"{kind}, {name}, trained", f"one, {name}, trained"
    assert_states(state(out, got), state(out, want), tolerance(name))
    assert_numbers(about(out, got), about(out, want), tolerance(name))
    rows = about(out, want)["rows"]
    assert [row["updates"] for row in rows] == [
        (3 if CASES[name].config.accumulate == 2 else 5) * e for e in (1, 2, 3)
    ][: len(rows)]
    assert all(math.isfinite(row["held_out"]) for row in rows)
    assert len({row["held_out"] for row in rows}) == len(rows)


@pytest.mark.parametrize("posterior", ["fitted", "calibrated"])
@pytest.mark.parametrize(("kind", "name"), AS_ONE)
def test_the_posterior_is_that_of_one_process(out: Path, kind: str, name: str, posterior: str) -> None:
    got, want = f"{kind}, {name}, {posterior}", f"one, {name}, {posterior}"
    assert_states(state(out, got), state(out, want), 10 * tolerance(name))
    assert_numbers(about(out, got)["report"], about(out, want)["report"], 10 * tolerance(name))
    if "sngp" in name:
        assert about(out, got)["report"]["count"] == 41


@pytest.mark.parametrize("when", ["trained", "calibrated"])
@pytest.mark.parametrize(("kind", "name"), IN_TWO)
def test_every_process_ends_with_the_same_model(out: Path, kind: str, name: str, when: str) -> None:
    assert_bits(state(out, f"{kind}, {name}, {when}", 1), state(out, f"{kind}, {name}, {when}", 0))
    mine, other = (about(out, f"{kind}, {name}, {when}", rank) for rank in (0, 1))
    assert mine == other


def test_the_points_of_integration_are_drawn(out: Path) -> None:
    """So that the above says something of them: other points, other weights."""
    engine = script.Engine(script.Hardware(devices=1, accelerator="cpu"))
    case = CASES["hetsngp"]
    other = script.replace(case, config=script.replace(case.config, seed=4))
    weight = script.train(engine, other).model.backbone.linear.weight.detach()
    want = state(out, "one, hetsngp, trained")["backbone.linear.weight"]
    assert float((weight - want).abs().max()) > 1e-6


# --- to go on -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["ddp", "DataLoader", "fsdp", "batch norm"])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(out: Path, name: str, rank: int) -> None:
    """Within an epoch, with dropout; ddp's in new processes."""
    assert about(out, f"{name}, resumed", rank)["resumed"] == 5
    assert about(out, f"{name}, whole", rank)["resumed"] == 0
    assert_bits(state(out, f"{name}, resumed", rank), state(out, f"{name}, whole", rank))


MOVED = ["fsdp, moved", "one, moved from ddp", "one, moved from fsdp", "one, DataLoader, moved"]


@pytest.mark.parametrize("name", MOVED)
def test_a_run_may_go_on_by_another_strategy(out: Path, name: str) -> None:
    assert about(out, name)["resumed"] == 5
    assert_states(state(out, name), state(out, GOES_ON[name]), 1e-9)


GOES_ON = {
    "ddp, resumed": "ddp, whole",
    "DataLoader, resumed": "DataLoader, whole",
    "fsdp, resumed": "fsdp, whole",
    "fsdp, moved": "one, whole",
    "one, moved from ddp": "one, whole",
    "one, moved from fsdp": "one, whole",
    "one, DataLoader, moved": "one, DataLoader, whole",
}


@pytest.mark.parametrize("name", GOES_ON)
def test_the_loss_of_an_interrupted_epoch_is_that_of_all_its_batches(out: Path, name: str) -> None:
    got, want = about(out, name), about(out, GOES_ON[name])
    assert_numbers(got["history"], want["history"], 1e-9)
    assert_numbers(got["rows"], want["rows"], 1e-9)


def test_torchrun_is_found(out: Path) -> None:
    assert [about(out, "torchrun", rank) for rank in (0, 1)] == [[2, 0, "DDPStrategy"], [2, 1, "DDPStrategy"]]


# --- DataLoader -----------------------------------------------------------------------------------------


def test_a_data_loader_gives_each_example_to_one_process(out: Path) -> None:
    parts = [about(out, "asked", rank) for rank in (0, 1)]
    alone = about(out / "one", "asked")
    for count in (20, 21):
        epochs = [sorted(a + b) for a, b in zip(*(p[f"{count} in training"] for p in parts), strict=True)]
        for epoch in epochs:
            times = Counter(epoch)
            assert sorted(times) == list(range(count))
            # Processes have as many batches each: where 2 does not divide the examples, one comes twice.
            assert sum(times.values()) - count == count % 2
        assert parts[0][f"{count} in training"][0] != parts[0][f"{count} in training"][1]  # shuffled
        (a,), (b,) = (p[f"{count} for the posterior"] for p in parts)
        assert sorted(a + b) == list(range(count)) == sorted(alone[f"{count} for the posterior"][0])
        assert abs(len(a) - len(b)) == count % 2


@pytest.mark.parametrize("count", [20, 21])
def test_the_posterior_counts_every_example_of_a_data_loader_once(out: Path, count: int) -> None:
    name = f"DataLoader of {count}"
    got, want = about(out, name)["report"], about(out / "one", name)["report"]
    assert got["count"] == want["count"] == count
    sums = [
        {k: v for k, v in state(folder, name).items() if "posterior" in k and k.endswith("values")}
        for folder in (out, out / "one")
    ]
    assert sums[0]
    assert_states(*sums, 1e-9)


# --- what goes wrong ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nothing kept", "ddp", "fsdp"])
def test_a_nan_in_one_process_stops_both(out: Path, name: str) -> None:
    said = [(out / f"NaN, {name}.{rank}.txt").read_text() for rank in (0, 1)]
    assert said[0] == said[1]
    assert re.search(r"(loss is NaN|weights are not finite).*in epoch 1: lower lr", said[0])
    if name == "nothing kept":
        assert "no checkpoint was made before" in said[0]
    else:
        assert f"the last good checkpoint is in {out / 'nan' / name / 'checkpoint'}" in said[0]
