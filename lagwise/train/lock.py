"""One owner of a run's folder at a time.

The lock is the kernel's, on the file `.lock`, so that it goes when its owner does, also by `kill -9`. A file that names a process
could not tell a dead owner from one on another machine. Who the owner is stands in `.owner.json`, for people alone.
"""

import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from lagwise.train.store import Run, make_folder, read_json, write

LOCK, OWNER = ".lock", ".owner.json"

MOMENT = 3.0
"""Seconds that an owner that was just killed, and whose processes save what they have, needs to be gone."""


class Held(ValueError):
    """A run's folder has another owner."""


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Owns a run's folder, which is made if it is not there; raises where somebody else does.

    A folder that was made here goes again where a `ValueError` refuses the run before its first line.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    make_folder(folder)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=MOMENT)
    except Timeout as error:
        raise Held(
            f"{folder} is in use by {owner_words(folder)}: wait until that ends, or stop it, and give the same command again; "
            "or choose another folder"
        ) from error
    try:
        since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        write(folder / OWNER, {"process": os.getpid(), "host": socket.gethostname(), "since": since})
        yield
    except ValueError:
        if made and not Run(folder).lines:
            remove(made)
        raise
    finally:
        (folder / OWNER).unlink(missing_ok=True)
        lock.release()


def remove(folders: Sequence[Path]) -> None:
    """Removes the folder of a run, which comes first, and those around it that nobody else uses."""
    shutil.rmtree(folders[0], ignore_errors=True)
    with suppress(OSError):
        for folder in folders[1:]:
            folder.rmdir()


def owner_words(folder: Path) -> str:
    """Returns who owns a folder."""
    try:
        owner = read_json(folder / OWNER, dict)
        return f"process {owner['process']} on {owner['host']} since {owner['since']}"
    except (ValueError, KeyError):
        # It has the lock already, and is about to write who it is.
        return "another process"
