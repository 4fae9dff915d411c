"""The state of a run as JSON and safetensors: written atomically, and read without pickle.

:mod:`hetsngp.io.storage` writes the files; here nested dicts, lists and tensors are converted for it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from hetsngp.files import remove_leftovers, replace_file
from hetsngp.io import storage
from hetsngp.io.storage import ArtifactError
from hetsngp.locking import LOCK

KIND = "training state"
_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EACCES)


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write the state atomically, in place of an earlier one in ``folder``."""
    tensors: dict[str, Tensor] = {}
    storage.write(folder, {"kind": KIND, "state": _without_tensors(state, "", tensors)}, tensors)


def read_state(folder: Path) -> dict[str, Any]:
    """Read what :func:`write_state` wrote; tensors are on the CPU."""
    description, tensors = storage.read(folder)
    if description.get("kind") != KIND:
        raise ArtifactError(f"{folder} holds a model and no training state: hetsngp.load reads it")
    try:
        state = _with_tensors(description["state"], tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{folder} is not a training state that can be read: {error!r}") from error
    if not isinstance(state, dict):
        raise ArtifactError(f"{folder} is not a training state: it holds a {type(state).__name__}")
    return state


def has_state(folder: Path) -> bool:
    """Whether the folder holds a state."""
    return (folder / storage.CONFIG).is_file()


def copy_state(folder: Path, copy: Path) -> None:
    """Make ``copy`` the state in ``folder``, in place of an earlier one.

    Interrupted at any moment, ``copy`` has the old state or the new one. The weights are a hard link, which
    takes no space, or a copy where the file system has no links.
    """
    config = (folder / storage.CONFIG).read_bytes()
    weights = str(json.loads(config)["weights"])
    replace_file(copy / weights, lambda file: _link(folder / weights, file))
    replace_file(copy / storage.CONFIG, lambda file: file.write_bytes(config))
    _remove_weights(copy, weights)


def _link(file: Path, link: Path) -> None:
    try:
        os.link(file, link)
    except (OSError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(file, link)


def remove_unused(folder: Path) -> None:
    """Remove temporary files, lock and weights that killed writers left; only the one writer may call it."""
    remove_leftovers(folder)
    (folder / LOCK).unlink(missing_ok=True)
    with suppress(OSError, ValueError, TypeError, KeyError):  # damaged: what belongs to it is not known
        weights = str(json.loads((folder / storage.CONFIG).read_text(encoding="utf-8"))["weights"])
        if (folder / weights).is_file():
            _remove_weights(folder, weights)


def _remove_weights(folder: Path, needed: str) -> None:
    for old in folder.glob("model-*.safetensors"):
        if old.name != needed:
            old.unlink(missing_ok=True)


def remove_states(folders: list[Path]) -> None:
    """Delete the folders of older states."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _without_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Replace each tensor in nested containers by a name. JSON has neither tuples nor keys that are numbers:
    both are written out, so that what is read equals what was written.
    """
    if isinstance(value, Tensor):
        name = f"{len(tensors)}{name}"  # the path alone may not be unique
        tensors[name] = value.detach().cpu().contiguous().clone()  # row-major, as safetensors wants it
        return {"tensor": name}
    if isinstance(value, dict):
        items = [[key, _without_tensors(v, f"{name}/{key}", tensors)] for key, v in value.items()]
        return {"items": items}
    if isinstance(value, list | tuple):
        values = [_without_tensors(v, f"{name}/{i}", tensors) for i, v in enumerate(value)]
        return values if isinstance(value, list) else {"tuple": values}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a training state cannot hold {type(value).__name__} ({name})")


def _with_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_with_tensors(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "tuple" in value:
        return tuple(_with_tensors(v, tensors) for v in value["tuple"])
    return {key: _with_tensors(v, tensors) for key, v in value["items"]}
