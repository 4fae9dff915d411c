"""The model/data split against nested tensor grids and nested sums over many points, in float64."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from tests.reference import oracles
from torch import Tensor

from hetsngp.functional import integration, uncertainty
from hetsngp.functional.laplace import contrast_basis
from hetsngp.functional.link import add, softmax_probs
from hetsngp.functional.quadrature import log_expected_sigmoid
from hetsngp.functional.sampling import sample
from hetsngp.functional.uncertainty import (
    binary_entropy,
    entropy,
    mixture,
    sigmoid_model_uncertainty,
    softmax_split,
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


def contrasts(rows: int, classes: int, sd: float, generator: torch.Generator) -> Factor:
    """Factor as of the Kronecker posterior, with variances of contrasts that differ by a factor of five."""
    column = sd * torch.logspace(0.35, -0.35, classes - 1).expand(rows, -1).sqrt()
    other = torch.randn(classes, classes - 1, generator=generator)
    basis = contrast_basis(classes, other)
    rotation = torch.linalg.qr(basis.mT @ other)[0]
    return Factor(basis @ rotation, column=column.contiguous(), contrasts=True)


def pair(
    classes: int, kind: str, gp_sd: float, noise_sd: float, *, diagonal: bool = True, rows: int = 40
) -> tuple[UtilityNormal, UtilityNormal]:
    """f with plain variance or correlated contrasts, and noise of rank 3 with or without a diagonal."""
    g = torch.Generator().manual_seed(0)
    mean = 2 * torch.randn(rows, classes, generator=g)
    zero = torch.zeros(rows, classes)
    if kind == "plain":
        f = UtilityNormal(mean, torch.full((rows, classes), gp_sd**2))
    else:
        f = UtilityNormal(mean, zero, contrasts(rows, classes, gp_sd, g))
    factor = noise_sd * torch.randn(rows, classes, 3, generator=g) / math.sqrt(3)
    var = torch.full((rows, classes), noise_sd**2) if diagonal else zero
    return f, UtilityNormal(zero, var, factor)


# --- references -----------------------------------------------------------------------------------------


def columns(u: UtilityNormal) -> Tensor:
    """A square root of the covariance: (B, K, ·), float64."""
    out = torch.diag_embed(u.var.double().sqrt())
    if u.form is None:
        return out
    dense = u.form.dense().double().expand(len(out), -1, -1)
    return torch.cat([out, dense], -1) if bool(u.var.any()) else dense


def normal_points(count: int, dimension: int, seed: int) -> Tensor:
    engine = torch.quasirandom.SobolEngine(dimension, scramble=True, seed=seed)
    return torch.special.ndtri(engine.draw(count, dtype=torch.float64).clamp(1e-12, 1 - 1e-12))


def nested(f: UtilityNormal, noise: UtilityNormal, outer: int = 512, inner: int = 1024) -> Tensor:
    """I(y; f) by sums over points f and, inside, points of the noise: (B,)."""
    of_f, of_noise = columns(f), columns(noise)
    z, eps = normal_points(outer, of_f.shape[-1], 1), normal_points(inner, of_noise.shape[-1], 2)
    out = []
    for mean, a, b in zip(f.mean.double(), of_f, of_noise, strict=True):
        first, second = mean + z @ a.mT, eps @ b.mT
        first, second = (torch.exp(part - part.amax(-1, keepdim=True)) for part in (first, second))
        p = first * ((1 / (first @ second.mT)) @ second) / inner
        out.append(entropy(p.mean(0)) - entropy(p).mean())
    return torch.stack(out)


def without_noise(f: UtilityNormal, count: int = 2**13) -> tuple[Tensor, Tensor]:
    """E softmax(f) (B, K) and E H(softmax(f)) (B,) by a long sum."""
    of_f = columns(f)
    probs, given = (
        torch.zeros_like(f.mean, dtype=torch.float64),
        torch.zeros(len(f.mean), dtype=torch.float64),
    )
    for z in normal_points(count, of_f.shape[-1], 5).split(2**10):
        p = torch.softmax(f.mean.double().unsqueeze(1) + z @ of_f.mT, -1)
        probs += p.sum(1) / count
        given += entropy(p).sum(1) / count
    return probs, given


def rms(error: Tensor) -> float:
    return float(error.square().mean().sqrt())


# --- with label noise -----------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize(("latent_scale", "noise_scale"), [(0.3, 1.0), (1.0, 0.3), (2.0, 2.0)])
def test_split_against_nested_grids(classes: int, latent_scale: float, noise_scale: float) -> None:
    """Both with a diagonal and a factor of rank 2, which has no control variate in f."""
    f, noise = gaussian(3, classes, latent_scale, 0), zero_mean(3, classes, noise_scale, 1)
    split = softmax_split(f, noise)
    step = {"step": 0.25} if classes == 2 else {"half": 5.0, "step": 0.5}
    for row in range(3):
        mean = f.mean[row].numpy()
        latent, label = f.covariance()[row].numpy(), noise.covariance()[row].numpy()
        data = oracles.data_uncertainty(mean, latent, label, **step)
        probs = oracles.expected_softmax(mean, latent + label, step=0.1)
        assert split.probs[row].numpy() == pytest.approx(probs, abs=0.005)
        assert split.clean_probs[row].numpy() == pytest.approx(
            oracles.expected_softmax(mean, latent, step=0.1), abs=0.005
        )
        total = float(oracles.entropy(probs))
        tolerance = 1e-3 if classes == 2 else 0.02 + 0.03 * latent_scale
        assert float(split.model[row]) == pytest.approx(total - data, abs=tolerance)
        assert total - data > 0.005


# Root mean square errors that were measured, and a third more.
LIMITS = {
    (3, "plain", True): 0.005, (3, "plain", False): 0.011, (3, "contrasts", True): 0.019,
    (3, "contrasts", False): 0.021, (10, "plain", True): 0.006, (10, "plain", False): 0.018,
    (10, "contrasts", True): 0.013, (10, "contrasts", False): 0.019,
}  # fmt: skip


@pytest.mark.parametrize("diagonal", [True, False], ids=["diagonal", "factor alone"])
@pytest.mark.parametrize("kind", ["plain", "contrasts"])
@pytest.mark.parametrize("classes", [3, 10])
def test_split_with_noise_agrees_with_a_nested_reference(classes: int, kind: str, diagonal: bool) -> None:
    """Noise from narrow to wide: the error does not grow with it, and is not to one side.

    With a diagonal in the noise and independent classes it is at most .005 for a GP of sd 1; without it, and
    with few correlated classes, 64 points f are too few for that.
    """
    for gp_sd in (0.3, 1.0):
        for noise_sd in (0.5, 2.0, 8.0):
            f, noise = pair(classes, kind, gp_sd, noise_sd, diagonal=diagonal)
            split, want = softmax_split(f, noise), nested(f, noise)
            error = split.model - want
            limit = LIMITS[classes, kind, diagonal] * (1 if gp_sd == 1 else 0.3)
            assert rms(error) < max(limit, 0.004), (gp_sd, noise_sd)
            assert abs(float(error.mean())) < (0.011 if gp_sd == 1 else 0.003), (gp_sd, noise_sd)
            if noise_sd == 0.5:
                assert rms(want) > 3 * max(limit, 0.002)


def test_noise_does_not_inflate_the_model_uncertainty() -> None:
    """The score of noisy inputs: 0.1 had 1.4 and 2.3 times the truth at noise of sd 4 and 8, GP sd .7."""
    for noise_sd in (4.0, 8.0):
        f, noise = pair(100, "plain", 0.7, noise_sd, rows=8)
        want = nested(f, noise, 256, 2048)
        ratio = softmax_split(f, noise).model.sum() / want.sum()
        assert float(ratio) == pytest.approx(1, abs=0.25), noise_sd


def test_noise_of_a_wide_factor_takes_points_in_all_coordinates() -> None:
    """As noise on features: against the same covariance in few columns."""
    f, noise = pair(5, "plain", 1.0, 1.0, rows=16)
    g = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(80, 3, generator=g))[0]
    wide = UtilityNormal(noise.mean, noise.var, noise.factor @ rotation.mT)
    want = nested(f, noise)
    assert rms(softmax_split(f, wide).model - want) < 0.005
    assert rms(softmax_split(f, noise).model - want) < 0.005


@pytest.mark.parametrize("kind", ["plain", "contrasts"])
@pytest.mark.parametrize("classes", [2, 3, 50])
def test_zero_gp_variance_is_exactly_zero_row_by_row(classes: int, kind: str) -> None:
    f, noise = pair(classes, kind, 1.0, 1.0, rows=4)
    none = torch.tensor([0.0, 1.0, 0.0, 1.0])[:, None]
    form = None if f.form is None else f.form.map(lambda t: t * none)
    f = UtilityNormal(f.mean, f.var * none, form)
    for given in (noise, None):
        split = softmax_split(f, given)
        assert (split.model[[0, 2]] == 0).all()
        assert (split.model[[1, 3]] > 0.005).all()
    if kind == "plain" and classes > 2:  # clean_probs are then those of a softmax, to the last bit
        assert torch.equal(split.clean_probs[[0, 2]], torch.softmax(f.mean, -1)[[0, 2]])


@pytest.mark.parametrize("given", ["noise", "none"])
@pytest.mark.parametrize("kind", ["plain", "contrasts"])
def test_model_uncertainty_grows_with_the_gp_variance(kind: str, given: str) -> None:
    """Common points: monotone in every row, from where I(y; f) is above the error of the nodes."""
    values = []
    for sd in (0.1, 0.3, 0.6, 1.0, 2.0, 4.0):
        f, noise = pair(5, kind, sd, 1.0, rows=20)
        values.append(softmax_split(f, noise if given == "noise" else None).model)
    assert (torch.stack(values).diff(dim=0) > -1e-3).all()
    assert (torch.stack(values).diff(dim=0).mean(1) > 1e-3).all()


def test_small_gp_variance_leaves_little() -> None:
    """I(y; f) is about 1e-5 there."""
    for noise_sd in (0.0, 1.0, 4.0):
        f, noise = pair(5, "plain", 1e-2, noise_sd, rows=40)
        model = softmax_split(f, noise if noise_sd else None).model
        assert rms(model) < 1e-4, noise_sd


@pytest.mark.parametrize("lead", [4.0, 8.0, 12.0])
def test_certain_inputs_keep_their_order(lead: float) -> None:
    """With noise the error shrinks with I(y; f), down to 1e-6: a constant would hide it in a score."""
    f, noise = pair(10, "plain", 0.5, 0.5, rows=20)
    mean = 0.25 * f.mean
    mean[:, 0] += lead
    f = UtilityNormal(mean, f.var)
    want = nested(f, noise, 2048, 2048)
    model = softmax_split(f, noise).model
    assert 1e-7 < float(want.median()) < 0.05
    assert (model > 0).all()
    ratio = model / want
    assert float((ratio.log() - ratio.log().mean()).std()) < 0.25
    assert float(ratio.log().mean().exp()) == pytest.approx(1, abs=0.4)


def test_all_pairs_of_points_are_two_products_of_matrices() -> None:
    """p(f) for logits and noise as far apart as 30, against the softmax of every sum."""
    g = torch.Generator().manual_seed(0)
    f = 6 * torch.randn(4, 8, 6, generator=g)
    noise = UtilityNormal(torch.zeros(4, 6), torch.full((4, 6), 16.0), 4 * torch.randn(4, 6, 2, generator=g))
    for count, parts in ((512, 2), (1024, 4)):
        got = uncertainty._Noise.of(noise, count, 3).probs(f, parts)
        assert got.shape == (4, parts, 8, 6)
        draws = sample(noise, count, seed=3).double().unflatten(1, (parts, -1))
        want = torch.softmax(f.double()[:, None, :, None] + draws.unsqueeze(2), -1).mean(3)
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6)


def test_logits_that_a_product_cannot_hold_are_numbers() -> None:
    """Far beyond what float32 has an exponential for."""
    f, noise = pair(7, "plain", 200.0, 300.0, rows=6)
    split = softmax_split(UtilityNormal(50 * f.mean, f.var), noise)
    assert torch.isfinite(split.model).all()
    assert (split.model >= 0).all()


@pytest.mark.parametrize("kind", ["plain", "contrasts"])
def test_few_points_of_f_are_enough_where_the_surrogate_is_exact(kind: str) -> None:
    """Without noise p(f) is the surrogate, whose I(y; f) is known: from 16 points too."""
    f, _ = pair(10, kind, 1.0, 0.0, rows=40)
    none = UtilityNormal(torch.zeros_like(f.mean), torch.zeros_like(f.var))
    want = softmax_split(f, None).model
    draws = uncertainty._outer_draws(f, 16, 2)[0]
    probs = torch.softmax(f.mean.unsqueeze(1) + draws, -1)
    plain = entropy(probs.mean(1)) - entropy(probs).mean(1)
    assert rms(plain - want) > 0.02
    assert rms(uncertainty._noisy(f, none, 0, members=100) - want) < 0.004


def test_more_information_than_the_logarithm_of_the_number_of_points() -> None:
    """64 points alone tell at most log 64; most of 300 classes are rare among them."""
    f, _ = pair(300, "plain", 8.0, 0.0, rows=10)
    none = UtilityNormal(torch.zeros_like(f.mean), torch.zeros_like(f.var))
    want = softmax_split(f, None).model
    assert (want > math.log(64)).any()
    assert rms(uncertainty._noisy(f, none, 0, members=1) - want) < 0.05


@pytest.mark.parametrize(("parts", "gain"), [(2, 4), (4, 8)])
def test_the_bias_of_an_entropy_is_extrapolated(parts: int, gain: float) -> None:
    """Frequencies of N draws: H is too small by (K − 1)/2N and more."""
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    g = torch.Generator().manual_seed(0)
    draws = torch.multinomial(probs, 20_000 * 32, replacement=True, generator=g)
    counts = torch.nn.functional.one_hot(draws, 4).double().view(20_000, parts, -1, 4).mean(2)
    groups = (count for count in (1, 2, 4) if count <= parts)
    values = [entropy(counts.unflatten(1, (count, -1)).mean(2)).mean() for count in groups]
    bias = float(values[0] - entropy(probs))
    assert bias == pytest.approx(-3 / 64, rel=0.1)
    left = float(uncertainty._extrapolated(values) - entropy(probs))
    assert abs(left) < abs(bias) / gain


def test_total_is_data_and_model() -> None:
    """H(probs) = E_f H(y | f) + I(y; f): the data uncertainty, their difference, is that of a reference."""
    f, noise = pair(10, "plain", 1.0, 1.0)
    split = softmax_split(f, noise)
    want = nested(f, noise)
    long, _ = without_noise(add(f, noise))
    data = entropy(split.probs) - split.model
    assert rms(data - (entropy(long) - want)) < 0.006
    assert (data > -1e-6).all()
    assert (split.model <= entropy(split.probs) + 1e-3).all()


def test_the_probabilities_are_those_of_the_link() -> None:
    f, noise = pair(6, "contrasts", 1.0, 1.0, rows=5)
    split = softmax_split(f, noise, seed=4)
    probs, count = softmax_probs(add(f, noise), seed=4)
    assert torch.equal(split.probs, probs)
    assert split.num_points == count
    assert torch.equal(split.clean_probs, softmax_probs(f, seed=4)[0])
    torch.testing.assert_close(add(f, noise).covariance(), f.covariance() + noise.covariance())
    few = softmax_split(f, noise, num_samples=8, seed=4)
    assert few.num_points == 8
    assert torch.equal(few.model, split.model)  # num_samples is that of the probabilities


@pytest.mark.parametrize("sampler", ["mc", "antithetic"])
def test_other_samplers_change_only_the_probabilities(sampler: str) -> None:
    f, noise = pair(6, "plain", 1.0, 1.0, rows=5)
    quasi, other = (softmax_split(f, noise, sampler=name) for name in ("sobol", sampler))
    assert (other.probs - quasi.probs).abs().max() < 0.05
    assert not torch.equal(other.probs, quasi.probs)
    assert torch.equal(other.model, quasi.model)


@pytest.mark.parametrize("kind", ["plain", "contrasts"])
def test_rows_do_not_influence_each_other(kind: str) -> None:
    f, noise = pair(6, kind, 1.0, 1.0, rows=5)
    for given in (noise, None):
        whole = softmax_split(f, given)
        for row in range(5):
            index = slice(row, row + 1)
            alone = softmax_split(f.rows(index), None if given is None else given.rows(index))
            for got, want in zip(alone[:3], whole[:3], strict=True):
                torch.testing.assert_close(got[0], want[row], rtol=0, atol=2e-5)


@pytest.mark.parametrize("chunk", [1, 20_000])
@pytest.mark.parametrize("kind", ["plain", "contrasts"])
def test_chunks_add_up(kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    f, noise = pair(6, kind, 1.0, 1.0, rows=5)
    want = [softmax_split(f, given) for given in (noise, None)]
    monkeypatch.setattr(integration, "_CHUNK", chunk)
    monkeypatch.setattr("hetsngp.functional.sampling.CPU_CHUNK", chunk)
    for given, expected in zip((noise, None), want, strict=True):
        for got, each in zip(softmax_split(f, given)[:3], expected[:3], strict=True):
            torch.testing.assert_close(got, each, rtol=0, atol=2e-5)


@pytest.mark.parametrize("classes", [3, 100, 1000])
def test_members_share_the_outer_points(classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An M-th each, but 16 at least."""
    counts: list[int] = []
    draws = uncertainty._outer_draws
    monkeypatch.setattr(
        uncertainty, "_outer_draws", lambda f, count, seed: counts.append(count) or draws(f, count, seed)
    )
    f, noise = pair(classes, "plain", 1.0, 1.0, rows=1)
    for members in (1, 2, 4, 100):
        counts.clear()
        softmax_split(f, noise, members=members)
        assert set(counts) == {max(64 // members, 16)}


def test_the_mean_over_members_against_a_nested_reference() -> None:
    f, noise = pair(3, "plain", 1.0, 0.5, rows=10)
    each = [softmax_split(f, noise, seed=seed, members=8).model for seed in range(0, 80, 10)]
    assert rms(torch.stack(each).mean(0) - nested(f, noise)) < 0.01


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "contrasts",
        "factor",
    ],
)
def test_outer_draws_have_the_covariance_of_f(kind: str) -> None:
    """Correlated, and independent with the same variances; pairs of opposite signs."""
    f, _ = pair(4, "contrasts" if kind == "contrasts" else "plain", 1.0, 1.0, rows=2)
    if kind == "factor":
        f = UtilityNormal(f.mean, f.var, torch.randn(2, 4, 2, generator=torch.Generator().manual_seed(1)))
    correlated, independent = uncertainty._outer_draws(f, 2**13, 0)
    var = uncertainty._outer_variance(f)
    assert torch.equal(correlated[:, : 2**12], -correlated[:, 2**12 :])
    centre = torch.eye(4) - 0.25  # of contrasts: up to the direction that a softmax does not see
    want = f.covariance()
    found = correlated.mT @ correlated / 2**13
    torch.testing.assert_close(centre @ found @ centre, centre @ want @ centre, rtol=0, atol=0.05)
    alone = independent.mT @ independent / 2**13
    torch.testing.assert_close(alone, torch.diag_embed(var), rtol=0, atol=0.05)


# --- without label noise --------------------------------------------------------------------------------


@pytest.mark.parametrize("sd", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("kind", ["plain", "contrasts"])
@pytest.mark.parametrize("classes", [3, 10])
def test_split_without_noise_agrees_with_a_long_reference(classes: int, kind: str, sd: float) -> None:
    """Root mean square over 100 inputs."""
    f, _ = pair(classes, kind, sd, 0.0, rows=100)
    split = softmax_split(f, None)
    probs, given = without_noise(f)
    assert torch.equal(split.probs, split.clean_probs)
    correlated = kind == "contrasts"
    assert float((split.probs - probs).abs().max()) < (0.02 if correlated and sd > 1 else 0.005)
    largest = 0.009 if correlated and sd > 1 else 0.003  # the draws of wide correlations are few
    assert rms(split.model - (entropy(probs) - given)) < largest
    assert rms(entropy(split.probs) - split.model - given) < largest


def test_very_many_classes_far_from_the_data() -> None:
    """1,000 classes, prior variance 100: I(y; f) nears log 1000 = 6.9."""
    f = UtilityNormal(torch.zeros(1, 1000), torch.full((1, 1000), 100.0))
    draws = np.random.default_rng(0).normal(scale=10, size=(4000, 1000))
    data = float(oracles.entropy(oracles.softmax(draws)).mean())
    assert float(softmax_split(f, None).model) == pytest.approx(math.log(1000) - data, abs=0.03)


def test_no_variance_gives_exactly_no_model_uncertainty_without_noise() -> None:
    mean = 3 * torch.randn(4, 5)
    var = torch.zeros(4, 5)
    var[1] = 1.0
    split = softmax_split(UtilityNormal(mean, var), None)
    assert (split.model[[0, 2, 3]] == 0).all()
    assert split.model[1] > 0
    assert torch.equal(split.probs[[0, 2, 3]], torch.softmax(mean, -1)[[0, 2, 3]])
    assert split.num_points == 0


# --- one logit at a time --------------------------------------------------------------------------------


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
