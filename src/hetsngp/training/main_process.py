"""Work of the main process that others wait for: its error is raised by all, so that none waits for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from hetsngp.files import remove_leftovers
from hetsngp.locking import FolderInUse, one_writer
from hetsngp.training.checkpointing.checkpoint_files import remove_unused

T = TypeVar("T")


def on_main(fabric: Any, function: Callable[[], T]) -> T:
    """Call ``function`` on the main process, and return its result or raise its error on every process.

    A collective call. The result is sent to the other processes.
    """
    if fabric.world_size == 1:
        return function()
    result: Any = None
    error: Exception | None = None
    if fabric.is_global_zero:
        try:
            result = function()
        except Exception as caught:  # the others are told before it is raised again
            error = caught
    result, failed = fabric.broadcast((result, None if error is None else f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    if failed is not None:
        raise RuntimeError(f"the main process stopped: {failed}")
    answer: T = result
    return answer


@contextmanager
def run_writer(fabric: Any, folder: Path) -> Iterator[None]:
    """Context in which the main process alone writes into the folder of a run; a collective call.

    Fails at once, on every process, where another writer has it. What killed writers left is removed.
    """
    with ExitStack() as stack:

        def take() -> None:
            if stack.enter_context(one_writer(folder)):
                remove_run_leftovers(folder)

        on_main(fabric, take)
        yield


def remove_leftovers_of_finished(folder: Path) -> None:
    """Remove what a run left that was killed after its last file was written, if it may be removed."""
    if any(folder.glob(".*")) or any(folder.glob("*/.*")):
        with suppress(OSError), one_writer(folder) as locked:
            if locked:
                remove_run_leftovers(folder)


def remove_run_leftovers(folder: Path) -> None:
    """Remove what killed writers left in the folders of a training; the caller holds the lock of the run."""
    remove_leftovers(folder)
    for each in (*folder.glob("checkpoint*"), *folder.glob("best-*")):
        if not each.is_symlink():  # a folder from somebody else may point anywhere
            remove_unused(each)
    model = folder / "model"
    if model.is_dir() and not model.is_symlink():
        with suppress(FolderInUse), one_writer(model) as locked:  # hetsngp.save locks it by itself
            if locked:
                remove_leftovers(model)
