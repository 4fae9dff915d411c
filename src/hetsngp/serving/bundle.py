"""What a model needs to answer for itself, beside its weights: ``serving.json``.

It says how images become inputs, what the classes are called and where the words of a verdict change, and
names the SHA-256 of the weights it was made for. Prediction needs nothing of the training code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hetsngp.data.datasets.registry import DATASETS
from hetsngp.data.preprocessing import Inputs
from hetsngp.files import replace_file
from hetsngp.io.artifact import load
from hetsngp.io.storage import CONFIG, ArtifactError
from hetsngp.models.classifier import Classifier
from hetsngp.models.ensemble import Ensemble
from hetsngp.serving.decisions import Thresholds

SERVING, MODEL = "serving.json", "model"
FORMAT, VERSION = "hetsngp-serving", 1
# The names of 21,843 classes take about 1 MiB.
MOST_BYTES = 2**25
# Of a side, so that a damaged file does not ask for more memory than there is.
MOST_PIXELS = 2**14
# What a run that has not ended leaves in its folder.
UNFINISHED = ("checkpoint", "metrics.csv")


@dataclass(frozen=True, eq=False)
class Served:
    """A finished run, ready to predict; made by :func:`open_run`."""

    model: Classifier | Ensemble
    inputs: Inputs
    thresholds: Thresholds
    folder: Path
    """Of the model."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What was written beside it, such as the recipe."""

    @property
    def device(self) -> torch.device:
        """Where its inputs go."""
        return next(self.model.parameters()).device


def write_serving(
    folder: str | Path, inputs: Inputs, thresholds: Thresholds, about: Mapping[str, Any] | None = None
) -> None:
    """Write ``serving.json`` beside the model that :func:`hetsngp.save` put into ``folder``, atomically.

    ``about``: whatever else is worth knowing of the model, as strict JSON. Where its "data" is a folder or a
    file, "data_path" says where that lies, for whoever evaluates the model from another folder.
    """
    content = {
        "format": FORMAT,
        "version": VERSION,
        "sha256": _weights(Path(folder)),
        "inputs": inputs.to_dict(),
        "thresholds": thresholds.to_dict(),
        "about": {**(about or {}), **_place((about or {}).get("data"))},
    }
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    replace_file(Path(folder) / SERVING, lambda file: file.write_text(text, encoding="utf-8"))


def open_run(path: str | Path, device: str | torch.device = "cpu") -> Served:
    """The finished run in ``path``, a folder with ``model/`` in it, or such a model's folder itself."""
    folder = _model_folder(Path(path))
    file, content = folder / SERVING, _read(folder / SERVING)
    model = load(folder, device=device)
    if content.get("sha256") != _weights(folder):
        raise ArtifactError(
            f"{file} belongs to other weights than those beside it: copy the folder of one run whole, or "
            "write it again with hetsngp.serving.write_serving"
        )
    try:
        inputs, thresholds = Inputs.of_dict(content["inputs"]), Thresholds.of_dict(content["thresholds"])
        about = content["about"]
        if not isinstance(about, dict):
            raise ValueError(f"about must be an object, got {about!r:.50}")
        _check_fit(model, inputs)
    except (KeyError, TypeError, ValueError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ArtifactError(f"{file} is damaged: {what}; copy it again") from error
    return Served(model, inputs, thresholds, folder, about)


# --- pieces ---------------------------------------------------------------------------------------------


def _place(data: Any) -> dict[str, str]:
    if not isinstance(data, str | Path) or str(data).partition(":")[0] in DATASETS:
        return {}
    path = Path(data).expanduser()
    return {"data_path": str(path.absolute())} if path.exists() else {}


def _model_folder(path: Path) -> Path:
    """Where ``config.json`` is."""
    if not path.exists():
        raise FileNotFoundError(f"there is no run {path}: give the folder that hetsngp train --out wrote")
    if not path.is_dir():
        raise ValueError(f"{path} is a file: give the folder of the run, or its folder {MODEL}/")
    for folder in (path, path / MODEL):
        if (folder / CONFIG).is_file():
            return folder
    if any((path / name).exists() for name in UNFINISHED):
        raise FileNotFoundError(
            f"the run in {path} is not finished, it has no model: train it to the end, "
            f"hetsngp train … --out {path}"
        )
    raise FileNotFoundError(
        f"{path} is no run: {MODEL}/{CONFIG} is not in it; give the folder that hetsngp train --out wrote"
    )


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is missing, which says how images become inputs: train to the end (hetsngp train …), "
            "copy the folder whole, or see hetsngp.serving.write_serving"
        )
    if file.stat().st_size > MOST_BYTES:
        raise ArtifactError(f"{file} is larger than any that hetsngp writes: not read")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON
        raise ArtifactError(f"{file} is not a JSON file: {error}; copy it again") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ArtifactError(f"{file} was not written by hetsngp: copy the folder of the run again")
    if content.get("version") != VERSION:
        raise ArtifactError(
            f"{file} has version {content.get('version')!r:.50}, and this hetsngp reads {VERSION}: use the "
            "version that wrote it"
        )
    return content


def _weights(folder: Path) -> str:
    """The SHA-256 that ``config.json`` names."""
    file = folder / CONFIG
    if not file.is_file():
        raise FileNotFoundError(f"no model in {folder}: write it first, hetsngp.save(model, path)")
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["sha256"])
    except (ValueError, TypeError, KeyError) as error:
        raise ArtifactError(f"{file} was not written by hetsngp.save: {error}") from error


def _check_fit(model: Classifier | Ensemble, inputs: Inputs) -> None:
    """The classes are the model's, and images have a size that fits into memory."""
    if len(inputs.class_names) != model.num_classes:
        raise ValueError(f"{len(inputs.class_names)} class_names for {model.num_classes} classes")
    first = model.members[0] if isinstance(model, Ensemble) else model
    if inputs.several_labels != first.head.sigmoid:
        raise ValueError("several_labels is not what the model says of itself")
    if max(*inputs.size, inputs.resize or 0) > MOST_PIXELS:
        raise ValueError(f"size {inputs.size} and resize {inputs.resize} are more than any image has")
