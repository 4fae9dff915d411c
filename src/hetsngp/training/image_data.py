"""Loaders of a training on images, in memory or from disk, and the preprocessing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hetsngp.data.images.arrays import ImageArrays, stratified
from hetsngp.data.images.copies import image_folds
from hetsngp.data.images.decoding import IMAGENET_MEAN, IMAGENET_STD, short_side
from hetsngp.data.images.device_loader import Augmentation, DeviceLoader
from hetsngp.data.images.files import LIMIT_BYTES, ImageFiles
from hetsngp.data.images.multi_label import MultiLabelFiles
from hetsngp.data.label_files import LabelFile, open_labels, with_labels
from hetsngp.data.preprocessing import Images, Preprocessing
from hetsngp.data.shards.streams import ShardedImages
from hetsngp.data.sources import has_test, open_set
from hetsngp.training.recipes.task import ImageTask

EVAL_BATCH = 1000
"""Images of a batch in evaluation, where they are in memory."""


@dataclass(frozen=True)
class TaskData:
    """Opened and split data sets."""

    train: Images
    held_out: Images
    test: Images | None
    missing: str | None
    """Why there are no test images, if the data set should have some."""
    shape: tuple[int, int, int]
    """Channels, height and width of an image."""
    fingerprints: dict[str, Any] = field(default_factory=dict)
    """Fingerprints of the sets as they were opened, before files are decoded, and of corrected labels."""
    corrected: dict[str, Any] | None = None
    """Corrected labels, for the summary: their path, and the numbers of dropped and of changed examples."""

    @property
    def num_classes(self) -> int:
        """Number of classes K."""
        return self.train.num_classes

    @property
    def multi_label(self) -> bool:
        """Whether an image may have several labels."""
        return isinstance(self.train, MultiLabelFiles | ShardedImages)


@dataclass(frozen=True)
class Loaders:
    """Loaders of a training: ``train`` shuffles and augments, ``clean`` has the same images unchanged."""

    train: Any
    clean: Any
    held_out: Any
    test: Any | None
    inputs: Preprocessing


def open_task(
    task: ImageTask, seed: int, fingerprints: Callable[[dict[str, Any]], dict[str, Any]] | None = None
) -> TaskData:
    """Open and check all data of a task, so that missing data are found before the training.

    ``fingerprints`` makes those of the opened sets.

    Folds and held-out images are drawn from the labels as given, so that they are the same with corrected
    labels; copies of an image are in one fold. Corrected labels are for training and held-out images, without
    those that were dropped; a fold that is tested on keeps its given labels.
    """
    images = open_set(task.data, "train")
    if not isinstance(images, Images):
        raise ValueError(f"{task.data} is a {type(images).__name__}, not images to train on: docs/data.md")
    single = isinstance(images, ImageArrays | ImageFiles)
    for name in ("labels", "fold"):
        if not single and getattr(task, name) is not None:
            raise ValueError(
                f"{name} is for images with one label each, and those of {task.data} are "
                f"{type(images).__name__}: leave it out"
            )
    labels = None if task.labels is None else open_labels(task.labels, images)  # type: ignore[arg-type]
    test, missing = None, None
    if task.fold is None and has_test(task.data):
        try:
            test = open_set(task.data, "test")
        except FileNotFoundError as error:
            missing = " ".join(str(error).split())
    found = {} if fingerprints is None else fingerprints({"train": images, "test": test})
    if labels is not None and fingerprints is not None:
        found = {**found, "labels": labels.to_fingerprint()}
    fold_rows = None
    if task.fold is not None:
        number, folds = task.fold_number
        fold_rows = image_folds(images, folds, seed)[number - 1]  # type: ignore[arg-type]
    images, test = _loaded(images, task), None if test is None else _loaded(test, task)
    if isinstance(images, ImageArrays):
        shape = tuple(images.images.shape[1:])
        short_side(max(shape[1:]), task.resize)  # checks what files for prediction will need
    else:
        shape = (3, _size(task), _size(task))
    corrected = None
    if single:
        train, held_out, fold, corrected = _split(images, labels, task, seed, fold_rows)
        test = test if fold is None else fold
    else:
        train, held_out = images.split(task.held_out, seed=seed)
    data = TaskData(train, held_out, test, missing, shape, found, corrected)  # type: ignore[arg-type]
    if test is not None and test.class_names != images.class_names:
        odd = sorted(set(images.class_names) ^ set(test.class_names))
        raise ValueError(
            f"training and test images of {task.data} have different classes, e.g. "
            f"{(odd or ['their order'])[0]!r}: give both the same folders"
        )
    link = task.options.get("link", "softmax")
    if data.multi_label != (link == "sigmoid"):
        kind, fix = ("multi-label", "sigmoid") if data.multi_label else ("single-label", "softmax")
        raise ValueError(f"{task.data} is {kind}: --set options.link={fix}")
    return data


def _split(
    images: Any, labels: LabelFile | None, task: ImageTask, seed: int, fold_rows: torch.Tensor | None
) -> tuple[Any, Any, Any | None, dict[str, Any] | None]:
    """Images to train on, held out, and of the fold; and how many examples have corrected labels."""
    rest, fold, corrected = torch.arange(len(images)), None, None
    if fold_rows is not None:
        fold, rest = images.take(fold_rows), rest[~torch.isin(rest, fold_rows)]
    parts = [rest[rows] for rows in stratified(images.labels[rest], images.num_classes, task.held_out, seed)]
    if labels is not None:
        images, kept = with_labels(images, labels), labels.is_kept
        parts = [rows[kept[rows]] for rows in parts]
        if not all(map(len, parts)):
            raise ValueError(f"the labels {task.labels} drop all images to train on, or all held-out ones")
        changed = sum(int(labels.changed[rows].sum()) for rows in parts)
        corrected = {"path": task.labels, "dropped": int((~kept[rest]).sum()), "changed": changed}
    train, held_out = (images.take(rows) for rows in parts)
    return train, held_out, fold, corrected


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
    padding = max(1, min(data.shape[1:]) // 8)
    train = DeviceLoader(
        data.train,  # type: ignore[arg-type]
        task.batch_size,
        shuffle=True,
        augment=Augmentation(padding),
        seed=seed,
        **scale,
    )
    inputs = _inputs(task, data, train.mean.tolist(), train.std.tolist())
    held_out, test = (
        None if images is None else inputs.loader(images, EVAL_BATCH) for images in (data.held_out, data.test)
    )
    return Loaders(train, train.clean(), held_out, test, inputs)


def _inputs(task: ImageTask, data: TaskData, mean: Any, std: Any) -> Preprocessing:
    names = data.train.class_names
    return Preprocessing(data.shape[1:], tuple(mean), tuple(std), names, data.multi_label, resize=task.resize)


def _loaded(images: Any, task: ImageTask) -> Any:
    """Load image files into memory, unless they are to be read from disk."""
    if not isinstance(images, ImageFiles):
        if isinstance(images, ImageArrays) and task.size is not None:
            raise ValueError(
                f"size={task.size} is for image files, the images of {task.data} have a size: leave it out"
            )
        return images
    if task.from_disk:
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


def spread(images: Images, most: int) -> Images:
    """Take ``most`` images at equal distances, because files are in the order of classes; all of shards."""
    if isinstance(images, ShardedImages) or len(images) <= most:
        return images
    indices = torch.linspace(0, len(images) - 1, most, dtype=torch.float64)  # float32 would repeat some
    return images.take(indices.round().long())
