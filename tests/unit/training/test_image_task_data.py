"""The data of a training: split, loaded in memory or from disk, shared by processes, refused in time."""

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.made_data import Made, made_data
from tests.unit.small_sets import random_bytes, write_image, write_svhn
from torch import Tensor

from hetsngp.data.datasets.synsets import wnids
from hetsngp.data.images.decoding import IMAGENET_MEAN, IMAGENET_STD
from hetsngp.data.images.files import ImageFiles
from hetsngp.training import image_data
from hetsngp.training.image_data import make_loaders
from hetsngp.training.recipes.task import ImageTask
from hetsngp.training.task_data import open_task, spread

pytest.importorskip("PIL.Image")
SCALE = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


@pytest.fixture
def arrays(tmp_path: Path) -> dict[str, np.ndarray]:
    """Every image is of a colour of its own, its number, and noise."""
    content = {}
    for split, first, count in (("train", 0, 40), ("test", 100, 7)):
        pixels = random_bytes(count, 8, 8, 3, seed=first)
        pixels[:, 0, 0] = np.arange(first, first + count)[:, None]
        content |= {f"x_{split}": pixels, f"y_{split}": np.arange(count) % 4}
    np.savez(tmp_path / "a.npz", **content)
    return content


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, count in (("train", 10), ("test", 3)):
        for number in range(count):
            for name in ("cat", "dog"):
                pixels = random_bytes(12, 10, 3, seed=number + 50 * (name == "dog") + 100 * (split == "test"))
                write_image(tmp_path / "pets" / split / name / f"{number}.png", pixels)
    return tmp_path / "pets"


def task(data: Any, **given: Any) -> ImageTask:
    return ImageTask(str(data), "wrn-10-1", "sngp", **{"batch_size": 6, "held_out": 0.25, **given})


def batches(loader: Any) -> tuple[Tensor, Tensor]:
    found = list(loader)
    return torch.cat([x for x, _ in found]), torch.cat([y for _, y in found])


# --- in memory ------------------------------------------------------------------------------------------


def test_in_memory_images_are_split_and_scaled_by_the_training_part(
    arrays: dict[str, np.ndarray], tmp_path: Path
) -> None:
    given = task(tmp_path / "a.npz")
    data = open_task(given, seed=3)
    assert (data.shape, data.num_classes, data.multi_label, data.missing) == ((3, 8, 8), 4, False, None)
    parts: Any = (data.train, data.held_out, data.test)
    numbers = [part.images[:, 0, 0, 0].tolist() for part in parts]
    assert sorted(numbers[0] + numbers[1]) == list(range(40))
    assert len(numbers[1]) == 10
    assert numbers[2] == list(range(100, 107))
    other: Any = open_task(given, seed=4).held_out
    assert other.images[:, 0, 0, 0].tolist() != numbers[1]

    loaders = make_loaders(given, data, {}, seed=3)
    rows = arrays["x_train"][numbers[0]] / 255
    mean, std = rows.mean((0, 1, 2)), rows.std((0, 1, 2))
    assert loaders.inputs.size == (8, 8)
    assert loaders.inputs.class_names == ("0", "1", "2", "3")
    assert np.allclose([loaders.inputs.mean, loaders.inputs.std], [mean, std])
    wanted = {"clean": rows, "held_out": arrays["x_train"][numbers[1]] / 255, "test": arrays["x_test"] / 255}
    labels = {"clean": arrays["y_train"][numbers[0]], "held_out": arrays["y_train"][numbers[1]]}
    for name, pixels in wanted.items():
        x, y = batches(getattr(loaders, name))
        assert np.allclose(x.permute(0, 2, 3, 1).numpy(), (pixels - mean) / std, atol=1e-4), name
        assert y.tolist() == labels.get(name, arrays["y_test"]).tolist()
    assert loaders.train.shuffle
    assert loaders.train.augment is not None
    assert loaders.train.batch_size == 6
    assert loaders.train.dataset is loaders.clean.dataset
    loaders = make_loaders(given, data, SCALE, seed=3)
    assert (loaders.inputs.mean, loaders.inputs.std) == (SCALE["mean"], SCALE["std"])


def test_from_disk_is_split_as_in_memory_and_gives_the_same_images(folder: Path) -> None:
    in_memory, from_disk = task(folder, size=8, resize=9), task(folder, size=8, resize=9, from_disk=True)
    ours, theirs = open_task(in_memory, 1), open_task(replace(from_disk, workers=0), 1)
    assert theirs.shape == ours.shape == (3, 8, 8)
    files: Any = [set(part.files) for part in (theirs.train, theirs.held_out)]
    assert not files[0] & files[1]
    assert len(files[0] | files[1]) == 20
    loaded = make_loaders(in_memory, ours, SCALE, seed=1)
    read = make_loaders(replace(from_disk, workers=0), theirs, SCALE, seed=1)
    assert loaded.inputs == read.inputs
    for name in ("clean", "held_out", "test"):
        for one, other in zip(batches(getattr(loaded, name)), batches(getattr(read, name)), strict=True):
            assert torch.allclose(one, other, atol=1e-5), name
    assert isinstance(read.train, torch.utils.data.DataLoader)
    assert len(batches(read.train)[0]) == 12  # of 15, full batches only
    standard = make_loaders(replace(from_disk, workers=0), theirs, {}, seed=1).inputs
    assert (standard.mean, standard.std) == (IMAGENET_MEAN, IMAGENET_STD)


def test_a_batch_is_one_of_all_processes(folder: Path, arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    from_disk = task(folder, size=8, from_disk=True, workers=0)
    data = open_task(from_disk, 0)
    assert make_loaders(from_disk, data, {}, seed=0, processes=3).train.batch_size == 2
    with pytest.raises(ValueError, match=re.escape("batch_size=6 is for all 4 processes together")):
        make_loaders(from_disk, data, {}, seed=0, processes=4)
    with pytest.raises(ValueError, match="choose 7"):
        make_loaders(from_disk, data, {}, seed=0, processes=7)
    # One image a process: what is looked at without augmentation is shared out all the same.
    loaders = make_loaders(from_disk, data, {}, seed=0, processes=6)
    for name in ("clean", "held_out", "test"):
        whole = getattr(loaders, name)
        parts = [batches(whole.shard(rank, 6))[0] for rank in range(6) if len(whole.shard(rank, 6))]
        assert sum(map(len, parts)) == len(batches(whole)[0])
    in_memory = task(tmp_path / "a.npz")
    assert make_loaders(in_memory, open_task(in_memory, 0), {}, seed=0, processes=3).train.batch_size == 6


# --- what there is --------------------------------------------------------------------------------------


def test_test_images_may_be_missing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = open_task(task(folder / "train", size=8), 0)
    assert (alone.test, alone.missing) == (None, None)
    assert make_loaders(task(folder / "train", size=8), alone, {}, seed=0).test is None
    monkeypatch.setenv("HETSNGP_DATA", str(tmp_path))
    write_svhn(tmp_path, "train", [0, 1] * 10)
    part = open_task(task("svhn"), 0)
    assert part.test is None
    assert part.missing is not None
    assert "test_32x32.mat" in part.missing
    assert "\n" not in part.missing
    write_svhn(tmp_path, "test", [0, 1] * 5)
    whole = open_task(task("svhn"), 0)
    assert whole.test is not None
    assert len(whole.test) == 10
    assert whole.missing is None


@pytest.fixture(scope="module", params=[False, True], ids=["files", "shards"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    if find_spec("timm") is None:
        pytest.skip("the class lists come with timm")
    few: Any = {"corruptions": ("fog",), "severities": (1,), "shards": request.param}
    return made_data(tmp_path_factory.mktemp("data"), classes=3, images=4, size=8, **few)


def test_several_labels(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETSNGP_DATA", str(made.root))
    several = task("imagenet21k", size=8, workers=0, batch_size=2, options={"link": "sigmoid"})
    data = open_task(several, 0)
    assert data.multi_label
    assert (len(data.train), len(data.held_out)) == (6, 2)
    loaders = make_loaders(several, data, {}, seed=0)
    assert loaders.inputs.multi_label
    assert len(loaders.inputs.class_names) == len(wnids("imagenet21k"))

    def labels(*names: str) -> list[list[int]]:
        found = [y for name in names for y in batches(getattr(loaders, name))[1]]
        return sorted(y.nonzero().flatten().tolist() for y in found)

    assert labels("clean", "held_out") == sorted(made.several["train"])
    assert labels("test") == sorted(made.several["test"])
    assert len(batches(loaders.train)[0]) == 6
    pixels = {tuple(x.flatten()[:9].tolist()) for x in batches(loaders.clean)[0]}
    assert not pixels & {tuple(x.flatten()[:9].tolist()) for x in batches(loaders.held_out)[0]}
    with pytest.raises(ValueError, match=r"is multi-label: --set options\.link=sigmoid"):
        open_task(replace(several, options={}), 0)


def test_resized_images_are_evaluated_in_batches_of_the_training(
    arrays: dict[str, np.ndarray], tmp_path: Path
) -> None:
    for size, expected in ((16, 6), (None, 10)):
        given = replace(task(tmp_path / "a.npz"), network="test_resnet", pretrained=True, size=size)
        loaders = make_loaders(given, open_task(given, 0), SCALE, seed=0)
        assert max(len(y) for _, y in loaders.held_out) == expected
        assert len(batches(loaders.held_out)[1]) == 10


# --- what is refused ------------------------------------------------------------------------------------


def test_what_cannot_be_trained_on(
    folder: Path, arrays: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, one = tmp_path / "a.npz", tmp_path / "one"
    write_image(one / "cat" / "0.png", random_bytes(8, 8, 3))
    refused = [
        (task(file, size=8), "size=8 is for image files"),
        (task(file, resize=7), "resize=7 makes the short side smaller than the crop of 8"),
        (task(file, options={"link": "sigmoid"}), "is single-label: --set options.link=softmax"),
        (task(file, held_out=0.01), "would hold out 0 of 40 examples"),
        (task(file, held_out=0.025), "one example is held out of 40, and calibration needs two or more"),
        (task(folder / "train" / "cat", size=8), "has images and no folders of classes"),
        (task(tmp_path / "a.csv"), "a.csv has texts, not images to train on: hetsngp train text --set data="),
        (task(one, size=8), "has one class, 'cat', and a classifier needs two or more"),
        (task(folder), "may have any size: choose one, e.g. --set size=64"),
        (task(folder, from_disk=True), "--set size=64"),
        (task(folder, size=8, resize=7), "resize=7 makes the short side smaller"),
        (task(tmp_path / "gone"), "cannot open images"),
    ]
    for given, words in refused:
        with pytest.raises(ValueError, match=re.escape(words)):
            open_task(given, 0)
    cut_late = task(folder, size=8, resize=7, from_disk=True, workers=0)
    with pytest.raises(ValueError, match="resize=7 makes the short side smaller"):
        make_loaders(cut_late, open_task(cut_late, 0), {}, seed=0)
    monkeypatch.setattr(image_data, "LIMIT_BYTES", 20 * 3 * 64 - 1)
    with pytest.raises(ValueError, match=r"20 images of 8 pixels are more than .* --set from_disk=true"):
        open_task(task(folder, size=8), 0)
    assert len(open_task(task(folder, size=8, from_disk=True), 0).train) == 15


def test_training_and_test_images_must_agree(folder: Path) -> None:
    write_image(folder / "test" / "eel" / "0.png", random_bytes(8, 8, 3))
    with pytest.raises(ValueError, match=r"have different classes, e\.g\. 'eel': give both the same folders"):
        open_task(task(folder, size=8), 0)


@pytest.mark.parametrize(("count", "most"), [(90, 30), (90, 89), (10_001, 10_000), (10_005, 10_000), (7, 2)])
def test_a_part_is_spread_over_all(count: int, most: int) -> None:
    """Files lie in the order of their classes; none is taken twice, and no gap is much wider than others."""
    files = ImageFiles(tuple(f"{row}.jpg" for row in range(count)), torch.zeros(count).long(), ("cat",))
    rows = torch.tensor([int(file.stem) for file in spread(files, most).files])
    assert len(rows) == most
    assert (int(rows[0]), int(rows[-1])) == (0, count - 1)
    gaps = rows.diff()
    assert int(gaps.min()) >= 1
    assert int(gaps.max() - gaps.min()) <= 1


@pytest.mark.parametrize("most", [9, 10])
def test_what_is_few_is_taken_whole(most: int) -> None:
    files = ImageFiles(tuple(f"{row}.jpg" for row in range(9)), torch.zeros(9).long(), ("cat",))
    assert spread(files, most) is files
    assert [file.stem for file in spread(files, 1).files] == ["0"]
