"""Risk and coverage against every order of tied rows, written out."""

import itertools
import math

import pytest
import torch

from hetsngp import metrics


def plain_risks(order: tuple[int, ...], correct: list[bool]) -> list[float]:
    wrong = list(itertools.accumulate(0 if correct[row] else 1 for row in order))
    return [count / (k + 1) for k, count in enumerate(wrong)]


def mean_risks(uncertainty: list[float], correct: list[bool]) -> list[float]:
    """The mean over all orders in which uncertainty does not fall."""
    orders = [
        order
        for order in itertools.permutations(range(len(uncertainty)))
        if all(uncertainty[a] <= uncertainty[b] for a, b in itertools.pairwise(order))
    ]
    each = [plain_risks(order, correct) for order in orders]
    return [math.fsum(column) / len(orders) for column in zip(*each, strict=True)]


CASES = [
    ([0.1, 0.2, 0.3, 0.4], [True, False, True, False]),
    ([0.5, 0.5, 0.5, 0.5, 0.5], [True, False, True, False, False]),
    ([0.1, 0.5, 0.5, 0.5, 0.9, 0.9], [False, True, False, True, True, False]),
    ([0.0, 0.0, 1.0], [True, True, True]),
    ([3.0, 1.0, 2.0], [False, False, False]),
    ([7.0], [False]),
]


@pytest.mark.parametrize(("uncertainty", "correct"), CASES)
def test_risks_are_the_mean_over_the_orders_of_ties(uncertainty: list[float], correct: list[bool]) -> None:
    expected = mean_risks(uncertainty, correct)
    found = metrics.risks(torch.tensor(uncertainty), torch.tensor(correct))
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    assert metrics.aurc(torch.tensor(uncertainty), torch.tensor(correct)) == pytest.approx(
        math.fsum(expected) / len(uncertainty), abs=1e-12
    )


@pytest.mark.parametrize(("uncertainty", "correct"), CASES)
def test_excess_is_over_the_best_of_all_orders(uncertainty: list[float], correct: list[bool]) -> None:
    best = min(
        math.fsum(plain_risks(order, correct)) / len(uncertainty)
        for order in itertools.permutations(range(len(uncertainty)))
    )
    expected = math.fsum(mean_risks(uncertainty, correct)) / len(uncertainty) - best
    found = metrics.excess_aurc(torch.tensor(uncertainty), torch.tensor(correct))
    assert found == pytest.approx(expected, abs=1e-12)
    assert found >= 0


def test_without_order_the_area_is_the_share_of_errors(generator: torch.Generator) -> None:
    correct = torch.rand(1000, generator=generator) < 0.7
    expected = 1 - float(correct.double().mean())
    assert metrics.aurc(torch.zeros(1000), correct) == pytest.approx(expected, abs=1e-12)


def test_accuracy_at_coverage() -> None:
    uncertainty = torch.arange(20.0)
    correct = torch.tensor([True] * 17 + [False] * 3)
    assert metrics.accuracy_at_coverage(uncertainty, correct, 0.85) == 1.0
    assert metrics.accuracy_at_coverage(uncertainty, correct, 0.9) == pytest.approx(17 / 18)
    assert metrics.accuracy_at_coverage(uncertainty, correct, 1.0) == pytest.approx(17 / 20)
    assert metrics.accuracy_at_coverage(-uncertainty, correct, 0.1) == 0.0
    hundred = torch.arange(100.0)
    assert 0.07 * 100 > 7  # by rounding: it is 7 rows, not 8
    assert metrics.accuracy_at_coverage(hundred, hundred < 7, 0.07) == 1.0
    with pytest.raises(ValueError, match="coverage"):
        metrics.accuracy_at_coverage(uncertainty, correct, 0.0)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="finite"):
        metrics.risks(torch.tensor([0.0, float("nan")]), torch.tensor([True, False]))
    for uncertainty, correct in (
        (torch.ones(3), torch.ones(2).bool()),
        (torch.ones(0), torch.ones(0).bool()),
    ):
        with pytest.raises(ValueError, match=r"both be \(n,\)"):
            metrics.aurc(uncertainty, correct)
