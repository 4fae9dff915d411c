"""Out-of-sample probabilities of heads on frozen features, from one fit; and labels corrected by them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from hetsngp.choices import MethodName
from hetsngp.fitting.lbfgs import MAX_EXAMPLES, MAX_LOGITS, MAX_ROUNDS, fit_map
from hetsngp.fitting.loop import Schedule
from hetsngp.fitting.progress import ExampleProgress, Progress, at_a_terminal
from hetsngp.fitting.table_trainer import (
    GP_LR_MULTIPLIER,
    TableTrainer,
    TrainingTable,
    can_precompute,
    fold_pairs,
    has_inducing_features,
    precomputed,
    table_folds,
)
from hetsngp.frozen.features import FeatureSet
from hetsngp.frozen.head import (
    MIN_STEPS,
    check_head_options,
    features_of,
    limit_components,
    table_of,
    view_of,
)
from hetsngp.labels.label_errors import LabelErrors
from hetsngp.labels.rounds import Correction, Score, correct_in_rounds
from hetsngp.labels.sharpening import MEASURABLE, standard_error
from hetsngp.models.classifier import Classifier, evaluating
from hetsngp.models.options import HeadOptions, Options
from hetsngp.nn.extractor import Features
from hetsngp.nn.heads import GaussianHead
from hetsngp.nn.latent import RandomFeatureGP
from hetsngp.posterior.calibration import CALIBRATION_BATCH_SIZE, HeldOut, best_temperature
from hetsngp.posterior.leave_one_out import leave_one_out_operations, leave_one_out_shift
from hetsngp.validation import check_positive, check_seed, is_device_loader

# Largest K·m²·(m + n), multiplications: a quarter of an hour on two cores. Beyond it folds are used.
MOST_OPERATIONS = 2e13
# What the curvature of an example's loss under label noise takes besides, in multiplications for each pair of
# classes: a gradient for each class (1.5 to 14 µs of one core for each example and pair).
NOISE_OPERATIONS = 1e5
# Inducing features where their number is not given: leave-one-out takes a quarter of the time of 2,048.
RANDOM_FEATURES = 1024
# Amplitudes that are tried, downhill from the first, where none is given: under label noise small ones resist
# memorising wrong labels, and the given labels show which.
AMPLITUDES, FIRST_AMPLITUDE = (0.5, 1.0, 2.0, 5.0, 10.0), 2.0
# A model that has memorised wrong labels is further than a Newton step from the one without an example, and
# leave-one-out then favours the larger amplitude. So it is compared with real folds, all of them up to so
# many examples and one beyond: a larger amplitude must be better there too, and where left-out labels have a
# lower NLL than in folds, by more than so much of it and measurably, folds replace it.
ALL_FOLDS, OPTIMISTIC = 5000, 0.05
# Largest share of examples that have copies: these are predicted by a further fit without all of them.
MOST_COPIES = 0.2
FOLDS = 5
BATCH_SIZE = 128


@dataclass(frozen=True, eq=False)
class OutOfSample:
    """Out-of-sample probabilities, made by :func:`out_of_sample_probs`."""

    probs: Any
    """P(label | x) of each example by a model that was not trained on its label: (N, K) NumPy array, in the
    order of the data; examples of weight zero are not in it."""
    how: str
    """"leave-one-out", from one fit; or "5 folds (why)"."""
    amplitude: float | None
    """Amplitude of the kernel, chosen by the given labels unless it was given; None without a GP."""


@dataclass(frozen=True, eq=False)
class FrozenCorrection(Correction):
    """Corrected labels of frozen features, made by :func:`correct_labels`."""

    features: FeatureSet | None = None
    """The features with the corrected soft targets, for :func:`hetsngp.fit_head`."""
    amplitude: float | None = None
    """Amplitude with the best validation NLL in the chosen round, for ``fit_head`` on the new targets."""
    how: str = ""
    """How out-of-sample probabilities were made, as in :class:`OutOfSample`."""


def out_of_sample_probs(
    model: Classifier,
    data: Iterable[Any] | FeatureSet,
    *,
    folds: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
    **options: Unpack[HeadOptions],
) -> OutOfSample:
    """Predict each example by a head that was not trained on its label, on ``model``'s features.

    For :func:`hetsngp.find_label_errors`. Where the head is a GP on features that stay the same, as on a
    backbone that ``convert(..., freeze=True)`` made, one fit is enough: leaving an example out is a Newton
    step in closed form (:func:`~hetsngp.posterior.leave_one_out.leave_one_out_shift`). Other heads, and GPs
    for which that takes more than some 15 minutes (very many classes), are trained in ``folds``.

    The amplitude of a GP, where the model was given none, is the one of 0.5, 1, 2, 5, 10 with the best
    out-of-sample NLL of the given labels. ``model`` itself does not change; ``data`` is a loader of (x, y)
    in a fixed order, or features from :func:`hetsngp.extract_features`. ``options`` are those of
    :func:`hetsngp.fit_head`, e.g. ``method="sngp"``, which takes a third of the time of "hetsngp" and ranks
    wrong labels as well (experiments/label_noise). Examples of weight zero are left out of the result.

    >>> import hetsngp, torch
    >>> from torch import nn
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> x = torch.randn(300, 2, generator=torch.Generator().manual_seed(0))
    >>> y = (x[:, 0] > 0).long()
    >>> y[:15] = 1 - y[:15]  # wrong labels
    >>> model = hetsngp.convert(net, "sngp", example_input=x[:2], freeze=True)
    >>> found = out_of_sample_probs(model, [(x, y)])
    >>> errors = hetsngp.find_label_errors(y.numpy(), found.probs)
    >>> found.how, int(errors.is_wrong[:15].sum()) > 10, int(errors.is_wrong[15:].sum()) < 10
    ('leave-one-out', True, True)
    """
    fitter = _FrozenCrossFit.of(model, data, folds, seed, progress, options)
    given = fitter.table.y
    probs = fitter(given, np.ones(len(given), dtype=bool), functools.partial(_nll, given))
    return OutOfSample(probs, fitter.how, fitter.amplitude)


def correct_labels(
    model: Classifier,
    data: Iterable[Any] | FeatureSet,
    *,
    rounds: int = 3,
    folds: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
    on_round: Callable[[int, LabelErrors, float], None] | None = None,
    **options: Unpack[HeadOptions],
) -> FrozenCorrection:
    """Find wrong labels of frozen features and correct them, in up to ``rounds`` rounds.

    Out-of-sample probabilities as of :func:`out_of_sample_probs`, rounds as of
    :func:`hetsngp.labels.correct_in_rounds`. Then train on the result:
    ``fit_head(model, correction.features, amplitude=correction.amplitude)``. A model that is trained so
    predicts the true label: ``probs`` are calibrated for that and not for the label that people would give.
    """
    fitter = _FrozenCrossFit.of(model, data, folds, seed, progress, options)
    amplitudes: list[float | None] = []

    def cross_fit(targets: Any, trained: Any, score: Score) -> Any:
        probs = fitter(targets, trained, score)
        amplitudes.append(fitter.amplitude)
        return probs

    found = correct_in_rounds(fitter.table.y, cross_fit, rounds=rounds, seed=seed, on_round=on_round)
    weight = torch.from_numpy(fitter.table.weight).float()
    features = FeatureSet(
        torch.from_numpy(fitter.table.x),
        torch.from_numpy(found.errors.clean_probs),
        None if bool((weight == 1).all()) else weight,
    )
    return FrozenCorrection(
        found.errors,
        found.round,
        found.losses,
        features,
        amplitudes[found.round - 1],
        fitter.how,
    )


def _make(model: Classifier, method: MethodName, seed: int, options: Options) -> Any:
    return view_of(model, method, options, seed)


def _nll(given: Any, probs: Any) -> float:
    return float(-np.log(np.maximum(probs[np.arange(len(given)), given], 1e-12)).mean())


def _shuffles(data: Any) -> bool:
    """Whether each pass over a loader is in another order."""
    if is_device_loader(data):
        return bool(data.shuffle)
    sampler = getattr(getattr(data, "batch_sampler", None), "sampler", getattr(data, "sampler", None))
    return isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler)


class _FrozenCrossFit:
    """Cross-fitting on a table of features: see :class:`hetsngp.labels.rounds.CrossFit`."""

    def __init__(
        self,
        make: Callable[[Options], Any],
        options: Options,
        table: TrainingTable,
        folds: int | None,
        seeds: tuple[int, ...],
        show: bool,
        *,
        choose_amplitude: bool,
    ) -> None:
        self.make, self.options, self.table = make, options, table
        self.seeds, self.show = seeds, show
        sample = make(options)
        head = sample.head
        gp = isinstance(head, GaussianHead) and isinstance(head.latent, RandomFeatureGP)
        self.choose_amplitude = choose_amplitude and gp
        self.amplitude = float(sample.head.latent.kernel.amplitude) if gp else None
        self.reason = self._why_folds(sample, folds)
        self.folds = FOLDS if folds is None else int(folds)
        different = len(np.unique(table.group))
        if self.reason is not None and different < self.folds:
            raise ValueError(
                f"data has {different} different examples, which cannot be split into {self.folds} folds: "
                "give more examples, or fewer folds"
            )
        self.to_check = self.reason is None and different >= 2 * self.folds
        """Whether leave-one-out is still to be compared with folds."""
        self.start = FIRST_AMPLITUDE
        self._kernel: tuple[RandomFeatureGP, Tensor] | None = None
        """The GP that the kernel features were computed with, and the inputs [h, φ]."""

    @classmethod
    def of(
        cls,
        model: Classifier,
        data: Any,
        folds: int | None,
        seed: int,
        progress: bool | None,
        options: HeadOptions,
    ) -> _FrozenCrossFit:
        given = {*getattr(model, "config", {}).get("given", ()), *options}
        method, changed = check_head_options(model, options)
        check_seed(seed)
        if folds is not None and check_positive("folds", folds, integer=True) < 2:
            raise ValueError(
                "folds must be at least 2: each example is predicted by the models of the others"
            )
        if changed.link == "sigmoid":
            raise ValueError(
                "multi-hot labels (link='sigmoid') have no single true class: label errors need one"
            )
        if _shuffles(data):
            raise ValueError(
                "data come in a random order, so that results could not be matched with the examples: give a "
                "loader with shuffle=False, or features = hetsngp.extract_features(model, loader), whose "
                "labels are features.y"
            )
        show = at_a_terminal() if progress is None else progress
        if "random_features" not in given and changed.features == "inducing":
            changed = replace(changed, random_features=RANDOM_FEATURES)
        sample = view_of(model, method, changed, 0)
        table = table_of(sample, features_of(model, sample, data, "data", show), "data")
        if table.label is not None:
            raise ValueError("data has soft targets: label errors are found among class numbers")
        if "random_features" not in given:
            changed = limit_components(len(table.y), model.num_classes, changed)
        seeds = np.random.default_rng(seed).integers(2**31, size=4).tolist()
        make = functools.partial(_make, model, method, seeds[1])
        return cls(make, changed, table, folds, tuple(seeds), show, choose_amplitude="amplitude" not in given)

    def _why_folds(self, sample: Classifier, folds: int | None) -> str | None:
        """Why leave-one-out is not used; None where it is."""
        count = len(self.table.y)
        if folds is not None:
            return "as asked"
        if not (has_inducing_features(sample) and can_precompute(sample, count)):
            return "leave-one-out is for a GP on frozen features"
        if sample.head.num_members > 1 or self.options.likelihood != "log_mean":
            return "leave-one-out is for one member and likelihood='log_mean'"
        noise = 0 if sample.head.noise is None else NOISE_OPERATIONS * sample.num_classes**2
        if leave_one_out_operations(sample, count) + noise * count > MOST_OPERATIONS:
            return "leave-one-out would take longer"
        if float((~self.table.unique).float().mean()) > MOST_COPIES:
            return "many examples occur several times"
        return None

    @property
    def how(self) -> str:
        """How out-of-sample probabilities are made."""
        return "leave-one-out" if self.reason is None else f"{self.folds} folds ({self.reason})"

    def __call__(self, targets: Any, trained: Any, score: Score) -> Any:
        """Out-of-sample probabilities (N, K), with the amplitude that has the best score."""
        if self.to_check:  # in later rounds the score is of examples that no model is trained on
            self.to_check = False
            probs = self._checked_leave_one_out(targets, trained, score)
            if probs is not None:
                return probs
            self.reason, self.start = "leave-one-out would be too optimistic", FIRST_AMPLITUDE
        return self._best_probs(targets, trained, score)

    def _best_probs(
        self,
        targets: Any,
        trained: Any,
        score: Score,
        is_better: Callable[[float, float], bool] = lambda larger, smaller: True,
    ) -> Any:
        """Probabilities at the amplitude with the best score, downhill from the last one; to a larger one
        only where it ``is_better`` otherwise too.
        """
        if not self.choose_amplitude:
            return self._probs(targets, trained, self.options)
        tried: dict[float, tuple[float, Any]] = {}

        def value(index: int) -> float:
            amplitude = AMPLITUDES[index]
            if amplitude not in tried:
                probs = self._probs(targets, trained, replace(self.options, amplitude=amplitude))
                tried[amplitude] = score(probs), probs
            return tried[amplitude][0]

        best = AMPLITUDES.index(self.start)
        for step in (-1, 1):
            while 0 <= best + step < len(AMPLITUDES) and value(best + step) < value(best):
                if step > 0 and not is_better(AMPLITUDES[best + step], AMPLITUDES[best]):
                    break
                best += step
        self.amplitude = self.start = AMPLITUDES[best]
        return tried[self.amplitude][1]

    def _checked_leave_one_out(self, targets: Any, trained: Any, score: Score) -> Any:
        """Probabilities (N, K) by leave-one-out, at a larger amplitude only where that is better in folds
        too; None where the labels are predicted better than in folds.
        """
        given, count = np.asarray(targets), None if len(targets) <= ALL_FOLDS else 1

        def losses_of(probs: Any) -> Any:
            return -np.log(np.maximum(probs[np.arange(len(given)), given], 1e-12))

        @functools.cache
        def in_folds(amplitude: float | None) -> Any:
            options = replace(self.options, amplitude=amplitude)
            losses = losses_of(self._by_folds(self._table_of(targets), trained, options, count))
            return np.where(trained, losses, np.nan)  # NaN in the folds that are not made, too

        def is_better(larger: float, smaller: float) -> bool:
            return bool(np.nanmean(in_folds(larger)) < np.nanmean(in_folds(smaller)))

        probs = self._best_probs(targets, trained, score, is_better)
        amplitude = self.amplitude if self.choose_amplitude else self.options.amplitude
        left_out = losses_of(probs)
        gain = in_folds(amplitude) - left_out
        known = ~np.isnan(gain)
        gain, least = torch.from_numpy(gain[known]), OPTIMISTIC * left_out[known].mean()
        return None if float(gain.mean()) > max(least, MEASURABLE * standard_error(gain)) else probs

    def _probs(self, targets: Any, trained: Any, options: Options) -> Any:
        table = self._table_of(targets)
        if self.reason is not None:
            return self._by_folds(table, trained, options)
        view, x = self._precomputed(options)
        y = torch.as_tensor(table.y)
        y = y.long().to(x.device) if y.dim() == 1 else y.to(x)
        weight = torch.as_tensor(table.weight).to(x)
        trained = torch.from_numpy(np.asarray(trained))
        unique = self.table.unique
        log_probs = self._leave_one_out(view, x, y, weight, trained, trained & unique)
        if not bool(unique.all()):  # copies would tell the label
            copies = trained & ~unique
            if not bool(copies.any()):
                copies = trained & unique
            log_probs[~unique] = self._leave_one_out(view, x, y, weight, trained & unique, copies)[~unique]
        return log_probs.exp().cpu().numpy()

    def _table_of(self, targets: Any) -> TrainingTable:
        return replace(self.table, y=np.asarray(targets), label=self.table.y)

    def _precomputed(self, options: Options) -> tuple[Classifier, Tensor]:
        """View of a new model with inputs [h, φ], and these inputs; the kernel is computed once."""
        model = self.make(options)
        latent = model.head.latent
        h = torch.as_tensor(self.table.x).to(model.temperature)
        if self._kernel is None:
            model.head.adapt(h, torch.Generator().manual_seed(self.seeds[0]))
            view, (x,) = precomputed(model, [h])
            self._kernel = latent, x
            return view, x
        known, x = self._kernel
        latent.inducing, latent.normalizer = known.inducing, known.normalizer
        scale = latent.kernel.amplitude / known.kernel.amplitude
        x = torch.cat([h, x[:, h.shape[1] :] * scale], 1)
        view = Classifier(
            Features(x.shape[1]),
            model.head.on_precomputed(),
            num_features=x.shape[1],
        )
        return view, x

    def _leave_one_out(
        self, view: Classifier, x: Tensor, y: Tensor, weight: Tensor, trained: Tensor, calibrated: Tensor
    ) -> Tensor:
        """log P (N, K) by a fit to the ``trained`` examples (N,), without each of them, at the temperature
        that is best for the ``calibrated`` ones.
        """
        own = x[trained], y[trained], weight[trained]
        view.dataset_size = float(own[2].sum())
        with Progress(MAX_ROUNDS, 0, self.show) as progress:
            size = min(MAX_EXAMPLES, max(1, MAX_LOGITS // view.num_classes))
            parts = (*own[:2], own[2] / own[2].mean())
            batches = list(zip(*(part.split(size) for part in parts), strict=True))
            fit_map([view], [batches], seed=self.seeds[2], on_epoch=progress)
        shift = x.new_zeros(len(x), view.num_classes)
        with ExampleProgress("leave-one-out", view.num_classes, self.show, unit="classes") as shown:
            shift[trained] = leave_one_out_shift(view, *own, progress=shown.add)
        held_out = HeldOut(x[calibrated], y[calibrated], weight[calibrated], shift[calibrated])
        chunks = zip(x.split(CALIBRATION_BATCH_SIZE), shift.split(CALIBRATION_BATCH_SIZE), strict=True)
        with evaluating(view):
            temperature = best_temperature([(view, held_out)])
            found = [view.head.shifted_log_probs(*chunk, temperature) for chunk in chunks]  # type: ignore[operator]
        return torch.cat(found)

    def _by_folds(
        self, table: TrainingTable, trained: Any, options: Options, count: int | None = None
    ) -> Any:
        """Probabilities of the parts of the table that models of the others predict; NaN beyond the first
        ``count`` parts, of which None are all.
        """
        sample = self.make(options)
        places = table_folds(self.table, self.folds, self.seeds[0])[:count]
        pairs = fold_pairs(table, places, np.asarray(trained))
        steps = max(1, round(len(table.y) / BATCH_SIZE))
        schedule = Schedule(max(50, -(-MIN_STEPS // steps)), 1e-3, 1e-4, GP_LR_MULTIPLIER)
        total = sum(len(a.y) + len(b.y) for a, b in pairs)
        trainer = TableTrainer(
            functools.partial(self.make, options),
            schedule,
            BATCH_SIZE,
            max(10, schedule.epochs // 5),
            (self.seeds[2], self.seeds[3]),
            False,
            can_precompute(sample, total),
        )
        length = MAX_ROUNDS if trainer.map_by_lbfgs else schedule.epochs
        with Progress(length, len(pairs), self.show) as progress:
            found = trainer.fold_probs(pairs, progress)
        probs = np.full((len(table.y), sample.num_classes), np.nan, dtype=np.float32)
        for place, part in zip(places, found, strict=True):
            probs[place] = part.float().numpy()
        return probs
