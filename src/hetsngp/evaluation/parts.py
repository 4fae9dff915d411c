"""Finished parts of an evaluation on disk, so that an interrupted one goes on where it was.

A part is taken from its file only where model, settings and data are those it was measured with. Of the data
that is: the first batch, the number of batches, and all that lies in memory or in a list (tensors, file
names, labels). A file whose content changed under the same name is seen if it is in the first batch.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path, PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hetsngp.counting import num_batches
from hetsngp.evaluation.rows import Batches
from hetsngp.evaluation.store import write_atomically

# Of what the files hold: raised when the same name comes to mean something else.
FORMAT = 1
_DEEPEST = 8
_PLAIN = str | int | float | complex | bytes | np.generic | PurePath
_CODE = type | FunctionType | BuiltinFunctionType | MethodType | ModuleType


@dataclass(frozen=True)
class Parts:
    """The folder ``parts`` of an evaluation. ``model`` is None where nothing can tell two models apart: then
    everything is measured anew.
    """

    folder: Path | None
    model: str | None
    settings: str

    def fingerprint(self, name: str, data: Batches | str) -> str | None:
        """Of all that decides the numbers of a part; None: it is not kept. A text stands for its data."""
        if self.folder is None or self.model is None:
            return None
        data = data if isinstance(data, str) else data_fingerprint(data)
        decides = [str(FORMAT), self.model, self.settings, name, data]
        return hashlib.sha256("\0".join(decides).encode()).hexdigest()

    def read(self, name: str, fingerprint: str | None) -> dict[str, np.ndarray] | None:
        """What :meth:`write` wrote with this fingerprint, or None; a damaged file counts as none."""
        if fingerprint is None or not self._file(name).is_file():
            return None
        try:
            with np.load(self._file(name), allow_pickle=False) as file:
                arrays = dict(file)
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
            return None
        return arrays if str(arrays.pop("fingerprint", "")) == fingerprint else None

    def write(self, name: str, fingerprint: str | None, arrays: Mapping[str, np.ndarray]) -> None:
        """In place of what was kept under this name."""
        if fingerprint is not None:
            content: dict[str, Any] = {"fingerprint": np.array(fingerprint), **arrays}
            write_atomically(self._file(name), lambda file: np.savez(file, **content))

    def _file(self, name: str) -> Path:
        """Readable, and another for each name."""
        assert self.folder is not None
        plain = re.sub(r"[^A-Za-z0-9.-]+", "_", name).strip("._")[:60]
        return self.folder / f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}.npz"


def model_fingerprint(model: Any) -> str | None:
    """Of weights, posterior and how it was built; None for an object that has neither tensors that we can see
    nor a method ``fingerprint() -> str``.
    """
    if callable(getattr(model, "fingerprint", None)):
        told = model.fingerprint()
        return None if told is None else str(told)
    digest = _Digest()
    if isinstance(model, nn.Module):
        digest.add(model.state_dict())
        digest.add([(type(each).__name__, getattr(each, "config", None)) for each in model.modules()])
        return digest.hex()
    if hasattr(model, "predict_uncertainty"):  # the estimator: None is its model of a single class
        fitted = [getattr(model, name, None) for name in ("classes_", "mean_", "scale_")]
        network = getattr(model, "model_", None)
        digest.add([fitted, network and model_fingerprint(network)])
        return digest.hex()
    return None


def data_fingerprint(batches: Batches) -> str:
    """Of the first batch, and of all that is plain to see in the loader's data set."""
    digest = _Digest()
    digest.add(batches.first)
    digest.add(num_batches(batches.loader))
    digest.add(getattr(batches.loader, "dataset", batches.loader))
    return digest.hex()


class _Digest:
    """SHA-256 of nested values: tensors and arrays by their bytes, objects by their attributes.

    Code counts by its name, and what is none of these (an open file) by its type alone.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._met: dict[int, tuple[int, Any]] = {}  # with the object, so that no other gets its id

    def hex(self) -> str:
        return self._hash.hexdigest()

    def add(self, value: Any, depth: int = 0) -> None:
        if isinstance(value, Tensor):
            value = value.detach().cpu().contiguous()
            # As bytes: NumPy has no bfloat16.
            self._add_array(str(value.dtype), value.shape, value.flatten().view(torch.uint8).numpy())
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self._add_array(str(value.dtype), value.shape, np.ascontiguousarray(value))
        elif value is None or isinstance(value, _PLAIN):
            self._tag(f"{type(value).__name__}:{value!r}")
        elif isinstance(value, _CODE):
            self._tag(f"{type(value).__name__}:{getattr(value, '__qualname__', value.__name__)}")
        elif depth > _DEEPEST:
            self._tag("…")
        elif id(value) in self._met:
            self._tag(f"…{self._met[id(value)][0]}")
        else:
            self._met[id(value)] = (len(self._met), value)
            self._add_parts(value, depth + 1)

    def _add_parts(self, value: Any, depth: int) -> None:
        self._tag(type(value).__name__)
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if isinstance(value, list) and len(value) > 1000 and isinstance(value[0], str | int | tuple):
            try:  # quick for the many labels and file names of a folder of images
                self._tag(json.dumps(value))
                return
            except (TypeError, ValueError):
                pass
        if isinstance(value, Mapping):
            named = [(str(key), part) for key, part in value.items()]
        elif isinstance(value, list | tuple):
            named = [("", part) for part in value]
        elif is_dataclass(value):
            named = [(field.name, getattr(value, field.name)) for field in fields(value)]
        else:
            named = sorted(getattr(value, "__dict__", {}).items())
        self._tag(str(len(named)))
        for name, part in named:
            self._tag(name)
            self.add(part, depth)

    def _add_array(self, dtype: str, shape: Any, data: np.ndarray) -> None:
        self._tag(f"{dtype}{tuple(shape)}")
        self._hash.update(data.data if data.size else b"")

    def _tag(self, text: str) -> None:
        self._hash.update(f"{len(text)}:{text}".encode())
