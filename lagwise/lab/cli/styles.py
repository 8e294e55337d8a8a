"""`lagwise styles`."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from lagwise.lab.cli.console import console, in_words
from lagwise.lab.cli.options import Data, Device, Nucleus, Runs, Save, Seed, Temperature, settings_of


@in_words()
def command(
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

    from lagwise.lab.json_files import add_line
    from lagwise.lab.report.subject import SAMPLE_NOTE
    from lagwise.lab.run import line_start, load_trained
    from lagwise.lab.run_folder import Run
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
        session = load_trained(folder, settings_of(device, data))
        assert isinstance(session.task, Music)
        try:
            prompts = session.task.long_pieces("test", pieces)
            watched = track(prompts, escape(str(folder)), console=console, disable=not console.is_terminal)
            found = session.task.styles(session.model.eval(), watched, sampling)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error
        if save is not None:
            add_line(save, {**line_start("styles", session), "sampling": asdict(sampling), "prompts": prompts, "styles": found})
        for histogram, rows in found.items():
            medians = (f"{median(quarter):.3f}" for quarter in zip(*rows, strict=True))
            table.add_row(str(folder), histogram, *medians, str(len(rows)))
        if session.task.is_sample:
            console.print(f"{folder}: {SAMPLE_NOTE}", markup=False)
    console.print(table)
    if save is not None:
        console.print(f"added to {save}")
