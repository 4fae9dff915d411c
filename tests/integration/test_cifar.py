"""The whole path on real images, on a CPU: convert, train, fit the posterior, predict, save, load."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import hetsngp
from hetsngp.data.images.device_loader import Augmentation, DeviceLoader
from hetsngp.data.sources import open_images
from hetsngp.metrics import accuracy, nll
from hetsngp.nn.backbones import WideResNet
from hetsngp.training import CheckpointConfig, Engine, Hardware, Schedule, TrainConfig

pytestmark = pytest.mark.slow

IMAGES, TEST = 2000, 500


def test_two_thousand_images(data_root: Path, tmp_path: Path) -> None:
    images = open_images("cifar10", "train", root=data_root).split(IMAGES)[1]
    train_set, held_out_set = images.split(0.2)
    test_set = open_images("cifar10", "test", root=data_root).split(TEST)[1]
    train = DeviceLoader(train_set, 64, shuffle=True, augment=Augmentation())
    scale = {"mean": train.mean, "std": train.std}
    clean, held_out, test = (DeviceLoader(part, 250, **scale) for part in (train_set, held_out_set, test_set))

    body = WideResNet(10, 1, generator=torch.Generator().manual_seed(0))
    classifier = nn.Sequential(body, nn.Linear(body.num_features, 10))
    model = hetsngp.convert(classifier, "hetsngp", torch.zeros(2, 3, 32, 32), random_features=256)
    engine = Engine(Hardware(accelerator="cpu", channels_last=True))
    schedule = Schedule(14, lr=0.1, weight_decay=5e-4, optimizer="sgd", warmup=2, smooth=True)
    config = TrainConfig(schedule, bound_every=5)
    checkpoints = CheckpointConfig(tmp_path)
    trained = engine.train(model, train, config, held_out=held_out, checkpoints=checkpoints)
    report = engine.fit_posterior(trained.model, clean, held_out)
    assert (report.count, report.held_out) == (1600, 400)

    assert trained.model is model
    predictions = [(model.predict(x), y) for x, y in test]
    probs = torch.cat([p.probs for p, _ in predictions])
    labels = torch.cat([y for _, y in predictions])
    assert probs.shape == (TEST, 10)
    assert accuracy(probs, labels) > 0.35  # chance: 0.1; a standard error is 0.022
    assert nll(probs, labels) < math.log(10) - 0.5
    first = predictions[0][0]
    assert torch.equal(first.total_uncertainty, first.data_uncertainty + first.model_uncertainty)

    engine.save(model, tmp_path / "model")
    network = nn.Sequential(WideResNet(10, 1), nn.Linear(64, 10))
    again = hetsngp.load(tmp_path / "model", backbone=network)
    x, _ = next(iter(test))
    torch.testing.assert_close(again.predict(x).probs, probs[:250])
