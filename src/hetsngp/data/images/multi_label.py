"""Multi-label image files, and batches with multi-hot targets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hetsngp.data.images.arrays import stratified
from hetsngp.data.images.decoding import IMAGENET_MEAN, IMAGENET_STD, Decoder, loader_from_disk
from hetsngp.data.images.files import checked_rows

Labelled = tuple[Tensor, Sequence[int]]
"""Image (3, H, W) and its classes."""


@dataclass(frozen=True, eq=False)
class MultiLabelFiles:
    """N image files below ``folder`` with any number of classes each.

    Four arrays, not objects: those of 13 million images would take gigabytes in every worker process.

    >>> files = MultiLabelFiles.of(Path("pets"), ["a.jpg", "b.jpg"], [[0], [0, 2]], ("cat", "dog", "owl"))
    >>> len(files), files.labels_of(1).tolist(), files.file(1).name
    (2, [0, 2], 'b.jpg')
    """

    folder: Path
    names: np.ndarray
    """(N,) paths inside ``folder``, as bytes."""
    labels: Tensor
    """(L,) int64: classes of the first image, then of the second, …"""
    ends: Tensor
    """(N,) int64: end of each image's classes in ``labels``."""
    class_names: tuple[str, ...]

    @classmethod
    def of(
        cls, folder: Path, names: Sequence[str], labels: Sequence[Sequence[int]], class_names: Iterable[str]
    ) -> MultiLabelFiles:
        """Make it from file names and a list of classes for each."""
        if not names or len(names) != len(labels):
            raise ValueError(f"{len(names)} names and {len(labels)} lists of labels: give one list an image")
        flat = np.fromiter((label for row in labels for label in row), np.int64)
        ends = np.cumsum(np.fromiter(map(len, labels), np.int64, len(labels)))
        known = tuple(map(str, class_names))
        if flat.size and not 0 <= flat.min() <= flat.max() < len(known):
            raise ValueError(
                f"labels go from {flat.min()} to {flat.max()}, but there are {len(known)} class_names: "
                "renumber the labels, or name every class"
            )
        encoded = np.array([os.fsencode(name) for name in names])
        return cls(folder, encoded, torch.from_numpy(flat), torch.from_numpy(ends), known)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def num_classes(self) -> int:
        """Number of classes K."""
        return len(self.class_names)

    def file(self, row: int) -> Path:
        """Path of an image."""
        return self.folder / os.fsdecode(self.names[row])

    def labels_of(self, row: int) -> Tensor:
        """Classes (n,) of an image."""
        return self.labels[int(self.ends[row - 1]) if row else 0 : int(self.ends[row])]

    def take(self, indices: Tensor | np.ndarray | Sequence[int]) -> MultiLabelFiles:
        """Images at ``indices`` (n,), in that order; classes without images stay."""
        rows = torch.arange(len(self))[checked_rows(indices)]  # negative indices count from the end
        counts = self.ends.diff(prepend=self.ends.new_zeros(1))[rows]
        ends = counts.cumsum(0)
        # Position in the new labels → position in ``self.labels``; a loop over 13 million images takes
        # minutes.
        positions = torch.arange(int(counts.sum())) + (self.ends[rows] - ends).repeat_interleave(counts)
        return replace(self, names=self.names[rows.numpy()], labels=self.labels[positions], ends=ends)

    def split(self, held_out: int | float, seed: int = 0) -> tuple[MultiLabelFiles, MultiLabelFiles]:
        """(rest, held out): ``held_out`` images, or that fraction of them, at random, in order.

        Not stratified: an image has any number of classes.
        """
        rest, chosen = stratified(torch.zeros(len(self)).long(), 1, held_out, seed)
        return self.take(rest), self.take(chosen)

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
        """(x, y); x: (b, 3, size, size) float32, (x/255 − mean)/std; y: (b, K) float32, multi-hot.

        Crops, order, ``resize`` and ``seed`` are those of
        :meth:`hetsngp.data.images.files.ImageFiles.loader`.
        """
        data = _Decoded(self, Decoder(size, resize, train=train, mean=mean, std=std))
        return loader_from_disk(data, batch_size, train, num_workers, seed, MultiHot(self.num_classes))


class MultiHot:
    """Collate images and their classes → (x, y); x: (b, …); y: (b, K) float32, 1 at each class of the image.

    >>> MultiHot(3)([(torch.zeros(2), [0, 2]), (torch.zeros(2), [])])[1]
    tensor([[1., 0., 1.],
            [0., 0., 0.]])
    """

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes

    def __call__(self, batch: Sequence[Labelled]) -> tuple[Tensor, Tensor]:
        targets = torch.zeros(len(batch), self.num_classes)
        for row, (_, labels) in zip(targets, batch, strict=True):
            row[torch.as_tensor(labels, dtype=torch.int64)] = 1.0
        return torch.stack([image for image, _ in batch]), targets


class _Decoded(Dataset[Labelled]):
    def __init__(self, data: MultiLabelFiles, decoder: Decoder) -> None:
        self.data, self.decoder = data, decoder

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> Labelled:
        file = self.data.file(row)
        return self.decoder(file, str(file)), self.data.labels_of(row).tolist()
