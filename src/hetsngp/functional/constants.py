"""Tensors that depend on no input: compilers take them as constants of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

P = ParamSpec("P")


def constant(make: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Function whose result is a constant of a traced graph, though ``make`` may cache, loop and factorise.

    Arguments are numbers, devices and dtypes.
    """

    def made(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        if not torch.compiler.is_compiling():
            return make(*args, **kwargs)
        # torch.export calls it with modes that make tensors without values, which a cache would keep.
        with _disable_current_modes():
            return make(*args, **kwargs)

    # torch.compiler.assume_constant_result, without the seconds that its import takes.
    made._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return made
