"""The command line: arguments, errors and messages."""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import re
import shlex
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
from hetsngp.cli import demo_command, reproduce_command, train_command
from hetsngp.data.datasets.registry import DATASETS
from hetsngp.data.datasets.synthetic import TASKS, LabelledPoints, SyntheticTask, make_task
from hetsngp.files import with_checksum
from hetsngp.models.methods import METHODS
from hetsngp.paper import TABLES
from hetsngp.paper.synthetic import experiment as synthetic
from hetsngp.paper.synthetic.experiment import SETTINGS, SyntheticSettings
from hetsngp.training import Engine
from hetsngp.training.images import finished
from hetsngp.training.recipes import recipe
from hetsngp.training.recipes.recipe import read_recipe, recipe_file, recipe_names

SRC = Path(__file__).parents[3] / "src"


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(cli.make_app(), list(map(str, arguments)))


def refused(result: Any, words: str) -> None:
    """Expect one line on stderr that begins with hetsngp, exit code 2 and no traceback."""
    try:
        error = result.stderr
    except ValueError:  # click before 8.2 has one stream for both
        error = result.output
    lines = [line for line in error.splitlines() if not line.startswith("warning: ")]
    assert result.exit_code == 2, (result.output, result.exception)
    assert len(lines) == 1, error
    assert lines[0].startswith("hetsngp: ")
    assert words in lines[0]
    assert "Traceback" not in result.output


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    def task(name: str, seed: int, label_noise: float = 0.0) -> SyntheticTask:
        whole = make_task(name, seed, label_noise)
        test = LabelledPoints(whole.test.x[::20], whole.test.y[::20], whole.test.clean[::20])
        return dataclasses.replace(whole, test=test, ood_directions=whole.ood_directions[:, :2])

    monkeypatch.setattr(synthetic, "make_task", task)
    monkeypatch.setattr(synthetic, "GRID", 8)
    for name in SETTINGS:
        monkeypatch.setitem(SETTINGS, name, SyntheticSettings(width=8, depth=1, epochs=3, random_features=16))


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
    text = invoke("--help").output
    assert all(re.search(rf"^  {name} ", text, re.MULTILINE) for name in cli.COMMANDS)
    bare = invoke()
    assert (bare.exit_code, bare.output) == (2, text)


def test_help_names_the_methods_tasks_and_tables_that_exist() -> None:
    """The command modules repeat these names so that help needs no torch."""
    assert tuple(METHODS) == demo_command.METHOD_NAMES
    assert tuple(TASKS) == demo_command.TASKS
    assert tuple(TABLES) == reproduce_command.TABLES


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], *([name, "--help"] for name in cli.COMMANDS)], ids=" ".join
)
def test_help_and_version_import_no_heavy_package(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('loaded:', *{name.partition('.')[0] for name in sys.modules}))\n"
        "sys.argv[0] = 'hetsngp'\n"
        "from hetsngp.cli import main\n"
        "main()\n"
    )
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    output, _, loaded = done.stdout.rpartition("loaded:")
    assert output.startswith("hetsngp " if arguments == ["--version"] else "Usage: hetsngp")
    assert "typer" in loaded.split()
    heavy = {"torch", "numpy", "matplotlib", "lightning", "lightning_fabric", "torchmetrics", "sklearn"}
    assert not heavy & set(loaded.split())


@pytest.mark.parametrize("command", [None, *cli.COMMANDS])
def test_every_help_has_an_example_that_would_run(command: str | None) -> None:
    """Its options are those of the command, and the recipes it names are there."""
    result = invoke(*([] if command is None else [command]), "--help")
    assert result.exit_code == 0, result.output
    text, _, example = " ".join(result.output.split()).partition("Example: ")
    assert example.startswith("hetsngp ")
    for called in re.split(r"^hetsngp |, then hetsngp ", example)[1:]:
        name, *words = shlex.split(called)
        assert name in (cli.COMMANDS if command is None else (command,))
        options = [word for word in words if word.startswith("--")]
        assert all(f" {option} " in text for option in options), options
        if name in ("train", "recipes"):
            changes = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
            read_recipe(words[0], changes)
        for place in (place for place, word in enumerate(words) if word in ("--ood", "--corrupted", "--far")):
            assert words[place + 1].rpartition("=")[2] in DATASETS


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "trian"),
        (["--verbose"], "--verbose"),
        (["train"], "RECIPE"),
        (["predict", "runs/a"], "FILE"),
        (["recipes", "cifar1000"], "did you mean 'cifar100'?"),
        (["data", "cifra10"], "did you mean 'cifar10'?"),
        (["reproduce", "cifar10"], "did you mean 'cifar100'?"),
        (["reproduce", "cifar100", "--set", "rank=3"], "did you mean 'options.rank'?"),
        (["reproduce", "cifar100", "--set", "schedule.epochs=few"], "schedule.epochs is a whole number"),
        (["reproduce", "cifar100", "--methods", "sgnp"], "did you mean 'sngp'?"),
        (["reproduce", "cifar100", "--seeds", "0"], "--seeds"),
        (["reproduce", "cifar100", "--out", __file__], "--out"),
        (["reproduce", "cifar100", "--out", "here"], "HETSNGP_DATA"),
    ],
)
def test_what_is_mistyped(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HETSNGP_DATA", raising=False)
    refused(invoke(*arguments), words)
    assert not list(tmp_path.rglob("*.json"))


def test_errors_of_our_own_show_where_they_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect is not made a line; a mistake is, unless --debug asks for more."""

    def fail(error: Exception) -> None:
        raise error

    monkeypatch.setattr(recipe, "recipe_file", lambda name: fail(ValueError("two\n  lines")))
    refused(invoke("recipes", "a"), "hetsngp: two lines")
    shown = invoke("--debug", "recipes", "a")
    assert isinstance(shown.exception, ValueError)
    monkeypatch.setattr(recipe, "recipe_file", lambda name: fail(AttributeError("ours")))
    assert isinstance(invoke("recipes", "a").exception, AttributeError)
    monkeypatch.setattr(recipe, "recipe_file", lambda name: fail(KeyboardInterrupt()))  # type: ignore[arg-type]
    stopped = invoke("recipes", "a")
    assert stopped.exit_code == 130
    assert stopped.output.splitlines() == ["hetsngp: stopped"]


@pytest.mark.parametrize(
    ("command", "inside", "goes_on"),
    [
        (["train", "cifar10"], "hetsngp.training.recipes.recipe.read_recipe", True),
        (["evaluate", "runs/a"], "hetsngp.serving.bundle.find_device", True),
        (["reproduce", "cifar100"], "hetsngp.paper.reproduce", True),
        (["demo", "--out", "demo"], "hetsngp.paper.synthetic.demo.run_demo", True),
        (["predict", "runs/a", "b.jpg"], "hetsngp.serving.bundle.find_device", False),
        (["data"], "hetsngp.data.datasets.registry.describe", False),
    ],
)
def test_who_presses_ctrl_c_hears_whether_the_command_goes_on(
    command: list[str], inside: str, goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*given: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inside, stop)
    stopped = invoke(*command)
    rest = "; run the same command again to resume" if goes_on else ""
    assert stopped.output.splitlines() == [f"hetsngp: stopped{rest}"]
    assert stopped.exit_code == 130


def test_ctrl_c_while_the_commands_are_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", stop)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # where ^C stands in the line
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 130
    assert capsys.readouterr().err == "\nhetsngp: stopped\n"


def test_what_comes_next_can_be_copied_into_a_shell() -> None:
    folder = Path("my runs/it's a")
    text = train_command._next(folder, has_test=True)
    evaluate, predict = re.fullmatch(r"next: (.*), or (.*)…; in Python .*", text).groups()  # type: ignore[union-attr]
    assert shlex.split(evaluate) == ["hetsngp", "evaluate", str(folder)]
    assert shlex.split(predict) == ["hetsngp", "predict", str(folder), "FILE"]
    assert eval(text.partition("in Python ")[2].replace("hetsngp.load", "str")) == str(folder / "model")
    assert "a' --data SET, or" in train_command._next(folder, has_test=False).replace('"', "")


def test_the_book_and_the_data_sets_are_listed() -> None:
    lines = invoke("recipes").output.splitlines()
    assert [line.split()[0] for line in lines] == list(recipe_names())
    assert all(len(line.split()) > 3 for line in lines)
    for name in ("cifar10", "cifar100/hetsngp"):
        assert invoke("recipes", name).output == recipe_file(name)[1].read_text()
    everything = invoke("data").output
    assert all(re.search(rf"^{re.escape(name)}$", everything, re.MULTILINE) for name in DATASETS)
    assert invoke("data", "svhn").output.startswith("svhn\n  SVHN")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "hetsnpg"], "did you mean 'hetsngp'?"),
        (["--methods", ","], "give at least one"),
        (["--tasks", "three_moons"], "did you mean 'two_moons'?"),
        (["--seeds", "0"], "--seeds"),
        (["--jobs", "0"], "--jobs"),
        (["--epochs", "0"], "--epochs"),
        (["--label-noise", "0.5"], "below 0.5"),
        (["--label-noise", "0.2", "--tasks", "noisy_circles"], "has fixed noise"),
        (["--out", __file__], "--out"),
        (["--out", f"{__file__}/deeper"], "cannot create the folder"),
    ],
)
def test_bad_input_is_named_and_exits_with_2(arguments: list[str], message: str) -> None:
    refused(invoke("demo", *arguments), message)


def test_all_means_every_method() -> None:
    assert demo_command._chosen("method", "all", ("a", "b")) == ("a", "b")
    assert demo_command._chosen("method", "b,a,b", ("a", "b")) == ("b", "a")


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
    code = hide + "import hetsngp.cli, hetsngp.paper.synthetic.demo"
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True)


@pytest.mark.slow
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
        assert "run the same command again to resume" in " ".join(output.split())
        assert "Traceback" not in output
        wait_until(lambda: not group(process.pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"timeout after {seconds:g} s")
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

SMALL = """
network = "wrn-10-1"
method = "hetsngp"
batch_size = 30
[options]
random_features = 64
[schedule]
epochs = 3
lr = 0.05
warmup = 2
[hardware]
accelerator = "cpu"
"""


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A recipe, and dark and bright pictures with a little noise."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 100), ("test", 31)):
        y = np.arange(count) % 2
        arrays[f"x_{split}"] = (rng.integers(0, 100, (count, 8, 8, 3)) + 100 * y[:, None, None, None]).astype(
            "uint8"
        )
        arrays[f"y_{split}"] = y
    np.savez(tmp_path / "pictures.npz", **arrays)
    (tmp_path / "small.toml").write_text(f"data = '{tmp_path / 'pictures.npz'}'\n{SMALL}")
    return tmp_path / "small.toml"


def train(recipe: Path, *arguments: object) -> Any:
    changes = [part for text in arguments if "=" in str(text) for part in ("--set", text)]
    return invoke("train", recipe, *changes, *(text for text in arguments if "=" not in str(text)))


def test_train_makes_a_model_and_goes_on(pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = ["training.ema_decay=0.9", "training.patience=3"]
    settings += ["schedule.decay=step", "schedule.milestones=[1, 2]"]
    result = train(pictures, "--out", out, *settings)
    assert result.exit_code == 0, result.output
    summary = json.loads((out / "summary.json").read_text())
    assert summary["test"]["examples"] == 31
    assert summary["test"]["accuracy"] > 0.9
    assert summary["recipe"] == read_recipe(pictures, settings).describe()
    assert summary["recipe"]["config"]["schedule"]["milestones"] == [1, 2]
    assert summary["changes"] == settings
    assert f"test: accuracy {summary['test']['accuracy']:.4f}" in result.output
    assert "no image is called confident: this needs 20 held-out images" in result.output  # of ten
    assert "no image is called unfamiliar: this needs 19" in result.output
    load = f"in Python hetsngp.load('{out}/model')"
    assert f"next: hetsngp evaluate {out}, or hetsngp predict {out} FILE…; {load}" in result.output
    model = hetsngp.load(out / "model")
    with np.load(tmp_path / "pictures.npz") as arrays:
        x = torch.from_numpy(arrays["x_test"]).permute(0, 3, 1, 2).float()
    scale = x.mean() / 255, x.std() / 255  # near those of the training images
    assert model.predict((x / 255 - scale[0]) / scale[1]).probs.shape == (31, 2)
    assert len((out / "metrics.csv").read_text().splitlines()) == 4
    with Image.open(out / "curves.png") as picture:
        assert min(picture.size) > 300

    other = train(pictures, "--out", out, *settings, "schedule.lr=0.01")
    refused(other, "another configuration")
    assert "lr 0.05, now 0.01" in other.output
    for change in ("held_out=0.3", "batch_size=20", "method=sngp", "options.rank=2"):
        refused(train(pictures, "--out", out, *settings, change, "--changed"), "holds a run on other data")

    before = {file: file.stat().st_mtime_ns for file in out.rglob("*")}
    (tmp_path / "pictures.npz").rename(tmp_path / "elsewhere.npz")  # nothing is left to do, nor to read
    again = train(pictures, "--out", out, *settings)
    assert again.exit_code == 0, again.output
    assert again.output in result.output
    assert "epoch" not in again.output
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*")} == before


def test_what_is_said_of_a_trained_model_may_be_said_anew(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other rules for verdicts, no calibration: the weights stay, and what is half done is not finished."""
    out = tmp_path / "run"
    small = ("schedule.epochs=1", "method=deterministic", "held_out=0.4")
    assert train(pictures, "--out", out, *small).exit_code == 0
    first = finished(out)
    assert first is not None
    checkpoint = (out / "checkpoint" / "config.json").read_text()

    def stop(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hetsngp.training.run_results.write_serving", stop)
        assert train(pictures, "--out", out, *small, "calibrate=false").exit_code == 130
    assert finished(out) is None
    assert train(pictures, "--out", out, *small, "calibrate=false").exit_code == 0
    second = finished(out)
    assert second is not None
    assert not second["recipe"]["task"]["calibrate"]
    assert second["posterior"] != first["posterior"]
    assert train(pictures, "--out", out, *small, "verdicts.correct=0.6").exit_code == 0
    third = finished(out)
    assert third is not None
    assert third["thresholds"]["right"] == 0.6
    assert third["held_out"] == first["held_out"]
    assert (out / "checkpoint" / "config.json").read_text() == checkpoint
    for damage in ("[]", "{}", json.dumps({"recipe": third["recipe"]}), "{", json.dumps(third)):
        (out / "summary.json").write_text(damage)
        assert finished(out) is None
    (out / "summary.json").write_text(json.dumps(with_checksum(third)))
    assert finished(out) == third
    (out / "model" / "config.json").unlink()
    assert finished(out) is None


def test_a_posterior_that_is_sampled_in_training_is_fitted_on_images_as_they_are(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    through = Engine.train

    def look(self: Engine, model: Any, loader: Any, plan: Any, **more: Any) -> Any:
        given.update(more)
        return through(self, model, loader, plan, **more)

    monkeypatch.setattr(Engine, "train", look)
    small = ("method=sngp", "schedule.epochs=1", "options.sample_beta=true")
    done = train(pictures, "--out", tmp_path / "run", *small)
    assert done.exit_code == 0, done.output
    assert given["clean"].augment is None
    assert not given["clean"].shuffle


@pytest.mark.slow
def test_train_starts_its_own_processes(pictures: Path, tmp_path: Path) -> None:
    """Each runs the same command; one of them prints and writes."""
    command = [sys.executable, "-m", "hetsngp", "train", str(pictures), "--out", str(tmp_path / "run")]
    for change in ("schedule.epochs=1", "hardware.devices=2", "hardware.strategy=ddp"):
        command += ["--set", change]
    env = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test: accuracy") == 1
    assert "All distributed processes registered. Starting with 2 processes" in done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["test"]["examples"] == 31


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["data=nowhere"], "cannot open images 'nowhere'"),
        (["data=nowhere.npz"], "there is no file nowhere.npz"),
        (["data=cifar10"], "HETSNGP_DATA"),
        (["data=cifar10n:wurst"], "unknown variant of cifar10n 'wurst'"),
        (["data=cifar10-c"], "unknown split of cifar10-c 'train'"),
        (["network=resnet9000"], "unknown network 'resnet9000'"),
        (["network=wrn-10-0"], "unknown network 'wrn-10-0'"),
        (["network=wrn-11-1"], "depth must be 6n + 4"),
        (["method=hetsgnp"], "did you mean 'hetsngp'"),
        (["hardware.strategy=dpp"], "did you mean 'ddp'"),
        (["hardware.precision=bf16"], "bf16-mixed"),
        (["hardware.devices=two"], "devices must be a positive whole number"),
        (["hardware.accelerator=abacus"], "accelerator='abacus'"),
        (["held_out=2"], "share between 0 and 1"),
        (["schedule.decay=step"], "milestones"),
        (["schedule.milestones=a"], "schedule.milestones is a list of numbers"),
        (["epochs=3"], "did you mean 'schedule.epochs'"),
        (["batch_size=4000"], "smaller batch_size"),
        (["schedule.lr=1e30"], "lower lr"),
        (["size=8"], "is for image files"),
        (["options.link=sigmoid"], "--set options.link=softmax"),
        (["--out", __file__], "--out"),
        (["--out", f"{__file__}/deeper"], "deeper"),
        (["--epochs", "3"], "--epochs"),
    ],
)
def test_train_says_what_is_wrong(
    arguments: list[str], words: str, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HETSNGP_DATA", raising=False)
    refused(train(pictures, *arguments), words)
    assert not list(tmp_path.rglob("summary.json"))
