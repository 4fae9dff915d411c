"""The 15 standard corruptions at 5 severities (Hendrycks & Dietterich 2019), batched, on CPU or CUDA.

``corrupt(images, name, severity)`` of ``apply`` is the entry point. ``noise``, ``blur``, ``weather``,
``digital`` and ``jpeg`` have a function for each corruption, on top of ``filters``; ``constants`` has the
parameters of CIFAR-C and ImageNet-C, ``counter_rng`` the random numbers, ``frost_images`` the overlays of
frost. Errors of the published code that show in its published images are reproduced.
"""

from typing import Any

from hetsngp._moved import renamed
from hetsngp.data.corruptions.apply import CORRUPTIONS, EXTRA, corrupt, corrupt_float, prepared_frost
from hetsngp.data.corruptions.constants import CONSTANTS, SEVERITIES
from hetsngp.data.corruptions.counter_rng import CounterRNG
from hetsngp.data.corruptions.frost_images import has_frost, load_frost

__all__ = [
    "CONSTANTS",
    "CORRUPTIONS",
    "EXTRA",
    "SEVERITIES",
    "CounterRNG",
    "corrupt",
    "corrupt_float",
    "has_frost",
    "load_frost",
    "prepared_frost",
]


def __getattr__(name: str) -> Any:
    return renamed(__name__, name)
