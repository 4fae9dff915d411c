"""Random features against the exact kernel."""

import copy
import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hetsngp
from hetsngp.functional.features import (
    clip_length,
    cosine_features,
    gaussian_frequencies,
    median_distance,
    normalize,
    orthogonal_frequencies,
    rbf_kernel,
    sincos_features,
)
from hetsngp.nn.extractor import Features
from hetsngp.nn.latent import FeatureNormalizer, Kernel, RandomFeatureGP


def points(n: int = 40, d: int = 16) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(1)) * 0.5


def kernel_error(kind: str, m: int, *, orthogonal: bool, seed: int) -> float:
    g = torch.Generator().manual_seed(seed)
    x = points()
    draw = orthogonal_frequencies if orthogonal else gaussian_frequencies
    if kind == "sincos":
        phi = sincos_features(x, draw(m // 2, x.shape[1], generator=g))
    else:
        phases = 2 * math.pi * torch.rand(m, generator=g)
        phi = cosine_features(x, draw(m, x.shape[1], generator=g), phases)
    return float((phi @ phi.mT - rbf_kernel(x, x)).square().mean().sqrt())


@pytest.mark.parametrize("kind", ["sincos", "cosine"])
@pytest.mark.parametrize("orthogonal", [True, False])
def test_features_converge_to_the_exact_kernel(kind: str, orthogonal: bool) -> None:
    errors = {
        m: sum(kernel_error(kind, m, orthogonal=orthogonal, seed=s) for s in range(8)) / 8 for m in (64, 4096)
    }
    assert errors[4096] < 0.02
    # Monte Carlo rate: 64 times the features, an eighth of the error.
    assert errors[64] / errors[4096] == pytest.approx(8, rel=0.35)


@pytest.mark.parametrize("kind", ["sincos", "cosine"])
def test_orthogonal_beats_gaussian_at_equal_m(kind: str) -> None:
    seeds = range(300)  # the phases of the cosine kind drown most of the gain
    orthogonal = torch.tensor([kernel_error(kind, 64, orthogonal=True, seed=s) for s in seeds])
    gaussian = torch.tensor([kernel_error(kind, 64, orthogonal=False, seed=s) for s in seeds])
    gap = gaussian - orthogonal
    assert gap.mean() > 4 * gap.std() / math.sqrt(len(gap))


def test_orthogonal_blocks_are_orthogonal_fresh_and_normal() -> None:
    w = orthogonal_frequencies(40, 16, generator=torch.Generator().manual_seed(0)).double()
    for start in (0, 16, 32):
        block = w[start : start + 16]
        gram = block @ block.mT
        off = gram - torch.diag(gram.diagonal())
        assert off.abs().max() < 1e-4 * gram.diagonal().max()
    # Fresh: no row of the second block is a multiple of a row of the first.
    unit = w / w.norm(dim=1, keepdim=True)
    assert (unit[:16] @ unit[16:32].mT).abs().max() < 0.95
    many = orthogonal_frequencies(16_000, 16, generator=torch.Generator().manual_seed(1))
    assert many.mean().abs() < 4 / math.sqrt(many.numel())
    assert many.square().sum(1).mean() == pytest.approx(16, rel=0.02)
    assert many.square().sum(1).var() == pytest.approx(32, rel=0.1)  # χ²₁₆, not a constant length


def test_sine_cosine_pairs_give_the_prior_variance_exactly() -> None:
    x = points(n=100).double() * 5
    gp = RandomFeatureGP(16, 3, Kernel(64, amplitude=7.0, length_scale=1.0)).double().eval()
    assert gp.features(x).shape == (100, 64)
    assert torch.allclose(gp.features(x).square().sum(-1), torch.full((100,), 49.0, dtype=torch.float64))
    cosine = (
        RandomFeatureGP(16, 3, Kernel(64, amplitude=7.0, length_scale=1.0, features="cosine")).double().eval()
    )
    assert cosine.features(x).square().sum(-1).std() > 0.1  # the paper's features do so only on average


def test_amplitude_and_length_scale_mean_what_they_say() -> None:
    torch.manual_seed(0)
    gp = RandomFeatureGP(16, 3, Kernel(8192, amplitude=3.0, length_scale=2.5)).eval()
    x = points()
    phi = gp.features(x)
    z = gp.normalizer(x)
    assert (phi @ phi.mT - rbf_kernel(z, z, amplitude=3.0, length_scale=2.5)).abs().max() < 0.4  # of 9


def test_length_scale_follows_the_median_distance_of_the_data() -> None:
    gp = RandomFeatureGP(16, 3, Kernel(64)).train()
    g = torch.Generator().manual_seed(0)
    for _ in range(50):
        gp.features(torch.randn(128, 16, generator=g) * 7 + 3)
    gp.eval()
    z = gp.normalizer(torch.randn(1000, 16, generator=g) * 7 + 3)
    oracle = torch.cdist(z, z)[torch.triu(torch.ones(1000, 1000, dtype=torch.bool), 1)].median()
    assert float(gp.length_scale) == pytest.approx(float(oracle), rel=0.02)
    assert float(median_distance(z)) == pytest.approx(float(oracle), rel=1e-4)
    before = gp.length_scale.clone()
    gp.features(torch.randn(64, 16) * 100)
    assert torch.equal(gp.length_scale, before)  # evaluation moves nothing


def test_normalisations() -> None:
    h = torch.tensor([[3.0, 4.0], [0.0, 2.0]], dtype=torch.float64)
    mean, rms = torch.tensor([0.0, 1.0], dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
    log_length, spread = torch.tensor(0.5, dtype=torch.float64), torch.tensor(0.25, dtype=torch.float64)
    by_kind = {k: normalize(h, k, mean, rms, log_length, spread) for k in ("rms", "direction", "polar")}
    assert torch.allclose(by_kind["rms"], (h - mean) / 2)
    lengths = torch.tensor([math.sqrt(18.0), 1.0], dtype=torch.float64)
    direction = math.sqrt(2) * (h - mean) / lengths[:, None]
    assert torch.allclose(by_kind["direction"], direction)
    assert torch.allclose(by_kind["polar"][:, :2], direction)
    radius = 0.3 * math.sqrt(2) * (lengths.log() - 0.5) / 0.25
    assert torch.allclose(by_kind["polar"][:, 2], radius)


def test_running_statistics_are_plain_averages_first_and_move_at_the_stated_rate_then() -> None:
    normalizer = FeatureNormalizer(3, "rms", momentum=0.5).double().train()
    first, second, third = torch.randn(3, 6, 3, dtype=torch.float64) + torch.arange(3).view(3, 1, 1)
    for h, weights in ((first, (1, 0, 0)), (second, (0.5, 0.5, 0)), (third, (0.25, 0.25, 0.5))):
        normalizer(h)
        oracle = sum(w * b.mean(0) for w, b in zip(weights, (first, second, third), strict=True))
        assert torch.allclose(normalizer.mean, oracle)


@pytest.mark.parametrize("kind", ["rms", "polar", "direction"])
def test_running_statistics_put_features_on_a_known_scale(kind: str) -> None:
    """Whatever the origin and unit of h: typical length √D, and under polar a radius of 0.3·√D."""
    normalizer = FeatureNormalizer(16, kind).train()
    g = torch.Generator().manual_seed(0)
    for _ in range(50):
        normalizer(torch.randn(128, 16, generator=g) * 7 + 3)
    z = normalizer.eval()(torch.randn(4000, 16, generator=g) * 7 + 3)
    assert float(z[:, :16].square().sum(1).mean()) == pytest.approx(16, rel=0.02)
    assert z[:, :16].mean(0).abs().max() < 0.08  # four standard errors, of these rows and of the mean
    if kind == "polar":
        assert float(z[:, 16].mean()) == pytest.approx(0, abs=0.08)
        assert float(z[:, 16].std()) == pytest.approx(0.3 * 4, rel=0.05)


def test_prior_penalty_is_minus_the_log_density_of_the_prior() -> None:
    gp = RandomFeatureGP(16, 3, Kernel(64)).double()
    log_density = torch.distributions.Normal(0, 1).log_prob
    constant = log_density(torch.zeros_like(gp.beta)).sum()
    assert float(gp.prior_penalty().detach()) == pytest.approx(
        float((constant - log_density(gp.beta).sum()).detach())
    )


def test_clipping_keeps_the_inside_and_moves_the_outside_to_the_surface() -> None:
    z = torch.tensor([[0.3, 0.4], [6.0, 8.0]])
    assert torch.allclose(clip_length(z, 1.0), torch.tensor([[0.3, 0.4], [0.6, 0.8]]))


# --- very large features --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e19, 1e30, 3e38])
@pytest.mark.parametrize("kind", ["direction", "polar", "power"])
def test_very_large_features_have_the_right_direction(kind: str, size: float) -> None:
    g = torch.Generator().manual_seed(0)
    h = torch.rand(5, 16, generator=g) * 2 - 1
    h = h / h.abs().amax(1, keepdim=True) * size
    mean = torch.rand(16, generator=g)
    one = torch.ones(())
    got = normalize(h, kind, mean, one, one, one)
    want = normalize(h.double(), kind, mean.double(), *[one.double()] * 3)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-5)
    assert got[:, :16].norm(dim=1).numpy() == pytest.approx(4, rel=1e-5)


@pytest.mark.parametrize("kind", ["direction", "polar"])
def test_very_large_features_in_float64(kind: str) -> None:
    h = torch.randn(5, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    zero, one = torch.zeros(16, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    small, large = (normalize(x, kind, zero, one, one, one) for x in (h, h * 1e300))
    torch.testing.assert_close(large[:, :16], small[:, :16])
    if kind == "polar":
        torch.testing.assert_close(
            large[:, 16] - small[:, 16], torch.full_like(h[:, 0], 1.2 * 300 * math.log(10))
        )


@pytest.mark.parametrize("kind", ["direction", "polar", "power", "rms"])
def test_ordinary_features_have_the_bits_of_the_plain_formula(kind: str) -> None:
    """Scaling, where it is needed, is by a power of two."""
    h = torch.randn(50, 16, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 8, 50)[:, None]
    mean, one = torch.full((16,), 0.25), torch.ones(())
    centred = (h.sign() * h.abs().clamp_min(1e-12).sqrt() if kind == "power" else h) - mean
    length = centred.norm(dim=1, keepdim=True)
    got = normalize(h, kind, mean, 2 * one, one, one)
    if kind == "rms":
        kept = centred.abs().amax(1) < 2**20
        assert kept.sum() > 30
        assert torch.equal(got[kept], centred[kept] / 2)
        assert got.abs().max() == 2**20  # further away nothing differs
        return
    assert torch.equal(got[:, :16], 4.0 * centred / length)
    if kind == "polar":
        assert torch.equal(got[:, 16:], 0.3 * 4 * (length.log() - 1) / 1)
    # The same formula where squares overflow: exact multiples have the same direction to the bit.
    zero = torch.zeros(16)
    assert torch.equal(
        normalize(h * 2.0**60, "direction", zero, one, one, one),
        normalize(h, "direction", zero, one, one, one),
    )


@pytest.mark.parametrize("kind", ["direction", "polar", "rms"])
def test_gradients_of_very_large_features_are_finite(kind: str) -> None:
    h = (torch.randn(4, 8, generator=torch.Generator().manual_seed(0)) * 1e30).requires_grad_()
    one = torch.ones(())
    normalize(h, kind, torch.zeros(8), one, one, one).square().mul(
        torch.arange(4.0)[:, None]
    ).sum().backward()
    assert h.grad is not None
    assert torch.isfinite(h.grad).all()


# --- precision and cost of the statistics -----------------------------------------------------------------


def test_half_precision_models_keep_statistics_in_float32() -> None:
    normalizer = FeatureNormalizer(8, "rms").train()
    h = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) * 1000
    for _ in range(5):
        normalizer(h)
    assert float(normalizer.mean_square) > 65_504  # the largest number of float16
    want = normalizer.eval()(h)
    for convert in (torch.nn.Module.half, torch.nn.Module.bfloat16):
        half = convert(copy.deepcopy(normalizer))
        assert {t.dtype for t in half.buffers()} == {torch.float32, torch.int64}
        assert torch.equal(half(h), want)
        assert torch.equal(convert(half).float()(h), want)
    # Half-precision files of release 0.1: `load` gives the buffers the precision of the file first.
    old = {
        name: t.half() if t.is_floating_point() else t
        for name, t in FeatureNormalizer(8, "rms").state_dict().items()
    }
    for buffer in normalizer.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.half()
    normalizer.load_state_dict(old)
    assert normalizer.mean_square.dtype == normalizer.mean.dtype == torch.float32


def test_running_mean_does_not_stall_in_bfloat16_training() -> None:
    """A weight of 0.01 times a small difference is below half a unit of bfloat16's last place."""
    normalizer = FeatureNormalizer(4, "rms").bfloat16().train()
    for _ in range(200):
        normalizer(torch.randn(32, 4))
    g = torch.Generator().manual_seed(0)
    for _ in range(600):
        normalizer(torch.randn(32, 4, generator=g) + 10)
    assert normalizer.mean.float().numpy() == pytest.approx(10, rel=0.02)


class Operations(TorchDispatchMode):
    """Names of the operations that are dispatched, without views."""

    VIEWS = ("detach", "slice", "view", "alias", "expand", "select", "unsqueeze", "_to_copy")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in self.VIEWS:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_training_step_computes_only_the_statistics_that_are_read() -> None:
    """Two normalisers took 96 operations, for statistics that most kinds never read."""
    h = torch.randn(32, 8, requires_grad=True)
    counts = {}
    for kind in ("rms", "direction", "noise"):
        known = "rms" if kind == "noise" else kind
        normalizer = FeatureNormalizer(8, known, measures_distance=kind != "noise").train()
        before = {name: t.clone() for name, t in normalizer.named_buffers()}
        with Operations() as operations:
            normalizer(h)
        counts[kind] = len(operations.names)
        moved = {name for name, t in normalizer.named_buffers() if not torch.equal(t, before[name])}
        read = {"rms": {"mean_square", "distance"}, "noise": {"mean_square"}, "direction": {"distance"}}
        assert moved == {"mean", "steps"} | read[kind]
    assert max(counts["rms"], counts["direction"]) + counts["noise"] <= 48
    kernel = Kernel(64, length_scale=2.0)
    assert not RandomFeatureGP(8, 3, kernel).normalizer.measures_distance
    assert RandomFeatureGP(8, 3, Kernel(64)).normalizer.measures_distance
    noise = hetsngp.build("heteroscedastic", Features(8, "mlp"), 3).head.noise
    assert not noise.normalizer.measures_distance
