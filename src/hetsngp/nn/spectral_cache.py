"""Cached spectral norms: σ = ⟨W, G⟩ in the forward pass of training, with a power iteration every few steps.

σ is homogeneous of degree one in the weight, σ(W) = ⟨W, G⟩ with G = ∂σ/∂W at fixed u and v. Between two
measurements ⟨W, G⟩ follows the weight to first order, from below, with the gradient that the power iteration
has; it costs one inner product in place of two convolutions and a backward pass. Growth in directions other
than u and v is seen at a measurement only: the further the weights move until then, the more the norm may
exceed c.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from hetsngp.functional.spectral import conv_direction, linear_direction

DIRECTION = "spectral_direction"
_CONV_OPTIONS = ("stride", "padding", "dilation", "groups", "padding_mode")


class CachesSpectralNorm(nn.Module):
    """G of a bounded layer, `spectral_direction`: of the weight's shape, None where nothing is cached.

    float32 or better, whatever the weight's dtype; zero until there is a v, `spectral_v`, to make it from.
    """

    weight: Tensor
    spectral_sigma: Tensor
    spectral_v: Tensor
    spectral_direction: Tensor | None

    @torch.inference_mode(False)
    @torch.no_grad()
    def cache_norm(self) -> None:
        """Compute G for the stored v by one iteration, whose v and σ are discarded."""
        self.spectral_direction = self._no_direction()
        if self.spectral_v.numel():
            self.spectral_direction.copy_(self._iterate(1)[2])

    def uncache_norm(self) -> None:
        """Return to a power iteration at each forward pass."""
        self.spectral_direction = None

    @torch.no_grad()
    def remeasure(self, iterations: int = 1) -> None:
        """Update v, G and σ in place; does nothing where no G is cached, or there is no v yet."""
        if self.spectral_direction is not None and self.spectral_v.numel():
            sigma, v, direction = self._iterate(iterations)
            self.spectral_sigma.copy_(sigma)
            self.spectral_v.copy_(v)
            self.spectral_direction.copy_(direction)

    def reset_cache(self) -> None:
        """Replace G after v has been replaced; a pending backward pass still has the old tensor."""
        if self.spectral_direction is not None:
            self.spectral_direction = self._no_direction()
            self.remeasure()

    def _iterate(self, iterations: int) -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(self, nn.Linear):
            return linear_direction(self.weight, self.spectral_v, iterations)
        return conv_direction(self.weight, self.spectral_v, iterations, **conv_options(self))

    def _no_direction(self) -> Tensor:
        return torch.zeros_like(self.weight, dtype=self.spectral_v.dtype)  # in the weight's memory format

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        missing, errors = args[2], args[4]
        if prefix + DIRECTION in missing:  # a state without G: cache after loading
            missing.remove(prefix + DIRECTION)
            if not errors:
                self.cache_norm()


def conv_options(layer: nn.Module) -> dict[str, Any]:
    """How a convolution applies its weight, as `conv_norm` takes it."""
    return {name: getattr(layer, name) for name in _CONV_OPTIONS}


def cacheable_layers(module: nn.Module) -> dict[str, CachesSpectralNorm]:
    """Every layer whose spectral norm can be cached, by name."""
    found = {name: layer for name, layer in module.named_modules() if DIRECTION in layer._buffers}
    return cast(dict[str, CachesSpectralNorm], found)


def cache_spectral_norms(module: nn.Module) -> list[str]:
    """Let every bounded layer take σ = ⟨W, G⟩ in training, without a power iteration; returns their names.

    From then on :func:`remeasure_spectral_norms` is to be called every few optimiser steps. A layer without v
    for its input size measures σ at its next forward pass, as without a cache, and computes G then.
    Evaluation is the same. The buffer ``spectral_direction``, G, is in the state_dict from now on: call this
    before loading such a state. A state without it can be loaded too; G is then computed from its v.

    >>> from hetsngp.nn.spectral import BoundedLinear
    >>> network = nn.Sequential(BoundedLinear(8, 8, bound=0.5), nn.ReLU(), BoundedLinear(8, 2, bound=0.5))
    >>> cache_spectral_norms(network)
    ['0', '2']
    >>> for step in range(20):
    ...     if step % 10 == 0:
    ...         remeasure_spectral_norms(network)
    ...     y = network(torch.randn(2, 8))                      # then backward and an optimiser's step
    >>> uncache_spectral_norms(network)
    >>> "0.spectral_direction" in network.state_dict()
    False
    """
    layers = cacheable_layers(module)
    for layer in layers.values():
        if layer.spectral_direction is None:
            layer.cache_norm()
    return list(layers)


def remeasure_spectral_norms(module: nn.Module, iterations: int = 1) -> None:
    """Run power iterations at the present weights, from the stored v, and update every cached G.

    With as many ``iterations`` as optimiser steps since the last call, v follows as closely as without a
    cache: where one singular value overtakes another, the number of iterations decides how fast v turns.
    Fewer cost less. Call it between an optimiser step and the next forward pass: a backward pass needs the G
    of its forward pass. All is written in place, so that compiled and CUDA graphs go on with it, and nothing
    waits for the device.
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    layers = cacheable_layers(module).values()
    if layers and all(layer.spectral_direction is None for layer in layers):
        raise ValueError("no spectral norm is cached: call cache_spectral_norms(module) first")
    for layer in layers:
        layer.remeasure(iterations)


def uncache_spectral_norms(module: nn.Module) -> None:
    """Return to a power iteration at each forward pass in training; G is dropped, σ and v stay."""
    for layer in cacheable_layers(module).values():
        layer.uncache_norm()
