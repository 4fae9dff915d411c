"""Whether the data of a run that is resumed, or finished, are those it began with."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from hetsngp.data.fingerprint import Fingerprint, compare_fingerprints, fingerprint_data, fingerprint_items
from hetsngp.data.label_files import open_labels
from hetsngp.training.checkpointing.randomness import rng_state, seed_all, set_rng_state
from hetsngp.training.input_kinds import input_kind
from hetsngp.training.main_process import on_main
from hetsngp.training.recipes.task import Task

Fingerprints = dict[str, Fingerprint]
"""Fingerprint of each part of the data: train, held_out, test, labels."""
_RANDOM = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
# Of a data set that holds more, its items are not read.
_MOST_OBJECTS, _MOST_ITEMS = 10_000, 100
FINGERPRINTS = "fingerprints"
"""Key in a checkpoint and in summary.json."""


def loader_fingerprints(
    loader: Any, held_out: Any, device: torch.device, *, everything: bool = False
) -> Fingerprints:
    """Fingerprints of the data of loaders, where they can be known without side effects.

    Items of a data set of an unknown kind are read, twice each with other random numbers, unless it has a
    random number generator of its own: reading would change what it draws later.
    """
    parts = {"train": loader, "held_out": held_out}
    found = {name: _of_loader(part, device, everything) for name, part in parts.items() if part is not None}
    return {name: value for name, value in found.items() if value is not None}


def set_fingerprints(sets: Mapping[str, Any], *, everything: bool = False) -> Fingerprints:
    """Fingerprints of opened sets of examples."""
    found = {
        name: fingerprint_data(examples, everything=everything)
        for name, examples in sets.items()
        if examples is not None
    }
    return {name: value for name, value in found.items() if value is not None}


def check_same_data(folder: Path, before: Any, now: Mapping[str, Fingerprint]) -> None:
    """Raise a ValueError that names the differences, where the run in ``folder`` began with other data."""
    if before is None:
        warnings.warn(
            f"the run in {folder} has no fingerprint of its data, as runs of release 0.1: only their number "
            "and path are compared",
            stacklevel=2,
        )
        return
    try:
        both = sorted(before.keys() & now.keys())
        changes = [
            f"{name}: {each}" for name in both for each in compare_fingerprints(before[name], now[name])
        ]
        only_sample = any("all" in now[name] and "all" not in before[name] for name in both)
    except (AttributeError, TypeError, KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"the fingerprint of the data in {folder} is damaged ({error!r}): give another folder"
        ) from error
    if changes:
        raise ValueError(
            f"{folder} holds a run on other data ({'; '.join(changes)}): resume with those it began with, or "
            "give another folder"
        )
    if only_sample:
        warnings.warn(
            f"the run in {folder} began without a hash of all data (hash_all_data, --hash-all-data): a "
            "sample of their contents was compared",
            stacklevel=2,
        )


def is_same_run(summary: Mapping[str, Any], described: Mapping[str, Any]) -> bool:
    """Whether a finished run had this recipe. Its data may have moved, where contents can be compared."""
    before = summary["recipe"]
    if FINGERPRINTS in summary and isinstance(before, Mapping) and isinstance(before.get("task"), Mapping):
        before = {**before, "task": with_paths_now(before["task"], described["task"])}
    return bool(before == described)


def with_paths_now(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Description of a task with the paths of its data and labels now, which may have moved."""
    return {**before, **{name: now[name] for name in ("data", "labels") if name in before and name in now}}


def check_data_of_finished(
    folder: Path, summary: Mapping[str, Any], task: Task, fabric: Any, *, everything: bool = False
) -> None:
    """Raise as :func:`check_same_data` does, for a finished run; a collective call.

    Data that are no longer at their place are not compared, nor those of a run of release 0.1.
    """
    before, kind = summary.get(FINGERPRINTS), input_kind(task)
    if not isinstance(before, Mapping):
        return

    def opened() -> Fingerprints:
        try:
            has_test = "test" in before and kind.has_test(task.data)
            test = kind.open(task.data, "test") if has_test else None
            train = kind.open(task.data, "train")
            found = set_fingerprints({"train": train, "test": test}, everything=everything)
            if task.labels is not None:
                found["labels"] = open_labels(task.labels, train).to_fingerprint()
            return found
        except FileNotFoundError:
            began = summary["recipe"]["task"]
            if (task.data, task.labels) != (began.get("data"), began.get("labels")):
                raise
            return {}

    check_same_data(folder, before, on_main(fabric, opened))


def _of_loader(loader: Any, device: torch.device, everything: bool) -> Fingerprint | None:
    dataset = getattr(loader, "dataset", loader)
    try:
        known = fingerprint_data(dataset, everything=everything)
    except (OSError, NotImplementedError, RuntimeError):
        return None  # a file that cannot be read, of which the training says so, or tensors without bytes
    readable = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset | list | tuple)
    if known is not None or not readable or _draws([dataset]):
        return known
    before, reads = rng_state(device), itertools.count()

    def read(row: int) -> Any:
        seed_all(next(reads), device)
        return dataset[row]

    try:
        return fingerprint_items(dataset, read)
    finally:
        set_rng_state(before, device)


def _draws(values: list[Any]) -> bool:
    """Whether a random number generator is among these objects, or among those that they hold."""
    seen: dict[int, Any] = {}
    while values and len(seen) < _MOST_OBJECTS:
        value = values.pop()
        if isinstance(value, _RANDOM):
            return True
        if id(value) in seen or isinstance(value, type | ModuleType | str | bytes | int | float | Tensor):
            continue
        seen[id(value)] = value
        inner = value.values() if isinstance(value, Mapping) else getattr(value, "__dict__", {}).values()
        values += islice(value if isinstance(value, list | tuple | set) else inner, _MOST_ITEMS)
    return bool(values)
