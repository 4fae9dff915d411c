"""Errors of the system, as one line with what to do; none of them is a traceback."""

from __future__ import annotations

import errno
import os
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("typer", reason="pip install 'hetsngp[cli]'")

from hetsngp.cli.errors import describe_error, make_group_class
from hetsngp.locking import FolderInUse

AGAIN = "; run the same command again to resume"


def memory_error() -> BaseException:
    """That of NumPy, which has a text."""
    try:
        np.empty(2**55)
    except MemoryError as error:
        return error
    raise AssertionError("there was memory")


def allocator_error() -> BaseException:
    """That of torch's allocator, a RuntimeError."""
    try:
        torch.empty(2**55)
    except RuntimeError as error:
        return error
    raise AssertionError("there was memory")


ERRORS: list[tuple[Any, str, str]] = [
    (OSError(errno.ENOSPC, "No space left", "a/b"), "train", f"a/b: No space left: free some space{AGAIN}"),
    (OSError(errno.EIO, "Input/output error"), "evaluate", f"Input/output error{AGAIN}"),
    (PermissionError(errno.EACCES, "Permission denied", "a"), "predict", "a: Permission denied"),
    (IsADirectoryError(errno.EISDIR, "Is a directory", "a"), "data", "a: Is a directory"),
    (
        FolderInUse("a is being written by process 3 on host"),
        "train",
        "a is being written by process 3 on host",
    ),
    (
        MemoryError(),
        "train",
        f"out of memory: MemoryError (smaller batches take less: --set batch_size=…){AGAIN}",
    ),
    (torch.OutOfMemoryError("CUDA"), "reproduce", f"out of memory: CUDA{AGAIN}"),
]


@pytest.mark.parametrize(("error", "command", "text"), ERRORS)
def test_an_error_of_the_system_says_what_to_do(error: Any, command: str, text: str) -> None:
    assert describe_error(error, command) == text


@pytest.mark.parametrize("make", [memory_error, allocator_error])
def test_out_of_memory_is_recognised(make: Any) -> None:
    text = describe_error(make(), "train")
    assert text.startswith("out of memory: ")
    assert text.endswith(AGAIN)
    assert "\n" not in text


def run(command: Any, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """An application of one group with one command, as hetsngp is."""
    import typer

    app = typer.Typer(cls=make_group_class(), pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    app.command("train")(command)
    with pytest.raises(SystemExit) as ended:
        app(["train"])
    return int(str(ended.value.code)), capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        *(error for error, _, _ in ERRORS),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        EOFError("half a file"),
    ],
)
def test_a_command_ends_with_one_line(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise error

    code, text = run(fail, capsys)
    assert code == 2
    assert text.startswith("hetsngp: ")
    assert text.count("\n") == 1


def test_warnings_and_errors_of_threads_are_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    def write() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def command() -> None:
        warnings.warn("the checkpoint is damaged:\nresuming from the one before it", stacklevel=1)
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()

    hook = threading.excepthook
    code, text = run(command, capsys)
    assert code == 0
    assert text.splitlines() == [
        "warning: the checkpoint is damaged: resuming from the one before it",
        "warning: [Errno 28] No space left on device",
    ]
    assert threading.excepthook is hook
