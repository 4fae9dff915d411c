"""Labelled images in memory: bytes, labels and the names of the classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetsngp.validation import check_positive, check_targets

# Images converted to float64 at a time: a whole set would take eight times its size.
CHUNK = 256


@dataclass(frozen=True, eq=False)
class ImageArrays:
    """Labelled images. ``images``: (N, C, H, W) uint8. ``labels``: (N,) int64 in 0 … K−1. ``class_names``: K.

    ``targets``, (N, K) float32: soft targets, which loaders yield in place of ``labels``; splits go by
    ``labels``.

    >>> data = ImageArrays(torch.zeros(4, 3, 8, 8).byte(), torch.tensor([0, 1, 0, 1]), ("cat", "dog"))
    >>> rest, held_out = data.split(0.5)
    >>> len(held_out), held_out.labels
    (2, tensor([0, 1]))
    """

    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    targets: Tensor | None = None

    def __post_init__(self) -> None:
        _check_images(self.images)
        _check_labels(self.labels, self.images)
        object.__setattr__(self, "class_names", tuple(str(name) for name in self.class_names))
        low, high = torch.stack(torch.aminmax(self.labels)).tolist()
        if low < 0 or high >= self.num_classes:
            raise ValueError(
                f"labels go from {low} to {high}, but there are {self.num_classes} class_names, so labels "
                f"must be 0 … {self.num_classes - 1}: renumber the labels, or name every class"
            )
        check_soft_targets(self.targets, self.labels, self.num_classes)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        """Number of classes K."""
        return len(self.class_names)

    @property
    def loader_labels(self) -> Tensor:
        """What loaders yield: ``targets`` (N, K) where there are any, else ``labels`` (N,)."""
        return self.labels if self.targets is None else self.targets

    def to(self, device: torch.device | str) -> ImageArrays:
        """Copy to ``device``; ``self`` where it is there already."""
        images, labels = self.images.to(device), self.labels.to(device)
        if images is self.images and labels is self.labels:
            return self
        targets = None if self.targets is None else self.targets.to(device)
        return replace(self, images=images, labels=labels, targets=targets)

    def take(self, indices: Tensor | np.ndarray | Sequence[int]) -> ImageArrays:
        """Examples at ``indices`` (n,), in that order; classes without examples stay."""
        rows = chosen_rows(indices).to(self.images.device)
        targets = None if self.targets is None else self.targets[rows]
        return replace(self, images=self.images[rows], labels=self.labels[rows], targets=targets)

    def split(self, held_out: int | float, seed: int = 0) -> tuple[ImageArrays, ImageArrays]:
        """(rest, held out): ``held_out`` examples, or that fraction, by :func:`stratified`, in order."""
        rest, chosen = stratified(self.labels, self.num_classes, held_out, seed)
        return self.take(rest), self.take(chosen)

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (over N·H·W, no Bessel) of each channel in [0, 1]: (C,), (C,) float64.

        Sums of bytes and of their squares are whole numbers below 2⁵³, so only the last divisions round.
        """
        channels = self.images.shape[1]
        sums = torch.zeros(2, channels, dtype=torch.float64, device=self.images.device)
        for chunk in self.images.split(CHUNK):
            pixels = chunk.transpose(0, 1).flatten(1).double()
            sums += torch.stack([pixels.sum(1), pixels.square().sum(1)])
        count = self.images.numel() // channels
        mean, square = sums.cpu() / count
        return mean / 255, (square - mean.square()).clamp(min=0).sqrt() / 255


def chosen_rows(indices: Tensor | np.ndarray | Sequence[int]) -> Tensor:
    """Check ``indices`` of examples and convert them to (n,) int64."""
    rows = torch.as_tensor(np.asarray(indices) if not isinstance(indices, Tensor) else indices)
    if rows.dim() != 1 or len(rows) == 0:
        raise ValueError(f"indices must be a list of at least one index, got shape {tuple(rows.shape)}")
    if rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool:
        raise TypeError(
            f"indices must be whole numbers, got {rows.dtype}: for a mask pass mask.nonzero().flatten()"
        )
    return rows.long()


def stratified(
    labels: Tensor, num_classes: int, held_out: int | float, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Stratified split: indices (n,) of the rest and of ``held_out`` examples, or that fraction of them.

    ``labels``: (N,) int64 in 0 … K−1. Both results are in increasing order, on the CPU. Numbers for each
    class are rounded by largest remainder, ties at random, so that their sum is exact; no class is held out
    completely as long as another can give an example instead.

    >>> stratified(torch.tensor([1, 0, 0, 0, 0, 1]), 2, held_out=3, seed=0)
    (tensor([0, 2, 3]), tensor([1, 4, 5]))
    """
    count = _count(held_out, len(labels))
    generator = torch.Generator().manual_seed(seed)
    labels = labels.cpu()
    sizes = torch.bincount(labels, minlength=num_classes)
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label, share in enumerate(_shares(sizes, count, generator)):
        rows = (labels == label).nonzero().flatten()
        chosen[rows[torch.randperm(len(rows), generator=generator)[:share]]] = True
    return (~chosen).nonzero().flatten(), chosen.nonzero().flatten()


def fold_rows(labels: Tensor, num_classes: int, folds: int, seed: int = 0) -> list[Tensor]:
    """Indices of each of ``folds`` parts of the examples, stratified by class: a list of (n,).

    ``labels``: (N,) int64 in 0 … K−1. The parts are in increasing order, on the CPU, and follow from labels
    and ``seed`` alone. Their sizes differ by at most one, and so do their numbers of examples of each class.

    >>> fold_rows(torch.tensor([0, 1, 0, 1, 0, 0]), num_classes=2, folds=2)
    [tensor([0, 1, 5]), tensor([2, 3, 4])]
    """
    check_positive("folds", folds, integer=True)
    if len(labels) < folds:
        raise ValueError(f"{len(labels)} examples cannot be divided into {folds} folds: choose fewer")
    generator, labels = torch.Generator().manual_seed(seed), labels.cpu()
    rows = [(labels == label).nonzero().flatten() for label in range(num_classes)]
    order = torch.cat([own[torch.randperm(len(own), generator=generator)] for own in rows])
    return [order[fold::folds].sort().values for fold in range(folds)]


def check_soft_targets(targets: Any, labels: Tensor, num_classes: int) -> None:
    """Check the soft targets (N, K) of images, or None."""
    if targets is None:
        return
    if not isinstance(targets, Tensor) or targets.dtype != torch.float32:
        kind = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
        raise TypeError(f"targets must be a tensor of float32, got {kind}: torch.as_tensor(targets).float()")
    if targets.shape != (len(labels), num_classes):
        raise ValueError(
            f"targets have shape {tuple(targets.shape)} where ({len(labels)}, {num_classes}) was expected: a "
            "probability of each class for each image"
        )
    check_targets(targets, num_classes, len(labels))
    if targets.device != labels.device:
        raise ValueError(
            f"labels are on {labels.device}, targets on {targets.device}: put both on one device"
        )


def _check_images(images: Any) -> None:
    if not isinstance(images, Tensor):
        raise TypeError(f"images must be a tensor, got {type(images).__name__}: torch.from_numpy(array)")
    if images.dtype != torch.uint8:
        raise TypeError(
            f"images must be bytes (torch.uint8), got {images.dtype}: for values in [0, 1] pass "
            "(255 * images).round().to(torch.uint8)"
        )
    if images.dim() != 4 or 0 in images.shape:
        raise ValueError(
            f"images must be (N, C, H, W) with none of them 0, got {tuple(images.shape)}: turn (N, H, W, C) "
            "with images.permute(0, 3, 1, 2), give grey images a channel with images[:, None]"
        )


def _check_labels(labels: Any, images: Tensor) -> None:
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a tensor, got {type(labels).__name__}: torch.as_tensor(labels)")
    if labels.dtype != torch.int64:
        raise TypeError(f"labels must be torch.int64, got {labels.dtype}: pass labels.long()")
    if labels.shape != images.shape[:1]:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)} where ({len(images)},) was expected: one for each image"
        )
    if labels.device != images.device:
        raise ValueError(f"images are on {images.device}, labels on {labels.device}: put both on one device")


def _count(held_out: int | float, size: int) -> int:
    """Number of examples to hold out of ``size``."""
    if isinstance(held_out, float) and 0 < held_out < 1:
        count = round(held_out * size)
    elif isinstance(held_out, int) and not isinstance(held_out, bool):
        count = held_out
    else:
        raise ValueError(f"held_out must be a number of examples or a fraction in (0, 1), got {held_out!r}")
    if not 0 < count < size:
        raise ValueError(
            f"held_out={held_out!r} would hold out {count} of {size} examples: choose at least 1 and at most "
            f"{size - 1}"
        )
    return count


def _shares(sizes: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """``count`` divided among classes of ``sizes`` (K,) in proportion, by largest remainder."""
    size = int(sizes.sum())
    shares, remainders = sizes * count // size, sizes * count % size
    # Last comes a class that would lose its last example; never one that has none.
    remainders[shares + 1 >= sizes] = -1
    remainders[sizes == 0] = -2
    lot = torch.randperm(len(sizes), generator=generator)
    first = lot[remainders[lot].argsort(descending=True, stable=True)]
    shares[first[: count - int(shares.sum())]] += 1
    return [int(share) for share in shares]
