"""Numbers from predictions: accuracy, calibration, and how well scores detect errors and OOD examples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetsngp import metrics
from hetsngp._moved import renamed_arguments, renamed_attribute
from hetsngp.evaluation.set_predictions import SCORES, SetPredictions

COVERAGES = (0.80, 0.90, 0.95)
# Four times the rounding of float32: a spread below this share of what a score is computed from is none.
ROUNDING = 4 * torch.finfo(torch.float32).eps
# Differences of entropies, which have the rounding of these.
DIFFERENCES = ("model_uncertainty", "function_uncertainty", "member_uncertainty")


@renamed_arguments(rows="examples")
@dataclass(frozen=True)
class Quality:
    """Quality of probabilities against labels."""

    examples: int
    accuracy: float
    """For multi-label data precision@1: how often the most probable class is among the labels."""
    accuracy_standard_error: float
    """Half of Wilson's interval of one standard error: √(a(1−a)/n) for many examples, and not 0 where all
    are correct."""
    confidence: float
    """Mean probability of the most probable class."""
    overconfidence: float
    """``confidence`` − ``accuracy``."""
    overconfidence_standard_error: float
    """√(Σ cᵢ(1−cᵢ))/n: standard deviation of ``overconfidence`` if every confidence cᵢ is calibrated."""
    nll: float
    """Nats; for multi-label data the sum over classes."""
    ece: float
    brier: float | None
    """From 0 to 2; None for multi-label data."""
    rows = renamed_attribute("rows", "examples")


@dataclass(frozen=True)
class Detection:
    """Detection of OOD examples by one score; ``*_out`` and FPR95 with OOD as positive."""

    auroc: float
    auroc_standard_error: float | None
    aupr_out: float
    aupr_in: float
    fpr95: float


@dataclass(frozen=True)
class Selection:
    """Selection of correct predictions by one score."""

    aurc: float
    excess_aurc: float
    accuracy_at_coverage: Mapping[str, float]
    """By the share of examples that are answered, e.g. "0.80"."""


@dataclass(frozen=True)
class Means:
    """Means over corrupted sets, each counted once."""

    sets: int
    accuracy: float
    nll: float
    ece: float
    brier: float | None
    scores: Mapping[str, float]
    """Mean of each uncertainty score; of probabilities alone, of those that follow from them."""


@dataclass(frozen=True)
class CorruptedSet:
    """One corruption at one severity."""

    corruption: str
    severity: int
    quality: Quality
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Corrupted:
    """All corrupted sets, and means over those that were given."""

    sets: tuple[CorruptedSet, ...]
    by_corruption: Mapping[str, Means]
    by_severity: Mapping[int, Means]
    mean: Means


def quality(of: SetPredictions, num_bins: int) -> Quality:
    """Quality of labelled predictions."""
    assert of.correct is not None
    assert of.nll is not None
    numbers = metrics.quality(of.confidence, of.correct, of.nll, num_bins)
    accuracy, confidence = numbers["accuracy"], float(of.confidence.mean())
    spread = float((of.confidence * (1 - of.confidence)).clamp_min(0).sum())  # 1 may be rounded up
    return Quality(
        examples=len(of),
        accuracy=accuracy,
        accuracy_standard_error=wilson(accuracy, len(of))[1],
        confidence=confidence,
        overconfidence=confidence - accuracy,
        overconfidence_standard_error=math.sqrt(spread) / len(of),
        nll=numbers["nll"],
        ece=numbers["ece"],
        brier=None if of.brier is None else float(of.brier.mean()),
    )


def wilson(share: Any, count: Any) -> tuple[Any, Any]:
    """Centre and half width of Wilson's interval of one standard error, for numbers or arrays."""
    middle = (share + 0.5 / count) / (1 + 1 / count)
    return middle, (share * (1 - share) / count + 0.25 / count**2) ** 0.5 / (1 + 1 / count)


def offered(sets: Iterable[SetPredictions]) -> tuple[str, ...]:
    """Names of the scores that are not the same for all examples of all sets.

    For a model without members the function uncertainty is left out: it is its model uncertainty.
    """
    sets = tuple(sets)
    scores = {name: torch.cat([each.scores[name] for each in sets]) for name in SCORES}
    reach = {name: float(score.abs().max()) for name, score in scores.items()}
    made_of = max(reach["total_uncertainty"], reach["model_uncertainty"])
    rounding = {name: ROUNDING * (made_of if name in DIFFERENCES else reach[name]) for name in SCORES}
    names = [name for name, score in scores.items() if float(score.max() - score.min()) > rounding[name]]
    if reach["member_uncertainty"] <= rounding["member_uncertainty"]:
        names = [name for name in names if name != "function_uncertainty"]
    return tuple(names)


def detection(id_scores: Tensor, ood_scores: Tensor) -> Detection:
    """Detection of OOD examples by scores (n,) and (m,)."""
    return Detection(
        auroc=metrics.auroc(id_scores, ood_scores),
        auroc_standard_error=metrics.auroc_standard_error(id_scores, ood_scores),
        aupr_out=metrics.aupr(id_scores, ood_scores),
        aupr_in=metrics.aupr(-ood_scores, -id_scores),
        fpr95=metrics.fpr95(id_scores, ood_scores),
    )


def selection(uncertainty: Tensor, correct: Tensor) -> Selection:
    """Selection by scores (n,), given whether predictions are correct (n,)."""
    risk = metrics.risks(uncertainty, correct)
    best = metrics.aurc(~correct, correct)
    ends = {f"{share:.2f}": math.ceil(share * len(risk) - 1e-9) for share in COVERAGES}
    return Selection(
        aurc=float(risk.mean()),
        excess_aurc=float(risk.mean()) - best,
        accuracy_at_coverage={share: 1 - float(risk[end - 1]) for share, end in ends.items()},
    )


def mean_scores(of: SetPredictions) -> dict[str, float]:
    """Mean of every uncertainty score."""
    return {name: float(score.mean()) for name, score in of.scores.items()}


def corrupted_means(sets: Sequence[CorruptedSet]) -> Corrupted:
    """Means by corruption in the given order, by increasing severity, and over all."""
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
