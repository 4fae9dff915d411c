"""Saved models: whole or not at all, and a file from elsewhere is refused, quickly and without running it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.contract import toy
from tests.contract.toy import same_bits
from torch import Tensor, nn

import hetsngp
from hetsngp import ArtifactError
from hetsngp.files import with_checksum
from hetsngp.models.methods import METHODS
from hetsngp.nn.backbones import WideResNet

X = toy.blobs(3)[0]


class Own(nn.Module):
    """A user's network, unknown to hetsngp."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layer = nn.Linear(2, width)
        self.norm = nn.BatchNorm1d(width)
        self.num_features = width

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.layer(x)))


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def name_of_change(value: Any) -> str:
    """An id for a parametrised change of the config."""
    return "-".join(f"{k}={str(v)[:14]}" for k, v in value.items()) if isinstance(value, dict) else ""


def edit(folder: Path, **changes: Any) -> None:
    """Set entries of the config, with its checksum made anew, so that what they say is what is refused;
    ``members__0__model`` means config["members"][0]["model"].
    """
    config = config_of(folder)
    for path, value in changes.items():
        *parents, last = (int(key) if key.isdigit() else key for key in path.split("__"))
        inner = config
        for key in parents:
            inner = inner[key]
        inner[last] = value
    (folder / "config.json").write_text(json.dumps(with_checksum(config)))


def weights_of(folder: Path) -> Path:
    return folder / config_of(folder)["weights"]


def replace_weights(folder: Path, content: bytes) -> None:
    """Other weights with a matching checksum: only their content differs."""
    weights_of(folder).write_bytes(content)
    edit(folder, sha256=hashlib.sha256(content).hexdigest())


def leftovers(folder: Path) -> list[str]:
    kept = {"config.json", config_of(folder)["weights"]} if (folder / "config.json").exists() else set()
    return sorted(f.name for f in folder.iterdir() if f.name not in kept)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    hetsngp.save(toy.trained("hetsngp"), tmp_path / "model")
    return tmp_path / "model"


# --- round trips --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_round_trip_of_a_fitted_and_calibrated_model(method: str, tmp_path: Path) -> None:
    x, y = toy.blobs(3, flip=0.3)
    model = toy.trained(method, flip=0.3)
    hetsngp.fit_posterior(model, toy.loader(x, y), toy.loader(*toy.blobs(3, flip=0.3, seed=5)))
    model.dataset_size = 1234
    hetsngp.save(model, tmp_path / "a" / "b")  # parents are made
    twin = hetsngp.load(str(tmp_path / "a" / "b"))
    assert same_bits(twin.predict(X), model.predict(X))
    assert not any(module.training for module in twin.modules())
    assert twin.config == model.config
    assert twin.dataset_size == 1234
    assert twin.calibration["temperature"] == float(model.temperature) != 1.0
    state = model.state_dict()
    assert list(twin.state_dict()) == list(state)
    assert all(torch.equal(t, state[name]) for name, t in twin.state_dict().items())
    hetsngp.save(twin, tmp_path / "again")
    assert (
        weights_of(tmp_path / "again").name == weights_of(tmp_path / "a" / "b").name
    )  # content decides the name
    twin.train().loss(x, y).backward()  # it trains on


def test_what_is_written(saved: Path) -> None:
    config, model = config_of(saved), toy.trained("hetsngp")
    names = ["format", "version", "weights", "sha256", "model", "calibration", "trained_since_fit"]
    assert list(config) == [*names, "checksum"]
    assert config["version"] == 2
    assert config["model"] == {**model.config, "dataset_size": model.dataset_size}
    assert sorted(load_file(weights_of(saved))) == sorted(model.state_dict())
    assert leftovers(saved) == []


@pytest.mark.parametrize("method", METHODS)
def test_round_trip_of_a_model_that_was_never_fitted(method: str, tmp_path: Path) -> None:
    model = toy.build(method, dataset_size=None, spectral_bound=math.inf)
    hetsngp.save(model, tmp_path)
    twin = hetsngp.load(tmp_path)
    assert twin.dataset_size is None
    assert twin.calibration is None
    assert torch.equal(twin(X), model.eval()(X))
    if method in ("sngp", "hetsngp"):
        with pytest.raises(hetsngp.PosteriorNotFittedError):
            twin.predict(X)


def test_convolutional_backbones_are_rebuilt(tmp_path: Path) -> None:
    network = WideResNet(depth=10, width=1)
    model = hetsngp.build("sngp", network, 3, posterior="none", dataset_size=2, **toy.TINY).train()
    images = torch.randn(2, 3, 8, 8)
    model.loss(images, torch.tensor([0, 2]))  # measures σ, whose vectors take the shape of the images
    hetsngp.save(model, tmp_path)
    assert same_bits(hetsngp.load(tmp_path).predict(images), model.predict(images))


@pytest.mark.parametrize("method", METHODS)
def test_a_network_of_ones_own(method: str, tmp_path: Path) -> None:
    x, y = toy.blobs(3)
    model = hetsngp.build(method, Own(), 3, dataset_size=len(x), **toy.TINY)
    toy.descend(model, x, y, 3)
    hetsngp.fit_posterior(model, toy.loader(x, y))
    hetsngp.save(model, tmp_path)
    with pytest.raises(ArtifactError, match=r"'Own'.*cannot rebuild.*backbone=MyNetwork\(\)"):
        hetsngp.load(tmp_path)
    twin = hetsngp.load(tmp_path, backbone=Own())
    assert same_bits(twin.predict(X), model.predict(X))
    hetsngp.save(twin, tmp_path)  # and again
    assert same_bits(hetsngp.load(tmp_path, backbone=Own()).predict(X), model.predict(X))
    for other in (Own(9), toy.backbone(8), nn.Sequential(Own())):
        other.num_features = getattr(other, "num_features", 8)
        with pytest.raises(ArtifactError, match=r"do not fit.*is backbone= the same architecture"):
            hetsngp.load(tmp_path, backbone=other)


@pytest.mark.parametrize("method", METHODS)
def test_a_network_that_does_not_fit_stays_as_it_was(method: str, tmp_path: Path) -> None:
    """Spectral bounds and widened layers are written into a network only when all is well."""
    hetsngp.save(hetsngp.build(method, Own(), 3, **toy.TINY), tmp_path)
    other = Own(9)
    before = {name: t.clone() for name, t in other.state_dict().items()}
    with pytest.raises(ArtifactError, match="do not fit"):
        hetsngp.load(tmp_path, backbone=other)
    assert type(other.layer) is nn.Linear
    assert list(other.state_dict()) == list(before)
    assert all(torch.equal(t, before[name]) for name, t in other.state_dict().items())
    edit(tmp_path, model__options__num_members=64)  # of a large first layer this would be a lot of memory
    mine = Own()
    if "mimo" in method:
        with pytest.raises(ArtifactError, match="do not fit"):
            hetsngp.load(tmp_path, backbone=mine)
        assert mine.layer.weight.shape == (8, 2)
    else:
        hetsngp.load(tmp_path, backbone=mine)


class Single(Own):
    """Cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("there is only one of me")


@pytest.mark.parametrize("method", METHODS)
def test_a_network_that_cannot_be_copied_is_filled_too(method: str, tmp_path: Path) -> None:
    model = hetsngp.build(method, Own(), 3, **toy.TINY)
    hetsngp.save(model, tmp_path)
    given = Single()
    twin = hetsngp.load(tmp_path, backbone=given)
    assert twin.backbone is given
    assert torch.equal(twin(X), model.eval()(X))


def test_only_models_are_saved(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"made by hetsngp\.build, got Linear"):
        hetsngp.save(nn.Linear(1, 1), tmp_path / "x")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ArtifactError, match="is a file: give a folder"):
        hetsngp.save(toy.build("sngp"), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "x").exists()


def test_nothing_there(tmp_path: Path) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(FileNotFoundError, match=r"hetsngp\.save\(model, path\)"):
            hetsngp.load(folder)


def test_an_older_model_is_replaced_and_strangers_are_left_alone(saved: Path) -> None:
    (saved / "notes.txt").write_text("mine")
    (saved / "model-mine.safetensors").write_text("mine")
    new = toy.trained("sngp")
    hetsngp.save(new, saved)
    assert leftovers(saved) == ["model-mine.safetensors", "notes.txt"]
    assert same_bits(hetsngp.load(saved).predict(X), new.predict(X))


# --- interrupted saves --------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


def half_written(tensors: dict[str, Tensor], file: Path, **_: Any) -> None:
    Path(file).write_bytes(b"half a file")
    raise Interrupted


def fail_at(call: int, original: Any) -> Any:
    seen = []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        if len(seen) == call:
            raise Interrupted
        return original(*args, **kwargs)

    return wrapper


STAGES = ["save_file", "fsync-1", "fsync-2", "replace-1", "replace-2", "write_text"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("first", [False, True], ids=["over-an-old-one", "first-save"])
def test_an_interrupted_save_leaves_the_old_model_whole(
    stage: str, first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = toy.trained("hetsngp"), toy.trained("sngp")
    if not first:
        hetsngp.save(old, tmp_path)
    with monkeypatch.context() as patch:
        if stage == "save_file":
            patch.setattr("safetensors.torch.save_file", half_written)
        elif stage == "write_text":
            patch.setattr(Path, "write_text", fail_at(1, Path.write_text))
        else:
            name, call = stage.split("-")
            patch.setattr(os, name, fail_at(int(call), getattr(os, name)))
        with pytest.raises(Interrupted):
            hetsngp.save(new, tmp_path)
    assert not [name for name in leftovers(tmp_path) if name.startswith(".")]  # no temporary files
    if first:
        with pytest.raises(FileNotFoundError):
            hetsngp.load(tmp_path)
    else:
        assert same_bits(hetsngp.load(tmp_path).predict(X), old.predict(X))
    hetsngp.save(new, tmp_path)  # the next save works and tidies up
    assert leftovers(tmp_path) == []
    assert same_bits(hetsngp.load(tmp_path).predict(X), new.predict(X))


SAVER = """
import sys, pickle, torch
torch.set_num_threads(1)
import hetsngp
models = [hetsngp.load(sys.argv[1]), hetsngp.load(sys.argv[2])]
print("ready", flush=True)
while True:
    for model in models:
        hetsngp.save(model, sys.argv[3])
        print("saved", flush=True)
"""


def test_a_killed_process_leaves_one_of_the_two_models(tmp_path: Path) -> None:
    models = [toy.trained("hetsngp"), toy.trained("sngp")]
    for i, model in enumerate(models):
        hetsngp.save(model, tmp_path / str(i))
    hetsngp.save(models[0], tmp_path / "target")
    expected = [model.predict(X) for model in models]
    arguments = [str(tmp_path / name) for name in ("0", "1", "target")]
    source = str(Path(hetsngp.__file__).parents[1])
    child = subprocess.Popen(
        [sys.executable, "-c", SAVER, *arguments],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"ready\n"
        for _ in range(3):
            assert child.stdout.readline() == b"saved\n"
        time.sleep(0.001)  # somewhere within a save
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    found = hetsngp.load(tmp_path / "target").predict(X)
    assert any(same_bits(found, e) for e in expected)


@pytest.mark.parametrize("stage", STAGES)
def test_a_process_that_dies_at_any_stage_leaves_the_old_model(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the power went: nothing after the failing call runs, not even ``finally``."""
    old, new = toy.trained("hetsngp"), toy.trained("sngp")
    hetsngp.save(old, tmp_path)
    with monkeypatch.context() as patch:
        if stage == "save_file":
            patch.setattr("safetensors.torch.save_file", half_written)
        elif stage == "write_text":
            patch.setattr(Path, "write_text", fail_at(1, Path.write_text))
        else:
            name, call = stage.split("-")
            patch.setattr(os, name, fail_at(int(call), getattr(os, name)))
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(Interrupted):
            hetsngp.save(new, tmp_path)
    assert same_bits(hetsngp.load(tmp_path).predict(X), old.predict(X))


# --- corrupt and foreign files ------------------------------------------------------------------------------


MOST_MODULES = 1000


def refused(folder: Path, *words: str) -> None:
    """load raises ArtifactError with these words, and builds nothing large on the way."""
    before, built, init = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0, nn.Module.__init__

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        nonlocal built
        built += 1
        init(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "__init__", counted)
        with pytest.raises(ArtifactError) as caught:
            hetsngp.load(folder)
    assert built < MOST_MODULES
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024  # KiB
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_weights(saved: Path, keep: int) -> None:
    content = weights_of(saved).read_bytes()
    weights_of(saved).write_bytes(content[:keep])
    refused(saved, "damaged", "checksum", "copy it again")
    replace_weights(saved, content[:keep])
    refused(saved, "not a safetensors file")


@pytest.mark.parametrize("where", [3, 50, -5])
def test_flipped_bits(saved: Path, where: int) -> None:
    content = bytearray(weights_of(saved).read_bytes())
    content[where] ^= 4
    weights_of(saved).write_bytes(content)
    refused(saved, "damaged", "checksum")


def test_missing_weights(saved: Path) -> None:
    weights_of(saved).unlink()
    refused(saved, "is missing", "copied or unpacked only in part")


def test_foreign_safetensors(saved: Path, tmp_path: Path) -> None:
    save_file({"layer.weight": torch.ones(2, 2)}, tmp_path / "foreign")
    replace_weights(saved, (tmp_path / "foreign").read_bytes())
    refused(saved, "do not fit", "missing", "unexpected ['layer.weight']")


@pytest.mark.parametrize("name", ["head.latent.beta", "backbone.isometry", "head.latent.posterior.gamma"])
def test_tensors_of_other_shapes(saved: Path, tmp_path: Path, name: str) -> None:
    tensors = load_file(weights_of(saved))
    tensors[name] = torch.zeros(5, 4, 3)
    save_file(tensors, tmp_path / "other")
    replace_weights(saved, (tmp_path / "other").read_bytes())
    refused(saved, "do not fit", name)


def test_tensors_of_other_types(saved: Path, tmp_path: Path) -> None:
    tensors = load_file(weights_of(saved))
    tensors["head.latent.beta"] = torch.ones_like(tensors["head.latent.beta"], dtype=torch.int8)
    save_file(tensors, tmp_path / "other")
    replace_weights(saved, (tmp_path / "other").read_bytes())
    refused(saved, "head.latent.beta has dtype torch.int8", "must be a real number")


class Trap:
    """Unpickled, it leaves a file behind."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (open, (self.file, "w"))


def test_pickles_are_refused_and_never_run(saved: Path, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    torch.save({"beta": torch.ones(2), "trap": Trap(str(sprung))}, tmp_path / "pickle")
    for content in ((tmp_path / "pickle").read_bytes(), pickle.dumps(Trap(str(sprung)))):
        replace_weights(saved, content)
        refused(saved, "not a safetensors file")
        assert not sprung.exists()
    pickle.loads(pickle.dumps(Trap(str(sprung)))).close()
    assert sprung.exists()  # the trap does work


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"not json", b"\xff\xfe\x00", b"[" * 200_000, b"PK\x03\x04", b"9" * 5000],
    ids=range(7),
)
def test_configs_that_are_not_json(saved: Path, text: bytes) -> None:
    (saved / "config.json").write_bytes(text)
    refused(saved, "config.json is not a JSON file")


@pytest.mark.parametrize(
    "text", ["[]", "3", "null", '"hetsngp"', "{}", '{"format": "gguf"}', '{"architectures": []}']
)
def test_configs_of_others(saved: Path, text: str) -> None:
    (saved / "config.json").write_text(text)
    refused(saved, "was not written by hetsngp.save")


def test_a_huge_config_is_not_read(saved: Path) -> None:
    (saved / "config.json").write_text(json.dumps({**config_of(saved), "padding": "x" * 2**22}))
    refused(saved, "larger than any hetsngp config")


@pytest.mark.parametrize("version", [3, 0, "2", 2.0, True, None, 10**30])
def test_other_versions(saved: Path, version: Any) -> None:
    edit(saved, version=version)
    refused(saved, f"version {version!r}", "reads version 1 and 2")


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "../model-0123456789abcdef.safetensors",
        "sub/model.safetensors",
        "",
        None,
        7,
        ["a"],
    ],
)
def test_weights_may_not_point_elsewhere(saved: Path, name: Any) -> None:
    shutil.copy(weights_of(saved), saved.parent / "model-0123456789abcdef.safetensors")
    shutil.copy(weights_of(saved), saved.parent / "x.safetensors")
    edit(saved, weights=name)
    refused(saved, "names weights", repr(name), "would not write")


def test_weights_may_not_be_an_absolute_path(saved: Path) -> None:
    elsewhere = saved.parent / "model-0123456789abcdef.safetensors"
    shutil.copy(weights_of(saved), elsewhere)
    edit(saved, weights=str(elsewhere))
    refused(saved, "would not write")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model__num_classes": 10**12}, "num_classes"),
        ({"model__num_classes": 10**40}, "num_classes"),
        ({"model__num_classes": 10_000}, "do not fit"),
        ({"model__num_classes": 4}, "do not fit"),
        ({"model__num_classes": 1}, "num_classes"),
        ({"model__num_classes": "3"}, "num_classes"),
        ({"model__options__random_features": 10**12}, "random_features"),
        ({"model__options__random_features": 10_000}, "do not fit"),
        ({"model__options__rank": 10**12}, "rank"),
        ({"model__options__rank": 10_000}, "do not fit"),
        ({"model__options__num_members": 10**9}, "num_members"),
        ({"model__options__num_members": 10_000}, "num_members"),
        ({"model__options__latent_dim": 10**12}, "latent_dim"),
        ({"model__options__flow_layers": 10**12}, "flow_layers"),
        ({"model__backbone__config__width": 10**9}, "width"),
        ({"model__backbone__config__width": 10_000}, "clearly more elements than the weights file"),
        ({"model__backbone__config__depth": 10**9}, "depth"),
        ({"model__backbone__config__in_features": 10**9}, "in_features"),
        ({"model__backbone__config__in_features": 3}, "do not fit"),
        ({"model__backbone__config": None}, "does not describe a model"),
        ({"model__backbone__config": {"shell": "rm"}}, "does not describe a model"),
        ({"model__backbone__name": "os.system"}, "cannot rebuild"),
        ({"model__backbone__name": ["ResidualMLP"]}, "does not describe a model"),
        ({"model__backbone": None}, "does not describe a model"),
        ({"model__options": []}, "does not describe a model"),
        ({"model__options": "rank"}, "does not describe a model"),
        ({"model__options": None}, "does not describe a model"),
        ({"model__options": {"shell": "rm"}}, "unknown option 'shell'"),
        ({"model__options__amplitude": math.nan}, "amplitude"),
        ({"model__options__posterior": "magic"}, "unknown posterior"),
        ({"model__method": "eval"}, "unknown method 'eval'"),
        ({"model__method": ["sngp"]}, "does not describe a model"),
        ({"model__method": "sngp"}, "do not fit"),
        ({"model": {}}, "does not describe a model"),
        ({"model": 3}, "does not describe a model"),
        ({"sha256": None}, "checksum"),
    ],
    ids=name_of_change,
)
def test_configs_that_lie(saved: Path, change: dict[str, Any], word: str) -> None:
    edit(saved, **change)
    refused(saved, word)


def test_numbers_that_are_no_sizes_may_be_large(saved: Path) -> None:
    numbers = {"num_samples": 100_000, "dataset_size": 10**9, "batch_repetition": 1000}
    edit(saved, **{f"model__options__{name}": n for name, n in numbers.items()}, model__dataset_size=10**9)
    assert hetsngp.load(saved).dataset_size == 10**9


@pytest.mark.parametrize("method", ["mimo", "posterior_network"])
@pytest.mark.parametrize("name", ["num_members", "latent_dim", "flow_layers", "num_classes"])
def test_sizes_that_a_method_uses_are_compared(method: str, name: str, tmp_path: Path) -> None:
    hetsngp.save(toy.build(method), tmp_path)
    path = "model__num_classes" if name == "num_classes" else f"model__options__{name}"
    used = name == "num_classes" or (name == "num_members") == (method == "mimo")
    edit(tmp_path, **{path: 60})
    if used:
        refused(tmp_path, "do not fit")
    else:
        hetsngp.load(tmp_path)
    edit(tmp_path, **{path: 10**9})
    refused(tmp_path, name, "far more than the saved weights have")
