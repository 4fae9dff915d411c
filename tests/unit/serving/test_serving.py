"""Prediction with a finished run: reading it from disk, and every record against the model's prediction."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract import toy
from tests.contract.toy import same_bits
from tests.unit.small_sets import Image, make_cifar_small, write_cifar10, write_image

import hetsngp
from hetsngp import ArtifactError
from hetsngp.data.preprocessing import Preprocessing
from hetsngp.files import with_checksum
from hetsngp.nn.backbones import WideResNet
from hetsngp.serving import (
    PredictionRecord,
    ServedModel,
    Thresholds,
    as_json,
    as_text,
    draw_contact_sheet,
    open_run,
    predict_and_show,
    predict_files,
    predict_set,
    set_thresholds,
    write_serving,
)

NAMES, SIDE = ("red", "green", "blue"), 8
MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.2, 0.3)
INPUTS = Preprocessing((SIDE, SIDE), MEAN, STD, NAMES)
COLOURS = np.array([[220, 40, 40], [40, 220, 40], [40, 40, 220]])


def coloured(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(n, 8, 8, 3) bytes, each of one colour with noise, and which."""
    rng = np.random.default_rng(seed)
    labels = np.arange(rows) % 3
    noise = rng.normal(0, 30, (rows, SIDE, SIDE, 3))
    return (COLOURS[labels][:, None, None] + noise).clip(0, 255).astype(np.uint8), labels


def as_inputs(pixels: np.ndarray) -> torch.Tensor:
    """Preprocessing in NumPy: (n, H, W, 3) bytes → (n, 3, H, W)."""
    return torch.tensor(
        ((pixels / 255 - np.array(MEAN)) / np.array(STD)).transpose(0, 3, 1, 2), dtype=torch.float32
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as the training leaves it; never written to."""
    torch.manual_seed(0)
    pixels, labels = coloured(60, seed=0)
    x, y = as_inputs(pixels), torch.as_tensor(labels)
    network = WideResNet(depth=10, width=1)
    model = hetsngp.build("hetsngp", network, 3, dataset_size=60, **toy.TINY)
    toy.descend(model.train(), x, y, steps=15)
    pixels, labels = coloured(90, seed=1)
    held_out, known = as_inputs(pixels), torch.as_tensor(labels)
    hetsngp.fit_posterior(model, toy.loader(x, y, 30), toy.loader(held_out, known, 30))
    folder = tmp_path_factory.mktemp("runs") / "colours"
    hetsngp.save(model, folder / "model")
    thresholds = set_thresholds(model.predict(held_out), known)
    write_serving(folder / "model", INPUTS, thresholds, {"data": "colours"})
    (folder / "summary.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def served(finished: Path) -> ServedModel:
    return open_run(finished)


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run, for tests that damage it."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def photos(tmp_path: Path) -> dict[str, np.ndarray]:
    """Names below ``photos/`` in the order of a walk, and their pixels; beside them what is no image."""
    pixels, _ = coloured(5, seed=2)
    pixels = np.concatenate(
        [pixels, np.random.default_rng(0).integers(0, 2, (1, SIDE, SIDE, 3), np.uint8) * 255]
    )
    names = ["B.png", "a.png", "b/1.png", "b/10.png", "b/2.png", "strange.png"]
    for name, image in zip(names, pixels, strict=True):
        write_image(tmp_path / "photos" / name, image)
    (tmp_path / "photos" / "notes.txt").write_text("no image")
    (tmp_path / "photos" / "._a.png").write_bytes(b"left by another system")
    return dict(zip(names, pixels, strict=True))


def edit(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the content, with a new checksum."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(with_checksum(content)))


def edit_text(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the content and leave the checksum as it is."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def record(name: str = "a.jpg", kind: str = "confident", **more: Any) -> PredictionRecord:
    text = {"ambiguous": "ambiguous (cat or dog)"}.get(kind, kind)
    every: dict[str, Any] = {"data_uncertainty": 0.25, "model_uncertainty": 0.0625, "ood_score": 0.0625}
    every |= {"label": "cat", "confidence": 0.875, "top": (("cat", 0.875), ("dog", 0.125)), **more}
    return PredictionRecord(name=name, verdict=kind, text=text, **every)


# --- a run on disk --------------------------------------------------------------------------------------


def test_a_run_and_its_model_open_to_what_was_written(finished: Path) -> None:
    x = as_inputs(coloured(9, seed=3)[0])
    model = hetsngp.load(finished / "model")
    for path in (finished, str(finished), finished / "model"):
        found = open_run(path)
        assert same_bits(found.model.predict(x), model.predict(x))
        assert (found.inputs, found.folder, found.about) == (INPUTS, finished / "model", {"data": "colours"})
        assert found.thresholds.held_out == 90
        assert found.thresholds.confident is not None
        assert found.thresholds.unfamiliar is not None


def test_an_ensemble_is_served_too(tmp_path: Path) -> None:
    members = [toy.build("deterministic"), toy.build("sngp", posterior="none")]
    hetsngp.save(hetsngp.Ensemble(members), tmp_path)
    thresholds = Thresholds(None, 0.1, 0.95, 0.05, 10, None, 0.0)
    write_serving(tmp_path, INPUTS, thresholds)
    assert open_run(tmp_path).thresholds == thresholds


def test_predicting_needs_no_training_code(finished: Path) -> None:
    code = (
        "import sys; from hetsngp.serving import open_run; open_run(sys.argv[1]); "
        "print(*sorted(name for name in sys.modules if name.startswith('hetsngp.')), "
        "*{name.split('.')[0] for name in sys.modules})"
    )
    src = Path(hetsngp.__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": str(src)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(finished)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "hetsngp.serving.bundle" in loaded
    assert not {
        name for name in loaded if name.startswith(("hetsngp.training", "hetsngp.evaluation", "hetsngp.cli"))
    }
    assert not loaded & {
        "lightning",
        "lightning_fabric",
        "matplotlib",
        "typer",
        "rich",
        "torchmetrics",
        "timm",
    }


def test_serving_json_is_written_whole_or_not_at_all(copied: Path) -> None:
    file = copied / "model" / "serving.json"
    before = file.read_bytes()
    thresholds = open_run(copied).thresholds
    with pytest.raises(ValueError, match="JSON"):
        write_serving(copied / "model", INPUTS, thresholds, {"loss": math.nan})
    assert file.read_bytes() == before
    write_serving(copied / "model", INPUTS, thresholds, {"recipe": "other"})
    assert open_run(copied).about == {"recipe": "other"}
    assert sorted(f.suffix for f in (copied / "model").iterdir()) == [".json", ".json", ".safetensors"]
    with pytest.raises(FileNotFoundError, match=r"save it first, hetsngp\.save"):
        write_serving(copied / "elsewhere", INPUTS, thresholds)


def shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (lambda m: shorten(m / "serving.json"), r"serving\.json is not a JSON file.*copy it again"),
    "bytes": (lambda m: (m / "serving.json").write_bytes(b"\xff\xfe"), r"serving\.json is not a JSON file"),
    "a list": (lambda m: (m / "serving.json").write_text("[]"), "was not written by hetsngp"),
    "another format": (
        lambda m: edit(m / "serving.json", lambda c: c.update(format="x")),
        "was not written by",
    ),
    "a later version": (
        lambda m: edit(m / "serving.json", lambda c: c.update(version=3)),
        "version 3.*use the",
    ),
    "missing": (lambda m: (m / "serving.json").unlink(), r"serving\.json is missing.*finish the training"),
    "no inputs": (lambda m: edit(m / "serving.json", lambda c: c.pop("inputs")), "'inputs' is missing"),
    "no thresholds": (
        lambda m: edit(m / "serving.json", lambda c: c.pop("thresholds")),
        "'thresholds' is missing",
    ),
    "odd about": (lambda m: edit(m / "serving.json", lambda c: c.update(about=3)), "about must be an object"),
    "odd inputs": (
        lambda m: edit(m / "serving.json", lambda c: c["inputs"].update(std=[0, 0, 0])),
        "std positive",
    ),
    "odd size": (
        lambda m: edit(m / "serving.json", lambda c: c["inputs"].update(size=[8.5, 8])),
        "whole numbers",
    ),
    "huge size": (
        lambda m: edit(m / "serving.json", lambda c: c["inputs"].update(size=[10**9] * 2)),
        "1,000,000,000 pixels a side.*HETSNGP_MAX_INPUT_SIDE",
    ),
    "huge resize": (
        lambda m: edit(m / "serving.json", lambda c: c["inputs"].update(resize=16384)),
        "16,384 pixels a side.*HETSNGP_MAX_INPUT_SIDE",
    ),
    "small resize": (
        lambda m: edit(m / "serving.json", lambda c: c["inputs"].update(resize=SIDE - 1)),
        "makes the short side smaller than the crop",
    ),
    "mean of bytes": (
        lambda m: edit(m / "serving.json", lambda c: c["inputs"].update(mean=[123.7, 116.3, 103.5])),
        r"in units of \[0, 1\].*divide those of bytes by 255",
    ),
    "a tiny std": (
        lambda m: edit(m / "serving.json", lambda c: c["inputs"].update(std=[1e-30] * 3)),
        "at least 1e-08",
    ),
    "labels by a number": (
        lambda m: edit(m / "serving.json", lambda c: c["inputs"].update(several_labels=0)),
        "multi_label is true or false, got 0",
    ),
    "a number beyond floats": (
        lambda m: edit(m / "serving.json", lambda c: c["thresholds"].update(unfamiliar=10**400)),
        "unfamiliar must be a finite number",
    ),
    "held out beyond floats": (
        lambda m: edit(m / "serving.json", lambda c: c["thresholds"].update(held_out=10**400)),
        "held_out must be a number of examples",
    ),
    "a list for a score": (
        lambda m: edit(m / "serving.json", lambda c: c["thresholds"].update(score=[])),
        "score must be one of",
    ),
    "no checksum": (
        lambda m: edit_text(m / "serving.json", lambda c: c.pop("checksum")),
        "its checksum is missing; copy it again, or write it with hetsngp.serving.write_serving",
    ),
    "another checksum": (
        lambda m: edit_text(m / "serving.json", lambda c: c.update(checksum="0" * 64)),
        "its content is not that of its checksum",
    ),
    "an odd checksum": (
        lambda m: edit_text(m / "serving.json", lambda c: c.update(checksum=[])),
        "its content is not that of its checksum",
    ),
    "another checksum of 0.1": (
        lambda m: edit_text(m / "serving.json", lambda c: c.update(version=1)),
        "its content is not that of its checksum",
    ),
    "true for a version": (
        lambda m: edit(m / "serving.json", lambda c: c.update(version=True)),
        "has version True",
    ),
    "odd resize": (
        lambda m: edit(m / "serving.json", lambda c: c["inputs"].update(resize="9")),
        "whole numbers",
    ),
    "more inputs": (
        lambda m: edit(m / "serving.json", lambda c: c["inputs"].update(x=1)),
        "inputs are described by",
    ),
    "odd threshold": (
        lambda m: edit(m / "serving.json", lambda c: c["thresholds"].update(confident=2)),
        "confident must lie between 0 and 1",
    ),
    "a class too few": (
        lambda m: edit(m / "serving.json", lambda c: c["inputs"].update(class_names=["a", "b"])),
        "2 class_names for 3 classes",
    ),
    "no names": (
        lambda m: edit(m / "serving.json", lambda c: c["inputs"].update(class_names=[1, 2, 3])),
        "class_names are two or more words",
    ),
    "several labels": (
        lambda m: edit(m / "serving.json", lambda c: c["inputs"].update(several_labels=True)),
        "several_labels is true, but the model's link is softmax: the file belongs to another model",
    ),
    "other weights": (lambda m: hetsngp.save(toy.build("sngp"), m), "belongs to other weights"),
    "damaged weights": (
        lambda m: shorten(next(m.glob("*.safetensors"))),
        "is damaged or was replaced.*copy it",
    ),
    "half a copy": (lambda m: next(m.glob("*.safetensors")).unlink(), "copied or unpacked only in part"),
    "no config": (lambda m: (m / "config.json").unlink(), r"is not a run: it has no model/config\.json"),
    "an odd config": (lambda m: (m / "config.json").write_text("{}"), "was not written by hetsngp"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_a_line_that_names_the_file_and_the_fix(
    damage: str, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetsngp.serving.bundle.PAUSES", ())
    break_it, words = DAMAGES[damage]
    break_it(copied / "model")
    with pytest.raises((ArtifactError, FileNotFoundError), match=words) as error:
        open_run(copied)
    assert "\n" not in str(error.value)
    assert str(copied) in str(error.value)


def leaves(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to all values of JSON."""
    yield path
    for key in content if isinstance(content, dict) else range(len(content)) if type(content) is list else ():
        yield from leaves(content[key], (*path, key))


def test_every_change_of_a_value_is_noticed(copied: Path) -> None:
    """0.1 answered differently, without a word, after 14 of 148 random changes."""
    file = copied / "model" / "serving.json"
    written = json.loads(file.read_text())
    paths = [path for path in leaves(written) if path]
    for path in paths:
        for value in (None, 0.5, 7, "x", [], {}, True):
            changed = json.loads(json.dumps(written))
            *outer, key = path
            inner = functools.reduce(lambda found, step: found[step], outer, changed)
            if inner[key] == value and type(inner[key]) is type(value):
                continue
            inner[key] = value
            file.write_text(json.dumps(changed))
            with pytest.raises(ArtifactError, match=r"serving\.json"):
                open_run(copied)
    assert len(paths) > 20
    file.write_text(json.dumps(dict(reversed(written.items())), indent=7))  # formatted anew
    open_run(copied)


def test_a_file_of_0_1_opens_with_a_warning_until_it_is_renewed(copied: Path) -> None:
    def as_0_1(content: dict[str, Any]) -> None:
        content["version"] = 1
        del content["checksum"]

    edit_text(copied / "model" / "serving.json", as_0_1)
    with pytest.warns(
        UserWarning, match=r"serving\.json is of hetsngp 0\.1 and has no checksum.*write_serving"
    ):
        found = open_run(copied)
    write_serving(copied / "model", found.inputs, found.thresholds, found.about)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = open_run(copied)
    assert (again.inputs, again.thresholds, again.about) == (found.inputs, found.thresholds, found.about)


def test_a_run_that_is_being_replaced_is_the_old_or_the_new_one(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model and serving.json are replaced one after the other; a reader in between waits for the second."""
    old = open_run(copied)
    x = as_inputs(coloured(4, seed=5)[0])
    other = hetsngp.build("deterministic", WideResNet(depth=10, width=1), 3)
    names = ("one", "two", "three")
    new_inputs = dataclasses.replace(INPUTS, class_names=names)
    steps = [
        lambda: hetsngp.save(other, copied / "model"),
        lambda: None,
        lambda: write_serving(copied / "model", new_inputs, old.thresholds),
    ]
    answers = {NAMES: old.model.predict(x).probs, names: other.eval().predict(x).probs}
    waits = []

    def pause(seconds: float) -> None:
        waits.append(seconds)
        steps.pop(0)()

    monkeypatch.setattr("hetsngp.serving.bundle.time.sleep", pause)
    found = open_run(copied)
    assert (found.inputs.class_names, len(waits)) == (NAMES, 0)
    steps.pop(0)()  # the model is new, serving.json is not yet
    found = open_run(copied)
    assert (found.inputs.class_names, len(waits)) == (names, 2)
    assert torch.equal(found.model.predict(x).probs, answers[names])
    # Replaced between the reading of one file and the next.
    first = hetsngp.load(copied / "model")
    steps = [lambda: write_serving(copied / "model", INPUTS, old.thresholds)]

    def load(folder: Path, **options: Any) -> Any:
        monkeypatch.setattr("hetsngp.serving.bundle.load", hetsngp.load)
        hetsngp.save(old.model, copied / "model")
        return first

    monkeypatch.setattr("hetsngp.serving.bundle.load", load)
    found = open_run(copied)
    assert (found.inputs.class_names, len(waits)) == (NAMES, 3)
    assert torch.equal(found.model.predict(x).probs, answers[NAMES])


@pytest.mark.slow
def test_readers_of_a_run_see_the_old_or_the_new_model(copied: Path) -> None:
    """A run is replaced over and over, and two processes read it all the while."""
    old = open_run(copied)
    x = as_inputs(coloured(4, seed=5)[0])
    other = hetsngp.build("deterministic", WideResNet(depth=10, width=1), 3).eval()
    runs = [(old.model, NAMES), (other, ("one", "two", "three"))]
    expected = {names: model.predict(x).probs for model, names in runs}
    code = (
        "import sys, json, torch; from hetsngp.serving import open_run\n"
        "x = torch.load(sys.argv[2], weights_only=True)\n"
        "for _ in range(25):\n"
        "    found = open_run(sys.argv[1])\n"
        "    probs = found.model.predict(x).probs.tolist()\n"
        "    print(json.dumps([found.inputs.class_names, probs]), flush=True)\n"
    )
    torch.save(x, copied / "x.pt")
    env = {**os.environ, "PYTHONPATH": str(Path(hetsngp.__file__).parents[1])}
    command = [sys.executable, "-c", code, str(copied), str(copied / "x.pt")]
    options: dict[str, Any] = {"env": env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    readers = [subprocess.Popen(command, **options) for _ in range(2)]
    writes = 0
    while any(reader.poll() is None for reader in readers):
        model, names = runs[writes % 2]
        hetsngp.save(model, copied / "model")
        write_serving(copied / "model", dataclasses.replace(INPUTS, class_names=names), old.thresholds)
        writes += 1
        time.sleep(1.0)
    for reader in readers:
        output, errors = reader.communicate(timeout=60)
        assert reader.returncode == 0, errors
        lines = [json.loads(line) for line in output.splitlines()]
        assert len(lines) == 25
        for names, probs in lines:
            assert torch.allclose(torch.tensor(probs), expected[tuple(names)], atol=1e-5)
    assert writes > 3


def test_a_batch_of_large_images_is_smaller(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 images of 2,048 pixels would take 3 GB."""
    from hetsngp.serving.predictions import _bounded

    for side, expected in ((SIDE, 64), (224, 64), (512, 64), (1024, 21), (2048, 5)):
        assert _bounded(64, dataclasses.replace(served.inputs, size=(side, side))) == expected


@pytest.mark.parametrize(
    "name", ["a$\\frac{$b^{$.png", "$$.png", "a\udcff.png", "a\x00\n.png", "\u202egnp.exe"]
)
def test_a_contact_sheet_shows_any_name(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one = record(name, label=name, given=name)
    draw_contact_sheet([one], [torch.zeros(3, 8, 8).byte()], tmp_path / "sheet.png")
    assert Image.open(tmp_path / "sheet.png").width > 100


def test_what_is_no_finished_run(tmp_path: Path, finished: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no run.*hetsngp train --out"):
        open_run(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is a file: give the folder"):
        open_run(finished / "summary.json")
    with pytest.raises(FileNotFoundError, match="is not a run"):
        open_run(tmp_path)
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(
        FileNotFoundError, match=re.escape(f"resume the training, hetsngp train … --out {tmp_path}")
    ):
        open_run(tmp_path)
    (tmp_path / "model").mkdir()  # interrupted while it was saved
    with pytest.raises(FileNotFoundError, match="not finished"):
        open_run(tmp_path)


# --- files ----------------------------------------------------------------------------------------------


def test_lines_of_files_are_the_prediction(
    served: ServedModel, photos: dict[str, np.ndarray], tmp_path: Path
) -> None:
    found = list(predict_files(served, [tmp_path / "photos"], batch_size=4, pictures=5))
    assert [each.name for each in found] == [str(tmp_path / "photos" / name) for name in photos]
    pixels = np.stack(list(photos.values()))
    expected = served.model.predict(as_inputs(pixels)).numpy()
    order = np.argsort(-expected.probs, axis=1)
    for row, each in enumerate(found):
        best, second = order[row, :2]
        assert (each.label, each.given) == (NAMES[best], None)
        assert [label for label, _ in each.top] == [NAMES[best], NAMES[second]]
        assert [p for _, p in each.top] == pytest.approx(expected.probs[row, [best, second]], abs=1e-5)
        assert each.confidence == each.top[0][1]
        for name in ("data_uncertainty", "model_uncertainty", "ood_score"):
            assert getattr(each, name) == pytest.approx(getattr(expected, name)[row], abs=1e-4)
        assert (each.pixels is None) == (row == 5)
        if each.pixels is not None:
            assert np.array_equal(each.pixels.permute(1, 2, 0).numpy(), pixels[row])
    assert [each.label for each in found[:5]] == ["red", "green", "blue", "red", "green"]
    assert found[5].verdict == "unfamiliar"


def test_files_come_in_the_order_they_are_named(
    served: ServedModel, photos: dict[str, np.ndarray], tmp_path: Path
) -> None:
    folder = tmp_path / "photos"
    given = [folder / "strange.png", str(folder / "b"), folder / "strange.png"]
    names = [Path(each.name).name for each in predict_files(served, given)]
    assert names == ["strange.png", "1.png", "10.png", "2.png", "strange.png"]
    (only,) = predict_files(served, str(folder / "a.png"))
    assert Path(only.name).name == "a.png"


def test_a_file_that_is_no_image_is_named_before_its_batch(
    served: ServedModel, photos: dict[str, np.ndarray], tmp_path: Path
) -> None:
    folder = tmp_path / "photos"
    files = [folder / "a.png", folder / "B.png", folder / "b/1.png", folder / "notes.txt"]
    lines = predict_files(served, files, batch_size=2)
    assert [next(lines).label, next(lines).label] == ["green", "red"]
    with pytest.raises(ValueError, match=r"notes\.txt cannot be read as an image"):
        next(lines)


@pytest.mark.parametrize(
    ("sources", "options"),
    [([], {"texts": ["a text"]}), (["a.csv"], {}), (["photos"], {"column": "body"})],
)
def test_texts_for_a_model_of_images_are_named(
    served: ServedModel, sources: list[str], options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="takes images, and these are texts: give image files"):
        predict_and_show(served, sources, **options)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["photos/a.png", "photos/nothing.png"], r"there is no file .*nothing\.png"),
        (["photos/a.png", "empty"], "empty has no images"),
        ([], "nothing to predict"),
    ],
)
def test_paths_are_looked_for_before_anything_is_predicted(
    files: list[str], words: str, served: ServedModel, photos: dict[str, np.ndarray], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises((FileNotFoundError, ValueError), match=words):
        predict_files(served, [tmp_path / file for file in files])


# --- sets -----------------------------------------------------------------------------------------------


def test_lines_of_a_set_have_their_labels(served: ServedModel, tmp_path: Path) -> None:
    pixels, labels = coloured(7, seed=4)
    labels[1] = 0  # the second is green, and was given as red
    file = tmp_path / "some.npz"
    np.savez(
        file,
        x_train=pixels,
        y_train=labels,
        x_test=pixels,
        y_test=labels,
        class_names=["rot", "grün", "blau"],
    )
    found = list(predict_set(served, str(file), batch_size=3, pictures=4))
    assert [each.name for each in found] == [f"{file}[{row}]" for row in range(7)]
    assert [each.given for each in found] == ["rot", "rot", "blau", "rot", "grün", "blau", "rot"]
    assert [each.label for each in found] == ["red", "green", "blue", "red", "green", "blue", "red"]
    assert [each.pixels is not None for each in found] == [True] * 4 + [False] * 3
    some = list(predict_set(served, str(file), limit=3))
    assert [each.name for each in some] == [f"{file}[{row}]" for row in (0, 2, 4)]
    assert [(each.label, each.given) for each in some] == [
        ("red", "rot"),
        ("blue", "blau"),
        ("green", "grün"),
    ]
    with pytest.raises(ValueError, match="limit must be a positive whole number"):
        predict_set(served, str(file), limit=0)


def test_sets_of_files_are_called_by_their_files(
    served: ServedModel, photos: dict[str, np.ndarray], tmp_path: Path
) -> None:
    for name in ("cats/1.png", "dogs/1.png", "dogs/2.png"):
        write_image(tmp_path / "set" / name, photos["a.png"])
    found = list(predict_set(served, str(tmp_path / "set")))
    assert [each.given for each in found] == ["cats", "dogs", "dogs"]
    assert found[2].name == str(tmp_path / "set" / "dogs" / "2.png")
    alone = predict_set(served, str(tmp_path / "set" / "dogs"))  # images alone have no label
    assert [each.given for each in alone] == [None, None]


def test_a_set_by_name(
    served: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Images of another size than the model's are refused, and the error says so."""
    make_cifar_small(monkeypatch)
    write_cifar10(tmp_path / "data")
    monkeypatch.setenv("HETSNGP_DATA", str(tmp_path / "data"))
    with pytest.raises(ValueError, match=r"\(3, 32, 32\).*\(3, 8, 8\)"):
        predict_set(served, "cifar10")
    larger = ServedModel(
        served.model,
        Preprocessing((32, 32), MEAN, STD, NAMES),
        served.thresholds,
        served.folder,
        served.about,
    )
    predict_and_show(larger, ["cifar10"], limit=5)
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split() == ["file", "label", "given", "confidence", "data", "model", "verdict"]
    assert [row.split()[0] for row in rows[1:]] == [f"cifar10[{row}]" for row in (0, 2, 4, 6, 8)]


# --- text and JSON --------------------------------------------------------------------------------------


def test_columns_are_aligned_and_stream() -> None:
    asked = []

    def records() -> Iterator[PredictionRecord]:
        for name in ("a.jpg", "b.jpg", "a much longer name.jpg", "c.jpg"):
            asked.append(name)
            yield record(name, label="an owl of a name that is far too long" if name == "b.jpg" else "cat")

    text = as_text(records(), block=2)
    assert next(text) == "file   label                         confidence   data  model  verdict"
    assert asked == ["a.jpg", "b.jpg"]  # two were waited for, and no more
    rest = list(text)
    assert rest[0] == "a.jpg  cat                                0.875  0.250  0.062  confident"
    assert rest[1] == "b.jpg  an owl of a name that is fa…       0.875  0.250  0.062  confident"
    ends = [row.index("0.875") for row in rest]
    assert ends[0] == ends[1] < ends[2] == ends[3]  # columns get wider where they must


def test_the_label_that_was_given_has_a_column() -> None:
    rows = list(as_text([record(given="dog"), record("b.jpg", "ambiguous", given="cat")]))
    assert rows[0].split() == ["file", "label", "given", "confidence", "data", "model", "verdict"]
    assert rows[2] == "b.jpg  cat    cat         0.875  0.250  0.062  ambiguous (cat or dog)"


def test_labels_that_first_appear_in_a_later_block_have_a_column_as_wide_as_its_heading() -> None:
    rows = list(as_text([record(), record(given="owl"), record(given="a longer one"), record()], block=1))
    assert rows[:2] == list(as_text([record()]))
    assert rows[2] == "a.jpg  cat    owl         0.875  0.250  0.062  confident"
    assert rows[3] == "a.jpg  cat    a longer one       0.875  0.250  0.062  confident"
    assert rows[4] == "a.jpg  cat                       0.875  0.250  0.062  confident"


def test_odd_names_stay_on_one_line_and_can_be_printed() -> None:
    odd = os.fsdecode(b"a\nb\xff\t.jpg")
    (heading, row) = as_text([record(odd)])
    assert heading.startswith("file")
    assert row.startswith(r"a\nb\udcff\t.jpg  cat")
    row.encode("utf-8")
    assert json.loads(as_json(record(odd)))["name"] == odd


def test_json_is_strict_and_complete() -> None:
    text = as_json(
        record(kind="ambiguous", given="dog", ood_score=math.inf, confidence=float(np.float32(0.1)))
    )
    assert "\n" not in text

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert json.loads(text, parse_constant=refuse) == {
        "name": "a.jpg",
        "label": "cat",
        "confidence": 0.1,
        "data_uncertainty": 0.25,
        "model_uncertainty": 0.0625,
        "ood_score": None,
        "verdict": "ambiguous",
        "text": "ambiguous (cat or dog)",
        "top": [{"label": "cat", "probability": 0.875}, {"label": "dog", "probability": 0.125}],
        "given": "dog",
    }


def test_predict_and_show(
    served: ServedModel, photos: dict[str, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files, a set and files again: JSON alone on stdout, and a contact sheet of all."""
    folder, file = tmp_path / "photos", tmp_path / "some.npz"
    pixels, labels = coloured(3, seed=4)
    np.savez(file, x_test=pixels, y_test=labels, x_train=pixels, y_train=labels)
    sources = [str(folder / "a.png"), str(folder / "b"), str(file), str(folder / "strange.png")]
    predict_and_show(served, sources, as_json=True, contact_sheet=tmp_path / "sheet.png", batch_size=2)
    out, err = capsys.readouterr()
    found = [json.loads(row) for row in out.splitlines()]
    assert [Path(each["name"]).name for each in found] == [
        *("a.png", "1.png", "10.png", "2.png"),
        *("some.npz[0]", "some.npz[1]", "some.npz[2]", "strange.png"),
    ]
    assert [each["given"] for each in found] == [None] * 4 + ["0", "1", "2"] + [None]
    assert err.split() == ["contact", "sheet:", str(tmp_path / "sheet.png")]
    assert Image.open(tmp_path / "sheet.png").format == "PNG"


def test_a_limit_is_of_each_source(
    served: ServedModel, photos: dict[str, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit holds for each set, each folder, and all files given one by one."""
    folder, file = tmp_path / "photos", tmp_path / "some.npz"
    pixels, labels = coloured(3, seed=4)
    np.savez(file, x_test=pixels, y_test=labels)
    named = [str(folder / name) for name in photos]
    sources = [named[0], str(folder / "b"), str(file), *named[1:], str(folder)]

    def names(limit: int | None) -> list[str]:
        predict_and_show(served, sources, as_json=True, limit=limit)
        rows = capsys.readouterr().out.splitlines()
        return [os.path.relpath(json.loads(row)["name"], tmp_path) for row in rows]

    assert names(2) == [
        *("photos/B.png", "photos/b/1.png", "photos/b/10.png", "some.npz[0]", "some.npz[1]"),
        *("photos/a.png", "photos/B.png", "photos/a.png"),
    ]
    assert len(names(None)) == 1 + 3 + 3 + 5 + 6
    with pytest.raises(FileNotFoundError, match="there is no file"):  # though it would be left out
        predict_and_show(served, [*named[:2], "nothing.png"], limit=1)


def test_words_that_no_input_gets_are_said_beside_the_lines(
    served: ServedModel, photos: dict[str, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def notes(**thresholds: Any) -> list[str]:
        other = dataclasses.replace(served, thresholds=dataclasses.replace(served.thresholds, **thresholds))
        predict_and_show(other, [str(tmp_path / "photos" / "a.png")], as_json=True)
        out, err = capsys.readouterr()
        assert len(out.splitlines()) == 1
        assert json.loads(out)["verdict"] in ("confident", "ambiguous", "unfamiliar")
        return err.splitlines()

    assert notes() == []
    needed = "20 held-out examples, 95% of them classified correctly"
    confident = f"note: no input is called confident: this needs {needed}"
    assert notes(confident=None, accuracy=None) == [confident]
    assert notes(unfamiliar=None) == [
        "note: no input is called unfamiliar: this model has no model uncertainty to tell by"
    ]
    few = "note: no input is called unfamiliar: this needs 19 held-out examples"
    assert notes(unfamiliar=None, held_out=19)[0] != few
    assert notes(confident=None, unfamiliar=None, held_out=18) == [confident, few]
    assert "set to 0" in notes(unfamiliar=None, share=0.0)[0]


def test_what_is_wrong_is_said_before_anything_is_printed(
    served: ServedModel, photos: dict[str, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = str(tmp_path / "photos" / "a.png")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        predict_and_show(served, [image, "nothing.png"])
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*create it first"):
        predict_and_show(served, [image], contact_sheet=tmp_path / "no" / "sheet.png")
    assert capsys.readouterr().out == ""


# --- contact sheet ------------------------------------------------------------------------------------------


def shown(file: Path, colour: str) -> int:
    """Pixels of that colour in a PNG file."""
    pixels = np.asarray(Image.open(file).convert("RGB")).astype(int)
    wanted = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)])
    return int((np.abs(pixels - wanted).max(-1) <= 2).sum())


def test_a_sheet_shows_the_images_in_frames_of_their_verdicts(tmp_path: Path) -> None:
    """Frames have as many pixels whatever their colour, and the pictures are of no frame's."""
    kinds = ["confident", "ambiguous", "ambiguous", "unfamiliar", "unfamiliar", "unfamiliar"]
    lines = [record(f"photos/{i}.jpg", kind, given="dog" if i else None) for i, kind in enumerate(kinds)]
    images = torch.zeros(6, 3, 4, 4, dtype=torch.uint8)
    images[:, 1] = 200
    draw_contact_sheet(lines, images, tmp_path / "sheet.png")
    frames = [shown(tmp_path / "sheet.png", colour) for colour in ("#0072B2", "#E69F00", "#D00000")]
    assert frames[0] > 300
    # beside the frame there is a patch in the legend, the same for each
    assert frames[1] - frames[0] == pytest.approx(frames[2] - frames[1], rel=0.2)
    assert shown(tmp_path / "sheet.png", "#00C800") > 6 * 5000
    draw_contact_sheet(lines[:1], images[:1, :1] + 128, tmp_path / "grey.png")
    assert shown(tmp_path / "grey.png", "#808080") > 5000


def test_a_sheet_has_at_most_64_pictures(tmp_path: Path) -> None:
    images = torch.zeros(70, 3, 2, 2, dtype=torch.uint8)
    images[:64, 0], images[64:, 2] = 255, 255
    draw_contact_sheet([record()] * 70, images, tmp_path / "sheet.png")
    assert shown(tmp_path / "sheet.png", "#FF0000") > 64 * 4000
    assert shown(tmp_path / "sheet.png", "#0000FF") == 0


def test_images_that_do_not_fit_the_lines(tmp_path: Path) -> None:
    image = torch.zeros(3, 4, 4, dtype=torch.uint8)
    for lines, images in (([], []), ([record()], []), ([record()], [image, image])):
        with pytest.raises(ValueError, match="give one image for each record"):
            draw_contact_sheet(lines, images, tmp_path / "sheet.png")
    for odd in (image.float(), image[0], torch.zeros(2, 4, 4, dtype=torch.uint8)):
        with pytest.raises(ValueError, match=r"\(C, H, W\) uint8"):
            draw_contact_sheet([record()], [odd], tmp_path / "sheet.png")
    assert not list(tmp_path.iterdir())
