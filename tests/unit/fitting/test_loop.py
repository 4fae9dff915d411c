"""The training loop against one written out: AdamW, cosine, best epoch, patience, learning rates."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.contract import toy
from tests.contract.toy import same_weights, weights
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import hetsngp
from hetsngp.fitting.loop import (
    EpochResult,
    Schedule,
    best_epoch,
    mean_nll,
    train,
    train_folds,
    train_with_schedule,
)
from hetsngp.models.loader_counts import class_counts, dataset_size
from hetsngp.models.methods import METHODS

EPOCHS, LR = 8, 0.05
TRAIN, HELD_OUT = toy.blobs(3, 8, flip=0.4), toy.blobs(3, 12, flip=0.4, seed=1)
WEIGHT = 0.2 + torch.rand(24, generator=torch.Generator().manual_seed(0))


def batches(x: Tensor, y: Tensor, *weight: Tensor, size: int = 10) -> list[tuple[Tensor, ...]]:
    """Of unequal size: 10, 10 and 4."""
    return list(zip(*(t.split(size) for t in (x, y, *weight)), strict=True))


def seed(value: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(value)


def count_by_hand(loader: Any, classes: int = 3) -> list[float]:
    counts = [0.0] * classes
    for _, y, *weight in loader:
        for label, w in zip(y, weight[0] if weight else torch.ones(len(y)), strict=True):
            counts[label] += float(w)
    return counts


def by_hand(
    model: Any, loader: Any, epochs: int = EPOCHS, *, gp_lr_multiplier: float = 1.0, watched: Any = None
) -> tuple[list[float], list[float], list[dict[str, Tensor]]]:
    """Mean losses, held-out NLL and weights after each epoch."""
    if model.wants_class_counts:
        model.class_counts = count_by_hand(loader)
    own = ("latent.beta", "head.norm.", "head.flows.")  # a prior's weights, and a density's
    beta = [p for name, p in model.named_parameters() if any(part in name for part in own)]
    rest = [p for name, p in model.named_parameters() if not any(part in name for part in own)]
    groups = [{"params": rest, "weight_decay": 0.01, "lr": LR}]
    groups += [{"params": beta, "weight_decay": 0.0, "lr": LR * gp_lr_multiplier}] if beta else []
    optimizer, g = torch.optim.AdamW(groups), seed()
    first = [group["lr"] for group in groups]
    losses, held_out, states = [], [], []
    for epoch in range(epochs):
        for group, rate in zip(optimizer.param_groups, first, strict=True):
            group["lr"] = rate * (1 + math.cos(math.pi * epoch / epochs)) / 2
        total = 0.0
        model.train()
        for x, y, *weight in loader:
            optimizer.zero_grad()
            loss = model.loss(x, y, generator=g, weight=weight[0] if weight else None)
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(x)
        losses.append(total / sum(len(batch[0]) for batch in loader))
        if watched is not None:
            model.eval()
            with torch.no_grad():
                held_out.append(float(F.nll_loss(model(watched[0]), watched[1])))
        states.append({name: t.clone() for name, t in model.state_dict().items()})
    return losses, held_out, states


def assert_weights(model: Any, state: dict[str, Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("gp_lr_multiplier", [1.0, 5.0])
@pytest.mark.parametrize("method", METHODS)
def test_it_is_adamw_with_a_cosine(method: str, gp_lr_multiplier: float, weighted: bool) -> None:
    loader = batches(*TRAIN, *([WEIGHT] if weighted else []))
    model, twin = toy.build(method), toy.build(method)
    seen: list[EpochResult] = []
    options: dict[str, Any] = {"epochs": EPOCHS, "lr": LR, "weight_decay": 0.01}
    options["gp_lr_multiplier"] = gp_lr_multiplier
    history = train(model, loader, generator=seed(), on_epoch=seen.append, **options)
    losses, _, states = by_hand(twin, loader, gp_lr_multiplier=gp_lr_multiplier)
    assert history == seen
    assert [r.epoch for r in history] == list(range(1, EPOCHS + 1))
    assert {(r.epochs, r.held_out, r.member, r.members) for r in history} == {(EPOCHS, None, 1, 1)}
    assert [r.loss for r in history] == pytest.approx(losses, rel=1e-5)
    assert_weights(model, states[-1])
    assert not model.training


def test_gp_lr_multiplier_is_of_beta_alone() -> None:
    """Adam's first step is its rate for every weight with a gradient worth the name."""
    start = toy.build("hetsngp", dataset_size=10**9)
    steps = {}
    for factor in (1.0, 4.0):
        model = copy.deepcopy(start)
        train(model, [TRAIN], epochs=1, lr=1e-3, weight_decay=0.0, gp_lr_multiplier=factor, generator=seed())
        steps[factor] = {
            name: (p - q).detach().abs().median()
            for (name, p), q in zip(model.named_parameters(), start.parameters(), strict=True)
        }
    for name, step in steps[4.0].items():
        expected = 4e-3 if name == "head.latent.beta" else 1e-3
        assert float(step) == pytest.approx(expected, rel=0.02), name
        assert float(steps[1.0][name]) == pytest.approx(1e-3, rel=0.02), name


@pytest.mark.parametrize("method", METHODS)
def test_the_weights_of_the_best_epoch_are_kept(method: str) -> None:
    loader, held_out = batches(*TRAIN), batches(*HELD_OUT, size=7)
    model, twin = toy.build(method), toy.build(method)
    epochs = 30 if method == "posterior_network" else EPOCHS  # densities are learned more slowly
    options: dict[str, Any] = {"epochs": epochs, "lr": LR, "weight_decay": 0.01}
    history = train(model, loader, generator=seed(), validation=held_out, **options)
    losses, values, states = by_hand(twin, loader, epochs, watched=HELD_OUT)
    assert [r.loss for r in history] == pytest.approx(losses, rel=1e-5)  # looking does not disturb
    assert [r.held_out for r in history] == pytest.approx(values, rel=1e-5)
    best = values.index(min(values))
    assert best + 1 < epochs  # so that there was something to go back to
    assert_weights(model, states[best])
    assert mean_nll(model, held_out) == pytest.approx(values[best], rel=1e-5)


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_patience_stops(patience: int) -> None:
    held_out = batches(*HELD_OUT)
    whole, stopped = toy.build("hetsngp"), toy.build("hetsngp")
    options: dict[str, Any] = {"epochs": 40, "lr": LR, "validation": held_out}
    values = [r.held_out for r in train(whole, batches(*TRAIN), generator=seed(), **options)]
    history = train(stopped, batches(*TRAIN), generator=seed(), patience=patience, **options)
    best = last = 0
    for epoch in range(1, len(values)):
        best = epoch if values[epoch] < values[best] else best
        last = epoch
        if epoch - best >= patience:
            break
    assert len(history) == last + 1 < 40
    assert [r.held_out for r in history] == values[: last + 1]
    assert mean_nll(stopped, held_out) == pytest.approx(values[best], rel=1e-5)


def test_a_held_out_nll_that_is_no_number_is_never_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([math.nan, math.nan, 1.0, math.nan, math.nan, math.nan])
    monkeypatch.setattr("hetsngp.fitting.loop.mean_nll", lambda model, loader: next(values))
    options: dict[str, Any] = {"epochs": 20, "patience": 3, "validation": batches(*HELD_OUT)}
    history = train(toy.build("sngp"), batches(*TRAIN), generator=seed(), **options)
    assert len(history) == 6
    assert best_epoch(history) == 3
    monkeypatch.setattr("hetsngp.fitting.loop.mean_nll", lambda model, loader: math.nan)
    assert len(train(toy.build("sngp"), batches(*TRAIN), generator=seed(), **options)) == 3


def test_patience_needs_something_to_watch() -> None:
    with pytest.raises(ValueError, match=r"patience needs a validation loader.*validation=held_out"):
        train(toy.build("sngp"), batches(*TRAIN), epochs=1, patience=3)
    with pytest.raises(ValueError, match="patience must be a positive whole number"):
        train(toy.build("sngp"), batches(*TRAIN), epochs=1, patience=0, validation=batches(*HELD_OUT))


# --- stopping after a given epoch -----------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_to_stop_after_an_epoch_is_to_leave_there(method: str) -> None:
    """The cosine is that of all epochs: those before are the same, to the last bit."""
    whole, states = toy.build(method), []
    options: dict[str, Any] = {"epochs": EPOCHS, "lr": LR, "gp_lr_multiplier": 2.0}
    history = train(
        whole, batches(*TRAIN), generator=seed(), on_epoch=lambda _: states.append(weights(whole)), **options
    )
    for last in (1, 3, EPOCHS, EPOCHS + 5):
        part = toy.build(method)
        got = train(part, batches(*TRAIN), generator=seed(), stop_after=last, **options)
        done = min(last, EPOCHS)
        assert same_weights(weights(part), states[done - 1])
        assert [(r.epoch, r.loss) for r in got] == [(r.epoch, r.loss) for r in history[:done]]
        assert {r.epochs for r in got} == {done}
        assert not part.training
    short = toy.build(method)
    train(short, batches(*TRAIN), generator=seed(), **{**options, "epochs": 3})
    assert not same_weights(weights(short), states[2])  # its rate is zero by then


def test_the_best_of_the_epochs_that_were_run_is_kept() -> None:
    model, states = toy.build("hetsngp"), []
    options: dict[str, Any] = {"epochs": EPOCHS, "lr": LR, "validation": batches(*HELD_OUT)}
    history = train(
        model,
        batches(*TRAIN),
        generator=seed(),
        stop_after=6,
        on_epoch=lambda _: states.append(weights(model)),
        **options,
    )
    values = [r.held_out for r in history]
    assert len(values) == 6
    assert (best := values.index(min(values))) < 5
    assert same_weights(weights(model), states[best])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 0}, "epochs must be a positive whole number, got 0"),
        ({"lr": 0.0}, "lr must be a positive finite number"),
        ({"stop_after": 0}, "stop_after must be a positive whole number, got 0"),
        ({"stop_after": -1}, "stop_after must be a positive whole number"),
        ({"stop_after": 1.5}, "stop_after must be a positive whole number"),
        ({"stop_after": True}, "stop_after must be a positive whole number"),
    ],
)
def test_bad_schedules_are_refused(options: dict[str, Any], words: str) -> None:
    model = toy.build("sngp")
    before = weights(model)
    with pytest.raises(ValueError, match=words):
        Schedule(**{"epochs": 3, **options})
    with pytest.raises(ValueError, match=words):
        train(model, batches(*TRAIN), **{"epochs": 3, **options})
    assert same_weights(weights(model), before)


# --- folds ----------------------------------------------------------------------------------------------


def fold(number: int) -> tuple[Any, Any]:
    """(training batches, held-out batches): 9, 18 and 27 held-out examples, heavy where they are few."""
    train_x, train_y = toy.blobs(3, 8, flip=0.4, seed=10 + number)
    x, y = toy.blobs(3, 3 * (number + 1), flip=0.4, seed=20 + number)
    weight = (0.5 + torch.rand(len(x), generator=seed(number))) * (9.0, 2.0, 1.0)[number]
    return batches(train_x, train_y), batches(x, y, weight, size=7)


FOLDS = [fold(number) for number in range(3)]


def fold_models(method: str, count: int = 3) -> list[Any]:
    return [toy.build(method, amplitude=3.0 + number) for number in range(count)]


def run_folds(models: list[Any], schedule: Schedule, **options: Any) -> list[EpochResult]:
    parts = FOLDS[: len(models)]
    generators = [seed(number) for number in range(len(models))]
    return train_folds(
        models, [a for a, _ in parts], [b for _, b in parts], schedule, generators=generators, **options
    )


@pytest.mark.parametrize("patience", [None, 2])
@pytest.mark.parametrize("method", METHODS)
def test_one_fold_is_training_with_validation(method: str, patience: int | None) -> None:
    schedule = Schedule(12, LR, 0.01, 2.0)
    [one], [two] = fold_models(method, 1), fold_models(method, 1)
    seen: list[EpochResult] = []
    history = run_folds([one], schedule, patience=patience, on_epoch=seen.append)
    training, held_out = FOLDS[0]
    expected = train_with_schedule(
        two, training, schedule, generator=seed(), validation=held_out, patience=patience
    )
    assert history == seen == expected
    assert same_weights(weights(one), weights(two))
    assert not one.training


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "lr"), [("deterministic", 0.01), ("heteroscedastic", 0.01), ("sngp", 0.02), ("hetsngp", 0.02)]
)
def test_folds_end_at_the_epoch_that_is_best_for_all_they_hold_out(method: str, lr: float) -> None:
    """Each fold trained by itself up to each epoch: what it says of its own examples, pooled by weight."""
    models = fold_models(method)
    history = run_folds(models, Schedule(EPOCHS, lr))
    sums, totals, losses, states = [], [], [], []
    for number, (training, held_out) in enumerate(FOLDS):
        weight = float(torch.cat([w for _, _, w in held_out]).double().sum())
        nll, mine = [], []
        for last in range(1, EPOCHS + 1):
            model = fold_models(method)[number]
            run = train(model, training, epochs=EPOCHS, lr=lr, generator=seed(number), stop_after=last)
            nll.append(mean_nll(model, held_out) * weight)
            mine.append(weights(model))
        sums.append(nll)
        totals.append(weight)
        losses.append([r.loss for r in run])
        states.append(mine)
    pooled = [sum(column) / sum(totals) for column in zip(*sums, strict=True)]
    assert [r.held_out for r in history] == pytest.approx(pooled, rel=1e-6)
    assert [r.loss for r in history] == pytest.approx([sum(c) / 3 for c in zip(*losses, strict=True)])
    assert [(r.epoch, r.epochs) for r in history] == [(e, EPOCHS) for e in range(1, EPOCHS + 1)]
    plain = [
        sum(s / t for s, t in zip(column, totals, strict=True)) / 3 for column in zip(*sums, strict=True)
    ]
    assert max(abs(a - b) for a, b in zip(plain, pooled, strict=True)) > 1e-3  # by weight, not fold by fold
    best = pooled.index(min(pooled))
    assert 0 < best < EPOCHS - 1  # so that there was something to go back to
    assert {nll.index(min(nll)) for nll in sums} != {best}  # one fold by itself would have chosen otherwise
    for model, mine in zip(models, states, strict=True):
        assert same_weights(weights(model), mine[best])
        assert not model.training


@pytest.mark.parametrize("patience", [1, 2, 4])
def test_patience_stops_all_folds_together(patience: int) -> None:
    schedule = Schedule(25, 0.02)
    values = [r.held_out for r in run_folds(fold_models("hetsngp"), schedule)]
    models = fold_models("hetsngp")
    stopped = run_folds(models, schedule, patience=patience)
    best = last = 0
    for epoch in range(1, len(values)):
        best = epoch if values[epoch] < values[best] else best
        last = epoch
        if epoch - best >= patience:
            break
    assert [r.held_out for r in stopped] == values[: last + 1]
    assert len(stopped) < 25
    assert best > 0
    until = fold_models("hetsngp")
    run_folds(until, Schedule(25, 0.02, stop_after=best + 1))
    for model, twin in zip(models, until, strict=True):
        assert same_weights(weights(model), weights(twin))


def test_folds_have_as_many_of_everything() -> None:
    parts, generators = ([a for a, _ in FOLDS], [b for _, b in FOLDS]), [seed() for _ in FOLDS]
    for models, training, held_out, points in (
        (fold_models("sngp", 2), *parts, generators),
        (fold_models("sngp"), parts[0][:2], parts[1], generators),
        (fold_models("sngp"), parts[0], parts[1][:2], generators),
        (fold_models("sngp"), *parts, generators[:2]),
    ):
        with pytest.raises(ValueError, match="argument"):
            train_folds(models, training, held_out, Schedule(1), generators=points)
    with pytest.raises(ValueError, match="patience must be a positive whole number"):
        run_folds(fold_models("sngp"), Schedule(2), patience=0)


# --- how many, and of which class -----------------------------------------------------------------------

X, Y = toy.blobs(3, 8)[0], torch.tensor([0] * 12 + [1] * 8 + [2] * 4)


class Relabelled(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return self.tensors[0][index], 2 - self.tensors[1][index]


class Backwards(SequentialSampler):
    """Says it goes in order, and shows the last five."""

    def __iter__(self) -> Any:
        return iter(range(19, 24))


def _relabel(rows: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = default_collate(rows)
    return x, torch.zeros_like(y)


def loader_of(kind: str) -> DataLoader[Any]:
    """Always the same rows; those of ``plain``, ``shuffled`` and ``drop_last`` are all there are."""
    data = TensorDataset(X, Y)
    whole: dict[str, dict[str, Any]] = {
        "plain": {},
        "shuffled": {"shuffle": True, "generator": seed()},
        "weighted": {"sampler": WeightedRandomSampler(1.0 + 9 * (Y == 2), 24, generator=seed())},
        "subset": {"sampler": SubsetRandomSampler(range(5, 20), generator=seed())},
        "replacement": {"sampler": RandomSampler(data, True, generator=seed(1))},
        "a part": {"sampler": RandomSampler(data, num_samples=7, generator=seed())},
        "twice": {"sampler": RandomSampler(data, num_samples=48, generator=seed())},
        "others": {"sampler": SequentialSampler(range(10))},
        "backwards": {"sampler": Backwards(data)},
        "relabelled in collate": {"collate_fn": _relabel},
    }
    if kind in whole:
        return DataLoader(data, 10, **whole[kind])
    if kind == "batches":
        sampler = WeightedRandomSampler(1.0 + 9 * (Y == 2), 24, generator=seed())
        return DataLoader(data, batch_sampler=BatchSampler(sampler, 10, False))
    if kind == "batches of its own":
        return DataLoader(data, batch_sampler=[[0, 1], [20, 21, 22]])  # type: ignore[arg-type]
    if kind == "with weights":
        return DataLoader(TensorDataset(X, Y, WEIGHT), 10)
    if kind == "Subset":
        return DataLoader(Subset(data, range(3, 15)), 10)
    assert kind == "Relabelled"
    return DataLoader(Relabelled(X, Y), 10)


KINDS = [
    "plain",
    "shuffled",
    "with weights",
    "weighted",
    "subset",
    "replacement",
    "a part",
    "twice",
    "others",
]
KINDS += ["backwards", "relabelled in collate", "batches", "batches of its own", "Subset", "Relabelled"]


@pytest.mark.parametrize("kind", KINDS)
def test_classes_are_counted_as_the_loader_shows_them(kind: str) -> None:
    want = count_by_hand(loader_of(kind))
    assert class_counts(loader_of(kind), 3).tolist() == pytest.approx(want, rel=1e-6)
    model = toy.build("posterior_network")
    train(model, loader_of(kind), epochs=1, lr=1e-6)
    assert model.class_counts.tolist() == pytest.approx(want, rel=1e-6)
    if kind not in ("plain", "shuffled"):
        assert want != [12.0, 8.0, 4.0]


@pytest.mark.parametrize("kind", ["plain", "shuffled", "with weights"])
def test_labels_at_hand_cost_no_pass(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loader, want = loader_of(kind), count_by_hand(loader_of(kind))
    monkeypatch.setattr(TensorDataset, "__getitem__", None)
    assert class_counts(loader, 3).tolist() == pytest.approx(want, rel=1e-6)
    if kind == "shuffled":  # and the order of the epochs to come is what it was
        assert torch.equal(loader.generator.get_state(), seed().get_state())


def test_streams_are_not_counted() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return zip(X, Y, strict=True)

    iterator = iter(batches(X, Y))
    for stream in (DataLoader(Stream(), 10), iterator):
        assert dataset_size(stream) is None
        assert class_counts(stream, 3) is None
    assert len(list(iterator)) == 3  # not touched
    model = toy.build("posterior_network", dataset_size=None)
    with pytest.warns(UserWarning, match="class_counts is not set"):
        train(model, DataLoader(Stream(), 10), epochs=1)
    assert model.class_counts is None
    assert model.dataset_size is None


def test_counts_that_were_given_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy.build("posterior_network", class_counts=[5, 6, 7])
    train(model, batches(X, Y), epochs=1)
    assert model.class_counts.tolist() == [5, 6, 7]
    assert model.dataset_size == 36
    monkeypatch.setattr(
        "hetsngp.models.loader_counts.class_counts", None
    )  # asks nobody who has no use for them
    for method in METHODS:
        if method != "posterior_network":
            model = toy.build(method, dataset_size=None)
            train(model, batches(X, Y), epochs=1)
            assert model.class_counts is None
            assert model.dataset_size == 24


def test_folds_count_their_own_classes() -> None:
    models = fold_models("posterior_network")
    run_folds(models, Schedule(1))
    for model, (training, _) in zip(models, FOLDS, strict=True):
        assert model.class_counts.tolist() == pytest.approx(count_by_hand(training), rel=1e-6)


def test_labels_that_cannot_be_counted_are_refused() -> None:
    for y, error in ((Y + 1, ValueError), (Y.float(), TypeError), (Y[:, None], ValueError)):
        with pytest.raises(error):
            class_counts([(X, y)], 3)
    assert class_counts([], 3) is None
    assert class_counts([(X, Y, torch.zeros(24))], 3) is None
    with pytest.raises(ValueError, match="loader is empty"):
        train(toy.build("posterior_network"), [], epochs=1)


# --- held-out NLL ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_held_out_nll_is_weighted_and_at_the_mode(link: str) -> None:
    model = toy.trained("sngp", link=link)
    x, y = HELD_OUT
    weight = torch.rand(len(x), generator=seed())
    with torch.no_grad():
        latent = model.head.latent
        f = (latent.features(model.backbone(x)) @ latent.beta).double()
    total = 0.0
    for logits, label, w in zip(f, y, weight, strict=True):
        if link == "softmax":
            nll = -float(torch.log_softmax(logits, -1)[label])
        else:
            signs = 2 * F.one_hot(label, 3).double() - 1
            nll = -float(F.logsigmoid(signs * logits).sum())
        total += float(w) * nll
    labels = toy.labels_for(y, 3, {"link": link})
    model.train()
    before = copy.deepcopy(model.state_dict())
    got = mean_nll(model, batches(x, labels, weight))
    assert got == pytest.approx(total / float(weight.double().sum()), rel=1e-5)
    assert model.training
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_held_out_nll_of_an_ensemble_is_of_the_mixture() -> None:
    ensemble = hetsngp.Ensemble([toy.trained("sngp"), toy.trained("deterministic")])
    x, y = HELD_OUT
    with torch.no_grad():
        probs = sum(m(x).double().exp() for m in ensemble.members) / 2
    want = -float(probs.gather(1, y[:, None]).log().mean())
    assert mean_nll(ensemble, batches(x, y)) == pytest.approx(want, rel=1e-5)


def test_nothing_to_learn_from_is_an_error() -> None:
    model = toy.build("sngp")
    for empty in ([], [(*HELD_OUT, torch.zeros(len(HELD_OUT[0])))]):
        with pytest.raises(ValueError, match="validation is empty"):
            train(model, batches(*TRAIN), epochs=1, validation=empty)


def test_a_loss_that_explodes_is_said_at_once() -> None:
    with pytest.raises(FloatingPointError, match=r"the loss is NaN in epoch \d: lower lr \(now "):
        train(toy.build("deterministic"), batches(*TRAIN), epochs=9, lr=1e30)


def test_a_negative_weight_decay_is_refused() -> None:
    with pytest.raises(ValueError, match="weight_decay must be at least 0"):
        Schedule(1, weight_decay=-1.0)
