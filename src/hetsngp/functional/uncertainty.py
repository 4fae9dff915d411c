"""The split of uncertainty: total H(y) = data E_f[H(y | f)] + model I(y; f), in nats.

Without label noise y | f is softmax(f), and E_f[H(y | f)] comes from the integral that gives the
probabilities (:func:`hetsngp.functional.link.integrated_softmax`). With label noise y | f is an average over
it, p(f) = E_ε softmax(f + ε), and the expectation over f keeps points: few, because only the difference to a
surrogate is sampled, softmax(log p(μ) + κ ⊙ (f − μ)), whose expectation is known. All f share the points of
the noise, whose error then cancels in I(y; f) but for a part of order 1/N, which two halves of the points
remove.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hetsngp.functional.integration import (
    COARSE_DEGREE,
    Curves,
    Grid,
    Memory,
    Rates,
    chunk_of_rows,
    probs_and_entropy,
    within_table,
)
from hetsngp.functional.link import (
    MANY_CLASSES,
    WIDE_RANK,
    correlated_draws,
    difference,
    integrated_softmax,
    num_points,
    separated,
    softmax_probs,
)
from hetsngp.functional.quadrature import expected_sigmoid
from hetsngp.functional.sampling import constant_points, sample
from hetsngp.types import Prediction, UtilityNormal, join_factors

# Points f: times the classes, and their least and largest number; points of the noise's factor, fewer from
# MANY_CLASSES on, and of all its coordinates where those are sampled. Nodes of the integral at each.
OUTER_LOGITS, FEWEST_OUTER, MOST_OUTER = 2**12, 32, 64
INNER, INNER_MANY, INNER_SAMPLED = 32, 16, 512
SPARSE = Grid(nodes=3, low=-4.0, high=1.4, steps=1, first=2.0)
# Points f that are computed together.
_TOGETHER = 16
# Nodes of the integral over one logit; the size of a logit from which its entropy is negligible (3e-7), and
# the distance from its mean, in standard deviations, from which its density is.
LOGIT_NODES, CERTAIN, FARTHEST = 48, 18.0, 7.5


def entropy(probs: Tensor) -> Tensor:
    """Entropy H of each row of probs (B, K): (B,).

    >>> entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    tensor([0.6931, 0.0000])
    """
    return torch.special.entr(probs).sum(-1) + 0.0  # −0.0 becomes 0.0


def binary_entropy(probs: Tensor) -> Tensor:
    """Sum over classes of the entropy of each yes-or-no label: (B, K) → (B,)."""
    return (torch.special.entr(probs) + torch.special.entr(1 - probs)).sum(-1) + 0.0


class Split(NamedTuple):
    """Probabilities, and the part of their entropy that is uncertainty about f."""

    probs: Tensor
    """E softmax(u): (B, K)."""
    clean_probs: Tensor
    """E softmax(f): (B, K)."""
    model: Tensor
    """I(y; f): (B,)."""
    num_points: int
    """Number of points of ``probs``."""


def softmax_split(
    latent: UtilityNormal,
    noise: UtilityNormal | None,
    *,
    num_samples: int | None = None,
    sampler: str = "sobol",
    seed: int = 0,
    members: int = 1,
    posterior: bool = True,
) -> Split:
    """Split under the softmax link. ``latent`` is f/τ and ``noise`` u − f over τ, of mean zero.

    I(y; f) is exactly zero where f has no variance; without ``posterior`` it has none anywhere. The arguments
    of the points, as of :func:`hetsngp.functional.link.softmax_probs`, are those of the probabilities.
    """
    options: dict[str, Any] = {"sampler": sampler, "seed": seed, "members": members}
    options["num_samples"] = num_samples
    given_f, count = None, 0
    if not posterior:
        clean = torch.softmax(latent.mean, -1)
    elif sampler == "sobol" and latent.mean.shape[-1] > 2 and separated(latent)[0].form is None:
        clean, given_f = integrated_softmax(latent, seed, entropy=noise is None, num_samples=num_samples)
        count = num_points(latent, num_samples, sampler)
    else:
        clean, count = softmax_probs(latent, **options)
    probs = clean
    if noise is not None:
        probs, count = softmax_probs(add(latent, noise), **options)
    if not posterior:
        model = torch.zeros_like(probs[:, 0])
    elif latent.mean.shape[-1] == 2:
        model = _two_class(latent, noise, probs)
    elif noise is not None:
        model = _noisy(latent, noise, seed, members)
    elif given_f is not None:
        model = entropy(probs) - given_f
    else:  # sampled probabilities, or the moments of a mixture
        none = UtilityNormal(torch.zeros_like(latent.mean), torch.zeros_like(latent.var))
        model = _noisy(latent, none, seed, members)
    known = latent.marginal_variance().amax(-1) == 0
    return Split(probs, clean, torch.where(known, 0, model.clamp_min(0)), count)


def add(latent: UtilityNormal, noise: UtilityNormal | None) -> UtilityNormal:
    """u = f + noise, in closed form."""
    if noise is None:
        return latent
    return UtilityNormal(latent.mean, latent.var + noise.var, join_factors(noise.form, latent.form))


# --- with label noise ------------------------------------------------------------------------------------


class _Noise:
    """p(f) = E_ε softmax(f + ε), from the same points ε for every f."""

    def __init__(self, noise: UtilityNormal, seed: int) -> None:
        form = noise.form
        self.var, self.total = noise.var, noise.marginal_variance()
        self.shifts = torch.zeros_like(noise.mean).unsqueeze(1).expand(-1, 2, -1)  # (B, N, K)
        if _is_sampled(noise):
            self.shifts = sample(noise, INNER_SAMPLED, seed=seed)
        elif form is not None:
            shifts = form.matmul(constant_points(_num_inner(noise), form.rank, seed, noise.mean))
            self.shifts = shifts.expand(noise.mean.shape[0], -1, -1)
        _, std, shrink = within_table(noise.var, noise.var)
        self.shrink = shrink.unsqueeze(-1)
        self.curves = None if _is_sampled(noise) else Curves.of(std, COARSE_DEGREE, residual=False)
        self.memory = Memory.of(noise.var)

    def halves(self, f: Tensor) -> Tensor:
        """p(f) of several f each, by each half of the points: (B, M, K) → (B, M, 2, K)."""
        count, means = f.shape[1], f.unsqueeze(2) + self.shifts.unsqueeze(1)
        if self.curves is None:
            return torch.softmax(means, -1).unflatten(2, (2, -1)).mean(3)
        means = means.flatten(1, 2).mT / self.shrink
        rates = Rates.of(means, self.curves, SPARSE, 1, self.memory, period=self.shifts.shape[1])
        return rates.means(rates.rate, 2 * count).unflatten(1, (count, 2))

    def centre(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """p(μ), and E[q(1 − q)]/(p(1 − p)), q = softmax(μ + ε): (B, K) each. The latter is the slope of
        log p_k in f_k over that of a softmax with the same probabilities.
        """
        means = mean.unsqueeze(1) + self.shifts
        if self.curves is None:
            q = torch.softmax(means, -1)
            probs, within = q.mean(1), (q - q.square()).mean(1)
        else:
            rates = Rates.of(means.mT / self.shrink, self.curves, SPARSE, 2)
            _, slope, bend = rates.log_hazard
            probs = rates.mean(rates.rate)
            within = rates.mean(rates.rate * (slope + bend / slope - rates.rate)) / self.shrink.squeeze(-1)
        info = torch.finfo(probs.dtype)
        slope = within / (probs * (1 - probs)).clamp_min(info.eps * probs + info.tiny)
        return probs.clamp_min(info.tiny), slope.clamp(0, 1)

    def mean_halves(self, mean: Tensor, var: Tensor) -> Tensor:
        """E_f p(f) for independent f_k ~ N(mean_k, var_k), by each half of the points: (B, 2, K)."""
        own = var if self.curves is None else var + self.var
        means, std, _ = within_table((mean.unsqueeze(1) + self.shifts).mT, own)
        rates = Rates.of(means, Curves.of(std, COARSE_DEGREE, residual=False), SPARSE)
        return rates.means(rates.rate, 2)


def _is_sampled(noise: UtilityNormal) -> bool:
    return noise.form is not None and noise.form.rank > WIDE_RANK


def _num_inner(noise: UtilityNormal) -> int:
    return INNER if noise.mean.shape[-1] < MANY_CLASSES else INNER_MANY


@torch.no_grad()
def _noisy(latent: UtilityNormal, noise: UtilityNormal, seed: int, members: int) -> Tensor:
    """I(y; f) = H(E_f p(f)) − E_f H(p(f)), both at the same points of the noise: (B,)."""
    batch, classes = latent.mean.shape
    outer = max(num_outer(classes) // members, FEWEST_OUTER // 2)
    if torch.compiler.is_compiling():
        return _noisy_rows(latent, _Noise(noise, seed + 1), outer, seed, _TOGETHER)
    elements = classes * (INNER_SAMPLED if _is_sampled(noise) else _num_inner(noise) * SPARSE.nodes)
    size = min(batch, chunk_of_rows(noise.var, elements))
    together = chunk_of_rows(noise.var, size * elements)
    found = []
    for start in range(0, batch, size):
        rows = slice(start, start + size)
        given = _Noise(noise.rows(rows), seed + 1)
        found.append(_noisy_rows(latent.rows(rows), given, outer, seed, together))
    return torch.cat(found)


def num_outer(num_classes: int) -> int:
    """Number of points f, a power of two.

    >>> num_outer(3), num_outer(1000)
    (64, 32)
    """
    wanted = min(max(OUTER_LOGITS // num_classes, FEWEST_OUTER), MOST_OUTER)
    return 1 << (wanted.bit_length() - 1)


def _noisy_rows(latent: UtilityNormal, given: _Noise, outer: int, seed: int, together: int) -> Tensor:
    mean = latent.mean
    correlated, independent, var = _outer_draws(latent, outer, seed)
    centre, slope = given.centre(mean)
    # Between that at the mean and that of a probit, which is nearer far from the mean.
    slope = (slope / (1 + math.pi / 8 * given.total).sqrt()).sqrt()
    surrogate = torch.softmax(centre.log().unsqueeze(1) + slope.unsqueeze(1) * independent, -1)
    _, exact = probs_and_entropy(centre.log(), slope.square() * var)
    pieces = (mean.unsqueeze(1) + correlated).split(together, 1)
    found = torch.cat([_debiased(given.halves(f)) for f in pieces], 1)
    given_f = exact + (found - entropy(surrogate)).mean(1)
    return _debiased(given.mean_halves(mean, var)) - given_f


def _debiased(halves: Tensor) -> Tensor:
    """H(p) of means over points, without its bias of order 1/N, from the means over both halves (…, 2, K)."""
    return 2 * entropy(halves.mean(-2)) - entropy(halves).mean(-1)


def _outer_draws(latent: UtilityNormal, outer: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """f − μ in antithetic pairs, with its covariance and with its variances alone: (B, M, K) each, (B, K)."""
    rest, contrasts = separated(latent)
    classes = latent.mean.shape[-1]
    # One sequence for all: two, of whatever seeds, correlate point by point.
    rank = 0 if rest.form is None else rest.form.rank
    points = constant_points(outer // 2, classes + rank, seed + 2, latent.mean)
    eps, shared = points.split([classes, rank], 1)
    if contrasts is not None and rest.form is None:
        draws, var = correlated_draws(contrasts, eps), rest.var
    else:
        var = latent.marginal_variance()
        independent = correlated = var.sqrt().unsqueeze(1) * eps
        if rest.form is not None:
            correlated = rest.var.sqrt().unsqueeze(1) * eps + rest.form.matmul(shared)
        draws = correlated, independent
    correlated, independent = (torch.cat([part, -part], 1) for part in draws)
    return correlated, independent, var


# --- one logit at a time ---------------------------------------------------------------------------------


def _two_class(latent: UtilityNormal, noise: UtilityNormal | None, probs: Tensor) -> Tensor:
    mean, var = difference(latent)
    noise_var = None if noise is None else difference(noise)[1].unsqueeze(-1)
    return sigmoid_model_uncertainty(mean.unsqueeze(-1), var.unsqueeze(-1), noise_var, probs[:, 1:])


def sigmoid_model_uncertainty(
    mean: Tensor, latent_var: Tensor, noise_var: Tensor | None, probs: Tensor
) -> Tensor:
    """Σ_c I(y_c; f_c) under the sigmoid link, by quadrature over f_c: arguments (B, K) → (B,).

    ``probs`` is E σ(u_c). A trapezoid rule, whose nodes are where f_c has a density and y_c | f_c an entropy.
    """
    std = latent_var.clamp_min(torch.finfo(mean.dtype).tiny).sqrt()
    reach = torch.full_like(mean, CERTAIN) if noise_var is None else CERTAIN + 6 * noise_var.sqrt()
    low, high = (((end - mean) / std).clamp(-FARTHEST, FARTHEST) for end in (-reach, reach))
    step = (high - low) / (LOGIT_NODES - 1)
    given_f = torch.zeros_like(mean)
    for node in torch.arange(LOGIT_NODES, device=mean.device, dtype=mean.dtype).view(-1, 1, 1).split(16):
        z = low + node * step
        f = mean + z * std
        p = torch.sigmoid(f) if noise_var is None else expected_sigmoid(f, noise_var)
        density = torch.exp(-0.5 * z.square()) * step / math.sqrt(2 * math.pi)
        given_f = given_f + (density * (torch.special.entr(p) + torch.special.entr(1 - p))).sum(0)
    total = torch.special.entr(probs) + torch.special.entr(1 - probs)
    return torch.where(latent_var > 0, (total - given_f).clamp_min(0), 0).sum(-1)


def mixture(members: Sequence[Prediction], *, sigmoid: bool) -> Prediction:
    """Prediction of the mixture of several members, with equal weights, for the same inputs.

    total = I(y; member) + mean I(y; f) + mean E[H(y | f)]. The ``member_uncertainty`` of a member that is
    itself a mixture counts as disagreement too. ``ood_score`` is the members' mean plus their disagreement:
    where it is the model uncertainty, or the entropy, of each member, it is that of the mixture.
    """
    if len(members) == 1:
        return members[0]

    def mean(name: str) -> Tensor:
        return torch.stack([getattr(member, name) for member in members]).mean(0)

    probs = mean("probs")
    total = binary_entropy(probs) if sigmoid else entropy(probs)
    between = (total - mean("total_uncertainty")).clamp_min(0)
    data = mean("data_uncertainty").minimum(total)
    model = total - data
    return Prediction(
        probs=probs,
        clean_probs=mean("clean_probs"),
        total_uncertainty=data + model,
        data_uncertainty=data,
        model_uncertainty=model,
        latent_variance=mean("latent_variance"),
        ood_score=mean("ood_score") + between,
        member_uncertainty=(between + mean("member_uncertainty")).minimum(model),
        num_points=torch.stack([member.num_points for member in members]).sum(0),
    )
