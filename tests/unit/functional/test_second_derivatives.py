"""Functions with a gradient of their own refuse a second derivative, which would be zero without a word."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hetsngp.functional.link import softmax_log_probs, softmax_nll
from hetsngp.functional.quadrature import expected_log_sigmoid, log_expected_sigmoid
from hetsngp.types import UtilityNormal

LABELS = torch.tensor([0, 2, 3])


def _utility(mean: Tensor) -> UtilityNormal:
    return UtilityNormal(mean, torch.ones_like(mean), torch.ones(*mean.shape, 1))


@pytest.mark.parametrize(
    "function",
    [
        lambda mean: softmax_nll(_utility(mean), LABELS, num_samples=8, seed=0),
        lambda mean: softmax_nll(_utility(mean), torch.full((3, 4), 0.25), num_samples=8, seed=0),
        lambda mean: softmax_log_probs(_utility(mean), num_samples=8, seed=0, sampler="mc"),
        lambda mean: softmax_log_probs(_utility(mean), num_samples=8, seed=0),
        lambda mean: softmax_log_probs(_utility(mean), num_samples=8, seed=0, likelihood="mean_log"),
        lambda mean: log_expected_sigmoid(mean, torch.ones_like(mean)),
        lambda mean: expected_log_sigmoid(mean, torch.ones_like(mean)),
    ],
    ids=[
        "label loss",
        "soft targets",
        "streamed",
        "log of the mean",
        "mean of the log",
        "log expected sigmoid",
        "expected log sigmoid",
    ],
)
def test_a_second_derivative_is_an_error(function: Callable[[Tensor], Tensor]) -> None:
    mean = torch.randn(3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(function(mean).square().sum(), mean, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()
