"""Recipes: a training as a small TOML file, from the book that comes with the package or the user's own."""

from __future__ import annotations

import difflib
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from hetsngp.options import Options
from hetsngp.recipes import METHODS, check_options
from hetsngp.schedule import Schedule
from hetsngp.training.hardware import Hardware
from hetsngp.training.plan import Plan
from hetsngp.validation import check_choice, check_positive

BOOK = Path(__file__).parents[1] / "book"
BOUND_EVERY = 10
"""Steps from one measurement of the spectral bound to the next (docs/decisions.md)."""
SEEDS = 2**32


@dataclass(frozen=True)
class ImageTask:
    """What is to be learned by what."""

    data: str
    """A name of ``hetsngp.data.registry`` such as cifar100 or cifar10n:worse, a folder, or a .npz file."""
    network: str = "wrn-16-8"
    """A Wide ResNet, or the name of a network in timm, which is converted."""
    method: str = "hetsngp"
    pretrained: bool = False
    """Whether timm's network comes with its weights."""
    size: int | None = None
    """Of image files, pixels of a side."""
    resize: int | None = None
    """Of image files, when they are not trained on: the short side before the middle is taken."""
    from_disk: bool = False
    """Read image files batch by batch, random parts of them, in place of holding all in memory."""
    workers: int | None = None
    """Processes that read from disk, for each device; None: one a core, at most 8."""
    batch_size: int = 128
    """Over all processes."""
    held_out: float = 0.1
    """Share of the training images kept to stop and to calibrate by."""
    calibrate: bool = True
    """Set temperature and posterior scale on the held-out images."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of :func:`hetsngp.build`."""

    def __post_init__(self) -> None:
        check_choice("method", self.method, tuple(METHODS))
        check_positive("batch_size", self.batch_size, integer=True)
        check_options(dict(self.options))
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out is a share between 0 and 1, e.g. 0.1, got {self.held_out!r}")
        for name in ("size", "resize"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name), integer=True)
        if self.workers is not None and self.workers < 0:
            raise ValueError(f"workers is a number of processes, 0 for none, got {self.workers!r}")
        if self.pretrained and self.network.startswith("wrn-"):
            raise ValueError(f"{self.network} has no pretrained weights: name a network of timm's")


@dataclass(frozen=True)
class VerdictRules:
    """What a prediction has to be to be called confident, or unfamiliar: see :mod:`hetsngp.serving`."""

    right: float = 0.95
    """Share of right answers among held-out inputs that are called confident."""
    unfamiliar: float = 0.05
    """Share of held-out inputs that may be called unfamiliar."""

    def __post_init__(self) -> None:
        for name in ("right", "unfamiliar"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"verdicts.{name} is a share between 0 and 1, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Recipe:
    """Everything about a training but where its results go."""

    name: str
    """In the book, or the stem of the file."""
    task: ImageTask
    plan: Plan
    hardware: Hardware = field(default_factory=Hardware)
    verdicts: VerdictRules = field(default_factory=VerdictRules)
    changes: tuple[str, ...] = ()
    """What was asked for in place of what the file says, as "key=value"."""

    def describe(self) -> dict[str, Any]:
        """All that decides the result, for JSON."""
        task = {**asdict(self.task), "options": _plain(dict(self.task.options))}
        del task["workers"]
        return {
            "name": self.name,
            "task": task,
            "plan": self.plan.describe(),
            "verdicts": asdict(self.verdicts),
        }

    def on_this_machine(self) -> tuple[Recipe, str | None]:
        """With hardware settings that are for GPUs left out where there is none; and a note that says so."""
        on_cpu = self.hardware.accelerator == "cpu" or (
            self.hardware.accelerator == "auto" and not torch.cuda.is_available()
        )
        asked = {text.partition("=")[0].strip() for text in self.changes}
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


def book_names() -> tuple[str, ...]:
    """The recipes that come with the package: "cifar10", "cifar100/hetsngp", …"""
    return tuple(sorted(file.relative_to(BOOK).with_suffix("").as_posix() for file in BOOK.rglob("*.toml")))


def recipe_file(source: str | Path) -> tuple[str, Path]:
    """Name and file of a recipe: a path that ends in .toml, or a name in the book."""
    if str(source).endswith(".toml"):
        path = Path(source).expanduser()
        if not path.is_file():
            raise FileNotFoundError(
                f"there is no recipe {path}; `hetsngp recipes` lists those that come with hetsngp"
            )
        return path.stem, path
    name = str(source)
    if name not in book_names() and Path(name).exists():
        raise ValueError(
            f"{name} is no recipe: to train on it, `hetsngp train images --set data={name}`, or "
            "write a .toml file"
        )
    if name not in book_names():
        hint = _hint(difflib.get_close_matches(name, book_names(), n=1))
        raise ValueError(f"unknown recipe {name!r}: {hint}`hetsngp recipes` lists them; a file ends in .toml")
    return name, BOOK / f"{name}.toml"


def read_recipe(source: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """The recipe in a .toml file, or of that name in the book, with ``changes`` such as "schedule.epochs=3".

    >>> recipe = read_recipe("cifar10", ["network=wrn-10-1", "schedule.epochs=2", "options.rank=3"])
    >>> recipe.task.network, recipe.plan.schedule.epochs, dict(recipe.task.options)["rank"]
    ('wrn-10-1', 2, 3)
    """
    name, path = recipe_file(source)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from error
    try:
        for change in changes:
            _apply(content, change)
        return _recipe(name, content, tuple(changes))
    except (ValueError, TypeError) as error:
        raise ValueError(f"recipe {name}: {error}") from error


def _recipe(name: str, content: dict[str, Any], changes: tuple[str, ...]) -> Recipe:
    _check_keys(content)
    for key in ("data", "network", "method"):
        if key not in content:
            raise ValueError(f"{key} is missing: say it in the file, or --set {key}=…")
    top = {key: value for key, value in content.items() if key not in SECTIONS}
    seed = _typed("seed", top.pop("seed", 0), Plan)
    if not 0 <= seed < SEEDS:
        raise ValueError(f"seed is a whole number from 0 to {SEEDS - 1}, got {seed}")
    task = _make(ImageTask, "", {**top, "options": _options(content.get("options", {}))})
    rate = dict(content.get("schedule", {}))
    shares = rate.pop("milestone_shares", None)
    if "epochs" not in rate:
        raise ValueError("schedule.epochs is missing: say how long to train")
    epochs = _typed("schedule.epochs", rate["epochs"], Schedule)
    if shares is not None:
        if "milestones" in rate:
            raise ValueError("schedule.milestones and schedule.milestone_shares say the same: leave one out")
        if not isinstance(shares, list) or not all(isinstance(s, float | int) and 0 < s < 1 for s in shares):
            raise ValueError(
                f"schedule.milestone_shares are between 0 and 1, e.g. [0.5, 0.8], got {shares!r}"
            )
        rate["milestones"] = [share * epochs for share in shares]
    warmup = _typed("schedule.warmup", rate.get("warmup", 0), Schedule)
    rate["warmup"] = min(warmup, epochs / 2)  # a recipe cut short for a look
    schedule = _make(Schedule, "schedule", {"smooth": True, **rate})
    training = {"bound_every": BOUND_EVERY, **content.get("training", {})}
    plan = _make(Plan, "training", {**training, "schedule": schedule, "seed": seed})
    hardware = _make(Hardware, "hardware", content.get("hardware", {}))
    return Recipe(
        name, task, plan, hardware, _make(VerdictRules, "verdicts", content.get("verdicts", {})), changes
    )


# --- keys and values --------------------------------------------------------------------------------------

SECTIONS: dict[str, type] = {
    "options": Options,
    "schedule": Schedule,
    "training": Plan,
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


def _check_keys(content: Mapping[str, Any]) -> None:
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
    raise ValueError(f"unknown key {key!r}: {_hint(close)}docs/recipes.md has all of them")


def _hint(close: Sequence[str]) -> str:
    return f"did you mean {close[0]!r}? " if close else ""


def _apply(content: dict[str, Any], change: str) -> None:
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


def _make(kind: type, section: str, values: Mapping[str, Any]) -> Any:
    """A dataclass of what the file says."""
    found = {
        name: _typed(f"{section}.{name}" if section else name, value, kind) for name, value in values.items()
    }
    return kind(**found)


def _options(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _typed(f"options.{name}", value, Options) for name, value in values.items()}


def _typed(key: str, value: Any, kind: type) -> Any:
    """``value`` as the field of ``kind`` wants it, or an error that names the key."""
    name = key.rpartition(".")[2]
    hint = typing.get_type_hints(kind)[name]
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
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


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Options that strict JSON can hold."""
    return {name: "inf" if value == float("inf") else value for name, value in options.items()}
