"""Integration points for a standard normal: randomised quasi-Monte Carlo, and the plain kinds beside it.

The factor's coordinates, and the diagonal's where all fit in 128, get a scrambled Sobol net with a fresh
digital shift. torch's engine stops at 21,201 coordinates and a class count may not, so the rest get a Latin
hypercube: every coordinate is stratified, which integrates the additive part of the integrand almost exactly
and can never do worse than n/(n−1) times plain sampling.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SAMPLERS = ("sobol", "mc", "antithetic")
# Past this many coordinates a net of a few hundred points has no structure left to offer.
SOBOL_DIMENSIONS = 128
# A scramble costs milliseconds: a few are kept, and the digital shift makes each use of them unbiased.
SCRAMBLES = 16
LATIN_SCRAMBLES = 4
_BITS = 30  # resolution of torch's Sobol engine
# Most points held at a time: the memory of a block is BLOCK·(K + R), whatever the number of points.
BLOCK = 256


@functools.lru_cache(maxsize=64)
def _sobol(dimension: int, count: int, scramble: int) -> Tensor:
    """The first ``count`` points of a scrambled sequence, as integers below 2³⁰: (count, dimension)."""
    engine = torch.quasirandom.SobolEngine(dimension, scramble=True, seed=scramble)
    return (engine.draw(count, dtype=torch.float64) * 2**_BITS).round().int()


def _normal_from_uniform(x: Tensor) -> Tensor:
    """Φ⁻¹, kept off the ends where it is infinite."""
    tiny = torch.finfo(x.dtype).eps / 2
    return torch.special.ndtri(x.clamp(tiny, 1 - 2 * tiny))


@functools.lru_cache(maxsize=8)
def _strata(count: int, dimension: int, scramble: int, device: torch.device) -> Tensor:
    """A permutation of 0 … count−1 in every column: (count, dimension)."""
    generator = torch.Generator().manual_seed(scramble)
    return torch.rand(count, dimension, generator=generator).argsort(0).to(device, torch.int16)


def _latin_hypercube(
    count: int, dimension: int, scramble: int, generator: torch.Generator, like: Tensor
) -> Tensor:
    """(count, dimension) uniform points with one point in each of ``count`` strata of every coordinate.

    Sorting is what costs, so a few sets of permutations are kept; rotating every column by a shift of its
    own makes each use unbiased, as if the permutations were fresh.
    """
    kind: dict[str, Any] = {"generator": generator, "device": like.device}
    turn = torch.randint(count, (dimension,), dtype=torch.int16, **kind)
    jitter = torch.rand(count, dimension, dtype=like.dtype, **kind)
    return ((_strata(count, dimension, scramble, like.device) + turn) % count + jitter) / count


@dataclass(frozen=True)
class Points:
    """A reproducible stream of normal points: equal fields and indices give equal points.

    ``rank``: coordinates of the factor (R); ``diagonal``: coordinates of the diagonal (K, or 0). Replicates
    are independent randomisations, which is what makes an error estimate possible. ``part``: which of how
    many equal parts of a batch the rows are.
    """

    sampler: str
    rank: int
    diagonal: int
    seed: int
    part: tuple[int, int] = (0, 1)

    def _generator(self, device: torch.device, *index: int) -> torch.Generator:
        seed = self.seed
        for i in index:  # splitmix64's increment keeps neighbouring indices apart
            seed = (seed * 6364136223846793005 + (i + 1) * 0x9E3779B97F4A7C15) % 2**63
        return torch.Generator(device=device).manual_seed(seed)

    def block(self, start: int, count: int, *, like: Tensor, replicate: int = 0) -> tuple[Tensor, Tensor]:
        """Points ``start … start+count−1``: ε of the factor (count, R) and of the diagonal (count, K)."""
        generator = self._generator(like.device, replicate, start, count)
        if self.sampler == "sobol":
            return self._quasi(start, count, replicate, generator, like)
        half = count if self.sampler == "mc" else math.ceil(count / 2)
        shape = (half, self.rank + self.diagonal)
        eps = torch.randn(shape, generator=generator, device=like.device, dtype=like.dtype)
        if self.sampler == "antithetic":
            eps = torch.cat([eps, -eps])[:count]
        return eps[:, : self.rank], eps[:, self.rank :]

    def _quasi(
        self, start: int, count: int, replicate: int, generator: torch.Generator, like: Tensor
    ) -> tuple[Tensor, Tensor]:
        total = self.rank + self.diagonal
        sobol = min(self.rank if total > SOBOL_DIMENSIONS else total, SOBOL_DIMENSIONS)
        latin = total - sobol
        columns = []
        if sobol:
            # One shift per replicate, so that later blocks continue the same sequence.
            shift_rng = self._generator(torch.device("cpu"), replicate)
            shift = torch.randint(2**_BITS, (sobol,), generator=shift_rng, dtype=torch.int32)
            # Rounded up to a power of four so that the cache holds few entries.
            length = 4 ** math.ceil(math.log2(start + count) / 2)
            net = _sobol(sobol, length, (self.seed + replicate) % SCRAMBLES)[start : start + count]
            # Without waiting: the driver takes what is in ordinary memory before it returns.
            uniform = ((net ^ shift).double() / 2**_BITS).to(like.dtype)
            columns.append(uniform.to(like.device, non_blocking=True))
        if latin:
            # Blocks and replicates differ by their shifts; nearby ones by their permutations too.
            scramble = (self.seed + replicate + start // max(count, 1)) % LATIN_SCRAMBLES
            columns.append(_latin_hypercube(count, latin, scramble, generator, like))
        if not columns:
            empty = like.new_zeros(count, 0)
            return empty, empty
        eps = _normal_from_uniform(torch.cat(columns, dim=1))
        return eps[:, : self.rank], eps[:, self.rank :]

    def replicated_block(
        self, start: int, count: int, replicates: int, *, like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same block of several replicates, one after another: (replicates·count, ·)."""
        blocks = [self.block(start, count, like=like, replicate=r) for r in range(replicates)]
        return torch.cat([b[0] for b in blocks]), torch.cat([b[1] for b in blocks])


def draw_seed(generator: torch.Generator | None) -> int:
    """A seed for :class:`Points` from ``generator``, or from torch's default generator."""
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**62, (), generator=generator, device=device).item())


class PartGenerator(torch.Generator):
    """For a process that has one of several equal parts of each batch; seed and use are the same in all.

    What is drawn for a batch is then what one process draws for all of it, and each row gets its own.
    """

    part: tuple[int, int] = (0, 1)

    @staticmethod
    def of(seed: int, index: int, parts: int) -> PartGenerator:
        """Part ``index`` (from 0) of ``parts``."""
        generator = PartGenerator()
        generator.manual_seed(seed)
        generator.part = (index, parts)
        return generator


def part_of(generator: torch.Generator | None) -> tuple[int, int]:
    """Which part of each batch ``generator`` is for, of how many."""
    return generator.part if isinstance(generator, PartGenerator) else (0, 1)
