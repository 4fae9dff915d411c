"""Accuracy, NLL and ECE of a pass over a loader are those of all its probabilities at once."""

import pytest
import torch

from hetsngp import metrics


def made(n: int = 300, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    probs = (2 * torch.randn(n, classes, generator=generator)).softmax(-1)
    return probs, torch.randint(classes, (n,), generator=generator)


@pytest.mark.parametrize("batch_size", [7, 300])
def test_batches_give_the_numbers_of_all_probabilities(batch_size: int) -> None:
    probs, labels = made()
    parts = [
        metrics.example_terms(p, y)
        for p, y in zip(probs.split(batch_size), labels.split(batch_size), strict=True)
    ]
    found = metrics.quality(*(torch.cat(terms) for terms in zip(*parts, strict=True)))
    correct = sum(int(p.argmax()) == int(y) for p, y in zip(probs, labels, strict=True))
    assert found["accuracy"] == pytest.approx(correct / 300, abs=1e-15)
    assert found["nll"] == metrics.nll(probs, labels)
    assert found["ece"] == metrics.ece(probs, labels)
    assert found["examples"] == 300


def test_multi_label_accuracy_is_precision_at_1() -> None:
    probs, _ = made()
    probs = probs.sqrt()
    labels = (torch.rand(300, 5, generator=torch.Generator().manual_seed(1)) < 0.4).float()
    found = metrics.quality(*metrics.example_terms(probs, labels))
    assert found["accuracy"] == metrics.precision_at_1(probs, labels)
    assert found["nll"] == metrics.multi_label_nll(probs, labels)
    top = labels[torch.arange(300), probs.argmax(-1)].bool()
    assert found["ece"] == metrics.calibration_error(probs.amax(-1), top)


def test_correctness_may_come_back_as_numbers_and_bins_may_be_chosen() -> None:
    """Processes exchange one tensor of floats."""
    probs, labels = made()
    terms = metrics.example_terms(probs, labels)
    stacked = torch.stack([term.double() for term in terms])
    assert metrics.quality(*stacked) == metrics.quality(*terms)
    assert metrics.quality(*terms, num_bins=3)["ece"] == metrics.ece(probs, labels, 3)
