"""Two trainings in one folder: the second is refused; of several processes all fail together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.unit.training.test_finished_runs import HOLD

pytest.importorskip("lightning", reason="pip install 'hetsngp[train]'")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TIMEOUT = 150

TWO = """
import json, os, sys, warnings
from pathlib import Path
import torch
import hetsngp
from hetsngp.nn.backbones import ResidualMLP
from hetsngp.training import CheckpointConfig, Engine, Hardware, Schedule, TrainConfig, run
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
torch.set_num_threads(1)
engine = Engine(Hardware(devices=2, strategy="ddp", accelerator="cpu"))
x = torch.randn(32, 2, generator=torch.Generator().manual_seed(0))
data, found = TensorDataset(x, (x[:, 0] > 0).long()), {}

def train(name, folder):
    model = hetsngp.build("deterministic", ResidualMLP(2, 8, 1), 2)
    loader, config = DataLoader(data, 8), TrainConfig(Schedule(2, 0.01))
    checkpoints = CheckpointConfig(folder, seconds=0, tensorboard=False)
    try:
        found[name] = engine.train(model, loader, config, checkpoints=checkpoints, show=False).resumed
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"

out = Path(sys.argv[1])
train("held", out / "held")
write = run.write_state
def full(folder, state):
    if state["place"]["updates"] == 2:
        raise OSError(28, "No space left on device", str(folder))
    write(folder, state)
run.write_state = full
train("full", out / "free")
run.write_state = write
if engine.is_main:  # damaged: both go on from the one before it
    (weights,) = (out / "free" / "checkpoint").glob("*.safetensors")
    weights.write_bytes(b"damaged")
engine.fabric.barrier()
train("alone", out / "free")
if engine.is_main:
    (out / "free" / "checkpoint" / weights.name).unlink()
    import shutil
    shutil.rmtree(out / "free")
engine.fabric.barrier()
train("freed", out / "free")
(out / f"{engine.fabric.global_rank}.json").write_text(json.dumps(found))
"""


def environment() -> dict[str, str]:
    ours = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src")}
    of_others = ("WORLD_SIZE", "LOCAL_", "RANK", "NODE_", "GROUP_", "MASTER_", "SLURM_", "TORCHELASTIC_")
    return {k: v for k, v in os.environ.items() if not k.startswith(of_others)} | ours


def test_all_processes_fail_together(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "held"], stdin=pipe, stdout=pipe) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        command = [sys.executable, str(tmp_path / "two.py"), str(tmp_path)]
        done = subprocess.run(command, env=environment(), timeout=TIMEOUT, capture_output=True, text=True)
        holder.communicate(b"")
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first["held"].startswith("FolderInUse: ")
    assert f"is being written by process {holder.pid} on " in first["held"]
    assert second["held"] == f"RuntimeError: the main process stopped: {first['held']}"
    assert first["full"].startswith("OSError: [Errno 28] No space left")
    assert second["full"] == f"RuntimeError: the main process stopped: {first['full']}"
    assert "damaged" in first["alone"]  # there is one checkpoint yet
    assert first["alone"] == second["alone"]
    assert (first["freed"], second["freed"]) == (0, 0)


WORKERS = """
import sys, time
from pathlib import Path
import torch
import hetsngp
from hetsngp.nn.backbones import ResidualMLP
from hetsngp.training import CheckpointConfig, Engine, Hardware, Schedule, TrainConfig
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        stops, end = sys.argv[2] == "stops" and index > 20, time.monotonic() + 140
        while stops and not Path(sys.argv[3]).exists() and time.monotonic() < end:
            time.sleep(0.05)  # the worker outlives its process, which is killed
        return torch.randn(2), index % 2

if __name__ == "__main__":
    engine = Engine(Hardware(accelerator="cpu"))
    loader = DataLoader(Data(), 4, num_workers=1)
    checkpoints = CheckpointConfig(sys.argv[1], seconds=0, tensorboard=False)
    config = TrainConfig(Schedule(1, 0.01))
    model = hetsngp.build("deterministic", ResidualMLP(2, 8, 1), 2)
    print(engine.train(model, loader, config, checkpoints=checkpoints, show=False).resumed)
"""


def test_a_second_training_is_refused_and_a_killed_one_frees_the_folder(tmp_path: Path) -> None:
    """The worker of the killed one lives on: it does not hold the lock."""
    (tmp_path / "train.py").write_text(WORKERS)
    folder = tmp_path / "run"

    def command(pace: str) -> list[str]:
        return [sys.executable, str(tmp_path / "train.py"), str(folder), pace, str(tmp_path / "done")]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command("goes on"), env=environment(), timeout=TIMEOUT, capture_output=True, text=True
        )

    with subprocess.Popen(command("stops"), env=environment()) as first:
        end = time.monotonic() + TIMEOUT
        while not (folder / "checkpoint" / "config.json").exists():
            assert first.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        refused = run()
        assert refused.returncode == 1
        assert f"FolderInUse: {folder} is being written by process {first.pid} on " in refused.stderr
        first.send_signal(signal.SIGKILL)
    try:
        done = run()
    finally:
        (tmp_path / "done").touch()
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= 1
    assert sorted(file.name for file in folder.iterdir()) == [
        "checkpoint",
        "checkpoint-previous",
        "metrics.csv",
    ]
