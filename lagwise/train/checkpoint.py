"""Checkpoints: tensors in safetensors, the rest in JSON, a digest of each file, and all of it there or nothing.

A checkpoint is a folder `step-00000500` that is written under another name, and renamed when it is complete. What a machine that
lost its power or a full disk leaves behind is told by the digests, and the checkpoint before counts.
"""

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

STATE, MANIFEST = "state.json", "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """What is needed to go on after a step: tensors by file and name, and numbers that are no tensors."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]


def save(folder: Path, checkpoint: Checkpoint, *, keep: int = 2) -> Path:
    """Writes a checkpoint beside those of earlier steps, of which the last `keep - 1` stay."""
    final = folder / f"step-{checkpoint.step:08d}"
    draft = folder / f".{final.name}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for name, tensors in checkpoint.tensors.items():
        # Tensors that share memory, such as tied weights, are written each by itself.
        own = {key: x.detach().cpu().contiguous().clone() for key, x in tensors.items()}
        save_file(own, draft / f"{name}.safetensors")
    (draft / STATE).write_text(json.dumps({"step": checkpoint.step, **checkpoint.state}))
    digests = {path.name: digest(path) for path in sorted(draft.iterdir())}
    (draft / MANIFEST).write_text(json.dumps(digests))
    for path in [*draft.iterdir(), draft]:
        flush(path)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(draft, final)
    flush(folder)
    for old in steps_in(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def load_latest(folder: Path) -> Checkpoint | None:
    """Returns the newest checkpoint that is whole, or None; a damaged one is told about and passed over."""
    for path in reversed(steps_in(folder)):
        try:
            return load(path)
        except (ValueError, OSError) as error:
            warnings.warn(f"{path} is damaged ({error}): going on from the checkpoint before it", stacklevel=2)
    return None


def load(path: Path) -> Checkpoint:
    """Returns a checkpoint; raises where a file is missing or is not what was written."""
    digests = json.loads((path / MANIFEST).read_text())
    for name, expected in digests.items():
        if digest(path / name) != expected:
            raise ValueError(f"{name} is not what was written")
    state = json.loads((path / STATE).read_text())
    tensors = {name.removesuffix(".safetensors"): load_file(path / name) for name in digests if name.endswith(".safetensors")}
    return Checkpoint(state.pop("step"), tensors, state)


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
