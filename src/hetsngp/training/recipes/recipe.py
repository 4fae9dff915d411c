"""Recipes: a training as a small TOML file, of the user or one of the configs that come with the package."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hetsngp._moved import renamed, renamed_arguments, renamed_attribute
from hetsngp.fitting.schedule import Schedule
from hetsngp.training.config import HeadConfig, TrainConfig
from hetsngp.training.hardware import Hardware
from hetsngp.training.recipes.keys import (
    INPUTS,
    SECTIONS,
    apply_change,
    check_keys,
    hint,
    make,
    options_of,
    rename_keys,
    task_type,
    typed,
)
from hetsngp.training.recipes.task import ImageTask, Task, VerdictRules

CONFIGS = Path(__file__).parents[2] / "configs"
BOUND_EVERY = 10
"""Steps from one measurement of the spectral norms to the next (docs/decisions.md)."""
SEEDS = 2**32


@renamed_arguments(plan="config")
@dataclass(frozen=True)
class Recipe:
    """Everything about a training except the folder of its results."""

    name: str
    """Name of a config of the package, or the stem of the file."""
    task: Task
    config: TrainConfig | HeadConfig
    """How the network is trained, or the head of a frozen one is fitted."""
    hardware: Hardware = field(default_factory=Hardware)
    verdicts: VerdictRules = field(default_factory=VerdictRules)
    changes: tuple[str, ...] = ()
    """Changes to the file, as "key=value"."""
    plan = renamed_attribute("plan", "config")

    def describe(self) -> dict[str, Any]:
        """Everything that decides the result, for JSON."""
        return {
            "name": self.name,
            "task": self.task.describe(),
            "config": self.config.describe(),
            "verdicts": asdict(self.verdicts),
        }

    def on_this_machine(self) -> tuple[Recipe, str | None]:
        """Drop hardware settings for GPUs where there is none; also returns a note that says so."""
        if self.task.frozen and self.hardware.devices == "auto":  # features are computed by one process
            return replace(self, hardware=replace(self.hardware, devices=1)), None
        asked = {text.partition("=")[0].strip() for text in self.changes}
        # A file with "cpu" was written for CPUs; a caller who sets "cpu" may have a file for GPUs.
        kind = "auto" if "hardware.accelerator" in asked else self.hardware.accelerator
        on_cpu = kind == "auto" and (self.hardware.accelerator == "cpu" or not torch.cuda.is_available())
        plain = {
            name: getattr(Hardware(), name)
            for name in ("precision", "channels_last", "compile")
            if f"hardware.{name}" not in asked and getattr(self.hardware, name) != getattr(Hardware(), name)
        }
        if not on_cpu or not plain:
            return self, None
        keeps = f"--set hardware.{next(iter(plain))}={getattr(self.hardware, next(iter(plain)))}".lower()
        note = f"no GPU: {', '.join(plain)} of the recipe left out ({keeps} would keep it)"
        return replace(self, hardware=replace(self.hardware, **plain)), note


def recipe_names() -> tuple[str, ...]:
    """Names of the recipes that come with the package: "cifar10", "cifar100/hetsngp", …"""
    files = CONFIGS.rglob("*.toml")
    return tuple(sorted(file.relative_to(CONFIGS).with_suffix("").as_posix() for file in files))


def recipe_file(source: str | Path) -> tuple[str, Path]:
    """Name and file of a recipe: a path that ends in .toml, or a name that :func:`recipe_names` lists."""
    if str(source).endswith(".toml"):
        path = Path(source).expanduser()
        if not path.is_file():
            raise FileNotFoundError(
                f"there is no recipe {path}; `hetsngp recipes` lists those that come with hetsngp"
            )
        return path.stem, path
    name = str(source)
    if name not in recipe_names() and Path(name).exists():
        raise ValueError(
            f"{name} is no recipe: to train on it, `hetsngp train images --set data={name}`, or "
            "write a .toml file"
        )
    if name not in recipe_names():
        close = hint(difflib.get_close_matches(name, recipe_names(), n=1))
        raise ValueError(f"unknown recipe {name!r}: {close}`hetsngp recipes` lists all; a file ends in .toml")
    return name, CONFIGS / f"{name}.toml"


def read_recipe(source: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a .toml file, or a recipe of the package by name; ``changes`` are such as "schedule.epochs=3".

    >>> recipe = read_recipe("cifar10", ["network=wrn-10-1", "schedule.epochs=2", "options.rank=3"])
    >>> recipe.task.network, recipe.config.schedule.epochs, dict(recipe.task.options)["rank"]
    ('wrn-10-1', 2, 3)
    """
    name, path = recipe_file(source)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from error
    try:
        rename_keys(content)
        # The kind of input first, which decides what keys there are.
        for change in sorted(changes, key=lambda change: change.partition("=")[0].strip() != INPUTS):
            apply_change(content, change)
        return _recipe(name, content, tuple(changes))
    except (ValueError, TypeError) as error:
        raise ValueError(f"recipe {name}: {error}") from error


def described_recipe(described: Mapping[str, Any], changes: Sequence[str] = ()) -> Recipe:
    """Recipe of a description, as :meth:`Recipe.describe` makes it: without hardware."""
    task = dict(described["task"])
    kind = task_type({INPUTS: task.pop(INPUTS, ImageTask.inputs)})
    options = {name: float(value) if value == "inf" else value for name, value in task["options"].items()}
    found, values = kind(**{**task, "options": options}), dict(described["config"])
    config: TrainConfig | HeadConfig
    if found.frozen:
        config = HeadConfig(**values)
    else:
        schedule = {**values["schedule"], "milestones": tuple(values["schedule"]["milestones"])}
        config = TrainConfig(**{**values, "schedule": Schedule(**schedule)})
    verdicts = VerdictRules(**described["verdicts"])
    return Recipe(described["name"], found, config, verdicts=verdicts, changes=tuple(changes))


def _recipe(name: str, content: dict[str, Any], changes: tuple[str, ...]) -> Recipe:
    check_keys(content)
    for key in ("data", "network", "method"):
        if key not in content:
            raise ValueError(f"{key} is missing: set it in the file, or --set {key}=…")
    top = {key: value for key, value in content.items() if key not in SECTIONS and key != INPUTS}
    seed = typed("seed", top.pop("seed", 0), TrainConfig)
    if not 0 <= seed < SEEDS:
        raise ValueError(f"seed is a whole number from 0 to {SEEDS - 1}, got {seed}")
    task = make(task_type(content), "", {**top, "options": options_of(content.get("options", {}))})
    hardware = make(Hardware, "hardware", content.get("hardware", {}))
    verdicts = make(VerdictRules, "verdicts", content.get("verdicts", {}))
    config = _head_config(content, seed) if task.frozen else _train_config(content, seed)
    return Recipe(name, task, config, hardware, verdicts, changes)


def _head_config(content: dict[str, Any], seed: int) -> HeadConfig:
    for section in ("schedule", "training"):
        if content.get(section):
            raise ValueError(
                f"{section}.{next(iter(content[section]))} is for a network that is trained, and this one is "
                f"frozen: leave out [{section}], or --set frozen=false"
            )
    return HeadConfig(seed)


def _train_config(content: dict[str, Any], seed: int) -> TrainConfig:
    schedule_values = dict(content.get("schedule", {}))
    shares = schedule_values.pop("milestone_shares", None)
    if "epochs" not in schedule_values:
        raise ValueError("schedule.epochs is missing: set the number of epochs")
    epochs = typed("schedule.epochs", schedule_values["epochs"], Schedule)
    if shares is not None:
        if "milestones" in schedule_values:
            raise ValueError(
                "schedule.milestones and schedule.milestone_shares set the same thing: leave one out"
            )
        if not isinstance(shares, list) or not all(isinstance(s, float | int) and 0 < s < 1 for s in shares):
            raise ValueError(
                f"schedule.milestone_shares are between 0 and 1, e.g. [0.5, 0.8], got {shares!r}"
            )
        schedule_values["milestones"] = [share * epochs for share in shares]
    warmup = typed("schedule.warmup", schedule_values.get("warmup", 0), Schedule)
    schedule_values["warmup"] = min(warmup, epochs / 2)  # also for a recipe with few epochs, to try it
    schedule = make(Schedule, "schedule", {"smooth": True, **schedule_values})
    training = {"bound_every": BOUND_EVERY, **content.get("training", {})}
    config: TrainConfig = make(TrainConfig, "training", {**training, "schedule": schedule, "seed": seed})
    return config


def __getattr__(name: str) -> Any:
    return renamed(__name__, name)
