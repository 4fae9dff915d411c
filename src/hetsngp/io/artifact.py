"""save() and load(): a folder with ``config.json`` and one safetensors file. Nothing is unpickled.

``config.json`` says how to build the model, or each member of an ensemble; member i has the tensors named
``members.i.<name>``. :mod:`hetsngp.io.storage` reads and writes the files; :class:`SavedModel` checks that
their content is a model before any memory is allocated for it, and :mod:`hetsngp.io.construction` allocates
no more than the file has.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetsngp.conversion.conversion import strip_classifier
from hetsngp.conversion.libraries import LIBRARIES, construct
from hetsngp.conversion.library_configs import check_numbers
from hetsngp.io import storage
from hetsngp.io.construction import allocate, bounded_outline, check_unsaved, without_weights
from hetsngp.io.storage import CONFIG, ArtifactError
from hetsngp.limits import NUM_SAMPLES, is_out_of_memory
from hetsngp.models.classifier import Classifier
from hetsngp.models.ensemble import Ensemble
from hetsngp.models.methods import build
from hetsngp.nn.backbones import BACKBONES
from hetsngp.nn.spectral_cache import DIRECTION

_MEMBER = re.compile(r"members\.(0|[1-9][0-9]{0,5})\.(.+)")
# Largest sizes that options may have without a tensor of that size: a method may not use them. Several inputs
# widen the first layer that many times, and the random numbers for it are drawn in memory.
_MAX_UNUSED_SIZE, _MAX_UNUSED_MEMBERS = 2**14, 2**6
# Options that are numbers but no sizes.
_NO_SIZES = {"num_samples", "dataset_size"}
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Buffers of a backbone may hold infinities, as masks of attention do; these may not.
_FINITE_BUFFERS = ("running_mean", "running_var", "spectral_bound", "spectral_sigma", "spectral_v")
_ENTRY = {"model": dict, "calibration": dict | None, "trained_since_fit": bool}
_MODEL = {
    "method": str,
    "num_classes": int,
    "options": dict,
    "backbone": dict,
    "dataset_size": float | int | None,
    "given": list | None,
}
_EXTRACTOR = {
    "classifier": str | None,
    "num_features": int,
    "num_outputs": int,
    "reads": str,
    "frozen": bool,
}
"""Types of the values in a config."""

Networks = nn.Module | Sequence[nn.Module | None] | None
"""Backbones of the user, as :func:`load` takes them."""


def save(model: Classifier | Ensemble, path: str | os.PathLike[str]) -> None:
    """Write a model, or an ensemble with all its members, into the folder ``path``, atomically; a model that
    was saved there before is replaced. Readers see the old model or the new one.

    A folder has one writer: another process that saves there is waited for, up to 30 s. Weights that are not
    finite are refused.

    >>> import hetsngp, tempfile
    >>> from hetsngp.nn.backbones import ResidualMLP
    >>> models = [hetsngp.build("deterministic", ResidualMLP(2, width=8, depth=1), 2) for _ in range(3)]
    >>> folder = tempfile.mkdtemp()
    >>> hetsngp.save(models[0], folder)
    >>> hetsngp.load(folder).num_classes
    2
    >>> hetsngp.save(hetsngp.Ensemble(models), folder)
    >>> len(hetsngp.load(folder).members)
    3
    """
    if not isinstance(model, Ensemble):
        _check_model(model)
        storage.write(Path(path), describe(model), _tensors(model))
        return
    members = model.members
    for i, member in enumerate(members):
        _check_model(member, f" as member {i + 1} of an Ensemble")
    tensors: dict[str, Tensor] = {}
    for i, member in enumerate(members):
        tensors |= {f"members.{i}.{name}": t for name, t in _tensors(member, f"member {i + 1}: ").items()}
    storage.write(Path(path), {"members": [describe(member) for member in members]}, tensors)


def load(
    path: str | os.PathLike[str],
    backbone: Networks = None,
    *,
    device: str | torch.device = "cpu",
    allow_download: bool = False,
) -> Classifier | Ensemble:
    """Load the model or the ensemble saved in ``path``, in eval mode.

    A backbone that this package cannot construct is given as ``backbone``: a freshly constructed network of
    the same architecture; its weights are overwritten. For an ensemble it is copied for each member that
    needs it, or it is a list with a network for each member, None for those that need none.

    A network of timm, torchvision or transformers is constructed from its config, which may come from
    elsewhere: what would fetch weights or code, or open another file, is refused, unless ``allow_download``
    is True and the libraries may do what the config says.
    """
    _check_networks(backbone)
    config, tensors = storage.read_mapped(Path(path))
    return _load(config, tensors, Path(path), backbone, allow_download).to(device).eval()


def _load(
    config: dict[str, Any], tensors: dict[str, Tensor], folder: Path, backbone: Networks, allow_download: bool
) -> Classifier | Ensemble:
    saved, is_ensemble = SavedModel(config, tensors, folder, allow_download), "members" in config
    with saved.errors_named():
        members = saved.members() if is_ensemble else [saved]
    _check_count(backbone, len(members) if is_ensemble else None)
    share_network = is_ensemble and isinstance(backbone, nn.Module)
    networks, outlines = [], []
    for i, member in enumerate(members):
        with member.errors_named():
            given = backbone[i] if isinstance(backbone, Sequence) else backbone
            networks.append(None if share_network and member.is_known else given)
            outlines.append(member.outline(networks[i]))
    with saved.errors_named():
        if is_ensemble:
            Ensemble(outlines)  # refuses members that do not belong together
        models = [
            member.complete(_copy(network) if share_network else network)
            for member, network in zip(members, networks, strict=True)
        ]
        return Ensemble(models) if is_ensemble else models[0]


def _check_model(model: Any, where: str = "") -> None:
    if where and isinstance(model, Ensemble):
        raise TypeError(
            f"save takes no Ensemble{where}: put all models into one list, Ensemble([*a.members, *b.members])"
        )
    if not isinstance(model, Classifier) or not model.config:
        raise TypeError(
            f"save takes a model made by hetsngp.build, got {type(model).__name__}{where}; an Ensemble "
            "of such models is saved as one"
        )
    check_entry(describe(model))


def _check_networks(backbone: Any) -> None:
    several = isinstance(backbone, Sequence) and not isinstance(backbone, str)
    for network in backbone if several else [backbone]:
        if network is not None and not isinstance(network, nn.Module):
            raise TypeError(
                f"backbone must be a network, e.g. backbone=MyNetwork(), got {network!r}; "
                "for an ensemble also a list with a network or None for each member"
            )


def _check_count(backbone: Any, members: int | None) -> None:
    """Check that a list of networks fits an ensemble of ``members``; None: there is only one model."""
    if backbone is None or isinstance(backbone, nn.Module):
        return
    if members is None:
        raise TypeError("backbone is a list, but here one model was saved: give backbone=MyNetwork()")
    if len(backbone) != members:
        raise ValueError(
            f"backbone is a list of {len(backbone)} for an ensemble of {members}: give a network for each "
            "member, None where the backbone is ours, or one network by itself, which is copied"
        )
    tensors = [id(t) for net in backbone if net is not None for t in (*net.parameters(), *net.buffers())]
    if len(set(tensors)) < len(tensors):
        raise ValueError(
            "backbone holds weights twice, which two members would share: construct a network for each, "
            "[MyNetwork() for _ in range(n)], or give one by itself, which is copied"
        )


def _tensors(model: Classifier, name: str = "") -> dict[str, Tensor]:
    # Without buffers of the spectral cache, which only training uses.
    state = {key: t for key, t in model.state_dict().items() if key.rpartition(".")[2] != DIRECTION}
    tensors = {key: t.detach().cpu().contiguous().clone() for key, t in state.items()}
    problem = _wrong_type(tensors, tensors) or _not_finite(tensors, model)
    if problem:
        raise ValueError(f"the model cannot be saved: {name}{problem}")
    return tensors


def _possible_tensors(outline: Classifier) -> dict[str, Tensor]:
    """Tensors that a file of a model may have: also those that are saved only where they are fitted."""
    score = outline.head.ood_score
    fitted = {} if score is None else {f"head.ood.{name}": getattr(score, name) for name in score.names}
    return {**fitted, **outline.state_dict()}


def _wrong_type(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """Say which tensor has not the type that ``expected`` has; any precision of a real number is right."""
    for name, tensor in tensors.items():
        like = expected[name].dtype
        if tensor.dtype in _FLOATS if like.is_floating_point else tensor.dtype == like:
            continue
        kind = "a real number of 16 bits or more" if like.is_floating_point else str(like)
        return f"{name} has dtype {tensor.dtype}, but must be {kind}"
    return None


def _not_finite(tensors: Mapping[str, Tensor], model: nn.Module) -> str | None:
    """Say which of the model's tensors has values that no training ends with."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in tensors.items():
        if tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        extremes = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).aminmax()
        low, high = map(float, extremes)  # both are NaN where a value is
        may_be_infinite = name not in parameters and name.startswith("backbone.")
        may_be_infinite = may_be_infinite and name.rpartition(".")[2] not in _FINITE_BUFFERS
        if math.isnan(low) or not (may_be_infinite or (math.isfinite(low) and math.isfinite(high))):
            values = "NaN" if math.isnan(low) else "infinite values"
            return f"{name} has {values}: did the training diverge? Train again with a lower learning rate"
    return None


def describe(model: Classifier) -> dict[str, Any]:
    """Entry of the model in the config: how to build it again."""
    return {
        "model": {**model.config, "dataset_size": model.dataset_size},
        "calibration": model.calibration,
        "trained_since_fit": model._trained_since_fit,
    }


def check_entry(entry: Any) -> None:
    """Check the types of an entry of the config, and what neither ``build`` nor a shape bounds."""
    model = _typed(entry, _ENTRY, "the entry of the model")["model"]
    options, backbone = _typed(model, _MODEL, "model")["options"], model["backbone"]
    if not all(isinstance(name, str) for name in model.get("given") or ()):
        raise TypeError("given must be a list of names")
    if not isinstance(options.get("sample_beta", False), bool):
        raise TypeError(f"sample_beta is {options['sample_beta']!r:.50}, but must be true or false")
    if isinstance(options.get("num_samples"), int):
        NUM_SAMPLES.check(options["num_samples"], "num_samples")
    if "extractor" in backbone:
        extractor = _typed(backbone["extractor"], _EXTRACTOR, "extractor")
        reads, classifier = extractor["reads"], extractor["classifier"]
        if reads not in (("output",) if classifier is None else ("output", "input")):
            raise ValueError(f"reads is {reads!r:.50} where classifier is {classifier!r:.50}")


def _typed(values: Any, types: dict[str, Any], where: str) -> dict[str, Any]:
    """``values``, if it is a dict with these types; those that may be None may be missing."""
    if not isinstance(values, dict):
        raise TypeError(f"{where} is {values!r:.50}")
    for name, kind in types.items():
        value = values.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise TypeError(f"{name} is {value!r:.50}" if name in values else f"{name} is missing")
    return values


def _copy(network: nn.Module | None) -> nn.Module | None:
    try:
        return copy.deepcopy(network)
    except Exception as error:
        raise ArtifactError(
            f"backbone cannot be copied for each member: give a list with a network for each ({error})"
        ) from error


@dataclass
class SavedModel:
    """Saved content of a model, or of an ensemble: its entry in the config and its tensors."""

    entry: Any
    tensors: dict[str, Tensor]
    folder: Path
    allow_download: bool = False
    name: str = ""
    """Name of the member, for messages."""

    @contextlib.contextmanager
    def errors_named(self) -> Iterator[None]:
        """Context in which errors that a damaged config leads to become an :class:`ArtifactError`."""
        try:
            yield
        except (ArtifactError, ImportError, OSError):
            raise
        except Exception as error:  # a config can lead to any, inside of torch
            if is_out_of_memory(error):
                raise MemoryError(f"there is not enough memory for the model in {self.folder}") from error
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            text = " ".join(f"{self.folder / CONFIG} does not describe a model: {self.name}{reason}".split())
            raise ArtifactError(text) from error

    def members(self) -> list[SavedModel]:
        """Split an ensemble into its members; every tensor belongs to one of them."""
        entries = self.entry["members"]
        if not isinstance(entries, list) or not entries or "model" in self.entry:
            raise ValueError("members must be a list of at least one, and there is no model beside them")
        tensors: list[dict[str, Tensor]] = [{} for _ in entries]
        for name, tensor in self.tensors.items():
            match = _MEMBER.fullmatch(name)
            if match is None or int(match[1]) >= len(entries):
                raise self.mismatch(f"unexpected [{name!r}] for {len(entries)} members")
            tensors[int(match[1])][match[2]] = tensor
        return [
            SavedModel(entry, tensors[i], self.folder, self.allow_download, f"member {i + 1}: ")
            for i, entry in enumerate(entries)
        ]

    @property
    def is_known(self) -> bool:
        """Whether the backbone can be constructed from the config."""
        return self.entry["model"]["backbone"]["name"] in (*BACKBONES, *LIBRARIES)

    def outline(self, network: nn.Module | None) -> Classifier:
        """Build the model on the meta device, without data: a damaged config must not ask for a terabyte.

        Its shapes and types are those of the saved tensors, whose values are finite; otherwise an error is
        raised.
        """
        check_entry(self.entry)
        self._check_sizes()
        with bounded_outline(self.tensors) if network is None else torch.device("meta"):
            outline = self.build(None if network is None else _on_meta_device(network))
        self._check_shapes(outline)
        if network is None:
            check_unsaved(outline, self.tensors)
        problem = _wrong_type(self.tensors, _possible_tensors(outline)) or _not_finite(self.tensors, outline)
        if problem:
            raise ArtifactError(f"the weights in {self.folder} are not of a model: {self.name}{problem}")
        return outline

    def _check_sizes(self) -> None:
        """Refuse sizes and depths that no network with these weights has, before anything loops over them."""
        shapes = [t.shape for t in self.tensors.values() if t.numel()]
        largest = max([len(self.tensors), *(size for shape in shapes for size in shape)])
        model, backbone = self.entry["model"], self.entry["model"]["backbone"]
        if backbone["name"] in LIBRARIES:
            check_numbers(backbone["name"], backbone["config"], largest)
        check_numbers("", backbone.get("extractor"), largest)
        sizes = {"num_classes": model["num_classes"]}
        sizes |= {name: value for name, value in model["options"].items() if name not in _NO_SIZES}
        sizes |= backbone["config"] if backbone["name"] in BACKBONES else {}
        for name, value in sizes.items():
            unused = _MAX_UNUSED_MEMBERS if name == "num_members" else _MAX_UNUSED_SIZE
            if isinstance(value, int) and value > max(unused, largest):
                raise ValueError(f"{name} is {value}, far more than the saved weights have")

    def build(self, network: nn.Module | None = None) -> Classifier:
        """Build the model without its weights, on ``network`` if that is given."""
        saved = self.entry["model"]
        backbone = saved["backbone"]
        network = strip_classifier(self._construct(backbone) if network is None else network, backbone)
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
            return construct(backbone, allow_download=self.allow_download)
        kind = backbone.get("class", "a network of your own")
        raise ArtifactError(
            f"{self.name or 'this model: '}its backbone is {kind!r}, which hetsngp cannot rebuild: "
            "pass a freshly constructed one, hetsngp.load(path, backbone=MyNetwork())"
        )

    def _check_shapes(self, outline: Classifier) -> None:
        """Check the names and shapes of the tensors. Buffers that start empty take any shape; those of an
        OOD score are in the file only where it was fitted.
        """
        expected = {name: tuple(t.shape) for name, t in _possible_tensors(outline).items()}
        found = {name: tuple(t.shape) for name, t in self.tensors.items()}
        missing = [name for name in outline.state_dict() if name not in found]
        unexpected = [name for name in found if name not in expected]
        other = [
            f"{name} {found[name]} for {shape}"
            for name, shape in expected.items()
            if name in found and 0 not in shape and found[name] != shape
        ]
        if missing or unexpected or other:
            raise self.mismatch(
                f"missing {missing[:3]}, unexpected {unexpected[:3]}, wrong shape {other[:3]}"
            )

    def complete(self, network: nn.Module | None) -> Classifier:
        """Build the model with its weights, on ``network`` if that is given."""
        if network is not None:
            return self.fill(self.build(network))
        model = None
        # A constructor that computes with its weights cannot do without: it takes the same memory, and time.
        try:
            with without_weights():
                model = self.build()
        except Exception as error:
            if is_out_of_memory(error):
                raise
        if model is None or not allocate(model, self.tensors):
            model = self.build()
        return self.fill(model)

    def fill(self, model: Classifier) -> Classifier:
        """Copy the saved tensors into ``model``, which takes their precision."""
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
            raise self.mismatch(str(error)) from error
        if missing or unexpected:
            raise self.mismatch(f"missing {missing[:3]}, unexpected {unexpected[:3]}")
        return model

    def mismatch(self, what: str) -> ArtifactError:
        """Make the error for tensors of another network."""
        hint = "is backbone= the same architecture?"
        if self.name:
            hint += " For members of several architectures give a list, backbone=[MyNetwork(), Another()]"
        return ArtifactError(
            f"the weights in {self.folder} do not fit the network they are loaded into: "
            f"{self.name}{what}; {hint}"
        )


def _on_meta_device(network: nn.Module) -> nn.Module:
    """Copy of the network on the meta device; the network itself where it cannot be copied."""
    try:
        memo: dict[int, Any] = {id(b): b.to("meta") for b in network.buffers()}
        for p in network.parameters():
            memo[id(p)] = nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
        return copy.deepcopy(network, memo)
    except Exception:
        return network
