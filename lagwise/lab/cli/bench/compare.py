"""`lagwise bench compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from lagwise.lab.cli.console import console, in_words, print_whole

if TYPE_CHECKING:
    from lagwise.lab.bench.changes import Change
    from lagwise.lab.json_files import Line

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
    same case and contender, the last one counts. What only one file has is named by its shape, its cases and its contenders.
    """
    from lagwise.lab.bench import changes as bench

    before, after = bench.read_lines(old), bench.read_lines(new)
    found = bench.compare_lines(before, after)
    share = threshold / 100.0
    for name, lines in (("old", before), ("new", after)):
        tell(f"{name}: {bench.origins(lines.values())}")
    table = Table(*COMPARE_COLUMNS)
    for change in found.changes:
        if not changed or change.verdict(share):
            table.add_row(*bench.labels_of(change.line), change.what, *cells(change), change.verdict(share))
    if table.rows:
        print_whole(table)
    for words, lines in (("fails now", found.broken), ("works now", found.mended)):
        for line in lines:
            tell(f"{words}: {', '.join(bench.labels_of(line))}{error_of(line)}")
    for name, lines in (("old", found.old_only), ("new", found.new_only)):
        for group in bench.groups_of(line for line in lines if "error" not in line):
            tell(f"only in {name}: {group}")
        for line in lines:
            if "error" in line:
                tell(f"only in {name}: {', '.join(bench.labels_of(line))}{error_of(line)}")
    if number := bench.otherwise_graphed(found):
        tell(f"{number} of these lines are in both files, but in CUDA graphs in only one of them: their times are not compared")
    for whose, ours in (("ours", True), ("others", False)):
        verdicts = [change.verdict(share) for change in found.changes if bench.is_ours(change.line) == ours]
        faster, slower = verdicts.count("faster"), verdicts.count("slower")
        tell(f"{whose}: {len(verdicts)} numbers compared, {faster} faster and {slower} slower by more than {threshold:g} %")
    if strict and found.got_worse(share):
        raise typer.Exit(1)


def tell(words: str) -> None:
    """Prints a line as it is, however long."""
    console.print(words, markup=False, highlight=False, soft_wrap=True)


def error_of(line: "Line") -> str:
    """Returns the error of a line, if it has one."""
    return f": {line['error']}" if "error" in line else ""


def cells(change: "Change") -> list[str]:
    """Returns the numbers of a change and their quotient, and the same of their ratios."""
    ratios = ["-", "-", "-"]
    if change.ratios is not None:
        ratios = [f"{number:.2f}" for number in (*change.ratios, change.ratio_change)]
    return [f"{change.numbers[0]:.4g}", f"{change.numbers[1]:.4g}", f"{change.number_change:.2f}", *ratios]
