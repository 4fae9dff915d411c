"""Several inputs for one network (MIMO): its first layer is widened and takes them concatenated."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from hetsngp.nn.precision import is_recomputing
from hetsngp.nn.spectral import OPAQUE, BoundedConv1d, BoundedConv2d, BoundedLinear

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Shapes of inputs whose mode is remembered.
_RECENT_SHAPES = 8
# Exact types only: a subclass may use its weight in another way (a standardised one undoes the division).
_LAYERS = {*LAYERS, BoundedLinear, BoundedConv1d, BoundedConv2d}


class NoInputLayerError(ValueError):
    """A network has no layer at all that could be widened."""


class _ThisThread(threading.local):
    """Modes other than "tiled", by the id of the stack."""

    def __init__(self) -> None:
        self.modes: dict[int, str] = {}


_this_thread = _ThisThread()


class InputStack:
    """Pre-forward hook of a widened layer that concatenates M inputs along the features or channels.

    Inside :meth:`distinct` a batch holds the first inputs of all B rows, then the second ones and so on, M·B
    in all, and becomes B rows; with ``stacked`` they are concatenated already. Otherwise every input is
    tiled: all M are the same. The mode ends with the block, and other threads are in the default mode. Where
    activation checkpointing repeats a call of the layer, the mode is that of the last call with an input of
    this shape.
    """

    def __init__(self, num_inputs: int, dim: int) -> None:
        self.num_inputs, self.dim = num_inputs, dim
        self._mode = "tiled"
        self._mode_by_shape: dict[torch.Size, str] = {}

    @contextmanager
    def distinct(self, *, stacked: bool = False) -> Iterator[None]:
        """Context in which the M inputs of a row are different examples."""
        self._mode = _this_thread.modes[id(self)] = "stacked" if stacked else "rows"
        try:
            yield
        finally:
            self._mode = "tiled"
            del _this_thread.modes[id(self)]

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self._enter(args[0], module.training), *args[1:]), kwargs
        name, x = next(iter(kwargs.items()))
        return args, {**kwargs, name: self._enter(x, module.training)}

    def _enter(self, x: Tensor, training: bool) -> Tensor:
        # A graph has no threads: it is compiled for the attribute.
        compiling = torch.compiler.is_compiling()
        mode = self._mode if compiling else self._mode_in_thread(x.shape, training)
        if self.num_inputs == 1 or mode == "stacked":
            return x
        parts = x.chunk(self.num_inputs) if mode == "rows" else [x] * self.num_inputs
        return torch.cat(parts, self.dim)

    def _mode_in_thread(self, shape: torch.Size, training: bool) -> str:
        mode = _this_thread.modes.get(id(self))
        if mode is None and is_recomputing():
            return self._mode_by_shape.get(shape, "tiled")
        mode = mode or "tiled"
        if training and self._mode_by_shape.get(shape) != mode:
            while len(self._mode_by_shape) >= _RECENT_SHAPES:
                self._mode_by_shape.pop(next(iter(self._mode_by_shape)), None)
            self._mode_by_shape[shape] = mode
        return mode

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({"_mode_by_shape": {}, **state})  # pickles of 0.1 have no such attribute


@runtime_checkable
class Widens(Protocol):
    """Network with its own method to take several inputs."""

    def widen_inputs(self, num_inputs: int, generator: torch.Generator | None) -> Any:
        """Widen the network for ``num_inputs`` inputs and return the dimension of x along which they are
        concatenated (None: the last), or NotImplemented, to have the first layer widened.
        """


def widened_module(backbone: nn.Module) -> tuple[nn.Module, InputStack] | None:
    """Module that takes several inputs (a layer, or the backbone itself) and its hook, or None."""
    for module in backbone.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, InputStack):
                return module, hook
    return None


def input_stack(backbone: nn.Module) -> InputStack | None:
    """Hook of a widened network, or None."""
    found = widened_module(backbone)
    return None if found is None else found[1]


def widen_inputs(
    backbone: nn.Module, num_inputs: int, *, generator: torch.Generator | None = None
) -> InputStack:
    """Let ``backbone`` take ``num_inputs`` inputs at once, in place; a second call changes nothing.

    Its first layer must be linear or convolutional; its weight is tiled and divided by M, so that M equal
    inputs give the same features as before, as a pretrained network needs. Modules before that layer see the
    inputs as separate rows.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    >>> x = torch.randn(5, 2, 2)
    >>> before = net(x)
    >>> stack = widen_inputs(net, 3)
    >>> torch.allclose(net(x), before, atol=1e-6), net[1].in_features
    (True, 12)
    """
    stack = input_stack(backbone)
    if stack is not None:
        if stack.num_inputs != num_inputs:
            raise ValueError(
                f"this backbone already takes {stack.num_inputs} inputs at once: make a fresh one for "
                f"num_members={num_inputs}"
            )
        return stack
    dim = backbone.widen_inputs(num_inputs, generator) if isinstance(backbone, Widens) else NotImplemented
    if dim is not NotImplemented:
        stack = InputStack(num_inputs, -1 if dim is None else dim)
        backbone.register_forward_pre_hook(stack, with_kwargs=True)
        return stack
    layer = first_layer(backbone)
    widen_layer(layer, num_inputs)
    stack = InputStack(num_inputs, -1 if isinstance(layer, nn.Linear) else 1)
    layer.register_forward_pre_hook(stack, with_kwargs=True)
    return stack


def first_layer(backbone: nn.Module) -> nn.Module:
    """First layer with parameters, in the order of registration; raises where it cannot be widened."""
    for name, module in backbone.named_modules():
        # Parameters of a module with children (a class token, a position embedding) are no layer.
        inner = any(True for _ in module.children()) and not isinstance(module, OPAQUE)
        if (inner and not isinstance(module, LAYERS)) or not any(True for _ in module.parameters()):
            continue
        if isinstance(module, LazyModuleMixin):
            raise ValueError(f"lazy layer {name!r} has no weight yet: run a batch through the network first")
        if isinstance(module, LAYERS) and "weight" not in module._parameters:
            raise ValueError(
                f"the weight of the first layer {name!r} is computed from others (weight_norm or another "
                "parametrisation): remove that first, e.g. with torch.nn.utils.parametrize"
            )
        if type(module) not in _LAYERS:
            raise ValueError(
                f"the first layer of the backbone is {name or 'the backbone itself'!r} "
                f"({type(module).__name__}): several inputs at once need a plain Linear or Conv layer there, "
                "or a method widen_inputs(num_inputs, generator) of the backbone that makes room for them "
                "and returns the dimension of x they stand along"
            )
        if isinstance(module, nn.Linear) or module.groups == 1:
            return module
        raise ValueError(
            f"the first layer {name!r} has groups={module.groups}: several inputs at once need a convolution "
            "with groups=1 there"
        )
    raise NoInputLayerError("the backbone has no layer with parameters that several inputs could enter by")


def widen_layer(layer: nn.Module, num_inputs: int) -> None:
    """Make a Linear or Conv layer take ``num_inputs`` times its features or channels, in place."""
    weight = layer._parameters["weight"]
    assert weight is not None
    wide = widened_weight(weight.detach(), num_inputs)
    layer.weight = nn.Parameter(wide, requires_grad=weight.requires_grad)
    name = "in_features" if isinstance(layer, nn.Linear) else "in_channels"
    setattr(layer, name, getattr(layer, name) * num_inputs)
    if isinstance(layer, BoundedLinear | BoundedConv1d | BoundedConv2d):
        layer.spectral_v = layer.spectral_v.new_empty(0)
        layer.spectral_sigma = layer.spectral_sigma / math.sqrt(num_inputs)  # of the tiled weight
        tighten_for_tiles(layer, num_inputs)
    if num_inputs > 1 and not weight.requires_grad:
        warnings.warn(
            "the first layer is frozen, so that the backbone only ever sees the mean of its inputs: "
            "layer.requires_grad_(True) lets it learn to tell them apart",
            stacklevel=4,
        )


def tighten_for_tiles(layer: nn.Module, num_inputs: int) -> None:
    """Bound a widened layer by c/√M, so that for M equal inputs, as in prediction, the bound is c."""
    if isinstance(layer, BoundedLinear | BoundedConv1d | BoundedConv2d):
        layer.spectral_bound = layer.spectral_bound / math.sqrt(num_inputs)
        if layer.spectral_keep is not None:
            layer.spectral_keep /= math.sqrt(num_inputs)


def widened_weight(weight: Tensor, num_inputs: int) -> Tensor:
    """W (out, in, ...) → M copies of W/M, (out, M·in, ...): M equal inputs give Wx.

    >>> widened_weight(torch.tensor([[2.0, 4.0]]), 2)
    tensor([[1., 2., 1., 2.]])
    """
    return torch.cat([weight / num_inputs] * num_inputs, 1)


def widened_isometry(isometry: Tensor, num_inputs: int, generator: torch.Generator | None) -> Tensor:
    """Q (out, in) → (out, M·in) that is Q for equal inputs; √M times it is an isometry of all M together.

    It is not trained, so tiled copies would only ever see the sum of the inputs. The part of input m is
    Σ_j R_jm Q_j/√M, where R is orthogonal with a constant first row, Q_1 = Q and the other Q_j are orthogonal
    to it. Where M·in > out that is impossible: the Q_j are random then, and only equal inputs keep distances.
    """
    if num_inputs == 1:
        return isometry.clone()
    out, columns = isometry.shape
    kind: dict[str, Any] = {"device": "cpu", "dtype": torch.float64}
    others = torch.randn(out, (num_inputs - 1) * columns, generator=generator, **kind) / math.sqrt(out)
    square = torch.randn(num_inputs, num_inputs, generator=generator, **kind)
    square[:, 0] = 1
    rotation = torch.linalg.qr(square).Q.mT
    rotation = rotation * rotation[0, 0].sign()
    if isometry.device.type == "meta":
        return isometry.new_empty(out, num_inputs * columns)
    parts = torch.cat([isometry.to(**kind), others], 1)
    if num_inputs * columns <= out:
        basis, triangle = torch.linalg.qr(parts)
        parts = basis * triangle.diagonal().sign()
    wide = torch.einsum("jm,ojc->omc", rotation, parts.unflatten(1, (num_inputs, columns)))
    return (wide.flatten(1) / math.sqrt(num_inputs)).to(isometry)
