"""Learning rates against torch's schedulers and formulas, optimisers against theirs, and run_epoch."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from tests.contract import toy
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset

from hetsngp.fitting.loop import Gradients, TrainState, run_epoch, train_with_schedule
from hetsngp.fitting.schedule import DECAYS, Schedule

EPOCHS, STEPS = 12, 7
X, Y = (t.double() if t.is_floating_point() else t for t in toy.blobs(3, 10, flip=0.3))


# --- torch's schedulers ---------------------------------------------------------------------------------


def by_torch(make: Callable[[torch.optim.Optimizer], Any], updates: int) -> list[float]:
    """Learning rate of each update, for a full learning rate of one."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
    scheduler, rates = make(optimizer), []
    for _ in range(updates):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def oracle(decay: str, warmup: int, total: int, milestones: list[int]) -> Callable[[Any], Any]:
    """In units of a step of the scheduler."""
    after = total - warmup

    def make(optimizer: torch.optim.Optimizer) -> Any:
        def warm() -> Any:
            return lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, total_iters=warmup - 1)

        kinds: dict[str, Callable[[], Any]] = {
            "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, T_max=after),
            "linear": lambda: lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=after),
            "step": lambda: lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.3),
            "constant": lambda: lr_scheduler.ConstantLR(optimizer, factor=1.0),
        }
        if not warmup:
            return kinds[decay]()
        if decay == "step":  # its milestones count from the beginning
            return lr_scheduler.ChainedScheduler([kinds[decay](), warm()])
        return lr_scheduler.SequentialLR(optimizer, [warm(), kinds[decay]()], milestones=[warmup])

    return make


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("warmup", [0, 2, 5])
@pytest.mark.parametrize("decay", DECAYS)
def test_rates_are_those_of_torch(decay: str, warmup: int, smooth: bool) -> None:
    milestones = (4, 9) if decay == "step" else ()
    schedule = Schedule(EPOCHS, decay=decay, warmup=warmup, milestones=milestones, gamma=0.3, smooth=smooth)
    steps = STEPS if smooth else 1
    want = by_torch(
        oracle(decay, warmup * steps, EPOCHS * steps, [steps * at for at in milestones]), EPOCHS * steps
    )
    if smooth:
        got = [schedule.factor(e + i / STEPS, 1 / STEPS) for e in range(EPOCHS) for i in range(STEPS)]
    else:
        got = [schedule.factor(epoch) for epoch in range(EPOCHS)]
        within = [schedule.factor(e + i / STEPS, 1 / STEPS) for e in range(EPOCHS) for i in range(STEPS)]
        assert within == [rate for rate in got for _ in range(STEPS)]  # it stands still within an epoch
    assert got == pytest.approx(want, rel=1e-6, abs=1e-9)
    assert min(got) > 0
    if warmup < 4:  # by then the steps begin
        assert max(got) == 1.0


# --- formulas -------------------------------------------------------------------------------------------


def written_out(decay: str, at: float, warmup: float) -> float:
    """The share of the full rate after ``at`` epochs, once warm."""
    left = (EPOCHS - max(at, warmup)) / (EPOCHS - warmup)
    if decay == "cosine":
        return math.sin(left * math.pi / 2) ** 2
    if decay == "linear":
        return left
    return 0.3 ** ((at >= 4) + (at >= 9.5)) if decay == "step" else 1.0


@pytest.mark.parametrize("warmup", [0.0, 0.25, 1.5, 3.1])
@pytest.mark.parametrize("decay", DECAYS)
def test_a_warm_up_may_end_within_an_epoch(decay: str, warmup: float) -> None:
    milestones = (4, 9.5) if decay == "step" else ()
    schedule = Schedule(EPOCHS, decay=decay, warmup=warmup, milestones=milestones, gamma=0.3, smooth=True)
    for update in range(EPOCHS * 20):
        done, after = update / 20, (update + 1) / 20
        share = min(1.0, after / warmup) if warmup else 1.0
        want = share * written_out(decay, done, warmup)
        assert schedule.factor(done, 1 / 20) == pytest.approx(want, rel=1e-9)
    coarse = Schedule(EPOCHS, decay=decay, warmup=warmup, milestones=milestones, gamma=0.3)
    for epoch in range(EPOCHS):
        share = min(1.0, (epoch + 1) / warmup) if warmup else 1.0
        want = share * written_out(decay, float(epoch), warmup)
        assert coarse.factor(epoch) == pytest.approx(want, rel=1e-9)
        assert coarse.factor(epoch + 0.7, 0.1) == coarse.factor(epoch)


def test_gp_lr_is_the_old_name_of_gp_lr_multiplier() -> None:
    with pytest.warns(DeprecationWarning, match="gp_lr is now called gp_lr_multiplier"):
        schedule = Schedule(3, gp_lr=2.0)  # type: ignore[call-arg]
    assert schedule == Schedule(3, gp_lr_multiplier=2.0)
    with pytest.warns(DeprecationWarning, match="gp_lr is now called gp_lr_multiplier"):
        assert schedule.gp_lr == 2.0
    with pytest.raises(TypeError, match="both are given"):
        Schedule(3, gp_lr=2.0, gp_lr_multiplier=2.0)  # type: ignore[call-arg]
    assert "gp_lr" not in asdict(schedule)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    old = Schedule.__new__(Schedule)  # as pickle does with an object of 0.1
    state = asdict(schedule)
    state["gp_lr"] = state.pop("gp_lr_multiplier")
    old.__setstate__(state)  # type: ignore[attr-defined]
    assert old == schedule


def test_set_rate_is_the_old_name_of_set_lr() -> None:
    schedule = Schedule(4, lr=0.1, optimizer="sgd")
    made = torch.optim.SGD([{"params": torch.zeros(1), "initial_lr": 0.1}], lr=0.1)
    with pytest.warns(DeprecationWarning, match=r"Schedule\.set_rate is now called set_lr"):
        assert schedule.set_rate(made, 2) == schedule.set_lr(made, 2) == pytest.approx(0.05)


def test_the_last_epoch() -> None:
    assert Schedule(10).last == 10
    assert Schedule(10, stop_after=4).last == 4
    assert Schedule(10, stop_after=40).last == 10
    # the learning rates are those of all epochs, whichever is the last
    assert Schedule(10, stop_after=4).factor(3) == Schedule(10).factor(3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 2.5}, "epochs must be a positive whole number, got 2.5"),
        ({"lr": math.inf}, "lr must be a positive finite number"),
        ({"gp_lr_multiplier": 0}, "gp_lr_multiplier must be a positive finite number"),
        ({"gamma": -1.0}, "gamma must be a positive finite number"),
        (
            {"optimizer": "adam"},
            "unknown optimizer 'adam': choose one of 'adamw', 'sgd'; did you mean 'adamw'",
        ),
        ({"decay": "cos"}, "unknown decay 'cos': choose one of 'cosine', 'linear', 'step', 'constant'"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0 and finite, got -0.1"),
        ({"weight_decay": math.nan}, "weight_decay must be at least 0 and finite"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1.0"),
        ({"momentum": -0.1}, "momentum must be at least 0 and below 1"),
        ({"warmup": 3}, "warmup is in epochs, at least 0 and below epochs=3: 3"),
        ({"warmup": -1}, "warmup is in epochs"),
        ({"stop_after": 0}, "stop_after must be a positive whole number"),
        (
            {"decay": "step"},
            r"decay=\"step\" and milestones=\(30, 60, 80\) belong together: give both or neither",
        ),
        ({"milestones": (1,)}, "belong together"),
        ({"decay": "step", "milestones": (3,)}, r"milestones are epochs between 0 and 3, got \(3,\)"),
        ({"decay": "step", "milestones": (0, 1)}, "milestones are epochs between 0 and 3"),
    ],
)
def test_bad_schedules_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Schedule(**{"epochs": 3, **options})


# --- optimisers -----------------------------------------------------------------------------------------

OWN = ("latent.beta", "head.norm.", "head.flows.")  # a prior's weights, and a density's


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("method", ["deterministic", "sngp", "hetsngp", "posterior_network"])
def test_groups_of_parameters(method: str, optimizer: str) -> None:
    model = toy.build(method)
    frozen = next(iter(model.backbone.parameters())).requires_grad_(False)
    schedule = Schedule(4, lr=0.3, weight_decay=0.02, gp_lr_multiplier=5.0, optimizer=optimizer, momentum=0.8)
    made = schedule.make_optimizer(model)
    assert type(made) is {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]
    found = {id(p): group for group in made.param_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in made.param_groups) == len(found)
    assert id(frozen) not in found
    assert len(found) == len(list(model.parameters())) - 1
    for name, parameter in model.named_parameters():
        if parameter is frozen:
            continue
        own, group = any(part in name for part in OWN), found[id(parameter)]
        assert group["weight_decay"] == (0.0 if own else 0.02), name
        assert group["lr"] == group["initial_lr"] == pytest.approx(1.5 if own else 0.3), name
        if optimizer == "sgd":
            assert (group["momentum"], group["nesterov"]) == (0.8, True)
    assert schedule.set_lr(made, 2) == pytest.approx(0.15)  # half way down a cosine
    assert {round(group["lr"], 12) for group in made.param_groups} == (
        {0.15} if method == "deterministic" else {0.15, 0.75}
    )
    schedule.set_lr(made, 1)
    assert schedule.set_lr(made, 2) == pytest.approx(0.15)  # of the full rate, not of the last one


def test_sgd_without_momentum() -> None:
    made = Schedule(4, optimizer="sgd", momentum=0.0).make_optimizer(toy.build("sngp"))
    assert {(group["momentum"], group["nesterov"]) for group in made.param_groups} == {(0.0, False)}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_nesterovs(momentum: float) -> None:
    """v ← μ·v + g, w ← w − rate·(g + μ·v), with g the gradient plus decay·w where there is decay."""
    model, twin = toy.build("hetsngp").double(), toy.build("hetsngp").double()
    schedule = Schedule(
        3,
        lr=0.05,
        weight_decay=0.1,
        gp_lr_multiplier=3.0,
        optimizer="sgd",
        momentum=momentum,
        warmup=2,
        decay="linear",
    )
    train_with_schedule(model, batches(10), schedule, generator=seed())
    g, velocity = seed(), [torch.zeros_like(p) for p in twin.parameters()]
    twin.train()
    for epoch in range(3):
        rate = 0.05 * [0.5, 1.0, 1.0][epoch]
        for x, y in batches(10):
            gradient = torch.autograd.grad(twin.loss(x, y, generator=g), list(twin.parameters()))
            with torch.no_grad():
                named = zip(twin.named_parameters(), gradient, velocity, strict=True)
                for (name, p), slope, v in named:
                    own = any(part in name for part in OWN)
                    slope = slope + (0.0 if own else 0.1) * p
                    v.mul_(momentum).add_(slope)
                    p -= rate * (3.0 if own else 1.0) * (slope + momentum * v)
    for (name, got), want in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12, msg=name)


# --- an epoch -------------------------------------------------------------------------------------------


def seed() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def batches(size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(X.split(size), Y.split(size), strict=True))


def made(schedule: Schedule, method: str = "deterministic") -> Gradients:
    model = toy.build(method).double().train()
    return Gradients(model, schedule.make_optimizer(model), seed())


def weights(gradients: Gradients) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in gradients.model.state_dict().items()}


def assert_weights(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("accumulate", [2, 3, 4, 6, 9])
def test_accumulated_batches_are_one_large_batch(accumulate: int, optimizer: str) -> None:
    """Of 30 rows in batches of 5; of the last group there may be less: 6 = 4 + 2."""
    schedule = Schedule(2, lr=0.1, weight_decay=0.01, optimizer=optimizer)
    parts, whole = made(schedule), made(schedule)
    places = TrainState(), TrainState()
    for _ in range(2):
        a = run_epoch(parts, batches(5), schedule, places[0], accumulate=accumulate)
        b = run_epoch(whole, batches(5 * accumulate), schedule, places[1])
        assert places[0].updates == places[1].updates
        assert (places[0].batches, places[0].seen) == (6, 30)
        assert a == pytest.approx(b, rel=1e-12)
        for state in places:
            state.start_next_epoch()
    assert places[0].updates == 2 * math.ceil(6 / accumulate)
    assert_weights(weights(parts), weights(whole))
    assert all(p.grad is None for p in parts.model.parameters())


def test_a_group_averages_its_batches_whatever_their_size() -> None:
    """30 rows in batches of 12, 12 and 6: the plan's accumulation is over batches."""
    schedule = Schedule(1, lr=0.1, weight_decay=0.0, optimizer="sgd", momentum=0.0)
    gradients, twin = made(schedule), made(schedule).model
    run_epoch(gradients, batches(12), schedule, TrainState(), accumulate=3)
    loss = sum(twin.loss(x, y) for x, y in batches(12)) / 3
    slopes = torch.autograd.grad(loss, list(twin.parameters()))
    for got, p, slope in zip(gradients.model.parameters(), twin.parameters(), slopes, strict=True):
        torch.testing.assert_close(got, p - 0.1 * slope, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("accumulate", "groups"), [(1, [1] * 6), (2, [2, 2, 2]), (4, [4, 2]), (5, [5, 1])])
def test_smooth_rates_are_of_the_share_of_the_epoch(accumulate: int, groups: list[int]) -> None:
    schedule = Schedule(4, lr=0.5, warmup=1.25, smooth=True, optimizer="sgd")
    gradients, state, rates = made(schedule), TrainState(), []
    for _ in range(3):
        run_epoch(gradients, batches(5), schedule, state, accumulate=accumulate, on_update=rates.append)
        state.start_next_epoch()
    want = []
    for epoch in range(3):
        done = 0
        for group in groups:
            start, end = epoch + done / 6, epoch + (done + group) / 6
            cosine = math.cos(math.pi / 2 * max(0.0, start - 1.25) / 2.75) ** 2
            want.append(0.5 * min(1.0, end / 1.25) * cosine)
            done += group
    assert rates == pytest.approx(want, rel=1e-9)
    assert state.updates == len(rates)


class Later:
    """The rest of an epoch, with the length of all of it."""

    def __init__(self, whole: list[Any], skip: int) -> None:
        self.whole, self.skip = whole, skip

    def __iter__(self) -> Iterator[Any]:
        return iter(self.whole[self.skip :])

    def __len__(self) -> int:
        return len(self.whole)


@pytest.mark.parametrize("updates", [1, 2])
def test_an_epoch_goes_on_where_it_was_left(updates: int) -> None:
    schedule = Schedule(2, lr=0.1, smooth=True, warmup=1)
    whole, parts = made(schedule, "hetsngp"), made(schedule, "hetsngp")
    want = run_epoch(whole, batches(5), schedule, TrainState(), accumulate=2)
    state, rates = TrainState(), []

    def stop(rate: float) -> None:
        rates.append(rate)
        if len(rates) == updates:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_epoch(parts, batches(5), schedule, state, accumulate=2, on_update=stop)
    assert (state.batches, state.updates) == (2 * updates, updates)
    rest = Later(batches(5), state.batches)
    got = run_epoch(parts, rest, schedule, state, accumulate=2, on_update=rates.append)
    assert got == want
    assert rates == pytest.approx([0.1 * share for share in (1 / 3, 2 / 3, 1)])
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(parts)[name], tensor), name


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X, Y, strict=True))


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_streams_have_no_share_of_an_epoch(smooth: bool, accumulate: int) -> None:
    schedule = Schedule(2, lr=0.1, smooth=smooth)
    for stream in (lambda: iter(batches(10)), lambda: DataLoader(Stream(), batch_size=10)):
        gradients = made(schedule)
        before = weights(gradients)
        if smooth or accumulate > 1:
            with pytest.raises(TypeError, match=r"loader has no len\(\).*give a loader of known length"):
                run_epoch(gradients, stream(), schedule, TrainState(), accumulate=accumulate)
            assert_weights(weights(gradients), before)
        else:
            want = made(schedule)
            run_epoch(want, batches(10), schedule, TrainState())
            rates: list[float] = []
            run_epoch(gradients, stream(), schedule, TrainState(), on_update=rates.append)
            assert rates == [0.1] * 3
            assert_weights(weights(gradients), weights(want))


def test_a_smooth_stream_is_refused_by_follow() -> None:
    with pytest.raises(TypeError, match="give a loader of known length"):
        train_with_schedule(
            toy.build("sngp").double(), DataLoader(Stream(), batch_size=10), Schedule(2, smooth=True)
        )


def test_an_empty_loader_is_told() -> None:
    with pytest.raises(ValueError, match="loader is empty: it yielded no batch"):
        run_epoch(made(Schedule(1)), [], Schedule(1), TrainState())


@pytest.mark.parametrize("at", [0, 49, 59, 99])
def test_a_loss_that_is_no_number_is_found_at_every_fiftieth_update(at: int) -> None:
    schedule = Schedule(2, lr=0.5)
    gradients, state = made(schedule), TrainState(epoch=2)
    add, count = gradients.add, iter(range(1000))

    def broken(*args: Any, **kwargs: Any) -> Tensor:
        loss = add(*args, **kwargs)
        return loss * math.nan if next(count) == at else loss

    gradients.add = broken  # type: ignore[method-assign]
    with pytest.raises(FloatingPointError, match=r"the loss is NaN in epoch 2: lower lr \(now 0.25\)"):
        run_epoch(gradients, batches(10) * 50, schedule, state)
    assert state.updates == (50 if at < 50 else 100)


# --- clipping -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.05, 1e6])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_clipping_is_of_the_gradient_of_a_step(clip: float, accumulate: int) -> None:
    pytest.importorskip("lightning")
    from hetsngp.training import Engine, Hardware, TrainConfig

    schedule = Schedule(2, lr=0.1, weight_decay=0.0, optimizer="sgd", momentum=0.0, decay="constant")
    model, twin = toy.build("hetsngp").double(), toy.build("hetsngp").double()
    plan = TrainConfig(schedule, accumulate=accumulate, clip=clip)
    Engine(Hardware(devices=1, accelerator="cpu")).train(model, batches(10), plan)
    g, norms = seed(), []
    twin.train()
    for group in [[0], [1], [2]] * 2 if accumulate == 1 else [[0, 1], [2]] * 2:
        for index in group:
            (twin.loss(*batches(10)[index], generator=g) / len(group)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(twin.parameters(), clip)))
        with torch.no_grad():
            for p in twin.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    assert min(norms) > 0.05
    assert max(norms) < 1e6
    assert_weights(dict(model.state_dict()), dict(twin.state_dict()))
