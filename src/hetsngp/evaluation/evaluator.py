"""evaluate(): one pass over each data set, and a report of accuracy, calibration and uncertainty."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from hetsngp import metrics
from hetsngp._moved import renamed_arguments
from hetsngp.evaluation.cache import ResultCache, clean_writer
from hetsngp.evaluation.figures import new_figure
from hetsngp.evaluation.fingerprints import model_fingerprint
from hetsngp.evaluation.predictors import Predictor
from hetsngp.evaluation.report import OODSet, Report
from hetsngp.evaluation.scores import (
    corrupted_means,
    detection,
    mean_scores,
    offered,
    quality,
    selection,
)
from hetsngp.evaluation.set_evaluation import EvaluationProgress, SetEvaluator
from hetsngp.evaluation.set_predictions import SetPredictions
from hetsngp.fitting.progress import at_a_terminal
from hetsngp.functional.sampling import draw_seed
from hetsngp.metrics.probabilities import torchmetrics
from hetsngp.validation import check_loader, check_num_bins, check_num_samples


@renamed_arguments(corrupted_doubt="corrupted_uncertainty")
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
    corrupted_uncertainty: bool = True,
    fresh: bool = False,
    show: bool | None = None,
) -> Report:
    """Measure how accurate and calibrated a model is, and how well it detects out-of-distribution data.

    Batches go to the model's device one by one, and of each example only a few numbers are kept, so that
    neither examples nor classes fill the memory. docs/evaluation.md defines every number.

    Args:
        model: Anything whose ``predict(x)`` returns a :class:`hetsngp.Prediction`: a model, an ensemble,
            a model made by :func:`hetsngp.evaluation.restrict`; or our scikit-learn estimator.
        id: In-distribution test data: a loader of (x, y), y class numbers (B,), or multi-hot (B, K) for a
            model with the sigmoid link.
        ood: Out-of-distribution data by name; loaders yield x, or (x, y) whose y is ignored.
        corrupted: Corrupted versions of ``id``, by (corruption, severity). Each loader is requested when its
            turn comes and released before the next: a mapping that makes them on demand never holds two. If
            it has a method ``fingerprint(key) -> str | None``, equal for equal data only, a set whose result
            is cached is not even made. Without it, or where it returns None, the set is made and compared.
        out: Folder for the report and its figures, with one writer at a time. Results of each set are cached
            in ``out/parts`` and used again as long as model, settings, data and code are the same, where they
            can be compared (:mod:`hetsngp.evaluation.fingerprints`).
        title: Title of the report; None: the model's class.
        about: Descriptions for the report, by name: {"data": "cifar100"}.
        num_samples: Argument of ``predict``.
        generator: Random integration points; None: fixed ones, and the same numbers every time.
        num_bins: Bins of the calibration error and the reliability diagram.
        corrupted_uncertainty: False: corrupted sets are measured by ``predict_probs`` alone, at a fraction of
            the cost where there is a GP, without the uncertainties that do not follow from the probabilities.
            Ignored for a model that has no ``predict_probs``.
        fresh: Compute all sets again, whatever ``out`` holds.
        show: Show a progress bar; None: at a terminal.

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
    with ExitStack() as stack:
        if out is not None:
            _prepare(Path(out))
            stack.enter_context(clean_writer(Path(out)))
        seed = None if generator is None else draw_seed(generator)
        cache = None if out is None else ResultCache(Path(out) / "parts")
        if cache is not None:
            cache.clean()
        fingerprint = None if cache is None else model_fingerprint(model)
        ood, corrupted = ood or {}, corrupted or {}
        start = time.perf_counter()
        progress = EvaluationProgress(
            1 + len(ood) + len(corrupted), at_a_terminal() if show is None else show
        )
        with progress:
            sets = SetEvaluator(predictor, cache, fingerprint, seed, num_bins, fresh, progress)
            uncertainty = corrupted_uncertainty or not predictor.has_probs
            of_id = sets.predictions(id, "id", labelled=True)
            of_ood = {name: sets.predictions(ood[name], f"ood[{name!r}]", labelled=False) for name in ood}
            of_corrupted = [sets.corrupted(corrupted, key, uncertainty) for key in corrupted]
        assert of_id.correct is not None
        names = offered([of_id, *of_ood.values()])
        order = dict.fromkeys([*names, "one_minus_confidence"])
        report = Report(
            title=title or type(model).__name__,
            about=dict(about or {}),
            num_classes=of_id.num_classes,
            multi_label=of_id.brier is None,
            scores=names,
            id=quality(of_id, num_bins),
            mean_scores=mean_scores(of_id),
            reliability=metrics.reliability_bins(of_id.confidence, of_id.correct, num_bins),
            selection={name: selection(of_id.scores[name], of_id.correct) for name in order},
            ood={name: _ood_set(of_id, predictions, names) for name, predictions in of_ood.items()},
            corrupted=corrupted_means(of_corrupted) if of_corrupted else None,
            seconds=time.perf_counter() - start,
            predictions={"id": of_id, **{f"ood {name}": found for name, found in of_ood.items()}},
        )
        if out is not None:
            report.save(out)
        return report


def _ood_set(of_id: SetPredictions, of_ood: SetPredictions, names: Iterable[str]) -> OODSet:
    found = {name: detection(of_id.scores[name], of_ood.scores[name]) for name in names}
    return OODSet(len(of_ood), float(of_ood.confidence.mean()), mean_scores(of_ood), found)


def _prepare(out: Path) -> None:
    """Check that the folder can be written to and that figures can be drawn."""
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"out={str(out)!r} is a file: give a folder for the report")
    out.mkdir(parents=True, exist_ok=True)
    new_figure(1.0, 1.0)


def _check_arguments(id: Any, ood: Any, corrupted: Any, num_samples: Any, num_bins: Any) -> None:
    """Refuse wrong arguments before a first batch is predicted."""
    if num_samples is not None:
        check_num_samples(num_samples)
    check_num_bins(num_bins)
    check_loader(id, "id")
    if ood is not None and not isinstance(ood, Mapping):
        raise TypeError(
            f"ood must be a dict of loaders by name, e.g. {{'svhn': loader}}, got {type(ood).__name__}"
        )
    for name in ood or {}:
        if not isinstance(name, str) or not name:
            raise TypeError(f"ood has the name {name!r}: names are strings, e.g. {{'svhn': loader}}")
        if isinstance(ood, dict):  # another mapping may make its loaders on demand
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
