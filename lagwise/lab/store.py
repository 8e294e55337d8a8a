"""A run as a folder: what was run, on what, every number on the way, and the numbers in the end.

config.json         the resolved config
environment.json    device, versions, commit, date, and where the data came from
metrics.jsonl       one line for each report and each evaluation
priors.json         what each position encoding learned, by lag
result.json         the final numbers; it is there when the run is complete
checkpoints/        from which a run goes on

A file that cannot be read raises a `ValueError` that names it and says what to do.
"""

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from lagwise.lab.config import Config, difference_words

CONFIG, ENVIRONMENT, METRICS, RESULT = "config.json", "environment.json", "metrics.jsonl", "result.json"
PRIORS = "priors.json"

FACTS = ("data", "device")
"""What is read of an environment."""

NUMBERS = (
    "parameters", "encoding_parameters", "seconds", "tokens_per_second", "peak_memory", "sample", "validation", "test", "lengths",
)  # fmt: skip
"""What is read of a result."""

RESTORE = "restore it, or delete the folder and train the run anew"
COMPUTE = f"delete {RESULT} and {PRIORS} and go on with the run, which computes them from its last checkpoint"
MEND = "mend the line, or delete it"

Line = dict[str, Any]
Content = TypeVar("Content", dict[str, Any], list[Any])


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
        write(self.folder / RESULT, result)


def runs_in(folders: Iterable[Path]) -> list[Run]:
    """Returns the runs in some folders, at any depth, in the order of their paths; also those that have lost their config."""
    # Unlike `rglob`, this passes over folders that somebody deletes meanwhile.
    found = {Path(path) for folder in folders for path, _, names in os.walk(folder) if {CONFIG, RESULT} & {*names}}
    return [Run(folder) for folder in sorted(found)]


def is_same_place(one: str, other: str) -> bool:
    """Says whether two words for data mean the same: they are equal, or paths of one folder."""
    return one == other or (os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other))


def missing(folder: Path) -> list[Path]:
    """Returns a folder and those around it that are not there yet, innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Removes those of some folders that hold nothing, innermost first."""
    for folder in folders:
        # Only an empty folder can be removed so.
        with suppress(OSError):
            folder.rmdir()


def make_folder(path: Path) -> None:
    """Makes a folder; raises with its name where none can be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{path} must be a folder, but cannot be made ({error.strerror}): choose another place") from error


def read_json(path: Path, kind: type[Content], *, remedy: str = "") -> Content:
    """Returns the content of a JSON file, which must be of a kind."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error.strerror, remedy) from error
    return content_of(text, kind, path, remedy=remedy)


def read_if_there(path: Path, kind: type[Content], *, remedy: str = "") -> Content | None:
    """Returns the content of a JSON file, or None where there is no such file."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    return content_of(text, kind, path, remedy=remedy)


def content_of(text: bytes, kind: type[Content], place: Path | str, *, remedy: str = "") -> Content:
    """Returns the content of a text of JSON, which must be of a kind; `place` says where the text is from."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise unreadable(place, error, remedy) from error
    if not isinstance(found, kind):
        raise unreadable(place, f"expected is a {kind.__name__}, but it holds a {type(found).__name__}", remedy)
    return found


def with_all(names: Sequence[str], content: dict[str, Any], place: Path | str, *, remedy: str = "") -> dict[str, Any]:
    """Returns the content of a place, which must have some names."""
    if missing := [name for name in names if name not in content]:
        raise unreadable(place, f"it has no {', '.join(missing)}", remedy)
    return content


def config_of(stored: Mapping[str, Any], place: Path | str, *, remedy: str = "") -> Config:
    """Returns the config of the fields that are stored in a place."""
    try:
        return Config.from_json(stored)
    except ValueError as error:
        raise unreadable(place, error, remedy) from error


def unreadable(place: Path | str, reason: object, remedy: str = "") -> ValueError:
    """Returns what to raise where something cannot be read."""
    return ValueError(f"{place} cannot be read ({reason})" + (f": {remedy}" if remedy else ""))


FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Says which file a full disk has no room for, and what to do: the error itself has no name."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        words = f"{os.strerror(error.errno)}, make room on the disk or raise its limit"
        raise OSError(error.errno, words, str(path)) from error


def add_line(path: Path, line: Line) -> None:
    """Adds a line to a file of JSON lines; one before it that was cut off ends there."""
    text = json.dumps(line).encode() + b"\n"
    # In one piece, so that lines of several processes do not mix.
    with writing(path), path.open("a+b", buffering=len(text) + 2) as file:
        if size := file.seek(0, os.SEEK_END):
            file.seek(size - 1)
            text = text if file.read(1) == b"\n" else b"\n" + text
        file.write(text)


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file, all of it or nothing."""
    replace_text(path, json.dumps(content, indent=2) + "\n")


DRAFT = ".part"
"""How the names of files end that are not finished."""


def replace_text(path: Path, text: str) -> None:
    """Writes a text file, all of it or nothing, also where several processes write it."""
    draft = path.with_name(f".{path.name}.{uuid4().hex}{DRAFT}")
    try:
        with writing(path):
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
