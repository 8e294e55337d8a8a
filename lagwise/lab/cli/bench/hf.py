"""`lagwise bench hf`."""

from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from lagwise.extras import install_command
from lagwise.lab.cli.bench.screen import Shape, Sheet, of_shapes
from lagwise.lab.cli.console import failed, in_words
from lagwise.lab.cli.options import Device, Lines, chosen_device, chosen_dtype
from lagwise.lab.cli.progress import count_cases

HF_COLUMNS = [
    "case", "shape", "contender", "training tokens/s", "ratio", "goal", "time by no positions", "goal", "inference tokens/s",
    "ratio", "peak MiB", "ratio", "goal",
]  # fmt: skip


@in_words()
def command(
    device: Device = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights: float32, bfloat16 or float16; bfloat16 on a GPU unless given.")
    ] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only this model, such as t5-base; may be repeated.")] = None,
    shape: Shape = None,
    batch: Annotated[int | None, typer.Option(help="Use this number of sequences in all cases, and no goals.", min=1)] = None,
    time: Annotated[int | None, typer.Option(help="Use this length in all cases, and no goals.", min=1)] = None,
    repeats: Annotated[int | None, typer.Option(help="Turns of each contender: 7, or 3 on a CPU.", min=1)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only ours, and what ratios are taken to.")] = False,
    out: Lines = Path("results"),
) -> None:
    """Compare Hugging Face models with attn_implementation="lagwise" to the same models without.

        lagwise bench hf --quick
        lagwise bench hf --case t5-small --time 256
        lagwise bench hf --case t5-base --shape "B16 T512"

    T5 (t5-base; t5-base-encoder is its encoder alone) runs with "eager", "sdpa" and "lagwise", and for reference without
    positions, on torch's attention without a bias: the least that any encoding could take. BERT with relative positions
    (bert-base-m4: relative_key_query) runs as transformers 4 computed it, with "lagwise", and for reference with "sdpa", which
    has no relative positions. On a CPU the models are smaller: t5-small, t5-small-encoder, bert-small-m4.

    The contenders have the same random weights, are first checked to compute the same but for those two, and run in turns.
    Training is a step forward and backward without an optimizer, inference a forward pass; all tokens of a batch count, in T5
    those of both sides. The peak is that of training, with weights, gradients and batch. A ratio is to "sdpa" for T5, and to
    transformers 4 for BERT: more tokens and less memory are better. The goals hold for the shapes on a GPU. Lines that failed
    say why.
    """

    try:
        from lagwise.lab.bench import hf as bench
    except ModuleNotFoundError as error:
        raise failed(f"bench hf needs {error.name}: {install_command('hf')}", 1) from error

    where = chosen_device(device)
    kind = chosen_dtype(dtype, where)
    cases = bench.CASES[where.type]
    known = list(dict.fromkeys(each.model for each in cases))
    for name in case or []:
        if name not in known:
            raise typer.BadParameter(f"no case {name!r} on {where.type}; there are {', '.join(known)}", param_hint="--case")
    sheet = Sheet("hf", HF_COLUMNS, out, where, kind, beside=f", transformers {metadata.version('transformers')}")
    chosen = [each.at(batch, time) for each in of_shapes(cases, shape) if not case or each.model in case]
    for each, progress in count_cases(chosen, lambda each: f"{each.words}, {each.shape}"):
        records = bench.measure_model(
            each, device=where, dtype=kind, repeats=repeats or (3 if where.type == "cpu" else 7), quick=quick, progress=progress
        )
        sheet.add(records, add_hf_rows, words=each.words)
    sheet.show()


def add_hf_rows(table: Table, records: list[dict[str, Any]], *, words: str) -> list[str]:
    """Adds the lines of one model to the table, and returns what there is to say about those without numbers."""

    from lagwise.lab.bench.cases import shape_of

    def ratio(number: float | None) -> str:
        return "-" if number is None else f"{number:.2f}"

    def verdict(sign: str, goal: float | None, met: bool | None) -> str:
        return "" if met is None else f"{sign} {goal:.2f} {'met' if met else 'missed'}"

    notes = []
    for number, record in enumerate(records):
        shape = shape_of(record)
        labels = [words, shape, record["contender"]] if number == 0 else ["", "", record["contender"]]
        if "error" in record:
            table.add_row(*labels, "-", "-", "", "-", "", "-", "-", "-", "-", "")
            notes.append(f"{words} {shape}, {record['contender']}: {record['error']}")
            continue
        table.add_row(
            *labels,
            f"{record['training_tokens_per_s']:,.0f}",
            ratio(record["training_speedup"]),
            verdict(">=", record["goal"], record["goal_met"]),
            ratio(record["floor_ratio"]),
            verdict("<=", record["floor_goal"], record["floor_goal_met"]),
            f"{record['inference_tokens_per_s']:,.0f}",
            ratio(record["inference_speedup"]),
            f"{record['held_bytes'] / 2**20:,.0f}",
            ratio(record["memory_ratio"]),
            verdict("<=", record["memory_goal"], record["memory_goal_met"]),
        )
    table.add_section()
    return notes
