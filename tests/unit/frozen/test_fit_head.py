"""fit_head: a new head from features that are computed once, on a backbone that stays as it is."""

from __future__ import annotations

import copy
import gc
import io
import json
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.contract import toy
from tests.contract.toy import same_bits
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hetsngp
from hetsngp import FeatureSet, MultiInput, fit_head
from hetsngp.fitting.loop import train
from hetsngp.fitting.table_trainer import precomputed
from hetsngp.models.methods import METHODS
from hetsngp.posterior.fit import PosteriorReport

TINY: dict[str, Any] = {"random_features": 32, "rank": 2}
X, Y3 = toy.blobs(3, 100, flip=0.2)  # 300 rows
X2, Y3_2 = toy.blobs(3, 40, flip=0.2, seed=1)  # 120 more
Y, Y2 = (Y3 > 0).long(), (Y3_2 > 0).long()  # two classes, which cost least
MULTI_HOT = torch.stack([X[:, 0] > 0, X[:, 1] > 0, X.norm(dim=1) > 3.0], 1).float()
FOLDS, ONE_PART = 0.1, 0.4  # of 300 rows: too few to hold out, and enough


def network(seed: int = 0) -> nn.Sequential:
    """What a user may come with: statistics that training moves, dropout, and a last linear layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(2, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 12), nn.Tanh()
        ).append(nn.Linear(12, 3))


def images(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Unflatten(1, (2, 1, 1)), nn.Conv2d(2, 12, 1), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
        )


def converted(
    method: str = "hetsngp", classes: int = 2, *, make: Callable[[], nn.Module] = network, **options: Any
) -> hetsngp.Classifier:
    """The same model at every call."""
    every: dict[str, Any] = {"freeze": True, **TINY, **options}
    generator = torch.Generator().manual_seed(3)
    return hetsngp.convert(make(), method, X[:2], num_classes=classes, generator=generator, **every)


def batches(x: Tensor = X, y: Tensor = Y, *more: Tensor, size: int = 50) -> list[tuple[Tensor, ...]]:
    return list(zip(*(t.split(size) for t in (x, y, *more)), strict=True))


def fit(model: Any, loader: Any, calibration: Any = None, **options: Any) -> PosteriorReport:
    """In a moment."""
    return fit_head(model, loader, calibration, **{"epochs": 2, **options})


def rows_through(model: hetsngp.Classifier) -> list[int]:
    """Rows of every batch that the backbone is given from now on."""
    seen: list[int] = []
    model.backbone.register_forward_hook(lambda _, args, h: seen.append(len(h)))
    return seen


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in module.state_dict().items()}


def unchanged(module: nn.Module, before: dict[str, Tensor]) -> bool:
    now = module.state_dict()
    return now.keys() == before.keys() and all(torch.equal(t, before[name]) for name, t in now.items())


class Stream:
    """Begins anew each time, and does not know its length."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class Rows(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(X, Y, strict=True)


def of_one_input() -> list[str]:
    """Methods whose head sees the features of a single example."""
    return [name for name in METHODS if not isinstance(toy.build(name), MultiInput)]


SINGLE = of_one_input()
SEVERAL = [name for name in METHODS if name not in SINGLE]


# --- the backbone runs once -----------------------------------------------------------------------------


LOADERS: dict[str, Callable[[], Any]] = {
    "list": batches,
    "loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=50),
    "shuffled": lambda: DataLoader(TensorDataset(X, Y), batch_size=50, shuffle=True),
    "generator": lambda: (batch for batch in batches()),
    "stream": lambda: Stream(batches()),
    "iterable rows": lambda: DataLoader(Rows(), batch_size=50),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_the_backbone_runs_once_over_each_loader(kind: str) -> None:
    model, loader, held_out = converted(), LOADERS[kind](), batches(X2, Y2, size=60)
    seen = rows_through(model)
    report = fit(model, loader, held_out)
    assert seen == [50] * 6 + [60] * 2
    assert (report.count, report.held_out) == (300, 120)


def test_each_call_with_a_loader_runs_the_backbone_again() -> None:
    """Nothing is kept between calls, so that a change of the data or of the network is never missed."""
    model, loader = converted(), batches()
    fit(model, loader)
    seen = rows_through(model)
    fit(model, loader)
    assert seen == [50] * 6


def test_features_that_were_computed_before_need_no_backbone() -> None:
    model = converted()
    features, held_out = (hetsngp.extract_features(model, b) for b in (batches(), batches(X2, Y2)))
    seen = rows_through(model)
    report = fit(model, features, held_out)
    other = converted()
    assert fit(other, batches(), batches(X2, Y2)) == report
    seen.clear()
    assert same_bits(model.predict(X), other.predict(X))
    assert seen == [300]
    seen.clear()
    changes: list[dict[str, Any]] = [{"amplitude": 3.0}, {"rank": 1, "epochs": 3}, {"method": "sngp"}]
    for options in changes:
        again = fit(model, features, held_out, **options)
        assert (again.count, again.held_out) == (300, 120)
    fit(model, features, ONE_PART)  # the same training data, split another way
    assert seen == []


def step(model: hetsngp.Classifier) -> None:
    optimizer = torch.optim.SGD(model.backbone.parameters(), lr=0.1)
    model.dataset_size = 300
    model.train().loss(X, Y).backward()
    optimizer.step()
    optimizer.zero_grad()


def load_other_weights(model: hetsngp.Classifier, *, assign: bool = False) -> None:
    other = network(seed=5)
    other[-1] = nn.Identity()
    state = {f"network.{name}": t for name, t in other.state_dict().items()}
    model.backbone.load_state_dict(state, assign=assign)


def shift_a_buffer(model: hetsngp.Classifier) -> None:
    model.backbone.get_submodule("network.1").running_mean.add_(1.0)


def run_in_train_mode(model: hetsngp.Classifier) -> None:
    norm = model.backbone.get_submodule("network.1")
    norm.train()
    model.backbone(X[:50])
    norm.eval()


def replace_a_tensor(model: hetsngp.Classifier) -> None:
    model.backbone.get_submodule("network.0").weight = nn.Parameter(torch.ones(16, 2))


def in_half(model: hetsngp.Classifier) -> None:
    model.backbone.half().float()


CHANGES: dict[str, tuple[bool, Callable[[hetsngp.Classifier], None]]] = {
    "a step of training": (False, step),
    "load_state_dict": (True, load_other_weights),
    "assigned": (True, lambda model: load_other_weights(model, assign=True)),
    "a buffer": (True, shift_a_buffer),
    "statistics": (True, run_in_train_mode),
    "another tensor": (True, replace_a_tensor),
    "rounded": (True, in_half),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_backbone_that_changed_gives_other_features(change: str) -> None:
    """The new head is fitted on the features as they are now."""
    freeze, act = CHANGES[change]
    model, loader = converted(freeze=freeze), batches()
    fit(model, loader)
    act(model)
    fit(model, loader)
    other = copy.deepcopy(model)
    fit(other, batches())
    assert same_bits(model.predict(X), other.predict(X))


def test_a_loader_that_changed_gives_other_features() -> None:
    model, loader = converted(), Stream(batches())
    fit(model, loader)
    loader.items = batches(X2, Y2)
    assert fit(model, loader).count == 120


def test_nothing_keeps_the_backbone_or_the_loader_alive() -> None:
    model, loader = converted(), Stream(batches())
    fit(model, loader)
    gone = [weakref.ref(each) for each in (model, model.backbone, loader)]
    del model, loader
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_forget_features_has_nothing_to_do() -> None:
    model = converted()
    with pytest.warns(DeprecationWarning, match=r"pass fit_head the result of hetsngp\.extract_features"):
        hetsngp.forget_features(model)


def test_a_loader_that_broke_off_can_be_used_again() -> None:
    model = converted()
    loader = Stream([*batches(), "no batch"])
    with pytest.raises(TypeError, match="got str"):
        fit(model, loader)
    loader.items.pop()
    assert fit(model, loader).count == 300


# --- the backbone is left alone -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "training", "calibration"),
    [
        *((made, training, None) for made in ("frozen", "unfrozen", "built") for training in (False, True)),
        *(("unfrozen", True, calibration) for calibration in (ONE_PART, FOLDS)),
    ],
)
def test_no_bit_of_the_backbone_changes(made: str, training: bool, calibration: float | None) -> None:
    model = toy.build("hetsngp", 2) if made == "built" else converted(freeze=made == "frozen")
    if made == "unfrozen":
        step(model)  # so that statistics are no longer those of a fresh network
    model.train(training)
    before, learn = state_of(model.backbone), [p.requires_grad for p in model.backbone.parameters()]
    modes = [module.training for module in model.backbone.modules()]
    old = model.head
    fit(model, batches(), calibration, epochs=1)
    assert unchanged(model.backbone, before)
    assert [p.requires_grad for p in model.backbone.parameters()] == learn == [made != "frozen"] * len(learn)
    assert [module.training for module in model.backbone.modules()] == modes
    assert {module.training for module in (model, *model.head.modules())} == {training}
    assert all(p.grad is None for p in model.parameters())
    assert model.head is not old
    assert all(p.requires_grad for p in model.head.parameters())


def test_every_module_of_the_backbone_keeps_its_own_mode() -> None:
    """BatchNorm is often held in eval mode while the rest is fine-tuned."""
    model = converted(freeze=False).train()
    model.backbone.get_submodule("network.1").eval()
    modes = {name: module.training for name, module in model.backbone.named_modules()}
    assert set(modes.values()) == {True, False}
    fit(model, batches())
    assert {name: module.training for name, module in model.backbone.named_modules()} == modes


def test_dropout_is_off_while_features_are_made() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 12), nn.Dropout(0.5), nn.Linear(12, 3))

    model = converted("deterministic", freeze=False, make=make).train()
    seen: list[Tensor] = []
    model.backbone.register_forward_hook(lambda _, args, h: seen.append(h))
    fit(model, batches())
    layer = model.backbone.get_submodule("network.0")
    torch.testing.assert_close(torch.cat(seen), X @ layer.weight.mT + layer.bias)


def test_what_the_model_knows_afterwards() -> None:
    model = converted("hetsngp", amplitude=4.0)
    report = fit(model, batches(), batches(X2, Y2), method="sngp", length_scale=2.0)
    assert model.config["method"] == "sngp"
    assert model.config["num_classes"] == 2
    options = model.config["options"]
    assert (options["amplitude"], options["length_scale"], options["random_features"]) == (4.0, 2.0, 32)
    assert model.head.latent.kernel.amplitude == 4.0
    assert float(model.head.latent.length_scale) == 2.0
    assert model.head.noise is None
    assert model.calibration == asdict(report)
    assert float(model.temperature) == pytest.approx(report.temperature)
    assert model.dataset_size == 300
    assert model.conversion.method == "sngp"
    assert bool(model.head.posterior.fitted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prediction = model.predict(X)
    torch.testing.assert_close(prediction.probs.sum(1), torch.ones(300))
    fit(model, batches(), rank=1)  # what is not given stays as it is
    assert model.config["method"] == "sngp"
    assert model.config["options"]["amplitude"] == 4.0
    assert model.config["options"]["rank"] == 1
    assert model.calibration["held_out"] == 0


def test_the_head_has_the_precision_of_the_one_it_replaces() -> None:
    model = converted().double()
    # Of inducing features double precision keeps more.
    fit(model, batches(X.double(), Y), ONE_PART, features="random")
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert model.temperature.dtype == torch.float64
    single = converted()
    fit(single, batches(), ONE_PART, features="random")
    torch.testing.assert_close(
        model.predict(X.double()).probs.float(), single.predict(X).probs, atol=0.01, rtol=0.01
    )


def test_a_model_that_was_trained_since_is_fitted_afterwards() -> None:
    model = converted(freeze=False)
    fit(model, batches())
    for _ in range(2):
        step(model)
        fit(model, batches())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.predict(X)
        step(model)
        with pytest.warns(UserWarning, match="trained after fit_posterior"):
            model.predict(X)


def test_the_model_can_be_trained_further_as_a_whole() -> None:
    model = converted(freeze=False)
    fit(model, batches())
    before = state_of(model)
    train(model, batches(), epochs=1)
    moved = {name for name, t in model.state_dict().items() if not torch.equal(t, before[name])}
    assert any(name.startswith("backbone.") for name in moved)
    assert any(name.startswith("head.") for name in moved)


@pytest.mark.parametrize("method", SINGLE)
def test_every_method_fits_and_comes_back_from_disk(method: str, tmp_path: Path) -> None:
    """Also where the model was made with another: what is written is the head that is there."""
    model, loader = converted("sngp" if method == "deterministic" else "deterministic", 3), batches(X, Y3)
    report = fit(model, loader, ONE_PART, epochs=20, lr=1e-2, method=method)
    assert report.held_out == 120
    prediction = model.predict(X2)
    assert prediction.labels.eq(toy.blobs(3, 40, seed=1)[1]).float().mean() > 0.8
    hetsngp.save(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model"]["method"] == method
    loaded = hetsngp.load(tmp_path, backbone=network(seed=9))
    assert same_bits(loaded.predict(X2), prediction)
    assert loaded.calibration == json.loads(json.dumps(asdict(report)))
    assert loaded.dataset_size == model.dataset_size == 180
    assert fit(loaded, loader, ONE_PART, epochs=20, lr=1e-2) == report  # and can be fitted again
    assert same_bits(loaded.predict(X2), prediction)


# --- the same by hand -----------------------------------------------------------------------------------


class Shuffled:
    """Parts of nearly equal size, in a new order each time."""

    def __init__(self, tensors: tuple[Tensor, ...], size: int, seed: int) -> None:
        self.tensors, self.size, self.generator = tensors, size, torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        order = torch.randperm(len(self.tensors[0]), generator=self.generator)
        parts = order.tensor_split(-(-len(order) // self.size))
        return ((*(t[rows] for t in self.tensors),) for rows in parts)


RANDOM = {"features": "random", "normalization": None}


@pytest.mark.parametrize(
    ("method", "make", "weighted", "kernel"),
    [
        *((method, network, False, RANDOM) for method in SINGLE),
        ("hetsngp", network, True, RANDOM),
        ("posterior_network", network, True, RANDOM),
        ("hetsngp", images, False, RANDOM),
        ("hetsngp", network, True, {"features": "inducing", "normalization": None}),
        ("sngp", images, False, {"features": "inducing", "normalization": "power"}),
    ],
)
def test_it_is_what_one_would_do_by_hand(
    method: str, make: Callable[[], nn.Module], weighted: bool, kernel: dict[str, Any]
) -> None:
    """Features, a head of the method on them, training, the posterior, calibration."""
    model = converted("sngp", 3, make=make)
    more = (0.5 + torch.rand(300),) if weighted else ()
    data, held_out = [(X, Y3, *more)], [(X2, Y3_2)]
    report = fit_head(
        model, data, held_out, method=method, epochs=20, lr=0.05, patience=2, batch_size=64, seed=7, **kernel
    )

    features = hetsngp.extract_features(model, data)
    held_h = hetsngp.extract_features(model, held_out).h
    weight = more[0] if weighted else torch.ones(300)
    _, head, order, points = np.random.default_rng(7).integers(2**31, size=4).tolist()
    # On the frozen backbone itself: whatever depends on the kind of network is seen from there.
    generator = torch.Generator().manual_seed(head)
    settings: dict[str, Any] = {"amplitude": 5.0, **TINY, **kernel}
    view = hetsngp.build(method, model.backbone, 3, generator=generator, **settings).on_features()
    view.head.adapt(features.h, torch.Generator().manual_seed(order))
    view.dataset_size = float(weight.double().sum())
    view.class_counts = torch.stack([weight[c == Y3].double().sum() for c in range(3)])
    mean_one = (weight.double() / weight.double().mean()).float()
    ones = torch.ones(len(held_h))
    fitted, x, held_x = view, features.h, held_h
    if kernel["features"] == "inducing":
        fitted, (x, held_x) = precomputed(view, [features.h, held_h])
    history = train(
        fitted,
        Shuffled((x, Y3, mean_one), 64, order),
        epochs=20,
        lr=0.05,
        gp_lr_multiplier=3.0,
        generator=torch.Generator().manual_seed(points),
        validation=[(held_x, Y3_2, ones)],
        patience=2,
    )
    expected = hetsngp.fit_posterior(fitted, [(x, Y3, weight)], [(held_x, Y3_2, ones)], tolerance=0.001)
    assert len(history) < 20  # it did stop
    assert report == expected
    assert same_bits(model.on_features().predict(held_h[:40]), view.predict(held_h[:40]))
    few = hetsngp.extract_features(model, [(X2[:40], Y3_2[:40])])
    assert same_bits(model.predict(X2[:40]), view.predict(few.h))
    assert model.dataset_size == view.dataset_size


def test_all_epochs_are_run_where_nothing_is_held_out() -> None:
    """With learning rates that follow the cosine to its end."""
    model = converted("deterministic", 3)
    fit_head(model, [(X, Y3)], None, epochs=5, batch_size=300, lr=0.1, weight_decay=0.3, patience=1)
    features = hetsngp.extract_features(model, [(X, Y3)])
    head = np.random.default_rng(0).integers(2**31, size=4)[1]
    start = torch.Generator().manual_seed(int(head))
    linear = hetsngp.build("deterministic", model.backbone, 3, generator=start, **TINY).head.latent.linear
    optimizer = torch.optim.AdamW(linear.parameters(), weight_decay=0.3)
    for epoch in range(5):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 + np.cos(np.pi * epoch / 5))
        optimizer.zero_grad()
        F.cross_entropy(linear(features.h), Y3).backward()
        optimizer.step()
    got = model.head.latent.linear
    torch.testing.assert_close(got.weight, linear.weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.bias, linear.bias, rtol=1e-4, atol=1e-5)


# --- seeds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calibration", [None, ONE_PART, FOLDS])
def test_the_seed_decides_and_nothing_else(calibration: float | None) -> None:
    def fitted(seed: int) -> tuple[PosteriorReport, Any]:
        model = converted()
        report = fit(model, batches(), calibration, seed=seed, epochs=1)
        return report, model.predict(X[:50])

    torch.manual_seed(1)
    one, prediction = fitted(0)
    torch.manual_seed(2)
    two, again = fitted(0)
    assert one == two
    assert same_bits(prediction, again)
    three, other = fitted(1)
    assert (other.probs - prediction.probs).abs().max() > 1e-3
    assert calibration is None or three.nll != one.nll


@pytest.mark.parametrize("method", SINGLE)
def test_no_draw_is_taken_from_the_global_generators(method: str) -> None:
    model = converted()
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    fit(model, batches(), ONE_PART, method=method)
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpy_before).all()  # noqa: NPY002


# --- what it learns -------------------------------------------------------------------------------------


def test_a_head_on_a_random_network_learns_and_is_uncertain_far_away() -> None:
    x, y = toy.blobs(3, 120)
    model = converted(classes=3, random_features=128)
    fit_head(model, batches(x, y), ONE_PART)
    new, labels = toy.blobs(3, 50, seed=2)
    prediction = model.predict(new)
    assert prediction.labels.eq(labels).float().mean() > 0.97
    between = torch.tensor([[0.0, 0.0], [-3.0, 0.0], [1.5, -9.0], [9.0, 9.0]])
    assert model.predict(between).model_uncertainty.min() > 3 * prediction.model_uncertainty.median()


# --- calibration ----------------------------------------------------------------------------------------


def test_held_out_data_come_in_any_form() -> None:
    expected = None
    for form in ("list", "loader", "features"):
        model = converted()
        held_out: Any = batches(X2, Y2, size=120)
        if form == "loader":
            held_out = DataLoader(TensorDataset(X2, Y2), batch_size=120)
        elif form == "features":
            held_out = hetsngp.extract_features(model, held_out)
        report = fit(model, batches(), held_out)
        expected = expected or report
        assert report == expected
    assert expected is not None
    assert expected.held_out == 120


@pytest.mark.parametrize(
    ("rows", "share", "trained_on", "held_out"),
    [
        (300, 0.4, 180, 120),
        (300, np.float32(0.4), 180, 120),
        (300, 0.334, 200, 100),
        (300, 0.33, 300, 300),  # 99 rows are too few: by folds, and every row is held out once
        (300, 0.1, 300, 300),
        (60, 0.1, 60, 60),
        (20, 0.5, 20, 20),
        (19, 0.5, 19, 0),  # a temperature would be a guess
        (300, 0.0, 300, 0),
        (300, 0, 300, 0),
        (300, None, 300, 0),
    ],
)
def test_how_much_is_held_out(rows: int, share: float | None, trained_on: int, held_out: int) -> None:
    model = converted()
    report = fit(model, batches(X[:rows], Y[:rows]), share, epochs=1)
    assert report.count == model.dataset_size == trained_on
    assert report.held_out == held_out
    assert (report.nll is None) == (held_out == 0)
    if held_out == 0:
        assert report.temperature == 1.0
        assert "not calibrated" in str(report)


def test_the_default_is_a_tenth() -> None:
    x, y = toy.blobs(2, 600)
    report = fit_head(converted("deterministic"), batches(x, y, size=400), epochs=1)
    assert report.held_out == 120


def test_equal_rows_are_held_out_together() -> None:
    """A row in training and its twin in the held-out part: fit_posterior would say so."""
    model = converted()
    x, y = X[:150].repeat(2, 1), Y[:150].repeat(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = fit(model, batches(x, y, size=70), ONE_PART)  # the twins stand in different batches
        # 150 different rows, of which a share is drawn; too few, so each is held out once, with its twin
        assert report.held_out == 300
        x, y = X.repeat(2, 1), Y.repeat(2)
        assert fit(model, batches(x, y, size=70), ONE_PART).held_out == 240


@pytest.mark.parametrize("share", [1.0, 1, 1.5, -0.1, True, False, float("nan"), float("inf"), "x"])
def test_a_share_is_a_share(share: Any) -> None:
    model = converted()
    with pytest.raises((TypeError, ValueError), match="calibration"):
        fit(model, batches(), share)


def test_a_bad_share_is_refused_before_the_backbone_runs() -> None:
    """Which may take an hour."""
    model = converted()
    seen = rows_through(model)
    with pytest.raises(ValueError, match="share of the examples"):
        fit(model, batches(), 1.0)
    assert seen == []


@pytest.mark.parametrize("method", ["hetsngp", "deterministic"])
@pytest.mark.parametrize("form", ["list", "loaders", "features"])
def test_training_data_are_not_held_out_data(form: str, method: str) -> None:
    model = converted(method)
    data = TensorDataset(X, Y)
    loader = held_out = batches()
    if form == "loaders":
        loader, held_out = DataLoader(data, batch_size=50, shuffle=True), DataLoader(data, batch_size=60)
    elif form == "features":
        loader = held_out = hetsngp.extract_features(model, batches())
    seen = rows_through(model)
    with pytest.raises(ValueError, match="calibration is the training data"):
        fit(model, loader, held_out)
    assert seen == []


def test_copies_of_training_data_are_noticed() -> None:
    with pytest.warns(UserWarning, match="100% of the calibration examples are also in the training data"):
        fit(converted(), batches(), batches(X[:120], Y[:120]))


def test_duplicates_up_to_rounding_are_noticed() -> None:
    """Examples are compared by h alone: with a short length scale φ differs by far more than h."""
    model = converted()
    features = hetsngp.extract_features(model, batches())
    noise = 1e-6 * torch.randn(features.h.shape, generator=torch.Generator().manual_seed(0))
    nearly = FeatureSet(features.h * (1 + noise), features.y)
    with pytest.warns(UserWarning, match="(9[5-9]|100)% of the calibration examples are also in"):
        fit_head(model, features, nearly, random_features=256, length_scale=0.5)


# --- weights --------------------------------------------------------------------------------------------


def test_a_weight_of_two_is_a_row_twice() -> None:
    """In the numbers, and in the posterior of a head that stays where it begins."""
    plain: dict[str, Any] = {"length_scale": 1.0, "batch_size": 1000, "lr": 1e-20}
    once, heavy, twice = converted(), converted(), converted()
    fit(once, [(X, Y)], **plain)
    report = fit(heavy, [(X, Y, torch.full((300,), 2.0))], **plain)
    assert report.count == heavy.dataset_size == 600
    assert fit(twice, [(X.repeat(2, 1), Y.repeat(2))], **plain).count == 600
    features = hetsngp.extract_features(once, [(X2, Y2)]).h
    covariance = [model.latent(features).covariance() for model in (once, heavy, twice)]
    torch.testing.assert_close(covariance[1], covariance[2], rtol=1e-3, atol=1e-4)
    assert (covariance[0] - covariance[1]).abs().max() > 0.1


@pytest.mark.parametrize("calibration", [None, ONE_PART, FOLDS])
def test_weights_are_counted(calibration: float | None) -> None:
    weight = torch.arange(300) % 3 + 0.5
    report = fit(converted(), batches(X, Y, weight), calibration)
    total = float(weight.sum())
    assert report.count + report.held_out == pytest.approx(total if calibration != FOLDS else 2 * total)


@pytest.mark.parametrize("calibration", [None, ONE_PART, FOLDS])
def test_rows_of_weight_zero_are_not_there(calibration: float | None) -> None:
    junk = torch.full((60, 2), 40.0) * torch.randn(60, 2)
    x, y = torch.cat([junk, X]), torch.cat([torch.randint(2, (60,)), Y])
    weight = torch.cat([torch.zeros(60), torch.ones(300)])
    one, two = converted(), converted()
    report = fit(one, batches(x, y, weight, size=60), calibration)
    expected = fit(two, batches(size=60), calibration)
    assert (report.count, report.held_out) == (expected.count, expected.held_out)
    assert same_bits(one.predict(X), two.predict(X))


def test_features_with_weights_of_zero_are_not_there_either() -> None:
    model = converted()
    features = hetsngp.extract_features(model, [(X, Y)])
    keep = torch.arange(300) % 2
    some = FeatureSet(features.h, features.y, keep.float())
    report = fit(model, some, ONE_PART)
    assert report.count == report.held_out == 150  # so few that they are held out by folds


# --- labels of other kinds ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "calibration"),
    [
        *(("deterministic", calibration) for calibration in (None, ONE_PART, FOLDS, "data")),
        ("sngp", FOLDS),
        ("hetsngp", ONE_PART),
    ],
)
def test_several_labels_at_once(method: str, calibration: Any) -> None:
    """With labels that are not quite sure: 0.95 and 0.05."""
    labels = 0.05 + 0.9 * MULTI_HOT
    model = converted(method, 3, link="sigmoid")
    if calibration == "data":
        calibration = batches(X[200:], labels[200:])
        report = fit(model, batches(X[:200], labels[:200]), calibration, epochs=25, lr=1e-2)
        assert report.held_out == 100
    else:
        report = fit(model, batches(X, labels), calibration, epochs=25, lr=1e-2)
        assert report.held_out == {None: 0, ONE_PART: 120, FOLDS: 300}[calibration]
    prediction = model.predict(X)
    right = (prediction.probs > 0.5) == MULTI_HOT.bool()
    assert right[:, :2].float().mean() > 0.9
    assert not torch.allclose(prediction.probs.sum(1), torch.ones(300), atol=0.1)


def test_the_link_may_change_with_the_head() -> None:
    """Labels are those of the new head; the old one has no say."""
    model = converted("deterministic", 3)
    seen = rows_through(model)
    several, one = batches(X, MULTI_HOT), batches(X, Y3)
    fit(model, several, link="sigmoid")
    assert model.head.sigmoid
    fit(model, one, link="softmax")
    assert not model.head.sigmoid
    with pytest.raises(ValueError, match="link='sigmoid' takes multi-hot labels"):
        fit(model, one, link="sigmoid")
    assert seen == [50] * 13  # wrong labels are found in the first batch


class LikeHuggingFace(nn.Module):
    """Takes keyword arguments and would compute a loss of its own from labels."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()[:-1]
        self.classifier = nn.Linear(12, 3)

    def forward(self, values: Tensor, mask: Tensor, labels: Tensor | None = None) -> Any:
        assert labels is None
        return SimpleNamespace(logits=self.classifier(self.body(values * mask)), loss=None)


@pytest.mark.parametrize("name", ["labels", "label"])
def test_batches_may_be_dicts(name: str) -> None:
    def dicts(x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
        return [{"values": a, "mask": torch.ones_like(a), name: b} for a, b in batches(x, y)]

    example = dicts(X[:2], Y[:2])[0]
    generator = torch.Generator().manual_seed(3)
    model = hetsngp.convert(
        LikeHuggingFace(), "hetsngp", example, num_classes=2, freeze=True, generator=generator, **TINY
    )
    report = fit(model, dicts(X, Y), dicts(X2, Y2))
    plain = converted()
    assert report == fit(plain, batches(X, Y), batches(X2, Y2))
    whole = {"values": X, "mask": torch.ones_like(X)}
    assert same_bits(model.predict(whole), plain.predict(X))


class TakesADict(nn.Module):
    """A backbone of the user's own, which gets the batch as it is: but for the labels."""

    num_features = 12

    def __init__(self) -> None:
        super().__init__()
        self.body = network()[:-1]

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        assert set(batch) == {"values"}
        return self.body(batch["values"])


def test_labels_in_a_dict_are_not_the_backbones_business() -> None:
    model = hetsngp.build("sngp", TakesADict(), 2, **TINY)
    assert fit(model, [{"values": x, "labels": y} for x, y in batches()]).count == 300


# --- errors ---------------------------------------------------------------------------------------------


H = torch.randn(300, 12, generator=torch.Generator().manual_seed(0))
NOT_FINITE = X.index_fill(0, torch.tensor([7]), float("nan"))

BAD: dict[str, tuple[Callable[[], tuple[Any, dict[str, Any]]], type[Exception], str]] = {
    "option": (lambda: (batches(), {"rnk": 2}), ValueError, "unknown option 'rnk'.*did you mean 'rank'"),
    "value": (lambda: (batches(), {"rank": 0}), ValueError, "rank must be a positive whole number"),
    "method": (lambda: (batches(), {"method": "sngpp"}), ValueError, "unknown method.*did you mean 'sngp'"),
    "epochs": (lambda: (batches(), {"epochs": 0}), ValueError, "epochs must be"),
    "batch_size": (lambda: (batches(), {"batch_size": 0}), ValueError, "batch_size must be"),
    "lr": (lambda: (batches(), {"lr": -1.0}), ValueError, "lr must be"),
    "patience": (
        lambda: (batches(), {"patience": 0, "calibration": 0.4}),
        ValueError,
        "patience must be a positive whole number",
    ),
    "labels": (lambda: (batches(X, Y + 1), {}), ValueError, "labels from 1 to 2.*num_classes=2"),
    "float labels": (lambda: (batches(X, Y.float()), {}), TypeError, "whole class numbers"),
    "no labels": (lambda: (list(X.split(50)), {}), TypeError, r"pairs \(x, y\)"),
    "dict without labels": (lambda: ([{"x": X}], {}), TypeError, "no 'labels'"),
    "dataset": (lambda: (TensorDataset(X, Y), {}), TypeError, "loader is a Dataset: wrap it"),
    "empty": (lambda: ([], {}), ValueError, "loader is empty"),
    "used up": (lambda: (iter([]), {}), ValueError, "loader is empty"),
    "nan": (lambda: (batches(NOT_FINITE, Y), {}), ValueError, "NaN or infinite values, first in row 7"),
    "weights": (lambda: ([(X, Y, -torch.ones(300))], {}), ValueError, "weights must be finite and not neg"),
    "weights of zero": (lambda: ([(X, Y, torch.zeros(300))], {}), ValueError, "every weight .* is zero"),
    "width": (lambda: (FeatureSet(H[:, :5], Y), {}), ValueError, r"\(300, 5\).*\(n, 12\)"),
    "features of images": (lambda: (FeatureSet(H[:, :, None], Y), {}), ValueError, r"\(300, 12, 1\)"),
    "features' labels": (lambda: (FeatureSet(H, Y + 1), {}), ValueError, "labels from 1 to 2"),
    "features' negative labels": (lambda: (FeatureSet(H, Y - 1), {}), ValueError, "labels from -1 to 0"),
    "features' float labels": (lambda: (FeatureSet(H, Y.float()), {}), TypeError, "whole class numbers"),
    "too few labels": (lambda: (FeatureSet(H, Y[:100]), {}), ValueError, "100.*300|300.*100"),
    "too few weights": (lambda: (FeatureSet(H, Y, torch.ones(9)), {}), ValueError, "weight.*9"),
    "no features": (lambda: (FeatureSet(H[:0], Y[:0]), {}), ValueError, "empty"),
    "one row held out": (
        lambda: (batches(), {"calibration": [(X[:1], Y[:1])]}),
        ValueError,
        "calibration holds one example",
    ),
    "held-out width": (lambda: (FeatureSet(H, Y), {"calibration": FeatureSet(H[:, :5], Y)}), ValueError, "5"),
    "held-out labels": (lambda: (batches(), {"calibration": [(X, Y + 1)]}), ValueError, "labels from 1 to 2"),
    "held-out dataset": (
        lambda: (batches(), {"calibration": TensorDataset(X, Y)}),
        TypeError,
        "calibration is a Dataset: wrap it",
    ),
    "nothing held out": (lambda: (batches(), {"calibration": []}), ValueError, "calibration is empty"),
}


def remembered_state(model: hetsngp.Classifier) -> Any:
    """Everything that a failure must not change."""
    known = copy.deepcopy((model.config, model.calibration, model.dataset_size, model.conversion))
    return model.head, known, [m.training for m in model.modules()], model._trained_since_fit


@pytest.mark.parametrize("mistake", BAD)
def test_a_mistake_is_explained_and_changes_nothing(mistake: str) -> None:
    make, kind, message = BAD[mistake]
    model = converted()
    fit(model, [(X, Y)], amplitude=5.0)
    model.train()
    before, state = remembered_state(model), state_of(model)

    def attempt() -> None:
        loader, options = make()
        fit(model, loader, **{"method": "sngp", "rank": 1, **options})

    with pytest.raises(kind, match=message):
        attempt()
    assert remembered_state(model) == before
    assert unchanged(model, state)


@pytest.mark.parametrize("option", [{"method": "sngp"}, {"method": "hetsngp"}, {"spectral_bound": 2.0}])
def test_a_backbone_to_be_trained_is_prepared_once(option: dict[str, Any]) -> None:
    model = converted("hetsngp", freeze=False)
    before, state, seen = remembered_state(model), state_of(model), rows_through(model)
    with pytest.raises(ValueError, match=f"{next(iter(option))} .*freeze=True"):
        fit(model, batches(), **option)
    assert remembered_state(model) == before
    assert unchanged(model, state)
    assert seen == []


@pytest.mark.parametrize("method", SEVERAL)
def test_a_model_of_several_inputs_is_refused(method: str) -> None:
    model = toy.build(method)
    before, state = remembered_state(model), state_of(model)
    with pytest.raises(TypeError, match=r"several inputs at once.*train it as a whole"):
        fit(model, batches())
    with pytest.raises(TypeError, match="several inputs at once"):
        fit(model, FeatureSet(torch.randn(300, 16), Y))
    assert remembered_state(model) == before
    assert unchanged(model, state)


@pytest.mark.parametrize("method", SEVERAL)
def test_a_method_of_several_inputs_is_refused(method: str) -> None:
    """Before the backbone runs, and by a message that speaks of the method."""
    model = converted()
    before, state, seen = remembered_state(model), state_of(model), rows_through(model)
    with pytest.raises((TypeError, ValueError), match="several inputs") as error:
        fit(model, batches(), method=method)
    assert remembered_state(model) == before
    assert unchanged(model, state)
    assert seen == []
    assert method in str(error.value)


@pytest.mark.parametrize("kind", ["ensemble", "network", "view"])
def test_only_models_of_ours_have_heads(kind: str) -> None:
    given: Any = {
        "ensemble": lambda: hetsngp.Ensemble([converted(), converted()]),
        "network": network,
        "view": lambda: converted().on_features(),
    }[kind]()
    with pytest.raises(TypeError, match=r"this takes a model made by hetsngp\.convert or hetsngp\.build"):
        fit(given, batches())


def breaking(items: list[Any]) -> Iterator[Any]:
    """All but the last, and then Ctrl-C."""
    yield from items[:-1]
    raise KeyboardInterrupt


class Impatient(io.StringIO):
    """Presses Ctrl-C when it reads ``text``."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def write(self, text: str) -> int:
        if self.text in text:
            raise KeyboardInterrupt
        return super().write(text)


@pytest.mark.parametrize(
    "when", ["loader", "calibration", "epoch 1/", "epoch 3/", "folds  epoch 2/", "all examples", "posterior"]
)
def test_an_interrupted_fit_leaves_the_old_head(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted()
    fit(model, batches(), ONE_PART)
    model.train()
    before, state, prediction = remembered_state(model), state_of(model), model.predict(X)
    loader: Any = breaking(batches()) if when == "loader" else batches()
    folds = when in ("folds  epoch 2/", "all examples")
    calibration: Any = breaking(batches(X2, Y2)) if when == "calibration" else FOLDS if folds else ONE_PART
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Impatient(when))
        with pytest.raises(KeyboardInterrupt):
            fit(model, loader, calibration, method="sngp", amplitude=2.0, epochs=4, lr=1e-2, progress=True)
    assert remembered_state(model) == before
    assert unchanged(model, state)
    assert same_bits(model.predict(X), prediction)
    assert fit(model, batches(), ONE_PART).count == 180


# --- progress -------------------------------------------------------------------------------------------


def test_progress_is_printed_line_by_line_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetsngp.fitting.progress.SECONDS", -1.0)  # as if every batch took long
    report = fit(converted(), loader := batches(), batches(X2, Y2), epochs=3, progress=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "features of loader  50 examples (17%)"
    assert lines[5] == "features of loader  300 examples (100%)"
    assert lines[6] == "features of calibration  50 examples (33%)"
    assert [line.split("  ")[0] for line in lines[9:12]] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert "held-out NLL" in lines[9]
    assert lines[12:] == [str(report)]
    fit(model := converted(), Stream(loader), progress=True)
    assert capsys.readouterr().out.splitlines()[0] == "features of loader  50 examples"
    capsys.readouterr()
    fit(model, hetsngp.extract_features(model, batches()), FOLDS, epochs=2, progress=True)
    lines = capsys.readouterr().out.splitlines()  # no features this time
    assert lines[0].startswith("5 folds  epoch 1/2  loss")
    assert lines[2].startswith("all examples  epoch 1/")


@pytest.mark.parametrize("progress", [False, None])
def test_nothing_is_printed_where_nobody_watches(
    progress: bool | None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetsngp.fitting.progress.SECONDS", -1.0)
    for calibration in (batches(X2, Y2), FOLDS):
        fit(converted("deterministic"), batches(), calibration, progress=progress)
    assert capfd.readouterr() == ("", "")


def test_at_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stdout", shown)
    report = fit(converted(), batches(), ONE_PART)
    assert "epoch 2/2" in shown.getvalue()
    assert str(report) in shown.getvalue()


def test_batches_that_change_inside_their_list_are_seen() -> None:
    model, data = converted(), batches()
    first = fit(model, data, None)
    data.append((X2, Y2))
    second = fit(model, data, None)
    assert (first.count, second.count) == (300, 300 + len(X2))
    before = model.predict(X)
    data[0] = (data[0][0] + 1.0, data[0][1])
    fit(model, data, None)
    assert not same_bits(model.predict(X), before)


def test_weights_that_are_all_zero_are_refused() -> None:
    model = converted()
    features = hetsngp.extract_features(model, [(X, Y)])
    with pytest.raises(ValueError, match="every weight of loader is zero"):
        fit(model, FeatureSet(features.h, features.y, torch.zeros(300)))
