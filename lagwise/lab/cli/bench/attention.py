"""`lagwise bench attention`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from lagwise.lab.cli.bench.screen import COLUMNS, Shape, Sheet, add_rows, chosen_cases
from lagwise.lab.cli.console import in_words
from lagwise.lab.cli.options import Device, Lines, chosen_device, chosen_dtype
from lagwise.lab.cli.progress import count_cases


@in_words()
def command(
    device: Device = "auto",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; bfloat16 on a GPU unless given.")] = None,
    encoding: Annotated[list[str] | None, typer.Option(help="Only cases of this encoding; may be repeated.")] = None,
    shape: Shape = None,
    time: Annotated[int | None, typer.Option(help="Use this length in all cases; in a sweep, stop there.", min=1)] = None,
    repeats: Annotated[int | None, typer.Option(help="Turns of each contender: 7, or 2 in a sweep on a CPU.", min=1)] = None,
    impl: Annotated[str, typer.Option(help="Who computes: auto, or the name of an implementation.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Only plain attention and ours.")] = False,
    eager: Annotated[
        bool, typer.Option("--eager", help="No CUDA graphs, and ratios to torch's attention as it is called.")
    ] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Also ours under torch.use_deterministic_algorithms(True).")
    ] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="Measure against the length instead, and draw a plot.")] = False,
    out: Lines = Path("results"),
) -> None:
    """Compare attention with encodings to attention without.

        lagwise bench attention --quick
        lagwise bench attention --encoding t5 --time 1024
        lagwise bench attention --shape "T2048 causal" --eager
        lagwise bench attention --sweep --device cuda

    For each case, plain attention, ours, and where there is one the code that people use today run in turns on the
    same tensors. The ratio is time by plain attention's time in the same turn (cuDNN's on a GPU): 1.0 would be positions
    for free. Training is forward and backward with the gradient of the learned tables, and the peak is its memory with all
    inputs. The median of the turns counts.

    On a GPU short cases are CUDA graphs of all contenders. Those marked eager are calls as people make them, beside torch's
    attention. Sequences of random lengths, padded (lengths) or packed (cu_seqlens), run beside the vendor's kernel for them. A
    sweep goes from T = 128 to 131,072 on a GPU, in CUDA graphs up to 2,048. Lines that failed or were left out say why.
    """
    if deterministic:
        # cuBLAS repeats its results only with a workspace of its own, which it reads before its first product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    from lagwise.errors import require_choice
    from lagwise.lab.bench import softmax as bench
    from lagwise.ops.support import IMPLEMENTATIONS

    require_choice("--impl", impl, ("auto", *IMPLEMENTATIONS))
    where = chosen_device(device)
    kind = chosen_dtype(dtype, where)
    if sweep and (encoding or shape or eager or deterministic):
        raise typer.BadParameter("it measures encodings and shapes of its own, and no other mode", param_hint="--sweep")
    turns = repeats or (2 if sweep and where.type == "cpu" else 7)
    sheet = Sheet("sweep" if sweep else "attention", COLUMNS, out, where, kind)
    options = {"device": where, "dtype": kind, "repeats": turns, "impl": impl, "quick": quick}
    if sweep:
        lengths = [length for length in bench.SWEEP_TIMES[where.type] if time is None or length <= time]
        for length, progress in count_cases(lengths, lambda length: f"T = {length}"):
            sheet.add(bench.measure_sweep(length, progress=progress, **options), add_rows)
    else:
        cases = chosen_cases(bench.CUDA_CASES if where.type == "cuda" else bench.CPU_CASES, encoding, time, shape)
        if eager:
            cases = [case.called_eagerly() for case in cases]
        for case, progress in count_cases(cases, lambda case: f"{case.words}, {case.shape}"):
            records = bench.measure_attention(case, deterministic=deterministic, progress=progress, **options)
            sheet.add(records, add_rows, words=case.words)
    sheet.show(sweep=sweep)
