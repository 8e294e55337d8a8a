"""`lagwise lens`."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from lagwise.lab.cli.console import console, in_words
from lagwise.lab.cli.options import Data, Device, settings_of


@in_words()
def command(
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_RUN", help="The folder of a run, or a Hugging Face model.")],
    text: Annotated[str | None, typer.Option(help="What the model reads; of runs, those of tasks on plain text.")] = None,
    example: Annotated[int, typer.Option(help="Of runs: the number of the example of the test split that is read.")] = 0,
    tokens: Annotated[int, typer.Option(help="Of Hugging Face models: tokens of the text at most.")] = 512,
    ablation: Annotated[
        bool, typer.Option("--ablate", help="Of runs: evaluate with the priors of more and more heads, on the validation split.")
    ] = False,
    data: Data = None,
    device: Device = "auto",
    out: Annotated[Path, typer.Option(help="The page.")] = Path("lens.html"),
) -> None:
    """Write a page about what a model learned about position: priors, attention, ranges, for each layer and head.

        lagwise lens runs/process-50/at5/*-seed0 --ablate
        lagwise lens google-t5/t5-small --text "The cat sat."

    Models are those of runs, and those of Hugging Face that can have attn_implementation="lagwise", by name or folder. What
    begins with a folder that is there, or with a dot, a slash or ~, is a folder and never looked for on the Hub. Linear
    attention is shown too, but not with rotary, whose weights are no probabilities there. The page is one file that needs nothing
    else.
    """
    from lagwise.lab import look as looks
    from lagwise.lab import look_pretrained
    from lagwise.lab.run_folder import ENVIRONMENT
    from lagwise.lens.model_page import page

    check_folder(model)
    is_run = (Path(model) / ENVIRONMENT).is_file()
    if example and (text is not None or not is_run):
        raise ValueError("--example must be left out beside --text, and for a Hugging Face model, which has no test split")
    if is_run:
        from lagwise.lab.look_run import look_at_run

        look = look_at_run(Path(model), text, example, settings_of(device, data), ablation)
    elif ablation:
        raise ValueError("--ablate must be left out for a Hugging Face model, which comes without a metric: call lens.ablate")
    elif data is not None or device not in ("auto", "cpu"):
        raise ValueError("--data and --device must be left out for a Hugging Face model: it reads --text, on the CPU")
    else:
        look = look_pretrained.look_at_pretrained(model, looks.TEXT if text is None else text, tokens)
    title = f"The lens on {look.name}"
    command = shlex.join(["lagwise", *sys.argv[1:]])
    kernels, without = looks.kernels_of(look.model, max(call.q.shape[2] for call in look.calls))
    look.notes.extend(without)
    made = page(
        look.calls, look.tokens, title=title, command=command, notes=look.notes, ranges=looks.ranges_of(look.model),
        edges=looks.edges_of(look.model), edges_before=look.edges_before, kernels=kernels, lengths=look.lengths,
        ablation=look.ablation, metric=look.metric,
    )  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(made, encoding="utf-8")
    for note in look.notes:
        console.print(note, markup=False)
    console.print(f"written to {out}")


def check_folder(name: str) -> None:
    """Raises for a folder that is not there, so that the Hub is not asked for it."""
    if is_path(name) and not Path(name).is_dir():
        raise ValueError(f"MODEL_OR_RUN must be a run or a Hugging Face model, but there is no folder {name}")


def is_path(name: str) -> bool:
    """Says whether a name is that of a folder: names of the Hub have one slash at most, and an owner that is no folder here."""
    first, *others = name.split("/")
    return name.startswith((".", "/", "~")) or name.endswith("/") or len(others) > 1 or (bool(others) and Path(first).is_dir())
