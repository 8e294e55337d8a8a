"""The command line: `lagwise`, or `python -m lagwise`."""

import sys
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError as error:
    raise SystemExit(f"the command line needs {error.name}: pip install 'lagwise[cli]'") from error

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
    time: Annotated[int | None, typer.Option(help="Use this length in all cases.")] = None,
    repeats: Annotated[int, typer.Option(help="How often each contender runs; the median counts.")] = 7,
    impl: Annotated[str, typer.Option(help="Who computes: auto, dense, blockwise or split.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder for the numbers, one JSON line each.")] = Path("results"),
) -> None:
    """Compare attention with encodings to attention without.

    For each case, plain attention, ours, and where there is one the code that people use today run in turns on the
    same tensors. The ratio is time by plain attention's time in the same turn: 1.0 would be positions for free.
    Training is forward and backward with the gradient of the learned tables.
    """
    import dataclasses

    import torch

    from lagwise.bench import attention as bench

    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    kind = getattr(torch, dtype) if dtype else (torch.bfloat16 if where.type == "cuda" else torch.float32)
    cases = bench.CUDA_CASES if where.type == "cuda" else bench.CPU_CASES
    if encoding:
        known = sorted({case.encoding for case in cases})
        for name in encoding:
            if name not in known:
                raise typer.BadParameter(f"no case of {name!r}; there are {', '.join(known)}", param_hint="--encoding")
        cases = [case for case in cases if case.encoding in encoding]
    if time is not None:
        cases = [dataclasses.replace(case, time=time, goal=None) for case in cases]
    facts = bench.machine(where)
    path = out / f"attention-{where.type}-{facts['date']}.jsonl"
    table = Table(
        "case", "shape", "contender", "forward ms", "ratio", "training ms", "ratio", "goal", "peak MiB",
        title=f"{facts['device']}, {facts['threads']} threads, torch {facts['torch']}, {kind}, {facts['date']}",
    )  # fmt: skip
    with console.status("warming up") as status:
        for case in cases:
            records = bench.run(
                case, device=where, dtype=kind, repeats=repeats, impl=impl,
                progress=lambda name, case=case: status.update(f"{case.words}: {name}"),
            )  # fmt: skip
            bench.save(records, path)
            for number, record in enumerate(records):
                table.add_row(
                    case.words if number == 0 else "",
                    f"B{case.batch} H{case.heads} T{case.time} D{case.head_dim}" if number == 0 else "",
                    record["contender"] + (f" ({record['impl']})" if record["impl"] else ""),
                    f"{record['forward_ms']:.2f}", f"{record['forward_ratio']:.2f}",
                    f"{record['training_ms']:.2f}", f"{record['training_ratio']:.2f}",
                    f"{case.goal:.2f}" if case.goal and record["contender"] == "lagwise" else "",
                    f"{record['peak_bytes'] / 2**20:.0f}",
                )  # fmt: skip
            table.add_section()
    console.print(table)
    console.print(f"saved to {path}")
