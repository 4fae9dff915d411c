"""Tiny data sets in the layouts of the real ones; every writer returns the pixels that it wrote."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from hetsngp.data.datasets import cifar

Image = pytest.importorskip("PIL.Image")

CIFAR_SIZES = {"train": 20, "test": 10}


def random_bytes(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def make_cifar_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make CIFAR-10 complete with 20 and 10 images."""
    monkeypatch.setattr(cifar, "SIZES", CIFAR_SIZES)


def cifar10_labels(split: str) -> np.ndarray:
    return np.random.default_rng(len(split)).permutation(np.arange(CIFAR_SIZES[split]) % 10)


def write_cifar10(root: Path) -> dict[str, np.ndarray]:
    """Write torchvision's folder; returns pixels (n, 3, 32, 32) of each split."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}, protocol=2))
    written = {}
    for split, files in cifar.CIFAR["cifar10"].files.items():
        labels = cifar10_labels(split)
        pixels = random_bytes(len(labels), 3072, seed=len(labels))
        for file, rows in zip(files, np.array_split(np.arange(len(labels)), len(files)), strict=True):
            batch = {"data": pixels[rows], "labels": labels[rows].tolist()}
            (folder / file).write_bytes(pickle.dumps(batch, protocol=2))
        written[split] = pixels.reshape(-1, 3, 32, 32)
    return written


def write_image(file: Path, pixels: np.ndarray) -> None:
    """Write (H, W, 3) bytes, without loss if the ending allows it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file, **({"lossless": True} if file.suffix == ".webp" else {}))


def write_scenes(root: Path) -> np.ndarray:
    """Write two airports and two kitchens, (4, 64, 64, 3)."""
    pixels = random_bytes(4, 64, 64, 3)
    names = ("airport/sun_a", "airport/sun_b", "kitchen/sun_a", "kitchen/sun_c")
    for name, image in zip(names, pixels, strict=True):
        write_image(root / "scenes" / f"{name}.webp", image)
    return pixels


def write_svhn(folder: Path, split: str, digits: list[int]) -> np.ndarray:
    """Write (32, 32, 3, N), the authors' order; the label of 0 is 10."""
    scipy_io = pytest.importorskip("scipy.io")
    folder.mkdir(parents=True, exist_ok=True)
    pixels = random_bytes(32, 32, 3, len(digits), seed=len(digits))
    y = np.array([[digit or 10] for digit in digits], np.uint8)
    scipy_io.savemat(folder / f"{split}_32x32.mat", {"X": pixels, "y": y}, do_compression=True)
    return pixels


def write_cifar_c(folder: Path, corruptions: list[str], count: int, classes: int) -> dict[str, np.ndarray]:
    """Write (5·count, 32, 32, 3) for each corruption, and labels.npy."""
    folder.mkdir(parents=True)
    np.save(folder / "labels.npy", np.tile(np.arange(count, dtype=np.uint8) % classes, 5))
    written = {
        name: random_bytes(5 * count, 32, 32, 3, seed=number) for number, name in enumerate(corruptions)
    }
    for name, pixels in written.items():
        np.save(folder / f"{name}.npy", pixels)
    return written
