"""Checkpoints: reading returns what was written, atomically; and how a run is resumed from them."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract import toy
from torch import Tensor

import hetsngp
from hetsngp import ArtifactError
from hetsngp.files import with_checksum
from hetsngp.training import CheckpointConfig, Engine, Hardware, Schedule, TrainConfig, Trained, run
from hetsngp.training.checkpointing.checkpoint_files import (
    copy_state,
    has_state,
    read_state,
    remove_unused,
    write_state,
)

pytest.importorskip("lightning")

DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float64)
STATE: dict[str, Any] = {
    "numbers": [0, -3, 2**60, 0.1, 1e-320, -0.0, math.inf, -math.inf, math.nan],
    "others": (None, True, False, "", 'ä "\n', (), [], {}, ((1,), [2, (3, [4])])),
    "keys": {0: "zero", -1: "less", "0": "text", True: "yes", None: "nothing", 0.5: "half", "a/b": 1},
    "tensors": {
        "scalar": torch.tensor(math.pi, dtype=torch.float64),
        "not numbers": torch.tensor([math.nan, math.inf, -0.0, 1e-45]),
        "empty": torch.zeros(0),
        "empty matrix": torch.zeros(3, 0, 2, dtype=torch.int64),
        **{str(dtype): torch.tensor([0, 1, 1, 0], dtype=dtype) for dtype in DTYPES},
    },
    "layouts": [
        torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).to(
            memory_format=torch.channels_last
        ),
        torch.arange(6.0).view(2, 3).T,
        torch.arange(10.0)[::3],
        torch.ones(1).expand(4),
        torch.nn.Parameter(torch.ones(2)),
    ],
    "same names": {1: torch.zeros(1), "1": torch.ones(2), "a/b": torch.ones(3), "a": {"b": torch.ones(4)}},
    "deep": {"a": [{"b": ({3: torch.tensor(7)},)}]},
    "look like ours": [{"tensor": "x"}, {"tuple": [1]}, {"items": [[1, 2]]}],
}


def assert_equal(a: Any, b: Any) -> None:
    """Types, the order of keys and the bits of numbers with them."""
    if isinstance(a, Tensor):
        assert isinstance(b, Tensor)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        assert torch.equal(*flat)
        return
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert [(type(k), k) for k in a] == [(type(k), k) for k in b]
        a, b = list(a.values()), list(b.values())
    if isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_equal(one, other)
    elif isinstance(a, float):
        assert (a.hex(), math.copysign(1, a)) == (b.hex(), math.copysign(1, b))
    else:
        assert a == b


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    assert not has_state(tmp_path / "deep" / "folder")
    write_state(tmp_path / "deep" / "folder", STATE)
    assert has_state(tmp_path / "deep" / "folder")
    assert_equal(read_state(tmp_path / "deep" / "folder"), STATE)
    write_state(tmp_path / "deep" / "folder", {"other": torch.ones(1)})
    assert_equal(read_state(tmp_path / "deep" / "folder"), {"other": torch.ones(1)})
    assert len(list((tmp_path / "deep" / "folder").iterdir())) == 2  # nothing of the first is left


def test_the_state_of_an_optimizer(tmp_path: Path) -> None:
    model = toy.build("hetsngp")
    optimizer = Schedule(2, optimizer="adamw").make_optimizer(model)
    model.loss(*toy.blobs(3), generator=torch.Generator().manual_seed(0)).backward()
    optimizer.step()
    write_state(tmp_path, optimizer.state_dict())
    assert_equal(read_state(tmp_path), optimizer.state_dict())


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", 1j, Path("x"), torch.float32])
def test_what_no_file_can_hold_is_refused(value: Any, tmp_path: Path) -> None:
    write_state(tmp_path, {"old": 1})
    with pytest.raises(TypeError, match=rf"a training state cannot hold {type(value).__name__} \(/a/0\)"):
        write_state(tmp_path, {"a": [value]})
    assert read_state(tmp_path) == {"old": 1}


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forbidden:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("pickle")

    for module, name in ((pickle, "Unpickler"), (pickle, "Pickler"), (torch, "load"), (torch, "save")):
        monkeypatch.setattr(module, name, Forbidden)
    for name in ("load", "loads", "dump", "dumps"):
        monkeypatch.setattr(pickle, name, Forbidden)
    write_state(tmp_path, STATE)
    assert_equal(read_state(tmp_path), STATE)


# --- damage ---------------------------------------------------------------------------------------------


def weights_of(folder: Path) -> Path:
    return folder / json.loads((folder / "config.json").read_text())["weights"]


@pytest.mark.parametrize("which", ["config.json", "weights"])
@pytest.mark.parametrize("damage", ["half", "empty", "a bit", "nonsense", "missing"])
def test_a_damaged_file_is_named(which: str, damage: str, tmp_path: Path) -> None:
    write_state(tmp_path, STATE)
    file = tmp_path / which if which == "config.json" else weights_of(tmp_path)
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "a bit":
        flipped = bytearray(content)
        # In a number of the config, which no grammar would miss: the checksum's; anywhere in the weights.
        at = content.index(b'"sha256": "') + 12 if which == "config.json" else len(content) - 2
        flipped[at] ^= 1
        file.write_bytes(flipped)
    else:
        file.write_bytes(
            {"half": content[: len(content) // 2], "empty": b"", "nonsense": b"\x80\x04."}[damage]
        )
    error = FileNotFoundError if (which, damage) == ("config.json", "missing") else ArtifactError
    with pytest.raises(error) as caught:
        read_state(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert (which if which == "config.json" else weights_of(tmp_path).name) in str(caught.value)


@pytest.mark.parametrize(
    "state", [{"tensor": "gone"}, {"items": [1]}, {"items": 1}, {}, {"tuple": 1}, 3, None]
)
def test_a_description_that_is_none_of_ours_is_refused(state: Any, tmp_path: Path) -> None:
    write_state(tmp_path, {})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(with_checksum({**config, "state": state})))
    with pytest.raises(ArtifactError, match="is not a training state"):
        read_state(tmp_path)


def test_a_model_is_no_state_and_a_state_is_no_model(tmp_path: Path) -> None:
    hetsngp.save(toy.trained("sngp"), tmp_path / "model")
    with pytest.raises(ArtifactError, match=r"model holds a model and no training state: hetsngp\.load"):
        read_state(tmp_path / "model")
    write_state(tmp_path / "state", {"model": toy.trained("sngp").state_dict()})
    with pytest.raises(ArtifactError, match=r"state.config\.json does not describe a model"):
        hetsngp.load(tmp_path / "state")


@pytest.mark.parametrize("name", ["fsync", "replace"])
@pytest.mark.parametrize("call", [1, 2])
def test_a_crash_while_writing_leaves_the_old_state(
    name: str, call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state(tmp_path, {"old": torch.arange(3)})
    calls, real = 0, getattr(os, name)

    def crash(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError("no space left on device")
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, crash)
        with pytest.raises(OSError, match="no space left"):
            write_state(tmp_path, {"new": torch.ones(5)})
    assert calls == call
    assert_equal(read_state(tmp_path), {"old": torch.arange(3)})
    write_state(tmp_path, {"new": torch.ones(5)})
    assert calls == call  # there are no more than two of each
    assert_equal(read_state(tmp_path), {"new": torch.ones(5)})
    assert len(list(tmp_path.iterdir())) == 2


# --- what a run makes of it -----------------------------------------------------------------------------

X, Y = toy.blobs(3, 8, flip=0.3)
CONFIG = TrainConfig(Schedule(3, 0.05))


class Died(BaseException):
    pass


class Loader:
    """4 batches an epoch; dies at one of them, or has inputs from it on that are finite, and no more."""

    def __init__(self, dies: int | None = None, huge: int | None = None) -> None:
        self.dies, self.huge, self.seen = dies, huge, 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        for x, y in zip(X.split(6), Y.split(6), strict=True):
            self.seen += 1
            if self.seen == self.dies:
                raise Died
            yield (x if self.huge is None or self.seen < self.huge else 3e38 * x.sign()), y


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(Hardware(accelerator="cpu"))


def train(
    engine: Engine,
    checkpoints: Any,
    config: TrainConfig = CONFIG,
    loader: Any = None,
    model: Any = None,
    **options: Any,
) -> Trained:
    model = toy.build("sngp") if model is None else model
    return engine.train(
        model, Loader() if loader is None else loader, config, checkpoints=checkpoints, **options
    )


def begun(engine: Engine, folder: Path, config: TrainConfig = CONFIG, **options: Any) -> CheckpointConfig:
    """A run that died in its second epoch, after 6 updates."""
    checkpoints = CheckpointConfig(folder, seconds=0, tensorboard=False)
    with pytest.raises(Died):
        train(engine, checkpoints, config, Loader(dies=7), **options)
    assert read_state(folder / "checkpoint")["place"]["updates"] == 6
    return checkpoints


def same_weights(a: Any, b: Any) -> bool:
    return all(torch.equal(t, b.state_dict()[name]) for name, t in a.state_dict().items())


def test_arguments_of_0_1(engine: Engine, tmp_path: Path) -> None:
    model, train = toy.build("deterministic"), engine.train
    with pytest.warns(DeprecationWarning, match="plan is now called config"):
        train(model, Loader(), plan=CONFIG, checkpoints=tmp_path)  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match="keep is now called checkpoints"):
        resumed = train(model, Loader(), CONFIG, keep=tmp_path).resumed  # type: ignore[call-arg]
    assert resumed == 12
    with pytest.raises(TypeError, match="both are given"):
        train(model, Loader(), CONFIG, keep=tmp_path, checkpoints=tmp_path)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder_is_enough(kind: Any, engine: Engine, tmp_path: Path) -> None:
    trained = train(engine, kind(tmp_path / "run"))
    assert trained.resumed == 0
    assert {"checkpoint", "metrics.csv"} <= {f.name for f in (tmp_path / "run").iterdir()}
    assert same_weights(trained.model, train(engine, None).model)  # keeping changes nothing
    loader = Loader()
    again = train(engine, kind(tmp_path / "run"), loader=loader)
    assert loader.seen == 0
    assert again.resumed == 12
    assert (again.history, again.rows) == (trained.history, trained.rows)
    assert same_weights(again.model, trained.model)
    assert not again.model.training


def test_a_finished_run_has_the_weights_of_its_best_epoch(engine: Engine, tmp_path: Path) -> None:
    config = TrainConfig(Schedule(12, 0.05), ema_decay=0.8, patience=2)
    options: dict[str, Any] = {"held_out": [toy.blobs(3, 12, flip=0.3, seed=1)]}
    trained = train(engine, CheckpointConfig(tmp_path, seconds=0), config, **options)
    assert 0 < trained.best < len(trained.history) < 12
    # Those of the checkpoint before the last, which was not finished.
    before = read_state(tmp_path / "checkpoint-previous")
    assert not before["finished"]
    assert [folder.name for folder in tmp_path.glob("best-*")] == [f"best-{before['best']:05d}"]
    loader = Loader()
    again = train(engine, tmp_path, config, loader, **options)
    assert (loader.seen, again.best) == (0, trained.best)
    assert same_weights(again.model, trained.model)
    damage(tmp_path / "checkpoint")
    with pytest.warns(UserWarning, match=r"is damaged .*resuming from the checkpoint before it"):
        again = train(engine, tmp_path, config, Loader(), **options)
    assert (again.best, again.resumed) == (trained.best, before["place"]["updates"])
    assert same_weights(again.model, trained.model)


def test_another_plan_is_refused_and_what_changed_is_said(engine: Engine, tmp_path: Path) -> None:
    checkpoints = begun(engine, tmp_path)
    before = (tmp_path / "checkpoint" / "config.json").read_bytes()
    other = TrainConfig(Schedule(5, 0.05, decay="step", milestones=(2, 3)), clip=1.0)
    with pytest.raises(ValueError, match="holds a run with another configuration") as caught:
        train(engine, checkpoints, other)
    text = str(caught.value)
    for change in ("clip None, now 1.0", "decay 'cosine', now 'step'", "epochs 3, now 5", "changed=True"):
        assert change in text
    assert "milestones [], now [2, 3]" in text
    assert "lr" not in text
    assert (tmp_path / "checkpoint" / "config.json").read_bytes() == before
    assert train(engine, replace(checkpoints, changed=True), other).resumed == 6
    # The folder is one of the new config now.
    assert train(engine, checkpoints, other).resumed == 20


@pytest.mark.parametrize(("old", "new"), [("adamw", "adamw"), ("adamw", "sgd"), ("sgd", "adamw")])
def test_a_changed_plan_is_followed(old: str, new: str, engine: Engine, tmp_path: Path) -> None:
    """The new learning rates count, not those in the optimiser state of the checkpoint."""
    checkpoints = begun(engine, tmp_path, TrainConfig(Schedule(3, 0.05, optimizer=old)))
    then = read_state(tmp_path / "checkpoint")["model"]
    config = TrainConfig(Schedule(3, 1e-9, weight_decay=0.0, optimizer=new))
    trained = train(engine, replace(checkpoints, changed=True), config)
    saved = read_state(tmp_path / "checkpoint")
    assert [row["lr"] for row in trained.rows] == pytest.approx([0.05, 7.5e-10, 2.5e-10])
    assert {group["weight_decay"] for group in saved["optimizer"]["param_groups"]} == {0.0}
    for name, parameter in trained.model.named_parameters():  # with such a learning rate nothing moves
        torch.testing.assert_close(parameter.detach(), then[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("change", [{"ema_decay": 0.9}, {"accumulate": 2}, {"seed": 3}, {"clip": 1e-3}])
def test_any_change_goes_on(change: dict[str, Any], engine: Engine, tmp_path: Path) -> None:
    checkpoints = begun(engine, tmp_path)
    with pytest.raises(ValueError, match=f"another configuration .{next(iter(change))} "):
        train(engine, checkpoints, replace(CONFIG, **change))
    trained = train(engine, replace(checkpoints, changed=True), replace(CONFIG, **change))
    assert trained.resumed == 6
    assert len(trained.history) == 3


def test_another_model_is_refused(engine: Engine, tmp_path: Path) -> None:
    checkpoints = begun(engine, tmp_path)
    with pytest.raises(ValueError, match=r"of another model \(head\.noise.* …\): resume with the model"):
        train(engine, checkpoints, model=toy.build("hetsngp"))
    wider = hetsngp.build("sngp", toy.backbone(width=20), 3, **toy.TINY)
    with pytest.raises((ValueError, RuntimeError), match="isometry"):
        train(engine, checkpoints, model=wider)
    fewer = toy.build("sngp")
    fewer.backbone.requires_grad_(False)
    with pytest.raises(ValueError, match="trained other parameters: freeze those"):
        train(engine, checkpoints, model=fewer)
    assert train(engine, checkpoints).resumed == 6


def test_other_data_are_refused(engine: Engine, tmp_path: Path) -> None:
    checkpoints = begun(engine, tmp_path)
    with pytest.raises(ValueError, match="stopped after 2 batches of epoch 2, but the loader now has fewer"):
        train(engine, checkpoints, loader=[(X, Y)])


def damage(folder: Path, how: str = "weights") -> None:
    """Damage one of the files of a state."""
    file = weights_of(folder) if how == "weights" else folder / "config.json"
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])


def test_damaged_checkpoints_are_not_begun_anew(engine: Engine, tmp_path: Path) -> None:
    """Hours of work are in the folder: better to stop."""
    checkpoints = begun(engine, tmp_path)
    for name in ("checkpoint-previous", "checkpoint"):
        damage(tmp_path / name)
    with pytest.raises(ArtifactError, match=weights_of(tmp_path / "checkpoint").name):
        train(engine, checkpoints)
    shutil.rmtree(tmp_path / "checkpoint-previous")  # as a run of 0.1 has none
    with pytest.raises(ArtifactError, match=weights_of(tmp_path / "checkpoint").name):
        train(engine, checkpoints)
    hetsngp.save(toy.trained("sngp"), tmp_path / "checkpoint")
    with pytest.raises(ArtifactError, match="holds a model and no training state"):
        train(engine, checkpoints)


@pytest.mark.parametrize("how", ["weights", "config", "missing"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before_it(
    how: str, engine: Engine, tmp_path: Path
) -> None:
    checkpoints, want = begun(engine, tmp_path), train(engine, None)
    before = (tmp_path / "checkpoint-previous" / "config.json").read_bytes()
    damage(tmp_path / "checkpoint", how)
    with (
        pytest.warns(
            UserWarning, match="resuming from the checkpoint before it, checkpoint-previous, with 5"
        ),
        pytest.raises(Died),
    ):
        train(engine, checkpoints, loader=Loader(dies=3))  # after one update and its checkpoint
    assert read_state(tmp_path / "checkpoint")["place"]["updates"] == 6
    # The damaged one has not become the one before.
    assert (tmp_path / "checkpoint-previous" / "config.json").read_bytes() == before
    damage(tmp_path / "checkpoint", how)
    with pytest.warns(UserWarning, match="resuming from the checkpoint before it"):
        trained = train(engine, checkpoints)
    assert trained.resumed == 5
    assert trained.history == want.history
    assert same_weights(trained.model, want.model)


def test_damaged_weights_of_the_best_epoch_fall_back_too(engine: Engine, tmp_path: Path) -> None:
    """Each generation has its own, where they differ."""
    options: dict[str, Any] = {"held_out": [toy.blobs(3, 12, flip=0.3, seed=1)]}
    config = TrainConfig(Schedule(12, 0.002), patience=8)
    checkpoints, want = (
        CheckpointConfig(tmp_path, seconds=0, tensorboard=False),
        train(engine, None, config, **options),
    )
    with pytest.raises(Died):  # after the second epoch, which is the best so far
        train(engine, checkpoints, config, Loader(dies=9), **options)
    now, before = (read_state(tmp_path / name)["best"] for name in ("checkpoint", "checkpoint-previous"))
    assert (before, now) == (1, 2)
    assert {folder.name for folder in tmp_path.glob("best-*")} == {"best-00001", "best-00002"}
    damage(tmp_path / f"best-{now:05d}")
    with pytest.warns(UserWarning, match="resuming from the checkpoint before it"):
        trained = train(engine, checkpoints, config, **options)
    assert (trained.history, trained.best) == (want.history, want.best)
    assert same_weights(trained.model, want.model)


@pytest.mark.parametrize("how", ["weights", "config", "missing", "folder"])
def test_a_checkpoint_that_is_damaged_while_the_run_goes_on(how: str, engine: Engine, tmp_path: Path) -> None:
    """The run does not need it: it writes the next one. A folder that was removed is made again."""

    class Damaging(Loader):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                if self.seen == 6 and how == "folder":
                    shutil.rmtree(tmp_path / "run")
                elif self.seen == 6:
                    damage(tmp_path / "run" / "checkpoint", how)
                yield batch

    checkpoints = CheckpointConfig(tmp_path / "run", seconds=0, tensorboard=False)
    trained = train(engine, checkpoints, loader=Damaging())
    assert same_weights(trained.model, train(engine, None).model)
    assert read_state(tmp_path / "run" / "checkpoint")["finished"]
    assert not read_state(tmp_path / "run" / "checkpoint-previous")["finished"]


def test_two_generations_take_the_space_of_two(engine: Engine, tmp_path: Path) -> None:
    """While the newer one is written the older is a second name of the present one."""
    begun(engine, tmp_path)
    copy_state(tmp_path / "checkpoint", tmp_path / "checkpoint-previous")
    names = ("checkpoint", "checkpoint-previous")
    inodes = {weights_of(tmp_path / name).stat().st_ino for name in names}
    assert len(inodes) == 1
    assert_equal(*(read_state(tmp_path / name) for name in names))
    assert all(len(list((tmp_path / name).iterdir())) == 2 for name in names)


@pytest.mark.parametrize("name", ["link", "fsync", "replace"])
@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_an_interrupted_rotation_leaves_a_state(
    name: str, call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state(tmp_path / "old", {"old": torch.arange(3)})
    write_state(tmp_path / "new", {"new": torch.ones(5)})
    copy_state(tmp_path / "old", tmp_path / "copy")
    calls, real = 0, getattr(os, name)

    def crash(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError(28, "no space left on device")
        real(*args)

    monkeypatch.setattr(os, name, crash)
    try:
        copy_state(tmp_path / "new", tmp_path / "copy")
        failed = False
    except OSError:
        failed = True
    assert failed == (calls >= call)
    found = read_state(tmp_path / "copy")
    if failed and "old" in found:
        assert_equal(found, {"old": torch.arange(3)})
    else:
        assert_equal(found, {"new": torch.ones(5)})
    assert_equal(read_state(tmp_path / "new"), {"new": torch.ones(5)})


def test_without_hard_links_the_state_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: Any) -> None:
        raise OSError(errno.EPERM, "not on this file system")

    monkeypatch.setattr(os, "link", none)
    write_state(tmp_path / "a", STATE)
    copy_state(tmp_path / "a", tmp_path / "b")
    assert_equal(read_state(tmp_path / "b"), STATE)
    assert weights_of(tmp_path / "a").stat().st_ino != weights_of(tmp_path / "b").stat().st_ino


# --- NaN ------------------------------------------------------------------------------------------------


def is_finite(state: dict[str, Tensor]) -> bool:
    return all(bool(t.isfinite().all()) for t in state.values())


def test_a_loss_that_is_nan_leaves_the_last_good_checkpoint(engine: Engine, tmp_path: Path) -> None:
    checkpoints, config = (
        CheckpointConfig(tmp_path, seconds=0, tensorboard=False),
        TrainConfig(Schedule(3, 0.05)),
    )
    model, loader = toy.build("deterministic"), Loader(huge=6)
    with pytest.raises(FloatingPointError) as caught:
        train(engine, checkpoints, config, loader, model)
    text = str(caught.value)
    assert "epoch 2" in text
    assert "lower lr (now 0.0375)" in text
    assert f"the last good checkpoint is in {tmp_path / 'checkpoint'}" in text
    assert "changed=True" in text
    state = read_state(tmp_path / "checkpoint")
    assert (state["place"]["updates"], loader.seen) == (5, 6)
    assert is_finite(state["model"])
    assert float(state["place"]["total"]) < 1e6
    lower = TrainConfig(Schedule(3, 0.001))
    trained = train(engine, replace(checkpoints, changed=True), lower, Loader(), toy.build("deterministic"))
    assert trained.resumed == state["place"]["updates"]
    assert trained.rows[-1]["lr"] == pytest.approx(0.001 / 4)
    assert all(math.isfinite(result.loss) for result in trained.history)
    assert is_finite(trained.model.state_dict())


@pytest.mark.parametrize("average", [None, 0.9])
def test_nan_between_two_checkpoints(
    average: float | None, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is not looked for at every update, no checkpoint is made of it either."""
    monkeypatch.setattr(run, "CHECK_EVERY", 3)
    model, loader = toy.build("deterministic"), Loader(huge=6)
    config = TrainConfig(Schedule(3, 0.05), ema_decay=average)
    with pytest.raises(FloatingPointError, match=r"NaN in epoch 2.*last good checkpoint"):
        train(engine, CheckpointConfig(tmp_path, seconds=1e-9, tensorboard=False), config, loader, model)
    state = read_state(tmp_path / "checkpoint")
    assert state["place"]["updates"] == 4
    assert is_finite(state["model"])
    assert average is None or is_finite(state["average"]["state"])


def test_nan_without_a_checkpoint_says_so(engine: Engine, tmp_path: Path) -> None:
    for checkpoints in (None, CheckpointConfig(tmp_path, seconds=1e9)):
        model, loader = toy.build("deterministic"), Loader(huge=3)
        with pytest.raises(FloatingPointError, match=r"epoch 1: lower lr \(now 0.05\); no checkpoint"):
            train(engine, checkpoints, CONFIG, loader, model)
        assert not has_state(tmp_path / "checkpoint")


# --- a state that hetsngp did not write -------------------------------------------------------------------


def forged(state: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of ``state`` with another value, or without one, at ``path``."""
    *outer, last = path.split("/")
    copied = inner = dict(state)
    for name in outer:
        inner[name] = list(inner[name]) if isinstance(inner[name], list) else dict(inner[name])
        inner = inner[name]
    if value is MISSING:
        del inner[last]
    else:
        inner[last] = value
    return copied


MISSING = object()
FORGED: list[tuple[str, Any]] = [
    *((name, MISSING) for name in ("plan", "about", "place", "rows", "model", "optimizer", "rng", "loader")),
    *((name, value) for name in ("world_size", "best") for value in (-1, "1", None, True, 1.5)),
    *(
        (name, value)
        for name in ("rate", "finished", "watched", "statistics", "entrance")
        for value in ("x", {})
    ),
    ("rate", math.nan),
    ("rows", torch.zeros(2, 3)),
    ("rows", torch.zeros(7)),
    ("place/epoch", "2"),
    ("place/batches", -1),
    ("place/seen", MISSING),
    ("place/total", 0.5),
    ("place/other", 1),
    ("plan/schedule", 3),
    ("plan/lr", torch.ones(1)),
    ("plan/accumulate", {1: 2}),
    ("about/examples", {"x": torch.ones(1)}),
    ("model", {1: torch.ones(1)}),
    ("model/head.temperature", "warm"),
    ("average", {"steps": "1", "state": {}}),
    ("average", {}),
    ("statistics", [{}]),
    ("statistics", [{}, {"a": 1}]),
    ("optimizer/param_groups", None),
    ("optimizer/param_groups", [1]),
    ("optimizer/state", []),
    ("optimizer/state", {0: 3}),
    ("optimizer/state", {"0": {}}),
    ("optimizer/state", {10**6: {}}),
    ("optimizer/state", {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(1)}}),
    ("points", torch.zeros(3)),
    ("rng/torch", torch.zeros(1, 3)),
    ("rng/torch", torch.zeros(1, 5056, dtype=torch.uint8)),
    ("rng/torch", torch.tensor(0)),
    ("rng/numpy", torch.zeros(1, 3)),
    ("rng/numpy_rest", torch.tensor([[10.0**6, 0.0, 0.0]])),
    ("rng/numpy_rest", torch.tensor([[math.nan, 0.0, 0.0]])),
    ("epoch_rng/python", torch.full((1, 625), 2**40)),
    ("epoch_rng/python_rest", torch.zeros(1, 2)),
    ("epoch_rng/python", MISSING),
    ("loader", [1]),
    ("loader", [torch.zeros(2)]),
    ("scaler", 3),
    ("batch", "6"),
]


def test_a_state_of_other_types_is_damage(engine: Engine, tmp_path: Path) -> None:
    """Their checksums are right: it is the content that nothing could be resumed from."""
    checkpoints, want = begun(engine, tmp_path), train(engine, None)
    state = read_state(tmp_path / "checkpoint")
    (tmp_path / "checkpoint-previous").rename(tmp_path / "before")
    for path, value in FORGED:
        write_state(tmp_path / "checkpoint", forged(state, path, value))
        with pytest.raises(ArtifactError, match=f"{tmp_path}/checkpoint"):
            train(engine, checkpoints)
    (tmp_path / "before").rename(tmp_path / "checkpoint-previous")
    with pytest.warns(UserWarning, match=f"{tmp_path}/checkpoint .*resuming from the checkpoint before it"):
        assert same_weights(train(engine, checkpoints).model, want.model)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(value: float, engine: Engine, tmp_path: Path) -> None:
    checkpoints = begun(engine, tmp_path)
    shutil.rmtree(tmp_path / "checkpoint-previous")
    state = read_state(tmp_path / "checkpoint")
    name = next(name for name, _ in toy.build("sngp").named_parameters())
    state["model"][name].view(-1)[-1] = value
    write_state(tmp_path / "checkpoint", state)
    with pytest.raises(ArtifactError, match=f"{name} has weights that are not finite"):
        train(engine, checkpoints)


def test_weights_of_another_type_are_refused(engine: Engine, tmp_path: Path) -> None:
    checkpoints = begun(engine, tmp_path)
    state = read_state(tmp_path / "checkpoint")
    name = next(name for name, _ in toy.build("sngp").named_parameters())
    state["model"][name] = state["model"][name].long()
    write_state(tmp_path / "checkpoint", state)
    with pytest.raises(ValueError, match=rf"{name} has type torch.int64 in the checkpoint"):
        train(engine, checkpoints)


def test_what_safetensors_leaves_when_it_is_killed_is_known_as_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes a temporary file of its own beside the one that it was asked for."""
    import safetensors.torch

    def killed(tensors: Any, file: Path, metadata: Any = None) -> None:
        (file.parent / ".tmpAbCdEf").write_bytes(b"half")
        raise Died

    write_state(tmp_path, {"old": 1})
    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", killed)
        patch.setattr(shutil, "rmtree", lambda *args, **options: None)  # as where nothing runs any more
        with pytest.raises(Died):
            write_state(tmp_path, {"new": torch.ones(5)})
    assert [file.name for file in tmp_path.rglob(".tmp*")] == [".tmpAbCdEf"]
    remove_unused(tmp_path)
    assert not list(tmp_path.rglob(".*"))
    assert read_state(tmp_path) == {"old": 1}
