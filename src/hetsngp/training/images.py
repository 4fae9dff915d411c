"""Train on images: build or convert a model, train it, fit the posterior, measure and save."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetsngp._moved import renamed_arguments
from hetsngp.conversion.conversion import convert
from hetsngp.data.preprocessing import Images, Preprocessing
from hetsngp.evaluation.figures import draw_curves
from hetsngp.evaluation.loader_quality import measure_quality
from hetsngp.files import write_text
from hetsngp.models.classifier import Classifier, to_device
from hetsngp.models.methods import build
from hetsngp.nn.backbones import WideResNet
from hetsngp.serving.bundle import write_serving
from hetsngp.serving.decisions import Thresholds, set_thresholds
from hetsngp.training.config import CheckpointConfig
from hetsngp.training.engine import Engine
from hetsngp.training.image_data import make_loaders, open_task, spread
from hetsngp.training.loaders import shard_loader
from hetsngp.training.recipes.keys import current_description
from hetsngp.training.recipes.recipe import Recipe
from hetsngp.training.recipes.task import ImageTask
from hetsngp.training.same_data import (
    FINGERPRINTS,
    check_data_of_finished,
    from_main,
    is_same_run,
    set_fingerprints,
)
from hetsngp.types import Prediction

__all__ = ["ImageTask", "Recipe", "finished", "make_model", "measure", "train_images"]

WIDE_RESNET = re.compile(r"wrn-(\d+)-([1-9]\d*)")
SUMMARY, MODEL = "summary.json", "model"
SUMMARY_KEYS = {"recipe", "epochs", "seconds", "posterior", "held_out", "test", "no_test", "thresholds"}
"""Keys of a complete summary."""
# Limits of the held-out predictions that set thresholds: probabilities, examples, and examples of a batch.
THRESHOLD_CELLS, THRESHOLD_EXAMPLES, THRESHOLD_BATCH = 50_000_000, 10_000, 250


@renamed_arguments(keep="checkpoints")
def train_images(
    recipe: Recipe, engine: Engine, checkpoints: CheckpointConfig, *, show: bool | None = None
) -> dict[str, Any]:
    """Train, and write ``model/``, ``curves.png`` and, last, ``summary.json``; returns the summary.

    The same call resumes an interrupted run, and returns the summary of a finished one. Held-out images are
    for early stopping and calibration; test images, if there are any, are only measured.
    """
    described, config, task = recipe.describe(), recipe.config, recipe.task
    before = finished(checkpoints.folder)
    fabric, everything = engine.fabric, checkpoints.hash_all_data
    if before is not None and is_same_run(before, described):
        check_data_of_finished(checkpoints.folder, before, task.data, fabric, everything=everything)
        return before
    data = open_task(
        task,
        config.seed,
        lambda sets: from_main(lambda: set_fingerprints(sets, everything=everything), fabric),
    )
    about = {**checkpoints.about, **_about(described)}
    checkpoints = replace(checkpoints, about=about, fingerprints=data.fingerprints)
    # The same weights in every process; also where a network takes no generator.
    torch.manual_seed(config.seed)
    model, scale = make_model(task, data.num_classes, data.shape)
    loaders = make_loaders(task, data, scale, seed=config.seed, processes=engine.fabric.world_size)
    trained = engine.train(
        model,
        loaders.train,
        config,
        held_out=loaders.held_out,
        checkpoints=checkpoints,
        show=show,
        clean=loaders.clean,
    )
    # Seconds of training, interrupted parts included, and of what comes after it.
    spent, begun = sum(float(row["seconds"] or 0) for row in trained.rows), time.perf_counter()
    calibration = loaders.held_out if task.calibrate else None
    report = engine.fit_posterior(trained.model, loaders.clean, calibration)
    summary = {
        "recipe": described,
        "changes": list(recipe.changes),
        "epochs": len(trained.history),
        "epoch": trained.best,
        "training_seconds": spent,
        "seconds": spent + time.perf_counter() - begun,
        "posterior": str(report),
        "held_out": measure(trained.model, loaders.held_out, engine),
        "test": None if loaders.test is None else measure(trained.model, loaders.test, engine),
        "no_test": data.missing,
        FINGERPRINTS: data.fingerprints,
    }
    if engine.is_main:
        (checkpoints.folder / SUMMARY).unlink(missing_ok=True)  # an older one describes another model
    engine.save(trained.model, checkpoints.folder / MODEL)
    if engine.is_main:
        thresholds = _thresholds(trained.model, data.held_out, loaders.inputs, recipe, engine)
        summary["thresholds"] = thresholds.to_dict()
        write_serving(
            checkpoints.folder / MODEL, loaders.inputs, thresholds, {"data": task.data, "recipe": recipe.name}
        )
        draw_curves(trained.rows, trained.best, checkpoints.folder / "curves.png")
        text = json.dumps(summary, indent=2) + "\n"
        write_text(checkpoints.folder / SUMMARY, text)
    engine.fabric.barrier()
    return summary


def finished(folder: Path) -> dict[str, Any] | None:
    """Summary of a finished run; None: it is not finished, or damaged."""
    try:
        summary = json.loads((Path(folder) / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    complete = isinstance(summary, dict) and summary.keys() >= SUMMARY_KEYS
    if not complete or not (Path(folder) / MODEL / "config.json").is_file():
        return None
    return {**summary, "recipe": current_description(summary["recipe"])}


def _about(described: dict[str, Any]) -> dict[str, Any]:
    """Description by which a run is recognised when it is resumed; calibration may change."""
    task = {name: value for name, value in described["task"].items() if name != "calibrate"}
    if task["from_disk"]:
        del task["resize"]  # used for evaluation only; in memory it also cuts the training images
    options = task.pop("options")
    return {**task, **{f"options.{name}": value for name, value in options.items()}}


def make_model(
    task: ImageTask, num_classes: int, shape: tuple[int, int, int]
) -> tuple[Classifier, dict[str, Any]]:
    """Make the model for images of ``shape`` (C, H, W); also returns mean and std if its network has them.

    Initial values come from torch's global generator.
    """
    options = dict(task.options)
    wide = WIDE_RESNET.fullmatch(task.network)
    if wide is not None:
        backbone = WideResNet(int(wide[1]), int(wide[2]), in_channels=shape[0])
        return build(task.method, backbone, num_classes, **options), {}
    network = _from_timm(task, num_classes, shape)
    model = convert(
        network, task.method, torch.zeros(2, *shape), num_classes=num_classes, copy=False, **options
    )
    config: Any = getattr(network, "pretrained_cfg", None) or {}
    known = task.pretrained and len(config.get("mean", ())) == shape[0]
    return model, {name: list(config[name]) for name in ("mean", "std")} if known else {}


def _from_timm(task: ImageTask, num_classes: int, shape: tuple[int, int, int]) -> nn.Module:
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
    config = timm.get_pretrained_cfg(task.network)
    given: dict[str, Any] = {}
    if config is not None and config.fixed_input_size and tuple(config.input_size[1:]) != shape[1:]:
        given["img_size"] = shape[1:]  # transformers have one embedding for each position
    network: nn.Module = timm.create_model(
        task.network, pretrained=task.pretrained, in_chans=shape[0], num_classes=num_classes, **given
    )
    return network


def _thresholds(
    model: Classifier, held_out: Images, inputs: Preprocessing, recipe: Recipe, engine: Engine
) -> Thresholds:
    """Set the thresholds of verdicts on held-out images, or as many as fit in memory."""
    most = max(1, min(THRESHOLD_EXAMPLES, THRESHOLD_CELLS // model.num_classes))
    loader = inputs.loader(spread(held_out, most), THRESHOLD_BATCH, num_workers=recipe.task.workers)
    found, labels = [], []
    for x, y in loader:
        found.append(model.predict(to_device(x, engine.device)).map(torch.Tensor.cpu))
        labels.append(y.cpu())
        if sum(map(len, labels)) >= most:
            break
    rules = recipe.verdicts
    return set_thresholds(
        Prediction.cat(found), torch.cat(labels), correct=rules.correct, unfamiliar=rules.unfamiliar
    )


def measure(model: Classifier, loader: Any, engine: Engine) -> dict[str, float]:
    """Accuracy (precision@1 for multi-label data), NLL and ECE; each process predicts its part."""
    numbers = measure_quality(
        model,
        shard_loader(loader, engine.fabric),
        engine.device,
        gather=lambda values: _gather(values, engine.fabric),
        dtype=torch.float32,
    )
    return {"accuracy" if name == "precision_at_1" else name: value for name, value in numbers.items()}


def _gather(values: torch.Tensor, fabric: Any) -> torch.Tensor:
    """Concatenate values (3, n) of all processes, whose n may differ by a few examples.

    In memory the three values of an example are adjacent: another order would sum with another rounding.
    """
    by_example = values.t().contiguous()
    if fabric.world_size == 1:
        return by_example.t()
    counts = fabric.all_gather(torch.tensor(len(by_example), device=values.device)).tolist()
    padded = by_example.new_zeros(max(counts), len(values))
    padded[: len(by_example)] = by_example
    gathered = fabric.all_gather(padded)
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)]).t()
