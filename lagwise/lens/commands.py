"""The command of the lens: a page about a trained model."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from lagwise.console import console
from lagwise.train.commands import Data, Device, in_words, settings_of, trained

if TYPE_CHECKING:
    from torch import nn

    from lagwise.lens import Ablation, Call
    from lagwise.tasks.base import Batch, Task

TEXT = (
    "The clockmaker who mended the old lamp on the long bridge forgot his blue umbrella there, and when the rain came, "
    "the baker carried it home for him."
)
"""What a Hugging Face model reads unless a text is given."""


class Look(NamedTuple):
    """A model that has read a text."""

    name: str
    model: "nn.Module"
    calls: "list[Call]"
    tokens: list[str]
    notes: list[str]
    ablation: "Ablation | None" = None
    metric: str = ""


def register(app: typer.Typer) -> None:
    """Adds the command to the command line."""
    app.command()(lens)


@in_words()
def lens(
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_RUN", help="The folder of a run, or a Hugging Face model.")],
    text: Annotated[str | None, typer.Option(help="What the model reads; of runs, only those of language modelling do.")] = None,
    example: Annotated[int, typer.Option(help="Of runs: the number of the example of the test split that is read.")] = 0,
    tokens: Annotated[int, typer.Option(help="Of Hugging Face models: tokens of the text at most.")] = 512,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Of runs: evaluate with the priors of more and more heads, on the validation split.")
    ] = False,
    data: Data = None,
    device: Device = "auto",
    out: Annotated[Path, typer.Option(help="The page.")] = Path("lens.html"),
) -> None:
    """Write a page about what a model learned about position: priors, attention, ranges, for each layer and head.

        lagwise lens runs/process-50/at5/0123456789ab-seed0 --ablate
        lagwise lens google-t5/t5-small --text "The cat sat on the mat." --out t5.html

    Models are those of runs with softmax attention, and those of Hugging Face that can have attn_implementation="lagwise", by
    name or folder. The page is one file that needs nothing else.
    """
    from lagwise.lens.page import page
    from lagwise.train.store import ENVIRONMENT

    if (Path(model) / ENVIRONMENT).is_file():
        look = look_at_run(Path(model), text, example, data, device, ablate)
    elif ablate:
        raise ValueError("--ablate must be left out for a Hugging Face model, which comes without a metric: call lens.ablate")
    elif data is not None or device not in ("auto", "cpu"):
        raise ValueError("--data and --device must be left out for a Hugging Face model: it reads --text, on the CPU")
    else:
        look = look_at_pretrained(model, TEXT if text is None else text, tokens)
    title = f"The lens on {look.name}"
    command = shlex.join(["lagwise", *sys.argv[1:]])
    ranges = ranges_of(look.model)
    made = page(
        look.calls, look.tokens, title=title, command=command, notes=look.notes, ranges=ranges, ablation=look.ablation,
        metric=look.metric,
    )  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(made, encoding="utf-8")
    for note in look.notes:
        console.print(note, markup=False)
    console.print(f"written to {out}")


def look_at_run(folder: Path, text: str | None, example: int, data: str | None, device: str, ablate: bool) -> Look:
    """Lets the model of a run read a text, or an example of the test split."""
    import torch

    from lagwise.lens import ablate as switch_on
    from lagwise.lens import capture
    from lagwise.train.loop import to_device

    session = trained(folder, settings_of(device, data))
    task, model = session.task, session.model.eval()
    if text is None:
        examples = task.examples("test")
        if not 0 <= example < len(examples):
            raise ValueError(f"--example must be from 0 to {len(examples) - 1}, but is {example}")
        batch = examples.batch([example])
    else:
        batch = batch_of(task, text)
    with torch.no_grad(), capture(model) as calls:
        model(to_device(batch, session.device))
    config, texts = session.config, len(calls[0].q)
    read = f"example {example} of the test split" if text is None else "the given text"
    notes = [f"The model has seed {config.seed} and was trained for {session.step:,} steps. It reads {read}."]
    notes += [f"The example is a group of {texts} texts, of which this is the first."] if texts > 1 else []
    notes += ["The data is the small built-in sample: these numbers mean little. Pass --data."] if task.is_sample else []
    name, tokens = f"{config.task} with {config.encoding}", words_of(task, model, batch)
    if not ablate:
        return Look(name, model, [first_text(call) for call in calls], tokens, notes)
    metric = next(iter(task.metrics()))
    found = switch_on(model, lambda: session.evaluate("validation")[metric])
    return Look(name, model, [first_text(call) for call in calls], tokens, notes, found, f"validation {metric}")


def batch_of(task: "Task", text: str) -> "Batch":
    """Returns a text as a batch of one, for tasks that read text."""
    import torch

    from lagwise.tasks.lm import LanguageModel

    if not isinstance(task, LanguageModel):
        raise ValueError("--text must be left out for a run of this task, whose examples are not plain text: pass --example")
    row = torch.tensor([[task.alphabet.end, *task.codes(text)]])
    return {"tokens": row, "chosen": torch.arange(row.shape[1])}


def words_of(task: "Task", model: "nn.Module", batch: "Batch") -> list[str]:
    """Returns what the page calls the tokens of the first text of a batch: pieces of text, or the numbers that the model reads.

    Where there are no tokens, and where a decoder reads other ones than the encoder, they are called by their places.
    """
    from lagwise.tasks.lm import LanguageModel
    from lagwise.tasks.models import Classifier

    before = ["[first]"] if isinstance(model, Classifier) and model.first is not None else []
    if "tokens" not in batch or "inputs" in batch:
        values = next(iter(batch.values()))
        return [*before, *(str(place) for place in range(values.shape[1]))]
    tokens = batch["tokens"][0].tolist()
    if isinstance(task, LanguageModel):
        special = task.alphabet.special
        return ["[special]" if special[token] else task.decoded([token]) for token in tokens]
    return [*before, *map(str, tokens)]


def first_text(call: "Call") -> "Call":
    """Returns a call with the first text of its batch alone."""
    from torch import Tensor

    mask, start = call.key_mask, call.query_start
    return replace(
        call, q=call.q[:1], k=call.k[:1], v=call.v[:1], key_mask=None if mask is None else mask[:1],
        query_start=start[:1] if isinstance(start, Tensor) and start.ndim else start,
    )  # fmt: skip


def look_at_pretrained(name: str, text: str, most: int) -> Look:
    """Lets a Hugging Face model read a text; the decoder of a model that has two stacks reads it too."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError("a Hugging Face model needs transformers: pip install 'lagwise[hf]'") from error
    import torch

    from lagwise.lens import capture

    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise ValueError(f"MODEL_OR_RUN must be a run, or a model with its tokenizer, but {name} has no config.json")
    try:
        model = load(name)
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(name)
    except OSError as error:
        raise ValueError(
            f"MODEL_OR_RUN must be a run, or a model with its tokenizer, but {name} cannot be loaded: {error}"
        ) from error
    ids = tokenizer(text)["input_ids"]
    longest = min(most, tokenizer.model_max_length)
    notes = [f"The text has {len(ids):,} tokens, of which the model reads the first {longest:,}."] if len(ids) > longest else []
    row = torch.tensor([ids[:longest]])
    inputs = {"input_ids": row, "attention_mask": torch.ones_like(row)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = row
        notes.append("The decoder reads the same text as the encoder.")
    with torch.no_grad(), capture(model) as calls:
        model(**inputs)
    return Look(Path(name).name, model, calls, tokenizer.convert_ids_to_tokens(ids[:longest]), notes)


def load(name: str) -> Any:
    """Returns a Hugging Face model whose attention is ours, in evaluation mode."""
    from transformers import AutoConfig, AutoModel

    from lagwise.hf import NAME, from_pretrained_relative
    from lagwise.hf.bert import TYPES

    config = AutoConfig.from_pretrained(name)
    if getattr(config, "position_embedding_type", None) in TYPES:
        return from_pretrained_relative(name, AutoModel).eval()
    return AutoModel.from_pretrained(name, attn_implementation=NAME).eval()


def ranges_of(model: "nn.Module") -> dict[str, Any]:
    """Returns the dependency ranges of each AT5 of a model, by its name."""
    from lagwise.encodings import AT5
    from lagwise.lens import dependency_ranges

    return {name: dependency_ranges(module).cpu() for name, module in model.named_modules() if isinstance(module, AT5)}
