"""Batches of data kept on the device, an epoch at a time, from any batch on, in one or several processes.

The order of an epoch is drawn at once on the CPU, from (seed, epoch) alone. So an epoch is the same on every
device, for every number of processes, from whatever batch it starts.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from hetsngp.validation import check_positive


class EpochBatches(ABC):
    """Batches (x, y) of ``dataset``, which has a length. A subclass says what an epoch draws, and makes each
    batch of it.

    ``batch_size`` is the global one, over all processes. ``drop_last`` leaves out a last batch that is not
    full; None: the value of ``shuffle``. The number of the epoch goes up with each ``iter``, or is set by
    :meth:`set_epoch`.
    """

    dataset: Any

    def __init__(self, batch_size: int, *, shuffle: bool, drop_last: bool | None, seed: int) -> None:
        self.batch_size = int(check_positive("batch_size", batch_size, integer=True))
        self.shuffle, self.seed = shuffle, seed
        self.drop_last = shuffle if drop_last is None else drop_last
        self.epoch = 0
        """Epoch of the next ``iter``."""
        self.rank, self.world_size = 0, 1
        self._start = 0
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed must be a whole number of at least 0, got {self.seed!r}")

    @abstractmethod
    def _draw(self, generator: torch.Generator) -> Any:
        """Everything random about an epoch, such as the order of the examples."""

    @abstractmethod
    def _batch(self, draws: Any, positions: slice) -> tuple[Any, Tensor]:
        """Batch (x, y) of the examples at ``positions`` of the epoch."""

    def _check_full_batch(self) -> None:
        """Check that there is a batch."""
        if self.drop_last and len(self.dataset) < self.batch_size:
            raise ValueError(
                f"{len(self.dataset)} examples give no full batch of {self.batch_size}: choose a smaller "
                "batch_size, or drop_last=False"
            )

    # --- copies ------------------------------------------------------------------------------------------

    def clean(self) -> Self:
        """A copy that yields every example once and in order."""
        other = copy.copy(self)
        other.shuffle, other.drop_last = False, False
        return other

    def shard(self, rank: int, world_size: int) -> Self:
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

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        # Not itself a generator: epoch and start count from the call, not from the first batch.
        epoch, start = self.epoch, self._start
        self.epoch, self._start = epoch + 1, 0
        return self._batches(epoch, start)

    def _batches(self, epoch: int, start: int) -> Iterator[tuple[Any, Tensor]]:
        # SeedSequence mixes: seed 0 in epoch 1 is unrelated to seed 1 in epoch 0.
        state = np.random.SeedSequence((self.seed, epoch)).generate_state(1, np.uint64)[0]
        draws = self._draw(torch.Generator().manual_seed(int(state >> np.uint64(1))))
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
