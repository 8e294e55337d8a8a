"""What runs say together: means with intervals, leagues, and paired differences.

Runs are compared where they differ in the encoding, its options and the seed alone, and in fields that were tuned for each
encoding. Runs that differ in anything else, or in where their data came from, are in tables of their own, because a difference
between them may be due to that. Runs of equal fields whose models differ in size are refused.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from inspect import Parameter
from statistics import fmean, median_low, stdev
from typing import Any, TypeVar

from lagwise.encodings import options_of
from lagwise.errors import nearest
from lagwise.lab.config import FIELDS, Config
from lagwise.lab.loop import make_task
from lagwise.lab.store import Run
from lagwise.lab.tasks import task_named

OWN_FIELDS = ("encoding", "encoding_options", "seed", "preset")
"""Fields in which runs of one table may differ; the name of a preset says only where other fields came from."""

CONFIDENCE = 0.95


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
        decimals = min(max(1 - magnitude(self.half_width), 0), 6)
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


def aligned(estimates: Sequence[Estimate], *, most: int = 6) -> list[str]:
    """Returns the estimates of a column with as many decimals each, and their points below each other.

    The interval in the middle has two digits, but none has more than `most` decimals.

    >>> aligned([Estimate(0.84123, 0.00512, 3), Estimate(-10.5, 0.0312, 3), Estimate(0.5, None, 1)])
    ['  0.8412 ± 0.0051', '-10.5000 ± 0.0312', '  0.5000         ']
    """
    decimals = min(shared_decimals(estimates), most)
    means = [f"{each.mean:.{decimals}f}" for each in estimates]
    halves = ["" if each.half_width is None else f" ± {each.half_width:.{decimals}f}" for each in estimates]
    widths = [max(map(len, column), default=0) for column in (means, halves)]
    return [f"{mean:>{widths[0]}}{half:<{widths[1]}}" for mean, half in zip(means, halves, strict=True)]


def shared_decimals(estimates: Sequence[Estimate]) -> int:
    """Returns the decimals of a column: by its intervals, or without any, four digits of its largest mean."""
    halves = [each.half_width for each in estimates if each.half_width and math.isfinite(each.half_width)]
    means = [abs(each.mean) for each in estimates if each.mean and math.isfinite(each.mean)]
    by_means = 3 - magnitude(max(means, default=1.0))
    wanted = 1 - magnitude(median_low(halves)) if halves else by_means
    return min(max(wanted, 0), 6)


def magnitude(value: float) -> int:
    """Returns the power of ten of the first digit of a number.

    >>> magnitude(0.00512), magnitude(31.2)
    (-3, 1)
    """
    return math.floor(math.log10(value))


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
    """Complete runs that may be compared: they differ in the encoding, its options, the seed and what was tuned alone.

    Args:
        title: The task, and the fields in which this group differs from others.
        fields: All fields that the runs have in common, and where the data came from.
        metric: The name of the metric that counts.
        higher_is_better: Whether a higher one is better.
        runs: The runs by the encoding's name, with the options where one name has several, and by the seed.
        tune: Fields of which each encoding has the value that is best for it.
    """

    title: str
    fields: dict[str, Any]
    metric: str
    higher_is_better: bool
    runs: dict[str, dict[int, Run]]
    tune: tuple[str, ...] = ()

    @property
    def members(self) -> list[Run]:
        """All runs."""
        return [run for seeds in self.runs.values() for run in seeds.values()]


def groups(runs: Iterable[Run], tune: Sequence[str] = ()) -> list[Group]:
    """Returns the complete ones of some runs, in groups that may be compared.

    Args:
        runs: The runs.
        tune: Fields that are tuned for each encoding, see `tuned`.
    """
    found: dict[str, list[Run]] = {}
    complete = tuned([run for run in runs if run.result is not None], tune)
    for run in complete:
        found.setdefault(json.dumps(common_fields(run, tune), sort_keys=True), []).append(run)
    fields = [json.loads(key) for key in found]
    return [group_of(members, complete, own, fields, tune) for members, own in zip(found.values(), fields, strict=True)]


def tuned(runs: Sequence[Run], fields: Sequence[str]) -> list[Run]:
    """Returns of each encoding the runs whose values of some fields are best on the validation split.

    The mean over the seeds that all values have counts. Each encoding so has the same tuning, on other examples than those that
    it is compared on.
    """
    check_tuned(fields)
    trials: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        config = run.config
        owner = json.dumps([common_fields(run, fields), config.encoding, shown_options(config)], sort_keys=True)
        trials.setdefault(owner, {}).setdefault(json.dumps([getattr(config, name) for name in fields]), []).append(run)
    chosen = {id(run) for values in trials.values() for run in best_of(list(values.values()))}
    return [run for run in runs if id(run) in chosen]


def check_tuned(fields: Iterable[str]) -> None:
    """Raises for what cannot be tuned."""
    for name in fields:
        if name not in FIELDS or name in OWN_FIELDS:
            known = [field for field in FIELDS if field not in OWN_FIELDS]
            raise ValueError(
                f"what is tuned must be a field of a run beside the encoding, its options and the seed, but is {name!r}"
                + nearest(name, known)
            )


def best_of(trials: Sequence[Sequence[Run]]) -> Sequence[Run]:
    """Returns the best of several sets of runs of one encoding, by the seeds that all of them have."""
    config = trials[0][0].config
    common = set.intersection(*({run.config.seed for run in runs} for runs in trials))
    if not common:
        raise ValueError(
            f"values that are tuned must have a seed in common, but those of {config.encoding} on {config.task} do not"
        )
    metric, higher_is_better = main_metric(config)

    def quality(runs: Sequence[Run]) -> tuple[bool, float]:
        found = (result for run in runs if run.config.seed in common and (result := run.result) is not None)
        return order(fmean(result["validation"][metric] for result in found), higher_is_better)

    return min(trials, key=quality)


def group_of(
    runs: Sequence[Run],
    all_runs: Sequence[Run],
    fields: dict[str, Any],
    all_fields: Sequence[dict[str, Any]],
    tune: Sequence[str],
) -> Group:
    """Returns one of several groups, with a title and names that tell it and its encodings from those of the others."""
    metric, higher_is_better = main_metric(runs[0].config)
    flat, others = spelled(fields), [spelled(other) for other in all_fields if other["task"] == fields["task"]]
    differing = [name for name in flat if name != "task" and any(other.get(name) != flat[name] for other in others)]
    own = by_encoding(runs, [run for run in all_runs if run.config.task == fields["task"]])
    for name, seeds in own.items():
        if words := unlike(list(seeds.values())):
            raise ValueError(f"runs of {name} must be of one model, but {words}: compare them apart")
    return Group(
        title=", ".join([fields["task"], *(f"{name}={shown(flat[name])}" for name in differing)]),
        fields=fields,
        metric=metric,
        higher_is_better=higher_is_better,
        runs=own,
        tune=tuple(tune),
    )


def unlike(runs: Sequence[Run]) -> str:
    """Says which of some runs of equal fields have models of two sizes, as with another tokenizer beside the data; "" if none."""
    first, *others = [(run.folder, result["parameters"]) for run in runs if (result := run.result) is not None]
    for folder, size in others:
        if size != first[1]:
            return (
                f"{first[0]} has {first[1]:,} parameters and {folder} {size:,}, so that their data, or the tokenizer beside it, "
                "was not the same"
            )
    return ""


def spelled(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields by the names that the command line has for them: each option of the task by itself."""
    others = {name: value for name, value in fields.items() if name != "task_options"}
    return {**others, **{f"task.{name}": value for name, value in fields["task_options"].items()}}


def common_fields(run: Run, tune: Sequence[str] = ()) -> dict[str, Any]:
    """Returns what runs must have in common to be compared; an option of the task that was left out counts as its default."""
    config = run.config
    fields = {name: value for name, value in config.to_json().items() if name not in (*OWN_FIELDS, *tune)}
    options = asdict(task_named(config.task).Options(**config.task_options))
    return {**fields, "task_options": options, "data": data_of(run)}


def data_of(run: Run) -> str:
    """Returns where the data of a run came from."""
    return run.environment["data"]


def chosen(runs: Sequence[Run], encodings: Sequence[str] | None, seeds: int | None) -> list[Run]:
    """Returns the runs of some encodings and of the first so many seeds of each; None leaves all."""
    known = list(dict.fromkeys(run.config.encoding for run in runs))
    for name in encodings or ():
        if name not in known:
            raise ValueError(f"encodings must be among those of the runs, {', '.join(known)}, but one is {name!r}")
    if seeds is not None and seeds < 1:
        raise ValueError(f"seeds must be at least 1, but is {seeds}")
    numbers = {name: sorted({run.config.seed for run in runs if run.config.encoding == name})[:seeds] for name in known}
    found = [
        run for run in runs if run.config.encoding in (encodings or known) and run.config.seed in numbers[run.config.encoding]
    ]
    if not found:
        raise ValueError("there must be runs to repeat, but there are none")
    return found


AnyRun = TypeVar("AnyRun", bound=Run)


def by_encoding(runs: Sequence[AnyRun], among: Sequence[Run] = ()) -> dict[str, dict[int, AnyRun]]:
    """Returns runs by the name of their encoding and their seed; options that tell runs of one name apart are in the name.

    An option that was left out counts as its default.

    Args:
        runs: The runs.
        among: Others that stand beside them, as in tables of their own, and that a name must tell them apart from as well.
    """
    options: dict[str, list[dict[str, str]]] = {}
    for run in (*runs, *among):
        options.setdefault(run.config.encoding, []).append(shown_options(run.config))
    found: dict[str, dict[int, AnyRun]] = {}
    for run in runs:
        config = run.config
        own, others = shown_options(config), options[config.encoding]
        told = [f"{name}={value}" for name, value in sorted(own.items()) if any(other.get(name) != value for other in others)]
        seeds = found.setdefault(config.encoding + (f" ({', '.join(told)})" if told else ""), {})
        if config.seed in seeds:
            raise ValueError(f"{seeds[config.seed].folder} and {run.folder} hold the same run: leave one of them out")
        seeds[config.seed] = run
    return found


def shown_options(config: Config) -> dict[str, str]:
    """Returns the options of a run's encoding, with their defaults, as the command line takes them."""
    options = {**options_of(config.encoding), **config.encoding_options}
    return {name: shown(value) for name, value in options.items() if value is not Parameter.empty}


def shown(value: Any) -> str:
    """Returns a field's value as the command line takes it."""
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value)


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
    rows = [row_of(name, list(seeds.values()), group) for name, seeds in group.runs.items()]
    return sorted(rows, key=lambda row: order(row.test.mean, group.higher_is_better))


def order(value: float, higher_is_better: bool) -> tuple[bool, float]:
    """Returns a key that sorts the best value first, and what is no number last."""
    return math.isnan(value), -value if higher_is_better else value


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
