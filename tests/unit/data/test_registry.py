"""Every named set is known, says where it is expected and where to get it, and opens by its name."""

import re
import typing
from pathlib import Path

import numpy as np
import pytest
from tests.unit.small_sets import make_cifar_small, write_cifar10, write_scenes, write_svhn

from hetsngp.data.datasets.registry import DATASETS, describe, open_data
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.files import ImageFiles
from hetsngp.data.sources import has_test, open_images

NAMES = (
    *(
        "cifar10",
        "cifar100",
        "cifar10n",
        "cifar10h",
        "cifar10-c",
        "cifar100-c",
        "scenes",
        "places365",
        "svhn",
    ),
    *("imagenet", "imagenet-c", "imagenet-a", "imagenet-r", "imagenet-v2", "imagenet21k", "clinc150"),
)
SPLITS = [(name, split) for name, data in DATASETS.items() for split in data.splits]
SOURCE = re.compile(r"https?://\S+|torchvision\.datasets\.\w+\(")


def test_the_names() -> None:
    assert tuple(DATASETS) == NAMES
    assert all(data.name == name for name, data in DATASETS.items())


@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_a_missing_set_says_where_it_belongs_and_where_it_comes_from(
    name: str, split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError) as error:
        open_data(name, split, tmp_path)
    message = str(error.value)
    folders = [line for line in message.splitlines() if line.startswith(f"  {tmp_path}/")]
    assert folders, message
    assert SOURCE.search(message.partition("To get it: ")[2]), message
    monkeypatch.setenv("HETSNGP_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=re.escape(folders[0])):
        open_data(name, split)
    with pytest.raises(FileNotFoundError, match=re.escape(folders[0])):
        open_images(name, split)


@pytest.mark.parametrize("name", NAMES)
def test_the_description_is_complete(name: str) -> None:
    data, text = DATASETS[name], describe(name)
    for part in (name, data.about, data.layout, data.get, *data.splits):
        assert part in text
    assert SOURCE.search(data.get)
    assert text in describe()


def test_names_that_are_none_are_told_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'cifar10', 'cifar100', .*'clinc150'; did you mean 'cifar100'"):
        open_data("cifar-100", root=tmp_path)
    with pytest.raises(ValueError, match="split of svhn 'val': choose one of 'train', 'test', 'extra'"):
        open_data("svhn", "val", tmp_path)
    with pytest.raises(ValueError, match="svhn has no variants: leave out ':clean'"):
        open_data("svhn:clean", root=tmp_path)


def test_without_a_folder_of_data_sets_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETSNGP_DATA", raising=False)
    with pytest.raises(
        ValueError, match=r"set the environment variable HETSNGP_DATA .*\(in Python also: root="
    ):
        open_data("svhn")


def test_the_home_folder_may_be_abbreviated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    write_scenes(tmp_path / "data")
    assert len(open_data("scenes", root="~/data")) == 4


@pytest.mark.parametrize("name", NAMES)
def test_what_a_set_gives_is_what_its_reader_says(name: str) -> None:
    """Readers that are lambdas say nothing; what these give is tested where they are."""
    said = typing.get_type_hints(DATASETS[name].open).get("return")
    if said is None:
        assert name in (*OPENED, "cifar100", "cifar10-c", "cifar100-c")
        return
    kinds = sorted(kind.__name__ for kind in typing.get_args(said) or (said,))
    assert kinds == DATASETS[name].gives.split(" or ")


OPENED = ("cifar10", "scenes", "svhn")


def test_sets_open_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cifar_small(monkeypatch)
    pixels, scenes = write_cifar10(tmp_path), write_scenes(tmp_path)
    write_svhn(tmp_path, "test", [1, 2])
    data = open_data("cifar10", "train", tmp_path)
    assert isinstance(data, ImageArrays)
    assert np.array_equal(data.images.numpy(), pixels["train"])
    files = open_data("scenes", root=tmp_path)
    assert isinstance(files, ImageFiles)
    assert len(files) == len(scenes)
    assert len(open_data("svhn", root=tmp_path)) == 2
    for name in OPENED:
        assert type(open_data(name, root=tmp_path)).__name__ == DATASETS[name].gives
    for name in ("cifar10", "svhn"):
        with pytest.raises(ValueError, match="leave it out"):
            open_images(name, "test", size=32, root=tmp_path)


def test_a_folder_may_be_called_as_a_set_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_scenes(tmp_path)
    (tmp_path / "scenes").rename(tmp_path / "svhn")
    monkeypatch.chdir(tmp_path)
    for folder in ("./svhn", Path("svhn")):
        assert len(open_images(folder, "train", size=8)) == 4
        assert not has_test(folder)


@pytest.mark.parametrize("name", NAMES)
def test_has_test_goes_by_the_splits(name: str) -> None:
    assert has_test(name) == ("test" in DATASETS[name].splits)
