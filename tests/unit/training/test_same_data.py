"""A run is resumed with the data it began with, wherever they are, and with no others."""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract import toy
from tests.unit.small_sets import random_bytes, write_image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

pytest.importorskip("lightning", reason="pip install 'hetsngp[train]'")
pytest.importorskip("PIL.Image")

from hetsngp.training import CheckpointConfig, Engine, Hardware, Schedule, TrainConfig
from hetsngp.training.checkpointing.checkpoint_files import read_state, write_state
from hetsngp.training.gradients import FabricGradients
from hetsngp.training.images import train_images
from hetsngp.training.recipes.recipe import Recipe, read_recipe
from hetsngp.training.same_data import check_same_data, loader_fingerprints

SMALL = """
network = "wrn-10-1"
method = "deterministic"
batch_size = 10
held_out = 0.25
workers = 0
[schedule]
epochs = 2
[hardware]
accelerator = "cpu"
"""
CONFIG = TrainConfig(Schedule(2, lr=0.05, optimizer="sgd", smooth=True))
CPU = torch.device("cpu")


class Died(BaseException):
    pass


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(Hardware(devices=1, accelerator="cpu"))


# --- recipes --------------------------------------------------------------------------------------------


def write_npz(folder: Path, *, train: int = 0, test: int = 0, flipped: bool = False) -> Path:
    """Images of these seeds; the name of the set is the same in every folder."""
    arrays: dict[str, Any] = {}
    for split, count, seed in (("train", 40, train), ("test", 8, test)):
        labels = np.arange(count) % 2
        arrays |= {f"x_{split}": random_bytes(count, 8, 8, 3, seed=seed), f"y_{split}": labels}
    arrays["y_train"] = 1 - arrays["y_train"] if flipped else arrays["y_train"]
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "a.npz", **arrays)
    return folder / "a.npz"


def write_folder(folder: Path, seed: int = 0) -> Path:
    for row, pixels in enumerate(random_bytes(40, 8, 8, 3, seed=seed)):
        write_image(folder / "set" / "train" / ("cat", "dog")[row % 2] / f"{row}.bmp", pixels)
    return folder / "set"


def recipe(folder: Path, data: Path, *changes: str) -> Recipe:
    (folder / "small.toml").write_text(f"data = '{data}'\n{SMALL}")
    size = () if data.suffix == ".npz" else ("size=8",)
    return read_recipe(folder / "small.toml", (*size, *changes))


def checkpoints_in(folder: Path, **options: Any) -> CheckpointConfig:
    return CheckpointConfig(folder, seconds=0, tensorboard=False, **options)


def begin(given: Recipe, engine: Engine, run: Path, patch: pytest.MonkeyPatch, **options: Any) -> None:
    """Train until the fourth update of six."""
    step = FabricGradients.step

    def dying(self: FabricGradients) -> None:
        if self.updates == 3:
            raise Died
        step(self)

    with patch.context() as inner:
        inner.setattr(FabricGradients, "step", dying)
        with pytest.raises(Died):
            train_images(given, engine, checkpoints_in(run, **options), show=False)


def other_images(folder: Path) -> Path:
    return write_npz(folder, train=1)


def other_labels(folder: Path) -> Path:
    return write_npz(folder, flipped=True)


def other_test_images(folder: Path) -> Path:
    return write_npz(folder, test=1)


def one_file(folder: Path) -> Path:
    file = write_folder(folder) / "train" / "dog" / "7.bmp"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return folder / "set"


def other_files(folder: Path) -> Path:
    shutil.rmtree(folder / "set")
    return write_folder(folder, seed=1)


CASES: list[tuple[Callable[[Path], Path], Callable[[Path], Path], str]] = [
    (write_npz, other_images, r"train: image 0 has other content, and 39 more of the sample"),
    (write_npz, other_labels, r"train: other labels or class names"),
    (write_npz, other_test_images, r"test: image 0 has other content"),
    (write_folder, one_file, r"train: dog/7\.bmp has other content"),
    (write_folder, other_files, r"train: "),
]


@pytest.mark.parametrize(("write", "change", "words"), CASES)
@pytest.mark.parametrize("finished", [False, True])
def test_other_data_of_equal_length_at_the_same_path_are_refused(
    write: Callable[[Path], Path],
    change: Callable[[Path], Path],
    words: str,
    finished: bool,
    tmp_path: Path,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, run = write(tmp_path), tmp_path / "run"
    given = recipe(tmp_path, data)
    if finished:
        train_images(given, engine, checkpoints_in(run), show=False)
    else:
        begin(given, engine, run, monkeypatch)
    assert change(tmp_path) == data
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    for options in ({}, {"changed": True}, {"hash_all_data": True}):
        with pytest.raises(ValueError, match=rf"on other data \({words}.*give another folder"):
            train_images(given, engine, checkpoints_in(run, **options), show=False)
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("write", [write_npz, write_folder])
@pytest.mark.parametrize("hash_all_data", [False, True])
def test_data_that_have_moved_are_resumed_to_the_same_bits(
    write: Callable[[Path], Path],
    hash_all_data: bool,
    tmp_path: Path,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, run, whole = write(tmp_path / "here"), tmp_path / "run", tmp_path / "whole"
    options = {"hash_all_data": hash_all_data}
    want = train_images(recipe(tmp_path, data), engine, checkpoints_in(whole, **options), show=False)
    begin(recipe(tmp_path, data), engine, run, monkeypatch, **options)
    moved = tmp_path / "there" / data.name
    moved.parent.mkdir()
    shutil.move(data, moved)
    shutil.copytree(moved, data) if moved.is_dir() else shutil.copy(moved, data)  # with new times
    shutil.rmtree(moved) if moved.is_dir() else moved.unlink()
    shutil.move(data, moved)
    given = recipe(tmp_path, moved)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        got = train_images(given, engine, checkpoints_in(run, **options), show=False)
        again = train_images(given, engine, checkpoints_in(run, **options), show=False)
    assert got["held_out"] == again["held_out"] == want["held_out"]
    states = [read_state(folder / "checkpoint")["model"] for folder in (run, whole)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert "all" in again["fingerprints"]["train"] or (write is write_folder and not hash_all_data)


def test_a_finished_run_whose_data_are_gone_is_still_finished(tmp_path: Path, engine: Engine) -> None:
    data, run = write_npz(tmp_path), tmp_path / "run"
    summary = train_images(recipe(tmp_path, data), engine, checkpoints_in(run), show=False)
    data.unlink()
    again = train_images(recipe(tmp_path, data), engine, checkpoints_in(run), show=False)
    assert again["held_out"] == summary["held_out"]
    with pytest.raises((FileNotFoundError, ValueError), match="elsewhere"):
        train_images(recipe(tmp_path, tmp_path / "elsewhere.npz"), engine, checkpoints_in(run), show=False)


def test_a_run_without_fingerprints_is_resumed_with_a_warning(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, run = write_npz(tmp_path), tmp_path / "run"
    given = recipe(tmp_path, data)
    begin(given, engine, run, monkeypatch)
    state = read_state(run / "checkpoint")
    del state["fingerprints"]  # as release 0.1 wrote it
    write_state(run / "checkpoint", state)
    elsewhere = recipe(tmp_path, write_npz(tmp_path / "b"))
    with pytest.raises(ValueError, match=r"on other data .*now"):  # the path is all that can be compared
        train_images(elsewhere, engine, checkpoints_in(run), show=False)
    with pytest.warns(UserWarning, match="has no fingerprint of its data"):
        train_images(given, engine, checkpoints_in(run), show=False)
    assert "train" in read_state(run / "checkpoint")["fingerprints"]


def test_a_hash_of_everything_that_the_run_did_not_begin_with(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, run = recipe(tmp_path, write_folder(tmp_path)), tmp_path / "run"
    begin(given, engine, run, monkeypatch)
    with pytest.warns(UserWarning, match="a sample of their contents was compared"):
        train_images(given, engine, checkpoints_in(run, hash_all_data=True), show=False)


@pytest.mark.parametrize(
    "before", [3, [], {"train": 3}, {"train": {"sample": [3]}}, {"train": {"sample": 1}}]
)
def test_a_damaged_fingerprint_is_an_error_of_one_line(before: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is damaged"):
        check_same_data(tmp_path, before, {"train": {"examples": 3, "sample": [["image 0", "ab"]]}})


# --- loaders --------------------------------------------------------------------------------------------


class Items(Dataset[tuple[Tensor, Tensor]]):
    """Data set of any kind: items are computed."""

    def __init__(self, seed: int = 0, noise: Callable[[], float] | None = None) -> None:
        self.x, self.y = toy.blobs(3, 8, seed=seed)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.x[row] + (0.0 if self.noise is None else self.noise()), self.y[row]


def train_loader(
    loader: Any, engine: Engine, folder: Path | None, held_out: Any = None, **options: Any
) -> Any:
    where = None if folder is None else checkpoints_in(folder, **options)
    return engine.train(
        toy.build("deterministic"), loader, CONFIG, held_out=held_out, checkpoints=where
    ).model


LOADERS: dict[str, Callable[[int], Any]] = {
    "tensors": lambda seed: DataLoader(TensorDataset(*toy.blobs(3, 8, seed=seed)), 6),
    "items": lambda seed: DataLoader(Items(seed), 6),
    "list": lambda seed: [toy.blobs(3, 8, seed=seed)],
}


@pytest.mark.parametrize("kind", LOADERS)
def test_other_data_in_a_loader_are_refused(kind: str, engine: Engine, tmp_path: Path) -> None:
    make = LOADERS[kind]
    train_loader(make(0), engine, tmp_path)
    train_loader(make(0), engine, tmp_path)
    with pytest.raises(ValueError, match=r"on other data \(train: "):
        train_loader(make(1), engine, tmp_path)


def test_other_held_out_data_are_refused(engine: Engine, tmp_path: Path) -> None:
    make = LOADERS["tensors"]
    train_loader(make(0), engine, tmp_path, held_out=make(1))
    with pytest.raises(ValueError, match=r"on other data \(held_out: example 0 has other content"):
        train_loader(make(0), engine, tmp_path, held_out=make(2))


NOISES: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.randn(())),
    "numpy": lambda: float(np.random.randn()),  # noqa: NPY002 - transforms draw from this one
    "python": random.random,
    "flips": lambda: float(random.random() < 0.5),
}


@pytest.mark.parametrize("noise", NOISES)
def test_random_items_are_known_by_their_number_and_draw_as_before(
    noise: str, engine: Engine, tmp_path: Path
) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Items(noise=NOISES[noise]), 6, shuffle=True)

    assert loader_fingerprints(loader(), None, CPU) == {}
    with_folder, without = (train_loader(loader(), engine, folder) for folder in (tmp_path, None))
    for name, value in with_folder.state_dict().items():
        assert torch.equal(value, without.state_dict()[name]), name
    train_loader(loader(), engine, tmp_path)


def test_items_that_draw_from_their_own_generator_are_not_read(engine: Engine, tmp_path: Path) -> None:
    class Own(Items):
        def __init__(self) -> None:
            super().__init__()
            self.transforms = [{"crop": torch.Generator().manual_seed(0)}]

        def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
            raise AssertionError("reading would change what it draws later")

    assert loader_fingerprints(DataLoader(Own(), 6), None, CPU) == {}


def test_items_that_cannot_be_read_are_left_to_the_training() -> None:
    class Broken(Items):
        def __getitem__(self, row: int) -> Any:
            raise OSError("the disk is gone")

    assert loader_fingerprints(DataLoader(Broken(), 6), Broken(), CPU) == {}
