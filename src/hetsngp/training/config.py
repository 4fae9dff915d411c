"""Configuration of a training and of its checkpoints."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hetsngp._moved import renamed, renamed_arguments, renamed_attribute
from hetsngp.fitting.schedule import Schedule
from hetsngp.validation import check_not_negative, check_positive


@renamed_arguments(average="ema_decay")
@dataclass(frozen=True)
class TrainConfig:
    """A schedule, and everything else that decides a training."""

    schedule: Schedule
    accumulate: int = 1
    """Batches of a step, whose gradients are averaged."""
    clip: float | None = None
    """Largest norm of the gradient of a step."""
    ema_decay: float | None = None
    """Decay of an exponential moving average of weights and statistics (0.998): the average is evaluated on
    the held-out data, and the model ends with it."""
    patience: int | None = None
    """Early stopping: epochs without a lower held-out NLL after which to stop."""
    best: bool = True
    """With held-out data: end with the weights of the epoch of lowest NLL; False: of the last epoch."""
    bound_every: int = 1
    """Steps from one measurement of the spectral norms to the next; 1: at every forward pass."""
    seed: int = 0
    """Seed of all that draws from torch's, NumPy's or Python's generators: dropout, integration points, …"""
    mixup: float = 0.0
    """α of mixup: each batch is mixed with a permutation of itself by λ ~ Beta(α, α); 0: none."""
    average = renamed_attribute("average", "ema_decay")

    def __post_init__(self) -> None:
        check_positive("accumulate", self.accumulate, integer=True)
        check_positive("bound_every", self.bound_every, integer=True)
        if self.clip is not None:
            check_positive("clip", self.clip)
        check_not_negative("mixup", self.mixup)
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"ema_decay is between 0 and 1, e.g. 0.998, got {self.ema_decay!r}")
        if self.patience is not None:
            check_positive("patience", self.patience, integer=True)

    def describe(self) -> dict[str, Any]:
        """Fields as JSON has them; without mixup as before there was any, so that older runs are resumed."""
        described = asdict(self)
        if not self.mixup:
            del described["mixup"]
        described["schedule"]["milestones"] = list(self.schedule.milestones)
        return described


@dataclass(frozen=True)
class HeadConfig:
    """What decides the fit of a head on a frozen network, besides its options."""

    seed: int = 0
    """Seed of the split, of the head's initial values, and of everything else that is random."""

    def describe(self) -> dict[str, Any]:
        """Fields as JSON has them."""
        return asdict(self)


@dataclass(frozen=True)
class CheckpointConfig:
    """A folder for checkpoint, logs and the best epoch; the same call with the same folder resumes."""

    folder: Path
    seconds: float = 60.0
    """Least time from one checkpoint to the next; the end of a run always writes one."""
    tensorboard: bool | None = None
    """Whether to log to TensorBoard; None: where it is installed."""
    changed: bool = False
    """Whether to resume from a checkpoint of another configuration, for example with a lower lr."""
    about: dict[str, Any] = field(default_factory=dict)
    """Description of data and model: a folder with a run of another description is refused."""
    hash_all_data: bool = False
    """Whether to compare all contents of data on disk with those the run began with, not a sample of them."""
    fingerprints: dict[str, Any] | None = None
    """Fingerprints of the data (:mod:`hetsngp.training.same_data`); None: made from the loaders."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        if not self.seconds >= 0:
            raise ValueError(f"seconds between checkpoints must be at least 0, got {self.seconds!r}")


def __getattr__(name: str) -> Any:
    return renamed(__name__, name)
