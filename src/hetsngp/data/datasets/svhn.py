"""SVHN, house numbers: cropped digits of 32 pixels in MATLAB files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetsngp.data.datasets.dataset import DataSet, data_root, first_file
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.limits import ARRAY_BYTES, LimitExceeded
from hetsngp.validation import check_choice

SIDE = 32
SPLITS = ("train", "test", "extra")
NUMBERS = {"uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "double": 8}
"""MATLAB's classes of numbers that are read, and their bytes."""
ZERO = 10
"""Label of the digit 0 in the files."""


def load_svhn(split: str = "test", root: str | Path | None = None) -> ImageArrays:
    """Load the ``split`` "train", "test" or "extra" of <split>_32x32.mat in ``root`` or ``root/svhn``.

    The class of a digit is the digit. torchvision's SVHN reads the same files, but only with the published
    checksums, so no part of the set, and it turns 10 into 0 before a wrong label could be found.
    """
    base = data_root(root)
    name = f"{check_choice('split', split, SPLITS)}_32x32.mat"
    files = [base / name, base / "svhn" / name]
    file = first_file("svhn", files, _get(split, repr(str(base / "svhn"))))
    pixels, digits = _read(file, _get(split, repr(str(file.parent))))
    images = np.ascontiguousarray(pixels.transpose(3, 2, 0, 1))
    labels = torch.from_numpy(digits.astype(np.int64).reshape(-1) % ZERO)
    return ImageArrays(torch.from_numpy(images), labels, tuple("0123456789"))


def _read(file: Path, get: str) -> tuple[np.ndarray, np.ndarray]:
    """(32, 32, 3, N) bytes and (N, 1) digits, 1 … 10."""
    scipy_io = _scipy_io()
    try:
        _check_headers({name: (shape, kind) for name, shape, kind in scipy_io.whosmat(file)}, file)
        content = scipy_io.loadmat(file, variable_names=("X", "y"))
        pixels, digits = content["X"], content["y"]
        count = pixels.shape[-1]
        if pixels.dtype != np.uint8 or pixels.shape != (SIDE, SIDE, 3, count):
            raise ValueError(f"X is {pixels.dtype} of shape {pixels.shape}, not bytes (32, 32, 3, N)")
        if digits.shape != (count, 1) or digits.min() < 1 or digits.max() > ZERO:
            raise ValueError(f"y of shape {digits.shape} is not one of 1 … 10 for each of {count} images")
    except LimitExceeded:
        raise
    except Exception as error:  # a corrupt file fails in zlib, struct or anywhere in SciPy
        raise ValueError(f"{file} is damaged ({error!r}): remove it and get it again, {get}") from error
    return pixels, digits


def _check_headers(found: dict[str, tuple[tuple[int, ...], str]], file: Path) -> None:
    """Check kind and size before data are read: SciPy recurses into cells, and expands what is compressed."""
    for name in ("X", "y"):
        shape, kind = found[name]
        if kind not in NUMBERS or any(side < 0 for side in shape):
            raise ValueError(f"{name} is a {kind} of shape {shape}, not numbers")
        needed = math.prod(shape) * NUMBERS[kind]
        if needed > file.stat().st_size:
            ARRAY_BYTES.check(needed, f"{name} of {file}")


def _get(split: str, folder: str) -> str:
    return f"torchvision.datasets.SVHN({folder}, {split!r}, download=True)"


def _scipy_io() -> Any:
    try:
        import scipy.io
    except ImportError as error:
        raise ImportError("SVHN's files are read with SciPy: pip install 'hetsngp[vision]'") from error
    return scipy.io


SVHN = DataSet(
    "svhn",
    "SVHN: 73,257 digits to train, 26,032 to test, 531,131 extra, 32 pixels",
    "train_32x32.mat, test_32x32.mat, extra_32x32.mat, here or in svhn/",
    _get("test", "root / 'svhn'"),
    SPLITS,
    lambda root, split: load_svhn(split, root),
)
