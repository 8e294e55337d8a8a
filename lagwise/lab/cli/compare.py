"""`lagwise compare`."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from lagwise.lab.cli.console import console, in_words
from lagwise.lab.cli.options import (
    Data,
    Device,
    Fields,
    Jobs,
    Lengths,
    Out,
    Precision,
    Preset,
    Steps,
    Workers,
    changes_of,
    make_room,
    settings_of,
    trials_of,
)
from lagwise.lab.cli.progress import failures, run_with_progress


@in_words()
def command(
    context: typer.Context,
    fields: Fields = None,
    task: Annotated[str, typer.Option(help="What to train on; `lagwise tasks` lists them.")] = "process-50",
    encodings: Annotated[
        str | None, typer.Option(help="Names with commas between, or all. `lagwise encodings` lists them. Eight unless given.")
    ] = None,
    seeds: Annotated[
        int, typer.Option(help="Runs of each encoding. Equal seeds have equal data, so that differences are paired.", min=1)
    ] = 3,
    baseline: Annotated[
        str | None, typer.Option(help="The encoding that others are compared to; t5 where it takes part.")
    ] = None,
    preset: Preset = "",
    steps: Steps = None,
    data: Data = None,
    device: Device = "auto",
    precision: Precision = None,
    lengths: Lengths = None,
    jobs: Jobs = None,
    workers: Workers = None,
    again: Annotated[bool, typer.Option("--again", help="Run what is there already once more.")] = False,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            help="Try a field with several values, such as rate=1e-3,1e-4, and give each encoding those that are best on the "
            "validation split, in the mean over its seeds. May be repeated. With --from the name of the field is enough."
        ),
    ] = None,
    stored: Annotated[
        list[Path] | None,
        typer.Option(
            "--from", help="Train nothing, and compare the runs of this folder, or of a file that --save wrote. May be repeated."
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Also write the runs to this file, a line of JSON each.", dir_okay=False, callback=make_room),
    ] = None,
    wide: Annotated[
        bool, typer.Option("--wide", help="Show all columns of the table: validation, parameters, speed and memory too.")
    ] = False,
    out: Out = Path("runs"),
) -> None:
    """Train the same model with several position encodings, and say which is best.

        lagwise compare
        lagwise compare --encodings t5,at5 --seeds 5
        lagwise compare --task adding --lengths 200,400
        lagwise compare --task reber --tune rate=5e-4,2e-3
        lagwise compare --from runs/process-50 --wide

    Without arguments: Process-50, strings from two Markov chains that have the same counts and differ in their order, a small
    model, eight encodings, three seeds, two minutes on two cores. It ends with a table and a verdict, and writes report.html
    and standings.csv.

    Runs that are complete are not run again, and runs that were stopped go on.
    """
    from lagwise.lab import compare as comparing
    from lagwise.lab import records
    from lagwise.lab.cli.standings import show_comparison
    from lagwise.lab.grouping import groups
    from lagwise.lab.report.comparison import write_report
    from lagwise.lab.standings import baselines

    notes: list[str] = []
    trials = trials_of(tune or [])
    if stored:
        check_alone(context, "--from", ("baseline", "tune", "stored", "save", "wide", "out"))
        runs = records.stored_runs(stored, notes.append)
    else:
        names = encodings.split(",") if encodings and encodings != "all" else encodings or list(comparing.DEFAULT_ENCODINGS)
        changes = changes_of(fields, steps=steps, precision=precision, lengths=lengths)
        configs = comparing.plan(task, names, seeds=seeds, preset=preset, changes=changes, tune=trials)
        check_baseline(baseline, [config.encoding for config in configs])
        settings = settings_of(device, data, task, save_every=0, workers=workers)
        outcomes = run_with_progress(configs, out, settings, jobs, again)
        notes = failures(outcomes)
        runs = records.complete_runs((outcome.run for outcome in outcomes if outcome.error is None), notes.append)
    if not runs:
        raise ValueError("\n".join(notes or ["no run is complete, so that there is nothing to compare"]))
    found = groups(runs, list(trials))
    for group, other in zip(found, baselines(found, baseline), strict=True):
        show_comparison(group, other, wide=wide)
    for note in notes:
        console.print(note)
    console.print()
    if save is not None:
        records.save_runs(runs, save)
        console.print(f"written to {save}")
    page, table = write_report(runs, out, shlex.join(["lagwise", *sys.argv[1:]]), list(trials), notes)
    console.print(f"written to {table}", soft_wrap=True)
    console.print(f"open {page} in a browser for curves, priors and all differences", soft_wrap=True)
    if notes:
        raise typer.Exit(1)


def check_alone(context: typer.Context, option: str, beside: Sequence[str]) -> None:
    """Raises for what was given beside an option that makes it meaningless."""
    given = [
        "FIELD=VALUE" if parameter.name == "fields" else parameter.opts[0]
        for parameter in context.command.params
        if parameter.name not in beside and (source := context.get_parameter_source(str(parameter.name))) is not None
        and source.name == "COMMANDLINE"
    ]  # fmt: skip
    if given:
        raise ValueError(f"{', '.join(given)} must be left out beside {option}, which trains nothing")


def check_baseline(name: str | None, encodings: Sequence[str]) -> None:
    """Raises for a baseline that takes no part, before anything is trained."""
    from lagwise.errors import nearest

    known = list(dict.fromkeys(encodings))
    if name is not None and name.partition(" (")[0] not in known:
        raise ValueError(f"--baseline must be one of {', '.join(known)}, but is {name!r}{nearest(name, known)}")
