"""Images in one folder for each class."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.files import LIMIT_BYTES, ImageFiles

# Pillow's own list has endings that it cannot read by itself (.h5, .mpg) and documents (.pdf, .eps).
ENDINGS = (
    *(".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png"),
    *(".ppm", ".tga", ".tif", ".tiff", ".webp"),
)
SHOWN = 5
"""Names listed in an error."""


def scan_folder(path: str | Path) -> ImageFiles:
    """Image files of ``path``, which has one folder for each class; labels follow the sorted folder names.

    Folders inside that of a class belong to it. Names that begin with a dot, and files that are no images
    (:data:`~hetsngp.data.images.folders.ENDINGS`), are skipped.
    """
    files, labels, names = [], [], class_names(path)
    for label, name in enumerate(names):
        folder = Path(path) / name
        images = sorted(image_names(folder, deep=True))
        if not images:
            raise ValueError(
                f"{folder} has {_others(folder)}: add images of this class, or remove the folder"
            )
        files += [folder / image for image in images]
        labels += [label] * len(images)
    return ImageFiles(tuple(files), torch.tensor(labels), tuple(names))


def load_folder(
    path: str | Path,
    size: int,
    *,
    limit_bytes: int = LIMIT_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> ImageArrays:
    """All images of :func:`scan_folder` in memory: the short side resized to ``size``, then a centre crop.

    ``progress`` is called with (images done, number of images).
    """
    return scan_folder(path).load(size, limit_bytes=limit_bytes, progress=progress)


def folder_loader(
    path: str | Path,
    size: int,
    batch_size: int,
    *,
    train: bool,
    num_workers: int | None = None,
    seed: int = 0,
) -> DataLoader[Any]:
    """A DataLoader for a folder too large for memory: :meth:`ImageFiles.loader` of :func:`scan_folder`."""
    return scan_folder(path).loader(size, batch_size, train=train, num_workers=num_workers, seed=seed)


def class_names(path: str | Path) -> list[str]:
    """Sorted names of the folders in ``path``, without hidden ones."""
    if not Path(path).is_dir():
        raise FileNotFoundError(f"{path} is not a folder: give the folder that has one folder for each class")
    names = subfolders(Path(path))
    if not names:
        raise ValueError(f"{path} has no subfolders: put the images of each class into a folder of its own")
    return names


def subfolders(folder: Path) -> list[str]:
    """Names of the folders in ``folder``, sorted as text: on Windows a Path sorts regardless of case."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if not entry.name.startswith(".") and _is_dir(entry))


def image_names(folder: Path, *, deep: bool = False) -> Iterator[str]:
    """Names of the images in a folder, in no order; ``deep``: also those in its folders, as "folder/name"."""
    return _file_names(folder, deep, lambda name: name.lower().endswith(ENDINGS))


def _file_names(folder: Path, deep: bool, wanted: Callable[[str], bool]) -> Iterator[str]:
    """Names of files for which ``wanted`` is true; names that begin with a dot are skipped."""
    remaining = [""]
    while remaining:
        inner = remaining.pop()
        with os.scandir(folder / inner) as entries:
            for entry in entries:
                # By name first: asking the file system about each of a million files is slow.
                name = entry.name
                found = wanted(name)
                if name.startswith(".") or not (found or deep):
                    continue
                if found and _is_file(entry):
                    yield inner + name
                elif _is_dir(entry) and deep:
                    _check_no_loop(entry)
                    remaining.append(f"{inner}{name}/")


def class_files(
    folder: Path, label_of: Mapping[str, int], title: str, *, advice: str = ""
) -> tuple[list[str], list[int]]:
    """Images in the folders of ``folder``, as "class/file", by label and then by name; and their labels.

    ``label_of`` gives the label of each name a folder may have. A folder of any other name is an error: its
    images have no label. Classes without images are allowed, so that a part of a data set can be used, with a
    warning. Files that are no images are skipped. ``advice`` ends the errors.
    """
    there = set(subfolders(folder))
    example = next(iter(label_of))
    if not there:
        raise ValueError(f"{folder} has no class folders such as {example}/: {advice or 'put them there'}")
    unknown = sorted(there - label_of.keys())
    if unknown:
        raise ValueError(
            f"{folder} has {_listed(unknown)}, which {_are(unknown)} no class of {title}: a folder for each "
            f"class, named such as {example}/, should lie in it directly; remove or rename the others"
        )
    files: list[str] = []
    labels: list[int] = []
    empty = []
    for name, label in sorted(label_of.items(), key=lambda item: item[1]):
        images = sorted(image_names(folder / name)) if name in there else []
        files += [f"{name}/{image}" for image in images]
        labels += [label] * len(images)
        if not images:
            empty.append(name)
    if not files:
        endings = ", ".join(ENDINGS)
        raise ValueError(f"no folder in {folder} has an image ({endings}): copy or unpack {title} again")
    if empty:
        warnings.warn(
            f"{folder} is a part of {title}: no images of {len(empty)} of {len(label_of)} classes, "
            f"{_listed(empty)}; the others keep their labels in the full set",
            stacklevel=2,
        )
    return files, labels


def _others(folder: Path) -> str:
    files = sorted(_file_names(folder, True, lambda name: True))
    if not files:
        return "no files"
    endings = ", ".join(ENDINGS)
    return f"{len(files)} files, such as {files[0]}, and none that Pillow knows as an image ({endings})"


def _ask(entry: os.DirEntry[str], question: Callable[[], bool]) -> bool:
    try:
        return question()
    except OSError as error:  # a link to itself, a folder that may not be read
        raise OSError(f"{entry.path} cannot be read ({error.strerror}): correct or remove it") from error


def _is_file(entry: os.DirEntry[str]) -> bool:
    return _ask(entry, entry.is_file)


def _check_no_loop(entry: os.DirEntry[str]) -> None:
    """Check that a link does not lead back to a folder that contains it: its images would come many times."""
    if entry.is_symlink():
        target, here = os.path.realpath(entry.path), os.path.realpath(os.path.dirname(entry.path))
        if os.path.commonpath([target, here]) == target:
            raise ValueError(f"{entry.path} is a link to a folder that contains it: remove the link")


def _is_dir(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder; a link that leads nowhere might have been one, or an image, and is an error."""
    if _ask(entry, entry.is_dir):
        return True
    if entry.is_symlink() and not os.path.exists(entry.path):
        raise FileNotFoundError(
            f"{entry.path} is a link to {os.readlink(entry.path)}, which is not there: mount or copy what it "
            "leads to, or remove the link (and others like it: find -L … -type l lists them)"
        )
    return False


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
