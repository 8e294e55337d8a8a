"""Comparing encodings: which runs there are to do, and doing them several at a time."""

import os
import shutil
import signal
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import torch

from lagwise.encodings import ENCODINGS, canonical_name
from lagwise.lab import loop
from lagwise.lab.config import Config
from lagwise.lab.lock import LOCK, OWNER, Held, owned
from lagwise.lab.loop import Diverged, Halted, Interrupted, Settings, data_words, make_config, saved_words
from lagwise.lab.signals import stop_on_signal
from lagwise.lab.standings import check_tuned
from lagwise.lab.store import Run, make_folder, missing, read_if_there, remove_empty, write
from lagwise.lab.tasks.models import encoder_of

DEFAULT_ENCODINGS = ("none", "sinusoidal", "t5", "at5", "huang2", "shaw", "huang4", "rotary")
"""No positions, absolute ones, and of each family of relative ones those that are used most."""

FAILURE = "failure.json"
"""Says why a run failed; it is there until the run is begun again."""

Event = dict[str, Any]
"""What `run_all` tells: `run` (counted from 0), `of`, `config`, and `line`, a line of the metrics, or at the end `outcome`."""


def plan(
    task: str,
    encodings: str | Sequence[str] = DEFAULT_ENCODINGS,
    *,
    seeds: int | Sequence[int] = 3,
    preset: str = "",
    changes: Mapping[str, Any] | None = None,
    tune: Mapping[str, Sequence[Any]] | None = None,
    tell: Callable[[str], None] = warnings.warn,
) -> list[Config]:
    """Returns the configs of a comparison: one for each encoding and seed, and each combination of values to tune.

    The same seed gives the same data in the same order to every encoding, so that differences are paired.

    Args:
        task: Name of the task.
        encodings: Names of encodings, or "all": those that the attention of the config can use.
        seeds: The seeds, or their number.
        preset: Name of a preset of the task.
        changes: Fields that differ from the defaults of the task.
        tune: Fields that are tried with several values, see `lagwise.lab.standings.tuned`.
        tell: Is told in words which encodings of "all" are left out, and why.
    """
    changes = dict(changes or {})
    for name, instead in (("encoding", "encodings"), ("seed", "seeds")):
        if name in changes:
            raise ValueError(f"{name} is what a comparison varies, but was given as a field: give {instead}")
    check_tuned(tune or {})
    for name, values in (tune or {}).items():
        if not values:
            raise ValueError(f"what is tuned must have values to try, such as {name}=1,2, but {name} has none")
    trials = [dict(zip(tune or {}, values, strict=True)) for values in product(*(tune or {}).values())]
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(dict.fromkeys(seeds))
    if not numbers:
        raise ValueError("seeds must be at least one, but there are none")

    def config_of(encoding: str, seed: int, trial: Mapping[str, Any]) -> Config:
        return make_config(task, encoding, preset=preset, **{**changes, **trial}, seed=seed)

    if isinstance(encodings, str) and encodings != "all":
        encodings = [encodings]
    names = (
        usable((config_of(name, numbers[0], {}) for name in ENCODINGS), tell)
        if encodings == "all"
        else dict.fromkeys(map(canonical_name, encodings))
    )
    return [config_of(name, seed, trial) for trial in trials for name in names for seed in numbers]


def usable(configs: Iterable[Config], tell: Callable[[str], None]) -> list[str]:
    """Returns the encodings of which a model can be made, and tells why of others none can."""
    found = []
    for config in configs:
        try:
            encoder_of(replace(config, layers=1))
        except ValueError as error:
            tell(f"{config.encoding} is left out: {error}")
        else:
            found.append(config.encoding)
    return found


def folder_of(out: Path, config: Config) -> Path:
    """Returns the folder of a run: seeds of one config lie beside each other."""
    return out / config.task / config.encoding / f"{config.fingerprint(without=['seed'])}-seed{config.seed}"


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Args:
        config: What was to be run.
        folder: Where it is.
        status: "ran", "resumed" (it had been begun before), "kept" (it was complete before) or "failed".
        error: Why it failed, in words.
    """

    config: Config
    folder: Path
    status: Literal["ran", "resumed", "kept", "failed"]
    error: str | None = None

    @property
    def run(self) -> Run:
        """The run's folder."""
        return Run(self.folder)


@dataclass(frozen=True)
class Job:
    """A run to do, as a process is told of it.

    The function that trains goes with it, so that processes call the one that their parent has.
    """

    number: int
    config: Config
    folder: Path
    settings: Settings
    train: Callable[..., Any]


def default_jobs(device: torch.device | str | None) -> int:
    """Returns how many runs are done at a time: one for each core on a CPU, one on a GPU; None is what there is."""
    kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type
    return cores() if kind == "cpu" else 1


def cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_all(
    configs: Sequence[Config],
    out: Path,
    settings: Settings,
    *,
    jobs: int = 1,
    again: bool = False,
    watch: Callable[[Event], None] | None = None,
) -> list[Outcome]:
    """Does all runs, and returns what became of each, in their order.

    A complete run is kept, one that was begun goes on, and one that fails, or that another process is at, does not stop the
    others. Ctrl-C stops all runs after their step, with checkpoints, and raises `Interrupted`; the next call goes on. Another one
    some seconds later ends at once.

    Args:
        configs: What to run.
        out: The folder of all runs.
        settings: How to run them.
        jobs: How many runs at a time. More than one are done in processes that share the cores: each has `cores / jobs` threads,
            however many runs are left. Another number of threads sums in another order, which changes the last digits.
        again: Delete runs that are there, and do them once more.
        watch: Is told how it goes.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, but is {jobs}")
    outcomes: dict[int, Outcome] = {}

    def tell(number: int, found: dict[str, Any] | Outcome) -> None:
        if isinstance(found, Outcome):
            outcomes[number] = found
        if watch is not None:
            about = {"outcome": found} if isinstance(found, Outcome) else {"line": found}
            watch({"run": number, "of": len(configs), "config": configs[number], **about})

    todo, made = [], missing(out)
    make_folder(out)
    for number, config in enumerate(configs):
        job = Job(number, config, folder_of(out, config), settings, loop.train)
        found = (cleared(job) if again else None) or settled(job)
        if found is None:
            todo.append(job)
        else:
            tell(number, found)
    try:
        if jobs > 1:
            in_processes(todo, jobs, tell)
        else:
            in_turn(todo, tell)
    except KeyboardInterrupt as error:
        raise Interrupted(interrupted_words(todo)) from error
    remove_empty([*out.glob("*/*"), *out.glob("*"), *made])
    return [outcomes[number] for number in range(len(configs))]


def interrupted_words(jobs: Iterable[Job]) -> str:
    """Returns what is saved of runs that were stopped, by what is on the disk."""
    begun = [run for run in (Run(job.folder) for job in jobs) if run.exists and not run.is_complete]
    return "\n".join(["stopped; the same command goes on, and keeps the runs that are complete", *map(saved_words, begun)])


def in_turn(todo: Sequence[Job], tell: Callable[[int, dict[str, Any] | Outcome], None]) -> None:
    """Does runs one after the other in this process, and tells what they say."""
    for job in todo:
        tell(job.number, carried_out(job, lambda line, job=job: tell(job.number, line)))


def cleared(job: Job) -> Outcome | None:
    """Deletes what is in the folder of a run; returns that it failed where somebody else is at it."""
    if not job.folder.exists():
        return None
    try:
        with owned(job.folder):
            for path in job.folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name not in (LOCK, OWNER):
                    path.unlink()
    except ValueError as error:
        return Outcome(job.config, job.folder, "failed", str(error))
    return None


def settled(job: Job) -> Outcome | None:
    """Returns what there is to say of a run that needs no doing: it is complete, or its folder has another one."""
    run = Run(job.folder)
    if not run.exists:
        return None
    try:
        run.check_same(job.config, data_words(job.settings))
        return Outcome(job.config, job.folder, "kept") if run.result is not None else None
    except ValueError as error:
        return Outcome(job.config, job.folder, "failed", str(error))


def carried_out(job: Job, watch: Callable[[dict[str, Any]], None]) -> Outcome:
    """Does a run, or goes on with it, and returns what became of it; a failure is kept beside it."""
    # Another comparison may have done it since this one began.
    if (found := settled(job)) is not None:
        return found
    status = "resumed" if Run(job.folder).exists else "ran"
    try:
        (job.folder / FAILURE).unlink(missing_ok=True)
        job.train(job.config, job.folder, job.settings, resume=True, watch=watch)
    except Held as error:
        return Outcome(job.config, job.folder, "failed", str(error))
    except Exception as error:
        # What is expected to go wrong says why; of anything else the name says more than the words.
        expected = isinstance(error, Diverged | Halted | ValueError)
        return failed(job, str(error) if expected else f"{type(error).__name__}: {error}", traceback.format_exc())
    return Outcome(job.config, job.folder, status)


def failed(job: Job, words: str, details: str = "") -> Outcome:
    """Returns the outcome of a run that failed, and leaves the reason in its folder, if it has one."""
    if Run(job.folder).exists:
        # A disk may be full: the outcome says why all the same.
        with suppress(OSError):
            write(job.folder / FAILURE, {"error": words, "traceback": details})
    return Outcome(job.config, job.folder, "failed", words)


def failure_of(run: Run) -> str:
    """Returns why a run is not complete."""
    try:
        stored = read_if_there(run.folder / FAILURE, dict) or {}
    except ValueError as error:
        return f"why is not known: {error}"
    return stored.get("error", "it was stopped before its end")


class Worker:
    """A process that does one run after the other, and its present or last run."""

    def __init__(self, threads: int, job: Job):
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, threads))
        # A terminal sends Ctrl-C to all processes. They get it from here instead, once, as a request to end. Python's tracker of
        # resources, which starts before the first process, would let the signal through to that one.
        ensure_running()
        with blocked(signal.SIGINT):
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
            say(carried_out(job, say))


def stop_with_parent() -> None:
    """Asks this process to save and stop when its parent has ended, so that it holds no run that somebody begins again."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def in_processes(todo: Sequence[Job], jobs: int, tell: Callable[[int, dict[str, Any] | Outcome], None]) -> None:
    """Does runs in some processes at a time, and tells what they say."""
    threads = max(1, cores() // jobs)
    waiting = list(reversed(todo))
    workers: list[Worker] = []
    asked = False
    with stop_on_signal() as stopped, ended(workers):
        while workers or (waiting and not stopped):
            if stopped and not asked:
                asked = True
                for worker in workers:
                    worker.process.terminate()
            while waiting and len(workers) < jobs and not stopped:
                workers.append(Worker(threads, waiting.pop()))
            for worker in ready(workers):
                said = worker.hear()
                if said is not None:
                    tell(worker.job.number, said)
                    if isinstance(said, Outcome):
                        worker.give(waiting.pop() if waiting and not stopped else None)
                    continue
                workers.remove(worker)
                # A worker that was asked to stop leaves its run to the next time.
                if worker.busy and not asked:
                    tell(worker.job.number, died(worker))
    if stopped:
        raise Interrupted


@contextmanager
def ended(workers: list[Worker]) -> Iterator[None]:
    """Leaves none of some workers behind, whatever happens."""
    try:
        yield
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()


def ready(workers: Sequence[Worker]) -> list[Worker]:
    """Returns the workers that have something to say, or have ended, within a moment."""
    found = wait([worker.pipe for worker in workers], timeout=0.2)
    return [worker for worker in workers if worker.pipe in found]


def died(worker: Worker) -> Outcome:
    """Returns the outcome of a run whose process ended in its midst."""
    saved = saved_words(Run(worker.job.folder))
    return failed(worker.job, f"its process ended with exit code {worker.process.exitcode}, perhaps for lack of memory; {saved}")


@contextmanager
def blocked(number: signal.Signals) -> Iterator[None]:
    """Keeps a signal waiting, for this thread and the processes that it starts, which keep it waiting for ever."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
