"""Features of examples by a frozen network, kept in parts by the content of the examples.

A part is a file of some hundred features and the SHA-256 of the examples that they are of. An interrupted
extraction goes on from the parts that are there, and of changed data only new and changed examples are run
through the network, wherever they are and whatever their labels. Several runs may share a folder.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hetsngp.files import remove_leftovers, replace_file, write_tensors
from hetsngp.fitting.progress import ExampleProgress
from hetsngp.locking import one_writer

PART = 512
"""Examples of a part: after a crash as many are run again, at most; Ctrl-C keeps all that were run."""
WAIT = 86_400.0
"""Seconds to wait for another run that writes into the same folder: its features are then there."""


class Unreadable(ValueError):
    """Some examples have no features; ``rows``: which, copies included."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(f"{len(rows)} examples cannot be used")
        self.rows = rows


def cached_features(
    keys: Sequence[bytes],
    folder: Path,
    compute: Callable[[list[int]], Iterator[tuple[int, Tensor]]],
    *,
    title: str,
    unit: str = "examples",
    show: bool = False,
    part: int | None = None,
) -> Tensor:
    """Features (N, D) of the examples with these content ``keys``: those that ``folder`` has are read, the
    others computed and written there.

    ``folder`` belongs to one network and one preprocessing. ``compute`` takes rows and yields (row, features
    (D,)) in any order; for rows that it leaves out :class:`Unreadable` is raised, after the others have been
    written. ``part``: examples of a part; None: ``PART``.
    """
    size = PART if part is None else part
    found = _read_parts(folder, set(keys))
    if found.keys() >= set(keys):
        if show and found:
            print(f"{title}: all {len(found)} are there", flush=True)
        return torch.stack([found[key] for key in keys])
    broken: set[bytes] = set()
    with one_writer(folder, wait=WAIT) as locked:
        if locked:
            remove_leftovers(folder)
        found |= _read_parts(folder, set(keys) - found.keys())  # of a writer that was waited for
        missing = {key: row for row, key in enumerate(keys) if key not in found}  # copies are run once
        rows, kept = list(missing.values()), f", {len(found)} are there" if found else ""
        with ExampleProgress(f"{title}{kept}", len(rows) or None, show and bool(rows), unit=unit) as shown:
            for begin in range(0, len(rows), size):
                asked, done = rows[begin : begin + size], dict[int, Tensor]()
                try:
                    for row, h in compute(asked):
                        done[row] = h
                        shown.add(1)
                finally:  # after Ctrl-C, what was computed
                    if done:
                        _write_part(folder, [keys[row] for row in done], torch.stack([*done.values()]))
                found |= {keys[row]: h for row, h in done.items()}
                broken |= {keys[row] for row in asked if row not in done}
    if broken:
        raise Unreadable([row for row, key in enumerate(keys) if key in broken])
    return torch.stack([found[key] for key in keys])


def batches_of(rows: list[int], size: int) -> Iterator[list[int]]:
    """Rows in batches of ``size``."""
    remaining = iter(rows)
    while batch := list(islice(remaining, size)):
        yield batch


def _write_part(folder: Path, keys: list[bytes], h: Tensor) -> None:
    name = hashlib.sha256(b"".join(keys)).hexdigest()[:24]
    digests = torch.from_numpy(np.frombuffer(b"".join(keys), np.uint8).copy()).view(len(keys), -1)
    tensors = {"keys": digests, "h": h.contiguous()}
    replace_file(folder / f"{name}.safetensors", lambda file: write_tensors(tensors, file))


def _read_parts(folder: Path, wanted: set[bytes]) -> dict[bytes, Tensor]:
    found: dict[bytes, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        if found.keys() >= wanted:
            break
        found |= _read_part(file, wanted)
    return found


def _read_part(file: Path, wanted: set[bytes]) -> dict[bytes, Tensor]:
    """Features of the examples of a part that are ``wanted``; the others are not read."""
    try:
        with safe_open(file, framework="pt") as opened:
            keys, h = opened.get_tensor("keys"), opened.get_slice("h")
            shape, dtype = h.get_shape(), h.get_dtype()
            if keys.dtype != torch.uint8 or dtype != "F32" or len(shape) != 2 or len(keys) != shape[0]:
                raise ValueError("its tensors have other types or shapes")
            rows = {row.tobytes(): number for number, row in enumerate(keys.numpy())}
            if not rows.keys() & wanted:
                return {}
            values = h[:]
    except (SafetensorError, KeyError, ValueError) as error:
        warnings.warn(f"{file} is damaged ({error}): its features are computed again", stacklevel=4)
        file.unlink(missing_ok=True)
        return {}
    return {key: values[row] for key, row in rows.items() if key in wanted}
