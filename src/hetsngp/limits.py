"""Limits on what a file may ask for: a damaged or hostile one must not take all memory.

Each is far above what data sets and models have, and can be raised by an environment variable, which worker
processes inherit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


class LimitExceeded(ValueError):
    """A file asks for more than a limit allows."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, NumPy, a GPU or torch's CPU allocator, which has no error type of its own, has no more
    memory.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to …"))
    True
    """
    names = [kind.__name__ for kind in type(error).__mro__]  # without importing torch
    text = str(error)
    known = isinstance(error, MemoryError) or "OutOfMemoryError" in names
    return known or "can't allocate memory" in text or "not enough memory" in text


@dataclass(frozen=True)
class Limit:
    """Largest amount of something in a file that is read.

    >>> sides = Limit("SIDE", 1000, "pixels a side", "height or width of an image")
    >>> sides.check(900, "cat.png")
    >>> sides.check(2000, "cat.png")
    Traceback (most recent call last):
    hetsngp.limits.LimitExceeded: cat.png has 2,000 pixels a side, more than the limit of 1,000: if you ...
    """

    name: str
    default: int
    unit: str
    about: str
    """What is limited, for the documents."""

    @property
    def variable(self) -> str:
        """Environment variable that replaces the default."""
        return f"HETSNGP_MAX_{self.name}"

    @property
    def value(self) -> int:
        """The limit in force."""
        text = os.environ.get(self.variable)
        if text is None:
            return self.default
        if not text.isascii() or not text.isdigit() or len(text) > 18 or int(text) == 0:
            raise ValueError(f"{self.variable} is {text!r:.50}: give a positive whole number")
        return int(text)

    def check(self, amount: int, what: str) -> None:
        """Raise :class:`LimitExceeded` where ``amount`` of ``what`` is above the limit."""
        if amount > self.value:
            raise LimitExceeded(
                f"{what} has {amount:,} {self.unit}, more than the limit of {self.value:,}: if you trust the "
                f"file, set the environment variable {self.variable}={amount}"
            )
