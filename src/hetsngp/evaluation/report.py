"""Report: the result of ``evaluate`` as a value, as JSON, as text, and as a folder with figures."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hetsngp._moved import renamed_arguments, renamed_attribute
from hetsngp.evaluation import report_text
from hetsngp.evaluation.report_plots import draw_report
from hetsngp.evaluation.scores import Corrupted, Detection, Quality, Selection
from hetsngp.evaluation.set_predictions import SetPredictions
from hetsngp.files import write_atomically, write_json
from hetsngp.metrics import Reliability


@renamed_arguments(rows="examples")
@dataclass(frozen=True)
class OODSet:
    """Result on an out-of-distribution set."""

    examples: int
    confidence: float
    """Mean probability of the most probable class."""
    mean_scores: Mapping[str, float]
    scores: Mapping[str, Detection]
    """How well each score separates it from ``id``."""
    rows = renamed_attribute("rows", "examples")


@renamed_arguments(several_labels="multi_label", rows="predictions")
@dataclass(frozen=True)
class Report:
    """Result of :func:`hetsngp.evaluate`; ``print(report)`` for people, ``save`` for a folder.

    docs/evaluation.md defines each number and says whether higher is better.
    """

    title: str
    num_classes: int
    multi_label: bool
    """Whether labels were multi-hot: ``id.accuracy`` is precision@1 then."""
    scores: tuple[str, ...]
    """Uncertainty scores of the model: those that are not the same for every example of ``id`` and
    ``ood``."""
    id: Quality
    mean_scores: Mapping[str, float]
    """Mean of every score over ``id``."""
    reliability: Reliability
    selection: Mapping[str, Selection]
    """Selective prediction on ``id``, by score; by ``one_minus_confidence`` in any case."""
    ood: Mapping[str, OODSet] = field(default_factory=dict)
    corrupted: Corrupted | None = None
    seconds: float = 0.0
    about: Mapping[str, str] = field(default_factory=dict)
    """Data sets, recipe and versions, by name."""
    predictions: Mapping[str, SetPredictions] = field(default_factory=dict, repr=False, compare=False)
    """Predictions of every example, of "id" and of each "ood NAME"; not in the JSON."""

    several_labels = renamed_attribute("several_labels", "multi_label")
    rows = renamed_attribute("rows", "predictions")

    def summary(self) -> list[str]:
        """Sentences on accuracy, calibration, OOD detection and corruption."""
        return report_text.summary(self)

    def to_dict(self) -> dict[str, Any]:
        """Values for strict JSON: no NaN, None where a number is undefined."""
        bins = self.reliability
        edges = [i / len(bins.count) for i in range(len(bins.count) + 1)]
        columns = (
            edges[:-1],
            edges[1:],
            bins.count.tolist(),
            bins.confidence.tolist(),
            bins.accuracy.tolist(),
        )
        names = ("from", "to", "count", "confidence", "accuracy")
        return _plain(
            {
                "title": self.title,
                "about": self.about,
                "summary": self.summary(),
                "num_classes": self.num_classes,
                "labels": "multi-hot" if self.multi_label else "class numbers",
                "scores": self.scores,
                "id": {**asdict(self.id), "mean_scores": self.mean_scores},
                "reliability": [dict(zip(names, bin, strict=True)) for bin in zip(*columns, strict=True)],
                "selection": {name: asdict(each) for name, each in self.selection.items()},
                "ood": {name: asdict(each) for name, each in self.ood.items()},
                "corrupted": None if self.corrupted is None else asdict(self.corrupted),
                "seconds": self.seconds,
            }
        )

    def markdown(self, pictures: Mapping[str, str] | None = None) -> str:
        """Summary and tables, with links to ``pictures`` (name → file)."""
        return report_text.markdown(self, pictures or {})

    def __str__(self) -> str:
        return report_text.plain_text(self)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write report.json, report.md and the figures into ``folder``; remove figures of an earlier report
        that this one does not have.

        Returns the path of report.md. Figures need matplotlib: ``pip install 'hetsngp[eval]'``.
        """
        folder = Path(folder)
        pictures = draw_report(self, folder)
        text = self.markdown({name: path.name for name, path in pictures.items()})
        write_atomically(folder / "report.md", lambda file: file.write(text.encode()))
        write_json(folder / "report.json", self.to_dict())
        return folder / "report.md"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
