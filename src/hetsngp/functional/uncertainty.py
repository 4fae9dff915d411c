"""The split of uncertainty: total H(y) = data E_f[H(y | f)] + model I(y; f), in nats.

Without label noise y | f is softmax(f), and E_f[H(y | f)] comes from the integral that gives the
probabilities (:func:`hetsngp.functional.link.integrated_softmax`). With label noise y | f is an average over
it, p(f) = E_ε softmax(f + ε), and I(y; f) is estimated from M points f and N points ε, all pairs of which are
two products of matrices. Only the difference to a surrogate is estimated, softmax(log p(μ) + κ ⊙ (f − μ)),
whose I(y; f) is known for independent f_k; what their correlations change takes draws of it alone. All f
share the points of the noise, whose error then cancels but for parts of order 1/N and 1/N².
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hetsngp.functional.integration import (
    chunk_of_rows,
    probs_and_entropy,
)
from hetsngp.functional.link import (
    VERY_MANY_CLASSES,
    add,
    correlated_draws,
    difference,
    integrated_softmax,
    mean_change,
    num_draws,
    num_points,
    separated,
    softmax_probs,
)
from hetsngp.functional.quadrature import expected_sigmoid
from hetsngp.functional.sampling import constant_points, sample
from hetsngp.types import Prediction, UtilityNormal

# Points f, and their least number; points of the label noise, more from VERY_MANY_CLASSES on.
OUTER, FEWEST_OUTER, INNER, INNER_MANY = 64, 16, 512, 1024
# Largest difference of the known expectation of a control to its estimate, in standard errors.
LARGEST_CHANGE = 2.0
# Without label noise I(y; f) is at least so much, or what it is to second order.
SMALL = 1e-4
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
        # The integral's error may exceed what little there is where f is nearly certain.
        least = 0.5 * ((clean - clean.square()) * latent.marginal_variance()).sum(-1)
        model = torch.maximum(entropy(probs) - given_f, least.clamp_max(SMALL))
    else:  # sampled probabilities, or the moments of a mixture
        none = UtilityNormal(torch.zeros_like(latent.mean), torch.zeros_like(latent.var))
        model = _noisy(latent, none, seed, members)
    known = latent.marginal_variance().amax(-1) == 0
    return Split(probs, clean, torch.where(known, 0, model.clamp_min(0).minimum(entropy(probs))), count)


# --- with label noise ------------------------------------------------------------------------------------


@torch.no_grad()
def _noisy(latent: UtilityNormal, noise: UtilityNormal, seed: int, members: int) -> Tensor:
    """I(y; f) = H(E_f p(f)) − E_f H(p(f)), p(f) = E_ε softmax(f + ε): (B,)."""
    batch, classes = latent.mean.shape
    outer, inner = max(OUTER // members, FEWEST_OUTER), num_inner(classes)
    if torch.compiler.is_compiling():
        return _noisy_rows(latent, noise, outer, inner, seed)
    size = chunk_of_rows(latent.mean, inner * classes)
    parts = (slice(i, i + size) for i in range(0, batch, size))
    return torch.cat([_noisy_rows(latent.rows(i), noise.rows(i), outer, inner, seed) for i in parts])


def num_inner(num_classes: int) -> int:
    """Number of points of the noise.

    >>> num_inner(3), num_inner(1000)
    (512, 1024)
    """
    return INNER if num_classes < VERY_MANY_CLASSES else INNER_MANY


def _noisy_rows(latent: UtilityNormal, noise: UtilityNormal, outer: int, inner: int, seed: int) -> Tensor:
    mean = latent.mean
    given = _Noise(noise, inner, seed + 1)
    correlated, _, var = _outer_draws(latent, outer, seed + 2)
    centre, slope = given.centre(mean)
    # Between that at the mean and that of a probit, which is nearer far from the mean.
    slope = (slope / (1 + math.pi / 8 * noise.marginal_variance()).sqrt()).sqrt()
    start = centre.log()
    surrogate = torch.softmax(start.unsqueeze(1) + slope.unsqueeze(1) * correlated, -1)
    found = _Nested.of(given.probs(mean.unsqueeze(1) + correlated))
    control = _Nested.of(surrogate.unsqueeze(2))
    probs, given_f = probs_and_entropy(start, slope.square() * var)
    if latent.form is not None:
        first, second, _ = _outer_draws(latent, num_draws(mean.shape[-1]), seed + 2)
        scale = slope.unsqueeze(1)
        change, more = mean_change(start.unsqueeze(1), scale * first, scale * second, entropy=True)
        probs, given_f = (probs + change).clamp_min(0), given_f + more
    change = entropy(probs) - given_f - control.information
    # The integral's error does not shrink with I(y; f), as that of the points does.
    limit = LARGEST_CHANGE * control.standard_error
    return found.information + found.slope(control) * change.clamp(-limit, limit)


class _Noise:
    """p(f) = E_ε softmax(f + ε) at the same points ε for every f.

    e^{f + ε} is a product, so that for M points f and N points ε the sums over classes, and those over ε of
    e^ε over them, are products of matrices.
    """

    def __init__(self, noise: UtilityNormal, count: int, seed: int) -> None:
        parts = 2 if count == INNER else 4
        self.exp = _exp(sample(noise, count, seed=seed)).unflatten(1, (parts, -1))  # (B, parts, n, K)

    def probs(self, f: Tensor) -> Tensor:
        """p(f) by each part of the points: (B, M, K) → (B, M, parts, K)."""
        exp = _exp(f).unsqueeze(1)
        share = (exp @ self.exp.mT).reciprocal_()  # (B, parts, M, n)
        return ((share @ self.exp) * exp / self.exp.shape[2]).transpose(1, 2)

    def centre(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """p(μ), and E[q(1 − q)]/(p(1 − p)), q = softmax(μ + ε): (B, K) each. The latter is the slope of
        log p_k in f_k over that of a softmax with the same probabilities.
        """
        exp, noise = _exp(mean).unsqueeze(1), self.exp.flatten(1, 2)
        share = (exp @ noise.mT).reciprocal_()  # (B, 1, N)
        probs = (share @ noise * exp).squeeze(1) / noise.shape[1]
        square = (share.square() @ noise.square() * exp.square()).squeeze(1) / noise.shape[1]
        info = torch.finfo(probs.dtype)
        slope = (probs - square) / (probs * (1 - probs)).clamp_min(info.eps * probs + info.tiny)
        return probs.clamp_min(info.tiny), slope.clamp(0, 1)


def _exp(x: Tensor) -> Tensor:
    """e^x over the largest of its row, but so large that a product of two, and one over it, is a number."""
    return (x - x.amax(-1, keepdim=True)).clamp_(0.45 * math.log(torch.finfo(x.dtype).tiny)).exp_()


class _Nested(NamedTuple):
    """Estimate of I(y; f) from p(f) at M points f, in its second half the antithetic ones of the first."""

    information: Tensor
    """(B,)."""
    divergence: Tensor
    """KL divergence of p(f) from their mean, of each antithetic pair: (B, M/2)."""

    @staticmethod
    def of(probs: Tensor) -> _Nested:
        """Estimate from probabilities by each part of the points of the noise, (B, M, parts, K).

        The entropy of a mean is too small by a part of order 1/M, which the means of two halves tell.
        """
        given_f = _debiased(probs)
        halves = probs.unflatten(1, (2, 2, -1)).mean((1, 3))  # (B, 2, parts, K)
        total = 2 * _debiased(halves.mean(1)) - _debiased(halves).mean(1)
        means = probs.mean(2)
        log_mean = means.mean(1).clamp_min(torch.finfo(probs.dtype).tiny).log()
        divergence = -(means @ log_mean.unsqueeze(-1)).squeeze(-1) - given_f
        return _Nested(total - given_f.mean(1), divergence.unflatten(1, (2, -1)).mean(1))

    @property
    def standard_error(self) -> Tensor:
        """Standard error of the mean divergence, as if points were independent: (B,)."""
        return self.divergence.std(1) / math.sqrt(self.divergence.shape[1])

    def slope(self, control: _Nested) -> Tensor:
        """Regression of the divergences on those of a control: (B,)."""
        x = control.divergence - control.divergence.mean(1, keepdim=True)
        slope = (x * self.divergence).sum(1) / x.square().sum(1).clamp_min(torch.finfo(x.dtype).tiny)
        return slope.clamp(0, 2)


def _debiased(parts: Tensor) -> Tensor:
    """H of the mean of probabilities by each part of N points, (…, parts, K) → (…): extrapolated from the
    means over all, halves and quarters of the points, as far as there are parts, to N → ∞.
    """
    counts = [count for count in (1, 2, 4) if count <= parts.shape[-2]]
    values = [entropy(parts.unflatten(-2, (count, -1)).mean(-2)).mean(-1) for count in counts]
    for order in range(1, len(counts)):
        values = [(2**order * more - less) / (2**order - 1) for more, less in itertools.pairwise(values)]
    return values[0]


def _outer_draws(latent: UtilityNormal, outer: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """f − μ in antithetic pairs, with its covariance and with its variances alone: (B, M, K) each, (B, K)."""
    rest, contrasts = separated(latent)
    classes = latent.mean.shape[-1]
    # One sequence for all: two, of whatever seeds, correlate point by point.
    rank = 0 if rest.form is None else rest.form.rank
    points = constant_points(outer // 2, classes + rank, seed, latent.mean)
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
