"""Images in folders, one a class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.class_folders import ENDINGS, image_names, subfolders
from hetsngp.data.images.decoding import IMAGENET_MEAN, IMAGENET_STD, pillow
from hetsngp.data.images.files import LIMIT_BYTES, ImageFiles, read_image

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "class_names",
    "folder_loader",
    "load_folder",
    "pillow",
    "read_image",
    "scan_folder",
]


def scan_folder(path: str | Path) -> ImageFiles:
    """The images of ``path``, which has a folder for each class; sorted, their names give the labels.

    Folders inside a class are its own; names that begin with a dot, and files that are no images
    (:data:`~hetsngp.data.images.class_folders.ENDINGS`), are passed over.
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
    """All images of :func:`scan_folder` in memory: the short side becomes ``size``, the middle is kept.

    ``progress`` is called with (images done, images in all).
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
    """The sorted names of the folders in ``path``; hidden ones are none."""
    if not Path(path).is_dir():
        raise FileNotFoundError(f"{path} is not a folder: give the folder that has one folder for each class")
    names = subfolders(Path(path))
    if not names:
        raise ValueError(f"{path} has no subfolders: put the images of each class into a folder of its own")
    return names


def _others(folder: Path) -> str:
    files = sorted(file.name for file in folder.rglob("*") if file.is_file())
    if not files:
        return "no files"
    endings = ", ".join(ENDINGS)
    return f"{len(files)} files, such as {files[0]}, and none that Pillow knows as an image ({endings})"
