"""Numbers of the findings, each from lines in results/: scores by encoding and seed, and paired differences."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from lagwise.encodings import options_of
from lagwise.lab.estimates import Estimate, estimate
from lagwise.lab.experiment import main_metric
from lagwise.lab.grouping import Group, groups
from lagwise.lab.records import read_runs
from lagwise.lab.report.tables import parts_of, position_losses, quarters_of, trained_length
from lagwise.lab.run_folder import Run

ROOT = Path(__file__).parent.parent
RATES = ("rate", "encoding_rate")
PREFERRED = {"realizations": 32, "gated": True, "kernel_size": 128}
"""Options of SPE that count where a group has several."""

Scores = dict[int, float]
"""Numbers by the seed."""


@dataclass(frozen=True)
class Source:
    """Where numbers come from: a file of results, the group of its runs that a word of the title names, and how runs are read.

    Args:
        file: Name of the file in results/, without its ending.
        tune: Fields that were tuned for each encoding.
        group: Words that the title of the group has.
        score: What is read of a run; without it the metric that counts, on the test split.
        factor: From the unit of the lines to that of the findings.
    """

    file: str
    tune: tuple[str, ...] = ()
    group: tuple[str, ...] = ()
    score: Callable[[Run], float] | None = None
    factor: float = 1.0


def percent(file: str, tune: tuple[str, ...] = (), group: tuple[str, ...] = ()) -> Source:
    """Returns a source of accuracies, in points."""
    return Source(file, tune, group, factor=100.0)


def main_score(run: Run) -> float:
    """Returns the metric that counts, on the test split."""
    return (run.result or {})["test"][main_metric(run.config)[0]]


def at_length(length: int) -> Callable[[Run], float]:
    """Returns what reads bits per byte in windows of another length."""
    return lambda run: (run.result or {})["lengths"][str(length)].get("bits_per_byte", float("nan"))


@cache
def runs_of(file: str) -> list[Run]:
    """Returns the runs of a file in results/."""
    return read_runs(ROOT / "results" / f"{file}.jsonl")


@cache
def groups_of(file: str, tune: tuple[str, ...]) -> list[Group]:
    """Returns the groups of a file."""
    return groups(runs_of(file), tune)


def group_of(source: Source) -> Group:
    """Returns the group that a source names, which must be one."""
    found = [group for group in groups_of(source.file, source.tune) if all(word in f"{group.title}, " for word in source.group)]
    if len(found) != 1:
        raise ValueError(f"{source} must name one group, but names {[group.title for group in found]}")
    return found[0]


def with_defaults(run: Run) -> dict[str, Any]:
    """Returns all options of a run's encoding."""
    return {**options_of(run.config.encoding), **run.config.encoding_options}


def rows_named(group: Group, name: str) -> list[dict[int, Run]]:
    """Returns the rows of a group that a name means: an encoding, or SPE with "fixed" or "new" codes before its name."""
    kind, _, encoding = name.rpartition(" ")
    found = [
        seeds
        for seeds in group.runs.values()
        if (first := next(iter(seeds.values()))).config.encoding == encoding
        and (not kind or with_defaults(first)["fixed"] == (kind == "fixed"))
    ]
    for option, value in PREFERRED.items():
        if len(found) > 1:
            found = [seeds for seeds in found if with_defaults(next(iter(seeds.values()))).get(option, value) == value]
    return found


def scores(source: Source, name: str) -> Scores:
    """Returns the numbers of an encoding by the seed; nothing where it was not run."""
    found = rows_named(group_of(source), name)
    if len(found) > 1:
        raise ValueError(f"{name} must be one row of {source.file}, but is {len(found)}")
    score = source.score or main_score
    return {seed: source.factor * score(run) for seeds in found for seed, run in seeds.items()}


def paired(own: Mapping[int, float], others: Mapping[int, float]) -> Estimate | None:
    """Returns the difference within seeds, or None without a common seed."""
    seeds = sorted(own.keys() & others.keys())
    return estimate([own[seed] - others[seed] for seed in seeds]) if seeds else None


def difference(source: Source, name: str, baseline: str) -> Estimate:
    """Returns by how much an encoding differs from a baseline."""
    found = paired(scores(source, name), scores(source, baseline))
    if found is None:
        raise ValueError(f"{name} and {baseline} must have a seed in common in {source.file}")
    return found


def glue_scores(file: str, name: str, tasks: Sequence[str]) -> Scores:
    """Returns the mean over some tasks of GLUE, in points, by the seed."""
    own = [scores(Source(file, group=(f"glue/{task}, ",), factor=100.0), name) for task in tasks]
    seeds = set.intersection(*(set(each) for each in own))
    return {seed: fmean(each[seed] for each in own) for seed in sorted(seeds)}


def music_scores(file: str, name: str, *, beyond: bool) -> Scores:
    """Returns nats per token within the length of the training or beyond it, by the seed."""
    group = group_of(Source(file))
    if name not in group.runs:
        return {}
    length = trained_length(group)
    return {seed: parts_of(bins, length)[int(beyond)] for seed, bins in position_losses(group, name).items()}


def style_scores(name: str, quarter: int) -> Scores:
    """Returns the median likeness of drums to their piece in a quarter of the continuation, by the seed."""
    lines = [line for line in lines_of("styles") if line["config"]["encoding"] == name]
    return {line["config"]["seed"]: quarters_of(line["styles"]["onset-drum"])[quarter] for line in lines}


@cache
def lines_of(file: str) -> list[dict[str, Any]]:
    """Returns the lines of a file in results/ as they are."""
    return [json.loads(line) for line in (ROOT / "results" / f"{file}.jsonl").read_text().splitlines()]


def curve(runs: Iterable[Run], split: str | None) -> dict[int, float]:
    """Returns the mean loss over runs by the step, of a split or, for None, of the training."""
    found: dict[int, list[float]] = {}
    for run in runs:
        for line in run.lines:
            if line.get("split") == split:
                found.setdefault(line["step"], []).append(line["loss"])
    return {step: fmean(losses) for step, losses in sorted(found.items())}
