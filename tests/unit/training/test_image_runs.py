"""Runs on images: what they are of, how long they took, and the rows that their thresholds come from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.small_sets import random_bytes

pytest.importorskip("lightning", reason="pip install 'hetsngp[train]'")
pytest.importorskip("PIL.Image")

import hetsngp
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.preprocessing import Preprocessing
from hetsngp.nn.backbones import WideResNet
from hetsngp.serving.decisions import set_thresholds
from hetsngp.training import CheckpointConfig, Engine, Hardware, run_results
from hetsngp.training.checkpointing.checkpoint_files import read_state, write_state
from hetsngp.training.gradients import FabricGradients
from hetsngp.training.images import train_images
from hetsngp.training.logs import COLUMNS
from hetsngp.training.recipes.recipe import Recipe, read_recipe

SMALL = """
network = "wrn-10-1"
method = "deterministic"
batch_size = 10
held_out = 0.25
workers = 0
[schedule]
epochs = 2
[hardware]
accelerator = "cpu"
"""


class Died(BaseException):
    pass


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(Hardware(devices=1, accelerator="cpu"))


def recipe(folder: Path, *changes: str, data: str = "a.npz") -> Recipe:
    (folder / "small.toml").write_text(f"data = '{folder / data}'\n{SMALL}")
    return read_recipe(folder / "small.toml", changes)


def write_arrays(folder: Path) -> None:
    arrays: dict[str, Any] = {}
    for split, count in (("train", 40), ("test", 8)):
        arrays |= {f"x_{split}": random_bytes(count, 8, 8, 3), f"y_{split}": np.arange(count) % 2}
    np.savez(folder / "a.npz", **arrays)


# --- what a run is of -----------------------------------------------------------------------------------


def test_what_training_images_are_cut_by_is_what_a_run_is_of(tmp_path: Path) -> None:
    def about(*changes: str) -> dict[str, Any]:
        return recipe(tmp_path, "size=8", *changes).task.identity()

    assert about("resize=9") != about("resize=10") != about()
    # From disk random parts are trained on, and only what is held out and tested is cut by it.
    assert about("resize=9", "from_disk=true") == about("resize=10", "from_disk=true")
    assert about("size=9", "from_disk=true") != about("from_disk=true")
    assert about("calibrate=false") == about()
    assert about("options.rank=2") != about()


def test_a_resumed_run_counts_its_first_part(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_arrays(tmp_path)
    checkpoints, given = CheckpointConfig(tmp_path / "run", seconds=0, tensorboard=False), recipe(tmp_path)
    step = FabricGradients.step

    def dying(self: FabricGradients) -> None:
        if self.updates == 4:
            raise Died
        step(self)

    with monkeypatch.context() as patch:
        patch.setattr(FabricGradients, "step", dying)
        with pytest.raises(Died):
            train_images(given, engine, checkpoints, show=False)
    with pytest.raises(ValueError, match=r"on other data \(resize None, now 9\)"):
        train_images(recipe(tmp_path, "resize=9"), engine, checkpoints, show=False)
    folder = checkpoints.folder / "checkpoint"
    state = read_state(folder)
    column = COLUMNS.index("seconds")
    assert 0 < state["rows"][0, column] < 100
    state["rows"][0, column] = 1000.0  # as if its first epoch had been long
    write_state(folder, state)
    summary = train_images(given, engine, checkpoints, show=False)
    assert 1000 < summary["training_seconds"] < summary["seconds"] < 1100
    assert summary["epochs"] == 2


# --- thresholds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "batch"), [(30, 250), (30, 7), (90, 16)])
def test_thresholds_are_of_examples_from_all_classes(
    most: int, batch: int, tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held-out files lie in the order of their classes; here the last of them are the brightest."""
    x = torch.from_numpy(random_bytes(90, 3, 8, 8) // 2)
    x[60:] += 100
    held_out = ImageArrays(x, torch.arange(90) // 30, ("cat", "dog", "owl"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = hetsngp.build("sngp", WideResNet(10, 1), 3, random_features=16)
    scaled = (x / 255 - 0.5) / 0.25
    hetsngp.fit_posterior(model, [(scaled, held_out.labels)])
    monkeypatch.setattr(run_results, "THRESHOLD_EXAMPLES", most)
    monkeypatch.setattr(run_results, "THRESHOLD_BATCH", batch)
    inputs = Preprocessing((8, 8), (0.5,) * 3, (0.25,) * 3, held_out.class_names)
    found = run_results.find_thresholds(model, held_out, inputs, recipe(tmp_path), engine)
    rows = np.linspace(0, 89, most).round().astype(int)
    want = set_thresholds(model.predict(scaled[rows]), held_out.labels[rows])
    assert found.held_out == want.held_out == most
    assert want.unfamiliar is not None
    assert found.unfamiliar == pytest.approx(want.unfamiliar, rel=1e-4)
    assert found.coverage == want.coverage
    first = set_thresholds(model.predict(scaled[:most]), held_out.labels[:most])
    assert (found.unfamiliar == pytest.approx(first.unfamiliar, rel=1e-3)) == (most == 90)
