"""A run as a folder: what was run, on what, every number on the way, and the numbers in the end.

config.json         the resolved config
environment.json    device, versions, commit, date, and where the data came from
metrics.jsonl       one line for each report and each evaluation
priors.json         what each position encoding learned, by lag
result.json         the final numbers; it is there when the run is complete
checkpoints/        from which a run goes on
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lagwise.train.config import Config

CONFIG, ENVIRONMENT, METRICS, RESULT = "config.json", "environment.json", "metrics.jsonl", "result.json"
PRIORS = "priors.json"

Line = dict[str, Any]


class Run:
    """The folder of a run."""

    def __init__(self, folder: Path):
        self.folder = folder

    @classmethod
    def create(cls, folder: Path, config: Config, environment: Mapping[str, Any]) -> "Run":
        """Makes the folder, or takes one that has the same config; what is in it stays."""
        run = cls(folder)
        if run.exists:
            if run.config != config:
                raise ValueError(f"{folder} holds a run with another config: choose another folder, or delete this one")
            return run
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / ENVIRONMENT, environment)
        write(folder / CONFIG, config.to_json())
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

    @property
    def config(self) -> Config:
        """What is run."""
        return Config.from_json(json.loads((self.folder / CONFIG).read_text()))

    @property
    def environment(self) -> dict[str, Any]:
        """What it was run on."""
        return json.loads((self.folder / ENVIRONMENT).read_text())

    @property
    def result(self) -> dict[str, Any] | None:
        """The final numbers, or None for a run that is not complete."""
        path = self.folder / RESULT
        return json.loads(path.read_text()) if path.is_file() else None

    @property
    def priors(self) -> list[dict[str, Any]] | None:
        """What each position encoding learned, see `lagwise.lens.learned.learned_priors`; None for a run that does not tell."""
        path = self.folder / PRIORS
        return json.loads(path.read_text()) if path.is_file() else None

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    @property
    def lines(self) -> list[Line]:
        """All lines of the metrics; a last one that was cut off is left out."""
        path = self.folder / METRICS
        text = path.read_text() if path.is_file() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def log(self, line: Line) -> None:
        """Adds a line to the metrics."""
        add_line(self.folder / METRICS, line)

    def forget_after(self, step: int) -> None:
        """Drops the lines after a step, from which the run goes on, and what was written at the end."""
        kept = [line for line in self.lines if line["step"] <= step]
        replace_text(self.folder / METRICS, "".join(json.dumps(line) + "\n" for line in kept))
        for name in (RESULT, PRIORS):
            (self.folder / name).unlink(missing_ok=True)

    def finish(self, result: Mapping[str, Any], priors: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Writes the final numbers, and before them what the encodings learned, if that is known."""
        if priors is not None:
            replace_text(self.folder / PRIORS, json.dumps(priors) + "\n")
        write(self.folder / RESULT, result)


def runs_in(folders: Iterable[Path]) -> list[Run]:
    """Returns the runs in some folders, at any depth, in the order of their paths."""
    found = {path.parent for folder in folders for path in folder.rglob(CONFIG)}
    return [Run(folder) for folder in sorted(found)]


def add_line(path: Path, line: Line) -> None:
    """Adds a line to a file of JSON lines."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file, all of it or nothing."""
    replace_text(path, json.dumps(content, indent=2) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Writes a text file, all of it or nothing."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(text)
    os.replace(draft, path)
