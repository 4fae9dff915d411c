"""Gaussian, shot, impulse and speckle noise. ``x``: (B, 3, H, W) in [0, 1]; the caller clips."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hetsngp.data.corruptions.counter_rng import CounterRNG


def gaussian_noise(x: Tensor, std: float, rng: CounterRNG) -> Tensor:
    """x + std·ε."""
    return x + std * rng.normal("noise", *x.shape[1:])


def speckle_noise(x: Tensor, std: float, rng: CounterRNG) -> Tensor:
    """x + x·std·ε."""
    return x + x * std * rng.normal("noise", *x.shape[1:])


def shot_noise(x: Tensor, rate: float, rng: CounterRNG) -> Tensor:
    """Poisson(rate·x)/rate, by the inverse of its distribution function.

    Pixels are bytes, so a table of 256 rows has every distribution.
    """
    u = rng.uniform("noise", *x.shape[1:]).double()
    most = math.ceil(rate + 12 * math.sqrt(rate) + 20)  # beyond it lies less than 2⁻⁵³
    levels, counts = (torch.arange(n, dtype=torch.float64, device=x.device) for n in (256, most))
    # P(count ≤ k) = Q(k + 1, μ), the regularised incomplete gamma function. One searchable row: level + CDF.
    table = torch.special.gammaincc(counts + 1, (rate * levels / 255)[:, None])
    level = (255 * x).round().long()
    place = torch.searchsorted((table + levels[:, None]).flatten(), u + level, right=True)
    return (place - level * most).clamp(0, most - 1).to(x) / rate


def impulse_noise(x: Tensor, share: float, rng: CounterRNG) -> Tensor:
    """Set a fraction ``share`` of all values, in each channel independently, to 1 or 0."""
    flipped = rng.uniform("flip", *x.shape[1:]) < share
    salt = rng.uniform("salt", *x.shape[1:]) < 0.5
    return torch.where(flipped, salt.to(x), x)
