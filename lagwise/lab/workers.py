"""Processes that do runs, several at a time.

They are no pool of a library. One of `concurrent.futures` ends all runs when one process dies, and others kill a process that was
asked to stop before it has saved its run, or start a new one in its place.
"""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.resource_tracker import ensure_running
from threading import Thread
from typing import Any

import torch

from lagwise.lab.checkpoint import saved_words
from lagwise.lab.jobs import Job, Outcome, do_run, failed_outcome
from lagwise.lab.run_folder import Run
from lagwise.lab.signals import Interrupted, stop_on_signal


def run_in_processes(
    todo: Sequence[Job], jobs: int, tell: Callable[[int, dict[str, Any] | Outcome], None], *, threads: int
) -> None:
    """Does runs in some processes at a time, each with so many threads, and tells what they say."""
    waiting = list(reversed(todo))
    workers: list[Worker] = []
    asked = False
    with stop_on_signal() as stopped, ending(workers):
        while workers or (waiting and not stopped):
            if stopped and not asked:
                asked = True
                for worker in workers:
                    worker.process.terminate()
            while waiting and len(workers) < jobs and not stopped:
                workers.append(Worker(threads, waiting.pop()))
            for worker in ready_workers(workers):
                said = worker.hear()
                if said is not None:
                    tell(worker.job.number, said)
                    if isinstance(said, Outcome):
                        worker.give(waiting.pop() if waiting and not stopped else None)
                    continue
                workers.remove(worker)
                # A worker that was asked to stop leaves its run to the next time.
                if worker.busy and not asked:
                    tell(worker.job.number, death_outcome(worker))
    if stopped:
        raise Interrupted


class Worker:
    """A process that does one run after the other, and its present or last run."""

    def __init__(self, threads: int, job: Job):
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, threads))
        # A terminal sends Ctrl-C to all processes. They get it from here instead, once, as a request to end. Python's tracker of
        # resources, which starts before the first process, would let the signal through to that one.
        ensure_running()
        with blocking(signal.SIGINT):
            self.process.start()
        theirs.close()
        self.job = job
        self.give(job)

    def give(self, job: Job | None) -> None:
        """Gives it the next run, or lets it go."""
        self.busy = job is not None
        self.job = job or self.job
        # One that has ended is found out by `hear`.
        with suppress(BrokenPipeError):
            self.pipe.send(job)

    def hear(self) -> dict[str, Any] | Outcome | None:
        """Returns what it says, or None if it has ended."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            return None


def work(pipe: Connection, threads: int) -> None:
    """Does the runs that come through a pipe, one after the other, and sends back lines of metrics and outcomes."""
    torch.set_num_threads(threads)
    Thread(target=stop_with_parent, daemon=True).start()

    def say(what: dict[str, Any] | Outcome) -> None:
        # A parent that is gone hears nothing, and its run is saved all the same.
        with suppress(BrokenPipeError):
            pipe.send(what)

    with suppress(Interrupted, EOFError):
        for job in iter(pipe.recv, None):
            say(do_run(job, say))


def stop_with_parent() -> None:
    """Asks this process to save and stop when its parent has ended, so that it holds no run that somebody begins again."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def ending(workers: list[Worker]) -> Iterator[None]:
    """Leaves none of some workers behind, whatever happens."""
    try:
        yield
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()


def ready_workers(workers: Sequence[Worker]) -> list[Worker]:
    """Returns the workers that have something to say, or have ended, within a moment."""
    found = wait([worker.pipe for worker in workers], timeout=0.2)
    return [worker for worker in workers if worker.pipe in found]


def death_outcome(worker: Worker) -> Outcome:
    """Returns the outcome of a run whose process ended in its midst."""
    saved = saved_words(Run(worker.job.folder))
    return failed_outcome(
        worker.job, f"its process ended with exit code {worker.process.exitcode}, perhaps for lack of memory; {saved}"
    )


@contextmanager
def blocking(number: signal.Signals) -> Iterator[None]:
    """Keeps a signal waiting, for this thread and the processes that it starts, which keep it waiting for ever."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
