"""CIFAR-10 and CIFAR-100 from their authors' files, in torchvision's layout too, or from WebP strips.

The authors' Python files are pickles, which can run any code; torchvision unpickles them. Here
:mod:`hetsngp.data.array_pickles` reads them, which runs nothing.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetsngp.data.array_pickles import read_pickle
from hetsngp.data.bounded import buffered, check_regular, read_file
from hetsngp.data.datasets.dataset import DataSet, data_root, missing
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.decoding import open_picture
from hetsngp.limits import INDEX_BYTES, LIST_BYTES, PICKLE_BYTES
from hetsngp.validation import check_choice

SIDE = 32
PIXELS = 3 * SIDE * SIDE
SIZES = {"train": 50_000, "test": 10_000}
IMAGES_PER_STRIP = 500
"""Images in a strip of CIFAR-10, whose strips are not by class."""
MOST_FIELDS = 64
"""Columns of an index of strips, at most."""


@dataclass(frozen=True)
class _Layout:
    """File names and keys of the authors' archives."""

    title: str
    python: str
    binary: str
    files: dict[str, tuple[str, ...]]
    """Files of each split; the binary ones end in .bin."""
    meta: tuple[str, str]
    """Pickle with the class names, and their key in it."""
    names: str
    """File with the class names in the binary archive."""
    labels: str
    label_bytes: int
    """Bytes before the pixels of a binary record; the last of them is the (fine) label."""


CIFAR = {
    "cifar10": _Layout(
        "CIFAR10",
        "cifar-10-batches-py",
        "cifar-10-batches-bin",
        {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)},
        ("batches.meta", "label_names"),
        "batches.meta.txt",
        "labels",
        1,
    ),
    "cifar100": _Layout(
        "CIFAR100",
        "cifar-100-python",
        "cifar-100-binary",
        {"train": ("train",), "test": ("test",)},
        ("meta", "fine_label_names"),
        "fine_label_names.txt",
        "fine_labels",
        2,
    ),
}

Arrays = tuple[np.ndarray, np.ndarray, list[str]]
"""Bytes (N, 3, 32, 32), labels (N,), names of the classes."""


def load_cifar(name: str, split: str, root: str | Path | None = None) -> ImageArrays:
    """Load the ``split`` "train" or "test" of "cifar10" or "cifar100" (fine labels) from below ``root``.

    Looks for ``root/<name>/index.csv.gz`` with its WebP strips, then, in ``root`` and ``root/<name>``, for
    the folders of the Python archive, as torchvision unpacks it, and of the binary one. ``root`` None: the
    environment variable HETSNGP_DATA.
    """
    layout = CIFAR[check_choice("name", name, CIFAR)]
    check_choice("split", split, SIZES)
    base = data_root(root)
    readers: list[tuple[Path, Callable[[Path, str, _Layout], Arrays]]] = [(base / name, _read_strips)]
    for folder in (base, base / name):
        readers += [(folder / layout.python, _read_python), (folder / layout.binary, _read_binary)]
    for folder, read in readers:
        if folder.is_dir() and (read is not _read_strips or (folder / "index.csv.gz").exists()):
            pixels, labels, names = read(folder, split, layout)
            break
    else:
        get = f"{_command(layout, repr(str(base)))}; the first folder is for WebP strips with index.csv.gz"
        raise missing(name, [folder for folder, _ in readers], get)
    if len(labels) != SIZES[split]:
        raise ValueError(
            f"{folder} has {len(labels)} images of the split {split!r} where {SIZES[split]} were expected: "
            + _again(layout)
        )
    return ImageArrays(torch.from_numpy(pixels), torch.from_numpy(labels), tuple(names))


def _command(layout: _Layout, root: str = "root") -> str:
    return f"torchvision.datasets.{layout.title}({root}, download=True)"


def _again(layout: _Layout) -> str:
    return f"remove it and get it again, e.g. with {_command(layout)}"


def _damaged(file: Path, why: object, layout: _Layout) -> ValueError:
    return ValueError(f"{file} is missing or damaged ({why}): {_again(layout)}")


# --- the authors' archives ------------------------------------------------------------------------------


def _read_python(folder: Path, split: str, layout: _Layout) -> Arrays:
    meta, key = layout.meta
    try:
        file = folder / meta
        names = _texts(_unpickle(file)[key])
        pixels, labels = [], []
        for part in layout.files[split]:
            file = folder / part
            content = _unpickle(file)
            pixels.append(_records(content["data"], PIXELS))
            labels.append(_labels(content[layout.labels], len(pixels[-1])))
    except (OSError, KeyError, ValueError) as error:
        raise _damaged(file, error, layout) from error
    return np.concatenate(pixels).reshape(-1, 3, SIDE, SIDE), np.concatenate(labels), names


def _read_binary(folder: Path, split: str, layout: _Layout) -> Arrays:
    try:
        file = folder / layout.names
        names = read_file(file, LIST_BYTES).decode("ascii").split()
        parts = []
        for part in layout.files[split]:
            file = folder / f"{part}.bin"
            width = layout.label_bytes + PIXELS
            check_regular(file)
            parts.append(_records(np.fromfile(file, np.uint8).reshape(-1, width), width))
    except (OSError, ValueError) as error:
        raise _damaged(file, error, layout) from error
    records = np.concatenate(parts)
    pixels = np.ascontiguousarray(records[:, layout.label_bytes :]).reshape(-1, 3, SIDE, SIDE)
    return pixels, records[:, layout.label_bytes - 1].astype(np.int64), names


def _records(data: Any, width: int) -> np.ndarray:
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (width,):
        raise ValueError(f"no bytes of shape (n, {width})")
    return data


def _labels(values: Any, count: int) -> np.ndarray:
    """(count,) int64 of a list, or of an array in files written again by others."""
    if isinstance(values, list) and all(type(value) is int and abs(value) < 2**31 for value in values):
        values = np.array(values, dtype=np.int64)
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu" or values.shape != (count,):
        raise ValueError(f"no whole number for each of {count} images")
    return values.astype(np.int64)


def _texts(values: Any) -> list[str]:
    if not isinstance(values, list) or not all(type(value) is str for value in values):
        raise ValueError("no list of names")
    return values


def _unpickle(file: Path) -> dict[str, Any]:
    content, _ = read_pickle(read_file(file, PICKLE_BYTES))
    if not isinstance(content, dict):
        raise ValueError(f"a {type(content).__name__}, not a dict")
    return content


# --- WebP strips ----------------------------------------------------------------------------------------


def _read_strips(folder: Path, split: str, layout: _Layout) -> Arrays:
    """Read strips of images below one another; the index has strip, row and label of each image."""
    index = folder / "index.csv.gz"
    try:
        rows = _index_rows(index)
        names = {int(row["label"]): row["class_name"] for row in rows}
        where = sorted((*_position(row), int(row["label"])) for row in rows if row["split"] == split)
        if any(label < 0 or label >= len(names) for label in names):
            raise ValueError(f"labels other than 0 … {len(names) - 1}")
    # A row that is too short has None for text.
    except (OSError, EOFError, KeyError, TypeError, ValueError, zlib.error, csv.Error) as error:
        raise _damaged(index, error, layout) from error
    files = sorted({file for file, _, _ in where})
    with ThreadPoolExecutor() as pool:
        strips = list(pool.map(lambda file: _strip(folder / file, layout), files))
    expected = [(file, row) for file, strip in zip(files, strips, strict=True) for row in range(len(strip))]
    if expected != [(file, row) for file, row, _ in where]:
        raise _damaged(index, "the strips have other images than it lists", layout)
    pixels = np.concatenate(strips) if strips else np.empty((0, 3, SIDE, SIDE), np.uint8)
    labels = np.array([label for *_, label in where], dtype=np.int64)
    return pixels, labels, [names[label] for label in sorted(names)]


def _index_rows(index: Path) -> list[dict[str, str]]:
    most = 2 * sum(SIZES.values())
    check_regular(index)
    with buffered(gzip.open(index), INDEX_BYTES, str(index)) as stream:
        reader = csv.DictReader(io.TextIOWrapper(stream, encoding="utf-8", newline=""))
        if len(reader.fieldnames or ()) > MOST_FIELDS:
            raise ValueError(f"{len(reader.fieldnames or ())} columns")
        rows = list(itertools.islice(reader, most + 1))
    if len(rows) > most:
        raise ValueError(f"more than {most} rows")
    return rows


def _position(row: dict[str, str]) -> tuple[str, int]:
    """Strip of an image, and its row in the strip."""
    if "row_in_strip" in row:
        if "/" in row["class_name"] or "\\" in row["class_name"]:
            raise ValueError(f"the class {row['class_name']!a:.50}, which is no part of a file name")
        return f"{row['split']}_{int(row['label']):02d}_{row['class_name']}.webp", int(row["row_in_strip"])
    strip, position = divmod(int(row["index"]), IMAGES_PER_STRIP)
    return f"{row['split']}_{strip:02d}.webp", position


def _strip(file: Path, layout: _Layout) -> np.ndarray:
    """Images (n, 3, 32, 32) of a strip."""
    try:
        pixels = np.asarray(open_picture(file, str(file)))
        if pixels.shape[1] != SIDE or len(pixels) % SIDE:
            raise ValueError(
                f"{pixels.shape[1]}×{len(pixels)} pixels, not images of {SIDE} below one another"
            )
    except ValueError as error:
        raise _damaged(file, error, layout) from error
    return np.ascontiguousarray(pixels.reshape(-1, SIDE, SIDE, 3).transpose(0, 3, 1, 2))


# --- entries of the registry -----------------------------------------------------------------------------

CIFAR_SETS = tuple(
    DataSet(
        name,
        f"{title}: 50,000 images to train, 10,000 to test, 32 pixels, {classes} classes",
        f"{CIFAR[name].python}/ or {CIFAR[name].binary}/, here or in {name}/; or {name}/ with WebP strips",
        _command(CIFAR[name]),
        tuple(SIZES),
        lambda root, split, name=name: load_cifar(name, split, root),
    )
    for name, title, classes in (("cifar10", "CIFAR-10", 10), ("cifar100", "CIFAR-100", 100))
)
