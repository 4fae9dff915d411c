"""Out-of-sample probabilities by the folds of a recipe: who predicts whom, by which labels, what is kept."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.small_sets import random_bytes

pytest.importorskip("lightning", reason="pip install 'hetsngp[train]'")
pytest.importorskip("PIL.Image")

import hetsngp
from hetsngp.auditing.recipe_folds import RecipeFolds
from hetsngp.data.images.arrays import ImageArrays, fold_rows
from hetsngp.data.label_files import LabelFile
from hetsngp.data.sources import open_set
from hetsngp.serving.bundle import open_run
from hetsngp.training import Engine, Hardware
from hetsngp.training.images import finished
from hetsngp.training.recipes.recipe import Recipe, read_recipe

COUNT, FOLDS = 48, 3
NAMES = tuple(map(str, range(COUNT)))
TINY = """
network = "wrn-10-1"
method = "sngp"
batch_size = 16
held_out = 0.25
seed = 3
[options]
random_features = 8
[schedule]
epochs = 1
[hardware]
accelerator = "cpu"
"""


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(Hardware(devices=1, accelerator="cpu"))


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    np.savez(tmp_path / "data.npz", x_train=random_bytes(COUNT, 8, 8, 3), y_train=np.arange(COUNT) % 2)
    (tmp_path / "tiny.toml").write_text(f"data = '{tmp_path / 'data.npz'}'\n{TINY}")
    return read_recipe(tmp_path / "tiny.toml")


@pytest.fixture
def images(recipe: Recipe) -> ImageArrays:
    found: ImageArrays = open_set(recipe.task.data, "train")
    return found


def score(probs: Any) -> float:
    raise AssertionError("a recipe has no settings to choose")


def folds_of(recipe: Recipe, images: ImageArrays, engine: Engine, out: Path, said: list[str]) -> RecipeFolds:
    return RecipeFolds(
        recipe, images, NAMES, out, engine, folds=FOLDS, batch_size=7, show=False, say=said.append
    )


def test_each_image_is_predicted_by_the_run_that_left_it_out(
    recipe: Recipe, images: ImageArrays, engine: Engine, tmp_path: Path
) -> None:
    said: list[str] = []
    cross_fit = folds_of(recipe, images, engine, tmp_path / "folds", said)
    probs = cross_fit(images.labels.numpy(), np.ones(COUNT, dtype=bool), score)
    assert said == [f"round 1, fold {number} of 3" for number in (1, 2, 3)]
    for number, rows in enumerate(fold_rows(images.labels, 2, FOLDS, seed=3), 1):
        folder = tmp_path / "folds" / "round-1" / f"fold-{number}"
        summary = finished(folder)
        assert summary is not None
        assert summary["recipe"]["task"]["fold"] == f"{number}/3"
        assert "labels" not in summary  # the first round trains on what is given
        served = open_run(folder)
        mean, std = (torch.tensor(v)[:, None, None] for v in (served.inputs.mean, served.inputs.std))
        x = (images.images[rows].float() / 255 - mean) / std
        expected = hetsngp.load(folder / "model").predict(x).probs
        assert torch.allclose(torch.from_numpy(probs[rows]), expected, atol=1e-5)


def test_the_second_round_trains_on_targets_without_the_judges(
    recipe: Recipe, images: ImageArrays, engine: Engine, tmp_path: Path
) -> None:
    """Judges are predicted by the run of their fold, and are in no run's training and held-out images."""
    said: list[str] = []
    cross_fit = folds_of(recipe, images, engine, tmp_path / "folds", said)
    trained = np.ones(COUNT, dtype=bool)
    trained[::5] = False
    cross_fit(images.labels.numpy(), trained, score)
    targets = (
        np.full((COUNT, 2), 0.1, dtype=np.float32)
        + 0.8 * np.eye(2, dtype=np.float32)[1 - images.labels.numpy()]
    )
    probs = cross_fit(targets, trained, score)
    assert probs.shape == (COUNT, 2)
    assert np.allclose(probs.sum(1), 1, atol=1e-5)
    first, second = (LabelFile.read(tmp_path / "folds" / f"round-{number}") for number in (1, 2))
    assert first.targets.tolist() == images.labels.tolist()
    assert torch.equal(second.targets, torch.from_numpy(targets))
    for labels, changed in ((first, False), (second, True)):
        assert labels.is_kept.tolist() == trained.tolist()
        assert bool(labels.changed.all()) == changed
    for round_number in (1, 2):
        for number, rows in enumerate(fold_rows(images.labels, 2, FOLDS, seed=3), 1):
            folder = tmp_path / "folds" / f"round-{round_number}"
            summary = finished(folder / f"fold-{number}")
            assert summary is not None
            outside = np.setdiff1d(np.arange(COUNT), rows.numpy())
            untrained = int((~trained[outside]).sum())
            assert summary["labels"]["dropped"] == untrained > 0
            assert summary["labels"]["changed"] == (0 if round_number == 1 else len(outside) - untrained)


def test_what_is_finished_is_not_repeated(
    recipe: Recipe, images: ImageArrays, engine: Engine, tmp_path: Path
) -> None:
    out, given, everyone = tmp_path / "folds", images.labels.numpy(), np.ones(COUNT, dtype=bool)
    before = folds_of(recipe, images, engine, out, [])(given, everyone, score)
    models = {
        file: file.stat().st_mtime_ns for file in out.rglob("*") if file.is_file() and "model" in str(file)
    }
    kept = {file: file.stat().st_mtime_ns for file in out.rglob("fold-?.safetensors")}
    assert len(kept) == FOLDS
    assert np.array_equal(folds_of(recipe, images, engine, out, [])(given, everyone, score), before)
    assert kept == {file: file.stat().st_mtime_ns for file in kept}
    # Probabilities that are damaged, or of other weights, are predicted again; the network is not trained.
    first, second, _ = sorted(kept)
    first.write_bytes(b"")
    second.write_bytes(sorted(kept)[2].read_bytes())
    assert np.array_equal(folds_of(recipe, images, engine, out, [])(given, everyone, score), before)
    assert models == {file: file.stat().st_mtime_ns for file in models}


def test_another_recipe_in_the_same_folder_is_refused(
    recipe: Recipe, images: ImageArrays, engine: Engine, tmp_path: Path
) -> None:
    given, everyone = images.labels.numpy(), np.ones(COUNT, dtype=bool)
    folds_of(recipe, images, engine, tmp_path / "folds", [])(given, everyone, score)
    folds, schedule = tmp_path / "folds", replace(recipe.config.schedule, epochs=2)
    for other, message in (
        (replace(recipe, task=replace(recipe.task, batch_size=8)), "batch_size 16, now 8"),
        (replace(recipe, config=replace(recipe.config, schedule=schedule)), "epochs 1, now 2"),
    ):
        message = f"holds a .*{message}.* give another folder, --out, or remove {folds}$"
        with pytest.raises(ValueError, match=message):
            folds_of(other, images, engine, folds, [])(given, everyone, score)


def test_targets_that_another_processor_rounds_otherwise_are_the_same_run(
    recipe: Recipe, images: ImageArrays, engine: Engine, tmp_path: Path
) -> None:
    given, everyone = images.labels.numpy(), np.ones(COUNT, dtype=bool)
    targets = np.random.default_rng(0).dirichlet(np.ones(2), COUNT).astype(np.float32)

    def rounds(second: Any) -> Any:
        cross_fit = folds_of(recipe, images, engine, tmp_path / "folds", [])
        cross_fit(given, everyone, score)
        return cross_fit(second, everyone, score)

    before = rounds(targets)
    file = tmp_path / "folds/round-2/labels.safetensors"
    written = file.read_bytes()
    assert np.array_equal(rounds(targets + np.float32([1e-6, -1e-6])), before)
    assert file.read_bytes() == written
    with pytest.raises(ValueError, match=r"other labels.* --out, or remove"):
        rounds(targets[:, ::-1].copy())
