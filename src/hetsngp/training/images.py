"""Images as a kind of input of recipes: their model, by the name of its network; and their training."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from hetsngp.conversion.conversion import convert
from hetsngp.conversion.libraries import create_timm_network
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.copies import image_folds
from hetsngp.data.images.files import ImageFiles
from hetsngp.data.preprocessing import Images
from hetsngp.data.sources import has_test
from hetsngp.models.classifier import Classifier
from hetsngp.models.methods import build
from hetsngp.nn.backbones import WideResNet
from hetsngp.training.finished_runs import finished
from hetsngp.training.image_data import image_shape, load_images, make_loaders, open_images_to_train_on
from hetsngp.training.input_kinds import InputKind, Loaders, TaskData
from hetsngp.training.recipe_run import measure
from hetsngp.training.recipe_run import train_recipe as train_images
from hetsngp.training.recipes.recipe import Recipe
from hetsngp.training.recipes.task import ImageTask

__all__ = ["ImageInputs", "ImageTask", "Recipe", "finished", "make_model", "measure", "train_images"]

WIDE_RESNET = re.compile(r"wrn-(\d+)-([1-9]\d*)")
OFFLINE = "without a network connection train from scratch, --set pretrained=false"


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

    def shape(self, examples: Any, task: ImageTask) -> tuple[int, int, int]:
        return image_shape(examples, task)

    def make_model(self, task: ImageTask, data: TaskData) -> tuple[Classifier, dict[str, Any]]:
        channels, height, width = data.shape
        return make_model(task, data.num_classes, (channels, height, width))

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
    network = _from_timm(task, num_classes, shape)
    model = convert(
        network, task.method, torch.zeros(2, *shape), num_classes=num_classes, copy=False, **options
    )
    config: Any = getattr(network, "pretrained_cfg", None) or {}
    known = task.pretrained and len(config.get("mean", ())) == shape[0]
    return model, {name: list(config[name]) for name in ("mean", "std")} if known else {}


def _from_timm(task: ImageTask, num_classes: int, shape: tuple[int, int, int]) -> nn.Module:
    try:
        import timm
    except ImportError:
        raise ImportError(f"network {task.network!r} needs timm: pip install 'hetsngp[vision]'") from None
    if not timm.is_model(task.network.partition(".")[0]):
        close = ", ".join(timm.list_models(f"*{task.network[:6]}*")[:5])
        raise ValueError(
            f"unknown network {task.network!r}: give wrn-16-8 (depth, width), or one that timm.list_models() "
            f"names{'; alike: ' + close if close else ''}"
        )
    config = timm.get_pretrained_cfg(task.network)
    given: dict[str, Any] = {}
    if config is not None and config.fixed_input_size and tuple(config.input_size[1:]) != shape[1:]:
        given["img_size"] = shape[1:]  # transformers have one embedding for each position
    given |= {"in_chans": shape[0], "num_classes": num_classes}
    return create_timm_network(task.network, pretrained=task.pretrained, offline=OFFLINE, **given)
