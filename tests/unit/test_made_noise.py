"""The teacher of benchmarks/made_noise.py: labels by the law it states, which the student can represent."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.scripts import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("benchmarks/made_noise.py")


@pytest.fixture(scope="module")
def settings(script: ModuleType) -> Any:
    return replace(script.Settings(), classes=5, rank=2, steps=10, batch=64)


def test_labels_have_the_probabilities_of_the_law(script: ModuleType, settings: Any) -> None:
    teacher, generator, draws, points = script.Teacher(settings), torch.Generator(), 20_000, 2**15
    generator.manual_seed(0)
    x = teacher.draw_inputs(4, generator)
    labels = teacher.draw_labels(x.repeat_interleave(draws, 0), generator).view(4, draws)
    shares = torch.nn.functional.one_hot(labels, settings.classes).double().mean(1)
    # The Gaussian integral written out once more, from the covariance rather than from its parts.
    law = teacher.law(x)
    covariance = torch.diag_embed(law.std**2) + law.factor @ law.factor.mT
    normal = torch.randn(points, 5, 1, generator=generator)
    root = torch.linalg.cholesky(covariance).unsqueeze(1)
    integral = torch.softmax(law.mean.unsqueeze(1) + (root @ normal).squeeze(-1), -1).double().mean(1)
    error = (integral * (1 - integral) * (1 / draws + 1 / points)).sqrt()
    assert ((shares - integral).abs() < 4 * error + 1e-6).all()
    assert ((script.probabilities(law, points, seed=1) - integral).abs() < 4 * error + 1e-6).all()
    assert error.max() < 0.005
    assert (integral.amax(1) < 0.99).any()


def test_noise_depends_on_the_input_and_is_wide(script: ModuleType) -> None:
    settings = script.Settings()
    noise = script.Examination(script.Teacher(settings), 1024, 1, 0, torch.device("cpu")).noise()
    low, _, high = noise["std_quantiles_5_50_95"]
    assert 2.5 < noise["std"] < 3.5
    assert high > 3 * low


def test_the_student_can_represent_the_teacher(script: ModuleType, settings: Any) -> None:
    teacher = script.Teacher(settings)
    model = script.make_student("heteroscedastic", teacher, settings, 0, torch.device("cpu"))
    x = teacher.draw_inputs(256, torch.Generator().manual_seed(0))
    truth = teacher.law(x)
    assert script.compare_noise(truth, script.law_of(model, x))["noise"] < 0.9
    model.load_state_dict(
        {
            "head.latent.linear.weight": teacher.mean_weight.mT,
            "head.latent.linear.bias": torch.zeros(settings.classes),
            "head.noise.diagonal.weight": teacher.diagonal_weight.mT,
            "head.noise.diagonal.bias": teacher.diagonal_bias,
            "head.noise.factor.weight": teacher.factor_weight.flatten(1).mT,
            "head.noise.factor.bias": teacher.factor_bias.flatten(),
        },
        strict=False,
    )
    found = script.compare_noise(truth, script.law_of(model, x))
    for name in ("noise", "diagonal", "factor", "mean", "correlation"):
        assert found[name] == pytest.approx(1, abs=1e-5), name
    assert found["error"] < 1e-5


def test_sizes_ignore_what_all_logits_share(script: ModuleType, settings: Any) -> None:
    teacher = script.Teacher(settings)
    law = teacher.law(teacher.draw_inputs(64, torch.Generator().manual_seed(0)))
    shifted = script.Law(law.mean + 3, law.std, torch.cat([law.factor, torch.full((64, 5, 1), 7.0)], 2))
    double = script.Law(law.mean, 2 * law.std, 2 * law.factor)
    assert script.compare_noise(law, shifted)["noise"] == pytest.approx(1, abs=1e-5)
    assert script.compare_noise(law, shifted)["mean"] == pytest.approx(1, abs=1e-5)
    assert script.compare_noise(law, double)["noise"] == pytest.approx(2)
    assert script.compare_noise(law, double)["error"] == pytest.approx(3)


def test_nll_and_ece_are_expectations_over_labels(script: ModuleType) -> None:
    truth = torch.tensor([[0.8, 0.2], [0.5, 0.5]]).double()
    assert script.expected_ece(truth, truth) == pytest.approx(0)
    entropy = -(truth * truth.log()).sum(1).mean()
    assert script.expected_nll(truth, truth) == pytest.approx(float(entropy))
    sure = torch.tensor([[0.9, 0.1], [0.9, 0.1]]).double()
    assert script.expected_ece(truth, sure) == pytest.approx(0.25)
    assert script.expected_nll(truth, sure) == pytest.approx(-0.65 * math.log(0.9) - 0.35 * math.log(0.1))


@pytest.mark.parametrize("method", ["heteroscedastic", "hetsngp"])
def test_a_short_run_is_written_and_not_repeated(
    script: ModuleType, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name, value in {"steps": 8, "batch": 16, "test_inputs": 32, "integral_points": 64}.items():
        monkeypatch.setitem(script.QUICK, name, value)
    command = ["made_noise.py", "--label", "before", "--quick", "--methods", method, "--seeds", "0", "1"]
    monkeypatch.setattr(sys, "argv", [*command, "--device", "cpu", "--parts", str(tmp_path)])
    script.main()
    assert f"| {method} | before | 2 |" in capsys.readouterr().out
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "quick").glob("*.json")}
    assert len(before) == 2
    script.main()
    assert "finished already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_one_version_under_both_labels_is_noticed(script: ModuleType, capsys: Any) -> None:
    runs = {label: {"label": label, "package": label} for label in script.LABELS}
    script.check_versions(runs)
    assert capsys.readouterr().out == ""
    runs["after"]["package"] = "before"
    script.check_versions(runs)
    assert "PYTHONPATH" in capsys.readouterr().out
