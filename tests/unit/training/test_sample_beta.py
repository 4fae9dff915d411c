"""Training under the posterior: the loss is that of an independent oracle, and nothing else is touched."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from tests.contract import toy
from tests.unit.training.test_resumed_runs import Died, DiesAt, checkpoints_in
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import hetsngp
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.device_loader import Augmentation, DeviceLoader
from hetsngp.training import Engine, Hardware, Schedule, TrainConfig
from hetsngp.training.run import PosteriorRefit

pytest.importorskip("lightning")

STILL = TrainConfig(Schedule(2, lr=1e-30))
"""So slow that no weight moves: whatever differs between the epochs is the posterior."""
MOVING = TrainConfig(Schedule(4, lr=0.05, optimizer="sgd", smooth=True))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(Hardware(devices=1, accelerator="cpu"))


def built(method: str = "hetsngp", classes: int = 2, **options: Any) -> hetsngp.Classifier:
    """In float64, with a β far from zero, so that Eq. (5) has unequal weights."""
    model = toy.build(method, classes, **{"sample_beta": True, "amplitude": 2.0, **options}).double()
    with torch.no_grad():
        model.head.latent.beta.mul_(8)
    return model


def data(classes: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    x, y = toy.blobs(classes, 10, flip=0.3, seed=seed)
    return x.double(), y


# --- the loss -------------------------------------------------------------------------------------------


def phi_and_probs(model: hetsngp.Classifier, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    phi = model.head.latent.features(model.backbone(x)).detach().numpy()
    u = phi @ model.head.latent.beta.detach().numpy() / float(model.temperature)
    odds = np.exp(u - u.max(1, keepdims=True))
    return phi, odds / odds.sum(1, keepdims=True)


def latent_covariances(model: hetsngp.Classifier, clean: Tensor, x: Tensor, posterior: str) -> np.ndarray:
    """(B, K, K) of f at x, from the whole precision of vec β in float64: (K·m, K·m), inverted."""
    phi, probs = phi_and_probs(model, clean)
    m, k, scale = phi.shape[1], probs.shape[1], float(model.temperature) ** -2
    hessians = [np.diag(p) - np.outer(p, p) for p in probs]
    if posterior == "exact":  # class by class, Eq. (5)
        hessians = [np.diag(np.diag(h)) for h in hessians]
        curvature = sum(np.kron(h, np.outer(f, f)) for h, f in zip(hessians, phi, strict=True))
    else:
        curvature = np.kron(np.mean(hessians, 0), phi.T @ phi)
    covariance = np.linalg.inv(np.eye(k * m) + scale * curvature)
    return np.stack(
        [np.kron(np.eye(k), f) @ covariance @ np.kron(np.eye(k), f).T for f in phi_and_probs(model, x)[0]]
    )


def penalty_of(model: hetsngp.Classifier) -> float:
    """½‖β‖²/N."""
    return float(model.head.latent.beta.detach().square().sum()) / 2 / float(model.dataset_size or 0)


def minus_log_mean_sigmoid(mean: float, variance: float) -> float:
    """−log E σ(d), d ~ N(mean, variance), by adaptive quadrature."""

    def integrand(z: float) -> float:
        return float(np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi) / (1 + np.exp(-mean - z * variance**0.5)))

    return -float(np.log(quad(integrand, -12, 12, epsabs=1e-13, epsrel=1e-12, limit=200)[0]))


@pytest.mark.parametrize("posterior", ["exact", "kronecker"])
@pytest.mark.parametrize("method", ["sngp", "hetsngp"])
def test_the_second_epoch_is_trained_under_the_posterior_of_the_clean_data(
    method: str, posterior: str, engine: Engine
) -> None:
    (x, y), clean = data(), (data(seed=3)[0] + 0.5, data(seed=3)[1])
    model = built(method, posterior=posterior, temperature=0.7)
    rows = engine.train(model, [(x, y)], STILL, clean=[clean]).rows
    with torch.no_grad():
        at_the_mode = model.head.utility(model.backbone(x), posterior=False)
        noise, mean = at_the_mode.covariance().numpy(), at_the_mode.mean.numpy()
    penalty = penalty_of(model)
    f = latent_covariances(model, clean[0], x, posterior)
    assert f.max() > 0.3  # far from negligible
    for row, covariance in zip(rows, (noise, noise + f), strict=True):
        losses = []
        for i, label in enumerate(y.tolist()):
            sign = np.eye(2)[label] - np.eye(2)[1 - label]
            spread = sign @ covariance[i] @ sign / 0.7**2
            losses.append(minus_log_mean_sigmoid(sign @ mean[i] / 0.7, spread))
        assert row["loss"] == pytest.approx(np.mean(losses) + penalty, rel=1e-6)
    assert abs(rows[1]["loss"] - rows[0]["loss"]) > 1e-3


def test_with_more_classes_it_is_the_mean_of_draws(engine: Engine) -> None:
    (x, y), classes = data(3), 3
    model = built("hetsngp", classes, posterior="exact", num_samples=4096)
    (_, row) = engine.train(model, [(x, y)], STILL, clean=[(x, y)]).rows
    f = latent_covariances(model, x, x, "exact")
    with torch.no_grad():
        at_the_mode = model.head.utility(model.backbone(x), posterior=False)
    covariance = at_the_mode.covariance().numpy() + f
    random, losses, variances = np.random.default_rng(0), [], []
    for i, label in enumerate(y.tolist()):
        u = random.multivariate_normal(at_the_mode.mean[i].numpy(), covariance[i], 20_000)
        p = np.exp(u[:, label] - np.logaddexp.reduce(u, 1))
        losses.append(-np.log(p.mean()))
        variances.append(p.var() / p.mean() ** 2 / len(p))
    # Of the draws; training's points are as many that fill the space more evenly.
    error = 4 * np.sqrt(np.sum(variances)) / len(y)
    expected = np.mean(losses) + penalty_of(model)
    assert row["loss"] == pytest.approx(expected, abs=error)
    assert abs(expected - mode_loss(model, x, y)) > 3 * error


def mode_loss(model: hetsngp.Classifier, x: Tensor, y: Tensor) -> float:
    """What the second epoch would have without the posterior."""
    plain = copy.deepcopy(model).train()
    return float(plain.loss(x, y, generator=torch.Generator().manual_seed(0)).detach())


@pytest.mark.parametrize("posterior", ["exact", "kronecker"])
def test_the_gradient_goes_through_mean_and_variance(posterior: str) -> None:
    x, y = data()
    model = built("sngp", posterior=posterior)
    hetsngp.fit_posterior(model, [(x, y)])
    h = model.backbone(x).detach().requires_grad_()
    model.train()
    model.head.latent.normalizer.eval()  # its statistics count as constants
    assert torch.autograd.gradcheck(lambda h: model.head.nll(h, y), h)
    full = torch.autograd.grad(model.head.nll(h, y).sum(), h)[0]
    model.head.sample_beta = False
    assert (full - torch.autograd.grad(model.head.nll(h, y).sum(), h)[0]).abs().max() > 0.01


# --- when, on what --------------------------------------------------------------------------------------


class Watching(list[Any]):
    """Batches that remember β each time they are gone through."""

    def __init__(self, batches: list[Any], model: hetsngp.Classifier) -> None:
        super().__init__(batches)
        self.model, self.seen = model, []

    def __iter__(self) -> Iterator[Any]:
        self.seen.append(self.model.head.latent.beta.detach().clone())
        return super().__iter__()


@pytest.mark.parametrize("stop_after", [None, 1])
def test_it_is_fitted_once_between_two_epochs(stop_after: int | None, engine: Engine) -> None:
    x, y = data()
    model = built("sngp")
    clean = Watching([(x, y)], model)
    trained = engine.train(
        model, [(x, y)], TrainConfig(Schedule(4, lr=0.05, stop_after=stop_after)), clean=clean
    )
    epochs = 4 if stop_after is None else stop_after
    assert len(trained.history) == epochs
    assert len(clean.seen) == epochs - 1
    for one, other in zip(clean.seen, clean.seen[1:], strict=False):
        assert not torch.equal(one, other)


@pytest.mark.parametrize("options", [{"sample_beta": False}, {"posterior": "none"}])
def test_otherwise_the_clean_data_are_left_alone(options: dict[str, Any], engine: Engine) -> None:
    """And nothing changes, to the bit."""
    x, y = data()
    states = []
    for given in (True, False):
        model = built("hetsngp", **options)
        clean = Watching([(x, y)], model)
        more = {"clean": clean} if given else {}
        engine.train(model, [(x[:10], y[:10]), (x[10:], y[10:])], MOVING, held_out=[data(seed=1)], **more)
        assert clean.seen == []
        states.append(toy.weights(model))
    toy.assert_same(*states)


def test_images_are_taken_as_they_are(engine: Engine) -> None:
    """Without ``clean``, as with that of the loader; with other images it is another training."""
    g = torch.Generator().manual_seed(0)
    images = ImageArrays(
        torch.randint(256, (30, 1, 6, 6), generator=g).byte(), torch.arange(30) % 3, (*"abc",)
    )
    loader = DeviceLoader(images, 10, shuffle=True, augment=Augmentation(2))
    states = []
    for clean in (None, loader.clean(), DeviceLoader(images, 30, mean=[0.3], std=[0.1])):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            flat = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 8))
            flat.num_features = 8  # type: ignore[assignment]
            model = hetsngp.build("sngp", flat, 3, random_features=32, sample_beta=True)
        engine.train(model, loader, MOVING, clean=clean)
        states.append(toy.weights(model))
    toy.assert_same(states[0], states[1])
    assert not toy.same_weights(states[0], states[2])


# --- what it leaves alone -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["hetsngp", "hetsngp_mimo"])
def test_a_fit_between_epochs_touches_the_posterior_alone(method: str, engine: Engine) -> None:
    x, y = data(3)
    model = toy.build(method, sample_beta=True).double().train()
    model.loss(x, y, generator=torch.Generator().manual_seed(0))  # statistics have begun to move
    model.head.temperature.fill_(0.4)  # as an earlier calibration left it
    model.calibration = {"temperature": 0.4}
    model.backbone.eval()  # frozen by its owner
    before, modes = toy.weights(model), [module.training for module in model.modules()]
    refit = PosteriorRefit(model, lambda: engine.fit_posterior(model, [(x, y)]))
    refit()
    after = toy.weights(model)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        f"head.latent.posterior.{name}" for name in ("fitted", "vectors", "values", "basis", "gamma")
    }
    assert model.calibration == {"temperature": 0.4}
    assert [module.training for module in model.modules()] == modes
    # Of the temperature of training, not of the one that was calibrated.
    fresh = copy.deepcopy(model)
    fresh.head.reset_calibration()
    hetsngp.fit_posterior(fresh, [(x, y)])
    torch.testing.assert_close(model.head.latent.posterior.gamma, fresh.head.latent.posterior.gamma)
    refit.reset()
    toy.assert_same(toy.weights(model), before)
    assert not model.head.posterior.is_filled


def test_statistics_go_on_moving(engine: Engine) -> None:
    x, y = data()
    model = built("sngp")
    batches = [(x[:10], y[:10]), (x[10:], y[10:])]
    engine.train(model, batches, MOVING)
    assert int(model.head.latent.normalizer.steps) == 8


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("average", [None, 0.9])
@pytest.mark.parametrize("watched", [False, True])
def test_the_model_ends_without_a_posterior(average: float | None, watched: bool, engine: Engine) -> None:
    """An average of eigenvectors is none; and no one is told of a posterior that is out of date."""
    x, y = data()
    model = built("hetsngp")
    config = TrainConfig(MOVING.schedule, ema_decay=average, bound_every=2)
    engine.train(model, [(x, y)], config, held_out=[data(seed=1)] if watched else None)
    assert not model.head.posterior.is_filled
    with pytest.raises(hetsngp.PosteriorNotFittedError):
        model.predict(x)
    engine.fit_posterior(model, [(x, y)])
    assert torch.isfinite(model.predict(x).probs).all()


def test_a_refused_run_leaves_the_posterior(engine: Engine, tmp_path: Path) -> None:
    x, y = data()
    model = built("sngp")
    hetsngp.fit_posterior(model, [(x, y)])
    before = toy.weights(model)
    with pytest.raises(TypeError, match="used up"):
        engine.train(model, iter([(x, y)]), MOVING)
    toy.assert_same(toy.weights(model), before)


def test_fsdp_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "hardware", Hardware(strategy="fsdp"))
    with pytest.raises(ValueError, match=r"sample_beta .* under fsdp: Hardware\(strategy='ddp'\)"):
        engine.train(built(), [data()], MOVING)


# --- going on -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("at", [2, 5, 8, 10, 15])
def test_a_killed_run_ends_as_if_it_had_not_been(at: int, engine: Engine, tmp_path: Path) -> None:
    """Four batches an epoch: killed in the first one, within later ones, and between two."""
    x, y = toy.blobs(3, 8)
    config = TrainConfig(MOVING.schedule, ema_decay=0.9, seed=2)

    def model() -> hetsngp.Classifier:
        return toy.build("hetsngp", sample_beta=True)

    clean = DataLoader(TensorDataset(x, y), 7, shuffle=True)  # another order each time, drawn as crops are
    every: dict[str, Any] = {"held_out": [toy.blobs(3, 5, seed=1)], "clean": clean}
    whole = model()
    expected = engine.train(whole, DataLoader(TensorDataset(x, y), 6, shuffle=True), config, **every)
    dying = DiesAt(at, TensorDataset(x, y), 6, shuffle=True)
    with pytest.raises(Died):
        engine.train(model(), dying, config, **every, checkpoints=checkpoints_in(tmp_path))
    resumed = model()
    loader = DataLoader(TensorDataset(x, y), 6, shuffle=True)
    found = engine.train(resumed, loader, config, **every, checkpoints=checkpoints_in(tmp_path))
    assert found.resumed == at
    assert found.history == expected.history
    toy.assert_same(toy.weights(resumed), toy.weights(whole))
    again = model()
    engine.train(
        again, loader, config, **every, checkpoints=checkpoints_in(tmp_path)
    )  # it had come to its end
    toy.assert_same(toy.weights(again), toy.weights(whole))
