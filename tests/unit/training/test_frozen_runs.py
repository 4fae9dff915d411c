"""Runs of frozen networks: one set of features for all, and a saved model that predicts from images."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.small_sets import random_bytes, write_image
from torch import Tensor

pytest.importorskip("lightning", reason="pip install 'hetsngp[train]'")
pytest.importorskip("timm", reason="pip install 'hetsngp[vision]'")
pytest.importorskip("typer", reason="pip install 'hetsngp[cli]'")

from tests.unit.cli.test_cli import invoke

import hetsngp
from hetsngp.auditing.run_audit import AuditSettings, AuditSource, run_audit
from hetsngp.data.label_files import LabelFile
from hetsngp.data.sources import open_set
from hetsngp.evaluation.run_evaluation import RunSets, evaluate_run
from hetsngp.frozen.features import FeatureSet
from hetsngp.nn.extractor import Extractor
from hetsngp.pretrained import feature_cache
from hetsngp.pretrained.image_features import image_features
from hetsngp.pretrained.image_networks import PACKAGED, PackagedWeights, PretrainedNetwork, pretrained_network
from hetsngp.serving.bundle import open_run
from hetsngp.serving.decisions import set_thresholds
from hetsngp.serving.predictions import predict_files, predict_set
from hetsngp.training import CheckpointConfig, Engine, Hardware
from hetsngp.training.finished_runs import finished, recipe_of_run
from hetsngp.training.frozen_run import cache_folder
from hetsngp.training.recipe_run import train_recipe
from hetsngp.training.recipes.recipe import Recipe, read_recipe
from hetsngp.training.task_data import open_task

create_model: Any = pytest.importorskip("timm").create_model
NETWORK, SIDE = "tiny", 32
FROZEN = f"""
network = "{NETWORK}"
pretrained = true
frozen = true
method = "sngp"
size = {SIDE}
batch_size = 20
held_out = 0.25
workers = 0
[options]
random_features = 16
[hardware]
accelerator = "cpu"
"""
TRAINED = (
    FROZEN.replace("frozen = true", "head_first = true").replace(
        "random_features = 16", "random_features = 64"
    )
    + "[schedule]\nepochs = 1\n"
)


class Died(BaseException):
    pass


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(Hardware(devices=1, accelerator="cpu"))


@pytest.fixture(autouse=True)
def packaged(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of weights, as those of the extra ``weights`` are, of a tiny network."""
    folder = tmp_path_factory.mktemp("package")
    torch.manual_seed(0)
    torch.save(dict(create_model("test_resnet", num_classes=7).state_dict()), folder / "net.pth")
    path = str(folder / "net.pth")
    code = f"class File:\n    @staticmethod\n    def get_model_file_path():\n        return {path!r}\n"
    (folder / "tiny_weights.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "tiny_weights", raising=False)
    monkeypatch.setitem(PACKAGED, NETWORK, PackagedWeights("tiny_weights", "File", "test_resnet"))


@pytest.fixture
def run_images(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of images that networks are run on."""
    counts: list[int] = []
    features = PretrainedNetwork.features

    def counting(self: PretrainedNetwork, images: Tensor) -> Tensor:
        counts.append(len(images))
        return features(self, images)

    monkeypatch.setattr(PretrainedNetwork, "features", counting)
    return counts


def pixels(count: int, *, side: int = 12, channels: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Images whose brightness says most of their class, (n, side, side, C), and labels."""
    labels = np.arange(count) % 2
    noise = random_bytes(count, side, side, channels, seed=seed) // 2
    return (noise + 100 * labels[:, None, None, None]).astype(np.uint8), labels


def write_arrays(folder: Path, **given: int) -> Path:
    arrays: dict[str, np.ndarray] = {}
    for split, count in (("train", 80), ("test", 20)):
        x, y = pixels(count, seed=count, **given)
        arrays |= {f"x_{split}": x, f"y_{split}": y}
    np.savez(folder / "a.npz", **arrays)
    return folder / "a.npz"


def write_photos(folder: Path) -> Path:
    for split, count in (("train", 60), ("test", 12)):
        for number, (picture, label) in enumerate(zip(*pixels(count, side=40, seed=count), strict=True)):
            write_image(folder / split / "ab"[label] / f"{number}.png", picture[:, : 30 + number % 9])
    return folder


def recipe(folder: Path, data: Path, *changes: str, text: str = FROZEN) -> Recipe:
    (folder / "mine.toml").write_text(f"data = '{data}'\n{text}")
    return read_recipe(folder / "mine.toml", changes)


def checkpoints(folder: Path) -> CheckpointConfig:
    return CheckpointConfig(folder, tensorboard=False)


# --- the run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["arrays", "grey", "photos", "cut"])
def test_images_are_predicted_as_their_cached_features_are(kind: str, tmp_path: Path, engine: Engine) -> None:
    if kind in ("arrays", "grey"):
        data = write_arrays(tmp_path, channels=1 if kind == "grey" else 3)
    else:
        data = write_photos(tmp_path / "photos")
    changes = ["resize=36"] if kind == "cut" else []
    run = tmp_path / "runs" / "a"
    summary = train_recipe(recipe(tmp_path, data, *changes), engine, checkpoints(run), show=False)
    assert {file.name for file in run.iterdir()} == {"model", "summary.json"}
    assert summary["held_out"]["accuracy"] > 0.9
    served, images = open_run(run), open_set(data, "test")
    network = pretrained_network(NETWORK, size=SIDE, resize=36 if changes else None)
    features = run.parent / "features"
    kept = len(list(features.rglob("*.safetensors")))
    h = image_features(images, network, features)
    assert len(list(features.rglob("*.safetensors"))) == kept  # none of them is new
    expected = served.model.on_features().predict(h).probs  # type: ignore[union-attr]
    if kind in ("arrays", "grey"):
        records = list(predict_set(served, str(data)))
    else:
        records = list(predict_files(served, images.files))
    assert len(records) == len(images)
    found = torch.tensor([record.confidence for record in records])
    assert torch.allclose(found, expected.max(1).values, atol=1e-5)
    report = evaluate_run(run, RunSets(), tmp_path / "report")
    nll = -expected.gather(1, images.labels[:, None]).log().mean()
    assert report.id.nll == pytest.approx(float(nll), rel=1e-4)
    assert report.id.nll == pytest.approx(summary["test"]["nll"], rel=1e-4)
    assert report.id.accuracy == summary["test"]["accuracy"]


def test_a_loaded_model_is_timms_network_with_a_head(tmp_path: Path, engine: Engine) -> None:
    train_recipe(recipe(tmp_path, write_arrays(tmp_path)), engine, checkpoints(tmp_path / "a"), show=False)
    model = hetsngp.load(tmp_path / "a" / "model")
    assert isinstance(model, hetsngp.Classifier)
    assert isinstance(model.backbone, Extractor)
    assert model.backbone.source["config"]["model_name"] == "test_resnet"
    assert (model.config["method"], model.backbone.frozen) == ("sngp", True)


def test_features_are_computed_once_for_all_runs(
    tmp_path: Path, engine: Engine, run_images: list[int], capsys: Any
) -> None:
    data = write_arrays(tmp_path)
    runs = tmp_path / "runs"
    train_recipe(recipe(tmp_path, data), engine, checkpoints(runs / "a"), show=True)
    assert sum(run_images) == 100  # of training, held-out and test images
    assert "are there" not in capsys.readouterr().out
    for name, changes in (("b", ["method=hetsngp"]), ("c", ["seed=5"]), ("d", ["fold=2/4"])):
        train_recipe(recipe(tmp_path, data, *changes), engine, checkpoints(runs / name), show=True)
        assert sum(run_images) == 100
        assert f"features by {NETWORK}: all 20 are there" in capsys.readouterr().out
    train_recipe(recipe(tmp_path, data, f"features={runs / 'others'}"), engine, checkpoints(runs / "e"))
    assert sum(run_images) == 200


def test_features_lie_beside_the_folder_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "runs" / "a")
    task = recipe(tmp_path, tmp_path).task
    for run in (Path("."), Path("../a"), tmp_path / "runs" / "a"):
        assert cache_folder(task, run).resolve() == (tmp_path / "runs" / "features").resolve()


def test_a_killed_run_goes_on_from_its_features(
    tmp_path: Path, engine: Engine, run_images: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_cache, "PART", 8)
    data, run = write_photos(tmp_path / "photos"), tmp_path / "runs" / "a"
    given = recipe(tmp_path, data, "batch_size=4")

    def until(count: int) -> None:
        """Die in the batch after ``count`` images."""
        features = PretrainedNetwork.features

        def dying(self: PretrainedNetwork, images: Tensor) -> Tensor:
            if sum(run_images) + len(images) > count:
                raise Died
            return features(self, images)

        monkeypatch.setattr(PretrainedNetwork, "features", dying)

    with monkeypatch.context():
        before = PretrainedNetwork.features
        until(20)
        with pytest.raises(Died):
            train_recipe(given, engine, checkpoints(run), show=False)
        monkeypatch.setattr(PretrainedNetwork, "features", before)
    assert sum(run_images) == 20
    assert finished(run) is None
    summary = train_recipe(given, engine, checkpoints(run), show=False)
    assert sum(run_images) == 72
    whole = train_recipe(given, engine, checkpoints(tmp_path / "other" / "a"), show=False)
    assert summary["test"] == pytest.approx(whole["test"])
    assert summary["posterior"] == whole["posterior"]


def test_a_finished_run_is_known_by_its_recipe_and_data(
    tmp_path: Path, engine: Engine, run_images: list[int]
) -> None:
    data, run = write_arrays(tmp_path), tmp_path / "a"
    summary = train_recipe(recipe(tmp_path, data), engine, checkpoints(run), show=False)
    assert train_recipe(recipe(tmp_path, data, "workers=1"), engine, checkpoints(run)) == summary
    for change, words in (
        ("seed=1", "seed 0, now 1"),
        ("method=hetsngp", "method 'sngp', now 'hetsngp'"),
        ("options.amplitude=2", "amplitude"),
    ):
        with pytest.raises(ValueError, match=f"holds another run .*{words}.*give another folder"):
            train_recipe(recipe(tmp_path, data, change), engine, checkpoints(run))
    other = train_recipe(recipe(tmp_path, data, "verdicts.correct=0.6"), engine, checkpoints(run), show=False)
    assert other["thresholds"]["right"] == 0.6
    assert other["test"] == summary["test"]
    trained = recipe(tmp_path, data, text=TRAINED)
    with pytest.raises(ValueError, match="holds the run of a frozen network: give another folder"):
        train_recipe(trained, engine, checkpoints(run))
    x, y = pixels(80, seed=9)
    np.savez(data, **{**np.load(data), "x_train": x, "y_train": y})
    with pytest.raises(ValueError, match="holds a run on other data"):
        train_recipe(recipe(tmp_path, data, "verdicts.correct=0.6"), engine, checkpoints(run))
    with pytest.raises(ValueError, match="holds a run on other data"):
        train_recipe(recipe(tmp_path, data, "verdicts.correct=0.7"), engine, checkpoints(run))
    assert sum(run_images) == 100


def test_a_damaged_model_is_made_again(tmp_path: Path, engine: Engine, run_images: list[int]) -> None:
    given, run = recipe(tmp_path, write_arrays(tmp_path)), tmp_path / "a"
    summary = train_recipe(given, engine, checkpoints(run), show=False)
    for file in (run / "model").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-5])
    with pytest.warns(UserWarning, match="is written again$"):
        again = train_recipe(given, engine, checkpoints(run), show=False)
    assert again["weights"] == summary["weights"]
    assert finished(run) is not None
    assert sum(run_images) == 100


def test_held_out_copies_of_images_to_train_on_are_left_out(
    tmp_path: Path, engine: Engine, capsys: Any
) -> None:
    data = write_arrays(tmp_path)
    content = dict(np.load(data))
    for name in ("x_train", "y_train"):
        content[name][60:] = content[name][:20]
    np.savez(data, **content)
    given = recipe(tmp_path, data)
    split: Any = open_task(given.task, seed=0)
    trained, held_out = ([x.numpy().tobytes() for x in part.images] for part in (split.train, split.held_out))
    expected = sum(x not in trained for x in held_out)
    assert 0 < expected < len(held_out) == 20
    summary = train_recipe(given, engine, checkpoints(tmp_path / "a"), show=True)
    assert summary["held_out"]["examples"] == expected
    assert f"{20 - expected} of 20 held-out images are copies of ones to train on" in capsys.readouterr().out
    content["x_train"][:] = content["x_train"][0]
    np.savez(data, **content)
    with pytest.raises(ValueError, match="all 20 held-out examples are copies of ones to train on"):
        train_recipe(given, engine, checkpoints(tmp_path / "b"), show=False)


def test_corrected_labels_are_fitted(tmp_path: Path, engine: Engine) -> None:
    data, run = write_arrays(tmp_path), tmp_path / "a"
    images = open_set(data, "train")
    soft = torch.nn.functional.one_hot(1 - images.labels, 2).float() * 0.8 + 0.1  # all of the other class
    LabelFile(tuple(map(str, range(80))), images.class_names, images.labels, soft).write(tmp_path / "audit")
    labels = f"labels={tmp_path / 'audit'}"
    summary = train_recipe(recipe(tmp_path, data, labels), engine, checkpoints(run), show=False)
    assert summary["labels"]["changed"] == 80
    assert summary["held_out"]["accuracy"] > 0.9
    assert summary["test"]["accuracy"] < 0.1  # by their given labels


def test_the_head_is_fitted_and_calibrated_as_by_fit_head(tmp_path: Path, engine: Engine) -> None:
    data, run = write_arrays(tmp_path), tmp_path / "a"
    images = open_set(data, "train")
    soft = torch.full((80, 2), 0.3).scatter(1, images.labels[:, None], 0.7)
    LabelFile(tuple(map(str, range(80))), images.class_names, images.labels, soft).write(tmp_path / "audit")
    given = recipe(tmp_path, data, f"labels={tmp_path / 'audit'}", "seed=3")
    summary = train_recipe(given, engine, checkpoints(run), show=False)
    network, split = pretrained_network(NETWORK, size=SIDE), open_task(given.task, seed=3)
    train, held_out = (
        FeatureSet(network.features(part.images), part.targets) for part in (split.train, split.held_out)
    )
    example = torch.zeros(2, 3, SIDE, SIDE)
    model = hetsngp.convert(network.network, "sngp", example, num_classes=2, freeze=True)
    hetsngp.fit_head(model, train, held_out, seed=3, random_features=16)
    saved = hetsngp.load(run / "model")
    assert isinstance(saved, hetsngp.Classifier)
    found, expected = (each.eval().on_features().predict(held_out.h) for each in (saved, model))
    assert torch.allclose(found.probs, expected.probs, atol=1e-4)
    thresholds = set_thresholds(expected, held_out.y.argmax(1), correct=0.95, unfamiliar=0.05)
    assert thresholds.unfamiliar is not None
    assert summary["thresholds"]["unfamiliar"] == pytest.approx(thresholds.unfamiliar, rel=1e-3)
    assert summary["thresholds"]["confident"] == pytest.approx(thresholds.confident, rel=1e-3)


# --- the head before a training ---------------------------------------------------------------------------


def test_a_training_begins_with_the_fitted_head(
    tmp_path: Path, engine: Engine, run_images: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, begun = write_arrays(tmp_path), []

    def train(self: Engine, model: Any, loader: Any, config: Any, **given: Any) -> None:
        begun.append((model, loader.clean(), given["held_out"]))
        raise Died

    train_recipe(recipe(tmp_path, data), engine, checkpoints(tmp_path / "runs" / "f"), show=False)
    given = recipe(tmp_path, data, text=TRAINED)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "train", train)
        with pytest.raises(Died):
            train_recipe(given, engine, checkpoints(tmp_path / "runs" / "t"), show=False)
    assert sum(run_images) == 100  # those of the frozen run
    ((model, *loaders),) = begun
    assert not bool(model.head.posterior.fitted)
    assert model.head.temperature == model.head.training_temperature
    sets = []
    with torch.no_grad():
        for loader in loaders:
            x, y = (torch.cat(parts) for parts in zip(*loader, strict=True))
            sets.append(FeatureSet(model.eval().backbone(x), y))
    with torch.no_grad():
        nll = torch.nn.functional.cross_entropy(model.on_features()(sets[1].h), sets[1].y)
    assert float(nll) < 0.3  # an untrained head has log 2
    summary = train_recipe(given, engine, checkpoints(tmp_path / "runs" / "t"), show=False)
    assert summary["epochs"] == 1
    assert sum(run_images) == 100
    of_run = AuditSource.find(str(tmp_path / "runs" / "t")).recipe
    assert of_run is not None
    assert of_run.describe() == given.describe()


@pytest.mark.slow
def test_a_resumed_training_does_not_fit_its_head_again(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = recipe(tmp_path, write_arrays(tmp_path), "schedule.epochs=2", "batch_size=20", text=TRAINED)
    folder = CheckpointConfig(tmp_path / "a", seconds=0, tensorboard=False)
    from hetsngp.training.gradients import FabricGradients

    step = FabricGradients.step

    def dying(self: FabricGradients) -> None:
        if self.updates == 4:
            raise Died
        step(self)

    with monkeypatch.context() as patch:
        patch.setattr(FabricGradients, "step", dying)
        with pytest.raises(Died):
            train_recipe(given, engine, folder, show=False)
    with monkeypatch.context() as patch:
        patch.setattr("hetsngp.training.frozen_run.fit_head", None)
        resumed = train_recipe(given, engine, folder, show=False)
    whole = train_recipe(given, engine, CheckpointConfig(tmp_path / "b", tensorboard=False), show=False)
    assert resumed["test"] == whole["test"]


# --- recipes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["schedule.epochs=3"], "schedule.epochs is for a network that is trained, and this one is frozen"),
        (["training.clip=1"], "training.clip is for a network that is trained"),
        (["pretrained=false"], "frozen needs a network with its weights: --set pretrained=true"),
        (["head_first=true"], "leave out head_first"),
        (["method=mimo"], "mimo takes several inputs through the network at once"),
        (["from_disk=true"], "leave out from_disk"),
        (["frozen=false"], "schedule.epochs is missing"),
    ],
)
def test_recipes_that_are_refused(changes: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        recipe(tmp_path, tmp_path, *changes)


def test_data_that_are_refused(tmp_path: Path, engine: Engine) -> None:
    data = write_arrays(tmp_path)
    content = dict(np.load(data))
    np.savez(data, **{name: x[:, :, :10] if name.startswith("x") else x for name, x in content.items()})
    given = recipe(tmp_path, data, "size=none", text=TRAINED)
    with pytest.raises(ValueError, match=r"head_first is for square RGB images.*--set size=224"):
        train_recipe(given, engine, checkpoints(tmp_path / "a"), show=False)


def test_a_frozen_recipe_runs_in_one_process(tmp_path: Path) -> None:
    given = recipe(tmp_path, tmp_path, "hardware.devices=auto")
    assert given.on_this_machine()[0].hardware.devices == 1


# --- audits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["run", "recipe"])
def test_an_audit_of_a_frozen_run_uses_its_features(
    source: str, tmp_path: Path, engine: Engine, run_images: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = write_arrays(tmp_path)
    content = dict(np.load(data))
    wrong = [3, 17, 40]
    content["y_train"][wrong] = 1 - content["y_train"][wrong]
    np.savez(data, **content)
    run = tmp_path / "runs" / "a"
    given = recipe(tmp_path, data, "options.amplitude=3", "fold=none")
    train_recipe(given, engine, checkpoints(run), show=False)
    before = recipe_of_run(run)
    assert before.describe() == json.loads((run / "summary.json").read_text())["recipe"]
    asked = str(run) if source == "run" else str(tmp_path / "mine.toml")
    found = AuditSource.find(asked)
    said: list[str] = []
    about = run_audit(
        found, tmp_path / "audit", AuditSettings(rounds=1, page=False), say=said.append, show=False
    )
    assert sum(run_images) == 100
    assert about["method"] == "sngp"
    assert about["network"] == NETWORK
    lines = (tmp_path / "audit" / "label_errors.csv").read_text().splitlines()
    assert {int(line.split(",")[0]) for line in lines[1:] if ",True," in line} >= set(wrong)
    words = shlex.split(found.command(tmp_path / "audit"))
    assert words[:2] == ["hetsngp", "audit"]
    (tmp_path / "choices.csv").write_text("index,given_label,decision,new_label\n3,0,change,1\n")
    done = invoke(*words[1:])
    assert done.exit_code == 0, done.output
    assert "1 changed" in done.output
    command = found.train_command(tmp_path / "audit", about)
    changes = "mine.toml --set options.amplitude=3" if source == "run" else asked
    assert command == (
        f"hetsngp train {changes} --set labels={tmp_path / 'audit'} --out runs/audit-corrected"
    )
