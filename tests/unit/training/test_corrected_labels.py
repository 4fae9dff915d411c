"""Training on soft targets, on corrected labels, and on all but a fold."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.contract import toy
from tests.unit.small_sets import random_bytes, write_image
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning", reason="pip install 'hetsngp[train]'")
pytest.importorskip("PIL.Image")

from hetsngp import metrics
from hetsngp.data.images.arrays import ImageArrays, fold_rows
from hetsngp.data.images.device_loader import DeviceLoader
from hetsngp.data.label_files import CORRECTED, LabelFile, example_names
from hetsngp.data.preprocessing import Preprocessing
from hetsngp.data.sources import open_set
from hetsngp.evaluation.loader_quality import measure_quality
from hetsngp.models.loader_counts import class_counts
from hetsngp.models.methods import METHODS
from hetsngp.serving.decisions import set_thresholds
from hetsngp.training import CheckpointConfig, Engine, Hardware, Schedule, TrainConfig
from hetsngp.training.gradients import FabricGradients
from hetsngp.training.image_data import make_loaders
from hetsngp.training.images import make_model, train_images
from hetsngp.training.input_kinds import TaskData
from hetsngp.training.recipes.recipe import Recipe, read_recipe
from hetsngp.training.recipes.task import ImageTask
from hetsngp.training.run_results import find_thresholds, measure
from hetsngp.training.task_data import open_task

CLASSES = ("cat", "dog", "owl")
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
CONFIG = TrainConfig(Schedule(2, lr=0.05, optimizer="sgd", smooth=True))
X, Y = toy.blobs(3, 8)


class Died(BaseException):
    pass


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(Hardware(devices=1, accelerator="cpu"))


def soft(rows: int, seed: int = 5) -> Tensor:
    return torch.softmax(2 * torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed)), 1)


# --- soft targets in the engine -------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_engine_trains_fits_and_measures_with_soft_targets(method: str, engine: Engine) -> None:
    loader = DataLoader(TensorDataset(X, soft(24)), 6, shuffle=True)
    held_out = [(X + 0.1, soft(24, seed=6))]
    trained = engine.train(toy.build(method), loader, CONFIG, held_out=held_out, show=False)
    nll = -(held_out[0][1] * trained.model(held_out[0][0]).detach()).sum(1).mean()
    assert trained.history[trained.best - 1].held_out == pytest.approx(float(nll), rel=1e-4)
    report = engine.fit_posterior(trained.model, loader, held_out)
    assert report.held_out == 24
    assert report.nll is not None
    found = measure(trained.model, held_out, engine)
    probs = trained.model.predict_probs(held_out[0][0])
    assert found["accuracy"] == pytest.approx(metrics.accuracy(probs, held_out[0][1].argmax(1)))
    want = -(held_out[0][1] * probs.log()).sum(1).mean()
    assert found["nll"] == pytest.approx(float(want), rel=1e-5)


def test_one_hot_targets_train_as_their_labels(engine: Engine) -> None:
    images = ImageArrays(torch.from_numpy(random_bytes(24, 3, 8, 8)), Y, CLASSES)
    one_hot = replace(images, targets=F.one_hot(Y, 3).float())
    found = []
    for data in (images, one_hot, replace(images, targets=soft(24))):
        loader = DeviceLoader(data, 6, shuffle=True)
        task = ImageTask("none", "wrn-10-1", "posterior_network", batch_size=6)
        torch.manual_seed(0)
        model, _ = make_model(task, 3, (3, 8, 8))
        engine.train(model, loader, CONFIG, show=False)
        found.append((toy.weights(model), model.class_counts))
    for name, want in found[0][0].items():
        assert torch.allclose(found[1][0][name], want, atol=1e-4), name
    assert any((found[2][0][name] - want).abs().max() > 1e-2 for name, want in found[0][0].items())
    assert torch.allclose(found[2][1], soft(24).sum(0), rtol=1e-5)


def test_classes_are_counted_by_their_share() -> None:
    weight = torch.arange(24) / 10
    want = (weight[:, None].double() * soft(24).double()).sum(0)
    got = class_counts([(X, soft(24), weight)], 3)
    assert got is not None
    assert torch.allclose(got, want)


def test_wrong_soft_targets_are_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="soft targets must be probabilities"):
        engine.train(toy.build("hetsngp"), [(X, 2 * soft(24))], CONFIG, show=False)
    images = ImageArrays(torch.from_numpy(random_bytes(24, 3, 8, 8)), Y, CLASSES, soft(24))
    with pytest.raises(ValueError, match="the data have 3 classes, but this model has num_classes=4"):
        engine.train(toy.build("hetsngp", 4), DeviceLoader(images, 6), CONFIG, show=False)


def test_quality_of_soft_targets_is_that_of_the_most_probable_class() -> None:
    class Table:
        def predict_probs(self, x: Tensor) -> Tensor:
            return x

    probs, targets = soft(24, seed=8), soft(24)
    batches = list(zip(probs.split(10), targets.split(10), strict=True))
    found = measure_quality(Table(), batches, torch.device("cpu"), soft=True)
    assert list(found) == ["accuracy", "nll", "ece", "examples"]
    hard = measure_quality(Table(), [(probs, targets.argmax(1))], torch.device("cpu"), soft=True)
    assert (found["accuracy"], found["ece"]) == (hard["accuracy"], hard["ece"])
    want = (
        sum(-float((t.double() * p.double().log()).sum()) for p, t in zip(probs, targets, strict=True)) / 24
    )
    assert found["nll"] == pytest.approx(want, rel=1e-9)
    assert hard["nll"] == pytest.approx(metrics.nll(probs, targets.argmax(1)), rel=1e-9)


def test_thresholds_go_by_the_most_probable_class(engine: Engine, tmp_path: Path) -> None:
    targets = 0.2 * soft(60) + 0.8 / 3  # none is above a half, as a multi-hot label would be
    held_out = ImageArrays(
        torch.from_numpy(random_bytes(60, 3, 8, 8)), torch.zeros(60).long(), CLASSES, targets
    )
    inputs = Preprocessing((8, 8), (0.5,) * 3, (0.25,) * 3, CLASSES)
    model, _ = make_model(ImageTask("none", "wrn-10-1", "deterministic"), 3, (3, 8, 8))
    scaled = (held_out.images / 255 - 0.5) / 0.25
    (tmp_path / "small.toml").write_text(f"data = 'none'\n{SMALL}")
    recipe = read_recipe(tmp_path / "small.toml", ["verdicts.correct=0.2"])
    found = find_thresholds(model.eval(), held_out, inputs, recipe, engine)
    want = set_thresholds(model.predict(scaled), targets.argmax(1), correct=0.2)
    assert found.accuracy == want.accuracy
    assert found.coverage == want.coverage > 0


# --- data of a task -------------------------------------------------------------------------------------


def write_npz(folder: Path, count: int = 40) -> Path:
    """The first pixel of an image is its number."""
    arrays: dict[str, Any] = {}
    for split, size in (("train", count), ("test", 8)):
        pixels = random_bytes(size, 8, 8, 3)
        pixels[:, 0, 0] = np.arange(size)[:, None]
        arrays |= {f"x_{split}": pixels, f"y_{split}": np.arange(size) % 3}
    np.savez(folder / "a.npz", **arrays, class_names=np.array(CLASSES))
    return folder / "a.npz"


def write_folder(folder: Path, count: int = 40) -> Path:
    for row, pixels in enumerate(random_bytes(count, 8, 8, 3)):
        write_image(folder / "set" / "train" / CLASSES[row % 3] / f"{row:02d}.bmp", pixels)
    return folder / "set"


def audit(data: Path, folder: Path, *dropped: str, seed: int = 5) -> LabelFile:
    """Write soft targets for the training images, and what a person dropped."""
    images: Any = open_set(data, "train")
    targets = 0.7 * soft(len(images), seed) + 0.3 * F.one_hot(images.labels, 3)
    labels = LabelFile(example_names(images), images.class_names, images.labels, targets)
    labels.write(folder)
    key = "path" if "/" in labels.names[0] else "index"
    lines = [f"{key},given_label,label,source"]
    given = dict(zip(labels.names, labels.given.tolist(), strict=True))
    lines += [f"{name},{CLASSES[given[name]]},,person" for name in dropped]
    (folder / CORRECTED).write_text("\n".join(lines))
    return labels


def task(data: Path, **given: Any) -> ImageTask:
    return ImageTask(str(data), "wrn-10-1", "sngp", **{"batch_size": 6, "held_out": 0.25, **given})


def numbers(part: Any) -> list[int]:
    found: list[int] = part.images[:, 0, 0, 0].tolist()
    return found


def parts(data: TaskData) -> list[Any]:
    return [data.train, data.held_out, data.test]


def test_corrected_labels_are_for_training_and_held_out_images(tmp_path: Path) -> None:
    data = write_npz(tmp_path)
    plain = open_task(task(data), seed=3)
    labels = audit(data, tmp_path / "audit", "4", "7", "11")
    found = open_task(task(data, labels=str(tmp_path / "audit")), seed=3)
    for part, before in zip(parts(found)[:2], parts(plain)[:2], strict=True):
        want = [number for number in numbers(before) if number not in (4, 7, 11)]  # the same split
        assert numbers(part) == want
        assert torch.equal(part.targets, labels.targets[want])
        assert torch.equal(part.labels, labels.targets[want].argmax(1))
    assert numbers(found.test) == numbers(plain.test)
    test: Any = found.test
    assert test.targets is None
    assert test.labels.tolist() == [i % 3 for i in range(8)]
    kept = torch.tensor([i for i in range(40) if i not in (4, 7, 11)])
    changed = int((labels.targets.argmax(1) != labels.given)[kept].sum())
    assert 0 < changed < 37
    assert found.corrected == {"path": str(tmp_path / "audit"), "dropped": 3, "changed": changed}
    loaders = make_loaders(task(data), found, {}, seed=3)
    y = torch.cat([y for _, y in loaders.held_out])
    assert torch.equal(y, parts(found)[1].targets)
    assert next(iter(loaders.train))[1].shape == (6, 3)
    assert next(iter(loaders.test))[1].shape == (8,)


@pytest.mark.parametrize("from_disk", [False, True])
def test_corrected_labels_of_files(from_disk: bool, tmp_path: Path) -> None:
    data = write_folder(tmp_path)
    labels = audit(data, tmp_path / "audit", "cat/03.bmp")
    given = task(data, labels=str(tmp_path / "audit"), size=8, from_disk=from_disk, workers=0)
    plain: Any = open_task(task(data, size=8, from_disk=from_disk, workers=0), 0)
    found: Any = open_task(given, 0)
    assert len(found.train) + len(found.held_out) == 39
    assert len(plain.train) + len(plain.held_out) == 40
    loaders = make_loaders(given, found, {}, seed=0)
    y = torch.cat([y for loader in (loaders.clean, loaders.held_out) for _, y in loader])
    rows = [row for row, name in enumerate(labels.names) if name != "cat/03.bmp"]
    assert sorted(y.tolist()) == sorted(labels.targets[rows].tolist())
    x, y = next(iter(loaders.train))
    assert (x.shape, y.shape, y.dtype) == ((6, 3, 8, 8), (6, 3), torch.float32)


@pytest.mark.parametrize("kind", ["npz", "folder"])
def test_five_folds_are_the_test_sets_and_partition_the_data(kind: str, tmp_path: Path) -> None:
    data = write_npz(tmp_path) if kind == "npz" else write_folder(tmp_path)
    more: dict[str, Any] = {} if kind == "npz" else {"size": 8, "from_disk": True, "workers": 0}
    images: Any = open_set(data, "train")

    def names(part: Any) -> list[Any]:
        return numbers(part) if kind == "npz" else [file.name for file in part.files]

    whole = names(images)
    audit(data, tmp_path / "audit", *example_names(images)[:2])
    tested = []
    for fold in range(1, 6):
        found: Any = open_task(task(data, fold=f"{fold}/5", **more), seed=1)
        train, held_out, test = map(names, parts(found))
        assert test == [whole[row] for row in fold_rows(images.labels, 3, 5, seed=1)[fold - 1].tolist()]
        assert sorted(train + held_out + test) == sorted(whole)
        counts = torch.bincount(found.test.labels, minlength=3)
        assert int(counts.max() - counts.min()) <= 1
        tested += test
        again: Any = open_task(task(data, fold=f"{fold}/5", labels=str(tmp_path / "audit"), **more), seed=1)
        assert names(again.test) == test
        assert again.test.targets is None
        assert torch.equal(again.test.labels, found.test.labels)
        left = [[n for n in part if n not in whole[:2]] for part in (train, held_out)]
        assert [names(again.train), names(again.held_out)] == left
        assert again.corrected["dropped"] == 2 - sum(name in test for name in whole[:2])
    assert sorted(tested) == sorted(whole)
    other: Any = open_task(task(data, fold="1/5", **more), seed=2)
    assert names(other.test) != names(open_task(task(data, fold="1/5", **more), seed=1).test)


def test_copies_of_an_image_are_in_one_fold(tmp_path: Path) -> None:
    pixels, labels = random_bytes(20, 8, 8, 3).repeat(2, axis=0), np.arange(40) % 2
    np.savez(tmp_path / "copies.npz", x_train=pixels, y_train=labels)
    for fold in (1, 2, 3):
        found: Any = open_task(task(tmp_path / "copies.npz", fold=f"{fold}/3"), seed=0)
        train, held_out, test = ({image.numpy().tobytes() for image in p.images} for p in parts(found))
        assert len(test) == len(found.test) / 2 > 5
        assert not test & (train | held_out)


def test_folds_of_few_examples() -> None:
    labels = torch.tensor([0, 1, 1])
    assert sorted(torch.cat(fold_rows(labels, 2, 3)).tolist()) == [0, 1, 2]
    with pytest.raises(ValueError, match="3 examples cannot be divided into 4 folds"):
        fold_rows(labels, 2, 4)


@pytest.mark.parametrize("fold", ["0/5", "6/5", "1/1", "2", "a/b", "-1/5", "1/5/5", "", "02/5"])
def test_a_wrong_fold_is_refused(fold: str) -> None:
    with pytest.raises(ValueError, match="fold is such as 2/5"):
        ImageTask("none", fold=fold)


@pytest.mark.parametrize("key", ["labels", "fold"])
def test_multi_label_data_are_refused(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hetsngp.data.images.multi_label import MultiLabelFiles
    from hetsngp.training import image_data

    several = MultiLabelFiles.of(tmp_path, ["a.jpg", "b.jpg"], [[0], [0, 1]], CLASSES)
    monkeypatch.setattr(image_data, "open_set", lambda *_: several)
    given = task(tmp_path, size=8, options={"link": "sigmoid"}, **{key: "1/2"})
    with pytest.raises(ValueError, match=f"{key} is for images with one label each.*MultiLabelFiles: leave"):
        open_task(given, 0)


def test_labels_that_drop_everything_are_refused(tmp_path: Path) -> None:
    data = write_npz(tmp_path)
    audit(data, tmp_path / "audit", *map(str, range(40)))
    with pytest.raises(ValueError, match="drop all images"):
        open_task(task(data, labels=str(tmp_path / "audit")), 0)


# --- runs -----------------------------------------------------------------------------------------------


def recipe(folder: Path, data: Path, *changes: str) -> Recipe:
    (folder / "small.toml").write_text(f"data = '{data}'\n{SMALL}")
    size = () if data.suffix == ".npz" else ("size=8",)
    return read_recipe(folder / "small.toml", (*size, *changes))


def checkpoints(folder: Path) -> CheckpointConfig:
    return CheckpointConfig(folder, seconds=0, tensorboard=False)


def test_keys_that_are_not_set_are_not_described(tmp_path: Path) -> None:
    """Runs of before are recognised by their descriptions."""
    described = recipe(tmp_path, Path("a.npz")).describe()
    assert not {"labels", "fold"} & described["task"].keys()
    assert "mixup" not in described["config"]
    described = recipe(tmp_path, Path("a.npz"), "labels=x", "fold=1/2", "training.mixup=0.2").describe()
    assert (described["task"]["labels"], described["task"]["fold"]) == ("x", "1/2")
    assert described["config"]["mixup"] == 0.2


def test_a_run_on_corrected_labels(tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    data, folder = write_npz(tmp_path), tmp_path / "run"
    labels = audit(data, tmp_path / "audit", "3")
    given = recipe(tmp_path, data, f"labels={tmp_path / 'audit'}", "training.mixup=0.3")
    step = FabricGradients.step

    def dying(self: FabricGradients) -> None:
        if self.updates == 3:
            raise Died
        step(self)

    with monkeypatch.context() as patch:
        patch.setattr(FabricGradients, "step", dying)
        with pytest.raises(Died):
            train_images(given, engine, checkpoints(folder), show=False)
    # Other labels are other data, and so are none; the same in another place are not.
    audit(data, tmp_path / "audit", "4")
    with pytest.raises(ValueError, match=r"on other data \(labels: other labels or class names\)"):
        train_images(given, engine, checkpoints(folder), show=False)
    with pytest.raises(ValueError, match=r"other data \(.*labels '.*', now None"):
        train_images(recipe(tmp_path, data, "training.mixup=0.3"), engine, checkpoints(folder), show=False)
    audit(data, tmp_path / "moved", "3")
    given = recipe(tmp_path, data, f"labels={tmp_path / 'moved'}", "training.mixup=0.3")
    summary = train_images(given, engine, checkpoints(folder), show=False)
    rows = torch.arange(40) != 3
    changed = int((labels.changed & rows).sum())
    assert summary["labels"] == {"path": str(tmp_path / "moved"), "dropped": 1, "changed": changed}
    assert summary["recipe"]["task"]["labels"] == str(tmp_path / "moved")
    assert summary["held_out"]["examples"] in (9, 10)
    assert summary["test"]["examples"] == 8
    assert json.loads((folder / "summary.json").read_text())["labels"] == summary["labels"]
    whole = train_images(given, engine, checkpoints(tmp_path / "whole"), show=False)
    assert whole["weights"] == summary["weights"]
    # A finished run is recognised, and held to its labels.
    shutil.move(tmp_path / "moved", tmp_path / "audit2")
    again = recipe(tmp_path, data, f"labels={tmp_path / 'audit2'}", "training.mixup=0.3")
    assert train_images(again, engine, checkpoints(folder), show=False) == summary
    audit(data, tmp_path / "audit2", "3", seed=9)
    with pytest.raises(ValueError, match=r"on other data \(labels: other labels or class names\)"):
        train_images(again, engine, checkpoints(folder), show=False)
    # Where they are gone nothing is compared.
    assert train_images(given, engine, checkpoints(folder), show=False) == summary


def test_a_run_without_a_fold(tmp_path: Path, engine: Engine) -> None:
    data = write_folder(tmp_path, count=30)
    given = recipe(tmp_path, data, "fold=2/3")
    summary = train_images(given, engine, checkpoints(tmp_path / "run"), show=False)
    assert (summary["held_out"]["examples"], summary["test"]["examples"]) == (5, 10)
    assert summary["no_test"] is None
    assert "labels" not in summary
    assert train_images(given, engine, checkpoints(tmp_path / "run"), show=False) == summary
    with pytest.raises(ValueError, match="fold '2/3', now '1/3'"):
        train_images(recipe(tmp_path, data, "fold=1/3"), engine, checkpoints(tmp_path / "run"), show=False)


def test_a_run_on_a_file_of_hard_labels(tmp_path: Path, engine: Engine) -> None:
    """Labels that make every class the next one: the network learns those, and is wrong on the test set."""
    count = 60
    pixels = np.zeros((count, 8, 8, 3), np.uint8)
    for row in range(count):
        pixels[row, ..., row % 3] = 200
    labels = np.arange(count) % 3
    arrays = {"x_train": pixels, "y_train": labels, "x_test": pixels[:12], "y_test": labels[:12]}
    np.savez(tmp_path / "a.npz", **arrays, class_names=np.array(CLASSES))
    lines = [f"{row},{CLASSES[row % 3]},{CLASSES[(row + 1) % 3]},person" for row in range(count)]
    file = tmp_path / CORRECTED
    file.write_text("\n".join(["index,given_label,label,source", *lines]))
    settings = ["method=deterministic", "schedule.epochs=8", "schedule.lr=0.01", f"labels={file}"]
    found = train_images(
        recipe(tmp_path, tmp_path / "a.npz", *settings), engine, checkpoints(tmp_path / "run"), show=False
    )
    assert found["labels"] == {"path": str(file), "dropped": 0, "changed": count}
    assert found["held_out"]["accuracy"] == 1.0
    assert found["test"]["accuracy"] == 0.0
