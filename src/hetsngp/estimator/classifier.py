"""HetSNGPClassifier: tables in, probabilities and both kinds of doubt out, by scikit-learn's conventions."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.validation import _check_sample_weight

from hetsngp.choices import (
    LikelihoodName,
    MethodName,
    NoiseName,
    NormalizationName,
    PosteriorName,
    SamplerName,
)
from hetsngp.fitting.loop import EpochResult, Schedule
from hetsngp.fitting.progress import Progress
from hetsngp.fitting.tables import EVAL_ROWS, GP_LEARNING_RATE, TableFit, merge_copies, split
from hetsngp.models.classifier import Classifier
from hetsngp.models.methods import build, check_method
from hetsngp.models.options import Options
from hetsngp.nn.backbones import ResidualMLP
from hetsngp.posterior.fit import PosteriorReport
from hetsngp.types import Prediction
from hetsngp.validation import check_choice, check_positive


def example_weights(sample_weight: Any, class_weight: Any, X: Any, classes: Any, codes: Any) -> Any:
    """What each row of X (n, d) counts: (n,). ``codes`` (n,) number the rows' labels among ``classes``."""
    weight = _check_sample_weight(sample_weight, X, dtype=np.float64)
    if (weight < 0).any():
        raise ValueError("Negative values in sample_weight: give 0 to an example that must not count")
    if not (weight > 0).any():
        raise ValueError("every sample_weight is zero: give some examples a positive weight")
    if class_weight is None:
        return weight
    if isinstance(class_weight, str):
        check_choice("class_weight", class_weight, ["balanced"])
        totals = np.bincount(codes, weights=weight)  # by weight, as if repeated
        present = np.count_nonzero(totals)
        return weight * (weight.sum() / (present * np.where(totals > 0, totals, 1.0)))[codes]
    by_class = compute_class_weight(class_weight, classes=classes, y=classes[codes])
    if not (np.isfinite(by_class) & (by_class >= 0)).all():
        raise ValueError(f"class_weight must be finite and not negative, got {class_weight!r}")
    weight = weight * by_class[codes]
    if not (weight > 0).any():
        raise ValueError(f"class_weight={class_weight!r} leaves no example a positive weight")
    return weight


try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data

    from hetsngp.estimator.classifier import example_weights
except ImportError as error:
    raise ImportError(
        "HetSNGPClassifier needs scikit-learn 1.6 or later: pip install 'hetsngp[sklearn]'"
    ) from error

# Up to this many columns the network is at least as wide as the table, so that its first layer can be an
# isometry; a wider table passes through a trained linear layer, which keeps no distances.
WIDEST_ISOMETRY = 1024


class HetSNGPClassifier(ClassifierMixin, BaseEstimator):
    """A spectrally bounded residual MLP under any method of :func:`hetsngp.build`.

    Columns are standardised. A part of the data is held out to stop training and to calibrate temperature
    and posterior. Equal rows of one class are merged into one of their total weight, so that
    ``sample_weight`` and repetition are the same thing. Training runs in float32, posterior and predictions
    in float64. All randomness comes from ``random_state``.

    Args:
        method: Any name in :data:`hetsngp.models.methods.METHODS`.
        width: Of the network; a table of up to 1024 columns that has more than this gets its own width.
        depth: Residual blocks.
        epochs: At most so many passes over the data.
        batch_size: Rows in a training step.
        learning_rate: Of AdamW at the start; a cosine brings it to zero at the last epoch.
        weight_decay: Of AdamW; the GP's weights have their prior instead.
        patience: Stop after so many epochs without a lower held-out NLL; None: never. The weights of the best
            epoch are kept in either case.
        validation_fraction: Share of the distinct rows to hold out, classes in proportion. Where that is less
            than 100 rows, the table is cut into (at most five) folds instead: a model for each tells for how
            many epochs to train the one that is kept, which gets all rows, and calibrates it. With fewer than
            20 rows, or a share of 0, nothing is held out: all epochs are run and the model is not calibrated
            (``report_.held_out`` is 0).
        class_weight: None, "balanced", or a dict from label to weight; multiplies ``sample_weight``.
        device: Where to train and predict, e.g. "cuda"; None: the CPU, which is faster for small tables.
        verbose: Show progress.
        random_state: Seed, or a ``numpy.random.RandomState``.
        amplitude, rank, random_features, length_scale, normalization, posterior, noise, temperature,
            likelihood, sampler, num_samples, spectral_bound, num_members, input_repetition,
            batch_repetition, latent_dim, flow_layers, entropy_weight: See
            :class:`hetsngp.models.options.BuildOptions`.

    Attributes:
        model_: The fitted :class:`hetsngp.Classifier` (it takes standardised inputs), None for one class.
        classes_: Labels, in the order of the columns of ``predict_proba``.
        mean_, scale_: What columns are standardised by.
        report_: What :func:`hetsngp.fit_posterior` did.
        history_: An :class:`hetsngp.fitting.loop.EpochResult` for each epoch; with folds, ``held_out`` is
            theirs.
        n_iter_: Epochs that were run.

    >>> from sklearn.datasets import make_moons
    >>> X, y = make_moons(300, noise=0.1, random_state=0)
    >>> clf = HetSNGPClassifier(random_state=0).fit(X, y)
    >>> bool(clf.score(X, y) > 0.95)
    True
    >>> near, far = clf.predict_uncertainty([X[0], [30.0, 30.0]]).model_uncertainty
    >>> bool(far > 10 * near)
    True
    """

    def __init__(
        self,
        method: MethodName = "hetsngp",
        *,
        width: int = 128,
        depth: int = 4,
        epochs: int = 50,
        batch_size: int = 64,
        learning_rate: float = 1e-3,
        weight_decay: float = 1e-4,
        patience: int | None = 15,
        validation_fraction: float = 0.1,
        class_weight: Any = None,
        device: Any = None,
        verbose: bool | int = False,
        random_state: Any = None,
        amplitude: float = 3.0,
        rank: int = 6,
        random_features: int = 512,
        length_scale: float | None = None,
        normalization: NormalizationName | None = None,
        posterior: PosteriorName = "kronecker",
        noise: NoiseName = "low_rank",
        temperature: float = 1.0,
        likelihood: LikelihoodName = "log_mean",
        sampler: SamplerName = "sobol",
        num_samples: int | None = None,
        spectral_bound: float | None = None,
        num_members: int = 3,
        input_repetition: float = 0.0,
        batch_repetition: int = 1,
        latent_dim: int = 6,
        flow_layers: int = 8,
        entropy_weight: float = 1e-5,
    ) -> None:
        self.method = method
        self.width = width
        self.depth = depth
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.patience = patience
        self.validation_fraction = validation_fraction
        self.class_weight = class_weight
        self.device = device
        self.verbose = verbose
        self.random_state = random_state
        self.amplitude = amplitude
        self.rank = rank
        self.random_features = random_features
        self.length_scale = length_scale
        self.normalization = normalization
        self.posterior = posterior
        self.noise = noise
        self.temperature = temperature
        self.likelihood = likelihood
        self.sampler = sampler
        self.num_samples = num_samples
        self.spectral_bound = spectral_bound
        self.num_members = num_members
        self.input_repetition = input_repetition
        self.batch_repetition = batch_repetition
        self.latent_dim = latent_dim
        self.flow_layers = flow_layers
        self.entropy_weight = entropy_weight

    # --- fitting ----------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> HetSNGPClassifier:
        """Train on X (n, d) with labels y (n,); an example of ``sample_weight`` 2 counts as two."""
        options, device = self._check_parameters(), self._device()
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        classes, codes = np.unique(y, return_inverse=True)
        weight = example_weights(sample_weight, self.class_weight, X, classes, codes)
        # One seed each for the split, the initial weights, the order of batches and the integration points.
        seeds = check_random_state(self.random_state).randint(np.iinfo(np.int32).max, size=4).tolist()
        table = merge_copies(X, codes, weight)
        pairs = split(table, self.validation_fraction, seeds[0])
        alone = len(pairs) == 1
        mean, scale = (pairs[0][0] if alone else table).moments()
        table = table.standardised(mean, scale)
        pairs = [(a.standardised(mean, scale), b.standardised(mean, scale)) for a, b in pairs]
        model: Classifier | None = None
        history: list[EpochResult] = []
        report = PosteriorReport(temperature=options.temperature)
        if len(classes) > 1:
            make = functools.partial(self._build, len(classes), seeds[1], device)
            fit = TableFit(make, self._schedule(), self.batch_size, self.patience, (seeds[2], seeds[3]))
            with Progress(int(self.epochs), 0 if alone else len(pairs), bool(self.verbose)) as progress:
                model, history, report = (
                    fit.with_one_part(*pairs[0], progress) if alone else fit.in_folds(table, pairs, progress)
                )
            progress.say(str(report))
        # Only now: an interrupted fit leaves nothing half done.
        self.classes_, self.mean_, self.scale_ = classes, mean, scale
        self.model_, self.report_, self.history_, self.n_iter_ = model, report, history, len(history)
        return self

    def _schedule(self) -> Schedule:
        return Schedule(
            int(self.epochs), float(self.learning_rate), float(self.weight_decay), GP_LEARNING_RATE
        )

    def _build(self, num_classes: int, seed: int, device: torch.device) -> Classifier:
        generator = torch.Generator().manual_seed(seed)
        columns, width = int(self.n_features_in_), int(self.width)
        width = max(width, columns) if columns <= WIDEST_ISOMETRY else width
        backbone = ResidualMLP(columns, width, int(self.depth), generator=generator)
        options = {name: getattr(self, name) for name in OPTIONS}
        with torch.random.fork_rng(devices=[]):  # layers draw torch's initial values before they get ours
            return build(self.method, backbone, num_classes, generator=generator, **options).to(device)

    def _check_parameters(self) -> Options:
        check_method(self.method)
        for name in ("width", "depth", "epochs", "batch_size"):
            check_positive(name, getattr(self, name), integer=True)
        check_positive("learning_rate", self.learning_rate)
        if self.patience is not None:
            check_positive("patience", self.patience, integer=True)
        for name, most in (("weight_decay", float("inf")), ("validation_fraction", 1.0)):
            value = getattr(self, name)
            right_type = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not right_type or not 0 <= value < most:
                raise ValueError(f"{name} must be at least 0 and less than {most:g}, got {value!r}")
        return Options(**{name: getattr(self, name) for name in OPTIONS})

    def _device(self) -> torch.device:
        try:
            device = torch.device("cpu" if self.device is None else self.device)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
            raise ValueError(f"device {self.device!r} cannot be used here: {error}") from error
        return device

    # --- predicting -------------------------------------------------------------------------------------

    def predict_uncertainty(self, X: Any, batch_size: int = EVAL_ROWS) -> Prediction:
        """Probabilities and both kinds of doubt as NumPy arrays; rows are taken ``batch_size`` at a time.

        ``labels`` are numbers of classes: ``clf.classes_[prediction.labels]`` are the labels.
        """
        X = self._check_rows(X, batch_size)
        if self.model_ is None:
            return _certain(len(X))
        parts = [self.model_.predict(x) for x in self._parts(X, batch_size)]
        return Prediction.cat(parts).numpy()

    def predict_proba(self, X: Any) -> Any:
        """Probabilities (n, K) of the labels in ``classes_``: those of :meth:`predict_uncertainty`."""
        X = self._check_rows(X)
        if self.model_ is None:
            return _certain(len(X)).probs
        parts = [self.model_.predict_probs(x) for x in self._parts(X)]
        return torch.cat(parts).cpu().numpy()

    def _check_rows(self, X: Any, batch_size: int = EVAL_ROWS) -> Any:
        check_is_fitted(self, "classes_")  # n_features_in_ is there before the fit succeeds
        check_positive("batch_size", batch_size, integer=True)
        return validate_data(self, X, dtype=np.float64, reset=False)

    def _parts(self, X: Any, batch_size: int = EVAL_ROWS) -> Iterator[torch.Tensor]:
        """Standardised rows, some at a time."""
        assert self.model_ is not None
        like = self.model_.temperature
        for start in range(0, len(X), batch_size):
            x = (X[start : start + batch_size] - self.mean_) / self.scale_
            yield torch.as_tensor(x).to(like.dtype).to(like.device)

    def predict(self, X: Any) -> Any:
        """The most probable label of each row: (n,)."""
        probs = self.predict_proba(X)
        return self.classes_[probs.argmax(1)]


# The parameters that are handed on to ``build``.
OPTIONS = tuple(f.name for f in fields(Options) if f.name in HetSNGPClassifier._get_param_names())


def _certain(rows: int) -> Prediction:
    """Of a model that has met a single class: no doubt of any kind."""
    values = {f.name: np.zeros(rows) for f in fields(Prediction)}
    values |= {"probs": np.ones((rows, 1)), "clean_probs": np.ones((rows, 1))}
    return Prediction(**values | {"num_points": np.zeros(rows, dtype=np.int64)})
