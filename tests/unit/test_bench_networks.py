"""benchmarks/circles.py and ood_auroc.py, which compare two versions of the package on networks."""

import json
import sys
from pathlib import Path

import pytest
from tests.scripts import ROOT, load_script

from hetsngp.functional import link


def test_another_number_of_draws_ends_with_its_measurement() -> None:
    script = load_script("benchmarks/ood_auroc.py")
    before = link.num_draws(10), link.num_draws(100)
    with script.other_draws(4096):
        assert (link.num_draws(10), link.num_draws(100)) == (4096, 4096)
    assert (link.num_draws(10), link.num_draws(100)) == before
    with script.other_draws(None):
        assert (link.num_draws(10), link.num_draws(100)) == before


def test_circles_of_one_package_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("benchmarks/circles.py")
    arguments = ["--before", str(ROOT / "src"), "--seeds", "0", "1", "--epochs", "5", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["circles.py", *arguments])
    script.main()
    rows = json.loads((tmp_path / "circles.json").read_text())["rows"]
    assert [row["seed"] for row in rows] == [0, 1]
    for row in rows:
        assert row["before"] == row["after"]
        assert row["after"]["epoch"] == 5
        assert row["after"]["best_held_out"] <= row["after"]["held_out"]
        assert 0.5 < row["after"]["train"] < 1.1
    assert "| train | " in (shown := capsys.readouterr().out)
    assert shown.count("+0.0000 ± 0.0000") == len(script.SHOWN)
