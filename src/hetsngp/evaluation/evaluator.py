"""evaluate(): one pass over each data set, a report of what the model knows and of what it knows not to."""

from __future__ import annotations

import hashlib
import json
import operator
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetsngp import metrics
from hetsngp.evaluation.figures import new_figure
from hetsngp.evaluation.kept_parts import Parts, model_fingerprint
from hetsngp.evaluation.predictions import EvaluationBatches, SetPredictions, check_loader, predict_rows
from hetsngp.evaluation.predictors import Predictor
from hetsngp.evaluation.report import OutsideSet, Report
from hetsngp.evaluation.scores import (
    CorruptedSet,
    Quality,
    corrupted_means,
    detection,
    mean_scores,
    offered,
    quality,
    selection,
)
from hetsngp.fitting.progress import RowProgress, at_a_terminal
from hetsngp.functional.sampling import draw_seed
from hetsngp.metrics.probabilities import torchmetrics
from hetsngp.models.loaders import num_batches
from hetsngp.validation import check_positive


def evaluate(
    model: Any,
    id: Iterable[Any],
    ood: Mapping[str, Iterable[Any]] | None = None,
    corrupted: Mapping[tuple[str, int], Iterable[Any]] | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    title: str | None = None,
    about: Mapping[str, str] | None = None,
    num_samples: int | None = None,
    generator: torch.Generator | None = None,
    num_bins: int = 15,
    corrupted_doubt: bool = True,
    fresh: bool = False,
    show: bool | None = None,
) -> Report:
    """How accurate and how calibrated a model is, and how well it knows what it does not know.

    Batches go to the model's device one by one, and of each row only a few numbers are kept, so that neither
    rows nor classes fill the memory. docs/evaluation.md defines every number.

    Args:
        model: Anything whose ``predict(x)`` returns a :class:`hetsngp.Prediction`: a model, an ensemble,
            what :func:`hetsngp.evaluation.restrict` makes; or our scikit-learn estimator.
        id: Labelled data like those of training, and none of them: yields (x, y), y class numbers (B,), or
            multi-hot (B, K) for a model with the sigmoid link.
        ood: Data unlike those of training, by name; loaders yield x, or (x, y) whose y is not looked at.
        corrupted: ``id`` with damage, by (corruption, severity). Each loader is asked for when its turn comes
            and let go before the next: a mapping that makes them on demand never holds two. If it has a
            method ``fingerprint(key) -> str | None``, the same text for the same data and another for others,
            a set that was measured before is not even made. Without it, or where it says None, the set is
            made and looked at.
        out: A folder for the report and its pictures. Finished parts are kept in ``out/parts`` and not
            measured again as long as model, settings, data and code are the same, where they can be compared
            (:mod:`hetsngp.evaluation.kept_parts`).
        title: For headings; None: the model's class.
        about: What was measured on what, by name, to be said in the report: {"data": "cifar100"}.
        num_samples: Handed on to ``predict``.
        generator: For random integration points; None: fixed ones, and the same numbers every time.
        num_bins: Of the calibration error and the reliability diagram.
        corrupted_doubt: False: corrupted sets are measured by ``predict_probs`` alone, at a fraction of the
            cost where there is a GP: without the measures of doubt that do not follow from the probabilities.
            A model that has no ``predict_probs`` is measured as ever.
        fresh: Measure all parts again, whatever ``out`` holds.
        show: Show how far it is; None: at a terminal.

    >>> import hetsngp, torch
    >>> from hetsngp.nn.backbones import ResidualMLP
    >>> g = torch.Generator().manual_seed(0)
    >>> x = torch.randn(200, 2, generator=g)
    >>> model = hetsngp.build("sngp", ResidualMLP(2, width=16, depth=1, generator=g), 2, generator=g)
    >>> _ = hetsngp.fit_posterior(model, [(x, (x[:, 0] > 0).long())])
    >>> report = evaluate(model, [(x, (x[:, 0] > 0).long())], ood={"far": [x + 30]})
    >>> report.ood["far"].scores["model_uncertainty"].auroc > 0.9
    True
    """
    predictor = Predictor(model, num_samples)
    _check_arguments(id, ood, corrupted, num_samples, num_bins)
    torchmetrics()  # or an error, before the long part
    if out is not None:
        _prepare(Path(out))
    seed = None if generator is None else draw_seed(generator)
    folder = None if out is None else Path(out) / "parts"
    settings = json.dumps({"num_samples": num_samples, "seed": seed})
    known = None if folder is None else model_fingerprint(model)
    outside, damaged = ood or {}, corrupted or {}
    start = time.perf_counter()
    progress = _Progress(1 + len(outside) + len(damaged), at_a_terminal() if show is None else show)
    with progress:
        run = _Run(predictor, Parts(folder, known, settings), seed, num_bins, fresh, progress)
        doubt = corrupted_doubt or not predictor.has_probs
        inside = run.rows(id, "id", labelled=True)
        others = {name: run.rows(outside[name], f"ood[{name!r}]", labelled=False) for name in outside}
        sets = [run.corrupted(damaged, key, doubt) for key in damaged]
    assert inside.correct is not None
    names = offered([inside, *others.values()])
    order = dict.fromkeys([*names, "one_minus_confidence"])
    report = Report(
        title=title or type(model).__name__,
        about=dict(about or {}),
        num_classes=inside.num_classes,
        several_labels=inside.brier is None,
        scores=names,
        id=quality(inside, num_bins),
        mean_scores=mean_scores(inside),
        reliability=metrics.reliability_bins(inside.confidence, inside.correct, num_bins),
        selection={name: selection(inside.scores[name], inside.correct) for name in order},
        ood={name: _outside(inside, rows, names) for name, rows in others.items()},
        corrupted=corrupted_means(sets) if sets else None,
        seconds=time.perf_counter() - start,
        rows={"id": inside, **{f"ood {name}": rows for name, rows in others.items()}},
    )
    if out is not None:
        report.save(out)
    return report


def _outside(inside: SetPredictions, rows: SetPredictions, names: Iterable[str]) -> OutsideSet:
    found = {name: detection(inside.scores[name], rows.scores[name]) for name in names}
    return OutsideSet(len(rows), float(rows.confidence.mean()), mean_scores(rows), found)


@dataclass(frozen=True)
class _Run:
    """One evaluation on its way from part to part."""

    predictor: Predictor
    parts: Parts
    seed: int | None
    num_bins: int
    fresh: bool
    progress: _Progress

    def rows(self, loader: Any, name: str, *, labelled: bool) -> SetPredictions:
        """Those kept of an earlier call, or measured and kept."""
        batches = EvaluationBatches(loader, name)
        fingerprint = self.parts.fingerprint(name, batches)
        kept = None if self.fresh else self.parts.read(name, fingerprint)
        if kept is not None:
            rows = SetPredictions.of_arrays(kept)
            self.progress.skip(name, len(rows))
            return rows
        rows = self._predict(batches, labelled=labelled)
        self.parts.write(name, fingerprint, rows.arrays())
        return rows

    def corrupted(
        self, sets: Mapping[tuple[str, int], Any], key: tuple[str, int], doubt: bool
    ) -> CorruptedSet:
        """The same for numbers: of 75 sets the rows would be many."""
        settings = self.parts.settings if doubt else f"{self.parts.settings} of probabilities alone"
        parts = replace(self.parts, settings=settings)
        corruption, severity = key[0], operator.index(key[1])  # NumPy's are no int
        name = f"corrupted[{corruption!r}, {severity}]"
        tell = getattr(sets, "fingerprint", None)  # of a mapping that need not make a set to tell which it is
        told = tell(key) if callable(tell) else None
        # No name for the loader here: it must be gone before the next is made.
        data: str | EvaluationBatches = EvaluationBatches(sets[key], name) if told is None else str(told)
        fingerprint = parts.fingerprint(name, data, self.num_bins)
        kept = None if self.fresh else parts.read(name, fingerprint)
        if kept is not None:
            numbers = json.loads(str(kept["numbers"]))
            self.progress.skip(name, numbers["quality"]["rows"])
        else:
            batches = EvaluationBatches(sets[key], name) if isinstance(data, str) else data
            rows = self._predict(batches, labelled=True, doubt=doubt)
            numbers = {"quality": asdict(quality(rows, self.num_bins)), "scores": mean_scores(rows)}
            parts.write(name, fingerprint, {"numbers": np.array(json.dumps(numbers))})
        return CorruptedSet(corruption, severity, Quality(**numbers["quality"]), numbers["scores"])

    def _predict(self, batches: EvaluationBatches, *, labelled: bool, doubt: bool = True) -> SetPredictions:
        self.progress.begin(batches.where, num_batches(batches.loader))
        rows = predict_rows(
            self.predictor,
            batches,
            labelled=labelled,
            doubt=doubt,
            generator=self._generator(batches.where),
            on_batch=self.progress.batch,
        )
        self.progress.add(0)
        return rows

    def _generator(self, name: str) -> torch.Generator | None:
        """One of its own for each part, so that a part that is skipped changes no other."""
        if self.seed is None:
            return None
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


class _Progress(RowProgress):
    """Parts that are done, and how far the one at hand is. Silent unless ``show``."""

    def __init__(self, parts: int, show: bool) -> None:
        super().__init__("evaluating", parts, show)
        self._of: int | None = None
        self._seen = 0

    def begin(self, part: str, batches: int | None) -> None:
        """The next part, of so many ``batches``."""
        self.title, self._of, self._seen = part, batches, 0

    def batch(self, rows: int) -> None:
        """One of them."""
        self.rows, self._seen = self.rows + rows, self._seen + 1
        if self.bar is not None:
            share = min(1.0, self._seen / self._of) if self._of else 0.0
            self.bar.update(self.task, completed=self.done + share, description=self._text)

    def skip(self, part: str, rows: int) -> None:
        """A part of an earlier call."""
        self.title = f"{part} (kept)"
        self.add(rows)


def _prepare(out: Path) -> None:
    """The folder can be written to, and pictures can be drawn."""
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"out={str(out)!r} is a file: give a folder for the report")
    out.mkdir(parents=True, exist_ok=True)
    new_figure(1.0, 1.0)


def _check_arguments(id: Any, ood: Any, corrupted: Any, num_samples: Any, num_bins: Any) -> None:
    """What can be refused before a first batch is predicted."""
    if num_samples is not None:
        check_positive("num_samples", num_samples, integer=True)
    check_positive("num_bins", num_bins, integer=True)
    check_loader(id, "id")
    if ood is not None and not isinstance(ood, Mapping):
        raise TypeError(
            f"ood must be a dict of loaders by name, e.g. {{'svhn': loader}}, got {type(ood).__name__}"
        )
    for name in ood or {}:
        if not isinstance(name, str) or not name:
            raise TypeError(f"ood has the name {name!r}: names are strings, e.g. {{'svhn': loader}}")
        if isinstance(ood, dict):  # which makes nothing when it is asked
            check_loader(ood[name], f"ood[{name!r}]")
    if corrupted is not None and not isinstance(corrupted, Mapping):
        raise TypeError(
            "corrupted must be a mapping from (corruption, severity) to a loader, e.g. {('fog', 3): loader}, "
            f"got {type(corrupted).__name__}"
        )
    for key in corrupted or {}:
        if not _is_corruption(key):
            raise TypeError(
                f"corrupted has the key {key!r}: keys are (corruption, severity), a string and a whole "
                "number, e.g. ('fog', 3)"
            )


def _is_corruption(key: Any) -> bool:
    if not isinstance(key, tuple) or len(key) != 2 or not isinstance(key[0], str):
        return False
    try:
        return not isinstance(key[1], bool) and operator.index(key[1]) is not None
    except TypeError:
        return False
