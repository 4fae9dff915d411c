"""Features of images by a frozen network, kept by the content of the images."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.copies import PART as PART_OF_KEYS
from hetsngp.data.images.copies import content_keys
from hetsngp.data.images.files import ImageFiles, read_image
from hetsngp.fitting.progress import ExampleProgress
from hetsngp.pretrained.feature_cache import Unreadable, batches_of, cached_features
from hetsngp.pretrained.image_networks import PretrainedNetwork

SHOWN = 5
"""Images that cannot be read, as an error names them."""


def image_features(
    images: ImageArrays | ImageFiles,
    network: PretrainedNetwork,
    folder: Path,
    *,
    keys: Sequence[bytes] | None = None,
    batch_size: int = 64,
    show: bool = False,
) -> Tensor:
    """Features (N, D) of all images; those that ``folder`` has are read, the others are written there.

    ``keys``: of :func:`~hetsngp.data.images.copies.content_keys`, where they are known.

    Images that cannot be read are an error, which comes after the features of all others have been written.
    """
    keys = keys_with_progress(images, show) if keys is None else keys

    def compute(rows: list[int]) -> Iterator[tuple[int, Tensor]]:
        pixels, errors = _decode(images, rows, network)
        readable = [row for row in rows if row not in errors]
        for batch, chosen in zip(batches_of(readable, batch_size), pixels.split(batch_size), strict=False):
            yield from zip(batch, network.features(chosen), strict=True)

    folder, title = folder / network.identity()[:16], f"features by {network.name}"
    try:
        return cached_features(keys, folder, compute, title=title, unit="images", show=show)
    except Unreadable as error:
        _, errors = _decode(images, error.rows[:SHOWN], network)
        more = f"; and {len(error.rows) - SHOWN} more" if len(error.rows) > SHOWN else ""
        raise ValueError(
            f"{len(error.rows)} of {len(images)} images cannot be used: {'; '.join(errors.values())}{more}; "
            "then run the same command again: the features of the others are kept"
        ) from None


def keys_with_progress(images: ImageArrays | ImageFiles, show: bool) -> list[bytes]:
    """:func:`~hetsngp.data.images.copies.content_keys` with progress."""
    parts = math.ceil(len(images) / PART_OF_KEYS)
    with ExampleProgress("reading", parts, show, unit="images") as shown:
        return content_keys(images, shown.add)


def _decode(
    images: ImageArrays | ImageFiles, rows: list[int], network: PretrainedNetwork
) -> tuple[Tensor, dict[int, str]]:
    """Pixels of the images that can be read, (n, C, H, W), and by row what is wrong with the others."""
    if isinstance(images, ImageArrays):
        return images.images[rows], {}
    files = images.files

    def decode(row: int) -> Tensor | str:
        try:
            return read_image(files[row], network.size, network.resize)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(rows, pool.map(decode, rows), strict=True))
    pictures = [value for value in found.values() if isinstance(value, Tensor)]
    errors = {row: value for row, value in found.items() if isinstance(value, str)}
    return torch.stack(pictures) if pictures else torch.empty(0), errors
