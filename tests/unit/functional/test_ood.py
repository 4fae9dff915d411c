"""Relative Mahalanobis distance against its definition; tail probabilities against known distributions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hetsngp.functional.ood import (
    ClassSums,
    discriminants,
    relative_mahalanobis,
    tail_score,
    tail_table,
)


def made(classes: int, dims: int, n: int = 900) -> tuple[Tensor, Tensor]:
    """Features of classes that share a covariance, and their labels."""
    generator = torch.Generator().manual_seed(classes)
    means = 3 * torch.randn(classes, dims, generator=generator, dtype=torch.float64)
    mixing = torch.randn(dims, dims, generator=generator, dtype=torch.float64)
    y = torch.randint(classes, (n,), generator=generator)
    return means[y] + torch.randn(n, dims, generator=generator, dtype=torch.float64) @ mixing, y


def by_definition(x: Tensor, z: Tensor, y: Tensor) -> Tensor:
    """min_c (x − μ_c)ᵀΣ_w⁻¹(x − μ_c) − (x − μ)ᵀΣ_t⁻¹(x − μ), with matrices written out and inverted."""
    classes = y.unique()
    means = torch.stack([z[y == c].mean(0) for c in classes])
    centred = torch.cat([z[y == c] - z[y == c].mean(0) for c in classes])
    within = centred.mT @ centred / len(z)
    ridge = z.shape[1] / len(z) * within.diagonal().mean() * torch.eye(len(within)).double()
    everything = (z - z.mean(0)).mT @ (z - z.mean(0)) / len(z)
    near = torch.stack([((x - m) @ torch.linalg.inv(within + ridge) * (x - m)).sum(1) for m in means])
    rest = x - z.mean(0)
    return near.amin(0) - (rest @ torch.linalg.inv(everything + ridge) * rest).sum(1)


@pytest.mark.parametrize(("classes", "dims"), [(2, 1), (2, 6), (3, 2), (5, 12), (20, 7)])
def test_the_discriminants_give_the_relative_mahalanobis_distance(classes: int, dims: int) -> None:
    z, y = made(classes, dims)
    x = torch.cat([z[:20], 5 * torch.randn(20, dims).double(), 100 * torch.randn(5, dims).double()])
    found = discriminants(ClassSums.of(z, y, classes))
    assert found.projection.shape[1] <= min(classes - 1, dims)
    torch.testing.assert_close(relative_mahalanobis(x, found), by_definition(x, z, y), rtol=1e-5, atol=1e-5)


def test_the_distance_keeps_its_digits_where_classes_are_far_apart() -> None:
    """A network that has memorised its data: in float32 a difference of squares has no digits left."""
    z, y = made(3, 2)
    found = discriminants(ClassSums.of(1e-5 * z + 30 * torch.eye(3, 2)[y].double(), y, 3))
    x = 1e-5 * z[:50] + 30 * torch.eye(3, 2)[y[:50]].double()
    narrow = relative_mahalanobis(x.float(), type(found)(*(t.float() for t in found)))
    torch.testing.assert_close(narrow.double(), relative_mahalanobis(x, found), rtol=0.2, atol=1.0)


def test_a_class_without_examples_is_left_out_and_parts_of_the_data_add_up() -> None:
    z, y = made(4, 5)
    whole = ClassSums.of(z, y, 4)
    parts = [ClassSums.of(z[rows], y[rows], 4) for rows in (slice(0, 300), slice(300, None))]
    for total, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(total, sum(pieces))
    more = discriminants(ClassSums.of(z, y + 1, 6))  # classes 0 and 5 are unknown
    assert more.class_means.shape[0] == 4
    torch.testing.assert_close(relative_mahalanobis(z, more), relative_mahalanobis(z, discriminants(whole)))


def test_weights_are_copies_and_one_hot_targets_are_labels() -> None:
    z, y = made(3, 4, n=60)
    weight = torch.arange(60) % 3 + 1
    copies = ClassSums.of(z.repeat_interleave(weight, 0), y.repeat_interleave(weight), 3)
    one_hot = torch.nn.functional.one_hot(y, 3)
    for found in (ClassSums.of(z, y, 3, weight), ClassSums.of(z, one_hot, 3, weight)):
        for a, b in zip(found, copies, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("z", [torch.zeros(4, 3), torch.eye(4)[:, :3], torch.ones(1, 3)])
def test_few_and_equal_examples_give_finite_distances(z: Tensor) -> None:
    found = discriminants(ClassSums.of(z.double(), torch.arange(len(z)) % 2, 2))
    assert torch.isfinite(relative_mahalanobis(torch.randn(5, 3).double(), found)).all()


def test_tail_scores_are_log_shares_of_the_held_out_values() -> None:
    known = torch.randn(20_000, 1).double()
    table = tail_table(known)
    x = torch.linspace(-1.5, 1.2, 30).double()
    share = torch.stack([(known[:, 0] >= value).double().mean() for value in x])
    torch.testing.assert_close(tail_score(x[:, None], table), -share.log(), rtol=0, atol=0.02)


def test_beyond_the_highest_tenth_the_tail_is_exponential() -> None:
    """−log P(S ≥ s) of an exponential distribution is s, however far."""
    known = torch.distributions.Exponential(torch.tensor(1.0).double()).sample((50_000, 1))
    x = torch.tensor([0.5, 2.0, 5.0, 50.0, 1000.0]).double()
    torch.testing.assert_close(tail_score(x[:, None], tail_table(known)), x, rtol=0.03, atol=0.03)


def test_held_out_values_themselves_score_one_on_average() -> None:
    """−log of a uniform variable has mean one, for any distribution of the values."""
    values = torch.stack([torch.randn(5000), torch.rand(5000).exp(), torch.randn(5000) ** 3], 1)
    score = tail_score(values.double(), tail_table(values))
    assert float(score.mean()) == pytest.approx(3, abs=0.06)


def test_scores_add_up_over_columns_and_weights_are_copies() -> None:
    values = torch.randn(400, 2).double()
    both = tail_table(values)
    each = [tail_score(values[:, [i]], tail_table(values[:, [i]])) for i in (0, 1)]
    torch.testing.assert_close(tail_score(values, both), each[0] + each[1])
    weight = torch.arange(400) % 2 + 1
    copied = tail_table(values.repeat_interleave(weight, 0))
    x = 2 * torch.randn(100, 2).double()
    torch.testing.assert_close(tail_score(x, tail_table(values, weight)), tail_score(x, copied))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=50),
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=20),
)
def test_a_larger_value_never_scores_lower_and_scores_are_finite(
    known: list[float], asked: list[float]
) -> None:
    x = torch.tensor(sorted(asked)).double()[:, None]
    score = tail_score(x, tail_table(torch.tensor(known)[:, None]))
    assert bool(torch.isfinite(score).all())
    assert bool((score.diff() >= -1e-9 * score[1:].abs().clamp_min(1)).all())
    assert float(score[0]) >= 0


def test_one_value_far_from_all_others_does_not_flatten_the_tail() -> None:
    values = torch.randn(200, 1).double()
    with_outlier = torch.cat([values, torch.full((1, 1), 1e6).double()])
    x = torch.tensor([[2.0], [5.0], [50.0]]).double()
    torch.testing.assert_close(
        tail_score(x, tail_table(with_outlier)), tail_score(x, tail_table(values)), rtol=0.3, atol=0
    )


def test_equal_held_out_values_do_not_hide_larger_ones() -> None:
    table = tail_table(torch.zeros(50, 1))
    assert float(tail_score(torch.zeros(1, 1), table)) == 0
    assert float(tail_score(torch.full((1, 1), 0.1), table)) > -math.log(1e-3)


def test_the_ranks_of_small_values_are_kept_down_to_their_error() -> None:
    """Entropies of a confident network have a median of 1e-3 nats and little more error than rounding."""
    values = 1e-3 * torch.randn(500, 1, generator=torch.Generator().manual_seed(0)).double().exp()
    ranks = values[:, 0].argsort().argsort().double()
    for error, correlated in ((1e-6, True), (1e-3, False)):
        scores = tail_score(values, tail_table(values, errors=[error]))
        found = np.corrcoef(ranks, scores.argsort(stable=True).argsort().double())[0, 1]
        assert (found > 0.999) == correlated


def test_equal_values_below_the_tail_are_climbed_before_it() -> None:
    """A sixth of the values is two; those that are larger are the highest tenth, which reaches to four."""
    parts = [torch.linspace(0, 1, 150), torch.full((30,), 2.0), torch.linspace(2.00001, 4, 20)]
    table = tail_table(torch.cat(parts).double().unsqueeze(1))
    below, just_above, median = tail_score(torch.tensor([[1.99], [2.05], [3.0]]).double(), table).tolist()
    assert below == pytest.approx(math.log(4), abs=0.1)
    assert just_above == pytest.approx(math.log(10), abs=0.1)
    assert median == pytest.approx(math.log(20), abs=0.1)
