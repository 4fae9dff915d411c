"""What is to be learned by what, and what is said of its predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetsngp.models.methods import METHODS, check_options
from hetsngp.validation import check_choice, check_positive


@dataclass(frozen=True)
class ImageTask:
    """What is to be learned by what."""

    data: str
    """A name of ``hetsngp.data.datasets.registry`` such as cifar100 or cifar10n:worse, a folder, or a .npz file."""
    network: str = "wrn-16-8"
    """A Wide ResNet, or the name of a network in timm, which is converted."""
    method: str = "hetsngp"
    pretrained: bool = False
    """Whether timm's network comes with its weights."""
    size: int | None = None
    """Of image files, pixels of a side."""
    resize: int | None = None
    """Of image files, but for those trained on from disk: the short side before the middle is taken."""
    from_disk: bool = False
    """Read image files batch by batch, random parts of them, in place of holding all in memory."""
    workers: int | None = None
    """Processes that read from disk, for each device; None: one a core, at most 8."""
    batch_size: int = 128
    """Over all processes."""
    held_out: float = 0.1
    """Share of the training images kept to stop and to calibrate by."""
    calibrate: bool = True
    """Set temperature and posterior scale on the held-out images."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of :func:`hetsngp.build`."""

    def __post_init__(self) -> None:
        check_choice("method", self.method, tuple(METHODS))
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


@dataclass(frozen=True)
class VerdictRules:
    """What a prediction has to be to be called confident, or unfamiliar: see :mod:`hetsngp.serving`."""

    right: float = 0.95
    """Share of right answers among held-out inputs that are called confident."""
    unfamiliar: float = 0.05
    """Share of held-out inputs that may be called unfamiliar."""

    def __post_init__(self) -> None:
        for name in ("right", "unfamiliar"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"verdicts.{name} is a share between 0 and 1, got {getattr(self, name)!r}")
