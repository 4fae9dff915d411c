"""Kinds of input that a recipe can be for: what each of them provides to a training."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from hetsngp.models.classifier import Classifier
from hetsngp.training.recipes.task import Task

KINDS = {"images": ("hetsngp.training.images", "ImageInputs")}
"""Value of the recipe key ``inputs`` → module and name of its :class:`InputKind`."""


@dataclass(frozen=True)
class TaskData:
    """Opened and split sets of examples, of the type that the kind of input has for them."""

    train: Any
    held_out: Any
    test: Any | None
    missing: str | None
    """Why there are no test examples, if the data set should have some."""
    shape: tuple[int, ...] = ()
    """Shape of an example, where all have the same: channels, height and width of an image."""
    fingerprints: dict[str, Any] = field(default_factory=dict)
    """Fingerprints of the sets as they were opened, before files are decoded, and of corrected labels."""
    corrected: dict[str, Any] | None = None
    """Corrected labels, for the summary: their path, and the numbers of dropped and of changed examples."""
    multi_label: bool = False
    """Whether an example may have several labels."""

    @property
    def num_classes(self) -> int:
        """Number of classes K."""
        classes: int = self.train.num_classes
        return classes


@dataclass(frozen=True)
class Loaders:
    """Loaders of a training: ``train`` shuffles and augments, ``clean`` has the same examples unchanged."""

    train: Any
    clean: Any
    held_out: Any
    test: Any | None
    inputs: Any
    """Preprocessing that is saved with the model: ``loader(examples, batch_size, num_workers=…)``,
    ``class_names``, ``multi_label`` and ``to_dict()``."""


@dataclass(frozen=True, eq=False)
class FrozenModel:
    """A pretrained network with a new head, and its features of any set of examples."""

    model: Classifier
    """Converted with ``freeze=True``; its head is not fitted."""
    inputs: Any
    """Preprocessing, as of :class:`Loaders`: what it gives leads to the same features."""
    features: Callable[[Any, Path, bool], Tensor]
    """(examples, folder, show) → (N, D) float32: features that ``folder`` has are read, the others are
    computed by the network of ``model``, where it is, and written there."""


class InputKind(ABC):
    """What a kind of input provides to :func:`hetsngp.training.recipe_run.train_recipe`.

    A set of examples has ``len``, ``labels`` (N,) int64, ``class_names``, ``num_classes`` and ``take(rows)``;
    one with a label for each example is a dataclass with ``targets`` (N, K) or None besides, so that
    corrected labels can replace its own.
    """

    examples: ClassVar[str]
    """What an example is called in messages, in the plural."""

    @abstractmethod
    def open(self, spec: str, split: str) -> Any:
        """Open the ``split``, "train" or "test", of a data set; an error where it cannot be trained on."""

    @abstractmethod
    def has_test(self, spec: str) -> bool:
        """Whether a data set has test examples."""

    @abstractmethod
    def has_one_label(self, examples: Any) -> bool:
        """Whether each example has one label: such a set can have corrected labels and folds."""

    def is_multi_label(self, examples: Any) -> bool:
        """Whether an example may have several labels."""
        return not self.has_one_label(examples)

    @abstractmethod
    def folds(self, examples: Any, folds: int, seed: int) -> list[Tensor]:
        """Rows of each fold; copies of an example are in one fold."""

    @abstractmethod
    def prepare(self, examples: Any, task: Any) -> Any:
        """Make opened examples what the loaders take: image files, for example, are decoded into memory."""

    def shape(self, examples: Any, task: Any) -> tuple[int, ...]:
        """Shape of a prepared example, where all have the same; a last check of the task."""
        return ()

    @abstractmethod
    def make_model(self, task: Any, data: TaskData) -> tuple[Classifier, Any]:
        """Make the model, and what its network asks of the loaders, such as mean and std of the pixels.

        Initial values come from torch's global generator.
        """

    @abstractmethod
    def make_loaders(self, task: Any, data: TaskData, asked: Any, *, seed: int, processes: int) -> Loaders:
        """Make the loaders; ``asked``: what :meth:`make_model` returned with the model."""

    @abstractmethod
    def frozen_model(self, task: Any, data: TaskData) -> FrozenModel:
        """Make the model of a frozen network, or of one whose head is fitted first."""


def input_kind(task: Task) -> InputKind:
    """Kind of input that ``task`` is for."""
    module, name = KINDS[task.inputs]
    kind: InputKind = getattr(importlib.import_module(module), name)()
    return kind
