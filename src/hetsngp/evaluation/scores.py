"""Numbers out of rows: how right, how calibrated, how well errors and outside rows are told from the rest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetsngp import metrics
from hetsngp.evaluation.predictions import SCORES, SetPredictions

COVERAGES = (0.80, 0.90, 0.95)
# Rounding of float32, four times: less spread than this in parts of what a score was computed from is none.
ROUNDING = 4 * torch.finfo(torch.float32).eps
# Of entropies, so that they have the rounding of these.
DIFFERENCES = ("model_uncertainty", "function_uncertainty", "member_uncertainty")


@dataclass(frozen=True)
class Quality:
    """Of probabilities against labels."""

    rows: int
    accuracy: float
    """Of several labels a row: precision@1, how often the most probable class is among them."""
    accuracy_standard_error: float
    """Half of Wilson's interval of one standard error, for other rows of the same kind: √(a(1−a)/n) of many
    rows, and not 0 where all are right."""
    confidence: float
    """Mean probability of the most probable class."""
    overconfidence: float
    """``confidence`` − ``accuracy``."""
    overconfidence_standard_error: float
    """√(Σ cᵢ(1−cᵢ))/n: what chance makes of ``overconfidence`` if every confidence cᵢ is right."""
    nll: float
    """Nats; of several labels a row the sum over classes."""
    ece: float
    brier: float | None
    """From 0 to 2; None of several labels a row."""


@dataclass(frozen=True)
class Detection:
    """Of outside rows by one score; ``*_out`` and FPR95 with outside as positive."""

    auroc: float
    auroc_standard_error: float | None
    aupr_out: float
    aupr_in: float
    fpr95: float


@dataclass(frozen=True)
class Selection:
    """Of right answers by one score."""

    aurc: float
    excess_aurc: float
    accuracy_at_coverage: Mapping[str, float]
    """By the share of rows that are answered, e.g. "0.80"."""


@dataclass(frozen=True)
class Means:
    """Over corrupted sets, each counted once."""

    sets: int
    accuracy: float
    nll: float
    ece: float
    brier: float | None
    scores: Mapping[str, float]
    """Mean of each measure of doubt; of those that follow from the probabilities, where no more was asked."""


@dataclass(frozen=True)
class CorruptedSet:
    """One corruption at one severity."""

    corruption: str
    severity: int
    quality: Quality
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Corrupted:
    """All of them, and means over those that were given."""

    sets: tuple[CorruptedSet, ...]
    by_corruption: Mapping[str, Means]
    by_severity: Mapping[int, Means]
    mean: Means


def quality(rows: SetPredictions, num_bins: int) -> Quality:
    """Of labelled rows."""
    assert rows.correct is not None
    assert rows.nll is not None
    numbers = metrics.quality(rows.confidence, rows.correct, rows.nll, num_bins)
    share, said = numbers["accuracy"], float(rows.confidence.mean())
    spread = float((rows.confidence * (1 - rows.confidence)).clamp_min(0).sum())  # 1 may be rounded up
    return Quality(
        rows=len(rows),
        accuracy=share,
        accuracy_standard_error=wilson(share, len(rows))[1],
        confidence=said,
        overconfidence=said - share,
        overconfidence_standard_error=math.sqrt(spread) / len(rows),
        nll=numbers["nll"],
        ece=numbers["ece"],
        brier=None if rows.brier is None else float(rows.brier.mean()),
    )


def wilson(share: Any, count: Any) -> tuple[Any, Any]:
    """Middle and half width of Wilson's interval of one standard error, of numbers or arrays."""
    middle = (share + 0.5 / count) / (1 + 1 / count)
    return middle, (share * (1 - share) / count + 0.25 / count**2) ** 0.5 / (1 + 1 / count)


def offered(sets: Iterable[SetPredictions]) -> tuple[str, ...]:
    """The scores that are not the same for all rows of all sets; and of a model without members not the
    function uncertainty, which is its model uncertainty.
    """
    sets = tuple(sets)
    scores = {name: torch.cat([rows.scores[name] for rows in sets]) for name in SCORES}
    reach = {name: float(score.abs().max()) for name, score in scores.items()}
    made_of = max(reach["total_uncertainty"], reach["model_uncertainty"])
    rounding = {name: ROUNDING * (made_of if name in DIFFERENCES else reach[name]) for name in SCORES}
    names = [name for name, score in scores.items() if float(score.max() - score.min()) > rounding[name]]
    if reach["member_uncertainty"] <= rounding["member_uncertainty"]:
        names = [name for name in names if name != "function_uncertainty"]
    return tuple(names)


def detection(inside: Tensor, outside: Tensor) -> Detection:
    """Scores (n,) and (m,)."""
    return Detection(
        auroc=metrics.auroc(inside, outside),
        auroc_standard_error=metrics.auroc_standard_error(inside, outside),
        aupr_out=metrics.aupr(inside, outside),
        aupr_in=metrics.aupr(-outside, -inside),
        fpr95=metrics.fpr95(inside, outside),
    )


def selection(doubt: Tensor, correct: Tensor) -> Selection:
    """Scores (n,) and whether the answer was right (n,)."""
    risk = metrics.risks(doubt, correct)
    best = metrics.aurc(~correct, correct)
    ends = {f"{share:.2f}": math.ceil(share * len(risk) - 1e-9) for share in COVERAGES}
    return Selection(
        aurc=float(risk.mean()),
        excess_aurc=float(risk.mean()) - best,
        accuracy_at_coverage={share: 1 - float(risk[end - 1]) for share, end in ends.items()},
    )


def mean_scores(rows: SetPredictions) -> dict[str, float]:
    """Of every measure of doubt."""
    return {name: float(score.mean()) for name, score in rows.scores.items()}


def corrupted_means(sets: Sequence[CorruptedSet]) -> Corrupted:
    """By corruption in the order they came, by severity upwards, and over all."""
    corruptions = dict.fromkeys(each.corruption for each in sets)
    severities = sorted({each.severity for each in sets})
    return Corrupted(
        sets=tuple(sets),
        by_corruption={c: _means([each for each in sets if each.corruption == c]) for c in corruptions},
        by_severity={s: _means([each for each in sets if each.severity == s]) for s in severities},
        mean=_means(sets),
    )


def _means(sets: Sequence[CorruptedSet]) -> Means:
    def mean(values: Sequence[Any]) -> Any:
        return None if None in values else math.fsum(values) / len(values)

    numbers: dict[str, Any] = {
        name: mean([getattr(each.quality, name) for each in sets])
        for name in ("accuracy", "nll", "ece", "brier")
    }
    scores = {name: mean([each.scores[name] for each in sets]) for name in sets[0].scores}
    return Means(sets=len(sets), scores=scores, **numbers)
