"""Files of GLUE: where each task has its texts and labels, in the official tables and on the Hub."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lagwise.lab.tasks.files import find_file, from_hub, open_bytes, required_file, table_rows

HUB_NAME = "nyu-mll/glue"
SOURCE = "get the tasks from https://gluebenchmark.com/tasks and give the folder that has a folder for each of them"


@dataclass(frozen=True)
class Layout:
    """Where a task has its texts and labels.

    Args:
        folder: Of the official files.
        hub: Its name within the data set of the Hub.
        texts: The columns with one or two texts.
        label: The column of the label.
        labels: The labels in the order of the classes, which is that of the Hub; none for scores.
        relations: What the texts of the built-in sample have to do with each other, for each class.
        hub_texts: The texts' names on the Hub.
        columns: Those of the files with labels where they have no first line with names.
        dev: The official parts with labels that are evaluated.
        test: Those without labels.
        predictions: Their files for the leaderboard.
        broken: How many lines of the official files have a wrong number of columns, and are left out.
    """

    folder: str
    hub: str
    texts: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    relations: tuple[str, ...]
    hub_texts: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    dev: tuple[str, ...] = ("dev",)
    test: tuple[str, ...] = ("test",)
    predictions: tuple[str, ...] = ()
    broken: int = 0

    def label_of(self, place: str, field: str) -> float:
        """Returns the class of a label, or a score from 0 to 5."""
        if self.labels and field in self.labels:
            return float(self.labels.index(field))
        if not self.labels and field.replace(".", "", 1).isdecimal() and float(field) <= 5.0:
            return float(field)
        expected = f"one of {', '.join(self.labels)}" if self.labels else "a number from 0 to 5"
        raise ValueError(f"{place}: the label is {field!r}, but expected is {expected}")

    def prediction(self, value: float) -> str:
        """Returns a prediction as the leaderboard wants it."""
        return self.labels[int(value)] if self.labels else f"{min(max(value, 0.0), 5.0):.3f}"


class Item(NamedTuple):
    """One or two texts and their class or score, which is 0 where it is not known."""

    texts: tuple[str, ...]
    label: float


def file_items(layout: Layout, data: Path | str, part: str, *, labelled: bool) -> list[Item]:
    """Returns the examples of an official file; quotes in it are characters like all others."""
    path = part_file(layout, data, part)
    wanted = (*layout.texts, *([layout.label] if labelled else []))
    broken: list[str] | None = [] if layout.broken else None
    found = []
    for place, fields in columns_of(path, wanted, layout.columns if labelled else (), broken):
        *texts, label = fields if labelled else [*fields, ""]
        found.append(Item(tuple(texts), layout.label_of(place, label) if labelled else 0.0))
    if broken:
        if len(broken) > layout.broken:
            raise ValueError(f"{broken[0]} (and {len(broken) - 1} more lines like it)")
        warnings.warn(f"{len(broken)} lines are left out, as the official file has some: {broken[0]}", stacklevel=2)
    if not found:
        raise ValueError(f"{path}, line 1: there are no examples, but expected is one at least")
    return found


def part_file(layout: Layout, data: Path | str, part: str) -> Path:
    """Returns an official file, in the folder of all tasks or in that of one."""
    name, folder = f"{part}.tsv", Path(data) / layout.folder
    alone = find_file(folder, name) is None and find_file(data, name) is not None
    return required_file(data if alone else folder, name, SOURCE)


def columns_of(
    path: Path, wanted: Sequence[str], names: Sequence[str], broken: list[str] | None
) -> Iterator[tuple[str, list[str]]]:
    """Yields some columns of a table, each line with its place; the first line names them unless `names` are given."""
    header = list(names) or first_line(path)
    missing = [name for name in wanted if name not in header]
    if missing:
        raise ValueError(f"{path}, line 1: has no column {missing[0]!r}, but expected are {', '.join(wanted)}")
    places = [header.index(name) for name in wanted]
    table = table_rows(path, *header, broken=broken)
    if not names:
        next(table)
    for place, fields in table:
        yield place, [decode_field(place, fields[index]) for index in places]


def first_line(path: Path) -> list[str]:
    """Returns the names of the columns of a table."""
    with open_bytes(path) as file:
        # One of the official files begins with a mark of its byte order.
        line = file.readline().removeprefix(b"\xef\xbb\xbf")
    return [decode_field(f"{path}, line 1", field) for field in line.rstrip(b"\r\n").split(b"\t")]


def decode_field(place: str, field: bytes) -> str:
    """Returns the text of a field."""
    try:
        return field.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: the text is {field[:40]!r}, but expected is UTF-8") from error


def hub_items(layout: Layout, split: str) -> list[Item]:
    """Returns the examples of a split of the Hub; those without labels have the label -1 there."""
    found = from_hub(HUB_NAME, split, layout.hub)
    texts = zip(*(found[name] for name in layout.hub_texts or layout.texts), strict=True)
    return [Item(pair, max(0.0, float(label))) for pair, label in zip(texts, found["label"], strict=True)]
