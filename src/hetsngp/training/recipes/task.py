"""Data, network and method of a training, and rules for the verdicts on its predictions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetsngp._moved import renamed_arguments, renamed_attribute
from hetsngp.choices import MethodName
from hetsngp.models.methods import check_method, check_options
from hetsngp.validation import check_positive


@dataclass(frozen=True)
class ImageTask:
    """Data, network and method."""

    data: str
    """A name of ``hetsngp.data.datasets.registry`` (cifar100, cifar10n:worse), a folder, or a .npz file."""
    network: str = "wrn-16-8"
    """A Wide ResNet, or the name of a network in timm, which is converted."""
    method: MethodName = "hetsngp"
    pretrained: bool = False
    """Whether timm's network comes with its weights."""
    size: int | None = None
    """Side in pixels to which image files are cut."""
    resize: int | None = None
    """Short side of image files before the centre crop; not of those that are trained on from disk."""
    from_disk: bool = False
    """Read image files batch by batch, random crops of them, instead of holding all in memory."""
    workers: int | None = None
    """Processes that read from disk, for each device; None: one a core, at most 8."""
    batch_size: int = 128
    """Examples of a batch, over all processes."""
    held_out: float = 0.1
    """Share of the training images kept for early stopping and calibration."""
    calibrate: bool = True
    """Set temperature and posterior scale on the held-out images."""
    labels: str | None = None
    """Corrected labels of the training images, :mod:`hetsngp.data.label_files`: an audit folder or a CSV
    file."""
    fold: str | None = None
    """Fold of the training images that is left out and tested on, such as "2/5": number 2 of 5."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of :func:`hetsngp.build`."""

    def __post_init__(self) -> None:
        check_method(self.method)
        check_positive("batch_size", self.batch_size, integer=True)
        check_options(dict(self.options))
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out is a share between 0 and 1, e.g. 0.1, got {self.held_out!r}")
        for name in ("size", "resize"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name), integer=True)
        if self.workers is not None and self.workers < 0:
            raise ValueError(f"workers is a number of processes, 0 for none, got {self.workers!r}")
        if self.pretrained and self.network.startswith("wrn-"):
            raise ValueError(f"{self.network} has no pretrained weights: name a network of timm's")
        if self.fold is not None:
            self.fold_number  # noqa: B018  # raises

    @property
    def fold_number(self) -> tuple[int, int]:
        """Number of ``fold``, from 1, and the number of folds."""
        found = re.fullmatch(r"([1-9]\d{0,8})/([1-9]\d{0,8})", str(self.fold))
        if found is None or not (number := int(found[1])) <= (folds := int(found[2])) or folds < 2:
            raise ValueError(f"fold is such as 2/5, the second of five folds, got {self.fold!r}")
        return number, folds


@renamed_arguments(right="correct")
@dataclass(frozen=True)
class VerdictRules:
    """When a prediction is called confident, or unfamiliar: see :mod:`hetsngp.serving`."""

    correct: float = 0.95
    """Share of correct labels among held-out inputs that are called confident."""
    unfamiliar: float = 0.05
    """Share of held-out inputs that may be called unfamiliar."""
    right = renamed_attribute("right", "correct")

    def __post_init__(self) -> None:
        for name in ("correct", "unfamiliar"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"verdicts.{name} is a share between 0 and 1, got {getattr(self, name)!r}")
