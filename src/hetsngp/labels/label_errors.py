"""find_label_errors(): which given labels are wrong, and what is true, from out-of-sample probabilities."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetsngp.files import csv_text, write_text
from hetsngp.labels.sharpening import choose_sharpening, sample, sharpened
from hetsngp.labels.transition import (
    MISSING,
    TransitionFit,
    draw_wrong,
    fit_transition,
    label_losses,
    posterior_of_true,
)
from hetsngp.validation import check_positive

# Smallest probability, or this share of 1/K where that is less: a model that excludes the given label may be
# wrong, and yet of 1,000 classes the probability of a wrong label may be 1e-5 for each (1 % noise).
FLOOR, FLOOR_SHARE = 1e-5, 1e-4
# Draws for the interval of the number of wrong labels, and its half width in standard deviations.
DRAWS, WIDTH = 40, 1.96
# Share of given labels that are the most probable class, from which probabilities look like training ones.
LOOKS_TRAINED = 0.995
# Fewest examples for that warning: a handful may be classified correctly by chance.
FEWEST_FOR_WARNING = 100
# NLL of given labels, as a share of the entropy of the class frequencies, above which little was learned; and
# share of wrong labels above which the columns of probs may be in another order.
HARDLY_LEARNED, MOST_WRONG = 0.9, 0.6
# Share of wrong labels below which there seems to be no noise; and, with it, the largest probability that 19
# of 20 examples stay below where the model may have learned the noise: then it is certain of nothing.
NO_NOISE, CERTAIN = 0.01, 0.9
# Tolerance for the sum of a row of probabilities: float16 has three digits.
SUM_TOLERANCE = 5e-3


@dataclass(frozen=True, eq=False, repr=False)
class LabelErrors:
    """Label errors of N examples with K classes, as NumPy arrays; made by :func:`find_label_errors`.

    With several annotators ``labels``, ``wrong_probability`` and ``is_wrong`` are (N, A), and ``transition``
    is (A, K, K); where an annotator gave no label they are −1, NaN and False.
    """

    labels: Any
    """Given labels, (N,) class numbers."""
    wrong_probability: Any
    """P(the given label is wrong | x, given labels): (N,)."""
    suggested: Any
    """Most probable true class: (N,)."""
    clean_probs: Any
    """P(true class | x, given labels): (N, K), soft targets to train on."""
    transition: Any
    """P(given | true), estimated: (K, K), a row for each true class."""
    expected_wrong: float
    """Expected number of wrong labels."""
    expected_wrong_interval: tuple[float, float]
    """95 % interval of the number of wrong labels, if the probabilities are out of sample and wrong labels
    depend on the true class alone."""
    sharpening: float
    """Exponent s of P(true | x) ∝ probs^s."""
    losses: Any
    """−log P(given labels | x) of each example, with the transition matrix estimated without it: (N,). By
    their mean rounds of correction are compared."""
    probs: Any = None
    """The out-of-sample probabilities (N, K) that it was made from, as they were given."""
    class_names: tuple[str, ...] | None = None
    """Names of the K classes, where they are known: for :meth:`to_csv` and ``class_confusions``."""

    @property
    def is_wrong(self) -> Any:
        """Labels that are more probably wrong than correct."""
        return np.nan_to_num(self.wrong_probability) > 0.5

    @property
    def disagreeing(self) -> int:
        """Number of labels that are not the most probable class of ``probs``.

        Most often too large for the number of wrong ones, where ``expected_wrong`` is too small: on four sets
        of labels by people the true number is between both (experiments/label_noise).
        """
        labels, wrong = (x.reshape(len(self), -1) for x in (self.labels, self.wrong_probability))
        other = _array("probs", self.probs).argmax(1)[:, None] != labels
        return int((other & ~np.isnan(wrong)).sum())

    @property
    def order(self) -> Any:
        """Indices of the examples, most suspicious first; by the most suspicious label of each: (N,)."""
        by_example = np.nan_to_num(self.wrong_probability).reshape(len(self.suggested), -1).max(1)
        return np.argsort(-by_example, kind="stable")

    def __len__(self) -> int:
        return len(self.suggested)

    def __str__(self) -> str:
        low, high = self.expected_wrong_interval
        count = int((~np.isnan(self.wrong_probability)).sum())
        return (
            f"about {self.expected_wrong:.0f} of {count} labels are wrong "
            f"({self.expected_wrong / count:.1%}, 95% interval {low:.0f} to {high:.0f}); "
            f"{int(self.is_wrong.sum())} are flagged, more probably wrong than correct; sharpening "
            f"{self.sharpening:.3g}"
        )

    def __repr__(self) -> str:
        return f"<LabelErrors: {self}>"  # the arrays would fill a screen

    def to_csv(
        self,
        path: str | Path,
        *,
        class_names: Sequence[str] | None = None,
        names: Sequence[str] | None = None,
        texts: Sequence[str] | None = None,
    ) -> None:
        """Write a line for each example, most suspicious first, with cleanlab's names of the columns.

        ``label_score`` is 1 − ``wrong_probability``, empty where that is not known. ``class_names``: None:
        those of the result, or numbers. ``names``: what to call the examples, such as the paths of files, in
        a column ``path``; None: their numbers, in a column ``index``. ``texts``: the examples, where they are
        texts, for a column ``text`` at the end. One annotator only.
        """
        labels, wrong = (x.reshape(len(self), -1) for x in (self.labels, self.wrong_probability))
        if labels.shape[1] > 1:
            raise ValueError(
                "to_csv writes one label for each example: with several annotators write the arrays "
                "themselves, e.g. numpy.savetxt(file, errors.wrong_probability)"
            )
        key = "index" if names is None else "path"
        rows: list[list[Any]] = [[key, "is_label_issue", "label_score", "given_label", "predicted_label"]]
        rows[0] += [] if texts is None else ["text"]
        called = class_names_of(class_names, self)
        examples = range(len(self)) if names is None else list(names)  # a Series has an index of its own
        if len(examples) != len(self):
            raise ValueError(f"there are {len(examples)} names for {len(self)} examples: name each once")
        if texts is not None and len(texts) != len(self):
            raise ValueError(f"there are {len(texts)} texts for {len(self)} examples: give the text of each")
        flagged = self.is_wrong.reshape(-1)
        for i in self.order.tolist():
            score = "" if np.isnan(wrong[i, 0]) else f"{1 - wrong[i, 0]:.6f}"
            given = "" if labels[i, 0] == MISSING else called[labels[i, 0]]
            rows.append([examples[i], bool(flagged[i]), score, given, called[self.suggested[i]]])
            rows[-1] += [] if texts is None else [texts[i]]
        write_text(Path(path), csv_text(rows))


def class_names_of(class_names: Sequence[str] | None, errors: LabelErrors) -> tuple[str, ...]:
    """Return the names of the classes, those of ``errors`` or their numbers where none are given."""
    num_classes = errors.clean_probs.shape[1]
    if class_names is None:
        class_names = errors.class_names or [str(k) for k in range(num_classes)]
    if len(class_names) != num_classes:
        raise ValueError(
            f"there are {len(class_names)} class_names for {num_classes} classes: name each once"
        )
    return tuple(map(str, class_names))


def find_label_errors(
    labels: Any, probs: Any, *, sharpening: float | None = None, estimate_from: Any = None
) -> LabelErrors:
    """Find wrong labels from the given ``labels`` (N,) and out-of-sample ``probs`` (N, K).

    P(true = k | x, given) ∝ P(k | x)·T[k, given] with P(k | x) ∝ probs^s. The transition matrix T = P(given |
    true) is estimated by EM with a prior whose strength the labels choose (:func:`fit_transition`). A
    network that is trained on noisy labels predicts these, less certain than the true ones: the sharpening s
    makes up for it, and the given labels choose it too (:func:`choose_sharpening`).

    Args:
        labels: Class numbers (N,); or those of A annotators (N, A), with −1 where one has given none.
        probs: P(label | x) (N, K) of models that were not trained on the labels they are compared with:
            ``hetsngp.out_of_sample_probs`` for a head on frozen features, ``clf.find_label_errors`` for the
            estimator, ``hetsngp audit`` for images. Probabilities of the model trained on all labels find
            the errors that it has not learned, which are few.
        sharpening: s, if it is not to be chosen.
        estimate_from: (N,) bool, the examples that sharpening and transition matrix are estimated from; None:
            all. For probabilities of models that have learned from some of the labels.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> true = rng.integers(3, size=600)
    >>> given = np.where(rng.random(600) < 0.1, (true + 1) % 3, true)
    >>> errors = find_label_errors(given, np.full((600, 3), 0.15) + 0.55 * np.eye(3)[true])
    >>> bool((errors.is_wrong == (given != true)).all()), errors.transition.round(1)[0]
    (True, array([0.9, 0.1, 0. ]))
    """
    given, log_probs = _checked(labels, probs)
    if sharpening is not None:
        check_positive("sharpening", sharpening)
    _warn_of_kind(given, log_probs)
    several = np.ndim(labels) == 2
    errors = replace(_find(given, log_probs, several, sharpening, estimate_from), probs=probs)
    warn_of_poor_probs(
        errors, "check that the columns of probs are in the order of the class numbers, train longer", 3
    )
    return errors


def errors_of_folds(
    labels: Any, probs: Any, *, sharpening: float | None = None, estimate_from: Any = None
) -> LabelErrors:
    """:func:`find_label_errors` for ``probs`` that are known to be out of sample: without its warnings."""
    several = np.ndim(labels) == 2
    return replace(_find(*_checked(labels, probs), several, sharpening, estimate_from), probs=probs)


def nll_of_given(labels: Any, probs: Any, sharpening: float | None = None) -> float:
    """Mean of the ``losses`` that :func:`errors_of_folds` would have, in a fraction of its time."""
    given, log_probs = _checked(labels, probs)
    return float(_fit(given, log_probs, torch.arange(len(given)), sharpening)[0].loss.mean())


def _fit(
    given: Tensor, log_probs: Tensor, which: Tensor, sharpening: float | None
) -> tuple[TransitionFit, float, dict[float, TransitionFit], Tensor]:
    """Fit of the examples ``which``; its sharpening; the fits of all sharpenings that are as good, and the
    examples that these are by.
    """
    rows = which[sample(len(which), log_probs.shape[1])]
    if sharpening is None:
        chosen, fits = choose_sharpening(log_probs[rows], given[rows])
    else:
        chosen = float(sharpening)
        fits = {chosen: fit_transition(sharpened(log_probs[rows], chosen), given[rows])}
    if len(rows) == len(which):
        return fits[chosen], chosen, fits, rows
    return fit_transition(sharpened(log_probs[which], chosen), given[which]), chosen, fits, rows


def _find(
    given: Tensor, log_probs: Tensor, several: bool, sharpening: float | None, estimate_from: Any
) -> LabelErrors:
    """Label errors of checked arrays; ``several``: whether the labels were (N, A), also with A = 1."""
    which = _checked_rows(estimate_from, given)
    fit, chosen, fits, rows = _fit(given, log_probs, which, sharpening)
    log_clean = sharpened(log_probs, chosen)
    losses = fit.loss
    if len(which) < len(given):
        losses = label_losses(log_clean, given, fit.transition)
        losses[which] = fit.loss
    clean, wrong = _posterior(log_clean, given, fit)
    count = int((given != MISSING).sum())
    expected = float(wrong.nansum(dtype=torch.float64))
    low, high = _share_interval(log_probs[rows], given[rows], fits, (chosen, float(wrong[rows].nanmean())))
    return LabelErrors(
        labels=given.numpy() if several else given.squeeze(1).numpy(),
        wrong_probability=wrong.numpy() if several else wrong.squeeze(1).numpy(),
        suggested=clean.argmax(1).numpy(),
        clean_probs=clean.numpy(),
        transition=(fit.transition if several else fit.transition[0]).numpy(),
        expected_wrong=expected,
        expected_wrong_interval=(min(low * count, expected), max(high * count, expected)),
        sharpening=chosen,
        losses=losses.numpy(),
    )


# --- the posterior ----------------------------------------------------------------------------------------


def _posterior(log_clean: Tensor, given: Tensor, fit: TransitionFit) -> tuple[Tensor, Tensor]:
    """P(true | x, given) (N, K), and P(given is wrong) (N, A), NaN where none is given."""
    clean = torch.empty_like(log_clean)
    for rows, part in posterior_of_true(log_clean, given, fit.transition):
        clean[rows] = part
    return clean, _wrong(clean, given)


def _wrong(clean: Tensor, given: Tensor) -> Tensor:
    wrong = 1 - clean.gather(1, given.clamp_min(0))
    return wrong.clamp(0, 1).masked_fill(given == MISSING, float("nan"))


def _share_interval(
    log_probs: Tensor, given: Tensor, fits: dict[float, TransitionFit], chosen: tuple[float, float]
) -> tuple[float, float]:
    """Interval of the share of wrong labels, over what the labels leave open: the sharpening, T, and the
    truth of each label. The ``chosen`` sharpening comes with the expected share, around which draws lie too.
    """
    ends, total = [], int((given != MISSING).sum())
    for s, fit in fits.items():
        counts = draw_wrong(sharpened(log_probs, s), given, fit.concentration, DRAWS)
        centre, error = float(counts.mean()) / total, float(counts.std()) / total
        for middle in (centre, chosen[1]) if s == chosen[0] else (centre,):
            ends += [middle - WIDTH * error, middle + WIDTH * error]
    return max(min(ends), 0.0), min(max(ends), 1.0)


# --- checks -----------------------------------------------------------------------------------------------


def _checked(labels: Any, probs: Any) -> tuple[Tensor, Tensor]:
    """Labels (N, A) int64 with −1, and log-probabilities (N, K) float32."""
    values = _array("probs", probs)
    if values.ndim != 2 or len(values) == 0 or values.shape[1] < 2:
        raise ValueError(
            "probs must be (N, K), a row for each example and a column for each of at least two classes, "
            f"got shape {values.shape}; of P(class 1) alone numpy.column_stack([1 - p, p]); labels come first"
        )
    if values.dtype.kind not in "fiu":
        raise TypeError(f"probs must be real numbers, got {values.dtype}")
    p = torch.from_numpy(np.array(values, dtype=np.float32))
    total = p.sum(1)
    if not bool(total.isfinite().all()):
        worst = int((~total.isfinite()).int().argmax())
        raise ValueError(
            f"probs of example {worst} are NaN or infinite: drop such examples, with their labels, or mend "
            "the model that predicted them"
        )
    if bool((p < -1e-6).any()) or not bool(((total - 1).abs() <= SUM_TOLERANCE).all()):
        worst = int(((total - 1).abs() + (p < -1e-6).any(1)).argmax())
        raise ValueError(
            f"probs must be probabilities, not negative and with the sum one in each row; row {worst} has "
            f"the sum {float(total[worst]):.4g} and the least value {float(p[worst].min()):.4g}: give "
            "softmax(logits) of logits, and probs / probs.sum(1, keepdims=True) of percentages or of rounded "
            "probabilities"
        )
    given = _checked_labels(_array("labels", labels), len(p), p.shape[1])
    p = p.clamp_min(min(FLOOR, FLOOR_SHARE / p.shape[1]))
    return given, (p / p.sum(1, keepdim=True)).log()


def _checked_rows(estimate_from: Any, given: Tensor) -> Tensor:
    """Indices of the examples to estimate from."""
    count = len(given)
    if estimate_from is None:
        return torch.arange(count)
    mask = _array("estimate_from", estimate_from)
    if mask.dtype.kind != "b" or mask.shape != (count,):
        raise ValueError(f"estimate_from must be ({count},) booleans, a mask of the examples")
    if not bool((given[mask] != MISSING).any()):
        raise ValueError("estimate_from selects no example with a label: at least one is needed")
    return torch.from_numpy(np.flatnonzero(mask))


def _array(name: str, values: Any) -> Any:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    try:
        return np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} must be an array: {error}") from error


def _checked_labels(values: Any, count: int, num_classes: int) -> Tensor:
    several = values.ndim == 2
    is_number = values.dtype.kind in "iuf"
    one_hot = several and is_number and np.isin(values, (0, 1)).all() and bool((values.sum(-1) == 1).all())
    if one_hot and values.shape[1] == num_classes:
        raise ValueError(
            f"labels of shape {values.shape} with a single 1 in each row look one-hot, and not like those of "
            f"{num_classes} annotators: give class numbers, labels.argmax(1)"
        )
    if values.dtype.kind == "f":
        gaps = "where an annotator gave none, numpy.nan_to_num(labels, nan=-1).astype(int)"
        if not several:
            gaps = "leave out examples without a label (NaN), and their probs"
        raise TypeError(
            f"labels must be class numbers 0 … {num_classes - 1}, got {values.dtype}: labels.astype(int); "
            f"{gaps}"
        )
    if values.dtype.kind not in "iu":
        raise TypeError(
            f"labels must be class numbers 0 … {num_classes - 1}, the columns of probs, got {values.dtype}: "
            "numbers as labels.astype(int); names as numpy.searchsorted(names, labels), with the names of "
            "all columns in their alphabetical order, such as classes_ of a scikit-learn model"
        )
    if values.ndim not in (1, 2) or len(values) != count or values.size == 0:
        raise ValueError(
            f"labels have shape {values.shape} where ({count},) was expected, or ({count}, A) for A "
            "annotators: one row for each row of probs"
        )
    # A copy: whoever corrects the labels in place still has those that were given in the result.
    given = torch.from_numpy(np.array(values, dtype=np.int64)).reshape(count, -1)
    least = MISSING if several else 0
    low, high = int(given.min()), int(given.max())
    if low < least or high >= num_classes:
        gaps = ", and −1 where an annotator gave none" if several else ""
        raise ValueError(
            f"labels go from {low} to {high}, but probs have {num_classes} columns, so labels must be 0 … "
            f"{num_classes - 1}{gaps}"
        )
    if several and bool((given == MISSING).all()):
        raise ValueError("every label is −1: no annotator has given any")
    return given


def warn_of_poor_probs(errors: LabelErrors, advice: str, stacklevel: int) -> None:
    """Warn where the probabilities know hardly more than the frequencies of the classes, or other classes.

    ``advice``: what to do besides taking more examples; ``stacklevel``: as of ``warnings.warn``, from here.
    """
    labels, wrong = (each.reshape(len(errors), -1) for each in (errors.labels, errors.wrong_probability))
    known, losses = ~np.isnan(wrong), errors.losses[~np.isnan(errors.losses)]
    entropy, count, nll = 0.0, int(known.sum()), float(losses.mean())
    for given, there in zip(labels.T, known.T, strict=True):
        shares = np.bincount(given[there]) / there.sum()
        entropy -= float(np.log(shares[given[there]]).sum()) / len(losses)
    hardly_learned = nll > HARDLY_LEARNED * entropy and count >= FEWEST_FOR_WARNING
    if hardly_learned or errors.expected_wrong > MOST_WRONG * count:
        what = "hardly predict the labels" if nll > HARDLY_LEARNED * entropy else "contradict the labels"
        warnings.warn(
            f"the probabilities {what}: {errors.expected_wrong / count:.0%} of these seem "
            f"wrong, and the NLL of an example is {nll:.3f} where the frequencies of the classes have "
            f"{entropy:.3f}. What is found means little: {advice}, or take more examples",
            stacklevel=stacklevel,
        )
        return
    highest = np.quantile(_array("probs", errors.probs).max(1), 0.95)
    no_noise = errors.expected_wrong_interval[1] < NO_NOISE * count and count >= FEWEST_FOR_WARNING
    if no_noise and highest < CERTAIN:
        warnings.warn(
            f"no label seems wrong, but the probabilities are nowhere certain ({highest:.2f} at most in 19 "
            "of 20 examples): where a model predicts wrong labels along with the correct ones, none is "
            "found. Correct labels in rounds, which may find them: hetsngp.correct_labels, "
            "HetSNGPClassifier(label_noise='correct'), or hetsngp.labels.correct_in_rounds for other models",
            stacklevel=stacklevel,
        )


def _warn_of_kind(given: Tensor, log_probs: Tensor) -> None:
    """Warn of predicted classes, and of probabilities of the training data."""
    known = given != MISSING
    agree = (log_probs.argmax(1, keepdim=True) == given)[known].double()
    if len(agree) >= FEWEST_FOR_WARNING and bool((log_probs.max(1).values > -2e-4).all()):
        warnings.warn(
            "each row of probs has a single 1, as predicted classes have: they rank no label above another. "
            "Give probabilities, such as those of predict_proba",
            stacklevel=3,
        )
    if len(agree) >= FEWEST_FOR_WARNING and float(agree.mean()) >= LOOKS_TRAINED:
        warnings.warn(
            f"{float(agree.mean()):.1%} of the labels are the most probable class of probs, as where a model "
            "predicts what it was trained on: wrong labels that it has learned cannot be found. Give "
            "probabilities of models that were not trained on these labels, e.g. by "
            "sklearn.model_selection.cross_val_predict(model, X, labels, method='predict_proba')",
            stacklevel=3,
        )
