"""Images in folders, one a class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from hetsngp.data.decoding import IMAGENET_MEAN, IMAGENET_STD, pillow
from hetsngp.data.files import LIMIT_BYTES, ImageFiles, read_image
from hetsngp.data.images import ImageArrays

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

    Folders inside a class are its own; files that are no images are passed over.
    """
    kinds, files, labels = _image_kinds(), [], []
    folders = _class_folders(Path(path))
    for label, folder in enumerate(folders):
        entries = sorted(entry for entry in folder.rglob("*") if entry.is_file())
        images = [entry for entry in entries if entry.suffix.lower() in kinds]
        if not images:
            raise ValueError(
                f"{folder} has {_others(entries)}: add images of this class, or remove the folder"
            )
        files += images
        labels += [label] * len(images)
    return ImageFiles(tuple(files), torch.tensor(labels), tuple(folder.name for folder in folders))


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
    """The sorted names of the folders in ``path``."""
    return [folder.name for folder in _class_folders(Path(path))]


def _class_folders(path: Path) -> list[Path]:
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a folder: give the folder that has one folder for each class")
    folders = sorted(entry for entry in path.iterdir() if entry.is_dir())
    if not folders:
        raise ValueError(f"{path} has no subfolders: put the images of each class into a folder of its own")
    return folders


def _others(entries: Sequence[Path]) -> str:
    if not entries:
        return "no files"
    return f"{len(entries)} files, such as {entries[0].name}, and none that Pillow knows as an image"


def _image_kinds() -> frozenset[str]:
    """Endings of the files that Pillow reads, with the dot."""
    image_module = pillow()
    known = image_module.registered_extensions()
    return frozenset(ending for ending, kind in known.items() if kind in image_module.OPEN)
