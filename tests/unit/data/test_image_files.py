"""Image files: labels stay with their files, and disk and memory give the same pixels."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.small_sets import random_bytes, write_image

from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.files import ImageFiles, read_image
from hetsngp.data.images.folders import ENDINGS, class_names, load_folder, scan_folder
from hetsngp.data.images.multi_label import MultiLabelFiles

Image = pytest.importorskip("PIL.Image")
SIZE = 12


@pytest.fixture
def files(tmp_path: Path) -> ImageFiles:
    """Six, each of its own shape; names beyond ASCII and of many lengths."""
    names = ["é.png", "b.png", "long" * 20 + ".png", "c d.png", "e.bmp", "f.webp"]
    for number, name in enumerate(names):
        write_image(tmp_path / name, random_bytes(14 + number, 20 - number, 3, seed=number))
    return ImageFiles(
        tuple(tmp_path / name for name in names), torch.tensor([2, 0, 0, 1, 2, 0]), tuple("abc")
    )


def test_load_decodes_every_file(files: ImageFiles) -> None:
    done: list[tuple[int, int]] = []
    data = files.load(SIZE, progress=lambda *counts: done.append(counts))
    assert torch.equal(data.labels, files.labels)
    assert data.class_names == files.class_names
    assert done[-1] == (6, 6)
    for file, found in zip(files.files, data.images, strict=True):
        assert torch.equal(found, read_image(file, SIZE))


def test_many_files_keep_their_order(tmp_path: Path) -> None:
    """More than a thread decodes at once; the colour of each says which it is."""
    names = [tmp_path / f"{number}.png" for number in range(150)]
    for number, name in enumerate(names):
        write_image(name, np.full((4, 4, 3), number, np.uint8))
    data = ImageFiles(tuple(names), torch.arange(150) % 3, tuple("abc")).load(4)
    assert data.images[:, 0, 0, 0].tolist() == list(range(150))


def test_take_follows_the_indices(files: ImageFiles) -> None:
    for indices in ([3, 0], np.array([3, 0]), torch.tensor([3, 0])):
        taken = files.take(indices)
        assert taken.files == (files.files[3], files.files[0])
        assert taken.labels.tolist() == [1, 2]
        assert taken.num_classes == 3
    with pytest.raises(TypeError, match="nonzero"):
        files.take(files.labels == 1)
    with pytest.raises(ValueError, match="at least one index"):
        files.take([])


@pytest.mark.parametrize("held_out", [7, 0.25])
def test_files_are_split_as_arrays_are(held_out: float) -> None:
    labels = torch.arange(40) % 3
    paths = tuple(Path(f"{row}.png") for row in range(40))
    arrays = ImageArrays(torch.arange(40).byte()[:, None, None, None], labels, tuple("abc"))
    parts = {}
    for seed in (0, 1):
        parts[seed] = ImageFiles(paths, labels, tuple("abc")).split(held_out, seed)
        for ours, theirs in zip(parts[seed], arrays.split(held_out, seed), strict=True):
            assert [int(file.stem) for file in ours.files] == theirs.images.flatten().tolist()
            assert torch.equal(ours.labels, theirs.labels)
            assert ours.class_names == theirs.class_names
    assert parts[0][1].files != parts[1][1].files


# --- multi-label ---------------------------------------------------------------------------------------

LABELS = [[1], [], [0, 2], [3, 4, 1], [2], [], [4, 0]]


@pytest.fixture
def several() -> MultiLabelFiles:
    """Images without labels and with up to three, the last and the first of them too."""
    return MultiLabelFiles.of(Path("folder"), [f"{row}.png" for row in range(7)], LABELS, tuple("abcde"))


def rows_of(data: MultiLabelFiles) -> list[int]:
    """Which images they are; the labels of each are checked."""
    rows = [int(data.file(row).stem) for row in range(len(data))]
    assert [data.labels_of(row).tolist() for row in range(len(data))] == [LABELS[row] for row in rows]
    assert len(data.labels) == sum(len(LABELS[row]) for row in rows)
    assert data.num_classes == 5
    return rows


def test_labels_go_with_the_images_that_are_taken(several: MultiLabelFiles) -> None:
    for indices in ([3], [6, 0], range(4), [1, 5], [2, 2, 3], np.array([4, 3]), torch.tensor([0, 6])):
        assert rows_of(several.take(indices)) == [int(index) for index in indices]
    assert rows_of(several.take([-1, 2]).take([1, 0])) == [2, 6]
    with pytest.raises(TypeError, match="nonzero"):
        several.take(torch.ones(7, dtype=torch.bool))
    with pytest.raises(ValueError, match="at least one index"):
        several.take([])
    with pytest.raises(IndexError):
        several.take([7])


def test_multi_label_images_are_split_at_random(several: MultiLabelFiles) -> None:
    for held_out, count in ((3, 3), (0.3, 2), (6, 6)):
        rest, chosen = several.split(held_out, seed=4)
        assert len(chosen) == count
        assert sorted(rows_of(rest) + rows_of(chosen)) == list(range(7))
        assert rows_of(rest) == sorted(rows_of(rest))
        assert rows_of(chosen) == rows_of(several.split(held_out, seed=4)[1]) == sorted(rows_of(chosen))
    often = np.bincount([row for seed in range(200) for row in rows_of(several.split(2, seed)[1])])
    # A binomial count of 200 · 2/7, within four deviations.
    assert abs(often - 200 * 2 / 7).max() < 4 * (200 * 2 / 7 * 5 / 7) ** 0.5
    for held_out in (0, 7, 1.5, True):
        with pytest.raises(ValueError, match="held_out"):
            several.split(held_out)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_loader_gives_the_pixels_of_memory(files: ImageFiles, workers: int) -> None:
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    loader = files.loader(SIZE, 4, num_workers=workers, mean=mean, std=std)
    x, y = (torch.cat(parts) for parts in zip(*loader, strict=True))
    centre, scale = (torch.tensor(value)[:, None, None] for value in (mean, std))
    torch.testing.assert_close(x * scale + centre, files.load(SIZE).images / 255)
    assert torch.equal(y, files.labels)
    assert loader.dataset.classes == ["a", "b", "c"]


def test_training_crops_are_random_parts(tmp_path: Path) -> None:
    """An image with one colour on the left and another on the right, resized, flipped or not."""
    pytest.importorskip("torchvision")
    pixels = np.zeros((40, 40, 3), np.uint8)
    pixels[:, :20], pixels[:, 20:] = (255, 0, 0), (0, 0, 255)
    write_image(tmp_path / "a.png", pixels)
    files = ImageFiles((tmp_path / "a.png",) * 64, torch.zeros(64).long(), ("a",))
    loader = files.loader(8, 30, train=True, num_workers=0, mean=(0, 0, 0), std=(1, 1, 1))
    batches = list(loader)
    assert [len(x) for x, _ in batches] == [30, 30]  # full ones only
    x = torch.cat([x for x, _ in batches])
    assert x.shape[1:] == (3, 8, 8)
    torch.testing.assert_close(x[:, 0] + x[:, 2], torch.ones(60, 8, 8), atol=0.01, rtol=0)
    red = x[:, 0].mean((1, 2))
    assert red.std() > 0.1  # different parts
    left = x[:, 0, :, 0].mean(1) > 0.5
    both = (red > 0.2) & (red < 0.8)  # of those that have both colours some are mirrored
    assert 0 < int(left[both].sum()) < int(both.sum())


def test_a_damaged_file_is_named_by_the_loader(files: ImageFiles) -> None:
    pytest.importorskip("torchvision")
    files.files[3].write_bytes(b"no image")
    for train in (False, True):
        with pytest.raises(ValueError, match=r"c d.png cannot be read as an image.*replace or remove"):
            list(files.loader(SIZE, 2, train=train, num_workers=0))


@pytest.mark.parametrize(
    ("paths", "labels", "message"),
    [
        ((), torch.tensor([]).long(), "no files"),
        (("a", "b"), torch.tensor([0]), "one for each of 2 files"),
        (("a", "b"), torch.tensor([0.0, 1.0]), "int64"),
        (("a", "b"), [0, 1], "torch.tensor"),
        (("a", "b"), torch.tensor([0, 2]), "from 0 to 2, but there are 2 class_names"),
        (("a", "b"), torch.tensor([0, -1]), "from -1 to 0"),
    ],
)
def test_wrong_labels_are_refused(paths: tuple[str, ...], labels: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageFiles(paths, labels, ("x", "y"))


def test_sizes_are_checked(files: ImageFiles) -> None:
    for call in (lambda: files.load(0), lambda: files.loader(0, 2), lambda: files.loader(8, 0)):
        with pytest.raises(ValueError, match="must be a positive whole number"):
            call()
    with pytest.raises(ValueError, match=r"6 images of 8×8.*ImageFiles.loader.*limit_bytes"):
        files.load(8, limit_bytes=6 * 3 * 64 - 1)


def test_a_scanned_folder_is_the_loaded_one(tmp_path: Path) -> None:
    for name in ("b/2.png", "b/10.png", "a/deep/1.png"):
        write_image(tmp_path / name, random_bytes(9, 9, 3, seed=len(name)))
    files = scan_folder(tmp_path)
    assert [file.relative_to(tmp_path).as_posix() for file in files.files] == [
        "a/deep/1.png",
        "b/10.png",
        "b/2.png",
    ]
    assert files.labels.tolist() == [0, 1, 1]
    assert files.class_names == ("a", "b")
    assert torch.equal(files.load(8).images, load_folder(tmp_path, 8).images)


# --- which files and folders count --------------------------------------------------------------------


def paths_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths sort without regard to case, as they do there."""
    monkeypatch.setattr("pathlib.PurePath.__lt__", lambda a, b: str(a).lower() < str(b).lower())


def backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that lists its files from Z to A."""
    real = os.scandir

    @contextmanager
    def scandir(path: Any) -> Iterator[Iterator[Any]]:
        with real(path) as entries:
            yield iter(sorted(entries, key=lambda entry: entry.name, reverse=True))

    monkeypatch.setattr(os, "scandir", scandir)


def write_two(root: Path) -> Path:
    for name in ("Zebra/B.png", "Zebra/a.png", "apple/1.png", "apple/Deep/2.JPG", "apple/deep/1.png"):
        write_image(root / name, random_bytes(9, 9, 3, seed=len(name)))
    return root


@pytest.mark.parametrize("disk", [paths_of_windows, backwards])
def test_labels_and_order_do_not_depend_on_the_platform(
    disk: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_two(tmp_path)
    disk(monkeypatch)
    files = scan_folder(tmp_path)
    assert files.class_names == ("Zebra", "apple")
    assert [file.relative_to(tmp_path).as_posix() for file in files.files] == [
        *("Zebra/B.png", "Zebra/a.png"),
        *("apple/1.png", "apple/Deep/2.JPG", "apple/deep/1.png"),
    ]
    assert files.labels.tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    "hidden",
    [
        "apple/._1.png",
        ".ipynb_checkpoints/1.png",
        "apple/.ipynb_checkpoints/1.png",
        "apple/deep/.thumbs/1.png",
        ".DS_Store",
        ".trash/",
    ],
)
def test_what_begins_with_a_dot_is_passed_over(hidden: str, tmp_path: Path) -> None:
    before = scan_folder(write_two(tmp_path))
    if hidden.endswith("/"):
        (tmp_path / hidden).mkdir()
    else:
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / hidden).write_bytes(b"left by another system")
    after = scan_folder(tmp_path)
    assert (after.class_names, after.files) == (before.class_names, before.files)
    assert class_names(tmp_path) == ["Zebra", "apple"]


def test_only_images_count(tmp_path: Path) -> None:
    """Pillow knows all of these endings, the first four without being able to read such files by itself."""
    before = scan_folder(write_two(tmp_path))
    for ending in ("mpg", "h5", "grib", "wmf", "pdf", "eps"):
        (tmp_path / "apple" / f"other.{ending}").write_bytes(b"no image")
    assert scan_folder(tmp_path).files == before.files
    assert set(ENDINGS) <= set(Image.registered_extensions())


@pytest.mark.parametrize("place", ["apple/2.jpg", "apple/deep/more", "pear"])
def test_links_that_lead_nowhere_are_named(place: str, tmp_path: Path) -> None:
    """A class that is a link to a disk that is not mounted would move the labels of those behind it."""
    data = write_two(tmp_path / "data")
    (tmp_path / "elsewhere").mkdir()
    (data / "apple" / "linked").symlink_to(tmp_path / "elsewhere")  # this one is good
    write_image(tmp_path / "elsewhere" / "3.png", random_bytes(9, 9, 3))
    assert scan_folder(data).files[-1] == data / "apple/linked/3.png"
    (data / place).symlink_to(tmp_path / "nowhere")
    with pytest.raises(
        FileNotFoundError, match=rf"{place} is a link to .*nowhere, which is not there: mount"
    ):
        scan_folder(data)
