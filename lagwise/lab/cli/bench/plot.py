"""`lagwise bench plot`."""

from pathlib import Path
from typing import Annotated

import typer

from lagwise.lab.cli.bench.screen import draw_plot
from lagwise.lab.cli.console import console, in_words


@in_words()
def command(
    file: Annotated[Path, typer.Argument(help="JSON lines of a --sweep of `lagwise bench`.", exists=True, dir_okay=False)],
    out: Annotated[Path | None, typer.Option(help="The picture; beside the lines unless given.")] = None,
) -> None:
    """Draw time, time by that without positions, and memory against the length from the saved lines of a sweep.

        lagwise bench plot results/sweep-cpu-2026-01-31.jsonl

    The lines may come from another machine. Where there are several of the same contender and length, the last one counts.
    """
    console.print(f"drawn to {draw_plot(file, out or file.with_suffix('.png'))}", soft_wrap=True)
