"""`lagwise bench compiled`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from lagwise.lab.cli.bench.screen import Sheet, check_encodings
from lagwise.lab.cli.console import in_words
from lagwise.lab.cli.options import Device, Lines, chosen_device, chosen_dtype
from lagwise.lab.cli.progress import count_cases

COLUMNS = [
    "mode", "contender", "shape", "step ms", "ratio", "layer ms", "kernels", "graphs", "breaks", "recompiles", "skips", "first s",
]  # fmt: skip


@in_words()
def command(
    device: Device = "auto",
    dtype: Annotated[str | None, typer.Option(help="Of the products: float32, bfloat16; bfloat16 on a GPU unless given.")] = None,
    encoding: Annotated[list[str] | None, typer.Option(help="Only this encoding and none; may be repeated.")] = None,
    mode: Annotated[
        list[str] | None, typer.Option(help="Only eager, compile, dynamic or reduce-overhead; may be repeated.")
    ] = None,
    lengths: Annotated[bool, typer.Option(help="Also train on two more lengths, and count what is compiled again.")] = True,
    repeats: Annotated[int | None, typer.Option(help="Turns of each encoding: 7, or 3 on a CPU.", min=1)] = None,
    out: Lines = Path("results"),
) -> None:
    """Compare training of a deep encoder eagerly, under torch.compile, and in CUDA graphs.

        lagwise bench compiled
        lagwise bench compiled --mode eager --no-lengths
        lagwise bench compiled --encoding shaw --mode compile

    Twelve layers of width 768 on 16 sequences of 512 tokens (a smaller encoder on a CPU); a step is forward, backward and AdamW.
    The encoders of a mode, with none, t5 and huang4 unless others are named, run in turns. The ratio is to none in the same
    mode. Modes are options of torch.compile: "dynamic" is dynamic=True, and "reduce-overhead" runs CUDA graphs, on a GPU.

    Graphs are those compiled for the first length; breaks are places that torch could not compile. Recompiles are graphs
    compiled for two more lengths: 1 where torch took the first length for the only one. Skips are graphs that could not become
    CUDA graphs. The first step compiles, which takes from half a minute to some minutes.
    """
    from lagwise.lab.bench import compiled as bench
    from lagwise.lab.bench.host import host_encodings

    where = chosen_device(device)
    kind = chosen_dtype(dtype, where)
    check_encodings(encoding, host_encodings())
    modes = bench.modes_on(where)
    for name in mode or []:
        if name not in modes:
            raise typer.BadParameter(f"no mode {name!r} here; there are {', '.join(modes)}", param_hint="--mode")
    sheet = Sheet("compiled", COLUMNS, out, where, kind)
    for name, progress in count_cases([name for name in modes if not mode or name in mode], str):
        records = bench.measure_mode(
            name, device=where, dtype=kind, repeats=repeats or (3 if where.type == "cpu" else 7), encodings=encoding,
            lengths=lengths, progress=progress,
        )  # fmt: skip
        sheet.add(records, add_rows)
    sheet.show()


def add_rows(table: Table, records: list[dict[str, Any]]) -> list[str]:
    """Adds the lines of one mode to the table, and returns what there is to say about those without numbers."""
    from lagwise.lab.bench.cases import shape_of

    notes, digits = [], {"step_ms": 2, "step_ratio": 2, "layer_ms": 3, "first_step_s": 1}
    for record in records:
        if "error" in record:
            notes.append(f"{record['mode']}, {record['contender']}: {record['error']}")
        numbers = {name: record.get(name) for name in NUMBERS}
        shown = ("-" if x is None else f"{x:.{digits.get(name, 0)}f}" for name, x in numbers.items())
        table.add_row(record["mode"], record["contender"], shape_of(record), *shown)
    table.add_section()
    return notes


NUMBERS = (
    "step_ms", "step_ratio", "layer_ms", "kernels", "graphs", "graph_breaks", "recompiles", "cudagraph_skips", "first_step_s",
)  # fmt: skip
"""The fields of the columns from the fourth on."""
