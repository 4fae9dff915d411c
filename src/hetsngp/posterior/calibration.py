"""What held-out data decide: the temperature, the output Hessian, and how far to trust the posterior."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetsngp.models.classifier import Classifier
from hetsngp.nn.posteriors import Posterior

# Posterior scales tried: half decades, from "all but off" to the posterior's own largest.
SMALLEST_SCALE, SCALES_PER_DECADE = 1e-3, 2
# The temperature is searched within this factor of the one it was trained with, first at so many places.
TEMPERATURE_RANGE, TEMPERATURES = 10.0, 9
# Prior standard deviation of log τ around it. A few dozen held-out examples that happen to be right would ask
# for a temperature near zero; against a few hundred the prior has no say.
TEMPERATURE_SPREAD = 0.5
CALIBRATION_ROWS = 512
# Nats of held-out NLL that a larger posterior scale may cost in any case.
TOLERANCE = 0.01


@dataclass(frozen=True)
class HeldOut:
    """Features, labels and weights of the held-out data, so that the backbone sees them once.

    ``weight`` (n,), all positive, or None: one each. ``shift`` (n, K) is to be added to f: of training data,
    what makes of it the f of a model that has not seen the example.
    """

    h: Tensor
    y: Tensor
    weight: Tensor | None = None
    shift: Tensor | None = None

    @staticmethod
    def join(parts: Sequence[HeldOut]) -> HeldOut:
        """Several as one, to average over; without their shifts."""
        if len(parts) == 1:
            return parts[0]
        weights = [p.weight if p.weight is not None else p.h.new_ones(len(p.h)) for p in parts]
        weight = None if all(p.weight is None for p in parts) else torch.cat(weights)
        return HeldOut(torch.cat([p.h for p in parts]), torch.cat([p.y for p in parts]), weight)

    @property
    def total(self) -> float:
        """Examples, by weight where they have one."""
        return len(self.h) if self.weight is None else float(self.weight.double().sum())

    def mean(self, values: Tensor) -> float:
        """The (weighted) mean of a value (n,) an example has."""
        if self.weight is None:
            return float(values.mean())
        return float((self.weight.to(values) * values).sum() / self.weight.to(values).sum())

    def standard_error(self, values: Tensor) -> float:
        """Of :meth:`mean`."""
        if self.weight is None:
            return float(values.std() / math.sqrt(len(values)))
        weight, values = self.weight.cpu().double(), values.cpu().double()
        share = weight / weight.sum()
        spread = float((share * (values - (share * values).sum()).square()).sum())
        return math.sqrt(spread / max(self.effective - 1, 1e-9))

    @property
    def effective(self) -> float:
        """Witnesses: n, or (Σw)²/Σw² (Kish) with weights: an example of weight two is no two of them."""
        if self.weight is None:
            return len(self.h)
        weight = self.weight.double()
        return float(weight.sum().square() / weight.square().sum())

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

    def chunks(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        for start in range(0, len(self.h), CALIBRATION_ROWS):
            rows = slice(start, start + CALIBRATION_ROWS)
            yield self.h[rows], self.y[rows], None if self.weight is None else self.weight[rows]


Pairs = Sequence[tuple[Classifier, HeldOut]]
"""Models and what each of them has not seen; one pair, or one a fold."""


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
    shift = held_out.shift
    shifts = itertools.repeat(None) if shift is None else shift.split(CALIBRATION_ROWS)
    return torch.cat(
        [
            model.head.held_out_nll(h, y, temperature, posterior=posterior, shift=shift)
            for (h, y, _), shift in zip(held_out.chunks(), shifts, strict=False)
        ]
    )


def pooled_nll(pairs: Pairs, temperature: Tensor, *, posterior: bool) -> Tensor:
    """The NLL of every held-out example under the model that has not seen it: (n,)."""
    return torch.cat([held_out_nll(m, h, temperature, posterior=posterior) for m, h in pairs])


def best_temperature(pairs: Pairs, *, posterior: bool = False) -> Tensor:
    """The τ of highest posterior density, under a prior around the training temperature.

    A coarse grid of log τ first: under a posterior the NLL may have several minima, since the loss of an
    example that is wrong and uncertain is bounded. Then golden sections between the neighbours of the best.
    """
    start = pairs[0][0].head.training_temperature
    pool = HeldOut.join([held_out for _, held_out in pairs])
    centre, reach = math.log(float(start)), math.log(TEMPERATURE_RANGE)
    strength = 0.5 / (TEMPERATURE_SPREAD**2 * pool.effective)

    def value(log_temperature: float) -> float:
        temperature = start.new_tensor(math.exp(log_temperature))
        nll = pool.mean(pooled_nll(pairs, temperature, posterior=posterior))
        return nll + strength * (log_temperature - centre) ** 2

    step = 2 * reach / (TEMPERATURES - 1)
    best = min((centre - reach + i * step for i in range(TEMPERATURES)), key=value)
    return start.new_tensor(math.exp(_golden_section(value, best - step, best + step)))


def _golden_section(value: Callable[[float], float], low: float, high: float) -> float:
    """Where ``value`` is lowest between ``low`` and ``high``, to 0.01."""
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
    return (low + high) / 2


def held_out_fisher(model: Classifier, held_out: HeldOut) -> Tensor | None:
    """Λ: the mean output Hessian of held-out predictions at the chosen temperature."""
    total: Tensor | None = None
    for h, _, weight in held_out.chunks():
        part = model.head.fisher(h, weight)
        if part is None:
            return None
        total = part if total is None else total + part
    assert total is not None
    return total / held_out.total


def largest_good_scale(
    pairs: Pairs, tolerance: float = TOLERANCE
) -> tuple[float, float, tuple[tuple[float, float], ...]]:
    """The largest posterior scale whose held-out NLL is as good as the best, and what "as good" came to.

    The NLL is nearly flat in the scale and its minimum would mostly switch the GP off. As good is: worse by
    no more than one standard error of the difference, or than ``tolerance``. The difference is taken example
    by example; the error of the NLL itself is many times larger, and lets a scale through that makes every
    single prediction too timid. The tolerance is for data the model classifies perfectly, where even the
    smallest scale is measurably worse than none, at a cost that nobody would notice.
    """
    posteriors = [posterior_of(model) for model, _ in pairs]
    temperature, pool = pairs[0][0].temperature, HeldOut.join([held_out for _, held_out in pairs])
    decades = math.log10(posteriors[0].largest_scale / SMALLEST_SCALE)
    steps = round(decades * SCALES_PER_DECADE)
    scales = [SMALLEST_SCALE * 10 ** (i / SCALES_PER_DECADE) for i in range(steps + 1)]
    each = []
    for scale in scales:
        for posterior in posteriors:
            posterior.scale.fill_(scale)
        each.append(pooled_nll(pairs, temperature, posterior=True))
    means = [pool.mean(nll) for nll in each]
    best = min(range(len(scales)), key=means.__getitem__)
    allowed = [max(pool.standard_error(nll - each[best]), tolerance) for nll in each]
    chosen = max(i for i in range(len(scales)) if means[i] <= means[best] + allowed[i])
    return scales[chosen], allowed[chosen], tuple(zip(scales, means, strict=True))


def choose_temperature(pairs: Pairs, also: Pairs = ()) -> dict[str, Any]:
    """Set τ by the held-out NLL at the posterior mode; first, because the posterior is of τ's likelihood.

    ``also`` bear witness of τ with the others; what is reported is of the others alone.
    """
    pool = HeldOut.join([held_out for _, held_out in pairs])
    before = pooled_nll(pairs, pairs[0][0].temperature, posterior=False)
    temperature = best_temperature([*pairs, *also])
    _set_temperature(pairs, temperature)
    for model, _ in pairs:
        model.head.mode_temperature.copy_(temperature)
    after = pooled_nll(pairs, temperature, posterior=False)
    return {
        "held_out": pool.total,
        "left_out": sum(witnesses.total for _, witnesses in also),
        "mode_temperature": float(temperature),
        "nll_before": pool.mean(before),
        "nll_mode": pool.mean(after),
        "nll": pool.mean(after),
        "standard_error": pool.standard_error(after),
    }


def choose_scale(pairs: Pairs, also: Pairs = (), tolerance: float = TOLERANCE) -> dict[str, Any]:
    """Set the factor on the posterior variance, and then τ once more: what is to be calibrated is the
    prediction, and averaging over the posterior has made it more timid than its mode.

    How much more is seen on the held-out data alone: ``also`` are training data, where the variance is low.
    """
    pool = HeldOut.join([held_out for _, held_out in pairs])
    scale, allowance, grid = largest_good_scale(pairs, tolerance)
    for model, _ in pairs:
        posterior_of(model).scale.fill_(scale)
    temperature = best_temperature(pairs, posterior=True)
    if also:
        temperature = temperature * pairs[0][0].head.mode_temperature / best_temperature(pairs)
    _set_temperature(pairs, temperature)
    nll = pooled_nll(pairs, temperature, posterior=True)
    return {"scale": scale, "nll": pool.mean(nll), "allowance": allowance, "scale_grid": grid}


def _set_temperature(pairs: Pairs, temperature: Tensor) -> None:
    for model, _ in pairs:
        model.head.temperature.copy_(temperature)


def posterior_of(model: Classifier) -> Posterior:
    """The posterior of a model that has one."""
    assert model.head.posterior is not None
    return model.head.posterior
