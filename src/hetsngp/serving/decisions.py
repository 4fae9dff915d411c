"""One word about each input: *confident*, *ambiguous* or *unfamiliar*, by thresholds set on held-out data.

An input is **unfamiliar** where its score of unfamiliarity is above nearly all held-out ones; else
**confident** where held-out rows of such confidence were nearly all right; else **ambiguous**. What this
promises, for inputs exchangeable with the held-out rows: at most a given share of them is called unfamiliar,
and those called confident are right about as often as asked for. For other inputs, which are what the first
word is for, nothing is promised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from hetsngp.metrics import has_top_class
from hetsngp.types import Prediction
from hetsngp.validation import check_class_labels, check_multi_hot

LEAST_ROWS = 20
"""Of fewer held-out rows it is not said that 95 % are right."""
SCORES = ("ood_score", "model_uncertainty")
ABSENT = ("confident", "unfamiliar", "accuracy")
"""Thresholds that may be None."""
# Rounding of float32, four times: less model uncertainty in an entropy is none.
ROUNDING = 4 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Thresholds:
    """Where the words change, and what they were set by; made by :func:`set_thresholds`."""

    confident: float | None
    """Least confidence of a confident row; None: no row is."""
    unfamiliar: float | None
    """Largest score of a familiar row; None: the model cannot tell, or there were too few rows, and no row is
    called unfamiliar."""
    right: float
    """Asked for: how often confident rows are right, the least sure among them too."""
    share: float
    """Asked for: the share of familiar rows that may be called unfamiliar."""
    held_out: int
    """Rows they were set on."""
    accuracy: float | None
    """Of the held-out rows that would be called confident; None where none would."""
    coverage: float
    """Share of the held-out rows that would be called confident."""
    score: str = "ood_score"
    """What tells unfamiliar rows: ``ood_score``, or ``model_uncertainty`` where that is a mere entropy."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @staticmethod
    def of_dict(values: Mapping[str, Any]) -> Thresholds:
        """What :meth:`to_dict` gave; whatever else is a ValueError that says what is wrong."""
        names = [field.name for field in fields(Thresholds)]
        if not isinstance(values, Mapping) or set(values) != set(names):
            raise ValueError(f"thresholds are {', '.join(names)}, and nothing else; got {values!r:.200}")
        given = {name: value for name, value in values.items() if value is not None or name not in ABSENT}
        for name in given.keys() & {"confident", "right", "share", "accuracy", "coverage"}:
            if not _is_number(given[name], 0, 1):
                raise ValueError(f"{name} must lie between 0 and 1, got {given[name]!r:.50}")
        if not _is_number(given.get("unfamiliar", 0)):
            raise ValueError(f"unfamiliar must be a finite number or null, got {given['unfamiliar']!r:.50}")
        if not _is_number(given["held_out"], 1) or not isinstance(given["held_out"], int):
            raise ValueError(f"held_out must be a number of rows, got {given['held_out']!r:.50}")
        if given["score"] not in SCORES:
            raise ValueError(f"score must be one of {', '.join(SCORES)}, got {given['score']!r:.50}")
        return Thresholds(**values)


@dataclass(frozen=True)
class Verdict:
    """Of one input."""

    kind: str
    """confident, ambiguous or unfamiliar."""
    label: str
    """The most probable class."""
    others: tuple[str, ...]
    """Of an ambiguous input the next probable class; more than these two are meant where ``text`` says so."""
    text: str
    """For people: "confident", "ambiguous (cat or dog)", "ambiguous (cat, dog or others)", "unfamiliar"."""


def set_thresholds(
    prediction: Prediction, labels: Any, *, right: float = 0.95, unfamiliar: float = 0.05
) -> Thresholds:
    """From predictions of n held-out rows and their ``labels``: (n,), or multi-hot (n, K).

    *Unfamiliar* is a score above the k-th smallest held-out one, k = ⌈(n+1)(1 − unfamiliar)⌉, which of
    exchangeable inputs at most that share exceeds (split conformal prediction); where k > n, with fewer than
    19 rows for 0.05, there is no such threshold. Nor is there one where the model uncertainty is zero on all
    rows, as a deterministic or heteroscedastic network has it: its ``ood_score`` is an entropy, high for
    ambiguous inputs too. Where members without posteriors make the model uncertainty, that is the score, for
    the same reason.

    *Confident* is a confidence of t or more, the least t for which, among the rows that are not unfamiliar,
    those of confidence t … s have the right label at least that often for every s ≥ t (of several labels: the
    most probable class is among them), and of which at least 20 rows reach it. So all rows called confident
    are right that often, and the least sure of them too; were it all of them alone, a model that is right
    often enough would be called confident of everything.
    """
    _check_shares(right, unfamiliar)
    correct, confidence = _correct(prediction, labels), _confidence(prediction)
    name = _score_of(prediction)
    score = None if name is None else _numbers(prediction, name)
    limit = None if score is None else _quantile(score, unfamiliar)
    familiar = torch.ones_like(correct) if score is None or limit is None else score <= limit
    least = _surest(confidence[familiar], correct[familiar], right)
    chosen = familiar & (confidence >= (math.inf if least is None else least))
    count = int(chosen.sum())
    return Thresholds(
        confident=least,
        unfamiliar=limit,
        right=float(right),
        share=float(unfamiliar),
        held_out=len(correct),
        accuracy=int(correct[chosen].sum()) / count if count else None,
        coverage=count / len(correct),
        score=name or SCORES[0],
    )


def verdicts(prediction: Prediction, thresholds: Thresholds, class_names: Sequence[str]) -> list[Verdict]:
    """A verdict for each row.

    >>> from hetsngp.types import Prediction
    >>> probs = torch.tensor([[0.98, 0.01, 0.01], [0.48, 0.50, 0.02], [0.90, 0.05, 0.05]])
    >>> doubt = torch.tensor([0.0, 0.1, 2.0])
    >>> prediction = Prediction(probs, probs, doubt, doubt, doubt, doubt, doubt, doubt, doubt)
    >>> thresholds = Thresholds(0.9, 1.0, right=0.95, share=0.05, held_out=100, accuracy=0.96, coverage=0.7)
    >>> [verdict.text for verdict in verdicts(prediction, thresholds, ("cat", "dog", "owl"))]
    ['confident', 'ambiguous (dog or cat)', 'unfamiliar']
    """
    probs = torch.as_tensor(prediction.probs)
    if probs.shape[-1] != len(class_names):
        raise ValueError(f"{len(class_names)} class_names for {probs.shape[-1]} classes: name each once")
    first, second = most_probable(probs)
    # Of the probability there is: under the sigmoid link it is not one.
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


def never_said(thresholds: Thresholds) -> list[str]:
    """Which words no input gets, and why; nothing where all three are in use.

    >>> never_said(Thresholds(None, 1.0, right=0.95, share=0.05, held_out=10, accuracy=None, coverage=0.0))
    ['no image is called confident: that takes 20 held-out images, 95% of them right']
    """
    found = []
    if thresholds.confident is None:
        right = f"{thresholds.right:.0%}"
        found.append(
            f"no image is called confident: that takes {LEAST_ROWS} held-out images, {right} of them right"
        )
    if thresholds.unfamiliar is None:
        # What _quantile needs, turned round; of a share of 0 there are never enough.
        least = math.ceil(1 / thresholds.share - 1 - 1e-9) if thresholds.share else math.inf
        if thresholds.held_out >= least:
            found.append("no image is called unfamiliar: this model cannot tell")
        elif math.isinf(least):
            found.append("no image is called unfamiliar: none was to be, by a share of 0")
        else:
            found.append(f"no image is called unfamiliar: that takes {least} held-out images")
    return found


def most_probable(probs: Tensor) -> tuple[Tensor, Tensor]:
    """The most and the next probable class of (B, K): (B,), (B,); of equal ones the first."""
    first = probs.argmax(-1)
    return first, probs.scatter(-1, first[:, None], -math.inf).argmax(-1)


# --- pieces ---------------------------------------------------------------------------------------------


def _check_shares(right: Any, unfamiliar: Any) -> None:
    if not _is_number(right, 0, 1) or right == 0:
        raise ValueError(f"right must be a share above 0 and at most 1, e.g. 0.95, got {right!r}")
    if not _is_number(unfamiliar, 0, 1) or unfamiliar == 1:
        raise ValueError(
            f"unfamiliar must be a share of at least 0 and below 1, e.g. 0.05, got {unfamiliar!r}"
        )


def _kinds(prediction: Prediction, thresholds: Thresholds) -> list[str]:
    confidence, score = _confidence(prediction), _numbers(prediction, thresholds.score)
    least = math.inf if thresholds.confident is None else thresholds.confident
    most = math.inf if thresholds.unfamiliar is None else thresholds.unfamiliar
    return [
        "unfamiliar" if strange else "confident" if sure else "ambiguous"
        for strange, sure in zip((score > most).tolist(), (confidence >= least).tolist(), strict=True)
    ]


def _score_of(prediction: Prediction) -> str | None:
    """What tells unfamiliar rows from ambiguous ones; None where nothing does."""
    total, model, score = (
        _numbers(prediction, name) for name in ("total_uncertainty", "model_uncertainty", "ood_score")
    )
    rounding = ROUNDING * float(total.abs().max())
    if float(model.max()) <= rounding:
        return None
    return "model_uncertainty" if float((score - total).abs().max()) <= rounding else "ood_score"


def _quantile(score: Tensor, share: float) -> float | None:
    """The ⌈(n+1)(1 − share)⌉-th smallest of (n,); None where there are too few."""
    k = math.ceil((len(score) + 1) * (1 - share) - 1e-9)  # 10·(1 − 0.7) is rounded to more than 3
    limit = float(score.kthvalue(k).values) if k <= len(score) else math.inf
    return limit if math.isfinite(limit) else None


def _surest(confidence: Tensor, correct: Tensor, right: float) -> float | None:
    """The least t such that, whatever s ≥ t, rows of confidence t … s are right so often; of (n,), (n,).

    This is where isotonic regression of ``correct`` on ``confidence`` reaches ``right``.
    """
    values, group, size = confidence.unique(return_inverse=True, return_counts=True)  # ascending
    hits = torch.bincount(group, correct.double(), minlength=len(values)).cumsum(0)
    rows = size.cumsum(0).double()
    above = hits - right * rows  # of all rows up to s: how many more are right than asked for
    least = above.flip(0).cummin(0).values.flip(0)  # over all s from here on
    before = torch.cat([above.new_zeros(1), above[:-1]])
    left = len(confidence) - rows + size
    # Differences of whole numbers less multiples of ``right``: rounding is far below the tolerance.
    enough = (least - before >= -1e-9) & (left >= LEAST_ROWS)
    return float(values[enough][0]) if bool(enough.any()) else None


def _correct(prediction: Prediction, labels: Any) -> Tensor:
    probs, labels = torch.as_tensor(prediction.probs).cpu(), torch.as_tensor(labels).cpu()
    rows, classes = probs.shape
    if rows == 0:
        raise ValueError("thresholds need held-out rows: predict at least one, and better a thousand")
    if labels.dim() == 2:
        return has_top_class(probs, check_multi_hot(labels, classes, rows))
    return probs.argmax(-1) == check_class_labels(labels, classes, rows)


def _confidence(prediction: Prediction) -> Tensor:
    return _numbers(prediction, "confidence").clamp(max=1)  # an integral may be rounded to more


def _numbers(prediction: Prediction, name: str) -> Tensor:
    """(n,) on the CPU in float64, as thresholds are kept: one rounded up would exceed its own row."""
    found = torch.as_tensor(getattr(prediction, name)).detach().cpu().double()
    if bool(found.isnan().any()):
        row = int(found.isnan().int().argmax())
        raise ValueError(f"{name} is NaN, first in row {row}: look at that input; or did training diverge?")
    return found


def _at(probs: Tensor, column: Tensor) -> Tensor:
    return probs.gather(-1, column[:, None])[:, 0]


def _is_number(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and low <= value <= high
