"""Rounds of correction, with a real cross-fit: logistic regressions in real folds."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from tests.unit.labels.made_noise import draw, pairs

from hetsngp.labels import Correction, LabelErrors, correct_in_rounds, find_label_errors
from hetsngp.labels import rounds as rounds_module
from hetsngp.labels.rounds import Score

K, FOLDS = 3, 4


def blobs(n: int, seed: int = 0, rate: float = 0.2) -> tuple[Any, Any, Any]:
    """Inputs (n, 2) of three classes, true labels, and labels of which some are the next class."""
    rng = np.random.default_rng(seed)
    true = rng.integers(K, size=n)
    angle = 2 * np.pi * true / K
    x = 2 * np.stack([np.cos(angle), np.sin(angle)], 1) + rng.standard_normal((n, 2))
    return x, true, draw(pairs(K, rate)[true], rng)


class LogisticFolds:
    """Cross-fitting by softmax regression on quadratic features; keeps what it was given."""

    def __init__(self, x: Any, *, spoil_after: int = 99) -> None:
        self.phi = np.stack([np.ones(len(x)), *x.T, *(x.T**2), x[:, 0] * x[:, 1]], 1)
        self.calls: list[tuple[Any, Any]] = []
        self.returned: list[Any] = []
        self.scores: list[float] = []
        self.spoil_after = spoil_after

    def __call__(self, targets: Any, trained: Any, score: Score) -> Any:
        self.calls.append((np.array(targets), np.array(trained)))
        n = len(self.phi)
        soft = np.eye(K)[targets] if np.ndim(targets) == 1 else np.asarray(targets, dtype=np.float64)
        probs = np.empty((n, K))
        for fold in range(FOLDS):
            inside = np.arange(n) % FOLDS == fold
            probs[inside] = self.predict(self.fit(soft, trained & ~inside), inside)
        if len(self.calls) > self.spoil_after:  # a later round that predicts worse
            probs = 0.5 * probs + 0.5 * np.random.default_rng(0).dirichlet(np.ones(K), n)
        self.scores.append(score(probs))
        self.returned.append(probs)
        return probs

    def fit(self, soft: Any, rows: Any) -> Any:
        phi, target, weights = self.phi[rows], soft[rows], np.zeros((self.phi.shape[1], K))
        curvature = 0.5 * phi.T @ phi + np.eye(phi.shape[1])  # an upper bound of the Hessian
        for _ in range(60):
            p = self.softmax(phi @ weights)
            weights -= np.linalg.solve(curvature, phi.T @ (p - target) + weights)
        return weights

    def predict(self, weights: Any, rows: Any) -> Any:
        return self.softmax(self.phi[rows] @ weights)

    @staticmethod
    def softmax(z: Any) -> Any:
        e = np.exp(z - z.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)


LARGE = blobs(2400)
SMALL = blobs(1000)


def run(data: Any, rounds: int = 3, **options: Any) -> tuple[Correction, LogisticFolds]:
    cross_fit = LogisticFolds(data[0], **options)
    return correct_in_rounds(data[2], cross_fit, rounds=rounds), cross_fit


def test_labels_of_validation_examples_are_in_no_target() -> None:
    _, cross_fit = run(LARGE)
    validation = ~cross_fit.calls[0][1]
    assert validation.sum() == 240
    assert len(cross_fit.calls) >= 2
    for _, trained in cross_fit.calls:
        assert (trained == ~validation).all()
    # Other labels of validation examples leave everything that the models see as it was, but for the matrix
    # T, to which they have been added as all others: of trained examples nothing depends on a single one.
    given = LARGE[2].copy()
    given[validation] = (given[validation] + np.random.default_rng(1).integers(1, K, validation.sum())) % K
    first = LogisticFolds(LARGE[0])
    correct_in_rounds(given, first, rounds=1)
    np.testing.assert_array_equal(first.returned[0], cross_fit.returned[0])


def test_rounds_are_compared_by_the_labels_of_validation_examples() -> None:
    found, cross_fit = run(LARGE)
    validation = ~cross_fit.calls[0][1]
    expected = [
        find_label_errors(LARGE[2][validation], probs[validation], sharpening=own).losses.mean()
        for probs, own in zip(cross_fit.returned, (None, 2**0.5, 2**0.5), strict=False)
    ]
    assert found.losses == pytest.approx(expected)
    # Settings are chosen by all given labels in the first round, in which no target has learned from others;
    # later by those of the validation examples.
    whole = find_label_errors(LARGE[2], cross_fit.returned[0]).losses.mean()
    assert cross_fit.scores == pytest.approx([whole, *expected[1:]])


def test_each_round_trains_on_the_targets_of_the_one_before() -> None:
    seen: list[tuple[int, LabelErrors, float]] = []
    cross_fit = LogisticFolds(LARGE[0])
    found = correct_in_rounds(LARGE[2], cross_fit, on_round=lambda *args: seen.append(args))
    assert [number for number, _, _ in seen] == list(range(1, len(cross_fit.calls) + 1))
    assert tuple(loss for _, _, loss in seen) == found.losses
    (targets, _), *later = cross_fit.calls
    assert (targets == LARGE[2]).all()
    for (targets, _), (_, errors, _) in zip(later, seen, strict=False):
        np.testing.assert_array_equal(targets, errors.clean_probs)
    assert found.errors is seen[found.round - 1][1]
    assert found.probs is cross_fit.returned[found.round - 1]


def test_later_rounds_estimate_from_validation_examples_alone() -> None:
    seen: list[LabelErrors] = []
    cross_fit = LogisticFolds(LARGE[0])
    correct_in_rounds(LARGE[2], cross_fit, on_round=lambda _, errors, __: seen.append(errors))
    validation = ~cross_fit.calls[0][1]
    assert len(seen) >= 2
    for errors, probs, rows in zip(seen, cross_fit.returned, (None, validation, validation), strict=False):
        own = None if rows is None else 2**0.5  # few labels do not choose a sharpening
        expected = find_label_errors(LARGE[2], probs, sharpening=own, estimate_from=rows)
        np.testing.assert_array_equal(errors.clean_probs, expected.clean_probs)
        assert errors.sharpening == expected.sharpening


@pytest.mark.parametrize("data", [LARGE, SMALL], ids=["a tenth", "200"])
def test_a_round_that_predicts_worse_ends_the_rounds(data: Any) -> None:
    found, cross_fit = run(data, rounds=4, spoil_after=1)
    assert found.round == 1
    assert len(cross_fit.calls) == len(found.losses) == 2
    assert found.losses[1] > found.losses[0]
    assert found.probs is cross_fit.returned[0]


def test_rounds_go_on_while_they_help_and_no_longer() -> None:
    found, _ = run(LARGE, rounds=6)
    assert found.round == int(np.argmin(found.losses)) + 1
    falls = [later < before for before, later in itertools.pairwise(found.losses)]
    assert all(falls[:-1])
    assert len(found.losses) == 6 or not falls[-1]
    text = str(found)
    assert f"round {found.round} " in text
    assert f"{found.losses[0]:.4f}" in text


def test_with_few_examples_there_is_one_round_on_all() -> None:
    data = blobs(999)
    found, cross_fit = run(data)
    [(_, trained)], [probs] = cross_fit.calls, cross_fit.returned
    assert trained.all()
    assert found.losses == pytest.approx((find_label_errors(data[2], probs).losses.mean(),))


@pytest.mark.parametrize(("n", "validation"), [(999, 0), (1000, 200), (1999, 200), (2000, 200), (2400, 240)])
def test_numbers_of_validation_examples(n: int, validation: int) -> None:
    x, _, given = blobs(n)
    cross_fit = LogisticFolds(x)
    correct_in_rounds(given, cross_fit, rounds=1)
    assert (~cross_fit.calls[0][1]).sum() == validation


def test_a_thousand_validation_examples_choose_the_sharpening(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "ENOUGH_TO_SHARPEN", 240)
    seen: list[LabelErrors] = []
    cross_fit = LogisticFolds(LARGE[0])
    found = correct_in_rounds(LARGE[2], cross_fit, on_round=lambda _, errors, __: seen.append(errors))
    validation = ~cross_fit.calls[0][1]
    probs = cross_fit.returned[1]
    expected = find_label_errors(LARGE[2], probs, estimate_from=validation)
    assert seen[1].sharpening == expected.sharpening != 2**0.5
    np.testing.assert_array_equal(seen[1].clean_probs, expected.clean_probs)
    alone = find_label_errors(LARGE[2][validation], probs[validation])
    assert found.losses[1] == cross_fit.scores[1] == pytest.approx(alone.losses.mean())


class NearestTargets:
    """Cross-fitting by the targets of the nearest examples in other folds, which are what they are told."""

    def __init__(self, x: Any) -> None:
        near = np.square(x[:, None] - x[None]).sum(-1)
        fold = np.arange(len(x)) % FOLDS
        near[fold[:, None] == fold[None]] = np.inf
        self.near = near

    def __call__(self, targets: Any, trained: Any, score: Score) -> Any:
        soft = np.eye(K)[targets] if np.ndim(targets) == 1 else np.asarray(targets)
        order = np.argsort(np.where(trained[None], self.near, np.inf), 1)[:, :3]
        return 0.9 * soft[order].mean(1) + 0.1 / K


@pytest.mark.filterwarnings("ignore:the probabilities hardly predict")
@pytest.mark.parametrize("n", [990, 1000, 1500])
def test_a_later_round_does_not_believe_its_own_targets(n: int) -> None:
    """Labels drawn at random: models of targets that have learned from a label would seem to predict it."""
    rng = np.random.default_rng(0)
    found = correct_in_rounds(rng.integers(K, size=n), NearestTargets(rng.standard_normal((n, 2))))
    assert min(found.losses) > np.log(K) - 0.05


@pytest.mark.parametrize("n", [200, 1200])
def test_models_that_have_learned_nothing_are_called_so(n: int) -> None:
    x, _, given = blobs(n)
    with pytest.warns(UserWarning, match="hardly predict the labels.*train longer"):
        correct_in_rounds(given, LogisticFolds(np.random.default_rng(0).permutation(x)), rounds=1)


def test_the_same_seed_gives_the_same_result_and_another_other_examples() -> None:
    (first, one), (again, _) = run(LARGE, rounds=2), run(LARGE, rounds=2)
    assert first.losses == again.losses
    np.testing.assert_array_equal(first.errors.clean_probs, again.errors.clean_probs)
    other = LogisticFolds(LARGE[0])
    correct_in_rounds(LARGE[2], other, rounds=1, seed=1)
    assert (other.calls[0][1] != one.calls[0][1]).any()


@pytest.mark.parametrize("data", [LARGE, SMALL, blobs(999)], ids=["a tenth", "200", "one round"])
def test_corrected_targets_are_nearer_to_the_truth(data: Any) -> None:
    found, _ = run(data)
    _, true, given = data
    rows = np.arange(len(true))
    assert (found.errors.suggested == true).mean() > (given == true).mean() + 0.1
    assert found.errors.clean_probs[rows, true].mean() > (given == true).mean() + 0.1


@pytest.mark.parametrize("options", [{"rounds": 0}, {"rounds": 1.5}, {"seed": -1}, {"seed": "a"}])
def test_wrong_options_are_refused_before_anything_is_trained(options: Any) -> None:
    cross_fit = LogisticFolds(SMALL[0])
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        correct_in_rounds(SMALL[2], cross_fit, **options)
    assert not cross_fit.calls


@pytest.mark.parametrize(
    "given", [np.array([0.0, 1.0]), np.array(["a", "b"]), np.zeros((6, 2), dtype=int), []]
)
def test_labels_that_cannot_be_used_are_refused_before_anything_is_trained(given: Any) -> None:
    cross_fit = LogisticFolds(SMALL[0][: len(given)])
    with pytest.raises((TypeError, ValueError), match="given"):
        correct_in_rounds(given, cross_fit)
    assert not cross_fit.calls
