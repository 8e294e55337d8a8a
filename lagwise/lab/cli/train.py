"""`lagwise train`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from lagwise.lab.cli.console import console, in_words
from lagwise.lab.cli.options import (
    Data,
    Device,
    Fields,
    Lengths,
    Out,
    Precision,
    Preset,
    Seed,
    Steps,
    Threads,
    Workers,
    changes_of,
    settings_of,
)
from lagwise.lab.cli.progress import advance, progress_bar

if TYPE_CHECKING:
    from lagwise.lab.config import Config


@in_words()
def command(
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
    from lagwise.lab.compare import folder_of
    from lagwise.lab.experiment import make_config
    from lagwise.lab.run import default_tracker, train
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
        result = train(config, where, settings, resume=resume, watch=lambda line: advance(progress, bar, line))
    if is_main_process():
        show_result(config, result)
        console.print(f"the run is in {where}", soft_wrap=True)


def is_main_process() -> bool:
    """Says whether this process is the one that talks; launchers number them."""
    return os.environ.get("RANK", "0") == "0"


def show_config(config: "Config") -> None:
    """Prints all fields."""
    table = Table("field", "value")
    for name, value in config.to_json().items():
        table.add_row(name, str(value))
    console.print(table)


def show_result(config: "Config", result: dict[str, Any]) -> None:
    """Prints the final numbers of a run."""
    from lagwise.lab.report.subject import SAMPLE_NOTE

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
