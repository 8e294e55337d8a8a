"""`lagwise bench loop`."""

from pathlib import Path
from typing import Annotated

import typer

from lagwise.lab.cli.console import console, in_words
from lagwise.lab.cli.options import Device, Lines, changes_of, chosen_device, settings_of


@in_words()
def command(
    task: Annotated[str, typer.Argument(help="What is trained on; `lagwise tasks` lists them.")],
    fields: Annotated[list[str] | None, typer.Argument(metavar="[FIELD=VALUE]...", help="Fields of `lagwise train`.")] = None,
    preset: Annotated[str, typer.Option(help="A preset of the task.")] = "",
    steps: Annotated[int, typer.Option(help="Steps of each turn.", min=1)] = 50,
    data: Annotated[str | None, typer.Option(help="Folder with the official files.")] = None,
    device: Device = "auto",
    workers: Annotated[int | None, typer.Option(help="Processes that make batches; 2 for a GPU, 0 for a CPU.", min=0)] = None,
    out: Lines = Path("results"),
) -> None:
    """Measure whether the input keeps up with training.

        lagwise bench loop process-50
        lagwise bench loop lm --data DIR dim=768 batch=32

    Training steps on new batches, with the reports of the loss, take turns with the same steps on one batch that lies on the
    device. The share is the speed of the first by that of the second: 1.0 is an input that costs nothing.
    """
    from lagwise.lab.bench import training as bench
    from lagwise.lab.bench.cases import save_records
    from lagwise.lab.experiment import make_config

    record = bench.measure_loop(
        make_config(task, preset=preset, **changes_of(fields)), settings_of(device, data, task, workers=workers), steps=steps
    )
    path = out / f"loop-{chosen_device(device).type}-{record['date']}.jsonl"
    save_records([record], path)
    console.print(f"{record['loop_ms']:.2f} ms a step, {record['fixed_ms']:.2f} ms on a fixed batch: share {record['share']:.3f}")
    console.print(f"saved to {path}")
