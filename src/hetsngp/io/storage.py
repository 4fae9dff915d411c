"""The two files of a saved model: written atomically by one writer, and validated when they are read.

``config.json`` names the weights file and its SHA-256, and has a checksum of its own content. Replacing it
(one atomic rename, after the weights are on disk) completes a save: interrupted at any moment, the folder
holds the old model or the new one. Readers take no lock: where the weights that a config names are gone, a
newer save has removed them, and the config is read again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hetsngp.files import (
    CHECKSUM,
    has_checksum,
    remove_leftovers,
    rename,
    replace_file,
    sha256_of,
    sync_file,
    temporary_file,
    with_checksum,
    write_tensors,
)
from hetsngp.locking import FolderInUse, one_writer

FORMAT, VERSION = "hetsngp", 2
UNCHECKED = 1
"""Version of 0.1, whose files have no checksum."""
CONFIG = "config.json"
WAIT_SECONDS = 30.0
"""How long a save waits for another writer to the folder."""
_WEIGHTS = re.compile(r"model-[0-9a-f]{16}\.safetensors")
_MAX_CONFIG_BYTES = 2**22
# Tries to read while other processes save: each one fails only if a whole save happens within it.
_READ_ATTEMPTS = 100
_OS_ERROR = re.compile(r"\(os error ([0-9]+)\)")


class ArtifactError(ValueError):
    """A saved model cannot be read: it is damaged, of another format, or needs an argument or a package."""


class _WeightsMissing(ArtifactError):
    """The weights that a config names are not there."""


def write(folder: Path, description: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write both files into ``folder``, which is made if necessary; those of an older model are deleted.

    Waits for another writer; after 30 s :class:`hetsngp.locking.FolderInUse` names it. Where the system
    fails, for example because the disk is full, an OSError says so and the folder holds a complete model.
    """
    if folder.exists() and not folder.is_dir():
        raise ArtifactError(f"{folder} is a file: give a folder to save into")
    _config_text(description, "", "")  # an invalid description is refused before anything is written
    try:
        with one_writer(folder, wait=WAIT_SECONDS) as locked:
            if locked:
                remove_leftovers(folder)
            before = set(folder.glob("model-*.safetensors"))
            weights = _write_weights(folder, tensors)
            try:
                text = _config_text(description, weights.name, sha256_of(weights))
                replace_file(folder / CONFIG, lambda tmp: tmp.write_text(text, encoding="utf-8"))
            except BaseException:
                if weights not in before and not _is_named(folder, weights):
                    weights.unlink(missing_ok=True)
                raise
            for old in before - {weights}:
                if _WEIGHTS.fullmatch(old.name):
                    old.unlink(missing_ok=True)
    except FolderInUse:
        raise
    except (OSError, SafetensorError) as error:
        raise _write_error(folder, error) from error


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the description and the tensors that :func:`write` was given."""
    config, mapped = read_mapped(folder)
    # Copied: memory of the file is not aligned as torch's is, on which the order of sums may depend.
    return config, {name: tensor.clone() for name, tensor in mapped.items()}


def read_mapped(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the description, and map the tensors from the file: nothing of their size is allocated."""
    config = _read_config(folder)
    for _ in range(_READ_ATTEMPTS):
        try:
            return config, _map_weights(folder, config)
        except _WeightsMissing:
            before, config = config, _read_config(folder)
            if config == before and not (folder / config["weights"]).is_file():
                raise
    raise ArtifactError(f"{folder} is saved again and again while it is read: wait until that ends")


# --- config.json ------------------------------------------------------------------------------------------


def _config_text(description: dict[str, Any], weights: str, sha256: str) -> str:
    head = {"format": FORMAT, "version": VERSION, "weights": weights, "sha256": sha256}
    # As it will be read: keys of dicts become strings, of which the checksum is made.
    content = json.loads(json.dumps({**head, **description}))
    text = json.dumps(with_checksum(content), indent=2, allow_nan=True)
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
    try:
        with open(file, "rb") as handle:
            text = handle.read(_MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise _read_error(file, error) from error
    if len(text) > _MAX_CONFIG_BYTES:
        raise ArtifactError(f"{file} is larger than any hetsngp config: not read")
    try:
        config = json.loads(text.decode("utf-8"))
        is_whole = has_checksum(config) if isinstance(config, dict) else None
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, a number of 5000 digits
        raise ArtifactError(f"{file} is not a JSON file: {error}") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ArtifactError(f"{file} was not written by hetsngp.save")
    version = config.get("version")
    if type(version) is not int or version not in (UNCHECKED, VERSION):
        raise ArtifactError(
            f"{file} has version {version!r:.50}; this hetsngp reads version {UNCHECKED} and {VERSION}"
        )
    if is_whole is False or (is_whole is None and version != UNCHECKED):
        problem = "its content is not that of" if is_whole is False else "it has lost"
        raise ArtifactError(f"{file} is damaged or was edited: {problem} its checksum; copy it again")
    if is_whole is None:
        # Python shows a warning with the same text only once.
        warnings.warn(
            f"{file} was written by hetsngp 0.1 and has no checksum, so that damage to it is not noticed: "
            "save it again, hetsngp.save(hetsngp.load(path), path); a resumed training does so itself",
            stacklevel=2,
        )
    return {name: value for name, value in config.items() if name != CHECKSUM}


# --- weights ----------------------------------------------------------------------------------------------


def _map_weights(folder: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    name = config.get("weights")
    # Only a file name as this module writes it: a config must not point anywhere else.
    if not isinstance(name, str) or not _WEIGHTS.fullmatch(name):
        raise ArtifactError(
            f"{folder / CONFIG} names weights {name!r:.100}, which hetsngp.save would not write"
        )
    file = folder / name
    if not file.is_file():
        raise _missing(file)
    try:
        with open(file, "rb") as handle:
            tensors = _map_tensors(file)  # before it is read through: a newer save may remove it meanwhile
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise _missing(file) from error
    except OSError as error:
        raise _read_error(file, error) from error
    if digest != config.get("sha256"):
        raise ArtifactError(
            f"{file} is damaged or was replaced: its checksum is not the one in {CONFIG}; copy it again"
        )
    if isinstance(tensors, Exception):
        raise ArtifactError(f"{file} is not a safetensors file: {tensors}") from tensors
    return tensors


def _map_tensors(file: Path) -> dict[str, Tensor] | Exception:
    """Map the tensors of a safetensors file; returns the error where it is none."""
    try:
        with safe_open(file, framework="pt") as handle:
            return {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
    except OSError:
        raise
    except Exception as error:  # SafetensorError, or one of torch, which opens the file once more
        if os.strerror(errno.ENOENT) in str(error):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file) from error
        return error


def _missing(file: Path) -> _WeightsMissing:
    return _WeightsMissing(f"{file} is missing: the folder was copied or unpacked only in part")


def _write_weights(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """Write a temporary file, then rename it by the checksum of its content."""
    temporary = temporary_file(folder)
    try:
        write_tensors(tensors, temporary)
        sync_file(temporary)
        final = folder / f"model-{sha256_of(temporary)[:16]}.safetensors"
        rename(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)
    return final


def _is_named(folder: Path, weights: Path) -> bool:
    """Whether the config names ``weights``; True where it cannot be read."""
    try:
        return weights.name in (folder / CONFIG).read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True


# --- errors of the system -----------------------------------------------------------------------------------


def _write_error(folder: Path, error: Exception) -> OSError:
    number = _error_number(error)
    reason = os.strerror(number) if number is not None else " ".join(str(error).split())
    hint = ": free some space and save again" if number in (errno.ENOSPC, errno.EDQUOT) else ""
    message = f"cannot save into {folder}: {reason}{hint}"
    return OSError(message) if number is None else OSError(number, message)


def _read_error(file: Path, error: OSError) -> OSError:
    return OSError(error.errno or errno.EIO, f"cannot read {file}: {error.strerror or error}")


def _error_number(error: Exception) -> int | None:
    """Number of the system's error; safetensors gives it in the text."""
    if isinstance(error, OSError):
        return error.errno
    found = _OS_ERROR.search(str(error))
    return None if found is None else int(found[1])
