"""HetSNGPClassifier: a scikit-learn classifier of tables with data uncertainty and model uncertainty."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch

from hetsngp.choices import (
    KernelName,
    LikelihoodName,
    MethodName,
    NoiseName,
    NormalizationName,
    PosteriorName,
    SamplerName,
)
from hetsngp.estimator.label_noise import TableCrossFit, correction_of_examples, errors_of_examples
from hetsngp.fitting.loop import EpochResult, Schedule
from hetsngp.fitting.progress import Progress
from hetsngp.fitting.table_trainer import (
    EVAL_BATCH_SIZE,
    GP_LR_MULTIPLIER,
    TableTrainer,
    TrainingTable,
    merge_with_rows,
    split,
)
from hetsngp.labels.label_errors import LabelErrors
from hetsngp.labels.rounds import Correction
from hetsngp.models.classifier import Classifier
from hetsngp.models.methods import build, check_method
from hetsngp.models.options import Options
from hetsngp.nn.backbones import ResidualMLP
from hetsngp.posterior.fit import PosteriorReport
from hetsngp.types import Prediction
from hetsngp.validation import check_choice, check_not_negative, check_positive

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, clone
    from sklearn.utils import check_random_state
    from sklearn.utils.class_weight import compute_class_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import (
        _check_sample_weight,
        check_consistent_length,
        check_is_fitted,
        validate_data,
    )
except ImportError as error:
    raise ImportError(
        "HetSNGPClassifier needs scikit-learn 1.6 or later: pip install 'hetsngp[sklearn]'"
    ) from error

# Tolerance for the sum of a row of soft targets.
SUM_TOLERANCE = 1e-3
# Up to this many columns the network is at least as wide as the table, so that its first layer can be an
# isometry; a wider table passes through a trained linear layer, which keeps no distances.
WIDEST_ISOMETRY = 1024


class HetSNGPClassifier(ClassifierMixin, BaseEstimator):
    """A spectrally bounded residual MLP under any method of :func:`hetsngp.build`.

    Labels are of any kind, or soft targets (see :meth:`fit`). Columns are standardised. A part of the data is
    held out for early stopping and to calibrate temperature and posterior. Equal examples of one class are
    merged into one of their total weight, so that ``sample_weight`` and repetition are the same thing.
    Training runs in float32, posterior and predictions in float64. All randomness comes from
    ``random_state``.

    Args:
        method: Any name in :data:`hetsngp.models.methods.METHODS`.
        width: Width of the network; at least the number of columns, up to 1024 columns.
        depth: Number of residual blocks.
        epochs: Largest number of passes over the data.
        batch_size: Examples of a training step.
        learning_rate: Initial learning rate of AdamW; a cosine brings it to zero at the last epoch.
        weight_decay: Weight decay of AdamW; the GP's weights have their prior instead.
        patience: Early stopping: epochs without a lower held-out NLL after which to stop; None: never. The
            weights of the best epoch are used in either case.
        validation_fraction: Share of the distinct examples to hold out, stratified by class. Where that is
            less than 100 examples, the data is split into (at most five) folds instead: the models of the
            folds decide for how many epochs to train the final one on all examples, and calibrate it. With
            fewer than 20 examples, or a share of 0, nothing is held out: all epochs are run and the model is
            not calibrated (``report_.held_out`` is 0).
        class_weight: None, "balanced", or a dict from label to weight; multiplies ``sample_weight``. Where
            labels are corrected it counts by the true class, and for the final model only; "balanced" is then
            of the corrected numbers of examples.
        label_noise: None: train on y as given. "correct": some labels are wrong. In each of up to three
            rounds the models of five folds predict each example without having seen it, P(true label | x,
            given label) is made of that (:func:`hetsngp.find_label_errors`), and these are the targets of the
            next round, and of the final model. Up to fifteen models are trained besides it, five below 1,000
            examples, where there is one round; ``verbose=True`` shows the rounds. See :meth:`predict_proba`
            for what it predicts then. To balance classes give ``class_weight``: ``sample_weight`` is how
            often an example was seen, and would make the labels of a class with small weights look wrong.
        mixup: α of mixup, 0 for none; training mixes each batch with a permutation of itself
            (:func:`hetsngp.fitting.mixup.mixed_batch`), which is one way not to memorise wrong labels.
        device: Device to train and predict on, e.g. "cuda"; None: the CPU, which is faster for small tables.
        verbose: Show progress.
        random_state: Seed, or a ``numpy.random.RandomState``.
        amplitude, rank, random_features, length_scale, normalization, kernel, linear_share, posterior, noise,
            temperature, likelihood, sampler, num_samples, spectral_bound, num_members, input_repetition,
            batch_repetition, latent_dim, flow_layers, entropy_weight: See
            :class:`hetsngp.models.options.BuildOptions`.

    Attributes:
        model_: The fitted :class:`hetsngp.Classifier` (it takes standardised inputs), None for one class.
        classes_: Labels, in the order of the columns of ``predict_proba``.
        mean_, scale_: Mean and scale that columns are standardised by.
        report_: Report of :func:`hetsngp.fit_posterior`.
        history_: An :class:`hetsngp.fitting.loop.EpochResult` for each epoch; with folds, ``held_out`` is the
            result of the folds.
        n_iter_: Number of epochs that were run.
        label_errors_: With ``label_noise="correct"`` the :class:`hetsngp.LabelErrors` of the examples, as of
            :meth:`find_label_errors` but after the last useful round; else None.
        correction_: The :class:`hetsngp.labels.Correction` they are from: round, probabilities; else None.

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
        label_noise: Literal["correct"] | None = None,
        mixup: float = 0.0,
        verbose: bool | int = False,
        random_state: Any = None,
        amplitude: float | None = 3.0,
        rank: int = 6,
        random_features: int = 512,
        length_scale: float | None = None,
        normalization: NormalizationName | None = None,
        kernel: KernelName = "rbf",
        linear_share: float = 0.5,
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
        self.label_noise = label_noise
        self.mixup = mixup
        self.verbose = verbose
        self.random_state = random_state
        self.amplitude = amplitude
        self.rank = rank
        self.random_features = random_features
        self.length_scale = length_scale
        self.normalization = normalization
        self.kernel = kernel
        self.linear_share = linear_share
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
        """Train on X (n, d) with labels y (n,); an example of ``sample_weight`` 2 counts as two.

        y may be soft targets, floats (n, K) for K ≥ 2 classes, not negative and with the sum one in each row:
        how probable each class is, such as the shares of the annotators' labels, or ``clean_probs`` of a
        :class:`hetsngp.LabelErrors`. ``classes_`` is then 0 … K−1. They are split by the most probable class,
        and ``class_weight`` w multiplies the loss of each class by its weight: −Σ_k w_k q_k log p_k.
        """
        data = self._training_data(X, y, sample_weight, soft=self.label_noise is None)
        classes, table, trainer = data.classes, data.table, data.trainer
        correction: Correction | None = None
        if self.label_noise is not None:
            found = data.cross_fit(bool(self.verbose)).correct()
            correction = correction_of_examples(found, data.rows, data.codes, classes)
            table = replace(table, y=found.errors.clean_probs, label=table.y)
        if self.class_weight is not None:
            by_class = data.by_class
            if correction is not None and isinstance(self.class_weight, str):
                totals = corrected_totals(data.table.class_weights(len(classes)), table)
                by_class = class_weights(self.class_weight, classes, totals)
            table = table.with_class_weights(by_class)
        pairs = split(table, self.validation_fraction, data.seeds[0])
        one_part = len(pairs) == 1
        mean, scale = (pairs[0][0] if one_part else table).moments()
        table = table.standardised(mean, scale)
        pairs = [(a.standardised(mean, scale), b.standardised(mean, scale)) for a, b in pairs]
        model: Classifier | None = None
        history: list[EpochResult] = []
        report = PosteriorReport(temperature=float(self.temperature))
        if len(classes) > 1:
            with Progress(int(self.epochs), 0 if one_part else len(pairs), bool(self.verbose)) as progress:
                model, history, report = (
                    trainer.fit_with_held_out(*pairs[0], progress)
                    if one_part
                    else trainer.fit_in_folds(table, pairs, progress)
                )
            progress.say(str(report))
        # Only now: an interrupted fit leaves nothing half done.
        self.classes_, self.mean_, self.scale_ = classes, mean, scale
        self.model_, self.report_, self.history_, self.n_iter_ = model, report, history, len(history)
        self.correction_, self.label_errors_ = correction, None if correction is None else correction.errors
        return self

    def find_label_errors(self, X: Any, y: Any, sample_weight: Any = None) -> LabelErrors:
        """Find wrong labels among y (n,) of X (n, d), each by a model that was not trained on the example.

        Models with the parameters of this estimator are trained in (at most five) folds, as in the first
        round of ``label_noise="correct"``; equal examples are in one fold. Number of epochs and temperature
        are the same in all folds, chosen by all held-out labels together. Nothing has to be fitted before,
        and what is fitted does not change. :func:`hetsngp.find_label_errors` makes the result of their
        probabilities, in the order of X. Sample weights count in training, ``class_weight`` does not; an
        example of weight zero is left out, and its ``wrong_probability`` is NaN. A class with a single
        example is unknown to the model that predicts it: what is found about such a label means nothing.

        ``labels`` and ``suggested`` are class numbers in the order of ``np.unique(y)``, and ``class_names``
        are these labels as strings, so that ``to_csv`` and :func:`hetsngp.class_confusions` show them.

        >>> from sklearn.datasets import load_iris
        >>> iris = load_iris()
        >>> given = iris.target_names[iris.target]
        >>> given[50::10] = "setosa"  # ten wrong labels
        >>> clf = HetSNGPClassifier(width=32, depth=1, epochs=20, learning_rate=0.01, random_state=0)
        >>> errors = clf.find_label_errors(iris.data, given)
        >>> sorted(errors.order[:10].tolist())
        [50, 60, 70, 80, 90, 100, 110, 120, 130, 140]
        >>> str(np.unique(given)[errors.suggested[50]])
        'versicolor'
        """
        estimator = clone(self)
        data = estimator._training_data(X, y, sample_weight)
        errors = data.cross_fit(bool(estimator.verbose)).find_errors()
        return errors_of_examples(errors, data.rows, data.codes, data.classes)

    def _training_data(self, X: Any, y: Any, sample_weight: Any, *, soft: bool = False) -> _TrainingData:
        """Check parameters and examples, and merge equal ones; ``soft``: whether y may be soft targets."""
        self._check_parameters()
        device = self._device()
        targets = soft_targets(y)
        if targets is None:
            X, y = validate_data(self, X, y, dtype=np.float64)
            check_classification_targets(y)
            classes, codes = np.unique(y, return_inverse=True)
        elif soft:
            X = validate_data(self, X, dtype=np.float64)
            check_consistent_length(X, targets)
            classes = np.arange(targets.shape[1])
            codes = targets.argmax(1)
        else:
            raise ValueError(
                f"y are soft targets {targets.shape}, and wrong labels are found among labels (n,): give the "
                "labels as they are, or y.argmax(1); to train on soft targets fit with label_noise=None"
            )
        weight = example_weights(sample_weight, X)
        # One seed each for the split, the initial weights, the order of batches, the integration points, and
        # the folds that find wrong labels.
        seeds = check_random_state(self.random_state).randint(np.iinfo(np.int32).max, size=5).tolist()
        table, rows = merge_with_rows(X, codes if targets is None else targets, weight)
        by_class = class_weights(self.class_weight, classes, table.class_weights(len(classes)))
        trainer = TableTrainer(
            functools.partial(self._build, len(classes), seeds[1], device),
            self._schedule(),
            self.batch_size,
            self.patience,
            (seeds[2], seeds[3]),
            mixup=float(self.mixup),
        )
        return _TrainingData(classes, codes, by_class, table, rows, trainer, seeds)

    def _schedule(self) -> Schedule:
        return Schedule(
            int(self.epochs), float(self.learning_rate), float(self.weight_decay), GP_LR_MULTIPLIER
        )

    def _build(self, num_classes: int, seed: int, device: torch.device) -> Classifier:
        generator = torch.Generator().manual_seed(seed)
        columns, width = int(self.n_features_in_), int(self.width)
        width = max(width, columns) if columns <= WIDEST_ISOMETRY else width
        backbone = ResidualMLP(columns, width, int(self.depth), generator=generator)
        options = {name: getattr(self, name) for name in OPTIONS}
        return build(self.method, backbone, num_classes, generator=generator, **options).to(device)

    def _check_parameters(self) -> None:
        check_method(self.method)
        for name in ("width", "depth", "epochs", "batch_size"):
            check_positive(name, getattr(self, name), integer=True)
        check_positive("learning_rate", self.learning_rate)
        if self.patience is not None:
            check_positive("patience", self.patience, integer=True)
        for name, most in (("weight_decay", float("inf")), ("validation_fraction", 1.0)):
            value = getattr(self, name)
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not is_number or not 0 <= value < most:
                raise ValueError(f"{name} must be at least 0 and less than {most:g}, got {value!r}")
        check_not_negative("mixup", self.mixup)
        if self.label_noise is not None:
            check_choice("label_noise", self.label_noise, ["correct"])
        Options(**{name: getattr(self, name) for name in OPTIONS})  # checks them

    def _device(self) -> torch.device:
        try:
            device = torch.device("cpu" if self.device is None else self.device)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"device {self.device!r} cannot be used here: {error}") from error
        return device

    # --- predicting -------------------------------------------------------------------------------------

    def predict_uncertainty(self, X: Any, batch_size: int = EVAL_BATCH_SIZE) -> Prediction:
        """Probabilities and uncertainties as NumPy arrays, in batches of ``batch_size`` examples.

        ``labels`` are class indices: ``clf.classes_[prediction.labels]`` are the labels.

        With ``label_noise=None`` ``probs`` are those of the label as people would give it, and
        ``clean_probs`` are without the label noise Σ(x) that the model has learned. With "correct" both are
        of the true label; Σ(x) is then what the corrected targets leave open, and ``data_uncertainty`` too.
        """
        X = self._check_inputs(X, batch_size)
        if self.model_ is None:
            return _certain(len(X))
        parts = [self.model_.predict(x) for x in self._batches(X, batch_size)]
        return Prediction.cat(parts).numpy()

    def predict_proba(self, X: Any) -> Any:
        """Probabilities (n, K) of the labels in ``classes_``: those of :meth:`predict_uncertainty`.

        With ``label_noise=None`` they are of the label as people would give it, wrong ones included. With
        "correct" they are of the true label: training and calibration were by P(true label | x, given label).
        """
        X = self._check_inputs(X)
        if self.model_ is None:
            return _certain(len(X)).probs
        parts = [self.model_.predict_probs(x) for x in self._batches(X)]
        return torch.cat(parts).cpu().numpy()

    def _check_inputs(self, X: Any, batch_size: int = EVAL_BATCH_SIZE) -> Any:
        check_is_fitted(self, "classes_")  # n_features_in_ is there before the fit succeeds
        check_positive("batch_size", batch_size, integer=True)
        return validate_data(self, X, dtype=np.float64, reset=False)

    def _batches(self, X: Any, batch_size: int = EVAL_BATCH_SIZE) -> Iterator[torch.Tensor]:
        """Batches of standardised examples."""
        assert self.model_ is not None
        like = self.model_.temperature
        for start in range(0, len(X), batch_size):
            x = (X[start : start + batch_size] - self.mean_) / self.scale_
            yield torch.as_tensor(x).to(like.dtype).to(like.device)

    def predict(self, X: Any) -> Any:
        """Most probable label of each example: (n,)."""
        probs = self.predict_proba(X)
        return self.classes_[probs.argmax(1)]


# Parameters that are passed on to ``build``.
OPTIONS = tuple(f.name for f in fields(Options) if f.name in HetSNGPClassifier._get_param_names())


@dataclass(frozen=True)
class _TrainingData:
    """Examples as they are trained on."""

    classes: Any
    """Labels (K,), sorted."""
    codes: Any
    """Class number of each example: (n,); of soft targets the most probable."""
    by_class: Any
    """Weight of each class: (K,)."""
    table: TrainingTable
    """Different examples of positive weight, without the weights of classes and not yet standardised."""
    rows: Any
    """Row of each example in the table, −1 for none: (n,)."""
    trainer: TableTrainer
    seeds: list[int]

    def cross_fit(self, show: bool) -> TableCrossFit:
        """Training in folds on the given labels."""
        table = self.table.standardised(*self.table.moments())
        return TableCrossFit(self.trainer, table, len(self.classes), self.seeds[4], show)


def _certain(num_examples: int) -> Prediction:
    """Prediction of a model that has seen a single class: no uncertainty."""
    values = {f.name: np.zeros(num_examples) for f in fields(Prediction)}
    values |= {"probs": np.ones((num_examples, 1)), "clean_probs": np.ones((num_examples, 1))}
    return Prediction(**values | {"num_points": np.zeros(num_examples, dtype=np.int64)})


def example_weights(sample_weight: Any, X: Any) -> Any:
    """Weights (n,) of the examples X (n, d)."""
    weight = _check_sample_weight(sample_weight, X, dtype=np.float64)
    if (weight < 0).any():
        raise ValueError("Negative values in sample_weight: give 0 to an example that must not count")
    if not (weight > 0).any():
        raise ValueError("every sample_weight is zero: give some examples a positive weight")
    return weight


def soft_targets(y: Any) -> Any:
    """Soft targets (n, K) in float64, with the sum one in each row; None where ``y`` is something else."""
    try:
        values = np.asarray(y)
    except ValueError:  # of rows of different lengths, for which scikit-learn has an error
        return None
    if values.ndim != 2 or values.shape[1] < 2 or len(values) == 0 or values.dtype.kind not in "fiub":
        return None
    if values.dtype.kind != "f":
        if np.isin(values, (0, 1)).all() and (values.sum(1) == 1).all():
            raise ValueError(
                f"y {values.shape} of {values.dtype} looks one-hot: give class numbers, y.argmax(1), or soft "
                "targets as floats, y.astype(float)"
            )
        return None
    values = values.astype(np.float64)
    total = values.sum(1, keepdims=True)
    if not ((values >= 0).all() and (np.abs(total - 1) <= SUM_TOLERANCE).all()):
        raise ValueError(
            f"y of floats {values.shape} are soft targets, which must be probabilities, not negative and "
            "with the sum one in each row: y / y.sum(axis=1, keepdims=True); labels must be (n,)"
        )
    return values / total


def corrected_totals(given: Any, table: TrainingTable) -> Any:
    """Total weight (K,) of each class by the corrected targets of ``table``; ``given``: by the given labels.

    At least one example of each class that has one: the small probabilities of a class of which nothing is
    left would get weights of any size. None of a class whose examples have weight zero.
    """
    corrected = table.class_weights(len(given))
    return np.where(given > 0, np.maximum(corrected, np.minimum(given, 1.0)), 0.0)


def class_weights(class_weight: Any, classes: Any, totals: Any) -> Any:
    """Weights (K,) of ``classes``, of which the examples have the total weights ``totals`` (K,)."""
    if class_weight is None:
        return np.ones(len(classes))
    if isinstance(class_weight, str):
        check_choice("class_weight", class_weight, ["balanced"])
        present = np.count_nonzero(totals)  # by weight, as if repeated
        return totals.sum() / (present * np.where(totals > 0, totals, 1.0))
    by_class = compute_class_weight(class_weight, classes=classes, y=classes)
    if not (np.isfinite(by_class) & (by_class >= 0)).all():
        raise ValueError(f"class_weight must be finite and not negative, got {class_weight!r}")
    if not (totals * by_class > 0).any():
        raise ValueError(f"class_weight={class_weight!r} leaves no example a positive weight")
    return by_class
