"""Posterior Network: densities that integrate to one, evidence, and its uncertainty."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from tests.contract import toy
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hetsngp
from hetsngp.fitting import loop
from hetsngp.nn.backbones import ResidualMLP
from hetsngp.nn.dirichlet import LOG_UNIT

COUNTS = [40.0, 25.0, 10.0]


def seed(value: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(value)


def build(classes: int = 3, **options: Any) -> hetsngp.Classifier:
    """A fresh small model; the same call gives the same weights."""
    net = ResidualMLP(2, width=16, depth=2, generator=seed(1))
    return hetsngp.build("posterior_network", net, classes, generator=seed(2), **options)


@functools.cache
def _trained(steps: int) -> hetsngp.Classifier:
    """Three separate blobs of 40, 25 and 10 examples in a latent of two dimensions."""
    model = build(latent_dim=2, class_counts=COUNTS)
    x, y = data()
    toy.descend(model.train(), x, y, steps=steps, lr=0.02)
    return model.eval()


def trained(steps: int = 150) -> hetsngp.Classifier:
    return copy.deepcopy(_trained(steps))


def data() -> tuple[Tensor, Tensor]:
    x, y = toy.blobs(3, 40)
    keep = torch.cat([(y == c).nonzero().squeeze(1)[: int(n)] for c, n in enumerate(COUNTS)])
    return x[keep], y[keep]


def concentration(model: hetsngp.Classifier, h: Tensor) -> Tensor:
    with torch.no_grad():
        return model.head.concentration(model.head.log_evidence(h), model.temperature)


def features_at(model: hetsngp.Classifier, z: Tensor) -> Tensor:
    """h (B, D) whose latent code is z (B, L): projection and BatchNorm are affine in eval mode."""
    head = model.head
    scale = head.norm.weight / (head.norm.running_var + head.norm.eps).sqrt()
    weight = scale.unsqueeze(1) * head.projection.weight
    bias = scale * (head.projection.bias - head.norm.running_mean) + head.norm.bias
    return ((z - bias) @ torch.linalg.pinv(weight).mT).detach()


# --- evidence is a density times a count --------------------------------------------------------------------


def mass(model: hetsngp.Classifier, half: float, step: float) -> Tensor:
    """∫ q(z | c) dz by four grids that interleave, (4, K): q = (evidence of c)/N_c, through the whole head.

    ``half`` and ``step`` are in standard deviations of the latent, z in units of e^LOG_UNIT of them.
    """
    axis = torch.arange(-half, half, step, dtype=torch.float64)
    grid, masses = torch.cartesian_prod(axis, axis), []
    for shift in ((0.25, 0.25), (0.25, 0.75), (0.75, 0.25), (0.75, 0.75)):
        total = torch.zeros(model.num_classes, dtype=torch.float64)
        for z in (grid + step * torch.tensor(shift)).split(2**15):
            with torch.no_grad():
                total += model.head.log_evidence(features_at(model, z)).exp().sum(0)
        masses.append(total * (step / math.exp(LOG_UNIT)) ** 2 / model.class_counts.double())
    return torch.stack(masses)


@pytest.mark.parametrize("steps", [0, 100])
def test_the_evidence_of_a_class_integrates_to_its_count(steps: int) -> None:
    """A softmax, or any function that is no density, has no such integral. The flows have kinks at their
    centres, which a grid may hit or miss: what four grids disagree by bounds the error of their mean."""
    model = trained(steps).double()
    z = torch.randn(5, 2, dtype=torch.float64)
    with torch.no_grad():
        found = model.head.norm(model.head.projection(features_at(model, z)))
    torch.testing.assert_close(found, z, rtol=0, atol=1e-9)
    masses = mass(model, 10.0, 0.06)
    mean = masses.mean(0)
    error = (masses - mean).abs().amax(0)
    assert ((mean - 1).abs() < error + 1e-4).all(), masses
    assert (error < 0.1).all(), masses
    if steps:  # it is no longer the normal that it started from
        z = torch.randn(50, 2).double()
        normal = -math.log(2 * math.pi) - 0.5 * z.square().sum(-1, keepdim=True)
        assert (model.head.flows(z).detach() - normal).abs().mean() > 0.5


def test_evidence_grows_in_proportion_to_the_count_of_its_class() -> None:
    model = trained().double()
    h = model.backbone(torch.cat([data()[0], 3 * torch.randn(20, 2)]).double()).detach()
    before = concentration(model, h)
    for c in range(3):
        counts = torch.tensor(COUNTS)
        counts[c] *= 2
        model.class_counts = counts
        after = concentration(model, h)
        others = [j for j in range(3) if j != c]
        torch.testing.assert_close(after[:, c] - 1, 2 * (before[:, c] - 1), rtol=1e-12, atol=1e-12)
        assert torch.equal(after[:, others], before[:, others])
        # And with it the probability: the odds against another class, from the prediction alone.
        expected = (after / after.sum(-1, keepdim=True)).float()
        torch.testing.assert_close(model.head.probs(h).float(), expected)
        model.class_counts = COUNTS


def test_a_class_without_examples_has_no_evidence() -> None:
    model = build(class_counts=[30, 0, 30])
    x, y = torch.randn(12, 2), torch.arange(12) % 3
    loss = model.loss(x, y)  # a label of that class too: finite, and nothing for its flow to learn
    assert torch.isfinite(loss)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name
    model.eval()
    alpha = concentration(model, model.backbone(x))
    assert (alpha[:, 1] == 1).all()
    assert (alpha[:, [0, 2]] > 1).all()
    p = model.predict(x)
    assert all(torch.isfinite(getattr(p, name).double()).all() for name in toy.FIELDS)


def test_where_there_is_no_density_nothing_is_known() -> None:
    """α → 1: uniform probabilities, H(p) = log K, of which E H = H_K − 1 is the data's and the rest the
    model's, H_K the harmonic number."""
    model = trained()
    direction = torch.linspace(0, 2 * math.pi, 17)[:-1]
    z = 60 * torch.stack([direction.cos(), direction.sin()], 1)
    h = features_at(model, z)
    alpha = concentration(model, h)
    torch.testing.assert_close(alpha, torch.ones(16, 3).double(), rtol=0, atol=1e-12)
    p = model.head.predict(h)
    torch.testing.assert_close(p.probs, torch.full((16, 3), 1 / 3), rtol=0, atol=1e-6)
    harmonic = 1 + 1 / 2 + 1 / 3
    expected = torch.full((16,), math.log(3) - (harmonic - 1))
    torch.testing.assert_close(p.model_uncertainty, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(p.total_uncertainty, torch.full((16,), math.log(3)), rtol=1e-6, atol=1e-6)
    # Far inputs come there, but for directions the projection does not see.
    far = model.predict(300 * torch.randn(200, 2))
    assert far.model_uncertainty.median() == pytest.approx(expected[0].item(), rel=1e-4)


def test_on_the_data_there_is_evidence_and_far_away_there_is_none() -> None:
    model = trained()
    x, y = data()
    near, far = model.predict(x), model.predict(20 * torch.randn(200, 2))
    alpha = concentration(model, model.backbone(x))
    assert (near.labels == y).float().mean() > 0.95
    assert alpha.sum(-1).median() > 10
    assert near.model_uncertainty.mean() < 0.05
    assert far.model_uncertainty.mean() > 0.1
    # The rank of a random far input among random near ones: an AUROC.
    wins = (far.ood_score.unsqueeze(1) > near.ood_score).float().mean()
    assert wins > 0.85
    # The score goes on where the evidence is gone: −log of all of it.
    expected = -torch.logsumexp(model.head.log_evidence(model.backbone(x)), -1).detach()
    torch.testing.assert_close(near.ood_score, expected)


# --- the loss -----------------------------------------------------------------------------------------------


def textbook(alpha: np.ndarray, y: np.ndarray, entropy_weight: float) -> float:
    """mean of ψ(α₀) − ψ(α_y) − λ·H(Dir(α)), by scipy."""
    uce = scipy.special.psi(alpha.sum(-1)) - scipy.special.psi(alpha[np.arange(len(y)), y])
    entropy = np.array([scipy.stats.dirichlet(row).entropy() for row in alpha])
    return float((uce - entropy_weight * entropy).mean())


@pytest.mark.parametrize("entropy_weight", [0.0, 1e-5, 0.3])
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_the_loss_is_the_expected_cross_entropy_less_the_entropy(classes: int, entropy_weight: float) -> None:
    counts = torch.arange(classes) * 50.0 + 20
    model = build(classes, latent_dim=2, class_counts=counts, entropy_weight=entropy_weight).double().eval()
    with torch.no_grad():
        model.head.flows.raw_betas.add_(torch.randn(8, classes))  # densities that differ
    x, y = torch.randn(20, 2, dtype=torch.float64), torch.arange(20) % classes
    alpha = concentration(model, model.backbone(x)).numpy()
    assert alpha.std(-1).max() > 1
    weighted = torch.rand(20).double()
    each = [textbook(alpha[i : i + 1], y.numpy()[i : i + 1], entropy_weight) for i in range(20)]
    assert model.loss(x, y).item() == pytest.approx(np.mean(each), rel=1e-10)
    expected = float((weighted.numpy() * np.array(each)).mean())
    assert model.loss(x, y, weight=weighted).item() == pytest.approx(expected, rel=1e-10)


def test_the_entropy_is_rewarded() -> None:
    """λ's own share of the gradient makes the Dirichlet flatter: less evidence."""
    model = build(latent_dim=2, class_counts=[1000] * 3).eval()
    h, y = model.backbone(torch.randn(20, 2)).detach(), torch.arange(20) % 3
    gradients = []
    for weight in (0.0, 1.0):
        model.head.entropy_weight = weight
        log_evidence = model.head.log_evidence(h).detach().requires_grad_()
        model.head.log_evidence = lambda _, value=log_evidence: value
        model.head.nll(h, y).sum().backward()
        del model.head.log_evidence
        gradients.append(log_evidence.grad)
    assert ((gradients[1] - gradients[0]) > 0).all()  # descent lowers every class's evidence
    own = gradients[0].gather(1, y.unsqueeze(1))
    assert (own < 0).all()  # without it the label's evidence rises, the others' falls
    assert (gradients[0].sum(1, keepdim=True) - own > 0).all()


def test_forward_is_the_log_of_the_mean_and_trains_too() -> None:
    model = trained()
    x, y = data()
    alpha = concentration(model, model.backbone(x))
    expected = (alpha / alpha.sum(-1, keepdim=True)).log().float()
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
    model = build(latent_dim=2, class_counts=COUNTS)
    torch.nn.functional.cross_entropy(model(x), y).backward()
    assert all((p.grad != 0).any() for p in model.parameters())


# --- the prediction -----------------------------------------------------------------------------------------


def test_the_split_of_uncertainty_is_the_dirichlet_s() -> None:
    """Against scipy's digamma, and against draws p ~ Dir(α) within four standard errors."""
    model, draws = trained(), 20_000
    x = torch.cat([data()[0][::6], 2 * torch.randn(12, 2), 20 * torch.randn(4, 2)])
    alpha = concentration(model, model.backbone(x)).numpy()
    p = model.predict(x)
    a0 = alpha.sum(-1)
    mean = alpha / a0[:, None]
    data_uncertainty = scipy.special.psi(a0 + 1) - (mean * scipy.special.psi(alpha + 1)).sum(-1)
    total = scipy.stats.entropy(mean, axis=-1)
    for field, expected in (
        ("probs", mean),
        ("clean_probs", mean),
        ("data_uncertainty", data_uncertainty),
        ("total_uncertainty", total),
        ("model_uncertainty", total - data_uncertainty),
        ("latent_variance", scipy.special.polygamma(1, alpha).mean(-1)),
    ):
        np.testing.assert_allclose(getattr(p, field).numpy(), expected, rtol=2e-5, atol=2e-6, err_msg=field)
    assert torch.equal(p.data_uncertainty + p.model_uncertainty, p.total_uncertainty)
    assert (p.member_uncertainty == 0).all()
    rng = np.random.default_rng(0)
    for row in range(0, len(x), 5):
        entropy = scipy.stats.entropy(rng.dirichlet(alpha[row], draws), axis=-1)
        error = 4 * entropy.std() / math.sqrt(draws)
        assert abs(p.data_uncertainty[row].item() - entropy.mean()) < error + 2e-6


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_temperature_tempers_the_evidence(temperature: float) -> None:
    """(N_c·q)^(1/τ): α − 1 to that power; the evidence of a class never becomes another's."""
    model = trained().double()
    x = torch.cat([data()[0], 3 * torch.randn(20, 2)]).double()
    h = model.backbone(x).detach()
    before = concentration(model, h) - 1
    model.temperature = temperature
    after = concentration(model, h) - 1
    torch.testing.assert_close(after, before ** (1 / temperature), rtol=1e-9, atol=1e-13)
    expected = (1 + after) / (1 + after).sum(-1, keepdim=True)
    torch.testing.assert_close(model.predict(x).probs, expected)
    torch.testing.assert_close(model.predict_probs(x), expected)
    torch.testing.assert_close(model(x).exp(), expected)


def test_calibration_finds_the_temperature_of_the_lowest_held_out_nll() -> None:
    """With the prior of log τ, of standard deviation a half, against which 90 examples stand: to 0.01."""
    model = trained()
    x, y = toy.blobs(3, 30, flip=0.3, seed=4)
    report = hetsngp.fit_posterior(model, toy.loader(*data()), toy.loader(x, y))
    assert report.posterior == "none"
    other = trained()

    def nll(temperature: float) -> float:
        other.temperature = temperature
        return -other.predict_probs(x).gather(1, y.unsqueeze(1)).log().mean().item()

    grid = np.linspace(-1.5, 2.2, 741)
    values = [nll(math.exp(t)) + 0.5 * (t / 0.5) ** 2 / len(y) for t in grid]
    assert math.log(report.temperature) == pytest.approx(grid[np.argmin(values)], abs=0.015)
    assert report.nll == pytest.approx(nll(report.temperature), rel=1e-4)
    assert report.nll < nll(1.0)


# --- training -----------------------------------------------------------------------------------------------


def test_a_batch_of_one_trains_by_the_running_statistics() -> None:
    model = build(latent_dim=2, class_counts=COUNTS)
    x, y = data()
    model.loss(x, y)
    norm = model.head.norm
    mean, var = norm.running_mean.clone(), norm.running_var.clone()
    loss = model.loss(x[:1], y[:1])
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    assert torch.equal(norm.running_mean, mean)
    assert torch.equal(norm.running_var, var)
    torch.testing.assert_close(loss, model.eval().loss(x[:1], y[:1]))
    assert torch.isfinite(model.predict(x[:1]).probs).all()


def blobs_in_16_dimensions(classes: int, per_class: int, draw: int) -> tuple[Tensor, Tensor]:
    centres = torch.randn(classes, 16, generator=seed(99))
    y = torch.arange(classes).repeat(per_class)
    return centres[y] + 0.15 * torch.randn(len(y), 16, generator=seed(draw)), y


@pytest.mark.slow
def test_a_hundred_classes_train_with_the_default_latent_and_flows() -> None:
    """300 steps of AdamW at 0.02; at 0.001, the loop's default, it takes some 3,000. At 0.1 classes are lost:
    their density leaves their examples, and where there is no evidence there is no gradient."""
    net = ResidualMLP(16, width=64, depth=2, generator=seed(1))
    model = hetsngp.build("posterior_network", net, 100, generator=seed(2))
    assert model.head.flows.centres.shape == (8, 100, 6)
    x, y = blobs_in_16_dimensions(100, 10, 0)
    batches = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True, generator=seed(3))
    history = loop.train(model, batches, epochs=15, lr=0.02, generator=seed(4))
    losses = [result.loss for result in history]
    assert losses[0] > 4  # at first no better than chance
    assert losses[-1] < 0.5
    x, y = blobs_in_16_dimensions(100, 4, 5)
    p = model.predict(x)
    assert (p.labels == y).float().mean() > 0.9
    assert p.confidence.mean() > 0.7
    right = torch.stack([(p.labels == y)[y == c].float().mean() for c in range(100)])
    assert (right > 0).float().mean() > 0.97  # no class is lost
    far = model.predict(3 * torch.randn(400, 16))
    assert (far.ood_score.unsqueeze(1) > p.ood_score).float().mean() > 0.9


# --- counts -------------------------------------------------------------------------------------------------


def warned(model: hetsngp.Classifier, times: int = 1) -> list[str]:
    x, y = data()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            model.loss(x, y)
    return [str(w.message) for w in caught]


def test_missing_counts_are_said_once() -> None:
    model = build()
    assert model.wants_class_counts
    assert model.class_counts is None
    (message,) = warned(model, times=3)
    assert "class_counts is not set" in message
    assert "build(..., class_counts=" in message
    assert torch.equal(model.head.counts, torch.ones(3))


def test_given_counts_or_a_size_there_is_nothing_to_say() -> None:
    counted = build(class_counts=np.array([4, 5, 6]))
    assert warned(counted) == []
    assert not counted.wants_class_counts
    assert torch.equal(counted.class_counts, torch.tensor([4.0, 5.0, 6.0]))
    sized = build(dataset_size=75)
    assert warned(sized) == []
    assert torch.equal(sized.head.counts, torch.full((3,), 25.0))
    assert sized.wants_class_counts  # spread evenly until they are known
    later = build()
    later.class_counts = torch.tensor([1, 2, 3])
    assert warned(later) == []
    both = build(class_counts=[1, 2, 3], dataset_size=75)
    assert torch.equal(both.class_counts, torch.tensor([1.0, 2.0, 3.0]))


def test_a_size_that_is_set_later_is_a_size_too() -> None:
    model = build()
    model.dataset_size = 75
    assert warned(model) or torch.equal(model.head.counts, torch.full((3,), 25.0))


@pytest.mark.parametrize(
    ("counts", "says"),
    [([1, 2], "shape"), ([1, 2, -1], "not negative"), ([0, 0, 0], "all zero"), ([1, 2, math.nan], "finite")],
)
def test_counts_that_cannot_be_are_refused(counts: list[float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build(class_counts=counts)
    model = build(class_counts=[4, 5, 6])
    with pytest.raises(ValueError, match=says):
        model.class_counts = counts
    assert torch.equal(model.class_counts, torch.tensor([4.0, 5.0, 6.0]))


def test_the_loop_counts_the_labels_itself() -> None:
    x, y = data()
    for loader in (toy.loader(x, y), [(x[:30], y[:30]), (x[30:], y[30:])]):
        for model in (build(), build(dataset_size=7)):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                loop.train(model, loader, epochs=1)
            assert not model.wants_class_counts
            assert torch.equal(model.class_counts, torch.tensor(COUNTS))
    told = build(class_counts=[4, 5, 6])
    loop.train(told, toy.loader(x, y), epochs=1)
    assert torch.equal(told.class_counts, torch.tensor([4.0, 5.0, 6.0]))  # what was said stays
    weighted = build()
    weight = torch.where(y == 0, 2.0, 0.5)
    loop.train(weighted, [(x, y, weight)], epochs=1)
    assert torch.equal(weighted.class_counts, torch.tensor([80.0, 12.5, 5.0]))


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield from zip(*data(), strict=True)


def test_a_stream_cannot_be_counted_and_the_loss_says_so() -> None:
    model = build()
    with pytest.warns(UserWarning, match="class_counts is not set"):
        loop.train(model, DataLoader(Stream(), batch_size=25), epochs=1)
    assert model.wants_class_counts


def test_only_a_softmax_has_a_dirichlet() -> None:
    with pytest.raises(ValueError, match="link='softmax'"):
        build(link="sigmoid")
    with pytest.raises(TypeError, match=r"no Gaussian over logits.*predict"):
        build(class_counts=COUNTS).utility(torch.zeros(1, 2))
