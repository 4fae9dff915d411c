"""What to run through a network, and which of its layers a head is to replace."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hetsngp.conversion import libraries
from hetsngp.conversion.tracing import (
    ClassifierNotFoundError,
    LastLayer,
    find_last_layer,
    in_precision,
    returned_features,
)
from hetsngp.models.classifier import to_device
from hetsngp.validation import check_inputs


def example_batch(network: nn.Module, given: Any) -> Any:
    """A batch on the network's device and in its precision, or None."""
    example = libraries.example_for(network) if given is None else given
    if example is None:
        return None
    check_inputs(example)
    tensor = next((p for p in network.parameters() if p.is_floating_point()), torch.zeros(()))
    return in_precision(to_device(example, tensor.device), tensor.dtype)


def locate_last_layer(network: nn.Module, named: str | None, example: Any, *, given: bool) -> LastLayer:
    """The layer a head is to replace: the one that was named, or that its library or a trial run points out.

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
        return _unseen(network, named)
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
        return _unseen(network, named)


def _unseen(network: nn.Module, name: str | None) -> LastLayer:
    """The layer as it stands, without having seen it called."""
    assert name is not None
    layer = network.get_submodule(name)
    if isinstance(layer, nn.Linear):
        return LastLayer(name, layer.in_features, layer.out_features, "input")
    raise ValueError(
        f"layer {name!r} is a {type(layer).__name__}, whose input and output are not known without a batch: "
        "give one, example_input=..."
    )
