"""Constants of traced functions."""

import pytest
import torch
from torch import Tensor, nn

from hetsngp.functional import constants
from hetsngp.functional.constants import constant, kept_constants


def _powers(count: int, base: float, device: torch.device) -> Tensor:
    """Cannot be traced: it reads a value."""
    out = base ** torch.arange(count, device=device, dtype=torch.float32)
    assert float(out[0]) == 1
    return out


powers = constant(_powers)


class Sum(nn.Module):
    def __init__(self, *bases: float) -> None:
        super().__init__()
        self.bases = bases

    def forward(self, x: Tensor) -> Tensor:
        return sum((x * powers(3, base, x.device) for base in self.bases), torch.zeros_like(x))


@pytest.fixture(autouse=True)
def _no_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "_known", {})
    torch.compiler.reset()


def test_any_number_of_kept_constants_in_one_graph() -> None:
    """With equal names, which backends that differentiate refuse for constants that dynamo makes itself."""
    model, x = Sum(2.0, 3.0, 2.0), torch.ones(2, 3)
    with kept_constants():
        want = model(x)
    assert len(constants._known) == 2
    assert torch.equal(want[0], torch.tensor([3.0, 7.0, 17.0]))
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), want)
    for strict in (False, True):
        assert torch.equal(torch.export.export(model, (x,), strict=strict).module()(x), want)


def test_a_constant_that_was_not_kept() -> None:
    model, x = Sum(2.0), torch.ones(2, 3)
    want = model(x)
    assert constants._known == {}
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), want)
    for strict in (False, True):
        assert torch.equal(torch.export.export(model, (x,), strict=strict).module()(x), want)
