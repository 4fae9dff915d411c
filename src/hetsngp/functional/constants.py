"""Tensors that depend on no input: compilers take them as constants of the graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

# Constants of modules that are to be traced, by their function and its arguments.
_known: dict[tuple[Hashable, ...], Tensor] = {}
_keeps = False


@contextmanager
def kept_constants() -> Iterator[None]:
    """Context in which every constant that is made is kept for the tracing of what made it."""
    global _keeps
    before, _keeps = _keeps, True
    try:
        yield
    finally:
        _keeps = before


def constant(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Function whose result is a constant of a traced graph, though ``make`` may cache, loop and factorise.

    Arguments are numbers, devices and dtypes. A graph may have any number of constants from
    :func:`kept_constants`, and one of each function without.
    """
    name = make.__name__

    def unknown(*args: Hashable) -> Tensor:
        # torch.export calls it with modes that make tensors without values, which a cache would keep.
        with _disable_current_modes():
            return make(*args)

    # torch.compiler.assume_constant_result, without the seconds that its import takes. The compiler
    # distinguishes constants by the name of the code.
    unknown.__code__ = unknown.__code__.replace(co_name=name)
    unknown._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def made(*args: Hashable) -> Tensor:
        if torch.compiler.is_compiling():
            key = (name, *args)
            return _known[key] if key in _known else unknown(*args)
        value = make(*args)
        if _keeps and (name, *args) not in _known:
            # torch._dynamo.mark_static: with dynamic=True a constant that has as many rows as the batch would
            # share its symbol, and the program would be for batches of that size alone. So would the base of
            # a view.
            kept = _known[(name, *args)] = value.clone()
            kept._dynamo_static_indices = set(range(kept.dim()))  # type: ignore[attr-defined]
        return value

    return made
