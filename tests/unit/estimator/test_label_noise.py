"""The scikit-learn classifier on wrong labels: found out of sample, corrected in fit, and mixup."""

from __future__ import annotations

import copy
import pickle
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_digits, load_wine, make_blobs
from sklearn.exceptions import NotFittedError
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.utils import estimator_checks
from sklearn.utils.estimator_checks import parametrize_with_checks

import hetsngp
from hetsngp import HetSNGPClassifier
from hetsngp.estimator import label_noise
from hetsngp.estimator.classifier import corrected_totals
from hetsngp.fitting import table_trainer
from hetsngp.fitting.table_trainer import TableTrainer, TrainingTable, table_folds
from hetsngp.labels import rounds
from hetsngp.models.methods import METHODS

SMALL: dict[str, Any] = {
    **{"width": 16, "depth": 1, "random_features": 32, "rank": 2, "epochs": 10, "learning_rate": 1e-2},
    **{"random_state": 0},
}


def small(method: str = "sngp", **parameters: Any) -> HetSNGPClassifier:
    return HetSNGPClassifier(method, **{**SMALL, **parameters})


def correcting(method: str = "sngp", **parameters: Any) -> HetSNGPClassifier:
    return small(method, label_noise="correct", **parameters)


def blobs(rows: int = 60, classes: int = 3, columns: int = 3, seed: int = 0) -> tuple[Any, Any]:
    X, y = make_blobs(rows, columns, centers=classes, cluster_std=3.0, random_state=seed)
    return X, y


def uniform_flips(X: Any, y: Any, share: float, seed: int) -> Any:
    """Another class, drawn at random, for a share of the labels."""
    rng, classes = np.random.default_rng(seed), y.max() + 1
    return np.where(rng.random(len(y)) < share, (y + rng.integers(1, classes, len(y))) % classes, y)


def instance_flips(X: Any, y: Any, share: float, seed: int) -> Any:
    """The nearest other class, most often where that is nearly as near as the true one."""
    z = (X - X.mean(0)) / np.maximum(X.std(0), 1e-9)
    means = np.stack([z[y == k].mean(0) for k in range(y.max() + 1)])
    distance = np.square(z[:, None] - means).sum(2)
    own = distance[np.arange(len(y)), y].copy()
    distance[np.arange(len(y)), y] = np.inf
    rank = (own - distance.min(1)).argsort().argsort() / len(y)
    flip = np.random.default_rng(seed).random(len(y)) < 2 * share * rank
    return np.where(flip, distance.argmin(1), y)


TABLES = {"digits": (load_digits, 400), "cancer": (load_breast_cancer, 200), "wine": (load_wine, 120)}


def tables(name: str, seed: int) -> tuple[Any, ...]:
    load, rows = TABLES[name]
    X, y = load(return_X_y=True)
    return train_test_split(X, y, train_size=rows, random_state=seed, stratify=y)


def same_errors(a: Any, b: Any) -> None:
    for name, value in vars(a).items():
        np.testing.assert_array_equal(value, getattr(b, name), err_msg=name)


# --- scikit-learn's own checks --------------------------------------------------------------------------


CHECKED = correcting("deterministic", mixup=0.1, epochs=4, learning_rate=0.03)


@pytest.mark.slow
@parametrize_with_checks([CHECKED])
def test_scikit_learn_checks(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.parametrize(
    "check",
    [
        estimator_checks.check_classifiers_train,
        estimator_checks.check_class_weight_classifiers,
        estimator_checks.check_classifiers_one_label,
        estimator_checks.check_fit2d_1sample,
        estimator_checks.check_sample_weight_equivalence_on_dense_data,
        estimator_checks.check_dict_unchanged,
    ],
)
def test_scikit_learn_checks_of_fitting(check: Any) -> None:
    check("HetSNGPClassifier", clone(CHECKED))


# --- what it finds and what it corrects -----------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_wrong_labels_are_found(name: str) -> None:
    X, _, y, _ = tables(name, 0)
    clf = small("deterministic", epochs=12)
    for flips, share, least in ((uniform_flips, 0.3, 0.85), (instance_flips, 0.2, 0.8)):
        given = flips(X, y, share, 0)
        errors = clf.find_label_errors(X, given)
        assert roc_auc_score(given != y, errors.wrong_probability) > least, flips.__name__
        low, high = errors.expected_wrong_interval
        assert low <= errors.expected_wrong <= high
        if flips is uniform_flips:
            assert (errors.suggested != y).sum() < 0.6 * (given != y).sum()


@pytest.mark.parametrize(("name", "gain"), [("digits", 0.015), ("wine", None)])
def test_a_model_of_corrected_labels_predicts_the_true_ones(name: str, gain: float | None) -> None:
    """Of other examples: with ten classes it is more often correct, and it is as sure as it may be, which
    one of the given labels is not.
    """
    measured = []
    for seed in range(3):
        X, others, y, truth = tables(name, seed)
        given = uniform_flips(X, y, 0.3, seed)
        for make in (small, correcting):
            clf = make("deterministic", epochs=12).fit(X, given)
            right = clf.predict_proba(others)[np.arange(len(truth)), truth]
            measured.append([clf.score(others, truth), -np.log(right).mean()])
    (direct, nll_direct), (corrected, nll_corrected) = np.reshape(measured, (3, 2, 2)).mean(0)
    assert gain is None or corrected > direct + gain
    assert nll_corrected < 0.7 * nll_direct


@pytest.mark.parametrize("correct", [False, True])
def test_a_model_that_has_learned_nothing_is_called_so(correct: bool) -> None:
    X, y = blobs(200)
    X = np.random.default_rng(0).permutation(X)
    with pytest.warns(UserWarning, match="hardly predict the labels"):
        correcting("deterministic").fit(X, y) if correct else small("deterministic").find_label_errors(X, y)


# --- out of sample --------------------------------------------------------------------------------------


def centred_logs(probs: Any) -> Any:
    logs = np.log(probs.astype(np.float64))
    return logs - logs.mean(1, keepdims=True)


def off_proportion(a: Any, b: Any) -> float:
    """Distance of log-probabilities (n, K) from those of another temperature, relative to their length."""
    a, b = centred_logs(a), centred_logs(b)
    return float(np.linalg.norm(a - b * (a * b).sum() / np.square(b).sum()) / np.linalg.norm(a))


def test_no_example_is_predicted_from_its_own_label() -> None:
    """With another label of one example the model of its fold is the same; those of the others are not.

    All folds have one temperature (and number of epochs, here one), so their log-probabilities may still
    differ by one factor.
    """
    X, y = blobs(50)
    fit = small("deterministic", epochs=1)._training_data(X, y, None).cross_fit(False)
    given, everyone = fit.table.y, np.ones(50, dtype=bool)
    before, places = fit(given, everyone), table_folds(fit.table, 5, fit.seed)
    assert sorted(np.concatenate(places)) == list(range(50))
    for i in (places[0][0], places[3][2]):
        flipped = given.copy()
        flipped[i] = (given[i] + 1) % 3
        after = fit(flipped, everyone)
        for place in places:
            if i in place:
                assert off_proportion(after[place], before[place]) < 1e-5
            else:
                assert off_proportion(after[place], before[place]) > 1e-3
        assert off_proportion(fit(given, everyone & (np.arange(50) != i)), before) > 1e-3


@pytest.mark.parametrize("soft", [False, True])
def test_targets_of_untrained_rows_change_nothing(soft: bool) -> None:
    """They choose neither the number of epochs nor the temperature, and no model is trained on them."""
    X, y = blobs(100)
    fit = small("deterministic", epochs=8)._training_data(X, y, None).cross_fit(False)
    left = np.random.default_rng(0).random(100) < 0.4
    targets = np.eye(3)[fit.table.y] if soft else fit.table.y
    others = np.where(left[:, None] if soft else left, np.roll(targets, 1, -1) if soft else 0, targets)
    assert np.abs(targets - others)[left].sum() > 20
    np.testing.assert_array_equal(fit(targets, ~left), fit(others, ~left))
    everyone = np.ones(100, dtype=bool)
    assert np.abs(fit(targets, everyone) - fit(others, everyone)).max() > 0.01


def test_untrained_rows_are_predicted_by_the_model_of_the_trained_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the epochs and the temperature that they have where the left rows do not exist."""
    X, y = blobs(100)
    fit = small("deterministic", epochs=8)._training_data(X, y, None).cross_fit(False)
    left = np.random.default_rng(0).random(100) < 0.4
    places = table_folds(fit.table, 5, fit.seed)
    probs = fit(fit.table.y, ~left)
    new = np.cumsum(~left) - 1
    inner = [new[place[~left[place]]] for place in places]
    monkeypatch.setattr(label_noise, "table_folds", lambda *args: inner)
    alone = replace(fit, table=fit.table.rows(~left))(fit.table.y[~left], np.ones((~left).sum(), bool))
    np.testing.assert_allclose(probs[~left], alone, rtol=1e-4, atol=1e-6)
    assert np.isfinite(probs[left]).all()


def test_probabilities_of_folds_are_calibrated() -> None:
    """No other temperature would explain the given labels better; after few epochs, one less than a third."""
    X, y = blobs(300)
    fit = small("deterministic", epochs=4)._training_data(X, y, None).cross_fit(False)
    given = fit.table.y
    logs = centred_logs(fit(given, np.ones(300, dtype=bool)))
    factors = np.exp(np.linspace(-1.5, 1.5, 61))
    nll = [np.mean(logsumexp(f * logs, axis=1) - f * logs[np.arange(300), given]) for f in factors]
    assert 0.85 < factors[np.argmin(nll)] < 1.2


class FoldSpy:
    """Lets cross-fitting through and remembers its pairs of tables."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.through = TableTrainer.fold_probs
        monkeypatch.setattr(TableTrainer, "fold_probs", lambda *args: self(*args))

    def __call__(self, trainer: TableTrainer, pairs: Any, progress: Any) -> Any:
        self.calls.append(pairs)
        return self.through(trainer, pairs, progress)


def test_copies_with_both_labels_are_in_one_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "FEWEST_EXAMPLES", 60)
    monkeypatch.setattr(rounds, "FEWEST_VALIDATION", 12)
    spy = FoldSpy(monkeypatch)
    X, y = blobs(40, 2)
    X, given = np.vstack([X, X[:20]]), np.concatenate([y, 1 - y[:20]])
    clf = correcting(epochs=2).fit(X, given)
    assert len(spy.calls) >= 2
    for pairs in spy.calls:
        assert len(pairs) == 5
        for training, held_out in pairs:
            assert not {*map(tuple, training.x)} & {*map(tuple, held_out.x)}
            assert 60 - len(held_out.y) - 12 <= len(training.y) < 60 - len(held_out.y)  # 12 compare rounds
    probs = clf.correction_.probs
    np.testing.assert_array_equal(probs[:20], probs[40:])
    assert (clf.label_errors_.clean_probs[:20] != clf.label_errors_.clean_probs[40:]).any(1).all()


def test_folds_have_every_class(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = FoldSpy(monkeypatch)
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1, 2], [70, 20, 10])
    small(epochs=1).find_label_errors(rng.normal(size=(100, 2)), y)
    [pairs] = spy.calls
    for _, held_out in pairs:
        assert np.abs(np.bincount(held_out.y, minlength=3) - [14, 4, 2]).max() <= 1


def test_of_many_examples_a_tenth_compares_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = FoldSpy(monkeypatch)
    X, y = blobs(2000, 2)
    correcting("deterministic", epochs=1, batch_size=500).fit(X, uniform_flips(X, y, 0.2, 0))
    assert len(spy.calls) >= 2
    trained = [{*map(tuple, np.vstack([training.x for training, _ in pairs]))} for pairs in spy.calls]
    assert {len(rows) for rows in trained} == {1800}
    assert trained[0] == trained[1]
    assert sum(len(held_out.y) for _, held_out in spy.calls[0]) == 2000


# --- the final model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.1, 0.5])
@pytest.mark.parametrize("class_weight", [None, {0: 3.0}])
def test_the_final_model_has_the_corrected_targets(
    fraction: float, class_weight: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For training, early stopping and calibration; in folds or with one part."""
    seen: list[Any] = []
    through = {name: getattr(table_trainer, name) for name in ("fit_and_calibrate", "cross_fit_posterior")}

    def one_part(model: Any, training: Any, held_out: Any, **options: Any) -> Any:
        seen.extend([training, held_out])
        return through["fit_and_calibrate"](model, training, held_out, **options)

    def in_folds(model: Any, training: Any, folds: Any, **options: Any) -> Any:
        seen.extend([training, *(part for _, *parts in folds for part in parts)])
        return through["cross_fit_posterior"](model, training, folds, **options)

    monkeypatch.setattr(table_trainer, "fit_and_calibrate", one_part)
    monkeypatch.setattr(table_trainer, "cross_fit_posterior", in_folds)
    X, y = blobs(240, 3)
    given, own = uniform_flips(X, y, 0.2, 0), 0.5 + np.random.default_rng(0).random(240)
    clf = correcting(epochs=3, validation_fraction=fraction, class_weight=class_weight)
    clf.fit(X, given, sample_weight=own)
    rows = {tuple(np.float32(x)): i for i, x in enumerate((X - clf.mean_) / clf.scale_)}
    expected = clf.label_errors_.clean_probs * ([1, 1, 1] if class_weight is None else [3, 1, 1])
    count, held_out_classes = 0, []
    for number, (x, targets, weight) in enumerate(part.tensors for part in seen):
        index = [rows[tuple(row)] for row in x.float().numpy()]
        total = expected[index].sum(1)
        np.testing.assert_allclose(targets.numpy(), expected[index] / total[:, None], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(weight.numpy(), own[index] * total, rtol=1e-5)
        count += len(index)
        if number in (range(2, 11, 2) if fraction == 0.1 else [1]):
            held_out_classes.append(np.bincount(given[index], minlength=3) / len(index))
    # Stratified by the given label.
    assert np.abs(held_out_classes - np.bincount(given) / 240).max() < 0.03
    assert len(held_out_classes) == (5 if fraction == 0.1 else 1)
    assert count == (240 if fraction == 0.5 else 240 * 6)
    assert clf.report_.held_out > 0
    assert np.abs(expected - np.eye(3)[given]).max() > 0.3


def test_rounds_begin_with_find_label_errors() -> None:
    X, y = blobs()
    given = uniform_flips(X, y, 0.2, 0)
    clf = correcting(epochs=5).fit(X, given)
    assert clf.correction_.errors is clf.label_errors_
    losses = clf.correction_.losses
    assert clf.correction_.round == int(np.argmin(losses)) + 1
    assert len(losses) <= 3
    first = clf.find_label_errors(X, given)
    assert losses[0] == pytest.approx(float(first.losses.mean()))
    same_errors(first, small(epochs=5).find_label_errors(X, given))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_corrects(method: str) -> None:
    X, y = blobs(40)
    clf = correcting(method, epochs=2, mixup=0.5).fit(X, y)
    np.testing.assert_allclose(clf.predict_proba(X).sum(1), 1)
    assert clf.label_errors_.clean_probs.shape == clf.correction_.probs.shape == (40, 3)


# --- what labels, weights and seeds mean ----------------------------------------------------------------


def test_labels_of_any_kind_and_any_order() -> None:
    X, y = make_blobs(60, 2, centers=[[0, 0], [6, 0], [0, 6]], random_state=0)
    given = uniform_flips(X, y, 0.2, 0)
    names = np.array(["b", "c", "a"])
    numbers, spaced, listed, named = (
        small().find_label_errors(X, labels)
        for labels in (given, given * 10 - 7, given.tolist(), names[given])
    )
    same_errors(numbers, replace(spaced, class_names=numbers.class_names))
    same_errors(numbers, listed)
    assert [e.class_names for e in (numbers, spaced, named)] == [
        tuple("012"),
        ("-7", "3", "13"),
        tuple("abc"),
    ]
    assert (np.unique(names)[named.labels] == names[given]).all()
    assert (np.unique(names)[named.suggested] != names[y]).sum() <= 3 < (given != y).sum() / 2
    clf = correcting().fit(X, names[given])
    assert list(clf.classes_) == ["a", "b", "c"]
    assert (clf.predict(X) == names[y]).mean() > 0.95


def test_results_are_in_the_order_of_the_examples() -> None:
    X, y = blobs(40)
    given = uniform_flips(X, y, 0.2, 0)
    order = np.random.default_rng(1).permutation(len(y))
    one, two = (correcting(epochs=3).fit(X[i], given[i]) for i in (np.arange(len(y)), order))
    for name in ("labels", "wrong_probability", "suggested", "clean_probs", "losses"):
        np.testing.assert_array_equal(
            getattr(one.label_errors_, name)[order], getattr(two.label_errors_, name)
        )
    np.testing.assert_array_equal(one.correction_.probs[order], two.correction_.probs)
    np.testing.assert_array_equal(one.predict_proba(X), two.predict_proba(X))


def test_weights_are_repetition_and_zero_is_left_out() -> None:
    X, y = blobs()
    given = uniform_flips(X, y, 0.2, 0)
    weight = np.random.default_rng(0).integers(0, 3, len(y))
    assert set(weight) == {0, 1, 2}
    one = correcting(epochs=3).fit(X, given, sample_weight=weight)
    two = correcting(epochs=3).fit(X.repeat(weight, 0), given.repeat(weight))
    np.testing.assert_array_equal(one.predict_proba(X), two.predict_proba(X))
    a, b = one.label_errors_, two.label_errors_
    np.testing.assert_array_equal(a.wrong_probability.repeat(weight), b.wrong_probability)
    np.testing.assert_array_equal(a.clean_probs.repeat(weight, 0), b.clean_probs)
    out = weight == 0
    assert np.isnan(a.wrong_probability[out]).all()
    assert np.isnan(a.losses[out]).all()
    assert np.isfinite(a.wrong_probability[~out]).all()
    np.testing.assert_array_equal(a.suggested[out], given[out])
    assert np.isnan(a.probs[out]).all()
    np.testing.assert_array_equal(a.probs.repeat(weight, 0), b.probs)
    np.testing.assert_array_equal(a.clean_probs[out], np.eye(3)[given[out]])
    assert not a.is_wrong[out].any()
    for errors in (a, b):
        assert errors.expected_wrong == pytest.approx(np.nansum(errors.wrong_probability), rel=1e-6)
        low, high = errors.expected_wrong_interval
        assert low <= errors.expected_wrong <= high <= (~np.isnan(errors.wrong_probability)).sum()
    unweighted = correcting(epochs=3).fit(X, given)
    assert np.nanmax(np.abs(unweighted.label_errors_.wrong_probability - a.wrong_probability)) > 1e-3


def test_the_seed_decides() -> None:
    X, y = blobs(30)
    given = uniform_flips(X, y, 0.2, 0)
    before = torch.random.get_rng_state()
    one, two, other = (correcting(epochs=2, random_state=seed).fit(X, given) for seed in (3, 3, 4))
    same_errors(one.label_errors_, two.label_errors_)
    np.testing.assert_array_equal(one.predict_proba(X), two.predict_proba(X))
    assert np.abs(one.correction_.probs - other.correction_.probs).max() > 1e-3
    state = np.random.RandomState(3)  # a state of its own for each call: the estimator does not change
    errors = [small(epochs=2, random_state=state).find_label_errors(X, given) for _ in range(2)]
    same_errors(*errors)
    same_errors(errors[0], small(epochs=2, random_state=3).find_label_errors(X, given))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_fitted_estimator_does_not_change() -> None:
    X, y = blobs()
    clf = correcting(epochs=2).fit(X, y)
    state, probs = dict(vars(clf)), clf.predict_proba(X)
    errors = clf.find_label_errors(X[:30, :2], 1 - (y[:30] > 0))
    assert len(errors) == 30
    assert vars(clf).keys() == state.keys()
    assert all(vars(clf)[name] is value for name, value in state.items())
    np.testing.assert_array_equal(clf.predict_proba(X), probs)
    fresh = small(epochs=2)
    fresh.find_label_errors(X, y)
    assert vars(fresh).keys() == vars(small()).keys()
    with pytest.raises(NotFittedError):
        fresh.predict(X)


def test_copies_have_the_errors_and_another_fit_has_none() -> None:
    X, y = blobs()
    clf = correcting(epochs=2, mixup=0.3).fit(X, y)
    assert (clone(clf).label_noise, clone(clf).mixup) == ("correct", 0.3)
    for twin in (pickle.loads(pickle.dumps(clf)), copy.deepcopy(clf)):
        same_errors(twin.label_errors_, clf.label_errors_)
        np.testing.assert_array_equal(twin.predict_proba(X), clf.predict_proba(X))
    direct = clf.set_params(label_noise=None).fit(X, y)
    assert direct.label_errors_ is direct.correction_ is None


def test_an_interrupted_correction_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = blobs()
    clf = correcting(epochs=2).fit(X, y)
    errors, probs = clf.label_errors_, clf.predict_proba(X)

    def stop(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(table_trainer, "cross_fit_posterior", stop)
    with pytest.raises(KeyboardInterrupt):
        clf.fit(X + 5, 1 - (y > 1))
    assert clf.label_errors_ is errors
    np.testing.assert_array_equal(clf.predict_proba(X), probs)


def test_progress_names_the_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    X, y = blobs()
    given = uniform_flips(X, y, 0.2, 0)
    clf = correcting(epochs=2, verbose=1).fit(X, given)
    lines = capsys.readouterr().out.strip().split("\n")
    found = [line for line in lines if line.startswith("round ")]
    assert len(found) == len(clf.correction_.losses)
    for number, (line, loss) in enumerate(zip(found, clf.correction_.losses, strict=True), 1):
        assert line.startswith(f"round {number} of at most 3, NLL of given labels {loss:.4f}: ")
    assert str(clf.label_errors_) in found[clf.correction_.round - 1]
    assert lines[0].startswith("5 folds  epoch 1/2")
    correcting(epochs=2).fit(X, given)
    small(epochs=2).find_label_errors(X, given)
    assert capsys.readouterr().out == ""


# --- corners --------------------------------------------------------------------------------------------


def test_labels_that_are_easily_learned_are_no_warning() -> None:
    X, y = make_blobs(120, 2, centers=[[0, 0], [50, 0]], random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        errors = small().find_label_errors(X, y)
        clf = correcting().fit(X, y)
    assert not errors.is_wrong.any()
    assert not clf.label_errors_.is_wrong.any()
    assert clf.score(X, y) == 1
    with pytest.warns(UserWarning, match="most probable class"):
        hetsngp.find_label_errors(y, np.eye(2)[y])


def test_one_class_has_no_wrong_labels() -> None:
    X = np.random.default_rng(0).normal(size=(12, 3))
    clf = correcting().fit(X, ["only"] * 12)
    for errors in (clf.label_errors_, small().find_label_errors(X[:1], ["only"])):
        assert errors.expected_wrong == 0
        assert (errors.wrong_probability == 0).all()
        assert (errors.suggested == 0).all()
        assert errors.clean_probs.shape == (len(errors), 1)
        assert "0 of" in str(errors)
    assert (clf.predict(X) == "only").all()


@pytest.mark.parametrize("rows", [4, 5, 7, 9])
def test_fewer_examples_than_folds_need(rows: int) -> None:
    X, y = blobs(rows, 2)
    errors = small(epochs=2).find_label_errors(X, y)
    assert np.isfinite(errors.wrong_probability).all()
    assert correcting(epochs=2).fit(X, y).label_errors_.labels.tolist() == y.tolist()


def test_a_class_of_one_example_and_one_without_weight() -> None:
    X, y = blobs(80, 2)
    y[7], y[[3, 4, 5]] = 2, 3
    errors = small().find_label_errors(X, y)
    assert errors.wrong_probability[7] > 0.5
    assert errors.suggested[7] in (0, 1)
    clf = correcting(class_weight={1: 0.0}).fit(X, y)
    same_errors(clf.find_label_errors(X, y), errors)  # of labels as they are, whatever a mistake costs
    assert list(clf.classes_) == [0, 1, 2, 3]
    assert (clf.predict(X) != 1).all()
    assert (correcting().fit(X, y).predict(X) == 1).mean() > 0.4


def test_class_weights_are_of_the_true_class() -> None:
    """Were they of the given one, wrong labels would count most where their true class counts least."""
    X, y = make_blobs(120, 2, centers=[[0, 0], [1, 0]], random_state=0)
    first, plain, second = (
        correcting("deterministic", class_weight=weights).fit(X, y).predict(X)
        for weights in ({0: 10.0, 1: 0.1}, None, {0: 0.1, 1: 10.0})
    )
    assert (first == 0).mean() > 0.9
    assert 0.3 < (plain == 0).mean() < 0.7
    assert (second == 0).mean() < (plain == 0).mean() - 0.2


def test_balanced_is_by_the_corrected_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each class has a third of the weight by the targets, and not by the given labels."""
    seen: list[Any] = []
    through = table_trainer.cross_fit_posterior
    monkeypatch.setattr(
        table_trainer, "cross_fit_posterior", lambda *a, **o: (seen.append(a[1]), through(*a, **o))[1]
    )
    X, y = make_blobs([16, 84, 100], 2, centers=[[0, 0], [8, 0], [0, 8]], random_state=0)
    given, weight = uniform_flips(X, y, 0.3, 0), 1.0 + np.arange(200) % 2
    clf = correcting(class_weight="balanced").fit(X, given, sample_weight=weight)
    [batches] = seen
    _, targets, weights = batches.tensors
    np.testing.assert_allclose(weights @ targets, weight.sum() / 3, rtol=1e-6)
    corrected, wrong, true = (
        (weight @ part) / weight.sum() for part in (clf.label_errors_.clean_probs[:, 0], given == 0, y == 0)
    )
    assert corrected - true < 0.5 * (wrong - true)


def test_a_class_of_which_nothing_is_left_is_not_balanced() -> None:
    corrected = TrainingTable(
        np.zeros((2, 1)),
        np.array([[0.7, 0.29, 0.0, 0.01], [0.5, 0.49, 0.01, 0.0]]),
        np.array([10, 20.0]),
        None,
    )
    given = np.array([15.0, 14.5, 0.5, 0.0])
    np.testing.assert_allclose(corrected_totals(given, corrected), [17, 12.7, 0.5, 0])
    np.testing.assert_allclose(corrected_totals(given * 4, corrected), [17, 12.7, 1, 0])


def test_class_weights_of_soft_targets_are_those_of_their_parts() -> None:
    """Σ_k w_k q_k log p_k, the loss of an example of each class k with weight q_k."""
    rng = np.random.default_rng(0)
    q, logs, by_class = rng.dirichlet(np.ones(4), 5), -rng.random((5, 4)), np.array([0.0, 1.0, 2.5, 7.0])
    q[3] = [1, 0, 0, 0]
    made = TrainingTable(np.arange(5.0)[:, None], q, np.arange(1, 6), np.arange(5), q.argmax(1))
    table = made.with_class_weights(by_class)
    assert table.group.tolist() == [0, 1, 2, 4]
    np.testing.assert_allclose(table.y.sum(1), 1)
    got = table.weight * (table.y * logs[table.group]).sum(1)
    parts = [sum(w * q[k] * by_class[k] * logs[i, k] for k in range(4)) for i, (q, w) in enumerate(
        zip(made.y, made.weight, strict=True))]  # fmt: skip
    np.testing.assert_allclose(got, np.array(parts)[table.group])
    hard = TrainingTable(made.x, np.array([0, 1, 2, 3, 3]), made.weight, made.group)
    assert hard.with_class_weights(by_class).weight.tolist() == [2, 7.5, 28, 35]


@pytest.mark.parametrize("find", [lambda X, y: small().find_label_errors(X, y), correcting().fit])
def test_bad_data_name_the_fix(find: Any) -> None:
    X, y = blobs(20, 2)
    with pytest.raises(
        ValueError, match="at least 4 different examples of positive weight, and X has 3: give more"
    ):
        find(X[[0, 1, 2, 0, 1, 2]], [0, 1, 1, 1, 0, 0])
    with pytest.raises(ValueError, match="NaN"):
        find(np.where(X > 3, np.nan, X), y)
    with pytest.raises(ValueError, match="Unknown label type"):
        find(X, X[:, 0])
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        find(X, y[:-1])
    with pytest.raises(ValueError, match=r"soft targets \(20, 2\).* y\.argmax\(1\); .* label_noise=None"):
        find(X, np.eye(2)[y])


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"label_noise": "corect"}, "unknown label_noise 'corect'.* did you mean 'correct'"),
        ({"label_noise": True}, "unknown label_noise True: choose one of 'correct'"),
        ({"mixup": -0.1}, "mixup must be at least 0 and finite"),
        ({"mixup": float("nan")}, "mixup must be at least 0 and finite"),
        ({"mixup": None}, "mixup must be at least 0 and finite"),
        ({"epochs": 0}, "epochs must be a positive whole number"),
    ],
)
def test_bad_parameters_name_the_fix(parameters: dict[str, Any], words: str) -> None:
    X, y = blobs(20, 2)
    clf = small(**parameters)
    for call in (clf.fit, clf.find_label_errors):
        with pytest.raises(ValueError, match=words):
            call(X, y)


def test_bad_sample_weights_are_refused() -> None:
    X, y = blobs(20, 2)
    with pytest.raises(ValueError, match="Negative"):
        small().find_label_errors(X, y, sample_weight=np.r_[-1.0, np.ones(19)])
    with pytest.raises(ValueError, match="zero"):
        small().find_label_errors(X, y, sample_weight=np.zeros(20))


# --- mixup ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5])
def test_mixup_reaches_every_training(fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    for name in ("train_folds", "train_with_schedule"):
        through = getattr(table_trainer, name)

        def spy(*args: Any, through: Any = through, **options: Any) -> Any:
            given.append(options["mixup"])
            return through(*args, **options)

        monkeypatch.setattr(table_trainer, name, spy)
    X, y = blobs(240)
    options = {"epochs": 2, "validation_fraction": fraction}
    probs = {
        mixup: small(**options, mixup=mixup).fit(X, y).predict_proba(X)
        for mixup in (0.0, np.float32(0.4), 0.8)
    }
    times = 2 if fraction == 0.1 else 1
    assert given == [0.0] * times + [float(np.float32(0.4))] * times + [0.8] * times
    np.testing.assert_array_equal(probs[0.0], small(**options).fit(X, y).predict_proba(X))
    changes = np.abs(probs[0.8] - probs[0.0]).max()
    assert changes > 1e-3
    given.clear()
    small(**options, mixup=0.3).find_label_errors(X, y)
    assert given == [0.3]


def test_mixup_leaves_more_undecided() -> None:
    """Mixtures of two classes are between them: the loss on training examples stays higher."""
    X, y = make_blobs(200, 2, centers=[[0, 0], [6, 0]], random_state=0)
    options: dict[str, Any] = {"validation_fraction": 0.0, "epochs": 15}
    plain, mixed = (small("deterministic", mixup=a, **options).fit(X, y) for a in (0.0, 2.0))
    assert mixed.history_[-1].loss > 2 * plain.history_[-1].loss
    assert mixed.score(X, y) > 0.95
