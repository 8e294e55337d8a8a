"""`lagwise generate`."""

from pathlib import Path
from typing import Annotated

import typer

from lagwise.lab.cli.console import console, in_words
from lagwise.lab.cli.options import Data, Device, Nucleus, Seed, Temperature, settings_of


@in_words()
def command(
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
    from lagwise.lab.run import load_trained
    from lagwise.lab.tasks.base import Sampling

    session = load_trained(run, settings_of(device, data))
    sampling = Sampling(count, length, temperature, nucleus, seed)
    for path in session.task.generate(session.model.eval(), prompt, sampling, out or run / "generated"):
        console.print(f"written to {path}")
