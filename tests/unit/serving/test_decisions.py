"""Verdicts: thresholds against brute force over all cut-offs, promises against fresh draws, rules by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract import toy
from torch import Tensor

import hetsngp
from hetsngp import serving
from hetsngp.serving.decisions import Thresholds, most_probable, set_thresholds, verdicts
from hetsngp.types import Prediction


def prediction(probs: Any, score: Any = 0.5, *, model: Any = 0.1, total: Any = 1.0) -> Prediction:
    """Prediction with given probabilities (n, K) and scores; the other fields do not matter."""
    probs = torch.as_tensor(probs, dtype=torch.float32)
    score, model, total = (
        torch.as_tensor(v, dtype=torch.float32).expand(len(probs)) for v in (score, model, total)
    )
    none = torch.zeros(len(probs))
    return Prediction(probs, probs, total, total - model, model, none, score, none, none)


def binary(confidence: Any) -> Tensor:
    """(n, 2) with the first class as probable as that."""
    first = torch.as_tensor(confidence, dtype=torch.float32)
    return torch.stack([first, 1 - first], 1)


def thresholds(confident: float | None = 0.9, unfamiliar: float | None = 1.0, **more: Any) -> Thresholds:
    return Thresholds(confident, unfamiliar, 0.95, 0.05, held_out=100, accuracy=0.96, coverage=0.5, **more)


def brute_force(
    confidence: np.ndarray, correct: np.ndarray, score: np.ndarray, right: float, share: float
) -> tuple[float | None, float | None, float | None, float]:
    """(confident, unfamiliar, accuracy, coverage) by trying every cut-off."""
    n = len(score)
    # the least held-out score that few enough of n + 1 exchangeable scores can exceed
    rank = {value: int((score <= value).sum()) for value in score}
    fine = [value for value in score if rank[value] >= (n + 1) * (1 - share) - 1e-9]
    unfamiliar = min(fine, default=None)
    familiar = np.ones(n, bool) if unfamiliar is None else score <= unfamiliar
    for cut in sorted(confidence[familiar]):
        called = familiar & (confidence >= cut)
        shares = [correct[called & (confidence <= s)].mean() for s in confidence[called]]
        if called.sum() >= 20 and min(shares) >= right:
            return (
                float(cut),
                unfamiliar,
                int(correct[called].sum()) / int(called.sum()),
                int(called.sum()) / n,
            )
    return None, unfamiliar, None, 0.0


# --- thresholds -----------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 90),
    st.integers(0, 10**6),
    st.sampled_from([0.5, 0.7, 0.9, 0.95, 1.0]),
    st.sampled_from([0.0, 0.01, 0.05, 0.3, 0.7]),
    st.sampled_from([4, 40, 10**6]),
)
def test_thresholds_are_those_of_brute_force(
    n: int, seed: int, right: float, share: float, steps: int
) -> None:
    """``steps``: so few values that many examples tie, or none."""
    rng = np.random.default_rng(seed)
    sure = 0.5 + np.ceil(rng.random(n) * steps) / steps / 2
    correct = rng.random(n) < sure
    score = np.floor(rng.random(n) * steps) / steps
    given = prediction(binary(sure), score)
    found = set_thresholds(given, torch.as_tensor(~correct).long(), correct=right, unfamiliar=share)
    wide = [value.double().numpy() for value in (given.confidence, given.ood_score)]
    expected = brute_force(wide[0], correct, wide[1], right, share)
    assert (found.confident, found.unfamiliar, found.accuracy, found.coverage) == expected
    assert (found.correct, found.share, found.held_out, found.score) == (right, share, n, "ood_score")


def test_the_order_of_the_rows_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    sure = 0.6 + rng.integers(1, 20, 300) / 50
    labels = torch.as_tensor(rng.random(300) > sure).long()
    given = prediction(binary(sure), rng.integers(0, 50, 300))
    first = set_thresholds(given, labels, correct=0.9)
    assert first.confident is not None
    for seed in range(5):
        order = torch.randperm(300, generator=torch.Generator().manual_seed(seed))
        assert set_thresholds(given[order], labels[order], correct=0.9) == first


def test_numpy_and_the_other_precision_are_the_same() -> None:
    given = toy.trained("hetsngp").predict(toy.blobs(3, per_class=40)[0])
    labels = toy.blobs(3, per_class=40)[1]
    first = set_thresholds(given, labels)
    assert set_thresholds(given.numpy(), labels.numpy()) == first
    assert set_thresholds(given.map(lambda t: t.double()), labels) == first


def test_of_few_rows_nothing_is_said() -> None:
    """19 examples give a threshold of 5 %, 18 none; 20 correct ones are confident, 19 are not."""
    for n, known in ((18, False), (19, True)):
        found = set_thresholds(prediction(binary([0.9] * n), range(n)), torch.zeros(n).long())
        assert found.unfamiliar == (n - 1.0 if known else None)
        assert (found.confident, found.accuracy, found.coverage) == (None, None, 0.0)
    found = set_thresholds(prediction(binary([0.9] * 20), range(20)), torch.zeros(20).long())
    assert (found.unfamiliar, found.accuracy, found.coverage) == (19.0, 1.0, 1.0)
    assert found.confident == pytest.approx(0.9)


def test_nineteen_of_twenty_are_95_percent() -> None:
    labels = torch.zeros(20).long()
    labels[7] = 1
    assert set_thresholds(prediction(binary([0.9] * 20)), labels).accuracy == 0.95
    labels[8] = 1
    assert set_thresholds(prediction(binary([0.9] * 20)), labels).confident is None


def test_rows_that_would_be_unfamiliar_count_for_no_confidence() -> None:
    """Five confident errors are far away; without them all confident examples are correct."""
    sure = torch.tensor([0.99] * 95 + [0.999] * 5)
    labels = torch.tensor([0] * 95 + [1] * 5)
    far = torch.tensor([0.0] * 95 + [9.0] * 5)
    found = set_thresholds(prediction(binary(sure), far), labels, unfamiliar=0.06)
    assert (found.unfamiliar, found.accuracy, found.coverage) == (0.0, 1.0, 0.95)
    assert found.confident == pytest.approx(0.99)
    near = set_thresholds(prediction(binary(sure), far), labels, correct=0.96, unfamiliar=0.0)
    assert near.confident is None


def test_several_labels_are_right_where_the_top_class_is_among_them() -> None:
    probs = torch.tensor([[0.9, 0.8, 0.1]]).expand(40, 3)
    labels = torch.zeros(40, 3)
    labels[:38, 0] = 1  # 38 of 40
    labels[:, 1] = 1
    found = set_thresholds(prediction(probs), labels)
    assert (found.accuracy, found.coverage) == (0.95, 1.0)


# --- which score ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["deterministic", "heteroscedastic", "mimo", "sngp", "hetsngp", "posterior_network"]
)
def test_an_entropy_does_not_tell_unfamiliar_from_ambiguous(method: str) -> None:
    """Without a posterior there is no threshold; of members without any it is on their disagreement."""
    x, y = toy.blobs(3, per_class=40, seed=1)
    model = toy.trained(method)
    found = set_thresholds(model.predict(x), y)
    score = {"mimo": "model_uncertainty"}.get(method, "ood_score")
    assert found.score == score
    assert (found.unfamiliar is None) == (method in ("deterministic", "heteroscedastic"))
    far = verdicts(model.predict(100 * x), found, "abc")
    if method in ("sngp", "hetsngp"):
        assert {verdict.kind for verdict in far} == {"unfamiliar"}
    if found.unfamiliar is None:
        assert "unfamiliar" not in {verdict.kind for verdict in far}


def test_an_ensemble_is_judged_by_the_disagreement_of_its_members() -> None:
    x, y = toy.blobs(3, per_class=40, seed=1)
    members = [toy.trained("deterministic"), toy.build("deterministic").eval()]
    given = hetsngp.Ensemble(members).predict(x)
    found = set_thresholds(given, y)
    assert found.score == "model_uncertainty"
    # ⌈121·0.95⌉ = 115 of 120
    assert found.unfamiliar == float(given.model_uncertainty.double().sort().values[114])


# --- what is promised -----------------------------------------------------------------------------------


def draw(rng: np.random.Generator, rows: int) -> tuple[Prediction, Tensor]:
    """Predictions of a model calibrated by construction, with confidence uniform on (½, 1), and labels."""
    sure = rng.uniform(0.5, 1, rows)
    return prediction(binary(sure), rng.normal(size=rows)), torch.as_tensor(rng.random(rows) > sure).long()


def test_fresh_rows_are_called_unfamiliar_as_rarely_as_asked() -> None:
    """Thresholds of 200 examples, verdicts on 200 others: ⌊0.05·201⌋/201 on average, without ties."""
    rng, strange = np.random.default_rng(0), []
    for _ in range(300):
        found = set_thresholds(*draw(rng, 200))
        kinds = [verdict.kind for verdict in verdicts(draw(rng, 200)[0], found, "ab")]
        strange.append(kinds.count("unfamiliar") / 200)
    error = np.std(strange) / math.sqrt(300)
    assert abs(np.mean(strange) - 10 / 201) < 4 * error
    assert error < 0.002


def test_the_confident_are_right_as_often_as_documented() -> None:
    """docs/serving.md: .970 of those called confident are correct where .95 is required of 1,000 examples.

    Those of at least t are correct (1 + t)/2 of the time.
    """
    rng = np.random.default_rng(0)
    least = [set_thresholds(*draw(rng, 1000)).confident for _ in range(300)]
    right = [(1 + t) / 2 for t in least if t is not None]
    error = np.std(right) / math.sqrt(len(right))
    assert abs(np.mean(right) - 0.970) < 4 * error
    assert error < 0.001
    assert len(right) > 290
    assert np.quantile(right, 0.1) > 0.95


def test_of_many_rows_the_threshold_is_the_confidence_that_was_asked_for() -> None:
    """For a calibrated model, with the error of isotonic regression.

    Where P(correct | c) = c and confidences have density f, t̂ − t is (4·t(1 − t)/(f·n))^(1/3) times a
    variable of Chernoff's distribution, of standard deviation 0.513 (Groeneboom and Wellner 2001).
    """
    rows, times, t = 20_000, 40, 0.9
    found = [set_thresholds(*draw(np.random.default_rng(seed), rows), correct=t) for seed in range(times)]
    error = math.sqrt(np.mean([((each.confident or 0) - t) ** 2 for each in found]))
    expected = 0.513 * (4 * t * (1 - t) / (0.95 * 2 * rows)) ** (1 / 3)
    assert error == pytest.approx(expected, rel=4 / math.sqrt(2 * times))


def test_a_model_that_is_nearly_always_right_is_not_confident_of_everything() -> None:
    """970 confident examples are correct, and 15 of 30 others: 98.5 % of all, but not of those 30."""
    sure = torch.tensor([0.99] * 970 + [0.55] * 30)
    labels = torch.tensor([0] * 985 + [1] * 15)
    found = set_thresholds(prediction(binary(sure)), labels)
    assert found.confident == pytest.approx(0.99)
    assert (found.accuracy, found.coverage) == (1.0, 0.97)


# --- verdicts -------------------------------------------------------------------------------------------

NAMES = ("cat", "dog", "owl", "emu", "ant")


@pytest.mark.parametrize(
    ("probs", "score", "kind", "text"),
    [
        ([0.9, 0.1, 0, 0, 0], 0.5, "confident", "confident"),
        ([0.89, 0.11, 0, 0, 0], 0.5, "ambiguous", "ambiguous (cat or dog)"),
        ([0.1, 0, 0, 0.89, 0.01], 0.5, "ambiguous", "ambiguous (emu or cat)"),
        ([0.3, 0.2, 0.2, 0.2, 0.1], 0.5, "ambiguous", "ambiguous (cat or dog)"),
        ([0.24, 0.22, 0.19, 0.18, 0.17], 0.5, "ambiguous", "ambiguous (cat, dog or others)"),
        ([0.2, 0.2, 0.2, 0.2, 0.2], 0.5, "ambiguous", "ambiguous (cat, dog or others)"),
        ([0.99, 0.01, 0, 0, 0], 1.0, "confident", "confident"),
        ([0.99, 0.01, 0, 0, 0], 1.001, "unfamiliar", "unfamiliar"),
        ([0.2, 0.2, 0.2, 0.2, 0.2], math.inf, "unfamiliar", "unfamiliar"),
        # sigmoids: two of three labels' worth of probability is more than half of it, a fifth is not
        ([0.8, 0.7, 0.0, 0.0, 0.7], 0.5, "ambiguous", "ambiguous (cat or dog)"),
        ([0.8, 0.7, 0.7, 0.7, 0.7], 0.5, "ambiguous", "ambiguous (cat, dog or others)"),
    ],
)
def test_rules(probs: list[float], score: float, kind: str, text: str) -> None:
    # 0.9 is 0.9 in float32 on both sides
    (found,) = verdicts(prediction([probs], score), thresholds(float(np.float32(0.9))), NAMES)
    assert (found.kind, found.text) == (kind, text)
    assert found.label == NAMES[int(np.argmax(probs))]
    assert (found.others == ()) == (kind != "ambiguous")


def test_without_thresholds_all_is_ambiguous() -> None:
    found = verdicts(prediction([[1.0, 0.0]], math.inf), thresholds(None, None), ("a", "b"))
    assert [verdict.text for verdict in found] == ["ambiguous (a or b)"]


def test_the_score_is_the_one_named() -> None:
    given = prediction([[1.0, 0.0]], score=9.0, model=0.1)
    named = thresholds(unfamiliar=0.2, score="model_uncertainty")
    assert verdicts(given, named, "ab")[0].kind == "confident"
    assert verdicts(given, thresholds(unfamiliar=0.2), "ab")[0].kind == "unfamiliar"


def test_held_out_rows_get_the_verdicts_they_were_counted_by() -> None:
    """The example at a threshold is on the correct side of it, also in float32."""
    given, wrong = draw(np.random.default_rng(3), 500)
    found = Thresholds.from_dict(json.loads(json.dumps(set_thresholds(given, wrong).to_dict())))
    kinds = [verdict.kind for verdict in verdicts(given, found, "ab")]
    assert kinds.count("unfamiliar") == 500 - math.ceil(501 * 0.95)
    assert kinds.count("confident") / 500 == found.coverage


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20), st.integers(2, 8), st.integers(0, 10**6))
def test_the_two_most_probable(rows: int, classes: int, seed: int) -> None:
    probs = torch.randint(0, 4, (rows, classes), generator=torch.Generator().manual_seed(seed)) / 4
    first, second = most_probable(probs)
    order = np.argsort(-probs.numpy(), axis=1, kind="stable")
    assert np.array_equal(torch.stack([first, second], 1).numpy(), order[:, :2])


# --- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"correct": 0}, "correct must be a share above 0"),
        ({"correct": 1.5}, "correct must be a share above 0"),
        ({"correct": "high"}, "correct must be a share above 0"),
        ({"unfamiliar": 1}, "unfamiliar must be a share"),
        ({"unfamiliar": -0.1}, "unfamiliar must be a share"),
        ({"unfamiliar": math.nan}, "unfamiliar must be a share"),
    ],
)
def test_shares_that_are_none(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        set_thresholds(prediction(binary([0.9] * 30)), torch.zeros(30).long(), **change)


def test_rows_and_labels_belong_together() -> None:
    given = prediction(binary([0.9] * 30))
    with pytest.raises(ValueError, match="one label for each row"):
        set_thresholds(given, torch.zeros(29).long())
    with pytest.raises(ValueError, match="labels must be 0 … 1"):
        set_thresholds(given, torch.full((30,), 2))
    with pytest.raises(ValueError, match="at least one"):
        set_thresholds(given[:0], torch.zeros(0).long())
    with pytest.raises(ValueError, match="3 class_names for 2 classes"):
        verdicts(given, thresholds(), "abc")


def test_no_number_is_no_score() -> None:
    score = torch.arange(30.0)
    score[4] = math.nan
    with pytest.raises(ValueError, match="ood_score is NaN, first for example 4"):
        set_thresholds(prediction(binary([0.9] * 30), score), torch.zeros(30).long())
    score[4:] = math.inf  # evidence that underflows: a threshold of infinity is none
    assert set_thresholds(prediction(binary([0.9] * 30), score), torch.zeros(30).long()).unfamiliar is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"confident": 1.5}, "confident must lie between 0 and 1"),
        ({"confident": "0.9"}, "confident must lie between 0 and 1"),
        ({"confident": True}, "confident must lie between 0 and 1"),
        ({"accuracy": math.nan}, "accuracy must lie"),
        ({"coverage": None}, "coverage must lie"),
        ({"right": None}, "right must lie"),
        ({"share": -1}, "share must lie"),
        ({"unfamiliar": math.inf}, "unfamiliar must be a finite number or null"),
        ({"unfamiliar": [1]}, "unfamiliar must be a finite number or null"),
        ({"held_out": 1.5}, "held_out must be a number of examples"),
        ({"held_out": 0}, "held_out must be a number of examples"),
        ({"score": "entropy"}, "score must be one of"),
        ({"more": 1}, "and nothing else"),
    ],
)
def test_damaged_thresholds(change: dict[str, Any], words: str) -> None:
    whole = thresholds().to_dict()
    assert Thresholds.from_dict(whole) == thresholds()
    with pytest.raises(ValueError, match=words):
        Thresholds.from_dict({**whole, **change})


@pytest.mark.parametrize("value", [None, [], "x", {}, {"confident": 0.9}])
def test_thresholds_that_are_none(value: Any) -> None:
    with pytest.raises(ValueError, match="thresholds are confident, unfamiliar"):
        Thresholds.from_dict(value)


def test_names_of_0_1_still_work() -> None:
    given, labels = prediction(binary([0.9] * 30)), torch.zeros(30).long()
    with pytest.warns(DeprecationWarning, match="right is now called correct"):
        found = set_thresholds(given, labels, right=0.9)  # type: ignore[call-arg]
    assert found == set_thresholds(given, labels, correct=0.9)
    with pytest.warns(DeprecationWarning, match="right is now called correct"):
        assert found.right == 0.9
    assert found.to_dict()["right"] == 0.9
    with pytest.warns(DeprecationWarning, match="of_dict is now called from_dict"):
        assert Thresholds.of_dict(found.to_dict()) == found
    with pytest.warns(DeprecationWarning, match="PredictionRecord"):
        assert serving.Line is serving.PredictionRecord
    with pytest.warns(DeprecationWarning, match="ServedModel"):
        assert serving.Served is serving.ServedModel
    with pytest.warns(DeprecationWarning, match="draw_contact_sheet"):
        assert serving.draw_lines is serving.draw_contact_sheet
