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

from hetsngp.functional.integration import probs_and_entropy, scratch
from hetsngp.functional.link import (
    VERY_MANY_CLASSES,
    add,
    correlated_draws,
    difference,
    example_chunks,
    half_spread,
    integrated_softmax,
    is_sampled,
    mean_changes,
    num_draws,
    num_points,
    separated,
    separated_forms,
    softmax_probs,
)
from hetsngp.functional.quadrature import expected_sigmoid
from hetsngp.functional.sampling import constant_points, sample
from hetsngp.types import Prediction, UtilityNormal

# Points f, and their least number; points of the label noise, more from VERY_MANY_CLASSES on and for a factor
# of many columns, and the parts of them from which their errors are extrapolated.
OUTER, FEWEST_OUTER = 64, 16
INNER, INNER_MANY, INNER_WIDE, PARTS, PARTS_MANY = 512, 1024, 2048, 2, 4
# With more parts than two, every so-many-th point f tells how much larger the entropy by all points of the
# noise is than that by a part of them.
SOME = 4
# The surrogate's p(μ) takes so many times fewer points. Chunks are so many times larger than elsewhere: the
# host launches operations on small ones more slowly than they run.
CENTRE, CHUNKS = 4, 4
# Largest correction of the mean of p(f) over the points f: where I(y; f) is near the logarithm of their
# number, or above it, most classes are rare among them.
LARGEST_RATIO = 1e4
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
    # A probability that is rounded to just above one would have a negative entropy; + 0.0: −0.0 becomes 0.0.
    return torch.special.entr(probs).sum(-1).clamp_min(0) + 0.0


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
    elif sampler == "sobol" and latent.mean.shape[-1] > 2 and separated_forms(latent)[0] is None:
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
    classes = latent.mean.shape[-1]
    outer, inner = max(OUTER // members, FEWEST_OUTER), num_inner(classes, wide=is_sampled(noise, "sobol"))
    surrogate = _Surrogate.of(latent, noise, inner // CENTRE, seed)
    pieces = []
    for rows in example_chunks(latent.mean, inner, CHUNKS):
        f, own = latent.rows(rows), surrogate.rows(rows)
        draws = _outer_draws(f, outer, seed + 2)[0]
        given = _Noise.of(noise.rows(rows), inner, seed + 1)
        parts = PARTS if classes < VERY_MANY_CLASSES else PARTS_MANY
        pieces.append(own.information(draws, given.probs(f.mean.unsqueeze(1) + draws, parts)))
    return torch.cat(pieces)


def num_inner(num_classes: int, *, wide: bool = False) -> int:
    """Number of points of the noise; ``wide``: its factor has many columns, as that of noise on features.

    >>> num_inner(3), num_inner(1000), num_inner(1000, wide=True)
    (512, 1024, 2048)
    """
    if num_classes < VERY_MANY_CLASSES:
        return INNER
    return INNER_WIDE if wide else INNER_MANY


class _Surrogate(NamedTuple):
    """Surrogate of p(f), s(f) = softmax(log p(μ) + κ ⊙ (f − μ)), and its known expectations."""

    start: Tensor
    """log p(μ): (B, K)."""
    slope: Tensor
    """κ: (B, K)."""
    probs: Tensor
    """E s(f): (B, K)."""
    entropy: Tensor
    """E H(s(f)): (B,)."""

    @staticmethod
    def of(latent: UtilityNormal, noise: UtilityNormal, count: int, seed: int) -> _Surrogate:
        """Surrogate whose p(μ) is a mean over ``count`` points of the noise."""
        mean, found = latent.mean, []
        for rows in example_chunks(mean, count):
            found.append(_Noise.of(noise.rows(rows), count, seed + 1).centre(mean[rows]))
        centre, slope = (torch.cat(each) for each in zip(*found, strict=True))
        # Between that at the mean and that of a probit, which is nearer far from the mean.
        slope = (slope / (1 + math.pi / 8 * noise.marginal_variance()).sqrt()).sqrt()
        start, draws = centre.log(), num_draws(mean.shape[-1])
        var = _outer_variance(latent)
        probs, given_f = probs_and_entropy(start, slope.square() * var)
        if latent.form is None:
            return _Surrogate(start, slope, probs, given_f)
        changes = []
        centre = torch.softmax(start, -1)
        known = half_spread(latent, centre, slope) - half_spread(UtilityNormal(mean, var), centre, slope)
        for rows in example_chunks(mean, draws):
            scale = slope[rows].unsqueeze(1)
            first, second = (scale * each for each in _outer_draws(latent.rows(rows), draws, seed + 2))
            changes.append(mean_changes(start[rows], first, second, probs[rows], known[rows]))
        change, more = (torch.cat(each) for each in zip(*changes, strict=True))
        return _Surrogate(start, slope, (probs + change).clamp_min(0), given_f + more)

    def rows(self, index: slice) -> _Surrogate:
        """Surrogates of some rows of the batch."""
        return _Surrogate(*(part[index] for part in self))

    def information(self, draws: Tensor, probs: Tensor) -> Tensor:
        """I(y; f) from f − μ (B, M, K), in its second half the antithetic ones of the first, and p(f) by each
        part of the points of the noise (B, parts, M, K): (B,).

        For any q, I(y; f) = E KL(p(f) ‖ q) − KL(E p(f) ‖ q). q is the mean of p(f) over the points, times
        what the mean of the surrogate has to be multiplied by to be its expectation: so near to E p(f) that
        the second term is negligible. The first has KL(s(f) ‖ q), of known expectation, as control variate.
        """
        tiny = torch.finfo(probs.dtype).tiny
        surrogate = torch.softmax(self.start.unsqueeze(1) + self.slope.unsqueeze(1) * draws, -1)
        mean, entropies = surrogate.mean(1), _entropy(surrogate)
        ratio = (self.probs / mean.clamp_min(tiny)).clamp(1 / LARGEST_RATIO, LARGEST_RATIO)
        change = self.probs - mean
        every = 1 if probs.shape[1] <= PARTS else SOME
        whole, of_parts, some = probs.mean(1), probs.mean(2), probs[:, :, ::every]
        given_f = _entropy(whole)  # (B, M)
        values = []
        for count in (count for count in (1, 2, 4) if count <= probs.shape[1]):
            means = of_parts.unflatten(1, (count, -1)).mean(2)  # (B, count, K)
            q = means * ratio.unsqueeze(1)
            log_q = (q / q.sum(-1, keepdim=True)).clamp_min(tiny).log()
            value = -given_f.mean(1, keepdim=True) - (means * log_q).sum(-1)
            if count == 1:
                weight, limit = _regression(surrogate, entropies, whole, given_f, log_q[:, 0])
            else:
                of_some = _entropy(some.unflatten(1, (count, -1)).mean(2))  # (B, count, M / every)
                value = value - (of_some - given_f[:, None, ::every]).mean(2)
            control = (entropies.mean(1) - self.entropy).unsqueeze(1) - (log_q @ change.unsqueeze(-1))[..., 0]
            # The integral's error does not shrink with I(y; f), as that of the points does.
            values.append((value + weight * control.clamp(-limit, limit)).mean(1))
        return _extrapolated(values)


def _regression(
    surrogate: Tensor, surrogate_entropy: Tensor, probs: Tensor, entropies: Tensor, log_q: Tensor
) -> tuple[Tensor, Tensor]:
    """Regression of KL(p(f) ‖ q) on KL(s(f) ‖ q) over antithetic pairs of points, and the largest change of
    the mean of the latter: (B, 1) each. Probabilities (B, M, K), entropies (B, M), log q (B, K).
    """
    pairs = []
    for p, of_p in ((surrogate, surrogate_entropy), (probs, entropies)):
        divergence = -of_p - (p @ log_q.unsqueeze(-1)).squeeze(-1)
        pairs.append(divergence.unflatten(1, (2, -1)).mean(1))
    x = pairs[0] - pairs[0].mean(1, keepdim=True)
    square = x.square().sum(1, keepdim=True)
    slope = (x * pairs[1]).sum(1, keepdim=True) / square.clamp_min(torch.finfo(x.dtype).tiny)
    limit = LARGEST_CHANGE * (square / (x.shape[1] - 1) / x.shape[1]).sqrt()
    return slope.clamp(0, 2), limit


def _extrapolated(values: list[Tensor]) -> Tensor:
    """Limit N → ∞ of values from N points, and of the means of those from N/2 and N/4."""
    for order in range(1, len(values)):
        values = [(2**order * more - less) / (2**order - 1) for more, less in itertools.pairwise(values)]
    return values[0]


def _entropy(probs: Tensor) -> Tensor:
    """Entropies of positive probabilities, (…, K) → (…): in half the time of :func:`entropy`."""
    tiny = torch.finfo(probs.dtype).tiny
    return -probs.add(tiny).log_().mul_(probs).sum(-1)


class _Noise(NamedTuple):
    """p(f) = E_ε softmax(f + ε) at the same points ε for every f.

    e^{f + ε} is a product, so that for M points f and N points ε the sums over classes, and those over ε of
    e^ε over them, are products of matrices.
    """

    exp: Tensor
    """e^ε but for a factor of each point: (B, N, K). On a CPU, until the next noise is made."""

    @staticmethod
    def of(noise: UtilityNormal, count: int, seed: int) -> _Noise:
        """Noise at ``count`` points."""
        batch, classes = noise.mean.shape
        out = scratch(noise.mean, "noise", (batch, count, classes))
        return _Noise(_exp_(sample(noise, count, seed=seed, out=out)))

    def probs(self, f: Tensor, parts: int) -> Tensor:
        """p(f) by each part of the points: (B, M, K) → (B, parts, M, K)."""
        exp, noise = _exp_(f.clone()).unsqueeze(1), self.exp.unflatten(1, (parts, -1))
        share = (exp @ noise.mT).reciprocal_()  # (B, parts, M, n)
        return (share @ noise).mul_(exp / noise.shape[2])

    def centre(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """p(μ), and E[q(1 − q)]/(p(1 − p)), q = softmax(μ + ε): (B, K) each. The latter is the slope of
        log p_k in f_k over that of a softmax with the same probabilities. Overwrites the noise.
        """
        exp, noise = _exp_(mean.clone()).unsqueeze(1), self.exp
        share = (exp @ noise.mT).reciprocal_()  # (B, 1, N)
        probs = (share @ noise * exp).squeeze(1) / noise.shape[1]
        square = (share.square() @ noise.square_() * exp.square()).squeeze(1) / noise.shape[1]
        info = torch.finfo(probs.dtype)
        slope = (probs - square) / (probs * (1 - probs)).clamp_min(info.eps * probs + info.tiny)
        return probs.clamp_min(info.tiny), slope.clamp(0, 1)


def _exp_(x: Tensor) -> Tensor:
    """e^x over the largest of its row, but so large that a product of two, and one over it, is a number;
    in place.
    """
    return x.sub_(x.amax(-1, keepdim=True)).clamp_(0.45 * math.log(torch.finfo(x.dtype).tiny)).exp_()


def _outer_variance(latent: UtilityNormal) -> Tensor:
    """Variances of the independent draws of :func:`_outer_draws`: (B, K)."""
    rest, contrasts = separated_forms(latent)
    if contrasts is not None and rest is None:
        return separated(latent)[0].var
    return latent.marginal_variance()


def _outer_draws(latent: UtilityNormal, outer: int, seed: int) -> tuple[Tensor, Tensor]:
    """f − μ in antithetic pairs, with its covariance and with its variances alone: (B, M, K) each."""
    form, contrasts = separated_forms(latent)
    classes = latent.mean.shape[-1]
    # One sequence for all: two, of whatever seeds, correlate point by point.
    rank = 0 if form is None else form.rank
    points = constant_points(outer // 2, classes + rank, seed, latent.mean)
    eps, shared = points.split([classes, rank], 1)
    if contrasts is not None and form is None:
        draws = correlated_draws(contrasts, eps)
    else:
        independent = correlated = latent.marginal_variance().sqrt().unsqueeze(1) * eps
        if form is not None:
            correlated = separated(latent)[0].var.sqrt().unsqueeze(1) * eps + form.matmul(shared)
        draws = correlated, independent
    correlated, independent = (torch.cat([part, -part], 1) for part in draws)
    return correlated, independent


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
