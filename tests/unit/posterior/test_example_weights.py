"""A weight is repetition: (x, y, 3) and three times (x, y) are the same to loss, posterior, calibration."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from tests.contract import toy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import hetsngp
from hetsngp.fitting import loop
from hetsngp.models.methods import METHODS
from hetsngp.posterior import calibration
from hetsngp.validation import check_batch, check_weight

WEIGHT = torch.tensor([3, 1, 2, 0, 1, 5])
POSTERIORS = ["kronecker", "exact", "shared", "momentum"]


def data(seed: int = 0, links: str = "softmax", per_class: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    x, y = toy.blobs(3, per_class, flip=0.3, seed=seed)
    return x.double(), toy.labels_for(y, 3, {"link": links}), WEIGHT.repeat(len(x) // len(WEIGHT))


def repeated(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.repeat_interleave(weight, 0), y.repeat_interleave(weight, 0)


def batches(*tensors: Tensor, size: int = 10) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), batch_size=size)


def model_of(method: str, **options: Any) -> Any:
    return toy.trained(method, 3, fit=False, flip=0.3, **options).double()


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(a: Any, b: Any, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


# --- loss ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "links"), toy.LINKED)
def test_the_loss_and_its_gradient_are_those_of_repeated_rows(method: str, links: str) -> None:
    """In eval mode, where the integration points are fixed and rows do not influence each other, and with the
    same input for all members, who have no partners then."""
    model = toy.alike(model_of(method, link=links))
    x, y, weight = data(links=links)
    one = model.loss(x, y, weight=weight / weight.double().mean())
    two = model.loss(*repeated(x, y, weight))
    assert_same(one, two)
    assert abs(float((one - model.loss(x, y)).detach())) > 1e-4  # the weights matter at all
    first, second = gradients(model, one), gradients(model, two)
    assert len(first) > 2
    for name, gradient in first.items():
        assert_same(gradient, second[name])


def test_the_mean_is_over_rows_and_the_prior_has_no_weight() -> None:
    model = model_of("sngp")
    x, y, weight = data()
    logits = model(x).detach()
    by_hand = sum(-float(w) * float(f[c]) for w, f, c in zip(weight, logits, y, strict=True)) / len(x)
    by_hand += 0.5 * model.head.latent.beta.square().sum().item() / model.dataset_size
    assert model.loss(x, y, weight=weight).item() == pytest.approx(by_hand, rel=1e-12)


def test_an_ensemble_weighs_each_member() -> None:
    members = [model_of("sngp"), model_of("deterministic")]
    x, y, weight = data()
    each = torch.stack([m.loss(x, y, weight=weight) for m in members])
    assert_same(hetsngp.Ensemble(members).loss(x, y, weight=weight), each.mean())


def test_training_on_weights_of_one_is_training_without() -> None:
    x, y, _ = data()
    one, two = model_of("hetsngp"), model_of("hetsngp")
    loop.train(one, batches(x, y), epochs=2, generator=torch.Generator().manual_seed(0))
    loop.train(two, batches(x, y, torch.ones(len(x))), epochs=2, generator=torch.Generator().manual_seed(0))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


# --- posterior -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("links", ["softmax", "sigmoid"])
@pytest.mark.parametrize("posterior", POSTERIORS)
def test_the_posterior_is_that_of_repeated_rows(posterior: str, links: str) -> None:
    one, two, plain = (model_of("sngp", posterior=posterior, link=links) for _ in range(3))
    x, y, weight = data(links=links)
    reports = [
        hetsngp.fit_posterior(one, batches(x, y, weight)),
        hetsngp.fit_posterior(two, batches(*repeated(x, y, weight))),
    ]
    hetsngp.fit_posterior(plain, batches(x, y))
    assert reports[0].count == reports[1].count == int(weight.sum())
    assert str(reports[0]) == str(reports[1])
    h = torch.randn(7, 16, generator=torch.Generator().manual_seed(1)).double()
    assert_same(one.latent(h).covariance(), two.latent(h).covariance())
    assert float((one.latent(h).var / plain.latent(h).var - 1).abs().max()) > 0.01


@pytest.mark.parametrize("posterior", POSTERIORS)
def test_fractions_of_an_example_count_too(posterior: str) -> None:
    """Two halves are one; in float32 the statistics of the weights still add up."""
    one, two = model_of("sngp", posterior=posterior), model_of("sngp", posterior=posterior)
    x, y, _ = data()
    halves = torch.cat([x, x]), torch.cat([y, y]), torch.full((2 * len(x),), 0.5)
    assert hetsngp.fit_posterior(one, batches(*halves)).count == len(x)
    hetsngp.fit_posterior(two, batches(x, y))
    assert_same(one.latent(one.backbone(x)).var, two.latent(two.backbone(x)).var)


# --- calibration ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("method", "links"), toy.LINKED)
def test_calibration_is_that_of_repeated_rows(
    method: str, links: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the temperature's prior and what a scale may cost, to which a copy is no second example."""
    monkeypatch.setattr("hetsngp.posterior.calibration.TEMPERATURE_SPREAD", math.inf)
    monkeypatch.setattr(calibration.HeldOut, "standard_error", lambda self, values: 0.0)
    x, y, weight = data(links=links)
    held = data(seed=1, links=links, per_class=20)
    one, two, plain = (model_of(method, link=links) for _ in range(3))
    a = hetsngp.fit_posterior(one, batches(x, y, weight), batches(*held))
    b = hetsngp.fit_posterior(two, batches(*repeated(x, y, weight)), batches(*repeated(*held)))
    c = hetsngp.fit_posterior(plain, batches(x, y), batches(*held[:2]))
    assert a.held_out == b.held_out == int(held[2].sum())
    assert a.temperature == pytest.approx(b.temperature, rel=1e-9)
    assert abs(a.temperature / c.temperature - 1) > 0.02
    for name in ("mode_temperature", "nll_before", "nll_mode", "nll"):
        assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-9)
    assert [v for pair in a.scale_grid for v in pair] == pytest.approx(
        [v for pair in b.scale_grid for v in pair], rel=1e-9
    )
    if method in toy.GP:
        assert len(a.scale_grid) > 1
        one.head.latent.posterior.scale.fill_(1.0)
        two.head.latent.posterior.scale.fill_(1.0)
        h = one.backbone(x)
        assert_same(one.latent(h).covariance(), two.latent(h).covariance())


def test_the_held_out_hessian_is_weighted() -> None:
    x, y, weight = data()
    held = data(seed=1, per_class=20)
    model = model_of("sngp", amplitude=40.0)
    report = hetsngp.fit_posterior(model, batches(x, y, weight), batches(*held))
    tau = report.mode_temperature
    assert abs(report.temperature / tau - 1) > 0.005  # Λ is at the other one
    with torch.no_grad():
        latent = model.head.latent
        p = torch.softmax(latent.mean(latent.features(model.backbone(held[0]))) / tau, -1)
    total = torch.zeros(3, 3, dtype=torch.float64)
    for w, row in zip(held[2], p, strict=True):
        total += w * (torch.diag(row) - torch.outer(row, row)) / tau**2
    expected = torch.linalg.eigvalsh(total / held[2].sum())[1:]  # the smallest is 0, along (1, …, 1)
    assert_same(latent.posterior.gamma.sort().values, expected, rtol=1e-6)


def test_repetition_is_no_evidence_so_the_standard_error_uses_the_effective_number() -> None:
    values = torch.randn(50, generator=torch.Generator().manual_seed(0)).double()
    h, y = values.unsqueeze(1), torch.zeros(50)
    weight = torch.rand(50, generator=torch.Generator().manual_seed(1)).double() + 0.1
    got = calibration.HeldOut(h, y, weight).standard_error(values)
    mean = float((weight * values).sum() / weight.sum())
    spread = float((weight * (values - mean) ** 2).sum() / weight.sum())
    effective = float(weight.sum() ** 2 / (weight**2).sum())
    assert got == pytest.approx(math.sqrt(spread * effective / (effective - 1) / effective), rel=1e-12)
    assert calibration.HeldOut(h, y, weight).mean(values) == pytest.approx(mean, rel=1e-12)
    plain = calibration.HeldOut(h, y).standard_error(values)
    assert plain == pytest.approx(float(values.std()) / math.sqrt(50), rel=1e-12)
    for size in (1.0, 7.0):  # the unit of the weights does not matter
        same = calibration.HeldOut(h, y, torch.full((50,), size)).standard_error(values)
        assert same == pytest.approx(plain, rel=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_the_unit_of_held_out_weights_does_not_matter(method: str) -> None:
    x, y, _ = data()
    held = data(seed=1, per_class=20)
    one, two = model_of(method), model_of(method)
    a = hetsngp.fit_posterior(one, batches(x, y), batches(*held[:2]))
    b = hetsngp.fit_posterior(two, batches(x, y), batches(*held[:2], torch.full((len(held[0]),), 7.0)))
    assert b.held_out == 7 * a.held_out
    for name in (
        "temperature",
        "mode_temperature",
        "scale",
        "nll_before",
        "nll_mode",
        "nll",
        "standard_error",
    ):
        assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-9)


def test_examples_of_weight_zero_are_not_there() -> None:
    """A mask in place of a split: the same rows in both loaders, each counted in one of them."""
    x, y, _ = data()
    mask = torch.arange(len(x)) % 3 == 0
    one, two = model_of("sngp"), model_of("sngp")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none of the held-out rows was trained on
        a = hetsngp.fit_posterior(one, batches(x, y, ~mask), batches(x, y, mask.float(), size=2))
    b = hetsngp.fit_posterior(two, batches(x[~mask], y[~mask]), batches(x[mask], y[mask]))
    assert (a.count, a.held_out) == (b.count, b.held_out)
    assert a.temperature == pytest.approx(b.temperature, rel=1e-9)
    assert a.nll == pytest.approx(b.nll, rel=1e-9)
    assert a.standard_error == pytest.approx(b.standard_error, rel=1e-9)


def test_progress_counts_rows() -> None:
    seen: list[int] = []
    hetsngp.fit_posterior(model_of("sngp"), batches(*data(), size=12), progress=seen.append)
    assert seen == [10, 20, 30]  # two of twelve weigh nothing


# --- bad weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "error", "words"),
    [
        ([1.0, 1.0], TypeError, "must be a tensor, got list"),
        (torch.ones(3), ValueError, r"shape \(3,\) where \(2,\) was expected"),
        (torch.ones(2, 1), ValueError, r"shape \(2, 1\)"),
        (torch.tensor([1.0, -1.0]), ValueError, "finite and not negative"),
        (torch.tensor([1.0, math.nan]), ValueError, "finite and not negative"),
        (torch.tensor([1.0, math.inf]), ValueError, "finite and not negative"),
    ],
)
def test_bad_weights_are_refused(weight: Any, error: type[Exception], words: str) -> None:
    x, y, _ = (part[:2] for part in data())
    model = model_of("sngp")
    for call in (
        lambda: check_weight(weight, 2),
        lambda: model.loss(x, y, weight=weight),
        lambda: hetsngp.fit_posterior(model, [(x, y, weight)]),
        lambda: hetsngp.fit_posterior(model, [(x, y)], [(x + 1, y, weight)]),
    ):
        with pytest.raises(error, match=words):
            call()


def test_weights_that_are_all_zero_are_refused() -> None:
    x, y, _ = data()
    model = model_of("sngp")
    with pytest.raises(ValueError, match="every weight of loader is zero"):
        hetsngp.fit_posterior(model, [(x, y, torch.zeros(len(x)))])
    with pytest.raises(ValueError, match="every weight of calibration is zero"):
        hetsngp.fit_posterior(model, [(x, y)], [(x, y, torch.zeros(len(x)))])


def test_a_batch_has_two_or_three_parts() -> None:
    assert check_batch((1, 2), "loader") == (1, 2, None)
    assert check_batch([1, 2, 3], "loader") == (1, 2, 3)
    with pytest.raises(TypeError, match=r"loader must yield pairs \(x, y\) or triples .* got 4 values"):
        check_batch((1, 2, 3, 4), "loader")
