"""The constants of CIFAR-C and ImageNet-C, severity 1 to 5 (Hendrycks & Dietterich 2019).

CIFAR-C's are much milder: 32 pixels hold less than 224.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SEVERITIES = (1, 2, 3, 4, 5)
FAMILIES = ("cifar", "imagenet")


def _zooms(*ends: tuple[float, float]) -> tuple[tuple[float, ...], ...]:
    """Zoom factors np.arange(1, end, step); by rounding they may or may not include the end, as published."""
    return tuple(tuple(np.arange(1, end, step).tolist()) for end, step in ends)


CONSTANTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "gaussian_noise": {"cifar": (0.04, 0.06, 0.08, 0.09, 0.10), "imagenet": (0.08, 0.12, 0.18, 0.26, 0.38)},
    "shot_noise": {"cifar": (500, 250, 100, 75, 50), "imagenet": (60, 25, 12, 5, 3)},
    "impulse_noise": {"cifar": (0.01, 0.02, 0.03, 0.05, 0.07), "imagenet": (0.03, 0.06, 0.09, 0.17, 0.27)},
    # Radius of the disk, standard deviation that softens its edge.
    "defocus_blur": {
        "cifar": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        "imagenet": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    },
    # Standard deviation of the blur, largest shift, rounds.
    "glass_blur": {
        "cifar": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
        "imagenet": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    },
    # Radius, standard deviation.
    "motion_blur": {
        "cifar": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
        "imagenet": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    },
    "zoom_blur": {
        "cifar": _zooms((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
        "imagenet": _zooms((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
    },
    # Mean and standard deviation of the flakes, zoom, threshold, radius and σ of their motion, weight of x.
    "snow": {
        "cifar": (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
        "imagenet": (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
    },
    # Weight of the image, of the frost.
    "frost": {
        "cifar": ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
        "imagenet": ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
    },
    # Amount, decay of the fractal's roughness.
    "fog": {
        "cifar": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
        "imagenet": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
    },
    "brightness": {"cifar": (0.05, 0.1, 0.15, 0.2, 0.3), "imagenet": (0.1, 0.2, 0.3, 0.4, 0.5)},
    "contrast": {"cifar": (0.75, 0.5, 0.4, 0.3, 0.15), "imagenet": (0.4, 0.3, 0.2, 0.1, 0.05)},
    # α, σ, jitter of the corners; times the side (CIFAR) or 244 (ImageNet).
    "elastic_transform": {
        "cifar": ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
        "imagenet": (
            (2, 0.7, 0.1),
            (2, 0.08, 0.2),
            (0.05, 0.01, 0.02),
            (0.07, 0.01, 0.02),
            (0.12, 0.01, 0.02),
        ),
    },
    "pixelate": {"cifar": (0.95, 0.9, 0.85, 0.75, 0.65), "imagenet": (0.6, 0.5, 0.4, 0.3, 0.25)},
    "jpeg_compression": {"cifar": (80, 65, 58, 50, 40), "imagenet": (25, 18, 15, 10, 7)},
    "speckle_noise": {"cifar": (0.06, 0.1, 0.12, 0.16, 0.2), "imagenet": (0.15, 0.2, 0.35, 0.45, 0.6)},
    "gaussian_blur": {"cifar": (0.4, 0.6, 0.7, 0.8, 1), "imagenet": (1, 2, 3, 4, 6)},
    # Factor and offset of the saturation.
    "saturate": {
        "cifar": ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
        "imagenet": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
    },
}
