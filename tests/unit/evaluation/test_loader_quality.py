"""Accuracy, NLL and ECE of a model over a loader."""

import pytest
import torch
from torch import Tensor

from hetsngp import metrics
from hetsngp.evaluation.loader_quality import measure_quality

CPU = torch.device("cpu")
PROBS = torch.rand(50, 4, generator=torch.Generator().manual_seed(0)).softmax(-1)
LABELS = torch.arange(50) % 4


class Table:
    """A model whose input is its output."""

    def predict_probs(self, x: Tensor) -> Tensor:
        return x


def batches(labels: Tensor = LABELS, size: int = 20) -> list[tuple[Tensor, Tensor]]:
    return list(zip(PROBS.split(size), labels.split(size), strict=True))


def test_numbers_are_those_of_all_examples_together() -> None:
    found = measure_quality(Table(), batches(), CPU)
    assert list(found) == ["accuracy", "nll", "ece", "examples"]
    assert found["accuracy"] == pytest.approx(metrics.accuracy(PROBS, LABELS), abs=1e-7)
    assert found["nll"] == pytest.approx(metrics.nll(PROBS, LABELS), rel=1e-12)
    assert found["ece"] == pytest.approx(metrics.ece(PROBS, LABELS), rel=1e-12)
    assert found["examples"] == 50


def test_labels_of_a_subset_are_classes_of_the_model() -> None:
    index = torch.tensor([3, 1])
    found = measure_quality(Table(), batches(LABELS % 2), CPU, class_index=index)
    assert found == measure_quality(Table(), batches(index[LABELS % 2]), CPU)


def test_multi_label_data_have_precision_at_1() -> None:
    several = torch.nn.functional.one_hot(LABELS, 4) + torch.nn.functional.one_hot((LABELS + 1) % 4, 4)
    found = measure_quality(Table(), batches(several), CPU, class_index=torch.tensor([0]))
    assert "accuracy" not in found
    assert found["precision_at_1"] == metrics.precision_at_1(PROBS, several)
    assert found["nll"] == pytest.approx(metrics.multi_label_nll(PROBS, several), rel=1e-12)


def test_values_of_other_processes_are_gathered() -> None:
    halves = [batches()[:1], batches()[1:]]
    shapes: list[tuple[int, ...]] = []

    def gather(values: Tensor) -> Tensor:
        shapes.append(tuple(values.shape))
        other = [metrics.example_terms(*batch) for batch in halves[1]]
        return torch.cat([values, *(torch.stack([term.double() for term in terms]) for terms in other)], 1)

    assert measure_quality(Table(), halves[0], CPU, gather=gather) == measure_quality(Table(), batches(), CPU)
    assert shapes == [(3, 20)]


def test_nan_is_an_error() -> None:
    with pytest.raises(FloatingPointError, match="not numbers"):
        measure_quality(Table(), [(torch.full((2, 4), torch.nan), LABELS[:2])], CPU)
