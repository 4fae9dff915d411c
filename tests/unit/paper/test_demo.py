"""The demo: its numbers are of what they say, it goes on where it was stopped, its maps are upright."""

import dataclasses
import json
import math
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import image
from rich.console import Console
from scipy.stats import sem

import hetsngp.fitting.loop
from hetsngp.data.datasets.synthetic import LabelledPoints, SyntheticTask, compass, make_task
from hetsngp.files import write_atomically
from hetsngp.models.methods import METHODS
from hetsngp.paper.synthetic import experiment as synthetic
from hetsngp.paper.synthetic import plots
from hetsngp.paper.synthetic import processes as runs
from hetsngp.paper.synthetic.demo import DemoConfig, run_demo
from hetsngp.paper.synthetic.experiment import (
    SETTINGS,
    SyntheticRun,
    SyntheticSettings,
    measure,
    train_and_measure,
)
from hetsngp.paper.synthetic.store import Store
from hetsngp.paper.synthetic.summary import PAPER, summarise, table
from hetsngp.types import Prediction

TINY = SyntheticSettings(width=16, depth=1, epochs=2, random_features=32, rank=2)


def small_task(name: str, seed: int, label_noise: float = 0.0) -> SyntheticTask:
    """Fewer points to measure on: the split of uncertainty over three classes takes milliseconds a point."""
    task = make_task(name, seed, label_noise)
    test = LabelledPoints(task.test.x[::40], task.test.y[::40], task.test.clean[::40])
    return dataclasses.replace(task, test=test, ood_directions=task.ood_directions[:, :3])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "make_task", small_task)
    monkeypatch.setattr(synthetic, "GRID", 8)
    for name in SETTINGS:
        monkeypatch.setitem(SETTINGS, name, TINY)


# --- one run --------------------------------------------------------------------------------------------


class Known:
    """A model whose every answer is known: the labels it was told for ``probs`` and ``clean_probs``."""

    def __init__(self, task: SyntheticTask) -> None:
        self.task = task
        self.centre = task.train.x.mean(0)

    def predict(self, x: torch.Tensor) -> Prediction:
        row = torch.cdist(x.double(), self.task.test.x.double()).argmin(1)
        confident = 0.1 + 0.8 * torch.eye(self.task.num_classes)
        confident /= confident.sum(1, keepdim=True)
        distance = (x - self.centre).norm(dim=1) / 20
        return Prediction(
            probs=confident[self.task.test.y[row]],
            clean_probs=confident[self.task.test.clean[row]],
            total_uncertainty=distance + 0.25,
            data_uncertainty=torch.full_like(distance, 0.25),
            model_uncertainty=distance,
            latent_variance=distance,
            ood_score=distance * (x[:, 0] - self.centre[0]).sign(),  # blind on the left
            member_uncertainty=torch.zeros_like(distance),
            num_points=torch.zeros_like(distance),
        )


def test_every_number_is_of_what_it_says() -> None:
    """``probs`` knows the given labels and so is wrong on clean ones where these were flipped."""
    task = make_task("noisy_circles", 0)
    numbers = measure(Known(task), task)  # type: ignore[arg-type]
    confidence = 0.9 / 1.1
    flipped = float((task.test.y != task.test.clean).float().mean())
    assert numbers["accuracy"] == pytest.approx(1 - flipped, abs=1e-6)
    assert numbers["clean_accuracy"] == 1.0
    assert numbers["nll"] == pytest.approx(-math.log(confidence), rel=1e-5)
    assert numbers["clean_nll"] == pytest.approx(-math.log(confidence), rel=1e-5)
    assert numbers["ece"] == pytest.approx(1 - confidence, abs=1e-4)  # torchmetrics sums in float32
    assert numbers["ood_auroc"] is None
    assert numbers["data_uncertainty"] == pytest.approx(0.25)
    radius = (task.test.x - task.train.x.mean(0)).norm(dim=1)
    assert numbers["model_uncertainty"] == pytest.approx(float(radius.mean()) / 20, rel=1e-5)
    assert numbers["far_model_uncertainty_min"] == pytest.approx(0.5, rel=1e-4)
    directions = numbers["direction_auroc"]
    assert len(directions) == 16
    assert directions[:4] + directions[13:] == [1.0] * 7
    assert directions[5:12] == [0.0] * 7
    assert numbers["direction_auroc_min"] == 0.0
    assert numbers["direction_auroc_mean"] == pytest.approx(sum(directions) / 16)


def test_the_papers_cluster_is_scored_against_the_test_points() -> None:
    task = make_task("two_moons", 0)
    numbers = measure(Known(task), task)  # type: ignore[arg-type]
    assert numbers["ood_auroc"] == 1.0  # on the right, and further than any moon
    assert numbers["ood_fpr95"] == 0.0


@pytest.mark.usefixtures("small")
def test_a_run_repeats_itself_whatever_the_global_generator() -> None:
    run = SyntheticRun("two_moons", "hetsngp", 0, settings=TINY)
    first = train_and_measure(run).numbers
    torch.manual_seed(9)
    second = train_and_measure(run).numbers
    other = train_and_measure(dataclasses.replace(run, seed=1)).numbers
    for numbers in (first, second, other):
        del numbers["seconds"], numbers["seconds_of"]
    assert first == second
    assert first["losses"] != other["losses"]
    assert len(first["losses"]) == TINY.epochs


@pytest.mark.usefixtures("small")
def test_a_run_is_the_librarys_own_road(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained on given labels, posterior on the training points, calibrated on the held-out ones."""
    seen: dict[str, Any] = {}

    def fit(model: Any, loader: Any, calibration: Any) -> Any:
        seen.update(loader=loader, calibration=calibration)
        return hetsngp.fit_posterior(model, loader, calibration)

    def train(model: Any, loader: Any, **options: Any) -> Any:
        seen["trained"] = loader.dataset.tensors
        return hetsngp.fitting.loop.train(model, loader, **options)

    monkeypatch.setattr(synthetic, "fit_posterior", fit)
    monkeypatch.setattr(synthetic, "train", train)
    numbers = train_and_measure(SyntheticRun("noisy_circles", "sngp", 0, settings=TINY)).numbers
    task = make_task("noisy_circles", 0)
    assert torch.equal(seen["trained"][0], task.train.x)
    assert torch.equal(seen["trained"][1], task.train.y)
    for name, points in (("loader", task.train), ("calibration", task.held_out)):
        assert torch.equal(torch.cat([x for x, _ in seen[name]]), points.x)
        assert torch.equal(torch.cat([y for _, y in seen[name]]), points.y)
    assert numbers["posterior"]["count"] == 1500
    assert numbers["posterior"]["held_out"] == 300
    uncalibrated = dataclasses.replace(TINY, calibrate=False)
    train_and_measure(SyntheticRun("noisy_circles", "sngp", 0, settings=uncalibrated))
    assert seen["calibration"] is None


def test_maps_are_upright(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "GRID", 9)
    task = make_task("two_moons", 0)
    left, right, bottom, top = task.frame
    seen = []

    def predict(x: torch.Tensor) -> Prediction:
        seen.append(x)
        return Known(task).predict(x)

    maps = synthetic.draw_maps(SimpleNamespace(predict=predict), task)  # type: ignore[arg-type]
    grid = torch.cat(seen).view(9, 9, 2)
    assert grid[0, 0].tolist() == [left, bottom]
    assert grid[0, -1].tolist() == [right, bottom]
    assert grid[-1, 0].tolist() == [left, top]
    expected = (grid - task.train.x.mean(0)).norm(dim=-1) / 20
    assert np.allclose(maps["model_uncertainty"], expected, atol=1e-6)
    assert maps["probs"].shape == (2, 9, 9)
    assert np.allclose(maps["probs"].max(0), 1 - maps["one_minus_confidence"])


# --- many runs ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
def test_the_demo_writes_everything_and_repeats_only_what_is_missing(tmp_path: Path) -> None:
    config = DemoConfig(("two_moons", "noisy_circles"), ("deterministic", "sngp"), (0, 1))

    def demo() -> tuple[str, dict[str, Any]]:
        console = Console(width=200, record=True, quiet=False, file=(tmp_path / "log").open("a"))
        run_demo(config, tmp_path, 1, console)
        return console.export_text(), json.loads((tmp_path / "results.json").read_text())

    text, results = demo()
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").iterdir()}
    assert len(files) == 8
    assert len(list((tmp_path / "maps").iterdir())) == 4  # of the first seed
    for name in ("two_moons", "noisy_circles", "noisy_circles_labels"):
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert "skipped" not in text
    assert "0.841" in text  # the paper's
    assert len(results["runs"]) == 8
    cell = results["summary"]["two_moons"]["sngp"]["accuracy"]
    accuracies = [
        run["numbers"]["accuracy"]
        for run in results["runs"]
        if (run["settings"]["task"], run["settings"]["method"]) == ("two_moons", "sngp")
    ]
    assert cell["mean"] == pytest.approx(np.mean(accuracies))
    assert cell["standard_error"] == pytest.approx(sem(accuracies))
    assert results["paper"] == PAPER

    lost = next(file for file in files if "two_moons-sngp-seed1" in file.name)
    content = json.loads(lost.read_text())["numbers"]
    lost.unlink()
    text, _ = demo()
    assert "7 of 8 runs" in text
    assert "skipped" in text
    assert text.count("two_moons-sngp-seed1") == 1
    assert {f for f, t in files.items() if f.stat().st_mtime_ns != t} == {lost}
    again = json.loads(lost.read_text())["numbers"]
    assert again["losses"] == content["losses"]
    assert again["accuracy"] == content["accuracy"]

    (tmp_path / "maps" / next(iter((tmp_path / "maps").iterdir())).name).unlink()
    text, _ = demo()
    assert "7 of 8 runs" in text


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_processes_give_the_numbers_of_one_process(tmp_path: Path) -> None:
    """Really spawned: the workers measure on all points, so only what training decides is compared."""
    both = [SyntheticRun("two_moons", "deterministic", seed, settings=TINY) for seed in (0, 1)]
    alone, pooled = Store.open(tmp_path / "alone"), Store.open(tmp_path / "pooled")
    steps: list[runs.Step] = []
    runs.run_all(both, alone, workers=1)
    runs.run_all(both, pooled, workers=2, on_step=steps.append)
    for run in both:
        assert (
            pooled.results([run])[run]["numbers"]["losses"] == alone.results([run])[run]["numbers"]["losses"]
        )
        assert [step.epoch for step in steps if step.run == run and step.kind == "epoch"] == [1, 2]
        assert len([step for step in steps if step.run == run and step.kind == "done"]) == 1


@pytest.mark.slow
def test_a_run_that_fails_is_named(tmp_path: Path) -> None:
    wrong = [SyntheticRun("two_moons", name, 0, settings=TINY) for name in ("no_such_method", "another")]
    with pytest.raises(RuntimeError, match=r"seed0 failed: unknown method"):
        runs.run_all(wrong, Store.open(tmp_path), workers=2)
    assert not list(tmp_path.rglob("*.json"))
    with pytest.raises(RuntimeError, match=r"same command again \(hetsngp demo: with --jobs 1\)"):
        runs._raise_for(wrong[0], BrokenProcessPool())


def test_a_file_belongs_to_settings_and_code(tmp_path: Path) -> None:
    box = Store(tmp_path, "code")
    run = SyntheticRun("two_moons", "sngp", 0, settings=TINY)
    others = [
        dataclasses.replace(run, seed=1),
        dataclasses.replace(run, label_noise=0.2),
        dataclasses.replace(run, settings=dataclasses.replace(TINY, lr=1e-3)),
    ]
    names = {box.fingerprint(r) for r in (run, *others)} | {Store(tmp_path, "changed").fingerprint(run)}
    assert len(names) == 5
    circles = SyntheticRun("noisy_circles", "sngp", 0, settings=TINY)  # have their own noise
    assert box.fingerprint(circles) == box.fingerprint(dataclasses.replace(circles, label_noise=0.2))
    assert list(run.describe()) == ["task", "method", "seed", "label_noise", "recipe"]  # keys of the files


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, lambda file: file.write(b"old"))

    def fail(file: Any) -> None:
        file.write(b"new")
        raise OSError

    with pytest.raises(OSError):
        write_atomically(path, fail)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_dearest_runs_come_first_and_maps_are_of_the_first_seed() -> None:
    config = DemoConfig(("two_moons", "noisy_circles"), tuple(METHODS), (3, 4), epochs=7)
    assert [run.method for run in config.runs()[:2]] == [list(METHODS)[-1]] * 2
    assert len(set(config.runs())) == 2 * len(METHODS) * 2
    assert {run.seed for run in config.runs() if config.has_maps(run)} == {3}
    assert {run.settings.epochs for run in config.runs()} == {7}


# --- what is shown --------------------------------------------------------------------------------------


def test_one_seed_has_no_standard_error_and_the_circles_no_ood() -> None:
    run = SyntheticRun("noisy_circles", "hetsngp", 0)
    summary = summarise([(run, {"accuracy": 0.9, "ood_auroc": None, "warnings": ["x"], "seconds": 1.25})])
    cell = summary["noisy_circles"]["hetsngp"]
    assert set(cell) == {"accuracy", "seconds"}
    assert cell["accuracy"] == {"mean": 0.9, "standard_error": None, "min": 0.9, "max": 0.9, "n": 1}
    console = Console(width=160, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table(summary, "title"))
    row = next(line for line in console.export_text().splitlines() if "hetsngp" in line).split()
    assert row == ["hetsngp", "0.900", "–", "0.866", "–", "–", "–", "–", "1.2"]


def test_figures_show_the_maps_upright(tmp_path: Path) -> None:
    """Uncertainty in the lower left corner changes that corner of its own panel and nothing else."""
    task = make_task("two_moons", 0)
    nothing, corner, everything = np.zeros((3, 20, 20), np.float32)
    corner[:5, :5], everything[:] = 0.69, 0.69
    pictures = []
    for values in (nothing, corner, everything):
        none = {"one_minus_confidence": nothing, "data_uncertainty": nothing, "model_uncertainty": nothing}
        maps = {"sngp": none, "hetsngp": {**none, "one_minus_confidence": values}}
        plots.draw_uncertainty(task, maps, tmp_path / "a.png")
        pictures.append(image.imread(tmp_path / "a.png")[..., :3].mean(-1))
    change, panel = pictures[0] - pictures[1], np.nonzero(pictures[0] - pictures[2])
    rows, columns = np.nonzero(change)
    height, width = change.shape
    assert change.min() >= 0  # uncertainty is dark
    assert change.max() > 0.5
    # The first row of panels, the second of two methods.
    assert panel[0].max() < 0.45 * height
    assert panel[1].min() > 0.4 * width
    tall, wide = np.ptp(panel[0]), np.ptp(panel[1])
    # A quarter of each side, and half a cell that is blended into the next.
    assert rows.min() > panel[0].max() - 0.3 * tall
    assert columns.max() < panel[1].min() + 0.3 * wide
    assert 0.05 < len(rows) / (tall * wide) < 0.09


def test_label_figures_take_any_number_of_methods(tmp_path: Path) -> None:
    task = make_task("noisy_circles", 0)
    probs = np.random.default_rng(0).random((3, 12, 12)).astype(np.float32)
    for count in (1, 2, 5, len(METHODS)):
        maps = {method: {"probs": probs} for method in [*METHODS][:count]}
        plots.draw_labels(task, maps, dict.fromkeys(maps, 0.5), tmp_path / f"{count}.png")
        assert (tmp_path / f"{count}.png").read_bytes()[:4] == b"\x89PNG"


def test_compass_starts_in_the_east() -> None:
    around = compass(torch.tensor([1.0, 2.0]), 2.0)
    assert around[[0, 4, 8, 12]].flatten().tolist() == pytest.approx([3, 2, 1, 4, -1, 2, 1, 0], abs=1e-6)
