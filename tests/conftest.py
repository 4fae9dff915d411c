"""Fixtures shared by every test."""

import gc
import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("MPLBACKEND", "Agg")

collect_ignore = ["saved_0_1"]  # scripts that ran once, with release 0.1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Libraries and thousands of tests stay to the end: the collector need not look at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Same initial weights and data in every run and order; the library's own draws take a generator."""
    torch.manual_seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real data sets, named by the environment variable HETSNGP_DATA."""
    value = os.environ.get("HETSNGP_DATA")
    if not value:
        pytest.skip("set HETSNGP_DATA to the folder of data sets to run this test")
    root = Path(value)
    if not root.is_dir():
        pytest.fail(f"HETSNGP_DATA={value} is not a folder")
    return root
