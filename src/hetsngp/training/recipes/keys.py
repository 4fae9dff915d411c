"""The keys of a recipe file, and values as the classes behind them want them."""

from __future__ import annotations

import difflib
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from hetsngp.fitting.schedule import Schedule
from hetsngp.models.options import Options
from hetsngp.training.config import TrainConfig
from hetsngp.training.hardware import Hardware
from hetsngp.training.recipes.task import ImageTask, VerdictRules

SECTIONS: dict[str, type] = {
    "options": Options,
    "schedule": Schedule,
    "training": TrainConfig,
    "hardware": Hardware,
    "verdicts": VerdictRules,
}
"""Tables of a recipe file, and whose fields their keys are."""
NOT_SAID = {"training": ("schedule", "seed"), "options": ("class_counts", "dataset_size")}
"""Fields that have a place of their own, or that the data decide."""


def known_keys() -> tuple[str, ...]:
    """Every key of a recipe, as ``--set`` takes it."""
    top = [f.name for f in fields(ImageTask) if f.name != "options"]
    inner = [
        f"{section}.{f.name}"
        for section, kind in SECTIONS.items()
        for f in fields(kind)
        if f.name not in NOT_SAID.get(section, ())
    ]
    return (*top, "seed", *inner, "schedule.milestone_shares")


def check_keys(content: Mapping[str, Any]) -> None:
    """All of them are known, and tables are tables."""
    known = known_keys()
    for key, value in content.items():
        if key in SECTIONS:
            if not isinstance(value, Mapping):
                raise ValueError(f"{key} is a table: [{key}] on a line of its own, its keys below")
            for inner in value:
                _check_key(f"{key}.{inner}", known)
        else:
            _check_key(key, known)


def _check_key(key: str, known: Sequence[str]) -> None:
    if key in known:
        return
    # By the whole name, or by the last part: "epochs" is schedule.epochs.
    ends = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    close = ends or difflib.get_close_matches(key, known, n=1)
    raise ValueError(f"unknown key {key!r}: {hint(close)}docs/recipes.md has all of them")


def hint(close: Sequence[str]) -> str:
    """For an error."""
    return f"did you mean {close[0]!r}? " if close else ""


def apply_change(content: dict[str, Any], change: str) -> None:
    """As in "schedule.epochs=3": TOML on the right, or a bare word."""
    key, equals, text = change.partition("=")
    key, text = key.strip(), text.strip()
    if not equals or not key or not text:
        raise ValueError(f"--set takes key=value, e.g. --set schedule.epochs=3, got {change!r}")
    _check_key(key, known_keys())
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    section, dot, inner = key.partition(".")
    if not dot:
        content[key] = value
        return
    table = content.setdefault(section, {})
    if not isinstance(table, dict):
        raise ValueError(f"{section} is a table: [{section}] on a line of its own, its keys below")
    if (key == "schedule.decay" and value != "step") or inner in ("milestones", "milestone_shares"):
        table.pop("milestones", None), table.pop("milestone_shares", None)
    table[inner] = value


def make(kind: type, section: str, values: Mapping[str, Any]) -> Any:
    """A dataclass of what the file says."""
    found = {
        name: typed(f"{section}.{name}" if section else name, value, kind) for name, value in values.items()
    }
    return kind(**found)


def options_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of :func:`hetsngp.build`."""
    return {name: typed(f"options.{name}", value, Options) for name, value in values.items()}


def typed(key: str, value: Any, kind: type) -> Any:
    """``value`` as the field of ``kind`` wants it, or an error that names the key."""
    name = key.rpartition(".")[2]
    told = typing.get_type_hints(kind)[name]
    allowed = typing.get_args(told) if isinstance(told, types.UnionType) else (told,)
    if value == "none" and type(None) in allowed:
        return None
    if any(typing.get_origin(a) is tuple for a in allowed):
        if not isinstance(value, list) or not all(type(item) in (int, float) for item in value):
            raise ValueError(f"{key} is a list of numbers, e.g. [30, 60, 80], got {value!r}")
        return tuple(value)
    simple = tuple(a for a in allowed if a in (int, float, str, bool))
    if not simple or len(simple) < len([a for a in allowed if a is not type(None)]):
        return value  # a class of ours, or anything
    fits = (
        isinstance(value, bool)
        if simple == (bool,)
        else isinstance(value, simple) and not isinstance(value, bool)
    )
    if not fits and float in simple and isinstance(value, int) and not isinstance(value, bool):
        value, fits = float(value), True
    if not fits:
        words = {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}
        raise ValueError(f"{key} is {' or '.join(words[a] for a in simple)}, got {value!r}")
    return value
