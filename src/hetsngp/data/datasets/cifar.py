"""CIFAR-10 and CIFAR-100 from their authors' files, in torchvision's layout too, or from WebP strips.

The authors' Python files are pickles, which can run any code; torchvision unpickles them. Here an unpickler
reads them that builds arrays and nothing else.
"""

from __future__ import annotations

import csv
import gzip
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from hetsngp.data.datasets.dataset import DataSet, data_root, missing
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.decoding import pillow
from hetsngp.validation import check_choice

SIDE = 32
PIXELS = 3 * SIDE * SIDE
SIZES = {"train": 50_000, "test": 10_000}
IMAGES_PER_STRIP = 500
"""Images in a strip of CIFAR-10, whose strips are not by class."""


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
        names = [str(name) for name in _unpickle(file)[key]]
        pixels, labels = [], []
        for part in layout.files[split]:
            file = folder / part
            content = _unpickle(file)
            pixels.append(_records(content["data"], PIXELS))
            labels.append(np.array(content[layout.labels], dtype=np.int64))
            if labels[-1].shape != (len(pixels[-1]),):
                raise ValueError(f"{len(pixels[-1])} images, labels of shape {labels[-1].shape}")
    except Exception as error:  # a corrupt pickle may fail anywhere
        raise _damaged(file, error, layout) from error
    return np.concatenate(pixels).reshape(-1, 3, SIDE, SIDE), np.concatenate(labels), names


def _read_binary(folder: Path, split: str, layout: _Layout) -> Arrays:
    try:
        file = folder / layout.names
        names = file.read_text(encoding="ascii").split()
        parts = []
        for part in layout.files[split]:
            file = folder / f"{part}.bin"
            width = layout.label_bytes + PIXELS
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


class _ArraysOnly(pickle.Unpickler):
    """Unpickler of numbers, strings, lists, dicts and NumPy arrays; anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): _encode,
            # NumPy moved it; files written before and after exist.
            ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
            ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"it wants to run {module}.{name}, which is no part of the data")
        return allowed[module, name]


_reconstruct = np.empty(0).__reduce__()[0]


def _encode(text: str, encoding: str) -> bytes:
    """Replacement of ``_codecs.encode``, by which old protocols pickle bytes: only their codec is allowed."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"it wants the codec {encoding}, which is no part of the data")
    return text.encode("latin1")


def _unpickle(file: Path) -> dict[str, Any]:
    stream: BinaryIO
    with open(file, "rb") as stream:
        content = _ArraysOnly(stream, encoding="latin1").load()  # written by Python 2
    if not isinstance(content, dict):
        raise ValueError(f"a {type(content).__name__}, not a dict")
    return content


# --- WebP strips ----------------------------------------------------------------------------------------


def _read_strips(folder: Path, split: str, layout: _Layout) -> Arrays:
    """Read strips of images below one another; the index has strip, row and label of each image."""
    index = folder / "index.csv.gz"
    try:
        with gzip.open(index, "rt", encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
        names = {int(row["label"]): row["class_name"] for row in rows}
        where = sorted((*_position(row), int(row["label"])) for row in rows if row["split"] == split)
    except (OSError, EOFError, KeyError, ValueError) as error:
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


def _position(row: dict[str, str]) -> tuple[str, int]:
    """Strip of an image, and its row in the strip."""
    if "row_in_strip" in row:
        return f"{row['split']}_{int(row['label']):02d}_{row['class_name']}.webp", int(row["row_in_strip"])
    strip, position = divmod(int(row["index"]), IMAGES_PER_STRIP)
    return f"{row['split']}_{strip:02d}.webp", position


def _strip(file: Path, layout: _Layout) -> np.ndarray:
    """Images (n, 3, 32, 32) of a strip."""
    image_module = pillow()
    try:
        with image_module.open(file) as image:
            pixels = np.asarray(image.convert("RGB"))
        if pixels.shape[1] != SIDE:
            raise ValueError(f"{pixels.shape[1]} pixels wide, not {SIDE}")
        return np.ascontiguousarray(pixels.reshape(-1, SIDE, SIDE, 3).transpose(0, 3, 1, 2))
    except Exception as error:  # Pillow's readers raise nearly anything on corrupt files
        raise _damaged(file, error, layout) from error


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
