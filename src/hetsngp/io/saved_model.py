"""One saved model, between the files and the Classifier: checked before anything is allocated."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetsngp.conversion.conversion import strip
from hetsngp.conversion.libraries import LIBRARIES, construct
from hetsngp.io.storage import CONFIG, ArtifactError
from hetsngp.models.classifier import Classifier
from hetsngp.models.methods import build
from hetsngp.nn.backbones import BACKBONES

_MEMBER = re.compile(r"members\.(0|[1-9][0-9]{0,5})\.(.+)")
# Sizes a method may have in its options without using them, whatever the weights are. Several inputs widen
# the first layer that many times, and the random numbers for it are drawn in memory.
_FINE, _FINE_MEMBERS = 2**14, 2**6
# Numbers among the options that make nothing larger.
_NO_SIZES = {"num_samples", "dataset_size", "batch_repetition"}


def describe(model: Classifier) -> dict[str, Any]:
    """How to build the model again: its entry in the config."""
    return {
        "model": {**model.config, "dataset_size": model.dataset_size},
        "calibration": model.calibration,
        "trained_since_fit": model._trained_since_fit,
    }


@dataclass
class Saved:
    """A model, or a whole ensemble, as it was found: its entry in the config and its tensors."""

    entry: Any
    tensors: dict[str, Tensor]
    folder: Path
    name: str = ""
    """Which of several, for messages."""

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Whatever a damaged config leads to in here is an error that says so."""
        try:
            yield
        except ArtifactError:
            raise
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            file = self.folder / CONFIG
            raise ArtifactError(f"{file} does not describe a model: {self.name}{error}") from error

    def members(self) -> list[Saved]:
        """The members of an ensemble; every tensor belongs to one of them."""
        entries = self.entry["members"]
        if not isinstance(entries, list) or not entries or "model" in self.entry:
            raise ValueError("members must be a list of at least one, and there is no model beside them")
        tensors: list[dict[str, Tensor]] = [{} for _ in entries]
        for name, tensor in self.tensors.items():
            match = _MEMBER.fullmatch(name)
            if match is None or int(match[1]) >= len(entries):
                raise self.misfit(f"unexpected [{name!r}] for {len(entries)} members")
            tensors[int(match[1])][match[2]] = tensor
        return [Saved(entry, tensors[i], self.folder, f"member {i + 1}: ") for i, entry in enumerate(entries)]

    @property
    def is_known(self) -> bool:
        """Whether we can construct its backbone."""
        return self.entry["model"]["backbone"]["name"] in (*BACKBONES, *LIBRARIES)

    def outline(self, network: nn.Module | None) -> Classifier:
        """The model on the meta device, which holds no data: a damaged config must not ask for a terabyte.

        It has the shapes of the saved tensors, or there is an error.
        """
        self._check_sizes()
        with torch.device("meta"):
            outline = self.build(None if network is None else without_data(network))
        self._check_shapes(outline)
        return outline

    def _check_sizes(self) -> None:
        """Refuse sizes and depths that no network with these weights has, before anything loops over them."""
        largest = max([len(self.tensors), *(size for t in self.tensors.values() for size in t.shape)])
        model = self.entry["model"]
        options = model["options"]
        if not isinstance(options, dict):
            raise TypeError(f"options is {options!r}")
        sizes = {"num_classes": model["num_classes"]}
        sizes |= {name: value for name, value in options.items() if name not in _NO_SIZES}
        sizes |= model["backbone"]["config"] if model["backbone"]["name"] in BACKBONES else {}
        for name, value in sizes.items():
            fine = _FINE_MEMBERS if name == "num_members" else _FINE
            if isinstance(value, int) and value > max(fine, largest):
                raise ValueError(f"{name} is {value}, far more than the saved weights have")

    def build(self, network: nn.Module | None = None) -> Classifier:
        """The model without its weights, on a ``network`` that was given for a backbone that is not ours."""
        saved = self.entry["model"]
        backbone = saved["backbone"]
        network = strip(self._construct(backbone) if network is None else network, backbone)
        model = build(saved["method"], network, saved["num_classes"], **saved["options"])
        model.dataset_size = saved["dataset_size"]
        model.config["backbone"] = backbone
        model.config["given"] = list(saved.get("given", saved["options"]))
        model.calibration = self.entry["calibration"]
        model._trained_since_fit = bool(self.entry["trained_since_fit"])
        return model

    def _construct(self, backbone: dict[str, Any]) -> nn.Module:
        if backbone["name"] in BACKBONES:
            return BACKBONES[backbone["name"]](**backbone["config"])
        if backbone["name"] in LIBRARIES:
            return construct(backbone)
        kind = backbone.get("class", "a network of your own")
        raise ArtifactError(
            f"{self.name or 'this model: '}its backbone is {kind!r}, which hetsngp cannot rebuild: "
            "pass a freshly constructed one, hetsngp.load(path, backbone=MyNetwork())"
        )

    def _check_shapes(self, outline: Classifier) -> None:
        """The file holds what the described network needs. Buffers that start empty take any shape."""
        expected = {name: tuple(t.shape) for name, t in outline.state_dict().items()}
        found = {name: tuple(t.shape) for name, t in self.tensors.items()}
        missing = [name for name in expected if name not in found]
        unexpected = [name for name in found if name not in expected]
        other = [
            f"{name} {found[name]} for {shape}"
            for name, shape in expected.items()
            if name in found and 0 not in shape and found[name] != shape
        ]
        if missing or unexpected or other:
            raise self.misfit(f"missing {missing[:3]}, unexpected {unexpected[:3]}, wrong shape {other[:3]}")

    def fill(self, model: Classifier) -> Classifier:
        """Copy the saved tensors in; the model takes their precision."""
        head = (t.dtype for name, t in self.tensors.items() if name.startswith("head."))
        floating = [dtype for dtype in head if dtype.is_floating_point]
        if floating and all(dtype == torch.float64 for dtype in floating):
            model.double()
        for name, own in (*model.named_parameters(), *model.named_buffers()):
            saved = self.tensors.get(name, own)
            if saved.dtype != own.dtype and saved.is_floating_point() and own.is_floating_point():
                own.data = own.data.to(saved.dtype)
        try:
            missing, unexpected = model.load_state_dict(self.tensors, strict=False)
        except RuntimeError as error:
            raise self.misfit(str(error)) from error
        if missing or unexpected:
            raise self.misfit(f"missing {missing[:3]}, unexpected {unexpected[:3]}")
        return model

    def misfit(self, what: str) -> ArtifactError:
        """The error for tensors of another network."""
        hint = "is backbone= the same architecture?"
        if self.name:
            hint += " For members of several architectures give a list, backbone=[MyNetwork(), Another()]"
        return ArtifactError(
            f"the weights in {self.folder} do not fit the network they are loaded into: "
            f"{self.name}{what}; {hint}"
        )


def without_data(network: nn.Module) -> nn.Module:
    """A copy on the meta device; the network itself where it cannot be copied."""
    try:
        memo: dict[int, Any] = {id(b): b.to("meta") for b in network.buffers()}
        for p in network.parameters():
            memo[id(p)] = nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
        return copy.deepcopy(network, memo)
    except Exception:
        return network
