"""States of models and optimisers, whole on the way to a file and shared out again on the way back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hetsngp.nn.spectral_cache import DIRECTION

# Of BatchNorm: each process has its own within an epoch.
STATISTICS = ("running_mean", "running_var")


def whole(value: Any) -> Any:
    """The nest with whole tensors in place of the shares of them that fsdp keeps; a call of all processes."""
    if isinstance(value, Tensor):
        return value.full_tensor() if hasattr(value, "full_tensor") else value
    if isinstance(value, dict):
        return {key: whole(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(whole(v) for v in value)
    return value


def share_like(value: Tensor, model: Tensor) -> Tensor:
    """A whole tensor in the form that ``model`` has."""
    if not hasattr(model, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(model.device), model.device_mesh, model.placements)  # type: ignore[attr-defined]


def laid_out_like(value: Tensor, model: Tensor) -> Tensor:
    """In the memory format of ``model``: operations on both together want the same."""
    return torch.empty_like(value, memory_format=_format_of(model)).copy_(value)


def _format_of(tensor: Tensor) -> torch.memory_format:
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last and not tensor.is_contiguous() else torch.contiguous_format


def load_model(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Give ``model`` a whole state, be it shared out or not."""
    own = model.state_dict()
    # A bound that is held now and was not then makes its direction from its vectors; else it has no use.
    state = {name: value for name, value in state.items() if name in own or not name.endswith(DIRECTION)}
    own = {name: value for name, value in own.items() if name in state or not name.endswith(DIRECTION)}
    unknown = sorted(state.keys() ^ own.keys())
    if unknown:
        raise ValueError(
            f"the checkpoint is of another model ({', '.join(unknown[:3])}{' …' if unknown[3:] else ''}): "
            "resume with the model the run began with, or give another folder"
        )
    model.load_state_dict({name: share_like(state[name], value) for name, value in own.items()})


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Give ``optimizer`` a whole state, be its parameters shared out or not."""
    own, saved = optimizer.state_dict()["param_groups"], state["param_groups"]
    if [len(group["params"]) for group in own] != [len(group["params"]) for group in saved]:
        raise ValueError(
            "the checkpoint is of a run that trained other parameters: freeze those that were frozen then, "
            "or give another folder"
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    shared = {
        index: {
            name: share_like(laid_out_like(v, parameters[index]), parameters[index])
            if isinstance(v, Tensor) and v.shape == parameters[index].shape and v.dim() > 0
            else v
            for name, v in values.items()
        }
        for index, values in state["state"].items()
    }
    # Rates and decay stay as the plan has them, which may be another one by now.
    optimizer.load_state_dict({"state": shared, "param_groups": own})
