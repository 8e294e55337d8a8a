"""The commands of `lagwise bench`."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from lagwise.extras import install_command
from lagwise.lab.cli.console import console, counted, failed, in_words, print_whole
from lagwise.lab.cli.train import Device, changes_of, check_device, settings_of

if TYPE_CHECKING:
    import torch

    from lagwise.lab.bench.cases import Case

app = typer.Typer(
    no_args_is_help=True,
    help="Measure speed and memory beside what people run without us.\n\nlagwise bench attention --quick",
)

DTYPES = ("float32", "bfloat16", "float16")
Lines = Annotated[Path, typer.Option(help="Folder for the numbers, one JSON line each.", file_okay=False)]

COLUMNS = ["case", "shape", "contender", "forward ms", "ratio", "training ms", "ratio", "goal", "peak MiB", "ratio"]
HF_COLUMNS = [
    "case", "shape", "contender", "training tokens/s", "ratio", "goal", "inference tokens/s", "ratio",
    "peak MiB", "ratio", "goal",
]  # fmt: skip
MODEL_COLUMNS = ["attention", "shape", "encoding", "tokens/s", "ratio", "step ms", "peak MiB", "ratio", "its parameters"]
DECODE_COLUMNS = ["contender", "shape", "position", "step ms", "ratio", "peak MiB"]


@app.command("attention")
@in_words()
def attention(
    device: Device = "auto",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; bfloat16 on a GPU unless given.")] = None,
    encoding: Annotated[list[str] | None, typer.Option(help="Only cases of this encoding; may be repeated.")] = None,
    time: Annotated[int | None, typer.Option(help="Use this length in all cases; in a sweep, stop there.", min=1)] = None,
    repeats: Annotated[int | None, typer.Option(help="Turns of each contender: 7, or 2 in a sweep on a CPU.", min=1)] = None,
    impl: Annotated[str, typer.Option(help="Who computes: auto, or the name of an implementation.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Only plain attention and ours.")] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Also ours under torch.use_deterministic_algorithms(True).")
    ] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="Measure against the length instead, and draw a plot.")] = False,
    out: Lines = Path("results"),
) -> None:
    """Compare attention with encodings to attention without.

        lagwise bench attention --quick
        lagwise bench attention --encoding t5 --time 1024
        lagwise bench attention --sweep --device cuda

    For each case, plain attention, ours, and where there is one the code that people use today run in turns on the
    same tensors. The ratio is time by plain attention's time in the same turn (cuDNN's on a GPU): 1.0 would be positions
    for free. Training is forward and backward with the gradient of the learned tables, and the peak is its memory with all
    inputs. The median of the turns counts.

    On a GPU the cases at T = 512 are CUDA graphs of all contenders. Lines that failed or were left out say why.
    """
    if deterministic:
        # cuBLAS repeats its results only with a workspace of its own, which it reads before its first product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    from lagwise.lab.bench import softmax as bench
    from lagwise.lab.bench.cases import machine, save

    where = chosen_device(device)
    kind = chosen_dtype(dtype, where)
    if sweep and (encoding or deterministic):
        raise typer.BadParameter("it measures encodings of its own, and no deterministic mode", param_hint="--sweep")
    turns = repeats or (2 if sweep and where.type == "cpu" else 7)
    facts = machine(where)
    path = out / f"{'sweep' if sweep else 'attention'}-{where.type}-{facts['date']}.jsonl"
    table = Table(*COLUMNS, title=title(facts, kind))
    options = {"device": where, "dtype": kind, "repeats": turns, "impl": impl, "quick": quick}
    notes: list[str] = []
    if sweep:
        lengths = [length for length in bench.SWEEP_TIMES[where.type] if time is None or length <= time]
        for length, progress in counted(lengths, lambda length: f"T = {length}"):
            records = bench.run_sweep(length, progress=progress, **options)
            save(records, path)
            notes += add_rows(table, records)
    else:
        cases = chosen_cases(bench.CUDA_CASES if where.type == "cuda" else bench.CPU_CASES, encoding, time)
        for case, progress in counted(cases, lambda case: f"{case.words}, T = {case.time}"):
            records = bench.run(case, deterministic=deterministic, progress=progress, **options)
            save(records, path)
            notes += add_rows(table, records, words=case.words)
    show(table, notes, path, sweep=sweep)


@app.command("linear")
@in_words()
def linear(
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
    from lagwise.lab.bench.cases import machine, save

    where = chosen_device(device)
    kind = chosen_dtype(dtype, where)
    check_encodings(encoding, bench.DECODED if decode else list(bench.OPTIONS))
    if decode and (sweep or time or causal or quick):
        raise typer.BadParameter("it has no length to choose, and nothing beside ours", param_hint="--decode")
    facts = machine(where)
    name = "linear-decode" if decode else "linear-sweep" if sweep else "linear"
    path = out / f"{name}-{where.type}-{facts['date']}.jsonl"
    options = {"device": where, "dtype": kind, "encodings": encoding}
    options["repeats"] = repeats or (2 if sweep and where.type == "cpu" else 7)
    table = Table(*(DECODE_COLUMNS if decode else COLUMNS), title=title(facts, kind))
    notes: list[str] = []
    if decode:
        for _, progress in counted(["decoding"], str):
            records = bench.run_decode(progress=progress, **options)
            save(records, path)
            notes += add_decode_rows(table, records)
    else:
        shapes = bench.sweep_shapes(where, time) if sweep else chosen_cases(bench.SHAPES[where.type], None, time)
        for shape, progress in counted(shapes, lambda shape: f"T = {shape.time}"):
            records = bench.run(
                replace(shape, causal=causal), quick=quick, bench="linear sweep" if sweep else "linear", progress=progress,
                **options,
            )  # fmt: skip
            save(records, path)
            notes += add_rows(table, records, words=f"{bench.FEATURES}{', causal' if causal else ''}")
    show(table, notes, path, sweep=sweep)


@app.command("hf")
@in_words()
def hf(
    device: Device = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights: float32, bfloat16 or float16; bfloat16 on a GPU unless given.")
    ] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only this model, such as t5-base; may be repeated.")] = None,
    batch: Annotated[int | None, typer.Option(help="Use this number of sequences in all cases, and no goals.", min=1)] = None,
    time: Annotated[int | None, typer.Option(help="Use this length in all cases, and no goals.", min=1)] = None,
    repeats: Annotated[int | None, typer.Option(help="Turns of each contender: 7, or 3 on a CPU.", min=1)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only ours, and what ratios are taken to.")] = False,
    out: Lines = Path("results"),
) -> None:
    """Compare Hugging Face models with attn_implementation="lagwise" to the same models without.

        lagwise bench hf --quick
        lagwise bench hf --case t5-small --time 256

    T5 (t5-base; t5-base-encoder is its encoder alone) runs with "eager", "sdpa" and "lagwise". BERT with relative positions
    (bert-base-m4: relative_key_query) runs as transformers 4 computed it, with "lagwise", and for reference with "sdpa", which
    has no relative positions. On a CPU the models are smaller: t5-small, t5-small-encoder, bert-small-m4.

    The contenders have the same random weights, are first checked to compute the same, and run in turns. Training is a step
    forward and backward without an optimizer, inference a forward pass; all tokens of a batch count, in T5 those of both sides.
    The peak is that of training, with weights, gradients and batch. A ratio is to "sdpa" for T5, and to transformers 4 for BERT:
    more tokens and less memory are better. The goals hold for the shapes on a GPU. Lines that failed say why.
    """

    from lagwise.lab.bench.cases import machine, save

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
    facts = machine(where)
    path = out / f"hf-{where.type}-{facts['date']}.jsonl"
    table = Table(*HF_COLUMNS, title=f"{title(facts, kind)}, transformers {bench.versions()['transformers']}")
    notes: list[str] = []
    chosen = [each.at(batch, time) for each in cases if not case or each.model in case]
    for each, progress in counted(chosen, lambda each: f"{each.words}, T = {each.time}"):
        records = bench.run(
            each, device=where, dtype=kind, repeats=repeats or (3 if where.type == "cpu" else 7), quick=quick, progress=progress
        )
        save(records, path)
        notes += add_hf_rows(table, records, words=each.words)
    show(table, notes, path, sweep=False)


@app.command("models")
@in_words()
def models(
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
    from lagwise.lab.bench.cases import machine, save

    if attention not in ("softmax", "linear", "both"):
        raise typer.BadParameter(f"it is softmax, linear or both, not {attention!r}", param_hint="--attention")
    check_encodings(encoding, list(ENCODINGS))
    where = chosen_device(device)
    kind = chosen_dtype(dtype, where)
    facts = machine(where)
    path = out / f"models-{where.type}-{facts['date']}.jsonl"
    table = Table(*MODEL_COLUMNS, title=title(facts, kind))
    notes: list[str] = []
    shapes = [each for each in bench.shapes(where, time) if attention in ("both", each.attention)]
    for shape, progress in counted(shapes, lambda shape: f"{shape.attention}, T = {shape.time}"):
        records = bench.run(
            shape, device=where, dtype=kind, repeats=repeats or (3 if where.type == "cpu" else 7), encodings=encoding,
            progress=progress,
        )  # fmt: skip
        save(records, path)
        notes += add_model_rows(table, records)
    show(table, notes, path, sweep=False)


@app.command("loop")
@in_words()
def loop(
    task: Annotated[str, typer.Argument(help="What is trained on; `lagwise tasks` lists them.")],
    fields: Annotated[list[str] | None, typer.Argument(metavar="[FIELD=VALUE]...", help="Fields of `lagwise train`.")] = None,
    preset: Annotated[str, typer.Option(help="A preset of the task.")] = "",
    steps: Annotated[int, typer.Option(help="Steps of each turn.", min=1)] = 50,
    data: Annotated[str | None, typer.Option(help="Folder with the official files.")] = None,
    device: Device = "auto",
    workers: Annotated[int | None, typer.Option(help="Processes that make batches; 2 for a GPU, 0 for a CPU.", min=0)] = None,
    out: Lines = Path("results"),
) -> None:
    """Measure whether the input keeps up with training.

        lagwise bench loop process-50
        lagwise bench loop lm --data DIR dim=768 batch=32

    Training steps on new batches, with the reports of the loss, take turns with the same steps on one batch that lies on the
    device. The share is the speed of the first by that of the second: 1.0 is an input that costs nothing.
    """
    from lagwise.lab.bench import training as bench
    from lagwise.lab.bench.cases import save
    from lagwise.lab.loop import make_config

    record = bench.run(
        make_config(task, preset=preset, **changes_of(fields)), settings_of(device, data, task, workers=workers), steps=steps
    )
    path = out / f"loop-{chosen_device(device).type}-{record['date']}.jsonl"
    save([record], path)
    console.print(f"{record['loop_ms']:.2f} ms a step, {record['fixed_ms']:.2f} ms on a fixed batch: share {record['share']:.3f}")
    console.print(f"saved to {path}")


@app.command("plot")
@in_words()
def plot(
    file: Annotated[Path, typer.Argument(help="JSON lines of a --sweep of `lagwise bench`.", exists=True, dir_okay=False)],
    out: Annotated[Path | None, typer.Option(help="The picture; beside the lines unless given.")] = None,
) -> None:
    """Draw time and memory against the length from the saved lines of a sweep.

        lagwise bench plot results/sweep-cpu-2026-01-31.jsonl

    The lines may come from another machine. Where there are several of the same contender and length, the last one counts.
    """
    console.print(f"drawn to {draw_plot(file, out or file.with_suffix('.png'))}", soft_wrap=True)


def chosen_device(name: str) -> "torch.device":
    """Returns the device of this name, or with "auto" a GPU where there is one."""
    import torch

    check_device(name)
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def chosen_dtype(name: str | None, device: "torch.device") -> "torch.dtype":
    """Returns the type of this name; unless one is given, bfloat16 on a GPU and float32 elsewhere."""
    import torch

    if name is not None and name not in DTYPES:
        raise ValueError(f"--dtype must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, but is {name!r}")
    return getattr(torch, name or ("bfloat16" if device.type == "cuda" else "float32"))


def title(facts: dict[str, Any], dtype: "torch.dtype") -> str:
    """Returns what the numbers of a table depend on, in one line."""
    return f"{facts['device']}, {facts['threads']} threads, torch {facts['torch']}, {dtype}, {facts['date']}"


def show(table: Table, notes: list[str], path: Path, *, sweep: bool) -> None:
    """Prints a table and the notes on it, and where its numbers are; draws those of a sweep."""
    print_whole(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)
    console.print(f"saved to {path}")
    if sweep:
        try:
            console.print(f"drawn to {draw_plot(path, path.with_suffix('.png'))}")
        except ImportError as error:
            console.print(f"{error}; `lagwise bench plot {path.name}` then draws it, on any machine", markup=False)


def draw_plot(lines: Path, picture: Path) -> Path:
    """Draws the saved lines of a sweep, and returns where."""
    from lagwise.lab.bench import sweep_plot

    sweep_plot.draw(sweep_plot.read(lines), picture)
    return picture


def chosen_cases(cases: list["Case"], encodings: list[str] | None, time: int | None) -> list["Case"]:
    """Returns the cases of the given encodings, at the given length."""
    check_encodings(encodings, sorted({case.encoding for case in cases}))
    chosen = [case for case in cases if not encodings or case.encoding in encodings]
    return chosen if time is None else [case.at(time) for case in chosen]


def check_encodings(names: list[str] | None, known: list[str]) -> None:
    """Raises for encodings that are not measured."""
    for name in names or []:
        if name not in known:
            raise typer.BadParameter(f"no case of {name!r}; there are {', '.join(known)}", param_hint="--encoding")


def add_rows(table: Table, records: list[dict[str, Any]], *, words: str = "") -> list[str]:
    """Adds the lines of one case to the table, and returns what there is to say about those without numbers."""
    notes = []
    for number, record in enumerate(records):
        shape = "B{batch} H{heads} T{time} D{head_dim}".format(**record) + (" graph" if record["graph"] else "")
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


def add_hf_rows(table: Table, records: list[dict[str, Any]], *, words: str) -> list[str]:
    """Adds the lines of one model to the table, and returns what there is to say about those without numbers."""

    def ratio(number: float | None) -> str:
        return "-" if number is None else f"{number:.2f}"

    def verdict(sign: str, goal: float | None, met: bool | None) -> str:
        return "" if met is None else f"{sign} {goal:.2f} {'met' if met else 'missed'}"

    notes = []
    for number, record in enumerate(records):
        shape = "B{batch} T{time}".format(**record)
        labels = [words, shape, record["contender"]] if number == 0 else ["", "", record["contender"]]
        if "error" in record:
            table.add_row(*labels, "-", "-", "", "-", "-", "-", "-", "")
            notes.append(f"{words} {shape}, {record['contender']}: {record['error']}")
            continue
        table.add_row(
            *labels,
            f"{record['training_tokens_per_s']:,.0f}",
            ratio(record["training_speedup"]),
            verdict(">=", record["goal"], record["goal_met"]),
            f"{record['inference_tokens_per_s']:,.0f}",
            ratio(record["inference_speedup"]),
            f"{record['held_bytes'] / 2**20:,.0f}",
            ratio(record["memory_ratio"]),
            verdict("<=", record["memory_goal"], record["memory_goal_met"]),
        )
    table.add_section()
    return notes


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
