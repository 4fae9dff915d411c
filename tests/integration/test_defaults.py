"""The experiments behind the defaults still replace the rules of the library that they name."""

import math

import pytest
from tests.scripts import load_script

pytestmark = pytest.mark.slow
tabular = load_script("experiments/defaults/tabular.py")


def test_every_idea_changes_what_the_estimator_predicts() -> None:
    case = ("180 × 13, apart", 0.2, 0)
    found = {name: tabular.one_fold(name, *case)["log loss"] for name in ("default", *tabular.IDEAS)}
    assert len(set(found.values())) == len(found)
    assert all(math.isfinite(value) for value in found.values())
