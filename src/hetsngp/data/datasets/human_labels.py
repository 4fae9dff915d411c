"""Human labels of CIFAR-10: CIFAR-10N for the training images, CIFAR-10H for the test images.

CIFAR-10N (Wei et al. 2022) has three labels by crowd workers for each training image; CIFAR-10H (Peterson et
al. 2019) has about 50 votes for each test image. Both are lists in the order of CIFAR-10. A copy of the
images in another order would get wrong labels, so the order is checked when both are opened.
"""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetsngp.data.array_pickles import read_pickle
from hetsngp.data.bounded import read_file
from hetsngp.data.datasets import cifar
from hetsngp.data.datasets.dataset import DataSet, data_root, first_file
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.npz import map_array, npz_keys, read_array, read_member
from hetsngp.limits import PICKLE_BYTES
from hetsngp.validation import check_choice

CIFAR10N_KEYS = {
    "aggre": "aggre_label",
    "random1": "random_label1",
    "random2": "random_label2",
    "random3": "random_label3",
    "worse": "worse_label",
    "clean": "clean_label",
}
"""Variant → key in the authors' file; with the prefix c10_ in cifar_n.npz."""
CIFAR10N_FILE = "CIFAR-10_human.pt"
CIFAR10N_GET = (
    "git clone https://github.com/UCSC-REAL/cifar-10-100n in the folder of data sets, or only "
    "data/CIFAR-10_human.pt from there"
)
CIFAR10H_FILE = "cifar10h-counts.npy"
CIFAR10H_GET = (
    "git clone https://github.com/jcpeterson/cifar-10h in the folder of data sets, or "
    "https://github.com/jcpeterson/cifar-10h/raw/master/data/cifar10h-counts.npy"
)
CLASSES = 10
LEGACY_PICKLES = 4
# The majority of voters agrees with CIFAR-10 on 99 % of its test images; in another order on 10 %.
LEAST_AGREEMENT = 0.9


# --- CIFAR-10N --------------------------------------------------------------------------------------------


def load_cifar10n(root: str | Path | None = None) -> dict[str, Tensor]:
    """Load labels of CIFAR-10's 50,000 training images: (50000,) int64 for each of six names.

    "random1", "random2" and "random3" are by one worker each (17 to 18 % wrong), "aggre" is their majority
    (9 %), "worse" a wrong one where there is any (40 %), "clean" the label of CIFAR-10.
    """
    base = data_root(root)
    folders = (base, base / "cifar10n", base / "cifar10", base / "cifar-10-100n" / "data")
    files = [*(folder / CIFAR10N_FILE for folder in folders), base / "cifar10" / "cifar_n.npz"]
    file = first_file("cifar10n", files, CIFAR10N_GET)
    try:
        content = _npz_labels(file) if file.suffix == ".npz" else _torch_labels(file)
        return {name: _labels(content[key]) for name, key in CIFAR10N_KEYS.items()}
    except Exception as error:  # a corrupt archive fails in zipfile, zlib or NumPy
        raise ValueError(
            f"{file} is damaged or no file of CIFAR-10N ({error}): get it again, {CIFAR10N_GET}"
        ) from error


def open_cifar10n(root: str | Path | None, split: str, labels: str = "worse") -> ImageArrays:
    """Open CIFAR-10's training images with ``labels`` of :func:`load_cifar10n`, or its clean test images.

    "worse" is the default because methods for noisy labels differ most on it.
    """
    check_choice("labels of cifar10n", labels, CIFAR10N_KEYS)
    if split != "train":
        return cifar.load_cifar("cifar10", split, root)
    human, images = load_cifar10n(root), cifar.load_cifar("cifar10", split, root)
    differ = int((human["clean"] != images.labels).sum())
    if differ:
        raise ValueError(
            f"CIFAR-10N's clean labels are not those of CIFAR-10 for {differ} of {len(images)} training "
            "images, so one of them is in another order (TensorFlow's, for example) and labels would go to "
            f"wrong images: get CIFAR-10 from its authors, {cifar.CIFAR_SETS[0].get}, and the labels by "
            f"{CIFAR10N_GET}"
        )
    return dataclasses.replace(images, labels=human[labels])


def _torch_labels(file: Path) -> Mapping[str, Any]:
    """Read the authors' file, a dict of arrays that ``torch.save`` wrote, without torch's unpickler."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            entry = next(found for found in archive.infolist() if found.filename.endswith("/data.pkl"))
            PICKLE_BYTES.check(entry.file_size, str(file))
            content, _ = read_pickle(read_member(archive, entry))
    else:  # before torch 1.6: a magic number, a version and the machine, each a pickle, then the content
        data, end = read_file(file, PICKLE_BYTES), 0
        for _ in range(LEGACY_PICKLES):
            content, end = read_pickle(data, end)
    if not isinstance(content, dict):
        raise ValueError(f"a {type(content).__name__}, not a dict")
    return content


def _npz_labels(file: Path) -> Mapping[str, Any]:
    keys = npz_keys(file)
    return {key: read_array(file, f"c10_{key}") for key in CIFAR10N_KEYS.values() if f"c10_{key}" in keys}


def _labels(values: Any) -> Tensor:
    array, count = values, cifar.SIZES["train"]
    if not isinstance(array, np.ndarray) or array.shape != (count,) or array.dtype.kind not in "iu":
        got = (
            f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        )
        raise ValueError(f"labels {got} where ({count},) was expected")
    if array.min() < 0 or array.max() >= CLASSES:
        raise ValueError(f"labels from {array.min()} to {array.max()} where 0 … {CLASSES - 1} was expected")
    return torch.from_numpy(array.astype(np.int64))


# --- CIFAR-10H --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class VotedImages:
    """Images with votes. ``votes``: (N, K) int64, the number of people who chose each class."""

    images: ImageArrays
    votes: Tensor

    def __len__(self) -> int:
        return len(self.images)


def load_cifar10h(root: str | Path | None = None) -> Tensor:
    """Load votes (10000, 10) int64: about 50 for each of CIFAR-10's test images."""
    base = data_root(root)
    folders = (base, base / "cifar10h", base / "cifar10", base / "cifar-10h" / "data")
    files = [*(folder / CIFAR10H_FILE for folder in folders), base / "cifar10" / "cifar10h_counts.npz"]
    file = first_file("cifar10h", files, CIFAR10H_GET)
    try:
        votes = read_array(file, "counts") if file.suffix == ".npz" else map_array(file)
        shape = (cifar.SIZES["test"], CLASSES)
        if votes.shape != shape or (votes != votes.round()).any() or votes.min() < 0:
            raise ValueError(f"{votes.dtype} of shape {votes.shape} where counts {shape} were expected")
    except Exception as error:  # a corrupt file fails in zipfile, zlib or NumPy
        raise ValueError(
            f"{file} is damaged or no file of CIFAR-10H ({error}): get it again, {CIFAR10H_GET}"
        ) from error
    return torch.from_numpy(votes.astype(np.int64))


def open_cifar10h(root: str | Path | None, split: str = "test") -> VotedImages:
    """Open CIFAR-10's test images with the votes of :func:`load_cifar10h`."""
    votes, images = load_cifar10h(root), cifar.load_cifar("cifar10", split, root)
    agreement = float((votes.argmax(1) == images.labels).float().mean())
    if agreement < LEAST_AGREEMENT:
        raise ValueError(
            f"CIFAR-10H's voters agree with CIFAR-10's labels on {agreement:.0%} of the test images, not on "
            "99 % as published, so one of them is in another order: get CIFAR-10 from its authors, "
            f"{cifar.CIFAR_SETS[0].get}, and the votes by {CIFAR10H_GET}"
        )
    return VotedImages(images, votes)


HUMAN_LABEL_SETS = (
    DataSet(
        "cifar10n",
        "CIFAR-10's training images with labels by people, 9 to 40 % of them wrong; its clean test images",
        f"{CIFAR10N_FILE} here or in cifar10n/ or cifar-10-100n/data/, or cifar10/cifar_n.npz; cifar10",
        CIFAR10N_GET,
        tuple(cifar.SIZES),
        open_cifar10n,
        variants=tuple(CIFAR10N_KEYS),
    ),
    DataSet(
        "cifar10h",
        "CIFAR-10's test images with about 50 people's votes for each",
        f"{CIFAR10H_FILE} here or in cifar10h/ or cifar-10h/data/, or cifar10/cifar10h_counts.npz; cifar10",
        CIFAR10H_GET,
        ("test",),
        open_cifar10h,
        gives="VotedImages",
    ),
)
