"""docs/recipes.md has every key of a recipe with its default, and every recipe of the package."""

import itertools
import re
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from hetsngp.choices import FEATURES, LIKELIHOODS, LINKS, NOISES, NORMALIZATIONS, POSTERIORS, SAMPLERS
from hetsngp.fitting.schedule import DECAYS, OPTIMIZERS
from hetsngp.models.methods import METHODS
from hetsngp.training.hardware import PRECISIONS, STRATEGIES
from hetsngp.training.recipes.keys import RENAMED, SECTIONS, known_keys
from hetsngp.training.recipes.recipe import BOUND_EVERY, read_recipe, recipe_file, recipe_names
from hetsngp.training.recipes.task import ImageTask

PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"


def first_line(name: str) -> str:
    """Of a recipe's header."""
    return recipe_file(name)[1].read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


def rows(head: str) -> list[list[str]]:
    """Cells of the rows of every table with that head."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    found = []
    for start in (number for number, line in enumerate(lines) if line == head):
        table = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
        found += [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in table]
    return found


def documented() -> dict[str, tuple[str, str]]:
    """Default and meaning of every key."""
    return {
        key.strip("`"): (default, meaning) for key, default, meaning in rows("| key | default | meaning |")
    }


def default_of(key: str) -> object:
    """None: nothing is given; MISSING: it must be."""
    special = {
        **dict.fromkeys(("data", "network", "method"), MISSING),  # a file says them
        "seed": 0,
        "inputs": "images",
        "schedule.smooth": True,
        "schedule.milestone_shares": None,
        "schedule.milestones": None,
        "training.bound_every": BOUND_EVERY,
    }
    if key in special:
        return special[key]
    section, _, inner = key.rpartition(".")
    kind = SECTIONS[section] if section else ImageTask
    return next(field.default for field in fields(kind) if field.name == inner)


def test_every_key_is_documented_and_no_other() -> None:
    keys = [key for key, *_ in rows("| key | default | meaning |")]
    assert sorted(key.strip("`") for key in keys) == sorted(known_keys())


@pytest.mark.parametrize("key", known_keys())
def test_a_key_is_documented_with_its_default(key: str) -> None:
    default, meaning = documented()[key]
    expected = default_of(key)
    if expected is MISSING:
        assert default == "required"
    elif expected is None:
        assert default == "–"
    else:
        value = tomllib.loads(f"value = {default.strip('`')}")["value"]
        assert (value, type(value)) == (expected, type(expected))
    assert len(meaning) > 5


def test_old_keys_are_documented() -> None:
    listed = {old.strip("`"): new.strip("`") for old, new in rows("| old key | new key |")}
    assert listed == RENAMED


CHOICES = {
    "method": tuple(METHODS),
    "options.normalization": NORMALIZATIONS,
    "options.features": FEATURES,
    "options.posterior": POSTERIORS,
    "options.noise": NOISES,
    "options.link": LINKS,
    "options.likelihood": LIKELIHOODS,
    "options.sampler": SAMPLERS,
    "schedule.optimizer": OPTIMIZERS,
    "schedule.decay": DECAYS,
    "hardware.strategy": STRATEGIES,
    "hardware.precision": PRECISIONS,
}


@pytest.mark.parametrize("key", CHOICES)
def test_choices_are_all_named(key: str) -> None:
    assert set(CHOICES[key]) <= set(re.findall(r"`([^`]+)`", documented()[key][1]))


def test_recipes_are_listed_as_their_files_begin() -> None:
    listed = {name.strip("`"): what for name, what in rows("| recipe | what it is |")}
    assert listed == {name: first_line(name) for name in recipe_names()}


def test_the_file_shown_is_one(tmp_path: Path) -> None:
    shown = re.search(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None
    (tmp_path / "mine.toml").write_text(shown[1], encoding="utf-8")
    recipe = read_recipe(tmp_path / "mine.toml")
    assert (recipe.name, recipe.task.data, recipe.config.ema_decay) == ("mine", "photos", 0.998)
