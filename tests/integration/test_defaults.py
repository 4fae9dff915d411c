"""The experiments behind the defaults still replace the rules of the library that they name."""

import math
from typing import Any

import pytest
from tests.scripts import load_script

from hetsngp.posterior import calibration

pytestmark = pytest.mark.slow


def test_every_idea_changes_the_fit_of_the_estimator(monkeypatch: pytest.MonkeyPatch) -> None:
    tabular = load_script("experiments/defaults/tabular.py")
    largest_good_scale, grids = calibration.largest_good_scale, []

    def recorded(*args: Any) -> Any:
        found = largest_good_scale(*args)
        grids.append(found[2])
        return found

    monkeypatch.setattr(calibration, "largest_good_scale", recorded)
    case = ("120 × 8, 2 classes", 0.2, 0)
    found = {name: tabular.one_fold(name, *case)["log loss"] for name in ("default", *tabular.IDEAS)}
    assert all(math.isfinite(value) for value in found.values())
    # Here the same scale is chosen whether each has its own temperature or not, from other held-out NLLs.
    assert found.pop("scales compared at one temperature") == found["default"]
    assert grids[-1] != grids[0]
    assert len(set(found.values())) == len(found)
