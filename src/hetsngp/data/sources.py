"""Open images by name, or by the path of a folder or a .npz file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hetsngp.data.datasets.registry import DATASETS, find, open_data
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.files import ImageFiles
from hetsngp.data.images.folders import class_names, image_names, load_folder, scan_folder, subfolders
from hetsngp.data.images.npz import load_npz, npz_keys, numbered_names, read_array
from hetsngp.validation import check_choice

SPLITS = ("train", "test")
HELD_OUT = ("test", "val")
UNLABELLED = ("unlabelled",)
"""``class_names`` of a folder of images without class folders."""


def open_images(
    spec: str | Path, split: str, *, size: int | None = None, root: str | Path | None = None
) -> ImageArrays:
    """Load the ``split`` "train" or "test" of ``spec`` into memory. ``spec`` is one of:

    - a name of :data:`~hetsngp.data.datasets.registry.DATASETS`, such as ``cifar100``, ``cifar10n:worse``,
      ``svhn``, ``places365``; some have other splits too;
    - a .npz file with the arrays ``x_train``, ``y_train``, ``x_test``, ``y_test``, as Keras saves them;
    - a folder with the folders ``train`` and ``test`` (or ``val``), or one of them, each with one folder for
      each class. A folder of classes without those two is all training data; ``scan_folder(path)`` opens one
      that is for evaluation only, such as an out-of-distribution set. A folder with the name of a data set is
      given as ./svhn or Path("svhn"): a Path is never a name.

    ``size`` in pixels is for image files: the short side is resized to it and the centre is cropped.
    ``root`` is the folder of data sets (None: the environment variable HETSNGP_DATA, for names); a relative
    path starts at ``root`` where one is given.
    """
    if _is_name(spec):
        return _from_registry(str(spec), split, size, root)
    check_choice("split", split, SPLITS)
    path = _path(spec, root)
    if path.suffix == ".npz":
        if size is not None:
            raise _has_a_size(str(spec), size)
        return _from_npz(path, split)
    if path.is_dir():
        return _from_folder(path, split, size)
    what = "is neither a folder nor a .npz file" if path.exists() else "is not there"
    raise ValueError(
        f"cannot open images {str(spec)!r}: {path} {what}; give a folder with one folder for each class, a "
        f".npz file with x_train, y_train, x_test, y_test, or one of {', '.join(DATASETS)}"
    )


def open_set(spec: str | Path, split: str = "test", *, root: str | Path | None = None) -> Any:
    """Open like :func:`open_images`, but leave image files on disk: ``ImageFiles``, or the registry's type.

    A folder without ``train`` and ``test`` is one set, for any split: one folder for each class, or images
    without classes, such as an out-of-distribution set, which all get the label 0.
    """
    if _is_name(spec):
        return open_data(str(spec), split, root)
    check_choice("split", split, SPLITS)
    path = _path(spec, root)
    if not path.is_dir():
        return open_images(spec, split, root=root)  # a .npz file, or an error
    held_out = next((path / name for name in HELD_OUT if (path / name).is_dir()), None)
    train = path / "train"
    if train.is_dir() or held_out is not None:
        chosen = train if split == "train" else held_out
        if chosen is None or not chosen.is_dir():
            wanted = "train" if split == "train" else " or ".join(HELD_OUT)
            raise FileNotFoundError(f"{path} has no folder {wanted}: make one, with a folder for each class")
        return scan_folder(chosen)
    alone = sorted(image_names(path)) if not subfolders(path) else []
    if alone:
        return ImageFiles(tuple(path / name for name in alone), torch.zeros(len(alone)).long(), UNLABELLED)
    if not subfolders(path):
        raise FileNotFoundError(f"{path} has no images, nor a folder for each class: give another folder")
    return scan_folder(path)


def has_test(spec: str | Path, *, root: str | Path | None = None) -> bool:
    """Whether a set has test images."""
    if _is_name(spec):
        return "test" in find(str(spec))[0].splits
    path = _path(spec, root)
    if path.suffix == ".npz":
        return "x_test" in npz_keys(path)
    return any((path / name).is_dir() for name in HELD_OUT)


def _is_name(spec: str | Path) -> bool:
    return isinstance(spec, str) and spec.partition(":")[0] in DATASETS


def _path(spec: str | Path, root: str | Path | None) -> Path:
    path = Path(spec).expanduser()
    return path if root is None else Path(root).expanduser() / path


def _has_a_size(spec: str, size: int) -> ValueError:
    return ValueError(f"size={size} is for image files, the images of {spec} have a size: leave it out")


def _from_registry(spec: str, split: str, size: int | None, root: str | Path | None) -> ImageArrays:
    found = open_data(spec, split, root)
    if isinstance(found, ImageArrays):
        if size is not None:
            raise _has_a_size(spec, size)
        return found
    if not isinstance(found, ImageFiles):
        raise ValueError(
            f"{spec} is a {type(found).__name__}, not one set of images with a label each: open it with "
            f"hetsngp.data.datasets.registry.open_data({spec!r}, {split!r})"
        )
    size = find(spec)[0].size if size is None else size
    if size is None:
        raise ValueError(f"the images of {spec} have many sizes: give the size to resize to, e.g. size=224")
    return found.load(size)


def _from_npz(path: Path, split: str) -> ImageArrays:
    keys = npz_keys(path)
    names = None
    if "class_names" not in keys:
        # Classes of both splits, which must agree: a small test set may lack the last ones.
        both = [read_array(path, f"y_{part}") for part in SPLITS if f"y_{part}" in keys]
        most = max((int(y.max()) for y in both if y.dtype.kind in "iu" and y.size), default=-1)
        names = numbered_names(most, path)
    return load_npz(path, images=f"x_{split}", labels=f"y_{split}", class_names=names)


def _from_folder(path: Path, split: str, size: int | None) -> ImageArrays:
    if size is None:
        raise ValueError(f"the images in {path} may have any size: give the size to resize to, e.g. size=64")
    train = path / "train"
    held_out = next((path / name for name in HELD_OUT if (path / name).is_dir()), None)
    if split == "test" and held_out is None:
        if not train.is_dir():
            raise ValueError(
                f"{path} has no folder {' or '.join(HELD_OUT)}, so its classes are training data: for images "
                "to evaluate on, such as an out-of-distribution set, call "
                f"hetsngp.data.images.folders.scan_folder({str(path)!r}).load({size})"
            )
        raise ValueError(
            f"{path} has no folder {' or '.join(HELD_OUT)}: make one, or hold out a part of the training "
            "data with its split(0.2)"
        )
    if held_out is None:
        return load_folder(train if train.is_dir() else path, size)
    if not train.is_dir():
        if split == "train":
            raise ValueError(f"{path} has a folder {held_out.name} and no folder train: make one")
        return load_folder(held_out, size)
    ours, theirs = class_names(train), class_names(held_out)
    if ours != theirs:
        odd = sorted(set(ours) ^ set(theirs))[0]
        raise ValueError(
            f"{train} and {held_out} have different classes, e.g. {odd!r}, so their labels would not agree: "
            "give both the same folders"
        )
    return load_folder(train if split == "train" else held_out, size)
