"""Mixup: against plain loops in float64, the distribution of λ, training with it, and resumed runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.contract import toy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import hetsngp
from hetsngp.fitting.loop import train_folds
from hetsngp.fitting.mixup import beta_share, mixed_batch
from hetsngp.fitting.schedule import Schedule
from hetsngp.models.methods import METHODS

X, Y = toy.blobs(3, 8)


def seed(value: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(value)


def drawn(rows: int, alpha: float = 1.0) -> tuple[float, list[int]]:
    """λ and the partner of each example, read off mixed unit vectors."""
    x, _, _ = mixed_batch(
        toy.build("deterministic"), torch.eye(rows).double(), torch.zeros(rows).long(), None, alpha, seed()
    )
    assert torch.allclose(x.sum(1), torch.ones(rows).double())
    off = x - x.diagonal().diag()
    partner = [int(row.argmax()) if row.any() else i for i, row in enumerate(off)]
    moved = [i for i in range(rows) if partner[i] != i]
    assert len(moved) > rows // 2
    assert sorted(partner) == list(range(rows))
    shares = x.diagonal()[moved]
    assert torch.allclose(shares, shares[:1])
    return float(shares[0]), partner


# --- one batch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numbers", "soft", "multi-hot"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_mixed_batch_is_that_of_plain_loops(kind: str, weighted: bool) -> None:
    rows, classes = 9, 3
    share, partner = drawn(rows)
    assert 0.5 < share < 0.99
    x = torch.randn(rows, 2, generator=seed(1), dtype=torch.float64)
    y = torch.arange(rows) % classes
    full = F.one_hot(y, classes).double()
    if kind == "soft":
        full = torch.rand(rows, classes, generator=seed(2), dtype=torch.float64).softmax(1)
    if kind == "multi-hot":
        full = (torch.rand(rows, classes, generator=seed(2)) < 0.5).double()
    weight = None
    if weighted:
        weight = torch.rand(rows, generator=seed(3), dtype=torch.float64)
        weight[[0, partner[0]]] = 0.0  # a pair that does not count
    model = toy.build("deterministic", link="sigmoid" if kind == "multi-hot" else "softmax")
    given = y if kind == "numbers" else full
    got_x, got_y, got_weight = mixed_batch(model, x, given, weight, 1.0, seed())
    w = [1.0] * rows if weight is None else weight.tolist()
    for i, j in enumerate(partner):
        both = share * w[i] + (1 - share) * w[j]
        first, second = (share * w[i] / both, (1 - share) * w[j] / both) if both else (share, 1 - share)
        for d in range(2):
            assert float(got_x[i, d]) == pytest.approx(share * float(x[i, d]) + (1 - share) * float(x[j, d]))
        for k in range(classes):
            want = first * float(full[i, k]) + second * float(full[j, k])
            assert float(got_y[i, k]) == pytest.approx(want, abs=1e-6)
        if got_weight is not None:
            assert float(got_weight[i]) == pytest.approx(both)
    assert (got_weight is None) == (not weighted)


def test_the_loss_of_a_mixed_batch_is_the_mixture_of_both_losses() -> None:
    """λ·w_i·CE(y_i) + (1 − λ)·w_j·CE(y_j) at the mixed input."""
    rows = len(X)
    share, partner = drawn(rows)
    model = toy.build("deterministic").eval()
    weight = torch.rand(rows, generator=seed(4)) + 0.1
    x, y, w = mixed_batch(model, X, Y, weight, 1.0, seed())
    nll = -model(x).detach()
    want = share * weight * nll[torch.arange(rows), Y]
    want += (1 - share) * weight[partner] * nll[torch.arange(rows), Y[partner]]
    assert float(model.loss(x, y, weight=w).detach()) == pytest.approx(float(want.mean()), rel=1e-5)


@pytest.mark.parametrize("alpha", [0.05, 0.2, 1.0, 4.0])
def test_lambda_has_a_beta_distribution(alpha: float) -> None:
    """λ(1 − λ) is the same for λ and 1 − λ; its moments are quotients of Beta functions."""

    def log_beta(a: float) -> float:
        return 2 * math.lgamma(a) - math.lgamma(2 * a)

    first, second = (math.exp(log_beta(alpha + k) - log_beta(alpha)) for k in (1, 2))
    count, generator = 4000, seed()
    shares = torch.tensor([beta_share(alpha, generator) for _ in range(count)], dtype=torch.float64)
    assert float(shares.min()) >= 0.5
    error = math.sqrt((second - first**2) / count)
    assert float((shares * (1 - shares)).mean()) == pytest.approx(first, abs=4 * error)


def test_a_small_alpha_mixes_nothing() -> None:
    for alpha in (1e-6, 1e-300):
        assert all(beta_share(alpha, seed(value)) == 1.0 for value in range(50))
    x, y, _ = mixed_batch(toy.build("deterministic"), X, Y, None, 1e-6, seed())
    assert torch.equal(x, X)
    assert torch.equal(y, F.one_hot(Y, 3).float())


def test_a_batch_may_be_a_dict_or_a_tuple() -> None:
    model, y = toy.build("deterministic"), Y
    alone, _, _ = mixed_batch(model, X, y, None, 1.0, seed())
    both, _, _ = mixed_batch(model, {"a": X, "b": (X, 2 * X), "scale": 3}, y, None, 1.0, seed())
    assert torch.equal(both["a"], alone)
    assert torch.equal(both["b"][1], 2 * alone)
    assert both["scale"] == 3


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_whole_numbers_are_refused(dtype: torch.dtype) -> None:
    model = toy.build("deterministic")
    with pytest.raises(TypeError, match=r"mixup cannot mix x of torch\..*train with mixup=0"):
        mixed_batch(model, {"ids": torch.ones(24, 5, dtype=dtype)}, Y, None, 1.0, seed())


def test_without_a_generator_torchs_own_decides() -> None:
    model = toy.build("deterministic")
    torch.manual_seed(3)
    first = mixed_batch(model, X, Y, None, 1.0)[0]
    other = mixed_batch(model, X, Y, None, 1.0)[0]
    torch.manual_seed(3)
    assert torch.equal(mixed_batch(model, X, Y, None, 1.0)[0], first)
    assert not torch.equal(other, first)


# --- training -------------------------------------------------------------------------------------------


def trained(method: str = "deterministic", **options: Any) -> dict[str, Tensor]:
    model = toy.build(method)
    hetsngp.fitting.train(model, [(X, Y)] * 3, epochs=2, lr=0.01, generator=seed(), **options)
    return toy.weights(model)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_with_mixup(method: str) -> None:
    weights = trained(method, mixup=1.0)
    assert all(t.isfinite().all() for t in weights.values())
    assert not toy.same_weights(weights, trained(method))
    assert toy.same_weights(weights, trained(method, mixup=1.0))


def test_no_mixup_and_a_small_alpha_train_alike() -> None:
    plain = trained()
    assert toy.same_weights(plain, trained(mixup=0.0))
    small = trained(mixup=1e-9)  # one-hot targets, whose loss is rounded in another order
    assert all(torch.allclose(t, small[name], atol=1e-5) for name, t in plain.items())
    large = trained(mixup=1.0)
    assert any((t - large[name]).abs().max() > 1e-3 for name, t in plain.items())


def test_folds_take_mixup() -> None:
    def weights(mixup: float) -> dict[str, Tensor]:
        models = [toy.build("deterministic") for _ in range(2)]
        train_folds(
            models,
            [[(X[:12], Y[:12])], [(X[12:], Y[12:])]],
            [[(X[12:], Y[12:])], [(X[:12], Y[:12])]],
            Schedule(2, 0.01),
            generators=[seed(0), seed(1)],
            mixup=mixup,
        )
        return toy.weights(models[1])

    assert not toy.same_weights(weights(0.0), weights(1.0))


@pytest.mark.parametrize("mixup", [-0.1, math.nan, math.inf, "much"])
def test_a_wrong_alpha_is_refused(mixup: Any) -> None:
    with pytest.raises(ValueError, match="mixup must be at least 0 and finite"):
        trained(mixup=mixup)


# --- the engine -----------------------------------------------------------------------------------------


class Died(BaseException):
    pass


class DiesAt(DataLoader[Any]):
    """Whose batch ``left``, of all epochs, is never had."""

    left = -1

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            if self.left == 0:
                raise Died
            self.left -= 1
            yield batch


@pytest.mark.parametrize("method", ["deterministic", "hetsngp", "mimo"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(method: str, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from hetsngp.training import CheckpointConfig, Engine, Hardware, TrainConfig

    engine = Engine(Hardware(accelerator="cpu"))
    config = TrainConfig(Schedule(3, lr=0.05, optimizer="sgd", smooth=True), mixup=0.5)

    def run(name: str, at: int = -1, config: TrainConfig = config) -> Any:
        loader = DiesAt(TensorDataset(X, Y), 6, shuffle=True)
        loader.left = at
        checkpoints = CheckpointConfig(tmp_path / name, seconds=0, tensorboard=False)
        return engine.train(toy.build(method), loader, config, checkpoints=checkpoints, show=False)

    whole = toy.weights(run("whole").model)
    with pytest.raises(Died):
        run("parts", at=6)
    with pytest.raises(ValueError, match=r"mixup 0\.5, now None"):
        run("parts", config=TrainConfig(config.schedule))
    resumed = run("parts")
    assert resumed.resumed == 6
    toy.assert_same(toy.weights(resumed.model), whole)
    assert not toy.same_weights(whole, toy.weights(run("none", config=TrainConfig(config.schedule)).model))
