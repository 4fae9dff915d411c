"""Images in tar shards, as WebDataset writes them, streamed in an order that (seed, epoch) decides.

An epoch goes through all shards one after another, for training in a new order. It is cut into equal
stretches, one for each process and each of its workers, by counting samples and not shards: so every process
makes the same number of batches, however unequal the shards are, and that number is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hetsngp.data.images.decoding import IMAGENET_MEAN, IMAGENET_STD, Decoder, worker_count
from hetsngp.data.images.multi_label import Labelled, MultiHot
from hetsngp.data.shards.index import sample_counts
from hetsngp.data.shards.tar_samples import Labeller, Sample, read_samples
from hetsngp.validation import check_positive

BUFFER = 1000
"""Encoded images in the shuffle buffer of a worker: some 100 MB of ImageNet's."""
ORDER, REMAINDER, DRAW, CROP = range(1, 5)
"""Purposes of random numbers, each with its own stream."""
DRAWS = 64
"""Random orders tried by :func:`hold_out_shards`; with shards of equal size the first is as good as any."""


@dataclass(frozen=True, eq=False)
class ShardedImages:
    """Images in tar files, with one or more classes each.

    ``wnids``: the K classes; the index of each is its label. ``class_names``: K names to show; empty: the
    wnids. ``numbering``: the list of classes that numbers in the shards index; None: numbers need a wnid
    beside them. :class:`~hetsngp.data.shards.tar_samples.Labeller` documents the labels that a sample may
    have.
    """

    shards: tuple[Path, ...]
    wnids: tuple[str, ...]
    class_names: tuple[str, ...] = ()
    numbering: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards", tuple(map(Path, self.shards)))
        object.__setattr__(self, "wnids", tuple(self.wnids))
        object.__setattr__(self, "class_names", tuple(self.class_names) or self.wnids)
        if not self.shards:
            raise ValueError("there are no shards: name at least one tar file")
        if len(set(self.wnids)) < len(self.wnids) or len(self.class_names) != len(self.wnids):
            raise ValueError(
                f"{len(self.wnids)} wnids, {len(set(self.wnids))} different ones, and "
                f"{len(self.class_names)} class_names: give each class once, with a name"
            )

    @property
    def num_classes(self) -> int:
        """Number of classes K."""
        return len(self.wnids)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of samples of each shard, by :func:`sample_counts`."""
        return sample_counts(self.shards)

    def __len__(self) -> int:
        return sum(self.counts)

    @property
    def labeller(self) -> Labeller:
        """Reader of the labels of a sample."""
        label_of = {wnid: label for label, wnid in enumerate(self.wnids)}
        return Labeller(label_of, None if self.numbering is None else tuple(self.numbering))

    def first_shards(self, n: int) -> ShardedImages:
        """The fewest first shards that have ``n`` images together; all where there are fewer images."""
        before = np.cumsum(self.counts) - self.counts
        return self._take(before < check_positive("n", n, integer=True))

    def split(self, held_out: int | float, seed: int = 0) -> tuple[ShardedImages, ShardedImages]:
        """(rest, held out): whole shards, with about ``held_out`` images, or that fraction of them, held out.

        At least one shard with images is held out and one is left, so more shards come nearer.
        """
        chosen = hold_out_shards(self.counts, held_out, seed)
        return self._take(~chosen), self._take(chosen)

    def _take(self, kept: np.ndarray) -> ShardedImages:
        return replace(self, shards=tuple(self.shards[place] for place in np.flatnonzero(kept)))

    def loader(
        self,
        size: int,
        batch_size: int,
        *,
        resize: int | None = None,
        train: bool = False,
        num_workers: int | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        buffer: int = BUFFER,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> ShardLoader:
        """(x, y); x: (b, 3, size, size) float32, (x/255 − mean)/std; y: (b, K) float32, multi-hot.

        For training: random crops, shards in random order, images shuffled in a buffer of ``buffer``; full
        batches only, equally many in each of ``world_size`` processes, and the images left over change with
        the epoch. Otherwise: a centre crop after resizing the short side to ``resize`` (None: ``size``),
        each image once in all processes together; without workers (``num_workers`` None: up to 8) in the
        order of the shards.

        ``batch_size`` is that of this process, number ``rank``; for the training engine, which divides a
        loader among processes itself (:meth:`ShardLoader.shard`), leave out ``rank`` and ``world_size``.
        Order and crops follow from ``seed`` and the epoch, which goes up with each ``iter``; the crops of an
        image do not depend on the workers.
        """
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed must be a whole number of at least 0, got {seed!r}")
        stream = ShardStream(
            self,
            Decoder(size, resize, train=train, mean=mean, std=std),
            int(check_positive("batch_size", batch_size, integer=True)),
            train=train,
            seed=seed,
            part=(rank, world_size),
            buffer=int(check_positive("buffer", buffer, integer=True)),
        )
        return ShardLoader(stream, worker_count(num_workers))


class ShardStream(IterableDataset[Labelled]):
    """Samples of one process in the order of an epoch; in a DataLoader's worker, those of the worker."""

    def __init__(
        self,
        data: ShardedImages,
        decoder: Decoder,
        batch_size: int,
        *,
        train: bool,
        seed: int = 0,
        part: tuple[int, int] = (0, 1),
        buffer: int = BUFFER,
    ) -> None:
        rank, world_size = part
        check_positive("world_size", world_size, integer=True)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be one of 0 … {world_size - 1}, got {rank!r}")
        self.data, self.decoder, self.batch_size = data, decoder, batch_size
        self.train, self.seed, self.part, self.buffer = train, seed, part, buffer
        self.epoch = 0
        """Epoch of the next ``iter``."""
        self.labeller, self.counts = data.labeller, data.counts
        if len(self) == 0:
            raise ValueError(
                f"there are no images in {data.shards[0]}, nor in any other of {len(data.shards)} shards: "
                "they should hold samples such as 0001.jpg and 0001.cls, one right after the other"
            )
        if self.num_batches() == 0:
            raise ValueError(
                f"{len(data)} images give no batch of {batch_size} in each of {world_size} processes: choose "
                "a smaller batch_size, or fewer processes"
            )

    def shard(self, rank: int, world_size: int) -> ShardStream:
        """The stream of one of ``world_size`` processes, in the same epoch."""
        options: Any = {"train": self.train, "seed": self.seed, "buffer": self.buffer}
        other = ShardStream(self.data, self.decoder, self.batch_size, part=(rank, world_size), **options)
        other.epoch = self.epoch
        return other

    def __len__(self) -> int:
        """Number of samples of all processes."""
        return sum(self.counts)

    def num_batches(self) -> int:
        """Number of batches of an epoch, in this process."""
        begin, end = self._bounds(0)
        return -(-(end - begin) // self.batch_size)

    def __iter__(self) -> Iterator[Labelled]:
        # Not itself a generator: the epoch is that of the call, not of the first sample.
        info = get_worker_info()
        return self._decoded(self.epoch, *((0, 1) if info is None else (info.id, info.num_workers)))

    def _decoded(self, epoch: int, worker: int, workers: int) -> Iterator[Labelled]:
        begin, end = self._bounds(epoch)
        each, extra = divmod(self.num_batches(), workers)
        first = worker * each + min(worker, extra)
        last = first + each + (worker < extra)
        here = begin + first * self.batch_size, min(end, begin + last * self.batch_size)
        samples: Iterator[tuple[int, Sample]] = self._samples(epoch, *here)
        if self.train:
            samples = shuffled(samples, self.buffer, _random(DRAW, self.seed, epoch, *self.part, worker))
        for position, sample in samples:
            # By its position in the epoch, not by the order in which workers come to it.
            seed = int(_random(CROP, self.seed, epoch, position).integers(2**62)) if self.train else None
            yield self.decoder(sample.image, f"sample {sample.key!r} of {sample.shard}", seed), sample.labels

    def _samples(self, epoch: int, begin: int, end: int) -> Iterator[tuple[int, Sample]]:
        """Samples at positions ``begin`` … ``end`` − 1 of an epoch, with their positions."""
        start = 0
        for shard in self._order(epoch):
            count = self.counts[shard]
            low, high = max(begin - start, 0), min(end - start, count)
            if low < high:
                path = self.data.shards[shard]
                found = read_samples(path, self.labeller, low, high, expected=count)
                yield from enumerate(found, start + low)
            start += count

    def _order(self, epoch: int) -> list[int]:
        shards = len(self.counts)
        if not self.train:
            return list(range(shards))
        return [int(shard) for shard in _random(ORDER, self.seed, epoch).permutation(shards)]

    def _bounds(self, epoch: int) -> tuple[int, int]:
        """First position of this process in an epoch, and the one after its last."""
        size, (rank, world) = len(self), self.part
        if not self.train:
            return size * rank // world, size * (rank + 1) // world
        each = size // world // self.batch_size * self.batch_size
        left_over = size - world * each
        begin = int(_random(REMAINDER, self.seed, epoch).integers(left_over + 1)) + rank * each
        return begin, begin + each


class ShardLoader(DataLoader[Any]):
    """A DataLoader that knows its number of batches and counts epochs; see :meth:`ShardedImages.loader`."""

    def __init__(self, stream: ShardStream, num_workers: int = 0) -> None:
        self.stream = stream
        super().__init__(
            stream,
            stream.batch_size,
            collate_fn=MultiHot(stream.data.num_classes),
            num_workers=num_workers,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator().manual_seed(stream.seed),
        )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next ``iter``."""
        if epoch < 0:
            raise ValueError(f"epoch must be at least 0, got {epoch!r}")
        self.stream.epoch = int(epoch)

    def shard(self, rank: int, world_size: int) -> ShardLoader:
        """The loader of one of ``world_size`` processes; ``self`` where it is that one.

        ``batch_size`` stays that of each process, as in Fabric with any DataLoader.
        """
        made_for, world = self.stream.part
        if (made_for, world) == (rank, world_size):
            return self
        if world > 1:
            raise ValueError(
                f"this loader was made for rank {made_for} of {world} processes, not for rank {rank} of "
                f"{world_size}: leave out rank and world_size in images.loader(...), or give rank={rank}, "
                f"world_size={world_size}"
            )
        return ShardLoader(self.stream.shard(rank, world_size), self.num_workers)

    def __len__(self) -> int:
        return self.stream.num_batches()

    def __iter__(self) -> Any:
        batches = super().__iter__()  # its workers have copied the stream by now
        self.stream.epoch += 1
        return batches


def hold_out_shards(counts: Sequence[int], held_out: int | float, seed: int = 0) -> np.ndarray:
    """(shards,) bool: whole shards chosen at random, with about ``held_out`` images or that fraction of them.

    ``counts``: images of each shard. In a random order, each shard that brings the sum nearer to
    ``held_out`` is held out; of several such orders the one that comes nearest is taken. Both parts have
    images.

    >>> int(hold_out_shards([100, 100, 100, 100], 0.25).sum()), hold_out_shards([5, 90, 5], 0.9).tolist()
    (1, [False, True, False])
    """
    sizes, total = np.asarray(counts, np.int64), int(sum(counts))
    filled = np.flatnonzero(sizes)
    if len(filled) < 2:
        raise ValueError(
            f"{len(filled)} of {len(sizes)} shards have images, and only whole shards can be held out: write "
            "the images into two shards or more, or hold none out"
        )
    wanted = _wanted(held_out, total)
    random = np.random.default_rng(seed)
    draws = [_nearer(sizes, random.permutation(filled), wanted) for _ in range(DRAWS)]
    return min(draws, key=lambda chosen: abs(int(sizes[chosen].sum()) - wanted))


def shuffled(stream: Iterable[Any], size: int, random: np.random.Generator) -> Iterator[Any]:
    """Shuffle a stream with a buffer: each item is drawn at random from the next ``size`` remaining ones.

    >>> sorted(shuffled(range(9), 4, np.random.default_rng(0)))
    [0, 1, 2, 3, 4, 5, 6, 7, 8]
    """
    buffer: list[Any] = []
    for item in stream:
        buffer.append(item)
        if len(buffer) >= size:
            yield _draw(buffer, random)
    while buffer:
        yield _draw(buffer, random)


def _nearer(sizes: np.ndarray, order: np.ndarray, wanted: float) -> np.ndarray:
    chosen, total = np.zeros(len(sizes), bool), 0
    for shard in order[:-1]:  # the last one is never held out
        if abs(total + sizes[shard] - wanted) < abs(total - wanted):
            chosen[shard], total = True, total + int(sizes[shard])
    if not total:
        chosen[min(order, key=lambda shard: sizes[shard])] = True
    return chosen


def _wanted(held_out: int | float, total: int) -> float:
    if isinstance(held_out, float) and 0 < held_out < 1:
        return held_out * total
    if isinstance(held_out, int) and not isinstance(held_out, bool) and 0 < held_out < total:
        return held_out
    raise ValueError(
        f"held_out must be a number of images from 1 to {total - 1} or a fraction in (0, 1), got {held_out!r}"
    )


def _draw(buffer: list[Any], random: np.random.Generator) -> Any:
    index = int(random.integers(len(buffer)))
    buffer[index], buffer[-1] = buffer[-1], buffer[index]
    return buffer.pop()


def _random(*seeds: int) -> np.random.Generator:
    # Mixed by SeedSequence: seed 0 in epoch 1 is unrelated to seed 1 in epoch 0. It ignores zeros at the end
    # of short lists, hence the purpose, never zero, at the beginning.
    return np.random.default_rng(seeds)
