"""Runs as lines of JSON, to be kept and published: what a run's folder holds, without weights and with fewer points of curves."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lagwise.train.config import Config
from lagwise.train.store import Line, Run, replace_text, runs_in

KIND = "run"
"""What the lines say that they are, in a folder that also holds measurements of speed."""

MOST_POINTS = 20
"""Points of a curve that are kept."""


class Recorded(Run):
    """A complete run of which a line is left."""

    def __init__(self, path: Path, number: int, content: Line):
        super().__init__(path.with_name(f"{path.name}, line {number}"))
        self.content = content

    @property
    def exists(self) -> bool:
        return True

    @property
    def config(self) -> Config:
        return Config.from_json(self.content["config"])

    @property
    def environment(self) -> dict[str, Any]:
        return self.content["environment"]

    @property
    def result(self) -> dict[str, Any]:
        return self.content["result"]

    @property
    def lines(self) -> list[Line]:
        return self.content["lines"]

    @property
    def priors(self) -> None:
        return None


def record(run: Run) -> Line:
    """Returns a complete run as one line of JSON."""
    if run.result is None:
        raise ValueError(f"{run.folder} must be a complete run, but has no result: train it to the end")
    reports = [line for line in run.lines if "split" not in line]
    evaluations = [line for line in run.lines if "split" in line]
    kept = sorted(thinned(reports) + thinned(evaluations), key=lambda line: line["step"])
    return {
        "bench": KIND, "config": run.config.to_json(), "environment": run.environment, "result": run.result,
        "lines": [rounded(line) for line in kept],
    }  # fmt: skip


def thinned(lines: Sequence[Line]) -> list[Line]:
    """Returns some lines of a curve, evenly, with the first and the last.

    >>> [line["step"] for line in thinned([{"step": step} for step in range(1, 39)])][:4]
    [1, 3, 5, 7]
    """
    if len(lines) <= MOST_POINTS:
        return list(lines)
    places = [round(place * (len(lines) - 1) / (MOST_POINTS - 1)) for place in range(MOST_POINTS)]
    return [lines[place] for place in places]


def rounded(line: Line) -> Line:
    """Returns a line with six digits of each number."""
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in line.items()}


def save(runs: Iterable[Run], path: Path) -> None:
    """Writes complete runs as lines, in the order of what they are, in place of those that the file had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, "".join(json.dumps(record(run)) + "\n" for run in sorted(runs, key=place)))


def place(run: Run) -> tuple[str, str, str, int]:
    """Returns where a run stands in a file: seeds of one config beside each other."""
    config = run.config
    return config.task, config.encoding, config.fingerprint(without=["seed"]), config.seed


def read(path: Path) -> list[Run]:
    """Returns the runs of a file of lines."""
    return [Recorded(path, number, line) for number, line in enumerate(lines_of(path, KIND, "lagwise compare --save"), 1)]


def lines_of(path: Path, kind: str, command: str) -> list[Line]:
    """Returns the lines of a file, which must be of a kind, and were written by a command."""
    found: list[Line] = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: is no JSON, but expected are the lines of `{command}`: {error}") from error
        if not isinstance(content, dict) or content.get("bench") != kind:
            raise ValueError(f"{path}, line {number}: is no line of {kind!r}: expected are those of `{command}`")
        found.append(content)
    return found


def stored_runs(places: Iterable[Path]) -> list[Run]:
    """Returns the complete runs of folders, at any depth, and of files of lines."""
    found: list[Run] = []
    for place in places:
        if not place.exists():
            raise ValueError(f"--from must be a folder of runs, or a file of their lines, but {place} is not there")
        found += read(place) if place.is_file() else [run for run in runs_in([place]) if run.result is not None]
    return found
