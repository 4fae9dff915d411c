"""The noise is kept where the data are and vanishes far from them, as a dense GP in float64 says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.contract import toy
from tests.reference import oracles
from torch import Tensor

import hetsngp
from hetsngp.choices import NOISES
from hetsngp.functional import laplace
from hetsngp.nn.posteriors import POSTERIOR_TYPES
from hetsngp.types import Factor

UNIT_NOISE = ("kronecker", "shared", "momentum")
KINDS = (*UNIT_NOISE, "exact")


def data(classes: int = 3, per_class: int = 12, **options: Any) -> tuple[Tensor, Tensor]:
    x, y = toy.blobs(classes, per_class, flip=0.3)
    return x.double(), toy.labels_for(y, classes, options)


def fitted(posterior: str, method: str = "hetsngp", **options: Any) -> Any:
    model = toy.trained(method, 3, fit=False, flip=0.3, posterior=posterior, **options).double()
    hetsngp.fit_posterior(model, toy.loader(*data(**options)))
    return model


def queries() -> Tensor:
    """On the data, between them, away and far away."""
    x = data()[0]
    return torch.cat([x[:6], 0.5 * x[:4], 3 * x[:4], 50 * x[:4]])


@torch.no_grad()
def features(model: Any, x: Tensor) -> Any:
    return model.head.latent.features(model.backbone(x)).numpy()


@torch.no_grad()
def posterior_contraction(model: Any, x: Tensor) -> Tensor:
    return model.head.latent.posterior_contraction(model.backbone(x))


# --- the number -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
@pytest.mark.parametrize("posterior", UNIT_NOISE)
def test_it_is_that_of_a_dense_gp_with_unit_noise(posterior: str, link: str) -> None:
    model = fitted(posterior, link=link)
    train, query = features(model, data()[0]), features(model, queries())
    want = torch.tensor(oracles.posterior_contraction(train, query, torch.ones(len(train)).numpy()))
    torch.testing.assert_close(posterior_contraction(model, queries()), want, rtol=1e-8, atol=1e-10)
    assert want.max() - want.min() > 0.3  # there was something to get right


@pytest.mark.parametrize("posterior", UNIT_NOISE)
def test_an_example_of_weight_w_is_seen_with_noise_one_over_w(posterior: str) -> None:
    model = fitted(posterior)
    x, y = data()
    weight = torch.linspace(0.1, 3, len(x)).double()
    hetsngp.fit_posterior(model, [(x, y, weight)])
    want = oracles.posterior_contraction(features(model, x), features(model, queries()), (1 / weight).numpy())
    torch.testing.assert_close(
        posterior_contraction(model, queries()), torch.tensor(want), rtol=1e-8, atol=1e-10
    )


def test_the_exact_posterior_goes_by_its_best_class() -> None:
    model = fitted("exact")
    model.temperature = 1.3
    x, y = data()
    hetsngp.fit_posterior(model, toy.loader(x, y))
    train, query = features(model, x), features(model, queries())
    p = torch.softmax(torch.tensor(train) @ model.head.latent.beta.detach() / 1.3, -1)
    each = [
        torch.tensor(
            oracles.posterior_contraction(train, query, (1.3**2 / (p[:, c] * (1 - p[:, c]))).numpy())
        )
        for c in range(3)
    ]
    # Sums of the exact posterior are kept in the precision of the features.
    torch.testing.assert_close(
        posterior_contraction(model, queries()), torch.stack(each).amax(0), rtol=1e-6, atol=1e-8
    )
    assert (torch.stack(each).amax(0) - torch.stack(each).amin(0)).max() > 0.05


@pytest.mark.parametrize("posterior", UNIT_NOISE)
def test_it_belongs_to_the_inputs_not_to_temperature_scale_or_labels(posterior: str) -> None:
    model = fitted(posterior)
    before = posterior_contraction(model, queries())
    x, y = data()
    model.temperature = 3.0
    hetsngp.fit_posterior(model, toy.loader(x, (y + 1) % 3))
    model.head.latent.posterior.scale.fill_(0.01)
    assert torch.equal(posterior_contraction(model, queries()), before)


@pytest.mark.parametrize(("method", "posterior"), [("heteroscedastic", "kronecker"), ("hetsngp", "none")])
def test_without_a_posterior_the_contraction_is_one(method: str, posterior: str) -> None:
    model = fitted(posterior, method)
    assert torch.equal(posterior_contraction(model, queries()), torch.ones(len(queries())).double())


@pytest.mark.parametrize("posterior", KINDS)
def test_one_on_the_data_and_zero_far_away(posterior: str) -> None:
    """With enough of them: 0.99 and more kept. Many features, or far ones would overlap by chance."""
    model = toy.trained("hetsngp", 3, fit=False, flip=0.3, posterior=posterior, random_features=512)
    x, y = toy.blobs(3, 100, flip=0.3)
    hetsngp.fit_posterior(model, toy.loader(x, y))
    near, far = posterior_contraction(model, x), posterior_contraction(model, 100 * x)
    # p(1 − p) ≤ ¼ instead of 1: under Eq. (5) less was learned.
    assert near.min() > (0.95 if posterior == "exact" else 0.99)
    assert near.mean() > 0.99
    assert far.max() < 0.1  # rank/m by chance: some 15 directions of 512 are taken


@pytest.mark.parametrize("posterior", KINDS)
def test_rounding_does_not_lead_below_zero(posterior: str) -> None:
    """Features orthogonal to all that was seen: zero in exact arithmetic, and a root is taken of it."""
    phi = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    query = torch.randn(200, 64, generator=torch.Generator().manual_seed(1)).double()
    query = (query - query @ torch.linalg.pinv(phi.double()) @ phi.double()).float()
    module = POSTERIOR_TYPES[posterior](3, 64, "softmax")
    module.fit(module.statistics(phi, torch.full((5, 3), 1 / 3), torch.ones(())))
    known = module.posterior_contraction(query)
    assert ((known >= 0) & (known < 1e-5)).all()
    assert module.posterior_contraction(1e3 * phi).max() <= 1


# --- what it does to the noise --------------------------------------------------------------------------


def widen(model: Any, by: float = 6.0) -> Any:
    with torch.no_grad():
        model.head.noise.factor.bias.add_(by * torch.randn(6, generator=torch.Generator().manual_seed(0)))
    return model


@torch.no_grad()
def full_noise(model: Any, x: Tensor) -> Tensor:
    """Σ(x) as it was learned: (B, K, K)."""
    var, factor = model.head.noise(model.backbone(x), model.head.latent)
    return torch.diag_embed(var) + factor.dense() @ factor.dense().mT


@torch.no_grad()
def believed_noise(model: Any, x: Tensor) -> Tensor:
    return model.head.parts(model.backbone(x), posterior=True)[1].covariance()


@pytest.mark.parametrize(
    ("method", "posterior", "noise"),
    [
        *(("hetsngp", kind, "low_rank") for kind in (*KINDS, "none")),
        *(("hetsngp", "kronecker", noise) for noise in NOISES[1:]),
        *((method, "exact", noise) for method in toy.NOISY if method in toy.MIXTURES for noise in NOISES),
    ],
)
def test_the_noise_is_believed_as_far_as_its_width_allows(method: str, posterior: str, noise: str) -> None:
    """k/(k + (1 − k)·max(v, 1)) of it, v its mean variance in units of the training temperature."""
    model = fitted(posterior, method, noise=noise, temperature=0.75)
    model.head.temperature.fill_(0.05)  # calibration has no say in it
    x = queries()
    full, shares = full_noise(model, x), []
    known = posterior_contraction(model, x).tolist()
    for row, covariance in enumerate(full):  # the members' of one input after another
        k = known[row // model.head.num_members]
        width = float(covariance.trace()) / 3 / 0.75**2
        shares.append(k / (k + (1 - k) * max(width, 1.0)))
    share = torch.tensor(shares, dtype=torch.float64)[:, None, None]
    widths = full.diagonal(dim1=1, dim2=2).mean(1) / 0.75**2
    assert widths.min() < 1 < widths.max()  # both sides of the rule
    assert posterior == "none" or share.min() < 0.5
    torch.testing.assert_close(believed_noise(model, x), share * full, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        latent, _ = model.head.parts(model.backbone(x), posterior=True)
        _, at_mode = model.head.parts(model.backbone(x), posterior=False)
        u = model.head.utility(model.backbone(x), posterior=True)
    torch.testing.assert_close(at_mode.covariance(), full, rtol=1e-12, atol=1e-14)  # as it was learned
    assert not at_mode.mean.any()
    torch.testing.assert_close(u.covariance(), latent.covariance() + share * full, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("posterior", KINDS)
def test_believed_noise_is_no_wider_than_the_odds_of_knowing_it(posterior: str) -> None:
    """k/(1 − k) in units of τ² on average over classes, however wide it is on the data; and no more than k
    of what was learned."""
    model = widen(fitted(posterior, temperature=1.5), 60.0)
    x = torch.cat([factor * data()[0] for factor in (1.0, 1.3, 2.0, 3.0, 10.0, 100.0)])
    known = posterior_contraction(model, x)
    width = believed_noise(model, x).diagonal(dim1=1, dim2=2).mean(1)
    full = full_noise(model, x).diagonal(dim1=1, dim2=2).mean(1)
    assert (width <= known / (1 - known) * 1.5**2 * (1 + 1e-9)).all()
    assert (width <= known * full * (1 + 1e-9)).all()
    some = (known > 0.3) & (known < 0.7)
    assert some.any()
    assert (known * full)[some].min() > 20 * width[some].max()  # what a plain share of it would leave
    narrow = widen(model, -60.0)
    with torch.no_grad():
        narrow.head.noise.diagonal.bias.sub_(5.0)
        narrow.head.noise.factor.weight.mul_(0.1)
    full = full_noise(narrow, x)
    assert full.diagonal(dim1=1, dim2=2).mean(1).max() < 1.5**2
    torch.testing.assert_close(believed_noise(narrow, x), known[:, None, None] * full)


def test_it_is_the_training_temperature_that_noise_is_measured_by() -> None:
    """The noise was learned with that one; a calibrated temperature belongs to predictions."""
    model = widen(fitted("kronecker"))
    x = queries()
    before = believed_noise(model, x)
    model.head.temperature.fill_(0.3)  # as calibration sets it
    torch.testing.assert_close(believed_noise(model, x), before, rtol=1e-10, atol=1e-12)
    model.temperature = 3.0
    assert (believed_noise(model, x) / before)[-4:].min() > 1.5


def test_wide_noise_does_not_hide_uncertainty_half_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A half of wide noise is still wide: there it would pass for a fact about the labels."""
    model = widen(fitted("kronecker", random_features=512), 20.0)
    x = torch.cat([factor * data()[0] for factor in (1.5, 2.0, 3.0)])
    near, x = data()[0], x[(posterior_contraction(model, x) - 0.5).abs() < 0.3]
    assert len(x) > 5
    here, there = model.predict(near), model.predict(x)
    monkeypatch.setattr(
        "hetsngp.nn.heads.noise_weight", lambda variance, posterior_contraction: posterior_contraction
    )
    old_here, old_there = model.predict(near), model.predict(x)
    assert there.data_uncertainty.mean() < 0.7 * old_there.data_uncertainty.mean()
    assert there.model_uncertainty.mean() > 1.2 * old_there.model_uncertainty.mean()
    assert here.data_uncertainty.mean() > 0.9 * old_here.data_uncertainty.mean()  # on the data it is kept


def test_noise_of_the_data_does_not_hide_the_uncertainty_far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the noise that the network extrapolates, part of the uncertainty far away would count as noise."""
    model = widen(fitted("kronecker", random_features=512))
    near, far = data()[0], 100 * data()[0]
    here, there = model.predict(near), model.predict(far)
    with_contraction = model.head.latent.with_contraction
    monkeypatch.setattr(
        model.head.latent, "with_contraction", lambda h: (with_contraction(h)[0], h.new_ones(len(h)))
    )
    full_here, full_there = model.predict(near), model.predict(far)
    assert full_there.data_uncertainty.mean() > 1.5 * there.data_uncertainty.mean()
    assert there.model_uncertainty.mean() > 1.2 * full_there.model_uncertainty.mean()
    assert (
        here.data_uncertainty.mean() > 0.9 * full_here.data_uncertainty.mean()
    )  # it is not lost where it is


def test_in_training_the_noise_is_whole_and_the_running_statistics_move_once() -> None:
    """``sample_beta`` puts the posterior into the loss; the contraction there would be a second pass through
    the normalizer, which moves its statistics and breaks the gradient."""
    model = fitted("kronecker", sample_beta=True).train()
    x, y = data()
    steps = int(model.head.latent.normalizer.steps)
    model.loss(x, y, generator=torch.Generator().manual_seed(0)).backward()
    assert int(model.head.latent.normalizer.steps) == steps + 1
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    model.head.noise.eval()  # its own statistics stand still for the comparison
    with torch.no_grad():
        h = model.backbone(50 * x)
        noise = model.head.parts(h, posterior=True)[1]
        var, factor = model.head.noise(h, model.head.latent)
    torch.testing.assert_close(noise.marginal_variance(), var + factor.variance())


@pytest.mark.parametrize("kind", ["dense", "shared basis", "row", "column", "row and column"])
def test_a_weighted_factor(kind: str) -> None:
    """Each row's factor times a number of its own, in every form a factor has."""
    g = torch.Generator().manual_seed(0)
    basis = torch.randn(*((4, 3, 2) if kind == "dense" else (3, 2)), generator=g)
    row = torch.randn(4, 3, generator=g) if "row" in kind else None
    column = torch.randn(4, 2, generator=g) if "column" in kind else None
    factor, by = Factor(basis, row, column), torch.rand(4, 1, generator=g)
    want = factor.dense() * by.unsqueeze(-1)
    weighted = factor.weighted(by)
    torch.testing.assert_close(weighted.dense(), want)
    torch.testing.assert_close(weighted.variance(), want.square().sum(-1))
    eps = torch.randn(5, 2, generator=g)
    torch.testing.assert_close(weighted.matmul(eps), eps @ want.mT)
    torch.testing.assert_close(weighted.project(torch.ones(4, 3)), want.sum(1))
    assert weighted.rank == 2


# --- mean, covariance and contraction at once ---------------------------------------------------------------


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
@pytest.mark.parametrize("posterior", [*KINDS, "none"])
@pytest.mark.parametrize("method", ["hetsngp", "hetsngp_mimo"])
def test_one_call_has_the_bits_of_two(method: str, posterior: str, link: str) -> None:
    model = fitted(posterior, method, link=link).float()
    latent = model.head.latent
    h = model.backbone(queries().float()).detach()
    views = [(latent, h), (model.head.on_precomputed().latent, latent.with_features(h))]
    for view, inputs in views:
        got, contraction = view.with_contraction(inputs)
        want = view(inputs, posterior=True)
        assert torch.equal(contraction, view.posterior_contraction(inputs))
        assert torch.equal(got.mean, want.mean)
        assert torch.equal(got.var, want.var)
        assert (got.factor is None) == (want.factor is None)
        assert torch.equal(got.covariance(), want.covariance())


def test_a_linear_latent_has_a_contraction_of_one() -> None:
    latent = toy.build("heteroscedastic").head.latent
    h = torch.randn(5, 16)
    got, contraction = latent.with_contraction(h)
    assert torch.equal(got.mean, latent(h, posterior=True).mean)
    assert torch.equal(contraction, torch.ones(5))


@pytest.mark.parametrize("posterior", KINDS)
def test_one_call_computes_features_and_projection_once(
    posterior: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fitted(posterior)
    latent = model.head.latent
    h = model.backbone(queries()).detach()
    calls: dict[str, int] = {}

    def count(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def counted(*args: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return inner(*args)

        monkeypatch.setattr(owner, name, counted)

    count(latent, "features")
    count(laplace, "cholesky_variance")
    if posterior == "kronecker":
        count(latent.posterior, "_squares")
    latent.with_contraction(h)
    assert sorted(calls.values()) == [1, 1]


@pytest.mark.parametrize("posterior", KINDS)
def test_an_unfitted_posterior_is_refused_without_reading_the_device(posterior: str) -> None:
    """``fitted`` is on the device: to read it waits for everything that was launched before."""
    latent = toy.build("hetsngp", posterior=posterior).eval().head.latent
    h = torch.randn(4, 16)
    for call in (lambda: latent(h, posterior=True), lambda: latent.with_contraction(h)):
        with pytest.raises(hetsngp.PosteriorNotFittedError):
            call()
    latent = fitted(posterior).head.latent
    latent.posterior.fitted = torch.tensor(True).as_subclass(Unread)
    h = torch.randn(4, 16, dtype=torch.float64)
    latent(h, posterior=True)
    latent.with_contraction(h)


class Unread(Tensor):
    """A value that may not be read."""

    def __bool__(self) -> bool:
        raise AssertionError("read")

    def item(self) -> Any:
        raise AssertionError("read")
