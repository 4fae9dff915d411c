"""save() and load(): a folder with ``config.json`` and one safetensors file. Nothing is ever unpickled.

``config.json`` names the weights file and its SHA-256, and replacing it (one atomic rename, after the weights
are safely on disk) is what makes a save happen: interrupted at any moment, the folder holds the old model or
the new one, whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hetsngp.model import Classifier
from hetsngp.nn.backbones import BACKBONES
from hetsngp.recipes import build

FORMAT, VERSION = "hetsngp", 1
CONFIG = "config.json"
_WEIGHTS = re.compile(r"model-[0-9a-f]{16}\.safetensors")
_MAX_CONFIG_BYTES = 2**20
# Sizes a method may have in its options without using them, whatever the weights are.
_ALWAYS_FINE = 2**14


class ArtifactError(ValueError):
    """A saved model cannot be read: damaged, foreign, or in need of something."""


def save(model: Classifier, path: str | os.PathLike[str]) -> None:
    """Write ``model`` into the folder ``path``, atomically; an older model there is replaced.

    >>> import hetsngp
    >>> from hetsngp.nn.backbones import ResidualMLP
    >>> model = hetsngp.build("deterministic", ResidualMLP(2, width=8, depth=1), num_classes=2)
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> hetsngp.save(model, folder)
    >>> hetsngp.load(folder).num_classes
    2
    """
    if not isinstance(model, Classifier) or not model.config:
        raise TypeError(
            f"save takes a model made by hetsngp.build, got {type(model).__name__}; "
            "save the members of an Ensemble one by one"
        )
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ArtifactError(f"{folder} is a file: give a folder to save into")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in model.state_dict().items()}
    weights = _write_weights(folder, tensors)
    config = {
        "format": FORMAT,
        "version": VERSION,
        "weights": weights.name,
        "sha256": _sha256(weights),
        "model": {**model.config, "dataset_size": model.dataset_size},
        "calibration": model.calibration,
        "trained_since_fit": model._trained_since_fit,
    }
    text = json.dumps(config, indent=2, allow_nan=True)
    _replace(folder / CONFIG, lambda tmp: tmp.write_text(text, encoding="utf-8"))
    for old in folder.glob("model-*.safetensors"):
        if old.name != weights.name and _WEIGHTS.fullmatch(old.name):
            old.unlink(missing_ok=True)


def load(
    path: str | os.PathLike[str], backbone: nn.Module | None = None, *, device: str | torch.device = "cpu"
) -> Classifier:
    """The model saved in ``path``, in eval mode. A backbone that is not ours is given as ``backbone``.

    ``backbone`` is a freshly constructed network of the same architecture; its weights are overwritten.
    """
    if backbone is not None and not isinstance(backbone, nn.Module):
        raise TypeError(f"backbone must be a network, e.g. backbone=MyNetwork(), got {backbone!r}")
    folder = Path(path)
    config = _read_config(folder)
    tensors = _read_weights(folder, config)
    try:
        _check_sizes(config, tensors)
        # On the meta device first, which holds no data: a damaged config must not ask for a terabyte.
        with torch.device("meta"):
            outline = _rebuild(config, backbone)
        _check_shapes(outline, tensors, folder)
        model = _rebuild(config, backbone)
    except ArtifactError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ArtifactError(f"{folder / CONFIG} does not describe a model: {error}") from error
    _fill(model, tensors, folder)
    return model.to(device).eval()


def _check_sizes(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Refuse sizes and depths that no network with these weights has, before anything loops over them."""
    largest = max([_ALWAYS_FINE, len(tensors), *(size for t in tensors.values() for size in t.shape)])
    saved = config["model"]
    options, described = saved["options"], saved["backbone"]
    if not isinstance(options, dict):
        raise TypeError(f"options is {options!r}")
    sizes = {"num_classes": saved["num_classes"]}
    sizes |= {name: options[name] for name in ("rank", "random_features") if name in options}
    sizes |= described["config"] if described["name"] in BACKBONES else {}
    for name, value in sizes.items():
        if isinstance(value, int) and value > largest:
            raise ValueError(f"{name} is {value}, far more than the saved weights have")


def _check_shapes(outline: Classifier, tensors: dict[str, Tensor], folder: Path) -> None:
    """The file holds what the described network needs. Buffers that start empty take any shape."""
    expected = {name: tuple(t.shape) for name, t in outline.state_dict().items()}
    missing = [name for name in expected if name not in tensors]
    unexpected = [name for name in tensors if name not in expected]
    other = [
        f"{name} {tuple(tensors[name].shape)} for {shape}"
        for name, shape in expected.items()
        if name in tensors and 0 not in shape and tuple(tensors[name].shape) != shape
    ]
    if missing or unexpected or other:
        raise ArtifactError(
            f"the weights in {folder} do not fit the network they are loaded into: missing {missing[:3]}, "
            f"unexpected {unexpected[:3]}, wrong shape {other[:3]}; is backbone= the same architecture?"
        )


def _rebuild(config: dict[str, Any], backbone: nn.Module | None) -> Classifier:
    saved = config["model"]
    described = saved["backbone"]
    if backbone is None:
        name = described["name"]
        if name not in BACKBONES:
            kind = described.get("class", "a network of your own")
            raise ArtifactError(
                f"this model's backbone is {kind!r}, which hetsngp cannot rebuild: "
                "pass a freshly constructed one, hetsngp.load(path, backbone=MyNetwork())"
            )
        backbone = BACKBONES[name](**described["config"])
    model = build(saved["method"], backbone, saved["num_classes"], **saved["options"])
    model.dataset_size = saved["dataset_size"]
    model.config["backbone"] = described
    model.calibration = config["calibration"]
    model._trained_since_fit = bool(config["trained_since_fit"])
    return model


def _fill(model: Classifier, tensors: dict[str, Tensor], folder: Path) -> None:
    """Copy the saved tensors in; the model takes their precision."""
    floating = [t.dtype for name, t in tensors.items() if t.is_floating_point() and name.startswith("head.")]
    if floating and all(dtype == torch.float64 for dtype in floating):
        model.double()
    for name, own in (*model.named_parameters(), *model.named_buffers()):
        saved = tensors.get(name, own)
        if saved.dtype != own.dtype and saved.is_floating_point() and own.is_floating_point():
            own.data = own.data.to(saved.dtype)
    try:
        missing, unexpected = model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise ArtifactError(
            f"the weights in {folder} do not fit the network they are loaded into: {error}"
        ) from error
    if missing or unexpected:
        raise ArtifactError(
            f"the weights in {folder} do not fit the network they are loaded into: "
            f"missing {missing[:3]}, unexpected {unexpected[:3]}; is backbone= the same architecture?"
        )


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    if not file.is_file():
        raise FileNotFoundError(
            f"no model in {folder}: {CONFIG} is missing; hetsngp.save(model, path) writes one"
        )
    if file.stat().st_size > _MAX_CONFIG_BYTES:
        raise ArtifactError(f"{file} is larger than any hetsngp config: not read")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ArtifactError(f"{file} is not a JSON file: {error}") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ArtifactError(f"{file} was not written by hetsngp.save")
    if config.get("version") != VERSION:
        raise ArtifactError(
            f"{file} has version {config.get('version')!r}; this hetsngp reads version {VERSION}"
        )
    return config


def _read_weights(folder: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    name = config.get("weights")
    # Only a plain file name of our own making: a config must not point anywhere else.
    if not isinstance(name, str) or not _WEIGHTS.fullmatch(name):
        raise ArtifactError(f"{folder / CONFIG} names weights {name!r}, which hetsngp.save would not write")
    file = folder / name
    if not file.is_file():
        raise ArtifactError(f"{file} is missing: the folder was copied or unpacked only in part")
    if _sha256(file) != config.get("sha256"):
        raise ArtifactError(
            f"{file} is damaged or was replaced: its checksum is not the one in {CONFIG}; copy it again"
        )
    try:
        with safe_open(file, framework="pt") as handle:
            return {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ArtifactError(f"{file} is not a safetensors file: {error}") from error


def _write_weights(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """Write under a temporary name, then under one that its content decides."""
    temporary = _temporary(folder)
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)  # safetensors writes files that only their owner may read
        _sync(temporary)
        final = folder / f"model-{_sha256(temporary)[:16]}.safetensors"
        os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)
    return final


def _replace(file: Path, write: Callable[[Path], Any]) -> None:
    temporary = _temporary(file.parent)
    try:
        write(temporary)
        _sync(temporary)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(folder: Path) -> Path:
    """A name nobody else has."""
    return folder / f".saving-{secrets.token_hex(8)}"


def _sync(file: Path) -> None:
    with open(file, "rb") as handle:
        os.fsync(handle.fileno())


def _sha256(file: Path) -> str:
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
