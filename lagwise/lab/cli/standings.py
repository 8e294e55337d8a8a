"""Standings on the screen, with a verdict."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from lagwise.lab.cli.console import console, print_whole
from lagwise.lab.estimates import Estimate, align, shared_decimals
from lagwise.lab.grouping import Group
from lagwise.lab.report.verdict import verdict_on
from lagwise.lab.standings import Difference, Row, differences_of, rows_of

CONFIDENCE_NOTE = "± is the 95 % confidence interval over the seeds; differences are taken within each seed."


def show_comparison(group: Group, baseline: str, *, wide: bool = False) -> None:
    """Prints the standings of some runs that may be compared, with differences to a baseline within each seed, and a verdict.

    Args:
        group: The runs.
        baseline: The encoding that others are compared to.
        wide: Show all columns, however wide the table becomes.
    """
    rows = rows_of(group)
    table = standings_table(group, rows, baseline, wide=wide)
    if wide:
        print_whole(table, console)
    else:
        console.print(table)
    console.print()
    show_lengths(group, rows)
    if any(len(row.seeds) > 1 for row in rows):
        console.print(CONFIDENCE_NOTE, highlight=False)
    console.print()
    console.print(verdict_on(group), style="bold", markup=False, highlight=False)


def standings_table(group: Group, rows: Sequence[Row], baseline: str, *, wide: bool) -> Table:
    """Returns the standings: quality, difference, runs and time, and with `wide` everything else that is known."""
    differences = {difference.encoding: difference for difference in differences_of(group, baseline)}
    columns = {
        "encoding": [row.encoding for row in rows],
        f"test {group.metric}": align([row.test for row in rows]),
        f"minus {baseline}": difference_column([differences.get(row.encoding) for row in rows], [row.test for row in rows]),
        "runs": [str(len(row.seeds)) for row in rows],
        **{field: [str(row.options[field]) for row in rows] for field in group.tune},
        "seconds": [f"{row.seconds:.1f}" for row in rows],
    }
    if wide:
        columns |= {
            f"validation {group.metric}": align([row.validation for row in rows]),
            "its parameters": [f"{row.parameters:,}" for row in rows],
            "tokens/s": ["-" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}" for row in rows],
            "peak MiB": ["-" if row.peak_memory is None else f"{row.peak_memory / 2**20:.1f}" for row in rows],
        }
    return make_table(columns, title=group.title)


def difference_column(differences: Sequence[Difference | None], scores: Sequence[Estimate]) -> list[str]:
    """Returns a column of differences, which is empty where there is none; without intervals it is as exact as the scores."""
    known = [each.estimate for each in differences if each is not None and each.estimate is not None]
    alone = all(each.half_width is None for each in known)
    words = iter(align(known, most=shared_decimals(scores)) if alone else align(known))
    return ["" if each is None or each.estimate is None else next(words) for each in differences]


def show_lengths(group: Group, rows: Sequence[Row]) -> None:
    """Prints the metric at other lengths, if any were asked for, and why an encoding refuses one."""
    lengths = sorted({length for row in rows for length in row.lengths})
    if not lengths:
        return
    columns = {"encoding": [row.encoding for row in rows], "its own length": align([row.test for row in rows])}
    refused: list[str] = []
    for length in lengths:
        found = [row.lengths.get(length, "it was not asked for") for row in rows]
        words = iter(align([each for each in found if isinstance(each, Estimate)]))
        columns[f"at {length:,}"] = [next(words) if isinstance(each, Estimate) else "refused" for each in found]
        refused += [
            f"{row.encoding} at {length:,}: {each}" for row, each in zip(rows, found, strict=True) if isinstance(each, str)
        ]
    console.print(make_table(columns, title=f"test {group.metric} at other lengths"))
    for words in refused:
        console.print(words, markup=False, highlight=False)
    console.print()


def make_table(columns: dict[str, list[str]], *, title: str) -> Table:
    """Returns a table of columns; the first one names the rows, and all others are numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table
