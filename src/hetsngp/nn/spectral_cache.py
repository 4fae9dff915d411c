"""Held bounds: σ = ⟨W, G⟩ in the forward pass of training, the power iteration outside of it, now and then.

σ is homogeneous of degree one in the weight, σ(W) = ⟨W, G⟩ with G = ∂σ/∂W at fixed u and v. Between two
refreshes ⟨W, G⟩ follows the weight to first order, from below, with the gradient that the power iteration
has; it costs one inner product in place of two convolutions and a backward pass. What grows beside u and v
is seen at a refresh only: the further the weights move until then, the more the norm may exceed c.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from hetsngp.functional.spectral import conv_direction, linear_direction

DIRECTION = "spectral_direction"
_CONV_OPTIONS = ("stride", "padding", "dilation", "groups", "padding_mode")


class Holdable(nn.Module):
    """G of a bounded layer, `spectral_direction`: of the weight's shape, None where the layer is not held.

    float32 or better, whatever the weight's dtype; zero until there is a v, `spectral_v`, to make it from.
    """

    weight: Tensor
    spectral_sigma: Tensor
    spectral_v: Tensor
    spectral_direction: Tensor | None

    @torch.inference_mode(False)
    @torch.no_grad()
    def hold(self) -> None:
        """Make G for the stored v, by an iteration that is not kept: v and σ stay as they are."""
        self.spectral_direction = self._no_direction()
        if self.spectral_v.numel():
            self.spectral_direction.copy_(self._iterate(1)[2])

    def release(self) -> None:
        """Back to a power iteration at each forward pass."""
        self.spectral_direction = None

    @torch.no_grad()
    def refresh(self, iterations: int = 1) -> None:
        """Move v, G and σ on, in place; nothing where the layer is not held, or has no v yet."""
        if self.spectral_direction is not None and self.spectral_v.numel():
            sigma, v, direction = self._iterate(iterations)
            self.spectral_sigma.copy_(sigma)
            self.spectral_v.copy_(v)
            self.spectral_direction.copy_(direction)

    def renew(self) -> None:
        """As `refresh`, where v is a new one: the old G stays for a backward pass that may want it yet."""
        if self.spectral_direction is not None:
            self.spectral_direction = self._no_direction()
            self.refresh()

    def _iterate(self, iterations: int) -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(self, nn.Linear):
            return linear_direction(self.weight, self.spectral_v, iterations)
        return conv_direction(self.weight, self.spectral_v, iterations, **conv_options(self))

    def _no_direction(self) -> Tensor:
        return torch.zeros_like(self.weight, dtype=self.spectral_v.dtype)  # in the weight's memory format

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        missing, errors = args[2], args[4]
        if prefix + DIRECTION in missing:  # a state without G: as if the layer were held after loading it
            missing.remove(prefix + DIRECTION)
            if not errors:
                self.hold()


def conv_options(layer: nn.Module) -> dict[str, Any]:
    """How a convolution applies its weight, as `conv_norm` takes it."""
    return {name: getattr(layer, name) for name in _CONV_OPTIONS}


def holdable_layers(module: nn.Module) -> dict[str, Holdable]:
    """Every layer whose bound can be held, by name."""
    found = {name: layer for name, layer in module.named_modules() if DIRECTION in layer._buffers}
    return cast(dict[str, Holdable], found)


def hold_bounds(module: nn.Module) -> list[str]:
    """Let every bounded layer take σ = ⟨W, G⟩ in training, without a power iteration; returns their names.

    From then on :func:`refresh_bounds` is to be called every few optimiser steps. A layer without v for its
    input size measures itself at its next forward pass, as ever, and makes its G then. Evaluation is the
    same. The buffer ``spectral_direction``, G, is in the state_dict from now on: hold a network before it
    loads such a state. A state without it can be loaded too, and G is made from its v.

    >>> from hetsngp.nn.spectral import BoundedLinear
    >>> network = nn.Sequential(BoundedLinear(8, 8, bound=0.5), nn.ReLU(), BoundedLinear(8, 2, bound=0.5))
    >>> hold_bounds(network)
    ['0', '2']
    >>> for step in range(20):
    ...     if step % 10 == 0:
    ...         refresh_bounds(network)
    ...     y = network(torch.randn(2, 8))                      # then backward and an optimiser's step
    >>> release_bounds(network)
    >>> "0.spectral_direction" in network.state_dict()
    False
    """
    layers = holdable_layers(module)
    for layer in layers.values():
        if layer.spectral_direction is None:
            layer.hold()
    return list(layers)


def refresh_bounds(module: nn.Module, iterations: int = 1) -> None:
    """Power iterations at the present weight, from the stored v, and G anew, in every held layer.

    With as many ``iterations`` as steps were made since the last, v follows as closely as if not held: where
    one singular value overtakes another it is the number of iterations that turns it. Fewer cost less.
    Between an optimiser's step and the next forward pass: a backward pass needs the G of its forward pass.
    All is written in place, so that compiled and CUDA graphs go on with it, and nothing waits for the device.
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    layers = holdable_layers(module).values()
    if layers and all(layer.spectral_direction is None for layer in layers):
        raise ValueError("no bound is held, there is nothing to refresh: call hold_bounds(module) first")
    for layer in layers:
        layer.refresh(iterations)


def release_bounds(module: nn.Module) -> None:
    """Back to a power iteration at each forward pass in training; G is dropped, σ and v stay."""
    for layer in holdable_layers(module).values():
        layer.release()
