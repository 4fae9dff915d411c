"""Data of a recipe: opened, checked, with corrected labels, split into training, held-out, test examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hetsngp.data.images.arrays import stratified
from hetsngp.data.label_files import LabelFile, open_labels, with_labels
from hetsngp.data.shards.streams import ShardedImages
from hetsngp.training.input_kinds import TaskData, input_kind
from hetsngp.training.recipes.task import Task


def open_task(
    task: Task, seed: int, fingerprints: Callable[[dict[str, Any]], dict[str, Any]] | None = None
) -> TaskData:
    """Open and check all data of a task, so that missing data are found before the training.

    ``fingerprints`` makes those of the opened sets.

    Folds and held-out examples are drawn from the labels as given, so that they are the same with corrected
    labels; copies of an example are in one fold. A data set may have its own held-out examples, whose labels
    are not corrected. Corrected labels are for training and held-out examples,
    without those that were dropped; a fold that is tested on keeps its given labels.
    """
    kind = input_kind(task)
    examples = kind.open(task.data, "train")
    single = kind.has_one_label(examples)
    for name in ("labels", "fold"):
        if not single and getattr(task, name) is not None:
            raise ValueError(
                f"{name} is for {kind.examples} with one label each, and those of {task.data} are "
                f"{type(examples).__name__}: leave it out"
            )
    labels = None if task.labels is None else open_labels(task.labels, examples)
    test, missing = None, None
    if task.fold is None and kind.has_test(task.data):
        try:
            test = kind.open(task.data, "test")
        except FileNotFoundError as error:
            missing = " ".join(str(error).split())
    own = kind.own_held_out(task.data)
    sets = {"train": examples, "test": test, "held_out": own}
    found = {} if fingerprints is None else fingerprints(sets)
    if labels is not None and fingerprints is not None:
        found = {**found, "labels": labels.to_fingerprint()}
    fold_rows = None
    if task.fold is not None:
        number, folds = task.fold_number
        fold_rows = kind.folds(examples, folds, seed)[number - 1]
    examples, test = kind.prepare(examples, task), None if test is None else kind.prepare(test, task)
    shape, multi_label = kind.shape(examples, task), kind.is_multi_label(examples)
    corrected = None
    if single:
        train, held_out, fold, corrected = _split(examples, labels, task, seed, fold_rows, kind.examples, own)
        test = test if fold is None else fold
        if task.calibrate and len(held_out) < 2:
            raise ValueError(
                f"one example is held out of {len(examples)}, and calibration needs two or more: hold out a "
                "larger share, --set held_out=0.2, or --set calibrate=false"
            )
    else:
        train, held_out = examples.split(task.held_out, seed=seed)
    if test is not None and test.class_names != examples.class_names:
        odd = sorted(set(examples.class_names) ^ set(test.class_names))
        raise ValueError(
            f"training and test {kind.examples} of {task.data} have different classes, e.g. "
            f"{(odd or ['their order'])[0]!r}: give both the same folders"
        )
    link = task.options.get("link", "softmax")
    if multi_label != (link == "sigmoid"):
        name, fix = ("multi-label", "sigmoid") if multi_label else ("single-label", "softmax")
        raise ValueError(f"{task.data} is {name}: --set options.link={fix}")
    return TaskData(train, held_out, test, missing, shape, found, corrected, multi_label)


def spread(examples: Any, most: int) -> Any:
    """Take ``most`` examples at equal distances, because files are in the order of classes; all of shards."""
    if isinstance(examples, ShardedImages) or len(examples) <= most:
        return examples
    return examples.take(spread_rows(len(examples), most))


def spread_rows(count: int, most: int) -> torch.Tensor:
    """Rows of ``most`` of ``count`` examples at equal distances, or of all."""
    if count <= most:
        return torch.arange(count)
    rows = torch.linspace(0, count - 1, most, dtype=torch.float64)  # float32 would repeat some
    return rows.round().long()


def _split(
    examples: Any,
    labels: LabelFile | None,
    task: Task,
    seed: int,
    fold_rows: torch.Tensor | None,
    what: str,
    own: Any | None,
) -> tuple[Any, Any, Any | None, dict[str, Any] | None]:
    """Examples to train on, held out (``own``, where the data set has some), and of the fold; and how many
    have corrected labels.
    """
    rest, fold, corrected = torch.arange(len(examples)), None, None
    if fold_rows is not None:
        fold, rest = examples.take(fold_rows), rest[~torch.isin(rest, fold_rows)]
    parts = [rest]
    if own is None:
        rows = stratified(examples.labels[rest], examples.num_classes, task.held_out, seed)
        parts = [rest[each] for each in rows]
    if labels is not None:
        examples, kept = with_labels(examples, labels), labels.is_kept
        parts = [each[kept[each]] for each in parts]
        if not all(map(len, parts)):
            raise ValueError(f"the labels {task.labels} drop all {what} to train on, or all held-out ones")
        changed = sum(int(labels.changed[each].sum()) for each in parts)
        corrected = {"path": task.labels, "dropped": int((~kept[rest]).sum()), "changed": changed}
    train, *held_out = (examples.take(each) for each in parts)
    return train, held_out[0] if held_out else own, fold, corrected
