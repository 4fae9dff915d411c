"""State dicts of models and optimisers: full tensors for a file, sharded again when loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hetsngp.nn.spectral_cache import DIRECTION

# Running statistics of BatchNorm, which differ between processes within an epoch.
STATISTICS = ("running_mean", "running_var")
STATE_KEYS = ({"step", "exp_avg", "exp_avg_sq"}, {"momentum_buffer"})
"""Values that AdamW and SGD keep for each parameter."""


def full_tensors(value: Any) -> Any:
    """Replace the shards of fsdp in nested containers by full tensors; a collective call."""
    if isinstance(value, Tensor):
        return value.full_tensor() if hasattr(value, "full_tensor") else value
    if isinstance(value, dict):
        return {key: full_tensors(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(full_tensors(v) for v in value)
    return value


def shard_like(value: Tensor, model: Tensor) -> Tensor:
    """Shard a full tensor as ``model`` is sharded."""
    if not hasattr(model, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(model.device), model.device_mesh, model.placements)  # type: ignore[attr-defined]


def with_memory_format_of(value: Tensor, model: Tensor) -> Tensor:
    """Copy ``value`` in the memory format of ``model``, as fused operations on both need it."""
    return torch.empty_like(value, memory_format=_format_of(model)).copy_(value)


def _format_of(tensor: Tensor) -> torch.memory_format:
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last and not tensor.is_contiguous() else torch.contiguous_format


def load_model(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load a full state dict into ``model``, sharded or not."""
    own = model.state_dict()
    # A spectral norm that is cached now and was not then gets its direction from its vectors.
    state = {name: value for name, value in state.items() if name in own or not name.endswith(DIRECTION)}
    own = {name: value for name, value in own.items() if name in state or not name.endswith(DIRECTION)}
    unknown = sorted(state.keys() ^ own.keys())
    if unknown:
        raise ValueError(
            f"the checkpoint is of another model ({', '.join(unknown[:3])}{' …' if unknown[3:] else ''}): "
            "resume with the model the run began with, or give another folder"
        )
    for name, value in own.items():
        if state[name].is_floating_point() != value.is_floating_point():
            raise ValueError(f"{name} has type {state[name].dtype} in the checkpoint, not {value.dtype}")
    try:
        model.load_state_dict({name: shard_like(state[name], value) for name, value in own.items()})
    except RuntimeError as error:
        text = " ".join(str(error).split())[:300]
        raise ValueError(
            f"the checkpoint is of another model ({text}): resume with the model the run began with, or give "
            "another folder"
        ) from error


def _is_state_of(parameters: list[Tensor], index: Any, values: dict[str, Any]) -> bool:
    """Whether an optimiser could go on from these values of a parameter."""
    if type(index) is not int or not 0 <= index < len(parameters) or values.keys() not in STATE_KEYS:
        return False
    return all(
        value is None if not isinstance(value, Tensor) else value.shape in ((), parameters[index].shape)
        for value in values.values()
    )


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a full state dict into ``optimizer``, whose parameters may be sharded."""
    own, saved = optimizer.state_dict()["param_groups"], state["param_groups"]
    if [len(group["params"]) for group in own] != [len(group["params"]) for group in saved]:
        raise ValueError(
            "the checkpoint is of a run that trained other parameters: freeze those that were frozen then, "
            "or give another folder"
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in state["state"].items():
        if not _is_state_of(parameters, index, values):
            raise TypeError(f"the optimiser state of parameter {index!r:.20} is not what hetsngp writes")
    sharded = {
        index: {
            name: shard_like(with_memory_format_of(v, parameters[index]), parameters[index])
            if isinstance(v, Tensor) and v.shape == parameters[index].shape and v.dim() > 0
            else v
            for name, v in values.items()
        }
        for index, values in state["state"].items()
    }
    # Learning rates and weight decay are those of the present configuration.
    optimizer.load_state_dict({"state": sharded, "param_groups": own})
