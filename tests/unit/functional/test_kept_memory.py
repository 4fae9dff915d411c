"""Memory that a thread keeps from call to call (integration.Memory) leaves no trace in any result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from hetsngp.functional import integration
from hetsngp.functional.link import softmax_log_probs, softmax_nll, softmax_probs
from hetsngp.functional.uncertainty import softmax_split
from hetsngp.types import UtilityNormal

# Rows, classes, columns of the factor: more classes than points times nodes, and the reverse.
SHAPES = ((7, 5, 2), (2, 300, 3), (1, 3, 0), (33, 10, 4), (3, 40, 0))


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """No memory from other tests, and none for them."""
    vars(integration._kept).clear()
    yield
    vars(integration._kept).clear()


def utility(batch: int, classes: int, rank: int, *, grad: bool = False) -> UtilityNormal:
    g = torch.Generator().manual_seed(batch)
    mean, var = torch.randn(batch, classes, generator=g), torch.rand(batch, classes, generator=g)
    factor = torch.randn(batch, classes, rank, generator=g) if rank else None
    tensors = [t if t is None else t.requires_grad_(grad) for t in (mean, var, factor)]
    return UtilityNormal(*tensors)


def loss(u: UtilityNormal, **options: Any) -> list[Tensor]:
    y = torch.arange(len(u.mean)) % u.mean.shape[1]
    out = softmax_nll(u, y, num_samples=6, seed=0, **options)
    leaves = [t for t in (u.mean, u.var, u.factor) if t is not None]
    return [out.detach(), *torch.autograd.grad(out.sum(), leaves)]


def noise_of(u: UtilityNormal) -> UtilityNormal:
    return UtilityNormal(torch.zeros_like(u.mean), u.var, u.factor)


CALLS: dict[str, Callable[[tuple[int, int, int]], list[Tensor]]] = {
    "probs": lambda shape: [softmax_probs(utility(*shape))[0]],
    "log-probabilities": lambda shape: [softmax_log_probs(utility(*shape), seed=0)],
    "loss": lambda shape: loss(utility(*shape, grad=True)),
    "split": lambda shape: list(softmax_split(utility(*shape[:2], 0), noise_of(utility(*shape)))[:3]),
    "split without noise": lambda shape: list(softmax_split(utility(*shape[:2], 0), None)[:3]),
}


def fresh(name: str, shape: tuple[int, int, int]) -> list[Tensor]:
    """Result of a thread that has no memory yet."""
    vars(integration._kept).clear()
    return CALLS[name](shape)


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_memory_is_kept() -> None:
    """Or what follows would test nothing."""
    fresh("probs", SHAPES[0])
    kept = integration._kept.memory.parts
    assert kept
    before = {name: part.data_ptr() for name, part in kept.items()}
    CALLS["probs"](SHAPES[0])
    assert {name: part.data_ptr() for name, part in kept.items()} == before


def test_calls_of_different_shapes_in_turn() -> None:
    want = {(name, shape): fresh(name, shape) for name in CALLS for shape in SHAPES}
    vars(integration._kept).clear()
    for _ in range(2):
        for shape in SHAPES:
            for name in CALLS:
                assert_same(CALLS[name](shape), want[name, shape])
    for name in CALLS:
        for shape in reversed(SHAPES):
            assert_same(CALLS[name](shape), want[name, shape])


@pytest.mark.parametrize("name", CALLS)
def test_results_are_not_overwritten_by_the_next_call(name: str) -> None:
    first = CALLS[name](SHAPES[0])
    copies = [t.clone() for t in first]
    for other in CALLS:
        for shape in SHAPES:
            CALLS[other](shape)
    assert_same(first, copies)


def test_a_gradient_is_not_overwritten_by_a_later_forward_pass() -> None:
    """Several losses before one backward pass, and predictions between them."""
    u = utility(7, 5, 2, grad=True)
    y = torch.arange(7) % 5

    def out() -> Tensor:
        return softmax_nll(u, y, num_samples=6, seed=0)

    want = torch.autograd.grad(out().sum(), [u.mean, u.var, u.factor])
    losses = [out(), out()]
    softmax_probs(utility(33, 10, 4))
    loss(utility(2, 300, 3, grad=True))
    for each in losses:
        assert_same(list(torch.autograd.grad(each.sum(), [u.mean, u.var, u.factor])), list(want))


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("name", CALLS)
def test_training_after_inference_mode(name: str, first: Any) -> None:
    """Memory made under inference mode can be written to outside of it, and larger memory after it."""
    want = {shape: (fresh("loss", shape), fresh(name, shape)) for shape in SHAPES}
    vars(integration._kept).clear()
    for shape in SHAPES:
        with first():
            quiet = CALLS["probs"](shape) + CALLS["split"](shape)
        assert_same(CALLS["loss"](shape), want[shape][0])
        assert_same(CALLS[name](shape), want[shape][1])
        assert_same(quiet, fresh("probs", shape) + fresh("split", shape))


def test_several_threads_at_once() -> None:
    want = {(name, shape): fresh(name, shape) for name in CALLS for shape in SHAPES}
    jobs = [(name, shape) for _ in range(3) for shape in SHAPES for name in CALLS]
    together = threading.Barrier(4)

    def work(offset: int) -> list[bool]:
        together.wait()
        turned = jobs[offset:] + jobs[:offset]
        return [
            all(torch.equal(a, b) for a, b in zip(CALLS[n](s), want[n, s], strict=True)) for n, s in turned
        ]

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(work, (0, 7, 19, 31)):
            assert all(found)


def test_other_dtypes_do_not_share_the_memory_of_float32() -> None:
    want = fresh("probs", SHAPES[0])
    u = utility(*SHAPES[0])
    double = softmax_probs(UtilityNormal(u.mean.double(), u.var.double(), u.factor.double()))[0]
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), want[0], rtol=0, atol=1e-4)
    assert all(part.dtype == torch.float32 for part in integration._kept.memory.parts.values())
