"""Counter-based random numbers: a hash of seed, corruption, image and position.

An image gets the same noise on every device, in any batch, whatever was drawn before; torch's generators
promise none of that.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

# SplitMix64 (Steele, Lea and Flood 2014): steps of the golden ratio, two rounds of multiply and shift.
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
BITS = {torch.float32: 24, torch.float64: 53}


class CounterRNG:
    """Random numbers for images ``first`` … ``first + count − 1`` of a set, for one corruption.

    Each method takes the name of a stream and the shape for one image, and returns (count, *shape).

    >>> both = CounterRNG(0, "fog", 3, first=0, count=2).uniform("square", 4)
    >>> bool((both[1:] == CounterRNG(0, "fog", 3, first=1, count=1).uniform("square", 4)).all())
    True
    """

    def __init__(
        self,
        seed: int,
        name: str,
        severity: int,
        first: int = 0,
        count: int = 1,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.key = f"{seed}/{name}/{severity}"
        self.first, self.count, self.device, self.dtype = first, count, torch.device(device), dtype

    def uniform(self, stream: str, *shape: int) -> Tensor:
        """Uniform numbers in [0, 1), on a grid of 2⁻²⁴ (float32) or 2⁻⁵³ (float64)."""
        digest = hashlib.sha256(f"{self.key}/{stream}".encode()).digest()
        key = int.from_bytes(digest[:8], "little", signed=True)
        images = torch.arange(self.first, self.first + self.count, device=self.device)
        start = _mix(key + images * _signed(GOLDEN))
        numbers = torch.arange(1, math.prod(shape) + 1, device=self.device)
        bits = _mix(start[:, None] + numbers * _signed(GOLDEN))
        used = BITS[self.dtype]
        return (_shifted(bits, 64 - used).to(self.dtype) * 2.0**-used).view(self.count, *shape)

    def normal(self, stream: str, *shape: int) -> Tensor:
        """Standard normal numbers, by Box and Muller."""
        radius, angle = (self.uniform(f"{stream}/{part}", *shape) for part in ("radius", "angle"))
        return (-2 * torch.log1p(-radius)).sqrt_() * torch.cos(2 * math.pi * angle)

    def integers(self, stream: str, low: int, high: int, *shape: int) -> Tensor:
        """Integers in low … high − 1, int64."""
        return low + (self.uniform(stream, *shape) * (high - low)).long()


def _mix(z: Tensor) -> Tensor:
    """Finaliser of SplitMix64 on int64, which wraps around like unsigned numbers."""
    z = (z ^ _shifted(z, 30)) * _signed(FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(SECOND)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, by: int) -> Tensor:
    """Shift right by ``by`` bits, with zeros from the left."""
    return (z >> by) & (2 ** (64 - by) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
