"""Train by a recipe, whatever its kind of input: model, training, posterior, measurement, saved run."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from typing import Any

import torch

from hetsngp._moved import renamed_arguments
from hetsngp.evaluation.figures import draw_curves
from hetsngp.evaluation.loader_quality import measure_quality
from hetsngp.files import sync_folder
from hetsngp.io.artifact import save
from hetsngp.locking import check_lock
from hetsngp.models.classifier import Classifier, to_device
from hetsngp.serving.bundle import write_serving
from hetsngp.serving.decisions import Thresholds, set_thresholds
from hetsngp.training.checkpointing.checkpoint import AMPLITUDE, GIVEN_AMPLITUDE, read_about
from hetsngp.training.config import CheckpointConfig
from hetsngp.training.engine import Engine
from hetsngp.training.finished_runs import (
    CURVES,
    MODEL,
    SUMMARY,
    changed_files,
    inspect_run,
    weights_digest,
    write_logs_again,
    write_summary,
)
from hetsngp.training.input_kinds import input_kind
from hetsngp.training.loaders import shard_loader
from hetsngp.training.main_process import on_main, remove_leftovers_of_finished, run_writer
from hetsngp.training.recipes.recipe import Recipe
from hetsngp.training.same_data import (
    FINGERPRINTS,
    check_data_of_finished,
    is_same_run,
    set_fingerprints,
)
from hetsngp.training.task_data import open_task, spread
from hetsngp.types import Prediction

# Limits of the held-out predictions that set thresholds: probabilities, examples, and examples of a batch.
THRESHOLD_CELLS, THRESHOLD_EXAMPLES, THRESHOLD_BATCH = 50_000_000, 10_000, 250


@renamed_arguments(keep="checkpoints")
def train_recipe(
    recipe: Recipe, engine: Engine, checkpoints: CheckpointConfig, *, show: bool | None = None
) -> dict[str, Any]:
    """Train, and write ``model/``, ``curves.png`` and, last, ``summary.json``; returns the summary.

    The same call resumes an interrupted run, and returns the summary of a finished one, whose files it
    checks: what is damaged or missing is written again from the checkpoint. Held-out examples are for early
    stopping and calibration; test examples, if there are any, are only measured.
    """
    folder, fabric, described = checkpoints.folder, engine.fabric, recipe.describe()
    before, problem = on_main(fabric, lambda: inspect_run(folder))
    if before is not None and is_same_run(before, described):
        check_data_of_finished(folder, before, recipe.task, fabric, everything=checkpoints.hash_all_data)
        if on_main(fabric, lambda: changed_files(folder, before)):
            with run_writer(fabric, folder):
                on_main(fabric, lambda: write_logs_again(folder, before))
        on_main(fabric, lambda: remove_leftovers_of_finished(folder))
        return before
    with run_writer(fabric, folder):
        if problem is not None and engine.is_main:
            warnings.warn(f"{problem}; {folder} is written again from its checkpoint", stacklevel=2)
        return _train(recipe, described, engine, checkpoints, show)


def _train(
    recipe: Recipe,
    described: dict[str, Any],
    engine: Engine,
    checkpoints: CheckpointConfig,
    show: bool | None,
) -> dict[str, Any]:
    config, task, everything = recipe.config, recipe.task, checkpoints.hash_all_data
    kind = input_kind(task)
    data = open_task(
        task,
        config.seed,
        lambda sets: on_main(engine.fabric, lambda: set_fingerprints(sets, everything=everything)),
    )
    before = on_main(engine.fabric, lambda: read_about(checkpoints.folder))
    by_default = "amplitude" not in task.options
    if by_default and before is not None and GIVEN_AMPLITUDE not in before:  # as it began, also by 0.1
        task = replace(task, options={**task.options, "amplitude": before[AMPLITUDE]})
    # The same weights in every process; also where a network takes no generator.
    torch.manual_seed(config.seed)
    model, asked = kind.make_model(task, data)
    if by_default:
        model.config["given"] = [name for name in model.config["given"] if name != "amplitude"]
    about = {**checkpoints.about, **task.identity(), AMPLITUDE: model.config["options"]["amplitude"]}
    checkpoints = replace(checkpoints, about=about, fingerprints=data.fingerprints)
    loaders = kind.make_loaders(task, data, asked, seed=config.seed, processes=engine.fabric.world_size)
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
        AMPLITUDE: trained.model.config["options"]["amplitude"],
        "held_out": measure(trained.model, loaders.held_out, engine),
        "test": None if loaders.test is None else measure(trained.model, loaders.test, engine),
        "no_test": data.missing,
        FINGERPRINTS: data.fingerprints,
    }
    if data.corrected is not None:
        summary["labels"] = data.corrected

    def write() -> dict[str, Any]:
        folder = checkpoints.folder
        # First, so that model and serving.json are replaced within a moment.
        thresholds = _thresholds(trained.model, data.held_out, loaders.inputs, recipe, engine)
        check_lock(folder)
        (folder / SUMMARY).unlink(missing_ok=True)  # an older one describes another model
        sync_folder(folder)
        save(trained.model, folder / MODEL)
        about = {"data": task.data, "recipe": recipe.name}
        write_serving(folder / MODEL, loaders.inputs, thresholds, about)
        draw_curves(trained.rows, trained.best, folder / CURVES)
        found = {**summary, "thresholds": thresholds.to_dict(), "weights": weights_digest(folder)}
        return write_summary(folder, found)

    return on_main(engine.fabric, write)


def _thresholds(model: Classifier, held_out: Any, inputs: Any, recipe: Recipe, engine: Engine) -> Thresholds:
    """Set the thresholds of verdicts on held-out examples, or as many as fit in memory."""
    most = max(1, min(THRESHOLD_EXAMPLES, THRESHOLD_CELLS // model.num_classes))
    loader = inputs.loader(spread(held_out, most), THRESHOLD_BATCH, num_workers=recipe.task.workers)
    found, labels = [], []
    for x, y in loader:
        found.append(model.predict(to_device(x, engine.device)).map(torch.Tensor.cpu))
        labels.append((y if y.dim() == 1 or inputs.multi_label else y.argmax(1)).cpu())
        if sum(map(len, labels)) >= most:
            break
    rules = recipe.verdicts
    return set_thresholds(
        Prediction.cat(found), torch.cat(labels), correct=rules.correct, unfamiliar=rules.unfamiliar
    )


def measure(model: Classifier, loader: Any, engine: Engine) -> dict[str, float]:
    """Accuracy (precision@1 for multi-label data), NLL and ECE; each process predicts its part.

    With soft targets the most probable class counts as correct.
    """
    numbers = measure_quality(
        model,
        shard_loader(loader, engine.fabric),
        engine.device,
        gather=lambda values: _gather(values, engine.fabric),
        dtype=torch.float32,
        soft=not model.head.sigmoid,
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
