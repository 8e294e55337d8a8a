"""The tables of the page about speed, from lines of results: `<!-- speed: NAME -->` becomes the table of that name."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "results"

Line = dict[str, Any]
Words = Callable[[Line], str]

PLAIN = {"plain", "plain cuDNN"}

# Those at which lengths of 512 and of 32,768 were measured once more.
NEWEST = ("d6ece67", "e591ce0")


def lines(file: str, *commits: str, hidden: Iterable[str] = ()) -> list[Line]:
    """Returns the lines of a file that were measured at some commits, without some contenders."""
    found = map(json.loads, (RESULTS / file).read_text().splitlines())
    return [line for line in found if line["commit"].startswith(commits) and line["contender"] not in set(hidden)]


def pivot(found: Iterable[Line], *, row: Words, column: Words, cell: Words) -> str:
    """Returns a table with a row and a column for each of the words that lines have; where two lines meet, the last counts."""
    cells = {(row(line), column(line)): cell(line) for line in found}
    rows, columns = (list(dict.fromkeys(key[axis] for key in cells)) for axis in (0, 1))
    table = [["", *columns], ["---", *["---:"] * len(columns)]]
    table += [[name, *(cells.get((name, head), "") for head in columns)] for name in rows]
    return "\n".join("| " + " | ".join(each) + " |" for each in table)


def case(line: Line) -> str:
    """Returns an encoding with its options."""
    shown = {name: value for name, value in line["options"].items() if name != "causal"}
    if shown.get("max_lag") == line["time"]:
        shown["max_lag"] = "T"
    options = ", ".join(f"{name}={value}" for name, value in shown.items())
    return f"`{line['encoding']}`" + (f", {options}" if options else "") + (", causal" if line["causal"] else "")


def shape(line: Line) -> str:
    """Returns the sizes of a call."""
    return f"B{line['batch']} H{line['heads']} T{line['time']} D{line['head_dim']}"


def ours_or(line: Line) -> str:
    """Returns the case of our lines, and the case with the contender of others."""
    return case(line) if line["contender"] == "lagwise" else f"{case(line)}: {line['contender']}"


def number(line: Line, name: str, form: str, factor: float = 1.0) -> str:
    """Returns a number of a line, or why there is none."""
    if "error" in line:
        return "left out" if line["error"].startswith("left out") else "out of memory"
    return form.format(factor * line[name])


def ratio(line: Line) -> str:
    """Returns the training time by that of attention without positions."""
    return number(line, "training_ratio", "{:.2f}")


def mebibytes(line: Line) -> str:
    return number(line, "peak_bytes", "{:,.0f}", 2**-20)


def joined(found: list[Line], row: Words, *, cells: dict[str, Words]) -> str:
    """Returns a table with one row for each line and one column for each number."""
    doubled = [(line, head) for line in found for head in cells]
    each = [{**line, "head": head} for line, head in doubled]
    return pivot(each, row=row, column=lambda line: line["head"], cell=lambda line: cells[line["head"]](line))


def cpu() -> str:
    found = lines("attention-cpu-2026-11-15.jsonl", "4f38ad2", hidden=PLAIN)
    return joined(found, lambda line: f"{ours_or(line)}, T = {line['time']}", cells={"training": ratio, "peak MiB": mebibytes})


def gpu() -> str:
    found = lines("attention-cuda-2026-11-15.jsonl", "ffc3106", *NEWEST)
    found = [line for line in found if line["contender"] == "lagwise"]
    return pivot(found, row=case, column=shape, cell=ratio)


def gpu_others() -> str:
    narrow = ({}, {"max_lag": 128}, {"max_lag": 128, "values": False})
    found = lines("attention-cuda-2026-11-15.jsonl", "f15646e", *NEWEST, hidden=PLAIN)
    found = [line for line in found if line["options"] in narrow and not line["causal"]]
    flexed = {(case(line), shape(line)) for line in found if line["contender"] == "FlexAttention"}
    found = [line for line in found if (case(line), shape(line)) in flexed]
    return pivot(found, row=lambda line: f"{case(line)}: {line['contender']}", column=shape, cell=ratio)


def linear(file: str, commit: str) -> str:
    found = lines(file, commit)
    return pivot(found, row=lambda line: line["contender"], column=lambda line: f"B{line['batch']} T{line['time']}", cell=ratio)


def hugging_face(name: str, form: str, factor: float = 1.0) -> str:
    def row(line: Line) -> str:
        return f"{line['model']}, B{line['batch']} T{line['time']}, dropout {line['dropout']}"

    found = lines("hf-cuda-2026-11-15.jsonl", "e60ed2d")
    return pivot(found, row=row, column=lambda line: line["contender"], cell=lambda line: number(line, name, form, factor))


TABLES: dict[str, Callable[[], str]] = {
    "cpu": cpu,
    "gpu": gpu,
    "gpu-others": gpu_others,
    "linear-gpu": lambda: linear("linear-cuda-2026-11-15.jsonl", "a78b066"),
    "linear-cpu": lambda: linear("linear-cpu-2026-11-15.jsonl", "a797d20"),
    "hf-speed": lambda: hugging_face("training_tokens_per_s", "{:,.0f}"),
    "hf-memory": lambda: hugging_face("held_bytes", "{:,.1f}", 2**-30),
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fills in the tables, when MkDocs reads a page."""
    return re.sub(r"<!-- speed: (\S+) -->", lambda found: TABLES[found[1]](), markdown)
