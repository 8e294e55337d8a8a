"""`lagwise evaluate`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from lagwise.lab.cli.console import console, in_words
from lagwise.lab.cli.options import Data, Device, Lengths, changes_of, settings_of


@in_words()
def command(
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
    from lagwise.lab.json_files import add_line
    from lagwise.lab.loop import curves_of, evaluate_at, whole_model
    from lagwise.lab.run import load_trained
    from lagwise.lab.tasks.base import SPLITS

    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, but is {split!r}")
    session = load_trained(run, settings_of(device, data))
    table = Table("split", "length", *session.task.metrics(), "loss")
    for length in (None, *changes_of(None, lengths=lengths).get("lengths", ())):
        found = session.evaluate(split) if length is None else evaluate_at(session, length, split)
        more = {} if "refused" in found else curves_of(session, whole_model(session), split, length)
        add_line(run / "evaluations.jsonl", {"step": session.step, "split": split, "length": length, **found, **more})
        shown = [f"{found[name]:.4f}" if name in found else "-" for name in (*session.task.metrics(), "loss")]
        table.add_row(split, "its own" if length is None else str(length), *shown)
        if "refused" in found:
            console.print(f"length {length}: {found['refused']}", markup=False)
    console.print(table)
