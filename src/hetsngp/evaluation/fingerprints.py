"""Fingerprints of models, data and code, by which :func:`hetsngp.evaluate` recognises cached results.

Tensors and arrays count by their bytes, code by what it does (not by what it calls), every other object by
its class and by the state it would be copied with. Nothing is pickled. An object that has no such state (an
open file, a generator) raises :class:`CannotFingerprint`, and a result that depends on it is not cached.

Data count by the first batch, the number of batches, and all that lies in memory or in a list (tensors, file
names, labels, the order of a sampler). A file whose content changed under the same name is noticed if it is
in the first batch. Data of unknown length are not cached: of a generator only the first batch is known.
"""

from __future__ import annotations

import copyreg
import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hetsngp.evaluation.cache import code_fingerprint
from hetsngp.evaluation.set_predictions import EvaluationBatches
from hetsngp.models.loader_counts import num_batches

DECIDES = (
    "hetsngp.evaluation.set_evaluation",
    "hetsngp.evaluation.restriction",
    "hetsngp.models.*",
    "hetsngp.posterior.*",
    "hetsngp.conversion.*",
    "hetsngp.io.*",
    "hetsngp.frozen.*",
    "hetsngp.estimator.*",
    "hetsngp.data.*",
)
"""Modules whose code, with all that they import, decides the predictions of a model and their numbers."""
# By their type alone: where a stream of random numbers has got to does not make other data.
RANDOM = (
    torch.Generator,
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
)
# What PyTorch keeps in every module, whose tensors and children are looked at by themselves; and what our
# models remember of the warnings they gave.
MODULES_OWN = {*vars(nn.Module()), "_warned"}
# Their versions stand for them (see environment_fingerprint), and their classes have much code.
VERSIONED = ("torch", "hetsngp", "builtins")
_PLAIN = str | int | float | complex | np.generic | PurePath
_LONG = 1000


def environment_fingerprint() -> str:
    """Code of this package, torch's version, and the precision that autocast sets."""
    cast = [(d, str(torch.get_autocast_dtype(d))) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    return json.dumps([code_fingerprint(*DECIDES), torch.__version__, cast])


def model_fingerprint(model: Any) -> str | None:
    """Fingerprint of the tensors of a network, the plain attributes of its modules and the code of their
    classes; of our estimator also its settings.

    An object with a method ``fingerprint() -> str | None`` decides itself. None: models cannot be compared.
    """
    if callable(getattr(model, "fingerprint", None)):
        found = model.fingerprint()
        return None if found is None else str(found)
    if not isinstance(model, nn.Module) and not hasattr(model, "predict_uncertainty"):
        return None
    try:
        return Fingerprinter().of(model)
    except CannotFingerprint:
        return None


def data_fingerprint(batches: EvaluationBatches) -> str | None:
    """Fingerprint of the first batch, and of the state of the loader and its data set; None: unknown."""
    count = num_batches(batches.loader)
    if count is None:
        return None
    try:
        return Fingerprinter().of([batches.first, count, batches.loader])
    except CannotFingerprint:
        return None


class CannotFingerprint(Exception):
    """Raised for a value that holds something that cannot be told from another of its kind."""


class Fingerprinter:
    """SHA-256 of nested values; ``of`` is the same for equal values, in any process."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, str]] = {}  # with the object, so that no other gets its id

    def of(self, value: Any) -> str:
        """Fingerprint of one value; raises :class:`CannotFingerprint`."""
        if value is None or isinstance(value, _PLAIN):
            return f"{type(value).__name__}:{value!r}"
        if id(value) not in self._known:
            self._known[id(value)] = (value, "…")  # for what holds itself
            try:
                self._known[id(value)] = (value, self._made(value))
            except RecursionError as error:
                raise CannotFingerprint(f"{type(value).__name__} is nested too deeply") from error
        return self._known[id(value)][1]

    def _made(self, value: Any) -> str:
        if isinstance(value, RANDOM):
            return _hashed("random", type(value).__name__)
        if isinstance(value, Tensor):
            return _tensor(value)
        if type(value) in (np.ndarray, np.memmap):
            return self._array(value)
        if isinstance(value, bytes | bytearray):
            return _hashed("bytes", data=value)
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, DataLoader):
            return self._loader(value)
        if isinstance(value, type | FunctionType | MethodType | BuiltinFunctionType | ModuleType | CodeType):
            return self._code(value)
        if type(value) in (list, tuple):
            return self._sequence(value)
        if type(value) is dict:
            return _hashed("dict", *(self.of(part) for item in value.items() for part in item))
        if isinstance(value, set | frozenset):
            return _hashed("set", *sorted(self.of(part) for part in value))
        return self._object(value)

    def _all(self, kind: str, parts: Iterable[Any]) -> str:
        return _hashed(kind, *(self.of(part) for part in parts))

    def _array(self, value: np.ndarray) -> str:
        if value.dtype.hasobject:
            return self._all("array", [value.shape, value.tolist()])
        data = np.ascontiguousarray(value).reshape(-1)
        return _hashed("array", str(value.dtype), str(value.shape), data=data.view(np.uint8).data)

    def _sequence(self, value: list[Any] | tuple[Any, ...]) -> str:
        if len(value) > _LONG and isinstance(value[0], str | int | tuple):
            try:  # quick for the many labels and file names of a folder of images
                return _hashed("sequence", json.dumps(value))
            except (TypeError, ValueError):
                pass
        return self._all(type(value).__name__, value)

    def _module(self, value: nn.Module) -> str:
        """Parameters, all buffers, and the plain attributes of every module in it."""
        parts: list[Any] = []
        for name, each in value.named_modules(remove_duplicate=False):
            own = {key: part for key, part in vars(each).items() if key not in MODULES_OWN}
            parts += [name, type(each), sorted(own.items()), dict(each.named_parameters(recurse=False))]
            parts.append(dict(each.named_buffers(recurse=False)))
            if type(each).get_extra_state is not nn.Module.get_extra_state:
                parts.append(each.get_extra_state())
        return self._all("module", parts)

    def _loader(self, value: DataLoader[Any]) -> str:
        """What it takes and in which batches; its workers make no other data."""
        try:
            size = len(value.dataset)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            size = None
        how = [value.sampler, value.batch_sampler, value.batch_size, value.drop_last, value.collate_fn]
        return self._all("loader", [value.dataset, size, *how])

    def _code(self, value: Any) -> str:
        if isinstance(value, CodeType):
            return self._all("code", [value.co_code, value.co_names, value.co_consts])
        if isinstance(value, MethodType):
            return self._all("method", [value.__func__, value.__self__])
        if isinstance(value, FunctionType):
            given = [value.__defaults__, value.__kwdefaults__]
            return self._all("function", [value.__code__, *given, *_held(value)])
        name = f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', value.__name__)}"
        if isinstance(value, type):
            return self._all("type", [name, *(part for each in value.__mro__ for part in _written(each))])
        owner = getattr(value, "__self__", None)  # [].append has a list, math.exp its module
        return self._all("builtin", [name, None if isinstance(owner, ModuleType) else owner])

    def _object(self, value: Any) -> str:
        """By the state that ``copy.copy`` would give to another."""
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            made = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except Exception as error:  # whatever its __getstate__ raises
            raise CannotFingerprint(f"{type(value).__name__} has no state that can be read") from error
        if isinstance(made, str):  # the name of the one object of its kind
            return self._all("name", [type(value), made])
        parts = [list(part) if isinstance(part, Iterator) else part for part in made]
        return self._all("object", [type(value), *parts])


def _held(function: FunctionType) -> Iterator[Any]:
    """What it closes over."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that has no value yet
            yield None


def _written(each: type) -> Iterator[Any]:
    """Names, code and plain values in the body of a class."""
    if each.__module__.split(".")[0] in VERSIONED:
        return
    for name, part in vars(each).items():
        code = getattr(part, "__func__", getattr(part, "fget", part))  # of a property, a class method
        if isinstance(code, FunctionType):
            yield from (name, code.__code__)
        elif isinstance(part, _PLAIN) and not name.startswith("__"):
            yield from (name, part)


def _tensor(value: Tensor) -> str:
    try:
        flat = value.detach().cpu().contiguous().flatten()
        # As bytes: NumPy has no bfloat16.
        return _hashed(
            "tensor", str(value.dtype), str(tuple(value.shape)), data=flat.view(torch.uint8).numpy()
        )
    except (RuntimeError, NotImplementedError, TypeError) as error:  # without values, or sparse
        raise CannotFingerprint(f"a tensor of layout {value.layout} on {value.device}") from error


def _hashed(*parts: str, data: Any = b"") -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode(errors="surrogatepass"))
    digest.update(data)
    return digest.hexdigest()
