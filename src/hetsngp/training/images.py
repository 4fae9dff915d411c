"""Train on images: build or convert a model, train it, fit the posterior, measure and save."""

from __future__ import annotations

import json
import re
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetsngp._moved import renamed_arguments
from hetsngp.conversion.conversion import convert
from hetsngp.conversion.libraries import create_timm_network
from hetsngp.data.preprocessing import Images, Preprocessing
from hetsngp.evaluation.figures import draw_curves
from hetsngp.evaluation.loader_quality import measure_quality
from hetsngp.files import CHECKSUM, has_checksum, sha256_of, sync_folder, with_checksum, write_text
from hetsngp.io.artifact import save
from hetsngp.io.storage import CONFIG, ArtifactError
from hetsngp.locking import check_lock
from hetsngp.models.classifier import Classifier, to_device
from hetsngp.models.methods import build
from hetsngp.nn.backbones import WideResNet
from hetsngp.serving.bundle import open_run, write_serving
from hetsngp.serving.decisions import Thresholds, set_thresholds
from hetsngp.training.checkpointing.checkpoint import (
    AMPLITUDE,
    CHECKPOINT,
    GIVEN_AMPLITUDE,
    PREVIOUS,
    read_about,
    read_rows,
)
from hetsngp.training.checkpointing.checkpoint_files import has_state
from hetsngp.training.config import CheckpointConfig
from hetsngp.training.engine import Engine
from hetsngp.training.image_data import make_loaders, open_task, spread
from hetsngp.training.loaders import shard_loader
from hetsngp.training.logs import METRICS, write_csv
from hetsngp.training.main_process import on_main, remove_leftovers_of_finished, run_writer
from hetsngp.training.recipes.keys import current_description
from hetsngp.training.recipes.recipe import Recipe
from hetsngp.training.recipes.task import ImageTask
from hetsngp.training.same_data import (
    FINGERPRINTS,
    check_data_of_finished,
    is_same_run,
    set_fingerprints,
)
from hetsngp.types import Prediction

__all__ = ["ImageTask", "Recipe", "finished", "make_model", "measure", "train_images"]

WIDE_RESNET = re.compile(r"wrn-(\d+)-([1-9]\d*)")
SUMMARY, MODEL, CURVES = "summary.json", "model", "curves.png"
LOGS = (METRICS, CURVES)
OFFLINE = "without a network connection train from scratch, --set pretrained=false"
SUMMARY_KEYS = {"recipe", "epochs", "seconds", "posterior", "held_out", "test", "no_test", "thresholds"}
"""Keys of a complete summary."""
# Limits of the held-out predictions that set thresholds: probabilities, examples, and examples of a batch.
THRESHOLD_CELLS, THRESHOLD_EXAMPLES, THRESHOLD_BATCH = 50_000_000, 10_000, 250


@renamed_arguments(keep="checkpoints")
def train_images(
    recipe: Recipe, engine: Engine, checkpoints: CheckpointConfig, *, show: bool | None = None
) -> dict[str, Any]:
    """Train, and write ``model/``, ``curves.png`` and, last, ``summary.json``; returns the summary.

    The same call resumes an interrupted run, and returns the summary of a finished one, whose files it
    checks: what is damaged or missing is written again from the checkpoint. Held-out images are for early
    stopping and calibration; test images, if there are any, are only measured.
    """
    folder, fabric, described = checkpoints.folder, engine.fabric, recipe.describe()
    before, problem = on_main(fabric, lambda: _inspect(folder))
    if before is not None and is_same_run(before, described):
        task, everything = recipe.task, checkpoints.hash_all_data
        check_data_of_finished(folder, before, task.data, fabric, labels=task.labels, everything=everything)
        if on_main(fabric, lambda: _changed_files(folder, before)):
            with run_writer(fabric, folder):
                on_main(fabric, lambda: _write_logs_again(folder, before))
        on_main(fabric, lambda: remove_leftovers_of_finished(folder))
        return before
    with run_writer(fabric, folder):
        if problem is not None and engine.is_main:
            warnings.warn(f"{problem}; {folder} is written again from its checkpoint", stacklevel=2)
        return _train_images(recipe, described, engine, checkpoints, show)


def _train_images(
    recipe: Recipe,
    described: dict[str, Any],
    engine: Engine,
    checkpoints: CheckpointConfig,
    show: bool | None,
) -> dict[str, Any]:
    config, task, everything = recipe.config, recipe.task, checkpoints.hash_all_data
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
    model, scale = make_model(task, data.num_classes, data.shape)
    if by_default:
        model.config["given"] = [name for name in model.config["given"] if name != "amplitude"]
    about = {**checkpoints.about, **_about(described), AMPLITUDE: model.config["options"]["amplitude"]}
    checkpoints = replace(checkpoints, about=about, fingerprints=data.fingerprints)
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
        found = {**summary, "thresholds": thresholds.to_dict(), "weights": _weights_digest(folder)}
        return _write_summary(folder, found)

    return on_main(engine.fabric, write)


# --- finished runs --------------------------------------------------------------------------------------


def finished(folder: Path) -> dict[str, Any] | None:
    """Summary of a finished run; None: it is not finished, or its summary or model is damaged or missing.

    The model is loaded for this check.
    """
    try:
        return check_finished(Path(folder))
    except (OSError, ValueError):
        return None


def check_finished(folder: Path) -> dict[str, Any] | None:
    """Summary of a finished run; None without one. Raises where a file of the model is missing or damaged."""
    file = folder / SUMMARY
    if not file.exists():
        return None
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{file} is not a JSON file: {error}") from error
    if not isinstance(summary, dict) or not summary.keys() >= SUMMARY_KEYS:
        raise ArtifactError(f"{file} is damaged: it is not the summary of a run")
    # Release 0.1, which called the configuration "plan", wrote no checksum.
    by_0_1 = isinstance(summary["recipe"], dict) and "plan" in summary["recipe"]
    if not has_checksum(summary) and not (by_0_1 and CHECKSUM not in summary):
        raise ArtifactError(f"{file} is damaged: its checksum is not that of its content")
    open_run(folder / MODEL)
    if summary.get("weights", _weights_digest(folder)) != _weights_digest(folder):
        raise ValueError(
            f"{folder / MODEL} holds another model than the one that {file} describes: move it to another "
            f"folder, or remove {file}, so that the model is written again from the checkpoint"
        )
    kept = {name: value for name, value in summary.items() if name != CHECKSUM}
    return {**kept, "recipe": current_description(summary["recipe"])}


def _inspect(folder: Path) -> tuple[dict[str, Any] | None, str | None]:
    """Summary of a finished run, and what is wrong with it; an error where there is no checkpoint to mend it
    from.
    """
    summary, problem = None, None
    try:
        summary = check_finished(folder)
    except (ArtifactError, FileNotFoundError) as error:
        problem = str(error)
        if not any(has_state(folder / name) for name in (CHECKPOINT, PREVIOUS)):
            raise ArtifactError(
                f"{problem}; without {CHECKPOINT}/ it cannot be written again: copy the folder from where it "
                "is complete, or train again in another folder, --out"
            ) from error
    return summary, problem


def _write_summary(folder: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """Write the summary, which names the model's weights and the logs by their SHA-256, with a checksum."""
    logs = {name: sha256_of(folder / name) for name in LOGS if (folder / name).is_file()}
    content = {**json.loads(json.dumps(summary)), "files": logs}
    write_text(folder / SUMMARY, json.dumps(with_checksum(content), indent=2) + "\n")
    return content


def _changed_files(folder: Path, summary: dict[str, Any]) -> list[str]:
    """Logs of a finished run that are missing, or not as they were written."""

    def is_same(name: str, digest: Any) -> bool:
        return (folder / name).is_file() and sha256_of(folder / name) == digest

    written = summary.get("files", {})  # release 0.1 has none
    return [name for name, digest in written.items() if name in LOGS and not is_same(name, digest)]


def _write_logs_again(folder: Path, summary: dict[str, Any]) -> None:
    """Write metrics.csv and the curves again, from the checkpoint."""
    names = ", ".join(_changed_files(folder, summary))
    try:
        rows = read_rows(folder)
    except (ArtifactError, FileNotFoundError) as error:
        warnings.warn(
            f"{names} in {folder} is damaged or missing, and so is the checkpoint: {error}", stacklevel=2
        )
        return
    warnings.warn(
        f"{names} in {folder} is damaged or missing: written again from the checkpoint", stacklevel=2
    )
    write_csv(folder / METRICS, rows)
    draw_curves(rows, summary["epoch"], folder / CURVES)
    _write_summary(folder, summary)


def _weights_digest(folder: Path) -> str:
    """SHA-256 of the weights of the model, from its ``config.json``."""
    return str(json.loads((folder / MODEL / CONFIG).read_text(encoding="utf-8"))["sha256"])


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
    given |= {"in_chans": shape[0], "num_classes": num_classes}
    return create_timm_network(task.network, pretrained=task.pretrained, offline=OFFLINE, **given)


def _thresholds(
    model: Classifier, held_out: Images, inputs: Preprocessing, recipe: Recipe, engine: Engine
) -> Thresholds:
    """Set the thresholds of verdicts on held-out images, or as many as fit in memory."""
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
