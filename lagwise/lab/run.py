"""One run from its beginning to its end: the folder, going on from a checkpoint, the final numbers, and the trained model."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import broadcast_object_list

from lagwise.lab.checkpoint import checkpoint_of, saved_words
from lagwise.lab.config import Config
from lagwise.lab.data import is_dead_worker
from lagwise.lab.environment import machine
from lagwise.lab.lock import owned
from lagwise.lab.loop import Session, Settings, Watch, curves_at, data_words, evaluate_at, run_steps, tell, whole_model
from lagwise.lab.run_folder import Run
from lagwise.lab.signals import Interrupted, interrupt, on_signal
from lagwise.lab.tasks.base import HUB, Split
from lagwise.lens.learned import learned_priors

GO_ON = "Run it again to go on, `lagwise train` with --resume"


class Halted(OSError):
    """The machine ended a run: a full disk, a process that was killed; the words say what is saved."""


def train(
    config: Config, folder: Path, settings: Settings, *, resume: bool = False, watch: Watch | None = None
) -> dict[str, Any]:
    """Trains a model, or goes on with it, and returns the final numbers, which are in the run's folder too.

    Args:
        config: What to run.
        folder: The run's folder.
        settings: How to run it.
        resume: Go on from the newest whole checkpoint, if there is one.
        watch: Is told how it goes.
    """
    with on_signal(interrupt), telling_what_is_saved(Run(folder)), begin(config, folder, settings) as run:
        session = Session(config, settings, run)
        checkpoint = checkpoint_of(run, data=data_words(settings))
        if checkpoint is not None and not resume:
            raise ValueError(f"{folder} holds a run that was begun: pass --resume to go on with it, or choose another folder")
        if checkpoint is not None:
            session.load(checkpoint)
        if session.accelerator.is_main_process:
            run.forget_after(session.step)
        session.accelerator.wait_for_everyone()
        run_steps(session, watch)
        result = final_numbers(session, watch)
        # A sharded model is gathered by all processes together.
        model = whole_model(session)
        if session.accelerator.is_main_process:
            result["curves"] = curves_at(session, model, result["lengths"])
            run.finish(result, learned_priors(model, session.task.length))
        # A group of processes that ends waits for its thread, which may wait for Python's lock. The group gives the lock up
        # meanwhile; a wrapped model that is its last owner does not.
        accelerator = session.accelerator
        del session
        accelerator.free_memory()
        accelerator.wait_for_everyone()
        accelerator.end_training()
    return result


@contextmanager
def begin(config: Config, folder: Path, settings: Settings) -> Iterator[Run]:
    """Makes a run's folder, or takes one of the same run, and owns it; all processes of the run have to call this.

    The main process is the owner. What it refuses is raised by all, so that none waits for it.
    """
    refusal: list[ValueError | OSError | None] = [None]
    with ExitStack() as stack:
        if PartialState(cpu=settings.device == "cpu").is_main_process:
            device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
            try:
                stack.enter_context(owned(folder))
                Run.create(folder, config, {**machine(device), "data": data_words(settings)})
            except (ValueError, OSError) as error:
                refusal = [error]
        broadcast_object_list(refusal)
        if refusal[0] is not None:
            raise refusal[0]
        yield Run(folder)


@contextmanager
def telling_what_is_saved(run: Run) -> Iterator[None]:
    """Says what of a run is saved where something from outside ends it."""
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt as error:
        raise Interrupted(f"stopped at once, and saved nothing more: {saved_words(run)}. {GO_ON}") from error
    except OSError as error:
        raise Halted(f"{run.folder} could not go on: {error}; {saved_words(run)}. {GO_ON}") from error
    except RuntimeError as error:
        if not is_dead_worker(error):
            raise
        raise Halted(
            f"{run.folder} could not go on: a process that makes batches has ended, perhaps for lack of memory (give fewer "
            f"--workers): {error}; {saved_words(run)}. {GO_ON}"
        ) from error


def final_numbers(session: Session, watch: Watch | None) -> dict[str, Any]:
    """Evaluates the trained model and returns all numbers of the run."""
    result: dict[str, Any] = {
        "parameters": session.parameters,
        "encoding_parameters": session.encoding_parameters,
        "steps": session.step,
        "seconds": round(session.seconds, 3),
        "tokens_per_second": round(session.tokens / session.seconds, 1) if session.seconds else None,
        "peak_memory": session.peak_memory,
        "sample": session.task.is_sample,
    }
    splits: tuple[Split, ...] = ("validation", "test")
    for split in splits:
        result[split] = session.evaluate(split)
        tell(session, watch, {"step": session.step, "split": split, **result[split]})
    result["lengths"] = {}
    for length in session.config.lengths:
        result["lengths"][str(length)] = found = evaluate_at(session, length)
        tell(session, watch, {"step": session.step, "split": "test", "length": length, **found})
    return result


def default_tracker() -> str | None:
    """Returns "tensorboard" where it is installed."""
    return "tensorboard" if find_spec("tensorboard") is not None else None


def load_trained(folder: Path, settings: Settings) -> Session:
    """Returns the model of a run, from its last checkpoint."""
    run = Run.open(folder)
    checkpoint = checkpoint_of(run)
    if checkpoint is None:
        raise ValueError(f"{folder} has no checkpoint: train it to the end, or with --save-every")
    # The checkpoint has all weights: what the run started from is not needed any more, and may be gone.
    session = Session(replace(run.config, start=""), with_data_of(run, settings), run)
    session.load(checkpoint)
    return session


def with_data_of(run: Run, settings: Settings) -> Settings:
    """Returns settings with the data that a run was trained on, unless other data is given."""
    trained_on = run.environment["data"]
    if settings.data is not None or trained_on == data_words(settings):
        return settings
    if trained_on != HUB and not Path(trained_on).is_dir():
        raise ValueError(f"the run was trained on {trained_on}, which is not there: pass --data with the folder of its files")
    return replace(settings, data=HUB if trained_on == HUB else Path(trained_on))


def line_start(kind: str, session: Session) -> dict[str, Any]:
    """Returns the beginning of a line of what was measured on a trained model: what it is, and where it was measured."""
    assert session.run is not None
    environment = {**machine(session.device), "data": data_words(session.settings)}
    config = session.run.config.to_json()
    return {"bench": kind, "config": config, "environment": environment, "trained_on": session.run.environment}
