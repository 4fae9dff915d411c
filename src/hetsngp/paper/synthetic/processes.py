"""Many runs on a few processes; each is stored when it is finished, so that an interrupted demo continues."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from hetsngp.fitting.loop import EpochResult
from hetsngp.paper.synthetic.experiment import SyntheticRun, train_and_measure
from hetsngp.paper.synthetic.store import Store

POLL_SECONDS = 0.1
MOST_WORKERS = 8


@dataclass(frozen=True)
class Step:
    """Progress of a run, for the parent process: an "epoch", or "done"."""

    run: SyntheticRun
    kind: str
    epoch: int = 0


def run_all(
    runs: Sequence[SyntheticRun],
    store: Store,
    *,
    maps: Callable[[SyntheticRun], bool] = lambda run: False,
    workers: int | None = None,
    on_step: Callable[[Step], None] = lambda step: None,
) -> None:
    """Carry out those of ``runs`` that are not in ``store``, on ``workers`` processes of one thread each."""
    store.clean()
    todo = [run for run in runs if not store.has(run, maps=maps(run))]
    workers = min(workers or default_workers(), len(todo))
    if workers > 1:
        _in_processes(todo, store, maps, workers, on_step)
        return
    with _one_thread():
        for run in todo:
            _carry_out(store, run, maps(run), on_step)
            on_step(Step(run, "done"))


def _carry_out(store: Store, run: SyntheticRun, maps: bool, on_step: Callable[[Step], None]) -> None:
    def tell(result: EpochResult) -> None:
        on_step(Step(run, "epoch", result.epoch))

    store.write(run, train_and_measure(run, maps=maps, on_epoch=tell))


def _in_processes(
    todo: Sequence[SyntheticRun],
    store: Store,
    maps: Callable[[SyntheticRun], bool],
    workers: int,
    on_step: Callable[[Step], None],
) -> None:
    # Forking a process that has run torch can hang, so each worker starts afresh.
    context = multiprocessing.get_context("spawn")
    steps, (theirs, ours) = context.SimpleQueue(), context.Pipe(duplex=False)
    with ours, theirs, ProcessPoolExecutor(workers, context, _start_worker, (steps, theirs)) as pool:
        with _interrupts_blocked():  # the workers start here, and inherit it
            pending = {pool.submit(_work, store, run, maps(run)): run for run in todo}
        try:
            while pending:
                finished, _ = wait(pending, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                while not steps.empty():
                    on_step(steps.get())
                for future in finished:
                    run = pending.pop(future)
                    _raise_for(run, future.exception())
                    on_step(Step(run, "done"))
        except BaseException:
            ours.close()  # the workers leave; the pool would let them finish
            pool.shutdown(cancel_futures=True)
            raise


def _raise_for(run: SyntheticRun, error: BaseException | None) -> None:
    if isinstance(error, BrokenProcessPool):
        raise RuntimeError(
            "a worker process died, perhaps for want of memory: finished runs are kept, so run the same "
            "command again (hetsngp demo: with --jobs 1)"
        ) from error
    if error is not None:
        raise RuntimeError(f"{run.name} failed: {error}") from error


_steps: Any = None
"""In a worker: the queue to the parent."""


def _start_worker(steps: Any, parent: Any) -> None:
    global _steps
    _steps = steps
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)


def _exit_with_parent(parent: Any) -> None:
    """Exit in mid-run when the parent closes its end of the pipe, or is killed, which closes it too."""
    with suppress(EOFError, OSError):
        parent.recv()
    os._exit(1)


def _work(store: Store, run: SyntheticRun, maps: bool) -> None:
    _carry_out(store, run, maps, _steps.put)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block SIGINT: a terminal sends Ctrl-C to every process, and the parent decides what to stop."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread, as a worker does: the same numbers, and more do not speed up a small network."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def default_workers() -> int:
    """Number of cores this process may use, up to 8: a worker takes about 400 MB."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, MOST_WORKERS)
