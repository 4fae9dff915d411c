"""Plan(best=False): the last epoch's weights, whatever the held-out data say of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract import toy
from tests.contract.toy import weights

pytest.importorskip("lightning", reason="pip install 'hetsngp[train]'")

from hetsngp.training import CheckpointConfig, Engine, Hardware, Schedule, TrainConfig, Trained

X, Y = toy.blobs(3, 8, flip=0.4)
HELD_OUT = [toy.blobs(3, 12, flip=0.4, seed=1)]
CONFIG = TrainConfig(Schedule(8, lr=0.05), best=False)


class Died(BaseException):
    pass


class Batches(list[Any]):
    """Three an epoch; the one after ``left``, of all epochs, is never had."""

    def __init__(self, left: int = 99) -> None:
        super().__init__(zip(X.split(8), Y.split(8), strict=True))
        self.left = left

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            if self.left == 0:
                raise Died
            self.left -= 1
            yield batch


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(Hardware(devices=1, accelerator="cpu"))


def train(
    engine: Engine, config: TrainConfig, watched: bool = True, left: int = 99, checkpoints: Any = None
) -> Trained:
    held_out = HELD_OUT if watched else None
    return engine.train(
        toy.build("hetsngp"), Batches(left), config, held_out=held_out, checkpoints=checkpoints
    )


def kept(folder: Path, **options: Any) -> CheckpointConfig:
    return CheckpointConfig(folder, seconds=0, tensorboard=False, **options)


def assert_same(got: Trained, want: Trained) -> None:
    for name, value in weights(want.model).items():
        assert torch.equal(weights(got.model)[name], value), name


@pytest.mark.parametrize("average", [None, 0.7])
def test_held_out_data_choose_nothing(engine: Engine, average: float | None) -> None:
    config = replace(CONFIG, ema_decay=average)
    last, chosen = train(engine, config), train(engine, replace(config, best=True))
    assert chosen.best < 8  # so that it is worth asking for
    assert last.best == 8
    assert last.history == chosen.history  # they are measured all the same
    assert_same(last, train(engine, config, watched=False))
    assert any(not torch.equal(a, weights(chosen.model)[n]) for n, a in weights(last.model).items())


@pytest.mark.parametrize("average", [None, 0.7])
def test_patience_stops_where_it_would(engine: Engine, average: float | None) -> None:
    config = replace(CONFIG, ema_decay=average, patience=2, schedule=replace(CONFIG.schedule, epochs=40))
    last, chosen = train(engine, config), train(engine, replace(config, best=True))
    count = len(chosen.history)
    assert last.history == chosen.history
    assert chosen.best == count - 2
    assert last.best == count < 40
    stopped = replace(config, patience=None, schedule=replace(config.schedule, stop_after=count))
    assert_same(last, train(engine, stopped, watched=False))


@pytest.mark.parametrize("average", [None, 0.7])
def test_it_goes_on_from_any_epoch(engine: Engine, average: float | None, tmp_path: Path) -> None:
    """From the sixth, and the best has been: patience goes on counting from it, and it is on no disk."""
    config = replace(CONFIG, ema_decay=average, patience=6)
    whole = train(engine, config)
    best = min(whole.history, key=lambda result: result.held_out or 0.0).epoch
    assert best < 6
    with pytest.raises(Died):
        train(engine, config, left=3 * 5 + 1, checkpoints=kept(tmp_path))
    assert not list(tmp_path.glob("best-*"))
    resumed = train(engine, config, checkpoints=kept(tmp_path))
    assert resumed.resumed == 16
    assert resumed.history == whole.history
    assert resumed.best == whole.best == len(whole.history)
    assert_same(resumed, whole)
    again = train(engine, config, left=0, checkpoints=kept(tmp_path))  # finished: no batch is asked for
    assert again.best == whole.best
    assert_same(again, whole)


def test_a_choice_given_up_on_the_way(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(Died):
        train(engine, replace(CONFIG, best=True), left=16, checkpoints=kept(tmp_path))
    assert list(tmp_path.glob("best-*"))
    last = train(engine, CONFIG, checkpoints=kept(tmp_path, changed=True))
    assert last.best == 8
    assert_same(last, train(engine, CONFIG))
    assert not list(tmp_path.glob("best-*"))


def test_a_choice_made_too_late_is_refused(engine: Engine, tmp_path: Path) -> None:
    """The weights of the epochs to choose from were not kept."""
    with pytest.raises(Died):
        train(engine, CONFIG, left=16, checkpoints=kept(tmp_path))
    with pytest.raises(ValueError, match="best=False"):
        train(engine, replace(CONFIG, best=True), checkpoints=kept(tmp_path, changed=True))
    assert train(engine, CONFIG, checkpoints=kept(tmp_path)).best == 8
