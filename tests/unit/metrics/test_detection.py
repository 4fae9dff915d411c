"""Inside against outside: average precision, DeLong's standard error, and a million rows."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from hetsngp import metrics


def scores(
    generator: torch.Generator, inside: int = 300, outside: int = 200
) -> tuple[torch.Tensor, torch.Tensor]:
    """With many ties."""
    low = torch.randn(inside, generator=generator).round(decimals=1)
    return low, torch.randn(outside, generator=generator).round(decimals=1) + 1


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1000.0])
def test_aupr_is_scikit_learns(scale: float, generator: torch.Generator) -> None:
    inside, outside = (scale * part for part in scores(generator))
    both = torch.cat([inside, outside])
    out = average_precision_score(np.repeat([0, 1], [300, 200]), both)
    assert metrics.aupr(inside, outside) == pytest.approx(out, abs=1e-6)
    other = average_precision_score(np.repeat([1, 0], [300, 200]), -both)
    assert metrics.aupr(-outside, -inside) == pytest.approx(other, abs=1e-6)


def test_a_score_that_tells_nothing() -> None:
    """All equal: half the pairs, the share of outside rows, and every inside row flagged."""
    inside, outside = torch.full((30,), 0.7), torch.full((10,), 0.7)
    assert metrics.auroc(inside, outside) == 0.5
    assert metrics.aupr(inside, outside) == 0.25
    assert metrics.fpr95(inside, outside) == 1.0
    assert metrics.auroc_standard_error(inside, outside) == 0.0


def test_roc_is_scikit_learns(generator: torch.Generator) -> None:
    inside, outside = scores(generator)
    false, true = metrics.roc(inside, outside)
    expected = roc_curve(np.repeat([0, 1], [300, 200]), torch.cat([inside, outside]), drop_intermediate=False)
    assert false.numpy() == pytest.approx(expected[0], abs=1e-6)
    assert true.numpy() == pytest.approx(expected[1], abs=1e-6)


# --- standard error -------------------------------------------------------------------------------------


def test_the_standard_error_follows_delong(generator: torch.Generator) -> None:
    inside, outside = scores(generator, 40, 30)
    pairs = (outside[:, None] > inside).double() + 0.5 * (outside[:, None] == inside).double()
    expected = pairs.mean(1).var() / 30 + pairs.mean(0).var() / 40
    assert metrics.auroc_standard_error(inside, outside) == pytest.approx(float(expected.sqrt()), rel=1e-12)


def test_the_standard_error_is_that_of_repetitions(generator: torch.Generator) -> None:
    """The standard deviation over 400 draws, known to 1/√800, within four times that."""
    drawn = [
        (torch.randn(60, generator=generator), torch.randn(40, generator=generator) + 1) for _ in range(400)
    ]
    areas = torch.tensor([metrics.auroc(*pair) for pair in drawn], dtype=torch.float64)
    errors = torch.tensor([metrics.auroc_standard_error(*pair) for pair in drawn], dtype=torch.float64)
    ratio = float(areas.std() / errors.square().mean().sqrt())
    assert abs(ratio - 1) < 4 / 800**0.5


def test_one_row_has_no_standard_error() -> None:
    assert metrics.auroc_standard_error(torch.ones(1), torch.ones(5)) is None
    assert metrics.auroc_standard_error(torch.ones(5), torch.ones(1)) is None


def test_scores_are_one_a_row() -> None:
    for metric in (metrics.auroc, metrics.auroc_standard_error, metrics.aupr, metrics.fpr95, metrics.roc):
        for pair in ((torch.rand(3, 2), torch.rand(3)), (torch.rand(3), torch.rand(3, 1))):
            with pytest.raises(ValueError, match=r"\(n,\) and \(m,\), one for each example.*amax"):
                metric(*pair)


# --- many rows ------------------------------------------------------------------------------------------


def test_fpr95_counts_to_the_row_among_a_million() -> None:
    """float32 shares of a million are whole numbers only after rounding."""
    outside = torch.arange(1_000_000, dtype=torch.float64)
    inside = torch.arange(1_000_000, dtype=torch.float64) / 10 + 0.05
    # The threshold is 50,000, and of the inside rows those from 500,000 on are above it.
    assert metrics.fpr95(inside, outside) == pytest.approx(0.5, abs=2e-7)


def test_a_million_scores_are_exact(generator: torch.Generator) -> None:
    """Comparing every pair would take 250 GB."""
    inside = torch.randn(500_000, generator=generator)
    outside = torch.randn(500_000, generator=generator) + 1
    found = metrics.auroc(inside, outside), metrics.aupr(inside, outside)
    target, both = np.repeat([0, 1], 500_000), torch.cat([inside, outside])
    assert found[0] == pytest.approx(roc_auc_score(target, both), abs=1e-5)
    assert found[1] == pytest.approx(average_precision_score(target, both), abs=1e-5)
