"""Decode images, from files or from bytes, into tensors; DataLoaders over data sets that do so."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hetsngp.data.bounded import check_regular
from hetsngp.limits import IMAGE_BYTES, IMAGE_PIXELS, LimitExceeded
from hetsngp.validation import check_positive

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF", "TGA")
"""Formats that are read, the frequent ones first. Pillow would also hand PostScript to Ghostscript."""
MOST_RESIZED = 2**24
"""Pixels of a resized image before the crop. A long narrow one is cropped before it is resized."""
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MOST_WORKERS = 8
"""Worker processes of a loader where no number is given, at most."""


def pillow() -> Any:
    """PIL.Image, or an error that says how to get it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("image files are read with Pillow: pip install 'hetsngp[vision]'") from error
    return Image


def image_ops() -> Any:
    """PIL.ImageOps, or an error that says how to get it."""
    pillow()
    from PIL import ImageOps

    return ImageOps


def open_picture(source: Path | bytes, name: str) -> Any:
    """Open a file, or its content, as an RGB image of Pillow; errors call it ``name``.

    Limits on bytes and pixels hold before anything is decoded. Of several frames the first is read.
    """
    image_module = pillow()
    try:
        IMAGE_BYTES.check(len(source) if isinstance(source, bytes) else check_regular(source), name)
        stream = io.BytesIO(source) if isinstance(source, bytes) else source
        with image_module.open(stream, formats=FORMATS) as image:
            IMAGE_PIXELS.check(image.width * image.height, name)
            # Pillow clips deeper pixels at 255 instead of scaling them.
            if image.mode == "F" or image.mode.startswith("I"):
                raise ValueError(f"pixels of mode {image.mode!r}, only 8 bits a channel are read")
            return image.convert("RGB")
    except LimitExceeded:
        raise
    except Exception as error:  # Pillow's readers raise nearly anything on corrupt files
        reason = str(error) or type(error).__name__
        raise ValueError(f"{name} cannot be read as an image ({reason}): replace or remove it") from error


def short_side(size: int, resize: int | None) -> int:
    """Length of the short side before a centre crop of ``size``: ``resize``, or ``size`` for None.

    >>> short_side(224, 256), short_side(224, None)
    (256, 224)
    """
    if resize is None:
        return size
    side = int(check_positive("resize", resize, integer=True))
    if side < size:
        raise ValueError(
            f"resize={resize} makes the short side smaller than the crop of {size} pixels: choose resize "
            f"of at least {size}, or None for {size}"
        )
    return side


def resize_and_center_crop(picture: Any, size: int, resize: int | None = None) -> Tensor:
    """(3, size, size) uint8 of an RGB picture: its short side resized to ``resize``, then a centre crop.

    ``resize`` None: ``size``, so that nothing of the short side is lost; customary for ImageNet are 256 and
    224. The same pixels as torchvision's Resize and CenterCrop, without torchvision, unless resizing would
    take more than ``MOST_RESIZED`` pixels: then the long side is cropped to its middle first.
    """
    target = short_side(size, resize)
    picture, short = _middle(picture, target), min(picture.size)
    # Rounded as torchvision does, so that both give the same pixels.
    width, height = (target if side == short else target * side // short for side in picture.size)
    if picture.size != (width, height):
        picture = picture.resize((width, height), pillow().Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return torch.from_numpy(np.array(picture)[top : top + size, left : left + size]).permute(2, 0, 1)


def _middle(picture: Any, target: int) -> Any:
    """Middle of the long side, as much of it as may be resized together with the short side to ``target``."""
    short, long = sorted(picture.size)
    most = max(1, MOST_RESIZED // target**2) * short
    if long <= most:
        return picture
    cut = (long - most) // 2  # as much on either side, so that the centre stays
    width, height = picture.size
    return picture.crop((cut, 0, width - cut, height) if width > height else (0, cut, width, height - cut))


def random_resized_crop(size: int) -> Callable[[Any], Tensor]:
    """Transform of a picture to (3, size, size) uint8: torchvision's RandomResizedCrop, flipped or not.

    It draws from torch's global generator, as torchvision's transforms do.
    """
    try:
        from torchvision.transforms import v2
    except ImportError as error:
        raise ImportError("random crops from disk need torchvision: pip install 'hetsngp[vision]'") from error
    crop = v2.RandomResizedCrop(size, antialias=True)
    transform: Callable[[Any], Tensor] = v2.Compose([crop, v2.RandomHorizontalFlip(), v2.PILToTensor()])
    return transform


class Decoder:
    """Encoded image → (3, size, size) float32, (x/255 − mean)/std.

    x is a :func:`random_resized_crop` for training (``resize`` is ignored), else
    :func:`resize_and_center_crop`.
    """

    def __init__(
        self,
        size: int,
        resize: int | None = None,
        *,
        train: bool,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> None:
        self.size = int(check_positive("size", size, integer=True))
        self.resize = short_side(self.size, resize)
        pillow()  # raises here and not in a worker process
        self.random_crop = random_resized_crop(self.size) if train else None
        self.mean, self.std = (torch.tensor(value)[:, None, None] for value in (mean, std))

    def __call__(self, source: Path | bytes, name: str, seed: int | None = None) -> Tensor:
        """Decode. ``seed``: of the random crop; None: torch's global generator. ``name``: for errors."""
        picture = open_picture(source, name)
        if self.random_crop is None:
            pixels = resize_and_center_crop(picture, self.size, self.resize)
        elif seed is None:
            pixels = self.random_crop(picture)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)  # torchvision draws from nowhere else
                pixels = self.random_crop(picture)
        return (pixels.float() / 255 - self.mean) / self.std


def loader_from_disk(
    data: Dataset[Any],
    batch_size: int,
    train: bool,
    num_workers: int | None,
    seed: int,
    collate: Callable[[Any], Any] | None = None,
) -> DataLoader[Any]:
    """DataLoader: for training in random order and full batches only, else all examples in order."""
    return DataLoader(
        data,
        int(check_positive("batch_size", batch_size, integer=True)),
        shuffle=train,
        drop_last=train,
        collate_fn=collate,
        num_workers=worker_count(num_workers),
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator().manual_seed(seed),
    )


def worker_count(num_workers: int | None) -> int:
    """Number of worker processes: ``num_workers``, or for None one for each core, up to 8."""
    return min(MOST_WORKERS, os.cpu_count() or 1) if num_workers is None else num_workers
