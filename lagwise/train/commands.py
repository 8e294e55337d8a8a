"""The commands of the harness: compare, repeat, train, evaluate, generate, styles, tasks, results."""

import math
import os
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn, track
from rich.table import Table

from lagwise.console import console
from lagwise.train.signals import ignore_signals, interrupt, on_signal

if TYPE_CHECKING:
    from lagwise.train.config import Config
    from lagwise.train.league import Group
    from lagwise.train.loop import Session, Settings
    from lagwise.train.store import Run


def made_room(path: Path | None) -> Path | None:
    """Makes the folder of a file that lines will be added to, before anything is computed for them."""
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(f"no folder can be made for {path}: {error.strerror}") from error
    return path


FIELDS_HELP = (
    "Any field of a run, such as dim=256 layers=4 rate=3e-4; options of the task and of the encoding as task.NAME=VALUE and "
    "encoding.NAME=VALUE. `lagwise train TASK --fields` lists them."
)
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.", exists=True, file_okay=False)]
Fields = Annotated[list[str] | None, typer.Argument(metavar="[FIELD=VALUE]...", help=FIELDS_HELP)]
Data = Annotated[
    str | None,
    typer.Option(help="Folder with the official files, or hub: download them. Without it, generated data or a small sample."),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: what there is.")]
Precision = Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; the task's own unless given.")]
Steps = Annotated[int | None, typer.Option(help="Training steps; the task's own unless given.")]
Preset = Annotated[str, typer.Option(help="A configuration of the papers; `lagwise tasks` lists them.")]
Lengths = Annotated[
    str | None, typer.Option(help="Evaluate the test split at these lengths too, with commas between: the inductive test.")
]
Workers = Annotated[int | None, typer.Option(help="Processes that make batches; 2 for a GPU, 0 for a CPU.")]
Jobs = Annotated[int | None, typer.Option(help="Runs at the same time; one for each core on a CPU, one on a GPU.")]
Save = Annotated[
    Path | None, typer.Option(help="Also add a line of JSON for each run to this file.", dir_okay=False, callback=made_room)
]
Temperature = Annotated[float, typer.Option(help="Below 1 likely tokens become likelier; 0 takes the likeliest.")]
Nucleus = Annotated[float, typer.Option(help="Draw from the likeliest tokens that together have this probability.")]
Seed = Annotated[int, typer.Option(help="Where random numbers start.")]
Out = Annotated[Path, typer.Option(help="Folder for all runs; each has one of its own in it.")]


@contextmanager
def in_words() -> Iterator[None]:
    """Shows what went wrong in words; exit status 130 says that the user stopped it."""
    try:
        with warnings.catch_warnings(), on_signal(interrupt):
            warnings.showwarning = lambda message, *_, **__: console.print(f"warning: {message}", markup=False)
            yield
    except KeyboardInterrupt as error:
        ignore_signals()
        console.print(str(error) or "stopped", markup=False)
        raise typer.Exit(130) from error
    except (ValueError, ArithmeticError, OSError) as error:
        console.print(f"error: {error}", markup=False, highlight=False)
        raise typer.Exit(1) from error
    except ModuleNotFoundError as error:
        console.print(f"error: this needs {error.name}: pip install 'lagwise[train]'", markup=False)
        raise typer.Exit(1) from error


def register(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    for command in (compare, repeat, train, evaluate, generate, styles, tasks, results):
        app.command()(command)


@in_words()
def compare(
    fields: Fields = None,
    task: Annotated[str, typer.Option(help="What to train on; `lagwise tasks` lists them.")] = "process-50",
    encodings: Annotated[
        str | None, typer.Option(help="Names with commas between, or all. `lagwise encodings` lists them. Eight unless given.")
    ] = None,
    seeds: Annotated[
        int, typer.Option(help="Runs of each encoding. Equal seeds have equal data, so that differences are paired.")
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
    save: Annotated[Path | None, typer.Option(help="Also write the runs to this file, a line of JSON each.")] = None,
    out: Out = Path("runs"),
) -> None:
    """Train the same model with several position encodings, and show which is best.

    Without arguments: Process-50, strings from two Markov chains that have the same counts and differ in their order, a small
    model, eight encodings, three seeds, a few minutes on two cores. It ends with a league table, and writes report.html,
    report.png and league.csv.

        lagwise compare --encodings t5,at5 --seeds 5
        lagwise compare --task listops --preset relu-sine --encodings sine-spe,rotary --data DIR --device cuda
        lagwise compare --task reber --tune rate=5e-4,2e-3 --save reber.jsonl
        lagwise compare --from runs/process-50

    Runs that are complete are not run again, and runs that were stopped go on.
    """
    from lagwise.train import compare as comparing
    from lagwise.train import records
    from lagwise.train.league import baselines, groups
    from lagwise.train.report import write_report

    notes: list[str] = []
    trials = trials_of(tune or [])
    if stored:
        runs = records.stored_runs(stored, notes.append)
    else:
        names = encodings.split(",") if encodings and encodings != "all" else encodings or list(comparing.DEFAULT_ENCODINGS)
        changes = changes_of(fields, steps=steps, precision=precision, lengths=lengths)
        configs = comparing.plan(task, names, seeds=seeds, preset=preset, changes=changes, tune=trials)
        settings = settings_of(device, data, save_every=0, workers=workers)
        outcomes = run_all(configs, out, settings, jobs, again)
        notes = [
            f"{outcome.config.encoding}, seed {outcome.config.seed}: {outcome.error}" for outcome in outcomes if outcome.error
        ]
        runs = records.complete((outcome.run for outcome in outcomes if outcome.error is None), notes.append)
    if not runs:
        raise ValueError("no run is complete, so that there is nothing to compare" + "".join(f"\n{note}" for note in notes))
    found = groups(runs, list(trials))
    for group, other in zip(found, baselines(found, baseline), strict=True):
        show_league(group, other)
    for note in notes:
        console.print(note, markup=False)
    if save is not None:
        records.save(runs, save)
        console.print(f"written to {save}")
    for path in write_report(runs, out, shlex.join(["lagwise", *sys.argv[1:]]), list(trials), notes):
        console.print(f"written to {path}")
    if notes:
        raise typer.Exit(1)


@in_words()
def repeat(
    file: Annotated[Path, typer.Argument(help="Lines of runs, as in results/.", exists=True, dir_okay=False)],
    encodings: Annotated[str | None, typer.Option(help="Only these, with commas between.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Only the first so many seeds of each.")] = None,
    data: Data = None,
    device: Device = "auto",
    jobs: Jobs = None,
    workers: Workers = None,
    out: Out = Path("runs"),
) -> None:
    """Train published runs once more, with all their fields and seeds, and show the old and the new numbers side by side.

        lagwise repeat results/process-50.jsonl --encodings t5,at5 --seeds 1
        lagwise repeat results/lra-text.jsonl --encodings rotary --data IMDB --device cuda

    On a CPU of the same kind and with the same versions the numbers are the same; elsewhere rounding differs, and they differ
    too. Runs that start from others find them where these were repeated with the same --out.
    """
    from lagwise.train import records
    from lagwise.train.league import chosen, data_of, main_metric, unlike

    notes: list[str] = []
    readable = records.read(file, notes.append)
    if notes and not readable:
        raise ValueError("\n".join(notes))
    published = chosen(readable, None if encodings is None else encodings.split(","), seeds)
    if len(kinds := sorted({data_of(run) for run in published})) > 1:
        raise ValueError(
            f"the runs of {file} must have one kind of data, but have {', '.join(kinds)}: give each a file of its own"
        )
    settings = with_data_of(published[0], settings_of(device, data, save_every=0, workers=workers))
    outcomes = run_all([run.config for run in published], out, settings, jobs, again=False)
    table = Table("task", "encoding", "seed", "metric", "published", "now", "difference", title=str(file))
    for before, outcome in zip(published, outcomes, strict=True):
        config, (metric, _) = before.config, main_metric(before.config)
        old, new = (math.nan if result is None else result["test"][metric] for result in (before.result, outcome.run.result))
        words = [f"{new:.4f}", f"{new - old:+.4f}"] if outcome.error is None else [outcome.error, ""]
        table.add_row(config.task, config.encoding, str(config.seed), metric, f"{old:.4f}", *words)
        if outcome.error is None and (difference := unlike([before, outcome.run])):
            console.print(f"warning: this is not the published model: {difference}", markup=False)
    console.print(table)
    for note in notes:
        console.print(note, markup=False)
    if notes or any(outcome.error for outcome in outcomes):
        raise typer.Exit(1)


@in_words()
def train(
    task: Annotated[str, typer.Argument(help="What to train on; `lagwise tasks` lists them.")],
    fields: Fields = None,
    encoding: Annotated[str | None, typer.Option(help="Its name; `lagwise encodings` lists them. t5 unless given.")] = None,
    preset: Preset = "",
    steps: Steps = None,
    seed: Seed = 0,
    data: Data = None,
    device: Device = "auto",
    precision: Precision = None,
    lengths: Lengths = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last whole checkpoint, if there is one.")] = False,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 500,
    workers: Workers = None,
    tracker: Annotated[
        str | None, typer.Option(help="Where numbers go too: tensorboard (where it is installed), wandb, ..., or none.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="The run's folder; one in --out by its config unless given.")] = None,
    show_fields: Annotated[bool, typer.Option("--fields", help="List all fields with their values here, and stop.")] = False,
    out: Out = Path("runs"),
) -> None:
    """Train one model on one task, with checkpoints, and evaluate it.

        lagwise train process-50 --encoding at5 --steps 500
        lagwise train text --preset relu-sine --data DIR --device cuda --precision bf16
        accelerate launch --num_processes 2 -m lagwise train listops --encoding rotary batch=64

    Ctrl-C saves a checkpoint before it stops; the same command with --resume goes on, also after a crash, and gives the same
    numbers as a run that was never stopped.
    """
    from lagwise.train.compare import folder_of
    from lagwise.train.loop import default_tracker, make_config
    from lagwise.train.loop import train as run

    changes = changes_of(fields, steps=steps, precision=precision, lengths=lengths, encoding=encoding)
    config = make_config(task, preset=preset, **{"seed": seed, **changes})
    if show_fields:
        show_config(config)
        return
    tracker = None if tracker == "none" else tracker or default_tracker()
    settings = settings_of(device, data, save_every=save_every, workers=workers, tracker=tracker)
    where = folder or folder_of(out, config)
    with progress_bar(hidden=not is_main_process()) as progress:
        bar = progress.add_task(f"{config.task}, {config.encoding}", total=config.steps, facts="")
        result = run(config, where, settings, resume=resume, watch=lambda line: advance(progress, bar, line))
    if is_main_process():
        show_result(config, result)
        console.print(f"the run is in {where}")


@in_words()
def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a run.", exists=True, file_okay=False)],
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    lengths: Lengths = None,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Evaluate a trained model, also at other lengths than it was trained at.

        lagwise evaluate runs/adding/t5/0123456789ab-seed0 --lengths 200,400,800

    The numbers are added to the run's evaluations.jsonl.
    """
    from lagwise.tasks.base import SPLITS
    from lagwise.train.loop import at_length, curves_of, whole_model
    from lagwise.train.store import add_line

    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, but is {split!r}")
    session = trained(run, settings_of(device, data))
    table = Table("split", "length", *session.task.metrics(), "loss")
    for length in (None, *changes_of(None, lengths=lengths).get("lengths", ())):
        found = session.evaluate(split) if length is None else at_length(session, length, split)
        more = {} if "refused" in found else curves_of(session, whole_model(session), split, length)
        add_line(run / "evaluations.jsonl", {"step": session.step, "split": split, "length": length, **found, **more})
        shown = [f"{found[name]:.4f}" if name in found else "-" for name in (*session.task.metrics(), "loss")]
        table.add_row(split, "its own" if length is None else str(length), *shown)
        if "refused" in found:
            console.print(f"length {length}: {found['refused']}", markup=False)
    console.print(table)


@in_words()
def generate(
    run: Annotated[Path, typer.Argument(help="The folder of a run of a task that generates.", exists=True, file_okay=False)],
    prompt: Annotated[str | None, typer.Option(help="What to go on from: text, or a file where the task says so.")] = None,
    count: Annotated[int, typer.Option(help="How many.")] = 1,
    length: Annotated[int, typer.Option(help="Tokens of each, the prompt included.")] = 256,
    temperature: Temperature = 1.0,
    nucleus: Nucleus = 1.0,
    seed: Seed = 0,
    data: Data = None,
    device: Device = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for what is generated; the run's own unless given.")] = None,
) -> None:
    """Draw new sequences from a trained model, of a task that has something to generate.

    lagwise generate runs/lm/rotary/0123456789ab-seed0 --prompt "The " --length 500 --temperature 0.8
    """
    from lagwise.tasks.base import Sampling

    session = trained(run, settings_of(device, data))
    sampling = Sampling(count, length, temperature, nucleus, seed)
    for path in session.task.generate(session.model.eval(), prompt, sampling, out or run / "generated"):
        console.print(f"written to {path}")


@in_words()
def styles(
    runs: Runs,
    pieces: Annotated[int, typer.Option(help="How many pieces of the test split are gone on from.", min=1)] = 20,
    count: Annotated[int, typer.Option(help="Continuations of each.", min=1)] = 3,
    length: Annotated[int, typer.Option(help="Tokens of each, the two bars of the prompt included.")] = 1024,
    temperature: Temperature = 0.6,
    nucleus: Nucleus = 1.0,
    seed: Seed = 0,
    data: Data = None,
    device: Device = "auto",
    save: Save = None,
) -> None:
    """Let models of music go on from two bars: does what they play stay like the piece?

        lagwise styles runs/groove/rotary/*-seed0 runs/groove/conv-spe/*-seed0 --save styles.jsonl

    After the third paper: pieces of the test split that are at least as long as a training example, and for each quarter of a
    continuation the cosine between its histograms and those of the whole piece. Shown is the median over continuations.
    """
    from statistics import median

    from lagwise.tasks import task_named
    from lagwise.tasks.base import Sampling
    from lagwise.tasks.music import Music
    from lagwise.train.report import SAMPLE_NOTE
    from lagwise.train.store import Run, add_line

    sampling = Sampling(count, length, temperature, nucleus, seed)
    for folder in runs:
        task = Run.open(folder).config.task
        if not issubclass(task_named(task), Music):
            raise ValueError(f"runs must be of music (piano, groove), but {folder} is one of {task}")
    table = Table("run", "histogram", "1st quarter", "2nd", "3rd", "4th", "continuations")
    for folder in runs:
        session = trained(folder, settings_of(device, data))
        assert isinstance(session.task, Music)
        try:
            prompts = session.task.long_pieces("test", pieces)
            watched = track(prompts, escape(str(folder)), console=console, disable=not console.is_terminal)
            found = session.task.styles(session.model.eval(), watched, sampling)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error
        if save is not None:
            add_line(save, {**measured_on("styles", session), "sampling": asdict(sampling), "prompts": prompts, "styles": found})
        for histogram, rows in found.items():
            medians = (f"{median(quarter):.3f}" for quarter in zip(*rows, strict=True))
            table.add_row(str(folder), histogram, *medians, str(len(rows)))
        if session.task.is_sample:
            console.print(f"{folder}: {SAMPLE_NOTE}", markup=False)
    console.print(table)
    if save is not None:
        console.print(f"added to {save}")


def measured_on(kind: str, session: "Session") -> dict[str, Any]:
    """Returns the beginning of a line of what was measured on a trained model: what it is, and where it was measured."""
    from lagwise.bench.records import machine
    from lagwise.train.loop import data_words

    assert session.run is not None
    environment = {**machine(session.device), "data": data_words(session.settings)}
    config = session.run.config.to_json()
    return {"bench": kind, "config": config, "environment": environment, "trained_on": session.run.environment}


@in_words()
def tasks() -> None:
    """List all tasks, with where their data comes from, and what was published on them."""
    from lagwise.tasks import TASKS

    table = Table("task", "what is asked", "metric", "data", "licence", "published", "presets", show_lines=True)
    for name, kind in TASKS.items():
        facts = kind.facts
        more = [f"--data DIR: {facts.files}"] if facts.files else []
        more += [f"--data hub: {facts.hub}"] if facts.hub else []
        data = "\n".join([facts.source, facts.size, *more])
        table.add_row(name, facts.words, facts.metric, data, facts.licence, facts.published, ", ".join(kind.presets))
    console.print(table)


@in_words()
def results(
    document: Annotated[Path, typer.Argument(help="A page with marks.", exists=True, dir_okay=False)] = Path("docs/results.md"),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a table is not what the lines say.")] = False,
    root: Annotated[Path, typer.Option(help="The folder that files of marks are in.", file_okay=False)] = Path("."),
) -> None:
    """Write the tables and figures of a page anew, from lines of results.

    A mark in the page says what stands there, up to its end:

        <!-- results: league results/reber.jsonl --tune rate --percent --figure docs/figures/reber.png -->
        <!-- end -->

    `league`, `overview` (tasks side by side) and `positions` (losses within and beyond the length of the training) are made of
    runs that `lagwise compare --save` wrote: --baseline NAME names the encoding that others are compared to, --also METRIC adds
    another metric to a league. `ablation` is made of the lines of `lagwise ablate`, `styles` of those of `lagwise styles`, and
    `models` of those of `lagwise bench models`.
    """
    from lagwise.train import tables

    text = tables.filled(document.resolve(), root.resolve(), figures=not check)
    changed = text != document.read_text()
    if check and changed:
        raise ValueError(f"{document} does not say what its lines say: run lagwise results")
    if changed:
        document.write_text(text)
    console.print(f"{document} {'is written anew' if changed else 'says what its lines say'}")


def trained(folder: Path, settings: "Settings") -> "Session":
    """Returns the model of a run, from its last checkpoint."""
    from lagwise.train.loop import Session, checkpoint_of
    from lagwise.train.store import Run

    run = Run.open(folder)
    checkpoint = checkpoint_of(run)
    if checkpoint is None:
        raise ValueError(f"{folder} has no checkpoint: train it to the end, or with --save-every")
    # The checkpoint has all weights: what the run started from is not needed any more, and may be gone.
    session = Session(replace(run.config, start=""), with_data_of(run, settings), run)
    session.load(checkpoint)
    return session


def with_data_of(run: "Run", settings: "Settings") -> "Settings":
    """Returns settings with the data that a run was trained on, unless other data is given."""
    from lagwise.tasks.base import HUB
    from lagwise.train.loop import data_words

    trained_on = run.environment["data"]
    if settings.data is not None or trained_on == data_words(settings):
        return settings
    if trained_on != HUB and not Path(trained_on).is_dir():
        raise ValueError(f"the run was trained on {trained_on}, which is not there: pass --data with the folder of its files")
    return replace(settings, data=HUB if trained_on == HUB else Path(trained_on))


def changes_of(fields: list[str] | None, **options: Any) -> dict[str, Any]:
    """Returns the fields that a command line sets: those of options and those in words, which count more."""
    from lagwise.train.config import parsed

    found = {name: value for name, value in options.items() if value is not None}
    if "lengths" in found:
        try:
            found["lengths"] = tuple(int(length) for length in found["lengths"].split(","))
        except ValueError as error:
            raise ValueError(f"--lengths must be whole numbers with commas between, but is {found['lengths']!r}") from error
    return {**found, **parsed(fields or [])}


def trials_of(tune: list[str]) -> dict[str, list[Any]]:
    """Returns the values that are tried of each field that is tuned."""
    from lagwise.train.config import parsed

    found = {}
    for words in tune:
        name, _, values = words.partition("=")
        found[name] = [parsed([f"{name}={value}"])[name] for value in values.split(",")] if values else []
    return found


def settings_of(device: str, data: str | None, **options: Any) -> "Settings":
    """Returns how runs are carried out."""
    import torch

    from lagwise.tasks.base import HUB
    from lagwise.train.loop import Settings

    where = data if data is None or data == HUB else Path(data)
    if isinstance(where, Path) and not where.is_dir():
        raise ValueError(f"--data must be a folder or hub, but {data} is no folder")
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda, but is {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device must be auto or cpu here, where torch finds no CUDA device, but is 'cuda'")
    return Settings(data=where, device=None if device == "auto" else device, **options)


def is_main_process() -> bool:
    """Says whether this process is the one that talks; launchers number them."""
    return os.environ.get("RANK", "0") == "0"


def progress_bar(*, hidden: bool = False) -> Progress:
    """Returns a bar with the steps, some facts, and the time that is left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, disable=hidden)


def advance(progress: Progress, bar: TaskID, line: dict[str, Any]) -> None:
    """Shows a line of the metrics."""
    progress.update(bar, completed=line["step"])
    if "split" not in line:
        speed = line["tokens"] / line["seconds"] if line["seconds"] else 0.0
        progress.update(bar, facts=f"loss {line['loss']:.4f}, {speed:,.0f} tokens/s")


def run_all(configs: list["Config"], out: Path, settings: "Settings", jobs: int | None, again: bool) -> list[Any]:
    """Runs all configs with one bar for all steps."""
    from lagwise.train import compare as comparing

    with progress_bar() as progress:
        bar = progress.add_task("", total=sum(config.steps for config in configs), facts="")
        done: dict[int, int] = {}

        def watch(event: dict[str, Any]) -> None:
            config, line = event["config"], event.get("line")
            done[event["run"]] = config.steps if line is None else line["step"]
            loss = "" if line is None or "split" in line else f"loss {line['loss']:.3f}"
            words = f"{config.encoding}, seed {config.seed} ({event['run'] + 1} of {event['of']})"
            progress.update(bar, completed=sum(done.values()), description=words, facts=loss)

        return comparing.run_all(
            configs, out, settings, jobs=jobs or comparing.default_jobs(settings.device), again=again, watch=watch
        )


def show_league(group: "Group", baseline: str) -> None:
    """Prints the league of some runs that may be compared, with differences to a baseline within each seed."""
    from lagwise.train import league

    found = {difference.encoding: difference for difference in league.differences_of(group, baseline)}
    rows = league.rows_of(group)
    lengths = list(dict.fromkeys(length for row in rows for length in row.lengths))
    table = Table(
        "encoding", f"{group.metric} (test)", f"minus {baseline}", "validation", *(f"at {length}" for length in lengths), "seeds",
        *group.tune, "its parameters", "seconds", "peak MiB", title=group.title,
    )  # fmt: skip
    for row in rows:
        difference = found.get(row.encoding)
        paired = "" if difference is None or difference.estimate is None else str(difference.estimate)
        table.add_row(
            row.encoding, str(row.test), paired, str(row.validation), *(str(row.lengths.get(length, "-")) for length in lengths),
            str(len(row.seeds)), *(str(row.options[field]) for field in group.tune), f"{row.parameters:,}", f"{row.seconds:.1f}",
            "-" if row.peak_memory is None else f"{row.peak_memory / 2**20:.1f}",
        )  # fmt: skip
    console.print(table)
    console.print("± is the 95 % confidence interval over the seeds; differences are taken within each seed")


def show_config(config: "Config") -> None:
    """Prints all fields."""
    table = Table("field", "value")
    for name, value in config.to_json().items():
        table.add_row(name, str(value))
    console.print(table)


def show_result(config: "Config", result: dict[str, Any]) -> None:
    """Prints the final numbers of a run."""
    table = Table(
        "split", "length", *(name for name in result["test"] if name != "loss"), "loss", title=f"{config.task}, {config.encoding}"
    )
    rows = [(split, "its own", result[split]) for split in ("validation", "test")]
    rows += [("test", length, found) for length, found in result["lengths"].items()]
    for split, length, found in rows:
        names = [*(name for name in result["test"] if name != "loss"), "loss"]
        table.add_row(split, length, *(f"{found[name]:.4f}" if name in found else found.get("refused", "-") for name in names))
    console.print(table)
    words = [
        f"{result['parameters']:,} parameters, {result['encoding_parameters']:,} of the encoding",
        f"{result['seconds']:.1f} s",
    ]
    words += [f"{result['tokens_per_second']:,.0f} tokens/s"] if result["tokens_per_second"] else []
    console.print(", ".join(words))
    if result["sample"]:
        console.print("the data is the small built-in sample: these numbers mean nothing. Pass --data")
