"""`lagwise repeat`."""

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from lagwise.lab.cli.console import console, in_words
from lagwise.lab.cli.options import Data, Device, Jobs, Out, Workers, settings_of
from lagwise.lab.cli.progress import run_with_progress


@in_words()
def command(
    file: Annotated[Path, typer.Argument(help="Lines of runs, as in results/.", exists=True, dir_okay=False)],
    encodings: Annotated[str | None, typer.Option(help="Only these, with commas between.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Only the first so many seeds of each.", min=1)] = None,
    data: Data = None,
    device: Device = "auto",
    jobs: Jobs = None,
    workers: Workers = None,
    out: Out = Path("runs"),
) -> None:
    """Train published runs once more, with all their fields and seeds, and show the old and the new numbers side by side.

        lagwise repeat results/process-50.jsonl --seeds 1
        lagwise repeat results/lra-text.jsonl --data IMDB

    On a CPU of the same kind and with the same versions the numbers are the same; elsewhere rounding differs, and they differ
    too. Runs that start from others find them where these were repeated with the same --out.
    """
    from lagwise.lab import records
    from lagwise.lab.experiment import main_metric
    from lagwise.lab.grouping import data_of, model_difference, select_runs
    from lagwise.lab.run import with_data_of

    notes: list[str] = []
    readable = records.read_runs(file, notes.append)
    if notes and not readable:
        raise ValueError("\n".join(notes))
    published = select_runs(readable, None if encodings is None else encodings.split(","), seeds)
    if len(kinds := sorted({data_of(run) for run in published})) > 1:
        raise ValueError(
            f"the runs of {file} must have one kind of data, but have {', '.join(kinds)}: give each a file of its own"
        )
    settings = with_data_of(published[0], settings_of(device, data, save_every=0, workers=workers))
    outcomes = run_with_progress([run.config for run in published], out, settings, jobs, again=False)
    table = Table("task", "encoding", "seed", "metric", "published", "now", "difference", title=str(file))
    for before, outcome in zip(published, outcomes, strict=True):
        config, (metric, _) = before.config, main_metric(before.config)
        old, new = (math.nan if result is None else result["test"][metric] for result in (before.result, outcome.run.result))
        words = [f"{new:.4f}", f"{new - old:+.4f}"] if outcome.error is None else [outcome.error, ""]
        table.add_row(config.task, config.encoding, str(config.seed), metric, f"{old:.4f}", *words)
        if outcome.error is None and (difference := model_difference([before, outcome.run])):
            console.print(f"warning: this is not the published model: {difference}", markup=False)
    console.print(table)
    for note in notes:
        console.print(note)
    if notes or any(outcome.error for outcome in outcomes):
        raise typer.Exit(1)
