"""From a set of images to a model on disk: build or convert, train, fit the posterior, measure, save."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from hetsngp.conversion import convert
from hetsngp.data.device_loader import Augmentation, DeviceLoader
from hetsngp.data.images import ImageArrays
from hetsngp.data.sources import has_test, open_images
from hetsngp.evaluation.curves import draw_curves
from hetsngp.metrics import accuracy, ece, nll
from hetsngp.model import Classifier
from hetsngp.nn.backbones import WideResNet
from hetsngp.recipes import METHODS, build
from hetsngp.storage import replace_file
from hetsngp.training.engine import Engine
from hetsngp.training.feeds import share_of
from hetsngp.training.plan import Keep, Plan
from hetsngp.validation import check_choice, check_positive

WIDE_RESNET = re.compile(r"wrn-(\d+)-(\d+)")
# Rows at a time where there is no gradient.
EVAL_ROWS = 1000
SUMMARY, MODEL = "summary.json", "model"


@dataclass(frozen=True)
class ImageTask:
    """What is to be learned by what."""

    data: str
    """A name of ``hetsngp.data.registry`` such as cifar100 or cifar10n:worse, a folder, or a .npz file."""
    network: str = "wrn-16-8"
    """A Wide ResNet, or the name of a network in timm, which is converted."""
    method: str = "hetsngp"
    pretrained: bool = False
    """Whether timm's network comes with its weights."""
    size: int | None = None
    """Of the images in a folder, pixels."""
    batch_size: int = 128
    """Over all processes."""
    held_out: float = 0.1
    """Share of the training images kept to stop and to calibrate by."""

    def __post_init__(self) -> None:
        check_choice("method", self.method, tuple(METHODS))
        check_positive("batch_size", self.batch_size, integer=True)
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out is a share between 0 and 1, e.g. 0.1, got {self.held_out!r}")
        if self.pretrained and WIDE_RESNET.fullmatch(self.network):
            raise ValueError(f"{self.network} has no pretrained weights: name a network of timm's")


def train_images(
    task: ImageTask, plan: Plan, engine: Engine, keep: Keep, *, show: bool | None = None
) -> dict[str, Any]:
    """Train; ``model/``, ``summary.json`` and ``curves.png`` go to ``keep.folder``; returns the summary.

    The same call goes on where an earlier one was interrupted. The held-out images stop the training,
    where the plan has patience, and calibrate; the test images, if there are any, are only measured.
    """
    keep = replace(keep, about={**keep.about, **asdict(task)})
    images = open_images(task.data, "train", size=task.size)
    train_set, held_out_set = images.split(task.held_out, seed=plan.seed)
    torch.manual_seed(plan.seed)  # the same weights in every process; also where a network takes no generator
    model, scale = make_model(task, images)
    padding = max(1, min(images.images.shape[-2:]) // 8)
    loader = DeviceLoader(
        train_set, task.batch_size, shuffle=True, augment=Augmentation(padding), seed=plan.seed, **scale
    )
    rest: Any = {"mean": loader.mean, "std": loader.std}
    held_out = DeviceLoader(held_out_set, EVAL_ROWS, **rest)
    begun = time.perf_counter()
    trained = engine.train(model, loader, plan, held_out=held_out, keep=keep, show=show)
    report = engine.fit_posterior(trained.model, loader, held_out)
    summary = {
        "task": asdict(task),
        "plan": plan.describe(),
        "epochs": len(trained.history),
        "epoch": trained.best,
        "training_seconds": sum(float(row["seconds"] or 0) for row in trained.rows),
        "seconds": time.perf_counter() - begun,
        "posterior": str(report),
        "held_out": measure(trained.model, held_out, engine),
        "test": None,
    }
    if has_test(task.data):
        test_set = open_images(task.data, "test", size=task.size)
        summary["test"] = measure(trained.model, DeviceLoader(test_set, EVAL_ROWS, **rest), engine)
    engine.save(trained.model, keep.folder / MODEL)
    if engine.is_main:
        text = json.dumps(summary, indent=2) + "\n"
        replace_file(keep.folder / SUMMARY, lambda file: file.write_text(text, encoding="utf-8"))
        draw_curves(trained.rows, trained.best, keep.folder / "curves.png")
    return summary


def make_model(task: ImageTask, images: ImageArrays) -> tuple[Classifier, dict[str, Any]]:
    """The model, and the mean and std its network wants of pixels, if it wants any."""
    channels = images.images.shape[1]
    wide = WIDE_RESNET.fullmatch(task.network)
    if wide is not None:
        backbone = WideResNet(int(wide[1]), int(wide[2]), in_channels=channels)
        return build(task.method, backbone, images.num_classes), {}
    network = _from_timm(task, channels, images.num_classes)
    example = torch.zeros(2, *images.images.shape[1:])
    model = convert(network, task.method, example, num_classes=images.num_classes)
    config: Any = getattr(network, "pretrained_cfg", None) or {}
    known = task.pretrained and len(config.get("mean", ())) == channels
    return model, {name: list(config[name]) for name in ("mean", "std")} if known else {}


def _from_timm(task: ImageTask, channels: int, num_classes: int) -> nn.Module:
    try:
        import timm
    except ImportError:
        raise ImportError(f"network {task.network!r} needs timm: pip install 'hetsngp[vision]'") from None
    if not timm.is_model(task.network.partition(".")[0]):
        close = ", ".join(timm.list_models(f"*{task.network[:6]}*")[:5])
        raise ValueError(
            f"unknown network {task.network!r}: give wrn-16-8 (depth, width), or one that timm.list_models() "
            f"names{'; alike: ' + close if close else ''}"
        )
    network: nn.Module = timm.create_model(
        task.network, pretrained=task.pretrained, in_chans=channels, num_classes=num_classes
    )
    return network


@torch.no_grad()
def measure(model: Classifier, loader: DeviceLoader, engine: Engine) -> dict[str, float]:
    """Accuracy, NLL and ECE with the posterior; every process predicts its part."""
    parts = []
    for x, y in share_of(loader, engine.fabric):
        parts.append(torch.cat([model.predict_probs(x), y[:, None].to(x)], 1))
    rows = torch.cat(parts)
    if engine.fabric.world_size > 1:
        rows = _gather(rows, engine.fabric)
    probs, labels = rows[:, :-1].cpu(), rows[:, -1].long().cpu()
    found = {"accuracy": accuracy(probs, labels), "nll": nll(probs, labels), "ece": ece(probs, labels)}
    return {**found, "examples": len(labels)}


def _gather(rows: torch.Tensor, fabric: Any) -> torch.Tensor:
    """Of all processes; parts may differ by a few rows."""
    counts = fabric.all_gather(torch.tensor(len(rows), device=rows.device)).tolist()
    padded = rows.new_zeros(max(counts), rows.shape[1])
    padded[: len(rows)] = rows
    whole = fabric.all_gather(padded)
    return torch.cat([part[:count] for part, count in zip(whole, counts, strict=True)])
