"""Label noise: the covariance it says, zero mean, any K and R."""

import pytest
import torch

from hetsngp.functional.noise import diagonal_variance, low_rank_factor, parameter_efficient_factor
from hetsngp.nn.noise import LONGEST, NOISE_TYPES
from hetsngp.types import Factor, FactorSum, LatentNormal, UtilityNormal, join_factors


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


@pytest.mark.parametrize("kind", NOISE_TYPES)
@pytest.mark.parametrize(("classes", "rank"), [(2, 1), (2, 6), (5, 3), (3, 20)])
def test_modules_make_the_covariance_of_the_paper(kind: str, classes: int, rank: int) -> None:
    """Sampled noise has mean zero and covariance VVᵀ + diag(d²), within four standard errors."""
    module = NOISE_TYPES[kind](8, classes, rank).double().eval()
    h = torch.randn(1, 8, dtype=torch.float64)
    with torch.no_grad():
        var, factor = module(h)
    u = UtilityNormal(torch.zeros_like(var), var, factor)
    cov = u.covariance()[0]
    assert torch.allclose(cov.diagonal(), u.marginal_variance()[0])
    assert (torch.linalg.eigvalsh(cov) > 0).all()
    n = 40_000
    eps_r, eps_k = torch.randn(n, rank, dtype=torch.float64), torch.randn(n, classes, dtype=torch.float64)
    draws = factor.matmul(eps_r)[0] + var.sqrt() * eps_k
    assert (draws.mean(0).abs() < 4 * (cov.diagonal() / n).sqrt()).all()
    diagonal = cov.diagonal()
    error = ((diagonal[:, None] * diagonal + cov.square()) / n).sqrt()
    assert ((draws.T @ draws / n - cov).abs() < 5 * error).all()


def test_noise_is_held_constant_beyond_the_data() -> None:
    """Far inputs are read at the edge of the data: Σ does not grow without bound along a ray."""
    module = NOISE_TYPES["low_rank"](8, 4, 2).train()
    for _ in range(20):
        module(torch.randn(64, 8))
    module.eval()
    direction = torch.randn(1, 8)
    direction = direction / direction.norm()
    centre = module.normalizer.mean
    far = module(centre + 1e3 * direction)
    farther = module(centre + 1e6 * direction)
    assert torch.allclose(far[0], farther[0], rtol=1e-4)
    assert torch.allclose(far[1].dense(), farther[1].dense(), rtol=1e-3, atol=1e-5)
    inside = module(centre + 0.9 * LONGEST * 8**0.5 * direction)
    assert not torch.allclose(inside[0], far[0], rtol=1e-4)


@pytest.mark.parametrize("kind", NOISE_TYPES)
def test_noise_does_not_depend_on_origin_and_unit_of_the_features(kind: str) -> None:
    h = torch.randn(64, 8, dtype=torch.float64)
    outputs = []
    for moved in (h, 30 * h + 7):
        torch.manual_seed(1)
        module = NOISE_TYPES[kind](8, 4, 2).double().train()
        module(moved)
        var, factor = module.eval()(moved)
        outputs.append(UtilityNormal(torch.zeros_like(var), var, factor).covariance())
    assert torch.allclose(outputs[0], outputs[1])
    assert outputs[0].std(0).max() > 1e-3  # it depends on the input


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
