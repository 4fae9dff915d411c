"""−log E softmax(u)_y, its gradient, and that of soft targets, against integrals over all contrasts of the
logits in float64 (tests/reference/contrast_grid.py).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.reference import contrast_grid
from torch import Tensor

from hetsngp.functional import integration, label_loss, link
from hetsngp.functional.integration import Grid
from hetsngp.functional.link import softmax_log_probs, softmax_nll
from hetsngp.types import Factor, FactorSum, UtilityNormal

BATCH, CLASSES, RANK = 6, 4, 2
LABELS = torch.tensor([0, 3, 2, 2, 1, 3])
SOFT = torch.softmax(2 * torch.randn(BATCH, CLASSES, generator=torch.Generator().manual_seed(9)).double(), -1)
FORMS = ("dense", "efficient", "shared", "sum", "column", "no factor", "dense, no diagonal")
EXACT = Grid(32, -13.0, 2.8, 6, 0.7)


def leaves(form: str, width: float, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """What a utility of this form is made of, each a leaf of the graph."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).clamp(-2, 2)

    mean = 2 * draw(BATCH, CLASSES)
    var = width**2 * (0.2 + draw(BATCH, CLASSES).square().clamp_max(1))
    dense = 0.7 * width * draw(BATCH, CLASSES, RANK)
    row, basis = width * draw(BATCH, CLASSES), 0.7 * draw(CLASSES, RANK)
    shared, column = 0.7 * width * draw(CLASSES, RANK), width * draw(BATCH, RANK).abs()
    tensors = {
        "dense": [mean, var, dense],
        "efficient": [mean, var, basis, row],
        "shared": [mean, var, shared],
        "sum": [mean, var, dense, basis, column],
        "column": [mean, var, basis, column],
        "no factor": [mean, var],
        "dense, no diagonal": [mean, dense],
    }[form]
    return [t.to(dtype).requires_grad_() for t in tensors]


def assembled(form: str, tensors: list[Tensor]) -> UtilityNormal:
    mean, *rest = tensors
    var = torch.zeros_like(mean) if form == "dense, no diagonal" else rest.pop(0)
    factor = {
        "dense": lambda a: a,
        "efficient": lambda a, b: Factor(a, row=b),
        "shared": lambda a: Factor(a),
        "sum": lambda a, b, c: FactorSum((Factor(a), Factor(b, column=c))),
        "column": lambda a, b: Factor(a, column=b),
        "no factor": lambda: None,
        "dense, no diagonal": lambda a: a,
    }[form](*rest)
    return UtilityNormal(mean, var, factor)


def gradients(value: Tensor, tensors: list[Tensor], weight: Tensor | None = None) -> list[Tensor]:
    weight = torch.ones_like(value) if weight is None else weight
    return list(torch.autograd.grad((value * weight).sum(), tensors))


def of_labels(log_probs: Tensor, y: Tensor = LABELS) -> Tensor:
    return -log_probs.gather(1, y.unsqueeze(1)).squeeze(1)


def largest_error(got: list[Tensor], want: list[Tensor]) -> float:
    return max(float((a - b).abs().max().detach()) for a, b in zip(got, want, strict=True))


def assert_close(got: Any, want: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many nodes that only the points of the factor are left as a source of error, and the table."""
    for name in ("ROUGH", "COARSE", "_WIDE"):
        monkeypatch.setattr(label_loss, name, EXACT)
    monkeypatch.setattr(label_loss, "COARSE_DEGREE", label_loss.DEGREE)


# --- value and gradient --------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["label", "soft"])
@pytest.mark.parametrize("width", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("exact")
def test_value_and_gradient_are_those_of_the_integral(form: str, width: float, target: str) -> None:
    """At many points and nodes, in everything that the utility is made of."""
    tensors = leaves(form, width)
    weight = torch.linspace(-1, 2, BATCH, dtype=torch.float64)
    log_probs = contrast_grid.log_mean(assembled(form, tensors), step=0.4)
    want = of_labels(log_probs) if target == "label" else -(SOFT * log_probs).sum(-1)
    y = LABELS if target == "label" else SOFT
    got = softmax_nll(assembled(form, tensors), y, num_samples=2**11, seed=1)
    assert_close(got, want, 6e-3)
    by_got, by_want = gradients(got, tensors, weight), gradients(want, tensors, weight)
    assert largest_error(by_got, by_want) < 0.015
    for part in by_want:  # which says something
        assert part.abs().max() > 0.03
    plain = F.cross_entropy(tensors[0], y, reduction="none")
    assert (plain - want).abs().max() > (0.01 if width < 1 else 0.1)


@pytest.mark.parametrize("width", [0.3, 1.0, 2.5])
def test_the_few_nodes_of_training_err_little_and_not_to_one_side(width: float) -> None:
    """Default nodes, many points: of one example, and of the mean of 60, which a step of training takes."""
    runs = [leaves("dense", width, seed=s) for s in range(10)]
    tensors = [torch.cat(part).detach().requires_grad_() for part in zip(*runs, strict=True)]
    y, u = LABELS.repeat(10), assembled("dense", tensors)
    want, got = of_labels(contrast_grid.log_mean(u), y), softmax_nll(u, y, num_samples=512, seed=1)
    assert (got - want).abs().max() < 0.05
    assert (got - want).mean().abs() < 0.01
    for part, expected in zip(gradients(got, tensors), gradients(want, tensors), strict=True):
        assert (part - expected).abs().max() < 0.1
        assert (part - expected).square().mean().sqrt() < 0.015


@pytest.mark.parametrize("form", ["dense", "no factor"])
def test_the_default_number_of_points_is_enough_for_a_batch(form: str) -> None:
    """Loss and gradient of the mean over 240 examples with signs of their own, noise of one logit."""
    runs = [leaves(form, 1.0, seed=s) for s in range(40)]
    tensors = [torch.cat(part).detach().requires_grad_() for part in zip(*runs, strict=True)]
    y, u = LABELS.repeat(40), assembled(form, tensors)
    want = of_labels(contrast_grid.log_mean(u, half=6.0, step=0.5), y)
    got = softmax_nll(u, y, seed=1, decorrelate=True)
    assert float((got - want).mean().abs()) < (0.02 if form == "dense" else 0.001)
    by_got, by_want = gradients(got, tensors), gradients(want, tensors)
    for part, expected in zip(by_got, by_want, strict=True):
        slope = (part * expected).sum() / expected.square().sum()  # one where it has the right size
        assert slope.item() == pytest.approx(1, abs=0.06 if form == "dense" else 0.002)


@pytest.mark.parametrize("towards", [0.0, 0.6, 1.2])
@pytest.mark.usefixtures("exact")
def test_probabilities_are_unbiased_wherever_the_points_are_moved(
    towards: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mean of e^{−nll} over seeds within four standard errors, at four points."""
    monkeypatch.setattr(label_loss, "TOWARDS", towards)
    u = assembled("dense", [t.detach() for t in leaves("dense", 1.0)])
    found = torch.stack([softmax_nll(u, LABELS, num_samples=4, seed=s).neg().exp() for s in range(300)])
    want = of_labels(contrast_grid.log_mean(u)).neg().exp()
    error = found.std(0) / math.sqrt(len(found))
    assert ((found.mean(0) - want).abs() < 4 * error + 1e-3 * want).all()
    assert (found.std(0) > 0.01 * want).all()


def test_moved_points_have_less_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most where the label is improbable: a quarter of the squared error, and less."""
    tensors = leaves("dense", 1.5)
    with torch.no_grad():
        tensors[0].scatter_(1, LABELS[:, None], -4.0)
    u = assembled("dense", [t.detach() for t in tensors])

    def spread(towards: float) -> Tensor:
        monkeypatch.setattr(label_loss, "TOWARDS", towards)
        return torch.stack([softmax_nll(u, LABELS, num_samples=4, seed=s) for s in range(100)]).var(0).mean()

    own = label_loss.TOWARDS
    assert spread(own) < 0.25 * spread(0.0)


def test_the_gradient_in_the_factor_has_less_variance_than_along_the_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By Price's theorem while noise is mild; the path alone is that of all log-probabilities."""
    monkeypatch.setattr(label_loss, "TOWARDS", 0.0)
    tensors = leaves("dense", 0.3)

    def variance(loss: Any) -> Tensor:
        runs = [gradients(loss(assembled("dense", tensors), s), tensors)[2] for s in range(60)]
        return torch.stack(runs).var(0).mean()

    mixed = variance(lambda u, s: softmax_nll(u, LABELS, num_samples=4, seed=s))
    path = variance(lambda u, s: of_labels(softmax_log_probs(u, num_samples=4, seed=s)))
    assert mixed < 0.25 * path


# --- soft targets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", ["log_mean", "mean_log"])
@pytest.mark.parametrize("sampler", ["sobol", "mc"])
@pytest.mark.parametrize("form", ["sum", "no factor"])
def test_soft_targets_weight_the_log_probabilities(form: str, sampler: str, likelihood: str) -> None:
    """At the same points, to rounding: value, and gradients in utility and targets."""
    tensors, targets = leaves(form, 1.0), SOFT.clone().requires_grad_()
    options: dict[str, Any] = {"num_samples": 32, "seed": 3, "sampler": sampler, "likelihood": likelihood}
    got = softmax_nll(assembled(form, tensors), targets, decorrelate=True, **options)
    log_probs = softmax_log_probs(assembled(form, tensors), decorrelate=True, **options)
    want = -(targets * log_probs).sum(-1)
    assert_close(got, want, 1e-12)
    weight = torch.linspace(-1, 2, BATCH, dtype=torch.float64)
    assert_close(gradients(got, [*tensors, targets], weight), gradients(want, [*tensors, targets], weight))


@pytest.mark.parametrize("form", ["sum", "no factor"])
def test_a_mixture_of_targets_has_the_weighted_sum_of_losses(form: str) -> None:
    u = assembled(form, [t.detach() for t in leaves(form, 1.0)])
    other = SOFT.roll(1, 0)
    losses = [softmax_nll(u, y, num_samples=16, seed=3) for y in (SOFT, other, 0.3 * SOFT + 0.7 * other)]
    assert_close(losses[2], 0.3 * losses[0] + 0.7 * losses[1], 1e-12)


def test_one_hot_targets_have_the_loss_of_their_labels() -> None:
    """Without a factor: the same nodes and table. With one, labels take fewer nodes and moved points."""
    one_hot = F.one_hot(LABELS, CLASSES).double()
    for form, tolerance in (("no factor", 1e-9), ("sum", 0.02)):
        tensors = leaves(form, 1.0)
        soft, hard = (
            softmax_nll(assembled(form, tensors), y, num_samples=2**12, seed=3) for y in (one_hot, LABELS)
        )
        assert_close(soft, hard, tolerance)
        # A common shift changes nothing: the gradient of labels gets rid of that part of its error.
        assert largest_error(gradients(soft, tensors), gradients(hard, tensors)) < max(tolerance, 1e-3)


def test_smoothed_labels() -> None:
    """As torch's label smoothing: (1 − s)·loss of the label + s·mean loss of all classes."""
    u = assembled("no factor", [t.detach() for t in leaves("no factor", 1.0)])
    targets = 0.9 * F.one_hot(LABELS, CLASSES).double() + 0.1 / CLASSES
    every = [softmax_nll(u, torch.full_like(LABELS, k)) for k in range(CLASSES)]
    want = 0.9 * softmax_nll(u, LABELS) + 0.1 * torch.stack(every).mean(0)
    assert_close(softmax_nll(u, targets), want, 1e-9)


# --- limits --------------------------------------------------------------------------------------------


def test_no_noise_is_the_cross_entropy() -> None:
    mean = torch.randn(BATCH, CLASSES, requires_grad=True)
    for factor in (None, torch.zeros(BATCH, CLASSES, 2)):
        for y in (LABELS, SOFT.float()):
            out = softmax_nll(UtilityNormal(mean, torch.zeros(BATCH, CLASSES), factor), y, seed=0)
            want = F.cross_entropy(mean, y, reduction="none")
            tolerance = 1e-3 if factor is None else 0.03  # four nodes
            assert_close(out, want, tolerance)
            assert_close(gradients(out, [mean]), gradients(want, [mean]), tolerance)


def test_two_classes_go_through_quadrature() -> None:
    """No point is drawn: the two-class log-probabilities, their gradient, and nothing of the seed."""
    g = torch.Generator().manual_seed(0)
    y = torch.tensor([0, 1, 1, 0])
    tensors = [
        (3 * torch.randn(4, 2, generator=g, dtype=torch.float64)).requires_grad_(),
        torch.rand(4, 2, generator=g, dtype=torch.float64).requires_grad_(),
        (2 * torch.randn(4, 2, 3, generator=g, dtype=torch.float64)).requires_grad_(),
    ]
    u = UtilityNormal(*tensors)
    out = softmax_nll(u, y, num_samples=1, seed=0)
    want = of_labels(contrast_grid.log_mean(u, step=0.05), y)
    assert_close(out, want, 1e-6)
    assert_close(gradients(out, tensors), gradients(want, tensors), 1e-4)
    assert torch.equal(softmax_nll(u, y, num_samples=3, seed=5), out)
    assert_close(softmax_nll(u, F.one_hot(y, 2).double()), out, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [0.3, 2.0])
@pytest.mark.parametrize("below", [-50.0, -200.0, -2000.0])
@pytest.mark.parametrize("target", ["label", "soft"])
def test_improbable_labels(width: float, below: float, dtype: torch.dtype, target: str) -> None:
    """exp(−200) is nothing in float32; value and gradient are near the integral all the same.

    Beyond the table the hazard of the label's class goes on with the slope that it has at the end, 3 % off
    where noise is wide, and the few nodes of labels make the gradient too small by a sixth there.
    """
    tensors = leaves("dense", width)
    with torch.no_grad():
        for row, label in enumerate(LABELS):
            if row != 2:  # one probable label among them
                tensors[0][row, label] = below
    y = LABELS if target == "label" else F.one_hot(LABELS, CLASSES).double()
    want = of_labels(contrast_grid.log_mean(assembled("dense", tensors), step=0.4, half=9.0))
    assert want[0] > 0.7 * -below
    low = [t.detach().to(dtype).requires_grad_() for t in tensors]
    out = softmax_nll(assembled("dense", low), y, num_samples=512, seed=2)
    assert_close(out.double(), want, 0.01 if width < 1 else 0.03)
    found = gradients(out, low)
    assert all(torch.isfinite(part).all() for part in found)
    tolerance = 0.03 if width < 1 else 0.2 if target == "label" else 0.05
    assert largest_error([found[0].double()], gradients(want, tensors)[:1]) < tolerance


def test_few_classes_have_points_for_a_wide_factor() -> None:
    """Three classes, V of standard deviation 6 and hardly any d: the gradient in a scale of V is unbiased."""
    g = torch.Generator().manual_seed(0)
    mean = 5 * torch.randn(200, 3, generator=g)
    factor = 6 / math.sqrt(6) * torch.randn(200, 3, 6, generator=g)
    y = torch.multinomial(torch.softmax(mean / 4, -1), 1, generator=g).squeeze(1)

    def in_scale(points: int | None, seeds: int) -> Tensor:
        out = []
        for seed in range(seeds):
            scale = torch.ones((), requires_grad=True)
            u = UtilityNormal(mean, torch.full_like(mean, 0.02), factor * scale)
            loss = softmax_nll(u, y, num_samples=points, seed=seed, decorrelate=True).mean()
            out.append(torch.autograd.grad(loss, scale)[0])
        return torch.stack(out).mean()

    want = in_scale(2048, 6)
    assert (in_scale(None, 40) - want).abs() < 0.006
    assert (in_scale(16, 40) - want).abs() > 0.006  # the bias that more points remove


@pytest.mark.parametrize("width", [50.0, 1000.0])
def test_noise_beyond_the_table_is_scaled_down(width: float) -> None:
    """An argmax but for a share of 1/width: value and gradients are those of the integral."""
    tensors = leaves("dense", 1.0)
    big = [t.detach() * width**power for t, power in zip(tensors, (1, 2, 0), strict=True)]
    want = of_labels(drawn_log_probs(UtilityNormal(*big)))
    for y in (LABELS, F.one_hot(LABELS, CLASSES)):
        low = [t.float().requires_grad_() for t in big]
        out = softmax_nll(UtilityNormal(*low), y, num_samples=512, seed=1)
        assert (out.neg().exp() - want.neg().exp()).abs().max() < 0.02
        # p does not depend on the scale: Euler's theorem relates the gradients.
        by_mean, by_var, by_factor = gradients(out, low)
        assert all(torch.isfinite(part).all() for part in (by_mean, by_var, by_factor))
        radial = (by_mean * low[0]).sum(1) + 2 * (by_var * low[1]).sum(1)
        probable = want < 3
        assert probable.sum() >= 3
        assert (radial.abs() < 0.15 * (by_mean * low[0]).abs().sum(1) + 0.2)[probable].all()


def drawn_log_probs(u: UtilityNormal, draws: int = 40_000) -> Tensor:
    """log E softmax(u) by plain Monte Carlo: (B, K)."""
    g = torch.Generator().manual_seed(0)
    root = torch.linalg.cholesky(u.covariance())
    eps = torch.randn(len(u.mean), draws, u.mean.shape[1], generator=g, dtype=torch.float64)
    return torch.softmax(u.mean.unsqueeze(1) + eps @ root.mT, -1).mean(1).log()


@pytest.mark.parametrize("width", [6.0, 20.0])
def test_wide_noise_of_the_factor(width: float) -> None:
    """Probable labels at 32 points: within a tenth on average."""
    tensors = [t.detach() for t in leaves("dense", 1.0)]
    u = UtilityNormal(tensors[0], width**2 * tensors[1], width * tensors[2])
    log_probs = drawn_log_probs(u)
    y = log_probs.argmax(-1)
    found = torch.stack([softmax_nll(u, y, num_samples=32, seed=s, decorrelate=True) for s in range(20)])
    assert (found - of_labels(log_probs, y)).square().mean().sqrt() < 0.1


# --- batches -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["label", "soft"])
@pytest.mark.parametrize("count", [4, 40])
def test_rows_do_not_influence_each_other(count: int, target: str) -> None:
    """A row's value and gradient are those it has alone, whatever its neighbours' width and labels."""
    tensors, y = leaves("dense", 1.0), LABELS if target == "label" else SOFT
    with torch.no_grad():
        tensors[0][1, LABELS[1]] = -300.0
        tensors[1][3] *= 1e4  # beyond the table
        tensors[2][4] *= 5
    out = softmax_nll(assembled("dense", tensors), y, num_samples=count, seed=2)
    together = gradients(out, tensors)
    for row in range(BATCH):
        alone = [t.detach()[row : row + 1].clone().requires_grad_() for t in tensors]
        single = softmax_nll(assembled("dense", alone), y[row : row + 1], num_samples=count, seed=2)
        assert_close(single[0], out[row], 1e-11)
        for got, want in zip(gradients(single, alone), together, strict=True):
            assert_close(got[0], want[row], 1e-10)


@pytest.mark.parametrize("target", ["label", "soft"])
@pytest.mark.parametrize("chunk", [1, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # float32 reuses its memory
def test_chunks_add_up(chunk: int, target: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row at a time, a few, or all of them."""
    y = LABELS if target == "label" else SOFT.to(dtype)
    for form in ("sum", "shared", "no factor"):
        tensors = leaves(form, 1.0, dtype)

        def run(form: str = form, tensors: list[Tensor] = tensors) -> list[Tensor]:
            out = softmax_nll(assembled(form, tensors), y, num_samples=12, seed=3, decorrelate=True)
            return [out.detach(), *gradients(out, tensors)]

        want = run()
        with monkeypatch.context() as patched:
            patched.setattr(integration, "_CHUNK", chunk)
            got = run()
        assert_close(got, want, 1e-12 if dtype == torch.float64 else 2e-5)


def test_one_row_at_a_time_is_what_a_small_chunk_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "_CHUNK", 1)
    sizes = []
    rates = integration.Rates.of
    monkeypatch.setattr(
        integration.Rates, "of", staticmethod(lambda mean, *a: sizes.append(len(mean)) or rates(mean, *a))
    )
    softmax_nll(assembled("dense", leaves("dense", 1.0)), LABELS, num_samples=4, seed=3)
    assert sizes == [1] * BATCH


@pytest.mark.parametrize("target", ["label", "soft"])
def test_decorrelated_rows_average_their_errors(target: str) -> None:
    """Equal rows: with signs of their own their errors differ and cancel, without they are the same."""
    g = torch.Generator().manual_seed(2)
    one = [t.detach()[1:2] for t in leaves("dense", 1.0)[:2]]
    one.append(0.5 * torch.randn(1, CLASSES, 8, generator=g, dtype=torch.float64))
    row = [t.expand(100, *t.shape[1:]) for t in one]
    y = torch.zeros(100, dtype=torch.long) if target == "label" else SOFT[1:2].expand(100, -1)
    means = {
        own: torch.stack([
            softmax_nll(UtilityNormal(*row), y, num_samples=4, seed=s, decorrelate=own).mean()
            for s in range(30)
        ])
        for own in (True, False)
    }  # fmt: skip
    assert means[True].std() < 0.6 * means[False].std()


@pytest.mark.parametrize("target", ["label", "soft"])
def test_a_part_of_a_batch_has_the_points_that_it_has_in_the_whole(target: str) -> None:
    u = assembled("dense", [t.detach() for t in leaves("dense", 1.0)])
    y = LABELS if target == "label" else SOFT
    options: dict[str, Any] = {"num_samples": 4, "seed": 7, "decorrelate": True}
    whole = softmax_nll(u, y, **options)
    halves = [slice(3), slice(3, 6)]
    pieces = [softmax_nll(u.rows(h), y[h], part=(i, 2), **options) for i, h in enumerate(halves)]
    assert_close(torch.cat(pieces), whole, 1e-12)
    assert (softmax_nll(u.rows(halves[1]), y[halves[1]], **options) - whole[3:]).abs().max() > 1e-4


def test_gradients_are_scaled_by_those_that_follow() -> None:
    """Of a weighted sum, and of only some of the tensors."""
    tensors = leaves("dense", 1.0)
    weight = torch.linspace(-1, 2, BATCH, dtype=torch.float64)

    def out() -> Tensor:
        return softmax_nll(assembled("dense", tensors), LABELS, num_samples=4, seed=3)

    each = gradients(out(), tensors)
    scaled = gradients(out(), tensors, weight)
    for got, want in zip(scaled, each, strict=True):
        assert_close(got, weight.view(-1, *[1] * (want.dim() - 1)) * want, 1e-12)
    for i in range(3):
        some = [t if j == i else t.detach() for j, t in enumerate(tensors)]
        alone = softmax_nll(assembled("dense", some), LABELS, num_samples=4, seed=3)
        assert_close(gradients(alone, [tensors[i]])[0], each[i], 1e-12)
    with torch.no_grad():
        assert_close(softmax_nll(assembled("dense", tensors), LABELS, num_samples=4, seed=3), out().detach())


# --- other samplers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["mc", "antithetic"])
def test_plain_samplers_are_unbiased(sampler: str) -> None:
    """Mean of e^{−nll} over seeds within four standard errors; at a few points and at the default number."""
    u = assembled("dense", [t.detach() for t in leaves("dense", 1.0)])
    want = of_labels(contrast_grid.log_mean(u)).neg().exp()
    for count, seeds in ((8, 400), (None, 100)):
        found = torch.stack([
            softmax_nll(u, LABELS, num_samples=count, seed=s, sampler=sampler).neg().exp()
            for s in range(seeds)
        ])  # fmt: skip
        assert ((found.mean(0) - want).abs() < 4 * found.std(0) / math.sqrt(seeds)).all()
        assert (found.std(0) > 0).all()
    got = softmax_nll(u, LABELS, num_samples=50, seed=3, sampler=sampler)
    assert_close(got, of_labels(softmax_log_probs(u, num_samples=50, seed=3, sampler=sampler)), 1e-12)


@pytest.mark.parametrize("target", ["label", "soft"])
def test_a_wide_factor_has_the_loss_of_the_same_covariance(target: str) -> None:
    """More columns than WIDE_RANK, as noise on features has: value and gradient in the mean."""
    tensors = leaves("dense", 0.7)
    columns = link.WIDE_RANK + 8
    g = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(columns, RANK, generator=g, dtype=torch.float64))[0]
    u = UtilityNormal(tensors[0], tensors[1], tensors[2] @ rotation.mT)
    assert u.form.rank == columns
    log_probs = contrast_grid.log_mean(assembled("dense", tensors))
    y = LABELS if target == "label" else SOFT
    want = of_labels(log_probs) if target == "label" else -(SOFT * log_probs).sum(-1)
    got = softmax_nll(u, y, num_samples=2**12, seed=1)
    assert_close(got, want, 0.03)
    assert largest_error(gradients(got, tensors), gradients(want, tensors)) < 0.04


@pytest.mark.parametrize("factor", [True, False])
@pytest.mark.parametrize("classes", [5, 70])  # few and many take different ways
def test_the_loss_compiles_to_one_graph(classes: int, factor: bool) -> None:
    g = torch.Generator().manual_seed(0)
    mean, var = torch.randn(3, classes, generator=g), torch.rand(3, classes, generator=g)
    form = Factor(torch.randn(3, classes, 2, generator=g)) if factor else None
    y = torch.tensor([0, 4, 2])

    def loss(mean: Tensor) -> Tensor:
        return softmax_nll(UtilityNormal(mean, var, form), y, num_samples=4, seed=0).sum()

    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        leaf = mean.clone().requires_grad_()
        value = function(leaf)
        value.backward()
        results.append((value.detach(), leaf.grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_the_loss_may_be_changed_in_place() -> None:
    mean = torch.randn(3, 5, requires_grad=True)
    nll = softmax_nll(UtilityNormal(mean, torch.ones(3, 5), None), torch.tensor([0, 1, 2]))
    want = nll.detach().clone()
    torch.testing.assert_close(nll.mul_(2).detach(), 2 * want)
