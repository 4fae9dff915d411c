"""The split of uncertainty: total H(y) = data E_f[H(y | f)] + model I(y; f), in nats.

Without label noise y | f is softmax(f), and the data term comes from the integral that gives the
probabilities (:func:`hetsngp.functional.link.integrated_softmax`). With label noise y | f still averages over
it, so the data term is a nested expectation: outer points f, and inner points u | f that are the same for
every f. Common inner points make their error cancel in the difference that is the model term, so it is
smooth, never negative, and exactly zero where the GP variance is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hetsngp.functional.link import (
    CONTRAST_CLASSES,
    difference,
    in_contrasts,
    integrated_softmax,
    is_integrated,
)
from hetsngp.functional.quadrature import expected_sigmoid
from hetsngp.functional.sampling import sample
from hetsngp.types import Prediction, UtilityNormal

# Classes up to which → (outer, inner) points of the nested rule: about 10⁵ softmax terms for each example,
# for an error near a hundredth of a nat (a few times that for wide posteriors over many classes). Without
# noise the outer rule gets the inner points too.
NESTED = {8: (512, 64), 32: (256, 32), 128: (64, 32), 10**9: (32, 16)}
MOST_OUTER, LEAST_OUTER = 4096, 16
CHUNK = 2**20
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


def model_uncertainty(
    latent: UtilityNormal, noise: UtilityNormal | None, probs: Tensor, *, seed: int = 0, members: int = 1
) -> Tensor:
    """I(y; f) under the softmax link: (B,). ``latent`` is f/τ and ``noise`` u − f over τ, mean zero.

    ``probs`` (B, K) is E softmax(u/τ). K = 2 is computed by quadrature, and without noise the integral of the
    probabilities has the entropy too. Otherwise M nested points estimate
    H(mean p) − mean H(p), which cannot exceed log M; near that limit (very many classes, far from the data)
    H(probs) − mean H(p) is used instead, which has no limit but includes the error of ``probs``.
    ``members``: number of calls whose results are averaged; each uses that many times fewer outer points.
    """
    spread = latent.marginal_variance().amax(-1)
    if latent.mean.shape[-1] == 2:
        out = _two_class(latent, noise, probs)
    elif noise is None and is_integrated(latent, "sobol"):
        out = noise_free_split(latent, seed)[1]
    else:
        out = _nested(latent, noise, probs, seed, members)
    return torch.where(spread > 0, out.clamp_min(0), 0)


def noise_free_split(
    latent: UtilityNormal, seed: int, num_samples: int | None = None
) -> tuple[Tensor, Tensor]:
    """E softmax(f) (B, K) and I(y; f) (B,) of f/τ without label noise, from one integral, where
    :func:`hetsngp.functional.link.is_integrated`. Exactly zero where f has no variance.
    """
    probs, given_f = integrated_softmax(latent, seed, entropy=True, num_samples=num_samples)
    known = latent.marginal_variance().amax(-1) == 0
    return probs, torch.where(known, 0, (entropy(probs) - given_f).clamp_min(0))


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


def _nested(
    latent: UtilityNormal, noise: UtilityNormal | None, probs: Tensor, seed: int, members: int
) -> Tensor:
    batch, classes = latent.mean.shape
    outer, inner = next(points for most, points in NESTED.items() if classes <= most)
    if noise is None:
        outer, inner = min(outer * inner, MOST_OUTER), 1
    # H(mean p) is biased by about 1/outer, which averaging does not remove: a minimum number.
    outer = max(outer // members, min(outer, LEAST_OUTER))
    if classes <= CONTRAST_CLASSES:
        latent, noise = in_contrasts(latent), None if noise is None else in_contrasts(noise)
    rows = max(1, CHUNK // (outer * classes))
    out = torch.empty_like(latent.mean[:, 0])
    for start in range(0, batch, rows):
        part = slice(start, start + rows)
        f = sample(latent.rows(part), outer, seed=seed)
        shift = (
            torch.zeros_like(f[:, :1]) if noise is None else sample(noise.rows(part), inner, seed=seed + 1)
        )
        out[part] = _mutual_information(f, shift, probs[part])
    return out


def _mutual_information(f: Tensor, shift: Tensor, probs: Tensor) -> Tensor:
    """f (b, M, K), common shifts (b, N, K) → H(mean_M p) − mean_M H(p), p = mean_N softmax(f + shift)."""
    batch, outer, classes = f.shape
    # A softmax over a short last dimension uses one lane of eight: few classes go in front.
    at = 0 if classes <= CONTRAST_CLASSES else -1
    last = (lambda t: t.movedim(-1, 0).contiguous()) if at == 0 else (lambda t: t)
    mean = torch.zeros_like(f[:, 0])
    given_f = torch.zeros_like(f[:, 0, 0])
    step = max(1, CHUNK // (batch * shift.shape[1] * classes))
    for start in range(0, outer, step):
        u = last(f[:, start : start + step].unsqueeze(2) + shift.unsqueeze(1))
        p = torch.softmax(u, at).mean(2 if at == -1 else 3)
        given_f += torch.special.entr(p).sum((1, 2) if at == -1 else (0, 2)) / outer
        mean += (p.sum(1) if at == -1 else p.sum(2).mT) / outer
    nested = (entropy(mean) - given_f).clamp_min(0)
    near_ceiling = (2 * nested / math.log(outer) - 1).clamp(0, 1)
    return torch.lerp(nested, entropy(probs) - given_f, near_ceiling)


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
