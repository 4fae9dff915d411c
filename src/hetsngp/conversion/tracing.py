"""Location of the layer that makes a network's logits: by running the network, not by names of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetsngp.conversion import libraries
from hetsngp.models.classifier import evaluating, to_device
from hetsngp.nn.extractor import Passage, call, flat, logits_of, replace_layer
from hetsngp.validation import check_inputs

LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d)
# Layers an error lists, the last called first.
LISTED = 8


@dataclass(frozen=True)
class LastLayer:
    """Layer that makes the logits, by name, and how :class:`Extractor` gets its input.

    ``name`` None: the network has none, and returns features already.
    """

    name: str | None
    num_features: int
    num_outputs: int
    reads: str


@dataclass(frozen=True)
class Call:
    """Call of a linear layer."""

    name: str
    input: Tensor
    output: Tensor
    times: int = 1
    """Number of calls; input and output are those of the last one."""

    def num_outputs(self, network: nn.Module) -> int:
        return self.output.shape[_dim(network, self.name)]

    def __str__(self) -> str:
        return f"{self.name!r} {tuple(self.input.shape[1:])} → {tuple(self.output.shape[1:])}"


class ClassifierNotFoundError(ValueError):
    """No layer, or more than one, makes the logits."""


def find_last_layer(network: nn.Module, example: Any, named: str | None = None) -> LastLayer:
    """Find the linear layer whose output is the network's: (B, K) logits, or a softmax or sigmoid of them.

    The network runs on ``example`` in eval mode with a hook on every linear layer. A layer makes the logits
    if adding a vector c to its output adds c to them; that holds through pooling and the choice of a token
    too. ``named``: name of the layer, if the caller knows it; any module from a tensor to a tensor.
    """
    with evaluating(network):
        output, calls = traced(network, example, named)
        if named is not None:
            return _named_layer(network, example, named, calls, output)
        fits = [c for c in calls if output.dim() == 2 and c.num_outputs(network) == output.shape[1]]
        found = [c for c in fits if makes_logits(network, example, c.name, output)]
        if len(found) == 1:
            return _located(network, example, found[0], output)
    listed = ", ".join(str(c) for c in (found or calls[::-1][:LISTED]))
    reason = "each of these layers adds to the logits" if found else "no single linear layer makes the logits"
    raise ClassifierNotFoundError(
        f"{reason} {tuple(output.shape)} of {type(network).__name__}: name the layer to replace by a head, "
        f'classifier="...". Linear layers it called, the last first: {listed or "none"}. (A network that '
        "returns features has no such layer: hetsngp.build(method, network, num_classes) puts a head on it.)"
    )


def returned_features(network: nn.Module, example: Any) -> LastLayer:
    """Features that a network without a last layer returns."""
    with evaluating(network):
        h = flat(logits_of(call(network, example)))
    if h.dim() != 2:
        raise ClassifierNotFoundError(
            f"{type(network).__name__} has no last layer and returns {tuple(h.shape)}, not one vector (B, D) "
            "for each example: pool its features"
        )
    return LastLayer(None, h.shape[1], 0, "output")


def in_precision(x: Any, dtype: torch.dtype) -> Any:
    """Convert the floating-point tensors of a batch to ``dtype``."""
    if isinstance(x, Mapping):
        return {name: in_precision(value, dtype) for name, value in x.items()}
    if isinstance(x, tuple | list):
        return tuple(in_precision(value, dtype) for value in x)
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def traced(network: nn.Module, example: Any, also: str | None = None) -> tuple[Tensor, list[Call]]:
    """Logits for ``example``, and the last call of each linear layer and of ``also``, in order."""
    calls: dict[str, Call] = {}

    def recorder(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def record(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
                before = calls.pop(name, None)
                calls[name] = Call(name, args[0], output, 1 if before is None else before.times + 1)

        return record

    wanted = [n for n, layer in network.named_modules() if isinstance(layer, LINEAR) or n == also]
    with hooks([(network.get_submodule(name), recorder(name)) for name in wanted]):
        output = logits_of(call(network, example))
    return flat(output), list(calls.values())


def makes_logits(network: nn.Module, example: Any, name: str, output: Tensor) -> bool:
    """Whether adding c to the output of layer ``name`` adds c to the logits."""
    layer = network.get_submodule(name)
    shift = torch.randn(output.shape[1], generator=torch.Generator().manual_seed(0)).to(output)
    along = shift.view(-1, *[1] * (2 if isinstance(layer, nn.Conv2d) else 1)) if _is_conv(layer) else shift
    with hooks([(layer, lambda layer, args, result: result + along)]):
        shifted = flat(logits_of(call(network, example)))
    tolerance = 1e-3 if output.dtype in (torch.float32, torch.float64) else 3e-2
    if not bool(((shifted - output).abs() > 10 * tolerance).any()):
        return False  # a saturated softmax hides every shift
    return any(
        torch.allclose(shifted - output, expected - output, rtol=tolerance, atol=tolerance)
        for expected in _shifted_outputs(output, shift)
    )


def _shifted_outputs(output: Tensor, shift: Tensor) -> Iterator[Tensor]:
    """Output after the shift, if it is logits, their log-softmax, softmax, or sigmoid."""
    yield output + shift
    yield F.log_softmax(output + shift, 1)
    if bool((output >= 0).all()):
        yield F.softmax(output.log() + shift, 1)
        yield torch.sigmoid(torch.logit(output) + shift)


def _named_layer(
    network: nn.Module, example: Any, name: str, calls: Sequence[Call], output: Tensor
) -> LastLayer:
    called = {c.name: c for c in calls}
    if name not in called:
        raise ClassifierNotFoundError(
            f"layer {name!r} of {type(network).__name__} was not called with a tensor: name one that is, "
            f'classifier="...", of {", ".join(str(c) for c in calls[::-1][:LISTED])}'
        )
    return _located(network, example, called[name], output)


def _located(network: nn.Module, example: Any, found: Call, output: Tensor) -> LastLayer:
    """Decide how to get the layer's input (B, D): from the output of the network, or from the layer."""
    dim = _dim(network, found.name)
    width, outputs = found.input.shape[dim], found.output.shape[dim]
    layer = network.get_submodule(found.name)
    passed = _output_without(network, example, found.name)
    last = LastLayer(found.name, width, outputs, "output")
    own = flat(found.input)
    if passed is not None and passed.shape == (len(output), width):
        # A layer may be called on every token or pixel, or more than once: then the output must be a
        # selection or a mean of its inputs.
        if found.times == 1 and own.dim() == 2 and torch.equal(passed, own):
            return last
        if is_linear(layer) and torch.allclose(_applied(layer, passed), output, rtol=1e-3, atol=1e-3):
            return last
    if own.dim() == 2 and len(own) == len(output) and found.times == 1:
        return replace(last, reads="input")
    called = f"called {found.times} times, the last" if found.times > 1 else "called"
    raise ClassifierNotFoundError(
        f"layer {found} is {called} on {tuple(found.input.shape)}, not on one vector (B, D) for each "
        'example, and the network does not turn its input into one: name another layer, classifier="..."'
    )


def _output_without(network: nn.Module, example: Any, name: str) -> Tensor | None:
    """Output of the network if the layer returns its input; None where the network cannot use that."""
    layer = network.get_submodule(name)
    try:
        changed = replace_layer(network, name, Passage())
        return flat(logits_of(call(changed, example)))
    except Exception:
        return None
    finally:
        if name:
            replace_layer(network, name, layer)


def _applied(layer: nn.Module, h: Tensor) -> Tensor:
    weight: Any = layer.weight
    return F.linear(h, weight.flatten(1), layer.bias)  # type: ignore[arg-type]


def _is_conv(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Conv1d | nn.Conv2d)


def is_linear(layer: nn.Module) -> bool:
    """Whether the layer maps each vector to Wx + b: a linear layer, or a convolution with a kernel of size
    one; exact types only, since a subclass may use its weight in another way.
    """
    if type(layer) not in LINEAR:
        return False
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        return set(layer.kernel_size) == {1} and layer.groups == 1
    return True


def _dim(network: nn.Module, name: str) -> int:
    """Dimension of features and logits in the layer's input and output."""
    return 1 if _is_conv(network.get_submodule(name)) else -1


@contextmanager
def hooks(pairs: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Context with forward hooks."""
    handles = [module.register_forward_hook(hook) for module, hook in pairs]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def example_batch(network: nn.Module, given: Any) -> Any:
    """Example batch on the network's device and in its precision; None: there is none."""
    example = libraries.example_for(network) if given is None else given
    if example is None:
        return None
    check_inputs(example)
    tensor = next((p for p in network.parameters() if p.is_floating_point()), torch.zeros(()))
    return in_precision(to_device(example, tensor.device), tensor.dtype)


def locate_last_layer(network: nn.Module, named: str | None, example: Any, *, given: bool) -> LastLayer:
    """Locate the layer that a head is to replace: by name, by its library, or by a trial run.

    ``given``: whether the example is the user's, or one of the usual shape.
    """
    named = libraries.last_layer_of(network) if named is None else named
    if example is None and named is None:
        raise ValueError(
            f"convert cannot know what {type(network).__name__} takes: give a batch of it, "
            "example_input=..., by which the layer that makes the logits is found; or name that layer, "
            'classifier="..."'
        )
    if example is None:
        return _untraced_layer(network, named)
    try:
        if named is not None and isinstance(network.get_submodule(named), nn.Identity):
            return returned_features(network, example)
        return find_last_layer(network, example, named)
    except ClassifierNotFoundError:
        raise
    except Exception as error:
        if given:
            raise ValueError(
                f"{type(network).__name__} did not take example_input: {type(error).__name__}: {error}. Give "
                "a batch as it takes it: a tensor, a dict of keyword arguments, or a tuple"
            ) from error
        if named is None:
            raise ValueError(
                f"{type(network).__name__} did not take an input of the usual shape ({error}): give a batch "
                "of yours, example_input=..."
            ) from error
        return _untraced_layer(network, named)


def _untraced_layer(network: nn.Module, name: str | None) -> LastLayer:
    """Describe a linear layer by its attributes, without a trial run."""
    assert name is not None
    layer = network.get_submodule(name)
    if isinstance(layer, nn.Linear):
        return LastLayer(name, layer.in_features, layer.out_features, "input")
    raise ValueError(
        f"layer {name!r} is a {type(layer).__name__}, whose input and output are not known without a batch: "
        "give one, example_input=..."
    )
