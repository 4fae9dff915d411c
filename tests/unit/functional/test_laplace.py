"""Posteriors against the Hessian of the negative log posterior, by automatic differentiation in float64."""

import pytest
import torch
from torch import Tensor

import hetsngp
from hetsngp.functional import laplace
from hetsngp.nn.backbones import ResidualMLP
from hetsngp.nn.posteriors import POSTERIOR_TYPES, KroneckerPosterior, Posterior, Statistics

N, M, K = 12, 6, 4


def problem(seed: int = 0, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Features (N, M), labels (N,), weights (M, K)."""
    g = torch.Generator().manual_seed(seed)
    phi = torch.randn(N, M, generator=g, dtype=torch.float64)
    y = torch.randint(K, (N,), generator=g)
    return phi, y, scale * torch.randn(M, K, generator=g, dtype=torch.float64)


def full_hessian(phi: Tensor, y: Tensor, beta: Tensor, temperature: float) -> Tensor:
    """∇² of −log p(y | Φβ/τ) − log N(β; 0, I): (K·M, K·M), class by class."""

    def negative_log_posterior(flat: Tensor) -> Tensor:
        u = phi @ flat.view(K, M).mT / temperature
        return torch.nn.functional.cross_entropy(u, y, reduction="sum") + 0.5 * flat.square().sum()

    return torch.func.hessian(negative_log_posterior)(beta.mT.reshape(-1))


def fitted(kind: str, phi: Tensor, beta: Tensor, temperature: float = 1.0, **options) -> Posterior:
    posterior = POSTERIOR_TYPES[kind](K, M, "softmax", **options).double()
    tau = torch.tensor(temperature, dtype=torch.float64)
    probs = torch.softmax(phi @ beta / tau, -1)
    posterior.fit(posterior.statistics(phi, probs, tau))
    return posterior


def covariance(posterior: Posterior, phi: Tensor) -> Tensor:
    """(B, K, K) dense, whatever the form."""
    var, factor = posterior.covariance(phi)
    if factor is None:
        return torch.diag_embed(var)
    dense = factor.dense()
    assert torch.allclose(var, dense.square().sum(-1))
    return dense @ dense.mT


def queries() -> Tensor:
    return torch.randn(5, M, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_exact_is_the_class_diagonal_of_the_hessian(temperature: float) -> None:
    phi, y, beta = problem()
    hessian = full_hessian(phi, y, beta, temperature).view(K, M, K, M)
    posterior = fitted("exact", phi, beta, temperature)
    x = queries()
    var, factor = posterior.covariance(x)
    assert factor is None
    for c in range(K):
        block = hessian[c, :, c]
        precision = posterior.cholesky[c] @ posterior.cholesky[c].mT
        assert torch.allclose(precision, block, atol=1e-10)
        oracle = torch.einsum("bm,mn,bn->b", x, torch.linalg.inv(block), x)
        assert torch.allclose(var[:, c], oracle, atol=1e-10)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_kronecker_is_the_inverse_of_the_full_hessian_at_beta_zero(temperature: float) -> None:
    phi, y, beta = problem(scale=0.0)
    hessian = full_hessian(phi, y, beta, temperature)
    inverse = torch.linalg.inv(hessian).view(K, M, K, M)
    x = queries()
    dense = torch.einsum("bm,cmdn,bn->bcd", x, inverse, x)
    centre = torch.eye(K, dtype=torch.float64) - 1 / K  # the softmax-invariant direction aside
    got = covariance(fitted("kronecker", phi, beta, temperature), x)
    assert torch.allclose(got, centre @ dense @ centre, atol=1e-10)
    assert (centre @ dense @ centre).abs().max() > 0.1  # the comparison is not of zeros


def test_kronecker_is_the_dense_kronecker_inverse_elsewhere() -> None:
    phi, _, beta = problem(scale=2.0)
    probs = torch.softmax(phi @ beta, -1)
    fisher = sum(torch.diag(p) - torch.outer(p, p) for p in probs) / N
    gram = sum(torch.outer(f, f) for f in phi)
    precision = torch.eye(K * M, dtype=torch.float64) + torch.kron(fisher, gram)
    inverse = torch.linalg.inv(precision).view(K, M, K, M)
    x = queries()
    dense = torch.einsum("bm,cmdn,bn->bcd", x, inverse, x)
    centre = torch.eye(K, dtype=torch.float64) - 1 / K
    assert torch.allclose(covariance(fitted("kronecker", phi, beta), x), centre @ dense @ centre, atol=1e-10)


def test_diagonal_form_is_the_limit_of_uncorrelated_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    phi, _, _ = problem()
    fisher = torch.diag(torch.tensor([0.02, 0.1, 0.2, 0.15], dtype=torch.float64))
    total = Statistics(N, laplace.gram(phi), torch.zeros(K, K, dtype=torch.float64))
    x = queries()
    monkeypatch.setattr("hetsngp.nn.posteriors.FULL_CLASSES", 1)
    diagonal = KroneckerPosterior(K, M, "softmax").double()
    assert diagonal.diagonal
    diagonal.fit(total, fisher.diagonal())
    var, factor = diagonal.covariance(x)
    assert factor is None
    precision = torch.eye(K * M, dtype=torch.float64) + torch.kron(fisher, laplace.gram(phi))
    inverse = torch.linalg.inv(precision).view(K, M, K, M)
    oracle = torch.einsum("bm,cmdn,bn->bcd", x, inverse, x)
    assert torch.allclose(torch.diag_embed(var), oracle, atol=1e-10)  # off-diagonals of the oracle are zero
    # And the full form, given the same uncorrelated Λ, agrees with it in all that a softmax sees… to the
    # extent that Λ commutes with the projection: exactly so for equal classes.
    monkeypatch.setattr("hetsngp.nn.posteriors.FULL_CLASSES", 256)
    full = KroneckerPosterior(K, M, "softmax").double()
    equal = 0.1 * torch.eye(K, dtype=torch.float64)
    full.fit(total, equal)
    vectors, values = laplace.kronecker_eigen(total.sums, equal.diagonal())[:2]
    gamma = torch.full((K,), 0.1, dtype=torch.float64)
    diagonal_of_equal = laplace.kronecker_scales((x @ vectors).square(), values, gamma)
    centre = torch.eye(K, dtype=torch.float64) - 1 / K
    assert torch.allclose(
        covariance(full, x), centre @ torch.diag_embed(diagonal_of_equal) @ centre, atol=1e-10
    )


def test_sigmoid_posteriors_are_the_exact_hessian() -> None:
    phi, _, beta = problem()
    y = torch.randint(2, (N, K), generator=torch.Generator().manual_seed(3)).double()

    def negative_log_posterior(flat: Tensor) -> Tensor:
        u = phi @ flat.view(K, M).mT
        loss = torch.nn.functional.binary_cross_entropy_with_logits(u, y, reduction="sum")
        return loss + 0.5 * flat.square().sum()

    hessian = torch.func.hessian(negative_log_posterior)(beta.mT.reshape(-1)).view(K, M, K, M)
    posterior = POSTERIOR_TYPES["exact"](K, M, "sigmoid").double()
    one = torch.ones((), dtype=torch.float64)
    posterior.fit(posterior.statistics(phi, torch.sigmoid(phi @ beta), one))
    for c in range(K):
        assert torch.allclose(posterior.cholesky[c] @ posterior.cholesky[c].mT, hessian[c, :, c], atol=1e-10)
        for d in range(K):
            if d != c:
                assert hessian[c, :, d].abs().max() < 1e-12


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sigmoid_kronecker_keeps_the_mean_output_hessian_of_each_class(temperature: float) -> None:
    phi, _, beta = problem()
    tau = torch.tensor(temperature, dtype=torch.float64)
    posterior = KroneckerPosterior(K, M, "sigmoid").double()
    parts = [
        posterior.statistics(piece, torch.sigmoid(piece @ beta / tau), tau) for piece in (phi[:5], phi[5:])
    ]
    posterior.fit(parts[0] + parts[1])
    x = queries()
    var, factor = posterior.covariance(x)
    assert factor is None  # labels of a sigmoid are independent given f
    probs = torch.sigmoid(phi @ beta / tau)
    gram = sum(torch.outer(f, f) for f in phi)
    for c in range(K):
        curvature = sum(p * (1 - p) for p in probs[:, c]) / N / temperature**2
        inverse = torch.linalg.inv(torch.eye(M, dtype=torch.float64) + curvature * gram)
        assert torch.allclose(var[:, c], torch.einsum("bm,mn,bn->b", x, inverse, x), atol=1e-10)


@pytest.mark.parametrize("kind", ["exact", "shared", "kronecker", "momentum"])
def test_scale_multiplies_the_covariance(kind: str) -> None:
    phi, _, beta = problem()
    posterior = fitted(kind, phi, beta)
    x = queries()
    before = covariance(posterior, x)
    posterior.scale.fill_(2.5)
    assert torch.allclose(covariance(posterior, x), 2.5 * before)


@pytest.mark.parametrize("classes_at_a_time", [1, 3, 100])
def test_class_grams_in_pieces(classes_at_a_time: int) -> None:
    phi, _, _ = problem()
    weights = torch.rand(N, K, dtype=torch.float64)
    got = laplace.class_grams(phi, weights, max_elements=classes_at_a_time * phi.numel())
    assert torch.allclose(got, torch.einsum("bc,bm,bn->cmn", weights, phi, phi))


@pytest.mark.parametrize("kind", ["exact", "shared", "kronecker"])
def test_any_batching_any_order_and_two_halves_give_the_whole(kind: str) -> None:
    phi, _, beta = problem()
    tau = torch.tensor(0.8, dtype=torch.float64)
    probs = torch.softmax(phi @ beta / tau, -1)
    posterior = POSTERIOR_TYPES[kind](K, M, "softmax").double()

    def of(index: Tensor) -> Statistics:
        return posterior.statistics(phi[index], probs[index], tau)

    whole = of(torch.arange(N))
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    batched = of(order[:5]) + of(order[5:6]) + of(order[6:])
    half_a, half_b = of(order[:3]) + of(order[3:6]), of(order[6:])
    x = queries()
    results = []
    for total in (whole, batched, half_b + half_a):
        posterior.fit(total)
        results.append(covariance(posterior, x))
    assert torch.allclose(results[0], results[1], atol=1e-12)
    assert torch.allclose(results[0], results[2], atol=1e-12)
    posterior.fit(half_a)
    assert not torch.allclose(
        results[0], covariance(posterior, x), atol=1e-3
    )  # half the data is not the whole


def test_shared_bounds_exact_from_below() -> None:
    for seed in range(5):
        phi, _, beta = problem(seed)
        x = queries()
        shared, _ = fitted("shared", phi, beta).covariance(x)
        exact, _ = fitted("exact", phi, beta).covariance(x)
        assert (shared <= exact + 1e-12).all()
        assert (shared < 0.9 * exact).any()
        precision = torch.eye(M, dtype=torch.float64) + laplace.gram(phi)
        assert torch.allclose(shared[:, 0], torch.einsum("bm,mn,bn->b", x, torch.linalg.inv(precision), x))


def test_sums_over_many_batches_are_in_float64() -> None:
    """Collapsed features of 400,000 examples: in float32 their sum is not positive definite."""
    g = torch.Generator().manual_seed(0)
    m, size, batches = 64, 2048, 200
    frequencies = torch.randn(m // 2, 16, generator=g) / 5.6
    posterior = POSTERIOR_TYPES["exact"](2, m, "softmax")
    tau, total, wide = torch.ones(()), None, torch.zeros(m, m, dtype=torch.float64)
    for _ in range(batches):
        angle = 0.05 * torch.randn(size, 16, generator=g) @ frequencies.mT
        phi = 10 * (2 / m) ** 0.5 * torch.cat([angle.cos(), angle.sin()], 1)
        p = 0.5 * torch.rand(size, 1, generator=g)
        piece = posterior.statistics(phi, torch.cat([p, 1 - p], 1), tau)
        total = piece if total is None else total + piece
        wide += laplace.gram(phi.double(), (p * (1 - p)).double().squeeze(1))
    assert total is not None
    posterior.fit(total)
    far = torch.randn(50, 16, generator=g) @ frequencies.mT
    query = 10 * (2 / m) ** 0.5 * torch.cat([far.cos(), far.sin()], 1)
    precision = torch.eye(m, dtype=torch.float64) + wide
    want = torch.einsum("bm,bm->b", query.double(), torch.linalg.solve(precision, query.double().mT).mT)
    torch.testing.assert_close(posterior.covariance(query)[0][:, 0].double(), want, rtol=5e-3, atol=0)


@pytest.mark.parametrize("kind", ["exact", "shared", "kronecker"])
def test_sums_in_place_are_the_sums(kind: str) -> None:
    phi, _, beta = problem()
    posterior = POSTERIOR_TYPES[kind](K, M, "softmax")
    tau, probs = torch.ones(()), torch.softmax(phi @ beta, -1).float()
    pieces = [posterior.statistics(phi[i : i + 4].float(), probs[i : i + 4], tau) for i in (0, 4, 8)]
    want = pieces[0] + pieces[1] + pieces[2]
    first = pieces[1].sums.clone()
    total = posterior.statistics(phi[:4].float(), probs[:4], tau)
    total += pieces[1]
    total += pieces[2]
    assert total.count == want.count == N
    assert total.sums.dtype == torch.float64
    assert torch.equal(total.sums, want.sums)
    assert torch.equal(total.fisher, want.fisher)
    assert torch.equal(pieces[1].sums, first)


def test_momentum_moves_only_when_told_and_tends_to_the_shared_posterior() -> None:
    phi, _, beta = problem()
    momentum = POSTERIOR_TYPES["momentum"](K, M, "softmax").double()
    for batch in phi.split(4):
        momentum.update(batch)
    x = queries()
    # While the average is still a plain mean (fewer steps than 1/(1 − momentum)) the two are the same.
    assert torch.allclose(momentum.covariance(x)[0], fitted("shared", phi, beta).covariance(x)[0], atol=1e-10)
    before = momentum.covariance(x)[0]
    momentum.covariance(phi)
    assert torch.equal(before, momentum.covariance(x)[0])
    # A stream that changes is forgotten at the stated rate.
    fast = POSTERIOR_TYPES["momentum"](K, M, "softmax", momentum=0.5).double()
    old, new = phi[:4], phi[4:8]
    for _ in range(2):
        fast.update(old)
    fast.update(new, dataset_size=100)
    oracle = 100 * (0.5 * laplace.gram(old) / 4 + 0.5 * laplace.gram(new) / 4)
    precision = torch.eye(M, dtype=torch.float64) + oracle
    factor = fast.precision_factor()
    assert torch.allclose(factor @ factor.mT, precision, atol=1e-9)


def test_momentum_starts_from_a_whole_pass_and_moves_on() -> None:
    phi, _, beta = problem()
    new = queries()
    posterior = fitted("momentum", phi, beta, momentum=0.9)
    assert torch.allclose(posterior.covariance(new)[0], fitted("shared", phi, beta).covariance(new)[0])
    posterior.update(new)
    average = 0.9 * laplace.gram(phi) / N + 0.1 * laplace.gram(new) / len(new)
    precision = torch.eye(M, dtype=torch.float64) + (N + len(new)) * average
    factor = posterior.precision_factor()
    assert torch.allclose(factor @ factor.mT, precision, atol=1e-9)


def test_update_posterior_through_the_model() -> None:
    model = hetsngp.build("sngp", ResidualMLP(2, 16, 1), 3, random_features=32, posterior="momentum")
    x = torch.randn(64, 2)
    with pytest.raises(hetsngp.PosteriorNotFittedError, match="fit_posterior"):
        model.predict(x)
    for batch in x.split(16):
        model.update_posterior(batch)
    near = model.predict(x).latent_variance
    model.update_posterior(x)
    assert (model.predict(x).latent_variance < near).all()  # more data, less variance


@pytest.mark.parametrize("num_classes", [2, 3, 10, 300])
def test_contrast_basis_is_that_of_a_qr_decomposition(num_classes: int) -> None:
    """Signs too: integration points are in its coordinates, so that predictions of 0.1 stay as they were."""
    ones, eye = torch.ones(num_classes, 1).double(), torch.eye(num_classes).double()
    oracle = torch.linalg.qr(torch.cat([ones, eye[:, :-1]], 1)).Q[:, 1:]
    basis = laplace.contrast_basis(num_classes, oracle)
    assert torch.allclose(basis, oracle, rtol=0, atol=1e-13)


def test_contrast_basis_is_orthonormal_and_blind_to_a_common_shift() -> None:
    basis = laplace.contrast_basis(7, torch.zeros((), dtype=torch.float64))
    assert torch.allclose(basis.mT @ basis, torch.eye(6, dtype=torch.float64), atol=1e-12)
    assert basis.sum(0).abs().max() < 1e-12


def test_float32_posterior_is_right_for_large_data() -> None:
    """N·a² = 2·10⁶ against a prior of 1: the sums must not lose the small directions."""
    torch.manual_seed(0)
    backbone = ResidualMLP(2, 16, 1)
    model = hetsngp.build("sngp", backbone, 3, random_features=128, amplitude=10.0)
    x, y = torch.randn(20_000, 2), torch.randint(3, (20_000,))
    loader = [(x[i : i + 500], y[i : i + 500]) for i in range(0, len(x), 500)]
    hetsngp.fit_posterior(model, loader)
    query = torch.randn(50, 2) * 4
    single = model.predict(query).latent_variance
    model.double()
    hetsngp.fit_posterior(model, [(a.double(), b) for a, b in loader])
    double = model.predict(query.double()).latent_variance
    assert torch.allclose(single.double(), double, rtol=1e-4, atol=0)  # sums in float32 would be off by 1e-3
