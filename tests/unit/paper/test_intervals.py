"""Intervals of differences: metrics of a resample are those of the examples it draws, and rows are paired."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from hetsngp import metrics
from hetsngp.paper import intervals
from hetsngp.paper.definitions import FAR, TABLES
from hetsngp.paper.intervals import (
    QUALITY,
    Interval,
    Resamples,
    paired_interval,
    population,
    resampled_columns,
    resampled_detection,
    resampled_quality,
)
from hetsngp.paper.sets import AvailableSets, EvaluationSet

COLUMNS = TABLES["cifar100"].parts[0].columns


def drawn_often(random: np.random.Generator, count: int, size: int) -> np.ndarray:
    """How often each example is drawn, counted from explicit draws: (count, size)."""
    drawn = random.integers(0, size, (count, size))
    return np.stack([np.bincount(each, minlength=size) for each in drawn]).astype(np.float32)


def repeated(values: Any, counts: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.repeat(np.asarray(values), counts.astype(int), axis=0))


# --- metrics of a resample ------------------------------------------------------------------------------


def predictions(random: np.random.Generator, size: int, classes: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and labels, some of them certain; without confidences on the edge of a bin, which
    rounding decides."""
    probs = random.dirichlet([0.3] * classes, 2 * size)
    probs[::10] = np.eye(classes)[random.integers(0, classes, len(probs[::10]))]  # the upper edge is a bin's
    place = probs.max(1) * 15
    probs = probs[(np.abs(place - place.round()) > 1e-3) | (probs.max(1) == 1)][:size]
    assert len(probs) == size
    wrong = random.random(size) < 0.3
    return probs, np.where(wrong, random.integers(0, classes, size), probs.argmax(1))


def as_cached(probs: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Values of each example, as they are cached: float32."""
    given = np.maximum(probs[np.arange(len(probs)), labels], metrics.probabilities.TINY)
    return {
        "confidence": probs.max(1).astype(np.float32),
        "correct": probs.argmax(1) == labels,
        "nll": -np.log(given).astype(np.float32),
    }


def quality_of(probs: torch.Tensor, labels: torch.Tensor) -> list[float]:
    return [metric(probs, labels) for metric in (metrics.accuracy, metrics.nll, metrics.ece)]


def test_quality_is_that_of_the_drawn_examples() -> None:
    random = np.random.default_rng(0)
    probs, labels = predictions(random, 300)
    counts = drawn_often(random, 20, 300)
    found = resampled_quality(**as_cached(probs, labels), counts=counts)
    expected = [quality_of(repeated(probs, each), repeated(labels, each)) for each in counts]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert np.ptp(found, axis=0).min() > 0.01  # resamples differ by far more
    assert QUALITY == ("accuracy", "nll", "ece")


def test_each_example_once_gives_the_metrics_themselves() -> None:
    probs, labels = predictions(np.random.default_rng(1), 2000)
    cached = as_cached(probs, labels)
    found = resampled_quality(**cached, counts=np.ones((1, 2000), np.float32))
    whole = quality_of(torch.from_numpy(probs), torch.from_numpy(labels))
    np.testing.assert_allclose(found, [whole], atol=1e-5)
    for bins in (5, 40):
        other = resampled_quality(**cached, counts=np.ones((1, 2000), np.float32), num_bins=bins)
        ece = metrics.ece(torch.from_numpy(probs), torch.from_numpy(labels), bins)
        assert other[0, 2] == pytest.approx(ece, abs=1e-5)


@pytest.mark.parametrize("digits", [1, 6])
def test_detection_is_that_of_the_drawn_scores(digits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one digit most scores are equal to others, also to some of the other set."""
    monkeypatch.setattr(intervals, "AT_ONCE", 7)  # of 20, so that the last are fewer
    random = np.random.default_rng(2)
    ids, oods = random.normal(0, 1, 90).round(digits), random.normal(1, 1, 130).round(digits)
    assert len(set(ids) & set(oods)) > 20 or digits == 6
    id_counts, ood_counts = drawn_often(random, 20, 90), drawn_often(random, 20, 130)
    found = resampled_detection(ids, oods, id_counts, ood_counts)
    for each, inside, outside in zip(found, id_counts, ood_counts, strict=True):
        scores = repeated(ids, inside), repeated(oods, outside)
        assert each[0] == pytest.approx(metrics.auroc(*scores), abs=1e-6)
        assert each[1] == pytest.approx(metrics.fpr95(*scores, positive="id"), abs=1e-6)
    assert np.ptp(found, axis=0).min() > 0.05


@pytest.mark.parametrize("size", [19, 20, 21, 40])
def test_the_threshold_of_fpr95_keeps_at_least_95_per_cent(size: int) -> None:
    """Of 20 all but one, of 19 all: where rounding of 0.95·n would decide."""
    ids, oods = np.arange(size, dtype=float), np.arange(2 * size) / 2 + 0.25
    ones = np.ones((1, size)), np.ones((1, 2 * size))
    kept = next(count for count in range(size + 1) if 100 * count >= 95 * size)
    found = resampled_detection(ids, oods, *ones)[0, 1]
    assert found == pytest.approx((oods <= ids[kept - 1]).mean(), abs=1e-9)
    expected = metrics.fpr95(torch.from_numpy(ids), torch.from_numpy(oods), positive="id")
    assert found == pytest.approx(expected, abs=1e-6)


# --- the same examples for all --------------------------------------------------------------------------


def test_draws_are_of_the_population_and_the_same_for_all() -> None:
    counts = Resamples(50).of("cifar100", 200)
    assert counts.shape == (50, 200)
    assert (counts.sum(1) == 200).all()
    np.testing.assert_array_equal(counts, Resamples(50).of("cifar100", 200))
    assert (counts != Resamples(50).of("cifar10", 200)).any(1).all()
    # Of a multinomial: variance 1 − 1/n of each count, within 4 standard errors; the kurtosis is 4, nearly.
    variance = Resamples(400).of("a", 500).var()
    assert variance == pytest.approx(1 - 1 / 500, abs=4 * np.sqrt(3 / (400 * 500)))


@pytest.mark.parametrize("made", [False, True])
def test_corrupted_images_are_those_of_the_clean_set(made: bool) -> None:
    assert population(EvaluationSet("cifar100-c", ("fog", 3), made=made)) == "cifar100"
    assert population(EvaluationSet("imagenet-c", ("fog", 3))) == "imagenet"
    assert population(EvaluationSet("cifar100", scores=True)) == "cifar100"
    assert population(EvaluationSet("pictures-c")) == "pictures-c"  # a folder of that name


SETS = AvailableSets("far", {"cifar100-c": ({("fog", 1): None, ("snow", 5): None}, True)}, {})
SIZES = {"cifar100": 80, "cifar100-c": 80, "cifar10": 70, FAR: 60}


def measured(seed: int) -> dict[EvaluationSet, Mapping[str, Any]]:
    """Values of each example of every set, for one model; and its predictions, which no code reads."""
    found: dict[EvaluationSet, Mapping[str, Any]] = {}
    for column in COLUMNS:
        for each in SETS.evaluation_sets(column, "cifar100"):
            random = np.random.default_rng([seed, *each.name.encode()])
            size = SIZES[each.spec]
            if each.scores:
                found[each] = {"ood_score": random.normal(size=size).round(2).tolist(), "examples": size}
            else:
                probs, labels = predictions(random, size)
                found[each] = {**as_cached(probs, labels), "all": (probs, labels)}
    return found


def columns_of(values: Mapping[EvaluationSet, Mapping[str, Any]], count: int = 12) -> dict[str, np.ndarray]:
    return resampled_columns(COLUMNS, SETS, "cifar100", values.get, Resamples(count))


def test_every_column_is_that_of_the_drawn_examples() -> None:
    values = measured(0)
    found = columns_of(values)
    assert list(found) == [column.name for column in COLUMNS]
    functions: dict[str, Callable[..., float]]
    functions = {name: getattr(metrics, name) for name in (*QUALITY, "auroc")}
    functions["fpr95_at_id_recall"] = lambda ids, oods: metrics.fpr95(ids, oods, positive="id")
    for column in COLUMNS:
        needed = SETS.evaluation_sets(column, "cifar100")
        counts = [Resamples(12).of(each.spec.removesuffix("-c"), SIZES[each.spec]) for each in needed]
        for place in range(12):
            drawn = [each[place] for each in counts]
            if column.metric in QUALITY:
                of = [[repeated(v, c) for v in values[e]["all"]] for e, c in zip(needed, drawn, strict=True)]
                expected = np.mean([functions[column.metric](*each) for each in of])
            else:
                scores = [repeated(values[e]["ood_score"], c) for e, c in zip(needed, drawn, strict=True)]
                expected = functions[column.metric](*scores)
            assert found[column.name][place] == pytest.approx(expected, abs=1e-5), column.name


def test_clean_and_corrupted_sets_and_all_models_have_the_same_draws() -> None:
    """Corruptions that change nothing give the values of the clean set in every resample; a model that is
    worse by 0.25 nats for every image is so in every resample."""
    values = measured(0)
    clean = values[EvaluationSet("cifar100")]
    same = {each: clean if each.corruption else value for each, value in values.items()}
    found = columns_of(same)
    for metric in ("acc", "nll", "ece"):
        np.testing.assert_allclose(found[f"corr_{metric}"], found[f"id_{metric}"], rtol=1e-6)
    assert np.ptp(found["id_nll"]) > 0.1
    worse = {
        each: {**value, "nll": value["nll"] + np.float32(0.25)} if "nll" in value else value
        for each, value in same.items()
    }
    other = columns_of(worse)
    np.testing.assert_allclose(other["corr_nll"] - found["corr_nll"], 0.25, atol=1e-5)
    np.testing.assert_array_equal(other["near_auroc"], found["near_auroc"])


def test_columns_of_other_metrics_have_no_interval() -> None:
    columns = TABLES["imagenet21k"].parts[0].columns
    sets = AvailableSets("far", {"imagenet-c": ({("fog", 1): None}, False)}, {})
    values = as_cached(*predictions(np.random.default_rng(0), 40))
    found = resampled_columns(columns, sets, "imagenet21k", lambda of: values, Resamples(5))
    assert list(found) == [column.name for column in columns if column.metric == "accuracy"]
    assert len(found) == len(columns) - 1


# --- differences ----------------------------------------------------------------------------------------


def constant(**values: float) -> dict[int, tuple[float, np.ndarray]]:
    """Seed → (value, the same in each resample); s3=0.5 is seed 3."""
    return {int(name[1:]): (value, np.full(1000, value)) for name, value in values.items()}


def test_a_constant_shift_has_an_interval_of_no_width() -> None:
    """Though values vary from seed to seed and from resample to resample."""
    random = np.random.default_rng(0)
    base = {seed: (float(seed), random.normal(seed, 1, 1000)) for seed in range(4)}
    row = {seed: (value + 0.3, drawn + 0.3) for seed, (value, drawn) in base.items()}
    assert paired_interval(row, base, Resamples()) == pytest.approx((0.3, 0.3, 0.3, 4))


def test_seeds_are_paired_and_only_common_ones_count() -> None:
    row, base = constant(s0=7.0, s1=1.0, s2=20.0, s3=9.0), constant(s1=1.0, s2=19.0, s5=4.0)
    # Differences 0 and 1 of two seeds: a quarter of the resamples has one of them twice.
    assert paired_interval(row, base, Resamples()) == pytest.approx((0.5, 0.0, 1.0, 2))
    assert paired_interval(row, constant(s5=1.0), Resamples()) is None
    assert paired_interval({}, base, Resamples()) is None
    one = paired_interval(row, constant(s3=10.0), Resamples())
    assert one == pytest.approx((-1.0, -1.0, -1.0, 1))


@pytest.mark.parametrize("seeds", [1, 2, 5])
def test_seeds_are_drawn_as_often_as_there_are_seeds(seeds: int) -> None:
    shares = Resamples().seed_shares(seeds)
    assert shares.shape == (1000, seeds)
    np.testing.assert_allclose(shares.sum(1), 1.0)
    np.testing.assert_allclose(shares * seeds, (shares * seeds).round(), atol=1e-12)
    # Variance of a share is (1 − 1/n)/n² for n seeds; 1,000 resamples know it to a few per cent.
    assert shares.var(0) == pytest.approx((1 - 1 / seeds) / seeds**2, rel=0.25)


def test_intervals_have_the_width_and_coverage_of_the_normal_one() -> None:
    """Of 200 experiments with 400 normal differences each, 95 % cover the mean: 4 standard errors are 6 %."""
    random, size, mean = np.random.default_rng(3), 400, 0.1
    of_base = random.normal(5, 3, (200, size))
    of_row = of_base + random.normal(mean, 1, (200, size))
    resamples, covered, widths = Resamples(), 0, []
    counts = resamples.of("normal", size)
    for row, base in zip(of_row, of_base, strict=True):
        each = [{0: (float(values.mean()), counts @ values / size)} for values in (row, base)]
        found = paired_interval(each[0], each[1], resamples)
        assert found is not None
        assert found.difference == pytest.approx(float((row - base).mean()))
        assert found.low < found.difference < found.high
        half, expected = (found.high - found.low) / 2, 1.96 * (row - base).std() / np.sqrt(size)
        assert half == pytest.approx(expected, rel=0.15)
        widths.append(half / expected)
        covered += found.low <= mean <= found.high
    assert np.mean(widths) == pytest.approx(1.0, abs=0.05)
    assert covered / 200 == pytest.approx(0.95, abs=0.06)


@pytest.mark.parametrize(
    ("low", "high", "clear"), [(-0.1, 0.2, False), (0.1, 0.2, True), (-0.2, -0.1, True), (0.0, 0.2, False)]
)
def test_a_difference_is_clear_where_zero_is_outside(low: float, high: float, clear: bool) -> None:
    assert Interval(0.1, low, high, 3).is_clear is clear
