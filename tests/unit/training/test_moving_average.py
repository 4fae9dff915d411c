"""The moving average against a loop in float64, and in a run against a plain loop that makes it by hand."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.contract import toy
from tests.contract.toy import same_weights, weights
from torch import Tensor, nn

from hetsngp.models.methods import METHODS
from hetsngp.nn.spectral import BoundedLinear
from hetsngp.training import Engine, Hardware, Schedule, TrainConfig
from hetsngp.training.moving_average import MovingAverage

DIRECTIONS = ("spectral_v", "spectral_direction")


def decay_of(step: int, decay: float) -> float:
    """λ of the step after ``step`` others."""
    return min(decay, (1 + step) / (10 + step)) if step else 0.0


def by_hand(states: list[dict[str, Tensor]], decay: float) -> dict[str, Tensor]:
    """The average of all states, number by number in float64."""
    average: dict[str, Tensor] = {}
    for step, state in enumerate(states):
        keep = decay_of(step, decay)
        for name, value in state.items():
            old = average.get(name)
            whole = not value.is_floating_point() or name.rpartition(".")[2] in DIRECTIONS
            if old is None or whole or old.shape != value.shape:
                average[name] = value.clone() if whole else value.double()
            else:
                average[name] = keep * old + (1 - keep) * value.double()
    return average


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in got.items():
        if value.is_floating_point():
            torch.testing.assert_close(
                value.double(), want[name].double(), rtol=1e-5, atol=1e-6, equal_nan=False, msg=name
            )
        else:
            assert torch.equal(value, want[name]), name


class Mixed(nn.Module):
    """Weights, decimals that are no weights, whole numbers, bits, and a vector that comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.wide = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        self.layer = BoundedLinear(3, 3, bound=0.5)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("seen", torch.tensor(0, dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("hidden", torch.zeros(1), persistent=False)

    def move(self, generator: torch.Generator) -> None:
        """As a step does."""
        self.layer(self.norm(torch.randn(5, 3, generator=generator)))  # buffers
        with torch.no_grad():
            for parameter in (self.norm.weight, self.norm.bias, self.wide, self.layer.weight):
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
        self.seen += 1
        self.mask = torch.rand(3, generator=generator) < 0.5


@pytest.mark.parametrize("decay", [0.05, 0.5, 0.9, 0.999])
def test_it_is_the_loop(decay: float, generator: torch.Generator) -> None:
    model = Mixed()
    average, states = MovingAverage(model, decay), []
    assert model.state_dict()["layer.spectral_v"].shape == (0,)
    for _ in range(25):
        model.move(generator)
        average.update()
        states.append(weights(model))
        assert_close(average.state, by_hand(states, decay))
    assert average.steps == 25
    assert average.state["layer.spectral_v"].shape == (3,)
    assert "hidden" not in average.state
    if decay == 0.999:  # (1 + t)/(10 + t) holds it back
        assert decay_of(24, decay) == pytest.approx(25 / 34)
    assert average.state["wide"].dtype == torch.float64


def test_a_shape_that_comes_after_the_first_step(generator: torch.Generator) -> None:
    """As of a layer that the first batches did not call; and once more, at another size."""
    model = Mixed()
    average, states = MovingAverage(model, 0.9), []
    for step in range(6):
        if step in (2, 4):
            model.layer.spectral_v = torch.randn(step, generator=generator)
            model.register_buffer("statistics", torch.randn(step, generator=generator))
        elif step > 2:
            model.statistics.add_(1.0)
        states.append(weights(model))
        average.update()
        assert_close(average.state, by_hand(states, 0.9))
    assert average.state["layer.spectral_v"].shape == average.state["statistics"].shape == (4,)
    with average.applied():
        assert torch.equal(model.statistics, average.state["statistics"])


def test_directions_are_not_averaged(generator: torch.Generator) -> None:
    """Half of v and half of −v is no direction at all."""
    model = Mixed()
    model.move(generator)
    model.layer.cache_norm()
    average = MovingAverage(model, 0.5)
    for _ in range(4):
        model.layer.spectral_v.neg_()
        model.layer.spectral_direction.neg_()
        average.update()
        for name in DIRECTIONS:
            assert torch.equal(average.state[f"layer.{name}"], getattr(model.layer, name))


def test_the_average_is_its_own(generator: torch.Generator) -> None:
    """No tensor of the model is in it, also of those that are taken as they are."""
    model = Mixed()
    model.move(generator)
    average = MovingAverage(model, 0.5)
    average.update()
    before = {name: t.clone() for name, t in average.state.items()}
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    assert same_weights(average.state, before)


def test_applied_gives_back_the_bits(generator: torch.Generator) -> None:
    model = Mixed()
    average = MovingAverage(model, 0.9)
    for _ in range(4):
        model.move(generator)
        average.update()
    own, addresses = weights(model), [t.data_ptr() for t in model.state_dict().values()]
    mean = {name: t.clone() for name, t in average.state.items()}
    with average.applied():
        assert same_weights(weights(model), mean)
        assert not torch.equal(model.wide, own["wide"])
        model.eval()
        model.norm(torch.zeros(2, 3))
    assert same_weights(weights(model), own)
    with pytest.raises(RuntimeError, match="inside"), average.applied():
        raise RuntimeError("inside")
    assert same_weights(weights(model), own)
    assert same_weights(average.state, mean)
    average.apply()
    assert same_weights(weights(model), mean)
    assert [t.data_ptr() for t in model.state_dict().values()] == addresses  # an optimiser has them, too


def test_it_goes_on_where_it_was(generator: torch.Generator) -> None:
    model = Mixed()
    whole = MovingAverage(model, 0.9)
    for step in range(8):
        model.move(generator)
        whole.update()
        if step == 3:
            part = MovingAverage(model, 0.9)
            part.load(whole.steps, {name: t.clone() for name, t in whole.state.items()})
        elif step > 3:
            part.update()
    assert part.steps == whole.steps == 8
    assert same_weights(part.state, whole.state)


# --- in a run -------------------------------------------------------------------------------------------

TRAIN, HELD_OUT = toy.blobs(3, 8, flip=0.4), toy.blobs(3, 12, flip=0.4, seed=1)
BATCHES = list(zip(TRAIN[0].split(7), TRAIN[1].split(7), strict=True))
EPOCHS, LR, DECAY = 6, 0.05, 0.8


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(Hardware(accelerator="cpu"))


def plain_loop(
    model: Any,
) -> tuple[list[float], list[float], list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """SGD with a cosine: losses, NLL of the averages, averages and weights after each epoch."""
    if model.wants_class_counts:
        model.class_counts = torch.bincount(TRAIN[1]).tolist()
    own = ("latent.beta", "head.norm.", "head.flows.")  # these are not decayed
    decayed = [p for name, p in model.named_parameters() if not any(part in name for part in own)]
    rest = [p for name, p in model.named_parameters() if any(part in name for part in own)]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD([g for g in groups if g["params"]], lr=LR, momentum=0.9, nesterov=True)
    g, states = torch.Generator().manual_seed(0), []
    losses, held_out, averages, ends = [], [], [], []
    for epoch in range(EPOCHS):
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 + math.cos(math.pi * epoch / EPOCHS)) / 2
        total = 0.0
        model.train()
        for x, y in BATCHES:
            loss = model.loss(x, y, generator=g)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            states.append(weights(model))
            total += float(loss.detach()) * len(y)
        losses.append(total / len(TRAIN[1]))
        averages.append(by_hand(states, DECAY))
        ends.append(states[-1])
        twin = copy.deepcopy(model).eval()
        twin.load_state_dict({k: t.to(states[-1][k].dtype) for k, t in averages[-1].items()})
        with torch.no_grad():
            held_out.append(float(F.nll_loss(twin(HELD_OUT[0]), HELD_OUT[1])))
    return losses, held_out, averages, ends


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_run_ends_with_the_average(method: str, watched: bool, engine: Engine) -> None:
    model, twin = toy.build(method), toy.build(method)
    config = TrainConfig(Schedule(EPOCHS, LR, 0.01, optimizer="sgd"), ema_decay=DECAY)
    trained = engine.train(model, BATCHES, config, held_out=[HELD_OUT] if watched else None)
    losses, held_out, averages, ends = plain_loop(twin)
    assert [r.loss for r in trained.history] == pytest.approx(losses, rel=1e-4)
    end = EPOCHS - 1
    if watched:
        assert [r.held_out for r in trained.history] == pytest.approx(held_out, rel=1e-4)
        end = held_out.index(min(held_out))
        assert trained.best == end + 1
    got = weights(trained.model)
    assert got.keys() == averages[end].keys()
    for name, value in got.items():
        torch.testing.assert_close(
            value.double(), averages[end][name].double(), rtol=1e-3, atol=1e-4, msg=name
        )
    moved = [n for n, _ in model.named_parameters() if not torch.allclose(got[n], ends[end][n], atol=1e-3)]
    assert moved  # it is not what the last step left


def test_the_best_epoch_is_not_the_last(engine: Engine) -> None:
    """Or else the tests above would not tell them apart."""
    best = []
    for method in METHODS:
        _, held_out, _, _ = plain_loop(toy.build(method))
        best.append(held_out.index(min(held_out)))
    assert sum(epoch < EPOCHS - 1 for epoch in best) >= 3
