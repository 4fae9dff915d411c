"""Calibration by folds: one fold is fit_posterior; pooled, each choice is recomputed by other means."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from scipy.stats import qmc
from tests.contract import toy
from torch import Tensor

import hetsngp
from hetsngp.functional import link
from hetsngp.models.methods import METHODS
from hetsngp.posterior.cross_fitting import cross_fit_posterior

# A mixture's held-out NLL has its oracle in test_calibration; pooling does not look at it.
GP = tuple(method for method in toy.GP if method not in toy.MIXTURES)
KINDS = ("kronecker", "exact", "shared", "momentum")
ALL = toy.blobs(3, 30, flip=0.3)


def data(**options: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, y = ALL
    weight = 0.5 + torch.rand(len(x), generator=torch.Generator().manual_seed(5))
    return x.double(), toy.labels_for(y, 3, options), weight.double()


def model_of(method: str, steps: int = 0, **options: Any) -> Any:
    """As trained on one part of the data, and a bit more on all: the folds' models differ."""
    model = toy.trained(method, 3, fit=False, flip=0.3, **options)
    x, y, _ = data(**options)
    toy.descend(model.train(), x.float(), y, steps)
    return model.double().eval()


def part(fold: slice, *, weighted: bool = True, **options: Any) -> list[tuple[Tensor, ...]]:
    rows = [t[fold] for t in data(**options)]
    return list(zip(*(t.split(7) for t in (rows if weighted else rows[:2])), strict=True))


A, B = slice(0, 30), slice(30, 90)


# --- one fold -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options", "weighted"),
    [
        *((method, {}, weighted) for method in METHODS for weighted in (False, True)),
        *(("hetsngp", {"posterior": kind}, True) for kind in KINDS[1:]),
        *((method, {"link": "sigmoid"}, True) for method in toy.GAUSSIAN),
    ],
    ids=str,
)
def test_one_fold_of_the_model_itself_is_fit_posterior(
    method: str, options: dict[str, Any], weighted: bool
) -> None:
    one, two = model_of(method, **options), model_of(method, **options)
    two.temperature = 1.0
    train, held_out = (part(rows, weighted=weighted, **options) for rows in (B, A))
    expected = hetsngp.fit_posterior(one, train, held_out)
    report = cross_fit_posterior(two, train, [(copy.deepcopy(two), train, held_out)])
    assert report == expected
    assert toy.same_bits(two.predict(data()[0]), one.predict(data()[0]))
    assert two.calibration == one.calibration
    assert report.temperature != 1.0
    assert (report.posterior != "none") == (method in toy.GP)


# --- several --------------------------------------------------------------------------------------------


def crossed(method: str, **options: Any) -> tuple[Any, list[Any], Any]:
    """(model, models of the folds, report); the folds have 30 and 60 examples of different weights."""
    model = model_of(method, 4, **options)
    folds = [model_of(method, steps, **options) for steps in (0, 12)]
    with torch.no_grad():  # one surer of itself than the other
        head = folds[1].head
        for tensor in head.latent.parameters() if method in toy.GAUSSIAN else [head.counts]:
            tensor.mul_(2.0)
    report = cross_fit_posterior(
        model,
        part(slice(None), **options),
        [
            (folds[0], part(B, **options), part(A, **options)),
            (folds[1], part(A, **options), part(B, **options)),
        ],
    )
    return model, folds, report


@torch.no_grad()
def pooled_logits(folds: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Of every example under the model that has not seen it, with labels and weights."""
    x, y, weight = data()
    out = []
    for model, rows in zip(folds, (A, B), strict=True):
        h, latent = model.backbone(x[rows]), model.head.latent
        out.append(latent.features(h) @ latent.beta if hasattr(latent, "beta") else latent.linear(h))
    return torch.cat(out), y, weight


@pytest.mark.parametrize("method", ["deterministic", "sngp"])
def test_the_temperature_is_that_of_the_pooled_objective(method: str) -> None:
    model, folds, report = crossed(method)
    f, y, weight = pooled_logits(folds)
    effective = float(weight.sum() ** 2 / (weight**2).sum())

    def nll(t: float, rows: slice = slice(None)) -> Tensor:
        each = F.cross_entropy(f[rows] / t, y[rows], reduction="none")
        return (each @ weight[rows]) / weight[rows].sum()

    def objective(t: float, rows: slice = slice(None)) -> float:
        return float(nll(t, rows)) + 2 * math.log(t) ** 2 / effective

    grid = [10 ** (i / 1000) for i in range(-1000, 1001)]
    best = min(grid, key=objective)
    assert report.mode_temperature == pytest.approx(best, rel=0.01)
    alone = [min(grid, key=lambda t, rows=rows: objective(t, rows)) for rows in (A, B)]
    assert all(abs(math.log(best / t)) > 0.02 for t in alone)  # neither fold decides by itself
    assert {float(m.temperature) for m in (model, *folds)} == {report.temperature}
    assert report.nll_before == pytest.approx(float(nll(1.0)), rel=1e-9)
    assert report.nll_mode == pytest.approx(float(nll(report.mode_temperature)), rel=1e-6)
    assert report.held_out == pytest.approx(float(weight.sum()))
    assert method in GP or report.temperature == report.mode_temperature


@torch.no_grad()
def exact_nll(model: Any, rows: slice, temperature: float) -> Tensor:
    """−log E softmax(u/τ)[y] of each example under the posterior, by SciPy's Sobol points."""
    x, y, _ = data()
    u = model.utility(x[rows])
    root = torch.linalg.cholesky(u.covariance() + 1e-12 * torch.eye(3))
    eps = torch.tensor(qmc.MultivariateNormalQMC([0.0] * 3, rng=0).random(4096))
    draws = u.mean + torch.einsum("bkl,sl->sbk", root, eps)
    return -torch.softmax(draws / temperature, -1).mean(0).gather(1, y[rows, None]).squeeze(1).log()


@pytest.mark.slow
@pytest.mark.parametrize("posterior", ["kronecker", "exact"])
@pytest.mark.parametrize("method", GP)
def test_the_final_temperature_is_that_of_predictions_on_the_pool(
    method: str, posterior: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each example under the posterior that has not seen it, by weight; the prior is around that of training,
    and all examples are calibration examples."""
    for name in ("EVALUATION_POINTS", "EVALUATION_POINTS_SAMPLED"):  # so that only the search may differ
        monkeypatch.setattr(link, name, 2048)
    model, folds, report = crossed(method, posterior=posterior)
    weight = data()[2]

    def objective(log_temperature: float, used: Any = (A, B), centre: float = 1.0) -> float:
        t = math.exp(log_temperature)
        each = torch.cat([exact_nll(folds[rows is B], rows, t) for rows in used])
        w = torch.cat([weight[rows] for rows in used])
        return float(each @ w / w.sum() + 2 * math.log(t / centre) ** 2 * (w**2).sum() / w.sum() ** 2)

    def best(*args: Any) -> float:
        bounds = math.log(0.1), math.log(10.0)
        return math.exp(minimize_scalar(objective, bounds=bounds, method="bounded", args=args).x)

    want = best()
    assert {float(m.temperature) for m in (model, *folds)} == {report.temperature}
    assert report.temperature == pytest.approx(want, rel=0.02)
    assert abs(math.log(want / report.mode_temperature)) > 0.05  # there was something to find
    assert all(abs(math.log(want / best((rows,)))) > 0.05 for rows in (A, B))  # no fold decides by itself
    assert abs(math.log(want / best((A, B), report.mode_temperature))) > 0.05
    prior = 2 * math.log(want) ** 2 * float((weight**2).sum() / weight.sum() ** 2)
    assert report.nll == pytest.approx(objective(math.log(want)) - prior, abs=3e-3)


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_lambda_is_the_mean_over_all_examples(link: str) -> None:
    model, folds, report = crossed("sngp", link=link)
    f, _, weight = pooled_logits(folds)
    t = report.mode_temperature
    share = weight / weight.sum()
    if link == "sigmoid":
        p = torch.sigmoid(f / t)
        torch.testing.assert_close(model.head.latent.posterior.gamma, share @ (p * (1 - p)) / t**2)
        return
    p = torch.softmax(f / t, -1)
    want = sum(s * (torch.diag(q) - torch.outer(q, q)) for s, q in zip(share, p, strict=True)) / t**2
    posterior = model.head.latent.posterior
    got = posterior.basis @ torch.diag(posterior.gamma) @ posterior.basis.mT
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)
    for fold in folds:  # the scale is chosen for posteriors that are made as the last one is
        torch.testing.assert_close(fold.head.latent.posterior.gamma, posterior.gamma)
    by_fold = [
        sum(s * (torch.diag(q) - torch.outer(q, q)) for s, q in zip(share[rows], p[rows], strict=True))
        / share[rows].sum()
        / t**2
        for rows in (A, B)
    ]
    assert (sum(by_fold) / 2 - want).abs().max() > 1e-4  # by weight, not fold by fold


@pytest.mark.parametrize("posterior", KINDS)
def test_the_posterior_is_of_all_the_data_at_the_modes_temperature(posterior: str) -> None:
    """As fit_posterior gives it for the same temperature, but for Λ and the scale."""
    model, _, report = crossed("sngp", posterior=posterior)
    weight = data()[2]
    assert report.count == pytest.approx(float(weight.sum()))
    assert report.posterior == posterior
    twin = model_of("sngp", 4, posterior=posterior)
    twin.temperature = report.mode_temperature
    hetsngp.fit_posterior(twin, part(slice(None)))
    if posterior == "kronecker":
        twin.head.latent.posterior.gamma = model.head.latent.posterior.gamma
        twin.head.latent.posterior.basis = model.head.latent.posterior.basis
    twin.head.latent.posterior.scale.fill_(report.scale)
    h = model.backbone(data()[0])
    torch.testing.assert_close(model.latent(h).covariance(), twin.latent(h).covariance())


@pytest.mark.parametrize("method", GP)
def test_the_scale_is_chosen_on_the_pool(method: str) -> None:
    """The NLL of each scale by plain draws, each example under the posterior that has not seen it, at the
    temperature that SciPy finds best for this scale; the prior is around that of training, which is 1."""
    _, folds, report = crossed(method)
    x, y, weight = data()
    share = weight / weight.sum()
    effective = 1 / float((share**2).sum())

    def nll(draws: Tensor, log_temperature: float) -> Tensor:
        p = torch.softmax(draws / math.exp(log_temperature), -1).mean(0)
        return -p.gather(1, y[:, None]).squeeze(1).log()

    each, temperatures = [], []
    for scale, _ in report.scale_grid:
        pieces = []
        for model, rows in zip(folds, (A, B), strict=True):
            model.head.latent.posterior.scale.fill_(scale)
            u = model.utility(x[rows])
            root = torch.linalg.cholesky(u.covariance() + 1e-12 * torch.eye(3))
            eps = torch.randn(4000, len(x[rows]), 3, generator=torch.Generator().manual_seed(0)).double()
            pieces.append(u.mean + torch.einsum("bkl,sbl->sbk", root, eps))
        draws = torch.cat(pieces, 1)

        def objective(log_temperature: float, draws: Tensor = draws) -> float:
            return float(share @ nll(draws, log_temperature)) + 2 * log_temperature**2 / effective

        found = minimize_scalar(objective, bounds=(-2.3, 2.3), method="bounded", options={"xatol": 0.01}).x
        each.append(nll(draws, found))
        temperatures.append(math.exp(found))
    assert abs(math.log(temperatures[-1] / temperatures[0])) > 0.1  # not one temperature for all
    means = [float(share @ e) for e in each]
    assert [v for _, v in report.scale_grid] == pytest.approx(means, abs=0.01)
    best = each[means.index(min(means))]
    allowed = []
    for e in each:
        spread = share @ (e - best - share @ (e - best)).square()
        allowed.append(max(math.sqrt(float(spread) / (effective - 1)), 0.01))
    values = [v for _, v in report.scale_grid]
    chosen = max(i for i, v in enumerate(values) if v <= min(values) + allowed[i])
    assert report.scale == report.scale_grid[chosen][0]
    assert report.allowance == pytest.approx(allowed[chosen], rel=0.1)


@pytest.mark.parametrize("method", METHODS)
def test_earlier_calibrations_leave_no_trace_and_modes_stay(method: str) -> None:
    model, folds, report = crossed(method)
    before = model.predict(ALL[0].double())
    model.train()
    again = cross_fit_posterior(
        model, part(slice(None)), [(folds[0], part(B), part(A)), (folds[1], part(A), part(B))]
    )
    assert again == report
    assert model.training
    assert toy.same_bits(model.predict(ALL[0].double()), before)
    assert model.calibration["temperature"] == report.temperature


def breaking(loader: list[Any]) -> Iterator[Any]:
    """All but the last batch, and then none."""
    yield from loader[:-1]
    raise OSError("the disk is gone")


def remembered(model: Any) -> Any:
    """Everything that a failure must not change."""
    state = {name: t.clone() for name, t in model.state_dict().items()}
    return state, [m.training for m in model.modules()], model.calibration, model._trained_since_fit


@pytest.mark.slow
@pytest.mark.parametrize("where", ["held out", "training", "all rows", "scale", "last temperature"])
@pytest.mark.parametrize("posterior", KINDS)
def test_if_one_step_fails_all_models_are_as_they_were(
    posterior: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fold models too: half of them at a new temperature would fit nothing."""
    model, folds, _ = crossed("hetsngp", posterior=posterior)
    models = (model, *folds)
    for each in (model, folds[1]):
        each.train()
        each.head.noise.eval()  # every module has its own mode
        each.loss(*data()[:2])  # trained since: the posterior is known to be stale
    before = [remembered(each) for each in models]
    assert [state[-1] for state in before] == [True, False, True]
    loaders = {"all rows": part(slice(None)), "training": part(A), "held out": part(B)}
    if where in loaders:
        loaders[where] = breaking(loaders[where])
    else:
        name = "largest_good_scale" if where == "scale" else "pooled_nll"
        real, calls = getattr(hetsngp.posterior.calibration, name), []

        def fails(*args: Any, posterior: bool = True) -> Any:
            calls.append(posterior)
            if where == "scale" or sum(calls) > 12:  # in the second search of the temperature
                raise OSError("the disk is gone")
            return real(*args, posterior=posterior)

        monkeypatch.setattr(hetsngp.posterior.calibration, name, fails)
    with pytest.raises(OSError, match="the disk is gone"):
        cross_fit_posterior(
            model,
            loaders["all rows"],
            [(folds[0], part(B), part(A)), (folds[1], loaders["training"], loaders["held out"])],
        )
    for each, (state, *rest) in zip(models, before, strict=True):
        assert all(torch.equal(t, state[name]) for name, t in each.state_dict().items())
        assert list(remembered(each)[1:]) == rest


def test_fold_models_can_predict_afterwards() -> None:
    model, folds, _ = crossed("sngp")
    for fold in folds:
        fold.train()
        fold.loss(*data()[:2])
        fold.eval()
    with pytest.warns(UserWarning, match="trained after fit_posterior"):
        folds[0].predict(data()[0])
    report = cross_fit_posterior(
        model, part(slice(None)), [(folds[0], part(B), part(A)), (folds[1], part(A), part(B))]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (model, *folds):
            each.predict(data()[0])
    assert {float(m.head.latent.posterior.scale) for m in (model, *folds)} == {report.scale}
    assert model.calibration == dataclasses.asdict(report)


def test_held_out_rows_that_were_trained_on_are_noticed() -> None:
    model = model_of("sngp")
    with pytest.warns(UserWarning, match="100% of the calibration examples are also in the training data"):
        cross_fit_posterior(model, part(B), [(copy.deepcopy(model), part(B), part(B))])
