"""Batches of one process: an epoch at a time, from any batch on; and loaders sharded over processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler

from hetsngp.data.shards.streams import ShardLoader
from hetsngp.models.classifier import Classifier
from hetsngp.training.checkpointing.randomness import loader_generators, rng_state, set_rng_state
from hetsngp.validation import (
    check_batch,
    check_inputs,
    check_multi_hot,
    check_targets,
    check_weight,
    is_device_loader,
)


class ResumableLoader:
    """Batches of ``loader`` for this process of a Fabric, in the order of the epoch.

    A :class:`~hetsngp.data.images.device_loader.DeviceLoader` moves to the device, starts at any batch at no
    cost, and its batches are split over processes. A DataLoader gets Fabric's sampler where there are several
    processes; a :class:`~hetsngp.data.shards.streams.ShardLoader`, over tar files, splits its images itself.
    To start in the middle of an epoch, both load the batches before it again, from the random numbers that
    the epoch began with, and drop them. Any other iterable is for one process. ``set_epoch`` is called
    where a loader has it.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        model: Classifier,
        fabric: Any,
        *,
        channels_last: bool = False,
        seed: int = 0,
    ) -> None:
        self.device, self.model = fabric.device, model
        self.seed, self.rank, self.world_size = seed, fabric.global_rank, fabric.world_size
        self.batch_size: int | None = getattr(loader, "batch_size", None)
        """Examples of a batch in each process; of a DeviceLoader, in all of them."""
        self.is_device_loader = is_device_loader(loader)
        if self.is_device_loader:
            data: Any = loader.dataset  # type: ignore[attr-defined]
            other = data.targets is not None and data.num_classes != model.num_classes
            if data.num_classes > model.num_classes or other:
                raise ValueError(
                    f"the data have {data.num_classes} classes, but this model has num_classes="
                    f"{model.num_classes}: build it with num_classes={data.num_classes}"
                )
            rest = len(data) % loader.batch_size  # type: ignore[attr-defined]
            if not loader.drop_last and rest % fabric.world_size:  # type: ignore[attr-defined]
                raise ValueError(
                    f"the last batch has {rest} examples, which {fabric.world_size} processes cannot share "
                    "evenly: DeviceLoader(..., drop_last=True)"
                )
            loader = loader.to(fabric.device, channels_last)  # type: ignore[attr-defined]
            loader = loader.shard(fabric.global_rank, fabric.world_size)  # type: ignore[attr-defined]
        elif isinstance(loader, ShardLoader):
            if fabric.world_size > 1 and not loader.stream.train:
                raise ValueError(
                    f"{fabric.world_size} processes cannot train on a loader for evaluation, whose parts "
                    "differ in size: images.loader(..., train=True)"
                )
            loader = loader.shard(fabric.global_rank, fabric.world_size)
        elif isinstance(loader, DataLoader) and fabric.world_size > 1:
            _check_shareable(loader)
            loader = fabric.setup_dataloaders(loader, move_to_device=False)
            loader.sampler.seed = seed  # type: ignore[attr-defined]
        elif fabric.world_size > 1:
            raise TypeError(
                f"{fabric.world_size} processes cannot share a {type(loader).__name__}: give a DataLoader, "
                "or hetsngp.data.images.device_loader.DeviceLoader"
            )
        elif isinstance(loader, Iterator):
            raise TypeError(
                f"loader is a {type(loader).__name__}, which is used up after an epoch: give one that starts "
                "again, e.g. a DataLoader or a list of batches"
            )
        self.loader: Any = loader
        self.rng_at_epoch_start: dict[str, Any] = {}
        """States of the random number generators when the epoch began."""

    def randomness(self) -> dict[str, Any]:
        """States of the random number generators now."""
        generators = [generator.get_state() for generator in loader_generators(self.loader)]
        return {"rng": rng_state(self.device), "generators": generators}

    def begin(self, epoch: int, skip: int = 0, before: dict[str, Any] | None = None) -> RemainingBatches:
        """Begin epoch ``epoch`` (from 1) after its first ``skip`` batches; ``before``: its random states."""
        if before is not None:
            set_rng_state(before["rng"], self.device)
            generators = loader_generators(self.loader)
            if len(generators) != len(before["generators"]):
                raise ValueError(
                    f"the run began with {len(before['generators'])} generators in its loader, which now has "
                    f"{len(generators)}: resume with the loader it began with"
                )
            for generator, state in zip(generators, before["generators"], strict=True):
                generator.set_state(state)
        self._seed_process(epoch)
        self.rng_at_epoch_start = self.randomness()
        if self.is_device_loader:
            self.loader.set_epoch(epoch - 1)
            self.loader.start_at(skip)
            return RemainingBatches(self.loader, iter(self.loader))  # its data were checked when it was made
        if hasattr(self.loader, "_num_iter_calls"):
            # Fabric tells its sampler the epoch by counting iterations, which a resumed run has not all made.
            self.loader._num_iter_calls = epoch - 1
        # Persistent workers are seeded once, at the first epoch, which is another one in a resumed run.
        inner = getattr(self.loader, "_dataloader", self.loader)
        if getattr(inner, "_iterator", None) is not None:
            inner._iterator = None
        if hasattr(inner, "set_epoch"):  # ShardLoader's order and crops follow from it
            inner.set_epoch(epoch - 1)
        batches = iter(self.loader)
        if sum(1 for _ in islice(batches, skip)) < skip:
            raise ValueError(
                f"the run stopped after {skip} batches of epoch {epoch}, but the loader now has fewer: "
                "resume with the data it began with"
            )
        return RemainingBatches(self.loader, self._checked(batches))

    def _seed_process(self, epoch: int) -> None:
        """Seed the loader's generator by process: otherwise the workers of all would draw the same crops."""
        inner = getattr(self.loader, "_dataloader", self.loader)
        if (
            self.world_size == 1 or self.is_device_loader or isinstance(inner, ShardLoader)
        ):  # crops are drawn by position
            return
        generator = getattr(inner, "generator", None)
        if isinstance(generator, torch.Generator):
            state = np.random.SeedSequence((self.seed, self.rank, epoch)).generate_state(1, np.uint64)[0]
            generator.manual_seed(int(state >> np.uint64(1)))

    def _checked(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Check batches before they go to the device, where reading values would make the host wait."""
        head = self.model.head
        for batch in batches:
            x, y, weight = check_batch(batch, "loader")
            check_inputs(x)
            check = check_multi_hot if head.sigmoid else check_targets
            check(y, self.model.num_classes, len(y))
            if weight is not None:
                check_weight(weight, len(y))
            yield batch


class RemainingBatches:
    """Rest of an epoch; its length is that of the whole epoch."""

    def __init__(self, loader: Any, batches: Iterator[Any]) -> None:
        self.loader, self.batches = loader, batches

    def __iter__(self) -> Iterator[Any]:
        return self.batches

    def __len__(self) -> int:
        return len(self.loader)


def num_examples(loader: Any) -> int | None:
    """Number of examples of all processes, where it is known."""
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        return None


def _check_shareable(loader: DataLoader[Any]) -> None:
    """Refuse custom samplers: processes draw different random numbers, so each would have another epoch."""
    if not isinstance(loader.sampler, RandomSampler | SequentialSampler) or num_examples(loader) is None:
        raise TypeError(
            f"several processes cannot share a DataLoader with a {type(loader.sampler).__name__} over a "
            f"{type(loader.dataset).__name__}: use shuffle=True, with torch.utils.data.Subset for a part of "
            "the data, over a dataset with len()"
        )


def shard_loader(loader: Any, fabric: Any) -> Any:
    """Part of the data for this process, each example in exactly one process, for sums over the data."""
    rank, world = fabric.global_rank, fabric.world_size
    count = num_examples(loader)
    if (
        count is not None and count < world
    ):  # raised in all processes: one alone would leave the others waiting
        raise ValueError(f"{count} examples cannot be shared by {world} processes: use fewer")
    if is_device_loader(loader):
        loader = loader.to(fabric.device).shard(rank, world)
    elif isinstance(loader, ShardLoader):
        loader = loader.shard(rank, world)
    elif world > 1:
        loader = _strided(loader, rank, world)
    return loader


def _strided(loader: Any, rank: int, world: int) -> DataLoader[Any]:
    """Every ``world``-th example. Fabric's sampler repeats some to make parts equal: they'd count twice."""
    known = isinstance(loader, DataLoader) and loader.batch_size is not None
    sampler = loader.sampler if known else None
    if isinstance(sampler, SubsetRandomSampler):
        indices = list(sampler.indices)
    elif isinstance(sampler, SequentialSampler | RandomSampler) and hasattr(loader.dataset, "__len__"):
        indices = list(range(len(loader.dataset)))
    else:
        raise TypeError(
            f"several processes cannot share a {type(loader).__name__} for the posterior or for held-out "
            "data: give a DataLoader with shuffle=True or False, or a SubsetRandomSampler, over a dataset "
            "with len(), or a DeviceLoader"
        )
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=indices[rank::world],
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
    )


def to_channels_last(x: Any) -> Any:
    """Convert images to that memory format; anything else is returned unchanged."""
    if isinstance(x, torch.Tensor) and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x
