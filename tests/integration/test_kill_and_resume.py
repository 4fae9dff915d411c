"""A run that is killed, at any moment and as often as you like, ends with the bits of one that was not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.contract.toy import assert_same
from tests.integration import killed_run
from tests.integration.killed_run import found, without_times

import hetsngp
from hetsngp.training.checkpointing.checkpoint_files import read_state

pytestmark = pytest.mark.slow

pytest.importorskip("lightning")

ROOT = Path(__file__).parents[2]


class Process:
    """The script, until it is killed or done."""

    def __init__(self, case: str, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = folder / "run" / "checkpoint"
        paths = os.pathsep.join([str(Path(hetsngp.__file__).parents[1]), str(ROOT)])
        self.log = open(folder / "log.txt", "ab")  # noqa: SIM115 - closed by end()
        self.child = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.killed_run", case, str(folder)],
            stdout=self.log,
            stderr=self.log,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        )

    def updates(self) -> int:
        """Of the checkpoint on disk."""
        try:
            description = json.loads((self.checkpoint / "config.json").read_text())
        except FileNotFoundError:
            return 0
        return int(dict(dict(description["state"]["items"])["place"]["items"])["updates"])

    def is_writing(self) -> bool:
        return any(name.startswith(".saving-") for name in os.listdir(self.checkpoint))

    def wait_for(self, condition: Callable[[], bool], seconds: float = 0.001) -> None:
        end = time.monotonic() + 120
        while not condition():
            assert self.child.poll() is None, f"ended by itself: {(self.folder / 'log.txt').read_text()}"
            if time.monotonic() > end:
                pytest.fail(f"timeout after 120 s: {(self.folder / 'log.txt').read_text()}")
            time.sleep(seconds)

    def end(self, kill: bool) -> None:
        if kill:
            os.kill(self.child.pid, signal.SIGKILL)
        code = self.child.wait(120)
        self.log.close()
        assert code == (-signal.SIGKILL if kill else 0), (self.folder / "log.txt").read_text()


def kill(case: str, folder: Path, updates: int, delay: float | None) -> None:
    """Once there are so many updates on disk, and ``delay`` seconds later; None: within a write."""
    process = Process(case, folder)
    try:
        process.wait_for(lambda: process.updates() >= updates)
        if delay is None:
            process.wait_for(process.is_writing, 0.0)
        else:
            time.sleep(delay)
    finally:
        process.end(kill=True)


# Updates on disk, and whether to wait until the next checkpoint is being written, or for a random moment.
MOMENTS = {
    "mlp": [(2, "writing"), (5, "at once"), (14, "random")],  # 5 an epoch, 35 in all
    "images": [(4, "random"), (18, "writing")],  # 6 an epoch, 36 in all
    "workers": [(3, "writing"), (20, "random")],  # 10 an epoch, 40 in all
    "texts": [(3, "random"), (16, "writing")],  # 7 an epoch, 35 in all
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", MOMENTS)
def test_a_killed_run_ends_as_if_nothing_had_been(case: str, tmp_path: Path) -> None:
    if case == "texts":
        pytest.importorskip("transformers")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the processes have: several would add up in another order
    alone = killed_run.train(case, tmp_path / "alone")
    torch.set_num_threads(threads)
    draw, folder = random.Random(case), tmp_path / "killed"
    folder.mkdir()
    done = 0
    for updates, moment in MOMENTS[case]:
        delays = {"writing": None, "at once": 0.0, "random": draw.uniform(0.0, 0.06)}
        kill(case, folder, max(updates, done + 1), delays[moment])
        before, done = done, read_state(folder / "run" / "checkpoint")["place"]["updates"]
        assert done > before
    assert done < alone.rows[-1]["updates"]  # so that something was left to do
    Process(case, folder).end(kill=False)
    final = json.loads((folder / "final.json").read_text())
    assert final.pop("resumed") == done
    assert final == found(alone)
    assert_same(load_file(folder / "final.safetensors"), alone.model.state_dict())
    assert without_times(folder / "run" / "metrics.csv") == without_times(tmp_path / "alone" / "metrics.csv")
    before = read_state(folder / "run" / "checkpoint-previous")  # and the best epoch that it needs
    best = {f"best-{before['best']:05d}"} if before["best"] else set()
    assert {f.name for f in (folder / "run").iterdir()} == {
        *best,
        *("checkpoint", "checkpoint-previous", "metrics.csv"),
    }
