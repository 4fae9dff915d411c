"""The report of a run on sets given by name: the right images, the right classes, nothing measured twice."""

import json
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.small_sets import random_bytes, write_image
from torch import Tensor

import hetsngp
from hetsngp.data.datasets.synsets import class_names, wnids
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.preprocessing import Preprocessing
from hetsngp.evaluation import run_evaluation as run_report
from hetsngp.evaluation.run_evaluation import RunSets, evaluate_run
from hetsngp.nn.backbones import WideResNet
from hetsngp.serving.bundle import open_run, write_serving
from hetsngp.serving.decisions import Thresholds

pytest.importorskip("PIL.Image")
THRESHOLDS = Thresholds(0.9, 1.0, correct=0.95, share=0.05, held_out=50, accuracy=0.97, coverage=0.6)
NAMES = ("cat", "dog", "owl")
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
INPUTS = Preprocessing((8, 8), MEAN, STD, NAMES, resize=9)
PLAIN = RunSets()


def save_run(folder: Path, inputs: Preprocessing = INPUTS, **about: Any) -> Path:
    """A network that nobody has trained."""
    generator = torch.Generator().manual_seed(0)
    network = WideResNet(10, 1, generator=generator)
    model = hetsngp.build("deterministic", network, len(inputs.class_names), generator=generator)
    hetsngp.save(model, folder / "model")
    write_serving(folder / "model", inputs, THRESHOLDS, about)
    return folder


@pytest.fixture
def pixels(tmp_path: Path) -> np.ndarray:
    """(30, 8, 8, 3), saved as test images."""
    pixels = random_bytes(30, 8, 8, 3)
    names = np.array(NAMES)
    np.savez(tmp_path / "a.npz", x_test=pixels, y_test=np.arange(30) % 3, class_names=names)
    return pixels


@pytest.fixture
def run(tmp_path: Path, pixels: np.ndarray) -> Path:
    return save_run(tmp_path / "run", data=str(tmp_path / "a.npz"), recipe="mine")


def probabilities(run: Path, pixels: np.ndarray) -> Tensor:
    """By the model alone, of (n, 8, 8, 3) bytes."""
    x = torch.from_numpy((pixels / 255 - MEAN) / STD).permute(0, 3, 1, 2).float()
    return hetsngp.load(run / "model").predict(x).probs


def looked_at(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What would be evaluated, in place of the evaluation."""
    given: dict[str, Any] = {}

    def look(model: Any, inside: Any, **more: Any) -> None:
        given.update(more, inside=inside)

    monkeypatch.setattr(run_report, "evaluate", look)
    return given


def written(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in (folder / "parts").iterdir()}


def test_of_the_test_images_it_was_trained_beside(run: Path, pixels: np.ndarray, tmp_path: Path) -> None:
    np.savez(tmp_path / "far.npz", x_test=255 - pixels[:9], y_test=np.zeros(9, int))
    sets, out = RunSets(ood={"far": str(tmp_path / "far.npz")}), tmp_path / "out"
    report = evaluate_run(run, sets, out, batch_size=7)
    probs, y = probabilities(run, pixels), torch.arange(30) % 3
    assert report.id.examples == 30
    assert report.id.accuracy == pytest.approx(float((probs.argmax(1) == y).double().mean()))
    assert report.id.nll == pytest.approx(float(-probs[torch.arange(30), y].log().mean()), rel=1e-4)
    assert report.ood["far"].examples == 9
    far = probabilities(run, 255 - pixels[:9]).amax(1).mean()
    assert report.ood["far"].confidence == pytest.approx(float(far), rel=1e-4)
    assert report.title == "Deterministic (mine) on a.npz"
    about = {"recipe": "mine", "data": str(tmp_path / "a.npz"), "ood far": str(tmp_path / "far.npz")}
    about |= {"hetsngp": hetsngp.__version__, "torch": torch.__version__}
    assert json.loads((out / "report.json").read_text())["about"] == about
    (line,) = (line for line in (out / "report.md").read_text().splitlines() if line.startswith("Measured"))
    assert all(f"{name} `{value}`" in line for name, value in about.items())
    assert "Measured: recipe mine, data" in str(report)
    assert max(map(len, str(report).splitlines())) <= 80
    assert report.corrupted is None
    assert (out / "report.png").is_file()

    parts = written(out)
    assert len(parts) == 2
    again = evaluate_run(run, RunSets(), out, batch_size=7)
    assert written(out) == parts  # nothing was measured again
    assert again.id == report.id
    fewer = evaluate_run(run, RunSets(limit=6), out)
    assert fewer.id.examples == 6
    assert sum(written(out)[name] != time for name, time in parts.items()) == 1


def test_classes_that_are_some_of_the_models(run: Path, tmp_path: Path) -> None:
    """Owls and cats: it chooses among these, and a label is a place among them."""
    for place, name in enumerate(("owl", "cat")):
        for number in range(4):
            image = random_bytes(8, 8, 3, seed=10 * place + number)
            write_image(tmp_path / "some" / f"{place}-{name}" / f"{number}.png", image)
    (tmp_path / "some" / "0-owl").rename(tmp_path / "some" / "owl")
    (tmp_path / "some" / "1-cat").rename(tmp_path / "some" / "cat")
    inputs = replace(INPUTS, resize=None)
    some = save_run(tmp_path / "b", inputs, data="gone.npz")
    report = evaluate_run(some, RunSets(str(tmp_path / "some")), tmp_path / "out")
    shown = np.stack([random_bytes(8, 8, 3, seed=seed) for seed in (10, 11, 12, 13, 0, 1, 2, 3)])
    kept = probabilities(some, shown)[:, [0, 2]]
    kept = kept / kept.sum(1, keepdim=True)
    y = torch.tensor([0] * 4 + [1] * 4)
    assert report.num_classes == 2
    assert report.id.accuracy == pytest.approx(float((kept.argmax(1) == y).double().mean()))
    assert report.id.nll == pytest.approx(float(-kept[torch.arange(8), y].log().mean()), rel=1e-4)


@pytest.mark.filterwarnings("ignore:no frost overlays:UserWarning")
def test_corruptions_of_the_test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETSNGP_DATA", str(tmp_path))
    big = random_bytes(4, 32, 32, 3)
    np.savez(tmp_path / "b.npz", x_test=big, y_test=np.arange(4) % 3, class_names=np.array(NAMES))
    run = save_run(
        tmp_path / "run", replace(INPUTS, size=(32, 32), resize=None), data=str(tmp_path / "b.npz")
    )
    given = looked_at(monkeypatch)
    fingerprints = set()
    for batch_size in (500, 500, 1):  # by which a set that was measured is known before it is made
        evaluate_run(run, RunSets(corrupted="made", limit=2), tmp_path / "out", batch_size=batch_size)
        fingerprints.add(given["corrupted"].fingerprint(("fog", 1)))
        assert len(given["corrupted"]) == 14 * 5
        x, _ = next(iter(given["corrupted"]["fog", 1]))
        assert x.shape == (min(batch_size, 2), 3, 32, 32)
        assert given["corrupted_uncertainty"]
        assert given["about"]["corrupted"] == "made (made by hetsngp)"
        assert given["about"]["limit"] == "2 images of each set"
    assert len(fingerprints) == 2
    assert None not in fingerprints


@pytest.mark.parametrize("given", ["a.npz", "pets"])
def test_a_path_is_found_from_another_folder(
    given: str, pixels: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        write_image(tmp_path / "pets" / "test" / name / "a.png", random_bytes(9, 9, 3))
    monkeypatch.chdir(tmp_path)
    run = save_run(tmp_path / "run", data=given)
    about = open_run(run).about
    assert about == {"data": given, "data_path": str(tmp_path / given)}
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    report = evaluate_run(run, PLAIN, tmp_path / "out")
    assert report.id.examples == {"a.npz": 30, "pets": 3}[given]
    assert report.about["data"] == given  # as it was called
    (tmp_path / given).rename(tmp_path / "moved")
    with pytest.raises(
        FileNotFoundError, match=rf"{re.escape(str(tmp_path / given))}, where nothing.*--data SET"
    ):
        evaluate_run(run, PLAIN, tmp_path / "out")


def test_a_set_by_name_has_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that happens to be called so is another one."""
    (tmp_path / "cifar10n").mkdir()
    monkeypatch.chdir(tmp_path)
    assert open_run(save_run(tmp_path / "run", data="cifar10n:worse")).about == {"data": "cifar10n:worse"}
    (tmp_path / "cifar10").mkdir()
    assert open_run(save_run(tmp_path / "b", data="cifar10")).about == {"data": "cifar10"}
    there = str(tmp_path / "cifar10")
    assert open_run(save_run(tmp_path / "c", data="./cifar10")).about["data_path"] == there


def test_what_is_refused_before_anything_is_measured(run: Path, pixels: np.ndarray, tmp_path: Path) -> None:
    def refused(words: str, sets: RunSets = PLAIN, run: Path = run) -> None:
        with pytest.raises((ValueError, FileNotFoundError), match=re.escape(words)):
            evaluate_run(run, sets, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    refused(
        "does not say what it was trained on: name the labelled images, --data", run=save_run(tmp_path / "b")
    )
    for name in NAMES:
        write_image(tmp_path / "pets" / name / "a.png", random_bytes(9, 9, 3))
    trained_on_all = save_run(tmp_path / "c", data=str(tmp_path / "pets"))
    refused("has no test images: name others, --data", run=trained_on_all)
    assert evaluate_run(trained_on_all, RunSets(str(tmp_path / "pets")), tmp_path / "d").id.examples == 3
    refused("cannot open images 'nowhere'", RunSets(ood={"a": "nowhere"}))
    refused("no class of", RunSets(str(tmp_path / "pets" / "cat")))
    refused("unknown corrupted set 'cifar-c'", RunSets(corrupted="cifar-c"))
    refused("limit must be at least 1", RunSets(limit=0))


@pytest.mark.filterwarnings("ignore:.*(frost|lacks):UserWarning")
def test_corrupted_images_must_have_the_same_classes(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a label would be taken for another class, and nobody would know."""
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    np.save(folder / "labels.npy", np.tile(np.arange(3, dtype=np.uint8), 5))
    np.save(folder / "fog.npy", random_bytes(15, 32, 32, 3))
    monkeypatch.setenv("HETSNGP_DATA", str(tmp_path))
    for limit in (None, 2):
        with pytest.raises(ValueError, match=r"cifar10-c has other classes than .*a\.npz, 'airplane' first"):
            evaluate_run(run, RunSets(corrupted="cifar10-c", limit=limit), tmp_path / "out")


@pytest.mark.skipif(find_spec("timm") is None, reason="the class lists come with timm")
@pytest.mark.filterwarnings("ignore:.*is a part of:UserWarning")
@pytest.mark.filterwarnings("ignore:.*lacks:UserWarning")
def test_the_images_of_imagenet_c_are_cut_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its published files are the middle 224 of 256: to cut them again would show a smaller part."""
    pixels, wnid = random_bytes(2, 8, 8, 3), wnids("imagenet")[7]
    for number, folder in enumerate(("imagenet/val", "imagenet-c/fog/1")):
        write_image(tmp_path / folder / wnid / f"{number}.png", pixels[number])
    monkeypatch.setenv("HETSNGP_DATA", str(tmp_path))
    inputs = replace(INPUTS, class_names=class_names("imagenet"), resize=12)
    run = save_run(tmp_path / "run", inputs, data="imagenet")
    given = looked_at(monkeypatch)
    evaluate_run(run, RunSets(corrupted="imagenet-c"), tmp_path / "out")
    ((x, y),) = list(given["corrupted"]["fog", 1])
    wanted = torch.from_numpy((pixels[1] / 255 - MEAN) / STD).permute(2, 0, 1)[None].float()
    assert torch.allclose(x, wanted, atol=1e-5)
    assert given["about"]["corrupted"] == "imagenet-c (published files)"
    assert "limit" not in given["about"]
    assert y.tolist() == [7]
    ((clean, _),) = list(given["inside"])
    whole = ImageArrays(torch.from_numpy(pixels[:1]).permute(0, 3, 1, 2), torch.zeros(1).long(), ("a",))
    assert not torch.allclose(clean, next(iter(INPUTS.loader(whole, 1)))[0], atol=1e-2)


@pytest.mark.parametrize("labels", [None, "runs/audit"])
def test_a_report_on_the_images_of_the_training_says_so(labels: str | None, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    for number in range(12):
        write_image(photos / NAMES[number % 3] / f"{number}.png", random_bytes(9, 9, 3, seed=number))
    corrected = {} if labels is None else {"labels": labels}
    run = save_run(tmp_path / "run", data=str(photos), recipe="mine", **corrected)
    about = evaluate_run(run, RunSets(data=str(photos)), tmp_path / "report").about
    assert "these are the images that were trained on" in about["note"]
    assert ("by their labels as given, not as corrected by runs/audit" in about["note"]) == bool(labels)
    photos.rename(tmp_path / "train")
    (tmp_path / "moved").mkdir()
    (tmp_path / "train").rename(tmp_path / "moved" / "train")
    other = save_run(tmp_path / "other", data=str(tmp_path / "moved"), recipe="mine")
    train = evaluate_run(other, RunSets(data=str(tmp_path / "moved" / "train")), tmp_path / "b")
    assert "note" in train.about
    moved = RunSets(data=str(tmp_path / "moved" / "train"))
    assert "note" not in evaluate_run(run, moved, tmp_path / "c").about  # not where it was trained
