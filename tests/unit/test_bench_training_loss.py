"""The references of benchmarks/training_loss.py: closed cases, and one against the other."""

import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.scripts import ROOT, load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("benchmarks/training_loss.py")


def test_two_classes_are_one_integral(script: ModuleType) -> None:
    p = script.problem(2, 1.5, 4)
    p = p._replace(mean=p.mean / 4)
    difference = p.factor[:, 1] - p.factor[:, 0]
    sign = 2.0 * p.y - 1
    z, weight = script.normal_grid()

    def loss(in_d: float, in_v: float) -> torch.Tensor:
        sd = (2 * (p.sd * in_d) ** 2 + in_v**2 * difference.square().sum(1)).sqrt()
        x = (sign * (p.mean[:, 1] - p.mean[:, 0])).unsqueeze(1) + sd.unsqueeze(1) * z
        return -(torch.sigmoid(x) @ weight).log()

    found = script.reference(p, points=2**15)
    errors = torch.tensor(found["errors"])
    by = 1e-4
    truth = (
        loss(1, 1),
        (loss(math.exp(by), 1) - loss(math.exp(-by), 1)) / (2 * by),
        (loss(1, math.exp(by)) - loss(1, math.exp(-by))) / (2 * by),
    )
    for at, name in enumerate(script.NAMES):
        gap = (torch.tensor(found[name]) - truth[at]).abs()
        assert (gap < 5 * errors[:, at] + 1e-5).all()
        assert errors[:, at].max() < 0.06
    slopes = torch.tensor(found["mean"])
    assert slopes.sum(1).abs().max() < 1e-9
    assert ((script.quadrature_loss(p, 2**10) - truth[0]).abs() < 0.02).all()


def test_without_noise_it_is_the_cross_entropy(script: ModuleType) -> None:
    p = script.problem(20, 1e-6, 5)
    truth = torch.nn.functional.cross_entropy(p.mean, p.y, reduction="none")
    found = script.reference(p, points=32)
    assert torch.allclose(torch.tensor(found["loss"], dtype=torch.float64), truth, atol=2e-5)
    slopes = torch.softmax(p.mean, -1) - torch.nn.functional.one_hot(p.y, 20)
    shown = script.shown_classes(p)
    assert torch.allclose(torch.tensor(found["mean"]).double(), slopes.gather(1, shown), atol=2e-5)
    assert torch.allclose(script.quadrature_loss(p, 4), truth, atol=2e-3)


def test_both_references_agree(script: ModuleType) -> None:
    p = script.problem(12, 1.5, 3)
    found, other = script.reference(p, points=2**15), script.quadrature_reference(p, 2**11)
    errors = torch.tensor(found["errors"])
    for at, name in enumerate(script.NAMES):
        gap = (torch.tensor(found[name]) - other[name]).abs()
        assert (gap < 4 * errors[:, at] + 0.01).all(), name  # Sobol points have an error too
        assert errors[:, at].max() < 0.04


def test_errors_are_zero_at_the_truth_and_found_where_they_are(script: ModuleType) -> None:
    p = script.problem(12, 1.5, 5)
    truth = script.reference(p, points=2**10)
    exact = {
        name: torch.tensor(truth[name]).double().expand(4, *torch.tensor(truth[name]).shape)
        for name in truth
        if name not in ("errors", "points")
    }
    assert script.errors(exact, truth)["loss"]["bias"] == pytest.approx(0, abs=1e-6)
    moved = script.errors({name: value + 0.5 for name, value in exact.items()}, truth)
    assert moved["log_d"]["bias"] == pytest.approx(0.5, abs=1e-6)
    assert moved["log_V"]["rms"] == pytest.approx(0.5, abs=1e-6)
    assert moved["mean"]["bias"] > 0.1


def test_it_runs_on_two_packages(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(ROOT / "src")
    sizes = "--classes 12 --sd 1.5 --points 512 --examples 5 --seeds 4 --rounds 1 --repeats 2 --threads 1"
    monkeypatch.setenv("PYTHONPATH", source)
    monkeypatch.setattr(
        sys, "argv", ["training_loss.py", "--before", source, "--out", str(tmp_path), *sizes.split()]
    )
    script.main()
    shown = capsys.readouterr().out
    assert "same package" in shown
    assert "| ratio |" in shown
    result = json.loads((tmp_path / "training_loss.json").read_text())
    assert result["errors"][0]["before"] == result["errors"][0]["after"]
    script.main()  # now with the reference of the file
    assert "reference K" not in capsys.readouterr().out
