"""Paired differences between the rows of a table, with intervals of a bootstrap over examples and seeds.

A resample draws the examples of every set with replacement, the same ones for every model, and the seeds, the
same ones for both rows of a difference. All metrics are functions of how often each example was drawn.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hetsngp.paper.definitions import PaperColumn
from hetsngp.paper.sets import DETECTION, AvailableSets, EvaluationSet

RESAMPLES, LEVEL = 1000, 0.95
AT_ONCE = 100
"""Resamples of scores that are sorted out at once: 16 MB for 20,000 examples."""
QUALITY = ("accuracy", "nll", "ece")
Values = np.ndarray
"""(RESAMPLES,)"""


class Interval(NamedTuple):
    """Difference from the row that others are compared with."""

    difference: float
    low: float
    high: float
    seeds: int
    """Number of seeds that both rows have."""

    @property
    def is_clear(self) -> bool:
        """Whether zero is outside the interval."""
        return not self.low <= 0 <= self.high


@dataclass(frozen=True)
class Resamples:
    """How often each example of a set is drawn in each resample."""

    count: int = RESAMPLES
    drawn: dict[tuple[str, int], np.ndarray] = field(default_factory=dict, compare=False)

    def of(self, population: str, size: int) -> np.ndarray:
        """(count, size) float32; the same for the same arguments."""
        if (population, size) not in self.drawn:
            random = np.random.default_rng([zlib.crc32(population.encode()), size])
            counts = random.multinomial(size, np.full(size, 1 / size), self.count)
            self.drawn[population, size] = counts.astype(np.float32)
        return self.drawn[population, size]

    def seed_shares(self, seeds: int) -> np.ndarray:
        """Share of each seed in each resample: (count, seeds)."""
        return np.random.default_rng(seeds).multinomial(seeds, [1 / seeds] * seeds, self.count) / seeds


def population(of: EvaluationSet) -> str:
    """Name of the examples that are drawn: the corrupted images are those of the clean set.

    >>> population(EvaluationSet("cifar100-c", ("fog", 3))), population(EvaluationSet("cifar100"))
    ('cifar100', 'cifar100')
    """
    return of.spec.removesuffix("-c") if of.corruption is not None else of.spec


def resampled_quality(
    confidence: np.ndarray, correct: np.ndarray, nll: np.ndarray, counts: np.ndarray, num_bins: int = 15
) -> np.ndarray:
    """Accuracy, NLL and ECE of each resample: values (n,) and counts (R, n) → (R, 3)."""
    gap = correct.astype(np.float32) - confidence.astype(np.float32)
    bins = np.clip((confidence * num_bins).astype(int), 0, num_bins - 1)
    gaps = np.zeros((len(gap), num_bins), np.float32)
    gaps[np.arange(len(gap)), bins] = gap
    terms = np.column_stack([correct, nll, gaps]).astype(np.float32)
    means = counts @ terms / len(gap)
    return np.column_stack([means[:, :2], np.abs(means[:, 2:]).sum(1)])


def resampled_detection(
    id_scores: np.ndarray, ood_scores: np.ndarray, id_counts: np.ndarray, ood_counts: np.ndarray
) -> np.ndarray:
    """AUROC, and the paper's FPR95, of each resample: counts (R, n) and (R, m) → (R, 2)."""
    scores = np.concatenate([id_scores, ood_scores])
    order = np.argsort(scores, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(scores[order]) > 0])  # of equal scores
    found = []
    for start in range(0, len(id_counts), AT_ONCE):
        rows = slice(start, start + AT_ONCE)
        inside, outside = id_counts[rows].astype(np.float64), ood_counts[rows].astype(np.float64)
        ids = np.concatenate([inside, np.zeros_like(outside)], 1)[:, order]
        oods = np.concatenate([np.zeros_like(inside), outside], 1)[:, order]
        ids, oods = (np.add.reduceat(each, starts, axis=1) for each in (ids, oods))
        up_to, total, others = ids.cumsum(1), ids.sum(1), oods.sum(1)
        auroc = ((up_to - ids / 2) * oods).sum(1) / (total * others)
        threshold = (up_to >= 0.95 * total[:, None] - 1e-6).argmax(1)
        accepted = np.take_along_axis(oods.cumsum(1), threshold[:, None], 1)[:, 0]
        found.append(np.column_stack([auroc, accepted / others]))
    return np.concatenate(found)


def resampled_columns(
    columns: tuple[PaperColumn, ...],
    sets: AvailableSets,
    data: str,
    examples: Callable[[EvaluationSet], Mapping[str, Any] | None],
    resamples: Resamples,
) -> dict[str, Values]:
    """Values of each column in each resample, for one model. ``examples``: values of each example of a set,
    which has been measured; columns with a metric of another kind (precision@1) are left out.
    """

    def values_of(of: EvaluationSet) -> Mapping[str, Any]:
        found = examples(of)
        assert found is not None
        return found

    @functools.cache
    def quality(of: EvaluationSet) -> np.ndarray:
        values = values_of(of)
        drawn = resamples.of(population(of), len(values["nll"]))
        return resampled_quality(values["confidence"], values["correct"], values["nll"], drawn)

    @functools.cache
    def detection(id: EvaluationSet, ood: EvaluationSet) -> np.ndarray:
        scores = [np.asarray(values_of(of)["ood_score"], dtype=np.float64) for of in (id, ood)]
        drawn = [resamples.of(population(of), len(each)) for of, each in zip((id, ood), scores, strict=True)]
        return resampled_detection(*scores, *drawn)

    found: dict[str, Values] = {}
    for column in columns:
        needed = sets.evaluation_sets(column, data)
        if column.metric in DETECTION:
            found[column.name] = detection(*needed)[:, DETECTION.index(column.metric)]
        elif column.metric in QUALITY:
            each = [quality(of)[:, QUALITY.index(column.metric)] for of in needed]
            found[column.name] = np.mean(each, axis=0)
    return found


def paired_interval(
    row: Mapping[int, tuple[float, Values]], base: Mapping[int, tuple[float, Values]], resamples: Resamples
) -> Interval | None:
    """Mean over seeds of row − base, with its interval; both are seed → (value, its resamples).

    None where no seed is in both.
    """
    seeds = sorted(row.keys() & base.keys())
    if not seeds:
        return None
    difference = float(np.mean([row[seed][0] - base[seed][0] for seed in seeds]))
    each = np.stack([row[seed][1] - base[seed][1] for seed in seeds], axis=1)
    drawn = (each * resamples.seed_shares(len(seeds))).sum(1)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(difference, float(low), float(high), len(seeds))
