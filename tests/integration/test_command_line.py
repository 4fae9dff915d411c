"""Train, evaluate and predict by the command line, from images on disk to a verdict on each."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.cli.test_cli import SMALL, invoke, refused
from tests.unit.small_sets import write_image

import hetsngp
from hetsngp.files import with_checksum
from hetsngp.nn.backbones import WideResNet
from hetsngp.training.images import finished

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("lightning")
SRC = Path(__file__).parents[2] / "src"
COLOURS = {"blue": (40, 60, 200), "green": (40, 180, 60), "red": (210, 50, 40)}


def painted(name: str, seed: int, size: tuple[int, int] = (18, 14)) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(0, 25, (*size, 3))
    return np.clip(np.array(COLOURS[name]) + noise, 0, 255).astype(np.uint8)


def strict(text: str) -> list[dict[str, Any]]:
    """One object of JSON a line, without NaN."""

    def no(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=no) for line in text.splitlines()]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of PNG files, arrays of the same colours, and a finished run of each."""
    home = tmp_path_factory.mktemp("home")
    for split, count, first in (("train", 30, 0), ("test", 6, 500)):
        for place, name in enumerate(COLOURS):
            for number in range(count):
                file = home / "photos" / split / name / f"{number}.png"
                write_image(file, painted(name, first + 100 * place + number))
    arrays: dict[str, np.ndarray] = {"class_names": np.array(list(COLOURS))}
    for split, count, first in (("train", 60, 1000), ("test", 9, 2000)):
        names = [list(COLOURS)[number % 3] for number in range(count)]
        pictures = [painted(name, first + number, (8, 8)) for number, name in enumerate(names)]
        arrays |= {f"x_{split}": np.stack(pictures), f"y_{split}": np.arange(count) % 3}
    np.savez(home / "arrays.npz", **arrays)
    (home / "small.toml").write_text(f"data = '{home / 'arrays.npz'}'\n{SMALL}")
    files = (f"data={home / 'photos'}", "size=10", "resize=12", "held_out=0.3", "batch_size=9")
    for name, changes in (("arrays", ()), ("files", (*files, "schedule.lr=0.01"))):
        given = [word for change in changes for word in ("--set", change)]
        done = invoke("train", home / "small.toml", "--out", home / name, *given)
        assert done.exit_code == 0, done.output
        assert f"next: hetsngp evaluate {home / name}" in done.output
    return home


def inputs_of(run: Path) -> dict[str, Any]:
    described: dict[str, Any] = json.loads((run / "model" / "serving.json").read_text())["inputs"]
    return described


def prediction(run: Path, pixels: np.ndarray) -> hetsngp.Prediction:
    """Prediction for (n, H, W, 3) bytes by NumPy and the model alone."""
    inputs = inputs_of(run)
    x = (pixels / 255 - np.array(inputs["mean"])) / np.array(inputs["std"])
    return hetsngp.load(run / "model").predict(torch.from_numpy(x).permute(0, 3, 1, 2).float())


def check(lines: list[dict[str, Any]], found: hetsngp.Prediction, classes: list[str]) -> None:
    """Compare the printed numbers with the prediction of the model."""
    assert [line["label"] for line in lines] == [classes[k] for k in found.probs.argmax(1)]
    for name in ("confidence", "data_uncertainty", "model_uncertainty", "ood_score"):
        numbers = torch.tensor([line[name] for line in lines])
        assert torch.allclose(numbers, getattr(found, name), rtol=1e-3, atol=1e-5), name
    second = found.probs.sort(1, descending=True)
    for row, line in enumerate(lines):
        assert [pair["label"] for pair in line["top"]] == [classes[k] for k in second.indices[row, :2]]
        assert line["top"][0]["probability"] == pytest.approx(line["confidence"])
        assert line["verdict"] in ("confident", "ambiguous", "unfamiliar")


# --- train, predict, evaluate ---------------------------------------------------------------------------


def test_files_are_predicted_as_the_model_predicts_their_pixels(home: Path) -> None:
    run, classes = home / "files", list(COLOURS)
    assert inputs_of(run)["size"] == [10, 10]
    assert inputs_of(run)["resize"] == 12
    assert inputs_of(run)["class_names"] == classes
    folder = home / "photos" / "test"
    result = invoke("predict", run, folder, home / "photos" / "train" / "red" / "3.png", "--json")
    assert result.exit_code == 0, result.output
    lines = strict(result.stdout)
    files = [folder / name / f"{number}.png" for name in COLOURS for number in range(6)]
    files.append(home / "photos" / "train" / "red" / "3.png")
    assert [line["name"] for line in lines] == list(map(str, files))
    shown = []
    for file in files:  # short side 14 → 12, long side 18 → 15, of both the middle 10
        with Image.open(file) as picture:
            made = picture.convert("RGB").resize((12, 15), Image.Resampling.BILINEAR)
        shown.append(np.array(made)[2:12, 1:11])
    check(lines, prediction(run, np.stack(shown)), classes)
    summary = finished(run)
    assert summary is not None
    assert summary["test"]["accuracy"] > 0.9
    correct = [line["label"] == Path(line["name"]).parent.name for line in lines[:-1]]
    assert np.mean(correct) == pytest.approx(summary["test"]["accuracy"])
    text = invoke("predict", run, folder, "--limit", 2).stdout.splitlines()
    assert len(text) == 3
    assert text[0].split() == ["file", "label", "confidence", "data", "model", "verdict"]
    assert text[1].startswith(str(files[0]))


def test_arrays_are_predicted_with_their_labels(home: Path) -> None:
    result = invoke("predict", home / "arrays", home / "arrays.npz", "--json", "--batch-size", 4)
    with np.load(home / "arrays.npz") as arrays:
        pixels, y = arrays["x_test"], arrays["y_test"]
    lines = strict(result.stdout)
    check(lines, prediction(home / "arrays", pixels), list(COLOURS))
    assert [line["given"] for line in lines] == [list(COLOURS)[k] for k in y]
    assert [line["name"] for line in lines] == [f"{home / 'arrays.npz'}[{row}]" for row in range(9)]


@pytest.mark.filterwarnings("ignore:no frost overlays:UserWarning")
def test_evaluate_on_all_kinds_of_sets(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETSNGP_DATA", raising=False)
    for number in range(4):
        write_image(tmp_path / "far" / f"{number}.png", np.full((20, 20, 3), 60 * number, np.uint8))
    asked = ["evaluate", home / "files", "--corrupted", "made", "--limit", "3", "--quick"]
    asked += ["--out", tmp_path / "out"]
    result = invoke(*asked, "--ood", f"grey={tmp_path / 'far'}")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["id"]["examples"] == 3
    assert report["ood"]["grey"]["examples"] == 3
    assert len(report["corrupted"]["sets"]) == 14 * 5
    assert "HetSNGP (small) on photos" in result.stdout
    parts = {file: file.stat().st_mtime_ns for file in (tmp_path / "out" / "parts").iterdir()}
    assert len(parts) == 1 + 1 + 70
    assert invoke(*asked).exit_code == 0
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "out" / "parts").iterdir()} == parts


def test_evaluate_where_it_belongs_and_on_some_of_the_classes(home: Path, tmp_path: Path) -> None:
    result = invoke("evaluate", home / "files")
    assert f"wrote {home / 'files' / 'evaluation' / 'report.md'}" in result.stdout
    report = json.loads((home / "files" / "evaluation" / "report.json").read_text())
    summary = finished(home / "files")
    assert summary is not None
    assert report["id"]["examples"] == 18
    assert report["id"]["accuracy"] == pytest.approx(summary["test"]["accuracy"])
    assert report["id"]["nll"] == pytest.approx(summary["test"]["nll"], rel=1e-3)
    shutil.copytree(home / "photos" / "test", tmp_path / "two")
    shutil.rmtree(tmp_path / "two" / "green")
    result = invoke("evaluate", home / "files", "--data", tmp_path / "two")
    assert result.exit_code == 0, result.output
    report = json.loads((home / "files" / "evaluation-two" / "report.json").read_text())
    assert (report["num_classes"], report["id"]["examples"]) == (2, 12)
    assert report["id"]["accuracy"] > 0.9


# --- errors ---------------------------------------------------------------------------------------------


def edited(*keys: str, value: Any) -> Callable[[Path], None]:
    """serving.json with another value and its checksum."""

    def edit(model: Path) -> None:
        content = json.loads((model / "serving.json").read_text())
        place = functools.reduce(lambda inner, key: inner[key], keys[:-1], content)
        place[keys[-1]] = value
        (model / "serving.json").write_text(json.dumps(with_checksum(content)))

    return edit


def flip_a_bit(model: Path) -> None:
    (file,) = model.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def put_another(model: Path) -> None:
    hetsngp.save(hetsngp.build("deterministic", WideResNet(10, 1), 3), model)


def written(name: str, content: bytes) -> Callable[[Path], None]:
    def write(model: Path) -> None:
        (model / name).write_bytes(content)

    return write


def empty(model: Path) -> None:
    shutil.rmtree(model.parent)
    model.parent.mkdir()


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no model": (shutil.rmtree, "is not finished"),
    "nothing": (empty, "is not a run"),
    "no run": (lambda model: shutil.rmtree(model.parent), "there is no run"),
    "config cut": (written("config.json", b'{"a'), "is not a JSON file"),
    "config empty": (written("config.json", b"{}"), "was not written by"),
    "weights damaged": (flip_a_bit, "is damaged or was replaced"),
    "weights gone": (lambda model: next(model.glob("*.safetensors")).unlink(), "is missing"),
    "other weights": (put_another, "belongs to other weights"),
    "serving gone": (lambda model: (model / "serving.json").unlink(), "is missing"),
    "serving cut": (written("serving.json", b"[1"), "is not a JSON file"),
    "serving bytes": (written("serving.json", b"\xff"), "is not a JSON file"),
    "version": (edited("version", value=9), "has version 9"),
    "inputs": (edited("inputs", value=None), "is damaged"),
    "size": (edited("inputs", "size", value=[8]), "is damaged"),
    "mean": (edited("inputs", "mean", value=[10**400] * 3), "is damaged"),
    "names": (edited("inputs", "class_names", value=["a", "b"]), "is damaged"),
    "thresholds": (edited("thresholds", value={}), "is damaged"),
    "right": (edited("thresholds", "right", value=10**400), ""),
    "about": (edited("about", value=3), "is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_runs(home: Path, tmp_path: Path, damage: str) -> None:
    act, words = DAMAGES[damage]
    run = tmp_path / "run"
    shutil.copytree(home / "arrays", run, ignore=shutil.ignore_patterns("evaluation*", "logs"))
    act(run / "model")
    refused(invoke("predict", run, home / "arrays.npz"), words)
    refused(invoke("evaluate", run), words)
    assert not (run / "evaluation").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["predict", "RUN", "gone.png"], "there is no file gone.png"),
        (["predict", "RUN", "no.png"], "no.png cannot be read as an image"),
        (["predict", "RUN", "empty"], "empty has no images"),
        (["predict", "RUN", "cifar10"], "HETSNGP_DATA"),
        (["predict", "RUN", "gone.npz"], "there is no file gone.npz"),
        (["predict", "RUN", "no.png", "--limit", "0"], "--limit"),
        (["predict", "RUN", "no.png", "--device", "cuda:9"], "there is no device 'cuda:9' here"),
        (["predict", "RUN", "no.png", "--device", "gpu"], "there is no device 'gpu' here"),
        (["predict", "no.png", "no.png"], "no.png is a file: give the folder of the run"),
        (["predict", "RUN", "no.png", "--sheet", "gone/a.png"], "there is no folder gone"),
        (["evaluate", "RUN", "--ood", "near=gone"], "cannot open images 'gone'"),
        (["evaluate", "RUN", "--ood", "near=empty"], "empty has no images"),
        (["evaluate", "RUN", "--ood", "a=cifar10", "--ood", "a=svhn"], "the name 'a' twice"),
        (["evaluate", "RUN", "--ood", "a="], "--ood takes NAME=SET"),
        (["evaluate", "RUN", "--ood", "svhn"], "HETSNGP_DATA"),
        (["evaluate", "RUN", "--corrupted", "cifar-10-c"], "did you mean 'cifar10-c'?"),
        (["evaluate", "RUN", "--corrupted", "imagenet-c"], "HETSNGP_DATA"),
        (["evaluate", "RUN", "--data", "gone"], "cannot open images 'gone'"),
        (["evaluate", "RUN", "--data", "flat"], "no class of flat, such as 'unlabelled'"),
        (["evaluate", "RUN", "--limit", "0"], "--limit"),
        (["evaluate", "RUN", "--device", "cuda:9"], "there is no device 'cuda:9' here"),
        (["evaluate", "RUN", "--out", "no.png"], "--out"),
        (["evaluate", "RUN", "--out", "no.png/deeper"], "no.png"),
    ],
)
def test_mistakes(
    home: Path, tmp_path: Path, arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HETSNGP_DATA", raising=False)
    (tmp_path / "no.png").write_text("no picture")
    (tmp_path / "empty").mkdir()
    write_image(tmp_path / "flat" / "a.png", painted("red", 0))
    refused(invoke(*(home / "arrays" if word == "RUN" else word for word in arguments)), words)


# --- as a process ---------------------------------------------------------------------------------------


def start(*arguments: object, **more: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
    # A suite that was started in the background of a shell has interrupts ignored, and so would its children.
    pipes["preexec_fn"] = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen([sys.executable, "-m", "hetsngp", *map(str, arguments)], **pipes, **more)


@pytest.mark.slow
def test_an_interrupted_training_says_so_and_goes_on(home: Path, tmp_path: Path) -> None:
    command = ["train", home / "small.toml", "--out", tmp_path / "run"]
    long = ["--set", "schedule.epochs=100000"]
    process = start(*command, *long)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("epoch 1/100000")
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, error
    lines = [line for line in error.splitlines() if line.startswith("hetsngp: ")]
    assert lines == ["hetsngp: stopped; run the same command again to resume"]
    assert "Traceback" not in error
    assert finished(tmp_path / "run") is None
    refused(invoke("evaluate", tmp_path / "run"), "run")
    done = invoke(*command, *long, "--set", "schedule.stop_after=1", "--changed")
    assert done.exit_code == 0, done.output
    assert finished(tmp_path / "run") is not None


def test_a_reader_may_close_the_pipe(home: Path) -> None:
    """A reader such as ``| head -1`` closes it early."""
    sources = [home / "photos" / "train"] * 40
    process = start("predict", home / "files", *sources, "--batch-size", 1)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().split()[:2] == ["file", "label"]
        process.stdout.close()
        assert process.stderr is not None
        error = process.stderr.read()
        code = process.wait(60)
    finally:
        process.kill()
    assert code in (0, 1)
    assert error == ""
