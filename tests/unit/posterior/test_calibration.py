"""Held-out data choose temperature, output Hessian and scale; each choice is recomputed by other means."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from scipy.stats import qmc
from tests.contract import toy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import hetsngp
from hetsngp.functional import link
from hetsngp.models.methods import METHODS
from hetsngp.nn.heads import GaussianHead
from hetsngp.posterior.calibration import HeldOut, best_temperature
from hetsngp.posterior.cross_fitting import cross_fit_posterior

TRAIN = toy.blobs(3, flip=0.3, seed=0)
HELD_OUT = toy.blobs(3, 20, flip=0.3, seed=1)
KINDS = ("kronecker", "exact", "shared", "momentum")
# Members share a posterior, whatever its kind: of mixtures one will do.
POSTERIORS = [
    *((method, kind) for method in toy.GP if method not in toy.MIXTURES for kind in KINDS),
    *((method, "kronecker") for method in toy.GP if method in toy.MIXTURES),
]


def fitted(method: str, *, held_out: Any = HELD_OUT, **options: Any) -> tuple[Any, Any]:
    model = toy.trained(method, 3, fit=False, flip=0.3, **options)
    calibration = None if held_out is None else toy.loader(*held_out)
    return model, hetsngp.fit_posterior(model, toy.loader(*TRAIN), calibration)


@torch.no_grad()
def logits(model: Any, x: Tensor) -> Tensor:
    """Logits of the MAP estimate from the parts, in float64: (n, K) or, of M members, (n, M, K)."""
    h = model.backbone(x)
    latent = model.head.latent
    f = latent.features(h) @ latent.beta if hasattr(latent, "beta") else latent.linear(h)
    members = model.head.num_members
    return (f if members == 1 else f.view(len(x), members, -1)).double()


def nll(f: Tensor, y: Tensor, temperature: float) -> float:
    return float(F.cross_entropy(f / temperature, y))


def mode_nll(model: Any, x: Tensor, y: Tensor) -> Callable[[float], Tensor]:
    """−log P(y) of each example at the MAP estimate, as a function of the temperature."""
    if model.head.num_members > 1:
        f = logits(model, x)
        return lambda t: F.nll_loss(torch.softmax(f / t, -1).mean(1).log(), y, reduction="none")
    if isinstance(model.head, GaussianHead):
        f = logits(model, x)
        return lambda t: F.cross_entropy(f / t, y, reduction="none")
    with torch.no_grad():
        log_evidence = model.head.log_evidence(model.backbone(x)).double()

    def dirichlet(t: float) -> Tensor:
        alpha = 1 + (log_evidence / t).exp()
        return F.nll_loss((alpha / alpha.sum(-1, keepdim=True)).log(), y, reduction="none")

    return dirichlet


def surprise(temperature: float, start: float, examples: float) -> float:
    """−log of the prior N(log start, 0.5²) of log τ, as nats an example."""
    return 0.5 * (math.log(temperature / start) / 0.5) ** 2 / examples


def draws_nll(
    model: Any, scale: float | None, temperature: float, draws: int = 4000, held_out: Any = HELD_OUT
) -> Tensor:
    """−log E softmax(u/τ)[y] of each held-out example with the posterior's variance times ``scale`` (None:
    at the MAP estimate), by plain Monte Carlo in float64 from the covariance written out; of members,
    their mean probability."""
    x, y = held_out
    with torch.no_grad():
        h = model.backbone(x)
        if scale is None:
            mean, covariance = (t := model.head.utility(h, posterior=False)).mean, t.covariance()
        else:
            model.head.latent.posterior.scale.fill_(1.0)
            latent, noise = model.head.parts(h, posterior=True)
            mean, covariance = latent.mean, scale * latent.covariance()
            covariance = covariance if noise is None else covariance + noise.covariance()
    values, vectors = torch.linalg.eigh(covariance.double())
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    eps = torch.randn(draws, *mean.shape, generator=torch.Generator().manual_seed(0)).double()
    u = mean.double() + torch.einsum("bkl,sbl->sbk", root, eps)
    p = torch.softmax(u / temperature, -1).mean(0).view(len(x), -1, mean.shape[-1]).mean(1)
    return -p.gather(1, y[:, None]).squeeze(1).log()


# --- temperature ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [method for method in METHODS if method not in toy.NOISY])
@pytest.mark.parametrize("start", [0.3, 1.0, 4.0])
def test_the_temperature_minimises_held_out_nll_with_its_prior(method: str, start: float) -> None:
    model = toy.trained(method, 3, fit=False, flip=0.3)
    model.temperature = start
    report = hetsngp.fit_posterior(model, toy.loader(*TRAIN), toy.loader(*HELD_OUT))
    y, each = HELD_OUT[1], mode_nll(model, *HELD_OUT)

    def mean(t: float) -> float:
        return float(each(t).mean())

    grid = [start * 10 ** (i / 1000) for i in range(-1000, 1001)]
    best = min(grid, key=lambda t: mean(t) + surprise(t, start, len(y)))
    bare = min(grid, key=mean)
    assert not math.isclose(best, start, rel_tol=0.05)  # there was something to find
    assert not math.isclose(best, bare, rel_tol=0.02)  # and the prior has a say
    assert abs(math.log(best / start)) < abs(math.log(bare / start))
    assert report.mode_temperature == pytest.approx(best, rel=0.01)  # the search stops at one per cent
    assert report.nll_before == pytest.approx(mean(start), rel=1e-4)
    assert report.nll_mode == pytest.approx(mean(report.mode_temperature), rel=1e-4)
    assert report.nll_mode < report.nll_before
    error = float(each(report.mode_temperature).std()) / math.sqrt(len(y))
    assert report.standard_error == pytest.approx(error, rel=1e-4)
    assert report.held_out == len(y)


def test_the_prior_counts_examples_not_weight() -> None:
    """(Σw)²/Σw² of them (Kish): the unit of the weights does not matter, one heavy example is one example."""
    (x, y), weight = HELD_OUT, torch.ones(len(HELD_OUT[1])).double()
    weight[:6] = 40.0
    model = toy.trained("deterministic", 3, fit=False, flip=0.3)
    report = hetsngp.fit_posterior(model, toy.loader(*TRAIN), [(x, y, 7 * weight)])
    f = logits(model, x)
    each = {
        t: F.cross_entropy(f / t, y, reduction="none") @ weight / weight.sum()
        for t in (10 ** (i / 1000) for i in range(-1000, 1001))
    }
    effective = float(weight.sum() ** 2 / (weight**2).sum())
    assert effective < 10
    best = min(each, key=lambda t: float(each[t]) + surprise(t, 1.0, effective))
    by_rows = min(each, key=lambda t: float(each[t]) + surprise(t, 1.0, len(y)))
    by_weight = min(each, key=lambda t: float(each[t]) + surprise(t, 1.0, float(7 * weight.sum())))
    assert report.temperature == pytest.approx(best, rel=0.01)
    assert abs(math.log(best / by_rows)) > 0.03
    assert abs(math.log(best / by_weight)) > 0.03


def test_a_few_right_answers_do_not_send_the_temperature_to_zero() -> None:
    """Twelve held-out examples, all right: their NLL alone is lowest at the end of the search, 0.1."""
    x, y = toy.blobs(3, 4, seed=1)
    model = toy.trained("sngp", 3, fit=False)
    f = logits(model, x)
    assert (f.argmax(1) == y).all()
    grid = [10 ** (i / 1000) for i in range(-1000, 1001)]
    assert min(grid, key=lambda t: nll(f, y, t)) == pytest.approx(0.1)
    report = hetsngp.fit_posterior(model, toy.loader(*toy.blobs(3)), toy.loader(x, y))
    best = min(grid, key=lambda t: nll(f, y, t) + surprise(t, 1.0, len(y)))
    assert report.mode_temperature == pytest.approx(best, rel=0.01)
    assert 0.5 < report.temperature < report.mode_temperature < 1.0


def test_the_temperature_takes_the_noise_into_account() -> None:
    """For hetsngp the NLL is that of the noisy softmax, so its optimum is not that of the bare logits."""
    model, _ = fitted("hetsngp")
    with torch.no_grad():
        model.head.noise.factor.bias.add_(6.0 * torch.randn(6, generator=torch.Generator().manual_seed(0)))
    model.temperature = 1.0
    report = hetsngp.fit_posterior(model, toy.loader(*TRAIN), toy.loader(*HELD_OUT))
    y = HELD_OUT[1]

    def objective(t: float) -> float:
        return float(draws_nll(model, None, t).mean()) + surprise(t, 1.0, len(y))

    grid = [10 ** (i / 40) for i in range(-20, 21)]
    best = min(grid, key=objective)
    # The objective is flat: noise of standard deviation 12 is an argmax at any of these temperatures.
    assert objective(report.mode_temperature) == pytest.approx(objective(best), abs=0.003)
    f = logits(model, HELD_OUT[0])
    without = min(grid, key=lambda t: nll(f, y, t) + surprise(t, 1.0, len(y)))
    assert abs(math.log(without / best)) > 0.1
    assert abs(math.log(report.mode_temperature / best)) < 0.5 * abs(math.log(without / best))
    assert report.nll_mode == pytest.approx(
        float(draws_nll(model, None, report.mode_temperature).mean()), abs=0.01
    )


# --- temperature, with the posterior --------------------------------------------------------------------


def exact_nll(model: Any, temperature: float) -> Tensor:
    """−log E softmax(u/τ)[y] of each held-out example under the posterior, by SciPy's Sobol points."""
    u, y = model.utility(HELD_OUT[0]), HELD_OUT[1]
    values, vectors = torch.linalg.eigh(u.covariance().double())
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    eps = torch.tensor(qmc.MultivariateNormalQMC([0.0] * 3, rng=0).random(4096))
    draws = u.mean.double() + torch.einsum("bkl,sl->sbk", root, eps)
    return -torch.softmax(draws / temperature, -1).mean(0).gather(1, y[:, None]).squeeze(1).log()


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("method", "posterior", "start", "tolerance"),
    [
        ("sngp", "kronecker", 0.3, 0.1),
        ("sngp", "exact", 1.0, 0.01),
        ("hetsngp", "exact", 0.3, 0.01),
        ("hetsngp", "kronecker", 0.3, 0.1),
    ],
)
def test_the_final_temperature_is_that_of_predictions(
    method: str,
    posterior: str,
    start: float,
    tolerance: float,
    weighted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lowest NLL with the posterior in place and the prior around the training temperature, as SciPy
    finds it. Neither the temperature of the MAP estimate nor a prior around that one would be the same: the
    tolerance allows a scale that is large enough for that."""
    for name in ("EVALUATION_POINTS", "EVALUATION_POINTS_SAMPLED"):  # so that only the search may differ
        monkeypatch.setattr(link, name, 2048)
    (x, y), weight = HELD_OUT, torch.ones(len(HELD_OUT[1])).double()
    if weighted:
        weight[:6] = 8.0
    model = toy.trained(method, 3, fit=False, flip=0.3, posterior=posterior, amplitude=40.0)
    model.temperature = start
    held_out = [(x, y, weight) if weighted else (x, y)]
    report = hetsngp.fit_posterior(model, toy.loader(*TRAIN), held_out, tolerance=tolerance)
    share, effective = weight / weight.sum(), float(weight.sum() ** 2 / (weight**2).sum())

    def best(centre: float, effective: float = effective) -> float:
        def objective(log_temperature: float) -> float:
            t = math.exp(log_temperature)
            return float(share @ exact_nll(model, t)) + surprise(t, centre, effective)

        bounds = math.log(start / 10), math.log(start * 10)
        return math.exp(minimize_scalar(objective, bounds=bounds, method="bounded").x)

    want = best(start)
    assert report.temperature == float(model.temperature) == pytest.approx(want, rel=0.03)
    assert abs(math.log(want / report.mode_temperature)) > 0.05  # there was something to find
    assert abs(math.log(want / best(report.mode_temperature))) > 0.1
    assert not weighted or abs(math.log(want / best(start, report.held_out))) > 0.04
    assert report.nll == pytest.approx(float(share @ exact_nll(model, report.temperature)), abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "posterior"), POSTERIORS)
def test_the_second_search_pays_for_what_averaging_costs(method: str, posterior: str) -> None:
    """It cannot end worse than where it starts; what it may give up in NLL is the prior's alone."""
    for start in (0.5, 1.0):
        model = toy.trained(method, 3, fit=False, flip=0.3, posterior=posterior)
        model.temperature = start
        report = hetsngp.fit_posterior(model, toy.loader(*TRAIN), toy.loader(*HELD_OUT))
        here, there = (
            surprise(t, start, report.held_out) for t in (report.temperature, report.mode_temperature)
        )
        assert report.nll + here <= dict(report.scale_grid)[report.scale] + there + 1e-5
        assert report.temperature < report.mode_temperature
        model.head.temperature.fill_(report.mode_temperature)
        underconfident = model.predict(HELD_OUT[0]).confidence.mean()
        model.head.temperature.fill_(report.temperature)
        assert model.predict(HELD_OUT[0]).confidence.mean() > underconfident


@pytest.mark.parametrize("by_folds", [False, True])
def test_calling_the_model_is_at_the_temperature_of_its_mode(by_folds: bool) -> None:
    """``model(x)`` knows no posterior, so the temperature that makes up for one is not for it."""
    model, report = fitted("sngp", amplitude=40.0)
    if by_folds:
        model.temperature = 1.0  # nothing of that fit may stay
        fold = (copy.deepcopy(model), toy.loader(*TRAIN), toy.loader(*HELD_OUT))
        report = cross_fit_posterior(model, toy.loader(*TRAIN), [fold])
    assert abs(report.temperature / report.mode_temperature - 1) > 0.02
    f = logits(model, HELD_OUT[0])
    with torch.no_grad():
        got = model(HELD_OUT[0]).double()
    torch.testing.assert_close(got, torch.log_softmax(f / report.mode_temperature, -1), rtol=1e-4, atol=1e-4)
    assert model.calibration["nll_mode"] == pytest.approx(float(F.nll_loss(got, HELD_OUT[1])), rel=1e-4)
    model.temperature = 3.0
    with torch.no_grad():
        torch.testing.assert_close(
            model(HELD_OUT[0]).double(), torch.log_softmax(f / 3, -1), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("wells", [(-1.6, 1.4), (1.4, -1.6)])
def test_of_several_minima_the_lowest_is_found(wells: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of an example that is wrong and uncertain is bounded, so the NLL may have more than one."""
    deep, shallow = wells

    def two_wells(pairs: Any, temperature: Tensor, *, posterior: bool) -> Tensor:
        t = float(temperature.log())
        return torch.full((60,), 10 * min((t - deep) ** 2, (t - shallow) ** 2 + 0.05))

    monkeypatch.setattr("hetsngp.posterior.calibration.pooled_nll", two_wells)
    pair = (toy.build("sngp", 3), HeldOut(*HELD_OUT))
    assert float(best_temperature([pair]).log()) == pytest.approx(deep, abs=0.03)


@pytest.mark.parametrize(
    ("method", "options"),
    [*((m, {}) for m in METHODS if m not in toy.GP), *((m, {"posterior": "none"}) for m in toy.GP)],
)
def test_without_a_posterior_there_is_one_temperature(method: str, options: dict[str, Any]) -> None:
    model, report = fitted(method, **options)
    assert report.temperature == report.mode_temperature == float(model.temperature) != 1.0
    assert report.nll == report.nll_mode
    assert report.scale_grid == ()


def test_the_posterior_is_that_of_the_modes_temperature() -> None:
    """It is a property of the likelihood it was made with; the last temperature is of predictions alone."""
    model, report = fitted("sngp", posterior="exact")
    variances = {}
    for t in (report.mode_temperature, report.temperature):
        twin = toy.trained("sngp", 3, fit=False, flip=0.3, posterior="exact")
        twin.temperature = t
        hetsngp.fit_posterior(twin, toy.loader(*TRAIN))
        variances[t] = report.scale * twin.latent(twin.backbone(HELD_OUT[0])).var
    got = model.latent(model.backbone(HELD_OUT[0])).var
    torch.testing.assert_close(got, variances[report.mode_temperature], rtol=1e-4, atol=0)
    assert (got / variances[report.temperature] - 1).abs().max() > 0.1


# --- scale ----------------------------------------------------------------------------------------------


def best_draws_nll(model: Any, scale: float, draws: int, held_out: Any = HELD_OUT) -> Tensor:
    """−log p(y) of each example by plain draws, at the temperature that SciPy finds best for this scale."""
    start = float(model.head.training_temperature)

    def nll(log_temperature: float) -> Tensor:
        return draws_nll(model, scale, math.exp(log_temperature), draws, held_out=held_out)

    def objective(log_temperature: float) -> float:
        prior = surprise(math.exp(log_temperature), start, len(held_out[1]))
        return float(nll(log_temperature).mean()) + prior

    bounds = math.log(start / 10), math.log(start * 10)
    return nll(minimize_scalar(objective, bounds=bounds, method="bounded", options={"xatol": 0.01}).x)


def scale_by_hand(
    model: Any, report: Any, held_out: Any = HELD_OUT, draws: int = 4_096
) -> tuple[list[Tensor], list[float]]:
    """The NLL of each example at each scale and the best temperature for it, and what each scale may cost:
    one standard error of the difference from the best, example by example, and 0.01 in any case."""
    each = [best_draws_nll(model, scale, draws, held_out) for scale, _ in report.scale_grid]
    best = min(each, key=lambda t: float(t.mean()))
    return each, [max(float((t - best).std()) / math.sqrt(len(t)), 0.01) for t in each]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "posterior"), POSTERIORS)
def test_the_scale_is_the_largest_whose_cost_is_allowed(method: str, posterior: str) -> None:
    model, report = fitted(method, posterior=posterior)
    assert report.scale == pytest.approx(float(model.head.latent.posterior.scale))
    scales, means = zip(*report.scale_grid, strict=True)
    assert list(scales) == sorted(scales)
    assert scales[0] == pytest.approx(1e-3)
    assert scales[-1] == pytest.approx(100.0 if posterior in ("shared", "momentum") else 1.0)
    assert all(b / a == pytest.approx(math.sqrt(10)) for a, b in itertools.pairwise(scales))
    each, allowed = scale_by_hand(model, report)
    assert means == pytest.approx([float(t.mean()) for t in each], abs=0.01)
    chosen = max(i for i, mean in enumerate(means) if mean <= min(means) + allowed[i])
    assert report.scale == scales[chosen]
    assert report.allowance == pytest.approx(allowed[chosen], rel=0.1)


def test_the_allowance_is_of_paired_differences_and_never_less_than_the_tolerance() -> None:
    """Wide posteriors on noisy labels: the difference of two scales is known far better than either value."""
    model, report = fitted("sngp", posterior="shared", amplitude=40.0)
    each, allowed = scale_by_hand(model, report)
    chosen = [scale for scale, _ in report.scale_grid].index(report.scale)
    assert report.allowance == pytest.approx(allowed[chosen], rel=0.05)
    assert 0.01 < report.allowance < 0.7 * report.standard_error
    assert report.standard_error == pytest.approx(float(each[0].std()) / math.sqrt(60), rel=0.02)


@pytest.mark.parametrize(("method", "posterior"), [("sngp", "shared"), ("hetsngp", "kronecker")])
def test_the_nll_of_a_scale_is_that_of_brute_force(method: str, posterior: str) -> None:
    model, report = fitted(method, posterior=posterior, amplitude=100.0)
    smallest, largest = report.scale_grid[0], report.scale_grid[-1]
    by_hand = [float(best_draws_nll(model, scale, 20_000).mean()) for scale, _ in (smallest, largest)]
    assert smallest[1] == pytest.approx(by_hand[0], abs=0.005)
    assert largest[1] == pytest.approx(by_hand[1], abs=0.005)
    # The same draws for both, so that the cost of the variance is known far better than either value.
    assert by_hand[1] - by_hand[0] > 0.015
    assert largest[1] - smallest[1] == pytest.approx(by_hand[1] - by_hand[0], rel=0.2)


def test_a_harmful_posterior_is_scaled_down_and_a_harmless_one_is_not() -> None:
    x, y = toy.blobs(3, 40, flip=0.02, seed=1)  # nearly clean labels: variance blurs what is certain
    model = toy.trained("sngp", 3, fit=False)
    report = hetsngp.fit_posterior(model, toy.loader(*toy.blobs(3)), toy.loader(x, y))
    assert report.scale_grid[0][0] < report.scale < 1.0  # here the rule binds
    each, allowed = scale_by_hand(model, report, (x, y))
    means = [float(t.mean()) for t in each]
    good = [i for i, mean in enumerate(means) if mean <= min(means) + allowed[i]]
    assert report.scale == report.scale_grid[max(good)][0]
    small = toy.trained("sngp", 3, fit=False, amplitude=0.1)
    report = hetsngp.fit_posterior(small, toy.loader(*toy.blobs(3)), toy.loader(x, y))
    assert report.scale == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sngp", "hetsngp"])
def test_data_classified_perfectly_keep_their_posterior(method: str) -> None:
    """There any variance makes every example a little less certain: measurable at any scale, at no cost.
    Without a tolerance the smallest scale won, and inputs from anywhere were classified as surely."""
    train, held_out = toy.blobs(3, 300), toy.blobs(3, 100, seed=1)
    model = toy.build(method, 3, random_features=256, amplitude=3.0, dataset_size=900)
    toy.descend(model, *train, 60)
    report = hetsngp.fit_posterior(model, toy.loader(*train, 300), toy.loader(*held_out, 300))
    far = 60 * train[0][:20]
    assert report.scale >= 0.3
    assert report.allowance == 0.01
    assert report.nll < report.nll_mode + 0.01
    assert (
        model.predict(far).model_uncertainty.min() > 20 * model.predict(held_out[0]).model_uncertainty.mean()
    )
    each = [
        draws_nll(model, scale, report.mode_temperature, 1000, held_out) for scale, _ in report.scale_grid
    ]
    means = [float(t.mean()) for t in each]
    paired = [float((t - each[0]).std()) / math.sqrt(len(t)) for t in each]
    assert all(m > means[0] + e for m, e in zip(means[1:], paired[1:], strict=True))  # at the MAP's τ
    assert (model.predict(held_out[0]).labels == held_out[1]).all()
    model.head.latent.posterior.scale.fill_(1e-3)
    assert model.predict(far).model_uncertainty.min() < 0.02  # what that used to come to


# --- output Hessian -------------------------------------------------------------------------------------


@pytest.mark.parametrize("held_out", [HELD_OUT, None], ids=["held-out", "training"])
@pytest.mark.parametrize("method", toy.GP)
def test_lambda_is_the_mean_output_hessian(method: str, held_out: Any) -> None:
    """Over examples and members."""
    model, report = fitted(method, held_out=held_out)
    t = report.temperature if held_out is None else report.mode_temperature
    p = torch.softmax(logits(model, (TRAIN if held_out is None else held_out)[0]) / t, -1).view(-1, 3)
    hessian = torch.stack([torch.diag(row) - torch.outer(row, row) for row in p]).mean(0) / t**2
    posterior = model.head.latent.posterior
    expected = torch.linalg.eigvalsh(hessian)[1:]  # the smallest is 0, along (1, …, 1)
    torch.testing.assert_close(posterior.gamma.double().sort().values, expected, rtol=1e-4, atol=1e-7)
    rebuilt = posterior.basis.double() @ torch.diag(posterior.gamma.double()) @ posterior.basis.double().mT
    torch.testing.assert_close(rebuilt, hessian, rtol=1e-4, atol=1e-6)


def test_lambda_of_the_sigmoid_is_the_mean_of_p_one_minus_p() -> None:
    x, y = HELD_OUT
    hot = F.one_hot(y, 3).float()
    model = toy.trained("sngp", 3, fit=False, link="sigmoid")
    train = toy.blobs(3)
    training = toy.loader(train[0], F.one_hot(train[1], 3).float())
    t = hetsngp.fit_posterior(model, training, toy.loader(x, hot)).mode_temperature
    p = torch.sigmoid(logits(model, x) / t)
    expected = (p * (1 - p)).mean(0) / t**2
    torch.testing.assert_close(model.head.latent.posterior.gamma.double(), expected, rtol=1e-4, atol=1e-7)
    grid = [10 ** (i / 500) for i in range(-500, 501)]
    f = logits(model, x)

    def objective(s: float) -> float:
        each = F.binary_cross_entropy_with_logits(f / s, hot.double(), reduction="none").sum(1)
        return float(each.mean()) + surprise(s, 1.0, len(y))

    assert t == pytest.approx(min(grid, key=objective), rel=0.011)


# --- the whole ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_choice_is_kept_and_survives_saving(method: str, tmp_path: Any) -> None:
    model, report = fitted(method)
    assert model.calibration["temperature"] == report.temperature == float(model.temperature)
    assert model.calibration["scale"] == report.scale
    assert report.temperature != 1.0
    if method in toy.GP:
        assert float(model.head.latent.posterior.scale) == pytest.approx(report.scale)
    hetsngp.save(model, tmp_path)
    twin = hetsngp.load(tmp_path)
    assert float(twin.temperature) == float(model.temperature)
    for key, value in model.calibration.items():
        kept = twin.calibration[key]
        assert kept == ([list(pair) for pair in value] if key == "scale_grid" else value)
    assert toy.same_bits(twin.predict(HELD_OUT[0]), model.predict(HELD_OUT[0]))


@pytest.mark.parametrize("method", METHODS)
def test_without_calibration_nothing_is_chosen(method: str) -> None:
    model = toy.trained(method, 3, fit=False)
    model.temperature = 1.7
    report = hetsngp.fit_posterior(model, toy.loader(*TRAIN))
    assert float(model.temperature) == report.temperature == pytest.approx(1.7)
    assert report.scale == 1.0
    assert report.held_out == 0
    assert report.scale_grid == ()
    if method in toy.GP:
        assert float(model.head.latent.posterior.scale) == 1.0


@pytest.mark.parametrize("method", METHODS)
def test_fitting_twice_is_fitting_once(method: str) -> None:
    model, first = fitted(method)
    before = model.predict(HELD_OUT[0])
    assert float(model.temperature) != 1.0  # and yet the search starts at the training temperature again
    second = hetsngp.fit_posterior(model, toy.loader(*TRAIN), toy.loader(*HELD_OUT))
    assert second == first
    assert toy.same_bits(model.predict(HELD_OUT[0]), before)
    if method in toy.GP:
        model.head.latent.posterior.scale.fill_(0.01)  # the scale of an earlier calibration does not stick
        assert hetsngp.fit_posterior(model, toy.loader(*TRAIN)).scale == 1.0
        assert float(model.head.latent.posterior.scale) == 1.0


def test_the_batches_of_the_loaders_do_not_matter() -> None:
    one, two = toy.trained("sngp", 3, fit=False, flip=0.3), toy.trained("sngp", 3, fit=False, flip=0.3)
    a = hetsngp.fit_posterior(one, toy.loader(*TRAIN, 36), toy.loader(*HELD_OUT, 60))
    b = hetsngp.fit_posterior(two, toy.loader(*TRAIN, 5), toy.loader(*HELD_OUT, 7))
    assert a.count == b.count == len(TRAIN[0])
    assert a.temperature == pytest.approx(b.temperature, rel=0.01)
    assert a.scale == pytest.approx(b.scale)
    p, q = one.predict(HELD_OUT[0]), two.predict(HELD_OUT[0])
    torch.testing.assert_close(p.latent_variance, q.latent_variance, rtol=0.02, atol=0)


def test_held_out_data_in_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    _, whole = fitted("sngp")
    monkeypatch.setattr("hetsngp.posterior.calibration.CALIBRATION_BATCH_SIZE", 7)
    _, parts = fitted("sngp")
    assert parts.scale == whole.scale
    assert parts.temperature == pytest.approx(whole.temperature, rel=1e-6)
    assert parts.nll == pytest.approx(whole.nll, rel=1e-5)


def test_the_report_reads_well() -> None:
    _, report = fitted("sngp")
    text = str(report)
    assert text == (
        "posterior kronecker from 36 examples; on 60 held-out examples chose posterior scale "
        f"{report.scale:.3g}, the largest that costs at most {report.allowance:.4f}, and temperature "
        f"{report.temperature:.3g}: NLL {report.nll_before:.4f} → {report.nll:.4f}"
    )
    _, bare = fitted("sngp", held_out=None)
    assert str(bare) == "posterior kronecker from 36 examples, not calibrated"
    _, none = fitted("deterministic")
    assert str(none) == (
        f"no posterior; on 60 held-out examples chose temperature {none.temperature:.3g}: "
        f"NLL {none.nll_before:.4f} → {none.nll:.4f}"
    )


def test_progress_counts_examples() -> None:
    seen: list[int] = []
    hetsngp.fit_posterior(toy.build("sngp"), toy.loader(*TRAIN, 10), progress=seen.append)
    assert seen == [10, 20, 30, 36]


# --- ensembles ----------------------------------------------------------------------------------------------


def disagreeing(method: str, **options: Any) -> list[Any]:
    """Two members that were trained on different labels, and so disagree."""
    members = []
    for seed in (0, 1):
        model = toy.build(method, **options)
        for parameter in model.parameters():
            parameter.data += 0.3 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(seed)
            )
        toy.descend(model, *toy.blobs(3, flip=0.3, seed=10 + seed), 40)
        members.append(model.eval())
    return members


def mixture_objective(members: list[Any], alone: list[float]) -> Callable[[float], float]:
    """NLL of the mixture plus the prior of a temperature, recomputed from ``predict_probs``."""
    x, y = HELD_OUT

    def value(log_factor: float) -> float:
        moved = [math.log(t) + log_factor for t in alone]  # the temperature of training is 1
        for member, log in zip(members, moved, strict=True):
            member.head.temperature.fill_(math.exp(log))
        probs = hetsngp.Ensemble(members).predict_probs(x).double()
        prior = sum(log**2 for log in moved) / len(moved) / (2 * 0.5**2 * len(y))
        return float(F.nll_loss(probs.log(), y)) + prior

    return value


def test_the_temperatures_of_an_ensemble_are_those_of_its_mixture() -> None:
    members = disagreeing("deterministic")
    alone = [
        float(hetsngp.fit_posterior(m, toy.loader(*TRAIN), toy.loader(*HELD_OUT)).temperature)
        for m in members
    ]
    reports = hetsngp.fit_posterior(hetsngp.Ensemble(members), toy.loader(*TRAIN), toy.loader(*HELD_OUT))
    factors = [report.temperature / t for report, t in zip(reports, alone, strict=True)]
    assert factors[0] == pytest.approx(factors[1], rel=1e-5)
    best = minimize_scalar(mixture_objective(members, alone), bounds=(-0.8, 0.8), method="bounded")
    assert factors[0] == pytest.approx(math.exp(best.x), abs=0.02)
    assert factors[0] < 0.95  # averaging members that disagree costs confidence
    assert all(report.mode_temperature == report.temperature for report in reports)


@pytest.mark.parametrize("method", ["hetsngp", "posterior_network"])
def test_a_common_factor_lowers_the_nll_of_the_mixture_whatever_the_order(method: str) -> None:
    members = disagreeing(method)
    for member in members:
        hetsngp.fit_posterior(member, toy.loader(*TRAIN), toy.loader(*HELD_OUT))
    alone = [float(member.temperature) for member in members]
    value = mixture_objective(members, alone)
    before = value(0.0)
    data = TensorDataset(*HELD_OUT)
    shuffled = DataLoader(data, 7, shuffle=True, generator=torch.Generator().manual_seed(0))
    reports = hetsngp.fit_posterior(hetsngp.Ensemble(members), toy.loader(*TRAIN), shuffled)
    factor = reports[0].temperature / alone[0]
    assert reports[1].temperature / alone[1] == pytest.approx(factor, rel=1e-3)
    assert [member.calibration["temperature"] for member in members] == [r.temperature for r in reports]
    assert [float(member.temperature) for member in members] == [r.temperature for r in reports]
    assert abs(math.log(factor)) > 0.03
    assert value(math.log(factor)) < before
    assert value(math.log(factor)) <= min(value(math.log(factor) + step) for step in (-0.1, 0.1))


@pytest.mark.parametrize(("count", "link"), [(1, "softmax"), (2, "sigmoid")])
def test_one_member_and_multi_hot_labels_are_calibrated_alone(count: int, link: str) -> None:
    options = {} if link == "softmax" else {"link": link}
    train, held_out = ((x, y if link == "softmax" else F.one_hot(y, 3).float()) for x, y in (TRAIN, HELD_OUT))
    members = [toy.build("deterministic", **options).eval() for _ in range(count)]
    alone = [hetsngp.fit_posterior(m, toy.loader(*train), toy.loader(*held_out)) for m in members]
    together = hetsngp.fit_posterior(hetsngp.Ensemble(members), toy.loader(*train), toy.loader(*held_out))
    assert together == alone
