"""−log E softmax(u)_y: its value against all K log-probabilities, its gradient against autograd through every
sample kept (the path), Hessians by torch.func at the same points (Price), and product grids."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hetsngp.functional import label_loss
from hetsngp.functional.link import softmax_log_probs, softmax_nll
from hetsngp.functional.sampling import BLOCK, MILD_VARIANCE, IntegrationPoints, num_coordinates, random_signs
from hetsngp.types import Factor, FactorSum, UtilityNormal

BATCH, CLASSES, RANK = 6, 5, 2
WIDTHS = {"mild": [0.3] * BATCH, "wide": [2.0] * BATCH, "mixed": [0.3, 2.0, 2.0, 0.1, 2.0, 0.3]}
FORMS = ("dense", "efficient", "shared", "sum", "kronecker", "no factor", "dense, no diagonal")


def leaves(form: str, width: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """What a utility of this form is made of, each a leaf of the graph; rows as wide as WIDTHS says."""
    g = torch.Generator().manual_seed(seed)
    scale = torch.tensor(WIDTHS[width], dtype=dtype)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=dtype)

    mean, by = 2 * draw(BATCH, CLASSES), scale[:, None]
    var = by**2 * (0.2 + draw(BATCH, CLASSES).square().clamp_max(1))
    dense = by[..., None] * draw(BATCH, CLASSES, RANK).clamp(-1, 1)
    row, basis = by * draw(BATCH, CLASSES).clamp(-1, 1), draw(CLASSES, RANK).clamp(-1, 1)
    eigen, column = draw(CLASSES, CLASSES - 1).clamp(-1, 1), by * draw(BATCH, CLASSES - 1).abs().clamp(0.1, 1)
    tensors = {
        "dense": [mean, var, dense],
        "efficient": [mean, var, basis, row],
        "shared": [mean, var, basis],  # by nothing of the row: the same factor for all
        "sum": [mean, var, dense, eigen, column],
        "kronecker": [mean, eigen, column],
        "no factor": [mean, var],
        "dense, no diagonal": [mean, dense],
    }[form]
    return [t.requires_grad_() for t in tensors]


def assembled(form: str, tensors: list[Tensor]) -> UtilityNormal:
    mean, rest = tensors[0], tensors[1:]
    if form in ("kronecker", "dense, no diagonal"):
        factor = Factor(rest[0], column=rest[1]) if form == "kronecker" else Factor(rest[0])
        return UtilityNormal(mean, torch.zeros_like(mean), factor)
    var, *rest = rest
    factor = {
        "dense": lambda a: a,
        "efficient": lambda a, b: Factor(a, row=b),
        "shared": lambda a: Factor(a),
        "sum": lambda a, b, c: FactorSum((Factor(a), Factor(b, column=c))),
        "no factor": lambda: None,
    }[form](*rest)
    return UtilityNormal(mean, var, factor)


LABELS = torch.tensor([0, 4, 2, 2, 1, 3])


def is_mild(u: UtilityNormal) -> tuple[Tensor, Tensor]:
    """By part: the variance that the diagonal brings, and that the factor brings."""
    diagonal = u.var.detach()
    factor = u.covariance().detach().diagonal(dim1=-2, dim2=-1) - diagonal
    return diagonal.amax(-1) <= MILD_VARIANCE, factor.amax(-1) <= MILD_VARIANCE


def is_of_diagonal(form: str, leaf: int) -> bool:
    """Whether a gradient follows the choice made for the diagonal; the mean's is the same either way."""
    return leaf == 1 and form not in ("kronecker", "dense, no diagonal")


# --- oracles --------------------------------------------------------------------------------------------


def draws(u: UtilityNormal, count: int, seed: int, decorrelate: bool = False) -> Tensor:
    """u at every point, all at once and differentiable: (B, S, K)."""
    rank, diagonal = num_coordinates(u)
    points = IntegrationPoints("sobol", rank, diagonal, seed)
    blocks = [points.block(i, min(BLOCK, count - i), like=u.mean) for i in range(0, count, BLOCK)]
    eps = torch.cat([torch.cat(block, 1) for block in blocks])  # (S, R + K)
    eps = eps.expand(u.mean.shape[0], -1, -1)
    if decorrelate:
        eps = eps * random_signs(points, u.mean.shape[0], u.mean).unsqueeze(1)
    out = u.mean.unsqueeze(1).expand(-1, count, -1)
    if diagonal:
        out = out + u.var.sqrt().unsqueeze(1) * eps[..., rank:]
    return out if u.form is None else out + eps[..., :rank] @ u.form.dense().mT


def textbook(u: UtilityNormal, y: Tensor, **at: Any) -> Tensor:
    """(B,): autograd through it goes along the path."""
    log_q = torch.log_softmax(draws(u, **at), -1)
    label = log_q.gather(2, y.view(-1, 1, 1).expand(-1, log_q.shape[1], 1)).squeeze(2)
    return math.log(label.shape[1]) - label.logsumexp(1)


def price(u: UtilityNormal, y: Tensor, **at: Any) -> Tensor:
    """(B,): a surrogate whose gradient is Price's, with the Hessians of log q_y by automatic differentiation.

    ∇²q/q = ∇² log q + ∇ log q ∇ log qᵀ, averaged with the points' weights q_s/Σq, stays finite however
    improbable the label.
    """
    out = []
    covariance = u.covariance()
    for b, label in enumerate(y):

        def log_q(v: Tensor, label: Any = int(label)) -> Tensor:
            return torch.log_softmax(v, -1)[label]

        at_points = draws(u, **at)[b].detach()
        w = torch.softmax(torch.func.vmap(log_q)(at_points), 0)
        slope = torch.func.vmap(torch.func.grad(log_q))(at_points)
        curve = torch.func.vmap(torch.func.hessian(log_q))(at_points)
        by_mean = torch.einsum("s,sk->k", w, slope)
        by_covariance = 0.5 * torch.einsum("s,skl->kl", w, curve + slope.unsqueeze(1) * slope.unsqueeze(2))
        out.append(-(by_mean @ u.mean[b]) - (by_covariance * covariance[b]).sum())
    return torch.stack(out)


def gradients(value: Tensor, tensors: list[Tensor], weight: Tensor | None = None) -> list[Tensor]:
    weight = torch.ones_like(value) if weight is None else weight
    return list(torch.autograd.grad((value * weight).sum(), tensors))


def expected_gradients(form: str, tensors: list[Tensor], weight: Tensor, **at: Any) -> list[Tensor]:
    """Price's where a part of a row is mild, the path's elsewhere."""
    by_part = []
    for mild in is_mild(assembled(form, tensors)):
        share = mild.to(weight)
        by_price = gradients(price(assembled(form, tensors), LABELS, **at), tensors, weight * share)
        by_path = gradients(textbook(assembled(form, tensors), LABELS, **at), tensors, weight * (1 - share))
        by_part.append([a + b for a, b in zip(by_price, by_path, strict=True)])
    return [by_part[0 if is_of_diagonal(form, leaf) else 1][leaf] for leaf in range(len(tensors))]


def assert_close(got: Any, want: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


# --- value ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decorrelate", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("form", FORMS)
def test_the_value_is_that_of_all_log_probabilities(form: str, width: str, decorrelate: bool) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 3e-6)):
        with torch.no_grad():
            u = assembled(form, leaves(form, width, dtype))
            options: dict[str, Any] = {"num_samples": 96, "seed": 3, "decorrelate": decorrelate}
            want = -softmax_log_probs(u, **options).gather(1, LABELS[:, None]).squeeze(1)
            assert_close(softmax_nll(u, LABELS, **options), want, tolerance)
            assert not torch.allclose(want, -torch.log_softmax(u.mean, -1).gather(1, LABELS[:, None])[:, 0])


@pytest.mark.parametrize("sampler", ["mc", "antithetic"])
def test_the_plain_samplers_too(sampler: str) -> None:
    with torch.no_grad():
        u = assembled("dense", leaves("dense", "mixed"))
        options: dict[str, Any] = {"num_samples": 50, "seed": 3, "sampler": sampler}
        want = -softmax_log_probs(u, **options).gather(1, LABELS[:, None]).squeeze(1)
        assert_close(softmax_nll(u, LABELS, **options), want, 1e-12)


def test_a_point_is_the_cross_entropy() -> None:
    mean = torch.randn(BATCH, CLASSES, requires_grad=True)
    out = softmax_nll(UtilityNormal(mean, torch.zeros(BATCH, CLASSES)), LABELS, num_samples=4, seed=0)
    want = torch.nn.functional.cross_entropy(mean, LABELS, reduction="none")
    assert_close(out, want, 1e-6)
    assert_close(gradients(out, [mean]), gradients(want, [mean]), 1e-6)


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
    want = -softmax_log_probs(u, num_samples=1, seed=5).gather(1, y[:, None]).squeeze(1)
    assert torch.equal(out, want)
    assert_close(gradients(out, tensors), gradients(want, tensors), 1e-12)
    drawn = softmax_nll(u, y, num_samples=2**14, sampler="mc", seed=0)
    assert_close(out, drawn, 0.1)  # it is the integral, not something like it
    assert not torch.equal(out, drawn)


# --- gradient at the same points ------------------------------------------------------------------------


@pytest.mark.parametrize("decorrelate", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("form", FORMS)
def test_the_gradient_is_prices_for_mild_rows_and_the_paths_for_others(
    form: str, width: str, decorrelate: bool
) -> None:
    tensors = leaves(form, width)

    def make() -> UtilityNormal:
        return assembled(form, tensors)

    if form not in ("shared", "kronecker", "sum"):
        both = torch.stack(is_mild(make())).all(0)
        assert both.sum() == {"mild": 6, "wide": 0, "mixed": 3}[width]
    weight = torch.randn(BATCH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out = softmax_nll(make(), LABELS, num_samples=40, seed=3, decorrelate=decorrelate)
    got = gradients(out, tensors, weight)
    want = expected_gradients(form, tensors, weight, count=40, seed=3, decorrelate=decorrelate)
    assert_close(got, want)


def test_where_mild_ends() -> None:
    """Either side of MILD_VARIANCE, for the diagonal and for the factor, each by its own largest variance."""
    tensors = leaves("dense", "mild")
    wanted = torch.tensor([0.5, 0.999, 1.001, 0.999, 1.001, 2.0], dtype=torch.float64) * MILD_VARIANCE
    with torch.no_grad():
        tensors[1] *= (wanted / tensors[1].amax(-1))[:, None]
        of_factor = wanted[[1, 2, 4, 5, 3, 0]]
        tensors[2] *= (of_factor / tensors[2].square().sum(-1).amax(-1)).sqrt()[:, None, None]
    kinds_of_rows = [mild.tolist() for mild in is_mild(assembled("dense", tensors))]
    assert kinds_of_rows == [[True, True, False, True, False, False], [True, False, False, False, True, True]]
    at: dict[str, Any] = {"count": 16, "seed": 0}
    got = gradients(softmax_nll(assembled("dense", tensors), LABELS, num_samples=16, seed=0), tensors)
    kinds = [gradients(fn(assembled("dense", tensors), LABELS, **at), tensors) for fn in (price, textbook)]
    for part, mild_rows in enumerate(kinds_of_rows, 1):
        for row, mild in enumerate(mild_rows):
            by_price, by_path = kinds[0][part][row], kinds[1][part][row]
            want, other = (by_price, by_path) if mild else (by_path, by_price)
            assert_close(got[part][row], want)
            assert (got[part][row] - other).abs().max() > 1e-5  # at 16 points the two are told apart


def test_a_factored_form_too_large_to_write_out_goes_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetsngp.functional.link.DENSE_LIMIT", BATCH * CLASSES * RANK - 1)

    def refuse(*args: Any) -> None:
        raise AssertionError("written out")

    monkeypatch.setattr(label_loss.LabelNLL, "apply", refuse)
    tensors = leaves("efficient", "mixed")
    out = softmax_nll(assembled("efficient", tensors), LABELS, num_samples=32, seed=1)
    want = textbook(assembled("efficient", tensors), LABELS, count=32, seed=1)
    assert_close(out, want)
    assert_close(gradients(out, tensors), gradients(want, tensors))
    with pytest.raises(AssertionError, match="written out"):  # a dense one is written out already
        softmax_nll(assembled("dense", leaves("dense", "mixed")), LABELS, num_samples=32, seed=1)


@pytest.mark.parametrize("chunk", [1, 64, 2**18])
@pytest.mark.parametrize("count", [BLOCK, 2 * BLOCK + 88])
def test_blocks_and_chunks_add_up(count: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetsngp.functional.sampling.CPU_CHUNK", chunk)
    tensors = leaves("sum", "mixed")
    with torch.no_grad():
        tensors[4] *= 0.2  # so that some rows are mild and some are not
    for mild in is_mild(assembled("sum", tensors)):
        assert mild.any()
        assert not mild.all()
    out = softmax_nll(assembled("sum", tensors), LABELS, num_samples=count, seed=3)
    assert_close(out, textbook(assembled("sum", tensors), LABELS, count=count, seed=3))
    weight = torch.linspace(-1, 2, BATCH, dtype=torch.float64)
    want = expected_gradients("sum", tensors, weight, count=count, seed=3)
    assert_close(gradients(out, tensors, weight), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", ["mild", "wide"])
@pytest.mark.parametrize("below", [-50.0, -200.0, -2000.0])
def test_improbable_labels(width: str, below: float, dtype: torch.dtype) -> None:
    """exp(−200) is nothing in float32; value and gradient are right to its digits all the same."""
    tensors = leaves("dense", width)
    with torch.no_grad():
        for row, label in enumerate(LABELS):
            if row != 2:  # one probable label among them
                tensors[0][row, label] = below
    u = assembled("dense", tensors)
    want = textbook(u, LABELS, count=300, seed=2)
    assert want[0] > 0.8 * -below
    oracle = (price if width == "mild" else textbook)(u, LABELS, count=300, seed=2)
    want_gradients = gradients(oracle, tensors)
    low = [t.detach().to(dtype).requires_grad_() for t in tensors]
    out = softmax_nll(assembled("dense", low), LABELS, num_samples=300, seed=2)
    # The points themselves are rounded in float32.
    assert_close(out.double(), want, 1e-12 if dtype == torch.float64 else 2e-5)
    for got, expected in zip(gradients(out, low), want_gradients, strict=True):
        assert torch.isfinite(got).all()
        assert_close(got.double(), expected, 1e-10 if dtype == torch.float64 else 3e-4)
    assert want_gradients[0][0, LABELS[0]] == pytest.approx(-1, abs=1e-9)  # all it asks for is its label


# --- the gradient itself --------------------------------------------------------------------------------


def on_a_grid(mean: Tensor, std: Tensor | None, factor: Tensor | None, y: int) -> Tensor:
    """−log E softmax(u)_y of one row, by the trapezoid rule in each of its up to three normal coordinates."""
    coordinates = ([] if std is None else list(torch.diag(std).mT)) + (
        [] if factor is None else list(factor.mT)
    )
    z = torch.arange(-32, 33, dtype=torch.float64) / 4
    nodes = torch.tensor(list(itertools.product(z.tolist(), repeat=len(coordinates))), dtype=torch.float64)
    log_weight = torch.log_softmax(-0.5 * nodes.square().sum(1), 0)
    u = mean + nodes @ torch.stack(coordinates)
    return -(torch.log_softmax(u, -1)[:, y] + log_weight).logsumexp(0)


@pytest.mark.parametrize("kind", ["one column", "two columns", "diagonal"])
@pytest.mark.parametrize("decorrelate", [False, True])
@pytest.mark.parametrize("size", [0.3, 0.9, 3.0])
def test_the_gradient_is_that_of_the_integral(kind: str, decorrelate: bool, size: float) -> None:
    """Three classes, against a product grid: the mean over seeds within four standard errors, Price's (0.3,
    0.9) and the path's (3.0) alike, and with each row's own signs."""
    g = torch.Generator().manual_seed(4)
    mean = torch.randn(2, 3, generator=g, dtype=torch.float64).requires_grad_()
    columns = {"one column": 1, "two columns": 2, "diagonal": 0}[kind]
    shape = (2, 3, columns) if columns else (2, 3)
    width = torch.rand(*shape, generator=g, dtype=torch.float64) + 0.2
    largest = (width.square().sum(2) if columns else width.square()).sqrt().amax(1)
    width = (size * width / largest.view(2, *[1] * (width.dim() - 1))).requires_grad_()
    y, seeds = torch.tensor([2, 0]), 24

    def loss(seed: int) -> Tensor:
        var, factor = (width**2, None) if columns == 0 else (torch.zeros_like(mean), width)
        u = UtilityNormal(mean, var, factor)
        assert is_mild(u)[columns > 0].tolist() == [size < 1] * 2
        return softmax_nll(u, y, num_samples=512, seed=seed, decorrelate=decorrelate)

    exact = torch.stack([
        on_a_grid(mean[b], *((width[b], None) if columns == 0 else (None, width[b])), int(y[b]))
        for b in range(2)
    ])  # fmt: skip
    want = [exact.detach(), *gradients(exact, [mean, width])]
    runs = [loss(seed) for seed in range(seeds)]
    found = [[out.detach(), *gradients(out, [mean, width])] for out in runs]
    for expected, each in zip(want, zip(*found, strict=True), strict=True):
        sample = torch.stack(each)
        error = sample.std(0) / math.sqrt(seeds)
        assert (sample.mean(0) - expected).abs().le(4 * error + 1e-9).all()
        assert 4 * error.max() < 0.02 * expected.abs().max()  # which says something


def test_price_has_far_less_variance_while_noise_is_mild(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = leaves("dense", "mild")

    def variance() -> Tensor:
        runs = [
            gradients(softmax_nll(assembled("dense", tensors), LABELS, num_samples=64, seed=s), tensors)
            for s in range(30)
        ]
        return torch.stack([torch.stack(part).var(0).mean() for part in zip(*runs, strict=True)][1:])

    by_price = variance()
    monkeypatch.setattr(label_loss, "MILD_VARIANCE", -1.0)
    assert (variance() > 10 * by_price).all()


def test_decorrelated_rows_average_their_errors() -> None:
    """Equal rows: with signs of their own their errors differ and cancel, without they are the same."""
    row = [t.detach()[1:2].expand(200, *t.shape[1:]) for t in leaves("dense", "wide")]
    y = torch.zeros(200, dtype=torch.long)
    means = {
        own: torch.stack([
            softmax_nll(UtilityNormal(*row), y, num_samples=8, seed=s, decorrelate=own).neg().exp().mean()
            for s in range(40)
        ])
        for own in (True, False)
    }  # fmt: skip
    assert means[True].std() < 0.5 * means[False].std()
    exact = softmax_nll(UtilityNormal(*(t[:1] for t in row)), y[:1], num_samples=2**16, seed=1).neg().exp()
    for sample in means.values():
        assert abs(float(sample.mean() - exact)) < 4 * float(sample.std()) / math.sqrt(40) + 1e-5


def test_rows_do_not_influence_each_other() -> None:
    """A row's value and gradient are those it has alone, whatever its neighbours' width and labels."""
    tensors = leaves("dense", "mixed")
    with torch.no_grad():
        tensors[0][1, LABELS[1]] = -300.0
    out = softmax_nll(assembled("dense", tensors), LABELS, num_samples=300, seed=2)
    together = gradients(out, tensors)
    for row in range(BATCH):
        alone = [t.detach()[row : row + 1].clone().requires_grad_() for t in tensors]
        single = softmax_nll(assembled("dense", alone), LABELS[row : row + 1], num_samples=300, seed=2)
        assert_close(single[0], out[row], 1e-12)
        for got, want in zip(gradients(single, alone), together, strict=True):
            assert_close(got[0], want[row], 1e-12)


# --- both forms at once ---------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", ["both", "diagonal", "factor"])
@pytest.mark.parametrize("count", [40, BLOCK + 40])
def test_both_forms_of_every_row_are_those_of_each_kind(parts: str, count: int) -> None:
    """A small batch on a GPU is done both ways: value and gradients, for all four kinds of rows."""
    g = torch.Generator().manual_seed(5)
    mild, wide = 0.2, 2.0
    by = torch.tensor([[mild, mild], [mild, wide], [wide, mild], [wide, wide], [mild, wide], [mild, mild]])
    mean = 2 * torch.randn(BATCH, CLASSES, generator=g, dtype=torch.float64)
    std = by[:, :1] * (0.3 + torch.rand(BATCH, CLASSES, generator=g, dtype=torch.float64))
    signs = torch.randn(BATCH, CLASSES, generator=g).sign()
    factor = by[:, 1:, None] * torch.randn(BATCH, RANK, CLASSES, generator=g, dtype=torch.float64).clamp(
        -1, 1
    )
    u = label_loss._Gaussian(
        mean, None if parts == "factor" else std * signs, None if parts == "diagonal" else factor
    )
    kinds = {(bool(a), bool(b)) for a, b in zip(*u.mild(), strict=True)}
    assert len(kinds) == (4 if parts == "both" else 2)
    points = IntegrationPoints("sobol", u.rank, 0 if parts == "factor" else CLASSES, seed=3)
    nll, grads = label_loss._by_both(points, count, LABELS, u)
    want_nll, want = label_loss._by_kind(points, count, LABELS, u)
    assert_close(nll, want_nll, 1e-12)
    assert len(grads) == len(want) == (3 if parts == "both" else 2)
    for got, expected in zip(grads, want, strict=True):
        assert_close(got, expected, 1e-12)
