"""Standings: the numbers of each encoding of a group of runs, and paired differences to a baseline."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lagwise.errors import nearest
from lagwise.lab.estimates import Estimate, estimate
from lagwise.lab.grouping import Group, best_first
from lagwise.lab.run_folder import Run


@dataclass(frozen=True)
class Row:
    """The numbers of one encoding, over its seeds.

    Args:
        encoding: Its name, with options where one name has several.
        options: All options of the encoding, and what was tuned for it.
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


def rows_of(group: Group) -> list[Row]:
    """Returns the standings of a group, the best first."""
    rows = [row_of(name, list(seeds.values()), group) for name, seeds in group.runs.items()]
    return sorted(rows, key=lambda row: best_first(row.test.mean, group.higher_is_better))


def row_of(encoding: str, runs: Sequence[Run], group: Group) -> Row:
    """Returns the numbers of one encoding."""
    metric, config = group.metric, runs[0].config
    results = [result for run in runs if (result := run.result) is not None]
    speeds = [result["tokens_per_second"] for result in results if result["tokens_per_second"] is not None]
    peaks = [result["peak_memory"] for result in results if result["peak_memory"] is not None]
    return Row(
        encoding=encoding,
        options={**config.encoding_options, **{name: getattr(config, name) for name in group.tune}},
        seeds=tuple(run.config.seed for run in runs),
        test=estimate([result["test"][metric] for result in results]),
        validation=estimate([result["validation"][metric] for result in results]),
        parameters=results[0]["encoding_parameters"],
        seconds=fmean(result["seconds"] for result in results),
        tokens_per_second=fmean(speeds) if speeds else None,
        peak_memory=max(peaks, default=None),
        lengths={
            int(length): estimate_at([result["lengths"][length] for result in results], metric)
            for length in results[0]["lengths"]
        },
    )


def estimate_at(found: Sequence[Mapping[str, Any]], metric: str) -> Estimate | str:
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


def differences_of(group: Group, baseline: str) -> list[Difference]:
    """Returns the paired differences of all other encodings to one, the best first.

    Each interval is for one difference by itself: of twenty without any cause, one is expected to leave zero out.
    """
    if baseline not in group.runs:
        raise ValueError(f"baseline must be one of {', '.join(group.runs)}, but is {baseline!r}{nearest(baseline, group.runs)}")
    scores = {name: scores_of(seeds.values(), group.metric) for name, seeds in group.runs.items()}
    found = [
        difference(name, baseline, own, scores[baseline], group.higher_is_better)
        for name, own in scores.items()
        if name != baseline
    ]
    return sorted(found, key=lambda each: best_first(each.estimate.mean if each.estimate else math.nan, group.higher_is_better))


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


def scores_of(runs: Iterable[Run], metric: str) -> dict[int, float]:
    """Returns the metric on the test split by the seed."""
    return {run.config.seed: result["test"][metric] for run in runs if (result := run.result) is not None}


def default_baseline(group: Group) -> str:
    """Returns what others are compared to unless somebody says otherwise: t5, or the first."""
    return (rows_named(group, "t5") or list(group.runs))[0]


def rows_named(group: Group, name: str) -> list[str]:
    """Returns the rows of a group that a name may mean: its own, or else all of the encoding of that name."""
    if name in group.runs:
        return [name]
    return [row for row, seeds in group.runs.items() if next(iter(seeds.values())).config.encoding == name]


def baselines(found: Sequence[Group], wanted: str | None) -> list[str]:
    """Returns what others are compared to in each group: the encoding that is wanted, where it takes part.

    Raises where it takes part in none, or in one of them several times.
    """
    rows = [rows_named(group, wanted) if wanted is not None else [] for group in found]
    for own in rows:
        if len(own) > 1:
            raise ValueError(f"baseline must be one row of a table, but {wanted!r} may be {', '.join(own)}: name one of them")
    if wanted is not None and not any(rows):
        names = list(dict.fromkeys(name for group in found for name in group.runs))
        raise ValueError(f"baseline must be one of {', '.join(names)}, but is {wanted!r}{nearest(wanted, names)}")
    return [own[0] if own else default_baseline(group) for own, group in zip(rows, found, strict=True)]
