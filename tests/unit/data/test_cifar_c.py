"""CIFAR-C: every severity of every corruption where the published files have it, read when asked for."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from tests.unit.small_sets import random_bytes, write_cifar_c

from hetsngp.data.corruptions import CORRUPTIONS
from hetsngp.data.datasets.cifar import load_cifar
from hetsngp.data.datasets.cifar_c import CLASS_NAMES, open_cifar_c
from hetsngp.data.datasets.registry import DATASETS, open_data
from hetsngp.data.sources import open_images

ALL = [*CORRUPTIONS, "speckle_noise", "gaussian_blur"]
COUNT = 7


@pytest.mark.parametrize(
    ("name", "folder", "classes"), [("cifar10-c", "CIFAR-10-C", 10), ("cifar100-c", "CIFAR-100-C", 100)]
)
def test_blocks_are_severities(name: str, folder: str, classes: int, tmp_path: Path) -> None:
    written = write_cifar_c(tmp_path / folder, ALL, COUNT, classes)
    (tmp_path / folder / "._fog.npy").write_bytes(b"left by another system")
    found = open_data(name, root=tmp_path)
    assert isinstance(found, Mapping)
    assert type(found).__name__ == DATASETS[name].gives
    assert found.corruptions == (*CORRUPTIONS, "gaussian_blur", "speckle_noise")
    assert len(found) == len(list(found)) == 17 * 5
    assert list(found)[:6] == [*(("gaussian_noise", severity) for severity in range(1, 6)), ("shot_noise", 1)]
    for (corruption, severity), images in found.items():
        block = written[corruption].reshape(5, COUNT, 32, 32, 3)[severity - 1]
        assert np.array_equal(images.images.permute(0, 2, 3, 1).numpy(), block)
        assert images.labels.tolist() == list(range(COUNT))
        assert images.num_classes == classes
    with pytest.raises(ValueError, match=rf"open_data\('{name}'"):
        open_images(name, "test", root=tmp_path)


def test_a_file_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "CIFAR-100-C"
    write_cifar_c(folder, ALL, COUNT, 100)
    found = open_cifar_c(tmp_path)
    (folder / "fog.npy").unlink()
    assert ("fog", 5) in found  # to say so, no file is opened
    found["snow", 5]
    with pytest.raises(ValueError, match=r"fog.npy is missing or damaged.*zenodo.org/records/3555552"):
        found["fog", 5]


@pytest.mark.parametrize("key", [("fog", 0), ("fog", 6), ("rain", 1), "fog", ("fog",)])
def test_unknown_keys_are_told_the_known_ones(key: object, tmp_path: Path) -> None:
    write_cifar_c(tmp_path / "CIFAR-100-C", ALL, COUNT, 100)
    found = open_cifar_c(tmp_path)
    assert key not in found
    with pytest.raises(KeyError, match="speckle_noise, a severity of 1 … 5"):
        found[key]  # type: ignore[index]


def test_an_incomplete_set_says_so(tmp_path: Path) -> None:
    write_cifar_c(tmp_path / "CIFAR-100-C", ["fog", "snow"], COUNT, 100)
    with pytest.warns(UserWarning, match=r"lacks gaussian_noise, .*not that of the benchmark"):
        found = open_cifar_c(tmp_path)
    assert found.corruptions == ("snow", "fog")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda at: np.save(at / "fog.npy", random_bytes(34, 32, 32, 3)), r"\(34, 32, 32, 3\)"),
        (
            lambda at: np.save(at / "fog.npy", random_bytes(30, 32, 32, 3)),
            r"uint8 \(35, 32, 32, 3\) was expected",
        ),
        (lambda at: np.save(at / "fog.npy", random_bytes(35, 3, 32, 32)), r"\(35, 3, 32, 32\)"),
        (lambda at: np.save(at / "fog.npy", np.zeros((35, 32, 32, 3))), "float64"),
        (lambda at: np.save(at / "fog.npy", np.array([open, 1]), allow_pickle=True), "fog.npy is missing or"),
        (lambda at: (at / "fog.npy").write_bytes(b"no"), "fog.npy is missing or damaged"),
        (lambda at: (at / "labels.npy").unlink(), "labels.npy is missing or damaged"),
        (lambda at: np.save(at / "labels.npy", np.arange(35)), "same labels of 0 … 99 five times"),
        (lambda at: np.save(at / "labels.npy", np.arange(7)), "same labels"),
        (lambda at: np.save(at / "labels.npy", np.full(35, 100)), "same labels"),
        (lambda at: np.save(at / "labels.npy", np.zeros(35)), "same labels"),
    ],
)
def test_wrong_files_are_named(spoil: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "CIFAR-100-C"
    write_cifar_c(folder, ALL, COUNT, 100)
    open_cifar_c(tmp_path)["fog", 1]
    spoil(folder)
    with pytest.raises(ValueError, match=message) as error:
        open_cifar_c(tmp_path)["fog", 1]
    assert "get it again, https://zenodo.org/records/3555552" in str(error.value)


def test_a_missing_folder_names_both_ways(tmp_path: Path) -> None:
    for name, folder, record in (
        ("cifar10-c", "CIFAR-10-C", "2535967"),
        ("cifar100-c", "CIFAR-100-C", "3555552"),
    ):
        with pytest.raises(FileNotFoundError) as error:
            open_cifar_c(tmp_path, name)
        for part in (
            str(tmp_path / folder),
            f"https://zenodo.org/records/{record}",
            f'open_corrupted("{name}")',
        ):
            assert part in str(error.value)
    (tmp_path / "CIFAR-10-C").mkdir()
    with pytest.raises(FileNotFoundError, match=r"CIFAR-10-C/fog.npy"):
        open_cifar_c(tmp_path, "cifar10-c")


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_class_names_are_those_of_the_clean_set(name: str, data_root: Path) -> None:
    if not (data_root / name).is_dir():
        pytest.skip(f"no {name} in HETSNGP_DATA")
    assert load_cifar(name, "test", data_root).class_names == CLASS_NAMES[f"{name}-c"]
