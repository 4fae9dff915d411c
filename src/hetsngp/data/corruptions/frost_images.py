"""The six frost images, read from disk."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hetsngp.data.datasets.dataset import data_root, missing
from hetsngp.data.images.decoding import open_picture

FILES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg", "frost6.jpg")
GET = (
    "copy frost1.png, frost2.png, frost3.png, frost4.jpg, frost5.jpg and frost6.jpg from "
    "https://github.com/hendrycks/robustness/tree/master/ImageNet-C/create_c, or leave frost out"
)


def load_frost(root: str | Path | None = None) -> tuple[Tensor, ...]:
    """Load six overlays (3, H, W) uint8 from the folder ``frost`` of data sets."""
    folder = data_root(root) / "frost"
    if not all((folder / name).is_file() for name in FILES):
        raise missing("frost overlays", [folder / name for name in FILES], GET)
    return _read(folder)


def has_frost(root: str | Path | None = None) -> bool:
    """Whether the overlays exist."""
    try:
        folder = data_root(root) / "frost"
    except ValueError:
        return False
    return all((folder / name).is_file() for name in FILES)


@functools.cache
def _read(folder: Path) -> tuple[Tensor, ...]:
    pixels = (np.array(open_picture(folder / name, str(folder / name))) for name in FILES)
    return tuple(torch.from_numpy(image).permute(2, 0, 1).contiguous() for image in pixels)
