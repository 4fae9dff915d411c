"""The crops of several processes on one set: each process draws its own, and the same ones again."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract import toy
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

pytest.importorskip("lightning", reason="pip install 'hetsngp[train]'")

from lightning.fabric.utilities.data import _update_dataloader
from lightning.fabric.wrappers import _FabricDataLoader

from hetsngp.data.images.decoding import loader_from_disk
from hetsngp.training.checkpointing.randomness import seeded_rng
from hetsngp.training.loaders import ResumableLoader

COUNT, WORLD = 8, 2


class Draws(Dataset[tuple[Tensor, int]]):
    """An image is its number, and what its crop would be."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        drawn = float(torch.rand(())), np.random.rand(), random.random()  # noqa: NPY002
        return torch.tensor([index, *drawn]), index % 3


def fabric(rank: int, world: int = WORLD) -> Any:
    """One of several processes, with what ResumableLoader needs; loaders are made by Fabric's functions."""

    def setup(loader: Any, *, move_to_device: bool) -> Any:
        assert not move_to_device
        sampler = DistributedSampler(loader.dataset, world, rank, shuffle=True)
        return _FabricDataLoader(_update_dataloader(loader, sampler))

    device = torch.device("cpu")
    return SimpleNamespace(device=device, global_rank=rank, world_size=world, setup_dataloaders=setup)


def loader_of(rank: int, world: int = WORLD, seed: int = 0, workers: int = 1) -> ResumableLoader:
    loader = loader_from_disk(Draws(), 2, True, workers, seed)
    return ResumableLoader(loader, toy.build("deterministic"), fabric(rank, world), seed=seed)


def drawn(rest: Any) -> tuple[list[int], Tensor]:
    """Numbers of the images in their order, and (n, 3) of what was drawn for them."""
    x = torch.cat([x for x, _ in rest])
    return x[:, 0].long().tolist(), x[:, 1:]


def base_seed(process: ResumableLoader, epoch: int, before: Any = None) -> int:
    """From which the workers of an epoch are seeded; no worker has to be started for it."""
    process.begin(epoch, before=before)
    state: Any = process.rng_at_epoch_start["generators"][0]
    generator = torch.Generator()
    generator.set_state(state)
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def test_workers_of_two_processes_draw_apart() -> None:
    """As Engine.train has them: with global random numbers of their own, and copies of one loader."""
    found = []
    for rank in range(WORLD):
        with seeded_rng(rank, torch.device("cpu")):
            found.append(drawn(loader_of(rank).begin(1)))
    assert sorted(found[0][0] + found[1][0]) == list(range(COUNT))
    assert bool((found[0][1] != found[1][1]).all())
    with seeded_rng(1, torch.device("cpu")):
        resumed = loader_of(1)
        later = drawn(resumed.begin(1, 1, resumed.randomness()))
    assert later[0] == found[1][0][2:]
    assert torch.equal(later[1], found[1][1][2:])


def test_seeds_of_workers_differ_by_process_epoch_and_seed() -> None:
    seeds = {}
    for seed in (0, 1):
        for rank in range(3):
            process = loader_of(rank, 3, seed, workers=0)
            seeds |= {(seed, rank, epoch): base_seed(process, epoch) for epoch in (1, 2, 3)}
    assert len(set(seeds.values())) == 18
    # As a resumed run has it: all processes get what the first one had in its checkpoint.
    first = loader_of(0, 3, workers=0)
    base_seed(first, 2)
    again = loader_of(2, 3, workers=0)
    assert base_seed(again, 2, first.rng_at_epoch_start) == seeds[0, 2, 2]
    assert base_seed(again, 3) == seeds[0, 2, 3]


def test_one_process_draws_as_ever() -> None:
    alone, plain = loader_of(0, 1, 5), loader_from_disk(Draws(), 2, True, 1, 5)
    assert isinstance(plain, DataLoader)
    numbers, values = drawn(alone.begin(1))
    want = drawn(plain)
    assert numbers == want[0]
    assert torch.equal(values, want[1])
