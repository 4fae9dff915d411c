"""What held-out data decide: the temperature, the output Hessian, and how far to trust the posterior."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hetsngp.functional import link
from hetsngp.model import Classifier
from hetsngp.nn.heads import EVAL_POINTS
from hetsngp.nn.latent import RandomFeatureGP
from hetsngp.nn.posteriors import KroneckerPosterior
from hetsngp.types import UtilityNormal

# Posterior scales tried: half decades, from "all but off" to the posterior's own largest.
SMALLEST_SCALE, SCALES_PER_DECADE = 1e-3, 2
# The temperature is searched within this factor of the one it was trained with.
TEMPERATURE_RANGE = 10.0
CALIBRATION_ROWS = 512


@dataclass(frozen=True)
class HeldOut:
    """Features and labels of the held-out data, so that the backbone sees them once."""

    h: Tensor
    y: Tensor

    @functools.cached_property
    def keys(self) -> Tensor:
        """One whole number a row, to recognise it by: (n,)."""
        return row_keys(self.h, self._unit)

    @functools.cached_property
    def _unit(self) -> Tensor:
        return 1e-4 * self.h.square().mean().sqrt().clamp_min(1e-12)

    def found_in(self, h: Tensor) -> Tensor:
        """Which held-out rows are among the rows of h (B, D), up to rounding: (n,) bool."""
        return torch.isin(self.keys, row_keys(h, self._unit))

    def chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.h.split(CALIBRATION_ROWS), self.y.split(CALIBRATION_ROWS), strict=True)


def row_keys(h: Tensor, unit: Tensor) -> Tensor:
    """Three fixed projections of each row, in steps of ``unit``, as one whole number: (B, D) → (B,).

    Equal inputs agree although their features differ by rounding; others meet by chance once in 10¹⁴.
    """
    generator = torch.Generator().manual_seed(0)
    h = h.cpu() if h.device.type == "mps" else h  # which has no float64
    directions = torch.randn(h.shape[1], 3, generator=generator, dtype=torch.float64) / math.sqrt(h.shape[1])
    steps = (h.double() @ directions.to(h.device) / unit.to(h)).round().long() % 2**20
    return steps[:, 0] + steps[:, 1] * 2**20 + steps[:, 2] * 2**40


def held_out_nll(model: Classifier, held_out: HeldOut, temperature: Tensor, *, posterior: bool) -> Tensor:
    """Held-out −log p(y), example by example: (n,), at fixed integration points."""
    out = []
    for h, y in held_out.chunks():
        utility = model.head.utility(h, posterior=posterior).tempered(temperature.to(h))
        out.append(_label_nll(model, utility, y))
    return torch.cat(out)


def _label_nll(model: Classifier, utility: UtilityNormal, y: Tensor) -> Tensor:
    if model.head.link.link == "sigmoid":
        return link.sigmoid_nll(utility, y)
    log_probs = link.softmax_log_probs(utility, num_samples=EVAL_POINTS, seed=0)
    return -log_probs.gather(1, y.unsqueeze(1)).squeeze(1)


def best_temperature(model: Classifier, held_out: HeldOut) -> Tensor:
    """Golden-section search of log τ; the held-out NLL has one minimum in it for a fixed utility."""
    start = model.temperature

    def value(log_temperature: float) -> float:
        temperature = start.new_tensor(math.exp(log_temperature))
        return float(held_out_nll(model, held_out, temperature, posterior=False).mean())

    centre, reach = math.log(float(start)), math.log(TEMPERATURE_RANGE)
    low, high = centre - reach, centre + reach
    ratio = (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    value_a, value_b = value(a), value(b)
    while high - low > 0.01:  # one per cent of τ
        if value_a <= value_b:
            high, b, value_b = b, a, value_a
            a = high - ratio * (high - low)
            value_a = value(a)
        else:
            low, a, value_a = a, b, value_b
            b = low + ratio * (high - low)
            value_b = value(b)
    return start.new_tensor(math.exp((low + high) / 2))


def held_out_fisher(model: Classifier, held_out: HeldOut) -> Tensor | None:
    """Λ: the mean output Hessian of held-out predictions at the chosen temperature."""
    latent = model.head.latent
    assert isinstance(latent, RandomFeatureGP)
    if not isinstance(latent.posterior, KroneckerPosterior):
        return None
    total: Tensor | float = 0.0
    for h, _ in held_out.chunks():
        temperature = model.temperature.to(h)
        probs = model.head.noise_free_probs(latent.mean(latent.features(h)))
        total = total + latent.posterior.fisher(probs, temperature)
    assert isinstance(total, Tensor)
    return total / len(held_out.h)


def largest_good_scale(
    model: Classifier, held_out: HeldOut
) -> tuple[float, float, tuple[tuple[float, float], ...]]:
    """The one-standard-error rule. Held-out NLL is nearly flat in the scale; its minimum would mostly
    switch the GP off, so the largest scale that is not distinguishably worse is taken.
    """
    latent = model.head.latent
    assert isinstance(latent, RandomFeatureGP)
    decades = math.log10(latent.posterior.largest_scale / SMALLEST_SCALE)
    steps = round(decades * SCALES_PER_DECADE)
    scales = [SMALLEST_SCALE * 10 ** (i / SCALES_PER_DECADE) for i in range(steps + 1)]
    means, errors = [], []
    for scale in scales:
        latent.posterior.scale.fill_(scale)
        nll = held_out_nll(model, held_out, model.temperature, posterior=True)
        means.append(float(nll.mean()))
        errors.append(float(nll.std() / math.sqrt(len(nll))))
    best = min(range(len(scales)), key=means.__getitem__)
    limit = means[best] + errors[best]
    chosen = max(i for i, mean in enumerate(means) if mean <= limit)
    return scales[chosen], errors[best], tuple(zip(scales, means, strict=True))
