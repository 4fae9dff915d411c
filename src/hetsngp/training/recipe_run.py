"""Train by a recipe, whatever its kind of input: model, training, posterior, measurement, saved run."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from typing import Any

import torch

from hetsngp._moved import renamed_arguments
from hetsngp.training.checkpointing.checkpoint import AMPLITUDE, GIVEN_AMPLITUDE, read_about
from hetsngp.training.config import CheckpointConfig, HeadConfig, TrainConfig
from hetsngp.training.engine import Engine
from hetsngp.training.finished_runs import changed_files, inspect_run, write_logs_again
from hetsngp.training.frozen_run import fit_frozen, fit_head_first, refuse_frozen_run
from hetsngp.training.input_kinds import input_kind
from hetsngp.training.main_process import on_main, remove_leftovers_of_finished, run_writer
from hetsngp.training.recipes.recipe import Recipe
from hetsngp.training.run_results import find_thresholds, measure, write_run
from hetsngp.training.same_data import (
    FINGERPRINTS,
    check_data_of_finished,
    is_same_run,
    set_fingerprints,
)
from hetsngp.training.task_data import open_task


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
    before, problem = on_main(fabric, lambda: inspect_run(folder, frozen=recipe.task.frozen))
    if before is not None and is_same_run(before, described):
        check_data_of_finished(folder, before, recipe.task, fabric, everything=checkpoints.hash_all_data)
        if on_main(fabric, lambda: changed_files(folder, before)):
            with run_writer(fabric, folder):
                on_main(fabric, lambda: write_logs_again(folder, before))
        on_main(fabric, lambda: remove_leftovers_of_finished(folder))
        return before
    with run_writer(fabric, folder):
        if problem is not None and engine.is_main:
            source = "" if recipe.task.frozen else " from its checkpoint"
            warnings.warn(f"{problem}; {folder} is written again{source}", stacklevel=2)
        if isinstance(recipe.config, HeadConfig):
            return fit_frozen(recipe, described, recipe.config, before, engine, checkpoints, show)
        refuse_frozen_run(folder, before)
        return _train(recipe, described, recipe.config, engine, checkpoints, show)


def _train(
    recipe: Recipe,
    described: dict[str, Any],
    config: TrainConfig,
    engine: Engine,
    checkpoints: CheckpointConfig,
    show: bool | None,
) -> dict[str, Any]:
    task, everything = recipe.task, checkpoints.hash_all_data
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
    if task.head_first and before is None:
        fit_head_first(kind, task, data, model, config.seed, engine, checkpoints, show)
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
        # First, so that model and serving.json are replaced within a moment.
        thresholds = find_thresholds(trained.model, data.held_out, loaders.inputs, recipe, engine)
        return write_run(
            checkpoints, trained.model, loaders.inputs, thresholds, recipe, summary, trained.rows
        )

    return on_main(engine.fabric, write)
