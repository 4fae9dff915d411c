"""SVHN's files as torchvision keeps them, pixel for pixel, and zero is zero."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.unit.small_sets import write_svhn

from hetsngp.data.datasets.svhn import load_svhn
from hetsngp.data.sources import open_images

scipy_io = pytest.importorskip("scipy.io")
DIGITS = [3, 0, 9, 1, 0]


@pytest.mark.parametrize("folder", ["", "svhn"])
@pytest.mark.parametrize("split", ["train", "test", "extra"])
def test_images_and_digits(folder: str, split: str, tmp_path: Path) -> None:
    pixels = write_svhn(tmp_path / folder, split, DIGITS)
    for data in (load_svhn(split, tmp_path), open_images("svhn", split, root=tmp_path)):
        assert np.array_equal(data.images.numpy(), np.moveaxis(pixels, (3, 2), (0, 1)))
        assert [data.class_names[label] for label in data.labels] == ["3", "0", "9", "1", "0"]


def test_torchvision_reads_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    monkeypatch.setattr("torchvision.datasets.svhn.check_integrity", lambda *_: True)  # a set of our own
    write_svhn(tmp_path, "test", DIGITS)
    theirs, ours = datasets.SVHN(tmp_path, "test"), load_svhn("test", tmp_path)
    assert np.array_equal(ours.images.numpy(), theirs.data)
    assert ours.labels.tolist() == theirs.labels.tolist()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
        lambda file: file.write_bytes(b"<html>not found</html>" * 50),
        lambda file: scipy_io.savemat(file, {"X": np.zeros((32, 32, 3, 5), np.uint8)}),
        lambda file: scipy_io.savemat(file, {"X": np.zeros((32, 32, 3, 5)), "y": np.ones((5, 1))}),
        lambda file: scipy_io.savemat(file, {"X": np.zeros((5, 32, 32, 3), np.uint8), "y": np.ones((5, 1))}),
        lambda file: scipy_io.savemat(file, {"X": np.zeros((32, 32, 3, 5), np.uint8), "y": np.ones((4, 1))}),
        lambda file: scipy_io.savemat(file, {"X": np.zeros((32, 32, 3, 5), np.uint8), "y": np.zeros((5, 1))}),
    ],
)
def test_damaged_files_are_named(spoil: Callable[[Path], object], tmp_path: Path) -> None:
    write_svhn(tmp_path, "test", DIGITS)
    spoil(tmp_path / "test_32x32.mat")
    with pytest.raises(ValueError, match=r"(?s)test_32x32.mat is damaged.*get it again, torchvision.*SVHN\("):
        load_svhn("test", tmp_path)


def test_scipy_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_svhn(tmp_path, "test", DIGITS)
    for module in ("scipy", "scipy.io"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"hetsngp\[vision\]"):
        load_svhn("test", tmp_path)
