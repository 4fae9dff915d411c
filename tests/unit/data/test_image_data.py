"""Images come into memory as they lie on disk, and files that are not what they should be are refused."""

import csv
import gzip
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetsngp.data.datasets import cifar
from hetsngp.data.datasets.cifar import CIFAR, load_cifar
from hetsngp.data.images.arrays import ImageArrays, stratified
from hetsngp.data.images.decoding import IMAGENET_MEAN, IMAGENET_STD
from hetsngp.data.images.folders import folder_loader, load_folder, scan_folder
from hetsngp.data.images.npz import load_npz
from hetsngp.data.sources import has_test, open_images

Image = pytest.importorskip("PIL.Image")


def random_bytes(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def labelled(labels: list[int], classes: int) -> ImageArrays:
    pixels = torch.from_numpy(random_bytes(len(labels), 3, 4, 5))
    return ImageArrays(pixels, torch.tensor(labels), tuple("abcdefghij"[:classes]))


# --- arrays in memory ----------------------------------------------------------------------------------


def test_statistics_are_numpys() -> None:
    data = labelled([0] * 700, 1)  # more than the images of one step
    mean, std = data.statistics()
    pixels = data.images.numpy() / 255.0
    assert (mean.dtype, std.dtype) == (torch.float64, torch.float64)
    np.testing.assert_allclose(mean, pixels.mean((0, 2, 3)), rtol=1e-13)
    np.testing.assert_allclose(std, pixels.std((0, 2, 3)), rtol=1e-12)
    constant = ImageArrays(torch.full((9, 1, 7, 7), 77).byte(), torch.zeros(9).long(), ("a",))
    assert constant.statistics()[1].tolist() == [0.0]


def test_take_follows_the_indices() -> None:
    data = labelled([0, 1, 2, 1], 3)
    for indices in ([3, 0], np.array([3, 0]), torch.tensor([3, 0])):
        taken = data.take(indices)
        assert taken.labels.tolist() == [1, 0]
        assert torch.equal(taken.images, torch.stack([data.images[3], data.images[0]]))
        assert taken.num_classes == 3
    with pytest.raises(TypeError, match="nonzero"):
        data.take(data.labels == 1)
    with pytest.raises(ValueError, match="at least one index"):
        data.take([])


def test_split_divides_every_class_alike() -> None:
    data = labelled([0] * 40 + [1] * 20 + [2] * 20, 3)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for held_out in (20, 0.25):
        rest, held = data.split(held_out)
        assert torch.bincount(rest.labels).tolist() == [30, 15, 15]
        assert torch.bincount(held.labels).tolist() == [10, 5, 5]
        found = sorted(image.numpy().tobytes() for part in (rest, held) for image in part.images)
        assert found == sorted(image.numpy().tobytes() for image in data.images)  # each once
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(data.split(20, seed=0)[1].images, data.split(20, seed=0)[1].images)
    assert not torch.equal(data.split(20, seed=0)[1].images, data.split(20, seed=1)[1].images)


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ([5, 3, 2], 5, {(3, 1, 1), (2, 2, 1)}),  # 2.5, 1.5, 1: the odd one to either half, by lot
        ([9, 1], 5, {(5, 0)}),  # 4.5, 0.5: not the only one of its class
        ([7, 0, 3], 4, {(3, 0, 1)}),  # 2.8, 0, 1.2
        ([1, 1, 1], 2, {(1, 1, 0), (1, 0, 1), (0, 1, 1)}),  # no other way
    ],
)
def test_shares_are_rounded_by_largest_remainder(
    sizes: list[int], count: int, expected: set[tuple[int, ...]]
) -> None:
    data = labelled([label for label, size in enumerate(sizes) for _ in range(size)], len(sizes))
    held = [data.split(count, seed=seed)[1].labels for seed in range(40)]
    assert {tuple(torch.bincount(y, minlength=len(sizes)).tolist()) for y in held} == expected


def test_a_split_takes_what_was_chosen() -> None:
    data = labelled(torch.randint(4, (50,), generator=torch.Generator().manual_seed(0)).tolist(), 5)
    for held_out in (7, 0.4):
        for seed in range(3):
            chosen = stratified(data.labels, 5, held_out, seed)
            assert sorted(torch.cat(chosen).tolist()) == list(range(50))
            for rows, part in zip(chosen, data.split(held_out, seed), strict=True):
                assert rows.tolist() == sorted(rows.tolist())
                assert torch.equal(part.images, data.images[rows])
                assert torch.equal(part.labels, data.labels[rows])


IMAGES, LABELS = torch.zeros(2, 3, 4, 4).byte(), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((2, 3, 4, 4), np.uint8), LABELS, "torch.from_numpy"),
        (IMAGES.float(), LABELS, r"\(255 \* images\).round"),
        (IMAGES[0], LABELS, "permute"),
        (IMAGES[:0], LABELS[:0], "none of them 0"),
        (IMAGES, [0, 1], "torch.as_tensor"),
        (IMAGES, LABELS.int(), r"labels.long\(\)"),
        (IMAGES, LABELS[:1], "one for each image"),
        (IMAGES, torch.tensor([0, 2]), "labels must be 0 … 1"),
        (IMAGES, torch.tensor([0, -1]), "labels must be 0 … 1"),
    ],
)
def test_wrong_arrays_are_refused(images: Any, labels: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ImageArrays(images, labels, ("a", "b"))


@pytest.mark.parametrize("held_out", [0, 10, 0.0, 1.0, 0.01, True, "3"])
def test_impossible_splits_are_refused(held_out: Any) -> None:
    with pytest.raises(ValueError, match="held_out"):
        labelled([0] * 10, 1).split(held_out)


# --- CIFAR: small sets in the three layouts ------------------------------------------------------------

SMALL = {"train": 10, "test": 2}
NAMES = ["cat", "dog", "owl"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "SIZES", SMALL)
    monkeypatch.setattr(cifar, "IMAGES_PER_STRIP", 5)


def content(split: str) -> tuple[np.ndarray, list[int]]:
    """(n, 3072) bytes and labels, for cifar100 already in the order of its strips, by class."""
    count = SMALL[split]
    return random_bytes(count, 3072, seed=count), sorted(row % 3 for row in range(count))


def python2_pickle(pixels: np.ndarray, key: str, labels: list[int]) -> bytes:
    """A pickle of the authors' Python 2, opcode for opcode: strings without encoding, NumPy of that time."""

    def text(value: str) -> bytes:
        return b"U" + bytes([len(value)]) + value.encode()

    shape = b"".join(b"J" + struct.pack("<i", side) for side in pixels.shape)
    dtype = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    raw = b"T" + struct.pack("<i", pixels.size) + pixels.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    array += b"(K\x01(" + shape + b"t" + dtype + b"\x89" + raw + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + text("data") + array + text(key) + numbers + b"u."


def write_python(folder: Path, name: str, *, modern: bool = False) -> None:
    layout = CIFAR[name]
    folder = folder / layout.python
    folder.mkdir(parents=True)
    meta, key = layout.meta
    (folder / meta).write_bytes(pickle.dumps({key: NAMES}, protocol=2))
    for split, files in layout.files.items():
        pixels, labels = content(split)
        for number, file in enumerate(files):
            part = slice(number * len(labels) // len(files), (number + 1) * len(labels) // len(files))
            record = {"data": pixels[part], layout.labels: labels[part]}
            old = python2_pickle(pixels[part], layout.labels, labels[part])
            (folder / file).write_bytes(pickle.dumps(record, protocol=2) if modern else old)


def write_binary(folder: Path, name: str) -> None:
    layout = CIFAR[name]
    folder = folder / layout.binary
    folder.mkdir(parents=True)
    (folder / layout.names).write_text("\n".join(NAMES) + "\n\n")
    for split, files in layout.files.items():
        pixels, labels = content(split)
        coarse = b"\x09" * (layout.label_bytes - 1)
        records = [coarse + bytes([y]) + x.tobytes() for x, y in zip(pixels, labels, strict=True)]
        for number, file in enumerate(files):
            part = slice(number * len(labels) // len(files), (number + 1) * len(labels) // len(files))
            (folder / f"{file}.bin").write_bytes(b"".join(records[part]))


def write_strips(folder: Path, name: str) -> None:
    folder = folder / name
    folder.mkdir(parents=True)
    rows: list[dict[str, object]] = []
    strips: dict[str, list[np.ndarray]] = {}
    for split in SMALL:
        for index, (pixels, y) in enumerate(zip(*content(split), strict=True)):
            by_class = f"{split}_{y:02d}_{NAMES[y]}.webp"
            file = by_class if name == "cifar100" else f"{split}_{index // 5:02d}.webp"
            strip = strips.setdefault(file, [])
            place = {"row_in_strip": len(strip)} if name == "cifar100" else {"index": index}
            rows.append({"split": split, "label": y, "class_name": NAMES[y], **place})
            strip.append(pixels.reshape(3, 32, 32).transpose(1, 2, 0))
    for file, images in strips.items():
        Image.fromarray(np.concatenate(images)).save(folder / file, lossless=True)
    with gzip.open(folder / "index.csv.gz", "wt", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows[::-1])  # in any order


def write_modern(folder: Path, name: str) -> None:
    write_python(folder, name, modern=True)


def write_below(folder: Path, name: str) -> None:
    write_python(folder / name, name)


WRITERS = [write_python, write_modern, write_below, write_binary, write_strips]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("name", list(CIFAR))
@pytest.mark.parametrize("split", list(SMALL))
def test_every_layout_gives_the_images_that_went_in(
    write: Callable[[Path, str], None], name: str, split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, name)
    pixels, labels = content(split)
    monkeypatch.setenv("HETSNGP_DATA", str(tmp_path))
    for data in (load_cifar(name, split, tmp_path), load_cifar(name, split), open_images(name, split)):
        assert np.array_equal(data.images.numpy().reshape(-1, 3072), pixels)
        assert data.labels.tolist() == labels
        assert data.class_names == tuple(NAMES)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", list(CIFAR))
@pytest.mark.parametrize("split", list(SMALL))
def test_torchvision_reads_the_same(
    name: str, split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)  # a set of our own
    write_python(tmp_path, name)
    theirs = getattr(datasets, CIFAR[name].title)(tmp_path, train=split == "train")
    ours = load_cifar(name, split, tmp_path)
    assert np.array_equal(ours.images.permute(0, 2, 3, 1).numpy(), theirs.data)
    assert ours.labels.tolist() == theirs.targets
    assert list(ours.class_names) == theirs.classes


class Evil:
    """A pickle of it calls ``function``."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "make",
    [
        lambda mark: Evil(os.system, f"touch '{mark}'"),
        lambda mark: Evil(eval, f"open({str(mark)!r}, 'w')"),
        lambda mark: Evil(Path.touch, mark),
        lambda mark: Evil(np.savetxt, str(mark), [1]),
    ],
)
@pytest.mark.parametrize("file", ["test_batch", "batches.meta"])
def test_a_pickle_that_would_run_code_is_refused(
    make: Callable[[Path], Evil], file: str, tmp_path: Path
) -> None:
    write_python(tmp_path, "cifar10")
    mark = tmp_path / "mark"
    evil = pickle.dumps({"data": make(mark)}, protocol=2)
    (tmp_path / "cifar-10-batches-py" / file).write_bytes(evil)
    with pytest.raises(ValueError, match="it wants to run") as error:
        load_cifar("cifar10", "test", tmp_path)
    assert file in str(error.value)
    assert not mark.exists()
    pickle.loads(evil)  # and it would have
    assert mark.exists()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("write", "damage"),
    [
        (write_python, lambda root: cut(root / "cifar-100-python" / "test")),
        (write_python, lambda root: (root / "cifar-100-python" / "meta").unlink()),
        (write_python, lambda root: (root / "cifar-100-python" / "test").write_bytes(pickle.dumps([1]))),
        (write_binary, lambda root: cut(root / "cifar-100-binary" / "test.bin")),
        (write_binary, lambda root: (root / "cifar-100-binary" / "test.bin").unlink()),
        (write_strips, lambda root: cut(root / "cifar100" / "test_01_dog.webp")),
        (write_strips, lambda root: (root / "cifar100" / "test_01_dog.webp").unlink()),
        (write_strips, lambda root: cut(root / "cifar100" / "index.csv.gz")),
        (write_strips, lambda root: Image.new("RGB", (32, 64)).save(root / "cifar100" / "test_01_dog.webp")),
        (write_strips, lambda root: Image.new("RGB", (64, 16)).save(root / "cifar100" / "test_01_dog.webp")),
    ],
)
def test_damaged_files_are_named(
    write: Callable[[Path, str], None], damage: Callable[[Path], object], tmp_path: Path
) -> None:
    write(tmp_path, "cifar100")
    load_cifar("cifar100", "test", tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=r"missing or damaged.*get it again"):
        load_cifar("cifar100", "test", tmp_path)


@pytest.mark.usefixtures("small")
def test_strips_that_have_each_others_images_are_refused(tmp_path: Path) -> None:
    """Ten in all, as the index says, but a dog's label would go to an owl."""
    write_strips(tmp_path, "cifar100")
    for file, images in (("train_01_dog", 4), ("train_02_owl", 2)):
        assert Image.open(tmp_path / "cifar100" / f"{file}.webp").height == 3 * 32
        Image.new("RGB", (32, 32 * images)).save(tmp_path / "cifar100" / f"{file}.webp")
    with pytest.raises(ValueError, match="other images than it lists"):
        load_cifar("cifar100", "train", tmp_path)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: 2 * file.stat().st_size // 3])


def test_a_set_of_another_size_is_refused(tmp_path: Path) -> None:
    write_python(tmp_path, "cifar100")
    with pytest.raises(ValueError, match="has 2 images of the split 'test' where 10000 were expected"):
        load_cifar("cifar100", "test", tmp_path)


def test_a_missing_set_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError) as error:
        load_cifar("cifar100", "train", tmp_path)
    for place in ("cifar100", "cifar-100-python", "cifar100/cifar-100-binary"):
        assert f"\n  {tmp_path / place}\n" in str(error.value)
    assert f"CIFAR100({str(tmp_path)!r}, download=True)" in str(error.value)
    monkeypatch.delenv("HETSNGP_DATA", raising=False)
    with pytest.raises(ValueError, match="HETSNGP_DATA"):
        load_cifar("cifar100", "train")
    with pytest.raises(ValueError, match="did you mean 'cifar100'"):
        load_cifar("cifar-100", "train", tmp_path)


# Means and standard deviations as the field writes them down, and the first labels of CIFAR-10.
PUBLISHED = {
    "cifar10": ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    "cifar100": ([0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
}


@pytest.mark.parametrize("name", list(CIFAR))
def test_the_real_sets(name: str, data_root: Path) -> None:
    if not (data_root / name).is_dir():
        pytest.skip(f"no {name} in HETSNGP_DATA")
    classes = 10 if name == "cifar10" else 100
    train, test = (load_cifar(name, split, data_root) for split in ("train", "test"))
    assert torch.bincount(train.labels).tolist() == [50_000 // classes] * classes
    assert torch.bincount(test.labels).tolist() == [10_000 // classes] * classes
    assert train.class_names == test.class_names
    assert (train.class_names[0], train.class_names[9]) == (
        ("airplane", "truck") if classes == 10 else ("apple", "bottle")
    )
    if name == "cifar10":
        assert (train.labels[:5].tolist(), test.labels[:5].tolist()) == ([6, 9, 9, 4, 1], [3, 8, 8, 0, 6])
    for found, published in zip(train.statistics(), PUBLISHED[name], strict=True):
        np.testing.assert_allclose(found, published, atol=5.1e-5)


# --- folders -------------------------------------------------------------------------------------------

# Landscape, portrait, square, too small; grey, palette, transparent, and lossy: each with its own ending.
FILES = {
    "ant/1.png": ("RGB", (31, 20)),
    "ant/2.bmp": ("L", (17, 40)),
    "ant/deep/3.webp": ("RGB", (16, 16)),
    "bee/1.gif": ("P", (40, 33)),
    "bee/2.PNG": ("RGBA", (9, 7)),
    "bee/3.jpg": ("RGB", (23, 22)),
}


def write_folder(root: Path, files: dict[str, tuple[str, tuple[int, int]]] = FILES) -> Path:
    for seed, (name, (mode, (width, height))) in enumerate(files.items()):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(random_bytes(height, width, 3, seed=seed))
        picture.convert(mode).save(file)
    return root


def test_a_folder_is_what_torchvision_makes_of_each_file(tmp_path: Path) -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    (write_folder(tmp_path) / "ant" / "notes.txt").write_text("no image")
    done: list[tuple[int, int]] = []
    data = load_folder(tmp_path, 16, progress=lambda *counts: done.append(counts))
    assert data.class_names == ("ant", "bee")
    assert data.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert done[-1] == (6, 6)
    fit = v2.Compose([v2.Resize(16, antialias=True), v2.CenterCrop(16), v2.PILToTensor()])
    for name, found in zip(FILES, data.images, strict=True):
        assert torch.equal(found, fit(Image.open(tmp_path / name).convert("RGB"))), name


def test_the_loader_from_disk_gives_the_pixels_of_memory(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    data = load_folder(write_folder(tmp_path), 16)
    loader = folder_loader(tmp_path, 16, 4, train=False, num_workers=0)
    x, y = (torch.cat(parts) for parts in zip(*loader, strict=True))
    mean, std = (torch.tensor(value)[:, None, None] for value in (IMAGENET_MEAN, IMAGENET_STD))
    torch.testing.assert_close(x, (data.images / 255 - mean) / std)
    assert torch.equal(y, data.labels)
    pickle.dumps(loader.dataset)  # workers may get it that way


def test_the_loader_for_training_is_random_by_its_seed(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    names = {f"{animal}/{number}.png": ("RGB", (20, 20)) for animal in "abc" for number in range(7)}
    write_folder(tmp_path, names)

    def orders(seed: int) -> list[list[int]]:
        loader = folder_loader(tmp_path, 8, 5, train=True, num_workers=0, seed=seed)
        epochs = [list(loader) for _ in range(2)]
        assert {x.shape for epoch in epochs for x, _ in epoch} == {(5, 3, 8, 8)}
        return [torch.cat([y for _, y in epoch]).tolist() for epoch in epochs]

    first, second = orders(0)
    assert first != second
    assert orders(0) == [first, second]
    assert orders(1) != [first, second]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda root: (root / "cat").mkdir(), "cat has no files: add images"),
        (lambda root: text_only(root / "cat"), "such as a.txt, and none that Pillow knows"),
        (lambda root: cut(root / "bee" / "3.jpg"), "3.jpg cannot be read as an image.*replace or remove"),
        (lambda root: (root / "bee" / "4.png").write_text("no"), "4.png cannot be read as an image"),
        (lambda root: deep(root / "bee" / "4.png"), "4.png .*only 8 bits"),
    ],
)
def test_bad_folders_are_refused(spoil: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    load_folder(write_folder(tmp_path), 8)
    spoil(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_folder(tmp_path, 8)


def text_only(folder: Path) -> None:
    folder.mkdir()
    (folder / "a.txt").write_text("no image")


def deep(file: Path) -> None:
    Image.fromarray(np.full((9, 9), 60_000, np.uint16)).save(file)


def test_folders_that_are_none_or_too_much_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="one folder for each class"):
        load_folder(tmp_path / "nowhere", 8)
    with pytest.raises(ValueError, match="no subfolders"):
        load_folder(tmp_path, 8)
    write_folder(tmp_path)
    needed = 6 * 3 * 1000 * 1000
    with pytest.raises(ValueError, match=r"6 images of 1000×1000 take 0.0 GiB.*folder_loader.*smaller size"):
        load_folder(tmp_path, 1000, limit_bytes=needed - 1)
    assert load_folder(tmp_path, 1000, limit_bytes=needed).images.nbytes == needed


def test_real_scenes(data_root: Path) -> None:
    if not (data_root / "scenes").is_dir():
        pytest.skip("no scenes in HETSNGP_DATA")
    data = open_images("scenes", "test", size=16, root=data_root)
    assert len(data) == 1016
    assert data.class_names == ("airport", "auditorium", "campus", "football_field", "kitchen")


# --- NumPy files, names --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((5, 8, 6, 3), (0, 3, 1, 2)),
        ((5, 3, 8, 6), (0, 1, 2, 3)),
        ((5, 3, 8, 3), (0, 3, 1, 2)),  # both could be: the last
        ((5, 1, 8, 6), (0, 1, 2, 3)),
        ((5, 8, 6, 4), (0, 3, 1, 2)),
    ],
)
def test_channels_are_found(shape: tuple[int, ...], order: tuple[int, ...], tmp_path: Path) -> None:
    pixels = random_bytes(*shape)
    np.savez(tmp_path / "a.npz", x=pixels, y=np.array([[0], [1], [2], [1], [0]], np.uint8))
    data = load_npz(tmp_path / "a.npz")
    assert np.array_equal(data.images.numpy(), pixels.transpose(order))
    assert data.labels.tolist() == [0, 1, 2, 1, 0]
    assert data.class_names == ("0", "1", "2")


def test_grey_images_names_and_keys_of_ones_own(tmp_path: Path) -> None:
    pixels, y = random_bytes(4, 8, 6), np.array([0, 1, 0, 1])
    np.savez_compressed(
        tmp_path / "a.npz", pictures=pixels, kinds=y, class_names=np.array(["no", "yes", "eh"])
    )
    data = load_npz(tmp_path / "a.npz", images="pictures", labels="kinds")
    assert np.array_equal(data.images.numpy(), pixels[:, None])
    assert data.class_names == ("no", "yes", "eh")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": np.zeros((2, 8, 8)), "labels": np.zeros(2, int)}, r"float64.*astype\(np.uint8\)"),
        ({"images": np.zeros((2, 8, 8), np.uint8), "labels": np.zeros(2)}, "save class numbers"),
        ({"images": np.zeros((2, 8, 8, 2), np.uint8), "labels": np.zeros(2, int)}, "reshape them"),
        ({"images": np.zeros((2, 8, 8), np.uint8), "labels": np.zeros(3, int)}, "a.npz.*one for each image"),
        ({"images": np.zeros((2, 8, 8), np.uint8)}, "no array 'labels' or 'y', only 'images'"),
        ({"images": np.zeros((2, 8, 8), np.uint8), "labels": np.array([Evil(print), 1])}, "plain arrays"),
    ],
)
def test_wrong_npz_files_are_refused(arrays: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises((TypeError, ValueError), match=message):
        load_npz(tmp_path / "a.npz")


def test_damaged_npz_files_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=random_bytes(2, 8, 8), labels=np.zeros(2, int))
    cut(tmp_path / "a.npz")
    with pytest.raises(ValueError, match="cannot be read"):
        load_npz(tmp_path / "a.npz")
    with pytest.raises(FileNotFoundError, match=r"b\.npz"):
        load_npz(tmp_path / "b.npz")


def test_open_images_takes_the_split_of_an_npz(tmp_path: Path) -> None:
    arrays = {"x_train": random_bytes(6, 8, 8), "x_test": random_bytes(2, 8, 8, seed=1)}
    np.savez(tmp_path / "a.npz", **arrays, y_train=np.arange(6), y_test=np.array([0, 1]))
    for split in ("train", "test"):
        data = open_images(str(tmp_path / "a.npz"), split)
        assert np.array_equal(data.images.numpy()[:, 0], arrays[f"x_{split}"])
        assert data.num_classes == 6  # also where the test set has two of them
    assert len(open_images("a.npz", "test", root=tmp_path)) == 2
    with pytest.raises(ValueError, match="leave it out"):
        open_images(str(tmp_path / "a.npz"), "test", size=8)


def test_open_images_says_which_labels_an_npz_may_have(tmp_path: Path) -> None:
    arrays = {"x_train": random_bytes(2, 8, 8), "x_test": random_bytes(0, 8, 8)}
    np.savez(tmp_path / "a.npz", **arrays, y_train=np.array(["cat", "dog"]), y_test=np.zeros(0, int))
    with pytest.raises(TypeError, match=r"labels in .*a.npz are <U3: save class numbers.*np.unique"):
        open_images(tmp_path / "a.npz", "train")


def test_open_images_takes_paths_and_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    write_folder(tmp_path / "photos")
    np.savez(tmp_path / "a.npz", x_train=random_bytes(2, 8, 8), y_train=np.array([0, 1]))
    for folder in (tmp_path / "photos", Path("~/photos"), "~/photos"):
        assert len(open_images(folder, "train", size=8)) == 6
    assert len(open_images("photos", "train", size=8, root="~")) == 6
    for file in (tmp_path / "a.npz", Path("~/a.npz"), "~/a.npz"):
        assert len(open_images(file, "train")) == 2
        assert len(load_npz(file, images="x_train", labels="y_train")) == 2
        assert not has_test(file)


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_open_images_takes_a_folder_with_nothing_to_train_on(held_out: str, tmp_path: Path) -> None:
    write_folder(tmp_path / held_out)
    assert has_test(tmp_path)
    assert len(open_images(tmp_path, "test", size=8)) == 6
    with pytest.raises(ValueError, match=rf"has a folder {held_out} and no folder train: make one"):
        open_images(tmp_path, "train", size=8)


def test_open_images_says_how_to_open_a_set_that_is_not_split(tmp_path: Path) -> None:
    write_folder(tmp_path)
    with pytest.raises(ValueError, match="no folder test or val") as error:
        open_images(tmp_path, "test", size=8)
    call = str(error.value).partition("call hetsngp.data.images.folders.")[2]
    assert call == f"scan_folder({str(tmp_path)!r}).load(8)"
    assert len(scan_folder(tmp_path).load(8)) == 6


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_open_images_takes_the_split_of_a_folder(held_out: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "train")
    with pytest.raises(ValueError, match="no folder test or val"):
        open_images(str(tmp_path), "test", size=8)
    write_folder(tmp_path / held_out, {"ant/9.png": ("RGB", (9, 9)), "bee/9.png": ("RGB", (9, 9))})
    assert len(open_images(str(tmp_path), "train", size=8)) == 6
    assert len(open_images(str(tmp_path), "test", size=8)) == 2
    assert len(open_images(str(tmp_path / "train"), "train", size=8)) == 6
    with pytest.raises(ValueError, match="size=64"):
        open_images(str(tmp_path), "train")
    write_folder(tmp_path / held_out, {"cow/9.png": ("RGB", (9, 9))})
    for split in ("train", "test"):
        with pytest.raises(ValueError, match=r"different classes.*'cow'"):
            open_images(str(tmp_path), split, size=8)


def test_open_images_says_what_it_understands(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not there; give a folder.*npz.*cifar10, cifar100"):
        open_images("imagenette", "train", root=tmp_path)
    with pytest.raises(ValueError, match="did you mean 'train'"):
        open_images("cifar10", "training", root=tmp_path)


# --- what is imported ----------------------------------------------------------------------------------


def test_extras_are_imported_when_needed() -> None:
    source = Path(__file__).parents[3] / "src"
    code = (
        "import sys, hetsngp.data.sources, hetsngp.data.images.device_loader, hetsngp.data.tables; "
        "print({'PIL', 'torchvision', 'timm', 'scipy', 'pandas', 'pyarrow'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": str(source)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.stdout.strip() == "set()", run.stderr


def test_missing_extras_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path)
    for module in ("torchvision", "torchvision.transforms"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"hetsngp\[vision\]"):
        folder_loader(tmp_path, 8, 2, train=True)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"hetsngp\[vision\]"):
        load_folder(tmp_path, 8)
