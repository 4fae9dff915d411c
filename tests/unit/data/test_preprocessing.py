"""Preprocessing: the tensors a network gets from every kind of set; sets by name, folder or file."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.unit.small_sets import (
    make_cifar_small,
    random_bytes,
    write_cifar10,
    write_cifar_c,
    write_image,
    write_scenes,
)
from torch import Tensor

from hetsngp.data import preprocessing as module
from hetsngp.data.corruptions import corrupt
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.files import ImageFiles
from hetsngp.data.images.multi_label import MultiLabelFiles
from hetsngp.data.preprocessing import Preprocessing, made_by_hetsngp, subset
from hetsngp.data.sources import has_test, open_set

Image = pytest.importorskip("PIL.Image")
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
INPUTS = Preprocessing((8, 8), MEAN, STD, ("cat", "dog"), resize=10)
SHAPES = ((20, 13), (9, 31), (8, 8), (40, 40), (6, 7))


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Five cats and five dogs of many sizes."""
    for name in ("cat", "dog"):
        for number, (height, width) in enumerate(SHAPES):
            write_image(
                tmp_path / "pets" / name / f"{number}.png", random_bytes(height, width, 3, seed=number)
            )
    return tmp_path / "pets"


def theirs(files: list[Path], size: int, resize: int) -> Tensor:
    """Reference by torchvision."""
    v2 = pytest.importorskip("torchvision.transforms.v2")
    steps = [v2.Resize(resize, antialias=True), v2.CenterCrop(size), v2.PILToTensor()]
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    pictures = []
    for file in files:
        with Image.open(file) as picture:
            pictures.append(v2.Compose(steps)(picture.convert("RGB")))
    return torch.stack(pictures)


def batches(loader: Any) -> tuple[Tensor, Tensor]:
    found = list(loader)
    return torch.cat([x for x, _ in found]), torch.cat([y for _, y in found])


# --- pixels ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resize", [None, 8, 10, 17])
def test_pixels_are_torchvisions_however_they_come(
    pets: Path, resize: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = Preprocessing((8, 8), MEAN, STD, ("cat", "dog"), resize=resize)
    data = inputs.open(pets)
    assert isinstance(data, ImageFiles)
    expected = theirs(list(data.files), 8, resize or 8)
    labels = torch.tensor([0] * 5 + [1] * 5)
    assert torch.allclose(inputs.read(data.files), expected, atol=1e-6)
    x, y = batches(inputs.loader(data, 4))
    assert torch.allclose(x, expected, atol=1e-5)
    assert torch.equal(y, labels)
    monkeypatch.setattr(module, "SMALL_BYTES", 10 * 3 * 8 * 8 - 1)
    loader = inputs.loader(data, 4, num_workers=0)
    assert isinstance(loader, torch.utils.data.DataLoader)
    x, y = batches(loader)
    assert torch.allclose(x, expected, atol=1e-6)
    assert torch.equal(y, labels)


def test_images_that_are_cut_already_have_a_resize_of_their_own(
    pets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = INPUTS.open(pets)
    expected = theirs(list(data.files), 8, 8)  # type: ignore[union-attr]
    for most in (module.SMALL_BYTES, 0):
        monkeypatch.setattr(module, "SMALL_BYTES", most)
        x, _ = batches(INPUTS.loader(data, 4, num_workers=0, resize=8))
        assert torch.allclose(x, expected, atol=1e-5)
        assert not torch.allclose(batches(INPUTS.loader(data, 4, num_workers=0))[0], expected, atol=1e-2)


def test_arrays_keep_their_pixels(tmp_path: Path) -> None:
    pixels, y = random_bytes(5, 8, 8, 3), np.array([1, 0, 1, 1, 0])
    np.savez(tmp_path / "a.npz", x_test=pixels, y_test=y, class_names=np.array(["cat", "dog"]))
    found, labels = batches(INPUTS.loader(INPUTS.open(tmp_path / "a.npz"), 2))
    wanted = (pixels / 255 - MEAN) / STD
    assert np.allclose(found.permute(0, 2, 3, 1).numpy(), wanted, atol=1e-5)
    assert labels.tolist() == y.tolist()


def test_multi_label_targets_are_multi_hot(pets: Path) -> None:
    names = [f"cat/{number}.png" for number in range(5)]
    data = MultiLabelFiles.of(pets, names, [[0], [1], [0, 1], [], [1]], ("cat", "dog"))
    x, y = batches(INPUTS.loader(data, 2, num_workers=0))
    assert torch.allclose(x, theirs([pets / name for name in names], 8, 10), atol=1e-6)
    assert y.tolist() == [[1, 0], [0, 1], [1, 1], [0, 0], [0, 1]]


def test_files_for_models_that_take_no_files(pets: Path, tmp_path: Path) -> None:
    grey = Preprocessing((8, 8), (0.5,), (0.5,), ("cat", "dog"))
    with pytest.raises(ValueError, match="takes images of 1 channels, and image files give 3"):
        grey.loader(grey.open(pets), 4)
    with pytest.raises(ValueError, match="takes images of 1 channels"):
        grey.read([pets / "cat" / "0.png"])
    oblong = Preprocessing((8, 6), MEAN, STD, ("cat", "dog"))
    for call in (lambda: oblong.loader(oblong.open(pets), 4), lambda: oblong.read([pets / "cat" / "0.png"])):
        with pytest.raises(ValueError, match="takes images of 8×6"):
            call()
    data = ImageArrays(torch.zeros(2, 3, 8, 6).byte(), torch.tensor([0, 1]), ("cat", "dog"))
    assert batches(oblong.loader(data, 2))[0].shape == (2, 3, 8, 6)
    with pytest.raises(ValueError, match=r"the images are \(3, 8, 6\).* takes \(3, 8, 8\)"):
        INPUTS.loader(data, 2)
    (tmp_path / "no.png").write_text("no")
    with pytest.raises(ValueError, match=r"no\.png cannot be read as an image"):
        INPUTS.read([tmp_path / "no.png"])
    with pytest.raises(FileNotFoundError, match=r"gone\.png is not there"):
        INPUTS.read([tmp_path / "gone.png"])


# --- on disk --------------------------------------------------------------------------------------------


def test_a_description_comes_back() -> None:
    for inputs in (INPUTS, Preprocessing((3, 5), (0.5,), (1,), ("a", "b", "ü"), multi_label=True)):
        again = Preprocessing.from_dict(json.loads(json.dumps(inputs.to_dict(), allow_nan=False)))
        assert again == inputs
        assert hash(again) == hash(inputs)  # lists have become tuples again


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("size", value) for value in (8, [8], [8, 8, 8], [8, 0], [8.5, 8.5], ["8", "8"], None, [True, 8])],
        *[("mean", value) for value in (None, 0.5, [0.5], [None] * 3, [float("nan")] * 3, ["a"] * 3, "abc")],
        *[("mean", [number, 0, 0]) for number in (float("inf"), 10**400, -(10**400))],
        *[("std", value) for value in ([1, 1, 0], [1, 1, -1], [1, 1], [])],
        *[("class_names", value) for value in (None, "ab", ["a"], [], [1, 2], {"a": 1})],
        *[("resize", value) for value in ("10", 0, -1, 9.5, [10])],
        ("sizes", [8, 8]),
    ],
)
def test_damaged_descriptions_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError):
        Preprocessing.from_dict({**INPUTS.to_dict(), name: value})


def test_a_description_must_be_whole() -> None:
    for name in ("size", "mean", "std", "class_names"):
        whole = INPUTS.to_dict()
        del whole[name]
        with pytest.raises(ValueError, match=name):
            Preprocessing.from_dict(whole)
    for nothing in (None, [], 3, "size"):
        with pytest.raises(ValueError, match="inputs are described by"):
            Preprocessing.from_dict(nothing)  # type: ignore[arg-type]


# --- sets -----------------------------------------------------------------------------------------------


def test_folders(pets: Path, tmp_path: Path) -> None:
    split = tmp_path / "split"
    split.mkdir()
    (split / "train").symlink_to(pets)
    assert len(open_set(split, "train")) == 10
    assert not has_test(split)
    with pytest.raises(FileNotFoundError, match="has no folder test or val: make one"):
        open_set(split, "test")
    write_image(split / "val" / "cat" / "a.png", random_bytes(8, 8, 3))
    write_image(split / "val" / "dog" / "b.png", random_bytes(8, 8, 3))
    assert has_test(split)
    assert [file.name for file in INPUTS.open(split).files] == ["a.png", "b.png"]  # type: ignore[union-attr]
    # Classes alone are one set, and no test images to a training.
    assert not has_test(pets)
    write_image(pets / "poster.png", random_bytes(8, 8, 3))  # beside them, and of no class
    for part in ("train", "test"):
        assert open_set(pets, part).class_names == ("cat", "dog")
        assert len(open_set(pets, part)) == 10
    flat = INPUTS.open(pets / "dog")
    assert flat.class_names == ("unlabelled",)
    assert [file.name for file in flat.files] == [f"{n}.png" for n in range(5)]  # type: ignore[union-attr]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "readme.txt").touch()
    with pytest.raises(FileNotFoundError, match="has no images, nor a folder for each class"):
        INPUTS.open(tmp_path / "empty")
    (split / "train").unlink()
    with pytest.raises(FileNotFoundError, match="has no folder train: make one"):
        open_set(split, "train")


def test_files_of_arrays(tmp_path: Path) -> None:
    pixels = random_bytes(6, 8, 8, 3)
    np.savez(tmp_path / "a.npz", x_train=pixels, y_train=np.arange(6) % 3)
    assert not has_test(tmp_path / "a.npz")
    with pytest.raises(ValueError, match="has no array 'x_test'"):
        INPUTS.open(tmp_path / "a.npz")
    assert len(INPUTS.open(tmp_path / "a.npz", "train")) == 6
    np.savez(tmp_path / "a.npz", x_test=pixels[:2], y_test=np.array([0, 1]), y_train=np.arange(6) % 3)
    assert has_test("a.npz", root=tmp_path)
    assert INPUTS.open("a.npz", root=tmp_path).class_names == ("0", "1", "2")
    for wrong in ("b.npz", "cifar1"):
        with pytest.raises((ValueError, FileNotFoundError), match=re.escape(wrong)):
            INPUTS.open(wrong, root=tmp_path)


@pytest.mark.filterwarnings("ignore:.*lacks:UserWarning")
def test_sets_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cifar_small(monkeypatch)
    write_scenes(tmp_path)
    pixels = write_cifar10(tmp_path)
    monkeypatch.setenv("HETSNGP_DATA", str(tmp_path))
    data = INPUTS.open("cifar10")
    assert isinstance(data, ImageArrays)
    assert np.array_equal(data.images.numpy(), pixels["test"])
    assert len(INPUTS.open("cifar10", "train")) == 20
    assert has_test("cifar10")
    assert len(INPUTS.open("scenes")) == 4
    # A folder that is called as a set is one as a path.
    write_image(tmp_path / "svhn" / "cat" / "a.png", random_bytes(8, 8, 3))
    assert len(INPUTS.open(Path("svhn"), root=tmp_path)) == 1
    write_cifar_c(tmp_path / "CIFAR-10-C", ["fog"], 10, 10)
    with pytest.raises(
        ValueError, match=r"is a CorruptedFiles, not one set of images: .* given as corrupted"
    ):
        INPUTS.open("cifar10-c")
    with pytest.raises(ValueError, match="did you mean 'test'"):
        INPUTS.open("cifar10", "tests")


def test_some_of_a_set_are_of_every_class_alike(pets: Path) -> None:
    for data in (INPUTS.open(pets, limit=4), INPUTS.open(pets).load(8).split(4)[1]):  # type: ignore[union-attr]
        assert sorted(data.labels.tolist()) == [0, 0, 1, 1]  # type: ignore[union-attr]
    assert len(INPUTS.open(pets, limit=10)) == len(INPUTS.open(pets, limit=99)) == 10
    names = [f"cat/{number}.png" for number in range(5)]
    several = subset(MultiLabelFiles.of(pets, names, [[0]] * 5, ("cat", "dog")), 3)
    assert [several.file(row).name for row in range(3)] == ["0.png", "2.png", "4.png"]
    for limit in (0, -1):
        with pytest.raises(ValueError, match="limit must be at least 1"):
            INPUTS.open(pets, limit=limit)


# --- corrupted sets -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:no frost overlays:UserWarning")
def test_corruptions_are_made_of_the_test_images(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETSNGP_DATA", str(pets))
    inputs = Preprocessing((32, 32), MEAN, STD, ("cat", "dog"))
    sets = inputs.open_corrupted("made", clean=pets, limit=4)
    clean = inputs.open(pets, limit=4).load(32)  # type: ignore[union-attr]
    assert made_by_hetsngp(sets)
    assert len(sets) == 14 * 5
    found = sets["contrast", 5]
    assert torch.equal(found.labels, clean.labels)  # type: ignore[union-attr]
    made = corrupt(clean.images, "contrast", 5, seed=0, constants="cifar")
    assert torch.equal(found.images, made)  # type: ignore[union-attr]
    assert not torch.equal(made, clean.images)
    with pytest.raises(ValueError, match="corruptions are made of clean images: give clean"):
        inputs.open_corrupted("made")
    with pytest.raises(ValueError, match="choose one of 'cifar10-c'"):
        inputs.open_corrupted("cifar-c")


@pytest.mark.filterwarnings("ignore:.*(frost overlays|lacks):UserWarning")
def test_cifar_c_published_or_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cifar_small(monkeypatch)
    clean = write_cifar10(tmp_path)
    inputs = Preprocessing((32, 32), MEAN, STD, ("a", "b"))

    def opened(**given: Any) -> Any:
        return inputs.open_corrupted("cifar10-c", root=tmp_path, **given)

    whole, some = opened(), opened(limit=5)
    assert made_by_hetsngp(whole)
    assert made_by_hetsngp(some)
    assert len(whole["fog", 1]) == 10
    rows = [
        int((torch.from_numpy(clean["test"]) == image).flatten(1).all(1).nonzero())
        for image in some.images.images
    ]
    assert len(rows) == len(some["fog", 1]) == 5  # five are made, not ten
    pixels = write_cifar_c(tmp_path / "CIFAR-10-C", ["fog"], 10, 10)
    whole, some = opened(), opened(limit=4)
    assert not made_by_hetsngp(whole)
    assert not made_by_hetsngp(some)
    assert list(some) == [("fog", severity) for severity in range(1, 6)]
    assert np.array_equal(whole["fog", 2].images.permute(0, 2, 3, 1).numpy(), pixels["fog"][10:20])
    assert len(some["fog", 2]) == 4
    assert len(set(some["fog", 2].labels.tolist())) == 4


# --- images in memory that are resized --------------------------------------------------------------------


def test_arrays_are_resized_where_the_network_was_pretrained() -> None:
    inputs = Preprocessing((16, 16), (0.5,) * 3, (0.25,) * 3, ("a", "b"), resize_arrays=True)
    assert Preprocessing.from_dict(inputs.to_dict()) == inputs
    pixels = torch.from_numpy(random_bytes(3, 3, 8, 10))
    expected = F.interpolate(pixels.float(), (16, 16), mode="bicubic", antialias=True).clamp(0, 255)
    data = ImageArrays(pixels, torch.tensor([0, 1, 0]), ("a", "b"))
    x, y = next(iter(inputs.loader(data, 3)))
    assert torch.allclose(x, (expected / 255 - 0.5) / 0.25, atol=1e-5)
    assert y.tolist() == [0, 1, 0]
    grey = ImageArrays(pixels[:, :1], data.labels, data.class_names)
    x, _ = next(iter(inputs.loader(grey, 3)))
    assert x.shape == (3, 3, 16, 16)
    assert torch.equal(x[:, 0], x[:, 2])
    large = ImageArrays(torch.from_numpy(random_bytes(2, 3, 16, 16)), data.labels[:2], data.class_names)
    x, _ = next(iter(inputs.loader(large, 2)))
    assert torch.allclose(x, (large.images / 255 - 0.5) / 0.25, atol=1e-6)  # as it is


def test_a_description_without_resized_arrays_is_that_of_older_releases() -> None:
    inputs = Preprocessing((8, 8), (0.5,), (0.25,), ("a", "b"))
    assert set(inputs.to_dict()) == {"size", "mean", "std", "class_names", "several_labels", "resize"}
    assert not Preprocessing.from_dict(inputs.to_dict()).resize_arrays
    with pytest.raises(ValueError, match="resize_arrays is true or false"):
        Preprocessing.from_dict({**inputs.to_dict(), "resize_arrays": 1})
