"""Calibration on held-out data: the temperature, the output Hessian, and the scale of the posterior."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hetsngp.models.classifier import Classifier
from hetsngp.nn.posteriors import Posterior

# Posterior scales tried: half decades, from "all but off" to the posterior's own largest.
SMALLEST_SCALE, SCALES_PER_DECADE = 1e-3, 2
# The temperature is searched within this factor of the training temperature, first on a grid of this size.
TEMPERATURE_RANGE, TEMPERATURES = 10.0, 9
# Prior standard deviation of log τ around it. A few dozen held-out examples that happen to be correct would
# give a temperature near zero; with a few hundred the prior has hardly any effect.
TEMPERATURE_SPREAD = 0.5
# Step of log τ, and the most steps, from the temperature of one posterior scale to that of the next.
TEMPERATURE_STEP, MOST_STEPS = 0.1, 20
# Logarithms of temperatures are known to about one per cent, from parabolas that are this wide on each side.
PRECISION, NARROW = 0.005, 0.2
# The common factor on the temperatures of an ensemble: searched up to this logarithm, first on a grid.
FACTOR_REACH, FACTORS = 0.8, 9
CALIBRATION_BATCH_SIZE = 512
# Largest number of values that held-out data keep from temperature to temperature: a gigabyte.
MAX_PREPARED = 2**28
# Nats of held-out NLL that a larger posterior scale may cost in any case.
TOLERANCE = 0.01
# Most held-out examples that the tail probabilities of the OOD score are from, each a whole prediction; and
# most examples × classes where that is fewer, but not fewer examples than ENOUGH.
OOD_EXAMPLES, OOD_LOGITS = 10_000, 300_000
# Most examples × classes on which posterior scales are first compared, and the standard errors by which the
# NLL of a scale there may be above the best, and at least the tolerance, for a comparison on all examples.
SCREENED_LOGITS, SCREENED_ERRORS = 150_000, 4.0
ENOUGH = 1000
# Fewest held-out examples for an OOD score: with less it stays the model uncertainty, or the entropy.
FEWEST_OOD_EXAMPLES = 20


@dataclass(frozen=True)
class HeldOut:
    """Features, labels and weights of the held-out data, so that the backbone sees them once.

    ``weight`` (n,), all positive, or None: one each. ``shift`` (n, K) is added to f: for training examples,
    the difference to the f of a model trained without the example. ``nll()``: −log p(y) of each chunk as a
    function of the temperature, under one model as it is, from :meth:`prepared`.
    """

    h: Tensor
    y: Tensor
    weight: Tensor | None = None
    shift: Tensor | None = None
    nll: Callable[[], tuple[Callable[[Tensor], Tensor], ...]] | None = None

    @staticmethod
    def join(parts: Sequence[HeldOut]) -> HeldOut:
        """Concatenate several, for averages; shifts are dropped.

        Where some have soft targets and others class numbers, all have targets.
        """
        if len(parts) == 1:
            return parts[0]
        soft = next((p.y for p in parts if p.y.dim() == 2), None)
        targets = [
            F.one_hot(p.y, soft.shape[1]).to(soft) if soft is not None and p.y.dim() == 1 else p.y
            for p in parts
        ]
        weights = [p.weight if p.weight is not None else p.h.new_ones(len(p.h)) for p in parts]
        weight = None if all(p.weight is None for p in parts) else torch.cat(weights)
        return HeldOut(torch.cat([p.h for p in parts]), torch.cat(targets), weight)

    @property
    def total(self) -> float:
        """Number of examples, or their total weight."""
        return len(self.h) if self.weight is None else float(self.weight.double().sum())

    def mean(self, values: Tensor) -> float:
        """(Weighted) mean of ``values`` (n,), one for each example."""
        if self.weight is None:
            return float(values.mean())
        return float((self.weight.to(values) * values).sum() / self.weight.to(values).sum())

    def standard_error(self, values: Tensor) -> float:
        """Standard error of :meth:`mean`."""
        if self.weight is None:
            return float(values.std() / math.sqrt(len(values)))
        weight, values = self.weight.cpu().double(), values.cpu().double()
        share = weight / weight.sum()
        spread = float((share * (values - (share * values).sum()).square()).sum())
        return math.sqrt(spread / max(self.effective_size - 1, 1e-9))

    @property
    def effective_size(self) -> float:
        """Effective sample size: n, or (Σw)²/Σw² (Kish) with weights; an example of weight 2 is not two."""
        if self.weight is None:
            return len(self.h)
        weight = self.weight.double()
        return float(weight.sum().square() / weight.square().sum())

    def spread(self, count: int) -> HeldOut:
        """``count`` examples at equal distances, at least one; all where there are no more."""
        if count >= len(self.h):
            return self
        rows = torch.linspace(0, len(self.h) - 1, max(1, count), dtype=torch.float64).round().long()
        rows = rows.to(self.h.device)
        weight, shift = (None if t is None else t[rows] for t in (self.weight, self.shift))
        return HeldOut(self.h[rows], self.y[rows], weight, shift)

    @functools.cached_property
    def keys(self) -> Tensor:
        """One integer for each example, equal for equal inputs: (n,)."""
        return feature_keys(self.h, self._unit)

    @functools.cached_property
    def _unit(self) -> Tensor:
        return 1e-4 * self.h.square().mean().sqrt().clamp_min(1e-12)

    def contained_in(self, h: Tensor) -> Tensor:
        """Whether each held-out example is among h (B, D), up to rounding: (n,) bool."""
        return torch.isin(self.keys, feature_keys(h, self._unit))

    def prepared(self, model: Classifier, *, posterior: bool) -> HeldOut:
        """These examples with what the NLL at all temperatures shares, until the model changes.

        As they are where the Gaussians of all examples would not fit in memory.
        """
        noise = getattr(model.head, "noise", None)
        rank = 0 if noise is None else noise.rank
        if len(self.h) * model.num_classes * model.head.num_members * (3 + rank) > MAX_PREPARED:
            return self
        return replace(self, nll=functools.cache(lambda: tuple(self._functions(model, posterior))))

    def _functions(self, model: Classifier, posterior: bool) -> Iterator[Callable[[Tensor], Tensor]]:
        """−log p(y) of each chunk as a function of the temperature."""
        shift = self.shift
        shifts = itertools.repeat(None) if shift is None else shift.split(CALIBRATION_BATCH_SIZE)
        for (h, y, _), own in zip(self.chunks(), shifts, strict=False):
            yield model.head.nll_by_temperature(h, y, posterior=posterior, shift=own)

    def chunks(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        for start in range(0, len(self.h), CALIBRATION_BATCH_SIZE):
            rows = slice(start, start + CALIBRATION_BATCH_SIZE)
            yield self.h[rows], self.y[rows], None if self.weight is None else self.weight[rows]


Pairs = Sequence[tuple[Classifier, HeldOut]]
"""Models with the data held out from each: one pair, or one per fold."""
Objective = Callable[[float], float]


def feature_keys(h: Tensor, unit: Tensor) -> Tensor:
    """Integer key of each example: three fixed projections, rounded to steps of ``unit``: (B, D) → (B,).

    Equal inputs agree although their features differ by rounding; others collide once in 10¹⁴.
    """
    generator = torch.Generator().manual_seed(0)
    h = h.cpu() if h.device.type == "mps" else h  # mps has no float64
    directions = torch.randn(h.shape[1], 3, generator=generator, dtype=torch.float64) / math.sqrt(h.shape[1])
    steps = (h.double() @ directions.to(h.device) / unit.to(h)).round().long() % 2**20
    return steps[:, 0] + steps[:, 1] * 2**20 + steps[:, 2] * 2**40


def held_out_nll(model: Classifier, held_out: HeldOut, temperature: Tensor, *, posterior: bool) -> Tensor:
    """−log p(y) of each held-out example: (n,), at fixed integration points."""
    functions = held_out._functions(model, posterior) if held_out.nll is None else held_out.nll()
    return torch.cat([nll(temperature) for nll in functions])


def pooled_nll(pairs: Pairs, temperature: Tensor, *, posterior: bool) -> Tensor:
    """−log p(y) of every held-out example under the model it was held out from: (n,)."""
    return torch.cat([held_out_nll(m, h, temperature, posterior=posterior) for m, h in pairs])


def _log_temperature_objective(pairs: Pairs, *, posterior: bool) -> tuple[Callable[..., Tensor], Objective]:
    """−log p(y) of each held-out example as a function of log τ, and its mean with the prior on τ."""
    start = pairs[0][0].head.training_temperature
    pool = HeldOut.join([held_out for _, held_out in pairs])
    centre = math.log(float(start))
    strength = 0.5 / (TEMPERATURE_SPREAD**2 * pool.effective_size)
    pairs = [(model, held_out.prepared(model, posterior=posterior)) for model, held_out in pairs]

    @functools.cache
    def nll(log_temperature: float) -> Tensor:
        return pooled_nll(pairs, start.new_tensor(math.exp(log_temperature)), posterior=posterior)

    def value(log_temperature: float) -> float:
        return pool.mean(nll(log_temperature)) + strength * (log_temperature - centre) ** 2

    return nll, value


def _some(pairs: Pairs, examples: int) -> Pairs:
    """Pairs with about so many examples in all, the same share of each."""
    share = examples / sum(len(held_out.h) for _, held_out in pairs)
    return [(model, held_out.spread(round(share * len(held_out.h)))) for model, held_out in pairs]


def _screened(pairs: Pairs) -> Pairs:
    """Pairs with enough examples to see which scales and temperatures are far from the best."""
    return _some(pairs, max(ENOUGH, SCREENED_LOGITS // pairs[0][0].num_classes))


def best_temperature(pairs: Pairs, *, posterior: bool = False) -> Tensor:
    """MAP estimate of τ, under a prior around the training temperature.

    A coarse grid of log τ first: under a posterior the NLL may have several minima, since the loss of a
    misclassified, uncertain example is bounded. Some examples are enough for that.
    """
    start = pairs[0][0].head.training_temperature
    _, value = _log_temperature_objective(pairs, posterior=posterior)
    coarse, some = value, _screened(pairs) if posterior else pairs
    if any(one is not all_of for (_, one), (_, all_of) in zip(some, pairs, strict=True)):
        _, coarse = _log_temperature_objective(some, posterior=posterior)
    reach = math.log(TEMPERATURE_RANGE)
    return start.new_tensor(math.exp(_minimum(value, math.log(float(start)), reach, TEMPERATURES, coarse)))


def _minimum(
    value: Objective, centre: float, reach: float, count: int, coarse: Objective | None = None
) -> float:
    """Minimise ``value``: on a grid of ``count`` within ``reach``, by ``coarse`` if given, then around the
    best of it.
    """
    value, step = functools.cache(value), 2 * reach / (count - 1)
    best = min((centre - reach + i * step for i in range(count)), key=coarse or value)
    return min(max(_local_minimum(value, best, step, most_steps=0), centre - reach), centre + reach)


def _local_minimum(value: Objective, start: float, step: float, most_steps: int = MOST_STEPS) -> float:
    """Minimise a smooth ``value`` around ``start``: steps downhill until it rises, then parabolas.

    >>> round(_local_minimum(lambda x: (x - 0.73) ** 2 + 0.1 * (x - 0.73) ** 4, 0.0, 0.1), 2)
    0.73
    """
    value = functools.cache(value)
    low, middle, high = start - step, start, start + step
    for _ in range(most_steps):
        if value(low) < value(middle):
            low, middle, high = low - step, low, middle
        elif value(high) < value(middle):
            low, middle, high = middle, high, high + step
        else:
            break
    for _ in range(MOST_STEPS):
        left, right = middle - low, high - middle
        rise_left, rise_right = value(low) - value(middle), value(high) - value(middle)
        weight = rise_left * right + rise_right * left
        if min(rise_left, rise_right) < 0 or weight <= 0:  # it still falls, or is flat
            break
        vertex = middle + 0.5 * (right - rise_right * left * (left + right) / weight)
        if abs(vertex - middle) < PRECISION:
            if max(left, right) <= NARROW:
                break
            vertex = middle + right / 3 if right > left else middle - left / 3
        if value(vertex) < value(middle):
            low, middle, high = (middle, vertex, high) if vertex > middle else (low, vertex, middle)
        else:
            low, high = (low, vertex) if vertex > middle else (vertex, high)
    return min((middle, low, high), key=value)


def held_out_fisher(model: Classifier, held_out: HeldOut) -> Tensor | None:
    """Λ, the mean output Hessian of held-out predictions at the chosen temperature."""
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
    """Largest posterior scale whose held-out NLL is as good as the best; the allowed difference; the grid.

    Scales are compared each at its own temperature: averaging over a wider posterior makes predictions less
    confident, and a lower temperature makes up for it.
    The NLL is nearly flat in the scale and its minimum would mostly switch the GP off. As good as the best
    means worse by at most one standard error of the difference, or by ``tolerance``. The difference is taken
    example by example; the standard error of the NLL itself is many times larger, and would allow a scale
    that makes every prediction underconfident. The tolerance is for data that the model classifies perfectly,
    where even the smallest scale is measurably worse than none, at a negligible cost.
    With many examples and classes each scale's temperature is from some of the examples, on which scales that
    are far worse drop out, and none above them is tried; the others are compared on all.
    """
    posteriors = [posterior_of(model) for model, _ in pairs]
    decades = math.log10(posteriors[0].largest_scale / SMALLEST_SCALE)
    steps = round(decades * SCALES_PER_DECADE)
    scales = [SMALLEST_SCALE * 10 ** (i / SCALES_PER_DECADE) for i in range(steps + 1)]
    centre = math.log(float(pairs[0][0].head.training_temperature))
    reach = math.log(TEMPERATURE_RANGE)
    log_temperature = math.log(float(pairs[0][0].temperature))
    each: list[Tensor] = []
    temperatures: list[float] = []
    some, everything = _screened(pairs), HeldOut.join([held_out for _, held_out in pairs])
    pool = HeldOut.join([held_out for _, held_out in some])
    screens = len(pool.h) < len(everything.h)

    def contenders() -> list[int]:
        """Scales tried that may be as good as the best on all examples."""
        best = min(each, key=pool.mean)
        errors = [SCREENED_ERRORS * pool.standard_error(nll - best) for nll in each]
        worse = [pool.mean(nll) - pool.mean(best) for nll in each]
        return [i for i in range(len(each)) if worse[i] <= max(errors[i], 2 * tolerance)]

    for scale in scales:
        for posterior in posteriors:
            posterior.scale.fill_(scale)
        nll, value = _log_temperature_objective(some, posterior=True)
        found = _local_minimum(value, log_temperature, TEMPERATURE_STEP)
        log_temperature = min(max(found, centre - reach), centre + reach)  # as predictions may have it
        each.append(nll(log_temperature))
        temperatures.append(log_temperature)
        if screens and len(each) - 1 not in contenders():  # larger ones are worse still
            break
    left = contenders() if screens else list(range(len(each)))
    means = [pool.mean(nll) for nll in each]
    for i in left if screens else []:
        for posterior in posteriors:
            posterior.scale.fill_(scales[i])
        temperature = pairs[0][0].temperature.new_tensor(math.exp(temperatures[i]))
        each[i] = pooled_nll(pairs, temperature, posterior=True)
        means[i] = everything.mean(each[i])
    best = min(left, key=means.__getitem__)
    allowed = {i: max(everything.standard_error(each[i] - each[best]), tolerance) for i in left}
    chosen = max(i for i in left if means[i] <= means[best] + allowed[i])
    return scales[chosen], allowed[chosen], tuple(zip(scales, means, strict=False))


def choose_temperature(pairs: Pairs, leave_one_out: Pairs = ()) -> dict[str, Any]:
    """Set τ by the held-out NLL at the MAP estimate; first, because the posterior's likelihood contains τ.

    ``leave_one_out``: further examples that τ is chosen by; the reported NLL is that of ``pairs`` alone.
    """
    pool = HeldOut.join([held_out for _, held_out in pairs])
    before = pooled_nll(pairs, pairs[0][0].temperature, posterior=False)
    temperature = best_temperature([*pairs, *leave_one_out])
    _set_temperature(pairs, temperature)
    for model, _ in pairs:
        model.head.mode_temperature.copy_(temperature)
    after = pooled_nll(pairs, temperature, posterior=False)
    return {
        "held_out": pool.total,
        "left_out": sum(examples.total for _, examples in leave_one_out),
        "mode_temperature": float(temperature),
        "nll_before": pool.mean(before),
        "nll_mode": pool.mean(after),
        "nll": pool.mean(after),
        "standard_error": pool.standard_error(after),
    }


def choose_scale(pairs: Pairs, leave_one_out: Pairs = (), tolerance: float = TOLERANCE) -> dict[str, Any]:
    """Set the factor on the posterior variance, and then τ again: averaging over the posterior makes the
    prediction less confident than the MAP estimate.

    By how much is measured on ``pairs`` alone: ``leave_one_out`` are training data, of low variance.
    """
    pool = HeldOut.join([held_out for _, held_out in pairs])
    scale, allowance, grid = largest_good_scale(pairs, tolerance)
    for model, _ in pairs:
        posterior_of(model).scale.fill_(scale)
    temperature = best_temperature(pairs, posterior=True)
    if leave_one_out:
        temperature = temperature * pairs[0][0].head.mode_temperature / best_temperature(pairs)
    _set_temperature(pairs, temperature)
    nll = pooled_nll(pairs, temperature, posterior=True)
    return {"scale": scale, "nll": pool.mean(nll), "allowance": allowance, "scale_grid": grid}


def can_score_ood(model: Classifier, pairs: Pairs) -> bool:
    """Whether ``model`` has an OOD score, and there are enough held-out examples for it."""
    enough = sum(len(held_out.h) for _, held_out in pairs) >= FEWEST_OOD_EXAMPLES
    return model.head.ood_score is not None and enough


def fit_ood_tables(model: Classifier, pairs: Pairs) -> None:
    """Set the tail probabilities of the OOD score of ``model``, where it has one, from held-out examples.

    Each is scored by the model it was held out from.
    """
    if model.head.ood_score is None or not can_score_ood(model, pairs):
        return
    parts, weights = [], []
    for fitted, held_out in _some(pairs, min(OOD_EXAMPLES, max(ENOUGH, OOD_LOGITS // model.num_classes))):
        h, weight = held_out.h, held_out.weight
        parts += [fitted.head.ood_parts(chunk) for chunk in h.split(CALIBRATION_BATCH_SIZE)]
        weights.append(torch.ones_like(h[:, 0]) if weight is None else weight.to(h))
    model.head.ood_score.fit_tables(torch.cat(parts), torch.cat(weights))


def mixture_nll(pairs: Pairs, factor: float, *, posterior: bool) -> Tensor:
    """−log of the members' mean probability of each label, every τ multiplied by ``factor``: (n,).

    ``pairs`` are the members of an ensemble with the same examples in the same order. τ is that of
    predictions, or without ``posterior`` that of the MAP estimates.
    """
    each: list[Tensor] = []
    for model, held_out in pairs:
        head = model.head
        temperature = factor * (head.temperature if posterior else head.mode_temperature)
        nll = held_out_nll(model, held_out, temperature, posterior=posterior and head.has_posterior)
        each.append(nll if not each else nll.to(each[0]))
    return math.log(len(each)) - (-torch.stack(each)).logsumexp(0)


def joint_factor(pairs: Pairs, *, posterior: bool) -> float:
    """MAP estimate of a common factor on the temperatures of an ensemble, by the NLL of the mixture.

    The prior is that of :func:`best_temperature`, on the product of factor and τ. A prior around a factor of
    one would be a second one, and let few examples move τ twice as far.
    """
    pool = pairs[0][1]
    strength = 0.5 / (TEMPERATURE_SPREAD**2 * pool.effective_size)
    heads = [model.head for model, _ in pairs]
    chosen = [head.temperature if posterior else head.mode_temperature for head in heads]
    moved = [math.log(float(t / h.training_temperature)) for t, h in zip(chosen, heads, strict=True)]

    def value(log_factor: float) -> float:
        nll = pool.mean(mixture_nll(pairs, math.exp(log_factor), posterior=posterior).to(pool.h))
        return nll + strength * sum((log_factor + log) ** 2 for log in moved) / len(moved)

    return math.exp(_minimum(value, 0.0, FACTOR_REACH, FACTORS))


def choose_joint_temperature(pairs: Pairs) -> list[dict[str, Any]]:
    """Multiply the temperatures of an ensemble's members by one factor, and those of the MAP estimates by
    another: the mean of calibrated predictions is less confident than each of them, where members disagree.

    Return the changed fields of each member's report.
    """
    mode = joint_factor(pairs, posterior=False)
    fitted = any(model.head.has_posterior for model, _ in pairs)
    posterior = joint_factor(pairs, posterior=True) if fitted else mode
    changed = []
    for model, held_out in pairs:
        head = model.head
        head.mode_temperature.mul_(mode)
        head.temperature.mul_(posterior)
        at_mode = held_out_nll(model, held_out, head.mode_temperature, posterior=False)
        nll = held_out_nll(model, held_out, head.temperature, posterior=head.has_posterior)
        changed.append(
            {
                "temperature": float(head.temperature),
                "mode_temperature": float(head.mode_temperature),
                "nll_mode": held_out.mean(at_mode),
                "standard_error": held_out.standard_error(at_mode),
                "nll": held_out.mean(nll),
            }
        )
    return changed


def _set_temperature(pairs: Pairs, temperature: Tensor) -> None:
    for model, _ in pairs:
        model.head.temperature.copy_(temperature)


def posterior_of(model: Classifier) -> Posterior:
    """Posterior of a model that has one."""
    assert model.head.posterior is not None
    return model.head.posterior
