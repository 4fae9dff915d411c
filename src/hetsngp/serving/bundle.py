"""A finished run on disk: the saved model and ``serving.json`` beside it.

``serving.json`` holds the preprocessing of the images, the class names, the thresholds of the verdicts, the
SHA-256 of the weights they belong to and a checksum of its own content. Prediction imports no training code.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hetsngp._moved import renamed
from hetsngp.data.datasets.registry import DATASETS
from hetsngp.data.images.decoding import short_side
from hetsngp.data.preprocessing import Preprocessing
from hetsngp.files import CHECKSUM, has_checksum, with_checksum, write_json
from hetsngp.io.artifact import load
from hetsngp.io.storage import CONFIG, ArtifactError
from hetsngp.limits import INPUT_SIDE
from hetsngp.locking import LOCK, one_writer
from hetsngp.models.classifier import Classifier
from hetsngp.models.ensemble import Ensemble
from hetsngp.serving.decisions import Thresholds
from hetsngp.serving.plain_models import assumed_inputs

SERVING, MODEL = "serving.json", "model"
FORMAT, VERSION = "hetsngp-serving", 2
WITHOUT_CHECKSUM = 1
"""Version of release 0.1."""
# The names of 21,843 classes take about 1 MiB.
MAX_BYTES = 2**25
LOCK_SECONDS = 30.0
"""Longest wait for another writer of the folder."""
PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Seconds before each new reading where the files belong to different models: one is being replaced."""
# Present in the folder of a run that has not finished.
UNFINISHED = ("checkpoint", "metrics.csv")


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A finished run, ready to predict; made by :func:`open_run`."""

    model: Classifier | Ensemble
    inputs: Preprocessing
    thresholds: Thresholds | None
    """None: there are no verdicts."""
    folder: Path
    """Folder of the saved model."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Metadata written with the model, such as the recipe."""
    note: str | None = None
    """What was assumed, where the model was saved without its preprocessing."""

    @property
    def device(self) -> torch.device:
        """Device of the model's parameters."""
        return next(self.model.parameters()).device


def write_serving(
    folder: str | Path,
    inputs: Preprocessing,
    thresholds: Thresholds | None = None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write ``serving.json`` beside the model that :func:`hetsngp.save` put into ``folder``, atomically.

    ``thresholds``: of :func:`~hetsngp.serving.set_thresholds`; None: there are no verdicts.
    ``about``: further metadata of the model, as strict JSON. Where its "data" is a folder or a file, its
    absolute path is added as "data_path", so that the model can be evaluated from another working directory.
    """
    target, values = Path(folder), about or {}
    _weights_digest(target)  # before the folder is made for the lock
    with one_writer(target, wait=LOCK_SECONDS):
        content = {
            "format": FORMAT,
            "version": VERSION,
            "sha256": _weights_digest(target),
            "inputs": inputs.to_dict(),
            "thresholds": None if thresholds is None else thresholds.to_dict(),
            "about": {**values, **_data_path(values.get("data"))},
        }
        write_json(target / SERVING, with_checksum(content))


def open_run(
    path: str | Path,
    device: str | torch.device = "cpu",
    *,
    allow_download: bool = False,
    class_names: Sequence[str] | None = None,
) -> ServedModel:
    """Load the finished run in ``path``: a folder that contains ``model/``, or that folder itself.

    No lock is taken. While the run is being replaced, the files are read again until they belong to one
    model, the old or the new one, for a few seconds at most. ``allow_download``: as of :func:`hetsngp.load`.

    A model that was saved by :func:`hetsngp.save` alone has no ``serving.json``: where its network is one of
    timm's, that says how it takes images; ``class_names`` are for such a model.
    """
    folder = _model_folder(Path(path))
    file = folder / SERVING
    if not file.exists() and not _is_of_run(folder):
        plain = load(folder, device=device, allow_download=allow_download)
        assumed, note = assumed_inputs(plain, folder, class_names)
        return ServedModel(plain, assumed, None, folder, note=note)
    if class_names is not None:
        raise ValueError(f"{file} has the names of the classes: leave out other ones")
    model, content = _read_together(folder, device, allow_download)
    try:
        inputs, set_before = Preprocessing.from_dict(content["inputs"]), content["thresholds"]
        thresholds = None if set_before is None else Thresholds.from_dict(set_before)
        about = content["about"]
        if not isinstance(about, dict):
            raise ValueError(f"about must be an object, got {about!r:.50}")
        _check_fit(model, inputs)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ArtifactError(f"{file} is damaged: {reason}; copy it again") from error
    return ServedModel(model, inputs, thresholds, folder, about)


def _read_together(
    folder: Path, device: str | torch.device, allow_download: bool
) -> tuple[Classifier | Ensemble, dict[str, Any]]:
    """Model and content of ``serving.json`` that belong together."""
    for pause in (*PAUSES, None):
        content = _read(folder / SERVING)
        if content.get("sha256") == _weights_digest(folder):
            model = load(folder, device=device, allow_download=allow_download)
            if content.get("sha256") == _weights_digest(folder):  # not replaced in the meantime
                return model, content
        if pause is not None:
            time.sleep(pause)
    raise ArtifactError(
        f"{folder / SERVING} belongs to other weights than those beside it: copy the complete folder of one "
        "run, or write the file again with hetsngp.serving.write_serving"
    )


def find_device(name: str) -> torch.device:
    """Device of that name; "auto" is a GPU where there is one, else the CPU.

    >>> find_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"there is no device {name!r} here ({reason}): use cpu or auto") from None
    return device


# --- reading and checking -------------------------------------------------------------------------------


def _data_path(data: Any) -> dict[str, str]:
    if not isinstance(data, str | Path) or str(data).partition(":")[0] in DATASETS:
        return {}
    path = Path(data).expanduser()
    return {"data_path": str(path.absolute())} if path.exists() else {}


def _model_folder(path: Path) -> Path:
    """Folder that contains ``config.json``."""
    if not path.exists():
        raise FileNotFoundError(f"there is no run {path}: give the folder that hetsngp train --out wrote")
    if not path.is_dir():
        raise ValueError(f"{path} is a file: give the folder of the run, or its folder {MODEL}/")
    for folder in (path, path / MODEL):
        if (folder / CONFIG).is_file():
            return folder
    if any((path / name).exists() for name in UNFINISHED):
        raise FileNotFoundError(
            f"the run in {path} is not finished and has no model yet: resume the training, "
            f"hetsngp train … --out {path}"
        )
    raise FileNotFoundError(
        f"{path} is not a run: it has no {MODEL}/{CONFIG}; give the folder that hetsngp train --out wrote"
    )


def _is_of_run(folder: Path) -> bool:
    """Whether the model is that of a run of a training, which has, or will have, a ``serving.json``."""
    run = folder.parent
    return folder.name == MODEL and any((run / name).exists() for name in (*UNFINISHED, "summary.json", LOCK))


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is missing, which holds the preprocessing of the images: finish the training "
            "(hetsngp train …), copy the complete folder, or see hetsngp.serving.write_serving"
        )
    if file.stat().st_size > MAX_BYTES:
        raise ArtifactError(f"{file} is larger than any that hetsngp writes: copy it again")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON
        raise ArtifactError(f"{file} is not a JSON file: {error}; copy it again") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ArtifactError(f"{file} was not written by hetsngp: copy the folder of the run again")
    version, checked = content.get("version"), has_checksum(content)
    if type(version) is not int or version not in (WITHOUT_CHECKSUM, VERSION):
        raise ArtifactError(
            f"{file} has version {version!r:.50}, and this hetsngp reads {WITHOUT_CHECKSUM} and {VERSION}: "
            "use the hetsngp that wrote it"
        )
    if checked is False or (checked is None and version == VERSION):
        problem = (
            f"its {CHECKSUM} is missing" if checked is None else f"its content is not that of its {CHECKSUM}"
        )
        raise ArtifactError(
            f"{file} is damaged or was edited: {problem}; copy it again, or write it with "
            "hetsngp.serving.write_serving"
        )
    if checked is None:
        warnings.warn(
            f"{file} is of hetsngp 0.1 and has no checksum, so that a damage would not be noticed: to renew "
            "it, train again, or write it with hetsngp.serving.write_serving",
            stacklevel=4,
        )
    return content


def _weights_digest(folder: Path) -> str:
    """SHA-256 of the weights, from ``config.json``."""
    file = folder / CONFIG
    if not file.is_file():
        raise FileNotFoundError(f"there is no model in {folder}: save it first, hetsngp.save(model, path)")
    if file.stat().st_size > MAX_BYTES:
        raise ArtifactError(f"{file} is larger than any that hetsngp writes: copy it again")
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["sha256"])
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON
        raise ArtifactError(f"{file} is not a JSON file: {error}; copy it again") from error
    except (TypeError, KeyError) as error:
        raise ArtifactError(f"{file} was not written by hetsngp.save: {error}") from error


def _check_fit(model: Classifier | Ensemble, inputs: Preprocessing) -> None:
    """Check that the inputs match the model, and that an image of their size fits into memory."""
    if len(inputs.class_names) != model.num_classes:
        raise ValueError(f"{len(inputs.class_names)} class_names for {model.num_classes} classes")
    first = model.members[0] if isinstance(model, Ensemble) else model
    if inputs.multi_label != first.head.sigmoid:
        link = "sigmoid" if first.head.sigmoid else "softmax"
        raise ValueError(
            f"several_labels is {str(inputs.multi_label).lower()}, but the model's link is {link}: the file "
            "belongs to another model"
        )
    INPUT_SIDE.check(max(*inputs.size, inputs.resize or 0), "an input")
    short_side(min(inputs.size), inputs.resize)


def __getattr__(name: str) -> Any:
    return renamed(__name__, name)
