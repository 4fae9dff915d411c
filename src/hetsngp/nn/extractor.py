"""Backbone from a classifier without its last layer: x → h, for any network that ends in a linear layer."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

# Hugging Face's batches contain the labels, from which the network would compute a loss.
LABELS = ("labels", "label", "label_ids")


class Passage(nn.Module):
    """Replacement of the last layer that returns its input."""

    def forward(self, h: Tensor) -> Tensor:
        """h → h."""
        return h


class Catch(nn.Module):
    """Replacement of the last layer that stores its input for :meth:`take` and returns logits of zero.

    For networks with operations after the logits (a softmax, a second output), which run on the zeros. Calls
    from several threads are kept apart.
    """

    def __init__(self, num_outputs: int, dim: int = -1) -> None:
        super().__init__()
        self.num_outputs, self.dim = num_outputs, dim
        self._caught: dict[int, Tensor] = {}

    def forward(self, h: Tensor) -> Tensor:
        """h (..., D) → zeros (..., K); of a convolution (B, D, ...) → (B, K, ...)."""
        self._caught[threading.get_ident()] = h
        shape = list(h.shape)
        shape[self.dim] = self.num_outputs
        return h.new_zeros(shape)

    def __getstate__(self) -> dict[str, Any]:
        """State without stored inputs, which copies and pickles do not need."""
        return {**self.__dict__, "_caught": {}}

    def take(self) -> Tensor:
        """Input of the last call in this thread."""
        try:
            return self._caught.pop(threading.get_ident())
        except KeyError:
            raise RuntimeError(
                "the network did not call the layer that stands for its classifier: is it another branch, or "
                "another mode? Convert again with classifier= naming the layer that makes the logits"
            ) from None


class Extractor(nn.Module):
    """``network`` without the layer named ``classifier``: x → the input of that layer, h (B, D).

    x is a tensor, a dict of keyword arguments of the network (without labels) or a tuple of positional ones.
    ``reads``: "output", the network's output when that layer returns its input; or "input", the input of that
    layer. ``num_outputs``: outputs of the layer, K. A ``frozen`` network has no gradients and stays in eval
    mode: BatchNorm keeps its statistics, and dropout is off. The network is changed in place.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.LogSoftmax(1))
    >>> Extractor(net, "2", 8, 3, reads="input")(torch.randn(5, 4)).shape
    torch.Size([5, 8])
    """

    def __init__(
        self,
        network: nn.Module,
        classifier: str | None,
        num_features: int,
        num_outputs: int,
        *,
        reads: str = "output",
        frozen: bool = False,
        source: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.classifier, self.num_features, self.num_outputs = classifier, num_features, num_outputs
        self.reads, self.frozen = reads, frozen
        self.source = source or {"name": None, "class": type(network).__name__}
        """How to construct the network again, where that is known."""
        if classifier is not None:
            dim = 1 if isinstance(network.get_submodule(classifier), nn.Conv1d | nn.Conv2d) else -1
            stand_in = Passage() if reads == "output" else Catch(num_outputs, dim)
            network = replace_layer(network, classifier, stand_in)
        self.network = network
        if frozen:
            self.network.requires_grad_(False)
            self.network.eval()

    def forward(self, x: Any) -> Tensor:
        """x → h: (B, D)."""
        output = call(self.network, x)
        if self.reads == "output":
            return flat(logits_of(output))
        assert self.classifier is not None
        catch = self.network.get_submodule(self.classifier)
        assert isinstance(catch, Catch)
        return flat(catch.take())

    def train(self, mode: bool = True) -> Extractor:
        """Set the mode; a frozen network stays in eval mode."""
        super().train(mode)
        if self.frozen:
            self.network.eval()
        return self

    @property
    def description(self) -> dict[str, Any]:
        """Description of the backbone in a saved model."""
        stripped = {
            "classifier": self.classifier,
            "num_features": self.num_features,
            "num_outputs": self.num_outputs,
            "reads": self.reads,
            "frozen": self.frozen,
        }
        return {**self.source, "extractor": stripped}

    def extra_repr(self) -> str:
        """Summary for ``print(model)``."""
        return f"classifier={self.classifier!r}, num_features={self.num_features}, frozen={self.frozen}"


class Features(nn.Module):
    """Identity backbone for a head on features: h → h. ``kind``: that of the network they are from."""

    def __init__(self, num_features: int, kind: str | None = None) -> None:
        super().__init__()
        self.num_features, self.kind = num_features, kind

    def forward(self, h: Tensor) -> Tensor:
        """h: (B, D)."""
        return h


def call(network: nn.Module, x: Any) -> Any:
    """Call ``network`` with a tensor, the keyword arguments in a dict, or the arguments in a tuple."""
    if isinstance(x, Mapping):
        return network(**{name: value for name, value in x.items() if name not in LABELS})
    if isinstance(x, tuple | list):
        return network(*x)
    return network(x)


def logits_of(output: Any) -> Tensor:
    """Logits in the output of a network: itself, ``.logits``, ``["logits"]``, or the first of several."""
    found = getattr(output, "logits", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("logits")
    if found is None and isinstance(output, tuple | list) and output:
        found = output[0]
    found = output if found is None else found
    if not isinstance(found, Tensor):
        raise TypeError(
            f"the network returns {type(output).__name__}, in which no logits were found: they are its "
            'output, its .logits, its ["logits"], or the first of several'
        )
    return found


def flat(h: Tensor) -> Tensor:
    """(B, D, 1, 1) → (B, D); other shapes are not changed."""
    return h.flatten(1) if h.dim() > 2 and all(size == 1 for size in h.shape[2:]) else h


def replace_layer(network: nn.Module, name: str, layer: nn.Module) -> nn.Module:
    """Replace the layer ``name`` by ``layer``, under every name it has; returns the network."""
    old = network.get_submodule(name)
    if old is network:
        return layer
    for each, module in list(network.named_modules(remove_duplicate=False)):
        if module is old:
            owner, _, attribute = each.rpartition(".")
            setattr(network.get_submodule(owner), attribute, layer)
    return network
