"""Optimiser and learning-rate schedule; the learning rate is a function of the epoch, without state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from hetsngp._moved import renamed_arguments, renamed_attribute
from hetsngp.models.classifier import Classifier
from hetsngp.validation import check_choice, check_not_negative, check_positive

OPTIMIZERS = ("adamw", "sgd")
DECAYS = ("cosine", "linear", "step", "constant")


@renamed_arguments(gp_lr="gp_lr_multiplier")
@dataclass(frozen=True)
class Schedule:
    """AdamW, or SGD with Nesterov momentum; the learning rate warms up, and decays from ``lr`` in ``epochs``.

    ``gp_lr_multiplier`` multiplies the learning rate of parameters of natural size one, the GP's weights and
    a flow's; a network's have about 1/√width. ``stop_after`` ends training after so many of the ``epochs``.

    >>> [round(Schedule(10, warmup=2).factor(epoch), 2) for epoch in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.04]
    >>> [Schedule(10, decay="step", milestones=(5, 8), gamma=0.5).factor(epoch) for epoch in (0, 5, 9)]
    [1.0, 0.5, 0.25]
    """

    epochs: int
    lr: float = 1e-3
    weight_decay: float = 1e-4
    gp_lr_multiplier: float = 1.0
    stop_after: int | None = None
    optimizer: str = "adamw"
    """"adamw" or "sgd"."""
    momentum: float = 0.9
    """Momentum of SGD."""
    decay: str = "cosine"
    """"cosine" or "linear" to zero, "step" by ``gamma`` at each of the ``milestones``, or "constant"."""
    warmup: float = 0.0
    """Epochs in which the learning rate rises linearly from zero to ``lr``."""
    milestones: tuple[float, ...] = ()
    """Epochs after which the learning rate is multiplied by ``gamma``, where ``decay`` is "step"."""
    gamma: float = 0.1
    smooth: bool = False
    """Whether the learning rate changes at every update; otherwise it is constant within an epoch."""
    gp_lr = renamed_attribute("gp_lr", "gp_lr_multiplier")
    set_rate = renamed_attribute("set_rate", "set_lr")

    def __post_init__(self) -> None:
        check_positive("epochs", self.epochs, integer=True)
        check_positive("lr", self.lr)
        check_positive("gp_lr_multiplier", self.gp_lr_multiplier)
        check_positive("gamma", self.gamma)
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_choice("decay", self.decay, DECAYS)
        check_not_negative("weight_decay", self.weight_decay)
        check_not_negative("momentum", self.momentum, 1.0)
        if not isinstance(self.warmup, int | float) or not 0 <= self.warmup < self.epochs:
            raise ValueError(
                f"warmup is in epochs, at least 0 and below epochs={self.epochs}: {self.warmup!r}"
            )
        if self.stop_after is not None:
            check_positive("stop_after", self.stop_after, integer=True)
        numbers = isinstance(self.milestones, tuple | list) and all(
            isinstance(at, int | float) for at in self.milestones
        )
        if not numbers:
            raise ValueError(f"milestones are epochs, e.g. (30, 60, 80), got {self.milestones!r:.200}")
        if (self.decay == "step") != bool(self.milestones):
            raise ValueError('decay="step" and milestones=(30, 60, 80) belong together: give both or neither')
        if not all(0 < at < self.epochs for at in self.milestones):
            raise ValueError(f"milestones are epochs between 0 and {self.epochs}, got {self.milestones!r}")

    @property
    def last(self) -> int:
        """Last epoch of training."""
        return self.epochs if self.stop_after is None else min(self.stop_after, self.epochs)

    def factor(self, done: float, unit: float = 1.0) -> float:
        """Learning rate of an update, relative to ``lr``; ``done``: epochs before it, ``unit``: its length in
        epochs.

        The first of n warm-up steps has 1/n, the last one the full learning rate.
        """
        if not self.smooth:
            done, unit = float(math.floor(done)), 1.0
        warm = 1.0 if done + unit >= self.warmup else (done + unit) / self.warmup
        if self.decay == "step":
            return warm * self.gamma ** sum(done >= at for at in self.milestones)
        left = 1 - max(0.0, done - self.warmup) / (self.epochs - self.warmup)
        kinds = {"cosine": (1 - math.cos(math.pi * left)) / 2, "linear": left, "constant": 1.0}
        return warm * kinds[self.decay]

    def make_optimizer(self, model: Classifier) -> torch.optim.Optimizer:
        """Make an optimiser of parameters that are not frozen; ``initial_lr`` is the full learning rate."""
        groups: list[dict[str, Any]] = []
        for group in model.parameter_groups(self.weight_decay):
            lr = self.lr * (self.gp_lr_multiplier if group.get("no_weight_decay") else 1.0)
            groups.append({**group, "lr": lr, "initial_lr": lr})
        if not any(group["params"] for group in groups):
            raise ValueError("every parameter is frozen: model.requires_grad_(True), or leave training out")
        if self.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.momentum > 0)
        return torch.optim.AdamW(groups, lr=self.lr)

    def set_lr(self, optimizer: torch.optim.Optimizer, done: float, unit: float = 1.0) -> float:
        """Set the learning rate of every group; return that of the first."""
        factor = self.factor(done, unit)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        return float(optimizer.param_groups[0]["lr"])
