"""One owner of a run's folder at a time.

The lock is the kernel's, on the file `.lock`, so that it goes when its owner does, also by `kill -9`. A file that names a process
could not tell a dead owner from one on another machine. Who the owner is stands in `.owner.json`, for people alone.
"""

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from lagwise.lab.json_files import make_folder, missing_folders, read_json, remove_empty, write_json
from lagwise.lab.run_folder import Run

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
    made = missing_folders(folder)
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
        write_json(folder / OWNER, {"process": os.getpid(), "host": socket.gethostname(), "since": since})
        yield
    except ValueError:
        if made and not Run(folder).lines:
            shutil.rmtree(folder, ignore_errors=True)
            remove_empty(made)
        raise
    finally:
        (folder / OWNER).unlink(missing_ok=True)
        lock.release()


def owner_words(folder: Path) -> str:
    """Returns who owns a folder."""
    try:
        owner = read_json(folder / OWNER, dict)
        return f"process {owner['process']} on {owner['host']} since {owner['since']}"
    except (ValueError, KeyError):
        # It has the lock already, and is about to write who it is.
        return "another process"
