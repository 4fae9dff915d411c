"""Photographs of places: Places365, in torchvision's layout or its authors', and a small set of scenes.

torchvision's Places365 refuses any part of the set (checksums of the lists), does not look whether the
images are there, and knows neither the folders that the archives unpack to nor the easy format.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from hetsngp.data.bounded import read_file
from hetsngp.data.datasets.dataset import DataSet, data_root, missing
from hetsngp.data.images.files import ImageFiles
from hetsngp.data.images.folders import class_files, class_names, image_names, scan_folder
from hetsngp.limits import LIST_BYTES
from hetsngp.validation import check_choice

IMAGES = {
    # The archives unpack to data_256 and data_large; torchvision adds the _standard.
    "train": ("data_256_standard", "data_256", "data_large_standard", "data_large"),
    "test": ("val_256", "val_large"),
}
LISTS = {"train": "places365_train_standard.txt", "test": "places365_val.txt"}
CATEGORIES = "categories_places365.txt"
EASY = {"train": "places365_standard/train", "test": "places365_standard/val"}
"""One folder for each class, the "easy format"."""
LISTS_SOURCE = "http://data.csail.mit.edu/places/places365/filelist_places365-standard.tar"


def open_places365(root: str | Path | None = None, split: str = "test") -> ImageFiles:
    """Open the files of Places365 in ``root`` or ``root/places365``; "test" is its validation set.

    (Its own test set has no labels.) Images of 256 pixels are preferred to the large ones. The class
    "/a/apartment_building/outdoor" is called "apartment_building-outdoor", as in the easy format. Labels are
    the authors' numbers. The easy format comes without categories_places365.txt, which lists them: unless it
    is put beside it, labels there follow the sorted names, and both splits must have the same classes.
    """
    check_choice("split", split, LISTS)
    base = data_root(root)
    bases = (base, base / "places365")
    listed = [(home, home / name) for home in bases for name in IMAGES[split]]
    for home, folder in listed:
        if folder.is_dir():
            return _listed(home, folder, split)
    for home in bases:
        if (home / EASY[split]).is_dir():
            return _easy(home, split)
    looked_at = [*(folder for _, folder in listed), *(home / EASY[split] for home in bases)]
    raise missing("places365", looked_at, _get(split, repr(str(base / "places365"))))


def open_scenes(root: str | Path | None = None, split: str = "test") -> ImageFiles:
    """Open all images of ``root/scenes``, which has one folder for each class."""
    folder = data_root(root) / "scenes"
    if not folder.is_dir():
        raise missing("scenes", [folder], SCENES.get)
    return scan_folder(folder)


def _easy(home: Path, split: str) -> ImageFiles:
    """Open the easy format, one folder for each class."""
    folder = home / EASY[split]
    beside = next((at for at in (home, folder.parent) if (at / CATEGORIES).is_file()), None)
    if beside is not None:
        names = _categories(beside, split)
        label_of = {name: label for label, name in enumerate(names)}
        files, labels = class_files(folder, label_of, "places365")
        return ImageFiles(tuple(folder / file for file in files), torch.tensor(labels), names)
    train, test = (home / EASY[part] for part in LISTS)
    if train.is_dir() and test.is_dir():
        odd = sorted(set(class_names(train)) ^ set(class_names(test)))
        if odd:
            raise ValueError(
                f"{train} and {test} have different classes, e.g. {odd[0]!r}, so their labels would not "
                f"agree: put {CATEGORIES} of {LISTS_SOURCE}, which lists the label of each, into {home}, or "
                "give both the same folders"
            )
    return scan_folder(folder)


def _listed(home: Path, folder: Path, split: str) -> ImageFiles:
    """Open the files in ``folder`` by the lists in ``home``."""
    names = _categories(home, split)
    pairs = _pairs(home / LISTS[split], home, split)
    labels = torch.tensor([label for _, label in pairs])
    if int(labels.max()) >= len(names) or int(labels.min()) < 0:
        raise _damaged(home / LISTS[split], f"a label is none of 0 … {len(names) - 1}", home, split)
    paths = [path.lstrip("/") for path, _ in pairs]
    _check_there(folder, paths, home, split)
    return ImageFiles(tuple(folder / path for path in paths), labels, names)


def _categories(home: Path, split: str) -> tuple[str, ...]:
    names = {label: _class_name(path) for path, label in _pairs(home / CATEGORIES, home, split)}
    if sorted(names) != list(range(len(names))):
        raise _damaged(home / CATEGORIES, "its numbers are not 0, 1, 2, …", home, split)
    return tuple(names[label] for label in range(len(names)))


def _check_there(folder: Path, paths: Sequence[str], home: Path, split: str) -> None:
    there: dict[str, set[str]] = {}
    absent = []
    for path in paths:
        inner, _, name = path.rpartition("/")
        if inner not in there:  # listing folders is faster than asking for each of 1.8 million files
            there[inner] = set(image_names(folder / inner)) if (folder / inner).is_dir() else set()
        if name not in there[inner]:
            absent.append(path)
    if absent:
        raise ValueError(
            f"{home / LISTS[split]} and {folder} disagree: {len(absent)} of {len(paths)} images of the list "
            f"are not there, such as {absent[0]}; copy or unpack the images again, or take the lines out of "
            f"the list (as published: {LISTS_SOURCE})"
        )


def _pairs(file: Path, home: Path, split: str) -> list[tuple[str, int]]:
    """Read a file with lines "path number"."""
    try:
        lines = read_file(file, LIST_BYTES).decode("utf-8").splitlines()
        rows = [line.rsplit(maxsplit=1) for line in lines if line.strip()]
        pairs = [(path, int(number)) for path, number in rows]
        if not pairs:
            raise ValueError("it is empty")
        if any(abs(number) >= 2**31 or ".." in path.split("/") for path, number in pairs):
            raise ValueError("it has a number or a path that cannot be")
    except (OSError, ValueError) as error:
        raise _damaged(file, error, home, split) from error
    return pairs


def _class_name(path: str) -> str:
    """Name of a class, without the folder of its first letter.

    >>> _class_name("/a/apartment_building/outdoor")
    'apartment_building-outdoor'
    """
    return path.lstrip("/").partition("/")[2].replace("/", "-")


def _damaged(file: Path, why: object, home: Path, split: str) -> ValueError:
    return ValueError(
        f"{file} is missing or damaged ({why}): get the lists from {LISTS_SOURCE}, or everything by "
        f"{_get(split, repr(str(home)))}"
    )


def _get(split: str, folder: str) -> str:
    part = "train-standard" if split == "train" else "val"
    return f"torchvision.datasets.Places365({folder}, {part!r}, small=True, download=True)"


PLACES365 = DataSet(
    "places365",
    "Places365: 1.8 million photographs to train, 36,500 to test (its validation set), 365 classes",
    f"val_256/, {LISTS['test']} and {CATEGORIES}, here or in places365/ (to train data_256_standard/ and "
    f"{LISTS['train']}); or places365_standard/train/<class>/ and places365_standard/val/<class>/",
    _get("test", "root / 'places365'"),
    tuple(LISTS),
    open_places365,
    gives="ImageFiles",
)
SCENES = DataSet(
    "scenes",
    "1,016 photographs of airports, auditoriums, campuses, football fields and kitchens, 64 pixels",
    "scenes/<class>/*.webp",
    "put photographs of any size into a folder for each class, e.g. out of SUN, "
    "https://vision.princeton.edu/projects/2010/SUN/",
    ("test",),
    open_scenes,
    size=64,
    gives="ImageFiles",
)
