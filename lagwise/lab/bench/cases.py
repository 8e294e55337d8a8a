"""What is measured and what is saved of it: cases, and one record for each of their contenders."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lagwise.lab.environment import machine

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class Case:
    """One shape and one encoding.

    Args:
        goal: The ratio to plain attention, in training, that we promise for it.
        memory_goal: The same of the memory, inputs included.
        graph: Time CUDA graphs of all contenders: at short lengths launches would hide the kernels.
    """

    encoding: str
    batch: int
    heads: int
    time: int
    head_dim: int
    options: dict[str, Any] = field(default_factory=dict)
    causal: bool = False
    goal: float | None = None
    memory_goal: float | None = None
    graph: bool = False

    @property
    def words(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{self.encoding}{options}{', causal' if self.causal else ''}"

    def at(self, time: int) -> "Case":
        """Returns the case at another length, without its goals; a table as wide as the sequence stays so.

        >>> Case("t5-free", 1, 8, 512, 64, {"max_lag": 512}).at(64).options
        {'max_lag': 64}
        """
        wide = {"max_lag": time} if self.options.get("max_lag") == self.time else {}
        return replace(self, time=time, options=self.options | wide, goal=None, memory_goal=None)


def make_records(
    bench: str,
    cases: Mapping[str, "DataclassInstance"],
    numbers: dict[str, dict[str, Any]],
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
) -> list[dict[str, Any]]:
    """Returns one record per contender, with its case, its numbers, and all that they depend on."""
    common = {"dtype": str(dtype).removeprefix("torch."), "repeats": repeats, **machine(device)}
    return [{"bench": bench, "contender": name, **asdict(case), **numbers[name], **common} for name, case in cases.items()]


def save_records(records: list[dict[str, Any]], path: Path) -> None:
    """Appends records to a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
