"""Where data sets lie, and what is said where one does not."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENVIRONMENT = "HETSNGP_DATA"


@dataclass(frozen=True)
class DataSet:
    """An entry of the registry, ``hetsngp.data.datasets.registry``."""

    name: str
    about: str
    """One line: what it is, how many images, of what size."""
    layout: str
    """The files expected, below the folder of data sets."""
    get: str
    """Where to get it: a command or an address."""
    splits: tuple[str, ...]
    open: Callable[..., Any]
    """(folder of data sets, split) → what ``gives`` says; also (…, split, variant) where there are
    variants.
    """
    size: int | None = None
    """Pixels of a side where the files have one size."""
    variants: tuple[str, ...] = ()
    """What may follow the name and a colon, e.g. "cifar10n:aggre"."""
    gives: str = "ImageArrays"
    """The class of what comes back, or two with "or" between."""


def data_root(root: str | Path | None = None) -> Path:
    """The folder of data sets: as given, or the environment variable HETSNGP_DATA."""
    value = os.environ.get(ENVIRONMENT) if root is None else root
    if not value:
        raise ValueError(
            f"where is the data? set the environment variable {ENVIRONMENT} to the folder of data sets "
            "(in Python also: root=…)"
        )
    return Path(value).expanduser()


def first_file(name: str, files: Sequence[Path], get: str) -> Path:
    """The first of ``files`` that is there, or the error of :func:`missing`."""
    for file in files:
        if file.is_file():
            return file
    raise missing(name, files, get)


def missing(name: str, places: Sequence[Path], get: str) -> FileNotFoundError:
    """The error for a data set that is at none of ``places``: what to put where, and where it comes from."""
    listed = "".join(f"\n  {place}" for place in places)
    where = "there is no" if len(places) == 1 else "there is none of"
    return FileNotFoundError(f"no {name}: {where}{listed}\nTo get it: {get}")
