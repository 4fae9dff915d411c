"""Data, network and method of a training, and rules for the verdicts on its predictions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args

from hetsngp._moved import renamed_arguments, renamed_attribute
from hetsngp.choices import MethodName
from hetsngp.models.methods import check_method, check_options
from hetsngp.validation import check_positive

SEVERAL_INPUTS: tuple[str, ...] = get_args(Literal["mimo", "hetsngp_mimo"])
"""Methods whose network takes several inputs at once."""


@dataclass(frozen=True)
class Task:
    """Data, network and method, for any kind of input; keys of one kind are fields of its subclass."""

    data: str
    """A name of ``hetsngp.data.datasets.registry`` (cifar100, cifar10n:worse), a folder, or a file."""
    network: str
    method: MethodName = "hetsngp"
    pretrained: bool = False
    """Whether the network comes with its weights."""
    workers: int | None = None
    """Processes that read from disk, for each device; None: one a core, at most 8."""
    batch_size: int = 128
    """Examples of a batch, over all processes."""
    held_out: float = 0.1
    """Share of the training examples kept for early stopping and calibration."""
    calibrate: bool = True
    """Set temperature and posterior scale on the held-out examples."""
    labels: str | None = None
    """Corrected labels of the training examples, :mod:`hetsngp.data.label_files`: an audit folder or a CSV
    file."""
    fold: str | None = None
    """Fold of the training examples that is left out and tested on, such as "2/5": number 2 of 5."""
    frozen: bool = False
    """Leave the pretrained network as it is, and fit the head alone on its features."""
    head_first: bool = False
    """Fit the head alone on the features of the pretrained network before everything is trained."""
    features: str | None = None
    """Folder that keeps features of pretrained networks, for several runs; None: ``features`` beside the
    folder of the run."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of :func:`hetsngp.build`, or of :func:`hetsngp.fit_head` for a frozen network."""

    inputs: ClassVar[str]
    """Kind of input, the recipe key ``inputs``."""
    NOT_THE_RESULT: ClassVar[tuple[str, ...]] = ("workers", "features")
    """Fields that do not decide the result."""
    LATER: ClassVar[tuple[str, ...]] = ("labels", "fold", "frozen", "head_first")
    """Fields that recipes did not always have: left out of a description where they have their default, so
    that older runs are recognised."""

    def __post_init__(self) -> None:
        check_method(self.method)
        check_positive("batch_size", self.batch_size, integer=True)
        check_options(dict(self.options))
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out is a share between 0 and 1, e.g. 0.1, got {self.held_out!r}")
        if self.workers is not None and self.workers < 0:
            raise ValueError(f"workers is a number of processes, 0 for none, got {self.workers!r}")
        if self.fold is not None:
            self.fold_number  # noqa: B018  # raises
        for name in ("frozen", "head_first"):
            if getattr(self, name) and not self.pretrained:
                raise ValueError(f"{name} needs a network with its weights: --set pretrained=true")
        if self.frozen and self.head_first:
            raise ValueError("a frozen network is not trained after its head: leave out head_first")
        if (self.frozen or self.head_first) and self.method in SEVERAL_INPUTS:
            raise ValueError(
                f"{self.method} takes several inputs through the network at once, and its head cannot be "
                "fitted on features of single ones: leave out frozen and head_first, or choose another method"
            )

    @property
    def fold_number(self) -> tuple[int, int]:
        """Number of ``fold``, from 1, and the number of folds."""
        found = re.fullmatch(r"([1-9]\d{0,8})/([1-9]\d{0,8})", str(self.fold))
        if found is None or not (number := int(found[1])) <= (folds := int(found[2])) or folds < 2:
            raise ValueError(f"fold is such as 2/5, the second of five folds, got {self.fold!r}")
        return number, folds

    def describe(self) -> dict[str, Any]:
        """Everything that decides the result, for JSON."""
        defaults = {each.name: each.default for each in fields(self)}
        described = {
            name: value
            for name, value in asdict(self).items()
            if name not in self.NOT_THE_RESULT and not (name in self.LATER and value == defaults[name])
        }
        options = {name: "inf" if value == float("inf") else value for name, value in self.options.items()}
        kind = {} if self.inputs == ImageTask.inputs else {"inputs": self.inputs}
        return {**described, **kind, "options": options}

    def identity(self) -> dict[str, Any]:
        """Description by which a run is recognised when it is resumed; calibration may change."""
        described = {name: value for name, value in self.describe().items() if name != "calibrate"}
        options = described.pop("options")
        return {**described, **{f"options.{name}": value for name, value in options.items()}}


@dataclass(frozen=True)
class ImageTask(Task):
    """Data, network and method of a training on images."""

    network: str = "wrn-16-8"
    """A Wide ResNet, or the name of a network in timm, which is converted."""
    size: int | None = None
    """Side in pixels to which image files are cut."""
    resize: int | None = None
    """Short side of image files before the centre crop; not of those that are trained on from disk."""
    from_disk: bool = False
    """Read image files batch by batch, random crops of them, instead of holding all in memory."""

    inputs: ClassVar[str] = "images"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("size", "resize"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name), integer=True)
        if self.pretrained and self.network.startswith("wrn-"):
            raise ValueError(f"{self.network} has no pretrained weights: name a network of timm's")
        if self.frozen and self.from_disk:
            raise ValueError("the images of a frozen network are read once: leave out from_disk")

    def identity(self) -> dict[str, Any]:
        described = super().identity()
        if self.from_disk:
            del described["resize"]  # used for evaluation only; in memory it also cuts the training images
        return described


@dataclass(frozen=True)
class TextTask(Task):
    """Data, network and method of a training on texts."""

    network: str = "minilm"
    """"minilm" (weights by pip), a local folder, or a name of the Hugging Face hub."""
    pretrained: bool = True
    text_column: str | None = None
    """Column of the texts; None: guessed."""
    label_column: str | None = None
    """Column of the classes; None: guessed."""
    max_length: int | None = None
    """Tokens of a text, which is cut there; None: as many as the network was made for."""

    inputs: ClassVar[str] = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length is not None:
            check_positive("max_length", self.max_length, integer=True)


TASKS: dict[str, type[Task]] = {task.inputs: task for task in (ImageTask, TextTask)}
"""Value of the recipe key ``inputs`` → the class that has the keys of that kind."""


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
