"""What test_processes.py runs in one process and in two: many small trainings for one start of processes.

Fabric starts the second process: python tests/integration/processes.py OUT
torchrun starts both, after that: torchrun --standalone --nproc-per-node 2 tests/integration/processes.py OUT
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import hetsngp
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.device_loader import Augmentation, DeviceLoader
from hetsngp.training import CheckpointConfig, Engine, Hardware, Schedule, TrainConfig, Trained, hardware
from hetsngp.training.gradients import FabricGradients

CLASSES, BATCH, EPOCHS = 3, 8, 3
# With batches of 8 one example is left over: of two processes the first gets none of the last batch.
TRAIN, HELD_OUT = 41, 17
# Batches of 8 make 5 an epoch, and these 3 steps of two, two and one batch; 5 updates end within an epoch.
INTERRUPTED = 5


def images(count: int, seed: int) -> ImageArrays:
    """Bright in another corner for each class, in noise."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (count,), generator=g)
    x = torch.randint(140, (count, 1, 6, 6), generator=g)
    for row, label in enumerate(y.tolist()):
        x[row, 0, 3 * (label // 2) :, 3 * (label % 2) :][:3, :3] += 90
    return ImageArrays(x.byte(), y, tuple("abc"))


def training() -> DeviceLoader:
    return DeviceLoader(images(TRAIN, 0), BATCH, shuffle=True, augment=Augmentation(1))


def all_of_it() -> DeviceLoader:
    train = training()
    return DeviceLoader(train.dataset, BATCH, mean=train.mean, std=train.std)


def held_out(seed: int = 1) -> DeviceLoader:
    train = training()
    return DeviceLoader(images(HELD_OUT, seed), BATCH, mean=train.mean, std=train.std)


class Network(nn.Module):
    """In the precision of its weights; ``broken``: at which call its features are no numbers."""

    num_features = 7

    def __init__(self, dropout: float, batch_norm: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 5, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(4) if batch_norm else nn.Identity()
        self.dropout, self.linear = nn.Dropout(dropout), nn.Linear(45, 7)
        self.calls, self.broken = 0, -1

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = torch.tanh(self.norm(self.conv1(x.to(self.linear.bias.dtype))))
        h = self.linear(self.dropout(torch.tanh(self.conv2(h)).flatten(1)))
        return h * float("nan") if self.calls == self.broken else h


def build(
    method: str, *, double: bool = True, dropout: float = 0.0, batch_norm: bool = False, **options: Any
) -> hetsngp.Classifier:
    """In float64: what differs by the order of a sum alone agrees to many digits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        every = {"random_features": 16, "rank": 2, "spectral_bound": 0.8, **options}
        model = hetsngp.build(method, Network(dropout, batch_norm), CLASSES, **every)
    return model.double() if double else model


@dataclass(frozen=True)
class Case:
    """A training, and the posterior after it."""

    method: str
    config: TrainConfig
    options: dict[str, Any] = field(default_factory=dict)
    fsdp: bool = True
    """Whether fsdp does the same as ddp."""
    watched: bool = True
    """Whether the model ends with the epoch that is best on held-out data; otherwise with the last."""


SGD = Schedule(
    EPOCHS, lr=0.05, weight_decay=1e-3, gp_lr_multiplier=2.0, optimizer="sgd", warmup=1.5, smooth=True
)
ADAM = Schedule(EPOCHS, lr=0.02, weight_decay=1e-2)

CASES = {
    "hetsngp": Case("hetsngp", TrainConfig(SGD, accumulate=2, ema_decay=0.9, seed=3)),
    "hetsngp, exact posterior, mc": Case(
        "hetsngp", TrainConfig(ADAM, seed=1), {"posterior": "exact", "sampler": "mc"}
    ),
    "hetsngp in float32": Case("hetsngp", TrainConfig(SGD), {"double": False}),
    "sngp": Case("sngp", TrainConfig(replace(SGD, decay="linear"), accumulate=2, ema_decay=0.9, patience=2)),
    "sngp, held bound": Case("sngp", TrainConfig(SGD, bound_every=3), fsdp=False),
    "hetsngp, sample_beta": Case(
        "hetsngp",
        TrainConfig(SGD, accumulate=2, ema_decay=0.9),
        {"sample_beta": True, "posterior": "exact"},
        fsdp=False,
    ),
    "deterministic": Case(
        "deterministic", TrainConfig(replace(SGD, decay="step", milestones=(1,)), accumulate=2, clip=0.1)
    ),
    "deterministic, batch norm": Case("deterministic", TrainConfig(SGD), {"batch_norm": True}),
    "posterior_network": Case("posterior_network", TrainConfig(ADAM, ema_decay=0.8), {"latent_dim": 2}),
}
MOVED = Case("hetsngp", TrainConfig(SGD, accumulate=2, ema_decay=0.9, seed=5))
"""Begun with ddp, and resumed with another strategy."""
RESUMED = replace(MOVED, options={"dropout": 0.3}, watched=False)
"""Dropout: every process draws its own random numbers, which a checkpoint has to restore."""
FROM_DISK = Case("deterministic", TrainConfig(SGD, accumulate=2, ema_decay=0.9), watched=False)
"""A DataLoader's batch is that of a process: two have four images each, and one has eight."""
NORMED = replace(MOVED, options={"batch_norm": True}, watched=False)
"""BatchNorm: until the end of an epoch every process has its own statistics, and has to go on with them."""


class Numbered(Dataset[tuple[Tensor, int]]):
    """Remembers which examples were asked for."""

    def __init__(self, count: int) -> None:
        self.data, self.asked = images(count, 2), []

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.asked.append(int(index))
        return self.data.images[index] / 128 - 1, int(self.data.labels[index])


# --- what is done -----------------------------------------------------------------------------------------


def train(
    engine: Engine, case: Case, checkpoints: CheckpointConfig | None = None, loader: Any = training
) -> Trained:
    model = build(case.method, **case.options)
    watched = held_out() if case.watched else None
    return engine.train(model, loader(), case.config, held_out=watched, checkpoints=checkpoints)


def write(out: Path, name: str, engine: Engine, trained: Trained, **more: Any) -> None:
    """What each process ended with: with a ``report``, also what its model predicts."""
    file = out / f"{name}.{engine.fabric.global_rank}"
    tensors = dict(trained.model.state_dict())
    if "report" in more:
        prediction = trained.model.predict(torch.cat([x for x, _ in held_out(5)]).to(engine.device))
        tensors |= {f"prediction.{key}": value for key, value in vars(prediction).items()}
    save_file({key: t.detach().clone().contiguous() for key, t in tensors.items()}, f"{file}.safetensors")
    rows = [{k: v for k, v in row.items() if "second" not in k} for row in trained.rows]
    history = [asdict(result) for result in trained.history]
    about = {"history": history, "rows": rows, "resumed": trained.resumed, **more}
    Path(f"{file}.json").write_text(json.dumps(about))


def run_case(engine: Engine, out: Path, name: str, case: Case) -> None:
    trained = train(engine, case)
    write(out, f"{name}, trained", engine, trained)
    report = engine.fit_posterior(trained.model, all_of_it())
    write(out, f"{name}, fitted", engine, trained, report=asdict(report))
    report = engine.fit_posterior(trained.model, all_of_it(), held_out(4))
    write(out, f"{name}, calibrated", engine, trained, report=asdict(report))


class Interrupted(Exception):
    """Raised instead of a kill."""


@contextmanager
def interruption(updates: int) -> Iterator[None]:
    """The step after so many fails, in every process."""
    step = FabricGradients.step

    def failing(self: FabricGradients) -> None:
        if self.updates == updates:
            raise Interrupted
        step(self)

    FabricGradients.step = failing  # type: ignore[method-assign]
    try:
        yield
    except Interrupted:
        return
    finally:
        FabricGradients.step = step  # type: ignore[method-assign]
    raise AssertionError(f"{updates} updates were not reached")


def shuffled() -> DataLoader[Any]:
    return DataLoader(Numbered(TRAIN - 1), batch_size=4, shuffle=True)


def in_order(engine: Engine) -> DataLoader[Any]:
    """The same images at a time, however many processes share them out."""
    return DataLoader(Numbered(TRAIN - 1), batch_size=BATCH // engine.fabric.world_size)


def finish(
    engine: Engine, out: Path, name: str, case: Case, folder: str | None = None, loader: Any = training
) -> None:
    """What was begun in ``folder``, or all of it."""
    checkpoints = (
        None
        if folder is None
        else CheckpointConfig(out / folder, tensorboard=False, about={"batch_size": BATCH})
    )
    write(out, name, engine, train(engine, case, checkpoints, loader))


def interrupt(engine: Engine, out: Path, folder: str, case: Case, loader: Any = training) -> None:
    with interruption(INTERRUPTED):
        about = {"batch_size": BATCH}
        checkpoints = CheckpointConfig(out / folder, seconds=0, tensorboard=False, about=about)
        train(engine, case, checkpoints, loader)


def share_out_a_data_loader(engine: Engine, out: Path) -> None:
    """Which examples each process saw in each epoch, and for the posterior; 2 divides 20 and not 21."""
    asked: dict[str, Any] = {}
    config = TrainConfig(Schedule(2, lr=0.01))
    for count in (20, 21):
        data, model = Numbered(count), build("sngp")
        before = {key: value.clone() for key, value in model.state_dict().items()}
        trained = engine.train(model, DataLoader(data, 5, shuffle=True), config)
        half = len(data.asked) // 2
        asked[f"{count} in training"] = [data.asked[:half], data.asked[half:]]
        data.asked.clear()
        trained.model.load_state_dict(before, strict=False)  # the same for any number of processes
        report = engine.fit_posterior(trained.model, DataLoader(data, 5, shuffle=True))
        asked[f"{count} for the posterior"] = [list(data.asked)]
        write(out, f"DataLoader of {count}", engine, trained, report=asdict(report))
    (out / f"asked.{engine.fabric.global_rank}.json").write_text(json.dumps(asked))


def fail_in_one(engine: Engine, out: Path, name: str, batch: int, **options: Any) -> None:
    """A NaN in this batch of the last process alone; what each of them says."""
    model = build("hetsngp")
    if engine.fabric.global_rank == engine.fabric.world_size - 1:
        model.backbone.broken = batch
    said = "nothing"
    try:
        engine.train(model, training(), TrainConfig(SGD), **options)
    except FloatingPointError as error:
        said = str(error)
    (out / f"{name}.{engine.fabric.global_rank}.txt").write_text(said)


def by_fabric(out: Path) -> None:
    """ddp; Fabric starts the second process."""
    engine = Engine(Hardware(devices=2, strategy="ddp", accelerator="cpu"))
    for name, case in CASES.items():
        run_case(engine, out, f"ddp, {name}", case)
    finish(engine, out, "ddp, whole", RESUMED)
    interrupt(engine, out, "begun by ddp", RESUMED)
    finish(engine, out, "DataLoader, whole", RESUMED, loader=shuffled)
    interrupt(engine, out, "begun with a DataLoader", RESUMED, shuffled)
    interrupt(engine, out, "to be moved", MOVED)
    interrupt(engine, out, "DataLoader to be moved", FROM_DISK, partial(in_order, engine))
    finish(engine, out, "batch norm, whole", NORMED)
    interrupt(engine, out, "begun with batch norm", NORMED)
    finish(engine, out, "batch norm, resumed", NORMED, "begun with batch norm")
    share_out_a_data_loader(engine, out)
    fail_in_one(engine, out, "NaN, nothing kept", 5)  # the last of an epoch: the others end it unharmed
    checkpoints = CheckpointConfig(out / "nan" / "ddp", seconds=0, tensorboard=False)
    fail_in_one(engine, out, "NaN, ddp", 3, checkpoints=checkpoints)


def by_torchrun(out: Path) -> None:
    """What ddp began, in new processes, which the engine has to find; then fsdp."""
    engine = Engine(Hardware())
    rank = engine.fabric.global_rank
    found = [engine.fabric.world_size, rank, type(engine.fabric.strategy).__name__]
    (out / f"torchrun.{rank}.json").write_text(json.dumps(found))
    finish(engine, out, "ddp, resumed", RESUMED, "begun by ddp")
    finish(engine, out, "DataLoader, resumed", RESUMED, "begun with a DataLoader", shuffled)

    hardware.SHARD_PARAMETERS = 50  # so that parts of the network are gathered by themselves
    engine = Engine(Hardware(strategy="fsdp"))
    for name, case in CASES.items():
        if case.fsdp:
            run_case(engine, out, f"fsdp, {name}", case)
    finish(engine, out, "fsdp, whole", RESUMED)
    interrupt(engine, out, "begun by fsdp", RESUMED)
    finish(engine, out, "fsdp, resumed", RESUMED, "begun by fsdp")
    if rank == 0:
        shutil.copytree(out / "to be moved", out / "moved to fsdp")
    engine.fabric.barrier()
    finish(engine, out, "fsdp, moved", MOVED, "moved to fsdp")
    interrupt(engine, out, "to be moved from fsdp", MOVED)
    checkpoints = CheckpointConfig(out / "nan" / "fsdp", seconds=0, tensorboard=False)
    fail_in_one(engine, out, "NaN, fsdp", 3, checkpoints=checkpoints)


def in_one(out: Path) -> None:
    """One process, the reference of the others; runs after them."""
    engine = Engine(Hardware(devices=1, accelerator="cpu"))
    for name, case in CASES.items():
        run_case(engine, out, f"one, {name}", case)
    share_out_a_data_loader(engine, out / "one")
    finish(engine, out, "one, whole", MOVED)
    finish(engine, out, "one, moved from ddp", MOVED, "to be moved")
    from_disk = partial(in_order, engine)
    finish(engine, out, "one, DataLoader, whole", FROM_DISK, loader=from_disk)
    finish(engine, out, "one, DataLoader, moved", FROM_DISK, "DataLoader to be moved", from_disk)
    finish(engine, out, "one, moved from fsdp", MOVED, "to be moved from fsdp")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder, torchrun = Path(sys.argv[1]), "TORCHELASTIC_RUN_ID" in os.environ
    (by_torchrun if torchrun else by_fabric)(folder)
    # gloo's threads may abort a process at the end of its interpreter, when all is written. So it ends
    # without that, and not before the other one is done, which may still wait for its messages.
    ranks = range(torch.distributed.get_world_size())
    ends = [folder / f"the end of {'torchrun' if torchrun else 'fabric'}.{rank}" for rank in ranks]
    ends[torch.distributed.get_rank()].touch()
    while not all(end.exists() for end in ends):
        time.sleep(0.05)
    sys.stderr.flush()
    os._exit(0)
