"""The two files of a saved model: written atomically, and validated when they are read.

``config.json`` names the weights file and its SHA-256. Replacing it (one atomic rename, after the weights are
on disk) completes a save: interrupted at any moment, the folder holds the old model or the new one.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hetsngp.files import replace_file, sha256_of, sync_file, temporary_file, write_tensors

FORMAT, VERSION = "hetsngp", 1
CONFIG = "config.json"
_WEIGHTS = re.compile(r"model-[0-9a-f]{16}\.safetensors")
_MAX_CONFIG_BYTES = 2**22


class ArtifactError(ValueError):
    """A saved model cannot be read: it is damaged, of another format, or needs an argument or a package."""


def write(folder: Path, description: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write both files into ``folder``, which is made if necessary; those of an older model are deleted."""
    if folder.exists() and not folder.is_dir():
        raise ArtifactError(f"{folder} is a file: give a folder to save into")
    _config_text(description, "", "")  # an invalid description is refused before anything is written
    folder.mkdir(parents=True, exist_ok=True)
    weights = _write_weights(folder, tensors)
    text = _config_text(description, weights.name, sha256_of(weights))
    replace_file(folder / CONFIG, lambda tmp: tmp.write_text(text, encoding="utf-8"))
    for old in folder.glob("model-*.safetensors"):
        if old.name != weights.name and _WEIGHTS.fullmatch(old.name):
            old.unlink(missing_ok=True)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the description and the tensors that :func:`write` was given."""
    config = _read_config(folder)
    return config, _read_weights(folder, config)


def _config_text(description: dict[str, Any], weights: str, sha256: str) -> str:
    head = {"format": FORMAT, "version": VERSION, "weights": weights, "sha256": sha256}
    text = json.dumps({**head, **description}, indent=2, allow_nan=True)
    if len(text) > _MAX_CONFIG_BYTES - 256:  # space for the name and the checksum; json writes ASCII only
        raise ArtifactError(
            f"{CONFIG} would have {len(text)} bytes and could not be read again: save fewer members together"
        )
    return text


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
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, a number of 5000 digits
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
    # Only a file name as this module writes it: a config must not point anywhere else.
    if not isinstance(name, str) or not _WEIGHTS.fullmatch(name):
        raise ArtifactError(f"{folder / CONFIG} names weights {name!r}, which hetsngp.save would not write")
    file = folder / name
    if not file.is_file():
        raise ArtifactError(f"{file} is missing: the folder was copied or unpacked only in part")
    if sha256_of(file) != config.get("sha256"):
        raise ArtifactError(
            f"{file} is damaged or was replaced: its checksum is not the one in {CONFIG}; copy it again"
        )
    try:
        with safe_open(file, framework="pt") as handle:
            return {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ArtifactError(f"{file} is not a safetensors file: {error}") from error


def _write_weights(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """Write a temporary file, then rename it by the checksum of its content."""
    temporary = temporary_file(folder)
    try:
        write_tensors(tensors, temporary)
        sync_file(temporary)
        final = folder / f"model-{sha256_of(temporary)[:16]}.safetensors"
        os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)
    return final
