"""Images in folders, one a class: into memory as bytes, or through torchvision where memory is too small."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hetsngp.data.images import ImageArrays
from hetsngp.validation import check_positive

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LIMIT_BYTES = 8 * 2**30
# Images a thread decodes before it reports: a task for each of a million files would itself take memory.
CHUNK = 64
MOST_WORKERS = 8


def load_folder(
    path: str | Path,
    size: int,
    *,
    limit_bytes: int = LIMIT_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> ImageArrays:
    """All images of ``path``, which has a folder for each class; sorted, their names give the labels.

    The short side becomes ``size`` pixels and the middle is kept: (N, 3, size, size) RGB, as torchvision's
    Resize and CenterCrop make of an opened file. Folders inside a class are its own; files that are no images
    are passed over. ``progress`` is called with (images done, images in all).
    """
    size = int(check_positive("size", size, integer=True))
    names, files, labels = _scan(Path(path))
    needed = len(files) * 3 * size * size
    if needed > limit_bytes:
        raise ValueError(
            f"{len(files)} images of {size}×{size} take {needed / 2**30:.1f} GiB, more than limit_bytes="
            f"{limit_bytes} ({limit_bytes / 2**30:.1f} GiB): use folder_loader, which reads them from disk, "
            "a smaller size, or a larger limit_bytes"
        )
    images = torch.empty(len(files), 3, size, size, dtype=torch.uint8)

    def decode(begin: int) -> int:
        rows = range(begin, min(begin + CHUNK, len(files)))
        for row in rows:
            images[row] = read_image(files[row], size)
        return len(rows)

    pillow()  # where it is missing, say so once and here
    done = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for count in pool.map(decode, range(0, len(files), CHUNK)):
            done += count
            if progress is not None:
                progress(done, len(files))
    return ImageArrays(images, torch.tensor(labels), tuple(names))


def read_image(file: Path, size: int) -> Tensor:
    """(3, size, size) uint8: RGB, the short side made ``size``, the middle of the long one."""
    image_module = pillow()
    try:
        with image_module.open(file) as image:
            # Pillow cuts deeper pixels off at 255 instead of scaling them.
            if image.mode == "F" or image.mode.startswith("I"):
                raise ValueError(f"pixels of mode {image.mode!r}, only 8 bits a channel are read")
            picture = image.convert("RGB")
    except Exception as error:  # Pillow's readers raise nearly anything on damaged files
        raise ValueError(f"{file} cannot be read as an image ({error}): replace or remove it") from error
    short = min(picture.size)
    # Rounded as torchvision does, so that both give the same pixels.
    width, height = (size if side == short else size * side // short for side in picture.size)
    if picture.size != (width, height):
        picture = picture.resize((width, height), image_module.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return torch.from_numpy(np.array(picture)[top : top + size, left : left + size]).permute(2, 0, 1)


def folder_loader(
    path: str | Path,
    size: int,
    batch_size: int,
    *,
    train: bool,
    num_workers: int | None = None,
    seed: int = 0,
) -> DataLoader[Any]:
    """A DataLoader for a folder too large for memory: (x, y), x (b, 3, size, size) scaled as for ImageNet.

    For training a random part of random size, stretched to ``size``, mirrored or not, in random order; else
    the pixels of :func:`load_folder`, in order. ``seed`` decides the order and, where there are worker
    processes (None: up to 8), the crops; without any these come from torch's global random numbers.
    """
    v2, datasets = _torchvision()
    root = Path(path)
    _class_folders(root)
    kinds = _image_kinds()
    if train:
        geometry = [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
    else:
        geometry = [v2.Resize(size, antialias=True), v2.CenterCrop(size)]
    values = [
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(IMAGENET_MEAN, IMAGENET_STD),
    ]
    data = datasets.ImageFolder(
        str(root),
        v2.Compose([*geometry, *values]),
        is_valid_file=lambda file: Path(file).suffix.lower() in kinds,
    )
    workers = min(MOST_WORKERS, os.cpu_count() or 1) if num_workers is None else num_workers
    return DataLoader(
        data,
        batch_size,
        shuffle=train,
        drop_last=train,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator().manual_seed(seed),
    )


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


def _scan(path: Path) -> tuple[list[str], list[Path], list[int]]:
    """Names of the classes, files, and the class of each file."""
    kinds, files, labels = _image_kinds(), [], []
    folders = _class_folders(path)
    for label, folder in enumerate(folders):
        entries = sorted(entry for entry in folder.rglob("*") if entry.is_file())
        images = [entry for entry in entries if entry.suffix.lower() in kinds]
        if not images:
            raise ValueError(
                f"{folder} has {_others(entries)}: add images of this class, or remove the folder"
            )
        files += images
        labels += [label] * len(images)
    return [folder.name for folder in folders], files, labels


def _others(entries: Sequence[Path]) -> str:
    if not entries:
        return "no files"
    return f"{len(entries)} files, such as {entries[0].name}, and none that Pillow knows as an image"


def _image_kinds() -> frozenset[str]:
    """Endings of the files that Pillow reads, with the dot."""
    image_module = pillow()
    known = image_module.registered_extensions()
    return frozenset(ending for ending, kind in known.items() if kind in image_module.OPEN)


def pillow() -> Any:
    """PIL.Image, or an error that says how to get it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("image files are read with Pillow: pip install 'hetsngp[vision]'") from error
    return Image


def _torchvision() -> tuple[Any, Any]:
    try:
        from torchvision import datasets
        from torchvision.transforms import v2
    except ImportError as error:
        raise ImportError("folder_loader needs torchvision: pip install 'hetsngp[vision]'") from error
    return v2, datasets
