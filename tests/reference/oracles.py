"""Slow, plain float64 oracles in NumPy: loops and tensor grids, sharing no code with the library."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np


def softmax(u: np.ndarray) -> np.ndarray:
    e = np.exp(u - u.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def entropy(p: np.ndarray) -> np.ndarray:
    return -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1)


def normal_grid(
    covariance: np.ndarray, half: float = 8.5, step: float = 0.25
) -> tuple[np.ndarray, np.ndarray]:
    """Nodes (n, K) and weights (n,) of N(0, covariance): a tensor trapezoid grid over its principal axes."""
    values, vectors = np.linalg.eigh(covariance)
    keep = values > 1e-14 * max(values.max(), 1e-300)
    axes = (vectors * np.sqrt(np.clip(values, 0, None)))[:, keep]
    z = np.arange(-half, half + step / 2, step)
    weight = np.exp(-0.5 * z**2)
    weight /= weight.sum()
    if axes.shape[1] == 0:
        return np.zeros((1, len(covariance))), np.ones(1)
    coordinates = np.array(list(itertools.product(z, repeat=axes.shape[1])))
    weights = np.array([math.prod(w) for w in itertools.product(weight, repeat=axes.shape[1])])
    return coordinates @ axes.T, weights


def contrasts(covariance: np.ndarray) -> np.ndarray:
    """The covariance with the softmax-invariant direction projected out."""
    k = len(covariance)
    centre = np.eye(k) - np.ones((k, k)) / k
    return centre @ covariance @ centre


def expected_softmax(mean: np.ndarray, covariance: np.ndarray, **grid: float) -> np.ndarray:
    """E softmax(u), u ~ N(mean, covariance): (K,). For K = 3 the grid is two-dimensional."""
    nodes, weights = normal_grid(contrasts(covariance), **grid)
    return weights @ softmax(mean + nodes)


def expected_log_softmax(mean: np.ndarray, covariance: np.ndarray, **grid: float) -> np.ndarray:
    nodes, weights = normal_grid(contrasts(covariance), **grid)
    return weights @ np.log(softmax(mean + nodes))


def data_uncertainty(mean: np.ndarray, latent: np.ndarray, noise: np.ndarray, **grid: float) -> float:
    """E_f[H(E_noise softmax(f + noise))] by two nested grids."""
    outer, outer_weights = normal_grid(contrasts(latent), **grid)
    inner, inner_weights = normal_grid(contrasts(noise), **grid)
    total = 0.0
    for f, weight in zip(outer, outer_weights, strict=True):
        total += weight * float(entropy(inner_weights @ softmax(mean + f + inner)))
    return total


def posterior_contraction(train: np.ndarray, query: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """k*ᵀ(K + diag(noise))⁻¹k*/k**, the share of the prior variance that observing ``train`` takes away: the
    dual form, from features (N, m) and (B, m), with a noise variance for each of the N."""
    gram, cross = train @ train.T + np.diag(noise), query @ train.T
    return (cross * np.linalg.solve(gram, cross.T).T).sum(1) / (query**2).sum(1)


def monte_carlo_softmax(
    mean: np.ndarray, std: np.ndarray, factor: np.ndarray, samples: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Plain Monte Carlo of E softmax(u): the mean (K,) and the standard deviation of one draw (K,)."""
    rng = np.random.default_rng(seed)
    total, square = np.zeros(len(mean)), np.zeros(len(mean))
    chunk = max(1, 2**22 // len(mean))
    done = 0
    while done < samples:
        n = min(chunk, samples - done)
        u = mean + std * rng.standard_normal((n, len(mean)))
        u = u + rng.standard_normal((n, factor.shape[1])) @ factor.T
        q = softmax(u)
        total += q.sum(0)
        square += (q**2).sum(0)
        done += n
    p = total / samples
    return p, np.sqrt(np.clip(square / samples - p**2, 0, None))


def bernoulli(count: int) -> list[Fraction]:
    """B₀ … B_count, exactly."""
    numbers = [Fraction(1)]
    for m in range(1, count + 1):
        numbers.append(-sum(math.comb(m + 1, k) * numbers[k] for k in range(m)) / (m + 1))
    return numbers


BERNOULLI = bernoulli(40)


def lgamma_and_digamma(x: Decimal) -> tuple[Decimal, Decimal]:
    """lgamma(x) and ψ(x), x ≥ 1: the recurrence up to x + 60, then Stirling's series, right to 1e-50."""
    product, harmonic = Decimal(1), Decimal(0)
    for k in range(60):
        product *= x + k
        harmonic += 1 / (x + k)
    x = x + 60
    two_pi = Decimal("6.28318530717958647692528676655900576839433879875021164194988918461563281257")
    lgamma = (x - Decimal("0.5")) * x.ln() - x + two_pi.ln() / 2
    digamma = x.ln() - 1 / (2 * x)
    for n in range(2, len(BERNOULLI), 2):
        number = Decimal(BERNOULLI[n].numerator) / BERNOULLI[n].denominator
        lgamma += number / (n * (n - 1) * x ** (n - 1))
        digamma -= number / (n * x**n)
    return lgamma - product.ln(), digamma - harmonic


def dirichlet(alpha: Sequence[float], y: int) -> dict[str, float]:
    """The textbook formulas for Dir(alpha), alpha (K,), in 60 decimals: in float64 they cancel."""
    with localcontext() as context:
        context.prec = 60
        counts = [Decimal(a) for a in alpha]
        total, classes = sum(counts), len(counts)
        lgamma, psi = zip(*(lgamma_and_digamma(a) for a in counts), strict=True)
        lgamma_total, psi_total = lgamma_and_digamma(total)
        # ψ(x + 1) = ψ(x) + 1/x
        expected = psi_total + 1 / total
        expected -= sum(a / total * (p + 1 / a) for a, p in zip(counts, psi, strict=True))
        entropy = -sum(a / total * (a / total).ln() for a in counts)
        own = sum(lgamma) - lgamma_total + (total - classes) * psi_total
        own -= sum((a - 1) * p for a, p in zip(counts, psi, strict=True))
        return {
            "expected_entropy": float(expected),
            "mutual_information": float(entropy - expected),
            "differential_entropy": float(own),
            "uncertain_cross_entropy": float(psi_total - psi[y]),
        }


def radial_flow_log_density(
    z: np.ndarray, centres: np.ndarray, raw_alphas: np.ndarray, raw_betas: np.ndarray
) -> np.ndarray:
    """log q(z | c), z (B, L), centres (F, K, L), the others (F, K) → (B, K): as the paper writes it."""
    layers, classes, dim = centres.shape
    out = np.zeros((len(z), classes))
    for b, c in itertools.product(range(len(z)), range(classes)):
        point, log_det = z[b], 0.0
        for f in range(layers):
            alpha = math.log1p(math.exp(raw_alphas[f, c]))
            beta = -alpha + math.log1p(math.exp(raw_betas[f, c]))
            r = math.sqrt(sum((point[i] - centres[f, c, i]) ** 2 for i in range(dim)))
            h = 1 / (alpha + r)
            log_det += (dim - 1) * math.log1p(beta * h) + math.log1p(beta * h - beta * h**2 * r)
            point = point + beta * h * (point - centres[f, c])
        out[b, c] = log_det - 0.5 * float(point @ point) - 0.5 * dim * math.log(2 * math.pi)
    return out
