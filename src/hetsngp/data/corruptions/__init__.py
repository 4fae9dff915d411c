"""The 15 standard corruptions at 5 severities (Hendrycks & Dietterich 2019), batched, on CPU or CUDA.

``corrupt(images, name, severity)`` is all one needs. ``noise``, ``blur``, ``weather``, ``digital`` and
``jpeg`` hold a function for each, over ``filters``; ``constants`` those of CIFAR-C and ImageNet-C; ``draws``
the random numbers. Where the published code has slips that its published images show, we have them too.
"""

from hetsngp.data.corruptions.apply import CORRUPTIONS, EXTRA, corrupt, corrupt_float, prepared_frost
from hetsngp.data.corruptions.constants import CONSTANTS, SEVERITIES
from hetsngp.data.corruptions.draws import Draws
from hetsngp.data.corruptions.frost_images import has_frost, load_frost

__all__ = [
    "CONSTANTS",
    "CORRUPTIONS",
    "EXTRA",
    "SEVERITIES",
    "Draws",
    "corrupt",
    "corrupt_float",
    "has_frost",
    "load_frost",
    "prepared_frost",
]
