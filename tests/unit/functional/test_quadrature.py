"""The one-dimensional rules against adaptive quadrature."""

import functools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, special

from hetsngp.functional import quadrature
from hetsngp.functional.quadrature import (
    expected_log_sigmoid,
    expected_sigmoid,
    log_expected_sigmoid,
)

# −140 lies between −s² and −s²/2 for s = 12: there only the tilted rule is accurate.
MEANS = [-300.0, -140.0, -40.0, -5.0, -0.3, 0.0, 2.0, 25.0]
STDS = [0.0, 0.01, 0.5, 1.4999, 1.5001, 3.0, 12.0, 40.0]


@functools.cache
def oracle(m: float, s: float, kind: str) -> float:
    """log E σ or E log σ by scipy, with the largest exponent taken out."""
    if s == 0:
        return float(special.log_expit(m))
    if kind == "mean_log":
        value, _ = integrate.quad(
            lambda z: special.log_expit(m + s * z) * math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi),
            -40, 40, points=[-m / s] if abs(m / s) < 40 else None, limit=500, epsabs=1e-13, epsrel=1e-13,
        )  # fmt: skip
        return value
    z, step = np.linspace(-60 - s, 60 + s, 100_001, retstep=True)  # poles of σ are 40 steps away and more
    exponent = special.log_expit(m + s * z) - 0.5 * z**2 - 0.5 * math.log(2 * math.pi)
    return float(special.logsumexp(exponent) + math.log(step))


@pytest.mark.parametrize("kind", ["log_mean", "mean_log"])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 3e-6)])
def test_against_adaptive_quadrature(kind: str, dtype: torch.dtype, rtol: float) -> None:
    fn = log_expected_sigmoid if kind == "log_mean" else expected_log_sigmoid
    for m in MEANS:
        for s in STDS:
            got = float(fn(torch.tensor(m, dtype=dtype), torch.tensor(s * s, dtype=dtype)))
            want = oracle(m, s, kind)
            assert got == pytest.approx(want, rel=rtol, abs=rtol), (m, s)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-13), (torch.float32, 3e-7)])
def test_the_probability_alone(dtype: torch.dtype, atol: float) -> None:
    """The same expectation in all elements at once, so that both rules take part."""
    mean, std = (
        torch.cartesian_prod(*(torch.tensor(t, dtype=torch.float64) for t in (MEANS, STDS)))
        .to(dtype)
        .unbind(1)
    )
    got = expected_sigmoid(mean, std.square())
    want = [math.exp(oracle(m, s, "log_mean")) for m in MEANS for s in STDS]
    assert got.tolist() == pytest.approx(want, rel=0, abs=atol)


@pytest.mark.parametrize("fn", [log_expected_sigmoid, expected_log_sigmoid])
def test_gradients(fn) -> None:
    g = torch.Generator().manual_seed(0)
    mean = (torch.randn(30, generator=g, dtype=torch.float64) * 6).requires_grad_()
    var = (torch.rand(30, generator=g, dtype=torch.float64) * 20).requires_grad_()
    assert torch.autograd.gradcheck(fn, (mean, var))


def test_probabilities_never_exceed_one() -> None:
    mean = torch.linspace(-60, 60, 4001)
    for s in (0.1, 1.0, 1.6, 10.0):
        yes, no = log_expected_sigmoid(mean, torch.full_like(mean, s * s)), None
        no = log_expected_sigmoid(-mean, torch.full_like(mean, s * s))
        assert yes.max() <= 0
        assert torch.allclose(yes.exp() + no.exp(), torch.ones_like(mean), atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("fn", [log_expected_sigmoid, expected_log_sigmoid])
def test_pieces_equal_the_whole(fn, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a piece holds: narrow or wide elements only, or both; one row broadcast against many."""
    g = torch.Generator().manual_seed(0)
    mean = (5 * torch.randn(6, 7, generator=g, dtype=dtype)).requires_grad_()
    std = torch.tensor([0.0, 0.3, 1.4, 1.6, 9.0, 2.0], dtype=dtype)[:, None] * torch.ones(7, dtype=dtype)
    var = std.square().requires_grad_()
    cotangent = torch.randn(6, 7, generator=g, dtype=dtype)
    small = var.detach()[2:4, :1].clone().requires_grad_()
    results = []
    for elements in (10**6, 7, 5, 1):
        monkeypatch.setattr(quadrature, "PIECE", 128 * elements)
        out = fn(mean, var)
        broadcast = fn(mean[:2], small)
        grads = torch.autograd.grad(
            (out * cotangent).sum() + (broadcast * cotangent[:2]).sum(), (mean, var, small)
        )
        results.append((out, broadcast, *grads))
    assert results[0][0].shape == (6, 7)
    tolerance = 1e-13 if dtype == torch.float64 else 1e-6
    for pieces in results[1:]:
        for got, want in zip(pieces, results[0], strict=True):
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    row = [float(fn(m, v)) for m, v in zip(mean[3].detach(), var[3].detach(), strict=True)]  # one by one
    torch.testing.assert_close(
        results[0][0][3].detach(), torch.tensor(row, dtype=dtype), rtol=0, atol=tolerance
    )


def test_no_more_than_a_piece_is_worked_on_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes × elements of a large tensor would take a hundred times its memory."""
    sizes = []
    piece = quadrature._piece

    def watched(m: torch.Tensor, s: torch.Tensor, kind: str):
        sizes.append(m.numel())
        return piece(m, s, kind)

    monkeypatch.setattr(quadrature, "_piece", watched)
    mean = torch.zeros(5, quadrature.PIECE // 128)
    log_expected_sigmoid(mean, torch.ones_like(mean))
    assert sum(sizes) == mean.numel()
    assert max(sizes) <= quadrature.PIECE // 128
