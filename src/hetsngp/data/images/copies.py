"""Copies of images, by their content: a model that has seen one has seen the label of all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from hetsngp.data.bounded import read_file
from hetsngp.data.images.arrays import ImageArrays, fold_rows
from hetsngp.data.images.files import ImageFiles
from hetsngp.data.text.texts import LabelledTexts
from hetsngp.limits import IMAGE_BYTES

# Images hashed between two calls of ``progress``.
PART = 1024


def content_keys(
    images: ImageArrays | ImageFiles | LabelledTexts, progress: Callable[[int], None] = lambda images: None
) -> list[bytes]:
    """SHA-256 of the content of each image: of the file, or of the shape and the pixels; or of each text.

    ``progress`` is called with the number of images of each part.
    """
    if isinstance(images, LabelledTexts):
        return [hashlib.sha256(text.encode()).digest() for text in images.texts]
    keys: list[bytes] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for begin in range(0, len(images), PART):
            if isinstance(images, ImageFiles):
                keys += pool.map(_file_key, images.files[begin : begin + PART], chunksize=64)
            else:
                shape = repr(tuple(images.images.shape[1:])).encode()
                pixels = images.images[begin : begin + PART].cpu().contiguous().numpy()
                keys += [hashlib.sha256(shape + row.tobytes()).digest() for row in pixels]
            progress(min(PART, len(images) - begin))
    return keys


def first_copies(keys: Sequence[bytes]) -> Tensor:
    """Number of the first image with the same content, for each of the images with these ``keys``: (N,)."""
    first: dict[bytes, int] = {}
    return torch.tensor([first.setdefault(key, row) for row, key in enumerate(keys)])


def image_folds(
    images: ImageArrays | ImageFiles | LabelledTexts,
    folds: int,
    seed: int = 0,
    keys: Sequence[bytes] | None = None,
) -> list[Tensor]:
    """Indices of each of ``folds`` parts of the images, by :func:`~hetsngp.data.images.arrays.fold_rows`.

    Copies of an image are in one part, whatever their labels, so that no part has an image of another one.
    ``keys``: of :func:`content_keys`, where they are known.
    """
    of_copy = first_copies(content_keys(images) if keys is None else keys)
    rows = of_copy.unique()
    if len(rows) < folds:
        raise ValueError(
            f"{len(rows)} different images cannot be divided into {folds} folds: choose fewer folds"
        )
    found = fold_rows(images.labels.cpu()[rows], images.num_classes, folds, seed)
    return [torch.isin(of_copy, rows[part]).nonzero().flatten() for part in found]


def _file_key(file: Path) -> bytes:
    return hashlib.sha256(read_file(file, IMAGE_BYTES)).digest()
