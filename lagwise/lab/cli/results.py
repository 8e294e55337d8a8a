"""`lagwise results`."""

from pathlib import Path
from typing import Annotated

import typer

from lagwise.lab.cli.console import console, failed, in_words


@in_words()
def command(
    document: Annotated[Path, typer.Argument(help="A page with marks.", exists=True, dir_okay=False)],
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a table is not what the lines say.")] = False,
    root: Annotated[Path, typer.Option(help="The folder that files of marks are in.", file_okay=False)] = Path("."),
) -> None:
    """Write the tables and figures of a page anew, from lines of results.

        lagwise results docs/log/paper1.md
        lagwise results docs/log/paper1.md --check

    A mark in the page says what stands there, up to its end:

        <!-- results: standings results/reber.jsonl --percent -->
        <!-- end -->

    `standings`, `overview` (tasks side by side) and `positions` (losses within and beyond the length of the training) are made of
    runs that `lagwise compare --save` wrote: --baseline NAME names the encoding that others are compared to, --also METRIC adds
    another metric to standings. `ablation` is made of the lines of `lagwise ablate`, `styles` of those of `lagwise styles`, and
    `models` of those of `lagwise bench models`.
    """
    from lagwise.lab.report import tables

    text = tables.fill_document(document.resolve(), root.resolve(), figures=not check)
    changed = text != document.read_text()
    if check and changed:
        raise failed(f"{document} does not say what its lines say: run lagwise results", 1)
    if changed:
        document.write_text(text)
    console.print(f"{document} {'is written anew' if changed else 'says what its lines say'}")
