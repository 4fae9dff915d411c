"""Batches of texts of similar length, padded to the longest of each."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from hetsngp.data.batches import EpochBatches
from hetsngp.data.text.tokenizer import TokenizedTexts

BUCKET = 50
"""Batches whose texts are sorted by length together: more would make less padding and less random batches."""


class TextLoader(EpochBatches):
    """Batches (x, y) of ``data``; x: a dict of (b, L) int64 by the names of the network's inputs; y: labels
    (b,) int64, or soft targets (b, K) where there are any.

    Shuffled, a batch has texts of similar length: the texts of 50 random batches at a time are sorted by
    length and cut into batches, which come in random order. An epoch follows from ``seed`` and its number
    alone, see :class:`~hetsngp.data.batches.EpochBatches` for the other arguments.
    """

    def __init__(
        self,
        data: TokenizedTexts,
        batch_size: int,
        *,
        shuffle: bool = False,
        drop_last: bool | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, shuffle=shuffle, drop_last=drop_last, seed=seed)
        self.dataset = data
        self._check_full_batch()

    def to(self, device: torch.device | str, channels_last: bool = False) -> TextLoader:
        """A copy with the tokens on ``device``; ``channels_last`` is for images."""
        other = copy.copy(self)
        other.dataset = self.dataset.to(device)
        return other

    def _draw(self, generator: torch.Generator) -> Tensor:
        """Order of the examples, (N,)."""
        count = len(self.dataset)
        if not self.shuffle:
            return torch.arange(count)
        return bucketed_order(self.dataset.lengths, self.batch_size, generator)

    def _batch(self, draws: Tensor, positions: slice) -> tuple[dict[str, Tensor], Tensor]:
        return self.dataset.batch(draws[positions])


def bucketed_order(lengths: Tensor, batch_size: int, generator: torch.Generator) -> Tensor:
    """Random order (N,) of examples in which each ``batch_size`` of them have similar ``lengths`` (N,).

    The examples that make no full batch are last, a random choice.

    >>> order = bucketed_order(torch.tensor([9, 1, 8, 2, 5]), 2, torch.Generator().manual_seed(0))
    >>> sorted(order.tolist()), len(order)
    ([0, 1, 2, 3, 4], 5)
    """
    order = torch.randperm(len(lengths), generator=generator)
    full = len(lengths) - len(lengths) % batch_size
    sort = [part[lengths[part].argsort(stable=True)] for part in order[:full].split(BUCKET * batch_size)]
    batches = torch.cat([*sort, order[:0]]).view(-1, batch_size)
    mixed = batches[torch.randperm(len(batches), generator=generator)]
    return torch.cat([mixed.flatten(), order[full:]])
