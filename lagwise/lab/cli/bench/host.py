"""`lagwise bench host`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from lagwise.lab.cli.bench.screen import Sheet, check_encodings
from lagwise.lab.cli.console import in_words
from lagwise.lab.cli.options import Device, Lines, chosen_device, chosen_dtype
from lagwise.lab.cli.progress import count_cases

HOST_COLUMNS = ["contender", "shape", "training ms", "ratio", "goal ms", "forward ms", "ratio", "goal ms", "kernels", "goal"]
FIRST_COLUMNS = ["contender", "shape", "first call s", "goal s", "compiled", "second start s", "compiled"]


@in_words()
def command(
    device: Device = "auto",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; bfloat16 on a GPU unless given.")] = None,
    encoding: Annotated[list[str] | None, typer.Option(help="Only this encoding; may be repeated.")] = None,
    repeats: Annotated[int, typer.Option(help="Turns of each encoding.", min=1)] = 7,
    first_call: Annotated[
        bool, typer.Option("--first-call", help="Time the first call of new programs instead, which takes half a minute each.")
    ] = False,
    out: Lines = Path("results"),
) -> None:
    """Measure what one eager call takes where the GPU waits for the host.

        lagwise bench host
        lagwise bench host --encoding t5 --encoding none
        lagwise bench host --first-call --encoding huang4

    A small call with each encoding that softmax attention takes runs in turns beside torch's attention: forward and backward
    (training), and forward without gradients. The ratio is to torch's in the same turn. Kernels are those of one training step
    on a GPU, copies and fills included.

    With --first-call, two new programs make one call each, forward and backward. The first finds Triton's cache empty and
    compiles; the second finds what the first has left. Both are shown with the number of kernels that they compile. Imports are
    not timed.
    """
    from lagwise.lab.bench import host as bench

    where = chosen_device(device)
    kind = chosen_dtype(dtype, where)
    check_encodings(encoding, bench.host_encodings())
    if first_call:
        sheet = Sheet("first-call", FIRST_COLUMNS, out, where, kind)
        for name, progress in count_cases(encoding or bench.FIRST, str):
            progress("two new programs")
            sheet.add(bench.measure_first_call(name, device=where, dtype=kind), add_first_rows)
    else:
        sheet = Sheet("host", HOST_COLUMNS, out, where, kind)
        for _, progress in count_cases(["calls"], str):
            records = bench.measure_host(device=where, dtype=kind, repeats=repeats, encodings=encoding, progress=progress)
            sheet.add(records, add_host_rows)
    sheet.show()


def add_host_rows(table: Table, records: list[dict[str, Any]]) -> list[str]:
    """Adds the lines of calls to the table, and returns what there is to say about those without numbers."""
    columns = [
        ("training_ms", 3), ("training_ratio", 2), ("training_goal_ms", 2), ("forward_ms", 3), ("forward_ratio", 2),
        ("forward_goal_ms", 2), ("kernels", 0), ("kernels_goal", 0),
    ]  # fmt: skip
    return add_numbers(table, records, columns)


def add_first_rows(table: Table, records: list[dict[str, Any]]) -> list[str]:
    """Adds the lines of first calls to the table, and returns what there is to say about those without numbers."""
    columns = [("first_s", 2), ("first_goal_s", 2), ("first_kernels", 0), ("second_s", 2), ("second_kernels", 0)]
    return add_numbers(table, records, columns)


def add_numbers(table: Table, records: list[dict[str, Any]], columns: list[tuple[str, int]]) -> list[str]:
    """Adds one row for each record, with some of its numbers and their digits."""
    from lagwise.lab.bench.cases import shape_of, words_of

    notes = []
    for record in records:
        if "error" in record:
            notes.append(f"{record['contender']}: {record['error']}")
        options = words_of(record).removeprefix(record["encoding"])
        numbers = (record.get(name) for name, _ in columns)
        shown = ("-" if x is None else f"{x:.{digits}f}" for x, (_, digits) in zip(numbers, columns, strict=True))
        table.add_row(record["contender"] + options, shape_of(record), *shown)
    return notes
