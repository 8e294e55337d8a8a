"""What the commands of `lagwise bench` show, and which cases they measure."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import typer
from rich.table import Table

from lagwise.lab.cli.console import console, print_whole

if TYPE_CHECKING:
    import torch

    from lagwise.lab.bench.cases import Case

Shape = Annotated[
    list[str] | None, typer.Option(help='Only cases with all of these words in their shape, as "T512 graph"; may be repeated.')
]

COLUMNS = ["case", "shape", "contender", "forward ms", "ratio", "training ms", "ratio", "goal", "peak MiB", "ratio"]


class HasShape(Protocol):
    """A case of any bench."""

    @property
    def shape(self) -> str: ...


Shaped = TypeVar("Shaped", bound=HasShape)


class Sheet:
    """The numbers of a bench: a table on the screen, notes on lines without numbers, and a file of JSON lines.

    Args:
        name: What the name of the file begins with.
        columns: The heads of the table.
        out: The folder of the file.
        device: What is measured on.
        dtype: In which type.
        beside: What else the numbers depend on, in words.
    """

    def __init__(
        self, name: str, columns: Sequence[str], out: Path, device: "torch.device", dtype: "torch.dtype", *, beside: str = ""
    ):
        from lagwise.lab.environment import machine

        facts = machine(device)
        self.path = out / f"{name}-{device.type}-{facts['date']}.jsonl"
        title = f"{facts['device']}, {facts['threads']} threads, torch {facts['torch']}, {dtype}, {facts['date']}{beside}"
        self.table = Table(*columns, title=title)
        self.notes: list[str] = []

    def add(self, records: list[dict[str, Any]], add_rows: Callable[..., list[str]], **options: Any) -> None:
        """Saves records, and adds them to the table and the notes by a function that returns the latter."""
        from lagwise.lab.bench.cases import save_records

        save_records(records, self.path)
        self.notes += add_rows(self.table, records, **options)

    def show(self, *, sweep: bool = False) -> None:
        """Prints the table and the notes on it, and where its numbers are; draws those of a sweep."""
        print_whole(self.table)
        for note in self.notes:
            console.print(note, markup=False, highlight=False)
        console.print(f"saved to {self.path}")
        if sweep:
            try:
                console.print(f"drawn to {draw_plot(self.path, self.path.with_suffix('.png'))}")
            except ImportError as error:
                console.print(f"{error}; `lagwise bench plot {self.path.name}` then draws it, on any machine", markup=False)


def draw_plot(lines: Path, picture: Path) -> Path:
    """Draws the saved lines of a sweep, and returns where."""
    from lagwise.lab.bench import sweep_plot

    sweep_plot.draw_sweep(sweep_plot.read_sweep(lines), picture)
    return picture


def add_rows(table: Table, records: list[dict[str, Any]], *, words: str = "") -> list[str]:
    """Adds the lines of one case to the table, and returns what there is to say about those without numbers."""
    from lagwise.lab.bench.cases import shape_of

    notes = []
    for number, record in enumerate(records):
        shape = shape_of(record)
        labels = [words, shape] if number == 0 else ["", ""]
        impl = f" ({record['impl']})" if record.get("impl") else ""
        tiles = " (cut tiles)" if isinstance(record.get("tiles"), dict) else ""
        if "error" in record:
            table.add_row(*labels, record["contender"] + impl + tiles, "-", "-", "-", "-", "", "-", "-")
            notes.append(f"{words} {shape}, {record['contender']}: {record['error']}".strip())
            continue
        # Goals are for ours alone, and not for its deterministic mode.
        promised = record["contender"] in ("lagwise", f"lagwise, {record['encoding']}")
        table.add_row(
            *labels,
            record["contender"] + impl + tiles,
            *(
                "-" if record[name] is None else f"{record[name]:.{digits}f}"
                for name, digits in (("forward_ms", 3), ("forward_ratio", 2), ("training_ms", 3), ("training_ratio", 2))
            ),
            f"{record['goal']:.2f}" if record["goal"] and promised else "",
            f"{record['held_bytes'] / 2**20:.0f}",
            ("-" if record["memory_ratio"] is None else f"{record['memory_ratio']:.2f}")
            + (f" (goal {record['memory_goal']:.2f})" if record["memory_goal"] and promised else ""),
        )
    table.add_section()
    return notes


def chosen_cases(
    cases: list["Case"], encodings: list[str] | None, time: int | None, shapes: list[str] | None = None
) -> list["Case"]:
    """Returns the cases of the given encodings and shapes, at the given length."""
    check_encodings(encodings, sorted({case.encoding for case in cases}))
    chosen = [case for case in of_shapes(cases, shapes) if not encodings or case.encoding in encodings]
    return chosen if time is None else [case.at(time) for case in chosen]


def of_shapes(cases: list[Shaped], shapes: list[str] | None) -> list[Shaped]:
    """Returns the cases whose shape has all words of one of some shapes; raises for a shape that no case has."""
    for words in shapes or []:
        if not any(has_words(case.shape, words) for case in cases):
            known = "; ".join(dict.fromkeys(case.shape for case in cases))
            raise typer.BadParameter(f"no case has the shape {words!r}; there are {known}", param_hint="--shape")
    return [case for case in cases if not shapes or any(has_words(case.shape, words) for words in shapes)]


def has_words(shape: str, words: str) -> bool:
    """Says whether a shape has some words.

    >>> has_words("B4 H16 T2048 D128 causal graph", "T2048 causal"), has_words("B4 H16 T2048 D64", "T20")
    (True, False)
    """
    return set(words.split()) <= set(shape.split())


def check_encodings(names: list[str] | None, known: list[str]) -> None:
    """Raises for encodings that are not measured."""
    for name in names or []:
        if name not in known:
            raise typer.BadParameter(f"no case of {name!r}; there are {', '.join(known)}", param_hint="--encoding")
