"""The scikit-learn classifier: its conventions, and that weights, splits and seeds do what they say."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris, make_blobs, make_moons
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import hetsngp
from hetsngp import HetSNGPClassifier
from hetsngp.fitting import table_trainer as table
from hetsngp.fitting.loop import EpochResult, Schedule
from hetsngp.fitting.progress import Progress
from hetsngp.fitting.table_trainer import GP_LR_MULTIPLIER
from hetsngp.models.methods import METHODS
from hetsngp.models.options import Options
from hetsngp.types import Prediction

FIELDS = [f.name for f in dataclasses.fields(Prediction)]
SMALL: dict[str, Any] = {"width": 32, "depth": 1, "random_features": 64, "rank": 2, "random_state": 0}


def small(method: str = "hetsngp", **parameters: Any) -> HetSNGPClassifier:
    return HetSNGPClassifier(method, **{**SMALL, "epochs": 10, "learning_rate": 1e-2, **parameters})


def plain(method: str = "hetsngp", **parameters: Any) -> HetSNGPClassifier:
    """Without calibration: one training instead of six."""
    return small(method, validation_fraction=0.0, **parameters)


def blobs(rows: int = 240, classes: int = 3, columns: int = 4, seed: int = 0) -> tuple[Any, Any]:
    X, y = make_blobs(rows, columns, centers=classes, cluster_std=3.0, random_state=seed)
    return X, y


def same(a: Prediction, b: Prediction, rtol: float = 0.0) -> None:
    for name in FIELDS:
        np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=rtol, atol=rtol, err_msg=name)


# --- scikit-learn's own checks --------------------------------------------------------------------------


@parametrize_with_checks([small("deterministic")])
def test_scikit_learn_checks(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks([HetSNGPClassifier()])
def test_scikit_learn_checks_with_the_defaults(estimator: Any, check: Any) -> None:
    check(estimator)


# --- what it learns -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "classes"), [*((method, 3) for method in METHODS), ("deterministic", 2), ("hetsngp", 2)]
)
def test_every_method_learns(method: str, classes: int) -> None:
    X, y = blobs(400, classes)
    clf = small(method).fit(X[:300], y[:300])
    assert clf.score(X[300:], y[300:]) > 0.8
    assert clf.model_.config["method"] == method
    pred = clf.predict_uncertainty(X[300:])
    np.testing.assert_allclose(clf.predict_proba(X[300:]), pred.probs, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(pred.probs.sum(1), 1)
    assert all(isinstance(getattr(pred, name), np.ndarray) for name in FIELDS)
    assert clf.report_.held_out == 300  # in five folds, each row once
    values = [result.held_out for result in clf.history_]
    assert 1 <= clf.n_iter_ == len(values) <= 10
    assert values[-1] == min(values)  # as long as served the folds


def test_far_inputs_are_doubted_and_noisy_ones_are_told_apart() -> None:
    X, y = make_moons(400, noise=0.1, random_state=0)
    noisy = (np.arange(400) % 5 == 0) & (X[:, 0] < 0.5)
    clf = HetSNGPClassifier(random_state=0, validation_fraction=0.25).fit(X, np.where(noisy, 1 - y, y))
    pred = clf.predict_uncertainty(np.vstack([X, [[20.0, 20.0], [-20.0, 5.0]]]))
    assert pred.model_uncertainty[-2:].min() > 3 * pred.model_uncertainty[:-2].mean()
    left, right = pred.data_uncertainty[:-2][X[:, 0] < 0], pred.data_uncertainty[:-2][X[:, 0] > 1]
    assert left.mean() > 2 * right.mean()


def test_columns_are_standardised() -> None:
    """Units and offsets of columns do not matter, and a constant column does no harm."""
    X, y = blobs()
    scaled = np.column_stack([X * [1, 1e6, 1e-6, 50] + [0, 1e8, 5, -3], np.full(len(X), 7.7)])
    same_units = np.column_stack([X, np.zeros(len(X))])
    one, two = plain().fit(same_units, y), plain().fit(scaled, y)
    np.testing.assert_allclose(one.predict_proba(same_units), two.predict_proba(scaled), atol=0.05)
    assert two.scale_[-1] == 1.0
    weight = np.random.default_rng(0).random(len(X))
    fitted = plain().fit(X, y, sample_weight=weight)
    np.testing.assert_allclose(fitted.mean_, np.average(X, axis=0, weights=weight))
    variance = np.average((X - fitted.mean_) ** 2, axis=0, weights=weight)
    np.testing.assert_allclose(fitted.scale_, np.sqrt(variance))


@pytest.mark.parametrize("rows", [2, 3, 240, 10_001])
def test_constant_columns_are_told_from_narrow_ones(rows: int) -> None:
    """The mean of many equal numbers is not that number, to the last bits; its spread is no scale."""
    rng = np.random.default_rng(0)
    for value in (7.7, -1e8 / 3, 1e-30, 0.0):
        x = np.column_stack([np.full(rows, value), value + 1e-3 * rng.normal(size=rows)])
        _, scale = table.merge_duplicates(x, np.arange(rows) % 2, 0.1 + rng.random(rows)).moments()
        assert scale[0] == 1.0
        assert 1e-4 < scale[1] < 3e-3


def test_iris_with_names() -> None:
    X, y = load_iris(return_X_y=True, as_frame=True)
    names = load_iris().target_names[y]
    clf = small(epochs=15).fit(X, names)
    assert list(clf.classes_) == ["setosa", "versicolor", "virginica"]
    assert set(clf.predict(X)) == set(clf.classes_)
    assert clf.score(X, names) > 0.9
    assert list(clf.feature_names_in_) == list(X.columns)
    assert (clf.classes_[clf.predict_uncertainty(X).labels] == clf.predict(X)).all()


def test_a_wide_table_keeps_its_distances() -> None:
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(30, 50)), np.arange(30) % 2
    model = plain(epochs=1).fit(X, y).model_
    assert model.backbone.embedding is None
    assert model.num_features == 50
    assert plain(epochs=1).fit(rng.normal(size=(30, 1100)), y).model_.num_features == 32


# --- weights --------------------------------------------------------------------------------------------


FOLDS, ONE_PART = 0.1, 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "class_weight", "fraction"),
    [
        *((method, None, ONE_PART) for method in METHODS),
        *((method, None, FOLDS) for method in ("deterministic", "hetsngp", "posterior_network")),
        *(("hetsngp", "balanced", fraction) for fraction in (FOLDS, ONE_PART)),
        *(("hetsngp", {0: 3.0, 1: 0.5}, fraction) for fraction in (FOLDS, ONE_PART)),
    ],
)
def test_weights_are_repetition(method: str, class_weight: Any, fraction: float) -> None:
    """With folds, or early stopping; with calibration; and whatever the order."""
    X, y = blobs(280, 2)
    weight = np.random.default_rng(0).integers(0, 4, len(X))
    order = np.random.default_rng(1).permutation(int(weight.sum()))
    options = {"class_weight": class_weight, "validation_fraction": fraction, "epochs": 3}
    one = small(method, **options).fit(X, y, sample_weight=weight)
    two = small(method, **options).fit(X.repeat(weight, 0)[order], y.repeat(weight)[order])
    without = small(method, **options).fit(X, y)
    assert one.report_.held_out > 100
    assert one.history_ == two.history_
    assert one.history_[0].held_out != without.history_[0].held_out
    assert one.report_ == two.report_
    same(one.predict_uncertainty(X), two.predict_uncertainty(X))
    assert np.abs(one.predict_proba(X) - without.predict_proba(X)).max() > 1e-3


def test_weights_reach_the_prior_and_the_posterior() -> None:
    """More of the same data: a narrower posterior, by as much as repetition would bring."""
    X, y = blobs(100)
    light, heavy = plain(), plain()
    light.fit(X, y)
    heavy.fit(X, y, sample_weight=np.full(len(X), 100.0))
    assert (light.model_.dataset_size, heavy.model_.dataset_size) == (100, 10_000)
    assert (light.report_.count, heavy.report_.count) == (100, 10_000)
    assert heavy.history_[0].loss == pytest.approx(light.history_[0].loss, rel=0.3)  # a mean, not a sum
    ratio = heavy.predict_uncertainty(X).latent_variance / light.predict_uncertainty(X).latent_variance
    assert np.median(ratio) < 0.5


def test_class_weight_moves_the_decision() -> None:
    X, y = make_blobs([270, 30], 2, centers=[[0, 0], [2, 0]], random_state=0)
    recall = {
        str(w): plain(class_weight=w).fit(X, y).predict(X)[y == 1].mean()
        for w in (None, "balanced", {1: 50.0}, {0: 50.0})
    }
    assert recall["{0: 50.0}"] < 0.2 < recall["None"] < recall["balanced"] < recall["{1: 50.0}"]


def test_balanced_is_the_formula() -> None:
    X, y = blobs(90, 3)
    keep = (y > 0) | (np.arange(90) % 3 == 0)
    X, y = X[keep], y[keep]
    weight = np.random.default_rng(0).random(len(y))
    totals = np.array([weight[y == c].sum() for c in range(3)])
    by_hand = plain(epochs=3).fit(X, y, sample_weight=weight * weight.sum() / (3 * totals[y]))
    got = plain(epochs=3, class_weight="balanced").fit(X, y, sample_weight=weight)
    same(by_hand.predict_uncertainty(X), got.predict_uncertainty(X), rtol=1e-5)


@pytest.mark.parametrize("class_weight", [None, "balanced", {0: 3.0}])
def test_one_hot_targets_are_class_numbers(class_weight: Any) -> None:
    X, y = blobs(60)
    X, y = np.vstack([X, X[:9]]), np.concatenate([y, (y[:9] + 1) % 3])
    weight = np.random.default_rng(0).integers(0, 3, len(y))
    hard, soft = (
        small("sngp", class_weight=class_weight).fit(X, targets, sample_weight=weight)
        for targets in (y, np.eye(3)[y])
    )
    np.testing.assert_allclose(soft.predict_proba(X), hard.predict_proba(X), atol=2e-3)
    assert soft.classes_.tolist() == [0, 1, 2]
    assert soft.predict(X).dtype.kind == "i"
    assert soft.report_.held_out == hard.report_.held_out


def test_soft_targets_are_learned_and_calibrated() -> None:
    X, _ = blobs(300, 2)
    q = np.full((300, 2), [0.3, 0.7])
    clf = small("sngp", epochs=15).fit(X, q)
    assert np.abs(clf.predict_proba(X) - q).mean() < 0.02
    np.testing.assert_allclose(clf.predict_proba(X), q, atol=0.1)
    assert clf.report_.held_out == 300
    assert (clf.predict(X) == 1).all()
    q = np.where(X[:, :1] > X[:, :1].mean(), [0.2, 0.1, 0.7], [0.5, 0.5, 0.0])
    for targets in (q, q.tolist(), np.float32(q)):
        probs = small("deterministic", epochs=20).fit(X, targets).predict_proba(X)
        assert np.abs(probs - q).mean() < 0.08


def test_soft_targets_have_class_weights() -> None:
    """Σ_k w_k q_k is the weight: the optimum is w_k q_k, relative to the sum."""
    X, _ = blobs(300, 2)
    q = np.full((300, 2), [0.3, 0.7])
    for weights, first in (({0: 4.0, 1: 1.0}, 1.2 / 1.9), ("balanced", 0.5), ({1: 0.0}, 1.0)):
        clf = small("deterministic", epochs=15, class_weight=weights).fit(X, q)
        assert np.abs(clf.predict_proba(X)[:, 0] - first).mean() < 0.07
    with pytest.raises(ValueError, match="leaves no example a positive weight"):
        small(class_weight={1: 0.0}).fit(X, np.eye(2)[np.ones(300, dtype=int)])


def test_merged_examples_keep_their_targets() -> None:
    rng = np.random.default_rng(0)
    x, q = rng.integers(0, 3, (80, 1)).astype(float), rng.integers(1, 3, (80, 3)).astype(float)
    q, weight = q / q.sum(1, keepdims=True), rng.integers(0, 3, 80).astype(float)
    merged, rows = table.merge_with_rows(x, q, weight)
    assert len(merged.y) < 60 < (weight > 0).sum() + 20
    np.testing.assert_array_equal(merged.x[rows[weight > 0]], x[weight > 0])
    np.testing.assert_array_equal(merged.y[rows[weight > 0]], q[weight > 0])
    np.testing.assert_array_equal(rows < 0, weight == 0)
    np.testing.assert_allclose(merged.weight, np.bincount(rows[weight > 0], weights=weight[weight > 0]))
    assert len(np.unique(np.hstack([merged.x, merged.y]), axis=0)) == len(merged.y)
    np.testing.assert_array_equal(merged.label, merged.y.argmax(1))
    order = rng.permutation(80)
    again, _ = table.merge_with_rows(x[order], q[order], weight[order])
    for name in ("x", "y", "weight", "group", "label"):
        np.testing.assert_array_equal(getattr(again, name), getattr(merged, name))


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (np.eye(2, dtype=int)[[0, 1] * 10], r"looks one-hot.* y\.argmax\(1\), or .* y\.astype\(float\)"),
        (np.eye(2, dtype=bool)[[0, 1] * 10], "looks one-hot"),
        (np.ones((20, 2), dtype=int), "multilabel-indicator|should be a 1d array"),
        (np.arange(40).reshape(20, 2), "should be a 1d array"),
        (np.full((20, 2), 0.7), r"sum one in each row: y / y\.sum"),
        (np.full((20, 2), [-0.5, 1.5]), "not negative"),
        (np.full((20, 2), np.nan), "must be probabilities"),
        (np.full((19, 2), 0.5), "inconsistent numbers of samples"),
        ([[0.5, 0.5], [1.0]] * 10, "inhomogeneous|1d array"),
    ],
)
def test_bad_soft_targets_name_the_fix(targets: Any, words: str) -> None:
    X, _ = blobs(20, 2)
    with pytest.raises(ValueError, match=words):
        small().fit(X, targets)


def test_a_class_of_no_weight_is_known_but_not_expected() -> None:
    X, y = blobs(120, 3)
    clf = plain(class_weight={2: 0.0}).fit(X, y)
    assert list(clf.classes_) == [0, 1, 2]
    assert 2 not in clf.predict(X[y < 2])
    assert (clf.predict(X[y == 2]) == 2).mean() < 0.2 < (plain().fit(X, y).predict(X[y == 2]) == 2).mean()


# --- the split ------------------------------------------------------------------------------------------


def test_copies_are_merged_in_an_order_the_values_decide() -> None:
    x = np.array([[1.0, 2.0], [0.0, 5.0], [1.0, 2.0], [1.0, 2.0], [-0.0, 5.0], [9.0, 9.0]])
    y, weight = np.array([0, 1, 0, 1, 1, 0]), np.array([1.0, 2.0, 0.5, 4.0, 1.0, 0.0])
    merged = table.merge_duplicates(x, y, weight)
    got = {(*row, int(label)): w for row, label, w in zip(merged.x, merged.y, merged.weight, strict=True)}
    assert got == {(1.0, 2.0, 0): 1.5, (1.0, 2.0, 1): 4.0, (0.0, 5.0, 1): 3.0}
    assert len(set(merged.group)) == 2
    order = np.random.default_rng(0).permutation(6)
    again = table.merge_duplicates(x[order], y[order], weight[order])
    for name in ("x", "y", "weight", "group"):
        np.testing.assert_array_equal(getattr(again, name), getattr(merged, name))


def rows_of(part: table.TrainingTable) -> set[tuple[float, ...]]:
    return {*map(tuple, part.x)}


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5])
def test_a_large_table_has_one_held_out_part_in_proportion(fraction: float) -> None:
    rng = np.random.default_rng(0)
    y = rng.choice(4, 2000, p=[0.6, 0.3, 0.08, 0.02])
    data = table.merge_duplicates(rng.normal(size=(2000, 2)), y, np.ones(2000))
    [(training, held_out)] = table.split(data, fraction, seed=3)
    assert len(held_out.y) == fraction * 2000
    assert rows_of(training) | rows_of(held_out) == rows_of(data)
    assert not rows_of(training) & rows_of(held_out)
    for label in range(4):
        assert abs((held_out.y == label).sum() - fraction * (y == label).sum()) <= 1
    [(_, other)] = table.split(data, fraction, seed=4)
    assert not np.array_equal(other.x, held_out.x)


@pytest.mark.parametrize(
    ("rows", "fraction", "folds"),
    [(300, 0.1, 5), (300, 0.21, 5), (200, 0.3, 3), (150, 0.5, 2), (100, 0.9, 2)],
)
def test_a_small_table_has_every_row_held_out_once(rows: int, fraction: float, folds: int) -> None:
    rng = np.random.default_rng(0)
    y = rng.choice(3, rows, p=[0.6, 0.3, 0.1])
    data = table.merge_duplicates(rng.normal(size=(rows, 2)), y, np.ones(rows))
    pairs = table.split(data, fraction, seed=3)
    assert len(pairs) == folds
    assert np.array_equal(np.sort(np.concatenate([held_out.group for _, held_out in pairs])), np.arange(rows))
    for training, held_out in pairs:
        assert rows_of(training) | rows_of(held_out) == rows_of(data)
        assert not rows_of(training) & rows_of(held_out)
        assert abs(len(held_out.y) - rows / folds) < 1
        for label in range(3):
            assert abs((held_out.y == label).sum() - (y == label).sum() / folds) <= 1.5
    again, other = table.split(data, fraction, seed=3), table.split(data, fraction, seed=4)
    assert np.array_equal(again[0][1].x, pairs[0][1].x)
    assert not np.array_equal(other[0][1].x, pairs[0][1].x)


@pytest.mark.parametrize(
    ("rows", "fraction", "parts"),
    [(994, 0.1, 5), (996, 0.1, 1), (200, 0.5, 1), (198, 0.5, 2), (20, 0.1, 5), (19, 0.1, 0), (500, 0.0, 0)],
)
def test_how_much_is_enough(rows: int, fraction: float, parts: int) -> None:
    """A hundred held-out rows make one part, twenty in all folds make folds, fewer make nothing."""
    data = table.merge_duplicates(np.arange(float(rows)).reshape(-1, 1), np.arange(rows) % 2, np.ones(rows))
    assert len(table.split(data, fraction, seed=0)) == parts


def test_folds_of_one_class_are_no_folds() -> None:
    """29 rows of one class and one of another, which never leaves training: nothing to calibrate by."""
    x = np.arange(30.0).reshape(-1, 1)
    assert table.split(table.merge_duplicates(x, np.arange(30) // 29, np.ones(30)), 0.2, seed=0) == []
    assert len(table.split(table.merge_duplicates(x, np.arange(30) // 28, np.ones(30)), 0.2, seed=0)) == 5


@pytest.mark.parametrize(("values", "parts"), [(5, 1), (3, 5)])
def test_rows_with_the_same_x_stay_on_one_side(values: int, parts: int) -> None:
    """Else a table of few distinct rows and noisy labels would be calibrated on the opposite of the truth."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, values, (4000, 4)).astype(float)
    data = table.merge_duplicates(x, rng.integers(0, 2, 4000), np.ones(4000))
    pairs = table.split(data, 0.2, seed=0)
    assert len(pairs) == parts
    for training, held_out in pairs:
        assert not rows_of(training) & rows_of(held_out)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small(epochs=2).fit(x, (x[:, 0] > values // 2) ^ (rng.random(4000) < 0.2))


@pytest.mark.parametrize("fraction", [0.6, 0.1])
def test_no_class_leaves_training(fraction: float) -> None:
    rng = np.random.default_rng(0)
    y = np.r_[np.zeros(200), np.ones(200), [2], [3, 3]].astype(int)
    data = table.merge_duplicates(rng.normal(size=(len(y), 2)), y, np.ones(len(y)))
    for seed in range(20):
        pairs = table.split(data, fraction, seed=seed)
        assert len(pairs) == (1 if fraction == 0.6 else 5)
        for training, held_out in pairs:
            assert set(training.y) == {0, 1, 2, 3}
            assert 2 not in held_out.y
    # A class that is never the heaviest of its x has no place of its own, and still stays.
    x = np.r_[np.arange(200.0), 0.0, 1.0, 2.0].reshape(-1, 1)
    y, weight = np.r_[np.arange(200) % 2, [2, 2, 2]], np.r_[np.full(200, 5.0), np.ones(3)]
    for seed in range(20):
        for training, held_out in table.split(table.merge_duplicates(x, y, weight), fraction, seed=seed):
            assert set(training.y) == {0, 1, 2}
            assert not set(training.group) & set(held_out.group)


# --- what is held out, and what for ---------------------------------------------------------------------


def rows_in(loader: Any) -> set[tuple[float, ...]]:
    return {*map(tuple, loader.tensors[0].tolist())}


class Spy:
    """Lets trainings through and remembers what they were given, and what the folds found."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[set[tuple[float, ...]]] = []
        self.options: list[dict[str, Any]] = []
        self.folds: list[tuple[Any, ...]] = []
        self.fold_options: dict[str, Any] = {}
        self.found: list[EpochResult] = []
        loop = hetsngp.fitting.loop
        self.follow, self.train_folds = loop.train_with_schedule, loop.train_folds
        monkeypatch.setattr("hetsngp.fitting.table_trainer.train_with_schedule", self)
        monkeypatch.setattr("hetsngp.fitting.table_trainer.train_folds", self.of_folds)

    def __call__(self, model: Any, loader: Any, schedule: Schedule, **options: Any) -> Any:
        self.rows.append(rows_in(loader))
        self.options.append({**dataclasses.asdict(schedule), **options})
        return self.follow(model, loader, schedule, **options)

    def of_folds(self, models: Any, loaders: Any, validation: Any, schedule: Any, **options: Any) -> Any:
        self.folds = list(zip(models, loaders, validation, strict=True))
        self.fold_options = {"schedule": schedule, **options}
        self.found = self.train_folds(models, loaders, validation, schedule, **options)
        return self.found

    @property
    def best(self) -> int:
        return int(np.argmin([result.held_out for result in self.found])) + 1


def flipped(rows: int = 120, share: float = 0.4, seed: int = 0) -> tuple[Any, Any]:
    """Two blobs far apart, and a share of wrong labels."""
    X, y = make_blobs(rows, 2, centers=[[0, 0], [6, 0]], random_state=seed)
    return X, np.where(np.random.default_rng(seed).random(rows) < share, 1 - y, y)


def test_small_tables_are_stopped_and_calibrated_in_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five models that each miss a fifth tell for how long to train the one of all rows."""
    spy = Spy(monkeypatch)
    X, y = flipped(100, 0.1)
    weight = 0.5 + np.random.default_rng(0).random(100)
    clf = small(epochs=12, patience=None).fit(X, y, sample_weight=weight)
    [everything] = spy.rows
    assert len(everything) == 100
    for model, training, held_out in spy.folds:
        assert (len(rows_in(training)), len(rows_in(held_out))) == (80, 20)
        assert rows_in(training) | rows_in(held_out) == everything
        assert model.dataset_size == pytest.approx(weight.sum() - float(held_out.tensors[2].sum()))
        assert float(training.tensors[2].mean()) == pytest.approx(1.0)
    held_out = [rows_in(each) for _, _, each in spy.folds]
    assert sum(map(len, held_out)) == len(set.union(*held_out)) == 100
    assert sum(float(each.tensors[2].sum()) for _, _, each in spy.folds) == pytest.approx(weight.sum())
    assert spy.fold_options["schedule"] == Schedule(12, 1e-2, 1e-4, GP_LR_MULTIPLIER)
    assert spy.fold_options["patience"] is None

    values = [result.held_out for result in spy.found]
    assert 1 < spy.best < len(values) == 12  # so that there was something to choose
    assert clf.n_iter_ == len(clf.history_) == spy.best
    assert [result.held_out for result in clf.history_] == values[: spy.best]
    [options] = spy.options
    assert options["validation"] is options["patience"] is None
    assert (options["epochs"], options["stop_after"], options["gp_lr_multiplier"]) == (
        12,
        spy.best,
        GP_LR_MULTIPLIER,
    )
    assert clf.report_.held_out == clf.report_.count == pytest.approx(weight.sum())
    assert (
        clf.model_.calibration["scale"] == clf.report_.scale == float(clf.model_.head.latent.posterior.scale)
    )

    # The model is that of all rows; folds give it epochs, temperature, Λ and scale, and nothing else.
    def until_best(model: Any, loader: Any, schedule: Schedule, **given: Any) -> Any:
        return spy.follow(model, loader, dataclasses.replace(schedule, stop_after=spy.best), **given)

    monkeypatch.setattr("hetsngp.fitting.table_trainer.train_with_schedule", until_best)
    without = plain(epochs=12).fit(X, y, sample_weight=weight)
    assert without.report_.held_out == 0
    for (name, a), b in zip(clf.model_.named_parameters(), without.model_.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert [result.loss for result in clf.history_] == [result.loss for result in without.history_]
    assert float(clf.model_.temperature) == clf.report_.temperature != float(without.model_.temperature)
    np.testing.assert_array_equal(clf.mean_, without.mean_)


@pytest.mark.parametrize("patience", [1, 3])
def test_folds_stop_when_nothing_gets_better(patience: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch)
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(60, 3)), rng.integers(0, 2, 60)  # nothing to learn
    clf = small(patience=patience, epochs=40).fit(X, y)
    assert len(spy.found) == spy.best + patience < 40
    assert clf.n_iter_ == len(clf.history_) == spy.best
    assert {result.epochs for result in clf.history_} == {spy.best}


@pytest.mark.parametrize("method", ["deterministic", "hetsngp"])
def test_folds_train_long_where_it_helps_and_not_where_it_is_memorising(method: str) -> None:
    options: dict[str, Any] = {"epochs": 30, "patience": 5}
    clean = small(method, **options).fit(*flipped(share=0.0))
    noisy = small(method, **options).fit(*flipped(share=0.4))
    assert noisy.n_iter_ < 8
    assert clean.n_iter_ > 2 * noisy.n_iter_


def test_large_tables_are_stopped_and_calibrated_by_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch)
    X, y = blobs(1000)
    clf = small(patience=2, epochs=3).fit(X, y)
    assert len(spy.rows) == 1
    assert len(spy.rows[0]) == 900
    validation = rows_in(spy.options[0]["validation"])
    assert len(validation) == 100
    assert not validation & spy.rows[0]
    assert (spy.options[0]["patience"], spy.options[0]["stop_after"]) == (2, None)
    assert not spy.folds
    assert (clf.report_.held_out, clf.report_.count) == (100, 900)
    assert clf.history_[0].held_out is not None


@pytest.mark.parametrize(("rows", "fraction"), [(15, 0.1), (60, 0.0)])
def test_too_little_data_is_not_held_out(rows: int, fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch)
    X, y = blobs(rows)
    clf = small(validation_fraction=fraction, patience=1).fit(X, y)
    assert [len(each) for each in spy.rows] == [rows]
    assert clf.report_.held_out == 0
    assert clf.report_.count == rows
    assert not spy.folds
    assert clf.n_iter_ == len(clf.history_) == 10
    assert {result.held_out for result in clf.history_} == {None}
    assert clf.predict_uncertainty(X).latent_variance.min() > 0


def test_training_stops_when_nothing_gets_better() -> None:
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(300, 3)), rng.integers(0, 2, 300)  # nothing to learn
    clf = small(patience=3, epochs=60, validation_fraction=0.4).fit(X, y)
    values = [result.held_out for result in clf.history_]
    assert clf.n_iter_ == int(np.argmin(values)) + 1 + 3 < 60
    assert small(patience=None, validation_fraction=0.4).fit(X, y).n_iter_ == 10


# --- corners --------------------------------------------------------------------------------------------


def test_one_class() -> None:
    X = np.random.default_rng(0).normal(size=(12, 3))
    clf = small().fit(X, ["only"] * 12)
    assert (clf.predict(X) == "only").all()
    np.testing.assert_array_equal(clf.predict_proba(X), np.ones((12, 1)))
    pred = clf.predict_uncertainty(X, batch_size=5)
    for name in FIELDS:
        value = getattr(pred, name)
        assert value.shape == ((12, 1) if "probs" in name else (12,))
        assert (value == ("probs" in name)).all()
    assert clf.n_iter_ == 0
    pickle.loads(pickle.dumps(clf)).predict(X)


@pytest.mark.parametrize("method", METHODS)
def test_two_rows_and_rows_that_are_all_alike(method: str) -> None:
    for X in ([[0.0], [1.0]], [[3.0], [3.0]]):
        clf = small(method, epochs=2).fit(X, [0, 1])
        assert np.isfinite(clf.predict_proba([[0.0], [1e6]])).all()


@pytest.mark.parametrize("method", METHODS)
def test_batches_equal_the_whole(method: str) -> None:
    X, y = blobs()
    clf = small(method, epochs=3).fit(X, y)
    X = X[:40]
    whole = clf.predict_uncertainty(X)
    same(clf.predict_uncertainty(X, batch_size=7), whole, rtol=1e-9)
    assert len(whole) == len(X)
    with pytest.raises(ValueError, match="batch_size must be a positive whole number"):
        clf.predict_uncertainty(X, batch_size=0)


def test_lists_frames_and_memmaps(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    X, y = blobs(60)
    expected = small(epochs=2).fit(X, y).predict_proba(X)
    mapped = np.memmap(tmp_path / "x", dtype=np.float64, mode="w+", shape=X.shape)
    mapped[:] = X
    read_only = np.memmap(tmp_path / "x", dtype=np.float64, mode="r", shape=X.shape)
    frame = pandas.DataFrame(X, columns=list("abcd"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for form in (X.tolist(), frame, read_only, np.asfortranarray(X)):
            labels = y.tolist() if isinstance(form, list) else y
            np.testing.assert_array_equal(small(epochs=2).fit(form, labels).predict_proba(form), expected)
    with pytest.raises(ValueError, match="NaN"):
        small().fit(np.where(X > 5, np.nan, X), y)
    with pytest.raises(ValueError, match="features"):
        small(epochs=1).fit(X, y).predict(X[:, :2])
    with pytest.raises(NotFittedError):
        small().predict_uncertainty(X)


STEPS = ["fit_and_calibrate", "cross_fit_posterior", "train_with_schedule", "train_folds"]


@pytest.mark.parametrize("where", STEPS)
def test_an_interrupted_fit_changes_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = blobs(60)
    clf = (plain if where == "fit_and_calibrate" else small)(epochs=2).fit(X, y)
    before = clf.predict_proba(X)

    def stop(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"hetsngp.fitting.table_trainer.{where}", stop)
    with pytest.raises(KeyboardInterrupt):
        clf.fit(X + 5, 1 - (y > 1))
    np.testing.assert_array_equal(clf.predict_proba(X), before)
    with pytest.raises(KeyboardInterrupt):
        (fresh := clone(clf)).fit(X, y)
    with pytest.raises(NotFittedError):
        fresh.predict(X)


# --- randomness, copies ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_seed_decides_and_torch_is_left_alone(method: str) -> None:
    X, y = blobs(90)
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    one, two = small(method, epochs=3).fit(X, y), small(method, epochs=3).fit(X, y)
    other = small(method, epochs=3, random_state=1).fit(X, y)
    assert torch.equal(torch.random.get_rng_state(), before[0])
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
    torch.manual_seed(99)
    three = small(method, epochs=3).fit(X, y)
    same(one.predict_uncertainty(X[:20]), two.predict_uncertainty(X[:20]))
    same(one.predict_uncertainty(X[:20]), three.predict_uncertainty(X[:20]))
    assert np.abs(one.predict_proba(X) - other.predict_proba(X)).max() > 1e-3


def test_copies_predict_the_same(tmp_path: Path) -> None:
    X, y = blobs()
    few = X[:20]
    clf = small(epochs=3, width=np.int64(16))
    expected = clf.fit(X, y).predict_uncertainty(few)
    same(pickle.loads(pickle.dumps(clf)).predict_uncertainty(few), expected)
    same(copy.deepcopy(clf).predict_uncertainty(few), expected)
    fresh = clone(clf)
    assert not hasattr(fresh, "model_")
    same(fresh.fit(X, y).predict_uncertainty(few), expected)
    hetsngp.save(clf.model_, tmp_path)
    inputs = torch.as_tensor((few - clf.mean_) / clf.scale_)
    same(hetsngp.load(tmp_path).predict(inputs).numpy(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_on_a_gpu(method: str) -> None:
    X, y = blobs(400)
    clf = small(method, device="cuda").fit(X[:300], y[:300])
    assert clf.model_.temperature.is_cuda
    assert clf.score(X[300:], y[300:]) > 0.8
    there = clf.predict_uncertainty(X[:20])
    same(pickle.loads(pickle.dumps(clf)).predict_uncertainty(X[:20]), there, rtol=1e-9)
    clf.model_.cpu()  # trained there, used here
    same(clf.predict_uncertainty(X[:20]), there, rtol=1e-9)


# --- in scikit-learn's company --------------------------------------------------------------------------


def test_pipeline_grid_search_and_cross_validation() -> None:
    X, y = blobs(200)
    names = np.array(["a", "b", "c"])[y]
    pipe = make_pipeline(MinMaxScaler(), plain())
    assert cross_val_score(pipe, X, names, cv=3).mean() > 0.8
    grid = {"hetsngpclassifier__amplitude": [1.0, 10.0], "hetsngpclassifier__method": ["sngp", "hetsngp"]}
    search = GridSearchCV(pipe, grid, cv=2, scoring="neg_log_loss", error_score="raise").fit(X, names)
    assert len(search.cv_results_["mean_test_score"]) == 4
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert search.best_estimator_.predict_proba(X).shape == (200, 3)
    assert search.best_estimator_[-1].predict_uncertainty(X).probs.shape == (200, 3)


def test_options_are_those_of_build_with_their_names() -> None:
    parameters = set(HetSNGPClassifier().get_params())
    handed_on = parameters & {f.name for f in dataclasses.fields(Options)}
    # The data say how large they and their classes are; inducing features are for networks that do not train.
    kept = {"link", "dataset_size", "class_counts", "sample_beta", "features"}
    assert handed_on == {f.name for f in dataclasses.fields(Options)} - kept
    values = {
        **{"amplitude": 3.0, "rank": 3, "random_features": 32, "length_scale": 2.5, "temperature": 1.5},
        **{"normalization": "polar", "posterior": "shared", "noise": "parameter_efficient", "num_samples": 8},
        **{"likelihood": "mean_log", "sampler": "mc", "spectral_bound": 0.5, "num_members": 2},
        **{"input_repetition": 0.5, "batch_repetition": 2, "latent_dim": 3, "flow_layers": 2},
        **{"entropy_weight": 0.01, "kernel": "rbf+linear", "linear_share": 0.3},
    }
    assert set(values) == handed_on
    X, y = blobs(30)
    options = small(epochs=1, **values).fit(X, y).model_.config["options"]
    assert {name: options[name] for name in values} == values


# --- progress -------------------------------------------------------------------------------------------


def test_progress_is_printed_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    X, y = blobs(240)
    options: dict[str, Any] = {"epochs": 20, "patience": None, "validation_fraction": 0.5}
    small(**options).fit(X, y)
    assert capsys.readouterr().out == ""
    clf = small(**options, verbose=1).fit(X, y)
    *epochs, last = capsys.readouterr().out.strip().split("\n")
    assert last == str(clf.report_)
    assert [line.split()[1] for line in epochs] == ["1/20", *(f"{i}/20" for i in range(2, 21, 2))]
    final = clf.history_[-1]
    assert epochs[-1] == f"epoch 20/20  loss {final.loss:.4f}  held-out NLL {final.held_out:.4f}"
    with Progress(40, 0, show=True) as progress:
        for epoch in (1, 2, 3):  # stopped early: the last one is shown too
            progress(EpochResult(epoch, 40, 0.5, None))
    assert capsys.readouterr().out.split("\n") == ["epoch 1/40  loss 0.5000", "epoch 3/40  loss 0.5000", ""]


def test_progress_names_the_folds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    X, y = blobs(60)
    clf = small(epochs=2, verbose=1).fit(X, y)
    *epochs, last = capsys.readouterr().out.strip().split("\n")
    expected = [
        f"5 folds  epoch {r.epoch}/2  loss {r.loss:.4f}  held-out NLL {r.held_out:.4f}" for r in spy.found
    ]
    expected += [f"all examples  epoch {r.epoch}/{clf.n_iter_}  loss {r.loss:.4f}" for r in clf.history_]
    assert epochs == expected
    assert len(expected) == 4
    assert last == str(clf.report_)


def test_progress_is_a_bar_in_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")
    X, y = blobs(40)
    clf = small(epochs=3, verbose=1).fit(X, y)
    text = capsys.readouterr().out
    assert "\x1b[" in text
    assert f"all examples  epoch {clf.n_iter_}/{clf.n_iter_}  loss" in text
    assert str(clf.report_) in text


# --- bad parameters -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"method": "hetsnpg"}, "unknown method 'hetsnpg'.* did you mean 'hetsngp'"),
        ({"width": 0}, "width must be a positive whole number, got 0"),
        ({"depth": 1.5}, "depth must be a positive whole number"),
        ({"epochs": -1}, "epochs must be a positive whole number"),
        ({"batch_size": None}, "batch_size must be a positive whole number"),
        ({"learning_rate": 0}, "learning_rate must be a positive finite number"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0"),
        ({"patience": 0}, "patience must be a positive whole number"),
        ({"validation_fraction": 1.0}, "validation_fraction must be at least 0 and less than 1, got 1.0"),
        ({"validation_fraction": None}, "validation_fraction must be at least 0"),
        ({"class_weight": "balance"}, "unknown class_weight 'balance'.* did you mean 'balanced'"),
        ({"class_weight": {0: -1.0}}, "class_weight must be finite and not negative"),
        ({"class_weight": {0: 0.0, 1: 0.0}}, "leaves no example a positive weight"),
        ({"device": "gpu"}, "device 'gpu' cannot be used here"),
        ({"random_features": 33}, "random_features must be even"),
        ({"posterior": "exakt"}, "unknown posterior 'exakt'.* did you mean 'exact'"),
        ({"amplitude": -1.0}, "amplitude must be a positive finite number"),
        ({"random_state": "zero"}, "cannot be used to seed"),
    ],
)
def test_bad_parameters_name_the_fix(parameters: dict[str, Any], words: str) -> None:
    X, y = blobs(20, 2)
    clf = HetSNGPClassifier(**parameters)  # no complaint before fit
    with pytest.raises(ValueError, match=words):
        clf.fit(X, y)
    with pytest.raises(NotFittedError):
        clf.predict(X)


@pytest.mark.parametrize("weight", [np.zeros(20), np.r_[-1.0, np.ones(19)], np.r_[np.nan, np.ones(19)]])
def test_bad_sample_weights_are_refused(weight: Any) -> None:
    X, y = blobs(20, 2)
    with pytest.raises(ValueError, match=r"zero|Negative|NaN"):
        small().fit(X, y, sample_weight=weight)


# --- imports --------------------------------------------------------------------------------------------


def test_without_scikit_learn_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['sklearn'] = None\n"
        "import hetsngp\nfrom hetsngp import *\nassert 'HetSNGPClassifier' in dir(hetsngp)\n"
        "try: hetsngp.HetSNGPClassifier\n"
        "except ImportError as error: print(error)\n"
    )
    source = str(Path(hetsngp.__file__).parents[1])
    run = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": source}, capture_output=True, text=True
    )
    assert "pip install 'hetsngp[sklearn]'" in run.stdout, run.stderr
    with pytest.raises(AttributeError, match="HetSNGPClasifier"):
        hetsngp.HetSNGPClasifier  # noqa: B018
