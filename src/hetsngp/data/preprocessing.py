"""Preprocessing of images, saved with a model so that prediction repeats what training did.

:class:`Preprocessing` has size, normalisation and class names; it opens sets of images, clean or corrupted,
and makes loaders of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetsngp._moved import rename_keys, renamed_arguments, renamed_attribute
from hetsngp.data.corrupted import CorruptedImages, LazyMap, corrupted_images, open_corrupted
from hetsngp.data.datasets.cifar_c import FOLDERS as CIFAR_C
from hetsngp.data.datasets.cifar_c import CorruptedFiles
from hetsngp.data.datasets.registry import open_data
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.decoding import open_picture, resize_and_center_crop
from hetsngp.data.images.device_loader import DeviceLoader
from hetsngp.data.images.files import ImageFiles
from hetsngp.data.images.multi_label import MultiLabelFiles
from hetsngp.data.shards.streams import ShardedImages
from hetsngp.data.sources import open_set
from hetsngp.validation import check_choice

SMALL_BYTES = 2**28
"""Sets of files that decode to at most so many bytes are loaded: starting worker processes takes longer."""
CORRUPTED = (*CIFAR_C, "imagenet-c", "made")
"""Names of corrupted sets; "made": the standard corruptions of the test images, computed by hetsngp."""
LARGEST, SMALLEST = 10.0, 1e-8
"""Bounds on mean and standard deviation, in units of [0, 1]."""
Images = ImageArrays | ImageFiles | MultiLabelFiles | ShardedImages
JSON_KEYS = {"multi_label": "several_labels"}
"""Field → its key in serving.json, which keeps the name of release 0.1."""


@renamed_arguments(several_labels="multi_label")
@dataclass(frozen=True)
class Preprocessing:
    """Pixels (C, H, W) in [0, 1] → (x − mean)/std, and the names of the classes.

    >>> inputs = Preprocessing((8, 8), (0.5,) * 3, (0.25,) * 3, ("cat", "dog"))
    >>> data = ImageArrays(torch.full((2, 3, 8, 8), 255).byte(), torch.tensor([0, 1]), ("cat", "dog"))
    >>> x, y = next(iter(inputs.loader(data, batch_size=2)))
    >>> tuple(x.shape), round(float(x.max()), 3)
    ((2, 3, 8, 8), 2.0)
    """

    size: tuple[int, int]
    """Height and width, pixels."""
    mean: tuple[float, ...]
    """Mean of each channel, in units of [0, 1]."""
    std: tuple[float, ...]
    """Standard deviation of each channel, in units of [0, 1]."""
    class_names: tuple[str, ...]
    multi_label: bool = False
    """Whether an image may have any number of classes."""
    resize: int | None = None
    """Length of the short side of image files before the centre crop; None: as ``size``."""
    resize_arrays: bool = False
    """Whether images in memory of another size are resized, and grey ones made RGB, as for a pretrained
    network; False: they must have the size."""
    several_labels = renamed_attribute("several_labels", "multi_label")

    def __post_init__(self) -> None:
        for name in ("size", "mean", "std", "class_names"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Iterable):
                raise ValueError(f"{name} is a list, got {value!r:.50}")
            object.__setattr__(self, name, tuple(value))
        sides = (*self.size, *(() if self.resize is None else (self.resize,)))
        if len(self.size) != 2 or not all(type(side) is int and side > 0 for side in sides):
            raise ValueError(
                f"size is (height, width) and resize a side, whole numbers of pixels, got {sides}"
            )
        scale = (*self.mean, *self.std)
        if not all(type(number) in (int, float) and abs(number) <= LARGEST for number in scale):
            raise ValueError(
                f"mean and std are numbers of at most {LARGEST:g}, in units of [0, 1], got {scale!s:.200}: "
                "divide those of bytes by 255"
            )
        if len(self.mean) != len(self.std) or not self.mean or not all(s >= SMALLEST for s in self.std):
            raise ValueError(
                "mean and std need one number per channel, std positive and at least "
                f"{SMALLEST:g}, got {self.mean!s:.100} and {self.std!s:.100}"
            )
        for name in ("multi_label", "resize_arrays"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name} is true or false, got {getattr(self, name)!r:.50}")
        if len(self.class_names) < 2 or not all(isinstance(name, str) for name in self.class_names):
            raise ValueError(f"class_names are two or more words, got {self.class_names!s:.200}")

    @property
    def channels(self) -> int:
        """Number of channels C."""
        return len(self.mean)

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON, under the keys of release 0.1; newer ones where they are not at their default."""
        values = asdict(self)
        if not self.resize_arrays:
            del values["resize_arrays"]
        return rename_keys(values, JSON_KEYS)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Preprocessing:
        """Inverse of :meth:`to_dict`."""
        known = {JSON_KEYS.get(field.name, field.name) for field in fields(Preprocessing)}
        if not isinstance(values, Mapping) or not set(values) <= known:
            raise ValueError(f"inputs are described by {', '.join(sorted(known))}, got {values!r:.200}")
        try:
            return Preprocessing(**rename_keys(values, {key: name for name, key in JSON_KEYS.items()}))
        except TypeError as error:
            raise ValueError(f"inputs are not described in full: {error}") from error

    @staticmethod
    def of_dict(values: Mapping[str, Any]) -> Preprocessing:
        """Name of :meth:`from_dict` in release 0.1."""
        warnings.warn("Preprocessing.of_dict is now called from_dict", DeprecationWarning, stacklevel=2)
        return Preprocessing.from_dict(values)

    # --- sets -------------------------------------------------------------------------------------------

    def open(
        self,
        spec: str | Path,
        split: str = "test",
        *,
        limit: int | None = None,
        root: str | Path | None = None,
    ) -> Images:
        """A set by name, folder or .npz file, as :func:`hetsngp.data.sources.open_set` opens it.

        ``limit``: number of images to take, stratified by class where each has one.
        """
        found = open_set(spec, split, root=root)
        if not isinstance(found, Images):
            raise ValueError(
                f"{spec} is a {type(found).__name__}, not one set of images: name another, docs/data.md has "
                "a list; corrupted sets are given as corrupted"
            )
        return subset(found, limit)

    def open_corrupted(
        self,
        spec: str,
        *,
        clean: str | Path | None = None,
        limit: int | None = None,
        root: str | Path | None = None,
    ) -> Mapping[tuple[str, int], Images]:
        """(corruption, severity) → images: "cifar10-c", "cifar100-c" (published files, or made where they are
        missing), "imagenet-c", or "made": the standard corruptions of the test images of ``clean``.

        The images of ImageNet-C are cropped already: ``loader(images, …, resize=inputs.size[0])``.
        """
        check_choice("corrupted set", spec, CORRUPTED)
        if spec == "imagenet-c":
            found: Mapping[tuple[str, int], Images] = open_data(spec, "test", root)
        elif spec == "made":
            if clean is None:
                raise ValueError("corruptions are made of clean images: give clean, a set of images")
            found = self._made(clean, limit, root)
        else:
            found = open_corrupted(spec, root)
            if isinstance(found, CorruptedImages) and limit is not None:  # before any is made
                found = replace(found, images=subset(found.images, limit))
        if limit is None or isinstance(found, CorruptedImages):
            return found
        return LazyMap(found, lambda images: subset(images, limit), about=f"some {limit}")

    def _made(self, clean: str | Path, limit: int | None, root: str | Path | None) -> CorruptedImages:
        images = self.open(clean, "test", limit=limit, root=root)
        if isinstance(images, ImageFiles):
            images = images.load(*self._square(), resize=self.resize)
        if not isinstance(images, ImageArrays):
            raise ValueError(
                f"corruptions are made of images with one label each, and {clean} is multi-label"
            )
        return corrupted_images(images, root=root)

    def loader(
        self,
        data: Images,
        batch_size: int,
        *,
        device: torch.device | str | None = None,
        num_workers: int | None = None,
        resize: int | None = None,
    ) -> Any:
        """Batches (x, y) of all images, in order. ``resize`` replaces ``self.resize``, for cropped files."""
        resize = self.resize if resize is None else resize
        if not isinstance(data, ImageArrays):
            self._check_colour("image files")
        if isinstance(data, ImageFiles) and len(data) * 3 * self.size[0] * self.size[1] <= SMALL_BYTES:
            data = data.load(*self._square(), resize=resize)
        if not isinstance(data, ImageArrays):
            return data.loader(
                *self._square(),
                batch_size,
                num_workers=num_workers,
                mean=self.mean,
                std=self.std,
                resize=resize,
            )
        shape, size = tuple(data.images.shape[1:]), None
        if self.resize_arrays:
            size = self._square()[0]
        elif shape != (self.channels, *self.size):
            raise ValueError(
                f"the images are {shape} (channels, height, width), and the model takes "
                f"{(self.channels, *self.size)}: give a set of image files, which are resized, or train on "
                "images of that size"
            )
        loader = DeviceLoader(data, batch_size, mean=self.mean, std=self.std, size=size)
        return loader if device is None else loader.to(device)

    def read(self, files: Sequence[str | Path]) -> Tensor:
        """(n, C, H, W) float32 of image files."""
        self._check_colour("image files")
        pixels = torch.stack([self.pixels(file) for file in files])
        mean, std = (torch.tensor(value)[:, None, None] for value in (self.mean, self.std))
        return (pixels.float() / 255 - mean) / std

    def pixels(self, file: str | Path) -> Tensor:
        """(3, H, W) uint8 of one image file."""
        if not Path(file).is_file():
            raise FileNotFoundError(f"{file} is not there: give image files that exist")
        return resize_and_center_crop(
            open_picture(Path(file), str(file)), *self._square(), resize=self.resize
        )

    def _square(self) -> tuple[int]:
        if self.size[0] != self.size[1]:
            raise ValueError(
                f"the model takes images of {self.size[0]}×{self.size[1]}; image files are made square: use "
                "a .npz file of that size"
            )
        return (self.size[0],)

    def _check_colour(self, what: str) -> None:
        if self.channels != 3:
            raise ValueError(
                f"the model takes images of {self.channels} channels, and {what} give 3: use .npz"
            )


def subset(data: Any, limit: int | None) -> Any:
    """``limit`` images of a set, stratified by class where each has one; None: all."""
    if limit is None or limit >= len(data):
        return data
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    if isinstance(data, ShardedImages):
        raise ValueError("shards are read as a stream: leave out the limit, or give a folder of images")
    if isinstance(data, MultiLabelFiles):
        return data.take(torch.linspace(0, len(data) - 1, limit).round().long())
    return data.split(limit)[1]


def made_by_hetsngp(sets: Mapping[Any, Any]) -> bool:
    """Whether corrupted sets are computed by hetsngp, not read from the published files."""
    inner = sets.sets if isinstance(sets, LazyMap) else sets
    return not isinstance(inner, CorruptedFiles) and isinstance(inner, CorruptedImages)
