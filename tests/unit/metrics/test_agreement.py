"""Metrics against scikit-learn and against loops that follow the definition."""

import math
import sys

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score

from hetsngp import metrics


@pytest.fixture
def predictions(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    probs = torch.softmax(3 * torch.randn(500, 4, generator=generator), -1)
    return probs, torch.randint(4, (500,), generator=generator)


def plain_ece(probs: torch.Tensor, labels: torch.Tensor, num_bins: int) -> float:
    """Guo et al. 2017; a bin has its lower edge, and the last one also its upper."""
    bins: dict[int, list[tuple[float, bool]]] = {}
    for p, y in zip(probs.tolist(), labels.tolist(), strict=True):
        confidence, label = max((value, -k) for k, value in enumerate(p))
        bins.setdefault(min(int(confidence * num_bins), num_bins - 1), []).append((confidence, -label == y))
    return sum(
        abs(sum(right for _, right in cell) - sum(c for c, _ in cell)) for cell in bins.values()
    ) / len(labels)


def test_accuracy_and_nll_are_those_of_scikit_learn(predictions: tuple[torch.Tensor, torch.Tensor]) -> None:
    probs, labels = predictions
    assert metrics.accuracy(probs, labels) == pytest.approx(
        accuracy_score(labels, probs.argmax(-1)), abs=1e-6
    )
    expected = log_loss(labels, probs.double() / probs.double().sum(1, keepdim=True), labels=range(4))
    assert metrics.nll(probs, labels) == pytest.approx(expected, rel=1e-5)


def test_an_impossible_label_costs_a_finite_nll() -> None:
    assert metrics.nll(torch.tensor([[1.0, 0.0]]), torch.tensor([1])) == pytest.approx(87.34, abs=0.01)


@pytest.mark.parametrize("num_bins", [5, 15])
def test_ece_follows_the_definition(predictions: tuple[torch.Tensor, torch.Tensor], num_bins: int) -> None:
    probs, labels = predictions
    assert metrics.ece(probs, labels, num_bins) == pytest.approx(plain_ece(probs, labels, num_bins), abs=1e-5)


def test_ece_counts_a_certain_prediction_in_the_last_bin(
    predictions: tuple[torch.Tensor, torch.Tensor],
) -> None:
    probs, labels = predictions
    probs[:100] = torch.eye(4)[labels[:100].roll(1)]
    expected = plain_ece(probs, labels, 15)
    assert metrics.ece(probs, labels) == pytest.approx(expected, abs=1e-5)
    # Sums that float32 rounds above 1 are no logits.
    probs[0] = torch.tensor([1 + 1e-6, 0, 0, 0])
    assert metrics.ece(probs, labels) == pytest.approx(plain_ece(probs.clamp(max=1), labels, 15), abs=1e-5)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1000.0])
def test_auroc_is_that_of_scikit_learn_whatever_the_scale(scale: float, generator: torch.Generator) -> None:
    """Large scores included, which a sigmoid in float32 would make equal."""
    inside = torch.randn(300, generator=generator).round(decimals=1)
    outside = torch.randn(200, generator=generator).round(decimals=1) + 1
    expected = roc_auc_score(np.repeat([0, 1], [300, 200]), torch.cat([inside, outside]) * scale)
    assert metrics.auroc(inside * scale, outside * scale) == pytest.approx(expected, abs=1e-6)


def test_auroc_limits() -> None:
    low, high = torch.zeros(5), torch.ones(7)
    assert metrics.auroc(low, high) == 1.0
    assert metrics.auroc(high, low) == 0.0
    assert metrics.auroc(low, low) == 0.5
    assert metrics.fpr95(low, high) == 0.0
    assert metrics.fpr95(high, low) == 1.0


@pytest.mark.parametrize("count", [20, 100, 137, 200])
def test_fpr95_follows_the_definition(count: int, generator: torch.Generator) -> None:
    inside = torch.randn(300, generator=generator).round(decimals=1)
    outside = torch.randn(count, generator=generator).round(decimals=1) + 1.5
    need = math.ceil(round(0.95 * count, 6))
    strictest = max(t for t in outside.tolist() if sum(s >= t for s in outside.tolist()) >= need)
    expected = sum(s >= strictest for s in inside.tolist()) / 300
    assert metrics.fpr95(inside, outside) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("count", [20, 100, 137, 200])
def test_fpr95_of_the_paper_follows_its_definition(count: int, generator: torch.Generator) -> None:
    """The share of OOD examples taken for in-distribution where 95 % of the in-distribution ones are."""
    inside = torch.randn(count, generator=generator).round(decimals=1)
    outside = torch.randn(300, generator=generator).round(decimals=1) + 1.5
    need = math.ceil(round(0.95 * count, 6))
    strictest = min(t for t in inside.tolist() if sum(s <= t for s in inside.tolist()) >= need)
    expected = sum(s <= strictest for s in outside.tolist()) / 300
    assert metrics.fpr95(inside, outside, positive="id") == pytest.approx(expected, abs=1e-6)
    assert metrics.fpr95(inside, outside, positive="ood") == metrics.fpr95(inside, outside)
    assert metrics.fpr95(inside, outside) != pytest.approx(expected, abs=1e-3)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="positive"):
        metrics.fpr95(torch.zeros(2), torch.ones(2), positive="inside")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"labels \(n,\)"):
        metrics.nll(torch.ones(3, 2), torch.zeros(2).long())
    with pytest.raises(ValueError, match="both have values"):
        metrics.auroc(torch.ones(0), torch.ones(2))
    with pytest.raises(ValueError, match="finite"):
        metrics.fpr95(torch.tensor([float("nan")]), torch.ones(2))


def test_a_missing_torchmetrics_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics.functional", None)
    with pytest.raises(ImportError, match=r"pip install 'hetsngp\[eval\]'"):
        metrics.auroc(torch.zeros(1), torch.ones(1))
