"""Batches of images kept on the device: order, crops and flips by indexing there, no worker processes.

All random numbers of an epoch are drawn at once on the CPU, from (seed, epoch) alone, and copied to the
device once. So an epoch is the same on every device, for every number of processes, from whatever batch it
starts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hetsngp.data.images.arrays import ImageArrays
from hetsngp.validation import check_positive


@dataclass(frozen=True)
class Augmentation:
    """Random crop of the image padded with ``crop`` black pixels, and horizontal flips.

    As torchvision's RandomCrop(size, padding=crop) and RandomHorizontalFlip, before ToTensor.
    """

    crop: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.crop, bool) or not isinstance(self.crop, int) or self.crop < 0:
            raise ValueError(f"crop must be a whole number of pixels, 0 for no cropping, got {self.crop!r}")


@dataclass(frozen=True, eq=False)
class _EpochDraws:
    """Order and augmentation of an epoch, by position in it; on the loader's device."""

    order: Tensor | None
    """(N,) index of the example at each position; None: in order."""
    windows: Tensor | None
    """(3, N) int64, see :func:`crop_and_flip`; None: no augmentation."""


class DeviceLoader:
    """Batches (x, y) of ``data``; x: (b, C, H, W) float32, (x/255 − mean)/std; y: labels (b,) int64, or soft
    targets (b, K) where there are any.

    ``batch_size`` is the global one, over all processes. ``drop_last`` leaves out a last batch that is not
    full; None: the value of ``shuffle``. ``mean`` and ``std``: (C,) in units of [0, 1]; None: those of
    ``data``, so a loader for evaluation should get ``mean=train.mean, std=train.std``. ``size``: side to
    which images are resized after the augmentation, and made RGB, by :func:`rgb_of_size`.

    The number of the epoch goes up with each ``iter``, or is set by :meth:`set_epoch`; together with ``seed``
    it decides the order and the augmentation.

    >>> images = torch.arange(5 * 16).view(5, 1, 4, 4).byte()
    >>> data = ImageArrays(images, torch.arange(5), tuple("abcde"))
    >>> [(tuple(x.shape), len(y)) for x, y in DeviceLoader(data, 2)]
    [((2, 1, 4, 4), 2), ((2, 1, 4, 4), 2), ((1, 1, 4, 4), 1)]
    >>> len(DeviceLoader(data, 2, shuffle=True, augment=Augmentation(crop=1)))
    2
    """

    def __init__(
        self,
        data: ImageArrays,
        batch_size: int,
        *,
        shuffle: bool = False,
        augment: Augmentation | None = None,
        mean: Sequence[float] | Tensor | None = None,
        std: Sequence[float] | Tensor | None = None,
        drop_last: bool | None = None,
        seed: int = 0,
        size: int | None = None,
    ) -> None:
        self.dataset, self.size = data, size
        self.batch_size = int(check_positive("batch_size", batch_size, integer=True))
        self.shuffle, self.augment, self.seed = shuffle, augment, seed
        self.drop_last = shuffle if drop_last is None else drop_last
        self.epoch = 0
        """Epoch of the next ``iter``."""
        self.rank, self.world_size = 0, 1
        self.channels_last = False
        self._start = 0
        self._check()
        channels = data.images.shape[1] if size is None else 3
        self.mean, self.std = _normalisation(data, mean, std, channels)
        # (x/255 − mean)/std = x·scale + shift, rounded to float32 once
        scale, shift = 1 / (255 * self.std), -self.mean / self.std
        self._scale, self._shift = (t.float()[:, None, None].to(data.images.device) for t in (scale, shift))

    def _check(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed must be a whole number of at least 0, got {self.seed!r}")
        side = min(self.dataset.images.shape[-2:])
        if self.augment is not None and self.augment.crop >= side:
            raise ValueError(
                f"Augmentation(crop={self.augment.crop}) on images of {side} pixels would leave some black: "
                f"choose less than {side}, e.g. {side // 8}"
            )
        if self.drop_last and len(self.dataset) < self.batch_size:
            raise ValueError(
                f"{len(self.dataset)} examples give no full batch of {self.batch_size}: choose a smaller "
                "batch_size, or drop_last=False"
            )

    # --- copies for a device, for a process -------------------------------------------------------------

    def to(self, device: torch.device | str, channels_last: bool = False) -> DeviceLoader:
        """A copy with the images on ``device``; images that are there already are shared."""
        other = copy.copy(self)
        other.dataset = self.dataset.to(device)
        other._scale, other._shift = self._scale.to(device), self._shift.to(device)
        other.channels_last = channels_last
        return other

    def clean(self) -> DeviceLoader:
        """A copy that yields every image once, in order and without augmentation."""
        other = copy.copy(self)
        other.shuffle, other.augment, other.drop_last = False, None, False
        return other

    def shard(self, rank: int, world_size: int) -> DeviceLoader:
        """A copy for one of ``world_size`` processes: its contiguous part of every global batch.

        For a full batch of B that is examples [r·B/W, (r+1)·B/W). Where W does not divide a batch (never
        with ``drop_last``) parts differ by one example, and a process without any of the last batch has a
        batch fewer: together they yield every example once.
        """
        check_positive("world_size", world_size, integer=True)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be one of 0 … {world_size - 1}, got {rank!r}")
        if self.world_size > 1:
            raise ValueError("this loader is a shard already: shard the loader of all processes")
        below = self.batch_size - self.batch_size % world_size
        if self.batch_size < world_size or (self.drop_last and below != self.batch_size):
            choices = " or ".join(str(b) for b in (below, below + world_size) if b)
            raise ValueError(
                f"batch_size={self.batch_size} is for all {world_size} processes together and cannot be "
                f"divided evenly: choose {choices}"
            )
        other = copy.copy(self)
        other.rank, other.world_size = rank, world_size
        return other

    # --- where to resume ---------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next ``iter``."""
        if epoch < 0:
            raise ValueError(f"epoch must be at least 0, got {epoch!r}")
        self.epoch = int(epoch)

    def start_at(self, batch: int) -> None:
        """Begin the next ``iter``, and only that, with this batch; earlier ones are not computed."""
        if not 0 <= batch <= self._global_batches():
            raise ValueError(f"an epoch has {self._global_batches()} batches: cannot start at {batch!r}")
        self._start = int(batch)

    # --- batches ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of batches of a whole epoch, for this process."""
        count = self._global_batches()
        begin, end = self._bounds(count - 1)
        return count if begin < end else count - 1

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # Not itself a generator: epoch and start count from the call, not from the first batch.
        epoch, start = self.epoch, self._start
        self.epoch, self._start = epoch + 1, 0
        return self._batches(epoch, start)

    def _batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        draws = self._draw(epoch)
        for batch in range(start, len(self)):
            yield self._batch(draws, slice(*self._bounds(batch)))

    def _global_batches(self) -> int:
        size = len(self.dataset)
        return size // self.batch_size if self.drop_last else -(-size // self.batch_size)

    def _bounds(self, batch: int) -> tuple[int, int]:
        """First position of this process's part of a batch in the epoch, and the one after its last."""
        begin = batch * self.batch_size
        rows = min(self.batch_size, len(self.dataset) - begin)
        return begin + rows * self.rank // self.world_size, begin + rows * (self.rank + 1) // self.world_size

    def _draw(self, epoch: int) -> _EpochDraws:
        size, device, augment = len(self.dataset), self.dataset.images.device, self.augment
        # SeedSequence mixes: seed 0 in epoch 1 is unrelated to seed 1 in epoch 0.
        state = np.random.SeedSequence((self.seed, epoch)).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(state >> np.uint64(1)))
        order = windows = None
        # The order comes first, so that augmentation does not change it.
        if self.shuffle:
            order = torch.randperm(size, generator=generator).to(device)
        if augment is not None:
            corners = torch.randint(2 * augment.crop + 1, (2, size), generator=generator)
            flips = torch.randint(1 + augment.flip, (1, size), generator=generator)
            windows = torch.cat([corners, flips]).to(device)
        return _EpochDraws(order, windows)

    def _batch(self, draws: _EpochDraws, positions: slice) -> tuple[Tensor, Tensor]:
        rows = positions if draws.order is None else draws.order[positions]
        x, y = self.dataset.images[rows], self.dataset.loader_labels[rows]
        if self.augment is not None and draws.windows is not None:
            x = crop_and_flip(x, draws.windows[:, positions], self.augment.crop)
        if self.size is not None:
            x = rgb_of_size(x, self.size)
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)  # while it is bytes: a quarter of the traffic
        # A slice of the labels would be a view of the data set, which a caller might write to.
        return torch.addcmul(self._shift, x, self._scale), y.clone() if draws.order is None else y


def crop_and_flip(images: Tensor, windows: Tensor, padding: int) -> Tensor:
    """Crop each image, padded with ``padding`` zeros, at (top, left); flip it where flip is 1.

    ``images``: (b, C, H, W). ``windows``: (3, b) int64: top and left, in 0 … 2·padding, and flip, 0 or 1.

    >>> crop_and_flip(torch.tensor([[[[1, 2], [3, 4]]]]), torch.tensor([[2], [1], [1]]), padding=1)
    tensor([[[[4, 3],
              [0, 0]]]])
    """
    batch, channels, height, width = images.shape
    top, left, flip = windows[:, :, None]
    i, j = (torch.arange(side, device=images.device) for side in (height, width))
    row = top + i
    column = left + j + flip * (width - 1 - 2 * j)
    # (b, H·W) positions in the padded image, the same for all channels
    index = (row[:, :, None] * (width + 2 * padding) + column[:, None, :]).flatten(1)
    padded = F.pad(images, (padding,) * 4).flatten(2)
    return padded.gather(2, index[:, None].expand(-1, channels, -1)).view(batch, channels, height, width)


def rgb_of_size(images: Tensor, size: int) -> Tensor:
    """Pixels (n, 3, size, size) float32 in 0 … 255 of images (n, C, H, W) uint8: their first three channels,
    grey ones as RGB, resized by bicubic interpolation with antialiasing where they have another size.

    >>> rgb_of_size(torch.zeros(2, 1, 8, 10).byte(), 16).shape
    torch.Size([2, 3, 16, 16])
    """
    x = (images[:, :3] if images.shape[1] >= 3 else images[:, :1].expand(-1, 3, -1, -1)).float()
    if x.shape[2:] != (size, size):
        x = F.interpolate(x, (size, size), mode="bicubic", antialias=True).clamp(0, 255)
    return x


def _normalisation(data: ImageArrays, mean: Any, std: Any, channels: int) -> tuple[Tensor, Tensor]:
    """Mean and std (C,) in float64, given or those of the data."""
    if (mean is None) != (std is None):
        raise ValueError("mean and std belong together: give both, or neither for those of the data")
    if mean is None:
        mean, std = data.statistics()
    mean, std = (torch.as_tensor(value, dtype=torch.float64).cpu() for value in (mean, std))
    for name, value in (("mean", mean), ("std", std)):
        if value.shape != (channels,) or not bool(value.isfinite().all()):
            raise ValueError(
                f"{name} must be {channels} finite numbers, one per channel, got {value.tolist()}"
            )
    if not bool((std > 0).all()):
        raise ValueError(
            f"std is {std.tolist()}, and pixels are divided by it: where a channel is constant, give mean "
            "and std yourself"
        )
    return mean, std
