"""The options that commands share, and what is made of them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

    from lagwise.lab.loop import Settings


def make_room(path: Path | None) -> Path | None:
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
    Path | None, typer.Option(help="Also add a line of JSON for each run to this file.", dir_okay=False, callback=make_room)
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
Lines = Annotated[Path, typer.Option(help="Folder for the numbers, one JSON line each.", file_okay=False)]

DTYPES = ("float32", "bfloat16", "float16")


def changes_of(fields: list[str] | None, **options: Any) -> dict[str, Any]:
    """Returns the fields that a command line sets: those of options and those in words, which count more."""
    from lagwise.lab.config import parse_fields

    found = {name: value for name, value in options.items() if value is not None}
    if "lengths" in found:
        try:
            found["lengths"] = tuple(int(length) for length in found["lengths"].split(","))
        except ValueError as error:
            raise ValueError(f"--lengths must be whole numbers with commas between, but is {found['lengths']!r}") from error
    return {**found, **parse_fields(fields or [])}


def trials_of(tune: list[str]) -> dict[str, list[Any]]:
    """Returns the values that are tried of each field that is tuned."""
    from lagwise.lab.config import parse_fields

    found = {}
    for words in tune:
        name, _, values = words.partition("=")
        found[name] = [parse_fields([f"{name}={value}"])[name] for value in values.split(",")] if values else []
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


def chosen_device(name: str) -> "torch.device":
    """Returns the device of this name, or with "auto" a GPU where there is one."""
    import torch

    check_device(name)
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def chosen_dtype(name: str | None, device: "torch.device") -> "torch.dtype":
    """Returns the type of this name; unless one is given, bfloat16 on a GPU and float32 elsewhere."""
    import torch

    if name is not None and name not in DTYPES:
        raise ValueError(f"--dtype must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, but is {name!r}")
    return getattr(torch, name or ("bfloat16" if device.type == "cuda" else "float32"))
