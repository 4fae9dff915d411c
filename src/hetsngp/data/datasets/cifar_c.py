"""CIFAR-10-C and CIFAR-100-C as published, one array for each corruption."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hetsngp.data.corruptions import CORRUPTIONS, SEVERITIES
from hetsngp.data.datasets.dataset import DataSet, data_root, missing
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.npz import map_array
from hetsngp.validation import check_choice

SIDE = 32
FOLDERS = {"cifar10-c": "CIFAR-10-C", "cifar100-c": "CIFAR-100-C"}
ADDRESSES = {
    "cifar10-c": "https://zenodo.org/records/2535967",
    "cifar100-c": "https://zenodo.org/records/3555552",
}
CIFAR10_NAMES = "airplane automobile bird cat deer dog frog horse ship truck"
CIFAR100_NAMES = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly "
    "camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup "
    "dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower "
    "leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid "
    "otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray "
    "road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar "
    "sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle "
    "wardrobe whale willow_tree wolf woman worm"
)
CLASS_NAMES = {"cifar10-c": tuple(CIFAR10_NAMES.split()), "cifar100-c": tuple(CIFAR100_NAMES.split())}
"""Class names; the files have numbers only."""


@dataclass(frozen=True, eq=False)
class CorruptedFiles(Mapping[tuple[str, int], ImageArrays]):
    """Mapping (corruption, severity 1 … 5) → images, read from disk at each access.

    ``corruptions``: those found, the 15 standard ones first, in the order of the benchmark's tables.
    """

    folder: Path
    corruptions: tuple[str, ...]
    labels: Tensor
    """(n,) int64, the same for all severities."""
    class_names: tuple[str, ...]
    source: str
    """Where to get the set."""

    def __getitem__(self, key: tuple[str, int]) -> ImageArrays:
        if key not in self:
            raise KeyError(
                f"no {key!r} in {self.folder}: ask for (corruption, severity), a corruption of "
                f"{', '.join(self.corruptions)}, a severity of {SEVERITIES[0]} … {SEVERITIES[-1]}"
            )
        corruption, severity = key
        file, count = self.folder / f"{corruption}.npy", len(self.labels)
        pixels = _array(file, self.source)
        expected = (len(SEVERITIES) * count, SIDE, SIDE, 3)
        if pixels.shape != expected or pixels.dtype != np.uint8:
            raise ValueError(
                f"{file} holds {pixels.dtype} of shape {pixels.shape} where uint8 {expected} was expected, "
                f"{count} images of each severity: get it again, {self.source}"
            )
        block = pixels[(severity - 1) * count : severity * count].transpose(0, 3, 1, 2)
        return ImageArrays(torch.from_numpy(block.copy()), self.labels, self.class_names)

    def __contains__(self, key: object) -> bool:
        return key in tuple(self)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return ((corruption, severity) for corruption in self.corruptions for severity in SEVERITIES)

    def __len__(self) -> int:
        return len(self.corruptions) * len(SEVERITIES)


def open_cifar_c(root: str | Path | None = None, name: str = "cifar100-c") -> CorruptedFiles:
    """Open the folder CIFAR-100-C, or CIFAR-10-C, in ``root``.

    It has <corruption>.npy (5·n, 32, 32, 3) and labels.npy (5·n,), severity 1 first; published, n is 10,000.
    """
    base = data_root(root)
    folder = base / FOLDERS[check_choice("name", name, FOLDERS)]
    get = _get(name)
    if not folder.is_dir():
        raise missing(name, [folder], get)
    # macOS writes files such as ._fog.npy beside others.
    found = {file.stem for file in folder.glob("*.npy") if not file.name.startswith(".")} - {"labels"}
    absent = [corruption for corruption in CORRUPTIONS if corruption not in found]
    if len(absent) == len(CORRUPTIONS):
        raise missing(name, [folder / f"{corruption}.npy" for corruption in absent], get)
    if absent:
        warnings.warn(
            f"{folder} lacks {', '.join(absent)}: a mean over the rest is not that of the benchmark. "
            f"To complete it: {get}",
            stacklevel=2,
        )
    standard = [corruption for corruption in CORRUPTIONS if corruption in found]
    others = sorted(found - set(CORRUPTIONS))
    labels = _labels(folder / "labels.npy", len(CLASS_NAMES[name]), get)
    return CorruptedFiles(folder, (*standard, *others), labels, CLASS_NAMES[name], get)


def _labels(file: Path, classes: int, get: str) -> Tensor:
    labels = _array(file, get)
    usable = labels.ndim == 1 and labels.dtype.kind in "iu" and len(labels) > 0
    blocks = labels.reshape(len(SEVERITIES), -1) if usable and len(labels) % len(SEVERITIES) == 0 else None
    if blocks is None or (blocks != blocks[0]).any() or blocks.min() < 0 or blocks.max() >= classes:
        raise ValueError(
            f"{file} does not hold the same labels of 0 … {classes - 1} five times, once for each severity: "
            f"get it again, {get}"
        )
    return torch.from_numpy(blocks[0].astype(np.int64))


def _array(file: Path, get: str) -> np.ndarray:
    """Memory-mapped array: of the 150 MB of a file, one severity reads 30."""
    try:
        return map_array(file)
    except Exception as error:  # NumPy raises many types on corrupt headers
        raise ValueError(f"{file} is missing or damaged ({error}): get it again, {get}") from error


def _get(name: str) -> str:
    return (
        f"{ADDRESSES[name]}, unpacked; or have it made of the clean test images: "
        f'hetsngp.data.corrupted.open_corrupted("{name}")'
    )


CIFAR_C_SETS = tuple(
    DataSet(
        name,
        f"{folder}: the 10,000 test images under each of 15 corruptions (and a few more) at 5 severities",
        f"{folder}/<corruption>.npy and {folder}/labels.npy",
        _get(name),
        ("test",),
        lambda root, split, name=name: open_cifar_c(root, name),
        gives="CorruptedFiles",
    )
    for name, folder in FOLDERS.items()
)
