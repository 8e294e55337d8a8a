"""Curves from the folders of runs: a metric against length, the loss against position, styles by quarter."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lagwise.lens.measured import Extrapolation, Losses

OWN = "own"
"""What a result calls the length of the training among the lengths of its curves."""


def extrapolation(result: Mapping[str, Any], metric: str) -> Extrapolation:
    """Returns a metric on the test split against the length.

    Args:
        result: The final numbers of a run that had `lengths`: the `result` of a `lagwise.lab.run_folder.Run`, or its result.json.
        metric: The name of the metric, or "loss".
    """
    if metric not in result["test"]:
        raise ValueError(f"metric must be one of {', '.join(result['test'])}, but is {metric!r}")
    if not result["lengths"]:
        raise ValueError("result must have other lengths than its own, but has none: run with --lengths, or lagwise evaluate")
    found = {int(length): numbers for length, numbers in result["lengths"].items()}
    measured = sorted(length for length, numbers in found.items() if "refused" not in numbers)
    return Extrapolation(
        torch.tensor(measured, dtype=torch.int64),
        torch.tensor([found[length][metric] for length in measured], dtype=torch.float64),
        float(result["test"][metric]),
        {length: numbers["refused"] for length, numbers in sorted(found.items()) if "refused" in numbers},
    )


def losses_by_position(folder: Path, split: str = "test") -> dict[int | None, Losses]:
    """Returns the loss of a run against the position, by length; None is the run's own length.

    The run itself has that of the test split; `lagwise evaluate` adds others, of which the latest counts.
    """
    found: dict[int | None, Losses] = {}
    result = folder / "result.json"
    if split == "test" and result.is_file():
        found |= stored_losses(json.loads(result.read_text()))
    path = folder / "evaluations.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    found |= {
        line["length"]: losses(line["loss_by_position"])
        for line in lines
        if line["split"] == split and "loss_by_position" in line
    }
    if not found:
        raise ValueError(
            f"{folder} has no losses by position of split {split!r}: call lagwise evaluate on a run of a language or music task"
        )
    return found


def stored_losses(result: Mapping[str, Any]) -> dict[int | None, Losses]:
    """Returns the loss against the position that is in the final numbers of a run, by length; None is the run's own."""
    return {
        None if length == OWN else int(length): losses(curves["loss_by_position"])
        for length, curves in result.get("curves", {}).items()
        if "loss_by_position" in curves
    }


def losses(bins: Sequence[Sequence[float]]) -> Losses:
    """Returns bins of a loss: the first position of each, nats, tokens."""
    return Losses(*(torch.tensor(column) for column in zip(*bins, strict=True)))


def styles_by_quarter(pieces: Iterable[Path]) -> dict[str, Float[Tensor, "pieces 4"]]:
    """Returns how like its reference each quarter of generated pieces is, by each histogram.

    Args:
        pieces: The files piece-*.json that `lagwise generate` writes. Those whose reference lacks a histogram have no row there.
    """
    rows: dict[str, list[list[float]]] = {}
    for path in pieces:
        for name, quarters in json.loads(path.read_text())["style_by_quarter"].items():
            rows.setdefault(name, []).append(quarters)
    if not rows:
        raise ValueError("pieces must have been generated from a prompt, whose style they are compared with, but have no styles")
    return {name: torch.tensor(found) for name, found in rows.items()}
