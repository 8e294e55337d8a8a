"""`lagwise bench compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from lagwise.lab.cli.console import console, in_words, print_whole

if TYPE_CHECKING:
    from lagwise.lab.bench.changes import Change

COMPARE_COLUMNS = ["case", "shape", "contender", "what", "old", "new", "new/old", "old ratio", "new ratio", "new/old", ""]


@in_words()
def command(
    old: Annotated[Path, typer.Argument(help="JSON lines of `lagwise bench`, from before.", exists=True, dir_okay=False)],
    new: Annotated[Path, typer.Argument(help="JSON lines of `lagwise bench`, from after.", exists=True, dir_okay=False)],
    threshold: Annotated[float, typer.Option(help="Mark changes beyond so many per cent.", min=0.0)] = 5.0,
    changed: Annotated[bool, typer.Option("--changed", help="Show only what is marked.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if something of ours became slower or fails.")] = False,
) -> None:
    """Say what became faster or slower between two runs of a bench.

        lagwise bench compare before.jsonl after.jsonl
        lagwise bench compare before.jsonl after.jsonl --strict

    Numbers of the same case and contender stand side by side, with those of the plain contender of their own run divided out
    (the ratios). The ratios decide what is marked, and the times where there are none. Where a file has several lines for the
    same case and contender, the last one counts.
    """
    from lagwise.lab.bench import changes as bench

    before, after = bench.read_lines(old), bench.read_lines(new)
    found = bench.compare_lines(before, after)
    share = threshold / 100.0
    for name, lines in (("old", before), ("new", after)):
        console.print(f"{name}: {bench.origins(lines.values())}", highlight=False)
    table = Table(*COMPARE_COLUMNS)
    for change in found.changes:
        if not changed or change.verdict(share):
            table.add_row(*bench.labels_of(change.line), change.what, *cells(change), change.verdict(share))
    if table.rows:
        print_whole(table)
    apart = {
        "fails now": found.broken, "works now": found.mended, f"only in {old}": found.old_only, f"only in {new}": found.new_only,
    }  # fmt: skip
    for words, lines in apart.items():
        for line in lines:
            error = f": {line['error']}" if "error" in line else ""
            console.print(f"{words}: {', '.join(bench.labels_of(line))}{error}", highlight=False, soft_wrap=True)
    verdicts = [change.verdict(share) for change in found.changes]
    console.print(
        f"{len(verdicts)} numbers compared: {verdicts.count('faster')} faster, {verdicts.count('slower')} slower by more than "
        f"{threshold:g} %",
        highlight=False,
    )
    if strict and found.got_worse(share):
        raise typer.Exit(1)


def cells(change: "Change") -> list[str]:
    """Returns the numbers of a change and their quotient, and the same of their ratios."""
    ratios = ["-", "-", "-"]
    if change.ratios is not None:
        ratios = [f"{number:.2f}" for number in (*change.ratios, change.ratio_change)]
    return [f"{change.numbers[0]:.4g}", f"{change.numbers[1]:.4g}", f"{change.number_change:.2f}", *ratios]
