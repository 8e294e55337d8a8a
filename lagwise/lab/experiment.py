"""An experiment: the config of a task with its defaults and presets, and the task and the metric of a config."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lagwise.encodings import canonical_name
from lagwise.lab.config import Config, with_fields
from lagwise.lab.tasks import task_named
from lagwise.lab.tasks.base import Task


def make_config(task: str, encoding: str | None = None, *, preset: str = "", **changes: Any) -> Config:
    """Returns the config of a task with its defaults, those of a preset, and given fields, later ones counting more.

    With another encoding than the preset's, the preset gives everything but the options of its encoding; where a second preset
    differs from it in the encoding alone, that one gives them, as far as the task has none that suit it.

    >>> make_config("process-50", "at5", dim=32).dim
    32
    """
    kind = task_named(task)
    if preset and preset not in kind.presets:
        known = ", ".join(kind.presets) or "none"
        raise ValueError(f"preset must be one of {task}'s ({known}), but is {preset!r}")
    given = dict(kind.presets[preset]) if preset else {}
    name = canonical_name(changes.pop("encoding", None) or encoding or given.get("encoding", "t5"))
    beside: dict[str, Any] = {}
    if given.get("encoding", name) != name:
        given = but_encoding(given)
        alike = (other for other in kind.presets.values() if other.get("encoding") == name and but_encoding(other) == given)
        beside = next(alike, {}).get("encoding_options", {})
    config = Config(task, name, preset)
    for fields in (kind.defaults, {**given, "encoding": name}, changes):
        config = with_fields(config, fields)
    suited = kind(**config.task_options).encoding_options(name)
    return replace(config, encoding_options={**beside, **suited, **config.encoding_options})


def but_encoding(preset: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a preset that are not about its encoding."""
    return {field: value for field, value in preset.items() if field not in ("encoding", "encoding_options", "per_layer")}


def make_task(config: Config, data: Path | str | None) -> Task:
    """Returns the task of a config."""
    seed = config.seed if config.data_seed is None else config.data_seed
    return task_named(config.task)(data, seed=seed, **config.task_options)


def main_metric(config: Config) -> tuple[str, bool]:
    """Returns the name of the metric that counts in a task, and whether a higher one is better."""
    name, metric = next(iter(make_task(config, None).metrics().items()))
    if metric.higher_is_better is None:
        raise ValueError(f"higher_is_better of metric {name!r} must be True or False, but is None: set it in its class")
    return name, metric.higher_is_better
