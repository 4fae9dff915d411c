"""Description of a named data set, and where its files are looked for."""

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
    """One line: what it is, how many images or texts, of what size."""
    layout: str
    """Files expected, below the folder of data sets."""
    get: str
    """Command or address to get it."""
    splits: tuple[str, ...]
    open: Callable[..., Any]
    """(folder of data sets, split) → an object of the class ``gives``; with a third argument for variants."""
    size: int | None = None
    """Side in pixels, where all files have one size."""
    variants: tuple[str, ...] = ()
    """Variants, named after a colon: "cifar10n:aggre"."""
    gives: str = "ImageArrays"
    """Class of the object that ``open`` returns, or two with "or" between."""


def data_root(root: str | Path | None = None) -> Path:
    """Folder of data sets: ``root``, or the environment variable HETSNGP_DATA."""
    value = os.environ.get(ENVIRONMENT) if root is None else root
    if not value:
        raise ValueError(
            f"no folder of data sets: set the environment variable {ENVIRONMENT} to it "
            "(in Python also: root=…)"
        )
    return Path(value).expanduser()


def first_file(name: str, files: Sequence[Path], get: str) -> Path:
    """First of ``files`` that exists, or the error of :func:`missing`."""
    for file in files:
        if file.is_file():
            return file
    raise missing(name, files, get)


def missing(name: str, paths: Sequence[Path], get: str) -> FileNotFoundError:
    """Error for a data set that has none of ``paths``: the files expected, and how to get them."""
    listed = "".join(f"\n  {path}" for path in paths)
    where = "there is no" if len(paths) == 1 else "there is none of"
    return FileNotFoundError(f"no {name}: {where}{listed}\nTo get it: {get}")
