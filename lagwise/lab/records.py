"""Runs as lines of JSON, to be kept and published: what a run's folder holds, without weights and with fewer points of curves."""

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lagwise.lab.checkpoint import check_config, latest_state
from lagwise.lab.config import Config
from lagwise.lab.experiment import main_metric
from lagwise.lab.json_files import Line, content_of, make_folder, replace_text, unreadable, with_all
from lagwise.lab.run_folder import FACTS, MEND, NUMBERS, Run, config_of, runs_in

KIND = "run"
"""What the lines say that they are, in a folder that also holds measurements of speed."""

MOST_POINTS = 20
"""Points of a curve that are kept."""

Tell = Callable[[str], None]
"""Is told in words what is left out, and why."""


class Recorded(Run):
    """A run as it was at one time, such as one of which a line is left: what is written to its folder later changes nothing."""

    def __init__(self, place: Path, content: Line):
        super().__init__(place)
        self.content = with_all(("config", "environment"), content, place, remedy=MEND)
        self.known_config = config_of(content["config"], place, remedy=MEND)
        with_all(FACTS, content["environment"], f"the environment of {place}", remedy=MEND)

    @classmethod
    def of(cls, run: Run) -> "Recorded":
        """Returns a complete run as it is now; raises where a file of it cannot be read, or is of another run."""
        if (result := run.result) is None:
            raise ValueError(f"{run.folder}: {run.failure}")
        if (state := latest_state(run.checkpoints)) is not None:
            check_config(run, state, f"the newest checkpoint in {run.checkpoints}")
        config, environment = run.config.to_json(), run.environment
        content = {"config": config, "environment": environment, "result": result, "lines": run.lines, "priors": run.priors}
        return cls(run.folder, content)

    @property
    def exists(self) -> bool:
        return True

    @property
    def config(self) -> Config:
        return self.known_config

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
    def priors(self) -> list[dict[str, Any]] | None:
        return self.content.get("priors")


def line_about(run: Run) -> Line:
    """Returns a complete run as one line of JSON."""
    if run.result is None:
        raise ValueError(f"{run.folder} must be a complete run, but has no result: train it to the end")
    reports = [line for line in run.lines if "split" not in line]
    evaluations = [line for line in run.lines if "split" in line]
    kept = sorted(thin(reports) + thin(evaluations), key=lambda line: line["step"])
    return {
        "bench": KIND, "config": run.config.to_json(), "environment": run.environment, "result": run.result,
        "lines": [round_numbers(line) for line in kept],
    }  # fmt: skip


def thin(lines: Sequence[Line]) -> list[Line]:
    """Returns some lines of a curve, evenly, with the first and the last.

    >>> [line["step"] for line in thin([{"step": step} for step in range(1, 39)])][:4]
    [1, 3, 5, 7]
    """
    if len(lines) <= MOST_POINTS:
        return list(lines)
    places = [round(place * (len(lines) - 1) / (MOST_POINTS - 1)) for place in range(MOST_POINTS)]
    return [lines[place] for place in places]


def round_numbers(line: Line) -> Line:
    """Returns a line with six digits of each number."""
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in line.items()}


def save_runs(runs: Iterable[Run], path: Path) -> None:
    """Writes complete runs as lines, in the order of what they are, in place of those that the file had."""
    make_folder(path.parent)
    replace_text(path, "".join(json.dumps(line_about(run)) + "\n" for run in sorted(runs, key=sort_place)))


def sort_place(run: Run) -> tuple[str, str, str, int]:
    """Returns where a run stands in a file: seeds of one config beside each other."""
    config = run.config
    return config.task, config.encoding, config.fingerprint(without=["seed"]), config.seed


def complete_runs(runs: Iterable[Run], tell: Tell) -> list[Run]:
    """Returns the complete ones of some runs as they are now, and tells why others are left out."""
    found: list[Run] = []
    for run in runs:
        with left_out(tell):
            found.append(with_numbers(Recorded.of(run)))
    return found


def read_runs(path: Path, tell: Tell | None = None) -> list[Run]:
    """Returns the runs of a file of lines; one that cannot be read is told about, or raises where there is nobody to tell."""
    found: list[Run] = []
    for place, text in numbered_lines(path):
        with left_out(tell):
            found.append(with_numbers(Recorded(place, line_of(text, place, KIND, "lagwise compare --save"))))
    return found


@contextmanager
def left_out(tell: Tell | None) -> Iterator[None]:
    """Tells of what cannot be read, or raises where there is nobody to tell."""
    try:
        yield
    except ValueError as error:
        if tell is None:
            raise
        tell(f"left out: {error}")


def with_numbers(run: Recorded) -> Recorded:
    """Returns a run, which must have all numbers that a comparison reads."""
    content = with_all(("result", "lines"), run.content, run.folder, remedy=MEND)
    result = with_all(NUMBERS, content["result"], f"the result of {run.folder}", remedy=MEND)
    try:
        metric, _ = main_metric(run.config)
    except ValueError as error:
        raise unreadable(run.folder, error, MEND) from error
    for split in ("validation", "test"):
        with_all((metric,), result[split], f"{split} in the result of {run.folder}", remedy=MEND)
    return run


def numbered_lines(path: Path) -> Iterator[tuple[Path, bytes]]:
    """Yields the lines of a file, each with a name that says where it stands."""
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        yield path.with_name(f"{path.name}, line {number}"), text


def line_of(text: bytes, place: Path, kind: str, command: str) -> Line:
    """Returns the content of a line, which must be of a kind, and was written by a command."""
    content = content_of(text, dict, place, remedy=f"expected is a line of `{command}`: {MEND}")
    if content.get("bench") != kind:
        raise ValueError(f"{place}: is no line of {kind!r}: expected are those of `{command}`")
    return content


def lines_of(path: Path, kind: str, command: str) -> dict[Path, Line]:
    """Returns the lines of a file by where they stand; all must be of a kind, and were written by a command."""
    return {place: line_of(text, place, kind, command) for place, text in numbered_lines(path)}


def stored_runs(places: Iterable[Path], tell: Tell = warnings.warn) -> list[Run]:
    """Returns the complete runs of folders, at any depth, and of files of lines, and tells why others are left out."""
    found: list[Run] = []
    for place in places:
        if not place.exists():
            raise ValueError(f"--from must be a folder of runs, or a file of their lines, but {place} is not there")
        found += read_runs(place, tell) if place.is_file() else complete_runs(runs_in([place]), tell)
    return found
