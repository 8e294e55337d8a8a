"""What is measured and what is saved of it: cases, and one record for each of their contenders."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
        eager: Take ratios to torch's attention as people call it, not to cuDNN's kernel: at short lengths calls are what costs.
        ragged: Sequences of random lengths up to `time`, padded ("lengths") or packed ("cu_seqlens").
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
    eager: bool = False
    ragged: Literal["lengths", "cu_seqlens"] | None = None

    @property
    def words(self) -> str:
        return words_of(asdict(self))

    @property
    def shape(self) -> str:
        return shape_of(asdict(self))

    def at(self, time: int) -> "Case":
        """Returns the case at another length, without its goals; a table as wide as the sequence stays so.

        >>> Case("t5-free", 1, 8, 512, 64, {"max_lag": 512}).at(64).options
        {'max_lag': 64}
        """
        wide = {"max_lag": time} if self.options.get("max_lag") == self.time else {}
        return replace(self, time=time, options=self.options | wide, goal=None, memory_goal=None)

    def called_eagerly(self) -> "Case":
        """Returns the case without CUDA graphs and, unless it was so before, without its goals."""
        return self if self.eager else replace(self, graph=False, eager=True, goal=None, memory_goal=None)


def words_of(fields: Mapping[str, Any]) -> str:
    """Returns the model or the encoding of a case or of its record, with all options but those that `shape_of` shows.

    >>> words_of({"encoding": "at5", "options": {"max_lag": 128, "causal": True}, "causal": True})
    'at5, max_lag=128'
    >>> words_of({"model": "t5-base", "dropout": 0.1})
    't5-base, dropout 0.1'
    """
    names = [str(fields[name]) for name in ("model", "attention", "encoding") if name in fields]
    options = [f"{name}={value}" for name, value in fields.get("options", {}).items() if name != "causal"]
    others = [f"{name} {fields[name]}" for name in ("dropout", "position", "mode") if name in fields]
    return ", ".join([*names, *options, *others])


def shape_of(fields: Mapping[str, Any]) -> str:
    """Returns the sizes of a case or of its record, and how it is called.

    >>> shape_of({"batch": 4, "heads": 16, "time": 2048, "head_dim": 128, "causal": True, "graph": True})
    'B4 H16 T2048 D128 causal graph'
    """
    letters = {"batch": "B", "heads": "H", "time": "T", "head_dim": "D"}
    sizes = [f"{letter}{fields[name]}" for name, letter in letters.items() if name in fields]
    # Records of older versions lack what came later.
    ways = [name for name in ("causal", "graph", "eager") if fields.get(name)]
    return " ".join([*sizes, *ways, *([fields["ragged"]] if fields.get("ragged") else [])])


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
