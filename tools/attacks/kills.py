"""SIGKILL at file operations and at random moments of train, evaluate, demo and save.

After each kill the same command is run again: it must end with the results of a run that was not killed, and
leave no temporary file, lock or unused weights behind.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools.attacks.file_operations import Operations
from tools.attacks.harness import (
    CLEAN_ERROR,
    CORRECT,
    HANG,
    TRACEBACK,
    WRONG,
    Result,
    _virtual_memory,
    classify_command,
)
from tools.attacks.small_runs import Ended, digest_of, leftovers, run_command, warm_up, write_data

ATTACK, AT_MOMENTS = "kills at file operations", "kills at random moments"
LITTLE_MEMORY = "training with little memory"
RANDOM_KILLS = 18
MEMORY_SIZES = (0, 5, 10, 20, 30, 50, 80)
"""MiB beyond what the process has before it begins."""
STRIDE = {"train": 2, "evaluate": 8, "demo": 8}
"""Every so many file operations of a command are killed at; half of those of a training are 100 and more."""


def attack(seed: int, share: float, folder: Path) -> Iterator[Result]:
    """Kill at file operations, in a random order of which the first ``share`` is taken, and at moments."""
    warm_up()
    draw = random.Random(seed)
    recipe = write_data(folder / "data")
    run, images = folder / "finished", folder / "data" / "images.npz"
    commands = {
        "train": lambda out: ["train", str(recipe), "--out", str(out)],
        "evaluate": lambda out: ["evaluate", str(run), "--ood", f"far={images}", "--out", str(out)],
        "demo": lambda out: ["demo", *DEMO, "--out", str(out)],
    }
    _must_work(run_command(commands["train"](run)))
    for name, command in commands.items():
        yield from _commands(name, command, folder / name, draw, share)
    yield from _without_memory(commands["train"], folder / "memory", share)
    yield from _saves(folder / "save", share)


DEMO = ("--tasks", "two_moons", "--methods", "deterministic", "--epochs", "1", "--jobs", "1")


def _commands(
    name: str, command: Callable[[Path], list[str]], folder: Path, draw: random.Random, share: float
) -> Iterator[Result]:
    folder.mkdir()
    out, log = folder / "out", folder / "log.txt"
    begun = time.monotonic()
    _must_work(run_command(command(out), lambda: _count(out, log)))
    seconds = time.monotonic() - begun
    reference, operations = digest_of(out), log.read_text(encoding="utf-8").splitlines()
    shutil.rmtree(out)
    points = list(range(1 + draw.randrange(STRIDE[name]), len(operations) + 1, STRIDE[name]))
    draw.shuffle(points)
    for point in points[: max(3, round(share * len(points)))]:
        where = f"{name}, before operation {point}, {operations[point - 1]}"
        killed = run_command(command(out), lambda point=point: _kill_at(out, point))  # type: ignore[misc]
        yield _judge(where, killed, run_command(command(out)), out, reference)
        shutil.rmtree(out, ignore_errors=True)
    for _ in range(max(1, round(share * RANDOM_KILLS / len(STRIDE)))):
        moments = sorted(draw.uniform(0.0, seconds) for _ in range(draw.choice((1, 1, 2))))
        for moment in moments:
            killed = run_command(command(out), lambda moment=moment: _kill_after(moment))  # type: ignore[misc]
        where = f"{name}, after {' and '.join(f'{moment:.3f}' for moment in moments)} s"
        yield _judge(where, killed, run_command(command(out)), out, reference, ended=True)
        shutil.rmtree(out, ignore_errors=True)


def _judge(
    where: str, killed: Ended, again: Ended, out: Path, reference: dict[str, str], *, ended: bool = False
) -> Result:
    """Outcome of the command that was run again; ``ended``: the killed one may have ended before."""
    kind = AT_MOMENTS if ended else ATTACK
    if killed.hung or again.hung:
        return Result(kind, where, HANG)
    if killed.returncode != -signal.SIGKILL and not (ended and killed.returncode == 0):
        return Result(kind, where, TRACEBACK, f"not killed: {killed.returncode} {killed.stderr[-300:]}")
    outcome, detail = classify_command(again.returncode, again.stderr)
    if outcome != CORRECT:
        return Result(kind, where, outcome if outcome != CLEAN_ERROR else WRONG, detail)
    found = digest_of(out)
    different = sorted(name for name in found.keys() | reference if found.get(name) != reference.get(name))
    if different:
        return Result(kind, where, WRONG, f"other than undisturbed: {', '.join(different)}")
    left = leftovers(out)
    return Result(kind, where, WRONG if left else CORRECT, f"left behind: {left}" if left else "")


def _without_memory(command: Callable[[Path], list[str]], folder: Path, share: float) -> Iterator[Result]:
    """Train with a few MiB: an error of one line, or a crash in native code; then the same as undisturbed."""
    out = folder / "out"
    _must_work(run_command(command(out)))
    reference = digest_of(out)
    shutil.rmtree(out)
    for size in MEMORY_SIZES[:: max(1, round(0.25 / max(share, 0.05)))]:
        ended = run_command(command(out), lambda size=size: _limit_memory(size * 2**20))  # type: ignore[misc]
        again = run_command(command(out))
        where = f"{size} MiB beyond those at the start"
        outcome, detail = classify_command(ended.returncode, ended.stderr)
        after = _judge(where, Ended(0, ended.stderr, ended.hung), again, out, reference, ended=True)
        if after.outcome != CORRECT:
            outcome, detail = after.outcome, after.detail
        yield Result(LITTLE_MEMORY, where, outcome, detail)
        shutil.rmtree(out, ignore_errors=True)


def _limit_memory(size: int) -> None:
    limit = _virtual_memory() + size
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _saves(folder: Path, share: float) -> Iterator[Result]:
    """Kill hetsngp.save at each of its operations: the folder has the old model or the new one."""
    import torch

    import hetsngp
    from hetsngp.nn.backbones import ResidualMLP

    def model(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return hetsngp.build(
            "deterministic", ResidualMLP(2, 8, 1, generator=generator), 2, generator=generator
        )

    def weights(path: Path) -> list[float]:
        return [float(p.detach().double().sum()) for p in hetsngp.load(path).parameters()]

    old, new = model(0), model(1)
    hetsngp.save(old, folder / "old")
    hetsngp.save(new, folder / "new")
    states = [weights(folder / name) for name in ("old", "new")]
    log = folder / "log.txt"
    _in_fork(lambda: (_count(folder / "old", log), hetsngp.save(new, folder / "old")))
    operations = log.read_text(encoding="utf-8").splitlines()
    step = max(1, round(1 / max(share, 0.25)))
    for point in range(1, len(operations) + 1, step):
        out, where = folder / "out", f"save, before operation {point}, {operations[point - 1]}"
        hetsngp.save(old, out)
        _in_fork(lambda point=point: (_kill_at(folder / "out", point), hetsngp.save(new, folder / "out")))  # type: ignore[misc]
        if weights(out) not in states:
            yield Result(ATTACK, where, WRONG, "neither the old model nor the new one")
        else:
            hetsngp.save(new, out)
            left = leftovers(out)
            wrong = weights(out) != states[1] or left
            yield Result(ATTACK, where, WRONG if wrong else CORRECT, f"left behind: {left}" if left else "")
        shutil.rmtree(out)


def _in_fork(function: Callable[[], Any]) -> None:
    process = os.fork()
    if process == 0:
        try:
            function()
        finally:
            os._exit(0)
    os.waitpid(process, 0)


def _count(folder: Path, log: Path) -> None:
    """Write the kind and the file of every operation into ``log``."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    write, start = os.write, len(str(folder.resolve()))

    def act(number: int, kind: str, path: str, part: Callable[[], None]) -> None:
        write(descriptor, f"{kind} {path[start:] or '/'}\n".encode())

    Operations(folder, act).install()


def _kill_at(folder: Path, point: int) -> None:
    def act(number: int, kind: str, path: str, part: Callable[[], None]) -> None:
        if number == point:
            if number % 2:
                part()  # half of what would be written is on disk
            os.kill(os.getpid(), signal.SIGKILL)

    Operations(folder, act).install()


def _kill_after(seconds: float) -> None:
    def kill() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


def _must_work(ended: Ended) -> None:
    if ended.returncode or ended.hung:
        raise RuntimeError(f"the undisturbed command failed: {ended.stderr[-500:]}")
