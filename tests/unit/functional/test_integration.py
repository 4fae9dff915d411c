"""Moments of the softmax of independent Gaussians against integrals over all K logits, in float64."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hetsngp.functional import integration
from hetsngp.functional.integration import Grid, Moments, Quantiles, softmax_moments

REFERENCE = Grid(160, -15.0, 3.0, 6, 0.3)
NAMES = Moments._fields


@pytest.fixture(autouse=True, scope="module")
def _tables() -> None:
    """The tables, which are fitted at the first call of a process."""
    softmax_moments(torch.zeros(1, 2), torch.ones(1, 2))


def moments_of_samples(logits: Tensor, weight: Tensor) -> Moments:
    """Moments from points (n, K) of weights (n,), by their definition."""
    log_normalizer = logits.logsumexp(1)
    log_probs = logits - log_normalizer.unsqueeze(1)
    probs = log_probs.exp()
    entropy = -(probs * log_probs).sum(1)
    return Moments(weight @ probs, weight @ probs.square(), weight @ log_normalizer, weight @ entropy)


def axis(mean: Tensor, std: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """Points and logarithms of weights of the trapezoid rule for N(mean, std²), up to 6 σ."""
    if std == 0:
        return mean.view(1), mean.new_zeros(1)
    # The rule's error is about exp(−2π²/step) of a softmax, whose poles are at ±iπ: 2e-6 for 1.5.
    z = torch.linspace(-6, 6, 2 * max(10, math.ceil(6 * std.item() / step)) + 1, dtype=torch.float64)
    return mean + std * z, torch.log_softmax(-0.5 * z.square(), 0)


def product_rule(mean: Tensor, var: Tensor, step: float = 1.5) -> Moments:
    """Moments by the product of K trapezoid rules: (B, K), (B, K) → float64."""
    rows = []
    for centre, std in zip(mean.double(), var.double().sqrt(), strict=True):
        points, log_weights = zip(*(axis(m, s, step) for m, s in zip(centre, std, strict=True)), strict=True)
        rest = torch.cartesian_prod(*points[1:]).view(-1, len(points) - 1)
        rest_weight = torch.cartesian_prod(*log_weights[1:]).view(rest.shape).sum(1)
        parts = [
            moments_of_samples(torch.cat([x.expand(len(rest), 1), rest], 1), (rest_weight + w).exp())
            for x, w in zip(points[0], log_weights[0], strict=True)
        ]
        rows.append([torch.stack(part).sum(0) for part in zip(*parts, strict=True)])
    return Moments(*(torch.stack(column) for column in zip(*rows, strict=True)))


def difference_rule(mean: Tensor, var: Tensor) -> Moments:
    """Moments of two classes by one integral over f₀ − f₁ ~ N(μ₀ − μ₁, σ₀² + σ₁²)."""
    mean, var = mean.double(), var.double()
    z = torch.linspace(-9, 9, 6001, dtype=torch.float64)
    weight = torch.softmax(-0.5 * z.square(), 0)
    difference = (mean[:, :1] - mean[:, 1:]) + var.sum(1, keepdim=True).sqrt() * z
    p, q = torch.sigmoid(difference), torch.sigmoid(-difference)
    softplus = nn.functional.softplus
    log_normalizer = mean[:, 1] + softplus(difference) @ weight  # log Z = f₁ + log(1 + e^{f₀ − f₁})
    entropy = (p * softplus(-difference) + q * softplus(difference)) @ weight
    return Moments(
        torch.stack([p @ weight, q @ weight], 1),
        torch.stack([p.square() @ weight, q.square() @ weight], 1),
        log_normalizer,
        entropy,
    )


def laplace_rule(mean: Tensor, std: Tensor, count: Tensor) -> Moments:
    """Moments of groups of equal classes, (G,) each, for any number of them: 1/Z and 1/Z² as integrals of
    e^{−sZ}, whose expectation is a product over classes, over log s. Every expectation is a sum: no table.
    """
    step = 0.3  # e^{−e^x} is analytic within ±iπ/2: an error of about exp(−π²/step)
    margin = float(7 * std.max())
    top = float(mean.max())
    low, high = -top - margin - math.log(int(count.sum())) - 15, -float(mean.min()) + margin + 10
    t = torch.arange(low, high, step, dtype=torch.float64)
    z = torch.linspace(-7, 7, 2 * math.ceil(max(30, margin / step)) + 1, dtype=torch.float64)
    log_weight = torch.log_softmax(-0.5 * z.square(), 0)
    log_phi, moments = [], []
    for m, s in zip(mean.double(), std.double(), strict=True):
        f = m + s * z
        x = f + t.unsqueeze(1)
        exp = x.clamp_max(700).exp()
        below = -torch.expm1(-exp) @ log_weight.exp()
        above = log_weight - exp
        log_phi.append(torch.where(below < 0.5, torch.log1p(-below), above.logsumexp(1)))
        density = (above + x).exp()
        moments.append([density.sum(1), (above + 2 * x).exp().sum(1), density @ f])
    product = sum(n * part for n, part in zip(count.double(), log_phi, strict=True))
    probs, squares, cross = (
        torch.stack(
            [step * (product - own).exp() @ part[i] for own, part in zip(log_phi, moments, strict=True)]
        )
        for i in range(3)
    )
    # E log Z = ∫ (e^{−s} − E e^{−sZ}) d log s
    log_normalizer = step * ((-t.exp()).exp() - product.exp()).sum()
    entropy = log_normalizer - count.double() @ cross
    return Moments(probs, squares, log_normalizer, entropy)


def case(
    num_classes: int, largest: float, kind: str, spread: float, batch: int = 12, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Means in ±spread and variances of one kind, float32: (B, K) each."""
    g = torch.Generator().manual_seed(seed)
    mean = spread * (2 * torch.rand(batch, num_classes, generator=g) - 1)
    share = torch.rand(batch, num_classes, generator=g)
    std = {
        "equal": torch.linspace(1 / batch, 1, batch).unsqueeze(1).expand_as(share),
        "random": share,
        "mixed": (share < 0.5).float(),
        "one wide": (torch.arange(num_classes) == 0).float().expand_as(share),
        "one certain": (torch.arange(num_classes) > 0).float().expand_as(share),
    }[kind]
    return mean, (largest * std).square()


def bar(largest: float) -> float:
    """Largest error the docstring of ``softmax_moments`` allows up to this standard deviation."""
    return 1e-3 if largest <= 4 else 5e-3


def assert_close(got: Moments, oracle: Moments, tolerance: float) -> None:
    for name, value, wanted in zip(NAMES, got, oracle, strict=True):
        error = float((value - wanted).abs().max())
        assert error <= tolerance, f"{name}: {error:.1e} > {tolerance:.1e}"  # a NaN fails too


KINDS = ["equal", "random", "mixed", "one wide", "one certain"]
SPREADS = [0.0, 1.0, 5.0, 50.0]


# --- values ----------------------------------------------------------------------------------------------


def test_oracles_agree() -> None:
    mean, var = case(2, 20.0, "random", 5.0)
    assert_close(product_rule(mean, var), difference_rule(mean, var), 1e-5)
    mean, var = case(3, 4.0, "random", 2.0, batch=2)
    assert_close(product_rule(mean, var), product_rule(mean, var, step=0.7), 1e-5)
    by_laplace = [laplace_rule(m, v.sqrt(), torch.ones(3)) for m, v in zip(mean, var, strict=True)]
    assert_close(Moments(*map(torch.stack, zip(*by_laplace, strict=True))), product_rule(mean, var), 1e-5)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("largest", [0.5, 4.0, 20.0])
def test_two_classes_against_the_integral_over_their_difference(
    largest: float, kind: str, spread: float
) -> None:
    mean, var = case(2, largest, kind, spread, batch=64)
    assert_close(softmax_moments(mean, var), difference_rule(mean, var), bar(largest))


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("kind", KINDS)
def test_three_classes_against_the_product_rule(kind: str, spread: float) -> None:
    mean, var = case(3, 4.0, kind, spread, batch=6)
    assert_close(softmax_moments(mean, var), product_rule(mean, var), bar(4.0))


@pytest.mark.parametrize("spread", [1.0, 50.0])
@pytest.mark.parametrize("kind", ["equal", "random", "mixed"])
def test_three_wide_classes_against_the_product_rule(kind: str, spread: float) -> None:
    mean, var = case(3, 20.0, kind, spread, batch=1)
    assert_close(softmax_moments(mean, var), product_rule(mean, var, step=2.0), bar(20.0))


@pytest.mark.parametrize(
    ("num_classes", "kind", "spread"),
    [(4, "random", 2.0), (4, "mixed", 5.0), (5, "mixed", 1.0), (5, "one wide", 50.0)],
)
def test_four_and_five_classes_against_the_product_rule(num_classes: int, kind: str, spread: float) -> None:
    mean, var = case(num_classes, 4.0, kind, spread, batch=1)
    assert_close(softmax_moments(mean, var), product_rule(mean, var, step=2.0), bar(4.0))


@pytest.mark.parametrize(
    ("num_classes", "largest", "kind", "spread"),
    [(5, 4.0, "equal", 1.0), (5, 20.0, "mixed", 5.0), (10, 4.0, "random", 2.0), (100, 4.0, "mixed", 3.0)],
)
def test_against_monte_carlo(num_classes: int, largest: float, kind: str, spread: float) -> None:
    mean, var = case(num_classes, largest, kind, spread, batch=2)
    g = torch.Generator().manual_seed(1)
    pairs = 1_000_000 // num_classes
    noise = torch.randn(pairs, num_classes, generator=g, dtype=torch.float64)
    got = softmax_moments(mean, var)
    for row in range(len(mean)):
        offset = var[row].double().sqrt() * noise
        draws = []
        for sign in (1, -1):
            logits = mean[row].double() + sign * offset
            log_normalizer = logits.logsumexp(1, keepdim=True)
            log_probs = logits - log_normalizer
            probs = log_probs.exp()
            draws.append([probs, probs.square(), log_normalizer, -(probs * log_probs).sum(1, keepdim=True)])
        for name, moment, plus, minus in zip(NAMES, got, *draws, strict=True):
            sample = (plus + minus) / 2
            error = (moment[row] - sample.mean(0)).abs()
            assert (error <= 4 * sample.std(0) / math.sqrt(pairs) + bar(largest)).all(), name


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("num_classes", [2, 3, 10, 1000])
def test_without_variance_it_is_the_softmax(num_classes: int, spread: float) -> None:
    mean, var = case(num_classes, 0.0, "equal", spread)
    got = softmax_moments(mean, var)
    log_probs = torch.log_softmax(mean.double(), 1)
    probs = log_probs.exp()
    assert (got.probs - probs).abs().max() <= 1e-5
    assert (got.squares - probs.square()).abs().max() <= 1e-5
    assert (got.log_normalizer - mean.double().logsumexp(1)).abs().max() <= 2e-4
    assert (got.entropy + (probs * log_probs).sum(1)).abs().max() <= 2e-4


# --- many classes and extremes ---------------------------------------------------------------------------


# Means and standard deviations of three groups of classes: two classes, about a tenth, and the rest.
GROUPS = {
    "certain": [(0.0, 0.0), (0.0, 0.0), (0.0, 0.0)],
    "equal 0.3": [(0.0, 0.3), (0.0, 0.3), (0.0, 0.3)],
    "equal 1": [(0.0, 1.0), (0.0, 1.0), (0.0, 1.0)],
    "equal 2": [(0.0, 2.0), (0.0, 2.0), (0.0, 2.0)],
    "equal 4": [(0.0, 4.0), (0.0, 4.0), (0.0, 4.0)],
    "equal 20": [(0.0, 20.0), (0.0, 20.0), (0.0, 20.0)],
    "two above": [(7.0, 1.0), (0.0, 0.5), (-1.0, 2.0)],
    "two wide": [(-5.0, 4.0), (0.0, 0.0), (-1.0, 0.5)],
    "two very wide": [(-5.0, 20.0), (0.0, 0.0), (-1.0, 0.5)],
    "two certain": [(12.0, 0.0), (0.0, 4.0), (-3.0, 3.0)],
    "two certain beside very wide": [(40.0, 0.0), (0.0, 20.0), (-3.0, 15.0)],
    "far": [(50.0, 4.0), (35.0, 4.0), (-50.0, 4.0)],
}


@pytest.mark.parametrize("num_classes", [10, 100, 1000, 21843])
@pytest.mark.parametrize("groups", GROUPS)
def test_many_classes_against_the_laplace_transform(groups: str, num_classes: int) -> None:
    mean, std = torch.tensor(GROUPS[groups]).unbind(1)
    count = torch.tensor([2, num_classes // 10, num_classes - 2 - num_classes // 10])
    probs, squares, log_normalizer, entropy = laplace_rule(mean, std, count)
    first = count.cumsum(0) - count
    with torch.no_grad():
        got = softmax_moments(*(x.repeat_interleave(count).unsqueeze(0) for x in (mean, std.square())))
    got = Moments(got.probs[0, first], got.squares[0, first], got.log_normalizer[0], got.entropy[0])
    assert_close(got, Moments(probs, squares, log_normalizer, entropy), bar(float(std.max())))


@pytest.mark.parametrize(("num_classes", "batch"), [(10, 24), (1000, 4), (21843, 1)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("largest", [4.0, 20.0])
def test_many_classes_against_a_fine_grid(largest: float, kind: str, num_classes: int, batch: int) -> None:
    """A self-reference: the oracles above say that the integral is right, this that the nodes suffice."""
    mean, var = case(num_classes, largest, kind, 5.0, batch)
    with torch.no_grad():
        got = softmax_moments(mean, var)
        if num_classes <= 1000:
            assert_close(got, softmax_moments(mean.double(), var.double(), REFERENCE), bar(largest))
    assert all(moment.dtype == torch.float32 and moment.isfinite().all() for moment in got)
    assert (got.probs >= 0).all()
    assert (got.probs.sum(1) - 1).abs().max() <= 1e-4


@pytest.mark.parametrize("std", [0.0, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("num_classes", [2, 3, 10, 1000, 21843])
def test_equal_classes_are_equally_probable(num_classes: int, std: float) -> None:
    got = softmax_moments(torch.full((1, num_classes), 3.0), torch.full((1, num_classes), std**2))
    assert (got.probs * num_classes - 1).abs().max() <= 1e-4
    assert (got.squares >= 1 / num_classes**2 - 1e-5).all()
    if std == 0:
        assert abs(float(got.entropy) - math.log(num_classes)) <= 2e-4
        assert abs(float(got.log_normalizer) - 3 - math.log(num_classes)) <= 2e-4


@pytest.mark.parametrize("std", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("num_classes", [2, 3, 10, 1000, 21843])
def test_one_class_far_above_the_others_is_certain(num_classes: int, std: float) -> None:
    mean = torch.full((1, num_classes), -50.0)
    mean[0, 1] = 50.0
    got = softmax_moments(mean, torch.full((1, num_classes), std**2))
    certain = nn.functional.one_hot(torch.tensor([1]), num_classes).float()
    oracle = Moments(certain, certain, torch.tensor([50.0]), torch.tensor([0.0]))
    assert_close(got, oracle, bar(std))


@pytest.mark.parametrize("num_classes", [2, 3, 10, 1000, 21843])
def test_extreme_inputs_give_finite_moments_and_gradients(num_classes: int) -> None:
    g = torch.Generator().manual_seed(0)
    noise = torch.randn(5, num_classes, generator=g)
    mean = noise * torch.tensor([1.0, 50.0, 1e4, 1e4, 1e4]).unsqueeze(1)
    scale = torch.tensor([100.0, 100.0, 1e-3, 1.0, 100.0]).unsqueeze(1)
    var = (scale * torch.rand(5, num_classes, generator=g)).square()
    mean.requires_grad_()
    var.requires_grad_()
    got = softmax_moments(mean, var)
    assert all(moment.isfinite().all() for moment in got)
    assert (got.probs.sum(1) - 1).abs().max() <= 1e-4
    gradients = torch.autograd.grad(sum(moment.sum() for moment in got), [mean, var])
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_beyond_the_table_it_is_an_argmax() -> None:
    """σ of 100: the softmax is an argmax but for about 1/σ, and E max f of two equal classes is σ/√π."""
    std = 100.0
    mean = torch.tensor([[30.0, 0.0], [0.0, 0.0], [-200.0, 50.0]])
    got = softmax_moments(mean, torch.full((3, 2), std**2))
    oracle = difference_rule(mean, torch.full((3, 2), std**2))
    for name in ("probs", "squares", "entropy"):
        assert (getattr(got, name) - getattr(oracle, name)).abs().max() <= 0.02, name
    assert (got.log_normalizer - oracle.log_normalizer).abs().max() <= 0.01 * std
    assert abs(float(oracle.log_normalizer[1]) - std / math.sqrt(math.pi)) <= 0.01 * std


def test_large_means_keep_their_differences() -> None:
    mean, var = case(3, 4.0, "random", 2.0)
    mean = (mean * 64).round() / 64  # exact in float32 beside 1e4
    near, far = softmax_moments(mean, var), softmax_moments(mean + 8192, var)
    assert (near.probs - far.probs).abs().max() <= 2e-3
    assert (near.log_normalizer + 8192 - far.log_normalizer).abs().max() <= 5e-3


# --- gradients -------------------------------------------------------------------------------------------


def differentiable_case(num_classes: int = 3) -> tuple[Tensor, Tensor]:
    """Means (2, K) and variances (2, K) of σ in [0.3, 6], float64, that take gradients."""
    g = torch.Generator().manual_seed(3)
    mean = 2 * torch.randn(2, num_classes, generator=g, dtype=torch.float64)
    std = 0.3 + 5.7 * torch.rand(2, num_classes, generator=g, dtype=torch.float64)
    std[0, 0], std[1, 1] = 0.3, 6.0
    return mean.requires_grad_(), std.square().requires_grad_()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("grid", "tolerance"), [(REFERENCE, 1e-4), (integration.FINE, 1e-3)])
def test_gradcheck(grid: Grid, tolerance: float, name: str) -> None:
    """The nodes move with the inputs, which the gradient leaves out and a difference does not: the two
    agree up to the error of the rule, which a fine grid makes small.
    """

    def moment(mean: Tensor, var: Tensor) -> Tensor:
        return getattr(softmax_moments(mean, var, grid), name)

    assert torch.autograd.gradcheck(moment, differentiable_case(), eps=1e-5, atol=tolerance, rtol=0)


def gradients(function: Callable[[Tensor, Tensor], Moments], name: str) -> list[Tensor]:
    """Jacobians in mean and variance of the sum over the batch of one moment, per class."""
    mean, var = differentiable_case()
    value = getattr(function(mean, var), name).sum(0).reshape(-1)
    rows = [torch.autograd.grad(v, [mean, var], retain_graph=True) for v in value]
    return [torch.stack(parts) for parts in zip(*rows, strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_product_rule(name: str) -> None:
    got, oracle = gradients(softmax_moments, name), gradients(product_rule, name)
    for part, wanted in zip(got, oracle, strict=True):
        assert (part - wanted).abs().max() <= 1e-3
        assert wanted.abs().max() > 5e-3  # the comparison is not of zeros


def test_gradients_of_the_log_normalizer_are_moments() -> None:
    """∂E log Z/∂μ = E p, and ∂E log Z/∂σ² = (E p − E p²)/2, by the theorems of Bonnet and Price."""
    mean, var = differentiable_case(10)
    got = softmax_moments(mean, var)
    in_mean, in_var = torch.autograd.grad(got.log_normalizer.sum(), [mean, var])
    assert (in_mean - got.probs).abs().max() <= 1e-3
    assert (in_var - (got.probs - got.squares) / 2).abs().max() <= 1e-3


# --- properties ------------------------------------------------------------------------------------------

CASES = list(itertools.product([2, 3, 10, 300], [4.0, 20.0], KINDS, [1.0, 50.0]))


@pytest.mark.parametrize("shift", [-7.0, 32.0])
def test_a_shift_of_all_means_adds_to_the_log_normalizer_alone(shift: float) -> None:
    mean, var = (x.double() for x in case(5, 6.0, "random", 3.0))
    got, shifted = softmax_moments(mean, var), softmax_moments(mean + shift, var)
    assert_close(shifted, got._replace(log_normalizer=got.log_normalizer + shift), 1e-9)


def test_classes_permute() -> None:
    mean, var = (x.double() for x in case(7, 6.0, "random", 3.0))
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    got, permuted = softmax_moments(mean, var), softmax_moments(mean[:, order], var[:, order])
    assert_close(permuted, got._replace(probs=got.probs[:, order], squares=got.squares[:, order]), 1e-10)


def test_an_example_does_not_depend_on_its_batch() -> None:
    mean, var = case(7, 6.0, "random", 3.0)
    mean[0], var[0] = 1e3 * mean[0], 1e4 * var[0]  # beyond the table: scaled, which no other example may see
    got = softmax_moments(mean, var)
    for row in range(len(mean)):
        alone = softmax_moments(mean[row : row + 1], var[row : row + 1])
        rest = [moment[row : row + 1] for moment in got]
        for part, wanted in zip(alone, rest, strict=True):
            assert torch.allclose(part, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_classes", "largest", "kind", "spread"), CASES)
def test_inequalities_and_steins_identity(num_classes: int, largest: float, kind: str, spread: float) -> None:
    mean, var = case(num_classes, largest, kind, spread)
    tolerance = bar(largest)
    probs, squares, log_normalizer, entropy = (x.double() for x in softmax_moments(mean, var))
    mean, var = mean.double(), var.double()
    assert (entropy >= -tolerance).all()
    assert (entropy <= torch.special.entr(probs).sum(1) + tolerance).all()
    assert (squares >= probs.square() - tolerance).all()
    assert (squares <= probs + tolerance).all()
    assert (log_normalizer >= mean.logsumexp(1) - tolerance).all()
    # E Σ p f = Σ (μ E p + σ² E[p(1 − p)]). An error of E p or E p² is multiplied by μ and σ² here.
    stein = log_normalizer - (mean * probs).sum(1) - (var * (probs - squares)).sum(1)
    slack = tolerance * (1 + spread + largest**2) / 2
    assert ((entropy - stein).abs() <= slack).all()


# --- control flow ----------------------------------------------------------------------------------------


class Model(nn.Module):
    def forward(self, mean: Tensor, var: Tensor) -> tuple[Tensor, ...]:
        return tuple(softmax_moments(mean, var))


def traced_cases(*batch: int) -> list[tuple[Tensor, Tensor]]:
    """Three batches of these sizes whose values would take different branches, had the code any."""
    return [
        case(5, 4.0, "random", 2.0, batch[0]),
        case(5, 0.0, "equal", 50.0, batch[1]),
        case(5, 200.0, "mixed", 5.0, batch[2]),
    ]


def assert_as_eager(
    function: Callable[[Tensor, Tensor], tuple[Tensor, ...]], cases: list[tuple[Tensor, Tensor]]
) -> None:
    for mean, var in cases:
        for got, wanted in zip(function(mean, var), softmax_moments(mean, var), strict=True):
            assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_export_with_a_dynamic_batch() -> None:
    batch = torch.export.Dim("batch", min=2, max=1024)
    shapes = {"mean": {0: batch}, "var": {0: batch}}
    cases = traced_cases(12, 3, 20)
    with torch.no_grad():
        program = torch.export.export(Model(), cases[0], dynamic_shapes=shapes)
        assert_as_eager(program.module(), cases)


@pytest.mark.parametrize("grad", [False, True])
def test_compiles_to_one_graph(grad: bool) -> None:
    torch.compiler.reset()  # dynamic=True takes 12 s of symbolic shapes, which the export above covers
    with torch.set_grad_enabled(grad):
        compiled = torch.compile(Model(), fullgraph=True, backend="aot_eager", dynamic=False)
        assert_as_eager(compiled, traced_cases(6, 6, 6))


# --- one node for each point of a factor -----------------------------------------------------------------


def by_quantiles(mean: Tensor, std: Tensor, points: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """E p over points with means (B, K, S), each at so many equidistant levels, and the mean weight."""
    uniform = (torch.arange(levels, dtype=torch.float64) + 0.5) / levels
    level = (-uniform.log()).log().to(mean).repeat(points.shape[2])
    means = points.repeat_interleave(levels, 2)
    total, weight = Quantiles.of(mean, std).probs(means, level)
    return total / weight, weight.squeeze(1) / len(level)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_classes", "largest"), [(3, 0.5), (10, 4.0), (1000, 4.0), (1000, 20.0)])
def test_levels_integrate_over_time(num_classes: int, largest: float, kind: str, spread: float) -> None:
    """All points at the mean: the one-dimensional integral, by its quantiles."""
    mean, var = case(num_classes, largest, kind, spread, batch=4)
    mean, std = mean.float(), var.float().sqrt().clamp_min(1e-12)
    got, weight = by_quantiles(mean, std, mean.unsqueeze(-1), 256)
    tolerance = 0.015 if (kind, largest) == ("one wide", 20.0) else 3e-3
    torch.testing.assert_close(got, softmax_moments(mean, var.float()).probs, rtol=0, atol=tolerance)
    torch.testing.assert_close(weight, torch.ones(len(mean)), rtol=0, atol=0.05)


@pytest.mark.parametrize(("num_classes", "width"), [(3, 1.0), (10, 8.0), (200, 8.0), (200, 300.0)])
def test_points_far_from_their_mean_have_their_own_times(num_classes: int, width: float) -> None:
    """Against the integral at each point; 300 is far beyond what float32 has an exponential for."""
    g = torch.Generator().manual_seed(num_classes)
    mean, std = 2 * torch.randn(3, num_classes, generator=g), 3 * torch.rand(3, num_classes, generator=g)
    points = mean.unsqueeze(-1) + width * torch.randn(3, num_classes, 8, generator=g)
    got, weight = by_quantiles(mean, std, points, 64)
    each = [softmax_moments(points[..., s], std.square()).probs for s in range(8)]
    torch.testing.assert_close(got, torch.stack(each).mean(0), rtol=0, atol=6e-3)
    assert (weight - 1).abs().max() < 0.1
