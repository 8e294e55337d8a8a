"""The command line: `lagwise`, or `python -m lagwise`."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError as error:
    raise SystemExit(f"the command line needs {error.name}: pip install 'lagwise[cli]'") from error

if TYPE_CHECKING:
    from lagwise.bench.attention import Case

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Relative positions for attention: list encodings, measure their speed and memory.",
)
bench_app = typer.Typer(no_args_is_help=True, help="Measure speed and memory beside what people run without us.")
app.add_typer(bench_app, name="bench")
# A table that is piped to a file keeps its columns.
console = Console(width=None if sys.stdout.isatty() else 160)


@app.command()
def encodings() -> None:
    """List all encodings, with the options that each takes.

    Every one can be made with lagwise.make(NAME, heads=..., head_dim=..., ...). Options without a value must be given; heads,
    head_dim, dim and max_lag may be given to any encoding, which takes those that it knows.
    """
    import inspect

    from lagwise.encodings import ENCODINGS, options_of

    table = Table("name", "what it does", "options")
    for name, kind in ENCODINGS.items():
        options = [
            option if default is inspect.Parameter.empty else f"{option}={default}"
            for option, default in options_of(name).items()
        ]
        first = (kind.__doc__ or "").strip().splitlines()[0]
        table.add_row(name, first, ", ".join(options))
    console.print(table)


@bench_app.command("attention")
def bench_attention(
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; bfloat16 on a GPU unless given.")] = None,
    encoding: Annotated[list[str] | None, typer.Option(help="Only cases of this encoding; may be repeated.")] = None,
    time: Annotated[int | None, typer.Option(help="Use this length in all cases; in a sweep, stop there.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Turns of each contender: 7, or 2 in a sweep on a CPU.")] = None,
    impl: Annotated[str, typer.Option(help="Who computes: auto, or the name of an implementation.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Only plain attention and ours.")] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Also ours under torch.use_deterministic_algorithms(True).")
    ] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="Measure against the length instead, and draw a plot.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the numbers, one JSON line each.")] = Path("results"),
) -> None:
    """Compare attention with encodings to attention without.

    For each case, plain attention, ours, and where there is one the code that people use today run in turns on the
    same tensors. The ratio is time by plain attention's time in the same turn (cuDNN's on a GPU): 1.0 would be positions
    for free. Training is forward and backward with the gradient of the learned tables, and the peak is its memory with all
    inputs. The median of the turns counts.

    On a GPU the cases at T = 512 are CUDA graphs of all contenders. Lines that failed or were left out say why.
    """
    if deterministic:
        # cuBLAS repeats its results only with a workspace of its own, which it reads before its first product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    from lagwise.bench import attention as bench

    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    kind = getattr(torch, dtype) if dtype else (torch.bfloat16 if where.type == "cuda" else torch.float32)
    if sweep and (encoding or deterministic):
        raise typer.BadParameter("it measures encodings of its own, and no deterministic mode", param_hint="--sweep")
    turns = repeats or (2 if sweep and where.type == "cpu" else 7)
    facts = bench.machine(where)
    path = out / f"{'sweep' if sweep else 'attention'}-{where.type}-{facts['date']}.jsonl"
    table = Table(
        "case", "shape", "contender", "forward ms", "ratio", "training ms", "ratio", "goal", "peak MiB",
        title=f"{facts['device']}, {facts['threads']} threads, torch {facts['torch']}, {kind}, {facts['date']}",
    )  # fmt: skip
    options = {"device": where, "dtype": kind, "repeats": turns, "impl": impl, "quick": quick}
    notes: list[str] = []
    with console.status("warming up") as status:
        if sweep:
            for length in (length for length in bench.SWEEP_TIMES[where.type] if time is None or length <= time):
                records = bench.run_sweep(
                    length, progress=lambda name, length=length: status.update(f"T = {length}: {name}"), **options
                )
                bench.save(records, path)
                notes += add_rows(table, records)
        else:
            for case in chosen_cases(bench.CUDA_CASES if where.type == "cuda" else bench.CPU_CASES, encoding, time):
                records = bench.run(
                    case, deterministic=deterministic,
                    progress=lambda name, case=case: status.update(f"{case.words}: {name}"), **options,
                )  # fmt: skip
                bench.save(records, path)
                notes += add_rows(table, records, words=case.words)
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)
    console.print(f"saved to {path}")
    if sweep:
        try:
            console.print(f"drawn to {draw_plot(path, path.with_suffix('.png'))}")
        except ImportError as error:
            console.print(f"{error}; `lagwise bench plot {path.name}` then draws it, on any machine", markup=False)


@bench_app.command("plot")
def bench_plot(
    file: Annotated[Path, typer.Argument(help="JSON lines of `lagwise bench attention --sweep`.", exists=True, dir_okay=False)],
    out: Annotated[Path | None, typer.Option(help="The picture; beside the lines unless given.")] = None,
) -> None:
    """Draw time and memory against the length from the saved lines of a sweep.

    The lines may come from another machine. Where there are several of the same contender and length, the last one counts.
    """
    try:
        console.print(f"drawn to {draw_plot(file, out or file.with_suffix('.png'))}")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="FILE") from error
    except ImportError as error:
        console.print(str(error), markup=False)
        raise typer.Exit(1) from error


def draw_plot(lines: Path, picture: Path) -> Path:
    """Draws the saved lines of a sweep, and returns where."""
    from lagwise.bench import plot

    plot.draw(plot.read(lines), picture)
    return picture


def chosen_cases(cases: list["Case"], encodings: list[str] | None, time: int | None) -> list["Case"]:
    """Returns the cases of the given encodings, at the given length."""
    known = sorted({case.encoding for case in cases})
    for name in encodings or []:
        if name not in known:
            raise typer.BadParameter(f"no case of {name!r}; there are {', '.join(known)}", param_hint="--encoding")
    chosen = [case for case in cases if not encodings or case.encoding in encodings]
    return chosen if time is None else [case.at(time) for case in chosen]


def add_rows(table: Table, records: list[dict[str, Any]], *, words: str = "") -> list[str]:
    """Adds the lines of one case to the table, and returns what there is to say about those without numbers."""
    notes = []
    for number, record in enumerate(records):
        shape = "B{batch} H{heads} T{time} D{head_dim}".format(**record) + (" graph" if record["graph"] else "")
        labels = [words, shape] if number == 0 else ["", ""]
        impl = f" ({record['impl']})" if record.get("impl") else ""
        tiles = " (cut tiles)" if isinstance(record.get("tiles"), dict) else ""
        if "error" in record:
            table.add_row(*labels, record["contender"] + impl + tiles, "-", "-", "-", "-", "", "-")
            notes.append(f"{words} {shape}, {record['contender']}: {record['error']}".strip())
            continue
        table.add_row(
            *labels,
            record["contender"] + impl + tiles,
            *(
                "-" if record[name] is None else f"{record[name]:.{digits}f}"
                for name, digits in (("forward_ms", 3), ("forward_ratio", 2), ("training_ms", 3), ("training_ratio", 2))
            ),
            f"{record['goal']:.2f}" if record["goal"] and record["contender"] == "lagwise" else "",
            f"{record['held_bytes'] / 2**20:.0f}",
        )
    table.add_section()
    return notes
