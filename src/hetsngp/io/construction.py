"""Construction of a saved network within the memory of its weights file.

A config is built twice: on the meta device, where nothing is allocated, to compare it with the file; then
with parameters on the meta device and everything else in memory, since tensors that are not saved (masks,
frequencies, tables of indices) are computed by the constructors. The file's tensors then take the place of
the parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from hetsngp.limits import UNSAVED_BYTES, LimitExceeded

# A constructor may replace layers that it has made, and registers tensors that are not saved: clearly more
# than the file has is more than these multiples. The classifier that a head replaced is not saved, and of a
# small network it is the larger part: 21,843 classes on 1,024 features are 22 million weights.
_TENSORS_FACTOR, _TENSORS_MORE = 4, 256
_ELEMENTS_FACTOR, _ELEMENTS_MORE = 8, 2**24

_Hook = Callable[[Tensor], Tensor | None]


class _Hooks(threading.local):
    """Functions that are called with parameters and buffers that modules register in this thread."""

    parameter: _Hook | None = None
    buffer: _Hook | None = None


_hooks = _Hooks()


def _parameter_registered(module: nn.Module, name: str, tensor: Tensor) -> Any:
    return None if _hooks.parameter is None else _hooks.parameter(tensor)


def _buffer_registered(module: nn.Module, name: str, tensor: Tensor | None) -> Any:
    return None if _hooks.buffer is None or tensor is None else _hooks.buffer(tensor)


# Once and for all, when a model is first saved or loaded: torch goes through its table of hooks while other
# threads construct modules, so that nothing can be removed safely. A registered tensor costs 0.1 µs more.
register_module_parameter_registration_hook(_parameter_registered)
register_module_buffer_registration_hook(_buffer_registered)


@contextmanager
def _hooked(parameter: _Hook, buffer: _Hook | None) -> Iterator[None]:
    before = _hooks.parameter, _hooks.buffer
    _hooks.parameter, _hooks.buffer = parameter, buffer
    try:
        yield
    finally:
        _hooks.parameter, _hooks.buffer = before


@contextmanager
def bounded_outline(saved: Mapping[str, Tensor]) -> Iterator[None]:
    """Context on the meta device, in which modules cannot register clearly more tensors than ``saved`` has,
    nor clearly more elements.
    """
    tensors = _TENSORS_FACTOR * len(saved) + _TENSORS_MORE
    elements = _ELEMENTS_FACTOR * sum(t.numel() for t in saved.values()) + _ELEMENTS_MORE

    def count(tensor: Tensor) -> None:
        nonlocal tensors, elements
        tensors, elements = tensors - 1, elements - tensor.numel()
        if tensors < 0 or elements < 0:
            what = "tensors" if tensors < 0 else "elements"
            raise LimitExceeded(
                f"it describes a network of clearly more {what} than the weights file has: if that is right, "
                "construct it yourself, hetsngp.load(path, backbone=MyNetwork())"
            )

    with torch.device("meta"), _hooked(count, count):
        yield


def check_unsaved(outline: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Check the size of tensors that are not in the state dict: they are computed, whatever the file has."""
    known = {id(t) for t in (*outline.parameters(), *outline.state_dict(keep_vars=True).values())}
    every = (
        value
        for module in outline.modules()
        for value in (*module._buffers.values(), *vars(module).values())
        if isinstance(value, Tensor)
    )
    unsaved = {id(t): t.numel() * t.element_size() for t in every if id(t) not in known}
    size = sum(t.numel() * t.element_size() for t in saved.values())
    UNSAVED_BYTES.check(max(0, sum(unsaved.values()) - size), "the network")


@contextmanager
def without_weights() -> Iterator[None]:
    """Context in which parameters that modules register go to the meta device, one by one; layers that share
    a parameter go on sharing it.
    """
    replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def to_meta(tensor: Tensor) -> Tensor | None:
        if tensor.device.type == "meta":
            return None
        if tensor not in replaced:
            replaced[tensor] = nn.Parameter(tensor.detach().to("meta"), requires_grad=tensor.requires_grad)
        return replaced[tensor]

    with _hooked(to_meta, None):
        yield


def allocate(model: nn.Module, saved: Mapping[str, Tensor]) -> bool:
    """Give memory to every tensor on the meta device, in the precision of the ``saved`` one of that name.

    False: there is one with elements that is not saved.
    """
    made: dict[int, Tensor] = {}
    kept = []  # an id is that of a tensor only while it lives
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or tensor.device.type != "meta":
                continue
            full = f"{prefix}.{name}" if prefix else name
            if id(tensor) not in made:
                like = saved.get(full)
                if like is None and tensor.numel():
                    return False
                dtype = tensor.dtype if like is None or not like.is_floating_point() else like.dtype
                new = torch.empty_like(tensor, dtype=dtype, device="cpu")
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
                kept.append(tensor)
            setattr(module, name, made[id(tensor)])
    return True
