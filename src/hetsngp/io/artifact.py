"""save() and load(): a folder with ``config.json`` and one safetensors file. Nothing is ever unpickled.

``config.json`` says how to build the model, or each member of an ensemble; member i has the tensors named
``members.i.<name>``. :mod:`hetsngp.io.storage` writes and reads the files, :mod:`hetsngp.io.saved_model` checks them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetsngp.io import storage
from hetsngp.io.saved_model import Saved, describe
from hetsngp.io.storage import ArtifactError
from hetsngp.models.classifier import Classifier
from hetsngp.models.ensemble import Ensemble
from hetsngp.nn.spectral_cache import DIRECTION

Networks = nn.Module | Sequence[nn.Module | None] | None
"""Backbones that are not ours, as :func:`load` takes them."""


def save(model: Classifier | Ensemble, path: str | os.PathLike[str]) -> None:
    """Write a model, or an ensemble with all its members, into the folder ``path``, atomically; what was
    saved there before is replaced.

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
    tensors: dict[str, Tensor] = {}
    for i, member in enumerate(members):
        _check_model(member, f" as member {i + 1} of an Ensemble")
        tensors |= {f"members.{i}.{name}": t for name, t in _tensors(member).items()}
    storage.write(Path(path), {"members": [describe(member) for member in members]}, tensors)


def load(
    path: str | os.PathLike[str], backbone: Networks = None, *, device: str | torch.device = "cpu"
) -> Classifier | Ensemble:
    """The model or the ensemble saved in ``path``, in eval mode.

    A backbone that is not ours is given as ``backbone``: a freshly constructed network of the same
    architecture; its weights are overwritten. For an ensemble it is copied for each member that needs it, or
    it is a list with a network for each member, None for those with a backbone of ours.
    """
    _check_networks(backbone)
    config, tensors = storage.read(Path(path))
    whole, alone = Saved(config, tensors, Path(path)), "members" not in config
    with whole.reading():
        parts = [whole] if alone else whole.members()
    _check_count(backbone, None if alone else len(parts))
    for_all = not alone and isinstance(backbone, nn.Module)
    networks, outlines = [], []
    for i, part in enumerate(parts):
        with part.reading():
            given = backbone[i] if isinstance(backbone, Sequence) else backbone
            networks.append(None if for_all and part.is_known else given)
            outlines.append(part.outline(networks[i]))
    with whole.reading():
        if not alone:
            Ensemble(outlines)  # refuses members that do not belong together
        models = [
            part.fill(part.build(_copy(network) if for_all else network))
            for part, network in zip(parts, networks, strict=True)
        ]
    loaded = models[0] if alone else Ensemble(models)
    return loaded.to(device).eval()


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


def _tensors(model: Classifier) -> dict[str, Tensor]:
    # Without what held bounds keep for training alone: a loaded model is not held.
    kept = {name: t for name, t in model.state_dict().items() if name.rpartition(".")[2] != DIRECTION}
    return {name: t.detach().cpu().contiguous().clone() for name, t in kept.items()}


def _check_networks(backbone: Any) -> None:
    several = isinstance(backbone, Sequence) and not isinstance(backbone, str)
    for network in backbone if several else [backbone]:
        if network is not None and not isinstance(network, nn.Module):
            raise TypeError(
                f"backbone must be a network, e.g. backbone=MyNetwork(), got {network!r}; "
                "for an ensemble also a list with a network or None for each member"
            )


def _check_count(backbone: Any, members: int | None) -> None:
    """A list fits an ensemble of ``members``; None: there is only one model."""
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


def _copy(network: nn.Module | None) -> nn.Module | None:
    try:
        return copy.deepcopy(network)
    except Exception as error:
        raise ArtifactError(
            f"backbone cannot be copied for each member: give a list with a network for each ({error})"
        ) from error
