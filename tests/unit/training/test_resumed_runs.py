"""What a folder holds a run to: its data, its config, its best epoch; and what must not stop it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.contract import toy
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

import hetsngp
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.device_loader import DeviceLoader
from hetsngp.fitting.loop import TrainState
from hetsngp.nn.spectral_cache import cacheable_layers
from hetsngp.training import CheckpointConfig, Engine, Hardware, Schedule, TrainConfig
from hetsngp.training.checkpointing.checkpoint import Checkpointer, _rows, _table
from hetsngp.training.checkpointing.checkpoint_files import read_state, write_state
from hetsngp.training.loaders import ResumableLoader, shard_loader

pytest.importorskip("lightning")

CONFIG = TrainConfig(Schedule(3, lr=0.05, optimizer="sgd", smooth=True))
X, Y = toy.blobs(3, 8)
HELD_OUT = [toy.blobs(3, 5, seed=1)]


class Died(BaseException):
    pass


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(Hardware(accelerator="cpu"))


def loader(rows: int = 24, size: int = 6) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X[:rows], Y[:rows]), size, shuffle=True)


class DiesAt(DataLoader[Any]):
    """Whose batch ``at``, of all epochs, is never had."""

    def __init__(self, at: int, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.left = at

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            if self.left == 0:
                raise Died
            self.left -= 1
            yield batch


def checkpoints_in(folder: Path, **options: Any) -> CheckpointConfig:
    return CheckpointConfig(folder, seconds=0, tensorboard=False, **options)


def begin(
    engine: Engine, folder: Path, config: TrainConfig = CONFIG, at: int = 6, method: str = "hetsngp"
) -> None:
    dying = DiesAt(at, TensorDataset(X, Y), 6, shuffle=True)
    with pytest.raises(Died):
        engine.train(toy.build(method), dying, config, held_out=HELD_OUT, checkpoints=checkpoints_in(folder))


@pytest.mark.parametrize("other", [loader(18), loader(size=8)])
def test_other_data_are_refused(other: Any, engine: Engine, tmp_path: Path) -> None:
    begin(engine, tmp_path)
    with pytest.raises(ValueError, match="on other data"):
        engine.train(
            toy.build("hetsngp"),
            other,
            CONFIG,
            held_out=HELD_OUT,
            checkpoints=checkpoints_in(tmp_path, changed=True),
        )


def test_another_task_is_refused(engine: Engine, tmp_path: Path) -> None:
    model = toy.build("deterministic")
    engine.train(model, loader(), CONFIG, checkpoints=checkpoints_in(tmp_path, about={"data": "cats"}))
    with pytest.raises(ValueError, match="data 'cats', now 'dogs'"):
        engine.train(model, loader(), CONFIG, checkpoints=checkpoints_in(tmp_path, about={"data": "dogs"}))


def test_a_finished_run_cannot_be_made_longer(engine: Engine, tmp_path: Path) -> None:
    engine.train(toy.build("deterministic"), loader(), CONFIG, checkpoints=checkpoints_in(tmp_path))
    longer = replace(CONFIG, schedule=replace(CONFIG.schedule, epochs=5))
    with pytest.raises(ValueError, match=r"finished run with another configuration \(epochs 3, now 5"):
        engine.train(
            toy.build("deterministic"), loader(), longer, checkpoints=checkpoints_in(tmp_path, changed=True)
        )


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)])
def test_bounds_may_be_held_from_now_on(before: int, after: int, engine: Engine, tmp_path: Path) -> None:
    config = replace(CONFIG, ema_decay=0.9)
    begin(engine, tmp_path, replace(config, bound_every=before))
    trained = engine.train(
        toy.build("hetsngp"),
        loader(),
        replace(config, bound_every=after),
        held_out=HELD_OUT,
        checkpoints=checkpoints_in(tmp_path, changed=True),
    )
    assert trained.resumed == 6
    assert len(trained.history) == 3
    assert not any(name.endswith("direction") for name in trained.model.state_dict())


def test_the_best_of_a_run_that_never_was_is_not_ours(engine: Engine, tmp_path: Path) -> None:
    stale = {name: torch.zeros_like(t) for name, t in toy.build("hetsngp").state_dict().items()}
    for epoch in range(1, 4):
        write_state(tmp_path / f"best-{epoch:05d}", {"model": stale})
    dying = DiesAt(6, TensorDataset(X, Y), 6, shuffle=True)
    ends = CheckpointConfig(
        tmp_path, seconds=1e-9, tensorboard=False
    )  # a checkpoint at the end of each epoch
    with pytest.raises(Died):
        engine.train(toy.build("hetsngp"), dying, CONFIG, held_out=HELD_OUT, checkpoints=ends)
    [best] = tmp_path.glob("best-*")
    state = read_state(best)["model"]
    assert any(bool(state[name].any()) for name in dict(toy.build("hetsngp").named_parameters()))


def test_what_a_killed_write_left_behind_goes(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / ".saving-0123").write_bytes(b"half a checkpoint")
    engine.train(toy.build("deterministic"), loader(), CONFIG, checkpoints=checkpoints_in(tmp_path))
    assert not list((tmp_path / "checkpoint").glob(".saving-*"))


def test_a_mask_may_be_infinite(engine: Engine, tmp_path: Path) -> None:
    class Masked(nn.Module):
        num_features = 4

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 4)
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    model = hetsngp.build("deterministic", Masked(), 3)
    assert len(engine.train(model, loader(), CONFIG, checkpoints=checkpoints_in(tmp_path)).history) == 3


def test_rows_of_ten_thousand_epochs(tmp_path: Path) -> None:
    row = {"epoch": 1, "updates": 7, "loss": 0.1, "held_out": None, "lr": 1e-3, "seconds": 2.0}
    rows: Any = [{**row, "epoch": i, "examples_per_second": 3.0} for i in range(1, 10_001)]
    write_state(tmp_path, {"rows": _table(rows)})
    assert _rows(read_state(tmp_path)["rows"], has_held_out=False) == rows
    watched: Any = [{**rows[0], "held_out": 0.3}]
    assert _rows(_table(watched), has_held_out=True) == watched
    assert _rows(_table([]), has_held_out=True) == []


def test_an_infinite_loss_stops(engine: Engine) -> None:
    huge = [(X[:4], Y[:4], torch.full((4,), 3e38))]  # finite weights, and more than a float32 holds
    with pytest.raises(
        FloatingPointError, match=r"loss is infinite in epoch 1: lower lr .*no checkpoint was made before"
    ):
        engine.train(toy.build("deterministic"), huge, CONFIG)


def test_a_refused_run_leaves_no_trace(engine: Engine, tmp_path: Path) -> None:
    begin(engine, tmp_path, replace(CONFIG, bound_every=2))
    model = toy.build("hetsngp")
    with pytest.raises(ValueError, match="another configuration"):
        engine.train(
            model,
            loader(),
            replace(CONFIG, bound_every=3),
            held_out=HELD_OUT,
            checkpoints=checkpoints_in(tmp_path),
        )
    layers = cacheable_layers(model).values()
    assert layers
    assert all(layer.spectral_direction is None for layer in layers)


def test_an_ensemble_is_trained_member_by_member(engine: Engine) -> None:
    ensemble = hetsngp.Ensemble([toy.build("sngp"), toy.build("sngp")])
    with pytest.raises(TypeError, match="member by member"):
        engine.train(ensemble, loader(), CONFIG)  # type: ignore[arg-type]


@pytest.mark.slow
def test_workers_that_stay_on_do_not_change_a_resumed_run(engine: Engine, tmp_path: Path) -> None:
    def with_worker(at: int = 99) -> DataLoader[Any]:
        own: Any = {
            "num_workers": 1,
            "persistent_workers": True,
            "generator": torch.Generator().manual_seed(0),
        }
        return DiesAt(at, TensorDataset(X, Y), 6, shuffle=True, **own)

    alone = engine.train(
        toy.build("sngp"), with_worker(), CONFIG, checkpoints=checkpoints_in(tmp_path / "alone")
    )
    with pytest.raises(Died):  # in the second epoch
        engine.train(toy.build("sngp"), with_worker(6), CONFIG, checkpoints=checkpoints_in(tmp_path / "died"))
    again = engine.train(
        toy.build("sngp"), with_worker(), CONFIG, checkpoints=checkpoints_in(tmp_path / "died")
    )
    assert again.resumed == 6
    for name, value in alone.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name


# --- other processes than it began with -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "batch"), [(2, 3), (3, 2), (6, 1)])
def test_a_global_batch_is_one_for_any_number_of_processes(
    processes: int, batch: int, engine: Engine, tmp_path: Path
) -> None:
    """A checkpoint that several processes would have written of the same batches is resumed by one."""

    def train(data: Any, kept: CheckpointConfig | None = None) -> Any:
        return engine.train(toy.build("deterministic"), data, CONFIG, checkpoints=kept)

    kept = checkpoints_in(tmp_path, about={"batch_size": 6})
    with pytest.raises(Died):
        train(DiesAt(5, TensorDataset(X, Y), 6), kept)
    state = read_state(tmp_path / "checkpoint")
    assert (state["world_size"], state["batch"]) == (1, 6)
    place = state["place"]
    assert (place["batches"], place["seen"]) == (1, 6)
    place |= {"seen": batch, "total": place["total"] / processes}
    write_state(tmp_path / "checkpoint", {**state, "world_size": processes, "batch": batch, "place": place})
    resumed, want = (train(DataLoader(TensorDataset(X, Y), 6), where) for where in (kept, None))
    assert resumed.resumed == 5
    assert [row["updates"] for row in resumed.rows] == [4, 8, 12]
    assert [r.loss for r in resumed.history] == pytest.approx([r.loss for r in want.history], rel=1e-12)
    for name, value in want.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("then", "now", "accumulate", "batches"),
    [
        ((1, 8), (2, 4), 1, 12),  # processes and rows of each: the same global batch
        ((8, 1), (2, 4), 1, 12),
        ((2, 4), (1, 4), 1, 24),  # half of it
        ((2, 4), (1, 16), 1, 6),
        ((2, 4), (3, 4), 1, 8),
        ((2, 4), (5, 4), 1, 4),  # 96 images are 4.8 batches: begin with the fifth
        ((2, 4), (1, 8), 5, 10),  # and with a group
        ((2, None), (1, 8), 1, 24),  # a checkpoint, or loader, without a batch size
        ((2, 4), (1, None), 1, 24),
    ],
)
def test_the_state_after_twelve_batches(
    then: tuple[int, int | None], now: tuple[int, int | None], accumulate: int, batches: int
) -> None:
    loader = SimpleNamespace(is_device_loader=False, batch_size=now[1])
    run: Any = SimpleNamespace(
        fabric=fabric(now[0]),
        config=replace(CONFIG, accumulate=accumulate),
        data=SimpleNamespace(loader=loader),
    )
    state = TrainState(2, 12, 30, 60, 7.5)
    Checkpointer(run)._rescale(state, *then)
    assert (state.epoch, state.batches, state.updates) == (2, batches, 30)
    assert (state.seen, state.total) == (60 * then[0] // now[0], 7.5 * then[0] / now[0])
    loader.is_device_loader = True  # whose batches are those of all processes
    state = TrainState(2, 12, 30, 60, 7.5)
    Checkpointer(run)._rescale(state, *then)
    assert state.batches == 12


# --- what several processes cannot share ----------------------------------------------------------------


def fabric(world: int) -> Any:
    return SimpleNamespace(device=torch.device("cpu"), global_rank=0, world_size=world)


def test_parts_of_a_batch_are_equal() -> None:
    images = ImageArrays(torch.zeros(35, 1, 4, 4, dtype=torch.uint8), torch.arange(35) % 3, tuple("abc"))
    scale: Any = {"mean": [0.5], "std": [0.5]}
    with pytest.raises(ValueError, match="last batch has 3 examples, which 2 processes cannot share"):
        ResumableLoader(DeviceLoader(images, 8, **scale), toy.build("sngp"), fabric(2))
    ResumableLoader(DeviceLoader(images, 8, drop_last=True, **scale), toy.build("sngp"), fabric(2))
    ResumableLoader(DeviceLoader(images, 8, **scale), toy.build("sngp"), fabric(1))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(X[0], Y[0])])


@pytest.mark.parametrize(
    "shared",
    [DataLoader(TensorDataset(X, Y), 6, sampler=SubsetRandomSampler(range(12))), DataLoader(Stream(), 6)],
)
def test_epochs_that_differ_between_processes_are_refused(shared: Any) -> None:
    with pytest.raises(TypeError, match="shuffle=True"):
        ResumableLoader(shared, toy.build("sngp"), fabric(2))


def test_too_few_examples_for_all() -> None:
    with pytest.raises(ValueError, match="2 examples cannot be shared by 3 processes"):
        shard_loader(loader(2), fabric(3))
