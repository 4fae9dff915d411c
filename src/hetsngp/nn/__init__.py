"""Parameters and buffers: modules over the mathematics of :mod:`hetsngp.functional`."""

from hetsngp.nn import backbones

__all__ = ["backbones"]
