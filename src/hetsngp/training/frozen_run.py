"""Runs of frozen networks: features once, and a head fitted on them; also as the start of a training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hetsngp.fitting.progress import at_a_terminal
from hetsngp.frozen.features import FeatureSet
from hetsngp.frozen.head import fit_head
from hetsngp.models.classifier import Classifier
from hetsngp.training.checkpointing.checkpoint import AMPLITUDE, CHECKPOINT, PREVIOUS, differences
from hetsngp.training.checkpointing.checkpoint_files import has_state
from hetsngp.training.config import CheckpointConfig, HeadConfig
from hetsngp.training.engine import Engine
from hetsngp.training.input_kinds import FrozenModel, InputKind, TaskData, input_kind
from hetsngp.training.main_process import on_main
from hetsngp.training.recipes.recipe import Recipe
from hetsngp.training.recipes.task import Task
from hetsngp.training.run_results import measure, most_for_thresholds, thresholds_on, write_run
from hetsngp.training.same_data import FINGERPRINTS, check_same_data, set_fingerprints, with_paths_now
from hetsngp.training.task_data import open_task, spread_rows

FEATURES = "features"
"""Folder beside those of runs, with the features that they share."""
BATCH = 500
"""Examples of a batch of features."""
NOT_OF_THE_HEAD = ("temperature", "mode_temperature", "training_temperature")
"""Tensors that the fit of a head sets by calibration, and training sets again."""


def fit_frozen(
    recipe: Recipe,
    described: dict[str, Any],
    config: HeadConfig,
    before: Mapping[str, Any] | None,
    engine: Engine,
    checkpoints: CheckpointConfig,
    show: bool | None,
) -> dict[str, Any]:
    """Fit the head of a frozen network on its features, and write the run; returns the summary.

    ``before``: summary of a finished run in the folder. The caller holds the lock of the folder.
    """
    folder, task = checkpoints.folder, recipe.task
    if engine.fabric.world_size > 1:
        raise ValueError("a frozen network runs on one device: start one process, --set hardware.devices=1")
    _check_folder(folder, before, described)
    visible = at_a_terminal() if show is None else show
    everything, kind = checkpoints.hash_all_data, input_kind(task)
    data = open_task(task, config.seed, lambda sets: set_fingerprints(sets, everything=everything))
    if before is not None:
        check_same_data(folder, before.get(FINGERPRINTS), data.fingerprints)
    begun = time.perf_counter()
    made = kind.frozen_model(task, data)
    model = made.model.to(engine.device)
    cache = cache_folder(task, folder)
    train, held_out, test = (
        None if each is None else feature_set(made, each, cache, visible)
        for each in (data.train, data.held_out, data.test)
    )
    assert train is not None
    assert held_out is not None
    extracted = time.perf_counter()
    found = len(held_out)
    held_out = without_copies(held_out, train)
    if visible:
        if len(held_out) < found:
            copies = found - len(held_out)
            print(f"{copies} of {found} held-out {kind.examples} are copies of ones to train on: left out")
        print(f"{task.method} head on {len(train)} {kind.examples}", flush=True)
    calibration, options = held_out if task.calibrate else None, dict(task.options)
    report = fit_head(
        model, train, calibration, method=task.method, seed=config.seed, progress=False, **options
    )
    model.eval()
    view = model.on_features()
    summary = {
        "recipe": described,
        "changes": list(recipe.changes),
        "feature_seconds": extracted - begun,
        "training_seconds": time.perf_counter() - extracted,
        "posterior": str(report),
        AMPLITUDE: model.config["options"]["amplitude"],
        "held_out": measure(view, _batches(held_out), engine),
        "test": None if test is None else measure(view, _batches(test), engine),
        "no_test": data.missing,
        FINGERPRINTS: data.fingerprints,
    }
    if data.corrected is not None:
        summary["labels"] = data.corrected
    rows = spread_rows(len(held_out), most_for_thresholds(model.num_classes))
    chosen = FeatureSet(held_out.h[rows], held_out.y[rows])
    thresholds = thresholds_on(view, _batches(chosen), recipe, engine)
    summary["seconds"] = time.perf_counter() - begun
    return write_run(checkpoints, model, made.inputs, thresholds, recipe, summary)


def fit_head_first(
    kind: InputKind,
    task: Task,
    data: TaskData,
    model: Classifier,
    seed: int,
    engine: Engine,
    checkpoints: CheckpointConfig,
    show: bool | None,
) -> None:
    """Fit the head of ``model``, whose network is as it was pretrained; a collective call.

    What calibration sets is left as it was: posterior and temperatures are those of the network at the end.
    """
    visible = engine.is_main and (at_a_terminal() if show is None else show)

    def features() -> list[FeatureSet]:
        made = kind.frozen_model(task, data)
        made.model.to(engine.device)
        cache = cache_folder(task, checkpoints.folder)
        return [feature_set(made, each, cache, visible) for each in (data.train, data.held_out)]

    train, held_out = on_main(engine.fabric, features)
    head, config, conversion = model.head, model.config, model.conversion
    calibration, size = model.calibration, model.dataset_size
    model.to(engine.device)
    if visible:
        print(
            f"{task.method} head on {len(train)} {kind.examples}, before the network is trained", flush=True
        )
    fit_head(model, train, held_out, seed=seed, progress=False)
    fitted = {
        name: tensor
        for name, tensor in model.head.state_dict().items()
        if name not in NOT_OF_THE_HEAD and not name.startswith("ood.") and "posterior." not in name
    }
    model.head, model.config, model.conversion = head, config, conversion
    model.calibration, model.dataset_size = calibration, size
    head.load_state_dict(fitted, strict=False)
    model.mark_fitted()


def cache_folder(task: Task, run: Path) -> Path:
    """Folder with the features that the run in ``run`` shares with others."""
    return run.resolve().parent / FEATURES if task.features is None else Path(task.features).expanduser()


def feature_set(made: FrozenModel, examples: Any, cache: Path, show: bool) -> FeatureSet:
    """Features of examples, with their labels or soft targets."""
    y = examples.labels if examples.targets is None else examples.targets
    return FeatureSet(made.features(examples, cache, show), y.cpu())


def without_copies(held_out: FeatureSet, train: FeatureSet) -> FeatureSet:
    """Held-out examples without those that ``train`` has too, by equal features: calibration on examples that
    were trained on would make the head overconfident.
    """
    trained = {h.tobytes() for h in train.h.numpy()}
    rows = [row for row, h in enumerate(held_out.h.numpy()) if h.tobytes() not in trained]
    if not rows:
        raise ValueError(
            f"all {len(held_out)} held-out examples are copies of ones to train on, and a head cannot be "
            "calibrated on these: remove copies from the data, or hold out more, --set held_out=0.5"
        )
    return FeatureSet(held_out.h[rows], held_out.y[rows])


def refuse_frozen_run(folder: Path, before: Mapping[str, Any] | None) -> None:
    """Raise where a training would replace the finished run of a frozen network."""
    if before is not None and before["recipe"]["task"].get("frozen", False):
        raise ValueError(f"{folder} holds the run of a frozen network: give another folder, --out")


def _check_folder(folder: Path, before: Mapping[str, Any] | None, described: dict[str, Any]) -> None:
    """Raise where the folder holds another run than one of this network, its data and its options."""
    if any(has_state(folder / name) for name in (CHECKPOINT, PREVIOUS)):
        raise ValueError(f"{folder} holds the run of a network that is trained: give another folder, --out")
    if before is None:
        return
    then, now = (
        {**each["task"], "seed": each["config"].get("seed")} for each in (before["recipe"], described)
    )
    changes = differences(*({**each, "calibrate": None} for each in (now, with_paths_now(then, now))))
    if changes:
        raise ValueError(
            f"{folder} holds another run ({'; '.join(changes)}): give another folder, --out; features that "
            "both need are computed once"
        )


def _batches(features: FeatureSet) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(features.h.split(BATCH), features.y.split(BATCH), strict=True))
