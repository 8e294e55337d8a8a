"""The tables of speed, from the newest lines of results: `<!-- speed: NAME -->` on a page becomes the table of that name.

`python tools/speed_tables.py` writes those of the README, which no site makes, between its marks.
"""

import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from lagwise.lab.bench.cases import shape_of
from lagwise.lab.bench.changes import identity

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"

Line = dict[str, Any]
Words = Callable[[Line], str]

DATED = "????-??-??.jsonl"

EARLY = 128
"""The last lag of tables that end early."""

NO_LINES = "*There are no lines of this yet.*"

REASONS = {"OutOfMemory": "out of memory", "memory": "does not fit", "left out": "left out"}
"""What stands in place of a number, by a part of the error."""

MARKED = re.compile(r"(<!-- speed -->\n).*?(?=<!-- end of speed -->)", flags=re.DOTALL)

README_TIMES = (512, 32768)
README_CASES: dict[str, Line] = {
    "`t5`": {"encoding": "t5", "options": {}},
    "`shaw`, keys": {"encoding": "shaw", "options": {"max_lag": 128, "values": False}},
    "`huang4`": {"encoding": "huang4", "options": {"max_lag": 128}},
}


def newest(kind: str, wanted: Callable[[Line], bool] = lambda line: True) -> list[Line]:
    """Returns the lines that are wanted of the newest file of a kind that has some; of two that measure the same, the last."""
    for path in sorted(RESULTS.glob(f"{kind}-{DATED}"), reverse=True):
        found = {identity(line): line for line in map(json.loads, path.read_text().splitlines()) if wanted(line)}
        if found:
            return list(found.values())
    return []


def newest_date(kind: str) -> str:
    """Returns the date of the newest file of a kind, which may have stars in it."""
    return max((path.stem[-10:] for path in RESULTS.glob(f"{kind}-{DATED}")), default="")


def origin(found: Iterable[Line]) -> str:
    """Returns in a sentence on what lines were measured, and when; another one if other files are newer."""
    lines = list(found)

    def each(name: str) -> str:
        return ", ".join(dict.fromkeys(line[name].split("+")[0] for line in lines if line.get(name)))

    packages = {"PyTorch": each("torch"), "Triton": each("triton"), "transformers": each("transformers")}
    versions = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    commits = ", ".join(dict.fromkeys(line["commit"] or "unknown" for line in lines))
    told = f"Measured on {each('device')} in {each('dtype')} with {versions}, on {each('date')}, commit {commits}."
    latest = newest_date("*-cuda")
    return told if each("date") >= latest else f"{told} Older than the newest lines, which are of {latest}."


def described(found: list[Line], table: str) -> str:
    """Returns a table with what its lines were measured on, or a sentence where there are no lines."""
    return f"{table}\n\n*{origin(found)}*" if found else NO_LINES


def pivot(found: Iterable[Line], *, row: Words, column: Words, cell: Words) -> str:
    """Returns a table with a row and a column for each of the words that lines have; where two lines meet, the last counts."""
    cells = {(row(line), column(line)): cell(line) for line in found}
    rows, columns = (list(dict.fromkeys(key[axis] for key in cells)) for axis in (0, 1))
    return written(["", *columns], [[name, *(cells.get((name, head), "") for head in columns)] for name in rows])


def written(heads: list[str], rows: list[list[str]]) -> str:
    """Returns a table in Markdown, whose columns but the first are numbers."""
    table = [heads, ["---", *["---:"] * len(heads[1:])], *rows]
    return "\n".join("| " + " | ".join(each) + " |" for each in table)


def head_of(line: Line) -> str:
    """Returns which column a line was copied for."""
    return line["head"]


def joined(found: Iterable[Line], row: Words, cells: dict[str, Words], column: Words = head_of) -> str:
    """Returns a table with one row for each line and one column for each number."""
    each = [{**line, "head": head} for line in found for head in cells]
    return pivot(each, row=row, column=column, cell=lambda line: cells[line["head"]](line))


def case(line: Line) -> str:
    """Returns an encoding with its options, and how sequences are told apart."""
    shown = {name: value for name, value in line["options"].items() if name != "causal"}
    if wide(line) and shown.get("max_lag") == line["time"]:
        shown["max_lag"] = "T"
    options = [f"{name}={value}" for name, value in shown.items()]
    return ", ".join([f"`{line['encoding']}`", *options, *([f"`{line['ragged']}`"] if line.get("ragged") else [])])


def shape(line: Line) -> str:
    """Returns the sizes of a call, and whether it is causal or in a CUDA graph."""
    return shape_of({**line, "eager": False, "ragged": None})


def encoding(line: Line) -> str:
    """Returns the name of an encoding, or that of torch's attention."""
    return f"`{line['encoding']}`" if line["contender"].startswith("lagwise") else f"torch's {line['contender']}"


def typed_head(line: Line) -> str:
    """Returns which column a line was copied for, with the type of numbers where it is not the usual one."""
    return line["head"] if line["dtype"] == "bfloat16" else f"{line['head']}, {line['dtype']}"


def number(line: Line, name: str, form: str, factor: float = 1.0) -> str:
    """Returns a number of a line, or why there is none."""
    if line.get(name) is not None:
        return form.format(factor * line[name])
    if "error" not in line:
        return ""
    return next((words for part, words in REASONS.items() if part in line["error"]), "failed")


def against(line: Line, name: str, goal: str, form: str = "{:.2f}", *, more: bool = False) -> str:
    """Returns a number with its goal in brackets if it is ours and has one, in bold if it is met: not more, or not less."""
    shown, promised = number(line, name, form), line.get(goal)
    if promised is None or line.get(name) is None or not line["contender"].startswith("lagwise"):
        return shown
    met = line[name] >= promised if more else line[name] <= promised
    return f"{f'**{shown}**' if met else shown} ({promised:g})"


ratio: Words = partial(number, name="training_ratio", form="{:.2f}")
ratio_and_goal: Words = partial(against, name="training_ratio", goal="goal")
memory: Words = partial(against, name="memory_ratio", goal="memory_goal")
milliseconds: Words = partial(number, name="training_ms", form="{:.2f}")


def ours(line: Line) -> bool:
    return line["contender"] == "lagwise"


def wide(line: Line) -> bool:
    """Says whether a case is of a table as wide as the sequence; one that ends early may be longer than a short sequence."""
    return line["encoding"] == "kerple" or line["options"].get("max_lag", EARLY) != EARLY


def by_length(found: Iterable[Line]) -> list[Line]:
    """Sorts lines by their length, then by the width of heads."""
    return sorted(found, key=lambda line: (line["time"], line["head_dim"]))


def by_shape() -> str:
    """Training by the time of plain attention: a row for each encoding whose table ends early, and one for another kernel."""

    def wanted(line: Line) -> bool:
        apart = line.get("eager") or line.get("ragged")
        return not apart and (line["contender"] == "plain flash" or (ours(line) and not wide(line)))

    def row(line: Line) -> str:
        return case(line) if ours(line) else "no positions, FlashAttention"

    found = sorted(by_length(newest("attention-cuda", wanted)), key=ours, reverse=True)
    return described(found, pivot(found, row=row, column=shape, cell=ratio_and_goal))


def full_width() -> str:
    found = by_length(newest("attention-cuda", lambda line: ours(line) and wide(line)))
    cells = {"training": ratio_and_goal, "memory": memory}
    return described(found, joined(found, lambda line: f"{case(line)}, {shape(line)}", cells))


def others() -> str:
    found = by_length(newest("attention-cuda", lambda line: not line["contender"].startswith(("lagwise", "plain"))))
    return described(found, pivot(found, row=lambda line: f"{case(line)}: {line['contender']}", column=shape, cell=ratio))


def eager() -> str:
    found = newest("attention-cuda", lambda line: ours(line) and bool(line.get("eager")))
    cells = {"training": ratio_and_goal, "ms": milliseconds, "forward": partial(number, name="forward_ratio", form="{:.2f}")}
    return described(found, joined(found, lambda line: f"{case(line)}, {shape(line)}", cells))


def ragged() -> str:
    found = newest("attention-cuda", lambda line: ours(line) and bool(line.get("ragged")))
    return described(found, pivot(found, row=case, column=shape, cell=ratio_and_goal))


def cpu() -> str:
    def wanted(line: Line) -> bool:
        return not line["contender"].startswith("plain") and not (line["commit"] or "").endswith("-dirty")

    def row(line: Line) -> str:
        return f"{case(line)}, {shape(line)}" + ("" if ours(line) else f": {line['contender']}")

    found = newest("attention-cpu", wanted)
    mebibytes = partial(number, name="peak_bytes", form="{:,.0f}", factor=2**-20)
    return described(found, joined(found, row, {"training": ratio_and_goal, "peak MiB": mebibytes}))


def host() -> str:
    found = newest("host-cuda", lambda line: line["bench"] == "host")
    cells: dict[str, Words] = {
        "forward and backward, ms": partial(against, name="training_ms", goal="training_goal_ms"),
        "forward, ms": partial(against, name="forward_ms", goal="forward_goal_ms"),
        "kernels of a step": partial(against, name="kernels", goal="kernels_goal", form="{:.0f}"),
    }
    return described(found, joined(found, encoding, cells, typed_head))


def first_call() -> str:
    def wanted(line: Line) -> bool:
        return line["bench"] == "first call"

    found = newest("first-call-cuda", wanted) or newest("host-cuda", wanted)
    cells: dict[str, Words] = {
        "first, s": partial(against, name="first_s", goal="first_goal_s", form="{:.1f}"),
        "compiled": partial(number, name="first_kernels", form="{:.0f}"),
        "second, s": partial(number, name="second_s", form="{:.1f}"),
        "compiled then": partial(number, name="second_kernels", form="{:.0f}"),
    }
    return described(found, joined(found, encoding, cells, typed_head))


def compiled() -> str:
    found = newest("compiled-cuda")
    cells: dict[str, Words] = {
        "step, ms": partial(number, name="step_ms", form="{:.1f}"),
        "a layer, ms": partial(number, name="layer_ms", form="{:.2f}"),
        "by `none`": partial(number, name="step_ratio", form="{:.2f}"),
        "graphs": partial(number, name="graphs", form="{:.0f}"),
        "breaks": partial(number, name="graph_breaks", form="{:.0f}"),
        "recompiles": partial(number, name="recompiles", form="{:.0f}"),
    }
    return described(found, joined(found, lambda line: f"{line['mode']}, {encoding(line)}", cells))


def model(line: Line) -> str:
    dropout = f", dropout {line['dropout']}" if line["dropout"] else ""
    return f"{line['model']}, B{line['batch']} T{line['time']}{dropout}"


def t5() -> str:
    found = sorted(newest("hf-cuda", lambda line: line["model"] == "t5-base"), key=lambda line: (line["dropout"], line["time"]))
    columns: dict[str, tuple[str, Words]] = {
        "no positions, ms": ("no positions", partial(number, name="training_ms", form="{:.0f}")),
        "`lagwise` by it": ("lagwise", partial(against, name="floor_ratio", goal="floor_goal")),
        "`sdpa` by it": ("sdpa", partial(number, name="floor_ratio", form="{:.2f}")),
        "speed by `sdpa`": ("lagwise", partial(against, name="training_speedup", goal="goal", more=True)),
        "memory by `sdpa`": ("lagwise", memory),
    }
    cells = [{**line, "head": head} for head, (name, _) in columns.items() for line in found if line["contender"] == name]
    table = pivot(cells, row=model, column=head_of, cell=lambda line: columns[line["head"]][1](line))
    return described(found, table)


def models(name: str, form: str, factor: float = 1.0) -> str:
    found = newest("hf-cuda", lambda line: line["model"] != "t5-base")
    cell = partial(number, name=name, form=form, factor=factor)
    return described(found, pivot(found, row=model, column=lambda line: line["contender"], cell=cell))


def linear(kind: str) -> str:
    def column(line: Line) -> str:
        return f"B{line['batch']} T{line['time']}, {line['head']}"

    found = newest(kind)
    cells = {"time": ratio_and_goal, "memory": memory}
    return described(found, joined(found, lambda line: line["contender"], cells, column))


TABLES: dict[str, Callable[[], str]] = {
    "by-shape": by_shape,
    "full-width": full_width,
    "others": others,
    "eager": eager,
    "host": host,
    "first-call": first_call,
    "compiled": compiled,
    "ragged": ragged,
    "t5": t5,
    "models-speed": lambda: models("training_tokens_per_s", "{:,.0f}"),
    "models-memory": lambda: models("held_bytes", "{:,.1f}", 2**-30),
    "linear-gpu": lambda: linear("linear-cuda"),
    "linear-cpu": lambda: linear("linear-cpu"),
    "cpu": cpu,
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fills in the tables, when MkDocs reads a page."""
    return re.sub(r"<!-- speed: (\S+) -->", lambda found: TABLES[found[1]](), markdown)


def readme() -> str:
    """Returns what the README says about speed: a table beside others, its origin, and T5-base by length."""
    cases = [(name, {**wanted, "time": time}) for name, wanted in README_CASES.items() for time in README_TIMES]
    names = ("lagwise", "FlexAttention", "dense bias")
    lines = {
        name: newest(
            "attention-cuda",
            lambda line, name=name: line["contender"] == name and any(is_readme_case(line, wanted) for _, wanted in cases),
        )
        for name in names
    }
    rows: list[list[str]] = []
    for title, wanted in cases:
        cells = (next((ratio(line) for line in lines[name] if is_readme_case(line, wanted)), "") for name in names)
        rows.append([title, f"{wanted['time']:,}", *cells])
    dates = [", ".join(dict.fromkeys(line["date"] for line in lines[name])) for name in names[:2]]
    apart = "" if dates[0] == dates[1] else f" The other columns are of {dates[1]}."
    table = written(["encoding", "T", "Lagwise", "FlexAttention", "SDPA with a dense bias"], rows)
    return f"{table}\n\n{origin(lines['lagwise'])}{apart}\n{speed_of_t5()}"


def is_readme_case(line: Line, wanted: Line) -> bool:
    """Says whether a line is of a case of the README: a plain call, which is not causal."""
    apart = line["causal"] or line.get("eager") or line.get("ragged") or line["head_dim"] != 64
    return not apart and all(line[name] == wanted[name] for name in ("encoding", "options", "time"))


def speed_of_t5() -> str:
    """Returns in a sentence how much faster T5-base trains than with torch's attention."""

    def wanted(line: Line) -> bool:
        return line["model"] == "t5-base" and ours(line) and not line["dropout"] and bool(line.get("training_speedup"))

    found = sorted(newest("hf-cuda", wanted), key=lambda line: line["time"])
    speeds = [f"{line['training_speedup']:.1f} at {line['time']:,}" for line in found]
    return f"T5-base trains this many times as fast as with `sdpa`: {', '.join(speeds)} tokens."


if __name__ == "__main__":
    page = ROOT / "README.md"
    page.write_text(MARKED.sub(lambda found: f"{found[1]}{readme()}\n", page.read_text()))
