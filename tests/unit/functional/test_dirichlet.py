"""Doubt of a Dirichlet: against scipy, 60 decimals, its own samples, and what it tends to."""

import math
from decimal import Decimal

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from tests.reference import oracles
from torch import Tensor

from hetsngp.functional import dirichlet

SCALARS = ["expected_entropy", "mutual_information", "differential_entropy", "uncertain_cross_entropy"]


def values(name: str, alpha: Tensor, y: Tensor) -> Tensor:
    function = getattr(dirichlet, name)
    return function(alpha, y) if name == "uncertain_cross_entropy" else function(alpha)


def moderate(classes: int, rows: int = 6) -> Tensor:
    """α between one and about fifty."""
    g = torch.Generator().manual_seed(classes)
    return 1 + 20 * torch.rand(rows, classes, generator=g, dtype=torch.float64).square() * 2.5


def extremes(classes: int) -> Tensor:
    """Nothing seen, one class seen often, all seen often, both sides of the series' start, all scales."""
    g = torch.Generator().manual_seed(classes)
    rows = torch.ones(8, classes, dtype=torch.float64)
    rows[1, 0] = 1e10
    rows[2] = 1e8
    rows[3] = 1e12
    rows[4, -1] = 1e12
    rows[5] = torch.linspace(9.9, 10.1, classes, dtype=torch.float64)
    rows[6] = 10.0
    rows[7] = 10 ** (12 * torch.rand(classes, generator=g, dtype=torch.float64))
    return rows


@pytest.mark.parametrize("classes", [2, 3, 100])
def test_against_scipy(classes: int) -> None:
    alpha = moderate(classes)
    a, y = alpha.numpy(), torch.arange(len(alpha)) % classes
    a0 = a.sum(-1)
    p = a / a0[:, None]
    expected = scipy.special.psi(a0 + 1) - (p * scipy.special.psi(a + 1)).sum(-1)
    oracle = {
        "mean": np.stack([scipy.stats.dirichlet(row).mean() for row in a]),
        "expected_entropy": expected,
        "mutual_information": scipy.stats.entropy(p, axis=-1) - expected,
        "differential_entropy": np.array([scipy.stats.dirichlet(row).entropy() for row in a]),
        "uncertain_cross_entropy": scipy.special.psi(a0) - scipy.special.psi(a[range(len(a)), y.numpy()]),
        "latent_variance": scipy.special.polygamma(1, a).mean(-1),
    }
    for name, want in oracle.items():
        got = values(name, alpha, y).numpy()
        # The oracles add up some K·lgamma(50) of rounding, and torch's trigamma is right to 5e-10.
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-14 * classes * 150, err_msg=name)


def exact(alpha: Tensor, y: Tensor) -> dict[str, np.ndarray]:
    rows = [oracles.dirichlet(row, c) for row, c in zip(alpha.tolist(), y.tolist(), strict=True)]
    return {name: np.array([row[name] for row in rows]) for name in SCALARS}


@pytest.mark.parametrize("classes", [2, 3, 100])
def test_digits_are_kept_at_every_scale(classes: int) -> None:
    """To 1e-13 of the value, where the naive formulas have no digit right. An entropy may be near zero: it is
    right to that, or to 1e-15 of the K·log(1e12) that it adds up."""
    alpha = torch.cat([extremes(classes), moderate(classes, 2)])
    for y in (alpha.argmax(-1), alpha.argmin(-1)):
        for name, want in exact(alpha, y).items():
            atol = 3e-14 * classes if name == "differential_entropy" else 0
            got = values(name, alpha, y).numpy()
            np.testing.assert_allclose(got, want, rtol=1e-13, atol=atol, err_msg=name)


def test_single_precision_is_enough() -> None:
    alpha = torch.cat([extremes(3), moderate(3, 2)]).float()
    for y in (alpha.argmax(-1), alpha.argmin(-1)):
        for name, want in exact(alpha, y).items():
            got = values(name, alpha, y)
            assert got.dtype == torch.float32
            atol = 1e-5 if name == "differential_entropy" else 0
            # torch's digamma is right to 5e-7, and what it is taken from here is a twentieth.
            np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=atol, err_msg=name)


def test_the_decimal_oracle_is_scipy_where_scipy_is_right() -> None:
    for x in (1.0, 1.5, 7.25, 123.0, 1e6):
        lgamma, digamma = (float(v) for v in oracles.lgamma_and_digamma(Decimal(x)))
        assert lgamma == pytest.approx(scipy.special.gammaln(x), rel=1e-14, abs=1e-15)
        assert digamma == pytest.approx(scipy.special.psi(x), rel=1e-14)


@pytest.mark.parametrize(("classes", "samples"), [(2, 100_000), (3, 100_000), (100, 10_000)])
def test_against_its_own_samples(classes: int, samples: int) -> None:
    """Means over draws, within four standard errors: no digamma anywhere."""
    alpha = moderate(classes, rows=2)
    rng = np.random.default_rng(classes)
    for row in alpha:
        p = rng.dirichlet(row.numpy(), samples)
        log_p = np.log(p)
        y = int(row.argmin())
        log_norm = math.lgamma(row.sum()) - sum(math.lgamma(a) for a in row)
        logits = np.log(rng.gamma(row.numpy(), size=(samples, classes)))
        draws = {
            "expected_entropy": -(p * log_p).sum(-1),
            "uncertain_cross_entropy": -log_p[:, y],
            "differential_entropy": -log_norm - ((row.numpy() - 1) * log_p).sum(-1),
            "latent_variance": ((logits - logits.mean(0)) ** 2).mean(-1),
        }
        for name, draw in draws.items():
            got = float(values(name, row.unsqueeze(0), torch.tensor([y])))
            assert abs(draw.mean() - got) < 4 * draw.std() / math.sqrt(samples), name


def test_latent_variance_is_that_of_the_logits_behind_the_dirichlet() -> None:
    """softmax of independent log-Gamma variables is the Dirichlet: the mean and the variance of p agree."""
    alpha, samples = np.array([1.0, 2.5, 8.0]), 100_000
    logits = np.log(np.random.default_rng(0).gamma(alpha, size=(samples, 3)))
    p = oracles.softmax(logits)
    law = scipy.stats.dirichlet(alpha)
    assert (abs(p.mean(0) - law.mean()) < 4 * np.sqrt(law.var() / samples)).all()
    square = (p - law.mean()) ** 2
    assert (abs(square.mean(0) - law.var()) < 4 * square.std(0) / math.sqrt(samples)).all()


@pytest.mark.parametrize("name", [*SCALARS, "mean", "latent_variance"])
@pytest.mark.parametrize("classes", [2, 3])
def test_gradients(classes: int, name: str) -> None:
    # Off α = 10 exactly: a finite difference across the start of the series sees its 1e-15, not a slope.
    alpha = torch.cat([moderate(classes), 1 + 1e-3 * moderate(classes)]).requires_grad_()
    y = torch.arange(len(alpha)) % classes
    assert torch.autograd.gradcheck(lambda a: values(name, a, y), (alpha,), atol=1e-7, rtol=1e-6)


def test_gradients_at_the_extremes() -> None:
    """Where a finite difference sees nothing, the second derivatives of lgamma do, in scipy's asymptotics."""
    alpha = extremes(3)[[1, 2, 4, 6]].requires_grad_()
    y = torch.tensor([0, 1, 2, 0])
    a = alpha.detach().numpy()
    a0 = a.sum(-1, keepdims=True)
    trigamma = scipy.special.polygamma(1, a)
    trigamma0 = scipy.special.polygamma(1, a0)
    (got,) = torch.autograd.grad(dirichlet.uncertain_cross_entropy(alpha, y).sum(), alpha)
    # α_y ≫ the rest: ψ′(α₀) − ψ′(α_y) = −rest·(1/α_y²), which the difference of trigammas cannot show.
    own = np.arange(3) == y.numpy()[:, None]
    want = trigamma0 - own * trigamma
    rest = a0 - a
    want = np.where(own & (a > 1e9), -rest / a**2, want)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-8)
    (got,) = torch.autograd.grad(dirichlet.differential_entropy(alpha).sum(), alpha)
    # d/dα_c = (α₀ − K)ψ′(α₀) − (α_c − 1)ψ′(α_c), and xψ′(x) = 1 + 1/2x + 1/6x² + …
    excess, excess0 = (np.where(x > 1e6, 1 / (2 * x), x * t - 1) for x, t in ((a, trigamma), (a0, trigamma0)))
    want = (excess0 - 3 * trigamma0) - (excess - trigamma)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-8)


def test_a_concentrated_dirichlet_is_a_gaussian() -> None:
    """H → ½ log((2πe)^(K−1) det Cov) with det(diag p − ppᵀ) = Π p on K − 1 classes; the error is O(K/α)."""
    for scale in (1e8, 1e10, 1e12):
        p = torch.tensor([[0.2, 0.3, 0.1, 0.4]], dtype=torch.float64)
        covariance = (torch.diag(p[0]) - torch.outer(p[0], p[0]))[:3, :3] / scale
        want = 0.5 * (3 * math.log(2 * math.pi * math.e) + torch.logdet(covariance))
        assert torch.allclose(
            dirichlet.differential_entropy(scale * p), want, rtol=0, atol=10 / scale + 1e-12
        )
        # And I(y; p) → ½ Σ Var(p_c)/p_c.
        want = 0.5 * torch.tensor(3 / scale, dtype=torch.float64)
        assert torch.allclose(dirichlet.mutual_information(scale * p), want, rtol=10 / scale + 1e-12, atol=0)


def test_nothing_seen_and_the_order_of_uncertainty() -> None:
    for classes in (2, 3, 100):
        ones = torch.ones(1, classes, dtype=torch.float64)
        assert dirichlet.differential_entropy(ones).item() == pytest.approx(-math.lgamma(classes), rel=1e-13)
        harmonic = sum(1 / k for k in range(2, classes + 1))
        assert dirichlet.expected_entropy(ones).item() == pytest.approx(harmonic, rel=1e-13)
        assert dirichlet.latent_variance(ones).item() == pytest.approx(math.pi**2 / 6, rel=1e-9)
    scales = torch.logspace(0, 12, 50, dtype=torch.float64).unsqueeze(1)
    alpha = scales * torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    for name in ("mutual_information", "differential_entropy", "latent_variance"):
        assert (values(name, alpha, torch.zeros(50, dtype=torch.long)).diff() < 0).all(), name
    assert (dirichlet.expected_entropy(alpha).diff() >= -1e-15).all()  # what is left is the data's


def test_the_split_adds_up_and_keeps_its_signs() -> None:
    alpha = torch.cat([extremes(5), moderate(5)])
    p = dirichlet.mean(alpha)
    data, model = dirichlet.expected_entropy(alpha), dirichlet.mutual_information(alpha)
    assert torch.allclose(data + model, torch.special.entr(p).sum(-1), rtol=1e-12, atol=1e-15)
    assert (data > 0).all()
    assert (model > 0).all()
    order = torch.randperm(5)
    assert torch.allclose(dirichlet.mutual_information(alpha[:, order]), model, rtol=1e-13, atol=0)
    assert torch.allclose(dirichlet.expected_entropy(alpha[:, order]), data, rtol=1e-13, atol=0)
