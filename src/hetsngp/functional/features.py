"""Random Fourier features of the RBF kernel k(h, h′) = a²·exp(−‖h − h′‖²/(2ℓ²)), and normalisation of h.

The paper prints the kernel without its minus sign and scales it as ‖·‖²/λ; here the length scale ℓ has the
units of h and the amplitude a is the prior standard deviation of a logit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Weight of the standardised log length against the direction (√D long) under "polar".
POLAR_WEIGHT = 0.3
# Largest coordinate under "rms", of typical size one: further away nothing differs, and a product with
# frequencies stays finite.
FURTHEST = 2.0**20
# Fewest rows of a kernel matrix whose largest components are found by subspace iteration, the largest share
# of them, and the number of steps after the first columns.
ITERATED_ROWS, ITERATED_SHARE, SUBSPACE_STEPS = 1024, 0.7, 1


def rbf_kernel(x: Tensor, y: Tensor, amplitude: float = 1.0, length_scale: float | Tensor = 1.0) -> Tensor:
    """The exact kernel: x (N, D), y (M, D) → (N, M)."""
    # The same formula for any number of examples, so that a value does not depend on its batch.
    distance = torch.cdist(x, y, compute_mode="use_mm_for_euclid_dist")
    return amplitude**2 * torch.exp(-distance.square() / (2 * length_scale**2))


def gaussian_frequencies(num: int, dim: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Independent rows W ~ N(0, I): (num, dim)."""
    return torch.randn(num, dim, generator=generator)


def orthogonal_frequencies(num: int, dim: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Rows with the law of N(0, I), orthogonal within fresh blocks of ``dim``: (num, dim).

    Orthogonal random features (Yu et al. 2016) have lower variance than independent ones. The original code
    repeated one block for num > dim, which adds no information; here each block is drawn anew.
    """
    blocks = []
    for start in range(0, num, dim):
        rows = min(dim, num - start)
        q, r = torch.linalg.qr(torch.randn(dim, dim, generator=generator))
        q = q * r.diagonal().sign()  # uniform over the orthogonal group
        length = torch.randn(rows, dim, generator=generator).norm(dim=1, keepdim=True)
        blocks.append(q[:rows] * length)
    return torch.cat(blocks)


def cosine_features(h: Tensor, frequencies: Tensor, phases: Tensor) -> Tensor:
    """The paper's Φ = √(2/m)·cos(Wh + b): h (B, D), W (m, D), b (m,) → (B, m); E ΦΦ′ᵀ is the kernel."""
    return math.sqrt(2 / frequencies.shape[0]) * torch.cos(h @ frequencies.mT + phases)


def sincos_features(h: Tensor, frequencies: Tensor) -> Tensor:
    """Φ = √(2/m)·[cos Wh, sin Wh], W (m/2, D) → (B, m). ‖Φ‖ = 1, so the prior variance is exact.

    >>> phi = sincos_features(torch.randn(4, 3), torch.randn(8, 3))
    >>> torch.allclose(phi.square().sum(-1), torch.ones(4))
    True
    """
    angle = h @ frequencies.mT
    return math.sqrt(1 / frequencies.shape[0]) * torch.cat([torch.cos(angle), torch.sin(angle)], dim=-1)


def kernel_components(gram: Tensor, num: int, smallest: float = 1e-12) -> Tensor:
    """U/√λ of the ``num`` largest eigenvalues of a kernel matrix (n, n): (n, num), zero if there are fewer.

    With k (B, n) the kernel between other points and those n, kU/√λ are features whose inner products are the
    kernel's, up to the remaining components (Nyström). Components with λ ≤ ``smallest`` are zero, since 1/√λ
    multiplies the rounding errors of k.

    >>> gram = rbf_kernel(torch.arange(3.0).double()[:, None], torch.arange(3.0).double()[:, None])
    >>> phi = gram @ kernel_components(gram, 5)
    >>> torch.allclose(phi @ phi.mT, gram)
    True
    """
    values, vectors = _largest_components(gram, num)
    scaled = torch.where(values > smallest, vectors / values.clamp_min(smallest).sqrt(), 0.0)
    return torch.nn.functional.pad(scaled, (0, num - scaled.shape[1]))


def _largest_components(gram: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """About the ``num`` largest eigenvalues of a kernel matrix (n, n), from the largest, and their vectors.

    Of large matrices by subspace iteration from the first columns: a third of the time. Components about as
    small as those that are left out mix with them; the features are a projection of the kernel all the same.
    """
    if len(gram) < ITERATED_ROWS or num > ITERATED_SHARE * len(gram):
        values, vectors = torch.linalg.eigh(gram)
        return values.flip(0)[:num], vectors.flip(1)[:, :num]
    basis, single = gram[:, :num].float(), gram.float()
    for _ in range(SUBSPACE_STEPS):  # of whatever precision the basis is, the projection on it is exact
        basis = single @ torch.linalg.qr(basis)[0]
    basis = torch.linalg.qr(basis)[0].to(gram)
    values, rotation = torch.linalg.eigh(basis.mT @ (gram @ basis))
    return values.flip(0), (basis @ rotation).flip(1)


def signed_root(h: Tensor) -> Tensor:
    """sign(h)·√|h|: pooled activations are heavy-tailed, and large ones would dominate every distance."""
    return h.sign() * h.abs().clamp_min(1e-12).sqrt()  # the slope of the root at zero is infinite


def median_distance(h: Tensor) -> Tensor:
    """Median distance between distinct rows of h (N, D), the usual length scale: a scalar, or NaN."""
    # Zeros, which are of equal rows, become NaN and are not counted.
    return torch.nn.functional.threshold(torch.pdist(h), 0.0, torch.nan).nanmedian()


def normalize(
    h: Tensor, kind: str, mean: Tensor, rms: Tensor, log_length: Tensor, log_spread: Tensor
) -> Tensor:
    """Normalised features of h (B, D), by the running statistics of the training features.

    ``direction``: √D·(h − μ)/‖h − μ‖, (B, D); length is dropped, because out-of-distribution images have
    short features. ``polar``: the direction and 0.3·√D·(log‖h − μ‖ − mean)/std as one more coordinate, (B,
    D+1); far inputs stay far. ``rms``: (h − μ)/rms with one scale for all coordinates, (B, D); a
    distance-preserving network keeps its geometry, up to 2²⁰ in a coordinate. ``power``: the direction of the
    signed square roots, μ being their mean, (B, D); for frozen features, since near zero the root is steep.
    All have typical length √D, and are finite for any finite h − μ.
    """
    centred = (signed_root(h) if kind == "power" else h) - mean
    if kind == "rms":
        return (centred / rms).clamp(-FURTHEST, FURTHEST)
    root = math.sqrt(h.shape[-1])
    scale = _norm_scale(centred)
    centred = centred * scale
    length = centred.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(h.dtype).tiny ** 0.5)
    direction = root * centred / length
    if kind in ("direction", "power"):
        return direction
    radius = (length.log() - scale.log() - log_length) / log_spread
    return torch.cat([direction, POLAR_WEIGHT * root * radius], dim=-1)


@torch.no_grad()
def _norm_scale(x: Tensor) -> Tensor:
    """Factor with which the squares of a row neither overflow nor lose bits: (B, D) → (B, 1).

    One, or a power of two where a value is very large, so that the scaled row has the same bits.
    """
    bits = math.frexp(torch.finfo(x.dtype).max)[1]  # 128 in float32: large is 2⁴⁸, times 2⁻⁸⁰
    largest = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True)
    small = x.new_full((), 2.0 ** (-5 * bits // 8))  # not a number, which would be of float32
    return torch.where(largest > 2.0 ** (3 * bits // 8), small, 1.0)


def clip_length(z: Tensor, longest: float) -> Tensor:
    """z · min(1, longest/‖z‖) by row: points outside the ball are projected onto its surface."""
    return z * (longest / z.norm(dim=-1, keepdim=True).clamp_min(longest))
