"""Label noise: the covariance it says, zero mean, any K and R."""

from typing import Any

import pytest
import torch

from hetsngp.choices import NOISES
from hetsngp.functional.noise import diagonal_variance, low_rank_factor, parameter_efficient_factor
from hetsngp.nn.latent import Kernel, RandomFeatureGP
from hetsngp.nn.noise import CLASS_NOISES, LONGEST, FeatureNoise
from hetsngp.types import Factor, FactorSum, LatentNormal, UtilityNormal, join_factors


def noise_of(kind: str, classes: int, rank: int, members: int = 1) -> tuple[Any, RandomFeatureGP]:
    """A noise of 8 features, and the latent whose logits are noisy."""
    latent = RandomFeatureGP(8, classes, Kernel(random_features=16), members=members)
    if kind == "feature":
        return FeatureNoise(8, 16, rank, unit=2.5, members=members), latent
    return CLASS_NOISES[kind](8, classes, rank, members=members), latent


def test_low_rank_factor_is_class_major() -> None:
    raw = torch.arange(12.0).view(1, 12)
    dense = low_rank_factor(raw, rank=3).dense()
    assert dense.shape == (1, 4, 3)
    assert torch.equal(dense[0, 1], torch.tensor([3.0, 4.0, 5.0]))


def test_parameter_efficient_factor_is_the_paper_s_product() -> None:
    v, basis = torch.randn(5, 4), torch.randn(4, 3)
    oracle = torch.stack([(v[b][:, None] @ torch.ones(1, 3)) * basis for b in range(5)])
    assert torch.allclose(parameter_efficient_factor(v, basis).dense(), oracle)


def test_diagonal_is_positive_and_softplus() -> None:
    raw = torch.tensor([[-50.0, 0.0, 20.0]])
    oracle = torch.tensor([[1e-6, (torch.log(torch.tensor(2.0)) + 1e-3) ** 2, 20.001**2]])
    assert torch.allclose(diagonal_variance(raw), oracle, rtol=1e-4)


@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize(("classes", "rank"), [(2, 1), (2, 6), (5, 3), (3, 20)])
def test_modules_make_the_covariance_of_the_paper(kind: str, classes: int, rank: int) -> None:
    """Sampled noise has mean zero and covariance VVᵀ + diag(d²), within four standard errors."""
    module, latent = (part.double().eval() for part in noise_of(kind, classes, rank))
    h = torch.randn(1, 8, dtype=torch.float64)
    with torch.no_grad():
        var, factor = module(h, latent)
    u = UtilityNormal(torch.zeros_like(var), var, factor)
    cov = u.covariance()[0]
    assert torch.allclose(cov.diagonal(), u.marginal_variance()[0])
    assert (torch.linalg.eigvalsh(cov) > 0).all()
    n = 40_000
    assert factor.rank == (rank if kind in CLASS_NOISES else rank + 16)
    eps_r = torch.randn(n, factor.rank, dtype=torch.float64)
    eps_k = torch.randn(n, classes, dtype=torch.float64)
    draws = factor.matmul(eps_r)[0] + var.sqrt() * eps_k
    assert (draws.mean(0).abs() < 4 * (cov.diagonal() / n).sqrt()).all()
    diagonal = cov.diagonal()
    error = ((diagonal[:, None] * diagonal + cov.square()) / n).sqrt()
    assert ((draws.T @ draws / n - cov).abs() < 5 * error).all()


@pytest.mark.parametrize("kind", NOISES)
def test_noise_is_held_constant_beyond_the_data(kind: str) -> None:
    """Far inputs are read at the edge of the data: Σ does not grow without bound along a ray."""
    module, latent = noise_of(kind, 4, 2)
    for _ in range(20):
        module(torch.randn(64, 8), latent)
    module.eval()
    direction = torch.randn(1, 8)
    direction = direction / direction.norm()
    centre = module.normalizer.mean

    def covariance(distance: float) -> torch.Tensor:
        var, factor = module(centre + distance * direction, latent)
        return UtilityNormal(torch.zeros_like(var), var, factor).covariance()

    far = covariance(1e3)
    torch.testing.assert_close(covariance(1e6), far, rtol=1e-3, atol=1e-5)
    assert not torch.allclose(covariance(0.9 * LONGEST * 8**0.5), far, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", NOISES)
def test_noise_does_not_depend_on_origin_and_unit_of_the_features(kind: str) -> None:
    h = torch.randn(64, 8, dtype=torch.float64)
    outputs = []
    for moved in (h, 30 * h + 7):
        torch.manual_seed(1)
        module, latent = (part.double() for part in noise_of(kind, 4, 2))
        module(moved, latent)
        var, factor = module.eval()(moved, latent)
        outputs.append(UtilityNormal(torch.zeros_like(var), var, factor).covariance())
    assert torch.allclose(outputs[0], outputs[1])
    assert outputs[0].std(0).max() > 1e-3  # it depends on the input


@pytest.mark.parametrize("kind", NOISES)
def test_each_member_has_its_own_noise(kind: str) -> None:
    """Rows b·M + m are those of a noise and a latent with the weights of member m alone."""
    members, classes, rank = 3, 4, 2
    module, latent = (part.double().eval() for part in noise_of(kind, classes, rank, members))
    h = torch.randn(5, 8, dtype=torch.float64)
    var, factor = module(h, latent)
    together = UtilityNormal(torch.zeros_like(var), var, factor).covariance()
    assert together.shape == (5 * members, classes, classes)
    for m in range(members):
        own, one = (part.double().eval() for part in noise_of(kind, classes, rank))
        for part, of_all in ((own, module), (one, latent)):
            state = {}
            for name, value in of_all.state_dict().items():
                for dim, size in enumerate(part.state_dict()[name].shape):
                    if value.shape[dim] > size:
                        value = value.narrow(dim, m * size, size)
                state[name] = value
            part.load_state_dict(state)
        var, factor = own(h, one)
        alone = UtilityNormal(torch.zeros_like(var), var, factor).covariance()
        torch.testing.assert_close(together[m::members], alone)
    assert (together[0] - together[1]).abs().max() > 1e-3


def test_temperature_divides_the_utility_not_its_variance() -> None:
    """u/τ: mean/τ and covariance/τ², whichever form the factor has."""
    mean, var = torch.randn(3, 4), torch.rand(3, 4)
    parts = (
        Factor(torch.randn(4, 5), row=torch.randn(3, 4)),
        Factor(torch.randn(4, 3), column=torch.rand(3, 3)),
    )
    for factor in (None, torch.randn(3, 4, 2), *parts, FactorSum(parts)):
        u = UtilityNormal(mean, var, factor)
        for tau in (0.4, torch.tensor(2.5)):
            assert torch.allclose(u.tempered(tau).mean, mean / tau)
            assert torch.allclose(u.tempered(tau).covariance(), u.covariance() / tau**2, atol=1e-5)


def test_latent_variance_is_counted_once() -> None:
    """``var`` of a latent is the whole marginal variance, with a factor and without."""
    factor = Factor(torch.randn(4, 3), column=torch.rand(2, 3))
    for form, var in ((factor, factor.variance()), (None, torch.rand(2, 4))):
        latent = LatentNormal(torch.randn(2, 4), var, form)
        assert torch.allclose(latent.as_utility().marginal_variance(), var)
        assert torch.allclose(latent.covariance().diagonal(dim1=-2, dim2=-1), var)
    dense = factor.dense()
    assert torch.allclose(
        LatentNormal(torch.zeros(2, 4), factor.variance(), factor).covariance(), dense @ dense.mT
    )


def test_factor_forms_agree_with_their_dense_form() -> None:
    torch.manual_seed(0)
    parts = (
        Factor(torch.randn(3, 4, 2)),
        Factor(torch.randn(4, 5), row=torch.randn(3, 4)),
        Factor(torch.randn(4, 3), column=torch.rand(3, 3)),
    )
    whole = join_factors(*parts, None)
    assert isinstance(whole, FactorSum)
    for form in (*parts, whole):
        dense = form.dense()
        assert dense.shape == (3, 4, form.rank)
        shared, own = torch.randn(6, form.rank), torch.randn(3, 6, form.rank)
        assert torch.allclose(form.matmul(shared), shared @ dense.mT, atol=1e-5)
        assert torch.allclose(form.matmul(own), own @ dense.mT, atol=1e-5)
        assert torch.allclose(form.variance(), dense.square().sum(-1), atol=1e-5)
        x = torch.randn(3, 4)
        assert torch.allclose(form.project(x), (dense.mT @ x[..., None]).squeeze(-1), atol=1e-5)
        assert torch.allclose(form.scaled(3.0).dense(), 3 * dense)
    assert join_factors(None, None) is None
