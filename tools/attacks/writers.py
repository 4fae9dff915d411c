"""Two writers to one folder, readers during a save, and holders of the lock that are killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tools.attacks.harness import Result, Wrong, run_case
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hetsngp
from hetsngp.fitting.schedule import Schedule
from hetsngp.locking import LOCK, FolderInUse
from hetsngp.nn.backbones import ResidualMLP
from hetsngp.training import CheckpointConfig, Engine, Hardware, TrainConfig, Trained

NOBODY = 65534
X = torch.linspace(-2, 2, 24).reshape(12, 2)
Y = (X[:, 0] > 0).long()


def attack(seed: int, share: float, folder: Path) -> Iterator[Result]:
    """Yield the outcome of every round."""
    models = [_fitted_model(seed + i) for i in range(3)]
    answers = [model.predict(X).probs for model in models]
    hetsngp.save(models[0], folder / "first")
    _check_answer(folder / "first", answers)  # imports what a reader without permissions may not
    for i in range(max(6, round(300 * share))):
        path = folder / f"pair-{i}"
        yield run_case("two saves to one folder", f"round {i}", lambda p=path: _two_saves(models, answers, p))
    for i in range(max(2, round(20 * share))):
        path = folder / f"threads-{i}"
        yield run_case(
            "two saves from threads", f"round {i}", lambda p=path: _two_threads(models, answers, p)
        )
    path = folder / "read"
    for i in range(max(2, round(20 * share))):
        yield run_case(
            "30 loads during saves, without write permission",
            f"round {i}",
            lambda p=path: _read_during_saves(models, answers, p, loads=30),
            seconds=120,
        )
    for i in range(max(3, round(30 * share))):
        path, pause = folder / f"killed-{i}", 0.002 * i
        yield run_case(
            "save after a killed save",
            f"killed after {1000 * pause:.0f} ms",
            lambda p=path, s=pause: _save_after_kill(models, answers, p, s),
        )
    for i in range(max(2, round(20 * share))):
        path = folder / f"train-{i}"
        yield run_case(
            "two trainings into one folder", f"round {i}", lambda p=path: _two_trainings(p), seconds=60
        )


def _fitted_model(seed: int) -> hetsngp.Classifier:
    torch.manual_seed(seed)
    backbone = ResidualMLP(2, width=8, depth=1)
    model = hetsngp.build("hetsngp", backbone, 2, rank=1, random_features=16, dataset_size=len(X))
    hetsngp.fit_posterior(model, [(X, Y)])
    return model


def _two_saves(models: list[hetsngp.Classifier], answers: list[Tensor], path: Path) -> None:
    hetsngp.save(models[2], path)
    start, go = os.pipe()
    writers = [_fork(lambda m=m: (os.read(start, 1), hetsngp.save(m, path))) for m in models[:2]]
    os.write(go, b"12")
    for writer in writers:
        _check_exit(writer)
    _check_answer(path, answers[:2])
    _check_no_leftovers(path)


def _two_threads(models: list[hetsngp.Classifier], answers: list[Tensor], path: Path) -> None:
    errors: list[Exception] = []

    def write(model: hetsngp.Classifier) -> None:
        try:
            for _ in range(5):
                hetsngp.save(model, path)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(model,)) for model in models[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise Wrong(f"a save failed: {errors[0]}") from errors[0]
    _check_answer(path, answers[:2])
    _check_no_leftovers(path)


def _read_during_saves(
    models: list[hetsngp.Classifier], answers: list[Tensor], path: Path, *, loads: int
) -> None:
    hetsngp.save(models[0], path)

    def write_for_ever() -> None:
        while True:
            for model in models:
                hetsngp.save(model, path)

    def read() -> None:
        if os.getuid() == 0:  # permissions do not bind the superuser
            os.setuid(NOBODY)
        for _ in range(loads):
            _check_answer(path, answers)

    writer = _fork(write_for_ever)
    try:
        _check_exit(_fork(read))
    finally:
        _kill(writer)


def _save_after_kill(
    models: list[hetsngp.Classifier], answers: list[Tensor], path: Path, seconds: float
) -> None:
    hetsngp.save(models[0], path)

    def write_for_ever() -> None:
        while True:
            hetsngp.save(models[1], path)
            hetsngp.save(models[0], path)

    writer = _fork(write_for_ever)
    time.sleep(seconds)
    _kill(writer)
    _check_answer(path, answers[:2])
    hetsngp.save(models[2], path)
    _check_answer(path, answers[2:])
    _check_no_leftovers(path)


def _two_trainings(path: Path) -> None:
    """The first training holds the folder while the second is refused; then the run is there, finished."""
    begun, say_begun = os.pipe()
    refused, say_refused = os.pipe()

    class Waiting(Dataset[tuple[Tensor, Tensor]]):
        """Data set whose example 0 waits until the second training was refused."""

        def __len__(self) -> int:
            return len(X)

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            if index == 0 and _holds_lock(path):
                os.write(say_begun, b"1")
                os.read(refused, 1)
            return X[index], Y[index]

    first = _fork(lambda: (os.close(say_refused), _train(Waiting(), path)))
    data = TensorDataset(X, Y)
    os.read(begun, 1)
    try:
        _train(data, path)
    except FolderInUse as error:
        if f"process {first} " not in str(error):
            raise Wrong(f"the error does not name process {first}: {error}") from error
    else:
        raise Wrong("both trainings wrote into one folder")
    finally:
        os.close(say_refused)  # from now on reading it returns at once
        _check_exit(first)
    if _train(data, path).resumed == 0:
        raise Wrong("the run of the first training is gone")


def _holds_lock(path: Path) -> bool:
    file = path / LOCK
    return file.exists() and f'"process": {os.getpid()}' in file.read_text(encoding="utf-8")


def _train(data: Dataset[Any], path: Path) -> Trained:
    engine = Engine(Hardware(accelerator="cpu"))
    model = hetsngp.build("deterministic", ResidualMLP(2, width=8, depth=1), 2)
    config = TrainConfig(Schedule(epochs=1, lr=0.01))
    checkpoints = CheckpointConfig(path, tensorboard=False)
    return engine.train(model, DataLoader(data, 4), config, checkpoints=checkpoints, show=False)


# --- processes and checks -------------------------------------------------------------------------------


def _fork(function: Callable[[], object]) -> int:
    """Run ``function`` in a fork; returns its process number."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return process


def _check_exit(process: int) -> None:
    _, status = os.waitpid(process, 0)
    if status != 0:
        raise Wrong(f"a writer ended with status {os.waitstatus_to_exitcode(status)}")


def _kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def _check_answer(path: Path, answers: list[Tensor]) -> None:
    try:
        found = hetsngp.load(path).predict(X).probs
    except Exception as error:  # nothing is damaged: an error is as wrong as another answer
        raise Wrong(f"no model: {error}") from error
    if not any(torch.equal(found, answer) for answer in answers):
        raise Wrong(f"{path.name} holds another model than those that were saved")


def _check_no_leftovers(path: Path) -> None:
    names = sorted(file.name for file in path.iterdir())
    if len(names) != 2 or names[0] != "config.json":
        raise Wrong(f"the folder holds {names}")
