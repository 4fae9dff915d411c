"""The sharpening: recovered where it is known, and chosen by the given labels alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.labels.made_noise import alike, noisy, pairs

from hetsngp.labels import find_label_errors
from hetsngp.labels.sharpening import (
    SEARCH_CELLS,
    choose_sharpening,
    sample,
    sharpened,
    standard_error,
)
from hetsngp.labels.transition import fit_transition


def steps(value: float, blur: float) -> float:
    """Steps of the grid by which a sharpening is larger than the true one."""
    return math.log(value / blur, 2**0.5)


@pytest.mark.parametrize("power", [0.5, 1.0, 3.0])
def test_sharpened_is_a_power(power: float) -> None:
    probs = noisy(0, 50, np.eye(4)).probs
    expected = probs**power / (probs**power).sum(1, keepdims=True)
    np.testing.assert_allclose(sharpened(torch.from_numpy(probs).log(), power).exp(), expected, rtol=1e-10)


@pytest.mark.parametrize("blur", [0.5, 1.0, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("made", [pairs(5, 0.25), alike(5, 0.25), np.eye(5)], ids=["pairs", "alike", "clean"])
def test_a_known_blur_is_recovered(made: Any, blur: float) -> None:
    """Within a step of √2, or two upwards: the next larger one is preferred where it is about as good."""
    data = noisy(0, 4000, made, blur=blur)
    floor = torch.from_numpy(np.maximum(data.probs, 1e-5)).log()
    chosen, as_good = choose_sharpening(floor, torch.from_numpy(data.given)[:, None])
    assert -1.01 < steps(chosen, blur) < 2.01
    assert chosen in as_good
    assert min(abs(steps(s, blur)) for s in as_good) < 1.01


def test_probabilities_of_given_labels_are_sharpened() -> None:
    """A perfect model of the given labels, P(given | x) = Σ_k P(k | x)·T[k, given], is less certain than
    P(k | x). No exponent makes up for all of that, but much is better than nothing.
    """
    data = noisy(0, 6000, alike(5, 0.4), spread=6.0)
    learned = data.probs @ data.transition
    plain, chosen = (find_label_errors(data.given, learned, sharpening=s) for s in (1.0, None))
    assert chosen.sharpening > 1.4
    assert plain.expected_wrong < chosen.expected_wrong - 500 < data.wrong.sum()
    assert (chosen.is_wrong == data.wrong).mean() > (plain.is_wrong == data.wrong).mean() + 0.1


def test_what_is_as_good_is_not_measurably_worse() -> None:
    """By leave-one-out losses of every exponent, computed here again."""
    data = noisy(2, 1500, pairs(4, 0.2), blur=2.0)
    log_probs, given = torch.from_numpy(data.probs).log(), torch.from_numpy(data.given)[:, None]
    chosen, as_good = choose_sharpening(log_probs, given)
    grid = [2 ** (power / 2) for power in range(-4, 11)]
    losses = {s: fit_transition(sharpened(log_probs, s), given).loss for s in grid}
    best = min(grid, key=lambda s: float(losses[s].mean()))
    worse = {s: losses[s] - losses[best] for s in grid}
    expected = {s for s, d in worse.items() if float(d.mean()) <= 2 * float(d.std()) / math.sqrt(1500)}
    assert {round(s, 6) for s in as_good} == {round(s, 6) for s in expected}
    assert chosen == pytest.approx(
        best * 2**0.5 if min(abs(s / best - 2**0.5) for s in as_good) < 1e-6 else best
    )


def test_noise_that_the_probabilities_have_learned_is_found_behind_a_worse_sharpening() -> None:
    """Models of three separate classes, a fifth of each mislabelled as the next, predict the labels, nearly.

    As they are they fit without any noise; a little sharper they contradict labels; and sharp, with the noise
    in T, they fit best. A search that ends where the loss rises finds no wrong label at all.
    """
    rng = np.random.default_rng(0)
    true = rng.integers(3, size=2000)
    wrong = rng.random(2000) < 0.2
    given = np.where(wrong, (true + 1) % 3, true)
    learned = 0.8 * np.eye(3) + 0.19 * np.roll(np.eye(3), 1, 1) + 0.01 * np.roll(np.eye(3), 2, 1)
    logits = np.log(learned)[true] + 0.1 * rng.standard_normal((2000, 3))
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    losses = [find_label_errors(given, probs, sharpening=s).losses.mean() for s in (1, 2**0.5, 32)]
    assert losses[1] > losses[0] > losses[2]
    found = find_label_errors(given, probs)
    assert np.array_equal(found.is_wrong, wrong)
    low, high = found.expected_wrong_interval
    assert low <= wrong.sum() <= high


def test_without_information_the_bounds_hold() -> None:
    """Probabilities that are all equal say nothing, whatever their exponent."""
    given = torch.arange(60).remainder(3)[:, None]
    chosen, as_good = choose_sharpening(torch.full((60, 3), 1 / 3).log(), given)
    assert 0.25 <= chosen <= 32
    assert all(0.25 <= s <= 32 for s in as_good)


def test_certain_and_correct_probabilities_stay_within_the_bounds() -> None:
    given = torch.arange(300).remainder(3)
    probs = 0.98 * torch.eye(3)[given] + 0.02 / 3
    chosen, as_good = choose_sharpening(probs.log(), given[:, None])
    assert all(0.25 <= s <= 32 for s in {chosen, *as_good})


def test_both_ends_of_the_search_are_tried() -> None:
    data = noisy(0, 400, np.eye(3), spread=6.0)
    for sharpness, end in ((1e-3, 32.0), (300.0, 0.25)):
        log_probs = sharpened(torch.as_tensor(np.log(data.probs)).float(), sharpness)
        _, as_good = choose_sharpening(log_probs, torch.as_tensor(data.true).unsqueeze(1))
        assert end in as_good


def test_few_examples_are_all_used_and_of_many_a_part() -> None:
    assert torch.equal(sample(100, 1000), torch.arange(100))
    some = sample(10_000, 1000)
    assert len(some) == SEARCH_CELLS // 1000
    assert torch.equal(some, sample(10_000, 1000))
    assert torch.equal(some, some.unique())
    assert 0 <= int(some[0]) < 20
    assert 9_980 < int(some[-1]) < 10_000


def test_the_standard_error_is_that_of_the_mean() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 9.0])
    assert standard_error(values) == pytest.approx(np.std(values.numpy(), ddof=1) / 2)
    assert standard_error(values[:1]) == 0.0
