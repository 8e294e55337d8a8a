"""The commands of the harness: compare, repeat, train, evaluate, generate, styles, tasks, results."""

import math
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress, TaskID, track
from rich.table import Table

from lagwise.lab.cli.console import console, failed, in_words, progress_bar

if TYPE_CHECKING:
    from lagwise.lab.compare import Outcome
    from lagwise.lab.config import Config
    from lagwise.lab.loop import Session, Settings
    from lagwise.lab.store import Run


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
    typer.Option(
        help="Folder with the official files, or hub: download them. Without it, generated data or a small sample. What is made "
        "of them once, such as a tokenizer, is kept in the folder LAGWISE_CACHE."
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: what there is.")]
Precision = Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; the task's own unless given.")]
Steps = Annotated[int | None, typer.Option(help="Training steps; the task's own unless given.", min=0)]
Preset = Annotated[str, typer.Option(help="A configuration of the papers; `lagwise tasks TASK` lists them.")]
Lengths = Annotated[
    str | None, typer.Option(help="Evaluate the test split at these lengths too, with commas between: the inductive test.")
]
Workers = Annotated[int | None, typer.Option(help="Processes that make batches; 2 for a GPU, 0 for a CPU.", min=0)]
Jobs = Annotated[int | None, typer.Option(help="Runs at the same time; one for each core on a CPU, one on a GPU.", min=1)]
Save = Annotated[
    Path | None, typer.Option(help="Also add a line of JSON for each run to this file.", dir_okay=False, callback=made_room)
]
Threads = Annotated[
    int | None, typer.Option(help="Threads of a run on a CPU; one for a small model and one for each core for others.", min=1)
]
Temperature = Annotated[float, typer.Option(help="Below 1 likely tokens become likelier; 0 takes the likeliest.", min=0.0)]
Nucleus = Annotated[
    float, typer.Option(help="Draw from the likeliest tokens that together have this probability.", min=0.0, max=1.0)
]
Seed = Annotated[int, typer.Option(help="Where random numbers start.")]
Out = Annotated[Path, typer.Option(help="Folder for all runs; each has one of its own in it.")]


def register(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    for command in (compare, repeat, train, evaluate, generate, styles, tasks, results):
        app.command()(command)


@in_words()
def compare(
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
        typer.Option(help="Also write the runs to this file, a line of JSON each.", dir_okay=False, callback=made_room),
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
    model, eight encodings, three seeds, two minutes on two cores. It ends with a table and a verdict, and writes report.html,
    report.png and league.csv.

    Runs that are complete are not run again, and runs that were stopped go on.
    """
    from lagwise.lab import compare as comparing
    from lagwise.lab import records
    from lagwise.lab.cli.progress import show_comparison
    from lagwise.lab.report.comparison import write_report
    from lagwise.lab.standings import baselines, groups

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
        outcomes = run_all(configs, out, settings, jobs, again)
        notes = failures(outcomes)
        runs = records.complete((outcome.run for outcome in outcomes if outcome.error is None), notes.append)
    if not runs:
        raise ValueError("\n".join(notes or ["no run is complete, so that there is nothing to compare"]))
    found = groups(runs, list(trials))
    for group, other in zip(found, baselines(found, baseline), strict=True):
        show_comparison(group, other, wide=wide)
    for note in notes:
        console.print(note)
    console.print()
    if save is not None:
        records.save(runs, save)
        console.print(f"written to {save}")
    page, *others = write_report(runs, out, shlex.join(["lagwise", *sys.argv[1:]]), list(trials), notes)
    console.print(f"written to {', '.join(map(str, others))}", soft_wrap=True)
    console.print(f"open {page} in a browser for curves, priors and all differences", soft_wrap=True)
    if notes:
        raise typer.Exit(1)


@in_words()
def repeat(
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
    from lagwise.lab.standings import chosen, data_of, main_metric, unlike

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
        console.print(note)
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
    threads: Threads = None,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0 for one at the end.", min=0)] = 500,
    workers: Workers = None,
    tracker: Annotated[
        str | None, typer.Option(help="Where numbers go too: tensorboard (where it is installed), wandb, ..., or none.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="The run's folder; one in --out by its config unless given.")] = None,
    show_fields: Annotated[bool, typer.Option("--fields", help="List all fields with their values here, and stop.")] = False,
    out: Out = Path("runs"),
) -> None:
    """Train one model on one task, with checkpoints, and evaluate it.

        lagwise train process-50 --encoding at5
        lagwise train process-50 --fields
        lagwise train text --preset relu-sine --data DIR
        lagwise train listops dim=256 encoding.max_lag=64
        accelerate launch -m lagwise train listops batch=64

    Ctrl-C saves a checkpoint before it stops; the same command with --resume goes on, also after a crash, and gives the same
    numbers as a run that was never stopped.
    """
    from lagwise.lab.cli.progress import show_config, show_result
    from lagwise.lab.compare import folder_of
    from lagwise.lab.loop import default_tracker, make_config
    from lagwise.lab.loop import train as run
    from lagwise.lab.threads import use_threads

    changes = changes_of(fields, steps=steps, precision=precision, lengths=lengths, encoding=encoding)
    config = make_config(task, preset=preset, **{"seed": seed, **changes})
    if show_fields:
        show_config(config)
        return
    tracker = None if tracker == "none" else tracker or default_tracker()
    settings = settings_of(device, data, task, save_every=save_every, workers=workers, tracker=tracker)
    use_threads(threads, [config])
    where = folder or folder_of(out, config)
    with progress_bar(hidden=not is_main_process()) as progress:
        bar = progress.add_task(f"{config.task}, {config.encoding}", total=config.steps, facts="")
        result = run(config, where, settings, resume=resume, watch=lambda line: advance(progress, bar, line))
    if is_main_process():
        show_result(config, result)
        console.print(f"the run is in {where}", soft_wrap=True)


@in_words()
def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a run.", exists=True, file_okay=False)],
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    lengths: Lengths = None,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Evaluate a trained model, also at other lengths than it was trained at.

        lagwise evaluate runs/adding/t5/*-seed0
        lagwise evaluate runs/adding/t5/*-seed0 --lengths 200,400

    The numbers are added to the run's evaluations.jsonl.
    """
    from lagwise.lab.loop import at_length, curves_of, whole_model
    from lagwise.lab.store import add_line
    from lagwise.lab.tasks.base import SPLITS

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
    count: Annotated[int, typer.Option(help="How many.", min=1)] = 1,
    length: Annotated[int, typer.Option(help="Tokens of each, the prompt included.", min=1)] = 256,
    temperature: Temperature = 1.0,
    nucleus: Nucleus = 1.0,
    seed: Seed = 0,
    data: Data = None,
    device: Device = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for what is generated; the run's own unless given.")] = None,
) -> None:
    """Draw new sequences from a trained model, of a task that has something to generate.

        lagwise generate runs/lm/rotary/*-seed0 --prompt "The "
        lagwise generate runs/piano/t5/*-seed0 --length 1024

    Each is written to a file of its own: text of language models, notes and a picture of music.
    """
    from lagwise.lab.tasks.base import Sampling

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

        lagwise styles runs/groove/*/*-seed0
        lagwise styles runs/groove/t5/* --save styles.jsonl

    After the third paper: pieces of the test split that are at least as long as a training example, and for each quarter of a
    continuation the cosine between its histograms and those of the whole piece. Shown is the median over continuations.
    """
    from statistics import median

    from lagwise.lab.report.comparison import SAMPLE_NOTE
    from lagwise.lab.store import Run, add_line
    from lagwise.lab.tasks import task_named
    from lagwise.lab.tasks.base import Sampling
    from lagwise.lab.tasks.music.music_task import Music

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
    from lagwise.lab.bench.cases import machine
    from lagwise.lab.loop import data_words

    assert session.run is not None
    environment = {**machine(session.device), "data": data_words(session.settings)}
    config = session.run.config.to_json()
    return {"bench": kind, "config": config, "environment": environment, "trained_on": session.run.environment}


@in_words()
def tasks(
    name: Annotated[str | None, typer.Argument(metavar="[TASK]", help="Tell more about this one, or about a family.")] = None,
) -> None:
    """List all tasks, or tell about one: its data, its fields and presets, and what was published on it.

        lagwise tasks
        lagwise tasks glue
        lagwise tasks listops

    Fields of a task are set as task.NAME=VALUE, in compare and in train.
    """
    from lagwise.lab.cli.progress import show_task, show_tasks
    from lagwise.lab.tasks import TASKS

    family = [each for each in TASKS if name is not None and each.startswith(f"{name}/")]
    if name is None:
        show_tasks(TASKS, families=True)
        console.print("Without --data, a task generates its data or uses a small built-in sample.")
        console.print("`lagwise tasks TASK` tells more about one.")
    elif family:
        show_tasks({each: TASKS[each] for each in family})
    else:
        show_task(name)


@in_words()
def results(
    document: Annotated[Path, typer.Argument(help="A page with marks.", exists=True, dir_okay=False)] = Path("docs/results.md"),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a table is not what the lines say.")] = False,
    root: Annotated[Path, typer.Option(help="The folder that files of marks are in.", file_okay=False)] = Path("."),
) -> None:
    """Write the tables and figures of a page anew, from lines of results.

        lagwise results docs/results.md
        lagwise results docs/results.md --check

    A mark in the page says what stands there, up to its end:

        <!-- results: league results/reber.jsonl --percent -->
        <!-- end -->

    `league`, `overview` (tasks side by side) and `positions` (losses within and beyond the length of the training) are made of
    runs that `lagwise compare --save` wrote: --baseline NAME names the encoding that others are compared to, --also METRIC adds
    another metric to a league. `ablation` is made of the lines of `lagwise ablate`, `styles` of those of `lagwise styles`, and
    `models` of those of `lagwise bench models`.
    """
    from lagwise.lab.report import tables

    text = tables.filled(document.resolve(), root.resolve(), figures=not check)
    changed = text != document.read_text()
    if check and changed:
        raise failed(f"{document} does not say what its lines say: run lagwise results", 1)
    if changed:
        document.write_text(text)
    console.print(f"{document} {'is written anew' if changed else 'says what its lines say'}")


def trained(folder: Path, settings: "Settings") -> "Session":
    """Returns the model of a run, from its last checkpoint."""
    from lagwise.lab.loop import Session, checkpoint_of
    from lagwise.lab.store import Run

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
    from lagwise.lab.loop import data_words
    from lagwise.lab.tasks.base import HUB

    trained_on = run.environment["data"]
    if settings.data is not None or trained_on == data_words(settings):
        return settings
    if trained_on != HUB and not Path(trained_on).is_dir():
        raise ValueError(f"the run was trained on {trained_on}, which is not there: pass --data with the folder of its files")
    return replace(settings, data=HUB if trained_on == HUB else Path(trained_on))


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
    from lagwise.encodings import nearest

    known = list(dict.fromkeys(encodings))
    if name is not None and name.partition(" (")[0] not in known:
        raise ValueError(f"--baseline must be one of {', '.join(known)}, but is {name!r}{nearest(name, known)}")


def changes_of(fields: list[str] | None, **options: Any) -> dict[str, Any]:
    """Returns the fields that a command line sets: those of options and those in words, which count more."""
    from lagwise.lab.config import parsed

    found = {name: value for name, value in options.items() if value is not None}
    if "lengths" in found:
        try:
            found["lengths"] = tuple(int(length) for length in found["lengths"].split(","))
        except ValueError as error:
            raise ValueError(f"--lengths must be whole numbers with commas between, but is {found['lengths']!r}") from error
    return {**found, **parsed(fields or [])}


def trials_of(tune: list[str]) -> dict[str, list[Any]]:
    """Returns the values that are tried of each field that is tuned."""
    from lagwise.lab.config import parsed

    found = {}
    for words in tune:
        name, _, values = words.partition("=")
        found[name] = [parsed([f"{name}={value}"])[name] for value in values.split(",")] if values else []
    return found


def settings_of(device: str, data: str | None, task: str | None = None, **options: Any) -> "Settings":
    """Returns how runs are carried out; data for a task that makes its own is refused."""
    from lagwise.lab.loop import Settings
    from lagwise.lab.tasks import task_named
    from lagwise.lab.tasks.base import HUB

    where = data if data is None or data == HUB else Path(data)
    if isinstance(where, Path) and not where.is_dir():
        raise ValueError(f"--data must be a folder or hub, but {data} is no folder")
    if where is not None and task is not None and not (task_named(task).facts.files or task_named(task).facts.hub):
        raise ValueError(f"--data must be left out for {task}, whose data is generated, but is {data}")
    check_device(device)
    return Settings(data=where, device=None if device == "auto" else device, **options)


def check_device(name: str) -> None:
    """Raises for a device that there is not."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda, but is {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device must be auto or cpu here, where torch finds no CUDA device, but is 'cuda'")


def is_main_process() -> bool:
    """Says whether this process is the one that talks; launchers number them."""
    return os.environ.get("RANK", "0") == "0"


def advance(progress: Progress, bar: TaskID, line: dict[str, Any]) -> None:
    """Shows a line of the metrics."""
    progress.update(bar, completed=line["step"])
    if "split" not in line:
        speed = line["tokens"] / line["seconds"] if line["seconds"] else 0.0
        progress.update(bar, facts=f"loss {line['loss']:.4f}, {speed:,.0f} tokens/s")


def run_all(configs: list["Config"], out: Path, settings: "Settings", jobs: int | None, again: bool) -> "list[Outcome]":
    """Runs all configs with one bar for all steps; the numbers of an encoding appear when its last seed is done."""
    from lagwise.lab import compare as comparing
    from lagwise.lab.cli.progress import outcome_words
    from lagwise.lab.threads import use_threads

    jobs = jobs or comparing.default_jobs(settings.device)
    if jobs == 1:
        use_threads(None, configs)
    with progress_bar() as progress:
        bar = progress.add_task("", total=sum(config.steps for config in configs), facts="")
        done: dict[int, int] = {}
        rows = Counter(config.fingerprint(without=["seed"]) for config in configs)
        outcomes: dict[str, list[Outcome]] = {row: [] for row in rows}

        def watch(event: dict[str, Any]) -> None:
            config, line = event["config"], event.get("line")
            done[event["run"]] = config.steps if line is None else line["step"]
            loss = "" if line is None or "split" in line else f"loss {line['loss']:.3f}"
            words = f"{config.encoding}, seed {config.seed} ({event['run'] + 1} of {event['of']})"
            progress.update(bar, completed=sum(done.values()), description=words, facts=loss)
            if line is None:
                row = config.fingerprint(without=["seed"])
                outcomes[row].append(event["outcome"])
                if len(outcomes[row]) == rows[row]:
                    progress.console.print(outcome_words(outcomes[row]), markup=False, highlight=False)

        return comparing.run_all(configs, out, settings, jobs=jobs, again=again, watch=watch)


def failures(outcomes: "Sequence[Outcome]") -> list[str]:
    """Returns which runs failed, each reason once."""
    found: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            found.setdefault(outcome.error, []).append(f"{outcome.config.encoding}, seed {outcome.config.seed}")
    return [f"{'all runs' if len(runs) == len(outcomes) else '; '.join(runs)} failed: {error}" for error, runs in found.items()]
