"""Features of images by a frozen network, kept in parts by the content of the images.

A part is a file of some hundred features and the SHA-256 of the images that they are of. An interrupted
extraction goes on from the parts that are there, and of changed data only new and changed images are run
through the network, wherever their files are and whatever their labels.
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hetsngp.auditing.pretrained import PretrainedNetwork
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.copies import PART as PART_OF_KEYS
from hetsngp.data.images.copies import content_keys
from hetsngp.data.images.files import ImageFiles, read_image
from hetsngp.files import remove_leftovers, replace_file, write_tensors
from hetsngp.fitting.progress import ExampleProgress

PART = 512
"""Images of a part: after a crash as many are run again, at most; Ctrl-C keeps all that were run."""
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

    ``keys``: of :func:`~hetsngp.data.images.copies.content_keys`, where they are known. The caller holds the
    lock of ``folder``, or of one that contains it.

    Images that cannot be read are an error, which comes after the features of all others have been written.
    """
    folder = folder / network.identity()[:16]
    remove_leftovers(folder)
    keys = keys_with_progress(images, show) if keys is None else keys
    known = _read_parts(folder)
    missing = {key: row for row, key in enumerate(keys) if key not in known}  # copies are run once
    rows = list(missing.values())
    broken: set[bytes] = set()
    kept = f", {len(set(keys) & known.keys())} are there" if known else ""
    title = f"features by {network.name}{kept}"
    with ExampleProgress(title, len(rows) or None, show and bool(rows), unit="images") as shown:
        for begin in range(0, len(rows), PART):
            pixels, errors = _decode(images, rows[begin : begin + PART], network.size)
            broken |= {keys[row] for row in errors}
            part = [row for row in rows[begin : begin + PART] if row not in errors]
            if not part:
                continue
            found: list[Tensor] = []
            try:
                for batch in pixels.split(batch_size):
                    found.extend(network.features(batch))
                    for _ in batch:
                        shown.add(1)
            finally:  # after Ctrl-C, what was computed
                done = [keys[row] for row in part[: len(found)]]
                if done:
                    _write_part(folder, done, torch.stack(found))
            known |= dict(zip(done, found, strict=True))
    if broken:
        rows = [row for row, key in enumerate(keys) if key in broken]  # copies, such as empty files, too
        _, errors = _decode(images, rows[:SHOWN], network.size)
        reasons = "; ".join(errors.values())
        more = f"; and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
        raise ValueError(
            f"{len(rows)} of {len(images)} images cannot be used: {reasons}{more}; then run the same "
            "command again: the features of the others are kept"
        )
    return torch.stack([known[key] for key in keys])


def keys_with_progress(images: ImageArrays | ImageFiles, show: bool) -> list[bytes]:
    """:func:`~hetsngp.data.images.copies.content_keys` with progress."""
    parts = math.ceil(len(images) / PART_OF_KEYS)
    with ExampleProgress("reading", parts, show, unit="images") as shown:
        return content_keys(images, shown.add)


def _decode(images: ImageArrays | ImageFiles, rows: list[int], size: int) -> tuple[Tensor, dict[int, str]]:
    """Pixels of the images that can be read, (n, C, H, W), and by row what is wrong with the others."""
    if isinstance(images, ImageArrays):
        return images.images[rows], {}
    files = images.files

    def decode(row: int) -> Tensor | str:
        try:
            return read_image(files[row], size)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(rows, pool.map(decode, rows), strict=True))
    pictures = [value for value in found.values() if isinstance(value, Tensor)]
    errors = {row: value for row, value in found.items() if isinstance(value, str)}
    return torch.stack(pictures) if pictures else torch.empty(0), errors


def _write_part(folder: Path, keys: list[bytes], h: Tensor) -> None:
    name = hashlib.sha256(b"".join(keys)).hexdigest()[:24]
    digests = torch.from_numpy(np.frombuffer(b"".join(keys), np.uint8).copy()).view(len(keys), -1)
    tensors = {"keys": digests, "h": h.contiguous()}
    replace_file(folder / f"{name}.safetensors", lambda file: write_tensors(tensors, file))


def _read_parts(folder: Path) -> dict[bytes, Tensor]:
    return {key: h for file in sorted(folder.glob("*.safetensors")) for key, h in _read_part(file)}


def _read_part(file: Path) -> Iterator[tuple[bytes, Tensor]]:
    try:
        tensors = load_file(file)
        keys, h = tensors["keys"], tensors["h"]
        if keys.dtype != torch.uint8 or h.dtype != torch.float32 or len(keys) != len(h) or h.dim() != 2:
            raise ValueError("its tensors have other types or shapes")
    except (SafetensorError, KeyError, ValueError) as error:
        warnings.warn(f"{file} is damaged ({error}): its features are computed again", stacklevel=2)
        file.unlink()
        return
    yield from zip((row.tobytes() for row in keys.numpy()), h, strict=True)
