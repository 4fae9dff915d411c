"""Conversion of a network with a linear output layer into a :class:`hetsngp.Classifier`."""

from hetsngp.conversion.conversion import Conversion, convert

__all__ = ["Conversion", "convert"]
