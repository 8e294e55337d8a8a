"""A run as a folder: what was run, on what, every number on the way, and the numbers in the end.

config.json         the resolved config
environment.json    device, versions, commit, date, and where the data came from
metrics.jsonl       one line for each report and each evaluation
priors.json         what each position encoding learned, by lag
result.json         the final numbers; it is there when the run is complete
failure.json        why the run failed; it is there until the run is begun again
checkpoints/        from which a run goes on

A file that cannot be read raises a `ValueError` that names it and says what to do.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lagwise.lab.config import Config, difference_words
from lagwise.lab.json_files import (
    DRAFT,
    Line,
    add_line,
    content_of,
    make_folder,
    read_if_there,
    read_json,
    replace_text,
    unreadable,
    with_all,
    write_json,
)

CONFIG, ENVIRONMENT, METRICS, RESULT = "config.json", "environment.json", "metrics.jsonl", "result.json"
PRIORS, FAILURE = "priors.json", "failure.json"

FACTS = ("data", "device")
"""What is read of an environment."""

NUMBERS = (
    "parameters", "encoding_parameters", "seconds", "tokens_per_second", "peak_memory", "sample", "validation", "test", "lengths",
)  # fmt: skip
"""What is read of a result."""

RESTORE = "restore it, or delete the folder and train the run anew"
COMPUTE = f"delete {RESULT} and {PRIORS} and go on with the run, which computes them from its last checkpoint"
MEND = "mend the line, or delete it"


class Run:
    """The folder of a run."""

    def __init__(self, folder: Path):
        self.folder = folder

    @classmethod
    def create(cls, folder: Path, config: Config, environment: Mapping[str, Any]) -> "Run":
        """Makes the folder, or takes one that has the same config and data; what is in it stays."""
        run = cls(folder)
        if run.exists:
            run.check_same(config, environment["data"])
            return run
        make_folder(folder)
        write_json(folder / ENVIRONMENT, environment)
        write_json(folder / CONFIG, config.to_json())
        return run

    @classmethod
    def open(cls, folder: Path) -> "Run":
        """Returns a run that exists; raises for a folder that holds none."""
        run = cls(folder)
        if not run.exists:
            raise ValueError(f"{folder} holds no run: it has no {CONFIG}")
        return run

    @property
    def exists(self) -> bool:
        """Whether the folder holds a run."""
        return (self.folder / CONFIG).is_file()

    def check_same(self, config: Config, data: str) -> None:
        """Raises where the folder holds a run with another config, or on other data."""
        if words := difference_words(self.config, config):
            raise ValueError(
                f"{self.folder} holds a run with another config ({words}): choose another folder, or delete this one"
            )
        if not is_same_place(there := self.environment["data"], data):
            raise ValueError(
                f"{self.folder} holds a run on other data ({there}, not {data}): give the data that it was begun with, or choose "
                "another folder"
            )

    @property
    def config(self) -> Config:
        """What is run."""
        path = self.folder / CONFIG
        return config_of(read_json(path, dict, remedy=RESTORE), path, remedy=RESTORE)

    @property
    def environment(self) -> dict[str, Any]:
        """What it was run on."""
        path = self.folder / ENVIRONMENT
        return with_all(FACTS, read_json(path, dict, remedy=RESTORE), path, remedy=RESTORE)

    @property
    def result(self) -> dict[str, Any] | None:
        """The final numbers, or None for a run that is not complete."""
        path = self.folder / RESULT
        found = read_if_there(path, dict, remedy=COMPUTE)
        return None if found is None else with_all(NUMBERS, found, path, remedy=COMPUTE)

    @property
    def is_complete(self) -> bool:
        """Whether there are final numbers, which may be damaged."""
        return (self.folder / RESULT).is_file()

    @property
    def priors(self) -> list[dict[str, Any]] | None:
        """What each position encoding learned, see `lagwise.lens.learned.learned_priors`; None for a run that does not tell."""
        return read_if_there(self.folder / PRIORS, list, remedy=COMPUTE)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    @property
    def lines(self) -> list[Line]:
        """All lines of the metrics; a last one that was cut off is left out."""
        path = self.folder / METRICS
        *whole, _ = path.read_bytes().split(b"\n") if path.is_file() else [b""]
        places = (f"{path}, line {number}" for number in range(1, len(whole) + 1))
        return [
            with_all(("step",), content_of(text, dict, place, remedy=MEND), place, remedy=MEND)
            for text, place in zip(whole, places, strict=True)
        ]

    def log(self, line: Line) -> None:
        """Adds a line to the metrics."""
        add_line(self.folder / METRICS, line)

    def forget_after(self, step: int) -> None:
        """Drops the lines after a step, from which the run goes on, and what was written at the end or never finished."""
        kept = [line for line in self.lines if line["step"] <= step]
        replace_text(self.folder / METRICS, "".join(json.dumps(line) + "\n" for line in kept))
        for path in (self.folder / RESULT, self.folder / PRIORS, *self.folder.glob(f".*{DRAFT}")):
            path.unlink(missing_ok=True)

    def finish(self, result: Mapping[str, Any], priors: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Writes the final numbers, and before them what the encodings learned, if that is known."""
        if priors is not None:
            replace_text(self.folder / PRIORS, json.dumps(priors) + "\n")
        write_json(self.folder / RESULT, result)

    @property
    def failure(self) -> str:
        """Why the run is not complete."""
        try:
            stored = read_if_there(self.folder / FAILURE, dict) or {}
        except ValueError as error:
            return f"why is not known: {error}"
        return stored.get("error", "it was stopped before its end")

    def fail(self, words: str, details: str = "") -> None:
        """Leaves the reason of a failure in the folder, if it holds a run."""
        # A disk may be full, and the reason is told elsewhere too.
        if self.exists:
            with suppress(OSError):
                write_json(self.folder / FAILURE, {"error": words, "traceback": details})


def runs_in(folders: Iterable[Path]) -> list[Run]:
    """Returns the runs in some folders, at any depth, in the order of their paths; also those that have lost their config."""
    # Unlike `rglob`, this passes over folders that somebody deletes meanwhile.
    found = {Path(path) for folder in folders for path, _, names in os.walk(folder) if {CONFIG, RESULT} & {*names}}
    return [Run(folder) for folder in sorted(found)]


def is_same_place(one: str, other: str) -> bool:
    """Says whether two words for data mean the same: they are equal, or paths of one folder."""
    return one == other or (os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other))


def config_of(stored: Mapping[str, Any], place: Path | str, *, remedy: str = "") -> Config:
    """Returns the config of the fields that are stored in a place."""
    try:
        return Config.from_json(stored)
    except ValueError as error:
        raise unreadable(place, error, remedy) from error
