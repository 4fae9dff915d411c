"""Images as a kind of input of recipes: their model, by the name of its network; and their training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetsngp.conversion.conversion import convert
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.copies import image_folds
from hetsngp.data.images.decoding import short_side
from hetsngp.data.images.files import ImageFiles
from hetsngp.data.preprocessing import Images, Preprocessing
from hetsngp.data.sources import has_test
from hetsngp.models.classifier import Classifier
from hetsngp.models.methods import build
from hetsngp.nn.backbones import WideResNet
from hetsngp.pretrained.image_features import image_features
from hetsngp.pretrained.image_networks import DEFAULT, create_network, name_in_timm, pretrained_network
from hetsngp.training.finished_runs import finished
from hetsngp.training.image_data import image_shape, load_images, make_loaders, open_images_to_train_on
from hetsngp.training.input_kinds import FrozenModel, InputKind, Loaders, TaskData
from hetsngp.training.recipe_run import train_recipe as train_images
from hetsngp.training.recipes.recipe import Recipe
from hetsngp.training.recipes.task import ImageTask
from hetsngp.training.run_results import measure

__all__ = ["ImageInputs", "ImageTask", "Recipe", "finished", "make_model", "measure", "train_images"]

WIDE_RESNET = re.compile(r"wrn-(\d+)-([1-9]\d*)")
OFFLINE = "to train from scratch, --set pretrained=false"
"""What to do where the weights of a network cannot be fetched."""
OFFLINE_FEATURES = f"--set network={DEFAULT} takes them"
"""The same for a network whose features are needed, which must be a pretrained one."""


class ImageInputs(InputKind):
    """Images in memory, in files, in tar shards, and multi-label ones."""

    examples = "images"

    def open(self, spec: str, split: str) -> Images:
        return open_images_to_train_on(spec, split)

    def has_test(self, spec: str) -> bool:
        return has_test(spec)

    def has_one_label(self, examples: Any) -> bool:
        return isinstance(examples, ImageArrays | ImageFiles)

    def folds(self, examples: Any, folds: int, seed: int) -> list[Tensor]:
        return image_folds(examples, folds, seed)

    def prepare(self, examples: Any, task: ImageTask) -> Any:
        return load_images(examples, task)

    def shape(self, examples: Any, task: ImageTask) -> tuple[int, ...]:
        return image_shape(examples, task)

    def make_model(self, task: ImageTask, data: TaskData) -> tuple[Classifier, dict[str, Any]]:
        channels, height, width = data.shape
        return make_model(task, data.num_classes, (channels, height, width))

    def frozen_model(self, task: ImageTask, data: TaskData) -> FrozenModel:
        if not self.has_one_label(data.train):
            raise ValueError(
                f"a frozen network is for images with one label each, and those of {task.data} are "
                f"{type(data.train).__name__}: leave out frozen and head_first"
            )
        return frozen_model(task, data)

    def make_loaders(
        self, task: ImageTask, data: TaskData, asked: dict[str, Any], *, seed: int, processes: int
    ) -> Loaders:
        return make_loaders(task, data, asked, seed=seed, processes=processes)


def make_model(
    task: ImageTask, num_classes: int, shape: tuple[int, int, int]
) -> tuple[Classifier, dict[str, Any]]:
    """Make the model for images of ``shape`` (C, H, W); also returns mean and std if its network has them.

    Initial values come from torch's global generator.
    """
    options = dict(task.options)
    wide = WIDE_RESNET.fullmatch(task.network)
    if wide is not None:
        backbone = WideResNet(int(wide[1]), int(wide[2]), in_channels=shape[0])
        return build(task.method, backbone, num_classes, **options), {}
    network, about = create_network(
        _timm_name(task.network),
        pretrained=task.pretrained,
        size=shape[1:],
        num_classes=num_classes,
        in_chans=shape[0],
        offline=OFFLINE_FEATURES if task.head_first else OFFLINE,
    )
    model = convert(
        network, task.method, torch.zeros(2, *shape), num_classes=num_classes, copy=False, **options
    )
    known = task.pretrained and len(about["mean"]) == shape[0]
    return model, {name: list(about[name]) for name in ("mean", "std")} if known else {}


def frozen_model(task: ImageTask, data: TaskData) -> FrozenModel:
    """Pretrained network without its classifier, with a head that is not fitted.

    A network whose head is fitted first sees images as in its training.
    """
    size = None if task.frozen else data.shape[-1]
    if task.head_first and data.shape != (3, size, size):
        raise ValueError(
            f"head_first is for square RGB images, and these are {data.shape} (channels, height, width): "
            "leave it out, or choose a size, --set size=224"
        )
    network = pretrained_network(
        task.network, size=task.size or size, resize=task.resize, offline=OFFLINE_FEATURES
    )
    side = network.size
    short_side(side, task.resize)
    model = convert(
        network.network,
        example_input=torch.zeros(2, 3, side, side),
        num_classes=data.num_classes,
        freeze=True,
        copy=False,
    )
    inputs = Preprocessing(
        (side, side),
        network.mean,
        network.std,
        data.train.class_names,
        resize=task.resize,
        resize_arrays=True,
    )

    def features(images: Any, folder: Path, show: bool) -> Tensor:
        return image_features(images, network, folder, batch_size=task.batch_size, show=show)

    return FrozenModel(model, inputs, features)


def _timm_name(network: str) -> str:
    try:
        name_in_timm(network)
    except ValueError as error:
        raise ValueError(f"{error}; wrn-16-8 (depth, width) is a Wide ResNet of ours") from None
    return network
