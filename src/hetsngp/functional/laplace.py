"""Laplace posteriors of the random-feature weights β: Eq. (5) and improvements of it.

With û = Φβ̂, p = softmax(û/τ) and the prior N(0, I), the Hessian of the negative log posterior has blocks
I·[c = c′] + Σᵢ (pᵢ_c[c = c′] − pᵢ_c pᵢ_c′)/τ² · φᵢφᵢᵀ. It includes the temperature, which is part of the
likelihood of the MAP estimate β̂. Functions here are sums over data (additive, so batches and processes can
share the work) and factorisations of such sums; no matrix is inverted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def gram(phi: Tensor, weight: Tensor | None = None) -> Tensor:
    """Σ φφᵀ: (B, m) → (m, m); each example counted ``weight`` (B,) times."""
    return phi.mT @ phi if weight is None else (phi.mT * weight) @ phi


def class_weights(probs: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """w = p(1 − p)/τ², the diagonal of the softmax Hessian and all of the sigmoid's: (B, K) → (B, K)."""
    return probs * (1 - probs) / temperature**2


def class_grams(phi: Tensor, weights: Tensor, max_elements: int = 2**26) -> Tensor:
    """Σ w_c φφᵀ for every class: phi (B, m), weights (B, K) → (K, m, m). Eq. (5) without the prior."""
    per_chunk = max(1, max_elements // max(1, phi.numel()))
    pieces = [(phi.mT * w.unsqueeze(1)) @ phi for w in weights.mT.split(per_chunk)]
    return torch.cat(pieces)


def output_fisher(probs: Tensor, temperature: Tensor | float = 1.0, weight: Tensor | None = None) -> Tensor:
    """Σ (diag(p) − ppᵀ)/τ²: (B, K) → (K, K), the softmax Hessian summed over inputs, by ``weight`` (B,)."""
    counted = probs if weight is None else probs * weight.unsqueeze(1)
    return (torch.diag(counted.sum(0)) - counted.mT @ probs) / temperature**2


def precision_cholesky(sums: Tensor) -> Tensor:
    """Lower Cholesky factor of I + sums, in float64: (…, m, m)."""
    eye = torch.eye(sums.shape[-1], device=sums.device, dtype=torch.float64)
    return torch.linalg.cholesky(sums.double() + eye)


def nearest_semidefinite(sums: Tensor) -> Tensor:
    """Sums without their negative eigenvalues, which rounding errors made: (m, m) → (m, m), in float64."""
    values, vectors = torch.linalg.eigh(sums.double())
    return (vectors * values.clamp_min(0)) @ vectors.mT


def cholesky_variance(cholesky: Tensor, phi: Tensor) -> Tensor:
    """diag(Φ P⁻¹ Φᵀ) = ‖L⁻¹φ‖², P = LLᵀ: (K, m, m) or (m, m), phi (B, m) → (B, K) or (B,).

    O(B·m²) a class, and no B×B matrix.
    """
    solved = torch.linalg.solve_triangular(cholesky, phi.mT.expand(*cholesky.shape[:-2], -1, -1), upper=False)
    return solved.square().sum(-2).mT if cholesky.dim() == 3 else solved.square().sum(-2)


def inverse_triangle(cholesky: Tensor) -> Tensor:
    """L⁻¹ of lower triangles (…, m, m)."""
    eye = torch.eye(cholesky.shape[-1], device=cholesky.device, dtype=cholesky.dtype)
    return torch.linalg.solve_triangular(cholesky, eye, upper=False)


def contrast_basis(num_classes: int, like: Tensor) -> Tensor:
    """Orthonormal basis (K, K−1) of the directions that a softmax depends on, those orthogonal to 1.

    Helmert's: column j is e_j less the mean of e_j, …, e_K, normalised, and the last column has the other
    sign. It is the basis that a QR decomposition gives, in closed form.

    >>> basis = contrast_basis(4, torch.zeros(()))
    >>> torch.allclose(basis.sum(0), torch.zeros(3), atol=1e-6)
    True
    """
    kind: dict[str, Any] = {"device": like.device, "dtype": torch.float64}
    if like.device.type == "mps":
        kind["dtype"] = like.dtype
    count = torch.arange(num_classes, 1, -1, **kind)  # of e_j, …, e_K
    below = -1 / (count * (count - 1)).sqrt()
    unit = torch.eye(num_classes, num_classes - 1, **kind)
    columns = below.expand(num_classes, -1).tril(-1) - unit * ((count - 1) * below)
    return torch.cat([columns[:, :-1], -columns[:, -1:]], 1).to(like)


def kronecker_eigen(sums: Tensor, fisher: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Eigen-factors of I + Λ ⊗ G: (Q (m, m), λ (m,), U (K, K−1), γ (K−1,)), in float64.

    G = ``sums`` = ΣΦΦᵀ = QλQᵀ; Λ = ``fisher`` = UγUᵀ within the contrasts: the softmax-invariant direction 1
    changes no probability and is omitted. For a diagonal Λ (K,) U is the identity, returned as None, and γ =
    Λ: exact for the sigmoid, and without K × K matrices for very many classes.
    """
    values, vectors = torch.linalg.eigh(sums.double())
    values = values.clamp_min(0)
    fisher = fisher.double()
    if fisher.dim() == 1:
        return vectors, values, None, fisher.clamp_min(0)
    basis = contrast_basis(fisher.shape[0], fisher)
    gamma, rotation = torch.linalg.eigh(basis.mT @ fisher @ basis)
    return vectors, values, basis @ rotation, gamma.clamp_min(0)


def kronecker_scales(squares: Tensor, values: Tensor, gamma: Tensor) -> Tensor:
    """s_k = Σᵢ (Qᵀφ)²ᵢ / (1 + λᵢγ_k) from ``squares`` (Qᵀφ)²: (B, m) → (B, K′). The covariance of f is
    U diag(s) Uᵀ.
    """
    return squares @ (1 / (1 + values.unsqueeze(1) * gamma))
