"""The paper's three synthetic tasks, in two dimensions so that uncertainty can be plotted.

Everything follows from ``seed``. Label noise has its own random numbers, so the points do not change with
it. The circles were fixed before any result was seen; the paper does not give those of its Figure 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

DIRECTIONS = 16
CLUSTER = 200
"""Points of an out-of-distribution cluster."""


@dataclass(frozen=True, eq=False)
class LabelledPoints:
    """Points ``x``: (n, 2). ``y``: (n,) labels with noise. ``clean``: (n,) labels without."""

    x: Tensor
    y: Tensor
    clean: Tensor

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True, eq=False)
class SyntheticTask:
    """Points to train, calibrate and test on, from one distribution, and out-of-distribution clusters."""

    name: str
    title: str
    num_classes: int
    train: LabelledPoints
    held_out: LabelledPoints
    test: LabelledPoints
    ood: Tensor | None
    """(200, 2): out-of-distribution cluster of the paper's Figure 1; its circles have none."""
    ood_directions: Tensor
    """(16, 200, 2): a cluster in each of 16 compass directions, none of them chosen by result."""
    frame: tuple[float, ...]
    """Left, right, bottom and top of the figure, a square."""


def two_moons(seed: int, label_noise: float = 0.0) -> SyntheticTask:
    """Two interlocking half circles, noise 0.1, and an out-of-distribution cluster at (2.5, −1.75).

    The classes are moved apart by ±(0.1, −0.2) and the cluster is that of SNGP's tutorial. Its angles are
    evenly spaced, ours random, so that test points are new.

    >>> two_moons(0).train.x.shape
    torch.Size([1000, 2])
    """

    def draw(clean: Tensor, points: torch.Generator) -> Tensor:
        angle = math.pi * torch.rand(len(clean), generator=points)
        upper = torch.stack([angle.cos() - 0.1, angle.sin() + 0.2], 1)
        lower = torch.stack([1.1 - angle.cos(), 0.3 - angle.sin()], 1)
        return torch.where(clean[:, None] == 0, upper, lower) + _normal(len(clean), 0.1, points)

    flips = _uniform_flips(label_noise, num_classes=2)
    rule = _Rule(draw, flips, (500, 150, 1000), distance=3.5, spread=0.1, ood=(2.5, -1.75))
    return rule.make("two_moons", "Two moons" + _flipped(label_noise), seed, (-3.5, 4.5, -3.75, 4.25))


def gaussian_mixture(seed: int, label_noise: float = 0.0) -> SyntheticTask:
    """Gaussians of standard deviation 0.5 at (±2, ±2): three are classes, (2, −2) is OOD."""
    centres = torch.tensor([[-2.0, -2.0], [-2.0, 2.0], [2.0, 2.0]])

    def draw(clean: Tensor, points: torch.Generator) -> Tensor:
        return centres[clean] + _normal(len(clean), 0.5, points)

    flips = _uniform_flips(label_noise, num_classes=3)
    rule = _Rule(draw, flips, (500, 100, 1000), distance=7.0, spread=0.5, ood=(2.0, -2.0))
    title = "Gaussian mixture" + _flipped(label_noise)
    return rule.make("gaussian_mixture", title, seed, (-6.0, 6.0, -6.0, 6.0))


def noisy_circles(seed: int) -> SyntheticTask:
    """Three concentric circles of radius 1, 2, 3, radial noise 0.25, the outer ones ever more mislabelled.

    A label is flipped with probability 0.1, 0.3, 0.5 to one of the other two. The circles overlap: a rule
    that knows the radius is correct on about 0.97 of the clean labels.
    """

    def draw(clean: Tensor, points: torch.Generator) -> Tensor:
        angle = math.tau * torch.rand(len(clean), generator=points)
        radius = clean + 1 + 0.25 * torch.randn(len(clean), generator=points)
        return radius[:, None] * torch.stack([angle.cos(), angle.sin()], 1)

    rule = _Rule(draw, torch.tensor([0.1, 0.3, 0.5]), (500, 100, 2000), distance=7.0, spread=0.25)
    return rule.make("noisy_circles", "Noisy concentric circles", seed, (-6.0, 6.0, -6.0, 6.0))


TASKS: dict[str, Callable[..., SyntheticTask]] = {
    "two_moons": two_moons,
    "gaussian_mixture": gaussian_mixture,
    "noisy_circles": noisy_circles,
}
FIXED_NOISE = ("noisy_circles",)
"""Tasks that take no ``label_noise``."""


def make_task(name: str, seed: int, label_noise: float = 0.0) -> SyntheticTask:
    """Make the task ``name``; ``label_noise`` is ignored by tasks with a fixed noise."""
    return TASKS[name](seed) if name in FIXED_NOISE else TASKS[name](seed, label_noise)


def flip_labels(clean: Tensor, probability: Tensor, generator: torch.Generator) -> Tensor:
    """Flip each label with the ``probability`` (K,) of its class, uniformly to another class."""
    flipped = torch.rand(len(clean), generator=generator) < probability[clean]
    step = torch.randint(1, len(probability), (len(clean),), generator=generator)
    return torch.where(flipped, (clean + step) % len(probability), clean)


def compass(centre: Tensor, distance: float) -> Tensor:
    """(16, 2): a point in each compass direction at ``distance`` from ``centre`` (2,)."""
    angle = torch.arange(DIRECTIONS) * math.tau / DIRECTIONS
    return centre + distance * torch.stack([angle.cos(), angle.sin()], 1)


# --- drawing a task -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Rule:
    """Distribution of a task's points; ``make`` draws them."""

    draw: Callable[[Tensor, torch.Generator], Tensor]
    """Clean labels (n,) → points (n, 2)."""
    flips: Tensor
    """(K,) probability that a label of each class is flipped."""
    per_class: tuple[int, int, int]
    """Number of points of each class to train on, to hold out and to test on."""
    distance: float
    """Distance of the 16 clusters from the mean of the training points."""
    spread: float
    """Standard deviation of an out-of-distribution cluster."""
    ood: tuple[float, float] | None = None
    """Centre of the paper's out-of-distribution cluster."""

    def make(self, name: str, title: str, seed: int, frame: tuple[float, ...]) -> SyntheticTask:
        points, noise, clusters = _streams(seed)

        def labelled(count: int) -> LabelledPoints:
            clean = torch.arange(len(self.flips)).repeat_interleave(count)
            return LabelledPoints(self.draw(clean, points), flip_labels(clean, self.flips, noise), clean)

        train, held_out, test = (labelled(count) for count in self.per_class)
        around = compass(train.x.mean(0), self.distance).repeat_interleave(CLUSTER, 0)
        directions = around + _normal(len(around), self.spread, clusters)
        ood = None
        if self.ood is not None:
            ood = torch.tensor(self.ood) + _normal(CLUSTER, self.spread, clusters)
        return SyntheticTask(
            name,
            title,
            len(self.flips),
            train,
            held_out,
            test,
            ood,
            directions.view(DIRECTIONS, CLUSTER, 2),
            frame,
        )


def _uniform_flips(label_noise: float, num_classes: int) -> Tensor:
    if not 0 <= label_noise < 0.5:
        raise ValueError(f"label_noise must be at least 0 and below 0.5, got {label_noise!r}")
    return torch.full((num_classes,), float(label_noise))


def _flipped(label_noise: float) -> str:
    return f", {100 * label_noise:g} % of labels flipped" if label_noise else ""


def _normal(count: int, std: float, generator: torch.Generator) -> Tensor:
    return std * torch.randn(count, 2, generator=generator)


def _streams(seed: int) -> tuple[torch.Generator, torch.Generator, torch.Generator]:
    """Independent generators for points, label noise and clusters."""
    root = torch.Generator().manual_seed(seed)
    first, second, third = torch.randint(2**62, (3,), generator=root).tolist()
    return _generator(first), _generator(second), _generator(third)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
