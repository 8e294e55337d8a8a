"""Checkpoints: tensors in safetensors, the rest in JSON, a digest of each file, and all of it there or nothing.

A checkpoint is a folder `step-00000500` that is written under another name, and renamed when it is complete. What a machine that
lost its power or a full disk leaves behind is told by the digests, and the checkpoint before counts. One process writes;
others may read meanwhile.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lagwise.lab.config import difference_words
from lagwise.lab.json_files import read_json, with_all, writing
from lagwise.lab.run_folder import CONFIG, Run, config_of, is_same_place

STATE, MANIFEST = "state.json", "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """What is needed to go on after a step: tensors by file and name, and numbers that are no tensors."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]


def save_checkpoint(folder: Path, checkpoint: Checkpoint, *, keep: int = 2) -> Path:
    """Writes a checkpoint beside those of earlier steps, of which the last `keep - 1` stay."""
    final = folder / f"step-{checkpoint.step:08d}"
    for left in folder.glob(".step-*"):
        shutil.rmtree(left)
    draft = hidden_path(final)
    draft.mkdir(parents=True)
    try:
        with writing(draft):
            write_files(draft, checkpoint)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    # Only a damaged one has the name of a step that is trained once more.
    shutil.rmtree(final, ignore_errors=True)
    os.replace(draft, final)
    flush(folder)
    earlier = [path for path in steps_in(folder) if path.name <= final.name]
    for old in earlier[:-keep]:
        # Gone at once, so that nobody reads half of it.
        os.replace(old, hidden_path(old))
        shutil.rmtree(hidden_path(old))
    return final


def hidden_path(path: Path) -> Path:
    """Returns the name that a checkpoint has before it is whole, and when it goes."""
    return path.with_name(f".{path.name}")


def write_files(folder: Path, checkpoint: Checkpoint) -> None:
    """Writes the files of a checkpoint, and waits until they are on the disk."""
    for name, tensors in checkpoint.tensors.items():
        # Tensors that share memory, such as tied weights, are written each by itself.
        write_tensors(folder / f"{name}.safetensors", {key: x.detach().cpu().contiguous().clone() for key, x in tensors.items()})
    (folder / STATE).write_text(json.dumps({"step": checkpoint.step, **checkpoint.state}))
    digests = {path.name: digest(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps(digests))
    for path in [*folder.iterdir(), folder]:
        flush(path)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a file of tensors; what the system refuses is an `OSError`, as it is elsewhere."""
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        if (number := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def load_latest(folder: Path) -> Checkpoint | None:
    """Returns the newest checkpoint that is whole, or None where there is none; a damaged one is told about and passed over.

    Raises where all are damaged: to begin anew in silence would lose them.
    """
    damaged: dict[Path, str] = {}
    while paths := [path for path in steps_in(folder) if path not in damaged]:
        try:
            found = load_checkpoint(paths[-1])
        except (ValueError, OSError) as error:
            # One that is gone was replaced by a newer one while it was read.
            if paths[-1].exists():
                damaged[paths[-1]] = str(error)
            continue
        for path, reason in damaged.items():
            warnings.warn(f"{path} is damaged ({reason}): going on from {paths[-1].name}", stacklevel=2)
        return found
    if damaged:
        told = "; ".join(f"{path.name}: {reason}" for path, reason in damaged.items())
        raise ValueError(f"{folder} has no checkpoint that is whole ({told}): restore one, or delete them all to begin anew")
    return None


def load_checkpoint(path: Path) -> Checkpoint:
    """Returns a checkpoint; raises where a file is missing or is not what was written."""
    digests = with_all((STATE,), read_json(path / MANIFEST, dict), path / MANIFEST)
    for name, expected in digests.items():
        if digest(path / name) != expected:
            raise ValueError(f"{name} is not what was written")
    state = read_json(path / STATE, dict)
    tensors = {name.removesuffix(".safetensors"): load_file(path / name) for name in digests if name.endswith(".safetensors")}
    return Checkpoint(state.pop("step"), tensors, state)


def latest_state(folder: Path) -> dict[str, Any] | None:
    """Returns what the newest checkpoint says beside its tensors, or None where there is none to read."""
    with suppress(ValueError):
        return next((read_json(path / STATE, dict) for path in reversed(steps_in(folder))), None)
    return None


def steps_in(folder: Path) -> list[Path]:
    """Returns the checkpoints of a folder, the oldest first."""
    return sorted(folder.glob("step-*"))


def digest(path: Path) -> str:
    """Returns the SHA-256 digest of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(2**20):
            found.update(part)
    return found.hexdigest()


def flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checkpoint_of(run: Run, *, data: str | None = None) -> Checkpoint | None:
    """Returns the newest whole checkpoint of a run, or None; raises for one of another run.

    Args:
        run: The run.
        data: Where the data comes from that it must have been trained on; None for any.
    """
    found = load_latest(run.checkpoints)
    if found is not None:
        place = f"the checkpoint of step {found.step} in {run.checkpoints}"
        check_config(run, found.state, place)
        if data is not None and not is_same_place(there := found.state.get("data", data), data):
            raise ValueError(f"{place} was trained on other data ({there}, not {data}): put back the run's own, or delete it")
    return found


def check_config(run: Run, state: Mapping[str, Any], place: str) -> None:
    """Raises where the state of a checkpoint has another config than its run."""
    if words := difference_words(config_of(state["config"], place), run.config):
        raise ValueError(
            f"{place} is of another run than {run.folder / CONFIG} says ({words}): put back the run's own, or choose another "
            "folder"
        )


def saved_words(run: Run) -> str:
    """Returns from where a run can go on."""
    paths = steps_in(run.checkpoints)
    return f"{paths[-1]} is saved" if paths else f"there is no checkpoint in {run.folder}"
