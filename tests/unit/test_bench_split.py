"""benchmarks/split.py: its reference in closed cases, and the Gaussians that it gives to the package."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.scripts import ROOT, load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("benchmarks/split.py")


def test_two_classes_are_one_integral(script: ModuleType) -> None:
    c = script.case(2, "low_rank", 1.5, 2.0, 4)
    g = script.gaussian(c)
    z = torch.arange(-9, 9.01, 0.05, dtype=torch.float64)
    weight = torch.softmax(-0.5 * z.square(), 0)

    def width(std: torch.Tensor | None, factor: torch.Tensor) -> torch.Tensor:
        own = 0 if std is None else std.square().sum(1)
        return ((factor[:, 1] - factor[:, 0]).square().sum(1) + own).sqrt()

    f = (g.mean[:, 1] - g.mean[:, 0]).unsqueeze(1) + width(g.std, g.factor).unsqueeze(1) * z
    p = torch.sigmoid(f.unsqueeze(2) + width(g.noise_std, g.noise_factor).view(-1, 1, 1) * z) @ weight

    def entropy(p: torch.Tensor) -> torch.Tensor:
        return torch.special.entr(p) + torch.special.entr(1 - p)

    truth = entropy(p @ weight) - entropy(p) @ weight
    found = script.reference(g, script.Sizes(2**8, 2**8, 8, 2**15))
    assert ((found.model - truth).abs() < 5 * found.error + 1e-4).all()
    assert found.error.max() < 0.005
    assert (truth > 10 * found.error).any()
    assert ((found.probs[:, 1] - p @ weight).abs() < 0.01).all()


def test_noise_of_no_width_is_none(script: ModuleType) -> None:
    g = script.gaussian(script.case(7, "none", 1.0, 0.0, 3))
    sizes = script.Sizes(2**7, 2**5, 8, 2**15)
    without = script.reference(g, sizes)
    found = script.reference(g._replace(noise_std=torch.zeros_like(g.mean)), sizes, seed=1)
    assert ((found.model - without.model).abs() < 5 * (found.error + without.error)).all()
    assert without.error.max() < 0.005
    assert without.model.min() > 0.05


def test_products_of_matrices_are_the_mean_of_softmaxes(script: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    f, eps = (3 * torch.randn(2, n, 5, generator=generator, dtype=torch.float64) for n in (3, 8))
    whole, first, second = script.nested(f, eps)
    each = torch.softmax(f.unsqueeze(2) + eps.unsqueeze(1), -1)
    assert torch.allclose(whole, each.mean(2))
    assert torch.allclose(first, each[:, :, :4].mean(2))
    assert torch.allclose(second, each[:, :, 4:].mean(2))


@pytest.mark.parametrize("kind", ["none", "low_rank", "parameter_efficient", "feature"])
def test_the_package_gets_the_same_gaussian(script: ModuleType, kind: str) -> None:
    noise_sd = 0.0 if kind == "none" else 2.0
    c = script.case(6, kind, 0.7, noise_sd, 3)
    g, (f, noise) = script.gaussian(c), script.package_case(c)
    assert torch.equal(f.mean.double(), g.mean)
    assert torch.allclose(f.covariance().double(), g.factor @ g.factor.mT, atol=1e-5)
    assert torch.allclose(f.marginal_variance().mean(1), torch.tensor(0.7**2), rtol=1e-3)
    if noise is None:
        return
    covariance = g.noise_factor @ g.noise_factor.mT
    if g.noise_std is not None:
        covariance = covariance + torch.diag_embed(g.noise_std.square())
    assert torch.allclose(noise.covariance().double(), covariance, atol=1e-3)
    # d and V each, or both parts of feature noise, have a variance of 2².
    assert torch.allclose(noise.marginal_variance().mean(1), torch.tensor(8.0), rtol=1e-3)


def test_many_classes_have_a_diagonal_covariance(script: ModuleType) -> None:
    c = script.case(300, "none", 0.7, 0.0, 2)
    g, (f, _) = script.gaussian(c), script.package_case(c)
    assert g.factor is None
    assert f.form is None
    assert torch.allclose(f.var.double(), g.std.square(), rtol=1e-5)
    assert torch.allclose(f.var.mean(1), torch.tensor(0.49))


@pytest.mark.parametrize(("gp_sd", "bound"), [(1.0, 0.005), (3.0, 0.02)])
@pytest.mark.parametrize("kind", ["low_rank", "parameter_efficient", "feature"])
@pytest.mark.parametrize("classes", [10, 100, 1000])
def test_wide_noise_stays_within_the_bounds_of_the_split(
    script: ModuleType, classes: int, kind: str, gp_sd: float, bound: float
) -> None:
    """Against the stored references, of every fifth input."""
    stored, _ = script.read_references(ROOT / "benchmarks" / "results" / "split_reference.safetensors")
    true = stored[script.key(classes, kind, gp_sd, 8.0)].double() * script.UNIT
    assert true.shape[1] == script.INPUTS
    case = script.case(classes, kind, gp_sd, 8.0, script.INPUTS)
    mean, scales, std = (None if t is None else t[::5] for t in (case.mean, case.scales, case.noise_std))
    parts = tuple(t[::5] if len(t) == script.INPUTS else t for t in case.parts)
    some = case._replace(mean=mean, scales=scales, noise_std=std, parts=parts)
    _, model = script.package_split(*script.package_case(some))
    assert float((model - true[0, ::5]).square().mean().sqrt()) < bound
    assert float(true[0].mean()) > 2 * bound


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setattr(sys, "argv", ["split.py", *arguments])
    script.main()


def test_accuracy_reads_the_references(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "GP_SD", (1.0,))
    monkeypatch.setattr(script, "NOISE_SD", (0.0, 2.0))
    common = ["--classes", "4", "--out", str(tmp_path)]
    run(script, monkeypatch, "references", "--inputs", "3", "--sizes", "128", "128", "8", "16384", *common)
    run(script, monkeypatch, "accuracy", *common)
    assert "| 4 | feature | 1.0 | 2.0 |" in capsys.readouterr().out
    rows = json.loads((tmp_path / "split_accuracy.json").read_text())["accuracy"]
    assert len(rows) == 4
    assert all(row["after"]["rms"] < 0.03 and row["after"]["probs"] < 0.02 for row in rows)
    run(script, monkeypatch, "references", *common)
    assert "error" not in capsys.readouterr().out  # all are there


def test_heads_of_two_packages(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "METHODS", (("hetsngp", "kronecker"),))
    monkeypatch.setattr(script, "HEAD_NOISE", {"4": 4.0})
    sizes = "--classes 4 --inputs 3 --steps 2 --rounds 1 --threads 1 --sizes 64 64 8 4096"
    arguments = ["--before", str(ROOT / "src"), "--out", str(tmp_path), *sizes.split()]
    run(script, monkeypatch, "heads", *arguments)
    assert "| 4 | hetsngp | kronecker | 4 (" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "split_heads.json").read_text())["heads"]
    assert row["before"]["rms"] == row["after"]["rms"]
    assert row["after"]["predict, cpu"] > 0
    run(script, monkeypatch, "heads", "--no-errors", *arguments)
    (again,) = json.loads((tmp_path / "split_heads.json").read_text())["heads"]
    assert again["after"]["rms"] == row["after"]["rms"]
    assert again["after"]["predict, cpu"] != row["after"]["predict, cpu"]
    assert again["sd"] == row["sd"]
