"""One name for images, whatever they lie in."""

from __future__ import annotations

from pathlib import Path

from hetsngp.data.arrays import load_npz, npz_keys, read_array
from hetsngp.data.cifar import CIFAR, load_cifar
from hetsngp.data.folders import class_names, load_folder
from hetsngp.data.images import ImageArrays
from hetsngp.validation import check_choice

SPLITS = ("train", "test")
HELD_OUT = ("test", "val")


def open_images(
    spec: str, split: str, *, size: int | None = None, root: str | Path | None = None
) -> ImageArrays:
    """The ``split`` "train" or "test" of ``spec``:

    - ``cifar10``, ``cifar100``: see :func:`~hetsngp.data.cifar.load_cifar`;
    - a .npz file with the arrays ``x_train``, ``y_train``, ``x_test``, ``y_test``, as Keras saves them;
    - a folder with the folders ``train`` and ``test`` (or ``val``), each with one folder for each class; a
      folder of classes without those two is all training data. ``size`` in pixels is for folders only.

    ``root`` is where data sets lie (None: the environment variable HETSNGP_DATA, for CIFAR); a path that is
    not absolute is taken from ``root`` where one is given.
    """
    check_choice("split", split, SPLITS)
    path = Path(spec) if root is None else Path(root) / spec
    known = spec in CIFAR or path.suffix == ".npz"
    if known and size is not None:
        raise ValueError(f"size={size} is for folders of images, those of {spec} have a size: leave it out")
    if spec in CIFAR:
        return load_cifar(spec, split, root)
    if path.suffix == ".npz":
        return _from_npz(path, split)
    if path.is_dir():
        return _from_folder(path, split, size)
    raise ValueError(
        f"cannot open images {spec!r}: it is none of {', '.join(CIFAR)}, no .npz file with x_train, y_train, "
        f"x_test, y_test, and {path} is no folder with train/ and test/"
    )


def has_test(spec: str, *, root: str | Path | None = None) -> bool:
    """Whether there are test images."""
    path = Path(spec) if root is None else Path(root) / spec
    if spec in CIFAR:
        return True
    if path.suffix == ".npz":
        return "x_test" in npz_keys(path)
    return any((path / name).is_dir() for name in HELD_OUT)


def _from_npz(path: Path, split: str) -> ImageArrays:
    keys = npz_keys(path)
    names = None
    if "class_names" not in keys:
        # Of both splits, which must agree: a small test set may lack the last classes.
        both = [read_array(path, f"y_{part}") for part in SPLITS if f"y_{part}" in keys]
        names = [str(label) for label in range(max((int(y.max()) for y in both), default=-1) + 1)]
    return load_npz(path, images=f"x_{split}", labels=f"y_{split}", class_names=names)


def _from_folder(path: Path, split: str, size: int | None) -> ImageArrays:
    if size is None:
        raise ValueError(f"the images in {path} may have any size: say what to make of them, e.g. size=64")
    train = path / "train"
    held_out = next((path / name for name in HELD_OUT if (path / name).is_dir()), None)
    if held_out is None:
        if split == "test":
            raise ValueError(
                f"{path} has no folder {' or '.join(HELD_OUT)}: make one, or hold out a part of the training "
                "data with its split(0.2)"
            )
        return load_folder(train if train.is_dir() else path, size)
    ours, theirs = class_names(train), class_names(held_out)
    if ours != theirs:
        odd = sorted(set(ours) ^ set(theirs))[0]
        raise ValueError(
            f"{train} and {held_out} have different classes, e.g. {odd!r}, so their labels would not agree: "
            "give both the same folders"
        )
    return load_folder(train if split == "train" else held_out, size)
