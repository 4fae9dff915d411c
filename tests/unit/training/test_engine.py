"""The engine on one CPU process against the plain loop: training, errors, loaders, what stays unchanged."""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract import toy
from tests.contract.toy import weights
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

pytest.importorskip("lightning", reason="pip install 'hetsngp[train]'")

import hetsngp
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.device_loader import Augmentation, DeviceLoader
from hetsngp.fitting.loop import train, train_with_schedule
from hetsngp.models.methods import METHODS
from hetsngp.training import CheckpointConfig, Engine, Hardware, Schedule, TrainConfig, hardware
from hetsngp.training.loaders import ResumableLoader, shard_loader
from hetsngp.training.moving_average import MovingAverage

TRAIN, HELD_OUT = toy.blobs(3, 8, flip=0.4), toy.blobs(3, 12, flip=0.4, seed=1)
CPU = Hardware(devices=1, accelerator="cpu")


def batches(x: Tensor, y: Tensor, size: int = 10) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def seed(value: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(value)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(CPU)


def different(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name, tensor in a.items() if not torch.equal(tensor, b[name])]


# --- images ---------------------------------------------------------------------------------------------


def images(count: int = 27, classes: int = 3) -> ImageArrays:
    g = seed()
    x = torch.randint(256, (count, 2, 8, 8), generator=g).byte()
    return ImageArrays(x, torch.randint(classes, (count,), generator=g), tuple("abcdef")[:classes])


def image_loader(count: int = 27, **options: Any) -> DeviceLoader:
    return DeviceLoader(images(count), 6, shuffle=True, augment=Augmentation(1), **options)


class Convolutions(nn.Module):
    num_features = 6

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 5, 3, padding=1), nn.Conv2d(5, 6, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv2(torch.relu(self.conv1(x)))).mean((2, 3))


def on_images(method: str, **options: Any) -> hetsngp.Classifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return hetsngp.build(method, Convolutions(), 3, **{**toy.TINY, **options})


# --- the same as the loop -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_one_process_is_the_plain_loop_to_the_bit(engine: Engine, method: str) -> None:
    """The best epoch by what is held out, too."""
    schedule = Schedule(6, lr=0.05, weight_decay=0.01, gp_lr_multiplier=2.0, warmup=1)
    model, twin = toy.build(method), toy.build(method)
    held_out = batches(*HELD_OUT, size=7)
    trained = engine.train(model, batches(*TRAIN), TrainConfig(schedule), held_out=held_out)
    history = train_with_schedule(twin, batches(*TRAIN), schedule, generator=seed(), validation=held_out)
    assert trained.history == history
    assert trained.model is model
    assert not model.training
    assert trained.resumed == 0
    assert trained.best == min(range(6), key=lambda i: history[i].held_out or 0.0) + 1
    assert different(weights(model), weights(twin)) == []
    assert [row["loss"] for row in trained.rows] == [result.loss for result in history]
    assert [row["updates"] for row in trained.rows] == [3, 6, 9, 12, 15, 18]


@pytest.mark.parametrize("method", ["sngp", "posterior_network"])
def test_a_shuffled_data_loader_is_fed_as_it_is(engine: Engine, method: str) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Subset(TensorDataset(*TRAIN), range(24)), 10, shuffle=True, generator=seed(3))

    model, twin = toy.build(method), toy.build(method)
    engine.train(model, loader(), TrainConfig(Schedule(3, lr=0.02)))
    train(twin, loader(), epochs=3, lr=0.02, generator=seed())
    assert different(weights(model), weights(twin)) == []


def test_the_seed_is_of_the_points(engine: Engine) -> None:
    states = []
    for value in (0, 0, 1):
        model = toy.build("hetsngp")
        engine.train(model, batches(*TRAIN), TrainConfig(Schedule(2, lr=0.02), seed=value))
        states.append(weights(model))
    assert different(states[0], states[1]) == []
    assert different(states[0], states[2]) != []


def test_a_model_can_be_trained_again(engine: Engine) -> None:
    model, twin = toy.build("hetsngp"), toy.build("hetsngp")
    for _ in range(2):
        engine.train(model, batches(*TRAIN), TrainConfig(Schedule(2, lr=0.02), bound_every=2))
        engine.fit_posterior(model, batches(*TRAIN))
        engine.train(twin, batches(*TRAIN), TrainConfig(Schedule(2, lr=0.02), bound_every=2))
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("patience", [1, 3])
def test_patience_stops(engine: Engine, patience: int) -> None:
    schedule = Schedule(40, lr=0.05)
    held_out = batches(*HELD_OUT)
    model, twin = toy.build("hetsngp"), toy.build("hetsngp")
    trained = engine.train(
        model, batches(*TRAIN), TrainConfig(schedule, patience=patience), held_out=held_out
    )
    values = [
        result.held_out
        for result in train_with_schedule(
            twin, batches(*TRAIN), schedule, generator=seed(), validation=held_out
        )
    ]
    best = last = 0
    for epoch in range(1, len(values)):
        best = epoch if values[epoch] < values[best] else best
        last = epoch
        if epoch - best >= patience:
            break
    assert len(trained.history) == last + 1 < 40
    assert trained.best == best + 1
    assert [result.held_out for result in trained.history] == values[: last + 1]


def test_the_posterior_is_that_of_fit_posterior(engine: Engine) -> None:
    model, twin = toy.trained("hetsngp", fit=False), toy.trained("hetsngp", fit=False)
    reports = (
        engine.fit_posterior(model, batches(*TRAIN), batches(*HELD_OUT), tolerance=0.02),
        hetsngp.fit_posterior(twin, batches(*TRAIN), batches(*HELD_OUT), tolerance=0.02),
    )
    assert reports[0] == reports[1]
    assert toy.same_bits(model.predict(HELD_OUT[0]), twin.predict(HELD_OUT[0]))


# --- averages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("watched", [False, True])
def test_the_average_is_what_is_held_against_the_data_and_kept(engine: Engine, watched: bool) -> None:
    """ā ← λā + (1−λ)a with λ = min(0.7, (1+t)/(10+t)), over the weights after each step, written out."""
    schedule = Schedule(4, lr=0.05)
    held_out = batches(*HELD_OUT)
    model, twin = toy.build("sngp").double(), toy.build("sngp").double()
    data = batches(TRAIN[0].double(), TRAIN[1])
    held_out = [(x.double(), y) for x, y in held_out]
    trained = engine.train(
        model, data, TrainConfig(schedule, ema_decay=0.7), held_out=held_out if watched else None
    )

    optimizer, g, average, t = schedule.make_optimizer(twin), seed(), {}, 0
    states, values = [], []
    for epoch in range(4):
        schedule.set_lr(optimizer, epoch)
        twin.train()
        for x, y in data:
            optimizer.zero_grad()
            twin.loss(x, y, generator=g).backward()
            optimizer.step()
            keep = min(0.7, (1 + t) / (10 + t)) if t else 0.0
            t += 1
            for name, value in weights(twin).items():
                quantity = value.is_floating_point() and "spectral_v" not in name
                same = name in average and average[name].shape == value.shape
                old = average[name] if quantity and same else value
                average[name] = keep * old + (1 - keep) * value if quantity else value
        states.append(dict(average))
        other = copy.deepcopy(twin)
        other.load_state_dict(average)
        other.eval()
        with torch.no_grad():
            x, y = HELD_OUT
            values.append(float(nn.functional.nll_loss(other(x.double()), y)))
    best = values.index(min(values)) if watched else 3
    if watched:
        assert [result.held_out for result in trained.history] == pytest.approx(values, rel=1e-9)
        assert trained.best == best + 1
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, states[best][name], rtol=1e-9, atol=1e-11, msg=name)


def test_an_average_forgets_shapes_that_change() -> None:
    layer = nn.BatchNorm1d(2, affine=False)
    average = MovingAverage(layer, 0.9)
    average.update()
    layer.running_mean = torch.ones(3)
    layer.running_var.fill_(3.0)
    layer.num_batches_tracked += 7
    average.update()
    with average.applied():
        assert layer.running_mean.tolist() == [1, 1, 1]
        assert layer.running_var.tolist() == pytest.approx([1 * 2 / 11 + 3 * 9 / 11] * 2)
        assert int(layer.num_batches_tracked) == 7
    assert layer.running_var.tolist() == [3, 3]


# --- devices --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ours", [True, False])
def test_channels_last_changes_memory_only(engine: Engine, ours: bool) -> None:
    config = TrainConfig(Schedule(3, lr=0.02), bound_every=2)
    loader = image_loader() if ours else [(x.clone(), y) for x, y in image_loader()]
    model, twin = on_images("hetsngp"), on_images("hetsngp")
    seen: list[bool] = []
    model.backbone.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].is_contiguous(memory_format=torch.channels_last))
    )
    other = Engine(Hardware(devices=1, accelerator="cpu", channels_last=True))
    got = other.train(model, loader, config, held_out=None)
    want = engine.train(twin, loader, config)
    assert all(seen)
    assert len(seen) >= 12
    assert model.backbone.conv2.weight.is_contiguous(memory_format=torch.channels_last)
    assert [r.loss for r in got.history] == pytest.approx([r.loss for r in want.history], rel=1e-5)


def backend(monkeypatch: pytest.MonkeyPatch, name: str) -> list[nn.Module]:
    """Let ``compile`` use another backend; the modules it was called for."""
    called, original = [], nn.Module.compile

    def compiled(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        called.append(self)
        assert kwargs == {"mode": None}  # CUDA graphs are for one GPU
        original(self, backend=name)

    monkeypatch.setattr(nn.Module, "compile", compiled)
    return called


@pytest.mark.parametrize("name", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["hetsngp", "deterministic"])
def test_a_compiled_backbone_trains_the_same(
    engine: Engine, method: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    called = backend(monkeypatch, name)
    config = TrainConfig(Schedule(3, lr=0.02), bound_every=2)
    held_out = DeviceLoader(images(7), 5)
    model, twin = on_images(method), on_images(method)
    got = Engine(Hardware(devices=1, accelerator="cpu", compile=True)).train(
        model, image_loader(), config, held_out=held_out
    )
    want = engine.train(twin, image_loader(), config, held_out=held_out)
    assert called == [model.backbone]
    # σ has been measured on one batch more
    assert [r.loss for r in got.history] == pytest.approx([r.loss for r in want.history], rel=1e-3)
    assert [r.held_out for r in got.history] == pytest.approx([r.held_out for r in want.history], rel=1e-3)
    assert model.backbone._compiled_call_impl is None
    assert weights(model).keys() == weights(twin).keys()
    pickle.loads(pickle.dumps(model))
    torch._dynamo.reset()


@pytest.mark.parametrize("method", METHODS)
def test_half_precision_is_of_the_backbone(engine: Engine, method: str) -> None:
    config = TrainConfig(Schedule(3, lr=0.02))
    model, twin = toy.build(method), toy.build(method)
    dtypes = set()
    inner = next(m for m in model.backbone.modules() if isinstance(m, nn.Linear))
    inner.register_forward_hook(lambda _, __, out: dtypes.add(out.dtype))
    mixed = Engine(Hardware(devices=1, accelerator="cpu", precision="bf16-mixed"))
    got = mixed.train(model, batches(*TRAIN), config)
    want = engine.train(twin, batches(*TRAIN), config)
    assert dtypes == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    losses = [r.loss for r in want.history]
    assert [r.loss for r in got.history] == pytest.approx(losses, rel=0.03)
    assert [r.loss for r in got.history] != losses


# --- what is left behind --------------------------------------------------------------------------------


def numbers() -> list[Any]:
    return [torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]]  # noqa: NPY002


class Drawing(Dataset[tuple[Tensor, Tensor]]):
    """Draws from everything, as transforms do."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(()) + np.random.rand() + random.random()  # noqa: NPY002
        return (TRAIN[0][index] + 0.01 * noise).float(), TRAIN[1][index]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("method", ["hetsngp", "posterior_network"])
def test_random_numbers_of_the_caller_are_left_alone(engine: Engine, method: str, fails: bool) -> None:
    def start() -> None:
        torch.manual_seed(5)
        np.random.seed(5)  # noqa: NPY002
        random.seed(5)
        numbers()

    start()
    want = numbers()
    start()
    config, loader = TrainConfig(Schedule(2)), DataLoader(Drawing(), 10, shuffle=True)
    if fails:
        with pytest.raises(RuntimeError):
            engine.train(
                toy.build(method), loader, config, held_out=[(torch.zeros(3, 7), torch.zeros(3).long())]
            )
    else:
        engine.train(toy.build(method), loader, config, held_out=batches(*HELD_OUT))
    assert numbers() == want


def test_the_callers_random_numbers_are_of_no_consequence(engine: Engine) -> None:
    states = []
    for value in (1, 2):
        torch.manual_seed(value)
        np.random.seed(value)  # noqa: NPY002
        random.seed(value)
        model = toy.build("hetsngp")
        engine.train(model, DataLoader(Drawing(), 10, shuffle=True), TrainConfig(Schedule(2)))
        states.append(weights(model))
    assert different(*states) == []


@pytest.mark.parametrize("method", METHODS)
def test_a_trained_model_is_an_ordinary_one(engine: Engine, method: str, tmp_path: Path) -> None:
    names = set(toy.build(method).state_dict())
    config = TrainConfig(Schedule(2, lr=0.02), bound_every=2, ema_decay=0.9)
    model = engine.train(toy.build(method), batches(*TRAIN), config, held_out=batches(*HELD_OUT)).model
    assert set(model.state_dict()) == names
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(getattr(module, "gather", None) is None for module in model.modules())
    assert model.backbone._compiled_call_impl is None
    engine.fit_posterior(model, batches(*TRAIN), batches(*HELD_OUT))
    engine.save(model, tmp_path / "model")
    want = model.predict(HELD_OUT[0])
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), hetsngp.load(tmp_path / "model")):
        assert toy.same_bits(twin.predict(HELD_OUT[0]), want)
        twin.train().loss(*TRAIN).backward()


def test_a_run_that_is_refused_leaves_the_model_as_it_was(engine: Engine, tmp_path: Path) -> None:
    checkpoints = CheckpointConfig(tmp_path, tensorboard=False)
    engine.train(toy.build("sngp"), batches(*TRAIN), TrainConfig(Schedule(1)), checkpoints=checkpoints)
    model = toy.build("sngp")
    names = set(model.state_dict())
    with pytest.raises(ValueError, match="holds a finished run with another configuration"):
        engine.train(model, batches(*TRAIN), TrainConfig(Schedule(2), bound_every=2), checkpoints=checkpoints)
    assert set(model.state_dict()) == names


# --- counts ---------------------------------------------------------------------------------------------


def test_counts_are_of_all_data(engine: Engine) -> None:
    """27 images in batches of 6: 3 of them are left out of an epoch, others of the next."""
    loader = image_loader()
    counts = torch.bincount(loader.dataset.labels, minlength=3)
    assert loader.drop_last
    model = on_images("posterior_network", latent_dim=2)
    assert model.dataset_size is None
    engine.train(model, loader, TrainConfig(Schedule(2)))
    assert model.dataset_size == 27
    assert model.class_counts.tolist() == counts.tolist()
    assert loader.epoch == 0  # nobody went through it


@pytest.mark.parametrize("method", ["hetsngp", "posterior_network"])
def test_what_the_model_was_told_is_kept(engine: Engine, method: str) -> None:
    told = {"class_counts": [5.0, 7.0, 9.0]} if method == "posterior_network" else {"dataset_size": 123}
    model = on_images(method, latent_dim=2, **told)
    engine.train(model, image_loader(), TrainConfig(Schedule(1)))
    if method == "posterior_network":
        assert model.class_counts.tolist() == [5, 7, 9]
    else:
        assert model.dataset_size == 123


# --- what is refused ------------------------------------------------------------------------------------


def refused(engine: Engine, loader: Any, error: type[Exception], words: str, **options: Any) -> None:
    model = toy.build(options.pop("method", "sngp"), **options.pop("options", {}))
    before = weights(model)
    config = options.pop("config", TrainConfig(Schedule(1)))
    with pytest.raises(error, match=words):
        engine.train(model, loader, config, **options)
    assert different(weights(model), before) == []


def test_training_data_are_not_held_out(engine: Engine) -> None:
    data = TensorDataset(*TRAIN)
    words = "calibration is the training data: give held-out data"
    loader = DataLoader(data, 10, shuffle=True)
    refused(engine, loader, ValueError, words, held_out=DataLoader(data, 10))
    data = batches(*TRAIN)
    refused(engine, data, ValueError, words, held_out=data)
    model = toy.trained("sngp", fit=False)
    with pytest.raises(ValueError, match=words):
        engine.fit_posterior(model, loader, loader)


def test_training_images_are_not_held_out(engine: Engine) -> None:
    loader = image_loader()
    with pytest.raises(ValueError, match="training data"):
        engine.train(
            on_images("sngp"), loader, TrainConfig(Schedule(1)), held_out=DeviceLoader(loader.dataset, 6)
        )


def test_patience_needs_something_to_watch(engine: Engine) -> None:
    words = r"patience needs held-out data: train\(..., held_out=loader\)"
    refused(engine, batches(*TRAIN), ValueError, words, config=TrainConfig(Schedule(2), patience=1))


def test_an_iterator_is_used_up_after_an_epoch(engine: Engine) -> None:
    words = "loader is a list_iterator, which is used up after an epoch: give one that starts again"
    refused(engine, iter(batches(*TRAIN)), TypeError, words)


def test_an_ensemble_is_refused(engine: Engine) -> None:
    members = hetsngp.Ensemble([toy.build("sngp"), toy.build("sngp")])
    with pytest.raises(TypeError, match="member"):
        engine.train(members, batches(*TRAIN), TrainConfig(Schedule(1)))  # type: ignore[arg-type]


def test_more_classes_than_the_model_has(engine: Engine) -> None:
    with pytest.raises(
        ValueError, match=r"the data have 4 classes, .*num_classes=3: build it with num_classes=4"
    ):
        engine.train(on_images("sngp"), DeviceLoader(images(20, 4), 5), TrainConfig(Schedule(1)))


X, Y = TRAIN
NAN = X.clone()
NAN[17, 1] = torch.nan
BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "label": ((X, Y + 1), {}, ValueError, r"y holds labels from \d to 3, but this model has num_classes=3"),
    "negative label": ((X, Y - 1), {}, ValueError, "y holds labels from -1"),
    "kind of label": ((X, Y.float()), {}, TypeError, "torch.float32"),
    "input": ((NAN, Y), {}, ValueError, "x has NaN or infinite values, first in row 7: clean or impute"),
    "negative weight": ((X, Y, -torch.ones(24)), {}, ValueError, "weights must be finite and not negative"),
    "infinite weight": ((X, Y, torch.full((24,), torch.inf)), {}, ValueError, "weights must be finite"),
    "two weights a row": ((X, Y, torch.ones(24, 2)), {}, ValueError, r"weights have shape \(10, 2\)"),
    "no label": ((X,), {}, TypeError, r"loader must yield pairs \(x, y\) or triples"),
    "class numbers for sigmoid": ((X, Y), {"link": "sigmoid"}, ValueError, "takes multi-hot labels"),
    "multi-hot": (
        (X, 2 * nn.functional.one_hot(Y, 3).float()),
        {"link": "sigmoid"},
        ValueError,
        r"multi-hot labels must lie in \[0, 1\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_batches_are_told_before_they_reach_the_device(
    engine: Engine, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, options, error, words = BAD[kind]
    met: list[Any] = []
    monkeypatch.setattr(
        "hetsngp.training.gradients.FabricGradients.add", lambda self, x, y, w, **_: met.append(x)
    )
    good = {"input": 1}.get(kind, 0)  # batches before the bad one
    monkeypatch.setattr(
        "hetsngp.fitting.loop.TrainState.add",
        lambda self, loss, rows: setattr(self, "batches", self.batches + 1),
    )
    monkeypatch.setattr("hetsngp.training.gradients.FabricGradients.step", lambda self: None)
    loader = DataLoader(TensorDataset(*tensors), 10)
    refused(engine, loader, error, words, options={"dataset_size": 24, **options})
    assert len(met) == good


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"accumulate": 0}, "accumulate must be a positive whole number"),
        ({"bound_every": 0.5}, "bound_every must be a positive whole number"),
        ({"clip": 0.0}, "clip must be a positive finite number"),
        ({"ema_decay": 1.0}, "ema_decay is between 0 and 1, e.g. 0.998, got 1.0"),
        ({"ema_decay": 0.0}, "ema_decay is between 0 and 1"),
        ({"patience": 0}, "patience must be a positive whole number"),
    ],
)
def test_bad_plans_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainConfig(Schedule(2), **options)


# --- hardware -------------------------------------------------------------------------------------------

TORCHRUN = {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}
SLURM = {"SLURM_NTASKS": "6", "SLURM_NNODES": "3", "SLURM_JOB_NAME": "train"}


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        ({}, {}, ("auto", 1)),
        ({"devices": 3}, {}, (3, 1)),
        ({"devices": 3, "nodes": 2}, {}, (3, 2)),
        ({"nodes": 2}, {}, ("auto", 2)),
        ({}, TORCHRUN, (4, 2)),
        ({}, {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1"}, (1, 1)),
        ({}, {**SLURM, **TORCHRUN}, (4, 2)),  # torchrun within a job
        ({}, SLURM, (2, 3)),
        ({"devices": 1}, SLURM, (1, 3)),
        ({"nodes": 1}, SLURM, (2, 1)),
        ({}, {**SLURM, "SLURM_JOB_NAME": "bash"}, ("auto", 1)),
        ({}, {**SLURM, "SLURM_JOB_NAME": "interactive"}, ("auto", 1)),
        ({}, {"SLURM_JOB_NAME": "train"}, ("auto", 1)),
        ({}, {"SLURM_NTASKS": "6", "SLURM_NNODES": "3"}, ("auto", 1)),
    ],
)
def test_processes_that_others_started_are_found(
    options: dict[str, Any], environment: dict[str, str], expected: tuple[int | str, int]
) -> None:
    assert Hardware(**options).started(environment) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"strategy": "dpp"},
            "unknown strategy 'dpp': choose one of 'auto', 'ddp', 'fsdp'; did you mean 'ddp'?",
        ),
        ({"precision": "16"}, "unknown precision '16': choose one of '32-true', 'bf16-mixed', '16-mixed'"),
        ({"devices": 0}, "devices must be a positive whole number, got 0"),
        ({"devices": "all"}, "devices must be a positive whole number, got 'all'"),
        ({"nodes": 0}, "nodes must be a positive whole number, got 0"),
    ],
)
def test_bad_hardware_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as error:
        Hardware(**options)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("options", "environment", "strategy", "devices"),
    [
        ({"devices": 1}, {}, "auto", 1),
        ({}, {}, "auto", "auto"),
        ({"devices": 2}, {}, "ddp", 2),
        ({"devices": 1, "nodes": 2}, {}, "ddp", 1),
        ({}, TORCHRUN, "ddp", 4),
        ({"strategy": "ddp", "devices": 1}, {}, "ddp", 1),
        ({"strategy": "fsdp", "devices": 3, "nodes": 2}, {}, 6, 3),
        ({"strategy": "fsdp", "accelerator": "cpu"}, {}, 1, 1),
        ({"strategy": "fsdp"}, TORCHRUN, 8, 4),
    ],
)
def test_fabric_is_asked_for_what_there_is(
    options: dict[str, Any],
    environment: dict[str, str],
    strategy: str | int,
    devices: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a number stands for a strategy: fsdp over so many processes."""
    asked: dict[str, Any] = {}

    def fabric(**arguments: Any) -> Any:
        asked.update(arguments)
        return SimpleNamespace(launch=lambda: asked.update(launched=True))

    monkeypatch.setattr("lightning.fabric.Fabric", fabric)
    for name in (*TORCHRUN, *SLURM):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    Hardware(**options, precision="bf16-mixed").launch()
    assert asked["launched"]
    assert (asked["devices"], asked["precision"]) == (devices, "bf16-mixed")
    if isinstance(strategy, str):
        assert asked["strategy"] == strategy
    else:
        assert type(asked["strategy"]).__name__ == "ModelParallelStrategy"
        assert asked["strategy"]._data_parallel_size == strategy
        assert asked["strategy"]._tensor_parallel_size == 1


def test_without_lightning_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning.fabric", None)
    with pytest.raises(
        ImportError, match=r"the training engine needs lightning: pip install 'hetsngp\[train\]'"
    ):
        Engine(CPU)


def test_fsdp_shares_out_the_smallest_parts_that_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "SHARD_PARAMETERS", 100)

    def big() -> nn.Linear:
        return nn.Linear(10, 10)

    inner = nn.Sequential(nn.Linear(2, 2), big())
    pair = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))  # big together only
    parts = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])  # never called itself
    module = nn.ModuleDict({"a": big(), "b": inner, "c": pair, "d": parts, "e": nn.Linear(3, 3)})
    found = hardware._blocks(module)
    assert [id(m) for m in found] == [id(m) for m in (module["a"], inner[1], pair)]


# --- loaders --------------------------------------------------------------------------------------------


def fabric(rank: int = 0, world: int = 1) -> Any:
    return SimpleNamespace(device=torch.device("cpu"), global_rank=rank, world_size=world)


LOADERS: dict[str, Callable[[], Any]] = {
    "list": lambda: batches(*TRAIN, size=5),
    "DataLoader": lambda: DataLoader(TensorDataset(*TRAIN), 5),
    "shuffled": lambda: DataLoader(TensorDataset(*TRAIN), 5, shuffle=True),
    "own generator": lambda: DataLoader(TensorDataset(*TRAIN), 5, shuffle=True, generator=seed(7)),
    "own sampler": lambda: DataLoader(
        TensorDataset(*TRAIN), 5, sampler=SubsetRandomSampler(range(24), generator=seed(8))
    ),
    "own batches": lambda: DataLoader(
        TensorDataset(*TRAIN),
        batch_sampler=BatchSampler(RandomSampler(range(24), generator=seed(9)), 5, drop_last=False),
    ),
    "transforms": lambda: DataLoader(Drawing(), 5, shuffle=True),
    "DeviceLoader": lambda: image_loader(30),
}


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize("skip", [0, 1, 3, 5])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_resumes_from_any_batch(kind: str, skip: int) -> None:
    model = on_images("deterministic") if kind == "DeviceLoader" else toy.build("deterministic")
    resumable = ResumableLoader(LOADERS[kind](), model, fabric())
    first, second = list(resumable.begin(1)), list(resumable.begin(2))
    before = resumable.rng_at_epoch_start
    third = list(resumable.begin(3))
    assert len(first) == len(second) == len(third) == 5
    assert same(first, second) == (kind in ("list", "DataLoader"))
    torch.manual_seed(99)
    np.random.seed(99)  # noqa: NPY002
    random.seed(99)
    later = ResumableLoader(LOADERS[kind](), model, fabric())  # as a new process makes it
    rest = later.begin(2, skip, before)
    assert len(rest) == 5  # as long as the whole epoch
    assert same(list(rest), second[skip:])
    assert same(list(later.begin(3)), third)


def test_fewer_batches_than_were_skipped() -> None:
    resumable = ResumableLoader(batches(*TRAIN), toy.build("sngp"), fabric())
    with pytest.raises(
        ValueError, match=r"stopped after 4 batches of epoch 2.*resume with the data it began"
    ):
        resumable.begin(2, 4, resumable.randomness())


def test_what_several_processes_cannot_share() -> None:
    model = toy.build("sngp")
    with pytest.raises(TypeError, match="2 processes cannot share a list: give a DataLoader, or"):
        ResumableLoader(batches(*TRAIN), model, fabric(0, 2))
    with pytest.raises(ValueError, match=r"batch_size=6 is for all 4 processes together.*choose 4 or 8"):
        ResumableLoader(image_loader(), on_images("sngp"), fabric(0, 4))


@pytest.mark.parametrize("count", [25, 27])
def test_uneven_parts_are_refused_for_training(count: int) -> None:
    """With batches of 6 one row is left, or three, for two processes."""
    with pytest.raises(ValueError, match="drop_last"):
        ResumableLoader(image_loader(count, drop_last=False), on_images("sngp"), fabric(0, 2))


# --- shares ---------------------------------------------------------------------------------------------


class Numbered(Dataset[tuple[Tensor, int]]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([float(index)]), index % 3


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [10, 11, 13])
@pytest.mark.parametrize("kind", ["sequential", "random", "subset", "device"])
def test_shares_hold_every_example_once(kind: str, count: int, world: int) -> None:
    expected, data = list(range(count)), Numbered(count)
    if kind == "subset":
        expected = list(range(1, count))
        loader: Any = DataLoader(data, 4, sampler=SubsetRandomSampler(expected))
    elif kind == "device":
        x = torch.arange(count).view(count, 1, 1, 1).byte().expand(-1, 1, 2, 2)
        arrays = ImageArrays(x.contiguous(), torch.arange(count) % 3, tuple("abc"))
        loader = DeviceLoader(arrays, 5, mean=[0.0], std=[1 / 255])
    else:
        loader = DataLoader(data, 4, shuffle=kind == "random")
    found, sizes = [], []
    for rank in range(world):
        share = list(shard_loader(loader, fabric(rank, world)))
        rows = [round(float(row.flatten()[0])) for x, _ in share for row in x]
        assert [int(label) for _, y in share for label in y] == [row % 3 for row in rows]
        assert all(len(y) <= loader.batch_size for _, y in share)
        found += rows
        sizes.append(len(rows))
    assert sorted(found) == expected
    assert max(sizes) - min(sizes) <= (len(loader) if kind == "device" else 1)


def test_a_share_keeps_how_examples_are_joined() -> None:
    def collate(rows: list[Any]) -> Any:
        return torch.stack([x for x, _ in rows]), torch.tensor([y for _, y in rows]), torch.ones(len(rows))

    share = shard_loader(DataLoader(Numbered(9), 4, collate_fn=collate), fabric(1, 2))
    assert [len(batch) for batch in share] == [3]
    assert [x.flatten().tolist() for x, _, _ in share] == [[1, 3, 5, 7]]


def test_what_cannot_be_shared_out() -> None:
    data = Numbered(9)
    others: list[Any] = [
        batches(*TRAIN),
        DataLoader(data, sampler=WeightedRandomSampler([1.0] * 9, 9)),
        DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 3, drop_last=False)),
    ]
    for loader in others:
        assert shard_loader(loader, fabric(0, 1)) is loader
        with pytest.raises(
            TypeError, match=r"processes cannot share a .*: give a DataLoader with shuffle=True or False"
        ):
            shard_loader(loader, fabric(0, 2))
    with pytest.raises(ValueError, match="3 examples cannot be shared by 4 processes: use fewer"):
        shard_loader(DataLoader(Numbered(3)), fabric(3, 4))


class Endless:
    def __iter__(self) -> Iterator[Any]:
        return iter(batches(*TRAIN))


def test_a_stream_can_be_trained_on_where_the_rate_stands_still(engine: Engine) -> None:
    model, twin = toy.build("sngp"), toy.build("sngp")
    engine.train(model, Endless(), TrainConfig(Schedule(2, lr=0.02)))
    engine.train(twin, batches(*TRAIN), TrainConfig(Schedule(2, lr=0.02)))
    assert different(weights(model), weights(twin)) == []
    refused(
        engine,
        Endless(),
        TypeError,
        "give a loader of known length",
        config=TrainConfig(Schedule(2, smooth=True)),
    )


def test_the_posterior_sees_images_as_they_are(engine: Engine) -> None:
    """Each once, whatever the loader does to them, and leaves out, in training."""
    loader = image_loader()
    assert loader.drop_last
    assert loader.augment is not None
    model = on_images("sngp")
    engine.train(model, loader, TrainConfig(Schedule(1)))
    twin = copy.deepcopy(model)
    plain = DeviceLoader(loader.dataset, 5, mean=loader.mean, std=loader.std)
    assert engine.fit_posterior(model, loader).count == len(loader.dataset)
    hetsngp.fit_posterior(twin, plain)
    x, _ = next(iter(plain))
    expected = twin.predict(x).latent_variance  # not eigenvectors, whose signs are anybody's
    torch.testing.assert_close(model.predict(x).latent_variance, expected, rtol=1e-3, atol=1e-5)
