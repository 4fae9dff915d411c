"""Verdicts on predictions: *confident*, *ambiguous* or *unfamiliar*, by thresholds set on held-out data.

An input is **unfamiliar** where its OOD score is above nearly all held-out scores; else **confident** where
held-out examples of that confidence were nearly all classified correctly; else **ambiguous**. For inputs
exchangeable with the held-out examples, at most a given share is called unfamiliar, and those called
confident are correct about as often as required. For out-of-distribution inputs nothing is guaranteed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from hetsngp._moved import rename_keys, renamed_arguments, renamed_attribute
from hetsngp.metrics import has_top_class
from hetsngp.types import Prediction
from hetsngp.validation import check_class_labels, check_multi_hot, check_plain

MIN_EXAMPLES = 20
"""Held-out examples needed to claim that 95 % are correct."""
SCORES = ("ood_score", "model_uncertainty")
OPTIONAL = ("confident", "unfamiliar", "accuracy")
"""Fields of :class:`Thresholds` that may be None."""
JSON_KEYS = {"correct": "right"}
"""Fields whose keys in ``serving.json`` and ``summary.json`` are those of release 0.1."""
LARGEST = float(torch.finfo(torch.float32).max)
# Model uncertainty below four roundings of float32, relative to the entropy, counts as zero.
ROUNDING = 4 * torch.finfo(torch.float32).eps


@renamed_arguments(right="correct")
@dataclass(frozen=True)
class Thresholds:
    """Thresholds of the verdicts and how they were set; made by :func:`set_thresholds`."""

    confident: float | None
    """Least confidence of a confident example; None: no example is called confident."""
    unfamiliar: float | None
    """Largest score of a familiar example; None, where the model has no such score or there were too few
    held-out examples: no example is called unfamiliar."""
    correct: float
    """Required accuracy of confident examples, also of the least confident among them."""
    share: float
    """Required bound on the share of in-distribution examples that are called unfamiliar."""
    held_out: int
    """Number of held-out examples."""
    accuracy: float | None
    """Accuracy on the held-out examples called confident; None where there are none."""
    coverage: float
    """Share of the held-out examples that are called confident."""
    score: str = "ood_score"
    """Score compared with ``unfamiliar``: ``ood_score``, or ``model_uncertainty`` of members without
    posteriors, since the entropy is part of their ``ood_score``."""
    right = renamed_attribute("right", "correct")

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        return rename_keys(asdict(self), JSON_KEYS)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Thresholds:
        """Read the values of :meth:`to_dict`; anything else raises a ValueError."""
        names = [JSON_KEYS.get(field.name, field.name) for field in fields(Thresholds)]
        if not isinstance(values, Mapping) or set(values) != set(names):
            raise ValueError(f"thresholds are {', '.join(names)} and nothing else, got {values!r:.200}")
        given = {name: value for name, value in values.items() if value is not None or name not in OPTIONAL}
        for name in given.keys() & {"confident", "right", "share", "accuracy", "coverage"}:
            if not _is_number(given[name], 0, 1):
                raise ValueError(f"{name} must lie between 0 and 1, got {given[name]!r:.50}")
        if not _is_number(given.get("unfamiliar", 0), -LARGEST, LARGEST):
            raise ValueError(f"unfamiliar must be a finite number or null, got {given['unfamiliar']!r:.50}")
        if not _is_number(given["held_out"], 1, LARGEST) or not isinstance(given["held_out"], int):
            raise ValueError(f"held_out must be a number of examples, got {given['held_out']!r:.50}")
        if not isinstance(given["score"], str) or given["score"] not in SCORES:
            raise ValueError(f"score must be one of {', '.join(SCORES)}, got {given['score']!r:.50}")
        return Thresholds(**rename_keys(values, {key: name for name, key in JSON_KEYS.items()}))

    @staticmethod
    def of_dict(values: Mapping[str, Any]) -> Thresholds:
        """Name of :meth:`from_dict` in release 0.1."""
        warnings.warn("Thresholds.of_dict is now called from_dict", DeprecationWarning, stacklevel=2)
        return Thresholds.from_dict(values)


@dataclass(frozen=True)
class Verdict:
    """Verdict on one input."""

    kind: str
    """confident, ambiguous or unfamiliar."""
    label: str
    """Most probable class."""
    others: tuple[str, ...]
    """Second most probable class of an ambiguous input, else empty."""
    text: str
    """For readers: "confident", "ambiguous (cat or dog)", "ambiguous (cat, dog or others)", "unfamiliar"."""


@renamed_arguments(right="correct")
def set_thresholds(
    prediction: Prediction, labels: Any, *, correct: float = 0.95, unfamiliar: float = 0.05
) -> Thresholds:
    """Set the thresholds by predictions of n held-out examples and ``labels``: (n,), or multi-hot (n, K).

    *Unfamiliar* is a score above the k-th smallest held-out score, k = ⌈(n+1)(1 − unfamiliar)⌉, which at most
    that share of exchangeable inputs exceeds (split conformal prediction). There is no such threshold where
    k > n (fewer than 19 examples for 0.05), nor where the model uncertainty of all examples is zero, as for a
    deterministic or heteroscedastic network: the entropy, which is part of its ``ood_score``, is high for
    ambiguous inputs too. For the same reason the score is the model uncertainty where that is the
    disagreement of ensemble members without posteriors, and nothing else.

    *Confident* is a confidence of at least t, the smallest t such that, among the examples that are not
    unfamiliar, for every s ≥ t at least the share ``correct`` with confidence in [t, s] is classified
    correctly (multi-label: the most probable class is among the labels), and at least 20 examples have
    confidence t or more. The least confident of them are then correct as often, too. A condition on all
    confident examples together would call every prediction of an accurate model confident.
    """
    _check_shares(correct, unfamiliar)
    _check_prediction(prediction)
    hits, confidence = _hits(prediction, labels), _confidence(prediction)
    name = _score_name(prediction)
    score = None if name is None else _values(prediction, name)
    limit = None if score is None else _conformal_quantile(score, unfamiliar)
    familiar = torch.ones_like(hits) if score is None or limit is None else score <= limit
    least = _confidence_threshold(confidence[familiar], hits[familiar], correct)
    chosen = familiar & (confidence >= (math.inf if least is None else least))
    count = int(chosen.sum())
    return Thresholds(
        confident=least,
        unfamiliar=limit,
        correct=float(correct),
        share=float(unfamiliar),
        held_out=len(hits),
        accuracy=int(hits[chosen].sum()) / count if count else None,
        coverage=count / len(hits),
        score=name or SCORES[0],
    )


def verdicts(prediction: Prediction, thresholds: Thresholds, class_names: Sequence[str]) -> list[Verdict]:
    """Verdict on each example.

    >>> from hetsngp.types import Prediction
    >>> probs = torch.tensor([[0.98, 0.01, 0.01], [0.48, 0.50, 0.02], [0.90, 0.05, 0.05]])
    >>> scores = torch.tensor([0.0, 0.1, 2.0])
    >>> prediction = Prediction(probs, probs, *[scores] * 7)
    >>> thresholds = Thresholds(0.9, 1.0, correct=0.95, share=0.05, held_out=100, accuracy=0.96, coverage=0.7)
    >>> [verdict.text for verdict in verdicts(prediction, thresholds, ("cat", "dog", "owl"))]
    ['confident', 'ambiguous (dog or cat)', 'unfamiliar']
    """
    _check_prediction(prediction)
    if not isinstance(thresholds, Thresholds):
        raise TypeError(
            f"thresholds come from set_thresholds(prediction, labels), got {type(thresholds).__name__}"
        )
    if not isinstance(class_names, Sequence):
        raise TypeError(f"class_names must be a list of names, got {type(class_names).__name__}")
    probs = torch.as_tensor(prediction.probs)
    if probs.shape[-1] != len(class_names):
        raise ValueError(f"{len(class_names)} class_names for {probs.shape[-1]} classes: name each once")
    first, second = most_probable(probs)
    # Half of the sum over classes, which is not one under the sigmoid link.
    scarce = (_at(probs, first) + _at(probs, second) < probs.sum(-1) / 2).tolist()
    kinds = _kinds(prediction, thresholds)
    found = []
    for kind, one, two, more in zip(kinds, first.tolist(), second.tolist(), scarce, strict=True):
        label, other = class_names[one], class_names[two]
        if kind == "ambiguous":
            text = f"ambiguous ({label}, {other} or others)" if more else f"ambiguous ({label} or {other})"
            found.append(Verdict(kind, label, (other,), text))
        else:
            found.append(Verdict(kind, label, (), kind))
    return found


def unused_verdicts(thresholds: Thresholds) -> list[str]:
    """Messages on the verdicts that no input can get, with the reason; empty where all three are in use.

    >>> settings = {"correct": 0.95, "share": 0.05, "held_out": 10, "accuracy": None, "coverage": 0.0}
    >>> unused_verdicts(Thresholds(None, 1.0, **settings))
    ['no input is called confident: this needs 20 held-out examples, 95% of them classified correctly']
    """
    found = []
    if thresholds.confident is None:
        needed = f"{MIN_EXAMPLES} held-out examples, {thresholds.correct:.0%} of them classified correctly"
        found.append(f"no input is called confident: this needs {needed}")
    if thresholds.unfamiliar is None:
        # The least n for which _conformal_quantile has a threshold; none for a share of 0.
        least = math.ceil(1 / thresholds.share - 1 - 1e-9) if thresholds.share else math.inf
        if thresholds.held_out >= least:
            found.append("no input is called unfamiliar: this model has no model uncertainty to tell by")
        elif math.isinf(least):
            found.append("no input is called unfamiliar: the share of unfamiliar inputs was set to 0")
        else:
            found.append(f"no input is called unfamiliar: this needs {least} held-out examples")
    return found


def most_probable(probs: Tensor) -> tuple[Tensor, Tensor]:
    """Most and second most probable class of (B, K): (B,), (B,); the first one of ties."""
    first = probs.argmax(-1)
    return first, probs.scatter(-1, first[:, None], -math.inf).argmax(-1)


# --- thresholds and scores ------------------------------------------------------------------------------


def _check_prediction(prediction: Any) -> None:
    if not isinstance(prediction, Prediction):
        raise TypeError(
            f"verdicts are on a hetsngp.Prediction, model.predict(x), got {type(prediction).__name__}"
        )


def _check_shares(correct: Any, unfamiliar: Any) -> None:
    if not _is_number(correct, 0, 1) or correct == 0:
        raise ValueError(f"correct must be a share above 0 and at most 1, e.g. 0.95, got {correct!r}")
    if not _is_number(unfamiliar, 0, 1) or unfamiliar == 1:
        raise ValueError(
            f"unfamiliar must be a share of at least 0 and below 1, e.g. 0.05, got {unfamiliar!r}"
        )


def _kinds(prediction: Prediction, thresholds: Thresholds) -> list[str]:
    confidence, score = _confidence(prediction), _values(prediction, thresholds.score)
    least = math.inf if thresholds.confident is None else thresholds.confident
    most = math.inf if thresholds.unfamiliar is None else thresholds.unfamiliar
    return [
        "unfamiliar" if is_unfamiliar else "confident" if is_confident else "ambiguous"
        for is_unfamiliar, is_confident in zip(
            (score > most).tolist(), (confidence >= least).tolist(), strict=True
        )
    ]


def _score_name(prediction: Prediction) -> str | None:
    """Score that separates unfamiliar examples from ambiguous ones; None where the model has none."""
    total, model, members = (
        _values(prediction, name) for name in ("total_uncertainty", "model_uncertainty", "member_uncertainty")
    )
    rounding = ROUNDING * float(total.abs().max())
    if float(model.max()) <= rounding:
        return None
    return "model_uncertainty" if float((model - members).abs().max()) <= rounding else "ood_score"


def _conformal_quantile(score: Tensor, share: float) -> float | None:
    """The ⌈(n+1)(1 − share)⌉-th smallest of (n,); None where there are too few."""
    k = math.ceil((len(score) + 1) * (1 - share) - 1e-9)  # 10·(1 − 0.7) is rounded to more than 3
    limit = float(score.kthvalue(k).values) if k <= len(score) else math.inf
    return limit if math.isfinite(limit) else None


def _confidence_threshold(confidence: Tensor, hits: Tensor, correct: float) -> float | None:
    """Smallest t such that the share of hits in [t, s] is at least ``correct`` for every s ≥ t; (n,), (n,).

    This is where isotonic regression of ``hits`` on ``confidence`` reaches ``correct``.
    """
    values, group, size = confidence.unique(return_inverse=True, return_counts=True)  # ascending
    hits_up_to = torch.bincount(group, hits.double(), minlength=len(values)).cumsum(0)
    count_up_to = size.cumsum(0).double()
    excess = hits_up_to - correct * count_up_to  # hits beyond the required number, up to s
    least = excess.flip(0).cummin(0).values.flip(0)  # over all s from here on
    before = torch.cat([excess.new_zeros(1), excess[:-1]])
    remaining = len(confidence) - count_up_to + size
    # Differences of integers less multiples of ``correct``: rounding is far below the tolerance.
    enough = (least - before >= -1e-9) & (remaining >= MIN_EXAMPLES)
    return float(values[enough][0]) if bool(enough.any()) else None


def _hits(prediction: Prediction, labels: Any) -> Tensor:
    """Whether each prediction is correct: (n,)."""
    try:
        labels = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"labels must be class numbers, or multi-hot labels: {error}") from error
    check_plain("labels", labels)
    probs, labels = torch.as_tensor(prediction.probs).cpu(), labels.cpu()
    examples, classes = probs.shape
    if examples == 0:
        raise ValueError("thresholds need held-out examples: give at least one, better a thousand or more")
    if labels.dim() == 2:
        return has_top_class(probs, check_multi_hot(labels, classes, examples))
    return probs.argmax(-1) == check_class_labels(labels, classes, examples)


def _confidence(prediction: Prediction) -> Tensor:
    return _values(prediction, "confidence").clamp(max=1)  # an integral may be rounded to more


def _values(prediction: Prediction, name: str) -> Tensor:
    """(n,) on the CPU in float64, like the thresholds: a rounded one could exceed the score it was set by."""
    found = torch.as_tensor(getattr(prediction, name)).detach().cpu().double()
    if bool(found.isnan().any()):
        first = int(found.isnan().int().argmax())
        raise ValueError(
            f"{name} is NaN, first for example {first}: check that input, or whether training diverged"
        )
    return found


def _at(probs: Tensor, column: Tensor) -> Tensor:
    return probs.gather(-1, column[:, None])[:, 0]


def _is_number(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return low <= value <= high and abs(value) < math.inf  # isfinite fails for whole numbers beyond a float
