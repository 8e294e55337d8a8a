"""Files of JSON and JSON lines: read with errors that say what to do, written all of it or nothing."""

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

Line = dict[str, Any]

Content = TypeVar("Content", dict[str, Any], list[Any])


def make_folder(path: Path) -> None:
    """Makes a folder; raises with its name where none can be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{path} must be a folder, but cannot be made ({error.strerror}): choose another place") from error


def missing_folders(folder: Path) -> list[Path]:
    """Returns a folder and those around it that are not there yet, innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Removes those of some folders that hold nothing, innermost first."""
    for folder in folders:
        # Only an empty folder can be removed so.
        with suppress(OSError):
            folder.rmdir()


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


def write_json(path: Path, content: Mapping[str, Any]) -> None:
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
