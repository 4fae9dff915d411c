"""Labelled images on disk, decoded when they are needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hetsngp.data.images.arrays import ImageArrays, check_soft_targets, stratified
from hetsngp.data.images.decoding import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Decoder,
    loader_from_disk,
    open_picture,
    pillow,
    resize_and_center_crop,
    short_side,
)
from hetsngp.validation import check_positive

LIMIT_BYTES = 8 * 2**30
# Images of one task of a thread: a task for each of a million files would itself take memory.
CHUNK = 64


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Labelled image files. ``files``: N paths. ``labels``: (N,) int64 in 0 … K−1. ``class_names``: K names.

    ``targets``, (N, K) float32: soft targets, which loaders yield in place of ``labels``; splits go by
    ``labels``.
    :meth:`load` decodes all into memory, :meth:`loader` reads them from disk batch by batch.

    >>> files = ImageFiles(("a.jpg", "b.jpg", "c.jpg"), torch.tensor([0, 1, 1]), ("cat", "dog"))
    >>> files.take([2]).files[0].name, files.num_classes
    ('c.jpg', 2)
    """

    files: tuple[Path, ...]
    labels: Tensor
    class_names: tuple[str, ...]
    targets: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", tuple(map(Path, self.files)))
        object.__setattr__(self, "class_names", tuple(map(str, self.class_names)))
        if not self.files:
            raise ValueError("there are no files: name at least one image")
        labels, count = self.labels, len(self.files)
        if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or labels.shape != (count,):
            raise ValueError(
                f"labels must be a tensor of int64, one for each of {count} files: torch.tensor(labels)"
            )
        low, high = torch.stack(torch.aminmax(labels)).tolist()
        if low < 0 or high >= self.num_classes:
            raise ValueError(
                f"labels go from {low} to {high}, but there are {self.num_classes} class_names: renumber the "
                "labels, or name every class"
            )
        check_soft_targets(self.targets, labels, self.num_classes)

    def __len__(self) -> int:
        return len(self.files)

    @property
    def num_classes(self) -> int:
        """Number of classes K."""
        return len(self.class_names)

    def take(self, indices: Tensor | np.ndarray | Sequence[int]) -> ImageFiles:
        """Files at ``indices`` (n,), in that order; classes without files stay."""
        rows = checked_rows(indices)
        chosen = tuple(self.files[row] for row in rows.tolist())
        targets = None if self.targets is None else self.targets[rows]
        return replace(self, files=chosen, labels=self.labels[rows], targets=targets)

    def split(self, held_out: int | float, seed: int = 0) -> tuple[ImageFiles, ImageFiles]:
        """(rest, held out): ``held_out`` files, or that fraction of them, stratified by class, in order.

        By :func:`~hetsngp.data.images.arrays.stratified`, like :meth:`ImageArrays.split`.
        """
        rest, chosen = stratified(self.labels, self.num_classes, held_out, seed)
        return self.take(rest), self.take(chosen)

    def load(
        self,
        size: int,
        *,
        resize: int | None = None,
        limit_bytes: int = LIMIT_BYTES,
        progress: Callable[[int, int], None] | None = None,
    ) -> ImageArrays:
        """Decode all images into memory, (N, 3, size, size), each by :func:`read_image`, in threads.

        ``resize``: length of the short side before the centre crop of ``size``; None: ``size``. ``progress``
        is called with (images done, number of images).
        """
        size = int(check_positive("size", size, integer=True))
        resize = short_side(size, resize)
        needed = len(self) * 3 * size * size
        if needed > limit_bytes:
            raise ValueError(
                f"{len(self)} images of {size}×{size} take {needed / 2**30:.1f} GiB, more than limit_bytes="
                f"{limit_bytes} ({limit_bytes / 2**30:.1f} GiB): use ImageFiles.loader or folder_loader, "
                "which read them from disk, a smaller size, or a larger limit_bytes"
            )
        pillow()  # raises here and not in a thread
        images = torch.empty(len(self), 3, size, size, dtype=torch.uint8)

        def decode(begin: int) -> int:
            rows = range(begin, min(begin + CHUNK, len(self)))
            for row in rows:
                images[row] = read_image(self.files[row], size, resize)
            return len(rows)

        done = 0
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for count in pool.map(decode, range(0, len(self), CHUNK)):
                done += count
                if progress is not None:
                    progress(done, len(self))
        return ImageArrays(images, self.labels, self.class_names, self.targets)

    def loader(
        self,
        size: int,
        batch_size: int,
        *,
        resize: int | None = None,
        train: bool = False,
        num_workers: int | None = None,
        seed: int = 0,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> DataLoader[Any]:
        """(x, y) from disk; x: (b, 3, size, size) float32, (x/255 − mean)/std, by default as for ImageNet.

        y: labels (b,), or soft targets (b, K) where there are any.

        For training: random resized crops, flipped or not, in random order, full batches only. Otherwise the
        pixels of :meth:`load` (with its ``resize``), in order. ``seed`` decides the order and, where there
        are worker processes (``num_workers`` None: up to 8), the crops; without any, these come from torch's
        global generator.
        """
        data = _FromDisk(self, Decoder(size, resize, train=train, mean=mean, std=std))
        return loader_from_disk(data, batch_size, train, num_workers, seed)


def checked_rows(indices: Tensor | np.ndarray | Sequence[int]) -> Tensor:
    """Indices as a tensor (n,) int64, at least one."""
    rows = torch.as_tensor(indices)
    if rows.dim() != 1 or len(rows) == 0:
        raise ValueError(f"indices must be a list of at least one index, got shape {tuple(rows.shape)}")
    if rows.is_floating_point() or rows.dtype == torch.bool:
        raise TypeError(
            f"indices must be whole numbers, got {rows.dtype}: for a mask pass mask.nonzero().flatten()"
        )
    return rows.long()


class _FromDisk(Dataset[tuple[Tensor, int | Tensor]]):
    """Data set that decodes one file at a time."""

    def __init__(self, data: ImageFiles, decoder: Decoder) -> None:
        # One array: counting references to a million paths would in time copy them in each worker.
        self.files = np.array([os.fsencode(file) for file in data.files])
        self.labels, self.targets, self.decoder = data.labels, data.targets, decoder
        self.classes = list(data.class_names)
        """Class names, under the name they have in torchvision's ImageFolder."""

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[Tensor, int | Tensor]:
        name = os.fsdecode(self.files[row])
        y = int(self.labels[row]) if self.targets is None else self.targets[row]
        return self.decoder(Path(name), name), y


def read_image(file: Path, size: int, resize: int | None = None) -> Tensor:
    """(3, size, size) uint8 of an image file, resized and cropped to its centre."""
    return resize_and_center_crop(open_picture(file, str(file)), size, resize)
