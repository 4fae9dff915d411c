"""Every write of a training fails once, and from some on all of them, as on a full disk.

The command must end with one line and exit code 2, or succeed with a warning where only a log is missing. The
same command without the fault must then end with the results of an undisturbed run.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.attacks.file_operations import Operations
from tools.attacks.harness import CLEAN_ERROR, CORRECT, HANG, WRONG, Result, classify_command
from tools.attacks.kills import _count, _must_work
from tools.attacks.small_runs import Ended, digest_of, leftovers, run_command, warm_up, write_data

from hetsngp.locking import LOCK

ATTACK = "write errors"
ERRORS = {
    "open": (errno.ENOSPC, errno.EACCES, errno.EMFILE),
    "write": (errno.ENOSPC, errno.EIO),
    "close": (errno.EIO, errno.EDQUOT),
    "fsync": (errno.EIO, errno.ENOSPC),
    "rename": (errno.ENOSPC, errno.EIO),
    "link": (errno.ENOSPC, errno.EPERM),
    "unlink": (errno.EIO, errno.EROFS),
    "mkdir": (errno.ENOSPC, errno.EACCES),
    "rmdir": (errno.EIO,),
    "truncate": (errno.EIO,),
}
SIZES = (0, 1, 50, 300, 1000, 3000, 10_000, 20_000, 40_000, 80_000)
"""Limits of the system on the size of a file, at which a write is short and the next one fails."""
SPACES = (0, 8, 64, 128, 256, 384, 512, 768)
"""KiB on a file system of its own."""


def attack(seed: int, share: float, folder: Path) -> Iterator[Result]:
    """Fail the operations of a training in a random order, of which the first ``share`` is taken."""
    warm_up()
    draw = random.Random(seed)
    recipe = write_data(folder / "data")
    out, log = folder / "out", folder / "log.txt"
    command = ["train", str(recipe), "--set", "batch_size=24", "--out", str(out)]
    _must_work(run_command(command, lambda: _count(out, log)))
    reference, operations = digest_of(out), log.read_text(encoding="utf-8").splitlines()
    shutil.rmtree(out)

    def case(where: str, prepare: Callable[[], None]) -> Result:
        failed = run_command(command, prepare)
        found = digest_of(out) if failed.returncode == 0 else reference
        result = _judge(where, failed, found, run_command(command), out, reference)
        shutil.rmtree(out, ignore_errors=True)
        return result

    points = list(range(1, len(operations) + 1))
    draw.shuffle(points)
    for point in points[: max(5, round(share * len(points)))]:
        kind = operations[point - 1].split()[0]
        code = draw.choice(ERRORS[kind])
        where = f"{errno.errorcode[code]} in operation {point}, {operations[point - 1]}"
        yield case(where, lambda point=point, code=code: _fail_at(out, point, code))  # type: ignore[misc]
    for point in points[: max(2, round(share * 12))]:
        where = f"full disk from operation {point}, {operations[point - 1]}"
        yield case(where, lambda point=point: _fail_from(out, point))  # type: ignore[misc]
    for point in range(1, max(2, round(share * 9)) + 1):
        where = f"ENOSPC in operation {point} of TensorBoard's log"
        yield case(where, lambda point=point: _fail_at(out, point, errno.ENOSPC, log=True))  # type: ignore[misc]
    for size in draw.sample(SIZES, max(2, round(share * len(SIZES)))):
        yield case(f"files of at most {size} bytes", lambda size=size: _limit(size))  # type: ignore[misc]
    for space in draw.sample(SPACES, max(1, round(share * len(SPACES)))):
        if (found := _small_disk(command, out, space, reference)) is not None:
            yield found


def _judge(
    where: str, failed: Ended, reported: dict[str, str], again: Ended, out: Path, reference: dict[str, str]
) -> Result:
    """Outcome of the run with the fault; ``reported``: what it had written where it reported success."""
    if failed.hung or again.hung:
        return Result(ATTACK, where, HANG)
    outcome, detail = classify_command(failed.returncode, failed.stderr)
    if outcome not in (CORRECT, CLEAN_ERROR):
        return Result(ATTACK, where, outcome, detail)
    # A lock file that could not be removed is not locked, and is removed at the next start.
    if {name: found for name, found in reported.items() if Path(name).name != LOCK} != reference:
        return Result(ATTACK, where, WRONG, "success was reported, and files are missing or others")
    text, detail_again = classify_command(again.returncode, again.stderr)
    if text != CORRECT:
        return Result(ATTACK, where, WRONG if text == CLEAN_ERROR else text, f"run again: {detail_again}")
    found = digest_of(out)
    different = sorted(name for name in found.keys() | reference if found.get(name) != reference.get(name))
    if different:
        return Result(ATTACK, where, WRONG, f"other than undisturbed: {', '.join(different)}")
    left = leftovers(out)
    return (
        Result(ATTACK, where, WRONG, f"left behind: {left}")
        if left
        else Result(ATTACK, where, outcome, detail)
    )


def _fail_at(folder: Path, point: int, code: int, *, log: bool = False) -> None:
    """Fail one operation; of a write, half was done."""

    def act(number: int, kind: str, path: str, part: Callable[[], None]) -> None:
        if number == point:
            part()
            raise OSError(code, os.strerror(code), path)

    Operations(folder, act, thread=log).install()


def _fail_from(folder: Path, point: int) -> None:
    """Fail every operation that takes space, from one on."""

    def act(number: int, kind: str, path: str, part: Callable[[], None]) -> None:
        if number >= point and kind in ("open", "write", "mkdir", "link", "fsync"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    Operations(folder, act).install()


def _limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _small_disk(command: list[str], out: Path, space: int, reference: dict[str, str]) -> Result | None:
    """Train on a file system with so many KiB, then give it more; None where none can be mounted."""
    out.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={max(4, space)}k", "tmpfs", str(out)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        out.rmdir()
        return None
    try:
        failed = run_command(command)
        subprocess.run(["mount", "-o", "remount,size=64m", str(out)], capture_output=True, check=True)
        found = digest_of(out) if failed.returncode == 0 else reference
        return _judge(f"disk of {space} KiB", failed, found, run_command(command), out, reference)
    finally:
        subprocess.run(["umount", str(out)], capture_output=True, check=False)
        shutil.rmtree(out, ignore_errors=True)
