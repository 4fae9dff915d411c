"""A finished run that is reported as a success is there: its files are checked and, if need be, mended."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.small_sets import random_bytes

pytest.importorskip("lightning", reason="pip install 'hetsngp[train]'")
pytest.importorskip("PIL.Image")

import hetsngp
from hetsngp import ArtifactError
from hetsngp.files import with_checksum
from hetsngp.locking import FolderInUse, one_writer
from hetsngp.nn.backbones import ResidualMLP
from hetsngp.serving.bundle import open_run
from hetsngp.training import CheckpointConfig, Engine, Hardware
from hetsngp.training.images import finished, train_images
from hetsngp.training.recipes.recipe import Recipe, read_recipe

SMALL = """
network = "wrn-10-1"
method = "hetsngp"
batch_size = 10
held_out = 0.25
workers = 0
[options]
random_features = 8
rank = 1
[schedule]
epochs = 2
[hardware]
accelerator = "cpu"
"""
TIMES = ("seconds", "training_seconds", "files")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(Hardware(devices=1, accelerator="cpu"))


@pytest.fixture(scope="module")
def run(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recipe, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("finished")
    arrays: dict[str, Any] = {}
    for split, count in (("train", 40), ("test", 8)):
        arrays |= {f"x_{split}": random_bytes(count, 8, 8, 3), f"y_{split}": np.arange(count) % 2}
    np.savez(folder / "a.npz", **arrays)
    (folder / "small.toml").write_text(f"data = '{folder / 'a.npz'}'\n{SMALL}")
    recipe = read_recipe(folder / "small.toml", ())
    summary = train_images(recipe, engine, checkpoints(folder / "run"), show=False)
    return folder / "run", recipe, summary


def checkpoints(folder: Path) -> CheckpointConfig:
    return CheckpointConfig(folder, tensorboard=False)


def without_times(summary: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in summary.items() if name not in TIMES}


def weights_of(folder: Path) -> Path:
    (file,) = (folder / "model").glob("model-*.safetensors")
    return file


def contents(folder: Path) -> dict[str, bytes]:
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != "summary.json"]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


FILES = ("weights", "model/config.json", "model/serving.json", "summary.json", "curves.png", "metrics.csv")
DAMAGES: dict[str, Callable[[Path], Any]] = {"missing": Path.unlink, "truncated": truncate, "bit": flip}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_written_again(
    name: str, damage: str, run: tuple[Path, Recipe, dict[str, Any]], engine: Engine, tmp_path: Path
) -> None:
    folder, recipe, summary = run
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    DAMAGES[damage](weights_of(copy) if name == "weights" else copy / name)
    if (name, damage) == ("summary.json", "missing"):  # as where it was killed before it wrote it
        again = train_images(recipe, engine, checkpoints(copy), show=False)
    else:
        with pytest.warns(UserWarning, match=r"written again from (its|the) checkpoint"):
            again = train_images(recipe, engine, checkpoints(copy), show=False)
    assert without_times(again) == without_times(summary)
    assert finished(copy) == again
    assert contents(copy) == contents(folder)
    open_run(copy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train_images(recipe, engine, checkpoints(copy), show=False) == again


def test_weights_of_another_model_are_found(
    run: tuple[Path, Recipe, dict[str, Any]], engine: Engine, tmp_path: Path
) -> None:
    folder, recipe, summary = run
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    hetsngp.save(hetsngp.build("deterministic", ResidualMLP(2, 8), 2), tmp_path / "other")
    (other,) = (tmp_path / "other").glob("*.safetensors")
    shutil.copy(other, weights_of(copy))
    with pytest.warns(UserWarning, match="written again from its checkpoint"):
        again = train_images(recipe, engine, checkpoints(copy), show=False)
    assert without_times(again) == without_times(summary)
    assert contents(copy) == contents(folder)


def test_another_model_in_its_place_is_neither_reported_nor_overwritten(
    run: tuple[Path, Recipe, dict[str, Any]], engine: Engine, tmp_path: Path
) -> None:
    """All of its files agree with one another: somebody has put it there."""
    folder, recipe, summary = run
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    content = {**json.loads((copy / "summary.json").read_text()), "weights": "0" * 64}
    (copy / "summary.json").write_text(json.dumps(with_checksum(content)))
    before = contents(copy)
    with pytest.raises(ValueError, match=r"another model than the one that .* describes: move it"):
        train_images(recipe, engine, checkpoints(copy), show=False)
    assert contents(copy) == before
    (copy / "summary.json").unlink()
    assert without_times(train_images(recipe, engine, checkpoints(copy), show=False)) == without_times(
        summary
    )


def test_without_a_checkpoint_it_says_so(
    run: tuple[Path, Recipe, dict[str, Any]], engine: Engine, tmp_path: Path
) -> None:
    folder, recipe, summary = run
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    for name in ("checkpoint", "checkpoint-previous"):
        shutil.rmtree(copy / name, ignore_errors=True)
    assert train_images(recipe, engine, checkpoints(copy), show=False) == summary
    weights_of(copy).unlink()
    with pytest.raises(ArtifactError, match=r"is missing.*without checkpoint/ it cannot be written again"):
        train_images(recipe, engine, checkpoints(copy), show=False)


def test_a_summary_without_its_checksum_is_not_believed(
    run: tuple[Path, Recipe, dict[str, Any]], engine: Engine, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run[0], copy)
    content = json.loads((copy / "summary.json").read_text())
    del content["checksum"]
    (copy / "summary.json").write_text(json.dumps(content))
    assert finished(copy) is None


def test_leftovers_are_removed_at_the_next_start(
    run: tuple[Path, Recipe, dict[str, Any]], engine: Engine, tmp_path: Path
) -> None:
    folder, recipe, summary = run
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    for name in (
        ".lock",
        ".saving-1",
        "checkpoint/.saving-2",
        "model/.saving-3",
        "checkpoint/model-0.safetensors",
    ):
        (copy / name).write_bytes(b"half")
    (copy / "checkpoint" / ".saving-4").mkdir()
    (copy / "checkpoint" / ".saving-4" / ".tmpAbCdEf").write_bytes(b"half of what safetensors writes")
    assert train_images(recipe, engine, checkpoints(copy), show=False) == summary
    assert contents(copy) == contents(folder)
    (copy / "checkpoint" / ".saving-5").mkdir()  # alone, below the folder of the run
    assert train_images(recipe, engine, checkpoints(copy), show=False) == summary
    assert not list(copy.rglob(".*"))


# --- one writer -----------------------------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from hetsngp.locking import one_writer
with one_writer(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_second_training_in_the_folder_is_refused_at_once(
    run: tuple[Path, Recipe, dict[str, Any]], engine: Engine, tmp_path: Path
) -> None:
    folder, recipe, summary = run
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdin=pipe, stdout=pipe) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(FolderInUse, match=f"written by process {holder.pid} on "):
            train_images(recipe, engine, checkpoints(tmp_path), show=False)
        with pytest.raises(FolderInUse, match=f"written by process {holder.pid} on "):
            engine.train(
                hetsngp.build("deterministic", ResidualMLP(2, 8), 2), [], recipe.config, checkpoints=tmp_path
            )
        holder.communicate(b"")
    assert not list(tmp_path.iterdir())
    # A finished run is read without the lock.
    with one_writer(folder):
        assert train_images(recipe, engine, checkpoints(folder), show=False) == summary
