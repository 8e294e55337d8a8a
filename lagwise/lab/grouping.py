"""Which runs may be compared.

Runs are compared where they differ in the encoding, its options and the seed alone, and in fields that were tuned for each
encoding. Runs that differ in anything else, or in where their data came from, are in tables of their own, because a difference
between them may be due to that. Runs of equal fields whose models differ in size are refused.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from inspect import Parameter
from statistics import fmean
from typing import Any, TypeVar

from lagwise.encodings import options_of
from lagwise.errors import nearest
from lagwise.lab.config import FIELDS, Config
from lagwise.lab.experiment import main_metric
from lagwise.lab.run_folder import Run
from lagwise.lab.tasks import task_named

OWN_FIELDS = ("encoding", "encoding_options", "seed", "preset")
"""Fields in which runs of one table may differ; the name of a preset says only where other fields came from."""


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
        tune: Fields that are tuned for each encoding, see `best_tuned`.
    """
    found: dict[str, list[Run]] = {}
    complete = best_tuned([run for run in runs if run.result is not None], tune)
    for run in complete:
        found.setdefault(json.dumps(common_fields(run, tune), sort_keys=True), []).append(run)
    fields = [json.loads(key) for key in found]
    return [group_of(members, complete, own, fields, tune) for members, own in zip(found.values(), fields, strict=True)]


def compared_groups(runs: Iterable[Run], tune: Sequence[str] = ()) -> list[Group]:
    """Returns the groups of some runs, of which there must be one."""
    found = groups(runs, tune)
    if not found:
        raise ValueError("runs must have at least one that is complete, but have none: train one to its end")
    return found


def only_group(runs: Iterable[Run]) -> Group:
    """Returns runs as one group, and raises where they are none or several."""
    first, *others = compared_groups(runs)
    if others:
        titles = "; ".join(group.title for group in (first, *others))
        raise ValueError(f"runs must differ in encoding and seed alone, but differ in more ({titles}): compare them apart")
    return first


def best_tuned(runs: Sequence[Run], fields: Sequence[str]) -> list[Run]:
    """Returns of each encoding the runs whose values of some fields are best on the validation split.

    The mean over the seeds that all values have counts. Each encoding so has the same tuning, on other examples than those that
    it is compared on.
    """
    check_tuned(fields)
    trials: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        config = run.config
        owner = json.dumps([common_fields(run, fields), config.encoding, options_as_arguments(config)], sort_keys=True)
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
        return best_first(fmean(result["validation"][metric] for result in found), higher_is_better)

    return min(trials, key=quality)


def best_first(value: float, higher_is_better: bool) -> tuple[bool, float]:
    """Returns a key that sorts the best value first, and what is no number last."""
    return math.isnan(value), -value if higher_is_better else value


def group_of(
    runs: Sequence[Run],
    all_runs: Sequence[Run],
    fields: dict[str, Any],
    all_fields: Sequence[dict[str, Any]],
    tune: Sequence[str],
) -> Group:
    """Returns one of several groups, with a title and names that tell it and its encodings from those of the others."""
    metric, higher_is_better = main_metric(runs[0].config)
    flat, others = fields_by_name(fields), [fields_by_name(other) for other in all_fields if other["task"] == fields["task"]]
    differing = [name for name in flat if name != "task" and any(other.get(name) != flat[name] for other in others)]
    own = by_encoding(runs, [run for run in all_runs if run.config.task == fields["task"]])
    for name, seeds in own.items():
        if words := model_difference(list(seeds.values())):
            raise ValueError(f"runs of {name} must be of one model, but {words}: compare them apart")
    return Group(
        title=", ".join([fields["task"], *(f"{name}={as_argument(flat[name])}" for name in differing)]),
        fields=fields,
        metric=metric,
        higher_is_better=higher_is_better,
        runs=own,
        tune=tuple(tune),
    )


def model_difference(runs: Sequence[Run]) -> str:
    """Says which of some runs of equal fields have models of two sizes, as with another tokenizer beside the data; "" if none."""
    first, *others = [(run.folder, result["parameters"]) for run in runs if (result := run.result) is not None]
    for folder, size in others:
        if size != first[1]:
            return (
                f"{first[0]} has {first[1]:,} parameters and {folder} {size:,}, so that their data, or the tokenizer beside it, "
                "was not the same"
            )
    return ""


def fields_by_name(fields: Mapping[str, Any]) -> dict[str, Any]:
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


def select_runs(runs: Sequence[Run], encodings: Sequence[str] | None, seeds: int | None) -> list[Run]:
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
        options.setdefault(run.config.encoding, []).append(options_as_arguments(run.config))
    found: dict[str, dict[int, AnyRun]] = {}
    for run in runs:
        config = run.config
        own, others = options_as_arguments(config), options[config.encoding]
        told = [f"{name}={value}" for name, value in sorted(own.items()) if any(other.get(name) != value for other in others)]
        seeds = found.setdefault(config.encoding + (f" ({', '.join(told)})" if told else ""), {})
        if config.seed in seeds:
            raise ValueError(f"{seeds[config.seed].folder} and {run.folder} hold the same run: leave one of them out")
        seeds[config.seed] = run
    return found


def options_as_arguments(config: Config) -> dict[str, str]:
    """Returns the options of a run's encoding, with their defaults, as the command line takes them."""
    options = {**options_of(config.encoding), **config.encoding_options}
    return {name: as_argument(value) for name, value in options.items() if value is not Parameter.empty}


def as_argument(value: Any) -> str:
    """Returns a field's value as the command line takes it."""
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value)
