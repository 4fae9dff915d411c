"""Images of a training, in memory or from disk: opened, loaded, their loaders and the preprocessing."""

from __future__ import annotations

from typing import Any

from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.decoding import IMAGENET_MEAN, IMAGENET_STD, short_side
from hetsngp.data.images.device_loader import Augmentation, DeviceLoader
from hetsngp.data.images.files import LIMIT_BYTES, ImageFiles
from hetsngp.data.preprocessing import Images, Preprocessing
from hetsngp.data.sources import UNLABELLED, open_set
from hetsngp.data.text.files import is_text_file
from hetsngp.data.text.texts import LabelledTexts
from hetsngp.training.input_kinds import Loaders, TaskData
from hetsngp.training.recipes.task import ImageTask

EVAL_BATCH = 1000
"""Images of a batch in evaluation, where they are in memory and of the size of the network's input."""


def open_images_to_train_on(spec: str, split: str) -> Images:
    """Open the ``split``, "train" or "test", of a data set, image files without reading them."""
    images = None if is_text_file(spec) else open_set(spec, split)
    if images is None or isinstance(images, LabelledTexts):
        raise ValueError(f"{spec} has texts, not images to train on: hetsngp train text --set data={spec}")
    if not isinstance(images, Images):
        raise ValueError(f"{spec} is a {type(images).__name__}, not images to train on: docs/data.md")
    if split == "train" and images.num_classes < 2:
        found = (
            "has images and no folders of classes"
            if images.class_names == UNLABELLED
            else f"has one class, {images.class_names[0]!r}"
        )
        raise ValueError(
            f"{spec} {found}, and a classifier needs two or more: give a folder with one folder for each"
        )
    return images


def image_shape(images: Images, task: ImageTask) -> tuple[int, ...]:
    """Channels, height and width of an image as the network gets it."""
    if task.frozen:
        return ()  # as the pretrained network takes them
    if not isinstance(images, ImageArrays):
        return (3, _size(task), _size(task))
    shape = tuple(images.images.shape[1:]) if task.size is None else (3, task.size, task.size)
    short_side(max(shape[1:]), task.resize)  # checks what files for prediction will need
    return shape


def make_loaders(
    task: ImageTask, data: TaskData, scale: dict[str, Any], *, seed: int, processes: int = 1
) -> Loaders:
    """Make the loaders; ``scale``: mean and std of the pixels that a pretrained network needs, or empty."""
    if isinstance(data.train, ImageArrays):
        return _in_memory(task, data, scale, seed)
    if task.batch_size % processes:
        raise ValueError(
            f"batch_size={task.batch_size} is for all {processes} processes together and cannot be "
            f"split evenly: choose {task.batch_size - task.batch_size % processes or processes}"
        )
    size, each = _size(task), task.batch_size // processes
    scale = scale or {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    inputs = _inputs(task, data, **scale)
    train = data.train.loader(size, each, train=True, num_workers=task.workers, seed=seed, **scale)

    def clean(images: Images) -> Any:
        # A few files are loaded into memory, and such a batch is one of all processes.
        return inputs.loader(images, max(each, processes), num_workers=task.workers)

    test = None if data.test is None else clean(data.test)
    return Loaders(train, clean(data.train), clean(data.held_out), test, inputs)


def _in_memory(task: ImageTask, data: TaskData, scale: dict[str, Any], seed: int) -> Loaders:
    padding = max(1, min(data.train.images.shape[2:]) // 8)
    train = DeviceLoader(
        data.train,
        task.batch_size,
        shuffle=True,
        augment=Augmentation(padding),
        seed=seed,
        size=task.size if is_resized(data) else None,
        **scale,
    )
    inputs = _inputs(task, data, train.mean.tolist(), train.std.tolist())
    # Resized images are large: a batch that fits into memory in training does so in evaluation.
    batch = task.batch_size if is_resized(data) else EVAL_BATCH
    held_out, test = (
        None if images is None else inputs.loader(images, batch) for images in (data.held_out, data.test)
    )
    return Loaders(train, train.clean(), held_out, test, inputs)


def is_resized(data: TaskData) -> bool:
    """Whether images in memory are resized for the network: their shape is not that of its input."""
    return isinstance(data.train, ImageArrays) and tuple(data.train.images.shape[1:]) != data.shape


def _inputs(task: ImageTask, data: TaskData, mean: Any, std: Any) -> Preprocessing:
    names = data.train.class_names
    _, height, width = data.shape
    return Preprocessing(
        (height, width),
        tuple(mean),
        tuple(std),
        names,
        data.multi_label,
        resize=task.resize,
        resize_arrays=is_resized(data),
    )


def load_images(images: Any, task: ImageTask) -> Any:
    """Load image files into memory, unless they are to be read from disk."""
    if not isinstance(images, ImageFiles):
        if isinstance(images, ImageArrays) and task.size is not None and not task.pretrained:
            raise ValueError(
                f"size={task.size} is for image files, the images of {task.data} have a size: leave it out, "
                "or take a pretrained network, for which they are resized"
            )
        return images
    if task.from_disk or task.frozen:  # each file is decoded once, where its features are computed
        return images
    size = _size(task)
    if len(images) * 3 * size**2 > LIMIT_BYTES:
        raise ValueError(
            f"{len(images)} images of {size} pixels are more than {LIMIT_BYTES / 2**30:.0f} GiB: "
            "--set from_disk=true reads them batch by batch"
        )
    return images.load(size, resize=task.resize)


def _size(task: ImageTask) -> int:
    if task.size is None:
        raise ValueError(f"the images of {task.data} may have any size: choose one, e.g. --set size=64")
    return task.size
