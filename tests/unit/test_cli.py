"""The command line: what it takes, what it refuses and how it says so."""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import hetsngp
from hetsngp import cli
from hetsngp.data.synthetic import Points, SyntheticTask, make_task
from hetsngp.evaluation import synthetic
from hetsngp.evaluation.synthetic import RECIPES, Recipe

SRC = Path(__file__).parents[2] / "src"


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(cli.make_app(), list(arguments))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    def task(name: str, seed: int, label_noise: float = 0.0) -> SyntheticTask:
        whole = make_task(name, seed, label_noise)
        test = Points(whole.test.x[::20], whole.test.y[::20], whole.test.clean[::20])
        return dataclasses.replace(whole, test=test, ood_directions=whole.ood_directions[:, :2])

    monkeypatch.setattr(synthetic, "make_task", task)
    monkeypatch.setattr(synthetic, "GRID", 8)
    for name in RECIPES:
        monkeypatch.setitem(RECIPES, name, Recipe(width=8, depth=1, epochs=3, random_features=16))


@pytest.mark.usefixtures("small")
def test_demo_trains_what_was_asked_for(tmp_path: Path) -> None:
    arguments = ["demo", "--tasks", "two_moons", "--methods", "sngp, deterministic", "--jobs", "1"]
    result = invoke(
        *arguments, "--seed", "2", "--label-noise", "0.2", "--epochs", "1", "--out", str(tmp_path)
    )
    assert result.exit_code == 0, result.output
    assert "20 % of labels flipped in two moons" in result.output
    results = json.loads((tmp_path / "results.json").read_text())
    settings = [run["settings"] for run in results["runs"]]
    assert [s["method"] for s in settings] == ["sngp", "deterministic"]
    assert {(s["task"], s["seed"], s["label_noise"]) for s in settings} == {("two_moons", 2, 0.2)}
    assert {s["recipe"]["epochs"] for s in settings} == {1}
    again = invoke(*arguments, "--seed", "2", "--label-noise", "0.2", "--epochs", "1", "--out", str(tmp_path))
    assert "2 of 2 runs" in again.output
    assert "skipped" in again.output


def test_version_and_help() -> None:
    assert invoke("--version").output.strip() == f"hetsngp {hetsngp.__version__}"
    text = invoke("demo", "--help").output
    for option in ("methods", "tasks", "seeds", "seed", "out", "label-noise", "jobs", "epochs"):
        assert f"--{option}" in text
    assert "demo" in invoke("--help").output  # a subcommand though it is the only one


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "hetsnpg"], "did you mean 'hetsngp'?"),
        (["--methods", ","], "name at least one"),
        (["--tasks", "three_moons"], "did you mean 'two_moons'?"),
        (["--seeds", "0"], "--seeds"),
        (["--jobs", "0"], "--jobs"),
        (["--epochs", "0"], "--epochs"),
        (["--label-noise", "0.5"], "below 0.5"),
        (["--label-noise", "0.2", "--tasks", "noisy_circles"], "noise of its own"),
        (["--out", __file__], "--out"),
        (["--out", f"{__file__}/deeper"], "cannot make the folder"),
    ],
)
def test_bad_input_is_named_and_exits_with_2(arguments: list[str], message: str) -> None:
    result = invoke("demo", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_all_means_every_method() -> None:
    assert cli._chosen("method", "all", ("a", "b")) == ("a", "b")
    assert cli._chosen("method", "b,a,b", ("a", "b")) == ("b", "a")


@pytest.mark.parametrize("name", cli.NEEDS)
def test_a_missing_package_names_the_extra(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *rest: None if n == name else find(n, *rest))
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 1
    assert capsys.readouterr().err == f"the command line needs {name}: pip install 'hetsngp[cli]'\n"


def test_the_cli_imports_without_its_packages(tmp_path: Path) -> None:
    """Else the message about them could not be given."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({cli.NEEDS!r})); "
    code = hide + "import hetsngp.cli, hetsngp.evaluation.demo"
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True)


def test_python_m_hetsngp_and_its_processes_stop_when_told(tmp_path: Path) -> None:
    """Ctrl-C with two workers: an exit code of 130, what to do next, and nobody left behind."""
    env = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    arguments = ["demo", "--jobs", "2", "--tasks", "two_moons", "--epochs", "100000", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "hetsngp", *arguments]
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # A suite that was started in the background of a shell has interrupts ignored, and so would its children.
    pipe["preexec_fn"] = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, cwd=tmp_path, env=env, start_new_session=True, **pipe)
    try:
        wait_until(lambda: len(group(process.pid)) >= 4)  # parent, tracker, two workers
        time.sleep(1)
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130, output
        assert "the same command goes on" in " ".join(output.split())
        assert "Traceback" not in output
        wait_until(lambda: not group(process.pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def group(leader: int) -> list[int]:
    """Processes of the group, as /proc has them."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[2]) == leader and fields[0] != "Z":
            members.append(int(stat.parent.name))
    return members


# --- train ----------------------------------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Dark and bright ones, with a little noise."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 100), ("test", 31)):
        y = np.arange(count) % 2
        arrays[f"x_{split}"] = (rng.integers(0, 100, (count, 8, 8, 3)) + 100 * y[:, None, None, None]).astype(
            "uint8"
        )
        arrays[f"y_{split}"] = y
    np.savez(tmp_path / "pictures.npz", **arrays)
    return tmp_path / "pictures.npz"


def train(*arguments: object) -> Any:
    small = ("--network", "wrn-10-1", "--batch-size", "30", "--epochs", "3", "--accelerator", "cpu")
    return invoke("train", *small, *map(str, arguments))


def test_train_makes_a_model_and_goes_on(pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = ["--average", "0.9", "--patience", "3", "--decay", "step", "--milestones", "1,2"]
    result = train(pictures, "--out", out, *settings)
    assert result.exit_code == 0, result.output
    summary = json.loads((out / "summary.json").read_text())
    assert summary["test"]["examples"] == 31
    assert summary["test"]["accuracy"] > 0.9
    assert summary["plan"]["schedule"]["milestones"] == [1, 2]
    assert f"test: accuracy {summary['test']['accuracy']:.4f}" in result.output
    model = hetsngp.load(out / "model")
    with np.load(pictures) as arrays:
        x = torch.from_numpy(arrays["x_test"]).permute(0, 3, 1, 2).float()
    scale = x.mean() / 255, x.std() / 255  # near those of the training images
    assert model.predict((x / 255 - scale[0]) / scale[1]).probs.shape == (31, 2)
    assert len((out / "metrics.csv").read_text().splitlines()) == 4
    with Image.open(out / "curves.png") as picture:
        assert min(picture.size) > 300

    weights = (out / "checkpoint" / "config.json").read_text()
    again = train(pictures, "--out", out, *settings)
    assert again.exit_code == 0, again.output
    assert "epoch" not in again.output  # nothing was left to train
    assert (out / "checkpoint" / "config.json").read_text() == weights
    assert json.loads((out / "summary.json").read_text())["test"] == summary["test"]

    other = train(pictures, "--out", out, "--lr", "0.01")
    assert other.exit_code == 2
    assert "another plan" in other.output
    assert "lr 0.1, now 0.01" in other.output
    for option, value in (("--held-out", "0.3"), ("--batch-size", "20"), ("--method", "sngp")):
        other = train(pictures, "--out", out, *settings, option, value, "--changed")
        assert other.exit_code == 2
        assert "holds a run on other data" in other.output


@pytest.mark.slow
def test_train_starts_its_own_processes(pictures: Path, tmp_path: Path) -> None:
    """Each runs the same command; one of them prints and writes."""
    command = [sys.executable, "-m", "hetsngp", "train", str(pictures), "--out", str(tmp_path / "run")]
    command += ["--network", "wrn-10-1", "--batch-size", "30", "--epochs", "1", "--accelerator", "cpu"]
    env = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    command += ["--devices", "2", "--strategy", "ddp"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test: accuracy") == 1
    assert "All distributed processes registered. Starting with 2 processes" in done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["test"]["examples"] == 31


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "cannot open images 'nowhere'"),
        (["PICTURES", "--network", "resnet9000"], "unknown network 'resnet9000'"),
        (["PICTURES", "--method", "hetsgnp"], "did you mean 'hetsngp'"),
        (["PICTURES", "--strategy", "dpp"], "did you mean 'ddp'"),
        (["PICTURES", "--precision", "bf16"], "bf16-mixed"),
        (["PICTURES", "--held-out", "2"], "share between 0 and 1"),
        (["PICTURES", "--decay", "step"], "milestones"),
        (["PICTURES", "--milestones", "a,b"], "--milestones takes numbers"),
        (["PICTURES", "--devices", "two"], "--devices takes a whole number"),
        (["PICTURES", "--batch-size", "4000"], "smaller batch_size"),
        (["PICTURES", "--lr", "1e30"], "lower lr"),
        (["PICTURES", "--size", "8"], "is for image files"),
    ],
)
def test_train_says_what_is_wrong(arguments: list[str], words: str, pictures: Path, tmp_path: Path) -> None:
    given = [str(pictures) if a == "PICTURES" else a for a in arguments]
    result = train(*given, "--out", tmp_path / "run")
    assert result.exit_code == 2, result.output
    assert words in result.output
    assert "Traceback" not in result.output
