"""convert(): give an existing classifier a head with data uncertainty and model uncertainty."""

from __future__ import annotations

import copy as copying
import warnings
from dataclasses import dataclass
from typing import Any, Unpack, cast

import torch
from torch import nn

from hetsngp.choices import MethodName
from hetsngp.conversion import libraries
from hetsngp.conversion.tracing import LINEAR, LastLayer, example_batch, is_linear, locate_last_layer
from hetsngp.models.classifier import Classifier, evaluating
from hetsngp.models.components import spectral_bound_for
from hetsngp.models.ensemble import Ensemble
from hetsngp.models.methods import build, check_method, check_options
from hetsngp.models.options import BuildOptions
from hetsngp.nn.extractor import Extractor
from hetsngp.nn.latent import LinearLatent
from hetsngp.nn.spectral import LayerBound, bounded_layers, measure_bounds
from hetsngp.validation import check_choice, check_num_classes


@dataclass(frozen=True)
class Conversion:
    """Report of ``convert``; ``print(model.conversion)`` says it in a sentence."""

    network: str
    """Class of the network."""
    classifier: str | None
    """Layer that was replaced; None: the network returned features already."""
    num_features: int
    """Width D of the input of that layer."""
    num_outputs: int
    """Width of the output of that layer."""
    num_classes: int
    """Number of classes K of the new head."""
    method: str
    frozen: bool
    kept_readout: bool
    """Whether the head starts with the weights of that layer."""
    num_bounded: int = 0
    """Number of layers with a spectral bound."""
    bounds: tuple[LayerBound, ...] = ()
    """Bounds that were measured."""
    asked_bound: float | None = None
    """Bound c before any was raised."""

    @property
    def raised(self) -> tuple[LayerBound, ...]:
        """Layers whose σ is larger than the bound that was asked for."""
        asked = self.asked_bound or float("inf")
        return tuple(layer for layer in self.bounds if layer.sigma > asked)

    def __str__(self) -> str:
        if self.classifier is None:
            text = f"{self.network}: its {self.num_features} features given to "
        else:
            layer = f"layer {self.classifier!r} ({self.num_features} → {self.num_outputs})"
            text = f"{self.network}: {layer} replaced by "
        text += f"a {self.method} head for {self.num_classes} classes"
        text += ", its weights kept" if self.kept_readout else ""
        if self.frozen:
            return text + "; everything else frozen"
        if not self.num_bounded:
            return text + "; no spectral bound"
        text += f"; {_layers(self.num_bounded)} bounded spectrally at {self.asked_bound:g}"
        if len(self.bounds) < self.num_bounded:
            text += ", or at their own norm where that is larger (measured when they are first trained)"
        if self.raised:
            largest = max(self.raised, key=lambda layer: layer.bound)
            text += (
                f", raised for {len(self.raised)} whose own norm is larger, so that the features stay as "
                f"they are (the largest to {largest.bound:.3g}, {largest.name!r})"
            )
        return text


def _layers(count: int) -> str:
    return f"{count} layer" if count == 1 else f"{count} layers"


def convert(
    model: nn.Module,
    method: MethodName = "hetsngp",
    example_input: Any = None,
    classifier: str | nn.Module | None = None,
    *,
    num_classes: int | None = None,
    freeze: bool = False,
    copy: bool = True,
    generator: torch.Generator | None = None,
    **options: Unpack[BuildOptions],
) -> Classifier:
    """Replace the last linear layer of ``model`` by a head of ``method``; every other tensor is kept.

    The layer is found by running ``example_input`` (a batch as the model takes it: a tensor, a dict, a tuple)
    and seeing which linear layer makes the logits; networks from timm, torchvision and Hugging Face need no
    example. ``classifier`` names it instead. Where the number of classes stays and the head is linear, it
    starts with the weights of the replaced layer, so that only the uncertainty changes; a GP has another form
    and starts anew. Methods of several inputs at once widen the first layer: its weight is tiled and divided.

    Args:
        model: A timm, torchvision or Hugging Face classifier, or any module whose logits a linear layer
            makes.
        method: As in :func:`hetsngp.build`.
        example_input: A batch of one example or more, without labels.
        classifier: Name of the last layer ("fc", "head.fc"), or the layer itself.
        num_classes: K of the new head; None: as many as the replaced layer has.
        freeze: Train the head alone: the rest has no gradients and stays in eval mode.
            :func:`hetsngp.fit_head` then needs the features only once.
        copy: Leave ``model`` unchanged; False changes it in place and saves the memory.
        generator: Draws the initial values of the head.
        **options: Those of :class:`hetsngp.models.options.BuildOptions`. Convolutional networks and MLPs are
            bounded spectrally where the method asks for it, transformers are not; ``spectral_bound`` sets the
            bound for any, ``float("inf")`` is none. No bound changes the features: it is raised to 1.05 times
            a layer's own norm where that is larger (``model.conversion`` says where).

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    >>> model = convert(net, example_input=torch.randn(2, 4))
    >>> print(model.conversion)
    Sequential: layer '2' (16 → 3) replaced by a hetsngp head for 3 classes; 1 layer bounded spectrally ...
    >>> model(torch.randn(5, 4)).shape  # log-probabilities
    torch.Size([5, 3])
    """
    if not isinstance(method, str):
        raise TypeError(f"method is a name, got {type(method).__name__}: a batch is given as example_input=x")
    check_method(method)
    check_options(options)
    network, named = _check_network(model, classifier)
    source = libraries.describe(network)
    if copy:
        network = _copied(network)
    example = example_batch(network, example_input)
    last = locate_last_layer(network, named, example, given=example_input is not None)
    classes = _check_classes(network, last, num_classes)
    layer = None if last.name is None else network.get_submodule(last.name)
    extractor = Extractor(
        network,
        last.name,
        last.num_features,
        last.num_outputs,
        reads=last.reads,
        frozen=freeze,
        source=source,
    )
    given = cast(BuildOptions, {**libraries.default_options(network), **options})
    asked = spectral_bound_for(extractor, check_options(given))
    made = build(method, extractor, classes, generator=generator, **given)
    made.conversion = Conversion(
        network=type(network).__name__,
        classifier=last.name,
        num_features=last.num_features,
        num_outputs=last.num_outputs,
        num_classes=classes,
        method=method,
        frozen=freeze,
        kept_readout=_keep_readout(made, layer),
        num_bounded=len(bounded_layers(network)),
        bounds=_measured_bounds(made, example),
        asked_bound=asked,
    )
    if given.get("spectral_bound") is not None and made.conversion.raised:
        warnings.warn(f"spectral_bound={asked:g} was raised: {made.conversion}", stacklevel=2)
    return made


def strip_classifier(network: nn.Module, description: dict[str, Any]) -> nn.Module:
    """Remove the last layer of a user's network, if the description of the saved backbone says so."""
    extractor = description.get("extractor")
    if extractor is None or isinstance(network, Extractor):
        return network
    source = {name: value for name, value in description.items() if name != "extractor"}
    try:
        return Extractor(network, source=source, **extractor)
    except AttributeError as error:
        raise ValueError(
            f"{type(network).__name__} has no layer {extractor['classifier']!r}, which a head had replaced: "
            f"give the network as it was before hetsngp.convert ({error})"
        ) from error


def _check_network(model: Any, classifier: Any) -> tuple[nn.Module, str | None]:
    """Unwrap the network, and return it with the name of the layer that was given."""
    if isinstance(model, Classifier | Ensemble):
        raise TypeError(
            "this model has a head of ours already: convert the network it was made from, or fit another "
            "head on its features with hetsngp.fit_head(model, loader, method=...)"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert takes a torch.nn.Module, got {type(model).__name__}")
    network: Any = model
    while type(network).__module__.startswith("torch."):  # torch.compile, DataParallel and similar wrappers
        inner = network._modules.get("_orig_mod", network._modules.get("module"))
        if inner is None:
            break
        network = inner
    names = {module: name for name, module in network.named_modules()}
    if isinstance(classifier, nn.Module):
        if classifier not in names:
            raise ValueError("classifier is no layer of this model: give one of its own, or its name")
        return network, names[classifier]
    if classifier is not None:
        known = [name for name, module in network.named_modules() if isinstance(module, LINEAR)]
        if classifier not in names.values():
            check_choice("classifier", classifier, known)
    return network, classifier


def _copied(network: nn.Module) -> nn.Module:
    try:
        return copying.deepcopy(network)
    except Exception as error:
        raise ValueError(
            f"{type(network).__name__} cannot be copied ({error}): convert(..., copy=False) takes it over"
        ) from error


def _check_classes(network: nn.Module, last: LastLayer, num_classes: int | None) -> int:
    if num_classes is None and last.num_outputs < 2:
        raise ValueError(
            f"{type(network).__name__} has {last.num_outputs or 'no'} output: give the number of classes, "
            "num_classes=2 for a yes-or-no label"
        )
    return check_num_classes(last.num_outputs if num_classes is None else num_classes)


@torch.no_grad()
def _keep_readout(model: Classifier, layer: nn.Module | None) -> bool:
    """Copy the weights of the replaced layer into a linear head, if they are for the same classes."""
    latent = getattr(model.head, "latent", None)
    if not isinstance(latent, LinearLatent) or layer is None or not is_linear(layer):
        return False
    weight = cast(torch.Tensor, layer.weight).flatten(1)
    if weight.shape != (model.num_classes, model.num_features):
        return False
    bias = weight.new_zeros(len(weight)) if layer.bias is None else cast(torch.Tensor, layer.bias)
    latent.linear.weight.copy_(weight.repeat(latent.members, 1))
    latent.linear.bias.copy_(bias.repeat(latent.members))
    return True


def _measured_bounds(model: Classifier, example: Any) -> tuple[LayerBound, ...]:
    """Measure the norms of bounded layers on ``example``; without one the first training pass does."""
    if example is None:
        return ()
    network = model.backbone.network
    assert isinstance(network, nn.Module)
    with evaluating(model):
        return tuple(measure_bounds(network, lambda: model.backbone(example)))
