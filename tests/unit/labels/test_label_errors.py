"""find_label_errors: against Bayes by loops and against the truth of simulated noise; what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.labels.made_noise import alike, noisy, pairs

from hetsngp.labels import find_label_errors

# --- numbers that were promised -----------------------------------------------------------------------------


@pytest.mark.parametrize("blur", [1.0, 2.0])
@pytest.mark.parametrize(
    ("made", "spread"),
    [(pairs(5, 0.1), 3.0), (pairs(5, 0.1), 2.0), (alike(4, 0.3), 3.0), (np.eye(4), 3.0)],
    ids=["pairs", "pairs-harder", "alike", "clean"],
)
def test_the_interval_has_the_number_of_wrong_labels(made: object, spread: float, blur: float) -> None:
    covered = 0
    for seed in range(20):
        data = noisy(seed, 800, made, blur=blur, spread=spread)
        errors = find_label_errors(data.given, data.probs)
        low, high = errors.expected_wrong_interval
        assert 0 <= low <= errors.expected_wrong <= high <= 800
        covered += int(low <= data.wrong.sum() <= high)
    assert covered >= 17
