"""Label noise Σ(x) = V(x)V(x)ᵀ + diag(d(x)²), Sec. 3.3: its forms as factors of a zero-mean Gaussian."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hetsngp.types import Factor, FactorSum

# As in the original code: a diagonal that cannot vanish keeps the link differentiable.
MIN_STD = 1e-3


def diagonal_variance(raw: Tensor) -> Tensor:
    """d² with d = softplus(raw) + 1e-3: (B, K) → (B, K)."""
    return (F.softplus(raw) + MIN_STD).square()


def noise_weight(variance: Tensor, contraction: Tensor) -> Tensor:
    """Factor of the noise covariance where the posterior contraction is k: (B,), (B,) → (B,).

    At most k, and the weighted variance is at most the odds k/(1 − k): noise that is wide on the data is
    still wide at a tenth of its variance, and would hide the model uncertainty far from them.
    ``variance`` is the mean variance of a logit in units of τ², the τ that the noise was learned with.

    >>> import torch
    >>> noise_weight(torch.tensor([0.5, 100.0, 100.0]), torch.tensor([0.5, 0.5, 1.0]))
    tensor([0.5000, 0.0099, 1.0000])
    """
    width = variance.clamp(1, torch.finfo(variance.dtype).max)
    return contraction / (contraction + (1 - contraction) * width)


def low_rank_factor(raw: Tensor, rank: int) -> Factor:
    """V(x) from an affine map of h: (B, K·R) → a factor (B, K, R)."""
    return Factor(raw.unflatten(-1, (-1, rank)))


def parameter_efficient_factor(v: Tensor, basis: Tensor) -> Factor:
    """V(x) = v(x)1ᵀ ⊙ V₀, kept factored: v (B, K), V₀ (K, R).

    The original code adds a bias to this product, which gives the noise a mean; here, as in the paper, u − f
    is zero-mean for every x.

    >>> import torch
    >>> f = parameter_efficient_factor(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0], [1.0]]))
    >>> f.dense()
    tensor([[[1.],
             [2.]]])
    """
    return Factor(basis, row=v)


def feature_factor(readout: Tensor, std: Tensor, row: Tensor, basis: Tensor) -> FactorSum:
    """βᵀ(v ⊙ V₀) and βᵀdiag(d) concatenated: noise on features as a factor of the logits' covariance.

    readout β: (m, M, K) of M members; std d: (B, m); row v: (B, m); basis V₀: (m, R). Factors of B·M rows.
    The second has rank m and is stored as β ⊙ d, β shared by the batch; only with several members is it
    written out.

    >>> import torch
    >>> beta = torch.tensor([[1.0, 0.0], [0.0, 2.0]]).view(2, 1, 2)
    >>> f = feature_factor(beta, torch.tensor([[0.5, 0.5]]), torch.zeros(1, 2), torch.ones(2, 1)).dense()
    >>> f @ f.mT
    tensor([[[0.2500, 0.0000],
             [0.0000, 1.0000]]])
    """
    members = readout.shape[1]
    low_rank = torch.einsum("fmk,bfr->bmkr", readout, row.unsqueeze(-1) * basis).flatten(0, 1)
    if members == 1:
        return FactorSum((Factor(low_rank), Factor(readout[:, 0].mT, column=std)))
    full = torch.einsum("fmk,bf->bmkf", readout, std).flatten(0, 1)
    return FactorSum((Factor(low_rank), Factor(full)))
