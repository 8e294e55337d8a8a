"""`lagwise bench linear`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from lagwise.lab.cli.bench.screen import COLUMNS, Sheet, add_rows, check_encodings, chosen_cases
from lagwise.lab.cli.console import in_words
from lagwise.lab.cli.options import Device, Lines, chosen_device, chosen_dtype
from lagwise.lab.cli.progress import count_cases

DECODE_COLUMNS = ["contender", "shape", "position", "step ms", "ratio", "peak MiB"]


@in_words()
def command(
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    encoding: Annotated[list[str] | None, typer.Option(help="Of ours, only this encoding and none; may be repeated.")] = None,
    time: Annotated[int | None, typer.Option(help="Use this length in all shapes; in a sweep, stop there.", min=1)] = None,
    repeats: Annotated[int | None, typer.Option(help="Turns of each contender: 7, or 2 in a sweep on a CPU.", min=1)] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Causal attention; the goals are for attention both ways.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only plain linear attention, and ours without positions and with SPE.")
    ] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="Measure against the length instead, and draw a plot.")] = False,
    decode: Annotated[
        bool, typer.Option("--decode", help="Time a decoding step near and far from the start of a sequence instead.")
    ] = False,
    out: Lines = Path("results"),
) -> None:
    """Compare linear attention with encodings to linear attention without.

        lagwise bench linear --quick
        lagwise bench linear --encoding sine-spe --causal
        lagwise bench linear --decode

    In each shape, linear attention without positions (plain code with the features relu(x) + 0.001), ours, softmax attention
    without positions, and SPE as published, its codes written out, run in turns on the same tensors. The ratio is to the first of
    these in the same turn: 1.0 would be positions for free. Training is forward and backward with the gradients of the
    encoding, and the peak is its memory with all inputs. The median of the turns counts.

    With --decode, the ratio is to the step at the first position. Lines that failed or were left out say why.
    """

    from lagwise.lab.bench import linear as bench

    where = chosen_device(device)
    kind = chosen_dtype(dtype, where)
    check_encodings(encoding, bench.DECODED if decode else list(bench.OPTIONS))
    if decode and (sweep or time or causal or quick):
        raise typer.BadParameter("it has no length to choose, and nothing beside ours", param_hint="--decode")
    name = "linear-decode" if decode else "linear-sweep" if sweep else "linear"
    options = {"device": where, "dtype": kind, "encodings": encoding}
    options["repeats"] = repeats or (2 if sweep and where.type == "cpu" else 7)
    sheet = Sheet(name, DECODE_COLUMNS if decode else COLUMNS, out, where, kind)
    if decode:
        for _, progress in count_cases(["decoding"], str):
            sheet.add(bench.measure_decoding(progress=progress, **options), add_decode_rows)
    else:
        shapes = bench.sweep_shapes(where, time) if sweep else chosen_cases(bench.SHAPES[where.type], None, time)
        for shape, progress in count_cases(shapes, lambda shape: f"T = {shape.time}"):
            records = bench.measure_linear(
                replace(shape, causal=causal), quick=quick, bench="linear sweep" if sweep else "linear", progress=progress,
                **options,
            )  # fmt: skip
            sheet.add(records, add_rows, words=bench.FEATURES)
    sheet.show(sweep=sweep)


def add_decode_rows(table: Table, records: list[dict[str, Any]]) -> list[str]:
    """Adds the lines of decoding steps to the table, and returns what there is to say about those without numbers."""
    notes = []
    for record in records:
        labels = [record["contender"], "B{batch} H{heads} D{head_dim}".format(**record), f"{record['position']:,}"]
        if "error" in record:
            table.add_row(*labels, "-", "-", "-")
            notes.append(f"{record['contender']}, position {record['position']:,}: {record['error']}")
            continue
        ratio = "-" if record["step_ratio"] is None else f"{record['step_ratio']:.2f}"
        table.add_row(*labels, f"{record['step_ms']:.3f}", ratio, f"{record['peak_bytes'] / 2**20:.1f}")
    return notes
