"""Every table by its command, on tiny data in the layouts of the real: train, measure, compare, go on, print.

The runtime table is in tests/unit/paper/test_runtime.py.
"""

import csv
import dataclasses
import json
import math
import os
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.made_data import Made, made_data
from torch import Tensor
from typer.testing import CliRunner

import hetsngp
from hetsngp import paper as reproduction
from hetsngp.cli import make_app
from hetsngp.data.datasets import cifar
from hetsngp.data.datasets.synsets import wnids
from hetsngp.data.datasets.synthetic import LabelledPoints, SyntheticTask, make_task
from hetsngp.locking import LOCK
from hetsngp.paper import TABLES, Result, plan_of, reproduce
from hetsngp.paper.synthetic import experiment as synthetic
from hetsngp.paper.synthetic import processes as demo_runs
from hetsngp.paper.synthetic.experiment import SETTINGS, SyntheticSettings
from hetsngp.training import run_results

pytestmark = pytest.mark.slow

# The real recipes, on a network, images and a time that a CPU can spare. Integration points are few where the
# table does not say how many.
SMALL = (
    *("network=wrn-10-1", "schedule.epochs=1", "training.accumulate=1", "batch_size=8", "held_out=0.34"),
    "options.random_features=32",
)
FEW_POINTS = ("options.num_samples=4",)
FILES = ("size=8", "resize=8", "workers=0")
SRC = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    root = tmp_path_factory.mktemp("data")
    made = made_data(root, classes=3, images=6, size=8, corruptions=["fog", "contrast"], severities=[1, 3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cifar, "SIZES", made.sizes)
        patch.setenv("HETSNGP_DATA", str(root))
        yield made


@pytest.fixture
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture of a training takes longer than these trainings do."""
    monkeypatch.setattr(run_results, "draw_curves", lambda rows, best, path: path.write_bytes(b""))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """That the sets are parts of the real ones is said in warnings, at length."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(is a part of|lacks).*")
        yield
    torch.set_num_threads(threads)


def typed(
    name: str,
    out: Path,
    changes: Sequence[str],
    *,
    seeds: int = 1,
    methods: Sequence[str] = (),
    far: str | None = None,
    recipe: str | None = None,
    one_seed: Sequence[str] = (),
) -> list[str]:
    """What comes after ``hetsngp``."""
    words = ["reproduce", name, "--out", str(out), "--seeds", str(seeds)]
    words += [word for change in changes for word in ("--set", change)]
    words += ["--methods", ",".join(methods)] if methods else []
    words += ["--recipe", recipe] if recipe else []
    words += ["--one-seed", ",".join(one_seed)] if one_seed else []
    return words + (["--far", far] if far else [])


def run_table(name: str, out: Path, *changes: str, **given: Any) -> tuple[Result, list[str]]:
    """By the command: the result that it came to, and the lines that it printed."""
    results: list[Result] = []

    def keep(*args: Any, **options: Any) -> Result:
        results.append(reproduce(*args, **options))
        return results[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reproduction, "reproduce", keep)
        done = CliRunner().invoke(make_app(), typed(name, out, changes, **given))
    assert done.exit_code == 0, done.output
    (result,) = results
    assert str(result) in done.stdout
    return result, done.stdout.splitlines()


def trainings(lines: Sequence[str]) -> int:
    """Runs that were trained, or trained further."""
    return sum("training, run" in line for line in lines)


def value(result: Result, row: str, column: str, part: str | None = None, seed: int = 0) -> float:
    return result.values[part or result.table.name, row, column][seed]


def check_files(result: Result, out: Path) -> None:
    """A number in every cell, the same in the JSON file; a document and a picture."""
    name = result.request.name
    assert result.is_finished
    found = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
    for part in result.table.parts:
        for row in part.rows:
            for column in part.columns:
                cell = found["parts"][part.name]["rows"][row.name]["cells"][column.name]
                assert list(cell["values"].values()) == list(result.cell(part, row, column).values.values())
                assert all(map(math.isfinite, cell["values"].values()))
    assert found["finished"]
    assert (out / f"{name}.md").read_text(encoding="utf-8").startswith(f"# {result.request.title()}")
    assert (out / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def stamps(folder: Path) -> dict[Path, int]:
    """When each file of a run was written, but for what is measured on it later."""
    files = (file for file in folder.rglob("*") if file.is_file() and "measured" not in file.parts)
    return {file: file.stat().st_mtime_ns for file in files}


def folders(name: str, out: Path, *changes: str, **given: Any) -> list[Path]:
    return [run.folder(out) for run, _ in plan_of(name, out=out, seeds=1, changes=changes, **given)]


# --- an independent look at the numbers -----------------------------------------------------------------


def pixels(files: list[Path], folder: Path) -> Tensor:
    """As the model of the run gets them: the middle, whose short side is 8 already."""
    inputs = json.loads((folder / "model/serving.json").read_text(encoding="utf-8"))["inputs"]
    size = inputs["size"][0]
    found = []
    for file in files:
        with Image.open(file) as picture:
            array = np.asarray(picture.convert("RGB"))
        top = round((array.shape[0] - size) / 2)
        found.append(array[top : top + size, :size])
    x = torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(inputs[name])[:, None, None] for name in ("mean", "std"))
    return (x - mean) / std


def by_folder(folder: Path) -> tuple[list[Path], list[str]]:
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in (".jpeg", ".jpg"))
    return files, [file.parent.name for file in files]


def quality(probs: Tensor, labels: list[int]) -> dict[str, float]:
    """Accuracy, NLL and ECE by their definitions."""
    p, y = probs.double().numpy(), np.array(labels)
    right, confidence = p.argmax(1) == y, p.max(1)
    bins = np.minimum((confidence * 15).astype(int), 14)
    gaps = [abs((right[bins == b] - confidence[bins == b]).sum()) for b in range(15)]
    nll = -np.log(p[np.arange(len(y)), y].clip(np.finfo(np.float32).tiny))
    return {"acc": right.mean(), "nll": nll.mean(), "ece": sum(gaps) / len(y)}


def compare(result: Result, row: str, name: str, expected: dict[str, float]) -> None:
    for kind, number in expected.items():
        assert value(result, row, f"{name}_{kind}") == pytest.approx(number, rel=1e-4, abs=1e-6), kind


def mean_of(parts: list[dict[str, float]]) -> dict[str, float]:
    return {kind: sum(part[kind] for part in parts) / len(parts) for kind in parts[0]}


# --- the tables -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_curves")
def test_imagenet_its_variants_and_ensembles_share_their_runs(made: Made, tmp_path: Path) -> None:
    changes = (*SMALL, *FEW_POINTS, *FILES)
    result, said = run_table("imagenet", tmp_path, *changes)
    check_files(result, tmp_path)
    assert [row.name for row in result.table.parts[0].rows] == list(TABLES["imagenet"].only(None).choices)
    assert any("4 of 75 sets" in line for line in said)
    _, _, _, hetsngp_run, _ = folders("imagenet", tmp_path, *changes)
    models: dict[int, Any] = {}

    def probs_of(seed: int) -> Callable[[Path], Tensor]:
        folder = hetsngp_run.parent / f"seed{seed}"
        models[seed] = models.get(seed) or hetsngp.load(folder / "model")
        return lambda where: models[seed].predict_probs(pixels(by_folder(where)[0], folder))

    def look(probs: Callable[[Path], Tensor], where: str) -> dict[str, float]:
        names = by_folder(made.root / where)[1]
        labels = [wnids("imagenet").index(n) if n.startswith("n") else int(n) for n in names]
        return quality(probs(made.root / where), labels)

    corrupted = [f"imagenet-c/{name}/{severity}" for name in made.corruptions for severity in (1, 3)]
    first = probs_of(0)
    compare(result, "hetsngp", "id", look(first, "imagenet/val"))
    compare(result, "hetsngp", "imc", mean_of([look(first, where) for where in corrupted]))
    compare(result, "hetsngp", "ima", look(first, "imagenet-a"))
    before = {file: then for f in folders("imagenet", tmp_path, *changes) for file, then in stamps(f).items()}

    # The other sets, and no training.
    variants, said = run_table("imagenet-r-v2", tmp_path, *changes)
    check_files(variants, tmp_path)
    assert "5 of 5 runs are finished already" in said
    assert trainings(said) == 0
    compare(variants, "hetsngp", "imr", look(first, "imagenet-r"))
    compare(variants, "hetsngp", "imv2", look(first, "imagenetv2-matched-frequency-format-val"))

    # Three members more of each row.
    ensembles, said = run_table("ensembles", tmp_path, *changes)
    check_files(ensembles, tmp_path)
    rows = [row.name for row in ensembles.table.parts[0].rows]
    assert rows == ["deterministic", "heteroscedastic", "sngp", "hetsngp"]
    assert "4 of 16 runs are finished already" in said
    assert trainings(said) == 12
    members = [probs_of(seed) for seed in range(4)]

    def together(where: Path) -> Tensor:
        return torch.stack([probs(where) for probs in members]).mean(0)

    compare(ensembles, "hetsngp", "id", look(together, "imagenet/val"))
    compare(ensembles, "hetsngp", "imc", mean_of([look(together, where) for where in corrupted]))
    assert all(file.stat().st_mtime_ns == then for file, then in before.items())


def test_imagenet21k_learns_several_labels_and_answers_for_the_1000_classes(
    made: Made, tmp_path: Path
) -> None:
    changes = (*SMALL, *FEW_POINTS, *FILES, "calibrate=false")
    result, _ = run_table("imagenet21k", tmp_path, *changes)
    check_files(result, tmp_path)
    known, thousand = wnids("imagenet21k"), wnids("imagenet")
    kept = torch.tensor([known.index(wnid) if wnid in known else -1 for wnid in thousand])
    folder, *_ = folders(
        "imagenet21k", tmp_path, *changes
    )  # deterministic: the others are sure of nothing yet
    model = hetsngp.load(folder / "model")
    assert model.head.sigmoid

    def measured(name: str) -> dict[str, float]:
        found = json.loads((folder / f"measured/{name}.json").read_text(encoding="utf-8"))["numbers"]
        return {kind: number for kind, number in found.items() if kind != "examples"}

    big = made.root / "imagenet21k/val"
    with open(big / "labels.csv", newline="", encoding="utf-8") as stream:
        several = {file: labels.split() for file, labels in csv.reader(stream)}
    assert max(map(len, several.values())) > 1
    probs = model.predict_probs(pixels([big / file for file in several], folder)).double()
    hits = [known[best] in labels for best, labels in zip(probs.argmax(1), several.values(), strict=True)]
    assert (
        value(result, "deterministic", "id_prec_at_1")
        == measured("imagenet21k")["precision_at_1"]
        == np.mean(hits)
    )
    targets = torch.zeros_like(probs)
    for row, labels in zip(targets, several.values(), strict=True):
        row[[known.index(label) for label in labels]] = 1.0
    nll = torch.nn.functional.binary_cross_entropy(probs, targets, reduction="none").sum(1).mean()
    assert measured("imagenet21k")["nll"] == pytest.approx(float(nll), rel=1e-4)
    for name, where in {"im": "imagenet/val", "ima": "imagenet-a", "imr": "imagenet-r"}.items():
        files, names = by_folder(made.root / where)
        logits = torch.logit(model.predict_probs(pixels(files, folder)).double())
        among = torch.where(kept >= 0, logits[:, kept.clamp(min=0)], -torch.inf).softmax(1)
        expected = quality(among, [thousand.index(name) for name in names])
        found = measured(where.split("/")[0])
        assert [found[kind] for kind in ("accuracy", "nll", "ece")] == pytest.approx(
            list(expected.values()), rel=1e-3
        )
        assert value(result, "deterministic", f"{name}_acc") == found["accuracy"]


def kill_after_one_run(made: Made, out: Path, words: list[str]) -> None:
    """A process of its own, by SIGKILL, as soon as its first run has a summary."""
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*made.command, *words], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            while not list(out.glob("runs/*/*/summary.json")):
                assert process.poll() is None, process.stderr and process.stderr.read()
                time.sleep(0.01)
        finally:
            process.kill()


def test_a_table_that_was_killed_and_interrupted_goes_on_and_comes_to_the_same(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command three times: killed; stopped between the end of a training and its summary; left."""
    changes, out = (*SMALL, *FEW_POINTS), tmp_path / "a"
    words = typed("cifar100", out, changes, far="scenes")
    plan = partial(plan_of, "cifar100", out=out, seeds=1, changes=changes)
    kill_after_one_run(made, out, words)
    ready = [state for _, state in plan()].count("finished")
    assert 1 <= ready < 7  # one, unless the machine is busy
    kept = [run.folder(out) for run, state in plan() if state == "finished"]
    # A process killed between its summary and the release of its lock leaves the file: the next removes it.
    before = [{file: then for file, then in stamps(folder).items() if file.name != LOCK} for folder in kept]

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_results, "draw_curves", stop)
    done = CliRunner().invoke(make_app(), words)
    assert done.exit_code == 130
    assert done.stderr.splitlines()[-1].startswith("hetsngp: stopped; run the same command again")
    assert "Traceback" not in done.output
    assert [state for _, state in plan()] == ["finished"] * ready + ["begun"] + ["to do"] * (6 - ready)
    half = json.loads((out / "cifar100.json").read_text(encoding="utf-8"))
    assert not half["finished"]
    stopped = plan()[ready][0]
    trained = (stopped.folder(out) / "metrics.csv").read_text()

    # Pictures take longer than these trainings.
    monkeypatch.setattr(run_results, "draw_curves", lambda rows, best, path: path.write_bytes(b""))
    result, said = run_table("cifar100", out, *changes, far="scenes")
    check_files(result, out)
    assert f"{ready} of 7 runs are finished already" in said
    assert trainings(said) == 7 - ready
    assert [stamps(folder) for folder in kept] == before
    # Which has the seconds of its one epoch.
    assert (stopped.folder(out) / "metrics.csv").read_text() == trained
    row = stopped.recipe.partition("/")[2]
    whole, _ = run_table("cifar100", tmp_path / "b", *changes, methods=[row], far="scenes")
    for column in whole.table.parts[0].columns:
        assert value(result, row, column.name) == value(whole, row, column.name)
    assert any("Far is scenes here" in line for line in said)
    after = stamps(out / "runs")
    again, said = run_table("cifar100", out, *changes, far="scenes")
    assert again.values == result.values
    assert stamps(out / "runs") == after
    assert not any("measured on" in line for line in said)


@pytest.mark.usefixtures("no_curves")
def test_ablations_train_the_shared_run_once(made: Made, tmp_path: Path) -> None:
    changes = (*SMALL, *FILES, "schedule.epochs=2")  # before the second there is no posterior to sample from
    result, said = run_table("ablations", tmp_path, *changes)
    check_files(result, tmp_path)
    assert trainings(said) == 17
    summaries = list((tmp_path / "runs").rglob("summary.json"))
    assert len(summaries) == 17
    base = {"samples": "1000", "rank": "15", "temperature": "1.25", "training": "map"}
    for column in ("acc", "nll", "ece"):
        same = {value(result, row, column, f"ablations-{part}") for part, row in base.items()}
        assert len(same) == 1
    sampled = value(result, "mc_sampling", "nll", "ablations-training")
    assert sampled != value(result, "map", "nll", "ablations-training")
    assert len({value(result, row, "nll", "ablations-temperature") for row in ("0.4", "1.25", "5.0")}) == 3
    for file in summaries:
        task = json.loads(file.read_text(encoding="utf-8"))["recipe"]["task"]
        model: Any = hetsngp.load(file.parent / "model")
        assert float(model.temperature) == pytest.approx(task["options"]["temperature"])


@pytest.mark.usefixtures("no_curves")
def test_tables_of_cifar100_by_one_recipe_share_their_runs(made: Made, tmp_path: Path) -> None:
    changes = (*SMALL, *FEW_POINTS, "schedule.epochs=2")
    given = {"recipe": "cifar100", "far": "scenes"}
    few = ["posterior_network", "mimo", "hetsngp_mimo"]
    result, said = run_table("cifar100", tmp_path, *changes, seeds=3, one_seed=few, **given)
    check_files(result, tmp_path)
    assert trainings(said) == 4 * 3 + 3
    (part,) = result.table.parts
    for row in part.rows:
        seeds = [0] if row.name in few else [0, 1, 2]
        assert all(list(result.cell(part, row, column).values) == seeds for column in part.columns)
    found = json.loads((tmp_path / "cifar100.json").read_text(encoding="utf-8"))
    for run in found["runs"].values():
        assert (run["recipe"], run["settings"]["name"]) == ("cifar100", "cifar100")
        assert f"method={run['settings']['task']['method']}" in run["changes"]

    ensembles, said = run_table("cifar100-ensembles", tmp_path, *changes, **given)
    check_files(ensembles, tmp_path)
    assert "12 of 12 runs are finished already" in said
    assert trainings(said) == 0

    ablations, said = run_table("cifar100-ablations", tmp_path, *changes, **given)
    check_files(ablations, tmp_path)
    assert "1 of 6 runs are finished already" in said
    assert trainings(said) == 5
    for column in ("id_acc", "id_nll", "id_ece", "near_auroc", "far_auroc"):
        same = {
            value(ablations, row, column, f"cifar100-ablations-{name}")
            for name, row in (("rank", "6"), ("temperature", "1"), ("training", "map"))
        }
        assert same == {value(result, "hetsngp", column)}
    for column in ("rank", "temperature"):
        assert len(set(values_of(ablations, f"cifar100-ablations-{column}", "id_nll"))) == 3


def values_of(result: Result, part: str, column: str) -> list[float]:
    rows = next(each.rows for each in result.table.parts if each.name == part)
    return [value(result, row.name, column, part) for row in rows]


def test_missing_data_are_told_of_before_anything_is_trained(made: Made, tmp_path: Path) -> None:
    part = tmp_path / "data"
    part.mkdir()
    for name in ("imagenet", "imagenet-r"):
        (part / name).symlink_to(made.root / name)
    with pytest.raises(FileNotFoundError, match="no imagenet-v2"):
        reproduce("imagenet-r-v2", out=tmp_path / "out", changes=[*SMALL, *FILES], root=part)
    for name in ("cifar-100-binary", "cifar-10-batches-bin", "CIFAR-100-C"):
        (part / name).symlink_to(made.root / name)
    with pytest.raises(FileNotFoundError, match=r"no places365(.|\n)*--far scenes"):
        reproduce("cifar100", out=tmp_path / "out", changes=SMALL, root=part)
    assert not (tmp_path / "out").exists()
    assert os.environ["HETSNGP_DATA"] == str(made.root)  # root was for that call


def test_synthetic_tasks_are_those_of_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On fewer points, and in this process."""

    def small_task(name: str, seed: int, label_noise: float = 0.0) -> SyntheticTask:
        task = make_task(name, seed, label_noise)
        test = LabelledPoints(task.test.x[::40], task.test.y[::40], task.test.clean[::40])
        return dataclasses.replace(task, test=test, ood_directions=task.ood_directions[:, :3])

    monkeypatch.setattr(synthetic, "make_task", small_task)
    monkeypatch.setattr(synthetic, "GRID", 8)
    monkeypatch.setattr(demo_runs, "default_workers", lambda: 1)
    for name in SETTINGS:
        monkeypatch.setitem(SETTINGS, name, SyntheticSettings(width=16, depth=1, random_features=32, rank=2))
    result, said = run_table("synthetic", tmp_path, "schedule.epochs=1")
    check_files(result, tmp_path)
    assert sum("/15  " in line for line in said) == 15
    for row in ("deterministic", "posterior_network", "heteroscedastic", "sngp", "hetsngp"):
        for column, task, number in (
            ("circles_acc", "noisy_circles", "accuracy"),
            ("moons_auroc", "two_moons", "ood_auroc"),
            ("mixture_auroc", "gaussian_mixture", "ood_auroc"),
        ):
            (file,) = (tmp_path / "synthetic/runs").glob(f"{task}-{row}-seed200-*.json")
            numbers = json.loads(file.read_text(encoding="utf-8"))["numbers"]
            assert value(result, row, column, seed=200) == numbers[number]
    assert (tmp_path / "synthetic/noisy_circles_labels.png").is_file()
    plan = plan_of("synthetic", out=tmp_path, changes=["schedule.epochs=1"], seeds=1)
    assert [state for _, state in plan] == ["finished"] * 15
    assert {state for _, state in plan_of("synthetic", out=tmp_path, seeds=1)} == {"to do"}


@pytest.mark.parametrize("name", TABLES)
def test_a_dry_run_lists_the_trainings_and_trains_nothing(name: str, tmp_path: Path) -> None:
    once = [] if name == "runtime" else ["--seeds", "1"]  # which is measured, not trained
    done = CliRunner().invoke(make_app(), ["reproduce", name, "--dry-run", *once, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    expected = {"synthetic": 15, "cifar100": 7, "cifar100-ensembles": 12, "cifar100-ablations": 6}
    expected |= {"imagenet": 5, "imagenet-r-v2": 5, "imagenet21k": 4}
    expected |= {"ensembles": 16, "runtime": 11, "ablations": 17}
    lines = done.stdout.splitlines()
    assert sum(line.startswith("to do") for line in lines) == expected[name]
    assert not list(tmp_path.iterdir())
