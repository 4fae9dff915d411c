"""Exponential moving average of the weights and statistics of a model.

torch's AveragedModel copies the model and takes buffers only in the shapes they have then, while the vectors
of spectral norms get theirs from the first batch; it also averages these directions (docs/decisions.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hetsngp.training.checkpointing.state_dicts import shard_like, with_memory_format_of


class MovingAverage:
    """ā ← λ·ā + (1 − λ)·a after each step, λ = min(decay, (1 + t)/(10 + t)): the initial weights fade soon.

    Floating-point tensors of the state dict are averaged; integers, and directions (the vectors of the power
    iteration), are copied.

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
        """Add the present weights to the average."""
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps)) if self.steps else 0.0
        self.steps += 1
        averages, values, copies, originals = [], [], [], []
        for name, value in self.model.state_dict().items():
            own = self.state.get(name)
            if own is None or own.shape != value.shape:
                self.state[name] = value.clone()
            elif _is_averaged(name, value):
                averages.append(_local(own))
                values.append(_local(value))
            else:
                copies.append(_local(own))
                originals.append(_local(value))
        if averages:
            torch._foreach_lerp_(averages, values, 1 - decay)
        if copies:
            torch._foreach_copy_(copies, originals)

    def load(self, steps: int, state: dict[str, Tensor]) -> None:
        """Restore an average, given as full tensors."""
        own = self.model.state_dict()
        self.steps = steps
        self.state = {
            name: shard_like(with_memory_format_of(value.to(own[name].device), own[name]), own[name])
            for name, value in state.items()
            if name in own
        }

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the averages inside; restore the weights afterwards."""
        own = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        self.apply()
        try:
            yield
        finally:
            _copy_into(self.model, own)

    def apply(self) -> None:
        """Copy the averages into the model."""
        _copy_into(self.model, self.state)


def _local(value: Tensor) -> Tensor:
    """Shard of this process under fsdp, which an elementwise average needs only."""
    shard: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return shard


def _is_averaged(name: str, value: Tensor) -> bool:
    directions = ("spectral_v", "spectral_direction")
    return value.is_floating_point() and name.rpartition(".")[2] not in directions


@torch.no_grad()
def _copy_into(model: nn.Module, state: dict[str, Tensor]) -> None:
    for name, value in model.state_dict().items():
        if name in state:
            value.copy_(state[name])
