"""Inducing features: the exact GP where every training point is one, the prior where there are no data."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetsngp
from hetsngp.functional import features as functional_features
from hetsngp.functional.features import kernel_components, rbf_kernel, signed_root
from hetsngp.nn import latent as latent_module
from hetsngp.nn.heads import GaussianHead, Link
from hetsngp.nn.latent import LENGTH_RATIO, FeatureNormalizer, InducingFeatures, Kernel, RandomFeatureGP
from hetsngp.nn.noise import LowRankNoise

A = 3.0


def adapted(h: Tensor, m: int = 64, posterior: str = "shared", **kernel: Any) -> RandomFeatureGP:
    kind = Kernel(m, A, normalization="rms", features="inducing", **kernel)
    gp = RandomFeatureGP(h.shape[1], 3, kind, posterior=posterior).double()
    gp.adapt(h, generator=torch.Generator().manual_seed(0))
    return gp.eval()


def exact(gp: RandomFeatureGP, x: Tensor, y: Tensor) -> Tensor:
    """The kernel itself, between the normalised features."""
    z = [gp.normalizer.normalized(h) for h in (x, y)]
    rbf = rbf_kernel(*z, A, float(gp.length_scale))
    share = gp.kernel.linear_share
    return (1 - share) * rbf + share * A**2 * z[0] @ z[1].mT / x.shape[1]


with_linear = pytest.mark.parametrize("linear", [0.0, 0.3])


@pytest.fixture
def h() -> Tensor:
    return torch.randn(40, 5, dtype=torch.float64)


@with_linear
def test_their_products_are_the_kernel_wherever_one_of_two_points_is_a_training_point(
    h: Tensor, linear: float
) -> None:
    gp, x = adapted(h, linear_share=linear), torch.randn(7, 5).double()
    assert torch.allclose(gp.features(x) @ gp.features(h).mT, exact(gp, x, h), atol=1e-6)
    assert torch.allclose(gp.features(h) @ gp.features(h).mT, exact(gp, h, h), atol=1e-6)


@with_linear
def test_the_posterior_is_that_of_the_exact_gp(h: Tensor, linear: float) -> None:
    """Textbook: k(x, x) − k(x, X)(K + I)⁻¹k(X, x); precision I + ΣφφT is noise of variance one."""
    gp = adapted(h, linear_share=linear)
    x = torch.cat([h[:3], h[:4] + 0.3, torch.randn(6, 5).double(), 50 + torch.randn(2, 5).double()])
    phi = gp.features(h)
    gp.posterior.fit(
        gp.posterior.statistics(phi, torch.full((40, 3), 1 / 3).double(), torch.ones(()).double())
    )
    var = gp(x, posterior=True).var[:, 0]
    cross = exact(gp, x, h)
    gram = exact(gp, h, h) + torch.eye(40).double()
    prior = exact(gp, x, x).diagonal()
    expected = prior - (cross * torch.linalg.solve(gram, cross.mT).mT).sum(1)
    assert torch.allclose(var, expected, atol=1e-5)
    if linear:  # a linear function is known less and less, however far the data reach
        assert bool((var[-2:] > A**2).all())
        return
    assert torch.allclose(var[-2:], torch.full((2,), A**2).double(), atol=1e-6)  # far: the prior
    assert float(gp.posterior_contraction(x)[-1]) < 1e-6 < 0.5 < float(gp.posterior_contraction(h).min())


@pytest.mark.parametrize("posterior", ["kronecker", "exact", "shared"])
def test_few_components_leave_the_rest_of_the_prior(h: Tensor, posterior: str) -> None:
    gp = adapted(h, m=8, posterior=posterior)
    phi = gp.features(h)
    assert phi.shape == (40, 8)
    assert not phi[:, -1].any()
    assert float(phi.square().sum(1).max()) < A**2
    whole = gp.with_prior_variance(phi)
    assert torch.equal(whole[:, :-1], phi[:, :-1])
    assert torch.allclose(whole.square().sum(1), torch.full((40,), A**2).double())
    probs = torch.softmax(torch.randn(40, 3).double(), 1)
    gp.posterior.fit(gp.posterior.statistics(phi, probs, torch.ones(()).double()))
    near, far = gp(h, posterior=True).var, gp(h + 100, posterior=True).var
    rest = A**2 - phi.square().sum(1)
    share = 1 - 1 / 3 if posterior == "kronecker" else 1.0  # the direction that no softmax sees is left out
    assert bool((near.mean(1) >= share * rest - 1e-8).all())
    assert bool((far.mean(1) > near.mean(1)).all())


def test_components_are_the_best_of_their_number(h: Tensor) -> None:
    """Eckart and Young: no other 8 features come nearer to the kernel matrix."""
    gram = rbf_kernel(h, h)
    phi = gram @ kernel_components(gram, 8)
    values, vectors = torch.linalg.eigh(gram)
    best = (vectors[:, -8:] * values[-8:]) @ vectors[:, -8:].mT
    assert torch.allclose(phi @ phi.mT, best, atol=1e-10)
    doubled = rbf_kernel(torch.cat([h, h]), torch.cat([h, h]))  # of rank 40
    components = kernel_components(doubled, 100)
    assert components.shape == (80, 100)
    assert torch.isfinite(components).all()
    assert torch.allclose(doubled @ components @ (doubled @ components).mT, doubled, atol=1e-7)


@pytest.mark.parametrize("rank", [None, 5])
def test_components_of_a_large_matrix_are_nearly_the_best(
    rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their projection of the kernel leaves hardly more than that on the eigenvectors, and never adds."""
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x = x if rank is None else x[:rank].repeat(12, 1)
    gram = rbf_kernel(x, x, length_scale=2.0)
    monkeypatch.setattr(functional_features, "ITERATED_ROWS", 50)
    components = kernel_components(gram, 30, 1e-9)
    phi = gram @ components
    products = components.mT @ gram @ components
    kept = components.square().sum(0) > 0
    eye = torch.diag(kept.double())
    assert torch.allclose(products, eye, atol=1e-6)
    assert float(torch.linalg.eigvalsh(gram - phi @ phi.mT).min()) > -1e-9
    best = float(torch.linalg.eigvalsh(gram)[:-30].clamp_min(0).sum())
    left = float((gram - phi @ phi.mT).trace())
    assert best - 1e-9 <= left < 1.2 * best + 1e-6
    assert int(kept.sum()) == (30 if rank is None else rank)


def test_the_length_scale_is_a_share_of_the_median_distance_or_given(h: Tensor) -> None:
    gp = adapted(h)
    z = gp.normalizer.normalized(h)
    assert float(gp.length_scale) == pytest.approx(LENGTH_RATIO * float(torch.pdist(z).median()), rel=1e-6)
    assert float(adapted(h, length_scale=2.5).length_scale) == 2.5


def test_at_most_so_many_points_are_kept(h: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_module, "MOST_POINTS", 10)
    gp = adapted(h)
    assert gp.inducing is not None
    assert gp.inducing.points.shape == (10, 5)
    z = gp.normalizer.normalized(h)
    distance = torch.cdist(gp.inducing.points, z).amin(1)
    assert float(distance.max()) < 1e-6  # points of the data
    assert float(torch.cdist(gp.inducing.points, z[:10]).amin(1).max()) > 0.1  # not the first ten


def test_statistics_are_those_of_all_rows_and_stand_still(h: Tensor) -> None:
    gp = adapted(5 + 2 * h).train()
    assert torch.allclose(gp.normalizer.mean, (5 + 2 * h).mean(0))
    gp.features(torch.randn(9, 5).double())
    assert torch.allclose(gp.normalizer.mean, (5 + 2 * h).mean(0))


def test_without_data_the_error_says_where_they_come_from() -> None:
    with pytest.raises(RuntimeError, match=r"hetsngp.fit_head\(model, loader\)"):
        InducingFeatures(3, 8)(torch.zeros(2, 3))


def test_power_is_the_direction_of_signed_roots() -> None:
    h = torch.randn(30, 4).double()
    assert torch.allclose(signed_root(h) * signed_root(h).abs(), h)
    normalizer = FeatureNormalizer(4, "power").double()
    normalizer.set_statistics(h)
    centred = signed_root(h) - signed_root(h).mean(0)
    expected = 2 * centred / centred.norm(dim=1, keepdim=True)
    assert torch.allclose(normalizer.eval()(h), expected)


# --- features computed once -----------------------------------------------------------------------------


def head_on(h: Tensor, noise: str | None = "low_rank") -> GaussianHead:
    """A head with inducing features from h (n, 5), and with a posterior fitted on it."""
    gp = adapted(h)
    label_noise = None if noise is None else LowRankNoise(5, gp.beta.shape[1], 2)
    head = GaussianHead(gp, label_noise, Link(), num_classes=gp.beta.shape[1]).double().eval()
    gp.posterior.fit(head.statistics(h))
    return head


@pytest.mark.parametrize("noise", ["low_rank", None])
@torch.no_grad()
def test_a_view_on_precomputed_features_gives_the_same(h: Tensor, noise: str | None) -> None:
    head = head_on(h, noise)
    more = torch.randn(12, 5).double()
    view, x = head.on_precomputed(), head.latent.with_features(more)  # type: ignore[operator]
    assert x.shape == (12, 5 + head.latent.beta.shape[0])  # type: ignore[union-attr, index]
    assert torch.equal(x[:, :5], more)
    for posterior in (False, True):
        one, other = head.utility(more, posterior=posterior), view.utility(x, posterior=posterior)
        assert torch.equal(one.mean, other.mean)
        assert torch.equal(one.marginal_variance(), other.marginal_variance())
    assert torch.equal(head.predict(more).model_uncertainty, view.predict(x).model_uncertainty)


def test_the_view_shares_parameters_and_posterior_and_computes_no_kernel(
    h: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = head_on(h)
    view, x = head.on_precomputed(), head.latent.with_features(h)  # type: ignore[operator]
    assert [id(p) for p in view.parameters()] == [id(p) for p in head.parameters()]
    assert [id(b) for b in view.buffers()] == [id(b) for b in head.buffers()]
    monkeypatch.setattr(InducingFeatures, "forward", lambda *_: pytest.fail("the kernel was computed"))
    before = view.predict(x).latent_variance
    with torch.no_grad():
        head.latent.posterior.scale.fill_(0.5)  # type: ignore[union-attr, operator]
    assert torch.allclose(view.predict(x).latent_variance, 0.5 * before)
    view.double().temperature.fill_(2.0)
    assert float(head.temperature) == 2.0


# --- in a model -----------------------------------------------------------------------------------------


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))


@pytest.mark.slow
def test_fit_head_makes_them_and_a_saved_model_has_them(tmp_path: Path) -> None:
    x = torch.randn(200, 2)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = hetsngp.convert(network(), example_input=x[:2], freeze=True)
    hetsngp.fit_head(model, [(x, y)], epochs=40)
    assert model.config["options"]["features"] == "inducing"
    hetsngp.save(model, tmp_path)
    loaded = hetsngp.load(tmp_path, backbone=network())
    assert torch.equal(loaded.predict(x).probs, model.predict(x).probs)
    assert torch.equal(copy.deepcopy(model).predict(x).probs, model.predict(x).probs)
    hetsngp.fit_head(model, [(x, y)], epochs=5, features="random")
    assert model.head.latent.inducing is None  # type: ignore[union-attr]


def test_options_that_were_chosen_stay(tmp_path: Path) -> None:
    x = torch.randn(60, 2)
    data = [(x, (x[:, 0] > 0).long())]
    options = {"random_features": 32, "amplitude": 2.0, "normalization": "direction"}
    model = hetsngp.convert(network(), "sngp", x[:2], freeze=True, **options)
    hetsngp.fit_head(model, data, None, epochs=2)
    found = model.config["options"]
    assert {name: found[name] for name in options} == options
    assert found["features"] == "inducing"


def test_a_row_is_predicted_alike_in_any_batch() -> None:
    """Two dimensions: the kernel's eigenvalues fall fast, and 1/√λ would multiply rounding errors."""
    x = torch.randn(600, 2)
    model = hetsngp.convert(network(), "sngp", x[:2], freeze=True)
    hetsngp.fit_head(model, [(x, (x[:, 0] * x[:, 1] > 0).long())], None, epochs=20)
    together = model.predict(x[:64]).probs
    alone = torch.cat([model.predict(row[None]).probs for row in x[:64]])
    assert torch.allclose(alone, together, atol=1e-3)
    phi = model.head.latent.features(model.backbone(x))  # type: ignore[union-attr]
    assert float(phi.square().sum(1).max()) < 100 * (1 + 1e-4)


def test_a_larger_data_set_gets_more_components_unless_their_number_was_given() -> None:
    x = torch.randn(200, 2)
    y = (x[:, 0] > 0).long()
    model = hetsngp.convert(network(), "sngp", x[:2], freeze=True)
    for rows in (30, 200):
        hetsngp.fit_head(model, [(x[:rows], y[:rows])], None, epochs=1)
        assert model.config["options"]["random_features"] == rows + 2
    hetsngp.fit_head(model, [(x, y)], None, epochs=1, features="random", random_features=1024)
    hetsngp.fit_head(model, [(x, y)], None, epochs=1, amplitude=3.0)
    found = model.config["options"]
    assert (found["features"], found["random_features"]) == ("random", 1024)


def test_a_backbone_that_may_train_gets_random_features(tmp_path: Path) -> None:
    x = torch.randn(60, 2)
    model = hetsngp.convert(network(), "sngp", x[:2])
    hetsngp.fit_head(model, [(x, (x[:, 0] > 0).long())], None, epochs=1)
    assert model.config["options"]["features"] == "random"
    hetsngp.save(model, tmp_path)
    assert hetsngp.load(tmp_path, backbone=network()).config == model.config
