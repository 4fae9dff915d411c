"""The attacks of tools/attack.py: a short form of each finds no defect, and the documented table is true."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tools import attack
from tools.attacks import harness

from hetsngp.limits import MODEL_LIMITS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "attack.json"
SHARE = 0.02

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limits on memory need Linux")


@pytest.mark.slow
@pytest.mark.parametrize("name", attack.ATTACKS)
def test_a_short_form_of_each_attack_finds_no_defect(name: str) -> None:
    command = [sys.executable, str(ROOT / "tools" / "attack.py"), name, "--share", str(SHARE)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    tried = [line for line in run.stdout.splitlines() if line.startswith("| ")][1:]
    assert tried, run.stdout


# --- the harness tells outcomes apart -------------------------------------------------------------------


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def take_memory() -> None:
    assert len(bytearray(64 * 2**20)) > 0


def hang() -> None:
    signal.pause()


def wrong() -> None:
    raise harness.Wrong("another answer")


def error_of_torch() -> None:
    import torch

    torch.zeros(2) @ torch.zeros(3)


def error_of_ours() -> None:
    from hetsngp.validation import check_num_classes

    check_num_classes(1)


@pytest.mark.parametrize(
    ("case", "outcome"),
    [
        (lambda: None, harness.CORRECT),
        (error_of_ours, harness.CLEAN_ERROR),
        (wrong, harness.WRONG),
        (error_of_torch, harness.TRACEBACK),
        (crash, harness.CRASH),
        (hang, harness.HANG),
        (take_memory, harness.TRACEBACK),
    ],
    ids=["nothing", "our error", "wrong", "error of torch", "crash", "hang", "memory"],
)
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_the_harness_tells_outcomes_apart(case: object, outcome: str) -> None:
    result = harness.run_case("harness", "case", case, seconds=5, memory=2**24)  # type: ignore[arg-type]
    assert result.outcome == outcome, result.detail


# --- documented figures ---------------------------------------------------------------------------------


ENOUGH = {"api_abuse": 150, "saved_models": 2000, "data_files": 100, "writers": 300, "kills": 100}


def last_full_run() -> list[harness.Result]:
    """Results in the file, without the names of the cases."""
    return [
        harness.Result(kind, "", outcome)
        for found in json.loads(RESULTS.read_text()).values()
        for kind, outcomes in found["table"].items()
        for outcome, count in outcomes.items()
        for _ in range(count)
    ]


def test_documented_table_is_that_of_the_last_full_run() -> None:
    lines = (ROOT / "docs" / "reliability.md").read_text().splitlines()
    assert [line for line in harness.table(last_full_run()).splitlines() if line not in lines] == []


def test_documented_limits_are_those_in_force() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    for limit in MODEL_LIMITS:
        amount = f"{limit.default:,} {limit.unit}".strip()
        assert f"| {limit.about} | {amount} | `{limit.variable}` |" in text


def test_last_full_run_has_no_defect_and_enough_cases() -> None:
    found = json.loads(RESULTS.read_text())
    assert list(found) == list(attack.ATTACKS)
    for name, run in found.items():
        assert (run["share"], run["defects"]) == (1.0, [])
        assert sum(sum(outcomes.values()) for outcomes in run["table"].values()) >= ENOUGH.get(name, 1)
    assert sum(found["kills"]["table"]["kills at file operations"].values()) >= 100
