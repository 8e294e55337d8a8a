"""`lagwise bench models`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from lagwise.lab.cli.bench.screen import Sheet, check_encodings
from lagwise.lab.cli.console import in_words
from lagwise.lab.cli.options import Device, Lines, chosen_device, chosen_dtype
from lagwise.lab.cli.progress import count_cases

MODEL_COLUMNS = ["attention", "shape", "encoding", "tokens/s", "ratio", "step ms", "peak MiB", "ratio", "its parameters"]


@in_words()
def command(
    device: Device = "auto",
    dtype: Annotated[str | None, typer.Option(help="Of the products: float32, bfloat16; bfloat16 on a GPU unless given.")] = None,
    encoding: Annotated[list[str] | None, typer.Option(help="Only this encoding and none; may be repeated.")] = None,
    attention: Annotated[str, typer.Option(help="softmax, linear, or both.")] = "both",
    time: Annotated[list[int] | None, typer.Option(help="Use this length; may be repeated.", min=1)] = None,
    repeats: Annotated[int | None, typer.Option(help="Turns of each encoding: 7, or 3 on a CPU.", min=1)] = None,
    out: Lines = Path("results"),
) -> None:
    """Compare training of a whole encoder with each encoding to the same encoder without one.

        lagwise bench models --encoding t5 --encoding rotary
        lagwise bench models --attention linear --time 1024

    Six layers of width 512 with an embedding and a score for each of 8,192 tokens (a smaller one on a CPU); a step is forward,
    backward and AdamW, with equally many tokens at each length (65,536 on a GPU, at T = 512, 4096 and 16384). The encoders run
    in turns, and the median of the turns counts. Ratios are to the encoder without positions and with the same attention: more
    tokens and less memory are better. The peak has the weights and all that training holds. Lines that failed, and encodings
    that a kind of attention cannot use, say why.
    """

    from lagwise.encodings import ENCODINGS
    from lagwise.lab.bench import model_steps as bench

    if attention not in ("softmax", "linear", "both"):
        raise typer.BadParameter(f"it is softmax, linear or both, not {attention!r}", param_hint="--attention")
    check_encodings(encoding, list(ENCODINGS))
    where = chosen_device(device)
    kind = chosen_dtype(dtype, where)
    sheet = Sheet("models", MODEL_COLUMNS, out, where, kind)
    shapes = [each for each in bench.shapes(where, time) if attention in ("both", each.attention)]
    for shape, progress in count_cases(shapes, lambda shape: f"{shape.attention}, T = {shape.time}"):
        records = bench.measure_encoders(
            shape, device=where, dtype=kind, repeats=repeats or (3 if where.type == "cpu" else 7), encodings=encoding,
            progress=progress,
        )  # fmt: skip
        sheet.add(records, add_model_rows)
    sheet.show()


def add_model_rows(table: Table, records: list[dict[str, Any]]) -> list[str]:
    """Adds the lines of one shape to the table, and returns what there is to say about those without numbers."""
    notes = []
    for record in records:
        labels = [record["attention"], "B{batch} T{time}".format(**record), record["contender"]]
        if "error" in record:
            notes.append(f"{', '.join(labels)}: {record['error']}")
            continue
        speed, memory = ("-" if record[name] is None else f"{record[name]:.2f}" for name in ("speed_ratio", "memory_ratio"))
        table.add_row(
            *labels, f"{record['tokens_per_s']:,.0f}", speed, f"{record['step_ms']:.2f}", f"{record['held_bytes'] / 2**20:,.0f}",
            memory, f"{record['encoding_parameters']:,}",
        )  # fmt: skip
    table.add_section()
    return notes
