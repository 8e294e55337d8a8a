"""Comparing encodings: which runs there are to do, doing them several at a time, and what their numbers say together.

Runs are compared where they differ in the encoding, its options and the seed alone. Runs that differ in anything else, or in
where their data came from, are in tables of their own, because a difference between them may be due to that.
"""

import json
import math
import os
import shutil
import signal
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

import torch

from lagwise.encodings import ENCODINGS, nearest
from lagwise.tasks.models import encoder_of
from lagwise.train import loop
from lagwise.train.config import Config
from lagwise.train.loop import Diverged, Interrupted, Settings, data_words, make_config, make_task, stop_on_signal
from lagwise.train.store import Run, write

DEFAULT_ENCODINGS = ("none", "sinusoidal", "t5", "at5", "huang2", "shaw", "huang4", "rotary")
"""No positions, absolute ones, and of each family of relative ones those that are used most."""

OWN_FIELDS = ("encoding", "encoding_options", "seed")
"""Fields in which runs of one table may differ."""

FAILURE = "failure.json"
"""Says why a run failed; it is there until the run is begun again."""

CONFIDENCE = 0.95

Event = dict[str, Any]
"""What `run_all` tells: `run` (counted from 0), `of`, `config`, and `line`, a line of the metrics, or at the end `outcome`."""


def plan(
    task: str,
    encodings: str | Sequence[str] = DEFAULT_ENCODINGS,
    *,
    seeds: int | Sequence[int] = 3,
    preset: str = "",
    changes: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = warnings.warn,
) -> list[Config]:
    """Returns the configs of a comparison: one for each encoding and seed.

    The same seed gives the same data in the same order to every encoding, so that differences are paired.

    Args:
        task: Name of the task.
        encodings: Names of encodings, or "all": those that the attention of the config can use.
        seeds: The seeds, or their number.
        preset: Name of a preset of the task.
        changes: Fields that differ from the defaults of the task.
        tell: Is told in words which encodings of "all" are left out, and why.
    """
    changes = dict(changes or {})
    for name, instead in (("encoding", "encodings"), ("seed", "seeds")):
        if name in changes:
            raise ValueError(f"{name} is what a comparison varies, but was given as a field: give {instead}")
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(dict.fromkeys(seeds))
    if not numbers:
        raise ValueError("seeds must be at least one, but there are none")

    def config_of(encoding: str, seed: int) -> Config:
        return make_config(task, encoding, preset=preset, **changes, seed=seed)

    if isinstance(encodings, str) and encodings != "all":
        encodings = [encodings]
    names = usable((config_of(name, numbers[0]) for name in ENCODINGS), tell) if encodings == "all" else dict.fromkeys(encodings)
    for name in names:
        if name not in ENCODINGS:
            raise ValueError(f"unknown encoding {name!r}{nearest(name, ENCODINGS)} `lagwise encodings` lists all")
    return [config_of(name, seed) for name in names for seed in numbers]


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

    A complete run is kept, one that was begun goes on, and one that fails does not stop the others. The first Ctrl-C stops all
    runs after their step, with checkpoints, and raises `Interrupted`; the next call goes on. The second one ends at once.

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

    todo = []
    for number, config in enumerate(configs):
        job = Job(number, config, folder_of(out, config), settings, loop.train)
        if again and Run(job.folder).exists:
            shutil.rmtree(job.folder)
        found = settled(job)
        if found is None:
            todo.append(job)
        else:
            tell(number, found)
    if jobs > 1:
        in_processes(todo, jobs, tell)
    else:
        in_turn(todo, tell)
    return [outcomes[number] for number in range(len(configs))]


def in_turn(todo: Sequence[Job], tell: Callable[[int, dict[str, Any] | Outcome], None]) -> None:
    """Does runs one after the other in this process, and tells what they say."""
    for job in todo:
        try:
            tell(job.number, carried_out(job, lambda line, job=job: tell(job.number, line)))
        except Interrupted as error:
            # The step of one run says nothing about all of them.
            raise Interrupted from error


def settled(job: Job) -> Outcome | None:
    """Returns what there is to say of a run that needs no doing: it is complete, or its folder has one on other data."""
    run = Run(job.folder)
    if not run.exists:
        return None
    there, wanted = data_of(run), data_words(job.settings)
    if there != wanted:
        words = f"{job.folder} holds a run on other data ({there}, not {wanted}): choose another folder, or run it again"
        return Outcome(job.config, job.folder, "failed", words)
    return Outcome(job.config, job.folder, "kept") if run.result is not None else None


def carried_out(job: Job, watch: Callable[[dict[str, Any]], None]) -> Outcome:
    """Does a run, or goes on with it, and returns what became of it; a failure is kept beside it."""
    status = "resumed" if Run(job.folder).exists else "ran"
    (job.folder / FAILURE).unlink(missing_ok=True)
    try:
        job.train(job.config, job.folder, job.settings, resume=True, watch=watch)
    except Exception as error:
        # What is expected to go wrong says why; of anything else the name says more than the words.
        expected = isinstance(error, Diverged | ValueError)
        return failed(job, str(error) if expected else f"{type(error).__name__}: {error}", traceback.format_exc())
    return Outcome(job.config, job.folder, status)


def failed(job: Job, words: str, details: str = "") -> Outcome:
    """Returns the outcome of a run that failed, and leaves the reason in its folder, if it has one."""
    if Run(job.folder).exists:
        write(job.folder / FAILURE, {"error": words, "traceback": details})
    return Outcome(job.config, job.folder, "failed", words)


def failure_of(run: Run) -> str:
    """Returns why a run is not complete."""
    path = run.folder / FAILURE
    return json.loads(path.read_text())["error"] if path.is_file() else "it was stopped before its end"


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
    for job in iter(pipe.recv, None):
        try:
            pipe.send(carried_out(job, pipe.send))
        except Interrupted:
            return


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
    return failed(worker.job, f"its process ended with exit code {worker.process.exitcode}, perhaps for lack of memory")


@contextmanager
def blocked(number: signal.Signals) -> Iterator[None]:
    """Keeps a signal waiting, for this thread and the processes that it starts, which keep it waiting for ever."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True)
class Estimate:
    """A mean, and how far from it the 95 % confidence interval goes: None for a single value, which says nothing about that."""

    mean: float
    half_width: float | None
    count: int

    def __str__(self) -> str:
        """Returns it with as many decimals as the interval has two digits of.

        >>> print(Estimate(0.84123, 0.00512, 3), Estimate(0.84123, None, 1))
        0.8412 ± 0.0051 0.8412
        """
        if not self.half_width or not math.isfinite(self.half_width):
            return f"{self.mean:.4g}"
        decimals = min(max(1 - math.floor(math.log10(self.half_width)), 0), 6)
        return f"{self.mean:.{decimals}f} ± {self.half_width:.{decimals}f}"


def estimate(values: Sequence[float]) -> Estimate:
    """Returns the mean of some values with its confidence interval by Student's t.

    >>> print(estimate([1.0, 2.0, 3.0]))
    2.0 ± 2.5
    """
    count = len(values)
    if count < 2:
        return Estimate(fmean(values), None, count)
    return Estimate(fmean(values), t_quantile(count - 1) * stdev(values) / math.sqrt(count), count)


def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Returns the t that Student's distribution exceeds in size with probability `1 - confidence`.

    For whole degrees of freedom the probability of |t| below `sqrt(freedom) tan(angle)` is a finite sum over powers of the
    cosine (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4), which rises with the angle: bisection finds the angle.

    >>> round(t_quantile(2), 6)
    4.302653
    """
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if t_probability(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def t_probability(angle: float, freedom: int) -> float:
    """Returns the probability that |t| is below `sqrt(freedom) tan(angle)`."""
    odd = freedom % 2
    term = math.sin(angle) * (math.cos(angle) if odd else 1.0)
    total = 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + total) if odd else total


@dataclass(frozen=True)
class Group:
    """Complete runs that may be compared: they differ in the encoding, its options and the seed alone.

    Args:
        title: The task, and the fields in which this group differs from others.
        fields: All fields that the runs have in common, and where the data came from.
        metric: The name of the metric that counts.
        higher_is_better: Whether a higher one is better.
        runs: The runs by the encoding's name, with the options where one name has several, and by the seed.
    """

    title: str
    fields: dict[str, Any]
    metric: str
    higher_is_better: bool
    runs: dict[str, dict[int, Run]]

    @property
    def members(self) -> list[Run]:
        """All runs."""
        return [run for seeds in self.runs.values() for run in seeds.values()]


def groups(runs: Iterable[Run]) -> list[Group]:
    """Returns the complete ones of some runs, in groups that may be compared."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        if run.result is not None:
            found.setdefault(json.dumps(common_fields(run), sort_keys=True), []).append(run)
    fields = [json.loads(key) for key in found]
    return [group_of(members, own, fields) for members, own in zip(found.values(), fields, strict=True)]


def group_of(runs: Sequence[Run], fields: dict[str, Any], all_fields: Sequence[dict[str, Any]]) -> Group:
    """Returns one of several groups, with a title that tells it from the others."""
    differing = [name for name in fields if name != "task" and any(other[name] != fields[name] for other in all_fields)]
    metric, higher_is_better = main_metric(runs[0].config)
    return Group(
        title=", ".join([fields["task"], *(f"{name}={shown(fields[name])}" for name in differing)]),
        fields=fields,
        metric=metric,
        higher_is_better=higher_is_better,
        runs=by_encoding(runs),
    )


def common_fields(run: Run) -> dict[str, Any]:
    """Returns what runs must have in common to be compared."""
    fields = {name: value for name, value in run.config.to_json().items() if name not in OWN_FIELDS}
    return {**fields, "data": data_of(run)}


def data_of(run: Run) -> str:
    """Returns where the data of a run came from."""
    return run.environment["data"]


def by_encoding(runs: Sequence[Run]) -> dict[str, dict[int, Run]]:
    """Returns runs by the name of their encoding and their seed; options that tell runs of one name apart are in the name."""
    options: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        options.setdefault(run.config.encoding, []).append(run.config.encoding_options)
    found: dict[str, dict[int, Run]] = {}
    for run in runs:
        config = run.config
        own, others = config.encoding_options, options[config.encoding]
        told = [name for name in sorted({*own}.union(*others)) if any(other.get(name) != own.get(name) for other in others)]
        label = config.encoding + (f" ({', '.join(f'{name}={shown(own.get(name))}' for name in told)})" if told else "")
        seeds = found.setdefault(label, {})
        if config.seed in seeds:
            raise ValueError(f"{seeds[config.seed].folder} and {run.folder} hold the same run: leave one of them out")
        seeds[config.seed] = run
    return found


def shown(value: Any) -> str:
    """Returns a field's value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def main_metric(config: Config) -> tuple[str, bool]:
    """Returns the name of the metric that counts in a task, and whether a higher one is better."""
    name, metric = next(iter(make_task(config, None).metrics().items()))
    if metric.higher_is_better is None:
        raise ValueError(f"higher_is_better of metric {name!r} must be True or False, but is None: set it in its class")
    return name, metric.higher_is_better


@dataclass(frozen=True)
class Row:
    """The numbers of one encoding, over its seeds.

    Args:
        encoding: Its name, with options where one name has several.
        options: All options of the encoding.
        seeds: The seeds.
        test: The metric that counts, on the test split.
        validation: The same on the validation split.
        parameters: Number of parameters of the encoding.
        seconds: Mean time of training.
        tokens_per_second: Mean speed of training.
        peak_memory: The most bytes that a training step took; None where it is not known.
        lengths: The metric on the test split at other lengths, or why there is none.
    """

    encoding: str
    options: dict[str, Any]
    seeds: tuple[int, ...]
    test: Estimate
    validation: Estimate
    parameters: int
    seconds: float
    tokens_per_second: float | None
    peak_memory: int | None
    lengths: dict[int, Estimate | str]


def league(runs: Iterable[Run]) -> list[Row]:
    """Returns the numbers of each encoding, the best first; raises for runs that may not be compared, see `leagues`."""
    return rows_of(only_group(runs))


def leagues(runs: Iterable[Run]) -> dict[str, list[Row]]:
    """Returns the league of each group of runs that may be compared, by the group's title."""
    return {group.title: rows_of(group) for group in groups(runs)}


def only_group(runs: Iterable[Run]) -> Group:
    """Returns runs as one group, and raises where they are none or several."""
    found = groups(runs)
    if not found:
        raise ValueError("runs must have at least one that is complete, but have none: train one to its end")
    if len(found) > 1:
        titles = "; ".join(group.title for group in found)
        raise ValueError(f"runs must differ in encoding and seed alone, but differ in more ({titles}): compare them apart")
    return found[0]


def rows_of(group: Group) -> list[Row]:
    """Returns the league of a group, the best first."""
    rows = [row_of(name, list(seeds.values()), group.metric) for name, seeds in group.runs.items()]
    return sorted(rows, key=lambda row: order(row.test.mean, group.higher_is_better))


def order(value: float, higher_is_better: bool) -> tuple[bool, float]:
    """Returns a key that sorts the best value first, and what is no number last."""
    return math.isnan(value), -value if higher_is_better else value


def row_of(encoding: str, runs: Sequence[Run], metric: str) -> Row:
    """Returns the numbers of one encoding."""
    results = [result for run in runs if (result := run.result) is not None]
    speeds = [result["tokens_per_second"] for result in results if result["tokens_per_second"] is not None]
    peaks = [result["peak_memory"] for result in results if result["peak_memory"] is not None]
    return Row(
        encoding=encoding,
        options=runs[0].config.encoding_options,
        seeds=tuple(run.config.seed for run in runs),
        test=estimate([result["test"][metric] for result in results]),
        validation=estimate([result["validation"][metric] for result in results]),
        parameters=results[0]["encoding_parameters"],
        seconds=fmean(result["seconds"] for result in results),
        tokens_per_second=fmean(speeds) if speeds else None,
        peak_memory=max(peaks, default=None),
        lengths={
            int(length): at_length([result["lengths"][length] for result in results], metric) for length in results[0]["lengths"]
        },
    )


def at_length(found: Sequence[Mapping[str, Any]], metric: str) -> Estimate | str:
    """Returns the metric at another length, or the reason why one of the runs has none."""
    refused = [each["refused"] for each in found if "refused" in each]
    return refused[0] if refused else estimate([each[metric] for each in found])


@dataclass(frozen=True)
class Difference:
    """How much more of the metric an encoding has than the baseline, on the test split.

    Args:
        encoding: Name of the encoding.
        baseline: Name of the other one.
        seeds: The seeds that both have; differences are taken within a seed.
        estimate: Their mean, or None without a common seed.
        better: Whether the encoding is better, or None where the interval has zero in it or is not known.
    """

    encoding: str
    baseline: str
    seeds: tuple[int, ...]
    estimate: Estimate | None
    better: bool | None


def differences(runs: Iterable[Run], baseline: str) -> list[Difference]:
    """Returns the paired differences of all other encodings to one, the best first; raises as `league` does.

    Each interval is for one difference by itself: of twenty without any cause, one is expected to leave zero out.
    """
    return differences_of(only_group(runs), baseline)


def default_baseline(group: Group) -> str:
    """Returns what others are compared to unless somebody says otherwise: t5, or the first."""
    return "t5" if "t5" in group.runs else next(iter(group.runs))


def differences_of(group: Group, baseline: str) -> list[Difference]:
    """Returns the paired differences in a group."""
    if baseline not in group.runs:
        raise ValueError(f"baseline must be one of {', '.join(group.runs)}, but is {baseline!r}{nearest(baseline, group.runs)}")
    scores = {name: scores_of(seeds.values(), group.metric) for name, seeds in group.runs.items()}
    found = [
        difference(name, baseline, own, scores[baseline], group.higher_is_better)
        for name, own in scores.items()
        if name != baseline
    ]
    return sorted(found, key=lambda each: order(each.estimate.mean if each.estimate else math.nan, group.higher_is_better))


def scores_of(runs: Iterable[Run], metric: str) -> dict[int, float]:
    """Returns the metric on the test split by the seed."""
    return {run.config.seed: result["test"][metric] for run in runs if (result := run.result) is not None}


def difference(
    encoding: str, baseline: str, own: Mapping[int, float], others: Mapping[int, float], higher_is_better: bool
) -> Difference:
    """Returns the difference of two encodings, by their numbers for each seed."""
    seeds = tuple(sorted(own.keys() & others.keys()))
    if not seeds:
        return Difference(encoding, baseline, seeds, None, None)
    found = estimate([own[seed] - others[seed] for seed in seeds])
    told = found.half_width is not None and abs(found.mean) > found.half_width
    return Difference(encoding, baseline, seeds, found, (found.mean > 0) == higher_is_better if told else None)
