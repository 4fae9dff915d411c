"""Results of a run: quality, thresholds of the verdicts, and the files of the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hetsngp.evaluation.figures import draw_curves
from hetsngp.evaluation.loader_quality import measure_quality
from hetsngp.files import sync_folder
from hetsngp.io.artifact import save
from hetsngp.locking import check_lock
from hetsngp.models.classifier import Classifier, to_device
from hetsngp.serving.bundle import write_serving
from hetsngp.serving.decisions import Thresholds, set_thresholds
from hetsngp.training.config import CheckpointConfig
from hetsngp.training.engine import Engine
from hetsngp.training.finished_runs import CURVES, MODEL, SUMMARY, weights_digest, write_summary
from hetsngp.training.loaders import shard_loader
from hetsngp.training.logs import MetricsRow
from hetsngp.training.recipes.recipe import Recipe
from hetsngp.training.task_data import spread
from hetsngp.types import Prediction

# Limits of the held-out predictions that set thresholds: probabilities, examples, and examples of a batch.
THRESHOLD_CELLS, THRESHOLD_EXAMPLES, THRESHOLD_BATCH = 50_000_000, 10_000, 250


def most_for_thresholds(num_classes: int) -> int:
    """Number of held-out examples that thresholds are set on, at most: as many as fit in memory."""
    return max(1, min(THRESHOLD_EXAMPLES, THRESHOLD_CELLS // num_classes))


def find_thresholds(
    model: Classifier, held_out: Any, inputs: Any, recipe: Recipe, engine: Engine
) -> Thresholds:
    """Set the thresholds of verdicts on held-out examples."""
    chosen = spread(held_out, most_for_thresholds(model.num_classes))
    loader = inputs.loader(chosen, THRESHOLD_BATCH, num_workers=recipe.task.workers)
    return thresholds_on(model, loader, recipe, engine, multi_label=inputs.multi_label)


def thresholds_on(
    model: Classifier, batches: Iterable[Any], recipe: Recipe, engine: Engine, *, multi_label: bool = False
) -> Thresholds:
    """Set the thresholds of verdicts on batches (x, y), or the first of them."""
    found, labels, most = [], [], most_for_thresholds(model.num_classes)
    for x, y in batches:
        found.append(model.predict(to_device(x, engine.device)).map(torch.Tensor.cpu))
        labels.append((y if y.dim() == 1 or multi_label else y.argmax(1)).cpu())
        if sum(map(len, labels)) >= most:
            break
    rules = recipe.verdicts
    return set_thresholds(
        Prediction.cat(found), torch.cat(labels), correct=rules.correct, unfamiliar=rules.unfamiliar
    )


def write_run(
    checkpoints: CheckpointConfig,
    model: Classifier,
    inputs: Any,
    thresholds: Thresholds,
    recipe: Recipe,
    summary: dict[str, Any],
    rows: Sequence[MetricsRow] | None = None,
) -> dict[str, Any]:
    """Write model, ``serving.json``, curves of the epochs where there are ``rows``, and the summary."""
    folder = checkpoints.folder
    check_lock(folder)
    (folder / SUMMARY).unlink(missing_ok=True)  # an older one describes another model
    sync_folder(folder)
    save(model, folder / MODEL)
    about = {"data": recipe.task.data, "recipe": recipe.name}
    if recipe.task.labels is not None:
        about["labels"] = recipe.task.labels
    write_serving(folder / MODEL, inputs, thresholds, about)
    if rows is not None:
        draw_curves(rows, summary["epoch"], folder / CURVES)
    found = {**summary, "thresholds": thresholds.to_dict(), "weights": weights_digest(folder)}
    return write_summary(folder, found)


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
