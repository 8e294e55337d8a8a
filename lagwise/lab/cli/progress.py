"""What the commands of the harness show: leagues, verdicts, fields and results."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from statistics import fmean
from typing import Any

from rich import box
from rich.table import Table

from lagwise.lab.cli.console import console, print_whole
from lagwise.lab.compare import Outcome
from lagwise.lab.config import Config
from lagwise.lab.loop import make_config, make_task
from lagwise.lab.report.comparison import SAMPLE_NOTE
from lagwise.lab.report.verdict import verdict_on
from lagwise.lab.standings import (
    Difference,
    Estimate,
    Group,
    Row,
    aligned,
    differences_of,
    estimate,
    main_metric,
    rows_of,
    shared_decimals,
    shown,
)
from lagwise.lab.tasks import Task, task_named
from lagwise.lab.tasks.files import cache_folder

CONFIDENCE_NOTE = "± is the 95 % confidence interval over the seeds; differences are taken within each seed."


def show_comparison(group: Group, baseline: str, *, wide: bool = False) -> None:
    """Prints the league of some runs that may be compared, with differences to a baseline within each seed, and a verdict.

    Args:
        group: The runs.
        baseline: The encoding that others are compared to.
        wide: Show all columns, however wide the table becomes.
    """
    rows = rows_of(group)
    table = league_table(group, rows, baseline, wide=wide)
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


def outcome_words(outcomes: Sequence[Outcome]) -> str:
    """Returns what became of the runs of one encoding, in one line."""
    config = outcomes[0].config
    metric, _ = main_metric(config)
    results = [result for outcome in outcomes if outcome.error is None and (result := outcome.run.result) is not None]
    failed = len(outcomes) - len(results)
    words = [f"{failed} of {len(outcomes)} runs failed"] if failed else []
    if results:
        score = estimate([result["test"][metric] for result in results])
        seconds = fmean(result["seconds"] for result in results)
        words.insert(0, f"test {metric} {score}, {seconds:.1f} s a run")
    return f"{config.encoding:<12} {', '.join(words)}"


def league_table(group: Group, rows: Sequence[Row], baseline: str, *, wide: bool) -> Table:
    """Returns the league: quality, difference, runs and time, and with `wide` everything else that is known."""
    differences = {difference.encoding: difference for difference in differences_of(group, baseline)}
    columns = {
        "encoding": [row.encoding for row in rows],
        f"test {group.metric}": aligned([row.test for row in rows]),
        f"minus {baseline}": beside([differences.get(row.encoding) for row in rows], [row.test for row in rows]),
        "runs": [str(len(row.seeds)) for row in rows],
        **{field: [str(row.options[field]) for row in rows] for field in group.tune},
        "seconds": [f"{row.seconds:.1f}" for row in rows],
    }
    if wide:
        columns |= {
            f"validation {group.metric}": aligned([row.validation for row in rows]),
            "its parameters": [f"{row.parameters:,}" for row in rows],
            "tokens/s": ["-" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}" for row in rows],
            "peak MiB": ["-" if row.peak_memory is None else f"{row.peak_memory / 2**20:.1f}" for row in rows],
        }
    return filled(columns, title=group.title)


def beside(differences: Sequence[Difference | None], scores: Sequence[Estimate]) -> list[str]:
    """Returns a column of differences, which is empty where there is none; without intervals it is as exact as the scores."""
    known = [each.estimate for each in differences if each is not None and each.estimate is not None]
    alone = all(each.half_width is None for each in known)
    words = iter(aligned(known, most=shared_decimals(scores)) if alone else aligned(known))
    return ["" if each is None or each.estimate is None else next(words) for each in differences]


def show_lengths(group: Group, rows: Sequence[Row]) -> None:
    """Prints the metric at other lengths, if any were asked for, and why an encoding refuses one."""
    lengths = sorted({length for row in rows for length in row.lengths})
    if not lengths:
        return
    columns = {"encoding": [row.encoding for row in rows], "its own length": aligned([row.test for row in rows])}
    refused: list[str] = []
    for length in lengths:
        found = [row.lengths.get(length, "it was not asked for") for row in rows]
        words = iter(aligned([each for each in found if isinstance(each, Estimate)]))
        columns[f"at {length:,}"] = [next(words) if isinstance(each, Estimate) else "refused" for each in found]
        refused += [
            f"{row.encoding} at {length:,}: {each}" for row, each in zip(rows, found, strict=True) if isinstance(each, str)
        ]
    console.print(filled(columns, title=f"test {group.metric} at other lengths"))
    for words in refused:
        console.print(words, markup=False, highlight=False)
    console.print()


def filled(columns: dict[str, list[str]], *, title: str) -> Table:
    """Returns a table of columns; the first one names the rows, and all others are numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def show_tasks(tasks: Mapping[str, type[Task]], *, families: bool = False) -> None:
    """Prints a line for each task; with `families`, one for all of those whose names begin alike."""
    grid = Table.grid(padding=(0, 2))
    rows: dict[str, list[str]] = {}
    for name, kind in tasks.items():
        family, slash, member = name.partition("/")
        if families and slash:
            rows.setdefault(f"{family}/...", []).append(member)
        else:
            rows[name] = [kind.facts.words]
    for name, words in rows.items():
        grid.add_row(name, ", ".join(words))
    console.print(grid, highlight=False)


def show_task(name: str) -> None:
    """Prints all that is known about a task, with a command that trains on it."""
    kind = task_named(name)
    facts = kind.facts
    config = make_config(name)
    metric, higher_is_better = main_metric(config)
    known = {
        "": " ".join((kind.__doc__ or "").split("\n\n")[0].split()),
        "metric": f"{metric}, {'higher' if higher_is_better else 'lower'} is better",
        "data": facts.source,
        "size": facts.size,
        "--data DIR": facts.files,
        "--data hub": facts.hub and f"downloads {facts.hub}",
        "cache": facts.files and f"{cache_folder()}, or the folder LAGWISE_CACHE, keeps what is made of the data once",
        "licence": facts.licence,
        "published": facts.published,
        "presets": ", ".join(kind.presets),
        "fields": ", ".join(f"task.{field.name}={shown(field.default)}" for field in fields(kind.Options)),
    }
    grid = Table.grid(padding=(0, 2))
    grid.add_row(name, facts.words, style="bold")
    for label, words in known.items():
        if words:
            grid.add_row(label, words)
    console.print(grid, markup=False, highlight=False)
    data = " --data DIR" if make_task(config, None).is_sample else ""
    console.print(f"\n  lagwise compare --task {name}{data}\n  lagwise train {name} --fields", markup=False, highlight=False)


def show_config(config: Config) -> None:
    """Prints all fields."""
    table = Table("field", "value")
    for name, value in config.to_json().items():
        table.add_row(name, str(value))
    console.print(table)


def show_result(config: Config, result: dict[str, Any]) -> None:
    """Prints the final numbers of a run."""
    names = [*(name for name in result["test"] if name != "loss"), "loss"]
    table = Table("split", "length", *names, title=f"{config.task}, {config.encoding}")
    rows = [(split, "its own", result[split]) for split in ("validation", "test")]
    rows += [("test", length, found) for length, found in result["lengths"].items()]
    for split, length, found in rows:
        table.add_row(split, length, *(f"{found[name]:.4f}" if name in found else found.get("refused", "-") for name in names))
    console.print(table)
    words = [
        f"{result['parameters']:,} parameters, {result['encoding_parameters']:,} of the encoding",
        f"{result['seconds']:.1f} s",
    ]
    words += [f"{result['tokens_per_second']:,.0f} tokens/s"] if result["tokens_per_second"] else []
    console.print(", ".join(words))
    if result["sample"]:
        console.print(SAMPLE_NOTE, markup=False)
