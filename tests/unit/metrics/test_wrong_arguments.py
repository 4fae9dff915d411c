"""Metrics refuse what is no tensor of real numbers, and means over NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hetsngp import metrics

pytest.importorskip("torchmetrics")

PROBS = torch.tensor([[0.8, 0.1, 0.1], [0.2, 0.5, 0.3], [0.1, 0.2, 0.7]])
Y = torch.tensor([0, 1, 2])
HOT = torch.nn.functional.one_hot(Y, 3)
SCORES = torch.tensor([0.1, 0.5, 0.3])
OF_PROBS: dict[str, tuple[Callable[..., Any], Any]] = {
    "accuracy": (metrics.accuracy, Y),
    "nll": (metrics.nll, Y),
    "brier": (metrics.brier, Y),
    "ece": (metrics.ece, Y),
    "vote_nll": (metrics.vote_nll, HOT),
    "vote_kl": (metrics.vote_kl, HOT),
    "precision_at_1": (metrics.precision_at_1, HOT),
    "multi_label_nll": (metrics.multi_label_nll, HOT),
}
OF_SCORES: dict[str, tuple[Callable[..., Any], Any]] = {
    "auroc": (metrics.auroc, SCORES + 0.2),
    "aupr": (metrics.aupr, SCORES + 0.2),
    "fpr95": (metrics.fpr95, SCORES + 0.2),
    "auroc_standard_error": (metrics.auroc_standard_error, SCORES + 0.2),
    "risks": (metrics.risks, SCORES > 0.2),
    "aurc": (metrics.aurc, SCORES > 0.2),
    "excess_aurc": (metrics.excess_aurc, SCORES > 0.2),
    "calibration_error": (metrics.calibration_error, SCORES > 0.2),
    "reliability_bins": (metrics.reliability_bins, SCORES > 0.2),
}
WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "None": lambda t: None,
    "NumPy": lambda t: t.numpy(),
    "list": lambda t: t.tolist(),
    "complex": lambda t: t.to(torch.complex64),
    "sparse": lambda t: t.to_sparse(),
    "meta": lambda t: t.to("meta"),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("name", [*OF_PROBS, *OF_SCORES])
def test_arguments_that_are_no_tensors_of_real_numbers(name: str, kind: str) -> None:
    function, second = (OF_PROBS | OF_SCORES)[name]
    first = PROBS if name in OF_PROBS else SCORES
    words = "must be a tensor|real numbers|sparse tensor|meta device"
    for arguments in ((WRONG[kind](first), second), (first, WRONG[kind](second))):
        with pytest.raises((TypeError, ValueError), match=words):
            function(*arguments)


@pytest.mark.parametrize("name", OF_PROBS)
def test_no_mean_over_probabilities_that_are_nan(name: str) -> None:
    function, labels = OF_PROBS[name]
    spoiled = PROBS.clone()
    spoiled[1] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        function(spoiled, labels)


def test_terms_of_single_examples_are_nan_where_the_probabilities_are() -> None:
    spoiled = PROBS.clone()
    spoiled[1] = torch.nan
    assert metrics.nll_terms(spoiled, Y).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("name", ["risks", "aurc", "excess_aurc", "calibration_error", "reliability_bins"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.5, 2.0])
def test_correct_is_yes_or_no(name: str, value: float) -> None:
    with pytest.raises(ValueError, match="give bool, or 0 and 1"):
        OF_SCORES[name][0](SCORES, torch.tensor([1.0, 0.0, value]))


@pytest.mark.parametrize("value", [0, -1, 2.5, "15", True, 10**12, 2**70])
def test_numbers_of_bins(value: Any) -> None:
    for function, first, second in (
        (metrics.ece, PROBS, Y),
        (metrics.calibration_error, SCORES, SCORES > 0.2),
    ):
        with pytest.raises(ValueError, match="num_bins must be"):
            function(first, second, num_bins=value)


@pytest.mark.parametrize("value", [0, 1.5, None, "1", True])
def test_coverage_is_a_share(value: Any) -> None:
    with pytest.raises(ValueError, match="coverage must be a share"):
        metrics.accuracy_at_coverage(SCORES, SCORES > 0.2, value)
