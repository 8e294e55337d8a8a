"""Comparing encodings: which runs there are to do, and doing them several at a time."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from lagwise.encodings import ENCODINGS, canonical_name
from lagwise.lab import run as runs
from lagwise.lab.checkpoint import saved_words
from lagwise.lab.config import Config
from lagwise.lab.experiment import make_config
from lagwise.lab.grouping import check_tuned
from lagwise.lab.jobs import Job, Outcome, clear, do_run, known_outcome
from lagwise.lab.json_files import make_folder, missing_folders, remove_empty
from lagwise.lab.loop import Settings
from lagwise.lab.run_folder import Run
from lagwise.lab.signals import Interrupted
from lagwise.lab.tasks.models import encoder_of
from lagwise.lab.threads import cores
from lagwise.lab.workers import run_in_processes

DEFAULT_ENCODINGS = ("none", "sinusoidal", "t5", "at5", "huang2", "shaw", "huang4", "rotary")
"""No positions, absolute ones, and of each family of relative ones those that are used most."""

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
        tune: Fields that are tried with several values, see `lagwise.lab.grouping.best_tuned`.
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
        usable_encodings((config_of(name, numbers[0], {}) for name in ENCODINGS), tell)
        if encodings == "all"
        else dict.fromkeys(map(canonical_name, encodings))
    )
    return [config_of(name, seed, trial) for trial in trials for name in names for seed in numbers]


def usable_encodings(configs: Iterable[Config], tell: Callable[[str], None]) -> list[str]:
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


def default_jobs(device: torch.device | str | None) -> int:
    """Returns how many runs are done at a time: one for each core on a CPU, one on a GPU; None is what there is."""
    kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type
    return cores() if kind == "cpu" else 1


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

    todo, made = [], missing_folders(out)
    make_folder(out)
    for number, config in enumerate(configs):
        job = Job(number, config, folder_of(out, config), settings, runs.train)
        found = (clear(job) if again else None) or known_outcome(job)
        if found is None:
            todo.append(job)
        else:
            tell(number, found)
    try:
        if jobs > 1:
            run_in_processes(todo, jobs, tell, threads=max(1, cores() // jobs))
        else:
            run_in_turn(todo, tell)
    except KeyboardInterrupt as error:
        raise Interrupted(interrupted_words(todo)) from error
    remove_empty([*out.glob("*/*"), *out.glob("*"), *made])
    return [outcomes[number] for number in range(len(configs))]


def interrupted_words(jobs: Iterable[Job]) -> str:
    """Returns what is saved of runs that were stopped, by what is on the disk."""
    begun = [run for run in (Run(job.folder) for job in jobs) if run.exists and not run.is_complete]
    return "\n".join(["stopped; the same command goes on, and keeps the runs that are complete", *map(saved_words, begun)])


def run_in_turn(todo: Sequence[Job], tell: Callable[[int, dict[str, Any] | Outcome], None]) -> None:
    """Does runs one after the other in this process, and tells what they say."""
    for job in todo:
        tell(job.number, do_run(job, lambda line, job=job: tell(job.number, line)))
