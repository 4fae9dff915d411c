"""fit_map: a GP on features that do not change ends at the MAP estimate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from tests.contract import toy
from tests.contract.toy import frozen
from torch import Tensor

import hetsngp
from hetsngp import fit_head
from hetsngp.fitting import lbfgs, mean_loss
from hetsngp.fitting.loop import EpochResult, mean_nll, train
from hetsngp.fitting.table_trainer import can_precompute

X, Y = toy.blobs(3, 60, flip=0.2)
X2, Y2 = toy.blobs(3, 40, flip=0.2, seed=1)
ONES = torch.ones(len(Y), dtype=torch.float64)


def gp(method: str = "sngp", **options: Any) -> hetsngp.Classifier:
    return toy.inducing(X, method, random_features=64, **options)


def rows(weight: Tensor = ONES, size: int = 1000) -> list[tuple[Tensor, ...]]:
    return list(zip(*(t.split(size) for t in (X.double(), Y, weight)), strict=True))


def beta_of(model: hetsngp.Classifier) -> Tensor:
    return model.head.latent.beta.detach()  # type: ignore[union-attr, return-value]


def map_by_scipy(model: hetsngp.Classifier, weight: Tensor = ONES) -> Tensor:
    """The minimum of Σ w·CE + ½‖β‖², from zero, by another program."""
    phi = model.head.latent.features(X.double()).detach()  # type: ignore[union-attr, operator]

    def objective(flat: Any) -> tuple[float, Any]:
        beta = torch.tensor(flat).reshape(phi.shape[1], 3).requires_grad_()
        each = F.cross_entropy(phi @ beta, Y, reduction="none")
        loss = (weight * each).sum() + 0.5 * beta.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        assert beta.grad is not None
        return float(loss.detach()), beta.grad.numpy().ravel()

    start = np.zeros(phi.shape[1] * 3)
    found = minimize(objective, start, jac=True, method="BFGS", options={"gtol": 1e-6, "maxiter": 5000})
    return torch.tensor(found.x).reshape(-1, 3)


@pytest.mark.parametrize("weighted", [False, True])
def test_it_ends_at_the_map_estimate(weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lbfgs, "MIN_GAIN", 1e-12)
    weight = 0.2 + torch.rand(len(Y), generator=torch.Generator().manual_seed(5)).double()
    weight = weight / weight.mean() if weighted else ONES
    model = gp()
    lbfgs.fit_map([model], [rows(weight)])
    torch.testing.assert_close(beta_of(model), map_by_scipy(model, weight), rtol=0, atol=1e-4)
    assert not model.training
    assert model.head.latent.beta.grad is None  # type: ignore[union-attr]


@pytest.mark.parametrize("soft", [False, True])
def test_rounds_of_the_largest_features_first_end_at_the_same_estimate(
    soft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lbfgs, "MIN_GAIN", 1e-12)
    monkeypatch.setattr(mean_loss, "COARSE_WEIGHTS", 0)
    batches = rows()
    if soft:
        batches = [(x, F.one_hot(y, 3).double(), weight) for x, y, weight in batches]
    model = gp().double()
    model.dataset_size = float(len(Y))
    lbfgs.fit_map([model], [batches])
    assert torch.allclose(beta_of(model), map_by_scipy(model), atol=1e-3)


def test_a_few_looks_come_as_near_as_the_tolerance_says() -> None:
    """Without a unit of steps of its own for each component it takes twice as many."""
    model = gp(amplitude=10.0)
    history = lbfgs.fit_map([model], [rows()])
    value = float(model.train().loss(X.double(), Y).detach())
    best = gp(amplitude=10.0)
    best.head.latent.beta.data.copy_(map_by_scipy(best))  # type: ignore[union-attr]
    lowest = float(best.train().loss(X.double(), Y).detach())
    assert lowest <= value < lowest + 1e-4
    assert len(history) <= 10
    assert history[-1].loss == pytest.approx(value)
    assert [r.epoch for r in history] == list(range(1, len(history) + 1))


def test_batches_are_one_sum() -> None:
    whole, parts = gp(), gp()
    lbfgs.fit_map([whole], [rows()])
    lbfgs.fit_map([parts], [rows(size=50)])  # the last has fewer rows, and counts for less
    torch.testing.assert_close(beta_of(parts), beta_of(whole), rtol=0, atol=0.02)
    assert mean_nll(parts, rows()) == pytest.approx(mean_nll(whole, rows()), abs=1e-4)


def test_the_noise_is_learned_too_and_lower_than_by_adam() -> None:
    model, other = gp("hetsngp"), gp("hetsngp")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    history = lbfgs.fit_map([model], [rows()], weight_decay=0.0)
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    train(other, rows(), epochs=60, lr=1e-2, weight_decay=0.0, generator=torch.Generator().manual_seed(0))
    points = torch.Generator().manual_seed(0)
    assert history[-1].loss < float(other.train().loss(X.double(), Y, generator=points).detach())


def test_weight_decay_is_a_prior_on_what_has_none() -> None:
    free, held = gp("hetsngp"), gp("hetsngp")
    lbfgs.fit_map([free], [rows()], weight_decay=0.0)
    lbfgs.fit_map([held], [rows()], weight_decay=1.0)

    def size(model: hetsngp.Classifier) -> float:
        return sum(float(p.detach().square().sum()) for n, p in model.named_parameters() if "noise" in n)

    assert size(held) < 0.1 * size(free)
    assert float(beta_of(held).norm()) > 0.5 * float(beta_of(free).norm())


def test_the_same_seed_gives_the_same_bits() -> None:
    one, two, other = gp("hetsngp"), gp("hetsngp"), gp("hetsngp")
    for model, seed in ((one, 3), (two, 3), (other, 4)):
        lbfgs.fit_map([model], [rows()], seed=seed)
    assert torch.equal(beta_of(one), beta_of(two))
    assert not torch.equal(beta_of(one), beta_of(other))  # other points of the integral


def test_models_go_side_by_side_and_one_that_is_there_waits() -> None:
    one, two = gp(amplitude=0.1), gp(amplitude=10.0)
    alone = gp(amplitude=10.0)
    seen: list[EpochResult] = []
    held_out = [(X2[:40].double(), Y2[:40]), (X2[40:].double(), Y2[40:])]
    watched = [held_out[:1], held_out[1:]]
    history = lbfgs.fit_map([one, two], [rows(), rows()], validation=watched, on_epoch=seen.append)
    lengths = [len(lbfgs.fit_map([gp(amplitude=a)], [rows()])) for a in (0.1, 10.0)]
    assert lengths[0] < lengths[1] == len(history)
    assert history == seen
    lbfgs.fit_map([alone], [rows()])
    assert torch.equal(beta_of(two), beta_of(alone))
    sums = [mean_nll(m, w) * len(w[0][1]) for m, w in zip((one, two), watched, strict=True)]
    assert history[-1].held_out == pytest.approx(sum(sums) / len(Y2))
    losses = [float(m.train().loss(X.double(), Y).detach()) for m in (one, two)]
    assert history[-1].loss == pytest.approx(sum(losses) / 2)


def test_a_nan_is_an_error_that_names_a_way_out() -> None:
    model = gp()
    model.head.latent.beta.data[0, 0] = float("nan")  # type: ignore[union-attr, index]
    with pytest.raises(FloatingPointError, match="the loss is nan: lower the amplitude"):
        lbfgs.fit_map([model], [rows()])


def test_what_is_left_is_little_in_all_and_not_only_of_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million examples (of weight one row here) may still have far to go when one of them gains nothing."""
    total = 1e6
    losses = []
    for enough in (lbfgs.MIN_GAIN, 1e-13):
        monkeypatch.setattr(lbfgs, "MIN_GAIN", enough)
        monkeypatch.setattr(lbfgs, "MAX_ROUNDS", 200)
        model = gp(amplitude=1.0)
        model.dataset_size = total
        losses.append(lbfgs.fit_map([model], [rows()])[-1].loss)
    assert total * (losses[0] - losses[1]) < 2.0


def test_more_examples_than_fit_in_memory_are_not_for_this() -> None:
    assert can_precompute(gp(), 2**22)
    assert not can_precompute(gp(), 2**22 + 1)  # of 64 features each
    assert can_precompute(gp(features="random"), 10)
    assert not can_precompute(gp("deterministic"), 10)


# --- fit_head ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calibration", [None, [(X2, Y2)], 0.1])
def test_fit_head_brings_a_gp_to_the_map_estimate(calibration: Any) -> None:
    """With a held-out part, in folds, and without either."""
    model = frozen()
    report = fit_head(model, [(X, Y)], calibration)
    assert report.held_out == {None: 0, 0.1: 180}.get(calibration if calibration != [(X2, Y2)] else "", 120)
    h = hetsngp.extract_features(model, [(X, Y)]).h
    view = model.on_features()
    beta: Any = model.head.latent.beta  # type: ignore[union-attr]
    view.train().zero_grad()
    view.loss(h, Y).backward()  # type: ignore[no-untyped-call]
    settled = float(beta.grad.norm())
    fit_head(model, [(X, Y)], calibration, epochs=50)
    model.on_features().train().loss(h, Y).backward()  # type: ignore[no-untyped-call]
    stopped = float(model.head.latent.beta.grad.norm())  # type: ignore[union-attr]
    assert settled < 0.1 * stopped


@pytest.mark.parametrize("calibration", [None, [(X2, Y2)], 0.1])
def test_too_many_examples_for_memory_are_trained_by_steps_all_the_same(
    calibration: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernel features of each batch are computed anew, in place of once."""
    models = [frozen(), frozen()]
    one = fit_head(models[0], [(X, Y)], calibration, epochs=3)
    monkeypatch.setattr("hetsngp.fitting.table_trainer.MAX_PRECOMPUTED", 1)
    monkeypatch.setattr("hetsngp.fitting.table_trainer.precomputed", pytest.fail)
    other = fit_head(models[1], [(X, Y)], calibration, epochs=3)
    assert other.scale == one.scale
    probs = [model.predict(X2).probs for model in models]
    assert torch.allclose(*probs, atol=1e-4)


@pytest.mark.parametrize("given", [{"epochs": 3}, {"lr": 1e-3}, {"batch_size": 64}])
def test_what_is_said_of_adam_means_adam(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetsngp.fitting.table_trainer.fit_map", pytest.fail)
    fit_head(frozen(), [(X, Y)], [(X2, Y2)], **given)


def test_what_is_no_gp_is_trained_by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetsngp.fitting.table_trainer.fit_map", pytest.fail)
    monkeypatch.setattr("hetsngp.frozen.head.MIN_STEPS", 1)
    fit_head(frozen(), [(X, Y)], [(X2, Y2)], method="deterministic")


def test_random_features_are_computed_once_and_training_may_go_on() -> None:
    """The gradient vanishes at the MAP estimate under the statistics of all examples; one more batch hardly
    moves them.
    """
    model = frozen()
    fit_head(model, [(X, Y)], [(X2, Y2)], method="sngp", features="random", random_features=128)
    h = hetsngp.extract_features(model, [(X, Y)]).h
    latent: Any = model.head.latent
    assert latent.inducing is None
    torch.testing.assert_close(latent.normalizer.mean, h.mean(0), rtol=0, atol=1e-5)
    with torch.no_grad():
        phi = latent.features(h)
        gradient = phi.mT @ (torch.softmax(phi @ latent.beta, 1) - F.one_hot(Y, 3)) + latent.beta
    assert float(gradient.square().sum()) / (2 * len(Y)) < 1e-3  # nats above the minimum, at most
    before = latent.normalizer.mean.clone()
    latent.train()(10 + h[:50], posterior=False)
    moved = (latent.normalizer.mean - before) / (10 + h[:50].mean(0) - before)
    torch.testing.assert_close(moved, torch.full_like(moved, 0.01), rtol=1e-3, atol=1e-5)


def test_progress_of_a_descent(capsys: pytest.CaptureFixture[str]) -> None:
    report = fit_head(frozen(), [(X, Y)], 0.1, progress=True)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("5 folds  epoch 1/40  loss") for line in lines)
    assert any(line.startswith("all examples  epoch 1/40  loss") for line in lines)
    assert lines[-1] == str(report)
