"""E softmax and E σ against tensor grids, long Monte Carlo and a textbook that keeps every sample."""

import itertools
import math
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
import torch
from tests.reference import contrast_grid, oracles
from torch import Tensor

import hetsngp
from hetsngp.functional import integration, label_loss
from hetsngp.functional.integration import Grid
from hetsngp.functional.laplace import contrast_basis
from hetsngp.functional.link import (
    TARGET_ERROR,
    correlated_draws,
    correlated_nll,
    half_spread,
    mean_changes,
    num_draws,
    num_factor_points,
    num_points,
    separated,
    sigmoid_log_probs,
    softmax_log_probs,
    softmax_probs,
)
from hetsngp.functional.sampling import (
    LATIN_SCRAMBLES,
    SCRAMBLES,
    IntegrationPoints,
    StreamedLogSoftmax,
    TaylorControl,
    _normal_from_uniform,
    pack,
    random_signs,
)
from hetsngp.nn.extractor import Features
from hetsngp.types import Factor, FactorSum, UtilityNormal

NOISE = {"mild": (0.5, 0.5), "wide factor": (4.0, 1.0), "wide diagonal": (1.0, 6.0), "wide both": (5.0, 5.0)}


def utility(
    batch: int, classes: int, rank: int, kind: str, seed: int = 0, dtype=torch.float32
) -> UtilityNormal:
    g = torch.Generator().manual_seed(seed)
    in_factor, in_diagonal = NOISE[kind]
    mean = 2 * torch.randn(batch, classes, generator=g, dtype=dtype)
    factor = in_factor / math.sqrt(rank) * torch.randn(batch, classes, rank, generator=g, dtype=dtype)
    return UtilityNormal(mean, torch.full((batch, classes), in_diagonal**2, dtype=dtype), factor)


def numpy_parts(u: UtilityNormal, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, std and factor of one row."""
    dense = u.form.dense() if u.form is not None else torch.zeros(*u.mean.shape, 1)
    return tuple(t[row].double().numpy() for t in (u.mean, u.var.sqrt(), dense))


# --- values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NOISE)
@pytest.mark.parametrize("classes", [3, 4])
def test_a_few_classes_against_a_grid(kind: str, classes: int) -> None:
    """At many points of the factor; what is left is the error of the nodes."""
    u = utility(4, classes, 2, kind, dtype=torch.float64)
    count, step = 2**13, {"step": 0.1} if classes == 3 else {"step": 0.3, "half": 6.0}
    probs, points = softmax_probs(u, num_samples=count)
    assert points == count
    want = contrast_grid.log_mean(u, **step)
    assert (probs - want.exp()).abs().max() < 0.003
    log_mean = softmax_log_probs(u, num_samples=count, seed=0)
    assert (log_mean.exp() - want.exp()).abs().max() < 0.003
    mean_log = softmax_log_probs(u, num_samples=count, seed=0, likelihood="mean_log")
    assert (mean_log - contrast_grid.mean_log(u, **step)).abs().max() < 0.03


def test_without_a_factor_no_points_are_taken() -> None:
    """The seed changes nothing, and neither does the number of points."""
    u = utility(6, 4, 1, "wide diagonal", dtype=torch.float64)
    u = UtilityNormal(u.mean, u.var)
    probs, points = softmax_probs(u, seed=3)
    assert points == 0
    want = contrast_grid.log_mean(u, step=0.15, half=6.0)
    assert (probs - want.exp()).abs().max() < 1e-3
    log_probs = softmax_log_probs(u, seed=0)
    assert (log_probs - want).abs().max() < 3e-3
    assert torch.equal(log_probs, softmax_log_probs(u, num_samples=7, seed=1, decorrelate=True))
    assert torch.equal(probs, softmax_probs(u, num_samples=7, seed=1)[0])


def test_two_classes_are_exact() -> None:
    u = utility(5, 2, 3, "wide both", dtype=torch.float64)
    probs, points = softmax_probs(u)
    assert points == 0
    for row in range(5):
        oracle = oracles.expected_softmax(u.mean[row].numpy(), u.covariance()[row].numpy(), step=0.005)
        assert probs[row].numpy() == pytest.approx(oracle, abs=1e-9)
        assert softmax_log_probs(u, num_samples=1)[row].exp().numpy() == pytest.approx(oracle, abs=1e-9)
        mean_log = softmax_log_probs(u, num_samples=1, likelihood="mean_log")[row].numpy()
        mean, cov = u.mean[row].numpy(), u.covariance()[row].numpy()
        assert mean_log == pytest.approx(oracles.expected_log_softmax(mean, cov, step=0.005), abs=1e-9)


def test_no_noise_is_the_plain_softmax() -> None:
    mean = torch.randn(3, 5)
    u = UtilityNormal(mean, torch.zeros(3, 5))
    assert torch.equal(softmax_probs(u)[0], torch.softmax(mean, -1))
    assert (softmax_log_probs(u) - torch.log_softmax(mean, -1)).abs().max() < 1e-3
    # Rows with noise beside those without, and a factor that is zero.
    some = UtilityNormal(mean, torch.tensor([[0.0], [1.0], [0.0]]).expand(3, 5))
    assert torch.equal(softmax_probs(some)[0][[0, 2]], torch.softmax(mean, -1)[[0, 2]])
    assert not torch.allclose(softmax_probs(some)[0][1], torch.softmax(mean, -1)[1], atol=1e-3)
    zero = UtilityNormal(mean, torch.zeros(3, 5), torch.zeros(3, 5, 2))
    assert (softmax_probs(zero)[0] - torch.softmax(mean, -1)).abs().max() < TARGET_ERROR


def sobol_reference(u: UtilityNormal, count: int, seed: int = 5) -> Tensor:
    """E softmax(u) by Sobol points in all coordinates, float64: (B, K)."""
    columns = torch.diag_embed(u.var.double().sqrt())
    if u.form is not None:
        columns = torch.cat([columns, u.form.dense().double().expand(len(columns), -1, -1)], -1)
    engine = torch.quasirandom.SobolEngine(columns.shape[-1], scramble=True, seed=seed)
    points = torch.special.ndtri(engine.draw(count, dtype=torch.float64).clamp(1e-12, 1 - 1e-12))
    out = torch.zeros_like(u.mean, dtype=torch.float64)
    for eps in points.split(2**8):
        out += torch.softmax(u.mean.double().unsqueeze(1) + eps @ columns.mT, -1).sum(1) / count
    return out


def given_factor_reference(u: UtilityNormal, count: int, seed: int = 5) -> Tensor:
    """E softmax(u) by the integral without a factor (tests/unit/functional/test_integration.py), in float64,
    at many Sobol points of the factor's coordinates: (B, K).
    """
    dense = u.form.dense().double()
    engine = torch.quasirandom.SobolEngine(dense.shape[-1], scramble=True, seed=seed)
    points = torch.special.ndtri(engine.draw(count, dtype=torch.float64).clamp(1e-12, 1 - 1e-12))
    rows = []
    for mean, var, factor in zip(u.mean.double(), u.var.double(), dense, strict=True):
        means = mean + points @ factor.mT
        rows.append(integration.probs_and_entropy(means, var.expand_as(means), entropy=False)[0].mean(0))
    return torch.stack(rows)


@pytest.mark.parametrize(("classes", "rank"), [(3, 2), (10, 6), (100, 6), (100, 15)])
@pytest.mark.parametrize("kind", NOISE)
def test_the_default_number_of_points_meets_the_target_error_nearly_always(
    classes: int, rank: int, kind: str
) -> None:
    """``num_samples=None``: the error of the largest of K probabilities, of 10 rows or more. The points of
    many classes are too few where a factor much wider than the diagonal decides the class.
    """
    rows = {3: 200, 10: 40, 100: 10}[classes]
    u = utility(rows, classes, rank, kind, seed=classes)
    probs, points = softmax_probs(u)
    assert points == num_factor_points(classes)
    assert torch.allclose(probs.sum(-1), torch.ones(rows), atol=1e-3)
    if classes == 3:
        want = contrast_grid.log_mean(u, step=0.2, half=6.0).exp()
    else:
        want = given_factor_reference(u, 2**11)
    at = want.argmax(-1, keepdim=True)
    error = (probs - want).gather(1, at).abs()
    largest = 2 * TARGET_ERROR if kind == "wide factor" and classes == 100 else TARGET_ERROR
    assert error.square().mean().sqrt() < largest
    assert (error < 2 * largest).double().mean() > 0.9
    assert (probs - want).mean().abs() < 1e-3


def test_numbers_of_points() -> None:
    """More of few classes; an M-th each of M members; none without a factor."""
    assert [num_factor_points(k) for k in (3, 32, 33, 20_000)] == [512, 512, 256, 256]
    u = utility(2, 5, 3, "mild")
    assert num_points(u, None, "sobol") == num_factor_points(5)
    assert num_points(u, None, "sobol", members=4) == num_factor_points(5) // 4
    assert num_points(u, 7, "sobol", members=4) == 7
    assert num_points(UtilityNormal(u.mean, u.var), 7, "sobol") == 0
    for sampled in (num_points(u, None, "mc"), num_points(utility(2, 5, 65, "mild"), None, "sobol")):
        assert sampled == 2048
    assert softmax_probs(u, members=4)[1] == num_factor_points(5) // 4


# --- classes that the posterior correlates --------------------------------------------------------------


def contrasts(rows: int, classes: int, sd: float, seed: int = 3, ratio: float = 5.0) -> Factor:
    """Factor as of the Kronecker posterior; variances of contrasts that differ by ``ratio``."""
    g = torch.Generator().manual_seed(seed)
    half = math.log10(ratio) / 2
    column = sd * torch.logspace(half, -half, classes - 1).sqrt().expand(rows, -1)
    other = torch.randn(classes, classes - 1, generator=g)
    basis = contrast_basis(classes, other)
    return Factor(basis @ torch.linalg.qr(basis.mT @ other)[0], column=column.contiguous(), contrasts=True)


@pytest.mark.parametrize("noise", [False, True], ids=["alone", "beside noise"])
@pytest.mark.parametrize("sd", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("classes", [3, 10])
def test_correlated_classes_against_a_reference(classes: int, sd: float, noise: bool) -> None:
    rows = 40
    u, factor = utility(rows, classes, 2, "mild", seed=1), contrasts(rows, classes, sd)
    var = u.var if noise else torch.zeros_like(u.var)
    form = FactorSum((Factor(u.factor), factor)) if noise else factor
    u = UtilityNormal(u.mean, var, form)
    probs, points = softmax_probs(u)
    assert points == (num_factor_points(classes) if noise else num_draws(classes))
    want = sobol_reference(u, 2**13)
    error = (probs - want).square().mean().sqrt()
    assert error < 0.8 * TARGET_ERROR
    assert (probs - want).abs().max() < (2 if sd < 3 else 4) * TARGET_ERROR
    # Independent classes would be another answer.
    other = UtilityNormal(u.mean, u.var + factor.variance(), Factor(form.parts[0].basis) if noise else None)
    if sd == 3:
        assert (softmax_probs(other)[0] - want).square().mean().sqrt() > 2 * error


@pytest.mark.parametrize("chunk", [1, 3000])
def test_chunks_of_correlated_draws_add_up(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    u = utility(5, 6, 2, "mild", dtype=torch.float64)
    factor = contrasts(5, 6, 1.0)
    factor = Factor(factor.basis.double(), column=factor.column.double(), contrasts=True)
    each = (factor, FactorSum((Factor(u.factor), factor)))
    want = [softmax_probs(UtilityNormal(u.mean, u.var, form))[0] for form in each]
    monkeypatch.setattr("hetsngp.functional.sampling.CPU_CHUNK", chunk)
    monkeypatch.setattr(integration, "_CHUNK", chunk)
    for form, expected in zip(each, want, strict=True):
        got = softmax_probs(UtilityNormal(u.mean, u.var, form))[0]
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


# --- samplers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["mc", "antithetic"])
def test_plain_samplers_agree_within_four_standard_errors(sampler: str) -> None:
    u = utility(1, 5, 3, "mild", dtype=torch.float64)
    reference, sd = oracles.monte_carlo_softmax(*numpy_parts(u, 0), samples=2**20, seed=3)
    probs, points = softmax_probs(u, num_samples=4096, sampler=sampler)
    assert points == 4096
    assert (np.abs(probs[0].numpy() - reference) <= 4 * sd * math.sqrt(1 / 4096 + 2**-20)).all()


@pytest.mark.parametrize("sampler", ["sobol", "mc", "antithetic"])
def test_estimates_are_unbiased(sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Independent randomisations scatter around the truth; at many nodes points are the source of error."""
    monkeypatch.setattr(integration, "COARSE_DEGREE", 12)
    u = utility(2, 4, 3, "wide both", seed=5, dtype=torch.float64)
    want = contrast_grid.log_mean(u, step=0.2, half=6.0).exp()
    draws = torch.stack([softmax_probs(u, num_samples=16, seed=s, sampler=sampler)[0] for s in range(300)])
    error = draws.std(0) / math.sqrt(300)
    assert ((draws.mean(0) - want).abs() < 4 * error + 5e-4).all()
    assert draws.std(0).max() > 0.005


def test_draws_of_contrasts_do_not_depend_on_those_of_noise() -> None:
    """Three classes, correlated beside mild noise: two thousand draws leave an error far below the target."""
    u, factor = utility(40, 3, 2, "mild", seed=1), contrasts(40, 3, 1.0)
    u = UtilityNormal(u.mean, u.var, FactorSum((Factor(u.factor), factor)))
    want = contrast_grid.log_mean(u, step=0.2).exp()
    assert (softmax_probs(u)[0] - want).square().mean().sqrt() < 0.001


def test_a_wide_factor_takes_points_in_all_coordinates() -> None:
    """Against the same covariance with few columns."""
    g = torch.Generator().manual_seed(0)
    u = utility(6, 4, 2, "mild", dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(80, 2, generator=g, dtype=torch.float64))[0]
    wide = UtilityNormal(u.mean, u.var, u.factor @ rotation.mT)
    probs, points = softmax_probs(wide)
    assert points == 2048
    assert (probs - contrast_grid.log_mean(u).exp()).abs().max() < TARGET_ERROR


@pytest.mark.parametrize(("rank", "diagonal"), [(3, 5), (2, 200)])
def test_points_are_stratified_in_every_coordinate(rank: int, diagonal: int) -> None:
    """A net and a Latin hypercube alike: 64 points, one in each 64th of every coordinate's mass."""
    like = torch.zeros((), dtype=torch.float64)
    strata = torch.arange(64, dtype=torch.float64)[:, None].expand(64, rank + diagonal)
    inside = []
    for seed in range(20):
        uniform = 64 * torch.special.ndtr(
            torch.cat(IntegrationPoints("sobol", rank, diagonal, seed).block(0, 64, like=like), 1)
        )
        assert torch.equal(uniform.floor().sort(0)[0], strata)
        assert len(uniform.floor().unique(dim=1)[0]) == rank + diagonal  # no two coordinates alike
        inside.append(uniform.frac())
    place = torch.stack(inside)  # where in its stratum a point lies: anywhere
    count = 20 if diagonal < 100 else 20 * 64  # a shift moves all points of a net together
    assert (place.mean((0, 1)) - 0.5).abs().max() < 5 * math.sqrt(1 / 12 / count)
    assert place.std((0, 1)).min() > 0.1


def latin(seed: int, count: int = 16, *, start: int = 0, replicate: int = 0, columns: int = 140) -> Tensor:
    """Uniform points of the Latin hypercube: (count, columns)."""
    like = torch.zeros((), dtype=torch.float64)
    block = IntegrationPoints("sobol", 0, columns, seed).block(start, count, like=like, replicate=replicate)
    return torch.special.ndtr(block[1])


def test_the_latin_hypercube_has_one_point_in_each_stratum_whatever_its_size() -> None:
    """Up to the 4,096 points at once that the nested rule takes; numbers that are no power of two too."""
    for count in (1, 2, 7, 100, 256, 4096):
        strata = (count * latin(1, count, columns=129)).floor().long()
        assert torch.equal(strata.sort(0)[0], torch.arange(count)[:, None].expand(count, 129))


def test_each_point_of_the_latin_hypercube_is_uniform_over_seeds() -> None:
    """Also over those that share their permutations: every point lands in every stratum equally often."""
    count, seeds = 8, range(0, 4 * 1500, LATIN_SCRAMBLES)
    draws = torch.stack([latin(seed, count) for seed in seeds])  # (1500, 8, 140)
    strata = torch.nn.functional.one_hot((count * draws).long(), count).sum(0).double()  # of each point
    expected = len(seeds) / count
    chi_square = ((strata - expected).square() / expected).sum(-1)  # count − 1 degrees of freedom
    degrees = (count - 1) * chi_square.numel()
    # The points of a column share its rotation and so their χ²: √count times the spread.
    assert abs(float(chi_square.sum()) - degrees) < 4 * math.sqrt(2 * degrees) * math.sqrt(count)
    assert chi_square.max() < 45  # P(χ²₇ > 45) = 1.4e-7, of 1,120
    place = (count * draws).frac()
    assert abs(float(place.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / place.numel())


def test_the_latin_hypercube_has_no_interactions_on_average() -> None:
    """E (x_i − ½)(x_j − ½) = 0 over seeds, though four sets of permutations serve for all of them; and so for
    two replicates that share one, or their spread would tell nothing about the error."""
    seeds, pairs = 400, 70
    products = []
    for replicate in (0, LATIN_SCRAMBLES):
        draws = torch.stack([latin(LATIN_SCRAMBLES * s, replicate=replicate) - 0.5 for s in range(seeds)])
        products.append((draws[..., :pairs] * draws[..., pairs:]).mean(1))  # (400, 70) of disjoint pairs
    together = products[0] * products[1]
    for sample in (*products, together):
        z = sample.mean(0) / (sample.std(0) / math.sqrt(seeds))
        assert z.abs().max() < 4.5
        assert z.square().mean() < 1 + 4 * math.sqrt(2 / pairs)
    plain = 1 / 144 / 16  # variance of the mean of 16 independent products
    assert products[0].var(0).mean() == pytest.approx(plain, rel=0.2)


def test_no_two_latin_hypercubes_are_alike() -> None:
    """Seeds, replicates and blocks that share their permutations differ by their shifts."""
    step = LATIN_SCRAMBLES
    blocks = [latin(seed) for seed in (0, 1, step, 2 * step)]
    blocks += [latin(0, replicate=r) for r in (1, step, 2 * step)]
    blocks += [latin(0, start=16 * i) for i in (1, step, 2 * step)]
    assert torch.equal(latin(0), blocks[0])
    for one, other in itertools.combinations([(16 * b).floor() for b in blocks], 2):
        agree = (one == other).double().mean(0)  # of each column: one in sixteen by chance
        assert agree.mean() < 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_point_is_infinite(dtype: torch.dtype) -> None:
    """One float32 uniform in 2²⁵ rounds to 1, and a net may hit 0."""
    ends = _normal_from_uniform(torch.tensor([0.0, 0.5, 1.0], dtype=dtype))
    assert torch.isfinite(ends).all()
    assert ends[0] < -5 < ends[1] == 0 < 5 < ends[2]


def test_points_are_continued_and_randomised_anew_by_seed_and_replicate() -> None:
    like = torch.zeros((), dtype=torch.float64)
    points = IntegrationPoints("sobol", 3, 4, seed=0)
    whole = torch.cat(points.block(0, 48, like=like), 1)
    pieces = [torch.cat(points.block(start, 16, like=like), 1) for start in (0, 16, 32)]
    assert torch.equal(whole, torch.cat(pieces))
    replicates = torch.cat(points.replicated_block(16, 16, 3, like=like), 1).view(3, 16, 7)
    assert torch.equal(replicates[0], pieces[1])
    for one, other in itertools.combinations(replicates, 2):
        assert (one - other).abs().min() > 0
    # Scrambles are reused every so many replicates and seeds; the digital shift is never.
    again = torch.cat(points.block(0, 48, like=like, replicate=SCRAMBLES), 1)
    assert (again - whole).abs().min() > 0
    again = torch.cat(IntegrationPoints("sobol", 3, 4, seed=SCRAMBLES).block(0, 48, like=like), 1)
    assert (again - whole).abs().min() > 0
    mirrored = torch.cat(IntegrationPoints("antithetic", 3, 4, seed=0).block(0, 48, like=like), 1)
    assert torch.equal(mirrored[:24], -mirrored[24:])


# --- gradients and memory -------------------------------------------------------------------------------


def textbook(
    u: UtilityNormal, points: IntegrationPoints, count: int, likelihood: str, flip: Tensor | None
) -> Tensor:
    """Materialise every sample, let autograd do the rest."""
    eps_factor, eps_diagonal = points.block(0, count, like=u.mean)
    if flip is not None:
        eps_factor = eps_factor * flip[:, None, : points.rank]
        eps_diagonal = eps_diagonal * flip[:, None, points.rank :]
    dense = u.form.dense()
    draws = u.mean[:, None] + u.var.sqrt()[:, None] * eps_diagonal + eps_factor @ dense.mT
    log_q = torch.log_softmax(draws, -1)
    return log_q.logsumexp(1) - math.log(count) if likelihood == "log_mean" else log_q.mean(1)


def factored(batch: int, classes: int, rank: int) -> list[Tensor]:
    """mean, var, dense factor, row, shared basis, shared basis, column."""
    g = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    tensors = [leaf(batch, classes), leaf(batch, classes).square() + 0.1, leaf(batch, classes, rank)]
    tensors += [leaf(batch, classes), leaf(classes, rank), leaf(classes, 3), leaf(batch, 3).abs() + 0.1]
    return [t.requires_grad_() for t in tensors]


def joined(
    mean: Tensor, var: Tensor, dense: Tensor, row: Tensor, basis: Tensor, eigen: Tensor, column: Tensor
):
    parts = (Factor(dense), Factor(basis, row=row), Factor(eigen, column=column))
    return UtilityNormal(mean, var, FactorSum(parts))


@pytest.mark.parametrize("likelihood", ["log_mean", "mean_log"])
def test_gradients_are_those_of_the_integral(likelihood: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At many points and nodes, in mean, var, and each tensor of dense, factored and shared factors."""
    for name in ("COARSE", "_WIDE"):
        monkeypatch.setattr(label_loss, name, Grid(32, -13.0, 2.8, 6, 0.7))
    monkeypatch.setattr(label_loss, "COARSE_DEGREE", 12)
    tensors = factored(3, 4, 2)
    weight = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    got = softmax_log_probs(joined(*tensors), num_samples=2**13, seed=3, likelihood=likelihood)
    want = (contrast_grid.log_mean if likelihood == "log_mean" else contrast_grid.mean_log)(joined(*tensors))
    assert (got - want).abs().max() < 0.02
    by_got, by_want = (torch.autograd.grad((out * weight).sum(), tensors) for out in (got, want))
    for a, b in zip(by_got, by_want, strict=True):
        assert (a - b).abs().max() < 0.02
        assert b.abs().max() > 0.04


@pytest.mark.parametrize("likelihood", ["log_mean", "mean_log"])
def test_gradients_without_a_factor_are_those_of_the_integral(likelihood: str) -> None:
    g = torch.Generator().manual_seed(0)
    mean = (2 * torch.randn(5, 4, generator=g, dtype=torch.float64)).requires_grad_()
    var = (4 * torch.rand(5, 4, generator=g, dtype=torch.float64)).requires_grad_()
    weight = torch.randn(5, 4, generator=g, dtype=torch.float64)
    out = softmax_log_probs(UtilityNormal(mean, var), likelihood=likelihood)
    oracle = contrast_grid.log_mean if likelihood == "log_mean" else contrast_grid.mean_log
    want = oracle(UtilityNormal(mean, var), step=0.3)
    assert (out - want).abs().max() < 2e-3
    for a, b in zip(
        *(torch.autograd.grad((o * weight).sum(), [mean, var]) for o in (out, want)), strict=True
    ):
        assert (a - b).abs().max() < 1e-3


def test_mean_log_is_the_mean_less_one_normalizer() -> None:
    """E log softmax(u) = μ − E log Z: E log Z is the same for all classes, and its gradient is E p."""
    tensors = factored(3, 6, 2)
    u = joined(*tensors)
    out = softmax_log_probs(u, num_samples=64, seed=0, likelihood="mean_log")
    normalizer = u.mean - out
    torch.testing.assert_close(normalizer, normalizer[:, :1].expand(-1, 6), rtol=0, atol=1e-12)
    (by_mean,) = torch.autograd.grad(normalizer[:, 0].sum(), tensors[:1])
    torch.testing.assert_close(by_mean, softmax_probs(u, num_samples=1024)[0], rtol=0, atol=0.03)
    torch.testing.assert_close(by_mean.sum(-1), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("likelihood", ["log_mean", "mean_log"])
@pytest.mark.parametrize("chunk", [1, 700])
def test_chunks_of_log_probabilities_add_up(
    likelihood: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = factored(5, 6, 2)
    weight = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def run() -> list[Tensor]:
        out = softmax_log_probs(joined(*tensors), num_samples=12, seed=3, likelihood=likelihood)
        return [out, *torch.autograd.grad((out * weight).sum(), tensors)]

    want = run()
    monkeypatch.setattr(integration, "_CHUNK", chunk)
    for got, expected in zip(run(), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("likelihood", ["log_mean", "mean_log"])
@pytest.mark.parametrize("chunk", [64, 2**18])
@pytest.mark.parametrize("flipped", [False, True])
def test_streaming_equals_the_textbook(
    likelihood: str, chunk: int, flipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetsngp.functional.sampling.CPU_CHUNK", chunk)
    tensors = factored(7, 6, 2)
    points = IntegrationPoints("sobol", 2 + 2 + 3, 6, seed=4)
    flip = random_signs(points, 7, tensors[0]) if flipped else None
    if flip is not None:
        assert (flip.abs() == 1).all()
        assert len(flip.unique(dim=0)) == 7
    weight = torch.randn(7, 6, dtype=torch.float64)
    for run in (0, 1):
        u = joined(*tensors)
        out = (
            StreamedLogSoftmax.apply(points, 200, likelihood, flip, *pack(u))
            if run
            else textbook(u, points, 200, likelihood, flip)
        )
        grads = torch.autograd.grad((out * weight).sum(), tensors)
        if run == 0:
            expected, expected_grads = out, grads
    assert torch.allclose(out, expected, atol=1e-12)
    for got, want in zip(grads, expected_grads, strict=True):
        assert torch.allclose(got, want, atol=1e-10)


def test_very_unlikely_classes_have_finite_loss_and_gradient() -> None:
    mean = torch.tensor([[0.0, -500.0, 300.0]], requires_grad=True)
    u = UtilityNormal(mean, torch.full((1, 3), 0.01), torch.full((1, 3, 1), 0.1))
    out = softmax_log_probs(u, num_samples=16, seed=0)
    assert torch.isfinite(out).all()
    out[0, 1].backward()
    assert torch.isfinite(mean.grad).all()
    assert mean.grad[0, 1] == pytest.approx(1.0, abs=0.03)  # few nodes for each point


@pytest.mark.slow
def test_memory_of_predictions_does_not_grow_with_the_number_of_points() -> None:
    """2,048 points take no more than 128; one more (B, S, K) tensor would be 125 MiB."""
    code = textwrap.dedent("""
        import resource, torch
        from hetsngp.functional.link import softmax_probs
        from hetsngp.types import UtilityNormal
        torch.set_num_threads(1)
        u = UtilityNormal(torch.randn(16, 1000), torch.rand(16, 1000), torch.randn(16, 1000, 4))
        def run(count, sampler):
            softmax_probs(u, num_samples=count, sampler=sampler)
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        small = max(run(128, sampler) for sampler in ("sobol", "mc"))
        print(max(run(2048, sampler) for sampler in ("sobol", "mc")) - small)
    """)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 48  # MiB


@pytest.mark.slow
def test_memory_of_a_streamed_gradient_does_not_grow_with_the_number_of_points() -> None:
    """O(B·K) forward and backward, where all coordinates are sampled."""
    code = textwrap.dedent("""
        import resource, torch
        from hetsngp.functional.link import softmax_log_probs
        from hetsngp.types import UtilityNormal
        torch.set_num_threads(1)
        tensors = [torch.randn(16, 1000), torch.rand(16, 1000), torch.randn(16, 1000, 4)]
        def run(count):
            leaves = [t.clone().requires_grad_() for t in tensors]
            u = UtilityNormal(*leaves)
            softmax_log_probs(u, num_samples=count, seed=0, sampler="mc").sum().backward()
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        small = run(256)
        print(run(2048) - small)
    """)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 48  # MiB; one more (B, S, K) tensor would be 125


def test_reproducible_by_generator() -> None:
    u = utility(3, 5, 2, "mild")

    def draw(seed: int) -> Tensor:
        g = torch.Generator().manual_seed(seed)
        return softmax_log_probs(u, num_samples=8, generator=g, decorrelate=True)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    state = torch.get_rng_state()
    draw(1)
    assert torch.equal(state, torch.get_rng_state())


def test_rows_do_not_influence_each_other() -> None:
    u = utility(6, 12, 3, "wide factor")
    whole, points = softmax_probs(u)
    for row in range(6):
        alone, alone_points = softmax_probs(u.rows(slice(row, row + 1)))
        assert torch.allclose(alone[0], whole[row], atol=1e-6)
        assert alone_points == points


def test_decorrelated_rows_average_their_errors() -> None:
    """Equal rows: with own signs their errors cancel in the batch mean, without they cannot."""
    row = utility(1, 5, 2, "wide factor", dtype=torch.float64)
    u = row.rows(torch.zeros(256, dtype=torch.long))
    spread = {}
    for decorrelate in (True, False):
        means = [
            softmax_log_probs(u, num_samples=8, seed=s, decorrelate=decorrelate).exp().mean(0)
            for s in range(40)
        ]
        spread[decorrelate] = float(torch.stack(means).std(0).max())
    assert spread[True] < 0.5 * spread[False]


# --- many classes, sigmoid ------------------------------------------------------------------------------


def test_imagenet_21k_classes_work() -> None:
    g = torch.Generator().manual_seed(0)
    classes, rank = 21_843, 50
    mean = (2 * torch.randn(2, classes, generator=g)).requires_grad_()
    row = (0.1 * torch.randn(2, classes, generator=g)).requires_grad_()
    basis = torch.randn(classes, rank, generator=g).requires_grad_()
    u = UtilityNormal(mean, torch.full((2, classes), 0.25), Factor(basis, row=row))
    log_probs = softmax_log_probs(u, num_samples=32, seed=0, decorrelate=True)
    log_probs[:, 0].sum().backward()
    assert torch.allclose(log_probs.exp().sum(-1), torch.ones(2), atol=1e-4)
    for leaf in (mean, row, basis):
        assert torch.isfinite(leaf.grad).all()
        assert leaf.grad.abs().sum() > 0
    probs, points = softmax_probs(u.rows(slice(None)))
    assert torch.allclose(probs.sum(-1), torch.ones(2), atol=1e-4)
    assert points == num_factor_points(classes)


def test_sigmoid_link_uses_the_marginal_variance_only() -> None:
    u = utility(3, 4, 2, "wide factor", dtype=torch.float64)
    log_yes, log_no = sigmoid_log_probs(u)
    mean_log_yes, mean_log_no = sigmoid_log_probs(u, "mean_log")
    cov = u.covariance().numpy()
    for row in range(3):
        for c in range(4):
            two = np.array([[0.0, 0.0], [0.0, cov[row, c, c]]])
            mean = np.array([0.0, float(u.mean[row, c])])
            oracle = oracles.expected_softmax(mean, two, step=0.005)[1]
            assert float(log_yes[row, c].exp()) == pytest.approx(oracle, abs=1e-9)
            oracle = oracles.expected_log_softmax(mean, two, step=0.005)
            assert float(mean_log_no[row, c]) == pytest.approx(oracle[0], abs=1e-9)
            assert float(mean_log_yes[row, c]) == pytest.approx(oracle[1], abs=1e-9)
    assert torch.allclose(log_yes.exp() + log_no.exp(), torch.ones(3, 4, dtype=torch.float64), atol=1e-9)


def test_the_taylor_control_has_mean_zero_and_sums_to_zero() -> None:
    """Its expectation is that of the expansion under the full covariance, within four standard errors."""
    u = joined(*(t.detach() for t in factored(2, 6, 2)))
    control = TaylorControl.of(u)
    g = torch.Generator().manual_seed(0)
    root = torch.linalg.cholesky(u.covariance())
    delta = torch.randn(2, 200_000, 6, generator=g, dtype=torch.float64) @ root.mT
    deviation = control.deviation(delta)
    assert deviation.sum(-1).abs().max() < 1e-9
    assert (deviation.mean(1).abs() < 4 * deviation.std(1) / math.sqrt(200_000)).all()
    assert control.expectation.abs().max() > 0.05


def test_the_taylor_control_is_of_second_order() -> None:
    """What it leaves out shrinks with the cube of the distance."""
    mean = torch.randn(1, 7, dtype=torch.float64)
    control = TaylorControl(torch.softmax(mean, -1), torch.zeros(1, 7, dtype=torch.float64))
    direction = torch.randn(1, 1, 7, dtype=torch.float64)
    left = [
        (
            torch.softmax(mean + h * direction[0], -1) - control.probs - control.deviation(h * direction)[0]
        ).norm()
        for h in (1e-2, 1e-3)
    ]
    assert float(left[0] / left[1]) == pytest.approx(1000, rel=0.1)


def test_mild_and_wide_rows_in_one_batch() -> None:
    mild, wide = utility(2, 40, 3, "mild"), utility(2, 40, 3, "wide factor", seed=1)
    both = UtilityNormal(
        *(torch.cat([getattr(mild, n), getattr(wide, n)]) for n in ("mean", "var", "factor"))
    )
    probs, _ = softmax_probs(both)
    assert torch.allclose(probs[:2], softmax_probs(mild)[0], atol=1e-6)
    assert torch.allclose(probs[2:], softmax_probs(wide)[0], atol=1e-6)


# --- differences that correlations make ------------------------------------------------------------------


@pytest.mark.parametrize("classes", [5, 40])
def test_the_second_order_part_of_correlated_draws_has_a_known_mean(classes: int) -> None:
    """½(Σ p a² − (Σ p a)²) of scaled draws; and of little variance it is all that entropies change by."""
    part = contrasts(2, classes, 0.02, ratio=100.0)
    part = Factor(part.basis.double(), column=part.column.double(), contrasts=True)
    kind = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
    mean, scale = torch.randn(2, classes, **kind), 0.5 + torch.rand(2, classes, **kind)
    probs, eps = torch.softmax(mean, -1), torch.randn(2**14, classes, **kind)
    diagonal = separated(UtilityNormal(mean, torch.zeros_like(mean), part))[0].var
    utilities = UtilityNormal(mean, torch.zeros_like(mean), part), UtilityNormal(mean, diagonal)
    known = [half_spread(u, probs, scale) for u in utilities]
    draws = [scale.unsqueeze(1) * each for each in correlated_draws(part, eps)]
    for value, a in zip(known, draws, strict=True):
        each = 0.5 * ((a.square() @ probs.unsqueeze(-1)) - (a @ probs.unsqueeze(-1)).square()).squeeze(-1)
        assert ((each.mean(1) - value).abs() < 4 * each.std(1) / 2**7).all()
    few = [each[:, :32] for each in draws]
    change, more = mean_changes(mean, *few, probs, known[0] - known[1])
    divergence = -(change * probs.log()).sum(-1) - more
    assert ((divergence - known[0] + known[1]).abs() < 0.01 * known[0]).all()


@pytest.mark.parametrize("method", ["sngp", "hetsngp"])
def test_probabilities_under_a_wide_kronecker_posterior_sum_to_one(method: Any) -> None:
    """The draws of the classes' correlations may make a small probability negative."""
    generator = torch.Generator().manual_seed(0)
    model = hetsngp.build(
        method,
        Features(4, "mlp"),
        30,
        random_features=64,
        amplitude=40.0,
        dataset_size=400,
        generator=generator,
    )
    x, y = torch.randn(400, 4, generator=generator), torch.randint(30, (400,), generator=generator)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for _ in range(40):
        optimizer.zero_grad()
        model.loss(x, y, generator=generator).backward()
        optimizer.step()
    hetsngp.fit_posterior(model, [(x, y)])
    model.temperature = 0.3
    prediction = model.predict(1.5 * torch.randn(300, 4, generator=generator))
    for probs in (prediction.probs, prediction.clean_probs, model.predict_probs(x)):
        assert float(probs.max()) <= 1
        torch.testing.assert_close(probs.sum(1), torch.ones(len(probs)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("classes", [5, 70])
@pytest.mark.parametrize("noisy", [False, True])
def test_the_loss_of_a_label_under_correlated_classes_is_that_of_plain_draws(
    classes: int, noisy: bool
) -> None:
    """Labels that the mean makes improbable too, for which few of the plain draws count."""
    generator = torch.Generator().manual_seed(2)
    mean = 2 * torch.randn(12, classes, generator=generator, dtype=torch.float64)
    column = (1.5 * torch.rand(12, classes - 1, generator=generator)).double()
    parts = [Factor(contrast_basis(classes, mean), column=column, contrasts=True)]
    var = torch.zeros_like(mean)
    if noisy:
        parts.append(Factor(0.7 * torch.randn(12, classes, 2, generator=generator).double()))
        var = torch.rand(12, classes, generator=generator).double()
    utility = UtilityNormal(mean, var, FactorSum(tuple(parts)))
    y = torch.arange(12) % classes
    got = correlated_nll(utility, y)
    draws = mean.unsqueeze(1) + var.sqrt().unsqueeze(1) * torch.randn(
        12, 20_000, classes, generator=generator, dtype=torch.float64
    )
    for part in parts:
        eps = torch.randn(12, 20_000, part.rank, generator=generator, dtype=torch.float64)
        draws += eps @ part.dense().mT
    p = torch.softmax(draws, -1).gather(2, y[:, None, None].expand(-1, 20_000, 1)).squeeze(2)
    expected, error = -p.mean(1).log(), p.std(1) / p.mean(1) / math.sqrt(20_000)
    assert float((got - expected).mean().abs()) < 0.01 + 4 * float(error.square().mean().sqrt()) / math.sqrt(
        12
    )
    assert float((got - expected).abs().max()) < (0.05 if classes == 5 else 0.3)
    again = correlated_nll(utility.rows(slice(3, 5)), y[3:5])
    assert torch.allclose(again, got[3:5])
