"""Recipes: what a file says, what --set changes, what is refused, and what counts as another recipe."""

import json
import math
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from hetsngp.fitting.schedule import Schedule
from hetsngp.models.options import Options
from hetsngp.training.config import TrainConfig
from hetsngp.training.hardware import Hardware
from hetsngp.training.recipes.keys import RENAMED, current_description, known_keys
from hetsngp.training.recipes.recipe import Recipe, described_recipe, read_recipe, recipe_file, recipe_names
from hetsngp.training.recipes.task import TASKS, ImageTask, Task, VerdictRules

SAVED = Path(__file__).parents[2] / "saved_0_1"
SMALLEST = 'data = "cifar10"\nnetwork = "wrn-10-1"\nmethod = "sngp"\n[schedule]\nepochs = 10\n'
WHOLE = """
data = "photos"
network = "resnet50"
method = "hetsngp"
pretrained = true
size = 224
resize = 256
from_disk = true
workers = 3
batch_size = 64
held_out = 0.2
calibrate = false
seed = 7

[options]
rank = 3
temperature = 2          # a whole number where any will do
spectral_bound = inf
sample_beta = true

[schedule]
epochs = 20
lr = 0.1
optimizer = "sgd"
decay = "step"
milestone_shares = [0.25, 0.5]
gamma = 0.2
warmup = 1
smooth = false

[training]
accumulate = 2
clip = 1
ema_decay = 0.99
patience = 4

[hardware]
precision = "bf16-mixed"
channels_last = true
devices = 4

[verdicts]
correct = 0.9
"""


def written(tmp_path: Path, text: str, name: str = "mine.toml") -> Path:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path / name


# --- files ----------------------------------------------------------------------------------------------


def test_all_that_a_file_says(tmp_path: Path) -> None:
    schedule = Schedule(20, 0.1, optimizer="sgd", decay="step", milestones=(5, 10), gamma=0.2, warmup=1)
    assert read_recipe(written(tmp_path, WHOLE)) == Recipe(
        name="mine",
        task=ImageTask(
            "photos",
            "resnet50",
            "hetsngp",
            pretrained=True,
            size=224,
            resize=256,
            from_disk=True,
            workers=3,
            batch_size=64,
            held_out=0.2,
            calibrate=False,
            options={"rank": 3, "temperature": 2.0, "spectral_bound": math.inf, "sample_beta": True},
        ),
        config=TrainConfig(
            schedule, accumulate=2, clip=1.0, ema_decay=0.99, patience=4, bound_every=10, seed=7
        ),
        hardware=Hardware(precision="bf16-mixed", channels_last=True, devices=4),
        verdicts=VerdictRules(correct=0.9, unfamiliar=0.05),
    )


def test_what_a_file_leaves_out(tmp_path: Path) -> None:
    recipe = read_recipe(written(tmp_path, SMALLEST))
    assert recipe.task == ImageTask("cifar10", "wrn-10-1", "sngp")
    assert recipe.config == TrainConfig(Schedule(10, smooth=True), bound_every=10)
    assert (recipe.hardware, recipe.verdicts, recipe.changes) == (Hardware(), VerdictRules(), ())


def test_a_name_is_a_file_of_the_package() -> None:
    for name in recipe_names():
        found, path = recipe_file(name)
        assert found == name
        assert read_recipe(name) == replace(read_recipe(path), name=name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data = = 1", "is not a TOML file"),
        (b"\xff\xfe", "is not a TOML file"),
        (SMALLEST.replace("method", "methods"), "unknown key 'methods': did you mean 'method'?"),
        (SMALLEST.replace("[schedule]\n", ""), "unknown key 'epochs': did you mean 'schedule.epochs'?"),
        (SMALLEST + "[sheduler]\nlr = 1\n", "unknown key 'sheduler'"),
        (SMALLEST + "[training]\nseed = 1\n", "unknown key 'training.seed': did you mean 'seed'?"),
        (SMALLEST + "[options]\nclass_counts = [1]\n", "unknown key 'options.class_counts'"),
        ("options = 3\n" + SMALLEST, "options is a table: [options] on a line of its own"),
        (SMALLEST.replace('data = "cifar10"\n', ""), "data is missing: set it in the file, or --set data=…"),
        (SMALLEST.replace("epochs = 10", ""), "schedule.epochs is missing"),
        (SMALLEST + "milestones = [3]\nmilestone_shares = [0.3]\n", "set the same thing: leave one out"),
        (SMALLEST.replace("10\n", "2020-01-01\n"), "schedule.epochs is a whole number"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str | bytes, words: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        read_recipe(file)
    assert "mine" in str(refused.value)


def test_sources_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no recipe .*gone\.toml"):
        read_recipe(tmp_path / "gone.toml")
    with pytest.raises(ValueError, match=re.escape(f"hetsngp train images --set data={tmp_path}")):
        read_recipe(str(tmp_path))
    with pytest.raises(
        ValueError, match="unknown recipe 'cifar100/hetsnpg': did you mean 'cifar100/hetsngp'"
    ):
        read_recipe("cifar100/hetsnpg")
    with pytest.raises(ValueError, match="unknown recipe"):  # no file outside the configs
        read_recipe("../configs/cifar100/hetsngp")


# --- changes --------------------------------------------------------------------------------------------

STEPS = SMALLEST + 'decay = "step"\nmilestone_shares = [0.5]\nwarmup = 2\n[options]\nnormalization = "rms"\n'
CHANGES: dict[str, tuple[Any, ...]] = {
    "data": ("svhn", "cifar10n:worse", "a/folder with spaces", "runs/#1.npz"),
    "network": ("wrn-16-8", '"resnet50"'),
    "inputs": ("images",),
    "method": ("hetsngp",),
    "size": (32, "none"),
    "resize": (40,),
    "from_disk": ("true",),
    "features": ("runs/features",),
    "frozen": ("false",),
    "head_first": ("false",),
    "workers": (0, "none"),
    "batch_size": (1_000,),
    "held_out": (0.25, "1e-3"),
    "calibrate": ("false",),
    "labels": ("runs/audit", "none"),
    "fold": ("2/5", "none"),
    "seed": (3,),
    "options.rank": (2,),
    "options.temperature": (0.5, 2),
    "options.random_features": (64,),
    "options.amplitude": (2.5,),
    "options.length_scale": (1.5,),
    "options.normalization": ("polar", "none"),
    "options.kernel": ("rbf+linear",),
    "options.linear_share": (0.2,),
    "options.features": ("inducing",),
    "options.posterior": ("none",),
    "options.noise": ("feature",),
    "options.link": ("sigmoid",),
    "options.likelihood": ("mean_log",),
    "options.sampler": ("mc",),
    "options.num_samples": (100, "none"),
    "options.spectral_bound": ("inf", 6),
    "options.num_members": (2,),
    "options.input_repetition": (0.5,),
    "options.batch_repetition": (4,),
    "options.latent_dim": (3,),
    "options.flow_layers": (2,),
    "options.entropy_weight": (0,),
    "options.sample_beta": ("true",),
    "schedule.epochs": (12,),
    "schedule.lr": ("1e-2",),
    "schedule.weight_decay": (0,),
    "schedule.gp_lr_multiplier": (10,),
    "schedule.stop_after": (3,),
    "schedule.optimizer": ("sgd",),
    "schedule.momentum": (0.5,),
    "schedule.decay": (),  # below: it takes the milestones with it
    "schedule.warmup": (0.5,),
    "schedule.milestones": ("[2, 7.5]",),
    "schedule.milestone_shares": ("[0.1, 0.9]",),
    "schedule.gamma": (0.5,),
    "schedule.smooth": ("false",),
    "training.accumulate": (2,),
    "training.clip": (1,),
    "training.ema_decay": (0.9,),
    "training.patience": (5,),
    "training.best": ("false",),
    "training.bound_every": (1,),
    "training.mixup": (0.2, 0),
    "hardware.devices": (2, "auto"),
    "hardware.nodes": (2,),
    "hardware.strategy": ("fsdp",),
    "hardware.accelerator": ("cpu",),
    "hardware.precision": ("16-mixed",),
    "hardware.channels_last": ("true",),
    "hardware.compile": ("true",),
    "verdicts.correct": (0.9,),
    "verdicts.unfamiliar": (0.01,),
    "pretrained": (),  # below: it needs another network
}
"""Every key, and values that it takes."""
SAME = {"hardware.devices": "auto", "size": "none", "workers": "none", "options.num_samples": "none"}
SAME |= {
    "frozen": "false",
    "head_first": "false",
    "inputs": "images",
    "labels": "none",
    "fold": "none",
    "training.mixup": 0,
}
"""Values that are there already."""


def at(recipe: Recipe, key: str) -> Any:
    """What a recipe has under a key."""
    section, dot, name = key.partition(".")
    if not dot:
        return recipe.config.seed if key == "seed" else getattr(recipe.task, key)
    if section == "options":
        return recipe.task.options[name]
    places = {"schedule": recipe.config.schedule, "training": recipe.config}
    return getattr(places.get(section) or getattr(recipe, section), name)


def expected(value: Any) -> Any:
    """What a text means, by TOML's rules."""
    if not isinstance(value, str) or value in ("auto",):
        return value
    known = {"true": True, "false": False, "inf": math.inf, "none": None, '"resnet50"': "resnet50"}
    if value in known:
        return known[value]
    if value.startswith("["):
        return tuple(float(part) for part in value[1:-1].split(","))
    return float(value) if re.fullmatch(r"\de-\d", value) else value


@pytest.mark.parametrize("key", CHANGES)
def test_every_key_can_be_set_and_counts_if_it_decides(tmp_path: Path, key: str) -> None:
    file = written(tmp_path, STEPS)
    base = read_recipe(file)
    for value in CHANGES[key]:
        change = f"{key} = {value}"
        recipe = read_recipe(file, [change])
        assert recipe.changes == (change,)
        if key == "schedule.milestone_shares":
            assert recipe.config.schedule.milestones == (1.0, 9.0)
        else:
            wanted = "none" if key == "options.posterior" else expected(value)
            assert at(recipe, key) == wanted
            assert isinstance(at(recipe, key), bool) == isinstance(wanted, bool)
        decides = (
            not key.startswith("hardware.") and key not in ("workers", "features") and SAME.get(key) != value
        )
        # Of options those that are stated count, whatever the value that goes without saying.
        assert (recipe.describe() != base.describe()) == (decides or key.startswith("options.")), change


def test_no_key_is_forgotten() -> None:
    assert set(known_keys()) == set(CHANGES)
    assert len(set(known_keys())) == len(known_keys())
    assert {f.name for f in fields(ImageTask)} - {"options"} <= set(known_keys())
    assert {f"options.{f.name}" for f in fields(Options)} - set(known_keys()) == {
        "options.class_counts",
        "options.dataset_size",
    }


def test_changes_that_take_two(tmp_path: Path) -> None:
    file = written(tmp_path, STEPS)
    recipe = read_recipe(file, ["network=resnet50", "pretrained=true"])
    assert recipe.task.pretrained
    first = read_recipe(file, ["network=resnet50", "pretrained=true", "head_first=true"])
    assert first.task.head_first
    assert first.describe()["task"] == {**recipe.describe()["task"], "head_first": True}
    schedule = read_recipe(file, ["schedule.decay=cosine", "schedule.milestone_shares=[]"]).config.schedule
    assert (schedule.decay, schedule.milestones) == ("cosine", ())
    assert read_recipe(file, ["seed=1", "seed=2"]).config.seed == 2  # the last word counts


@pytest.mark.parametrize("name", ["2024-05-01", "1e3", "true", "[a]"])
def test_the_name_of_a_folder_may_look_like_a_value(name: str, tmp_path: Path) -> None:
    file = written(tmp_path, STEPS)
    task = read_recipe(file, [f"data={name}", f'labels="{name}"']).task
    assert (task.data, task.labels) == (name, name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("epochs=3", "unknown key 'epochs': did you mean 'schedule.epochs'?"),
        ("schedule.epoch=3", "unknown key 'schedule.epoch': did you mean 'schedule.epochs'?"),
        ("options=3", "unknown key 'options'"),
        ("rank", "--set takes key=value"),
        ("seed=", "--set takes key=value"),
        ("=3", "--set takes key=value"),
        ("schedule.epochs=abc", "schedule.epochs is a whole number, got 'abc'"),
        ("schedule.epochs=2.5", "schedule.epochs is a whole number, got 2.5"),
        ("schedule.epochs=true", "schedule.epochs is a whole number, got True"),
        ("schedule.epochs=[3]", "schedule.epochs is a whole number, got [3]"),
        ("schedule.warmup=long", "schedule.warmup is a number, got 'long'"),
        ("schedule.milestones=5", "schedule.milestones is a list of numbers"),
        ('schedule.milestones=["a"]', "schedule.milestones is a list of numbers"),
        ("schedule.milestones=[true]", "schedule.milestones is a list of numbers"),
        ("schedule.milestones=[11]", "milestones are epochs between 0 and 10"),
        ("schedule.milestone_shares=0.5", "schedule.milestone_shares are between 0 and 1"),
        ("schedule.milestone_shares=[nan]", "schedule.milestone_shares are between 0 and 1"),
        ("schedule.smooth=yes", "schedule.smooth is true or false, got 'yes'"),
        ("schedule.lr=inf", "lr must be a positive finite number"),
        ("schedule.optimizer=1", "schedule.optimizer is a word, got 1"),
        ("options.rank=true", "options.rank is a whole number, got True"),
        ("options.temperature=nan", "temperature must be a positive finite number"),
        ("options.sample_beta=1", "options.sample_beta is true or false, got 1"),
        ("options.posterior=exactly", "did you mean 'exact'?"),
        ("method=hetsgnp", "did you mean 'hetsngp'?"),
        ("held_out=1", "held_out is a share between 0 and 1"),
        ("held_out=nan", "held_out is a share between 0 and 1"),
        ("pretrained=true", "has no pretrained weights"),
        ("workers=-1", "0 for none"),
        ("seed=-1", "seed is a whole number from 0 to"),
        ("seed=4294967296", "seed is a whole number from 0 to"),
        ("hardware.precision=bf16", "choose one of '32-true', 'bf16-mixed'"),
        ("hardware.devices=1.5", "hardware.devices is a whole number or a word"),
        ("verdicts.correct=1", "verdicts.correct is a share"),
        ("verdicts.unfamiliar=0.0", "verdicts.unfamiliar is a share"),
    ],
)
def test_changes_that_are_refused(tmp_path: Path, change: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        read_recipe(written(tmp_path, STEPS), [change])
    assert str(refused.value).startswith("recipe mine: ")


# --- keys of 0.1 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_key_is_read_with_a_warning_that_names_the_new_one(tmp_path: Path, old: str, new: str) -> None:
    message = re.escape(f"{old} is now called {new}")
    section, _, name = old.partition(".")
    table = f"{name} = 0.7\n" if section == "schedule" else f"[{section}]\n{name} = 0.7\n"
    with pytest.warns(DeprecationWarning, match=message):
        in_a_file = read_recipe(written(tmp_path, SMALLEST + table))
    with pytest.warns(DeprecationWarning, match=message):
        changed = read_recipe(written(tmp_path, SMALLEST), [f"{old} = 0.7"])
    expected = read_recipe(written(tmp_path, SMALLEST), [f"{new}=0.7"])
    assert at(expected, new) == 0.7
    assert in_a_file.describe() == changed.describe() == expected.describe()
    assert changed.changes == (f"{old} = 0.7",)
    with pytest.warns(DeprecationWarning, match=message):  # --set overrides the file, whatever the names
        overridden = read_recipe(written(tmp_path, SMALLEST + table), [f"{new}=0.6"])
    assert at(overridden, new) == 0.6


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_key_beside_its_new_name_is_refused(tmp_path: Path, old: str, new: str) -> None:
    section, _, name = old.partition(".")
    head = "" if section == "schedule" else f"[{section}]\n"
    file = written(tmp_path, f"{SMALLEST}{head}{name} = 0.7\n{new.partition('.')[2]} = 0.7\n")
    with pytest.raises(ValueError, match="both are given"), pytest.warns(DeprecationWarning, match=old):
        read_recipe(file)


def test_arguments_and_attributes_of_0_1(tmp_path: Path) -> None:
    recipe = read_recipe(written(tmp_path, WHOLE))
    with pytest.warns(DeprecationWarning, match="plan is now called config"):
        assert recipe.plan is recipe.config
    with pytest.warns(DeprecationWarning, match="plan is now called config"):
        assert Recipe("a", recipe.task, plan=recipe.config).config is recipe.config  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match="average is now called ema_decay"):
        config = TrainConfig(Schedule(3), average=0.9)  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match="average is now called ema_decay"):
        assert (config.average, config.ema_decay) == (0.9, 0.9)
    with pytest.warns(DeprecationWarning, match="right is now called correct"):
        assert VerdictRules(right=0.8).correct == 0.8  # type: ignore[call-arg]


def test_new_keys_exist_and_old_ones_are_gone() -> None:
    assert set(RENAMED.values()) <= set(known_keys())
    assert not set(RENAMED) & set(known_keys())


def test_a_description_written_by_0_1_is_that_of_the_same_recipe(tmp_path: Path) -> None:
    old = json.loads((SAVED / "run" / "summary.json").read_text())["recipe"]
    with pytest.warns(DeprecationWarning, match="gp_lr"):
        now = read_recipe(SAVED / "recipe.toml").describe()
    assert old != now
    assert current_description(old) == current_description(now) == now
    old["plan"]["schedule"]["gp_lr"] = 3.0
    assert current_description(old) != now
    for broken in (None, [], "recipe", {"plan": 3}, {"config": {"schedule": None}}):
        assert current_description(broken) == broken


def test_shares_and_warm_up_follow_the_epochs(tmp_path: Path) -> None:
    shares = written(tmp_path, SMALLEST + 'decay = "step"\nmilestone_shares = [0.3, 0.6, 0.8]\nwarmup = 5\n')
    schedule = read_recipe(shares, ["schedule.epochs=300"]).config.schedule
    assert schedule.milestones == pytest.approx((90, 180, 240))
    assert schedule.warmup == 5
    for epochs, warmup in ((10, 5), (4, 2), (1, 0.5)):
        schedule = read_recipe(shares, [f"schedule.epochs={epochs}"]).config.schedule
        assert schedule.warmup == warmup
        assert schedule.milestones == pytest.approx([share * epochs for share in (0.3, 0.6, 0.8)])


# --- what a recipe is -----------------------------------------------------------------------------------


def test_what_is_described_is_strict_json(tmp_path: Path) -> None:
    for file in (written(tmp_path, WHOLE), *recipe_names()):
        described = read_recipe(file).describe()
        assert json.loads(json.dumps(described, allow_nan=False)) == described
    described = read_recipe(written(tmp_path, WHOLE)).describe()
    assert described["task"]["options"]["spectral_bound"] == "inf"
    assert described["config"]["schedule"]["milestones"] == [5, 10]
    assert described["config"]["seed"] == 7


def test_the_description_of_older_runs_stays(tmp_path: Path) -> None:
    """As it was before recipes had a kind of input: runs on disk are recognised by it."""
    described = read_recipe(written(tmp_path, SMALLEST), ["size=32", "from_disk=true"]).describe()
    schedule = {"epochs": 10, "lr": 1e-3, "weight_decay": 1e-4, "gp_lr_multiplier": 1.0, "stop_after": None}
    schedule |= {"optimizer": "adamw", "momentum": 0.9, "decay": "cosine", "warmup": 0.0, "gamma": 0.1}
    training = {"accumulate": 1, "clip": None, "ema_decay": None, "patience": None, "best": True}
    task = {"data": "cifar10", "network": "wrn-10-1", "method": "sngp", "pretrained": False, "size": 32}
    task |= {"resize": None, "from_disk": True, "batch_size": 128, "held_out": 0.1, "calibrate": True}
    config = {**training, "schedule": {**schedule, "milestones": [], "smooth": True}, "bound_every": 10}
    assert described == {
        "name": "mine",
        "task": {**task, "options": {}},
        "config": {**config, "seed": 0},
        "verdicts": {"correct": 0.95, "unfamiliar": 0.05},
    }


@dataclass(frozen=True)
class SoundTask(Task):
    """Another kind of input."""

    rate: int = 16_000
    inputs: ClassVar[str] = "sounds"


def test_the_kind_of_input_decides_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "sounds", SoundTask)
    file = written(tmp_path, SMALLEST)
    recipe = read_recipe(file, ["rate=8000", "inputs=sounds"])  # in any order
    assert recipe.task == SoundTask("cifar10", "wrn-10-1", "sngp", rate=8000)
    described = recipe.describe()["task"]
    assert (described["inputs"], described["rate"], "size" in described) == ("sounds", 8000, False)
    for change, words in (
        (["size=8", "inputs=sounds"], "'size' is no key of recipes for sounds, but for images"),
        (["rate=8000"], "'rate' is no key of recipes for images, but for sounds"),
        (["inputs=smells"], "inputs is one of images, sounds, got 'smells'"),
        (["inputs=sounds", "rat=1"], "did you mean 'rate'?"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            read_recipe(file, change)


@pytest.mark.parametrize("name", ["cifar10", "cifar100/hetsngp", "imagenet21k/hetsngp", "finetune", "frozen"])
def test_a_description_is_read_back(name: str) -> None:
    recipe = read_recipe(name, ["verdicts.correct=0.9", "seed=3"])
    described = json.loads(json.dumps(recipe.describe()))
    found = described_recipe(described, recipe.changes)
    assert replace(recipe, hardware=Hardware()) == found
    assert found.describe() == recipe.describe()


def test_without_a_gpu_settings_for_one_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = '[hardware]\nprecision = "bf16-mixed"\nchannels_last = true\ncompile = true\ndevices = 2\n'
    file = written(tmp_path, SMALLEST + fast)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = read_recipe(file)
    plain, note = said.on_this_machine()
    assert plain == replace(said, hardware=Hardware(devices=2))
    assert note is not None
    assert "precision, channels_last, compile of the recipe left out" in note

    asked, note = read_recipe(file, ["hardware.precision = bf16-mixed"]).on_this_machine()
    assert asked.hardware == Hardware(precision="bf16-mixed", devices=2)
    assert note is not None
    advised = re.search(r"--set (\S+) would keep it", note)  # and it does
    assert advised is not None
    kept, _ = read_recipe(file, ["hardware.precision=bf16-mixed", advised[1]]).on_this_machine()
    assert kept.hardware.channels_last
    assert not kept.hardware.compile

    assert read_recipe(written(tmp_path, SMALLEST, "b.toml")).on_this_machine()[1] is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert said.on_this_machine() == (said, None)
    on_cpu, note = read_recipe(file, ["hardware.accelerator=cpu"]).on_this_machine()
    assert on_cpu.hardware == Hardware(devices=2, accelerator="cpu")
    assert note is not None
