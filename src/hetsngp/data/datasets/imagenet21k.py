"""ImageNet-21k: multi-label, 21,843 classes, as folders or tar shards; and the map to ImageNet's classes.

The paper trains on it and then evaluates on the 1,000 classes of ImageNet.
"""

from __future__ import annotations

import csv
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetsngp.data.class_maps import ClassMap
from hetsngp.data.datasets.dataset import data_root, missing
from hetsngp.data.datasets.synsets import WNID, class_names, wnids
from hetsngp.data.images.folders import class_files, image_names, subfolders
from hetsngp.data.images.multi_label import MultiLabelFiles
from hetsngp.data.shards.streams import ShardedImages
from hetsngp.validation import check_choice

LABELS = "labels.csv"
SPLITS = {"train": ("train",), "test": ("val", "validation", "test")}
"""Folders of each split."""
LAYOUT_21K = (
    "imagenet21k/<wnid>/*.JPEG, with imagenet21k/labels.csv for multi-label images; or "
    "imagenet21k/*.tar as WebDataset writes them; either also below imagenet21k/train and imagenet21k/val"
)
GET_21K = (
    "https://image-net.org/download (winter21_whole.tar.gz, after registration), or as shards "
    "https://huggingface.co/datasets/timm/imagenet-22k-wds"
)
_HELD_OUT = re.compile(r"(?:^|[-_.])(?:val|validation|test)(?=[-_.]|$)")


def open_imagenet21k(
    root: str | Path | None = None,
    split: str = "test",
    *,
    classes: Sequence[str] | None = None,
    numbering: str | Sequence[str] | None = None,
) -> ShardedImages | MultiLabelFiles:
    """Open the ``split`` "train" or "test" of ``root/imagenet21k``: tar shards or image files.

    It may have folders ``train`` and ``val``. Without them shards with "val", "validation" or "test" in
    their names, such as timm's, are the test images, and folders of classes are all training images:
    ImageNet-21k has no standard split.

    ``classes``: other wnids than the 21,843; their indices are the labels. ``numbering``: the wnids that
    numbers in shards index, or the name of their list in ``hetsngp.data.datasets.synsets``: "imagenet22k"
    for timm's shards, "imagenet21k" for the 21,843. It is needed for numbers without a wnid.

    For folders, ``labels.csv`` beside them lists the images and all labels of each, in lines such as
    ``n01440764/n01440764_18.JPEG,n01440764 n02512053``. Without it an image has the label of its folder; one
    that is in several folders, with the same name and content, has the labels of all.
    """
    check_choice("split", split, SPLITS)
    base = data_root(root) / "imagenet21k"
    if not base.is_dir():
        raise missing("imagenet21k", [base], GET_21K)
    known = wnids("imagenet21k") if classes is None else tuple(classes)
    names = class_names("imagenet21k") if classes is None else known
    folder, divided = _folder_of(base, split)
    if isinstance(numbering, str):
        numbering = wnids(numbering)
    shards = _archives(folder, ".tar")
    _check_unpacked(folder, shards)
    if shards:
        _check_shards(folder, shards)
        if not divided:
            shards = [s for s in shards if (_HELD_OUT.search(s.stem) is not None) == (split == "test")]
        if not shards:
            raise _no_split(base, split)
        return ShardedImages(tuple(shards), known, names, None if numbering is None else tuple(numbering))
    if not divided and split == "test":
        raise _no_split(base, split)
    label_of = {wnid: label for label, wnid in enumerate(known)}
    if (folder / LABELS).is_file():
        files, labels = _listed(folder, label_of)
    else:
        files, labels = _in_folders(folder, label_of)
    return MultiLabelFiles.of(folder, files, labels, names)


def to_imagenet1k() -> ClassMap:
    """Map from the 21,843 classes to the 1,000 of ImageNet, for the paper's evaluation.

    Class n04399382, a teddy bear, is not among the 21,843: its probability is zero.
    """
    return ClassMap.between(wnids("imagenet21k"), wnids("imagenet"), class_names("imagenet"))


def _folder_of(base: Path, split: str) -> tuple[Path, bool]:
    """Folder of the images, and whether each split has its own."""
    there = {
        part: [base / name for name in names if (base / name).is_dir()] for part, names in SPLITS.items()
    }
    if not any(there.values()):
        return base, False
    if not there[split]:
        raise _no_split(base, split)
    return there[split][0], True


def _no_split(base: Path, split: str) -> FileNotFoundError:
    folder = base / SPLITS[split][0]
    return FileNotFoundError(
        f"{base} has no images of the split {split!r}: put class folders or shards into {folder}, e.g. some "
        f"of those in {base}"
    )


def _archives(folder: Path, *endings: str) -> list[Path]:
    names = [name for name in os.listdir(folder) if name.endswith(endings) and not name.startswith(".")]
    return [folder / name for name in sorted(names)]


def _check_unpacked(folder: Path, shards: list[Path]) -> None:
    packed = _archives(folder, ".tar.gz", ".tgz")
    if packed and (shards or not subfolders(folder)):  # beside class folders it is their archive
        raise ValueError(
            f"{folder} has compressed archives, such as {packed[0].name}, and shards are read uncompressed: "
            f"gunzip them (gunzip {folder}/*gz), or, if classes are in them, unpack them with tar -xzf"
        )


def _check_shards(folder: Path, shards: list[Path]) -> None:
    single = [shard.name for shard in shards if WNID.fullmatch(shard.stem)]
    if single:
        raise ValueError(
            f"{folder} has archives of one class, such as {single[0]}; shards hold a mixture, with labels: "
            'unpack each into a folder of its name: for f in n*.tar; do mkdir "${f%.tar}" && tar -xf "$f" -C '
            '"${f%.tar}" && rm "$f"; done'
        )
    both = next((name for name in subfolders(folder) if WNID.fullmatch(name)), None)
    if both:
        raise ValueError(
            f"{folder} has shards, such as {shards[0].name}, and class folders, such as {both}: keep one kind"
        )


# --- folders --------------------------------------------------------------------------------------------


def _in_folders(folder: Path, label_of: Mapping[str, int]) -> tuple[list[str], list[list[int]]]:
    """Files and their labels; copies of one image are merged."""
    files, labels = class_files(folder, label_of, "imagenet21k", advice="unpack the archives of the classes")
    same_name = _grouped(list(range(len(files))), lambda row: files[row].rpartition("/")[2])
    groups = sorted(group for rows in same_name for group in _same_content(folder, files, rows))
    return [files[group[0]] for group in groups], [sorted(labels[row] for row in group) for group in groups]


def _same_content(folder: Path, files: list[str], rows: list[int]) -> Iterator[list[int]]:
    """Group rows by content: 0001.JPEG in two folders may be two images. Most differ in size."""
    if len(rows) == 1:
        yield rows
        return
    for alike in _grouped(rows, lambda row: (folder / files[row]).stat().st_size):
        yield from _grouped(alike, lambda row: _digest(folder / files[row])) if len(alike) > 1 else [alike]


def _grouped(rows: list[int], key: Callable[[int], Any]) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def _digest(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _csv_rows(stream: Iterable[str], file: Path) -> Iterator[list[str]]:
    try:
        yield from csv.reader(stream)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read ({error}): save it again, as CSV in UTF-8") from error


def _listed(folder: Path, label_of: Mapping[str, int]) -> tuple[list[str], list[list[int]]]:
    """Files and their labels by labels.csv."""
    found: dict[str, list[int]] = {}
    there: dict[str, set[str]] = {}
    with open(folder / LABELS, encoding="utf-8", newline="") as stream:
        for number, row in enumerate(_csv_rows(stream, folder / LABELS), 1):
            if not row or (number == 1 and row[0] in ("file", "image", "path")):
                continue
            where = f"line {number} of {folder / LABELS}"
            file, written = row[0], " ".join(row[1:]).split()
            if not written or file in found:
                raise ValueError(
                    f"{where} gives {file!r} {'no label' if not written else 'a second time'}: write each "
                    'image once, with all its labels, as in: n01440764/a.JPEG,"n01440764 n02512053"'
                )
            unknown = [wnid for wnid in written if wnid not in label_of]
            if unknown:
                raise ValueError(
                    f"{where} has the class {unknown[0]!r}, none of the {len(label_of)}: write wnids such as "
                    f"{next(iter(label_of))}, or leave it out"
                )
            inner, _, name = file.rpartition("/")
            if inner.startswith("/") or ".." in inner.split("/"):
                raise ValueError(f"{where} names {file!a:.200}, which is not below {folder}: move it there")
            if inner not in there:  # listing folders is faster than asking for each file
                there[inner] = set(image_names(folder / inner)) if (folder / inner).is_dir() else set()
            if name not in there[inner]:
                raise FileNotFoundError(
                    f"{where} names {folder / file}, which is not there: copy it, or remove the line"
                )
            found[file] = sorted({label_of[wnid] for wnid in written})
    if not found:
        raise ValueError(f"{folder / LABELS} is empty: write a line for each image, or remove it")
    return list(found), list(found.values())
