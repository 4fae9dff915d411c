"""Devices, nodes and precision of a training. Lightning Fabric finds the devices and starts the processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hetsngp.validation import check_choice, check_positive

STRATEGIES = ("auto", "ddp", "fsdp")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
# Under fsdp a block of the backbone with fewer parameters is not sharded by itself: one message less.
SHARD_PARAMETERS = 1_000_000


@dataclass(frozen=True)
class Hardware:
    """Arguments of Fabric. Under torchrun and SLURM "auto" and None mean the processes that those started."""

    devices: int | str = "auto"
    """Devices of each node: a number, or "auto": all GPUs, or one process on a CPU."""
    nodes: int | None = None
    strategy: str = "auto"
    """"ddp": a copy of the model on each device; "fsdp": a shard of it; "auto": ddp for several devices."""
    accelerator: str = "auto"
    """"cpu", "gpu", or any that Fabric knows."""
    precision: str = "32-true"
    """"bf16-mixed" and "16-mixed" run the backbone by autocast; head and posterior stay in float32."""
    channels_last: bool = False
    """Images as (B, H, W, C) in memory, which is faster for convolutions on a GPU."""
    compile: bool = False
    """``torch.compile`` the backbone; on a GPU the loss of labels becomes a CUDA graph too."""

    def __post_init__(self) -> None:
        check_choice("strategy", self.strategy, STRATEGIES)
        check_choice("precision", self.precision, PRECISIONS)
        if self.devices != "auto":
            check_positive("devices", self.devices, integer=True)
        if self.nodes is not None:
            check_positive("nodes", self.nodes, integer=True)

    def started(self, environment: Mapping[str, str] = os.environ) -> tuple[int | str, int]:
        """Devices of a node and number of nodes: as given, or as torchrun or SLURM started processes.

        >>> Hardware().started({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"})
        (4, 2)
        >>> Hardware().started({"SLURM_NTASKS": "16", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "train"})
        (8, 2)
        """
        local = int(environment.get("LOCAL_WORLD_SIZE", 0))
        nodes = int(environment.get("WORLD_SIZE", 0)) // local if local else 0
        # In an interactive allocation ("bash") srun has started nothing, and Fabric starts the processes.
        if not local and environment.get("SLURM_JOB_NAME") not in (None, "bash", "interactive"):
            nodes = int(environment.get("SLURM_NNODES", 0))
            local = int(environment.get("SLURM_NTASKS", 0)) // nodes if nodes else 0
        devices = local or self.devices if self.devices == "auto" else self.devices
        return devices, nodes or 1 if self.nodes is None else self.nodes

    def launch(self) -> Any:
        """Start the processes; returns the Fabric of this one."""
        try:
            from lightning.fabric import Fabric
        except ImportError:
            raise ImportError("the training engine needs lightning: pip install 'hetsngp[train]'") from None
        devices, nodes = self.started()
        strategy: Any = self.strategy
        if strategy == "auto" and devices != "auto" and int(devices) * nodes > 1:
            strategy = "ddp"
        if strategy == "fsdp":
            from lightning.fabric.strategies import ModelParallelStrategy

            if devices == "auto":
                devices = 1 if self.accelerator == "cpu" else max(1, torch.cuda.device_count())
            # By default Fabric shards tensors within a node, and splits data only between nodes.
            processes = int(devices) * nodes
            strategy = ModelParallelStrategy(_shard, data_parallel_size=processes, tensor_parallel_size=1)
        fabric = Fabric(
            accelerator=self.accelerator,
            devices=devices,
            num_nodes=nodes,
            strategy=strategy,
            precision=self.precision,
        )
        fabric.launch()
        return fabric


def _shard(module: nn.Module, mesh: Any) -> nn.Module:
    """Shard a module: blocks of the backbone one by one, everything else, the head included, together."""
    from torch.distributed.fsdp import fully_shard

    mesh = mesh["data_parallel"]
    for block in _blocks(module.get_submodule("model.backbone")):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Smallest submodules with at least ``SHARD_PARAMETERS`` that are called as modules, innermost first."""
    found: list[nn.Module] = []
    for child in module.children():
        inner = _blocks(child)
        found += inner
        callable_part = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        if not inner and callable_part and sum(p.numel() for p in child.parameters()) >= SHARD_PARAMETERS:
            found.append(child)
    return found
