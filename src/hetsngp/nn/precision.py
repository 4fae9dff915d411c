"""Modules that stay in float32 in a half-precision model, and passes that a backward pass repeats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class KeepsPrecision(nn.Module):
    """Parameters and buffers stay in float32 or better when the model is moved to half precision.

    A variance is a small difference of large numbers, a density the exponential of one.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def guarded(tensor: Tensor) -> Tensor:
            out = fn(tensor)
            if out.dtype in (torch.float16, torch.bfloat16):
                return tensor.to(device=out.device, dtype=torch.float32)
            return out

        return super()._apply(guarded, recurse)


def is_recomputing() -> bool:
    """Whether a backward pass runs this forward pass again, as activation checkpointing does.

    It must then compute what the first one did, and change no state.
    """
    # The number of the backward pass that this thread is in; torch.utils.checkpoint asks for it too.
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
