"""The paper's three synthetic tasks, in two dimensions so that doubt can be drawn.

Everything follows from ``seed``. Label noise has random numbers of its own, so the points do not change with
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
"""Points of an unseen cluster."""


@dataclass(frozen=True, eq=False)
class LabelledPoints:
    """``x``: (n, 2). ``y``: (n,) the labels as given, noise and all. ``clean``: (n,) as they should be."""

    x: Tensor
    y: Tensor
    clean: Tensor

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True, eq=False)
class SyntheticTask:
    """Points to train, calibrate and test on, all drawn by one rule, and clusters that no class explains."""

    name: str
    title: str
    num_classes: int
    train: LabelledPoints
    held_out: LabelledPoints
    test: LabelledPoints
    ood: Tensor | None
    """(200, 2): the unseen cluster of the paper's Figure 1; its circles have none."""
    ood_directions: Tensor
    """(16, 200, 2): a cluster in each of 16 compass directions, none of them chosen by result."""
    frame: tuple[float, ...]
    """Left, right, bottom and top of the figure, a square."""


def two_moons(seed: int, label_noise: float = 0.0) -> SyntheticTask:
    """Two interlocking half circles, noise 0.1, and an unseen cluster at (2.5, −1.75).

    The classes are moved apart by ±(0.1, −0.2) and the cluster stands where SNGP's own tutorial has it. Its
    angles are evenly spaced, ours random, so that test points are new.

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
    """Gaussians of standard deviation 0.5 at (±2, ±2): three are classes, the one at (2, −2) is unseen."""
    centres = torch.tensor([[-2.0, -2.0], [-2.0, 2.0], [2.0, 2.0]])

    def draw(clean: Tensor, points: torch.Generator) -> Tensor:
        return centres[clean] + _normal(len(clean), 0.5, points)

    flips = _uniform_flips(label_noise, num_classes=3)
    rule = _Rule(draw, flips, (500, 100, 1000), distance=7.0, spread=0.5, ood=(2.0, -2.0))
    title = "Gaussian mixture" + _flipped(label_noise)
    return rule.make("gaussian_mixture", title, seed, (-6.0, 6.0, -6.0, 6.0))


def noisy_circles(seed: int) -> SyntheticTask:
    """Three concentric circles of radius 1, 2, 3, radial noise 0.25, the outer ones ever more mislabelled.

    A label is flipped with probability 0.1, 0.3, 0.5 to one of the other two. The circles overlap, so a rule
    that knows the radius is right on about 0.97 of the clean labels.
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
NOISE_OF_ITS_OWN = ("noisy_circles",)
"""Tasks that take no ``label_noise``."""


def make_task(name: str, seed: int, label_noise: float = 0.0) -> SyntheticTask:
    """The task of that name; ``label_noise`` is for those that have none of their own."""
    return TASKS[name](seed) if name in NOISE_OF_ITS_OWN else TASKS[name](seed, label_noise)


def flip_labels(clean: Tensor, probability: Tensor, generator: torch.Generator) -> Tensor:
    """Each label changed with its class's ``probability`` (K,), to any other class alike."""
    flipped = torch.rand(len(clean), generator=generator) < probability[clean]
    step = torch.randint(1, len(probability), (len(clean),), generator=generator)
    return torch.where(flipped, (clean + step) % len(probability), clean)


def compass(centre: Tensor, distance: float) -> Tensor:
    """(16, 2): a point in each compass direction at ``distance`` from ``centre`` (2,)."""
    angle = torch.arange(DIRECTIONS) * math.tau / DIRECTIONS
    return centre + distance * torch.stack([angle.cos(), angle.sin()], 1)


# --- what all three share -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Rule:
    """How a task draws its points; ``make`` draws them."""

    draw: Callable[[Tensor, torch.Generator], Tensor]
    """Clean labels (n,) → points (n, 2)."""
    flips: Tensor
    """(K,) probability that a label of each class is changed."""
    per_class: tuple[int, int, int]
    """Points of each class to train on, to hold out and to test on."""
    distance: float
    """Of the 16 clusters from the mean of the training points."""
    spread: float
    """Standard deviation of an unseen cluster."""
    ood: tuple[float, float] | None = None
    """Centre of the paper's unseen cluster."""

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
    """Generators for points, label noise and clusters, so that none shifts the numbers of another."""
    root = torch.Generator().manual_seed(seed)
    first, second, third = torch.randint(2**62, (3,), generator=root).tolist()
    return tuple(torch.Generator().manual_seed(s) for s in (first, second, third))  # type: ignore[return-value]
