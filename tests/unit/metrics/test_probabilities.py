"""Brier, calibration from rows, votes and several labels, against scikit-learn, SciPy, torch and by hand."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import rel_entr
from sklearn.metrics import brier_score_loss

from hetsngp import metrics


@pytest.fixture
def predictions(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    probs = torch.softmax(3 * torch.randn(500, 4, generator=generator), -1)
    return probs, torch.randint(4, (500,), generator=generator)


def test_brier_is_scikit_learns_unhalved(predictions: tuple[torch.Tensor, torch.Tensor]) -> None:
    probs, labels = predictions
    expected = brier_score_loss(
        labels, probs.double() / probs.double().sum(1, keepdim=True), labels=range(4), scale_by_half=False
    )
    assert metrics.brier(probs, labels) == pytest.approx(expected, rel=1e-6)


def test_brier_goes_from_0_to_2() -> None:
    sure = torch.tensor([[1.0, 0.0, 0.0]])
    assert metrics.brier(sure, torch.tensor([0])) == 0.0
    assert metrics.brier(sure, torch.tensor([2])) == 2.0


def test_a_small_brier_is_not_rounded_away() -> None:
    """1 − p of float32 is exact near 1; a sum of squares less 2p − 1 would have 1e-8 left of it."""
    probs = torch.tensor([[1 - 2.0**-20, 2.0**-20]])
    assert metrics.brier(probs, torch.tensor([0])) == pytest.approx(2 * 2.0**-40, rel=1e-6)


# --- calibration ----------------------------------------------------------------------------------------


def test_calibration_error_by_hand() -> None:
    """Bins of a fifth: [0.4, 0.6) has one right of two; [0.8, 1] two of three, .95 sure on average.

    Were a confidence of 1 in a bin of its own, its errors would not be weighed against the .85 that is right.
    """
    confidence = torch.tensor([0.4, 0.55, 0.85, 1.0, 1.0], dtype=torch.float64)
    correct = torch.tensor([True, False, True, True, False])
    expected = 2 / 5 * abs(0.5 - 0.475) + 3 / 5 * abs(2 / 3 - 0.95)
    assert metrics.calibration_error(confidence, correct, 5) == pytest.approx(expected, abs=1e-12)


def test_a_million_rows_do_not_drift() -> None:
    confidence = torch.full((1_000_000,), 0.9)
    correct = torch.arange(1_000_000) % 4 > 0
    expected = float(confidence[0].double()) - 0.75
    assert metrics.calibration_error(confidence, correct) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("num_bins", [1, 4, 15])
def test_bins_add_up_to_the_calibration_error(
    predictions: tuple[torch.Tensor, torch.Tensor], num_bins: int
) -> None:
    probs, labels = predictions
    probs[:50] = torch.eye(4)[labels[:50]]
    confidence, correct = probs.amax(-1), probs.argmax(-1) == labels
    bins = metrics.reliability_bins(confidence, correct, num_bins)
    gaps = (bins.accuracy - bins.confidence).abs().nan_to_num() * bins.count / 500
    assert int(bins.count.sum()) == 500
    assert float(gaps.sum()) == pytest.approx(
        metrics.calibration_error(confidence, correct, num_bins), abs=1e-9
    )
    assert float(gaps.sum()) == pytest.approx(metrics.ece(probs, labels, num_bins), abs=1e-9)


def test_bins_without_rows_and_a_confidence_of_one() -> None:
    bins = metrics.reliability_bins(torch.tensor([0.5, 1.0]), torch.tensor([True, False]), 4)
    assert bins.count.tolist() == [0, 0, 1, 1]
    assert bins.accuracy[2:].tolist() == [1.0, 0.0]
    assert bins.confidence[2:].tolist() == [0.5, 1.0]
    assert bool(bins.accuracy[:2].isnan().all() and bins.confidence[:2].isnan().all())


def test_one_class_only() -> None:
    probs, labels = torch.tensor([[0.8, 0.2], [0.7, 0.3]]), torch.zeros(2).long()
    assert metrics.accuracy(probs, labels) == 1.0
    assert metrics.ece(probs, labels) == pytest.approx(0.25, abs=1e-6)


# --- votes ----------------------------------------------------------------------------------------------


def test_votes_are_many_labels(predictions: tuple[torch.Tensor, torch.Tensor]) -> None:
    """The NLL against shares is that of a row for each vote, when every row has as many."""
    probs, _ = predictions
    counts = torch.distributions.Multinomial(10, torch.ones(4)).sample((500,)).long()
    rows = torch.repeat_interleave(torch.arange(500), 10)
    labels = torch.repeat_interleave(torch.arange(4).repeat(500), counts.flatten())
    assert metrics.vote_nll(probs, counts) == pytest.approx(metrics.nll(probs[rows], labels), rel=1e-9)


def test_kl_to_votes_is_scipys(predictions: tuple[torch.Tensor, torch.Tensor]) -> None:
    probs, labels = predictions
    counts = F.one_hot(labels, 4) * 30 + F.one_hot(labels.roll(1), 4) * 20
    share = counts.numpy() / 50
    expected = rel_entr(share, probs.double().numpy()).sum(1).mean()
    assert metrics.vote_kl(probs, counts) == pytest.approx(expected, rel=1e-9)


def test_votes_of_one_are_a_label(predictions: tuple[torch.Tensor, torch.Tensor]) -> None:
    probs, labels = predictions
    counts = 7 * F.one_hot(labels, 4)
    assert metrics.vote_nll(probs, counts) == pytest.approx(metrics.nll(probs, labels), rel=1e-12)
    assert metrics.vote_kl(probs, counts) == pytest.approx(metrics.nll(probs, labels), rel=1e-12)


def test_bad_votes_are_named() -> None:
    probs = torch.full((2, 2), 0.5)
    with pytest.raises(ValueError, match="at least one vote"):
        metrics.vote_nll(probs, torch.tensor([[1, 2], [0, 0]]))
    with pytest.raises(ValueError, match="not be negative"):
        metrics.vote_kl(probs, torch.tensor([[1, 2], [3, -1]]))
    with pytest.raises(ValueError, match=r"\(n, K\)"):
        metrics.vote_nll(probs, torch.ones(2))


# --- several labels -------------------------------------------------------------------------------------


def test_several_labels(generator: torch.Generator) -> None:
    probs = torch.rand(200, 6, generator=generator)
    labels = (torch.rand(200, 6, generator=generator) < 0.3).long()
    bce = F.binary_cross_entropy(probs.double(), labels.double(), reduction="none").sum(1).mean()
    assert metrics.multi_label_nll(probs, labels) == pytest.approx(float(bce), rel=1e-6)
    hits = [bool(y[int(np.argmax(p))]) for p, y in zip(probs.numpy(), labels.numpy(), strict=True)]
    assert metrics.precision_at_1(probs, labels) == pytest.approx(sum(hits) / 200, abs=1e-12)


def test_an_impossible_one_of_several_costs_a_finite_nll() -> None:
    sure = torch.tensor([[1.0, 0.0]])
    assert metrics.multi_label_nll(sure, torch.tensor([[1, 0]])) == 0.0
    assert metrics.multi_label_nll(sure, torch.tensor([[0, 1]])) == pytest.approx(2 * 87.3365, abs=1e-3)
    assert math.isfinite(metrics.multi_label_nll(sure, torch.tensor([[1, 1]])))


def test_multi_hot_labels_have_the_shape_of_the_probabilities() -> None:
    with pytest.raises(ValueError, match=r"multi-hot labels must both be \(n, K\)"):
        metrics.precision_at_1(torch.ones(2, 3), torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_terms_are_those_of_the_values_in_float64(dtype: torch.dtype, generator: torch.Generator) -> None:
    """Half precision has no 1e-38 to clamp to, and rounds sums over classes; with many classes in pieces."""
    probs = (0.01 + 0.98 * torch.rand(40, 300, generator=generator)).to(dtype)
    probs[0, :2] = torch.tensor([0.0, 1.0])
    labels = (torch.rand(40, 300, generator=generator) < 0.1).float()
    labels[0, :2] = torch.tensor([0.0, 1.0])
    found = metrics.binary_nll_terms(probs, labels)
    expected = F.binary_cross_entropy(probs.double(), labels.double(), reduction="none").sum(1)
    assert torch.allclose(found, expected, rtol=1e-12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetsngp.metrics.probabilities.CHUNK", 1000)
        assert torch.equal(metrics.binary_nll_terms(probs, labels), found)
    one = torch.softmax(torch.randn(40, 300, generator=generator), -1).to(dtype)
    y = torch.randint(300, (40,), generator=generator)
    exact = (one.double() - F.one_hot(y, 300)).square().sum(1)
    assert torch.allclose(metrics.brier_terms(one, y), exact, rtol=1e-6)


# --- refusals -------------------------------------------------------------------------------------------


def test_labels_out_of_range_are_refused(predictions: tuple[torch.Tensor, torch.Tensor]) -> None:
    probs, labels = predictions
    for metric in (metrics.accuracy, metrics.ece, metrics.nll, metrics.brier):
        for wrong in (labels + 1, labels - 1):
            with pytest.raises(ValueError, match=r"classes 0 … 3: renumber"):
                metric(probs, wrong)
        with pytest.raises(TypeError, match=r"labels\.long\(\)"):
            metric(probs, labels.double())
        with pytest.raises(ValueError, match=r"one class only.*torch\.cat\(\[1 - p, p\], 1\)"):
            metric(torch.ones(3, 1), torch.zeros(3).long())
        assert metric(probs, labels.int()) == metric(probs, labels)


def test_logits_and_log_probabilities_are_refused(predictions: tuple[torch.Tensor, torch.Tensor]) -> None:
    probs, labels = predictions
    votes = F.one_hot(labels, 4)
    for metric, target in (
        *((metric, labels) for metric in (metrics.ece, metrics.nll, metrics.brier)),
        *((metric, votes) for metric in (metrics.vote_nll, metrics.vote_kl, metrics.multi_label_nll)),
    ):
        for wrong in (probs.log(), 8 * probs):
            with pytest.raises(ValueError, match=r"no probabilities.*softmax\(-1\).*\.exp\(\)"):
                metric(wrong, target)
    with pytest.raises(ValueError, match=r"add up to .*multi-hot"):
        metrics.nll(torch.full((500, 4), 0.5), labels)
    assert math.isfinite(metrics.multi_label_nll(torch.full((500, 4), 0.5), votes))


def test_bad_confidences_are_refused() -> None:
    right = torch.tensor([True, False])
    for metric in (metrics.calibration_error, metrics.reliability_bins):
        for wrong in (math.nan, -0.5, 1.5):
            with pytest.raises(ValueError, match=r"in \[0, 1\].*NaN"):
                metric(torch.tensor([wrong, 0.5]), right)
        with pytest.raises(ValueError, match=r"both be \(n,\).*amax"):
            metric(torch.rand(2, 2), right)
        with pytest.raises(ValueError, match="num_bins"):
            metric(torch.rand(2), right, 0)


@pytest.mark.parametrize(("rows", "by_chance"), [(1_000, 0.038), (10_000, 0.012)])
def test_a_perfectly_calibrated_model_has_an_error_by_chance(rows: int, by_chance: float) -> None:
    """docs/evaluation.md says how large."""
    generator = torch.Generator().manual_seed(0)
    errors = []
    for _ in range(100):
        confidence = torch.rand(rows, generator=generator, dtype=torch.float64)
        correct = torch.rand(rows, generator=generator, dtype=torch.float64) < confidence
        errors.append(metrics.calibration_error(confidence, correct))
    assert np.mean(errors) == pytest.approx(by_chance, rel=0.05)
