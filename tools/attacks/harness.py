"""Run one case of an attack in a process of its own, and name what came of it.

A case is a function without arguments. It runs in a fork of this process, which has torch and hetsngp
imported, with limits on memory and time, so that a crash, a hang or a huge allocation ends the case alone.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "hetsngp"

CORRECT, CLEAN_ERROR = "correct", "clean error"
WRONG, TRACEBACK, CRASH, HANG = "silently wrong", "traceback", "crash", "hang"
OUTCOMES = (CORRECT, CLEAN_ERROR, WRONG, TRACEBACK, CRASH, HANG)
"""``correct``: it worked and the answer is the right one. The last four are defects."""
DEFECTS = (WRONG, TRACEBACK, CRASH, HANG)
NAMED = {
    ("training with little memory", CRASH): "native code of torch and its libraries aborts the process where "
    "it has no memory; nothing is lost, and the same command goes on"
}
"""Defects that cannot be mended here, by attack and outcome, with their reason."""
MEMORY = 2 * 2**30
"""Bytes that a case may allocate beyond what the process has when it starts."""
EXPECTED = (ValueError, TypeError, OSError, ImportError, ArithmeticError, MemoryError, RuntimeError)
"""Types of errors that the library raises for wrong input."""


@dataclass(frozen=True)
class Result:
    """Outcome of one case."""

    attack: str
    case: str
    outcome: str
    detail: str = ""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def is_unexpected(result: Result) -> bool:
    """Whether a result is a defect that has no name."""
    return result.outcome in DEFECTS and (result.attack, result.outcome) not in NAMED


class Wrong(AssertionError):
    """Raised by a case whose answer is not the right one."""


def run_case(
    attack: str, case: str, function: Callable[[], Any], *, seconds: float = 30.0, memory: int | None = MEMORY
) -> Result:
    """Run ``function`` in a fork. It returns where the answer is right, raises :class:`Wrong` where it is
    not, and lets errors of the library pass: those that our code raises are clean, those of torch or NumPy
    that pass through are not.
    """
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        os.setsid()
        os.close(read)
        _child(function, write, memory)
    os.close(write)
    try:
        text = _read_until(read, seconds)
    finally:
        os.close(read)
    if text is None:
        os.killpg(process, signal.SIGKILL)  # with the processes that the case has started
        os.waitpid(process, 0)
        return Result(attack, case, HANG, f"no answer within {seconds:g} s")
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        return Result(attack, case, CRASH, signal.Signals(os.WTERMSIG(status)).name)
    if not text:
        return Result(attack, case, CRASH, f"exit code {os.waitstatus_to_exitcode(status)} without an answer")
    outcome, detail = json.loads(text)
    return Result(attack, case, outcome, detail)


def run_cases(
    attack: str, cases: Sequence[tuple[str, Callable[[], Any]]], **options: Any
) -> Iterator[Result]:
    """:func:`run_case` for each of ``cases``, in order."""
    for case, function in cases:
        yield run_case(attack, case, function, **options)


def classify_error(error: BaseException) -> tuple[str, str]:
    """Outcome of an error: clean where code of hetsngp raises it on purpose, in one of the usual types."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if isinstance(error, Wrong):
        return WRONG, text
    frames = traceback.extract_tb(error.__traceback__)
    # The error is ours where the last frame is a raise statement of the package.
    last = frames[-1] if frames else None
    ours = last is not None and Path(last.filename).is_relative_to(PACKAGE)
    raised = last is not None and (last.line or "").lstrip().startswith("raise ")
    if ours and raised and isinstance(error, EXPECTED) and str(error):
        return CLEAN_ERROR, text
    where = f" at {last.filename.rpartition('/')[2]}:{last.lineno}" if last is not None else ""
    return TRACEBACK, text + where


def classify_command(returncode: int, stderr: str) -> tuple[str, str]:
    """Outcome of a command of hetsngp: success, or exit code 2 and one line, are clean."""
    lines = [line for line in stderr.splitlines() if line.strip() and not line.startswith("warning:")]
    last = lines[-1][:300] if lines else ""
    if "Traceback (most recent call last)" in stderr:
        return TRACEBACK, last
    if returncode < 0:
        return CRASH, signal.Signals(-returncode).name
    if returncode == 0:
        return CORRECT, last
    if returncode == 2 and last.startswith("hetsngp: "):
        return CLEAN_ERROR, last
    return TRACEBACK, f"exit code {returncode}: {last}"


def _child(function: Callable[[], Any], write: int, memory: int | None) -> None:
    """Run the case in the fork and end it; never returns."""
    # Native stack dumps of a crash that is being provoked would only fill the screen.
    faulthandler.disable()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    answer = (CORRECT, "")
    try:
        if memory is not None:
            limit = _virtual_memory() + memory
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function()
    except BaseException as error:  # what it is, is the result
        answer = classify_error(error)
    with os.fdopen(write, "w") as pipe:
        pipe.write(json.dumps(answer))
    os._exit(0)


def _virtual_memory() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()


def _read_until(descriptor: int, seconds: float) -> str | None:
    """Read to the end of the pipe; None: the time is over."""
    import time

    parts, end = [], time.monotonic() + seconds
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return None
        part = os.read(descriptor, 2**16)
        if not part:
            return b"".join(parts).decode()
        parts.append(part)


def table(results: Sequence[Result]) -> str:
    """Counts of outcomes for each attack, as a Markdown table."""
    attacks = list(dict.fromkeys(result.attack for result in results))
    lines = [
        "| attack | tried | " + " | ".join(OUTCOMES) + " |",
        "|---|" + "---:|" * (len(OUTCOMES) + 1),
    ]
    for attack in attacks:
        mine = [result.outcome for result in results if result.attack == attack]
        counts = " | ".join(f"{mine.count(outcome):,}" for outcome in OUTCOMES)
        lines.append(f"| {attack} | {len(mine):,} | {counts} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit("run tools/attack.py")
