"""What only a GPU can show: graphs, compiled networks, no waiting, and fsdp in one process."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hetsngp
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.device_loader import Augmentation, DeviceLoader
from hetsngp.frozen.features import FeatureSet
from hetsngp.functional.label_loss import label_loss
from hetsngp.nn.backbones import WideResNet
from hetsngp.nn.spectral_cache import cache_spectral_norms, remeasure_spectral_norms
from hetsngp.training import CheckpointConfig, Engine, Hardware, Schedule, TrainConfig
from hetsngp.training.gradients import MAX_GRAPHS, FabricGradients, GraphedLabelLoss, SpectralNormUpdate
from hetsngp.training.loaders import ResumableLoader

pytestmark = pytest.mark.gpu


def images(count: int = 256) -> ImageArrays:
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 3
    pixels = torch.randint(0, 100, (count, 3, 16, 16), generator=g, dtype=torch.uint8)
    pixels[torch.arange(count), labels] += 100  # the brightest channel is the class
    return ImageArrays(pixels, labels, ("red", "green", "blue"))


def model(method: str = "hetsngp", **options: Any) -> hetsngp.Classifier:
    backbone = WideResNet(10, 1, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    return hetsngp.build(method, backbone, 3, random_features=64, rank=2, **options)


def config(epochs: int = 4, **options: Any) -> TrainConfig:
    return TrainConfig(
        Schedule(epochs, lr=0.05, optimizer="sgd", smooth=True), **{"bound_every": 2, **options}
    )


def loader(data: ImageArrays | None = None) -> DeviceLoader:
    return DeviceLoader(data or images(), 64, shuffle=True, augment=Augmentation(2))


FAST = Hardware(devices=1, precision="bf16-mixed", channels_last=True, compile=True)


@pytest.mark.parametrize("method", ["deterministic", "hetsngp"])
def test_the_fast_way_learns_and_resumes(method: str, tmp_path: Path) -> None:
    data = images(320)
    train, held_out = loader(data.take(range(256))), DeviceLoader(data.take(range(256, 320)), 30)
    engine = Engine(FAST)
    short = engine.train(
        model(method), train, config(2), held_out=held_out, checkpoints=CheckpointConfig(tmp_path / "short")
    )
    assert len(short.history) == 2
    trained = engine.train(
        model(method), train, config(ema_decay=0.9), held_out=held_out, checkpoints=CheckpointConfig(tmp_path)
    )
    assert trained.history[-1].loss < trained.history[0].loss
    assert trained.history[-1].held_out < 0.3
    again = engine.train(
        model(method), train, config(ema_decay=0.9), held_out=held_out, checkpoints=CheckpointConfig(tmp_path)
    )
    assert again.resumed == 16
    for (name, a), b in zip(trained.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    engine.fit_posterior(trained.model, train, held_out)
    x, y = next(iter(held_out.to(engine.device)))
    assert (trained.model.predict(x).labels == y).float().mean() > 0.8


@pytest.mark.parametrize("mixup", [0.0, 0.5])
def test_a_step_never_waits_for_the_device(mixup: float) -> None:
    """After the first ones, which measure, capture, compile and fill caches."""
    engine = Engine(Hardware(devices=1, precision="bf16-mixed", channels_last=True))
    net = model(dataset_size=256).to(engine.device)
    resumable = ResumableLoader(loader(), net, engine.fabric, channels_last=True)
    generator = torch.Generator().manual_seed(0)
    averaging = config(ema_decay=0.9, mixup=mixup)
    steps = FabricGradients(engine.fabric, net, averaging, generator, channels_last=True, sharded=False)
    net.head.label_loss = GraphedLabelLoss()
    net.train()
    for epoch in range(1, 12):
        for index, (x, y) in enumerate(resumable.begin(epoch)):
            if epoch == 11 and index == 0:
                torch.cuda.set_sync_debug_mode("error")
            try:
                steps.add(x, y, None, group=1, complete=True)
                steps.step()
            except BaseException:
                torch.cuda.set_sync_debug_mode("default")
                raise
    torch.cuda.set_sync_debug_mode("default")


def test_the_fast_way_learns_soft_targets_with_mixup() -> None:
    data = images(320)
    data = replace(data, targets=0.9 * torch.nn.functional.one_hot(data.labels, 3) + 0.1 / 3)
    train, held_out = loader(data.take(range(256))), DeviceLoader(data.take(range(256, 320)), 30)
    engine = Engine(FAST)
    trained = engine.train(model(), train, config(6, mixup=0.2), held_out=held_out)
    engine.fit_posterior(trained.model, train, held_out)
    x, y = next(iter(held_out.to(engine.device)))
    assert (trained.model.predict(x).labels == y.argmax(1)).float().mean() > 0.8


def test_a_graph_refreshes_bounds_as_they_would_be_one_by_one() -> None:
    net = model(spectral_bound=0.5).cuda().train()
    cache_spectral_norms(net)
    x = torch.randn(8, 3, 16, 16, device="cuda")
    net.backbone(x)
    twin, refresh = copy.deepcopy(net), None
    for _ in range(3):
        with torch.no_grad():
            for p, q in zip(net.parameters(), twin.parameters(), strict=True):
                change = 0.01 * torch.randn_like(p)
                p.add_(change)
                q.add_(change)
        if refresh is None:
            refresh = SpectralNormUpdate(net, iterations=20)
            remeasure_spectral_norms(twin, 20)  # a capture is preceded by one call
        refresh()
        remeasure_spectral_norms(twin, 20)
        for (name, a), b in zip(net.named_buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3, msg=name)
    net.backbone(torch.randn(8, 3, 12, 12, device="cuda"))  # new vectors, at new addresses
    before = net.backbone.stem.spectral_v.clone()
    refresh()
    assert not torch.equal(net.backbone.stem.spectral_v, before)


@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("classes", [40, 100])  # few and many take different ways
def test_the_graph_of_the_loss_computes_what_its_kernels_do_one_by_one(classes: int, rank: int) -> None:
    """Also where batches have more shapes than there may be graphs, and where a result is read later."""
    graphed, generator = GraphedLabelLoss(), torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    def inputs(rows: int) -> tuple[Any, ...]:
        labels = torch.randint(classes, (rows,), generator=generator, device="cuda")
        factor, points = (normal(rows, classes, rank) / 2, normal(rows, 4, rank)) if rank else (None, None)
        return normal(rows, classes), normal(rows, classes).square(), factor, labels, points

    batches = [inputs(rows) for rows in (64, 64, 17, 64, *range(20, 20 + MAX_GRAPHS), 64)]
    results = [graphed(*batch, gradients=True) for batch in batches]
    assert len(graphed.captured) == MAX_GRAPHS
    for batch, (nll, gradients) in zip(batches, results, strict=True):
        want, want_gradients = label_loss(*batch, gradients=True)
        torch.testing.assert_close(nll, want)
        for got, expected in zip(gradients, want_gradients, strict=True):
            torch.testing.assert_close(got, expected)
    assert graphed(*batches[0], gradients=False)[1] == ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetsngp.training.gradients.MAX_LOGITS", 64 * classes - 1)
        few = GraphedLabelLoss()
        few(*batches[0], gradients=True)
        assert not few.captured


def test_workers_pin_memory_while_the_loss_is_captured() -> None:
    data = images(640)
    dataset = TensorDataset(data.images.float() / 255, data.labels)
    batches = DataLoader(dataset, 64, num_workers=2, pin_memory=True)
    trained = Engine(FAST).train(model(), batches, config(2))
    assert trained.history[-1].loss < trained.history[0].loss


def test_training_leaves_no_graph_of_the_loss_behind() -> None:
    net = model("hetsngp_mimo", num_members=2)
    losses = []

    class Recording(GraphedLabelLoss):
        def __call__(self, *args: Any, **options: Any) -> Any:
            losses.append(self)
            return super().__call__(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetsngp.training.engine.GraphedLabelLoss", Recording)
        Engine(FAST).train(net, loader(), config(1))
    assert losses
    assert losses[0].captured
    assert not any("label_loss" in vars(m) for m in net.modules())


@pytest.mark.parametrize("folds", [None, 3], ids=["leave-one-out", "folds"])
def test_labels_of_frozen_features_are_corrected_as_on_a_cpu(folds: int | None) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(400, 4, generator=g)
    true = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    given = torch.where(torch.rand(400, generator=g) < 0.2, (true + 1) % 3, true)
    found = []
    for device in ("cpu", "cuda"):
        net = hetsngp.convert(torch.nn.Linear(4, 3), "sngp", x[:2], freeze=True).to(device)
        correction = hetsngp.correct_labels(
            net, FeatureSet(x, given), folds=folds, random_features=64, amplitude=3.0, rounds=2
        )
        assert correction.features is not None
        hetsngp.fit_head(net, correction.features, random_features=64, amplitude=3.0)
        found.append((correction, net.predict(x.to(device)).probs.cpu()))
    (on_cpu, cpu_probs), (on_gpu, gpu_probs) = found
    assert on_gpu.how == on_cpu.how
    torch.testing.assert_close(
        torch.from_numpy(on_gpu.probs), torch.from_numpy(on_cpu.probs), rtol=0, atol=0.02
    )
    torch.testing.assert_close(gpu_probs, cpu_probs, rtol=0, atol=0.05)
    assert (gpu_probs.argmax(1) == true).double().mean() > (given == true).double().mean() + 0.05


def test_fsdp_in_one_process(tmp_path: Path) -> None:
    """In a process of its own, which a process group would outlive."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from tests.integration.test_gpu import images, loader, model, config\n"
        "from hetsngp.training import Engine, Hardware\n"
        "losses = []\n"
        "for strategy in ('auto', 'fsdp'):\n"
        "    engine = Engine(Hardware(devices=1, strategy=strategy))\n"
        "    trained = engine.train(model(), loader(), config(2, bound_every=1))\n"
        "    losses.append(trained.history[-1].loss)\n"
        "    print(engine.fit_posterior(trained.model, loader()))\n"
        "assert abs(losses[0] - losses[1]) < 0.02, losses\n"
    )
    root = Path(__file__).parents[2]
    paths = {"PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}"}
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **paths},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
