"""Networks from timm, torchvision and Hugging Face: an example input, their last layer, and how to construct
them again. None of these packages is imported unless a network of theirs is converted or loaded.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hetsngp.conversion.library_configs import DownloadRefused, check_sources, offline, without_origin
from hetsngp.conversion.text_encoder import TextEncoder
from hetsngp.limits import LimitExceeded, is_out_of_memory

IMAGE_SIZE = 224
HUGGING_FACE = "transformers"
LIBRARIES = ("timm", "torchvision", HUGGING_FACE)


def library_of(network: nn.Module) -> str | None:
    """Package that a network comes from, by the modules of its classes; None: another."""
    if isinstance(network, TextEncoder):
        return library_of(network.network)
    if hasattr(network, "config") and any(c.__name__ == "PreTrainedModel" for c in type(network).__mro__):
        return HUGGING_FACE
    package = type(network).__module__.partition(".")[0]
    return package if package in LIBRARIES else None


def example_for(network: nn.Module) -> Any:
    """Two examples that ``network`` should be able to take; None where that is not known."""
    library = library_of(network)
    if library == HUGGING_FACE:
        return _hugging_face_example(network)
    if library == "timm":
        size = _timm_config(network).get("input_size") or (3, IMAGE_SIZE, IMAGE_SIZE)
        grid = getattr(getattr(network, "patch_embed", None), "img_size", None)
        return _noise(_channels(network, size[0]), *(grid or size[1:]))
    if library == "torchvision":
        return _noise(_channels(network, 3), IMAGE_SIZE, IMAGE_SIZE)
    return None


def _hugging_face_example(network: Any) -> Any:
    network = network.network if isinstance(network, TextEncoder) else network
    if network.main_input_name == "pixel_values":
        size = getattr(network.config, "image_size", None) or IMAGE_SIZE
        height, width = size if isinstance(size, tuple | list) else (size, size)
        return {"pixel_values": _noise(getattr(network.config, "num_channels", 3), height, width)}
    if network.main_input_name == "input_ids":
        vocabulary = int(getattr(network.config, "vocab_size", 8))
        tokens = torch.randint(vocabulary, (2, 6), generator=torch.Generator().manual_seed(0))
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return None


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))


def _channels(network: nn.Module, usual: int) -> int:
    """Number of channels of the images: those of the first convolution."""
    first = next((m for m in network.modules() if isinstance(m, nn.Conv2d)), None)
    return usual if first is None else first.in_channels


def last_layer_of(network: nn.Module) -> str | None:
    """Name of the last layer, where the library says which it is.

    timm does (its ``num_features`` is the width before a head's hidden layers, so it is not that). An
    nn.Identity there means that the network already returns features, as an encoder of texts does.
    """
    if isinstance(network, TextEncoder):
        return "classifier"
    if library_of(network) != "timm" or not hasattr(network, "get_classifier"):
        return None
    layer = network.get_classifier()  # type: ignore[operator]
    if not isinstance(layer, nn.Module):  # two heads, of a distilled network
        return None
    return next(name for name, module in network.named_modules() if module is layer)


def default_options(network: nn.Module) -> dict[str, Any]:
    """Options of ``build`` that the configuration of the network decides."""
    if library_of(network) == HUGGING_FACE and not isinstance(network, TextEncoder):
        multi_label = getattr(network.config, "problem_type", None) == "multi_label_classification"
        return {"link": "sigmoid"} if multi_label else {}
    return {}


# --- constructing them again ------------------------------------------------------------------------------


def describe(network: nn.Module) -> dict[str, Any] | None:
    """Describe a network as ``{"name": library, "config": {...}}``, or None where :func:`construct` would not
    make the same network: every module, setting and shape is compared, without weights where possible.
    """
    library = library_of(network)
    if library is None:
        return None
    with contextlib.suppress(Exception):  # a network that cannot be described is asked for when it is loaded
        for config in _DESCRIBE[library](network):
            source = {"name": library, "class": type(network).__name__, "config": config}
            source = json.loads(json.dumps(source))
            with contextlib.suppress(Exception):
                if _same(network, outline(source)):
                    return source
    return None


def construct(source: dict[str, Any], *, allow_download: bool = False) -> nn.Module:
    """Construct the network that was described, with random initial values.

    ``allow_download``: whether the config may name weights, code and files, and the library may fetch them.
    """
    name, config = source["name"], source["config"]
    if not allow_download:
        check_sources(name, config)
    try:
        with torch.random.fork_rng(devices=[]), contextlib.nullcontext() if allow_download else offline():
            network = _CONSTRUCT[name](config)
    except ImportError as error:
        extra = "text" if name == HUGGING_FACE else "vision"
        raise ImportError(f"this network is from {name}: pip install 'hetsngp[{extra}]'") from error
    except Exception as error:  # a config can lead to any, inside of the library
        if isinstance(error, DownloadRefused | LimitExceeded) or is_out_of_memory(error):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{name} cannot construct its network ({reason:.300})") from error
    if not isinstance(network, nn.Module):
        raise ValueError(f"{name} has no such network")
    return network


def outline(source: dict[str, Any]) -> nn.Module:
    """Construct the network on the meta device, without data, where the library can do that."""
    with contextlib.suppress(Exception), torch.device("meta"):
        return construct(source)
    return construct(source)


def _same(network: nn.Module, other: nn.Module) -> bool:
    shapes = [{n: tuple(t.shape) for n, t in net.state_dict().items()} for net in (network, other)]
    if shapes[0] != shapes[1] or repr(network) != repr(other):
        return False
    # Hugging Face's configuration says everything; elsewhere a setting may show in no shape and no repr.
    return library_of(network) == HUGGING_FACE or all(
        _settings(a) == _settings(b) for a, b in zip(network.modules(), other.modules(), strict=True)
    )


def _settings(module: nn.Module) -> dict[str, Any]:
    """Numbers, names and switches of a module, and tuples of them."""

    def plain(value: Any) -> bool:
        if isinstance(value, tuple):
            return all(plain(part) for part in value)
        return value is None or isinstance(value, bool | int | float | str)

    return {name: value for name, value in vars(module).items() if name != "training" and plain(value)}


def _timm_config(network: Any) -> dict[str, Any]:
    return getattr(network, "pretrained_cfg", None) or getattr(network, "default_cfg", None) or {}


def _describe_timm(network: Any) -> Iterator[dict[str, Any]]:
    outputs = getattr(network.get_classifier(), "out_features", network.num_classes)
    usual = {"model_name": _timm_config(network)["architecture"], "num_classes": outputs}
    yield usual
    given = {name: getattr(network, name, None) for name in ("global_pool", "drop_rate")}
    given = {name: value for name, value in given.items() if isinstance(value, str | float)}
    given["in_chans"] = _channels(network, 3)
    size = getattr(getattr(network, "patch_embed", None), "img_size", None)
    yield {**usual, **given}
    yield {**usual, **given, "img_size": list(size)} if size else usual


def create_timm_network(name: str, *, pretrained: bool, offline: str, **options: Any) -> nn.Module:
    """Make a network of timm's. ``offline``: what the error says to do where weights cannot be fetched."""
    import timm

    try:
        network: nn.Module = timm.create_model(name, pretrained=pretrained, **options)
    except Exception as error:  # of timm, its hub, or the network, of many types
        if not pretrained:
            raise
        reason = " ".join(str(error).split())[:200]
        raise RuntimeError(f"the weights of {name} cannot be fetched ({reason}): {offline}") from error
    return network


def _construct_timm(config: dict[str, Any]) -> nn.Module:
    import timm

    return timm.create_model(**config, pretrained=False)


def _describe_torchvision(network: nn.Module) -> Iterator[dict[str, Any]]:
    models = sys.modules["torchvision"].models
    linear = [m for m in network.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    outputs = getattr(linear[-1], "out_features", None) or linear[-1].out_channels
    for name in models.list_models():
        if models.get_model_builder(name).__module__ == type(network).__module__:
            yield {"name": name, "num_classes": outputs}


def _construct_torchvision(config: dict[str, Any]) -> nn.Module:
    import torchvision

    models, options = torchvision.models, {"weights": None, "num_classes": config["num_classes"]}
    if "weights_backbone" in inspect.signature(models.get_model_builder(config["name"])).parameters:
        options["weights_backbone"] = None  # its default is to fetch some
    return models.get_model(config["name"], **options)


def _describe_hugging_face(network: Any) -> Iterator[dict[str, Any]]:
    if isinstance(network, TextEncoder):
        for inner in _describe_hugging_face(network.network):
            yield {**inner, "pooling": network.pooling}
        return
    name = type(network).__name__
    if getattr(sys.modules[HUGGING_FACE], name, None) is type(network):
        config = without_origin(network.config.to_dict())
        yield {"class": name, "config": {key: value for key, value in config.items() if key != "auto_map"}}


def _construct_hugging_face(config: dict[str, Any]) -> nn.Module:
    import transformers

    kind = getattr(transformers, str(config["class"]), None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ValueError(f"transformers has no network {config['class']!r}")
    values = without_origin(config["config"])
    network = kind(transformers.AutoConfig.for_model(values.pop("model_type"), **values))
    return TextEncoder(network, config["pooling"]) if "pooling" in config else network


_DESCRIBE: dict[str, Callable[[Any], Iterator[dict[str, Any]]]] = {
    "timm": _describe_timm,
    "torchvision": _describe_torchvision,
    HUGGING_FACE: _describe_hugging_face,
}
_CONSTRUCT: dict[str, Callable[[dict[str, Any]], nn.Module]] = {
    "timm": _construct_timm,
    "torchvision": _construct_torchvision,
    HUGGING_FACE: _construct_hugging_face,
}
