"""Parameters and buffers: modules over the mathematics of :mod:`hetsngp.functional`."""

from typing import TYPE_CHECKING, Any

from hetsngp._moved import submodule

if not TYPE_CHECKING:  # or a type checker would take any name for a module

    def __getattr__(name: str) -> Any:
        return submodule(__name__, name)
