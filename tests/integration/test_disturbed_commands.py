"""Short forms of the attacks on files: kills and failing writes at some file operations of commands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning", reason="pip install 'hetsngp[train]'")
pytest.importorskip("typer", reason="pip install 'hetsngp[cli]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the attacks look into /proc"),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["kills", "write_errors"])
def test_a_disturbed_command_ends_well_when_it_is_run_again(name: str, tmp_path: Path) -> None:
    from importlib import import_module

    from tools.attacks.harness import DEFECTS

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = list(import_module(f"tools.attacks.{name}").attack(1, 0.05, tmp_path))
    finally:
        torch.set_num_threads(threads)
    assert len(results) > 10
    assert [result for result in results if result.outcome in DEFECTS] == []
