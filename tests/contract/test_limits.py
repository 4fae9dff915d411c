"""Limits in which one method becomes another, or the answer is known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract import toy
from tests.reference import oracles
from torch import Tensor

import hetsngp
from hetsngp.choices import NOISES
from hetsngp.functional import noise as noise_functions
from hetsngp.models.methods import METHODS

KINDS = ("kronecker", "exact", "shared", "momentum")
# Each posterior with the default noise, each noise with the default posterior.
PAIRS = [*((kind, "low_rank") for kind in KINDS), *(("kronecker", noise) for noise in NOISES[1:])]


def _silence(model: Any) -> None:
    """Σ(x) → 0 through the noise head's parameters: V = 0 and d = softplus(−100) + MIN_STD = MIN_STD."""
    with torch.no_grad():
        for parameter in model.head.noise.parameters():
            parameter.zero_()
        model.head.noise.diagonal.bias.fill_(-100.0)


def _twins(classes: int, posterior: str, noise: str) -> tuple[Any, Any]:
    """A fitted sngp, and a hetsngp with the same weights and posterior and its noise silenced."""
    sngp = toy.trained("sngp", classes, posterior=posterior)
    het = toy.build("hetsngp", classes, posterior=posterior, noise=noise)
    missing, unexpected = het.load_state_dict(sngp.state_dict(), strict=False)
    assert not unexpected
    assert all(name.startswith("head.noise.") for name in missing)
    _silence(het)
    return sngp, het.eval()


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize(("posterior", "noise"), PAIRS)
def test_hetsngp_without_noise_is_sngp(posterior: str, noise: str, classes: int) -> None:
    x, y = toy.blobs(classes)
    sngp, het = _twins(classes, posterior, noise)
    a, b = sngp.utility(x), het.utility(x)
    assert torch.equal(a.mean, b.mean)
    # The diagonal cannot fall below MIN_STD = 1e-3, so the covariances differ by 1e-6·I and nothing else; of
    # features of the size a/√m = 10/√32 it is their diagonal, and βᵀβ what is left of it.
    floor = noise_functions.MIN_STD**2 * torch.eye(classes)
    if noise == "feature":
        beta = sngp.head.latent.beta.detach()
        floor = noise_functions.MIN_STD**2 * 10.0**2 / 32 * beta.mT @ beta
    torch.testing.assert_close(b.covariance() - floor, a.covariance(), rtol=1e-5, atol=1e-5)
    p, q = sngp.predict(x), het.predict(x)
    torch.testing.assert_close(q.clean_probs, p.clean_probs, rtol=0, atol=1e-6)
    # dp ≤ MIN_STD·|dp/du|, and with noise, however little, the integral takes points.
    error = 1e-3 if classes == 2 else hetsngp.functional.link.TARGET_ERROR
    torch.testing.assert_close(q.probs, p.probs, rtol=0, atol=error)
    torch.testing.assert_close(q.latent_variance, p.latent_variance)
    # Integration error, not a difference of the models.
    torch.testing.assert_close(q.model_uncertainty, p.model_uncertainty, rtol=0, atol=0.006)
    losses = [m.loss(x, y, generator=torch.Generator().manual_seed(0)).detach() for m in (sngp, het)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("classes", [2, 3])
def test_hetsngp_with_sigma_exactly_zero_gives_the_probabilities_of_sngp(
    classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise_functions, "MIN_STD", 0.0)  # softplus(−100)² underflows to 0
    x, _ = toy.blobs(classes)
    sngp, het = _twins(classes, "kronecker", "low_rank")
    # With two classes both are the same quadrature; with more the noise, which is zero, makes one of them
    # take points.
    error = 1e-6 if classes == 2 else hetsngp.functional.link.TARGET_ERROR
    torch.testing.assert_close(het.predict(x).probs, sngp.predict(x).probs, rtol=0, atol=error)


def _monte_carlo(mean: Tensor, var: Tensor, factor: Tensor, draws: int = 20_000) -> tuple[Tensor, Tensor]:
    """E softmax(u) by plain draws in float64, and its standard error: each (B, K)."""
    g = torch.Generator().manual_seed(7)
    mean, var, factor = mean.double(), var.double(), factor.double()
    eps = torch.randn(draws, *mean.shape, generator=g, dtype=torch.float64)
    eta = torch.randn(draws, mean.shape[0], factor.shape[-1], generator=g, dtype=torch.float64)
    p = torch.softmax(mean + var.sqrt() * eps + torch.einsum("bkr,sbr->sbk", factor, eta), -1)
    return p.mean(0), p.std(0) / math.sqrt(draws)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize(("posterior", "noise"), [*PAIRS, ("none", "low_rank")])
def test_zero_gp_variance_is_heteroscedastic_noise_on_the_same_mean(
    posterior: str, noise: str, classes: int
) -> None:
    train, y = toy.blobs(classes, flip=0.4)
    train, x = train.double(), train[:8].double()
    model = toy.trained("hetsngp", classes, flip=0.4, posterior=posterior, noise=noise).double()
    hetsngp.fit_posterior(model, toy.loader(train, y))
    with torch.no_grad():  # noise wide enough to matter
        (model.head.noise.factor if noise == "low_rank" else model.head.noise.row).bias.add_(1.0)
    model.head.latent.posterior.scale.fill_(0.0)
    # The oracle from parts: Φβ from the latent, d² and V from the noise head, and of the posterior only the
    # contraction.
    with torch.no_grad():
        latent, h = model.head.latent, model.backbone(x)
        mean = latent.features(h) @ latent.beta
        var, factor = model.head.noise(h, latent)
        width = (var + factor.dense().square().sum(-1)).mean(-1)
        known = _dense_contraction(model, train, x, posterior)
        known = known / (known + (1 - known) * width.clamp_min(1))  # wide noise is reduced more
        var, v = var * known[:, None], factor.dense() * known[:, None, None].sqrt()
    u = model.utility(x)
    assert torch.equal(u.mean, mean)
    torch.testing.assert_close(u.covariance(), torch.diag_embed(var) + v @ v.mT, rtol=1e-6, atol=1e-8)
    p = model.predict(x)
    expected, error = _monte_carlo(mean, var, v)
    assert (p.probs.double() - expected).abs().le(4 * error + hetsngp.functional.link.TARGET_ERROR).all()
    assert not torch.allclose(p.probs, torch.softmax(mean, -1), atol=0.02)  # the noise did matter
    assert (p.model_uncertainty == 0).all()
    assert (p.latent_variance == 0).all()
    torch.testing.assert_close(p.clean_probs, torch.softmax(mean, -1), rtol=0, atol=1e-6)
    mode = toy.build("hetsngp", classes, posterior="none", noise=noise).double()
    mode.load_state_dict(model.state_dict(), strict=False)
    full = mode.utility(x).covariance()
    torch.testing.assert_close(known[:, None, None] * full, u.covariance(), rtol=1e-6, atol=1e-8)


# --- members ------------------------------------------------------------------------------------------------

MEMBER_OF = {"mimo": "deterministic", "hetsngp_mimo": "hetsngp"}


@pytest.mark.parametrize("options", [{}, {"link": "sigmoid"}, {"noise": "feature"}], ids=str)
@pytest.mark.parametrize("method", toy.MIXTURES)
def test_several_inputs_with_one_member_are_their_member(method: str, options: dict[str, Any]) -> None:
    """To the bit: initial weights, losses, gradients, posterior and predictions."""
    x, y = toy.blobs(3)
    y = toy.labels_for(y, 3, options)
    one, other = (toy.build(name, num_members=1, **options) for name in (method, MEMBER_OF[method]))

    def same_state() -> bool:
        a, b = one.state_dict(), other.state_dict()
        return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)

    assert same_state()
    assert toy.descend(one, x, y, 3) == toy.descend(other, x, y, 3)
    train, held_out = toy.loader(x, y), toy.loader(x + 0.1, y)
    assert hetsngp.fit_posterior(one, train, held_out) == hetsngp.fit_posterior(other, train, held_out)
    assert same_state()
    assert toy.same_bits(one.predict(x), other.predict(x))
    p, q = (model.predict(x, generator=torch.Generator().manual_seed(1)) for model in (one, other))
    assert toy.same_bits(p, q)
    assert (p.member_uncertainty == 0).all()
    with torch.no_grad():
        assert torch.equal(one.eval()(x), other.eval()(x))


@pytest.mark.parametrize("posterior", ["kronecker", "exact"])
@pytest.mark.parametrize("method", toy.MIXTURES)
def test_equal_members_are_one_of_them(method: str, posterior: str) -> None:
    """Three copies of a member have its probabilities, its Gaussian and no disagreement."""
    x, y = toy.blobs(3)
    one, several = (toy.build(name, posterior=posterior) for name in (MEMBER_OF[method], method))
    wide, copies = several.state_dict(), {}
    for name, value in one.state_dict().items():
        times = [b // a if a else 1 for a, b in zip(value.shape, wide[name].shape, strict=True)]
        copies[name] = value.repeat(times) if times else value
    copies["backbone.isometry"] = wide["backbone.isometry"]  # Qx for equal inputs, see widened_isometry
    several.load_state_dict(copies)
    for model in (one, several):
        hetsngp.fit_posterior(model, toy.loader(x, y))
        model.eval()
    p, q = one.predict(x), several.predict(x)
    torch.testing.assert_close(q.probs, p.probs, rtol=0, atol=0.01)  # different points
    torch.testing.assert_close(q.latent_variance, p.latent_variance, rtol=1e-4, atol=1e-6)
    assert q.member_uncertainty.max() < 1e-3
    u, v = one.utility(x), several.utility(x)
    torch.testing.assert_close(v.mean, u.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(v.covariance(), u.covariance(), rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(several(x), one(x), rtol=1e-4, atol=1e-4)
        # Losses and priors are sums over members.
        loss = toy.alike(several).loss(x, y)
        torch.testing.assert_close(loss, 3 * one.loss(x, y), rtol=1e-4, atol=1e-5)


def _dense_contraction(model: Any, train: Tensor, x: Tensor, posterior: str) -> Tensor:
    """Contraction at x (B, D) of the dense GP with unit noise, or, under Eq. (5), with the noise 1/(p(1 − p))
    of the class where it is largest; one where there is no posterior."""
    if posterior == "none":
        return torch.ones(len(x)).double()
    latent = model.head.latent
    phi, query = (latent.features(model.backbone(part)) for part in (train, x))
    p = torch.softmax(phi @ latent.beta, -1)
    noises = (1 / (p * (1 - p))).mT if posterior == "exact" else torch.ones(1, len(train)).double()
    each = [oracles.posterior_contraction(phi.numpy(), query.numpy(), noise.numpy()) for noise in noises]
    return torch.tensor(np.max(each, 0))


def _far(distance: float = 100.0, rows: int = 24) -> Tensor:
    angle = torch.arange(rows) * (2 * math.pi / rows)
    return distance * torch.stack([angle.cos(), angle.sin()], 1)


@pytest.mark.parametrize(
    ("method", "posterior"),
    [(method, kind) for method in toy.GP for kind in (KINDS if method not in toy.MIXTURES else KINDS[:2])],
)
def test_far_from_the_data_the_prior_returns(method: str, posterior: str) -> None:
    x, y = toy.blobs(3)
    # Many features: far features are random against those of the data, and overlap them by about rank/m.
    model = toy.trained(method, 3, posterior=posterior, random_features=512)
    near, far = model.predict(x), model.predict(_far())
    assert far.latent_variance.min() > near.latent_variance.max()
    assert far.model_uncertainty.min() > near.model_uncertainty.mean()
    # A kronecker posterior leaves the direction out that no softmax can see.
    prior = 10.0**2 * ((1 - 1 / 3) if posterior == "kronecker" else 1.0)
    torch.testing.assert_close(far.latent_variance, torch.full((24,), prior), rtol=0.05, atol=0)
    # Never above the prior, to rounding: data only take variance away.
    assert far.latent_variance.max() <= prior * (1 + 1e-4)
    # Logits of standard deviation 10 around means of a few: no class is favoured for long.
    assert (far.probs - 1 / 3).abs().mean() < 0.08
    assert (near.probs - 1 / 3).abs().mean() > 0.2
    assert (near.labels == y).float().mean() > 0.9


@pytest.mark.parametrize("method", [m for m in METHODS if m not in toy.GAUSSIAN])
def test_far_from_the_data_a_dirichlet_is_flat(method: str) -> None:
    """No evidence at all: every class as likely, E H(p) = ψ(K + 1) − ψ(2) = ½ + … + 1/K, logits of variance
    ψ′(1) = π²/6."""
    x, y = toy.blobs(3)
    model = toy.trained(method, 3)
    near, far = model.predict(x), model.predict(_far())
    torch.testing.assert_close(far.probs, torch.full((24, 3), 1 / 3))
    torch.testing.assert_close(far.data_uncertainty, torch.full((24,), 1 / 2 + 1 / 3))
    torch.testing.assert_close(far.model_uncertainty, torch.full((24,), math.log(3) - 1 / 2 - 1 / 3))
    torch.testing.assert_close(far.latent_variance, torch.full((24,), math.pi**2 / 6))
    assert far.ood_score.min() > near.ood_score.max()
    assert far.model_uncertainty.min() > 2 * near.model_uncertainty.mean()
    assert (near.labels == y).float().mean() > 0.9


@pytest.mark.parametrize("amplitude", [0.5, 3.0])
def test_the_prior_far_away_is_the_amplitude_squared(amplitude: float) -> None:
    model = toy.trained("sngp", 4, posterior="shared", random_features=512, amplitude=amplitude)
    torch.testing.assert_close(
        model.predict(_far()).latent_variance, torch.full((24,), amplitude**2), rtol=0.05, atol=0
    )


@pytest.mark.parametrize("posterior", KINDS)
def test_the_posterior_is_that_of_the_dense_precision(posterior: str) -> None:
    """(I + Hessian)⁻¹ of all K·m weights written out in float64, from several batches."""
    x, y = toy.blobs(3)
    model = toy.trained("sngp", 3, posterior=posterior)
    hetsngp.fit_posterior(model, toy.loader(x, y, 9))
    with torch.no_grad():
        phi = model.head.latent.features(model.backbone(x)).double()
        p = torch.softmax(phi @ model.head.latent.beta.double(), -1)
    m = phi.shape[1]
    gram = torch.zeros(m, m, dtype=torch.float64)
    for row in phi:
        gram += torch.outer(row, row)
    if posterior == "kronecker":
        output = torch.stack([torch.diag(q) - torch.outer(q, q) for q in p]).mean(0)
        blocks = torch.kron(output, gram)
        seen = torch.eye(3) - torch.ones(3, 3) / 3  # what a softmax can see
    elif posterior == "exact":
        blocks = torch.block_diag(*[(phi.mT * (p[:, c] * (1 - p[:, c]))) @ phi for c in range(3)])
        seen = torch.eye(3)
    else:
        blocks, seen = torch.kron(torch.eye(3).double(), gram), torch.eye(3)
    covariance = torch.linalg.inv(torch.eye(3 * m) + blocks)
    for row in (0, 7, 20):
        at = torch.kron(seen.double(), phi[row].unsqueeze(0))  # (K, K·m)
        expected = (at @ covariance @ at.mT).float()
        found = model.utility(x[row : row + 1]).covariance()[0]
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-4)


def test_more_data_leaves_less_variance() -> None:
    x, y = toy.blobs(3)
    model = toy.trained("sngp", 3)
    before = model.predict(x).latent_variance
    hetsngp.fit_posterior(model, toy.loader(x.repeat(8, 1), y.repeat(8)))
    assert (model.predict(x).latent_variance < before).all()
