"""`lagwise bench compare`: what became faster or slower between two files of lines."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lagwise.errors import is_number
from lagwise.lab.bench.cases import shape_of, words_of
from lagwise.lab.json_files import Line, content_of, unreadable, with_all
from lagwise.lab.records import numbered_lines

REMEDY = "expected are lines that `lagwise bench` has written"

IDENTITY = (
    "bench", "contender", "dtype", "model", "attention", "encoding", "options", "batch", "heads", "time", "head_dim", "dim",
    "layers", "mode", "symbols", "dropout", "position", "causal", "graph", "eager", "ragged",
)  # fmt: skip
"""What two lines share that measure the same thing. Where one lacks a field, it is as if it were empty or off."""


@dataclass(frozen=True)
class Measure:
    """A number of lines, and where its ratio to the anchor of the same run stands.

    Args:
        number: Its field; less is better.
        ratio: The field of the ratio.
        speed: The field of one by the ratio, which some benches have instead.
    """

    number: str
    ratio: str = ""
    speed: str = ""

    def ratio_of(self, line: Line) -> float | None:
        """Returns the ratio of a line, if it has one."""
        if (ratio := line.get(self.ratio)) is not None:
            return ratio
        return None if (speed := line.get(self.speed)) is None else 1.0 / speed

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(name for name in (self.number, self.ratio, self.speed) if name)


MEASURES = {
    "training ms": Measure("training_ms", "training_ratio", "training_speedup"),
    "forward ms": Measure("forward_ms", "forward_ratio"),
    "inference ms": Measure("inference_ms", speed="inference_speedup"),
    "step ms": Measure("step_ms", "step_ratio", "speed_ratio"),
    "first call s": Measure("first_s"),
    "second start s": Measure("second_s"),
    "kernels": Measure("kernels"),
}


@dataclass(frozen=True)
class Change:
    """One number of the same case and contender, before and after.

    Args:
        line: The newer line.
        what: A name of `MEASURES`.
        numbers: The older number and the newer one.
        ratios: Both divided by the anchor's in the same run, where both have that.
    """

    line: Line
    what: str
    numbers: tuple[float, float]
    ratios: tuple[float, float] | None

    @property
    def number_change(self) -> float:
        return self.numbers[1] / self.numbers[0]

    @property
    def ratio_change(self) -> float | None:
        return None if self.ratios is None else self.ratios[1] / self.ratios[0]

    def verdict(self, threshold: float) -> str:
        """Returns "faster", "slower", or nothing for a change by less than a share.

        The ratios decide where there are any: a busier or another machine changes the anchor's time too.
        """
        factor = self.number_change if self.ratio_change is None else self.ratio_change
        return "slower" if factor > 1.0 + threshold else "faster" if factor < 1.0 / (1.0 + threshold) else ""


@dataclass(frozen=True)
class Comparison:
    """What two files say about the same cases, and which lines have no counterpart.

    Args:
        changes: Numbers that both have.
        broken: Lines that had numbers and have an error now.
        mended: Lines that had an error and have numbers now.
        old_only: Lines of the older file alone.
        new_only: Lines of the newer file alone.
    """

    changes: list[Change]
    broken: list[Line]
    mended: list[Line]
    old_only: list[Line]
    new_only: list[Line]

    def got_worse(self, threshold: float) -> bool:
        """Says whether something of ours became slower, or fails now."""
        slower = [change.line for change in self.changes if change.verdict(threshold) == "slower"]
        return any(is_ours(line) for line in [*slower, *self.broken])


def compare_lines(old: dict[str, Line], new: dict[str, Line]) -> Comparison:
    """Compares the lines of two files, by what they measure."""
    both = [(old[key], line) for key, line in new.items() if key in old]
    return Comparison(
        changes=[change for before, after in both for change in changes_of(before, after)],
        broken=[after for before, after in both if "error" in after and "error" not in before],
        mended=[after for before, after in both if "error" in before and "error" not in after],
        old_only=[line for key, line in old.items() if key not in new],
        new_only=[line for key, line in new.items() if key not in old],
    )


def changes_of(old: Line, new: Line) -> Iterable[Change]:
    """Yields the changes of all numbers that two lines have."""
    for what, measure in MEASURES.items():
        before, after = old.get(measure.number), new.get(measure.number)
        if before is not None and after is not None:
            base, ratio = measure.ratio_of(old), measure.ratio_of(new)
            yield Change(new, what, (before, after), None if base is None or ratio is None else (base, ratio))


def read_lines(path: Path) -> dict[str, Line]:
    """Returns the lines of a file by what they measure; of two for the same, the later one. A bad line raises with its place."""
    found: dict[str, Line] = {}
    fields = [name for measure in MEASURES.values() for name in measure.fields]
    for place, text in numbered_lines(path):
        line = with_all(("bench", "contender"), content_of(text, dict, place, remedy=REMEDY), place, remedy=REMEDY)
        for name in fields:
            if (value := line.get(name)) is not None and not (is_number(value) and value > 0):
                raise unreadable(place, f"{name} must be a positive number, but is {value!r}", REMEDY)
        found[identity(line)] = line
    if not found:
        raise ValueError(f"{path} has no lines: {REMEDY}")
    return found


def identity(line: Line) -> str:
    """Returns what a line measures, as a key.

    >>> identity({"bench": "attention", "contender": "plain", "graph": False, "date": "2026-01-31"})
    '{"bench": "attention", "contender": "plain"}'
    """
    return json.dumps({name: line[name] for name in IDENTITY if line.get(name)}, sort_keys=True)


def is_ours(line: Line) -> bool:
    """Says whether a line is of this library; in the bench of whole models all are."""
    return line["contender"].startswith("lagwise") or line["bench"] == "models"


def labels_of(line: Line) -> tuple[str, str, str]:
    """Returns the words of a line's case, its shape, and its contender."""
    return f"{line['bench']}: {words_of(line)}", shape_of(line), line["contender"]


def groups_of(lines: Iterable[Line]) -> list[str]:
    """Returns in words what some lines measure, one sentence for the cases of a shape that have the same contenders.

    >>> groups_of({"bench": "attention", "encoding": name, "time": 8, "contender": "plain"} for name in ("t5", "alibi"))
    ['attention, T8: t5 / alibi (plain)']
    """
    contenders: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        contenders.setdefault((f"{line['bench']}, {shape_of(line)}", words_of(line)), []).append(line["contender"])
    cases: dict[tuple[str, str], list[str]] = {}
    for (shape, words), names in contenders.items():
        cases.setdefault((shape, " / ".join(names)), []).append(words)
    return [f"{shape}: {' / '.join(words)} ({names})" for (shape, names), words in cases.items()]


def otherwise_graphed(found: Comparison) -> int:
    """Returns how many lines have a counterpart that differs from them in the use of CUDA graphs alone."""
    old, new = ({identity({**line, "graph": False}) for line in lines} for lines in (found.old_only, found.new_only))
    return len(old & new)


def origins(lines: Iterable[dict[str, Any]]) -> str:
    """Returns where lines were measured, when, and at which commits."""
    commits: dict[str, list[str]] = {}
    for line in lines:
        place = f"{line.get('device')}, torch {line.get('torch')}, {line.get('date')}"
        commits.setdefault(place, []).append(line.get("commit") or "unknown")
    return "; ".join(f"{place}, commit {', '.join(dict.fromkeys(names))}" for place, names in commits.items())
