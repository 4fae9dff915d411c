"""find_label_errors: against Bayes by loops and against the truth of simulated noise; what is refused."""

from __future__ import annotations

import csv
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tests.unit.labels.made_noise import alike, draw, noisy, pairs

import hetsngp
from hetsngp.labels import LabelErrors, class_confusions, find_label_errors
from hetsngp.labels import sharpening as sharpening_module
from hetsngp.labels.transition import MISSING

GAPS = MISSING


def annotated(seed: int, n: int, matrices: list[Any], gaps: float = 0.3) -> tuple[Any, Any, Any]:
    """True classes (N,), P(true | x) (N, K) and labels (N, A) of annotators, with gaps."""
    rng = np.random.default_rng(seed)
    data = noisy(seed, n, np.eye(len(matrices[0])), spread=2.0)
    labels = np.stack([draw(made[data.true], rng) for made in matrices], 1)
    labels[rng.random(labels.shape) < gaps] = GAPS
    return data.true, data.probs, labels


# --- the posterior ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_it_is_bayes_rule(power: float) -> None:
    """By loops over examples, true classes and annotators, with the transition matrices of the result."""
    _, probs, labels = annotated(0, 50, [pairs(3, 0.1), alike(3, 0.3), pairs(3, 0.6)])
    labels[0] = GAPS
    errors = find_label_errors(labels, probs, sharpening=power)
    assert errors.transition.shape == (3, 3, 3)
    for i in range(50):
        joint = [float(max(probs[i, k], 1e-5)) ** power for k in range(3)]
        for k in range(3):
            for a in range(3):
                if labels[i, a] != GAPS:
                    joint[k] *= errors.transition[a, k, labels[i, a]]
        clean = np.array(joint) / sum(joint)
        np.testing.assert_allclose(errors.clean_probs[i], clean, rtol=2e-4, atol=1e-6)
        assert errors.suggested[i] == clean.argmax()
        for a in range(3):
            if labels[i, a] == GAPS:
                assert np.isnan(errors.wrong_probability[i, a])
                assert not errors.is_wrong[i, a]
            else:
                wrong = 1 - clean[labels[i, a]]
                assert errors.wrong_probability[i, a] == pytest.approx(wrong, rel=1e-3, abs=1e-5)
                assert errors.is_wrong[i, a] == (wrong > 0.5)


def test_the_parts_of_the_result_agree() -> None:
    data = noisy(0, 500, pairs(4, 0.2))
    errors = find_label_errors(data.given, data.probs)
    assert isinstance(errors, LabelErrors)
    assert hetsngp.find_label_errors is find_label_errors
    n, k = data.probs.shape
    shapes = [getattr(errors, name).shape for name in ("labels", "wrong_probability", "suggested", "losses")]
    assert shapes == [(n,)] * 4
    assert errors.clean_probs.shape == (n, k)
    assert errors.transition.shape == (k, k)
    assert len(errors) == n
    np.testing.assert_allclose(errors.clean_probs.sum(1), 1, rtol=1e-5)
    np.testing.assert_allclose(errors.transition.sum(1), 1, rtol=1e-9)
    wrong = errors.wrong_probability
    np.testing.assert_allclose(wrong, 1 - errors.clean_probs[np.arange(n), data.given], atol=1e-6)
    assert errors.expected_wrong == pytest.approx(wrong.sum(), rel=1e-5)
    assert sorted(errors.order.tolist()) == list(range(n))
    assert (np.diff(wrong[errors.order]) <= 0).all()
    assert (errors.is_wrong == (wrong > 0.5)).all()
    text = str(errors)
    assert f"about {errors.expected_wrong:.0f} of 500 labels are wrong" in text
    assert f"{errors.is_wrong.sum()} are flagged, more probably wrong than correct" in text
    assert repr(errors) == f"<LabelErrors: {text}>"


def test_labels_of_another_class_than_the_most_probable_are_counted() -> None:
    probs = np.array([[0.7, 0.3], [0.6, 0.4], [0.1, 0.9], [0.2, 0.8]])
    assert find_label_errors(np.array([0, 1, 1, 1]), probs).disagreeing == 1
    assert find_label_errors(np.array([[0, 1], [1, -1], [0, 1], [1, 1]]), probs).disagreeing == 3
    errors = find_label_errors(np.array([1, 1, 1, 0]), torch.from_numpy(probs))
    assert errors.disagreeing == 3
    unknown = np.array([np.nan, 0.5, 0.5, 0.5])
    assert replace(errors, wrong_probability=unknown).disagreeing == 2


def test_one_annotator_in_a_column_is_as_one_without() -> None:
    data = noisy(0, 300, pairs(3, 0.2))
    flat, column = (find_label_errors(labels, data.probs) for labels in (data.given, data.given[:, None]))
    assert (flat.clean_probs == column.clean_probs).all()
    assert flat.expected_wrong_interval == column.expected_wrong_interval
    assert column.labels.shape == column.wrong_probability.shape == column.is_wrong.shape == (300, 1)
    assert column.transition.shape == (1, 3, 3)
    assert (column.transition[0] == flat.transition).all()
    assert (column.order == flat.order).all()


def test_the_order_follows_the_most_suspicious_label_of_each_example() -> None:
    _, probs, labels = annotated(1, 80, [pairs(3, 0.3), alike(3, 0.3)])
    errors = find_label_errors(labels, probs)
    most = [max((w for w in row if not np.isnan(w)), default=0.0) for row in errors.wrong_probability]
    assert (np.diff(np.array(most)[errors.order]) <= 0).all()


def test_the_same_call_gives_the_same_result() -> None:
    data = noisy(0, 300, pairs(3, 0.2))
    first, again = (find_label_errors(data.given, data.probs) for _ in range(2))
    assert (first.wrong_probability == again.wrong_probability).all()
    assert first.expected_wrong_interval == again.expected_wrong_interval


def test_the_order_of_the_examples_does_not_matter() -> None:
    data, order = noisy(0, 400, pairs(3, 0.2)), np.random.default_rng(1).permutation(400)
    first = find_label_errors(data.given, data.probs)
    mixed = find_label_errors(data.given[order], data.probs[order])
    assert mixed.sharpening == first.sharpening
    np.testing.assert_allclose(mixed.wrong_probability, first.wrong_probability[order], atol=1e-5)


def test_the_names_of_the_classes_do_not_matter() -> None:
    data, names = noisy(0, 400, pairs(4, 0.2)), np.array([2, 0, 3, 1])
    first = find_label_errors(data.given, data.probs)
    renamed = find_label_errors(names[data.given], data.probs[:, np.argsort(names)])
    np.testing.assert_allclose(renamed.wrong_probability, first.wrong_probability, atol=1e-5)


# --- numbers that were promised -----------------------------------------------------------------------------


@pytest.mark.parametrize("blur", [1.0, 2.0])
@pytest.mark.parametrize(
    ("made", "spread"),
    [(pairs(5, 0.1), 3.0), (pairs(5, 0.1), 2.0), (alike(4, 0.3), 3.0), (np.eye(4), 3.0)],
    ids=["pairs", "pairs-harder", "alike", "clean"],
)
def test_the_interval_has_the_number_of_wrong_labels(made: Any, spread: float, blur: float) -> None:
    covered = 0
    for seed in range(20):
        data = noisy(seed, 800, made, blur=blur, spread=spread)
        errors = find_label_errors(data.given, data.probs)
        low, high = errors.expected_wrong_interval
        assert 0 <= low <= errors.expected_wrong <= high <= 800
        covered += int(low <= data.wrong.sum() <= high)
    assert covered >= 17


@pytest.mark.parametrize("made", [pairs(5, 0.2), alike(5, 0.2)], ids=["pairs", "alike"])
def test_of_labels_that_are_wrong_with_probability_p_the_share_p_is(made: Any) -> None:
    data = noisy(0, 30_000, made, spread=2.5)
    wrong = find_label_errors(data.given, data.probs, sharpening=1.0).wrong_probability
    bins = np.minimum((10 * wrong).astype(int), 9)
    for number in range(10):
        inside = bins == number
        error = np.sqrt((wrong[inside] * (1 - wrong[inside])).sum()) / inside.sum()
        assert inside.sum() > 300
        # Four standard errors, and what the estimate of T may be off.
        assert abs(wrong[inside].mean() - data.wrong[inside].mean()) < 4 * error + 0.02


@pytest.mark.parametrize("k", [2, 10, 200])
def test_of_clean_labels_hardly_any_is_suspicious(k: int) -> None:
    data = noisy(0, 3000, np.eye(k))
    errors = find_label_errors(data.given, data.probs)
    assert errors.is_wrong.mean() < 0.005
    assert errors.expected_wrong < 30


@pytest.mark.parametrize(("k", "n"), [(2, 2000), (10, 2000), (200, 6000), (1000, 1500)])
def test_wrong_labels_are_found_among_few_and_many_classes(k: int, n: int) -> None:
    data = noisy(0, n, alike(k, 0.2), spread=8.0)
    errors = find_label_errors(data.given, data.probs.astype(np.float32))
    assert errors.transition.shape == (k, k)
    assert np.isfinite(errors.clean_probs).all()
    # As good as with the true matrix, except for chance.
    posterior = data.probs * data.transition[:, data.given].T
    best = posterior.argmax(1) != data.given
    assert (errors.is_wrong != data.wrong).mean() < 1.2 * (best != data.wrong).mean() + 0.005
    assert errors.expected_wrong == pytest.approx(data.wrong.sum(), rel=0.1)


def test_the_work_of_the_search_does_not_grow_with_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large data set chooses the sharpening by a part of it, and is otherwise gone through as before."""
    data = noisy(0, 4000, pairs(4, 0.2), blur=2.0)
    whole = find_label_errors(data.given, data.probs)
    seen: list[int] = []
    fit = sharpening_module.fit_transition

    def counted(log_clean: Any, labels: Any) -> Any:
        seen.append(log_clean.numel())
        return fit(log_clean, labels)

    monkeypatch.setattr(sharpening_module, "fit_transition", counted)
    monkeypatch.setattr(sharpening_module, "SEARCH_CELLS", 4 * 1000)
    part = find_label_errors(data.given, data.probs)
    assert set(seen) == {4 * 1000}
    assert part.sharpening == pytest.approx(whole.sharpening, rel=0.5)
    assert (part.is_wrong == whole.is_wrong).mean() > 0.95
    low, high = part.expected_wrong_interval
    wide = whole.expected_wrong_interval[1] - whole.expected_wrong_interval[0]
    assert high - low > 1.3 * wide  # the interval knows that it comes from a part


def test_little_noise_among_a_thousand_classes() -> None:
    """Another class has a probability of 1e-5 as the wrong label of a class: no floor may hide that."""
    data = noisy(0, 5000, alike(1000, 0.01), spread=6.0)
    assert 30 < data.wrong.sum() < 70
    errors = find_label_errors(data.given, data.probs.astype(np.float32), sharpening=1.0)
    assert errors.is_wrong[data.wrong].mean() > 0.8
    assert errors.expected_wrong == pytest.approx(data.wrong.sum(), rel=0.15)


# --- rare and missing classes -------------------------------------------------------------------------------


def test_a_rare_class_is_kept() -> None:
    data = noisy(0, 6000, alike(5, 0.1), offset=np.array([-5.0, 0, 0, 0, 0]))
    rare = data.true == 0
    assert 50 < rare.sum() < 300
    errors = find_label_errors(data.given, data.probs)
    posterior = data.probs * data.transition[:, data.given].T
    best = (posterior.argmax(1) == data.true)[rare].mean()
    assert (errors.suggested == data.true)[rare].mean() > best - 0.1
    np.testing.assert_allclose(errors.transition, data.transition, atol=0.1)


def test_a_class_without_examples() -> None:
    """No example is of class 2, and a few labels say so."""
    data = noisy(0, 2000, alike(4, 0.15), offset=np.array([0, 0, -np.inf, 0]))
    assert (data.true != 2).all()
    assert (data.given == 2).sum() > 50
    errors = find_label_errors(data.given, data.probs)
    assert (errors.suggested != 2).all()
    assert errors.is_wrong[data.given == 2].all()
    assert np.isfinite(errors.transition).all()
    np.testing.assert_allclose(errors.transition.sum(1), 1)


def test_a_class_that_is_never_given() -> None:
    """All examples of class 3 are called 0."""
    made = np.eye(4)[[0, 1, 2, 0]]
    data = noisy(0, 2000, made, spread=5.0)
    errors = find_label_errors(data.given, data.probs)
    assert errors.transition[3, 0] > 0.95
    assert (errors.suggested == data.true)[data.true == 3].mean() > 0.9
    assert errors.expected_wrong == pytest.approx(data.wrong.sum(), rel=0.1)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_few_examples(n: int) -> None:
    probs = np.tile([0.7, 0.2, 0.1], (n, 1))
    errors = find_label_errors(np.arange(n) % 3, probs)
    assert np.isfinite(errors.clean_probs).all()
    assert np.isfinite(errors.losses).all()
    assert 0 <= errors.expected_wrong_interval[0] <= errors.expected_wrong_interval[1] <= n


# --- several annotators -------------------------------------------------------------------------------------


def test_each_annotator_has_a_matrix_and_the_labels_of_all_tell_the_truth() -> None:
    """One is careful, one careless, one always wrong, which says as much as always correct."""
    matrices = [pairs(4, 0.1), alike(4, 0.4), pairs(4, 1.0)]
    true, probs, labels = annotated(0, 3000, matrices)
    labels = np.concatenate([labels, np.full((3000, 1), GAPS)], 1)  # and one has given nothing
    errors = find_label_errors(labels, probs)
    known = labels != GAPS
    wrong = (labels != true[:, None]) & known
    for found, made in zip(errors.transition, matrices, strict=False):
        np.testing.assert_allclose(found, made, atol=0.05)
    np.testing.assert_allclose(errors.transition[3].sum(1), 1)
    assert np.isnan(errors.wrong_probability[:, 3]).all()
    assert (np.isnan(errors.wrong_probability) == ~known).all()
    joint = probs.copy()
    for a, made in enumerate(matrices):
        joint *= np.where(known[:, a : a + 1], made[:, labels[:, a]].T, 1.0)
    best = (joint.argmax(1) == true).mean()
    assert (errors.suggested == true).mean() > best - 0.01
    assert best > (probs.argmax(1) == true).mean() + 0.2
    assert (errors.is_wrong == wrong)[known].mean() > 0.95
    low, high = errors.expected_wrong_interval
    assert low <= wrong.sum() <= high
    assert errors.expected_wrong == pytest.approx(np.nansum(errors.wrong_probability), rel=1e-5)
    assert f"of {known.sum()} labels" in str(errors)


def test_annotators_with_few_labels_borrow_from_the_others() -> None:
    """A crowd of 40 people of whom each labels 25 examples: a matrix of its own for each has no basis."""
    rng = np.random.default_rng(0)
    data = noisy(0, 1000, np.eye(4), spread=2.0)
    labels = np.full((1000, 40), GAPS)
    for a, part in enumerate(np.split(rng.permutation(1000), 40)):
        labels[part, a] = draw(pairs(4, 0.25)[data.true[part]], rng)
    errors, together = find_label_errors(labels, data.probs), find_label_errors(labels.max(1), data.probs)
    np.testing.assert_allclose(errors.transition, np.tile(together.transition, (40, 1, 1)), atol=0.05)
    assert errors.expected_wrong == pytest.approx(together.expected_wrong, rel=0.02)


# --- warnings, and where to estimate from -------------------------------------------------------------------


def test_probabilities_of_training_examples_are_noticed() -> None:
    data = noisy(0, 400, pairs(4, 0.2))
    learned = 0.9 * np.eye(4)[data.given] + 0.025
    with pytest.warns(UserWarning, match="not trained on these labels"):
        find_label_errors(data.given, learned)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_label_errors(data.given, data.probs)  # out of sample
        find_label_errors(data.given[:50], learned[:50])  # a few may all be classified correctly


def test_the_warning_names_the_line_of_the_caller() -> None:
    data = noisy(0, 400, pairs(4, 0.2))
    with pytest.warns(UserWarning, match="not trained") as caught:
        find_label_errors(data.given, 0.9 * np.eye(4)[data.given] + 0.025)
    assert caught[0].filename == __file__


def test_some_examples_may_be_those_to_estimate_from() -> None:
    """A model has learned the labels of the other half; its probabilities there must not be believed."""
    data = noisy(0, 4000, pairs(4, 0.25))
    held_out = np.arange(4000) % 2 == 0
    probs = np.where(held_out[:, None], data.probs, 0.97 * np.eye(4)[data.given] + 0.0075)
    errors = find_label_errors(data.given, probs, estimate_from=held_out)
    alone = find_label_errors(data.given[held_out], data.probs[held_out])
    assert errors.sharpening == alone.sharpening
    np.testing.assert_allclose(errors.transition, alone.transition, rtol=1e-9)
    np.testing.assert_allclose(errors.wrong_probability[held_out], alone.wrong_probability, atol=1e-6)
    np.testing.assert_allclose(errors.losses[held_out], alone.losses)
    clean = probs**errors.sharpening
    joint = errors.transition[:, data.given].T * clean / clean.sum(1, keepdims=True)
    np.testing.assert_allclose(errors.losses[~held_out], -np.log(joint.sum(1))[~held_out], rtol=1e-3)
    fooled = find_label_errors(data.given, probs)
    assert np.abs(fooled.transition - data.transition).max() > 0.1
    # Shares of the held-out half go for all labels.
    ratio = np.array(errors.expected_wrong_interval)[1] / alone.expected_wrong_interval[1]
    assert ratio == pytest.approx(2.0)


# --- what is given is left alone, in whatever form it comes -------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors(dtype: torch.dtype) -> None:
    data = noisy(0, 200, pairs(3, 0.2))
    probs = torch.from_numpy(data.probs).to(dtype)
    errors = find_label_errors(torch.from_numpy(data.given), probs.requires_grad_())
    expected = find_label_errors(data.given, data.probs)
    assert isinstance(errors.wrong_probability, np.ndarray)
    assert np.abs(errors.wrong_probability - expected.wrong_probability).mean() < 0.01


def test_lists_and_other_integers() -> None:
    data = noisy(0, 150, pairs(3, 0.2))
    expected = find_label_errors(data.given, data.probs).wrong_probability
    for labels in (data.given.tolist(), data.given.astype(np.uint8), data.given.astype(np.int16)):
        assert (find_label_errors(labels, data.probs.tolist()).wrong_probability == expected).all()


def test_what_is_given_does_not_change_and_is_not_shared() -> None:
    data = noisy(0, 150, pairs(3, 0.2))
    labels, probs = data.given.copy(), data.probs.astype(np.float32)
    labels.flags.writeable = probs.flags.writeable = False  # a memory-mapped file
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        errors = find_label_errors(labels, probs)
    assert (probs == data.probs.astype(np.float32)).all()
    given = data.given.copy()
    errors = find_label_errors(given, probs)
    given[:] = errors.suggested  # corrected in place
    assert (errors.labels == data.given).all()


# --- what is refused ----------------------------------------------------------------------------------------

PROBS = np.full((6, 3), 1 / 3)
LABELS = np.array([0, 1, 2, 0, 1, 2])


def changed(value: float) -> Any:
    probs = PROBS.copy()
    probs[4, 1] = value
    return probs


@pytest.mark.parametrize(
    ("labels", "probs", "error", "words"),
    [
        (LABELS, changed(np.nan), ValueError, "example 4 are NaN or infinite"),
        (LABELS, changed(np.inf), ValueError, "example 4 are NaN or infinite"),
        (LABELS, changed(1.0), ValueError, r"row 4 has the sum 1.667.*softmax\(logits\)"),
        (LABELS, PROBS + np.array([-0.5, 0.5, 0]), ValueError, "the least value -0.1667"),
        (LABELS, 5 * PROBS, ValueError, r"softmax\(logits\)"),
        (LABELS, np.log(PROBS), ValueError, r"softmax\(logits\)"),
        (LABELS, PROBS[0], ValueError, r"probs must be \(N, K\)"),
        (LABELS, PROBS[None], ValueError, r"probs must be \(N, K\)"),
        (LABELS, np.ones((6, 1)), ValueError, "at least two classes"),
        (LABELS[:0], PROBS[:0], ValueError, r"probs must be \(N, K\)"),
        (LABELS, PROBS.astype(str), TypeError, "real numbers"),
        (LABELS, PROBS.astype(complex), TypeError, "real numbers"),
        (LABELS, PROBS > 0, TypeError, "real numbers"),
        (LABELS, [[0.5, 0.5], [1.0]], ValueError, "probs must be an array"),
        (LABELS[:5], PROBS, ValueError, r"shape \(5,\) where \(6,\) was expected"),
        (LABELS[None], PROBS, ValueError, r"shape \(1, 6\)"),
        (np.empty((6, 0), dtype=int), PROBS, ValueError, r"shape \(6, 0\)"),
        (LABELS.astype(float), PROBS, TypeError, "got float64"),
        (LABELS > 0, PROBS, TypeError, "got bool"),
        (np.array(list("abcabc")), PROBS, TypeError, r"numpy\.searchsorted\(names, labels\)"),
        (LABELS + 1, PROBS, ValueError, r"go from 1 to 3.*must be 0 … 2"),
        (LABELS - 1, PROBS, ValueError, r"go from -1 to 1"),
        (LABELS[:, None] - 2, PROBS, ValueError, "−1 where an annotator gave none"),
        (np.full((6, 2), -1), PROBS, ValueError, "no annotator has given any"),
        (torch.eye(3)[LABELS], PROBS, ValueError, r"labels\.argmax\(1\)"),
    ],
)
def test_what_cannot_be_used_is_an_error_that_names_the_fix(
    labels: Any, probs: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        find_label_errors(labels, probs)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "2", True])
def test_a_sharpening_is_a_positive_number(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="sharpening"):
        find_label_errors(LABELS, PROBS, sharpening=value)


@pytest.mark.parametrize(
    "mask",
    [np.arange(6), np.zeros(6, dtype=bool), np.ones(5, dtype=bool), np.ones((6, 1), dtype=bool), "all"],
    ids=["indices", "none", "short", "column", "text"],
)
def test_examples_to_estimate_from_are_a_mask(mask: Any) -> None:
    with pytest.raises(ValueError, match="estimate_from"):
        find_label_errors(LABELS, PROBS, estimate_from=mask)


# --- the file -----------------------------------------------------------------------------------------------

AWKWARD = ("a, with a comma", 'a "quoted"\nname of two lines', "ü 😀 = 1")


def read(path: Path) -> list[list[str]]:
    with open(path, encoding="utf-8", newline="") as handle:
        return list(csv.reader(handle))


def test_the_file_has_a_line_for_each_example_in_the_order_of_suspicion(tmp_path: Path) -> None:
    data = noisy(0, 30, pairs(3, 0.3))
    errors = find_label_errors(data.given, data.probs)
    paths = [f"folder, {i}/☃ {i}.png" for i in range(30)]
    for names in (None, paths):
        errors.to_csv(tmp_path / "errors.csv", class_names=AWKWARD, names=names)
        head, *lines = read(tmp_path / "errors.csv")
        key = "index" if names is None else "path"
        assert head == [key, "is_label_issue", "label_score", "given_label", "predicted_label"]
        assert len(lines) == 30
        for line, i in zip(lines, errors.order.tolist(), strict=True):
            assert line[0] == (str(i) if names is None else paths[i])
            assert line[1] == str(bool(errors.is_wrong[i]))
            assert float(line[2]) == pytest.approx(1 - errors.wrong_probability[i], abs=1e-6)
            assert line[3:] == [AWKWARD[data.given[i]], AWKWARD[errors.suggested[i]]]


def test_without_names_classes_are_numbers(tmp_path: Path) -> None:
    errors = find_label_errors(LABELS, np.full((6, 3), 0.1) + 0.7 * np.eye(3)[LABELS])
    errors.to_csv(tmp_path / "errors.csv")
    assert {(line[3], line[4]) for line in read(tmp_path / "errors.csv")[1:]} == {(k, k) for k in "012"}


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"class_names": ["a", "b"]}, "2 class_names for 3 classes"),
        ({"names": ["x.png"] * 5}, "5 names for 6 examples"),
    ],
)
def test_names_that_are_too_few_are_refused(names: Any, words: str, tmp_path: Path) -> None:
    errors = find_label_errors(LABELS, np.full((6, 3), 0.1) + 0.7 * np.eye(3)[LABELS])
    with pytest.raises(ValueError, match=words):
        errors.to_csv(tmp_path / "errors.csv", **names)
    assert not (tmp_path / "errors.csv").exists()


def test_several_annotators_have_no_file(tmp_path: Path) -> None:
    errors = find_label_errors(np.stack([LABELS, LABELS], 1), PROBS)
    with pytest.raises(ValueError, match=r"numpy\.savetxt"):
        errors.to_csv(tmp_path / "errors.csv")


# --- what a user may give by mistake ------------------------------------------------------------------------


def test_one_hot_labels_are_not_taken_for_annotators() -> None:
    data = noisy(0, 50, pairs(4, 0.2))
    for kind in (int, float):
        with pytest.raises(ValueError, match=r"labels\.argmax\(1\)"):
            find_label_errors(np.eye(4, dtype=kind)[data.given], data.probs)
    several = np.stack([data.given] * 4, 1)  # as many annotators as classes
    assert find_label_errors(several, data.probs).labels.shape == (50, 4)


def test_labels_with_nan_are_told_to_be_minus_one() -> None:
    data = noisy(0, 50, pairs(4, 0.2))
    given = np.stack([data.given, data.given], 1).astype(float)
    given[::3, 0] = np.nan
    with pytest.raises(TypeError, match=r"nan_to_num\(labels, nan=-1\)"):
        find_label_errors(given, data.probs)
    find_label_errors(np.nan_to_num(given, nan=-1).astype(int), data.probs)


def test_probabilities_that_know_nothing_are_called_so() -> None:
    data = noisy(0, 400, pairs(4, 0.1))
    noise = np.random.default_rng(0).dirichlet(np.ones(4), 400)
    for probs, what in ((noise, "hardly predict"), (np.roll(data.probs, 1, axis=1), "contradict")):
        with pytest.warns(UserWarning, match=f"the probabilities {what} the labels"):
            find_label_errors(data.given, probs)
    weak = 0.05 * data.probs + 0.95 * 0.25  # labels seem correct, and little is known
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_label_errors(data.given, data.probs)
        find_label_errors(data.given[:90], data.probs[:90])
        find_label_errors(data.given[:90], weak[:90], sharpening=1.0)  # too few to say
    with pytest.warns(UserWarning, match="hardly predict the labels"):
        find_label_errors(data.given, weak, sharpening=1.0)
    with pytest.warns(UserWarning, match="contradict the labels"):  # of few labels too
        find_label_errors(data.given[:90], np.roll(data.probs, 1, axis=1)[:90])


def test_a_model_that_may_have_learned_the_noise_is_told() -> None:
    """No label seems wrong where P(given | x) is right with its noise: .7 for a class, .3 for the next."""
    data = noisy(0, 600, pairs(4, 0.3), spread=20.0)
    learned = 0.9 * data.probs @ data.transition + 0.1 * data.probs @ alike(4, 0.75)
    with pytest.warns(UserWarning, match=r"nowhere certain \(0\.\d+ at most.*correct_in_rounds"):
        find_label_errors(data.given, learned, sharpening=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_label_errors(data.given, data.probs)
        find_label_errors(data.true, data.probs)


def test_predicted_classes_are_not_taken_for_probabilities() -> None:
    data = noisy(0, 200, pairs(4, 0.2))
    with pytest.warns(UserWarning, match="predict_proba"):
        find_label_errors(data.given, np.eye(4)[data.probs.argmax(1)])


def test_the_result_has_the_probabilities_and_may_have_names(tmp_path: Path) -> None:
    data = noisy(0, 60, pairs(3, 0.2))
    errors = find_label_errors(data.given, data.probs)
    assert errors.probs is data.probs
    named = replace(errors, class_names=("cat", "dog", "eel"))
    named.to_csv(tmp_path / "named.csv")
    rows = list(csv.DictReader((tmp_path / "named.csv").open()))
    assert {row["given_label"] for row in rows} == {"cat", "dog", "eel"}
    assert class_confusions(named).class_names == ("cat", "dog", "eel")
    named.to_csv(tmp_path / "other.csv", class_names=["a", "b", "c"])
    assert "cat" not in (tmp_path / "other.csv").read_text()


def test_a_label_of_which_nothing_is_known_has_no_score(tmp_path: Path) -> None:
    data = noisy(0, 60, pairs(3, 0.2))
    errors = find_label_errors(data.given, data.probs)
    unknown = errors.wrong_probability.copy()
    unknown[7] = np.nan
    replace(errors, wrong_probability=unknown).to_csv(tmp_path / "errors.csv")
    [row] = [row for row in csv.DictReader((tmp_path / "errors.csv").open()) if row["index"] == "7"]
    assert (row["label_score"], row["is_label_issue"]) == ("", "False")


def test_names_are_by_position(tmp_path: Path) -> None:
    """A Series of shuffled rows has an index of its own."""
    data = noisy(0, 60, pairs(3, 0.2))
    errors = find_label_errors(data.given, data.probs)
    names = pd.Series([f"{i}.png" for i in range(60)], index=np.random.default_rng(0).permutation(60))
    errors.to_csv(tmp_path / "errors.csv", names=names)
    rows = list(csv.DictReader((tmp_path / "errors.csv").open()))
    assert [row["path"] for row in rows] == [f"{i}.png" for i in errors.order]


def test_a_missing_label_has_no_name(tmp_path: Path) -> None:
    data = noisy(0, 60, pairs(3, 0.2))
    labels = data.given[:, None].copy()
    labels[4] = MISSING
    find_label_errors(labels, data.probs).to_csv(tmp_path / "errors.csv")
    [row] = [row for row in csv.DictReader((tmp_path / "errors.csv").open()) if row["index"] == "4"]
    assert (row["given_label"], row["label_score"], row["is_label_issue"]) == ("", "", "False")


def test_letters_that_end_a_line_are_quoted(tmp_path: Path) -> None:
    data = noisy(0, 60, pairs(3, 0.2))
    errors = find_label_errors(data.given, data.probs)
    errors.to_csv(tmp_path / "errors.csv", class_names=["cat\r", "dog\n", "eel"])
    with open(tmp_path / "errors.csv", encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert [row["index"] for row in rows] == [str(i) for i in errors.order]
    assert {row["given_label"] for row in rows} == {"cat\r", "dog\n", "eel"}


def test_the_text_counts_labels_that_were_examined() -> None:
    data = noisy(0, 60, pairs(3, 0.2))
    errors = find_label_errors(data.given, data.probs)
    wrong = errors.wrong_probability.copy()
    wrong[::2] = np.nan
    assert f"of 30 labels are wrong ({errors.expected_wrong / 30:.1%}" in str(
        replace(errors, wrong_probability=wrong)
    )


def test_missing_labels_name_a_way_on() -> None:
    data = noisy(0, 60, pairs(3, 0.2))
    unknown = np.where(np.arange(60) == 3, np.nan, data.given)
    with pytest.raises(TypeError, match=r"labels\.astype\(int\); leave out examples without a label"):
        find_label_errors(unknown, data.probs)
    with pytest.raises(TypeError, match="nan_to_num") as told:
        find_label_errors(unknown[:, None], data.probs)
    assert "where an annotator gave none" in str(told.value)
    find_label_errors(np.nan_to_num(unknown[:, None], nan=-1).astype(int), data.probs)  # as it says
    labels = np.where(np.arange(60) < 30, MISSING, data.given)[:, None]
    with pytest.raises(ValueError, match="estimate_from selects no example with a label"):
        find_label_errors(labels, data.probs, estimate_from=np.arange(60) < 30)
