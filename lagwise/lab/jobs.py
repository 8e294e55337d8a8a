"""Runs of a comparison: what is to be done, and what became of it."""

import shutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lagwise.lab.config import Config
from lagwise.lab.lock import LOCK, OWNER, Held, owned
from lagwise.lab.loop import Diverged, Settings, data_words
from lagwise.lab.run import Halted
from lagwise.lab.run_folder import FAILURE, Run


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Args:
        config: What was to be run.
        folder: Where it is.
        status: "ran", "resumed" (it had been begun before), "kept" (it was complete before) or "failed".
        error: Why it failed, in words.
    """

    config: Config
    folder: Path
    status: Literal["ran", "resumed", "kept", "failed"]
    error: str | None = None

    @property
    def run(self) -> Run:
        """The run's folder."""
        return Run(self.folder)


@dataclass(frozen=True)
class Job:
    """A run to do, as a process is told of it.

    The function that trains goes with it, so that processes call the one that their parent has.
    """

    number: int
    config: Config
    folder: Path
    settings: Settings
    train: Callable[..., Any]


def clear(job: Job) -> Outcome | None:
    """Deletes what is in the folder of a run; returns that it failed where somebody else is at it."""
    if not job.folder.exists():
        return None
    try:
        with owned(job.folder):
            for path in job.folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name not in (LOCK, OWNER):
                    path.unlink()
    except ValueError as error:
        return Outcome(job.config, job.folder, "failed", str(error))
    return None


def known_outcome(job: Job) -> Outcome | None:
    """Returns what there is to say of a run that needs no doing: it is complete, or its folder has another one."""
    run = Run(job.folder)
    if not run.exists:
        return None
    try:
        run.check_same(job.config, data_words(job.settings))
        return Outcome(job.config, job.folder, "kept") if run.result is not None else None
    except ValueError as error:
        return Outcome(job.config, job.folder, "failed", str(error))


def do_run(job: Job, watch: Callable[[dict[str, Any]], None]) -> Outcome:
    """Does a run, or goes on with it, and returns what became of it; a failure is kept beside it."""
    # Another comparison may have done it since this one began.
    if (found := known_outcome(job)) is not None:
        return found
    status = "resumed" if Run(job.folder).exists else "ran"
    try:
        (job.folder / FAILURE).unlink(missing_ok=True)
        job.train(job.config, job.folder, job.settings, resume=True, watch=watch)
    except Held as error:
        return Outcome(job.config, job.folder, "failed", str(error))
    except Exception as error:
        # What is expected to go wrong says why; of anything else the name says more than the words.
        expected = isinstance(error, Diverged | Halted | ValueError)
        return failed_outcome(job, str(error) if expected else f"{type(error).__name__}: {error}", traceback.format_exc())
    return Outcome(job.config, job.folder, status)


def failed_outcome(job: Job, words: str, details: str = "") -> Outcome:
    """Returns the outcome of a run that failed, and leaves the reason in its folder, if it has one."""
    Run(job.folder).fail(words, details)
    return Outcome(job.config, job.folder, "failed", words)
