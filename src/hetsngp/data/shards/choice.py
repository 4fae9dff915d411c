"""Random choices: of the shards to hold out, and of the next sample of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

DRAWS = 64
"""Orders that are tried: with shards of one size the first is as near as any, with unequal ones seldom."""


def part_of(counts: Sequence[int], held_out: int | float, seed: int = 0) -> np.ndarray:
    """(shards,) bool: a random choice of whole shards, near ``held_out`` images or that fraction of them.

    ``counts``: images of each shard. Shards are gone through in a random order, and each one that brings the
    sum nearer is held out; of several such orders the nearest counts. Both parts have images.

    >>> int(part_of([100, 100, 100, 100], 0.25).sum()), part_of([5, 90, 5], 0.9).tolist()
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
    """Each time a random one of the next ``size`` that have not been given yet.

    >>> sorted(shuffled(range(9), 4, np.random.default_rng(0)))
    [0, 1, 2, 3, 4, 5, 6, 7, 8]
    """
    held: list[Any] = []
    for item in stream:
        held.append(item)
        if len(held) >= size:
            yield _draw(held, random)
    while held:
        yield _draw(held, random)


def _nearer(sizes: np.ndarray, order: np.ndarray, wanted: float) -> np.ndarray:
    chosen, held = np.zeros(len(sizes), bool), 0
    for shard in order[:-1]:  # the last one is left
        if abs(held + sizes[shard] - wanted) < abs(held - wanted):
            chosen[shard], held = True, held + int(sizes[shard])
    if not held:
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


def _draw(held: list[Any], random: np.random.Generator) -> Any:
    place = int(random.integers(len(held)))
    held[place], held[-1] = held[-1], held[place]
    return held.pop()
