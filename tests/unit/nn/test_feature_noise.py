"""noise='feature', after HET-XL: noise on the features that the logits are read from."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.contract import toy
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hetsngp
from hetsngp.functional import link
from hetsngp.functional import noise as noise_functions
from hetsngp.functional.uncertainty import num_inner
from hetsngp.nn.backbones import ResidualMLP

AMPLITUDE, FEATURES, RANK = 10.0, 32, 2
METHODS = ("heteroscedastic", "hetsngp", "hetsngp_mimo")


def seed(value: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(value)


def build(method: str, classes: int = 3, *, wide: bool = True, **options: Any) -> hetsngp.Classifier:
    """Tiny, in float64, its running statistics moved by some batches; ``wide``: noise and logits of size."""
    model = toy.build(
        method, classes, noise="feature", num_members=2, random_features=FEATURES, rank=RANK, **options
    ).double()
    x = inputs(24)
    for _ in range(3):
        model.loss(2 * x + 1, torch.arange(24) % classes)
    if wide:
        g = seed(5)
        with torch.no_grad():
            for parameter in model.head.noise.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=g, dtype=torch.float64))
            model.head.latent.readout.mul_(4)
    return model.eval()


def inputs(rows: int, value: int = 3) -> Tensor:
    return torch.randn(rows, 2, generator=seed(value), dtype=torch.float64)


def members_of(model: Any) -> int:
    return int(model.head.num_members)


def noisy_features(model: Any, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The features (B, F) that the logits are read from, and each member's readout (F, K)."""
    with torch.no_grad():
        h = model.backbone(x)
        if model.config["method"] == "heteroscedastic":
            return h, [model.head.latent.linear.weight.mT]
        latent = model.head.latent
        return latent.features(h), list(latent.beta.chunk(members_of(model), 1))


def feature_covariance(model: Any, x: Tensor) -> Tensor:
    """Σ′(x) (B, F, F) = V′V′ᵀ + diag(d′²), in a loop over inputs and features."""
    noise = model.head.noise
    rms = noise.normalizer.mean_square.sqrt()
    unit = rms if model.config["method"] == "heteroscedastic" else AMPLITUDE / math.sqrt(FEATURES)
    out = []
    with torch.no_grad():
        for h in model.backbone(x):
            z = (h - noise.normalizer.mean) / (rms * math.sqrt(len(h)))
            if z.norm() > 2:
                z = 2 * z / z.norm()
            size = len(noise.diagonal.bias)
            factor, diagonal = torch.zeros(size, RANK).double(), torch.zeros(size).double()
            for i in range(size):
                raw = noise.diagonal.weight[i] @ z + noise.diagonal.bias[i]
                diagonal[i] = (unit * (math.log1p(math.exp(raw)) + 1e-3)) ** 2
                factor[i] = unit * (noise.row.weight[i] @ z + noise.row.bias[i]) * noise.basis[i]
            out.append(factor @ factor.mT + torch.diag(diagonal))
    return torch.stack(out)


# --- the law of the logits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3, 40])
@pytest.mark.parametrize("method", METHODS)
def test_the_covariance_of_the_logits_is_that_of_noisy_features_read_out(method: str, classes: int) -> None:
    model, x = build(method, classes), inputs(6, 4)
    x[-1] *= 50  # read at the edge of the data
    covariance = feature_covariance(model, x)
    phi, readouts = noisy_features(model, x)
    bias = model.head.latent.linear.bias if method == "heteroscedastic" else 0.0
    with torch.no_grad():
        u = model.head.utility(model.backbone(x), posterior=False)
    assert u.mean.shape == (6 * members_of(model), classes)
    found = u.covariance().unflatten(0, (6, -1))
    for m, readout in enumerate(readouts):
        expected = torch.stack([readout.mT @ sigma @ readout for sigma in covariance]).detach()
        torch.testing.assert_close(found[:, m], expected, rtol=1e-9, atol=1e-12)
        variance = u.marginal_variance().unflatten(0, (6, -1))[:, m]
        torch.testing.assert_close(variance, expected.diagonal(dim1=1, dim2=2), rtol=1e-9, atol=1e-12)
        # The noise has no mean.
        mean = u.mean.unflatten(0, (6, -1))[:, m]
        torch.testing.assert_close(mean, (phi @ readout + bias).detach(), rtol=1e-9, atol=1e-12)
        assert expected.diagonal(dim1=1, dim2=2).min() > 0.01
    assert (covariance[0] - covariance[1]).norm() > 0.1 * covariance[0].norm()  # it depends on the input
    if members_of(model) == 2:
        assert (found[:, 0] - found[:, 1]).norm() > 0.1 * found[:, 0].norm()  # and on the readout


@pytest.mark.parametrize("method", ["heteroscedastic", "hetsngp"])
def test_under_the_posterior_it_is_added_to_the_gp_s(method: str) -> None:
    model, x = build(method, 4, posterior="shared"), inputs(6, 4)
    if method == "hetsngp":
        y = torch.arange(24) % 4
        hetsngp.fit_posterior(model, toy.loader(inputs(24), y))
    h = model.backbone(x)
    (readout,) = noisy_features(model, x)[1]
    noise = torch.stack([readout.mT @ sigma @ readout for sigma in feature_covariance(model, x)]).detach()
    width = noise.diagonal(dim1=1, dim2=2).mean(-1).clamp_min(1)
    k = model.head.latent.posterior_contraction(h).detach()
    known = k / (k + (1 - k) * width)
    expected = known.view(-1, 1, 1) * noise + model.head.latent(h, posterior=True).covariance()
    torch.testing.assert_close(model.utility(x).covariance(), expected.detach(), rtol=1e-6, atol=1e-9)
    assert (known == 1).all() if method == "heteroscedastic" else (known < 0.999).any()


@pytest.mark.parametrize("method", METHODS)
def test_the_parameters_of_the_noise_do_not_depend_on_the_classes(method: str) -> None:
    def count(kind: str, classes: int) -> int:
        model = toy.build(method, classes, noise=kind, num_members=2, random_features=FEATURES, rank=RANK)
        return sum(p.numel() for p in model.head.noise.parameters())

    width = 16
    features = width if method == "heteroscedastic" else FEATURES
    expected = 2 * (width + 1) * features + features * RANK
    assert count("feature", 3) == count("feature", 1000) == expected
    for kind in ("low_rank", "parameter_efficient"):
        assert count(kind, 1000) > 100 * count(kind, 3)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("classes", [2, 3])
def test_the_gradient_reaches_every_parameter_of_the_noise(method: str, classes: int) -> None:
    model = build(method, classes, wide=False).train()
    model.loss(inputs(12, 6), torch.arange(12) % classes, generator=seed()).backward()
    for name, parameter in model.head.noise.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name
        assert (parameter.grad != 0).all(), name


# --- the loss -----------------------------------------------------------------------------------------------


def differentiable_covariance(model: Any, h: Tensor) -> Tensor:
    """As above, all at once and with gradients: the covariance of the logits of one member (B, K, K)."""
    noise = model.head.noise
    rms = noise.normalizer.mean_square.sqrt()
    z = (h - noise.normalizer.mean) / (rms * math.sqrt(h.shape[1]))
    z = z * (2 / z.norm(dim=1, keepdim=True)).clamp_max(1)
    unit = AMPLITUDE / math.sqrt(FEATURES)
    std = unit * (torch.log1p(torch.exp(noise.diagonal(z))) + 1e-3)
    factor = unit * noise.row(z).unsqueeze(-1) * noise.basis
    beta = model.head.latent.beta
    return beta.mT @ (factor @ factor.mT + torch.diag_embed(std**2)) @ beta


def test_two_classes_have_the_loss_and_the_gradient_of_a_quadrature() -> None:
    """−log E σ(±(u₁ − u₀)) by a fine trapezoid rule, differentiated by torch, in all that it depends on."""
    model, x, y = build("hetsngp", 2), inputs(8, 6), torch.arange(8) % 2
    nodes = torch.arange(-9, 9.001, 0.01, dtype=torch.float64)
    weights = torch.softmax(-0.5 * nodes**2, 0)
    wanted = [*model.head.noise.parameters(), model.head.latent.beta, *model.backbone.parameters()]

    def oracle() -> Tensor:
        h = model.backbone(x)
        u = model.head.latent.features(h) @ model.head.latent.beta
        cov = differentiable_covariance(model, h)
        mean = u[:, 1] - u[:, 0]
        std = (cov[:, 0, 0] + cov[:, 1, 1] - 2 * cov[:, 0, 1]).sqrt()
        sign = (2 * y - 1).unsqueeze(1)
        p = torch.sigmoid(sign * (mean.unsqueeze(1) + std.unsqueeze(1) * nodes)) @ weights
        prior = 0.5 * model.head.latent.beta.square().sum() / model.dataset_size
        return -p.log().mean() + prior

    loss, expected = model.loss(x, y), oracle()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for found, want in zip(
        torch.autograd.grad(loss, wanted), torch.autograd.grad(expected, wanted), strict=True
    ):
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("method", "classes"), [("heteroscedastic", 3), ("hetsngp", 3), ("hetsngp", 300)])
def test_the_loss_is_that_of_plain_draws_of_feature_noise(method: str, classes: int) -> None:
    """−log of the mean over ε ~ N(0, Σ′) of softmax(βᵀ(φ + ε))_y, within four standard errors of both."""
    points, draws = (1024 if classes > 100 else 4096), 8192
    model = build(method, classes, num_samples=points)
    x, y = inputs(4, 6), torch.arange(4) % classes
    phi, (readout,) = noisy_features(model, x)
    bias = model.head.latent.linear.bias.detach() if method == "heteroscedastic" else 0.0
    g, readout, variance, expected = seed(8), readout.detach(), 0.0, []
    for row, sigma in enumerate(feature_covariance(model, x)):
        eps = torch.randn(draws, len(sigma), generator=g, dtype=torch.float64)
        noisy = phi[row] + eps @ torch.linalg.cholesky(sigma).mT
        q = torch.softmax(noisy @ readout + bias, -1)[:, y[row]]
        expected.append(-q.mean().log())
        # A stratified net is never worse than n/(n − 1) times plain draws: the same variance on both sides.
        variance += float(q.var() / q.mean() ** 2) * (1 / draws + 1 / points) / len(x) ** 2
    penalty = model.head.prior_penalty()
    found = float(model.loss(x, y, generator=seed(9)).detach())
    found -= 0.0 if penalty is None else float(penalty.detach()) / model.dataset_size
    error = 4 * math.sqrt(variance)
    assert error < 0.2
    assert found == pytest.approx(float(torch.stack(expected).mean()), abs=error)
    # The noise matters: without it the examples' losses are others.
    clean = F.cross_entropy(phi @ readout + bias, y, reduction="none")
    assert (clean - torch.stack(expected)).abs().max() > error


@pytest.mark.parametrize(("method", "classes"), [("heteroscedastic", 3), ("hetsngp", 3), ("hetsngp", 40)])
def test_predictions_are_those_of_plain_draws_of_feature_noise(method: str, classes: int) -> None:
    """Within four standard errors of the draws and the target error of the points."""
    model, x, draws = build(method, classes, posterior="none"), inputs(4, 6), 20_000
    phi, (readout,) = noisy_features(model, x)
    bias = model.head.latent.linear.bias.detach() if method == "heteroscedastic" else 0.0
    p, g, moved = model.predict(x), seed(8), 0.0
    for row, sigma in enumerate(feature_covariance(model, x)):
        eps = torch.randn(draws, len(sigma), generator=g, dtype=torch.float64)
        noisy = phi[row] + eps @ torch.linalg.cholesky(sigma).mT
        q = torch.softmax(noisy @ readout.detach() + bias, -1)
        error = 4 * q.std(0) / math.sqrt(draws) + link.TARGET_ERROR
        assert ((p.probs[row] - q.mean(0)).abs() < error).all(), row
        clean = torch.softmax(phi[row] @ readout.detach() + bias, -1)
        torch.testing.assert_close(p.clean_probs[row], clean, rtol=0, atol=1e-6)
        moved = max(moved, float(((clean - q.mean(0)).abs() / error).max()))
    assert moved > 2  # the noise matters


def test_the_gradient_is_that_of_plain_draws_of_feature_noise() -> None:
    """In every parameter of the head: moved points and Price's theorem against the path of plain draws."""
    gradients = []
    for options in ({"num_samples": 2048}, {"num_samples": 2**15, "sampler": "mc"}):
        model = build("hetsngp", 5, wide=False, **options)
        model.loss(inputs(8, 6), torch.arange(8) % 5, generator=seed(9)).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.head.parameters()]))
    assert (gradients[0] - gradients[1]).norm() < 0.02 * gradients[1].norm()


# --- limits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("posterior", ["kronecker", "shared", "none"])
@pytest.mark.parametrize("classes", [2, 3])
def test_without_noise_it_is_sngp(classes: int, posterior: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_functions, "MIN_STD", 0.0)
    sngp = toy.trained("sngp", classes, posterior=posterior)
    het = toy.build("hetsngp", classes, posterior=posterior, noise="feature")
    missing, unexpected = het.load_state_dict(sngp.state_dict(), strict=False)
    assert not unexpected
    assert missing
    assert all(name.startswith("head.noise.") for name in missing)
    with torch.no_grad():
        for parameter in het.head.noise.parameters():
            parameter.zero_()
        het.head.noise.diagonal.bias.fill_(-200.0)  # softplus underflows to zero
    het.eval()
    x, y = toy.blobs(classes)
    a, b = sngp.utility(x), het.utility(x)
    assert torch.equal(a.mean, b.mean)
    torch.testing.assert_close(a.covariance(), b.covariance(), rtol=1e-6, atol=1e-7)
    # With more than two classes the noise, which is zero, makes one of them take points.
    error = 1e-5 if classes == 2 else link.TARGET_ERROR
    torch.testing.assert_close(het.predict(x).probs, sngp.predict(x).probs, rtol=0, atol=error)
    losses = [model.loss(x, y, generator=seed()).detach() for model in (sngp, het)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)


def test_it_learns_that_labels_are_noisy() -> None:
    """Half of the labels of one side are drawn at random: there data uncertainty is learned."""
    g = seed(1)
    x = torch.randn(300, 2, generator=g)
    x[:, 0] += torch.where(torch.rand(300, generator=g) < 0.5, -3.0, 3.0)
    y = (x[:, 1] > 0).long() + 2 * (x[:, 1].abs() > 1).long()
    noisy = (x[:, 0] > 0) & (torch.rand(300, generator=g) < 0.6)
    y = torch.where(noisy, torch.randint(4, y.shape, generator=g), y)
    model = toy.build("hetsngp", 4, noise="feature", dataset_size=300, posterior="shared")
    before = [p.detach().clone() for p in model.head.noise.parameters()]
    toy.descend(model.train(), x, y, steps=60)
    after = list(model.head.noise.parameters())
    assert all((a - b).norm() > 0.01 * b.norm() for a, b in zip(after, before, strict=True))
    with torch.no_grad():
        variance = model.eval().head.utility(model.backbone(x), posterior=False).marginal_variance().mean(-1)
    assert variance[x[:, 0] > 0].mean() > 1.5 * variance[x[:, 0] < 0].mean()


# --- very many classes --------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                held = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.elements = max(self.elements, held)
        return out


def many_classes(classes: int, features: int) -> hetsngp.Classifier:
    net = ResidualMLP(4, width=8, depth=1, generator=seed(1))
    return hetsngp.build(
        "hetsngp",
        net,
        classes,
        generator=seed(2),
        noise="feature",
        random_features=features,
        rank=2,
        posterior="shared",
        dataset_size=1000,
    )


def test_twenty_thousand_classes() -> None:
    """A step of training and a prediction."""
    classes, features, batch = 20_001, 64, 16
    model = many_classes(classes, features)
    assert sum(p.numel() for p in model.head.noise.parameters()) == 2 * 9 * features + 2 * features
    x, y = torch.randn(batch, 4), torch.randint(classes, (batch,))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    before = copy.deepcopy(model.head.noise.state_dict())
    loss = model.loss(x, y, generator=seed(3))
    loss.backward()
    # Logits of a half and noise of a tenth: near log K.
    start = float((loss - model.head.prior_penalty() / 1000).detach())
    assert abs(start - math.log(classes)) < 2
    optimizer.step()
    for name, parameter in model.head.noise.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    hetsngp.fit_posterior(model, [(x, y)])
    p = model.predict(x[:4], num_samples=64)
    assert p.probs.shape == (4, classes)
    torch.testing.assert_close(p.probs.sum(-1), torch.ones(4), rtol=0, atol=1e-4)
    assert all(torch.isfinite(getattr(p, name).double()).all() for name in toy.FIELDS)


def test_training_with_very_many_classes_writes_nothing_of_b_k_m_out() -> None:
    classes, features, batch = 20_001, 64, 16
    assert batch * classes * features > link.DENSE_LIMIT
    model = many_classes(classes, features)
    x, y = torch.randn(batch, 4), torch.randint(classes, (batch,))
    with Largest() as training:
        model.loss(x, y, generator=seed(3)).backward()
    assert training.elements < batch * classes * features / 3


def test_predictions_with_very_many_classes_take_bounded_memory() -> None:
    """No tensor larger than the points of the noise of one example."""
    classes, features = 5_001, 64
    model = many_classes(classes, features)
    x, y = torch.randn(16, 4), torch.randint(classes, (16,))
    hetsngp.fit_posterior(model, [(x, y)])
    with Largest() as predicting:
        model.predict(x[:4])
    assert predicting.elements < 1.01 * num_inner(classes, wide=True) * (classes + features)


def test_the_default_posterior_of_many_classes_needs_no_matrix_of_classes() -> None:
    classes = 2_000
    net = nn.Sequential(nn.Linear(4, 8))
    net.num_features = 8
    model = hetsngp.build("hetsngp", net, classes, noise="feature", random_features=16, dataset_size=8)
    with Largest() as fitting:
        hetsngp.fit_posterior(model, [(torch.randn(8, 4), torch.arange(8))])
    assert fitting.elements < classes**2 / 4
