"""Copies of images: found by content, and kept together by folds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.small_sets import random_bytes, write_image

from hetsngp.data.images import ImageArrays, image_folds
from hetsngp.data.images import copies as module
from hetsngp.data.images.arrays import fold_rows
from hetsngp.data.images.copies import content_keys
from hetsngp.data.images.files import ImageFiles
from hetsngp.data.sources import open_set

# Which of nine images each of 24 examples shows, and which of two classes it is given as.
SHOWN = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3, 0, 0, 8, 8, 8, 8, 8, 8, 8, 8, 8])
GIVEN = torch.arange(24) % 2
PIXELS = random_bytes(9, 6, 5, 3)


def arrays() -> ImageArrays:
    pixels = torch.from_numpy(PIXELS).permute(0, 3, 1, 2)[SHOWN]
    return ImageArrays(pixels.contiguous(), GIVEN, ("a", "b"))


def files(folder: Path) -> tuple[ImageFiles, list[int]]:
    """Images on disk, and which of the nine each of them shows."""
    for number, (shown, given) in enumerate(zip(SHOWN.tolist(), GIVEN.tolist(), strict=True)):
        write_image(folder / "ab"[given] / f"{number:02d}-{shown}.png", PIXELS[shown])
    found: ImageFiles = open_set(folder, "train")
    return found, [int(file.stem.partition("-")[2]) for file in found.files]


@pytest.mark.parametrize("kind", ["arrays", "files"])
def test_copies_are_in_one_fold_whatever_their_labels(kind: str, tmp_path: Path) -> None:
    images: Any
    images, shown = (arrays(), SHOWN.tolist()) if kind == "arrays" else files(tmp_path)
    found = image_folds(images, 3, seed=1)
    assert sorted(torch.cat(found).tolist()) == list(range(24))
    assert all(part.tolist() == sorted(part.tolist()) for part in found)
    seen = [{shown[row] for row in part.tolist()} for part in found]
    assert sum(map(len, seen)) == 9  # no image is in two folds
    assert max(map(len, seen)) - min(map(len, seen)) <= 1
    assert any(not torch.equal(a, b) for a, b in zip(found, image_folds(images, 3, seed=2), strict=True))


def test_without_copies_the_folds_are_those_of_the_labels() -> None:
    images = arrays().take(range(9))
    found = image_folds(images, 2, seed=4)
    expected = fold_rows(images.labels, 2, 2, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_there_are_no_more_folds_than_different_images() -> None:
    with pytest.raises(ValueError, match="9 different images cannot be divided into 10 folds: choose fewer"):
        image_folds(arrays(), 10)


def test_keys_are_those_of_the_content_in_any_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    images, (on_disk, shown) = arrays(), files(tmp_path)
    for held, which in ((images, SHOWN.tolist()), (on_disk, shown)):
        done: list[int] = []
        keys = content_keys(held, done.append)
        assert done == [24]
        assert len(set(keys)) == 9
        assert len(set(zip(keys, which, strict=True))) == 9
        with monkeypatch.context() as patch:
            patch.setattr(module, "PART", 7)
            assert content_keys(held, done.append) == keys
        assert done == [24, 7, 7, 7, 3]


def test_pixels_of_another_shape_are_another_image() -> None:
    wide, high = (
        ImageArrays(torch.zeros(2, 3, *s).byte(), torch.arange(2), ("a", "b")) for s in ((2, 8), (8, 2))
    )
    assert content_keys(wide)[0] == content_keys(wide)[1]
    assert content_keys(wide)[0] != content_keys(high)[0]
    assert np.unique([len(key) for key in content_keys(high)]).tolist() == [32]
