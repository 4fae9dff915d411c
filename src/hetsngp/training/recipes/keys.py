"""Keys of a recipe file, old keys among them, and values converted to the types of the dataclass fields."""

from __future__ import annotations

import difflib
import tomllib
import types
import typing
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from hetsngp.fitting.schedule import Schedule
from hetsngp.models.options import Options
from hetsngp.training.config import TrainConfig
from hetsngp.training.hardware import Hardware
from hetsngp.training.recipes.task import TASKS, ImageTask, Task, VerdictRules

INPUTS = "inputs"
"""Key that chooses the kind of input."""

SECTIONS: dict[str, type] = {
    "options": Options,
    "schedule": Schedule,
    "training": TrainConfig,
    "hardware": Hardware,
    "verdicts": VerdictRules,
}
"""Tables of a recipe file, and whose fields their keys are."""
NOT_IN_FILE = {"training": ("schedule", "seed"), "options": ("class_counts", "dataset_size")}
"""Fields that are set elsewhere in the file, or by the data."""
RENAMED = {
    "schedule.gp_lr": "schedule.gp_lr_multiplier",
    "training.average": "training.ema_decay",
    "verdicts.right": "verdicts.correct",
}
"""Key of 0.1 → its new name. An old key is read with a DeprecationWarning."""


def task_type(content: Mapping[str, Any]) -> type[Task]:
    """Class of the task of a recipe: that of the kind of input it is for."""
    kind = content.get(INPUTS, ImageTask.inputs)
    if kind not in TASKS:
        raise ValueError(f"{INPUTS} is one of {', '.join(TASKS)}, got {kind!r:.50}")
    return TASKS[kind]


def known_keys(task: type[Task] = ImageTask) -> tuple[str, ...]:
    """Every key of a recipe for that kind of input, as ``--set`` takes it."""
    top = [INPUTS, *(f.name for f in fields(task) if f.name != "options")]
    inner = [
        f"{section}.{f.name}"
        for section, kind in SECTIONS.items()
        for f in fields(kind)
        if f.name not in NOT_IN_FILE.get(section, ())
    ]
    return (*top, "seed", *inner, "schedule.milestone_shares")


def rename_keys(content: dict[str, Any]) -> None:
    """Replace the old keys of a recipe file by the new ones."""
    for old, new in RENAMED.items():
        section, _, name = old.partition(".")
        table = content.get(section)
        if isinstance(table, dict) and name in table:
            new_name = _current_key(old).partition(".")[2]
            if new_name in table:
                raise ValueError(f"{old} is now called {new}, and both are given: leave out {old}")
            content[section] = {new_name if key == name else key: value for key, value in table.items()}


def _current_key(key: str) -> str:
    new = RENAMED.get(key, key)
    if new != key:
        warnings.warn(f"the recipe key {key} is now called {new}", DeprecationWarning, stacklevel=4)
    return new


def current_config(described: Mapping[str, Any]) -> dict[str, Any]:
    """A description of a :class:`TrainConfig`, maybe written by 0.1, with the names of its fields now."""
    return {
        **_current_names("training", described),
        "schedule": _current_names("schedule", described["schedule"]),
    }


def current_description(described: Any) -> Any:
    """A description of a recipe, maybe written by 0.1, with the names that ``Recipe.describe`` has now."""
    try:
        found = dict(described)
        found["config"] = current_config(found.pop("plan" if "plan" in found else "config"))
        found["verdicts"] = _current_names("verdicts", found["verdicts"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return described  # not a description of a recipe
    return found


def _current_names(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        RENAMED.get(f"{section}.{name}", name).rpartition(".")[2]: value for name, value in values.items()
    }


def check_keys(content: Mapping[str, Any]) -> None:
    """Raise unless all keys are known, and tables are tables."""
    task = task_type(content)
    for key, value in content.items():
        if key in SECTIONS:
            if not isinstance(value, Mapping):
                raise ValueError(f"{key} is a table: [{key}] on a line of its own, its keys below")
            for inner in value:
                _check_key(f"{key}.{inner}", task)
        else:
            _check_key(key, task)


def _check_key(key: str, task: type[Task]) -> None:
    known = known_keys(task)
    if key in known:
        return
    of_others = [kind for kind, other in TASKS.items() if key in known_keys(other)]
    if of_others:
        raise ValueError(f"{key!r} is no key of recipes for {task.inputs}, but for {', '.join(of_others)}")
    # By the whole name, or by the last part: "epochs" is schedule.epochs.
    ends = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    close = ends or difflib.get_close_matches(key, known, n=1)
    raise ValueError(f"unknown key {key!r}: {hint(close)}docs/recipes.md has all of them")


def hint(close: Sequence[str]) -> str:
    """Suggest the first of ``close``, for an error message."""
    return f"did you mean {close[0]!r}? " if close else ""


def apply_change(content: dict[str, Any], change: str) -> None:
    """Apply a change such as "schedule.epochs=3": the value is TOML, or a bare word."""
    key, equals, text = change.partition("=")
    key, text = key.strip(), text.strip()
    if not equals or not key or not text:
        raise ValueError(f"--set takes key=value, e.g. --set schedule.epochs=3, got {change!r}")
    key = _current_key(key)
    task = task_type(content)
    _check_key(key, task)
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    if not isinstance(value, str) and _is_word(key, task):
        value = text  # a folder may be called 2024-05-01, which TOML takes for a date
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


def _is_word(key: str, task: type[Task]) -> bool:
    annotation = typing.get_type_hints(task).get(key)
    return annotation in (str, str | None)


def make(kind: type, section: str, values: Mapping[str, Any]) -> Any:
    """Make the dataclass ``kind`` from the values of a section."""
    found = {
        name: typed(f"{section}.{name}" if section else name, value, kind) for name, value in values.items()
    }
    return kind(**found)


def options_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options of :func:`hetsngp.build` from the values in the file."""
    return {name: typed(f"options.{name}", value, Options) for name, value in values.items()}


def typed(key: str, value: Any, kind: type) -> Any:
    """Convert ``value`` to the type of the field of ``kind``; errors name the key."""
    name = key.rpartition(".")[2]
    annotation = typing.get_type_hints(kind)[name]
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    allowed = typing.get_args(annotation) if is_union else (annotation,)
    allowed = tuple(str if typing.get_origin(a) is typing.Literal else a for a in allowed)
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
