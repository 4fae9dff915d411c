"""Rows, classes and weights on their way into a fit: merged, split, standardised, cut into batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Held-out rows that are enough to stop and to calibrate by. With fewer the best epoch is mostly chance, and
# chance stops too early: then folds decide, which together hold out every row.
ENOUGH_HELD_OUT = 100
MOST_FOLDS = 5
# With fewer rows in all folds together a temperature is a guess.
FEWEST_HELD_OUT = 20


@dataclass(frozen=True)
class Table:
    """``x`` (n, d); class numbers ``y`` (n,), or multi-hot labels (n, K); positive weights and numbers of
    equal x: (n,) each.
    """

    x: Any
    y: Any
    weight: Any
    group: Any

    def rows(self, index: Any) -> Table:
        return Table(self.x[index], self.y[index], self.weight[index], self.group[index])

    def moments(self) -> tuple[Any, Any]:
        """Weighted mean and standard deviation of each column, (d,) each; 1 for a column that is constant."""
        share = self.weight / self.weight.sum()
        mean = share @ self.x
        std = np.sqrt(share @ np.square(self.x - mean))
        rounding = 10 * np.finfo(np.float64).eps * np.abs(mean)
        varies = self.x.max(0) > self.x.min(0)  # the mean of many equal numbers may be off by more than that
        return mean, np.where(varies & (std > rounding), std, 1.0)

    def class_weights(self, num_classes: int) -> Any:
        """Total weight of each class: (K,)."""
        if self.y.ndim == 2:
            return self.weight @ self.y
        return np.bincount(self.y, weights=self.weight, minlength=num_classes)

    @property
    def strata(self) -> Any:
        """What a split keeps in proportion: the class (n,), one and the same for multi-hot labels."""
        return self.y if self.y.ndim == 1 else np.zeros(len(self.y), dtype=np.int64)

    @property
    def alone(self) -> Tensor:
        """Rows that no other is equal to in x: (n,) bool."""
        _, place, count = np.unique(self.group, return_inverse=True, return_counts=True)
        return torch.from_numpy(count[place.reshape(-1)] == 1)

    def standardised(self, mean: Any, scale: Any) -> Table:
        return replace(self, x=(self.x - mean) / scale)

    def of_mean_weight_one(self) -> Table:
        return replace(self, weight=self.weight / self.weight.mean())

    def batches(self, like: Tensor, size: int, generator: torch.Generator | None = None) -> Batches:
        """Batches in the dtype and on the device of ``like``."""
        y = torch.as_tensor(self.y, dtype=torch.long if self.y.ndim == 1 else like.dtype).to(like.device)
        x, weight = (torch.as_tensor(part).to(like.dtype).to(like.device) for part in (self.x, self.weight))
        return Batches(x, y, weight, size, generator)


def merge_copies(x: Any, y: Any, weight: Any) -> Table:
    """Equal rows of one class become one row, their weights added, in an order that the values decide.

    So a weight and that many copies are the same data to all that follows, whatever order they came in. Rows
    of weight zero are not there.
    """
    counts = weight > 0
    x, y, weight = np.ascontiguousarray(x[counts]) + 0.0, y[counts], weight[counts]  # −0.0 becomes 0.0
    as_bytes = x.view(np.dtype((np.void, x.itemsize * x.shape[1]))).ravel()
    group = np.unique(as_bytes, return_inverse=True)[1].reshape(-1)
    pair = group * (int(y.max()) + 1) + y
    _, first, row = np.unique(pair, return_index=True, return_inverse=True)
    return Table(x[first], y[first], np.bincount(row.reshape(-1), weights=weight), group[first])


def split(table: Table, fraction: float, seed: int) -> list[tuple[Table, Table]]:
    """(training, held-out) pairs, the classes in proportion as far as that goes; none leaves training.

    One pair where ``fraction`` makes a held-out part large enough to stop and to calibrate by; on a small
    table as many as it takes for every row to be held out once, five at most; an empty list where even that
    is too little. Rows with the same x stay together whatever their class: alone in training, one would
    teach the opposite of what its twin is asked.
    """
    rng = np.random.default_rng(seed)
    strata = table.strata
    heaviest = np.lexsort((strata, -table.weight, table.group))
    groups, first = np.unique(table.group[heaviest], return_index=True)
    label = strata[heaviest][first]  # of each group: the class with most weight in it
    # Groups of a class stand evenly on the line from 0 to 1, in random order; a fold is a piece of it.
    place = np.empty(len(groups))
    for each in np.unique(label):
        members = rng.permutation(np.flatnonzero(label == each))
        place[members] = (np.arange(len(members)) + rng.random()) / len(members)
    order = groups[np.argsort(place, kind="stable")]
    count = round(fraction * len(groups))
    if count == 0:
        return []
    if count >= ENOUGH_HELD_OUT:
        pieces = [order[:count]]
    else:
        pieces = np.array_split(order, min(MOST_FOLDS, max(2, round(1 / fraction))))
    pairs = [_hold_out(table, piece) for piece in pieces]
    held_out = np.concatenate([strata[:0], *(part.strata for _, part in pairs)])
    one_class = len(np.unique(held_out)) < min(2, len(np.unique(strata)))
    if len(held_out) < FEWEST_HELD_OUT or one_class or any(len(p.y) < 2 for _, p in pairs):
        return []
    return pairs


def _hold_out(table: Table, groups: Any) -> tuple[Table, Table]:
    held_out = np.isin(table.group, groups)
    lost = ~np.isin(table.strata, table.strata[~held_out])  # rows of a class that training would not meet
    held_out &= ~np.isin(table.group, table.group[lost])
    return table.rows(~held_out), table.rows(held_out)


class Batches:
    """Batches (x, y, weight) of nearly equal size, in a new order each time where there is a generator.

    Plain slices of tensors: a DataLoader takes longer to collate a batch than a small network to learn it.
    """

    def __init__(
        self, x: Tensor, y: Tensor, weight: Tensor, size: int, generator: torch.Generator | None = None
    ) -> None:
        self.tensors, self.generator = (x, y, weight), generator
        self.count = math.ceil(len(y) / size)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        tensors: tuple[Tensor, ...] = self.tensors
        if self.generator is not None:
            order = torch.randperm(len(tensors[1]), generator=self.generator).to(tensors[1].device)
            tensors = tuple(t[order] for t in tensors)
        # Nearly equal: a last batch of one row would have no spread to normalise by.
        return zip(*(t.tensor_split(self.count) for t in tensors), strict=True)
