"""The model/data split against nested tensor grids."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from tests.reference import oracles

from hetsngp.functional import uncertainty
from hetsngp.functional.laplace import contrast_basis
from hetsngp.functional.link import CONTRAST_CLASSES, softmax_probs
from hetsngp.functional.quadrature import log_expected_sigmoid
from hetsngp.functional.uncertainty import (
    binary_entropy,
    entropy,
    mixture,
    model_uncertainty,
    noise_free_split,
    sigmoid_model_uncertainty,
)
from hetsngp.types import Factor, Prediction, UtilityNormal


def gaussian(batch: int, classes: int, scale: float, seed: int) -> UtilityNormal:
    g = torch.Generator().manual_seed(seed)
    var = scale**2 * (0.5 + torch.rand(batch, classes, generator=g, dtype=torch.float64))
    factor = scale * torch.randn(batch, classes, 2, generator=g, dtype=torch.float64)
    return UtilityNormal(torch.randn(batch, classes, generator=g, dtype=torch.float64), var, factor)


def zero_mean(batch: int, classes: int, scale: float, seed: int) -> UtilityNormal:
    u = gaussian(batch, classes, scale, seed)
    return UtilityNormal(torch.zeros_like(u.mean), u.var, u.factor)


def added(f: UtilityNormal, noise: UtilityNormal) -> UtilityNormal:
    return UtilityNormal(f.mean, f.var + noise.var, torch.cat([f.factor, noise.factor], -1))


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize(("latent_scale", "noise_scale"), [(0.3, 1.0), (1.0, 0.3), (2.0, 2.0)])
def test_split_against_nested_grids(classes: int, latent_scale: float, noise_scale: float) -> None:
    f, noise = gaussian(3, classes, latent_scale, 0), zero_mean(3, classes, noise_scale, 1)
    probs, _ = softmax_probs(added(f, noise), target_error=1e-4, max_points=2**20)
    model = model_uncertainty(f, noise, probs)
    step = {"step": 0.25} if classes == 2 else {"half": 5.0, "step": 0.5}
    for row in range(3):
        mean = f.mean[row].numpy()
        latent, label = f.covariance()[row].numpy(), noise.covariance()[row].numpy()
        data = oracles.data_uncertainty(mean, latent, label, **step)
        total = float(oracles.entropy(oracles.expected_softmax(mean, latent + label, step=0.1)))
        tolerance = 1e-4 if classes == 2 else 0.01  # quadrature, or 512 × 64 nested points
        assert float(model[row]) == pytest.approx(total - data, abs=tolerance)
        assert total - data > 0.005


def test_without_noise_against_a_grid() -> None:
    f = gaussian(3, 3, 1.5, 0)
    probs, _ = softmax_probs(f, target_error=1e-4, max_points=2**20)
    model = model_uncertainty(f, None, probs)
    for row in range(3):
        nodes, weights = oracles.normal_grid(oracles.contrasts(f.covariance()[row].numpy()), step=0.1)
        q = oracles.softmax(f.mean[row].numpy() + nodes)
        oracle = oracles.entropy(weights @ q) - weights @ oracles.entropy(q)
        assert float(model[row]) == pytest.approx(float(oracle), abs=0.01)


@pytest.mark.parametrize("classes", [2, 3, 50])
def test_zero_gp_variance_is_exactly_zero_row_by_row(classes: int) -> None:
    f, noise = gaussian(4, classes, 1.0, 0), zero_mean(4, classes, 1.0, 1)
    none = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    f = UtilityNormal(f.mean, f.var * none[:, None], Factor(f.factor * none[:, None, None]))
    probs, _ = softmax_probs(UtilityNormal(f.mean, f.var + noise.var, noise.factor))
    model = model_uncertainty(f, noise, probs)
    assert (model[[0, 2]] == 0).all()
    assert (model[[1, 3]] > 0.01).all()


def test_model_uncertainty_grows_with_the_gp_variance_from_zero() -> None:
    """Common inner points: no noise floor, and the small-variance law I ≈ ½ Σ Var(p)/p."""
    f, noise = gaussian(1, 5, 1.0, 0), zero_mean(1, 5, 1.0, 1)
    values = []
    for scale in (1e-4, 1e-3, 1e-2, 1e-1, 1.0):
        small = UtilityNormal(f.mean, f.var * scale**2, f.factor * scale)
        probs, _ = softmax_probs(added(small, noise))
        values.append(float(model_uncertainty(small, noise, probs)))
    assert all(b > a for a, b in itertools.pairwise(values))
    assert values[1] / values[0] == pytest.approx(100, rel=0.05)


def test_very_many_classes_far_from_the_data_pass_the_ceiling_of_the_nested_rule() -> None:
    """1,000 classes, prior variance 100: I(y; f) nears log 1000 = 6.9; 128 points alone give at most 4.9."""
    f = UtilityNormal(torch.zeros(1, 1000), torch.full((1, 1000), 100.0))
    probs, _ = softmax_probs(f, num_samples=2**15)
    draws = np.random.default_rng(0).normal(scale=10, size=(4000, 1000))
    data = float(oracles.entropy(oracles.softmax(draws)).mean())
    assert float(model_uncertainty(f, None, probs)) == pytest.approx(math.log(1000) - data, abs=0.15)


def mutual_information(f: np.ndarray, shift: np.ndarray, probs: np.ndarray) -> float:
    """Nested rule by loops: H(mean p) − mean H(p), and towards H(probs) − mean H(p) as it nears log M."""
    total, given = np.zeros(f.shape[1]), 0.0
    for each in f:
        p = sum(oracles.softmax(each + s) for s in shift) / len(shift)
        total, given = total + p / len(f), given + float(oracles.entropy(p)) / len(f)
    nested = max(float(oracles.entropy(total)) - given, 0.0)
    near = min(max(2 * nested / math.log(len(f)) - 1, 0.0), 1.0)
    return (1 - near) * nested + near * (float(oracles.entropy(probs)) - given)


@pytest.mark.parametrize("classes", [3, CONTRAST_CLASSES, CONTRAST_CLASSES + 1])
@pytest.mark.parametrize("chunk", [1, 500, 2**20])
@pytest.mark.parametrize("width", [1.0, 20.0])
def test_the_nested_rule_by_loops(
    classes: int, chunk: int, width: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Classes first or last, in any pieces. Wide: at the ceiling log 9, where ``probs`` takes over."""
    monkeypatch.setattr(uncertainty, "CHUNK", chunk)
    rng = np.random.default_rng(0)
    f = width * rng.normal(size=(4, 9, classes))
    shift, probs = rng.normal(size=(4, 5, classes)), rng.dirichlet(np.ones(classes), 4)
    got = uncertainty._mutual_information(*(torch.tensor(t) for t in (f, shift, probs)))
    want = [mutual_information(*row) for row in zip(f, shift, probs, strict=True)]
    assert got.tolist() == pytest.approx(want, abs=1e-12)
    alone = uncertainty._mutual_information(*(torch.tensor(t[2:3]) for t in (f, shift, probs)))
    assert float(alone[0]) == pytest.approx(want[2], abs=1e-12)
    # And a shift of zero stands for no noise, one for all rows.
    none = np.zeros((4, 1, classes))
    got = uncertainty._mutual_information(*(torch.tensor(t) for t in (f, none, probs)))
    want = [mutual_information(*row) for row in zip(f, none, probs, strict=True)]
    assert got.tolist() == pytest.approx(want, abs=1e-12)


def test_sigmoid_split_against_a_grid() -> None:
    mean = torch.tensor([[0.5, -2.0], [0.0, 3.0]], dtype=torch.float64)
    latent = torch.tensor([[4.0, 0.25], [0.0, 100.0]], dtype=torch.float64)
    label = torch.tensor([[1.0, 2.0], [1.0, 0.5]], dtype=torch.float64)
    z, w = oracles.normal_grid(np.eye(1), step=0.02)
    probs = torch.empty_like(mean)
    oracle = np.zeros(2)
    for i in range(2):
        for c in range(2):
            f = float(mean[i, c]) + math.sqrt(float(latent[i, c])) * z[:, 0]
            given_f = np.array([
                w @ (1 / (1 + np.exp(-(value + math.sqrt(float(label[i, c])) * z[:, 0])))) for value in f
            ])  # fmt: skip
            p = w @ given_f
            probs[i, c] = p
            two = lambda q: oracles.entropy(np.stack([q, 1 - q], -1))  # noqa: E731
            oracle[i] += two(np.array(p)) - w @ two(given_f)
    got = sigmoid_model_uncertainty(mean, latent, label, probs)
    assert got.numpy() == pytest.approx(oracle, abs=2e-4)
    # No GP variance, no model uncertainty, whatever the rounding of the probabilities.
    rounded = probs + 1e-6 * (0.5 - probs)
    assert (sigmoid_model_uncertainty(mean, torch.zeros_like(latent), label, rounded) == 0).all()
    assert torch.allclose(binary_entropy(torch.tensor([[0.5, 0.5]])), torch.tensor([2 * math.log(2)]))


def fine_split(
    mean: torch.Tensor, std: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """E σ(u), and I(y; f) by 1,153 nodes over f in float64: (n,) each."""
    z = torch.arange(-9, 9 + 1e-9, 1 / 64, dtype=torch.float64).unsqueeze(1)
    f, weight = mean + std * z, torch.softmax(-0.5 * z.square(), 0)
    entropies = sum(torch.special.entr(log_expected_sigmoid(s * f, noise.square()).exp()) for s in (1, -1))
    yes, no = (log_expected_sigmoid(s * mean, std.square() + noise.square()).exp() for s in (1, -1))
    total = torch.special.entr(yes) + torch.special.entr(no)
    return yes, total - (weight * entropies).sum(0)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-6), (torch.float32, 5e-6)])
def test_sigmoid_split_of_any_width_against_many_nodes(dtype: torch.dtype, atol: float) -> None:
    """The nodes are as many for a logit that hardly varies as for one that is anywhere."""
    means = torch.tensor([0.0, 0.3, 2.0, 8.0, 15.0, 40.0, -3.0, -20.0], dtype=torch.float64)
    stds = torch.tensor([1e-3, 0.1, 0.7, 1.5, 2.4, 5.0, 12.0, 40.0], dtype=torch.float64)
    noises = torch.tensor([0.0, 0.1, 1.0, 1.6, 5.0, 20.0], dtype=torch.float64)
    mean, std, noise = torch.cartesian_prod(means, stds, noises).unbind(1)
    yes, want = fine_split(mean, std, noise)
    columns = [t.to(dtype).unsqueeze(1) for t in (mean, std.square(), noise.square(), yes)]
    assert (sigmoid_model_uncertainty(*columns).double() - want).abs().max() <= atol
    clear = noise == 0
    known = [t[clear] for t in columns]
    got = sigmoid_model_uncertainty(known[0], known[1], None, known[3])
    assert (got.double() - want[clear]).abs().max() <= atol
    assert want.max() > 0.5


@pytest.mark.parametrize(("classes", "outer"), [(3, 512), (20, 256), (100, 64), (1000, 32)])
def test_members_share_the_outer_points(classes: int, outer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An M-th each, but 16 at least (or all there are): averaging does not remove the bias of few."""
    counts: list[int] = []

    def recorded(utility: UtilityNormal, count: int, *, seed: int) -> torch.Tensor:
        counts.append(count)
        return torch.randn(len(utility.mean), count, utility.mean.shape[-1], generator=None).double()

    monkeypatch.setattr(uncertainty, "sample", recorded)
    probs = torch.full((1, classes), 1 / classes).double()
    for members in (1, 2, 4, 100):
        counts.clear()
        model_uncertainty(gaussian(1, classes, 1.0, 0), zero_mean(1, classes, 1.0, 1), probs, members=members)
        assert counts[0] == max(outer // members, min(16, outer))


def test_the_mean_over_members_against_nested_grids() -> None:
    f, noise = gaussian(2, 3, 1.0, 0), zero_mean(2, 3, 0.5, 1)
    probs, _ = softmax_probs(added(f, noise), target_error=1e-4, max_points=2**20)
    each = [model_uncertainty(f, noise, probs, seed=seed, members=8) for seed in range(0, 80, 10)]
    for row in range(2):
        mean = f.mean[row].numpy()
        latent, label = f.covariance()[row].numpy(), noise.covariance()[row].numpy()
        data = oracles.data_uncertainty(mean, latent, label, half=5.0, step=0.5)
        total = float(oracles.entropy(oracles.expected_softmax(mean, latent + label, step=0.1)))
        assert float(torch.stack(each).mean(0)[row]) == pytest.approx(total - data, abs=0.015)


# --- mixtures -------------------------------------------------------------------------------------------


def prediction(rows: int, classes: int, seed: int) -> Prediction:
    """Any that one model could give."""
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.ones(classes), rows)
    total, share = oracles.entropy(probs), rng.uniform(size=rows)
    fields = (probs, rng.dirichlet(np.ones(classes), rows), total, total * share, total * (1 - share))
    more = (rng.uniform(size=rows), rng.normal(size=rows), np.zeros(rows), rng.integers(9, size=rows))
    return Prediction(*(torch.tensor(field) for field in (*fields, *more)))


@pytest.mark.parametrize("sigmoid", [False, True])
def test_a_mixture_by_loops(sigmoid: bool) -> None:
    """H(mean p) = I(y; member) + the means of the members' uncertainties."""
    each = [prediction(5, 4, seed) for seed in range(3)]

    def h(p: torch.Tensor) -> float:
        q = p.numpy()
        return float(sum(oracles.entropy(np.array([x, 1 - x])) for x in q) if sigmoid else oracles.entropy(q))

    if sigmoid:  # entropies as that link has them
        each = [
            dataclasses.replace(e, total_uncertainty=(t := binary_entropy(e.probs)), data_uncertainty=t / 3)
            for e in each
        ]
        each = [dataclasses.replace(e, model_uncertainty=2 * e.total_uncertainty / 3) for e in each]
    p = mixture(each, sigmoid=sigmoid)
    for row in range(5):
        members = [e[row] for e in each]
        probs = sum(m.probs for m in members) / 3
        between = h(probs) - sum(h(m.probs) for m in members) / 3
        data, model, variance, score = (
            float(sum(getattr(m, name) for m in members)) / 3
            for name in ("data_uncertainty", "model_uncertainty", "latent_variance", "ood_score")
        )
        assert torch.allclose(p.probs[row], probs)
        assert torch.allclose(p.clean_probs[row], sum(m.clean_probs for m in members) / 3)
        for name, want in {
            "total_uncertainty": h(probs),
            "data_uncertainty": data,
            "function_uncertainty": model,
            "member_uncertainty": between,
            "model_uncertainty": model + between,
            "latent_variance": variance,
            "ood_score": score + between,
            "num_points": sum(int(m.num_points) for m in members),
        }.items():
            assert float(getattr(p, name)[row]) == pytest.approx(want, abs=1e-12), name
        assert between > 0.01


def test_a_mixture_of_mixtures_is_that_of_all() -> None:
    each = [prediction(5, 4, seed) for seed in range(6)]
    flat = mixture(each, sigmoid=False)
    pairs = [mixture(each[i : i + 2], sigmoid=False) for i in (0, 2, 4)]
    for field in dataclasses.fields(Prediction):
        nested = getattr(mixture(pairs, sigmoid=False), field.name)
        torch.testing.assert_close(nested, getattr(flat, field.name), rtol=1e-12, atol=1e-12)


def test_a_mixture_of_one_is_it_and_of_equals_too() -> None:
    one = prediction(5, 4, 0)
    assert mixture([one], sigmoid=False) is one
    p = mixture([one, one, one], sigmoid=False)
    torch.testing.assert_close(p.probs, one.probs)
    torch.testing.assert_close(p.ood_score, one.ood_score)
    assert (p.member_uncertainty < 1e-12).all()
    assert torch.equal(p.num_points, 3 * one.num_points)


def test_entropy_of_certainty_is_zero() -> None:
    assert torch.equal(entropy(torch.eye(3)), torch.zeros(3))
    assert not torch.signbit(entropy(torch.eye(3))).any()


def _contrast_factor(rows: int, classes: int, sd: float, generator: torch.Generator) -> Factor:
    """Factor as of the Kronecker posterior, with variances of contrasts that differ by a factor of five."""
    column = sd * torch.logspace(0.35, -0.35, classes - 1).expand(rows, -1).sqrt()
    other = torch.randn(classes, classes - 1, generator=generator)
    basis = contrast_basis(classes, other)
    rotation = torch.linalg.qr(basis.mT @ other)[0]
    return Factor(basis @ rotation, column=column.contiguous(), contrasts=True)


@pytest.mark.parametrize("sd", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("correlated", [False, True], ids=["diagonal", "contrasts"])
def test_split_without_noise_agrees_with_a_long_reference(correlated: bool, sd: float) -> None:
    """Root mean square over 200 inputs, against 2¹⁵ Sobol points in float64."""
    rows, classes = 200, 10
    generator = torch.Generator().manual_seed(3)
    mean = 2 * torch.randn(rows, classes, generator=generator)
    factor = _contrast_factor(rows, classes, sd, generator) if correlated else None
    var = torch.zeros(rows, classes) if correlated else torch.full((rows, classes), sd**2)
    probs, model = noise_free_split(UtilityNormal(mean, var, factor), 0)
    columns = torch.diag_embed(var.sqrt()) if factor is None else factor.dense()
    engine = torch.quasirandom.SobolEngine(columns.shape[-1], scramble=True, seed=5)
    points = torch.special.ndtri(engine.draw(2**15, dtype=torch.float64).clamp(1e-12, 1 - 1e-12))
    want, given = torch.zeros(rows, classes, dtype=torch.float64), torch.zeros(rows, dtype=torch.float64)
    for eps in points.split(2**11):
        p = torch.softmax(mean.double().unsqueeze(1) + eps @ columns.double().mT, -1)
        want += p.sum(1) / len(points)
        given += entropy(p).sum(1) / len(points)
    truth = entropy(want) - given
    assert float((probs - want).abs().max()) < (0.01 if correlated else 0.001)
    largest = 0.008 if correlated and sd > 1 else 0.002  # the draws of wide correlations are few
    assert float((model - truth).square().mean().sqrt()) < largest
    assert float((entropy(probs) - model - given).square().mean().sqrt()) < largest


def test_no_variance_gives_exactly_no_model_uncertainty_without_noise() -> None:
    mean = 3 * torch.randn(4, 5)
    var = torch.zeros(4, 5)
    var[1] = 1.0
    probs, model = noise_free_split(UtilityNormal(mean, var), 0)
    assert (model[[0, 2, 3]] == 0).all()
    assert model[1] > 0
    assert torch.equal(probs[[0, 2, 3]], torch.softmax(mean, -1)[[0, 2, 3]])
