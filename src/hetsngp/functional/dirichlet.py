"""Mathematics of the Posterior Network: radial flows q(z | c), and uncertainties of a Dirichlet p ~ Dir(α).

In nats, for every α ≥ 1: total H(E p) = data E[H(p)] + model I(y; p). A posterior network counts N_c·q(z | c)
observations, so α runs from one to billions, where differences of lgamma and digamma have no digits left.
Here their large parts are cancelled analytically: with ψ(x) = log x − s(x) and lgamma(x) = (x − ½) log x − x
+ ½ log 2π + m(x) the logarithms cancel, and s, m ~ 1/x remain.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# B₂ₖ/2k of the asymptotic series of ψ and lgamma; from x = 10 the first omitted term is below 1e-15.
_SERIES = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760)
_LARGE = 10.0


# --- radial flows ---------------------------------------------------------------------------------------


def radial(z: Tensor, centre: Tensor, raw_alpha: Tensor, raw_beta: Tensor) -> tuple[Tensor, Tensor]:
    """Radial layer of every class: z′ (B, K, L) and log|∂z′/∂z| = (L − 1) log(1 + βh) + log(slope) (B, K).

    z: (B, K, L), or (B, 1, L) where the classes start from the same points; centre: (K, L); raw_alpha,
    raw_beta: (K,). Below, the first class contracts, the second is the identity (β = 0), the third expands:

    >>> z, centre, raw_beta = torch.tensor([[[2.0, 0.0]]]), torch.zeros(3, 2), torch.tensor([-9.0, 0.0, 9.0])
    >>> radial(z, centre, torch.zeros(3), raw_beta)[0]
    tensor([[[1.4853, 0.0000],
             [2.0000, 0.0000],
             [8.1690, 0.0000]]])
    """
    alpha, b = F.softplus(raw_alpha), F.softplus(raw_beta)
    offset = z - centre
    # torch's gradient of the norm at zero is zero: finite, and exact for z′, whose derivative there is b/α.
    r = torch.linalg.vector_norm(offset, dim=-1)
    h = 1 / (alpha + r)
    stretch = (r + b) * h
    slope = r * h * (1 + alpha * h) + alpha * h * (b * h)
    log_det = (z.shape[-1] - 1) * stretch.log() + slope.log()
    return centre + stretch.unsqueeze(-1) * offset, log_det


def log_density(z: Tensor, centres: Tensor, raw_alphas: Tensor, raw_betas: Tensor) -> Tensor:
    """log q(z | c) = log N(z_F; 0, I) + Σ log-dets, z_F the image of z under F layers: (B, L) → (B, K).

    centres: (F, K, L); raw_alphas, raw_betas: (F, K). The layers run from data to latent, so a density costs
    one pass, O(B·F·K·L), and no inverse.

    >>> log_density(torch.zeros(1, 2), torch.ones(4, 3, 2), torch.zeros(4, 3), torch.zeros(4, 3))
    tensor([[-1.8379, -1.8379, -1.8379]])
    """
    latent = z.unsqueeze(1)
    total = z.new_full((z.shape[0], centres.shape[1]), -0.5 * z.shape[-1] * math.log(2 * math.pi))
    for centre, raw_alpha, raw_beta in zip(centres, raw_alphas, raw_betas, strict=True):
        latent, log_det = radial(latent, centre, raw_alpha, raw_beta)
        total = total + log_det
    return total - 0.5 * latent.square().sum(-1)


# --- uncertainties of a Dirichlet -----------------------------------------------------------------------


def mean(alpha: Tensor) -> Tensor:
    """p = α/α₀, α₀ = Σ α_c: (B, K) → (B, K)."""
    return alpha / alpha.sum(-1, keepdim=True)


def expected_entropy(alpha: Tensor) -> Tensor:
    """Data uncertainty E[H(p)] = ψ(α₀ + 1) − Σ p_c ψ(α_c + 1): (B, K) → (B,).

    Computed as H(E p) − I(y; p), both of which are accurate. Below: one class seen often, both seen often,
    neither seen, where part of the entropy is model uncertainty:

    >>> expected_entropy(torch.tensor([[1e8, 1.0], [1e8, 1e8], [1.0, 1.0]]))
    tensor([1.8998e-07, 6.9315e-01, 5.0000e-01])
    """
    return (mean(alpha) * _surprise(alpha)).sum(-1) - mutual_information(alpha)


def mutual_information(alpha: Tensor) -> Tensor:
    """Model uncertainty I(y; p) = H(E p) − E[H(p)]: (B, K) → (B,), ~ (K − 1)/2α₀ where α is large.

    Computed as Σ p_c (r(α_c) − r(α₀)) with r(x) = ψ(x + 1) − log x = 1/x − s(x), which decreases, so that
    every term is positive.

    >>> mutual_information(torch.tensor([[1e8, 1.0], [1e8, 1e8], [1.0, 1.0]]))
    tensor([4.2278e-09, 2.5000e-09, 1.9315e-01])
    """
    total = alpha.sum(-1, keepdim=True)
    excess = (1 / alpha - _digamma_gap(alpha)) - (1 / total - _digamma_gap(total))
    return (mean(alpha) * excess).sum(-1).clamp_min(0)


def differential_entropy(alpha: Tensor) -> Tensor:
    """Differential entropy of Dir(α): (B, K) → (B,), largest at α = 1, where it is −log (K − 1)!.

    log B(α) + (α₀ − K)ψ(α₀) − Σ (α_c − 1)ψ(α_c), which without its large parts is
    ½((K − 1) log(2π/α₀) + Σ log p_c) + Σ m(α_c) − m(α₀) + Σ (α_c − 1)s(α_c) − (α₀ − K)s(α₀).

    >>> differential_entropy(torch.tensor([[1.0, 1.0, 1.0], [1e10, 1e10, 1e10]]))
    tensor([ -0.6931, -22.9345])
    """
    classes = alpha.shape[-1]
    total = alpha.sum(-1)
    gaussian = (classes - 1) * (math.log(2 * math.pi) - total.log()) + mean(alpha).log().sum(-1)
    gamma = _lgamma_gap(alpha).sum(-1) - _lgamma_gap(total)
    digamma = ((alpha - 1) * _digamma_gap(alpha)).sum(-1) - (total - classes) * _digamma_gap(total)
    return gaussian / 2 + gamma + digamma


def uncertain_cross_entropy(alpha: Tensor, y: Tensor) -> Tensor:
    """E[−log p_y] = ψ(α₀) − ψ(α_y): alpha (B, K), labels y (B,) → (B,); of soft targets (B, K) its mean.

    >>> uncertain_cross_entropy(torch.tensor([[1.0, 2.0], [1e8, 1.0]]), torch.tensor([0, 0]))
    tensor([1.5000e+00, 1.0000e-08])
    """
    expected = _surprise(alpha) + _digamma_gap(alpha) - _digamma_gap(alpha.sum(-1, keepdim=True))
    if y.dim() == 2:
        return (y.to(expected) * expected).sum(-1)
    return expected.gather(-1, y.unsqueeze(-1)).squeeze(-1)


def latent_variance(alpha: Tensor) -> Tensor:
    """Mean variance of a logit, Σ ψ′(α_c)/K: (B, K) → (B,).

    Dir(α) is the softmax of independent u_c = log g_c, g_c ~ Gamma(α_c, 1), and Var u_c = ψ′(α_c): π²/6 for a
    class never seen, 1/α_c for one seen often.

    >>> latent_variance(torch.tensor([[1.0, 1.0], [100.0, 100.0]]))
    tensor([1.6449, 0.0101])
    """
    return torch.special.polygamma(1, alpha).mean(-1)


def _surprise(alpha: Tensor) -> Tensor:
    """−log p_c = log1p((α₀ − α_c)/α_c), accurate also where p_c rounds to one: (B, K) → (B, K)."""
    # α₀ − α_c cancels for the largest class only, for which the other classes are summed.
    top = alpha.argmax(-1, keepdim=True) == torch.arange(alpha.shape[-1], device=alpha.device)
    others = torch.where(
        top, alpha.masked_fill(top, 0).sum(-1, keepdim=True), alpha.sum(-1, keepdim=True) - alpha
    )
    return torch.log1p(others / alpha)


def _digamma_gap(x: Tensor) -> Tensor:
    """s(x) = log x − ψ(x) = 1/2x + 1/12x² − …, positive, for x ≥ 1."""
    small, inverse = x.clamp_max(_LARGE), 1 / x.clamp_min(_LARGE)
    series = inverse * (0.5 + inverse * _polynomial(inverse.square(), _SERIES))
    return torch.where(x < _LARGE, small.log() - torch.digamma(small), series)


def _lgamma_gap(x: Tensor) -> Tensor:
    """m(x) = lgamma(x) − (x − ½) log x + x − ½ log 2π = 1/12x − 1/360x³ + …, for x ≥ 1."""
    small, inverse = x.clamp_max(_LARGE), 1 / x.clamp_min(_LARGE)
    coefficients = tuple(c / (2 * k + 1) for k, c in enumerate(_SERIES))
    near = torch.lgamma(small) - (small - 0.5) * small.log() + small - 0.5 * math.log(2 * math.pi)
    return torch.where(x < _LARGE, near, inverse * _polynomial(inverse.square(), coefficients))


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Σ c_k xᵏ, by Horner's rule."""
    value = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        value = value * x + c
    return value
