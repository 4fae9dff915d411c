"""The soft spectral bound as layers: W·min(1, c/σ) inside the forward pass of Linear, Conv1d and Conv2d.

A layer is bounded in place by changing its class, so that hooks, parameter names, tied references, pickle,
deepcopy and optimisers made earlier keep working; torch's parametrizations would lose several of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetsngp.functional.spectral import (
    cached_norm,
    conv_norm,
    linear_norm,
    soft_bound,
    start_vector,
    wide_dtype,
)
from hetsngp.nn.precision import is_recomputing
from hetsngp.nn.spectral_cache import DIRECTION, CachesSpectralNorm, conv_options

_BUFFERS = ("spectral_bound", "spectral_sigma", "spectral_v")
OPAQUE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # read inner weights without calling the layer
_FIRST_ITERATIONS = 30  # σ to 1–2 % from a random start (error ~ log(n)/4k); then one iteration a step
# A layer that must not change is bounded by this multiple of its σ: the first estimate is too small.
_SIGMA_MARGIN = 1.05


# Input sizes whose last start vector is kept.
_RECENT_SIZES = 4


class _RecentStarts(dict[tuple[int, ...], Tensor]):
    """v before the last power iteration, by input size; a copy of the model has none."""

    def keep(self, v: Tensor) -> None:
        """Keep a copy of v (in, *spatial), which is about to be overwritten."""
        self.pop(tuple(v.shape), None)
        if len(self) == _RECENT_SIZES:
            del self[next(iter(self))]
        self[tuple(v.shape)] = v.clone()

    def __deepcopy__(self, memo: Any) -> _RecentStarts:
        return _RecentStarts()

    def __reduce__(self) -> tuple[type[_RecentStarts], tuple[()]]:
        return _RecentStarts, ()


class _Bounded(CachesSpectralNorm):
    """State and schedule of the bound; the subclasses apply the weight.

    Training: one power iteration at each forward pass (more at the first, and after a change of the spatial
    input size), gradient through σ. Evaluation: W·min(1, c/σ) with the stored σ, and nothing is written.
    Buffers, float32 or better whatever the weight's dtype: `spectral_bound` c, scalar; `spectral_sigma` σ,
    scalar, 0 until measured (the weight is not bounded before); `spectral_v` (in, *spatial), empty until the
    first training pass. σ lags the weight by one iteration: by some per cent where two singular values cross
    in fast training. `torch.compile(fullgraph=True)` needs an eager first pass.
    With a cached norm (:mod:`hetsngp.nn.spectral_cache`) a forward pass takes σ = ⟨W, G⟩ and leaves v alone.
    A pass that activation checkpointing repeats has the σ of the last pass of its input size, and writes
    nothing: the same as the first time where a backward pass follows each forward pass.

    A pretrained layer must not change when it is bounded. `spectral_keep` is the requested c: where σ is
    larger when it is first measured, c becomes 1.05·σ, and at another image size, with another σ, c changes
    in proportion to σ, never below the requested c.
    """

    spectral_keep: float | None = None

    spectral_bound: Tensor

    def __init__(self, *args: Any, bound: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _register(self, bound)

    def bounded_weight(self, spatial: Sequence[int] = ()) -> Tensor:
        """The weight the layer applies; in training mode σ is measured for it."""
        sigma = self.measure(spatial) if self.training else self.spectral_sigma
        return soft_bound(self.weight, sigma, self.spectral_bound)

    def measure(self, spatial: Sequence[int] = ()) -> Tensor:
        """Measure σ by one more power iteration (30 at a new input size) or as ⟨W, G⟩, and store it."""
        size = (_in_channels(self), *spatial)
        if self.spectral_direction is None and is_recomputing() and size in self._starts():
            return _norm(self, self._starts()[size], iterations=1)[0]
        if self.spectral_v.shape != size:
            self._start(spatial)
        v = self.spectral_v
        if self.spectral_direction is None:
            if not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
                self._starts().keep(v)
            sigma, v = _norm(self, v, iterations=1)
        else:
            sigma = cached_norm(self.weight, self.spectral_direction, _groups(self))
        with torch.no_grad():  # in place, so that compiled and CUDA graphs keep their addresses
            self.spectral_sigma.copy_(sigma)
            if v is not self.spectral_v:
                self.spectral_v.copy_(v)
        return sigma

    def _starts(self) -> _RecentStarts:
        # Layers are bounded without a constructor, by a change of their class.
        starts: _RecentStarts = self.__dict__.setdefault("spectral_starts", _RecentStarts())
        return starts

    @torch.inference_mode(False)
    @torch.no_grad()
    def _start(self, spatial: Sequence[int]) -> None:
        v = start_vector((_in_channels(self), *spatial), self.spectral_v.dtype, self.spectral_v.device)
        sigma, v_end = _norm(self, v, _FIRST_ITERATIONS)
        self.spectral_v = v_end.to(v)
        if self.spectral_keep is not None:
            sigma, before = sigma.to(self.spectral_bound), self.spectral_sigma
            fits = torch.where(before > 0, self.spectral_bound * sigma / before, _SIGMA_MARGIN * sigma)
            self.spectral_bound = fits.clamp_min(self.spectral_keep)
        self.reset_cache()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Rounded to bfloat16, σ would differ between training and evaluation, and c from the requested one.
        before = {name: getattr(self, name) for name in (*_BUFFERS, DIRECTION)}
        self._starts().clear()
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = getattr(self, name)
            if old is not None and new.dtype != wide_dtype(new):
                setattr(self, name, old.to(new.device))
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.get(prefix + "spectral_v")
        if saved is not None:  # its shape follows the input size, which a fresh layer does not know
            self.spectral_v = self.spectral_v.new_empty(saved.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)


class BoundedLinear(_Bounded, nn.Linear):
    """Linear layer with ‖W‖ ≤ c: y = W·min(1, c/σ)·x + b; x: (..., in), y: (..., out).

    >>> layer = BoundedLinear(8, 8, bound=0.5)
    >>> y = layer(torch.randn(2, 8))                            # training mode: measures σ
    >>> bool(torch.linalg.matrix_norm(layer.eval().bounded_weight(), 2) < 0.55)
    True
    """

    def forward(self, input: Tensor) -> Tensor:
        """As nn.Linear, with the bounded weight."""
        return F.linear(input, self.bounded_weight(), self.bias)


class BoundedConv1d(_Bounded, nn.Conv1d):
    """Conv1d whose operator norm at the training length is at most c; x: (B, in, L)."""

    def forward(self, input: Tensor) -> Tensor:
        """As nn.Conv1d, with the bounded weight."""
        return self._conv_forward(input, self.bounded_weight(input.shape[-1:]), self.bias)


class BoundedConv2d(_Bounded, nn.Conv2d):
    """Conv2d whose operator norm at the training image size is at most c; x: (B, in, H, W)."""

    def forward(self, input: Tensor) -> Tensor:
        """As nn.Conv2d, with the bounded weight."""
        return self._conv_forward(input, self.bounded_weight(input.shape[-2:]), self.bias)


_BOUNDED: dict[type, type] = {nn.Linear: BoundedLinear, nn.Conv1d: BoundedConv1d, nn.Conv2d: BoundedConv2d}
_PLAIN: dict[type, type] = {bounded: plain for plain, bounded in _BOUNDED.items()}


def bound_layer(module: nn.Module, bound: float, *, keep: bool = False) -> None:
    """Bound one Linear, Conv1d or Conv2d in place; not a subclass, which may use its weight differently."""
    if type(module) not in _BOUNDED:
        raise TypeError(f"only an exact Linear, Conv1d or Conv2d can be bounded, not {type(module).__name__}")
    _register(module, bound)
    module.__class__ = _BOUNDED[type(module)]
    if keep:
        cast(_Bounded, module).spectral_keep = bound


def bound_spectrally(module: nn.Module, bound: float, *, keep: bool = False) -> list[str]:
    """Bound every exact Linear, Conv1d and Conv2d layer of a network in place; returns their names.

    Left alone: layers already bounded (a second call changes no bound), subclasses, and the inside of
    MultiheadAttention and TransformerEncoderLayer. With ``keep``, for pretrained networks, no layer's output
    changes: a bound below a layer's σ is raised when σ is first measured, in training or by
    :func:`measure_bounds`.

    >>> bound_spectrally(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), 0.95)
    ['0', '2']
    """
    if not isinstance(bound, int | float) or not 0 < bound < float("inf"):
        raise ValueError(f"the spectral bound must be positive and finite (0.95, or 6 for CNNs), got {bound}")
    hidden = {inner for outer in module.modules() if isinstance(outer, OPAQUE) for inner in outer.modules()}
    found = {name: layer for name, layer in module.named_modules() if layer not in hidden}
    for name, layer in found.items():
        if getattr(layer, "cls_to_become", None) in _BOUNDED:
            raise ValueError(f"lazy layer {name!r} has no weight yet: run a batch through the network first")
    names = [name for name, layer in found.items() if type(layer) in _BOUNDED]
    for name in names:
        bound_layer(found[name], bound, keep=keep)
    return names


def bounded_layers(module: nn.Module) -> dict[str, _Bounded]:
    """Every layer with a bound, by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, _Bounded)}


@dataclass(frozen=True)
class LayerBound:
    """Name of a layer, its σ, and its bound c."""

    name: str
    sigma: float
    bound: float


def measure_bounds(module: nn.Module, forward: Callable[[], Any]) -> list[LayerBound]:
    """Measure σ of every bounded layer at its input size in ``forward()``; nothing else changes.

    Layers that ``forward`` does not call are measured at their first call in training.
    """
    sizes: dict[nn.Module, Sequence[int]] = {}

    def note(layer: nn.Module, args: tuple[Any, ...]) -> None:
        sizes[layer] = () if isinstance(layer, nn.Linear) else args[0].shape[2:]

    layers = bounded_layers(module)
    handles = [layer.register_forward_pre_hook(note) for layer in layers.values()]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    for layer, size in sizes.items():
        with torch.no_grad():
            cast(_Bounded, layer).measure(size)
    return [
        LayerBound(name, float(layer.spectral_sigma), float(layer.spectral_bound))
        for name, layer in layers.items()
        if layer in sizes
    ]


@torch.no_grad()
def fold_spectral_bound(module: nn.Module) -> int:
    """Write W·min(1, c/σ) into plain layers, for deployment; returns how many layers were folded.

    Outputs in eval mode are the same to the bit. A weight that layers share is replaced in the folded layer
    by a copy, because each layer has its own factor.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, _Bounded)]
    if any("weight" not in layer._parameters for layer in layers):
        raise ValueError("a hook recomputes the weight: remove it (weight_norm, spectral_norm) first")
    uses = Counter(id(p) for layer in module.modules() for p in layer.parameters(recurse=False))
    for layer in layers:
        weight = soft_bound(layer.weight, layer.spectral_sigma, layer.spectral_bound)
        if uses[id(layer.weight)] > 1:
            layer.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
        else:
            layer.weight.copy_(weight)
        for name in (*_BUFFERS, DIRECTION):
            delattr(layer, name)
        for attribute in ("spectral_keep", "spectral_starts"):
            layer.__dict__.pop(attribute, None)
        layer.__class__ = _PLAIN[type(layer)]
    return len(layers)


@torch.no_grad()
def measure_sigma(layer: nn.Module, input_size: Sequence[int] = (), iterations: int = 100) -> Tensor:
    """Operator norm (scalar) of a layer's weight before any bound; changes nothing.

    layer: Linear, Conv1d or Conv2d, bounded or not; input_size: (), (length,) or (height, width).
    """
    weight = cast(Tensor, layer.weight)
    v = start_vector((_in_channels(layer), *input_size), wide_dtype(weight), weight.device)
    return _norm(layer, v, iterations)[0]


def _norm(layer: nn.Module, v: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    if isinstance(layer, nn.Linear):
        return linear_norm(layer.weight, v, iterations)
    return conv_norm(cast(Tensor, layer.weight), v, iterations, **conv_options(layer))


def _in_channels(layer: nn.Module) -> int:
    return cast(int, layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels)


def _groups(layer: nn.Module) -> int:
    return 1 if isinstance(layer, nn.Linear) else cast(int, layer.groups)


def _register(module: nn.Module, bound: float) -> None:
    if not isinstance(bound, int | float) or not 0 < bound < float("inf"):
        raise ValueError(f"the spectral bound must be positive and finite (0.95, or 6 for CNNs), got {bound}")
    weight = cast(Tensor, module.weight)
    if not weight.is_floating_point():
        raise TypeError(f"only real floating-point weights can be bounded, not {weight.dtype}")
    for name, value in zip(_BUFFERS, (bound, 0.0, []), strict=True):
        module.register_buffer(name, torch.tensor(value, dtype=wide_dtype(weight), device=weight.device))
    module.register_buffer(DIRECTION, None)
