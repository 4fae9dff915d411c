"""Comparison of a model's weights with those that its posterior was fitted with."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

Marks = tuple[tuple[int, int, int], ...]

# Values that are widened at once: 8 MiB.
_CHUNK = 2**20
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def marks_of(model: nn.Module) -> Marks | None:
    """Identity, version and address of every tensor: equal as long as none was written to or replaced.

    None where they cannot be read: while compiling, and for tensors that are sharded or have no storage. A
    write to ``parameter.data`` in place leaves no mark.
    """
    if torch.compiler.is_compiling():
        return None
    found = []
    for tensor in chain(model.parameters(), model.buffers()):
        if type(tensor) not in (nn.Parameter, Tensor, nn.Buffer) or tensor.device.type == "meta":
            return None
        version = 0 if tensor.is_inference() else tensor._version
        found.append((id(tensor), version, tensor.data_ptr()))
    return tuple(found)


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """Checksum of the bits of a tensor, the same on any device and for any number of threads.

    The sum of all values, as integers, each times its odd position, modulo 2⁶⁴.

    >>> checksum(torch.tensor([1.0, 2.0])) == checksum(torch.tensor([2.0, 1.0]))
    False
    """
    bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    odd = torch.arange(1, 2 * min(_CHUNK, max(1, bits.numel())), 2, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        chunk = bits[start : start + _CHUNK].long()
        total += (chunk * (odd[: len(chunk)] + 2 * start)).sum()
    return int(total)


@dataclass(frozen=True)
class FittedWeights:
    """Checksums of the weights, and of the posterior that was fitted with them."""

    weights: dict[str, tuple[torch.dtype, int]]
    posterior: dict[str, int]

    @staticmethod
    def of(model: nn.Module, posterior: dict[str, Tensor]) -> FittedWeights:
        weights = {name: (p.dtype, checksum(p)) for name, p in model.named_parameters()}
        return FittedWeights(weights, {name: checksum(t) for name, t in posterior.items()})

    def differ_from(self, other: FittedWeights) -> bool:
        """Whether weights differ; those in another precision cannot be compared and count as equal."""
        if self.weights.keys() != other.weights.keys():
            return True
        pairs = ((self.weights[name], other.weights[name]) for name in self.weights)
        return any(own != found for own, found in pairs if own[0] == found[0])


@dataclass
class Seen:
    """Marks at the last comparison and at the last check of values; a copy of the model has no marks."""

    compared: Marks | None = field(default=None)
    finite: Marks | None = field(default=None)

    def forget(self) -> None:
        """Look at the weights again: a fused optimiser writes to them without a mark."""
        self.compared = self.finite = None

    def __deepcopy__(self, memo: Any) -> Seen:
        return Seen()

    def __reduce__(self) -> tuple[type[Seen], tuple[()]]:
        return Seen, ()
