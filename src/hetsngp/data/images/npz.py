"""Images in a .npz file of NumPy."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from hetsngp.data.bounded import check_regular
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.limits import ARRAY_BYTES, CLASSES, LimitExceeded

CHANNELS = (1, 3, 4)
"""Numbers of channels that are told apart from height and width."""


def load_npz(
    path: str | Path,
    *,
    images: str | None = None,
    labels: str | None = None,
    class_names: Sequence[str] | None = None,
) -> ImageArrays:
    """Load images and labels from a .npz file. Default names: ``images`` or ``x``, ``labels`` or ``y``.

    Images are uint8, (N, H, W), (N, H, W, C) or (N, C, H, W) with C one of 1, 3, 4; where both fit, channels
    are the last dimension, as in NumPy, Pillow and TensorFlow. Labels are whole numbers, (N,) or (N, 1), and
    the classes are 0 … their maximum, unless an array ``class_names`` is in the file or given.
    """
    path = Path(path).expanduser()
    keys = npz_keys(path)
    pixels = read_array(path, _pick(path, keys, images, ("images", "x")))
    numbers = read_array(path, _pick(path, keys, labels, ("labels", "y")))
    if pixels.dtype != np.uint8:
        raise TypeError(
            f"the images in {path} are {pixels.dtype}, not bytes: save them as uint8, for values in [0, 1] "
            "(255 * images).round().astype(np.uint8)"
        )
    if numbers.dtype.kind not in "iu":
        raise TypeError(
            f"the labels in {path} are {numbers.dtype}: save class numbers, 0 … K−1, as int64; of names "
            "class_names, labels = np.unique(labels, return_inverse=True)"
        )
    if numbers.ndim == 2 and numbers.shape[1] == 1:
        numbers = numbers[:, 0]
    if class_names is None and "class_names" in keys:
        written = read_array(path, "class_names")
        CLASSES.check(written.size, f"class_names of {path}")
        class_names = [str(name) for name in written.ravel()]
    if class_names is None:
        class_names = numbered_names(int(numbers.max()) if numbers.size else -1, path)
    try:
        return ImageArrays(
            torch.from_numpy(np.ascontiguousarray(channels_first(pixels))),
            torch.from_numpy(numbers.astype(np.int64)),
            tuple(class_names),
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def numbered_names(largest: int, path: Path) -> list[str]:
    """Names "0", "1", … of the classes up to the ``largest`` label of a file."""
    CLASSES.check(largest + 1, f"by its largest label, {path}")
    return [str(label) for label in range(largest + 1)]


def channels_first(pixels: np.ndarray) -> np.ndarray:
    """Convert images of a shape that :func:`load_npz` takes to (N, C, H, W).

    >>> [channels_first(np.zeros(shape)).shape for shape in [(5, 8, 8), (5, 8, 8, 3), (5, 3, 8, 8)]]
    [(5, 1, 8, 8), (5, 3, 8, 8), (5, 3, 8, 8)]
    """
    if pixels.ndim == 3:
        return pixels[:, None]
    if pixels.ndim == 4 and pixels.shape[3] in CHANNELS:
        return pixels.transpose(0, 3, 1, 2)
    if pixels.ndim == 4 and pixels.shape[1] in CHANNELS:
        return pixels
    raise ValueError(
        f"images have shape {pixels.shape} where (N, H, W), (N, H, W, C) or (N, C, H, W) with C one of "
        f"{', '.join(map(str, CHANNELS))} was expected: reshape them, or make an ImageArrays yourself"
    )


def npz_keys(path: str | Path) -> tuple[str, ...]:
    """Names of the arrays in a .npz file."""
    with _opened(Path(path)) as file:
        return tuple(file.files)


def read_array(path: str | Path, key: str) -> np.ndarray:
    """Read one array of a .npz file, without the others, which may be large."""
    with _opened(Path(path)) as file:
        for member in file.zip.infolist() if file.zip is not None else ():
            if member.filename in (key, f"{key}.npy"):
                _check_member(member, Path(path))
        return np.asarray(file[key])


def read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """Content of a member of an archive of NumPy or torch, as many bytes as its directory says."""
    _check_member(member, Path(archive.filename or ""))
    return archive.read(member)


def map_array(file: Path) -> np.ndarray:
    """Array of a .npy file, mapped into memory, so that it has no more than the file."""
    check_regular(file)
    array = np.load(file, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise ValueError("an archive of arrays, not a single one")
    return array


def _check_member(member: zipfile.ZipInfo, path: Path) -> None:
    """Check what a member expands to; zipfile gives no more than the directory of the archive says."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError("a compression that NumPy does not write")  # zipfile expands some of them at once
    if member.file_size > path.stat().st_size:
        ARRAY_BYTES.check(member.file_size, f"{member.filename} of {path}")


@contextmanager
def _opened(path: Path) -> Iterator[np.lib.npyio.NpzFile]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("a single array, not an archive of them")
            yield file
    except LimitExceeded:
        raise
    except Exception as error:  # a corrupt archive fails in zipfile, zlib or NumPy
        reason = str(error) or type(error).__name__
        raise ValueError(
            f"{path} cannot be read ({reason}): save plain arrays with np.savez(path, images=…, labels=…)"
        ) from error


def _pick(path: Path, keys: Sequence[str], name: str | None, usual: Sequence[str]) -> str:
    wanted = usual if name is None else (name,)
    found = [key for key in wanted if key in keys]
    if not found:
        raise ValueError(
            f"{path} has no array {' or '.join(map(repr, wanted))}, only {', '.join(map(repr, keys))}: name "
            "those to use,  load_npz(path, images=…, labels=…)"
        )
    return found[0]
