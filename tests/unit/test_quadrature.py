"""The one-dimensional rules against adaptive quadrature."""

import functools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, special

from hetsngp.functional.quadrature import expected_log_sigmoid, log_expected_sigmoid, normal_nodes

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


def test_normal_nodes_integrate_polynomials() -> None:
    z, w = normal_nodes(like=torch.zeros((), dtype=torch.float64))
    moments = [float((w * z**k).sum()) for k in (0, 2, 4, 6)]
    assert moments == pytest.approx([1, 1, 3, 15], rel=1e-9)
