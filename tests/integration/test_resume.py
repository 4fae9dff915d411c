"""An interrupted run ends with the same bits as an uninterrupted one: at every step, loader and method.

Death is an exception here, so that there can be hundreds; test_kill_and_resume.py has real ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.contract import toy
from tests.contract.toy import assert_same
from tests.integration import killed_run
from tests.integration.killed_run import build, found, rows_of, without_times
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler, default_collate

from hetsngp.data.images.device_loader import DeviceLoader
from hetsngp.models.methods import METHODS
from hetsngp.nn.backbones import ResidualMLP
from hetsngp.nn.initialization import seeded_linear
from hetsngp.training import CheckpointConfig, Engine, Hardware, Schedule, TrainConfig, Trained, run

pytestmark = pytest.mark.slow

pytest.importorskip("lightning")


class Died(BaseException):
    """Nothing that anybody should catch."""


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(Hardware(accelerator="cpu"))


Make = Callable[[], killed_run.Case]


def die_at(patch: pytest.MonkeyPatch, write: int, *, after: bool) -> None:
    """Before or after one of the writes of a checkpoint, or of the best epoch."""
    numbers, real = itertools.count(1), run.write_state

    def write_state(folder: Path, state: dict[str, Any]) -> None:
        number = next(numbers)
        if number == write and not after:
            raise Died
        real(folder, state)
        if number == write:
            raise Died

    patch.setattr(run, "write_state", write_state)


def go(engine: Engine, make: Make, folder: Path, seconds: float = 0) -> Trained:
    model, loader, config, held_out = make()
    checkpoints = CheckpointConfig(folder, seconds=seconds, tensorboard=False)
    return engine.train(model, loader, config, held_out=held_out, checkpoints=checkpoints)


def assert_dying_does_not_matter(
    engine: Engine,
    make: Make,
    folder: Path,
    die: Callable[[pytest.MonkeyPatch, int], None],
    seconds: float = 0,
) -> int:
    """For the n-th death, n = 1, 2, … as long as there is one; returns how many."""
    alone = go(engine, make, folder / "alone", seconds)
    for number in itertools.count(1):
        here = folder / str(number)
        with pytest.MonkeyPatch.context() as patch:
            die(patch, number)
            try:
                go(engine, make, here, seconds)
                return number - 1
            except Died:
                pass
        resumed = go(engine, make, here, seconds)
        assert found(resumed) == found(alone), number
        assert_same(resumed.model.state_dict(), alone.model.state_dict())
        assert without_times(here / "metrics.csv") == without_times(folder / "alone" / "metrics.csv")
    raise AssertionError


def network(dropout: float = 0.2) -> ResidualMLP:
    return ResidualMLP(2, 12, 1, dropout=dropout, generator=torch.Generator().manual_seed(1))


def everything() -> killed_run.Case:
    """5 batches an epoch, 3 updates."""
    model, _, _, held_out = killed_run.mlp()
    loader = DataLoader(rows_of(*toy.blobs(3, 6, flip=0.3)), 4, shuffle=True)
    schedule = Schedule(9, 0.01, warmup=1.5, smooth=True, optimizer="sgd")
    config = TrainConfig(schedule, accumulate=2, ema_decay=0.8, patience=2, bound_every=3)
    return model, loader, config, held_out


@pytest.mark.parametrize("after", [False, True])
def test_dying_at_any_write(after: bool, engine: Engine, tmp_path: Path) -> None:
    alone = go(engine, everything, tmp_path / "first")
    assert 1 < alone.best < len(alone.history) < 9  # there is something to go back to, and patience ends it
    deaths = assert_dying_does_not_matter(
        engine, everything, tmp_path, lambda patch, n: die_at(patch, n, after=after)
    )
    assert deaths >= alone.rows[-1]["updates"] + alone.best  # each epoch until then was the best


def test_dying_at_any_batch_with_an_older_checkpoint(engine: Engine, tmp_path: Path) -> None:
    """There are checkpoints every 3 updates; batches die between them, and within a group of two."""
    numbers, fatal = itertools.count(), -1

    def collate(rows: list[Any]) -> Any:
        if next(numbers) == fatal:
            raise Died
        return default_collate(rows)

    def make() -> killed_run.Case:
        model, _, config, held_out = everything()
        data = rows_of(*toy.blobs(3, 7, flip=0.3))
        schedule = replace(config.schedule, stop_after=2)
        loader = DataLoader(data, 3, shuffle=True, collate_fn=collate)
        return model, loader, replace(config, schedule=schedule), held_out

    def die(patch: pytest.MonkeyPatch, number: int) -> None:
        nonlocal numbers, fatal
        numbers, fatal = itertools.count(), number - 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "CHECK_EVERY", 3)
        assert assert_dying_does_not_matter(engine, make, tmp_path, die, seconds=1e-9) == 2 * 7


@pytest.mark.parametrize("method", METHODS)
def test_dying_with_any_method(method: str, engine: Engine, tmp_path: Path) -> None:
    def make() -> killed_run.Case:
        loader = DataLoader(rows_of(*toy.blobs(3, 8, flip=0.3)), 6, shuffle=True)
        config = TrainConfig(Schedule(3, 0.02), ema_decay=0.7, bound_every=2)
        return build(method, network()), loader, config, [toy.blobs(3, 6, seed=1)]

    moments = [1, 2, 5, 8, 13, 10**9]
    deaths = assert_dying_does_not_matter(
        engine, make, tmp_path, lambda patch, n: die_at(patch, moments[n - 1], after=True)
    )
    assert deaths >= 4


class Remembering(nn.Module):
    """Of how many rows it was called with: several inputs have to go in side by side, as is tried once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.num_features = seeded_linear(2, 12, torch.Generator().manual_seed(1)), 12

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.layer(x).relu(), 0.2, self.training)
        return h.view(len(x), 12)


def test_dying_does_not_try_again_how_inputs_enter(engine: Engine, tmp_path: Path) -> None:
    """To try costs random numbers."""

    def make() -> killed_run.Case:
        return build("mimo", Remembering()), LOADERS["list"](), TrainConfig(Schedule(2, 0.02)), None

    assert go(engine, make, tmp_path / "first").model._stacked_inputs
    deaths = assert_dying_does_not_matter(
        engine, make, tmp_path, lambda patch, n: die_at(patch, 3 * n, after=True)
    )
    assert deaths == 3


X, Y = toy.blobs(3, 7, flip=0.3)


def seed() -> torch.Generator:
    return torch.Generator().manual_seed(7)


class NoLength:
    """Batches, nobody knows how many."""

    def __iter__(self) -> Any:
        return zip(X.split(6), Y.split(6), strict=True)


LOADERS: dict[str, Callable[[], Any]] = {
    "list": lambda: list(zip(X.split(6), Y.split(6), strict=True)),
    "no length": NoLength,
    "shuffled": lambda: DataLoader(rows_of(X, Y), 6, shuffle=True),
    "own generator": lambda: DataLoader(rows_of(X, Y), 6, shuffle=True, generator=seed()),
    "sampler": lambda: DataLoader(rows_of(X, Y), 6, sampler=WeightedRandomSampler(Y + 1.0, 21)),
    "sampler with a generator": lambda: DataLoader(
        rows_of(X, Y), 6, sampler=RandomSampler(Y, True, generator=seed())
    ),
    "batch sampler": lambda: DataLoader(
        rows_of(X, Y), batch_sampler=BatchSampler(RandomSampler(Y, generator=seed()), 6, False)
    ),
    "random transforms": lambda: DataLoader(killed_run.Jittered(X, Y), 6, shuffle=True),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_dying_with_any_loader(kind: str, engine: Engine, tmp_path: Path) -> None:
    """At every update, so at the end of every epoch too."""

    def make() -> killed_run.Case:
        model = build("heteroscedastic", network(), dataset_size=21)
        return model, LOADERS[kind](), TrainConfig(Schedule(2, 0.02)), None

    deaths = assert_dying_does_not_matter(
        engine, make, tmp_path, lambda patch, n: die_at(patch, n, after=True)
    )
    assert deaths >= 8


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_dying_with_channels_last(optimizer: str, tmp_path: Path) -> None:
    """A file has tensors row by row, whatever their memory format was."""

    def make() -> killed_run.Case:
        model, loader, _, _ = killed_run.images()
        schedule = Schedule(2, 0.01, optimizer=optimizer)
        loader = DeviceLoader(loader.dataset, 8, shuffle=True, augment=loader.augment)
        return model, loader, TrainConfig(schedule, ema_decay=0.9, bound_every=2), None

    assert_dying_does_not_matter(
        Engine(Hardware(accelerator="cpu", channels_last=True)),
        make,
        tmp_path,
        lambda patch, n: die_at(patch, [1, 6, 9, 10**9][n - 1], after=True),
    )


def test_killed_twice_in_the_same_place(engine: Engine, tmp_path: Path) -> None:
    alone = go(engine, everything, tmp_path / "alone")
    for write in (3, 1, 1, 2, 4):
        with pytest.MonkeyPatch.context() as patch:
            die_at(patch, write, after=write > 1)
            with pytest.raises(Died):
                go(engine, everything, tmp_path / "run")
    resumed = go(engine, everything, tmp_path / "run")
    assert resumed.resumed > 5
    assert found(resumed) == found(alone)
    assert_same(resumed.model.state_dict(), alone.model.state_dict())
