"""Pure mathematics on tensors: features → laplace → noise → link. No modules, no I/O, no global state."""

from typing import TYPE_CHECKING, Any

from hetsngp._moved import submodule

if not TYPE_CHECKING:  # or a type checker would take any name for a module

    def __getattr__(name: str) -> Any:
        return submodule(__name__, name)
