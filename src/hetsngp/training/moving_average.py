"""Exponential moving average of the weights and statistics of a model.

torch's AveragedModel copies the model when it is made and takes buffers only in the shapes they have then;
the spectral bound's vectors have none before the first batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hetsngp.training.checkpointing.state_dicts import shard_like, with_memory_format_of


class MovingAverage:
    """ā ← λ·ā + (1 − λ)·a after each step, λ = min(decay, (1 + t)/(10 + t)): the start is soon forgotten.

    Of everything in the state dict that has decimals; whole numbers, and what is a direction and no
    quantity (the power iteration's vectors), are as the model has them.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> average = MovingAverage(model, 0.9)
    >>> with torch.no_grad():
    ...     for value in (0.0, 1.0, 1.0):
    ...         _ = model.weight.fill_(value)
    ...         average.update()
    >>> with average.applied():
    ...     round(model.weight.item(), 3)
    0.955
    >>> model.weight.item()
    1.0
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.steps = 0
        self.state: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self) -> None:
        """Take the model as it is into the average."""
        keep = min(self.decay, (1 + self.steps) / (10 + self.steps)) if self.steps else 0.0
        self.steps += 1
        averages, values = [], []
        for name, value in self.model.state_dict().items():
            average = self.state.get(name)
            if average is None or average.shape != value.shape or not _is_quantity(name, value):
                self.state[name] = value.detach().clone()
            else:
                averages.append(_own_share(average))
                values.append(_own_share(value.detach()))
        if averages:
            torch._foreach_lerp_(averages, values, 1 - keep)

    def load(self, steps: int, state: dict[str, Tensor]) -> None:
        """Go on from an earlier average, given in whole tensors."""
        own = self.model.state_dict()
        self.steps = steps
        self.state = {
            name: shard_like(with_memory_format_of(value.to(own[name].device), own[name]), own[name])
            for name, value in state.items()
            if name in own
        }

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averages inside, and its own weights again afterwards."""
        own = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        self.apply()
        try:
            yield
        finally:
            _copy_into(self.model, own)

    def apply(self) -> None:
        """Give the model the averages for good."""
        _copy_into(self.model, self.state)


def _own_share(value: Tensor) -> Tensor:
    """What this process has of a tensor that fsdp shares out: number by number, an average needs no more."""
    local: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return local


def _is_quantity(name: str, value: Tensor) -> bool:
    directions = ("spectral_v", "spectral_direction")
    return value.is_floating_point() and name.rpartition(".")[2] not in directions


@torch.no_grad()
def _copy_into(model: nn.Module, state: dict[str, Tensor]) -> None:
    for name, value in model.state_dict().items():
        if name in state:
            value.copy_(state[name])
