"""`lagwise warmup`."""

from typing import Annotated, Any

import typer

from lagwise.extras import install_command
from lagwise.lab.cli.console import console, failed, in_words
from lagwise.lab.cli.options import chosen_dtype
from lagwise.lab.cli.progress import count_done


@in_words()
def command(
    model: Annotated[
        str | None, typer.Argument(help="A Hugging Face model, a folder or a name: its config tells what it needs.")
    ] = None,
    encoding: Annotated[
        str | None, typer.Option(help="An encoding by name; beside a model, the one that it is converted to.")
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads; without a model.", min=1)] = None,
    key_heads: Annotated[int | None, typer.Option(help="Key heads; as many as query heads unless given.", min=1)] = None,
    head_dim: Annotated[int | None, typer.Option(help="Width of a head; without a model.", min=1)] = None,
    max_lag: Annotated[int | None, typer.Option(help="Where the encoding's table ends; its own unless given.", min=0)] = None,
    time: Annotated[list[int] | None, typer.Option(help="A length; may be repeated. 512 and 509 unless given.", min=1)] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="float32, bfloat16 or float16; may be repeated. bfloat16 unless given.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences of a call.", min=1)] = 2,
    causal: Annotated[bool, typer.Option("--causal", help="Queries see no later key; without a model.")] = False,
    padded: Annotated[bool, typer.Option("--padded", help="Calls with lengths too; a model always has them.")] = False,
    packed: Annotated[bool, typer.Option("--packed", help="Packed sequences too; without a model.")] = False,
    dropout: Annotated[float, typer.Option(help="Of attention weights; a model has its own.", min=0.0, max=1.0)] = 0.0,
    inference: Annotated[bool, typer.Option("--inference", help="No gradients; decoding, where calls are causal.")] = False,
    autocast: Annotated[
        bool | None, typer.Option(help="Weights are float32, and autocast casts; in training unless given.", show_default=False)
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Calls at the same time; 8 unless given.", min=1)] = None,
) -> None:
    """Make the GPU kernels that a model will need, so that its first step does not wait for them.

        lagwise warmup google-t5/t5-base
        lagwise warmup ./my-bert --encoding huang4 --time 512
        lagwise warmup --encoding at5 --heads 12 --head-dim 64

    Triton keeps compiled kernels in the folder TRITON_CACHE_DIR (~/.triton/cache unless that variable is set), where programs
    find them. They are made for this GPU and these versions. Of a model a copy with two layers and random weights takes a step
    for each length and type, with padding and without.
    """
    import torch

    import lagwise
    from lagwise.warming import TIMES

    dtypes = [chosen_dtype(name, torch.device("cuda")) for name in dtype or [None]]
    options = {} if max_lag is None else {"max_lag": max_lag}
    common: dict[str, Any] = dict(
        times=time or TIMES, dtypes=dtypes, batch=batch, training=not inference, autocast=autocast, jobs=jobs, **options
    )  # fmt: skip
    alone = {"--heads": heads, "--head-dim": head_dim}
    if model is not None:
        more = alone | {"--key-heads": key_heads, "--causal": causal, "--packed": packed, "--dropout": dropout}
        if given := [name for name, value in more.items() if value]:
            raise ValueError(f"{', '.join(given)} must be left out with a model, whose config tells them")
        try:
            from lagwise.hf import warmup
        except ModuleNotFoundError as error:
            raise failed(f"warmup of a model needs {error.name}: {install_command('hf')}", 1) from error
        with count_done() as watch:
            done = warmup(model, encoding, watch=watch, **common)
    else:
        if missing := [name for name, value in {"--encoding": encoding, **alone}.items() if value is None]:
            raise ValueError(f"{', '.join(missing)} must be given without a model")
        assert encoding is not None and heads is not None and head_dim is not None
        with count_done() as watch:
            done = lagwise.warmup(
                encoding, heads=heads, head_dim=head_dim, key_heads=key_heads, causal=causal, padded=padded, packed=packed,
                dropout=dropout, watch=watch, **common,
            )  # fmt: skip
    console.print(f"{done.made} kernels made, {done.found} found on disk, in {done.seconds:.1f} s", highlight=False)
