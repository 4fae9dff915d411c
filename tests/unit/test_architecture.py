"""docs/architecture.md says which files a loss, a fit and a prediction cross: a profiler agrees."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import hetsngp
from hetsngp.nn.backbones import ResidualMLP

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
SRC = Path(hetsngp.__file__).parent
# The OOD score is fitted by predictions of held-out data, so that a fit crosses what a prediction does.
MOST_FILES = {"loss": 14, "predict": 14, "fit_posterior": 17}
BACKBONE = r"nn/backbones/.*|nn/spectral.*|functional/spectral"
# The hook of io/construction sees every tensor that modules register, once a model was loaded in the process.
NOT_COUNTED = re.compile(
    rf"(.*__init__|_moved|types|validation|limits|io/construction|functional/constants|{BACKBONE})\.py"
)
CLASSES = 10


def documented(call: str) -> list[str]:
    """Files in the table below the heading that names ``call``."""
    section = re.search(rf"^### `[^`]*\b{call}\(.*?(?=^#|\Z)", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert section is not None
    return re.findall(r"^\| `([^`]+\.py)` \|", section[0], re.M)


def crossed(call: Callable[[], Any]) -> set[str]:
    """Source files of the package in which a function is called, here or in the threads of autograd."""
    found = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(SRC):
            found.add(file.relative_to(SRC).as_posix())

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {name for name in found if not NOT_COUNTED.fullmatch(name)}


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(64, 4, generator=generator), torch.randint(CLASSES, (64,), generator=generator)


@pytest.fixture(scope="module")
def model() -> hetsngp.Classifier:
    model = hetsngp.build("hetsngp", ResidualMLP(4), CLASSES, dataset_size=64, random_features=64)
    hetsngp.fit_posterior(model, [batch(0)], calibration=[batch(1)])
    return model


@pytest.mark.parametrize("call", ["loss", "fit_posterior", "predict"])
def test_the_files_that_a_call_crosses(call: str, model: hetsngp.Classifier) -> None:
    x, y = batch(0)
    calls = {
        "loss": lambda: model.train().loss(x, y).backward(),
        "fit_posterior": lambda: hetsngp.fit_posterior(model, [(x, y)], calibration=[batch(1)]),
        "predict": lambda: model.predict(x),
    }
    table = documented(call)
    assert set(table) == crossed(calls[call])
    assert len(table) == len(set(table)) <= MOST_FILES[call]


def test_every_package_is_in_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    packages = {path.name for path in SRC.iterdir() if path.is_dir() and not path.name.startswith("_")}
    assert packages == set(re.findall(r"`(\w+)/`(?=[^\n]* \| )", text))
