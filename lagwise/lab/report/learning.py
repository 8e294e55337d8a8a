"""Learning curves of the encodings of a group: means over the seeds, with the lowest and the highest."""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from lagwise.lab.grouping import Group

Point = tuple[int, float, float, float]
"""A step, and of the seeds at it the mean, the lowest and the highest value."""


def curves(group: Group) -> dict[str, dict[str, list[Point]]]:
    """Returns the learning curves of each encoding, by what they show; there are those with two points and more."""
    shows = {
        f"validation {group.metric}": ("validation", group.metric),
        "training loss": (None, "loss"),
        "validation loss": ("validation", "loss"),
    }
    found: dict[str, dict[str, list[Point]]] = {title: {} for title in shows}
    for name, seeds in group.runs.items():
        lines = [run.lines for run in seeds.values()]
        for title, (split, quantity) in shows.items():
            found[title][name] = curve([values_of(each, split, quantity) for each in lines])
    return {title: own for title, own in found.items() if max(map(len, own.values())) > 1}


def values_of(lines: Iterable[dict[str, Any]], split: str | None, quantity: str) -> dict[int, float]:
    """Returns a quantity of a split, or of training, by the step."""
    return {line["step"]: line[quantity] for line in lines if line.get("split") == split and "length" not in line}


def curve(seeds: Sequence[dict[int, float]]) -> list[Point]:
    """Returns the mean, the lowest and the highest value at the steps that all seeds have.

    >>> curve([{1: 2.0, 2: 1.0}, {1: 4.0, 2: 2.0, 3: 0.5}])
    [(1, 3.0, 2.0, 4.0), (2, 1.5, 1.0, 2.0)]
    """
    steps = sorted(set.intersection(*(set(values) for values in seeds)))
    return [(step, fmean(found), min(found), max(found)) for step in steps if (found := [values[step] for values in seeds])]
