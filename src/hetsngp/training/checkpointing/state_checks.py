"""Checks of a state that was read from a checkpoint, before a run is restored from it.

Checksums find damage. These checks are for a file that was written by something else: they name what is wrong
where torch or Python would fail somewhere later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from hetsngp.training.checkpointing.randomness import rng_state, set_rng_state
from hetsngp.training.logs import COLUMNS

TYPES: dict[str, tuple[type, ...]] = {
    "plan": (dict,),
    "about": (dict,),
    "world_size": (int,),
    "place": (dict,),
    "rate": (int, float),
    "rows": (Tensor,),
    "watched": (bool,),
    "best": (int,),
    "finished": (bool,),
    "model": (dict,),
    "entrance": (bool, NoneType),
    "optimizer": (dict,),
    "average": (dict, NoneType),
    "statistics": (list,),
    "scaler": (dict, NoneType),
    "points": (Tensor,),
    "rng": (dict,),
    "epoch_rng": (dict,),
    "loader": (list,),
}
"""Types of the entries that every checkpoint has, those of release 0.1 included."""
COUNTS = ("epoch", "batches", "updates", "seen")


def check_state(state: dict[str, Any]) -> None:
    """Raise a ValueError unless ``state`` has the entries of a checkpoint, each of its type."""
    for name, types in TYPES.items():
        _check(name in state, f"{name} is missing")
        _check(type(state[name]) in types or (Tensor in types and isinstance(state[name], Tensor)), name)
    _check(state["world_size"] >= 1 and state["best"] >= 0 and math.isfinite(state["rate"]), "counts")
    _check(type(state.get("batch")) in (int, NoneType), "batch")
    place, rows = state["place"], state["rows"]
    _check(place.keys() == {*COUNTS, "total"}, "place")
    _check(all(type(place[name]) is int and place[name] >= 0 for name in COUNTS), "place")
    _check(isinstance(place["total"], Tensor) and place["total"].numel() == 1, "place")
    _check(rows.dim() == 2 and rows.shape[1] == len(COLUMNS), "rows")
    _check(_is_plain(state["plan"]) and isinstance(state["plan"].get("schedule"), dict), "plan")
    _check(_is_plain(state["about"]), "about")
    _check(_has_tensors(state["model"]), "model")
    average = state["average"]
    if average is not None:
        _check(type(average.get("steps")) is int and _has_tensors(average.get("state")), "average")
    _check(len(state["statistics"]) == 2 and all(map(_has_tensors, state["statistics"])), "statistics")
    groups = state["optimizer"].get("param_groups")
    _check(isinstance(groups, list) and all(isinstance(g, dict) for g in groups), "optimizer")
    _check(all(isinstance(group.get("params"), list) for group in groups), "optimizer")
    values = state["optimizer"].get("state")
    _check(isinstance(values, dict) and all(isinstance(v, dict) for v in values.values()), "optimizer")
    for name in ("rng", "epoch_rng"):
        _check(_has_tensors(state[name]), name)
    _check(all(isinstance(generator, Tensor) for generator in state["loader"]), "loader")


def check_finite_weights(state: dict[str, Tensor], names: Iterable[str]) -> None:
    """Raise a ValueError where a weight of those ``names`` is not finite."""
    for name in names:
        if name in state and not bool(state[name].isfinite().all()):
            raise ValueError(f"{name} has weights that are not finite")


def check_randomness(state: dict[str, Any], rank: int, device: torch.device) -> None:
    """Raise a ValueError where a generator would not take its state."""
    before = rng_state(device)
    try:
        for name in ("rng", "epoch_rng"):
            set_rng_state({key: value[rank] for key, value in state[name].items()}, device)
        for generator in state["loader"]:
            torch.Generator().set_state(generator.cpu())
    except (RuntimeError, TypeError, ValueError, LookupError, OverflowError) as error:
        raise ValueError(f"the states of its random number generators are not valid ({error})") from error
    finally:
        set_rng_state(before, device)


def _check(valid: bool, what: str) -> None:
    if not valid:
        raise ValueError(what if what.endswith("missing") else f"{what} is not what hetsngp writes")


def _has_tensors(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in value.items()
    )


def _is_plain(value: Any) -> bool:
    """Whether a value can be compared with one of ours: names, numbers, text, and lists of these."""
    if isinstance(value, dict):
        return all(isinstance(name, str) for name in value) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
