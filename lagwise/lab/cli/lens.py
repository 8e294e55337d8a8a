"""The command of the lens: a page about a trained model."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from lagwise.extras import install_command
from lagwise.lab.cli.console import console, in_words
from lagwise.lab.cli.train import Data, Device, Runs, Save, measured_on, settings_of, trained

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lagwise.encodings import T5
    from lagwise.lab.loop import Session
    from lagwise.lab.tasks.base import Batch, Task
    from lagwise.lens import Ablation, Call, Kernels
    from lagwise.lens.page import Lengths

TEXT = (
    "The clockmaker who mended the old lamp on the long bridge forgot his blue umbrella there, and when the rain came, "
    "the baker carried it home for him."
)
"""What a Hugging Face model reads unless a text is given."""


POSITIONS = ("position_embeddings", "embed_positions", "wpe")
"""What models call their tables of absolute positions."""


class Look(NamedTuple):
    """A model that has read a text."""

    name: str
    model: "nn.Module"
    calls: "list[Call]"
    tokens: list[str]
    notes: list[str]
    ablation: "Ablation | None" = None
    metric: str = ""
    edges_before: "dict[str, Tensor] | None" = None
    lengths: "Lengths | None" = None


def register(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    for command in (lens, ablate):
        app.command()(command)


@in_words()
def lens(
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
    from lagwise.lab.store import ENVIRONMENT
    from lagwise.lens.page import page

    check_folder(model)
    is_run = (Path(model) / ENVIRONMENT).is_file()
    if example and (text is not None or not is_run):
        raise ValueError("--example must be left out beside --text, and for a Hugging Face model, which has no test split")
    if is_run:
        look = look_at_run(Path(model), text, example, data, device, ablation)
    elif ablation:
        raise ValueError("--ablate must be left out for a Hugging Face model, which comes without a metric: call lens.ablate")
    elif data is not None or device not in ("auto", "cpu"):
        raise ValueError("--data and --device must be left out for a Hugging Face model: it reads --text, on the CPU")
    else:
        look = look_at_pretrained(model, TEXT if text is None else text, tokens)
    title = f"The lens on {look.name}"
    command = shlex.join(["lagwise", *sys.argv[1:]])
    kernels, without = kernels_of(look.model, max(call.q.shape[2] for call in look.calls))
    look.notes.extend(without)
    made = page(
        look.calls, look.tokens, title=title, command=command, notes=look.notes, ranges=ranges_of(look.model),
        edges=edges_of(look.model), edges_before=look.edges_before, kernels=kernels, lengths=look.lengths,
        ablation=look.ablation, metric=look.metric,
    )  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(made, encoding="utf-8")
    for note in look.notes:
        console.print(note, markup=False)
    console.print(f"written to {out}")


@in_words()
def ablate(
    runs: Runs,
    data: Data = None,
    device: Device = "auto",
    save: Save = None,
) -> None:
    """Evaluate runs with the priors of more and more heads: which of them does the model need?

        lagwise ablate runs/squad/*/*-seed0
        lagwise ablate runs/squad/at5/* --save ablation.jsonl

    The first paper's ablation: all biases are switched off, and those of single heads on again, from the lowest to the highest
    peak of the prior. The metric is that of the validation split.
    """
    from rich.table import Table

    from lagwise.lab.store import add_line

    table = Table("run", "metric", "no priors", "a quarter", "a half", "three quarters", "all", "heads")
    for folder in runs:
        session = trained(folder, settings_of(device, data))
        metric, found = next(iter(session.task.metrics())), ablation_of(session)
        heads = [{"layers": head.layers, "head": head.head, "peak": head.peak, "lag": head.peak_lag} for head in found.order]
        if save is not None:
            known = {**measured_on("ablation", session), "split": "validation", "metric": metric}
            add_line(save, {**known, "values": found.values, "heads": heads})
        parts = (found.values[round(share * len(heads) / 4)] for share in range(5))
        name = f"{session.config.task}, {session.config.encoding}, seed {session.config.seed}"
        table.add_row(name, metric, *(f"{value:.4f}" for value in parts), str(len(heads)))
    console.print(table)
    if save is not None:
        console.print(f"added to {save}")


def check_folder(name: str) -> None:
    """Raises for a folder that is not there, so that the Hub is not asked for it."""
    if is_path(name) and not Path(name).is_dir():
        raise ValueError(f"MODEL_OR_RUN must be a run or a Hugging Face model, but there is no folder {name}")


def is_path(name: str) -> bool:
    """Says whether a name is that of a folder: names of the Hub have one slash at most, and an owner that is no folder here."""
    first, *others = name.split("/")
    return name.startswith((".", "/", "~")) or name.endswith("/") or len(others) > 1 or (bool(others) and Path(first).is_dir())


def ablation_of(session: "Session") -> "Ablation":
    """Evaluates the model of a run with the priors of more and more heads."""
    from lagwise.lens.ablation import ablate as switch_on

    metric = next(iter(session.task.metrics()))
    return switch_on(session.model.eval(), lambda: session.evaluate("validation")[metric])


def look_at_run(folder: Path, text: str | None, example: int, data: str | None, device: str, ablation: bool) -> Look:
    """Lets the model of a run read a text, or an example of the test split."""
    import torch

    from lagwise.lab.loop import to_device
    from lagwise.lens import capture

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
    calls = [first_text(call) for call in calls]
    read = f"example {example} of the test split" if text is None else "the given text"
    notes = [f"The model has seed {config.seed} and was trained for {session.step:,} steps. It reads {read}."]
    notes += [f"The example is a group of {texts} texts, of which this is the first."] if texts > 1 else []
    notes += linear_notes(calls)
    notes += ["The data is the small built-in sample: these numbers mean little. Pass --data."] if task.is_sample else []
    name, tokens = f"{config.task} with {config.encoding}", words_of(task, model, batch)
    metric, found = next(iter(task.metrics())), ablation_of(session) if ablation else None
    before = edges_of(untrained(session)) if ranges_of(model) else None
    return Look(name, model, calls, tokens, notes, found, f"validation {metric}", before, lengths_of(session, metric))


def linear_notes(calls: "list[Call]") -> list[str]:
    """Returns what a reader must know of linear attention; raises for scores that the page cannot draw."""
    linear = [call for call in calls if call.feature_map is not None]
    for call in linear:
        parts = call.parts()
        if bool((parts.context_score.isinf() & parts.visible[:, None]).any()):
            raise ValueError(
                f"weights must be above 0 to have a logarithm, but {call.layer} has some that are 0: read another text, or take "
                "call.parts() of lens.capture"
            )
    if not linear:
        return []
    return [
        "Attention is linear: the context score is the logarithm of the product of the features of query and key, up to a "
        "constant of each query, which cancels. Prior, likelihood and posterior are exact."
    ]


def batch_of(task: "Task", text: str) -> "Batch":
    """Returns a text as a batch of one, for tasks that read text."""
    check_text(text)
    return task.text_batch(text)


def check_text(text: str) -> None:
    """Raises for a text without words."""
    if not text.strip():
        raise ValueError("--text must have words to read, but is empty")


def words_of(task: "Task", model: "nn.Module", batch: "Batch") -> list[str]:
    """Returns what the page calls the tokens of the first text of a batch, as the task names them.

    They are called by their places where there are no tokens, and where a decoder reads as many other ones as the encoder, since
    the page knows one text by its number of tokens.
    """
    from lagwise.lab.tasks.models import Classifier

    before = ["[first]"] if isinstance(model, Classifier) and model.first is not None else []
    values = batch["tokens"] if "tokens" in batch else next(iter(batch.values()))
    if "tokens" not in batch or ("inputs" in batch and batch["inputs"].shape[-1] == values.shape[-1]):
        return [*before, *(str(place) for place in range(values.shape[1]))]
    # Those of a pair of texts have one more axis.
    return [*before, *task.token_names(values.flatten(0, -2)[0].tolist())]


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
        raise ValueError(f"a Hugging Face model needs transformers: {install_command('hf')}") from error
    import torch

    from lagwise.lens import capture

    check_text(text)
    if most < 1:
        raise ValueError(f"--tokens must be at least 1, but is {most}")
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise ValueError(f"MODEL_OR_RUN must be a run, or a model with its tokenizer, but {name} has no config.json")
    try:
        model = load(name)
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(name)
    except OSError as error:
        raise ValueError(
            f"MODEL_OR_RUN must be a run, or a model with its tokenizer, but {name} cannot be loaded: {error}"
        ) from error
    # Without files transformers makes a tokenizer that knows no word, and says nothing.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ValueError(f"MODEL_OR_RUN must be a run, or a model with its tokenizer, but {name} has none: save it there too")
    ids = tokenizer(text, verbose=False)["input_ids"]
    if not ids:
        raise ValueError(f"--text must have tokens of the model, but its tokenizer finds none in {text!r}")
    longest = min(most, tokenizer.model_max_length, last_position(model))
    notes = [f"The text has {len(ids):,} tokens, of which the model reads the first {longest:,}."] if len(ids) > longest else []
    row = torch.tensor([ids[:longest]])
    inputs = {"input_ids": row, "attention_mask": torch.ones_like(row)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = row
        notes.append("The decoder reads the same text as the encoder.")
    with torch.no_grad(), capture(model) as calls:
        model(**inputs)
    notes += linear_notes(calls)
    return Look(Path(name).name, model, calls, tokenizer.convert_ids_to_tokens(ids[:longest]), notes)


def last_position(model: Any) -> int:
    """Returns how many tokens a Hugging Face model has positions for; without bound where it adds none to its input."""
    from torch import nn

    from lagwise.hf.bert import TYPES
    from lagwise.hf.convert import UnusedEmbedding, longest

    if getattr(model.config, "position_embedding_type", None) in TYPES:
        return model.config.max_position_embeddings
    named = (module for name, module in model.named_modules() if name.rsplit(".", 1)[-1] in POSITIONS)
    tables = [table for table in named if isinstance(table, nn.Embedding) and not isinstance(table, UnusedEmbedding)]
    # Some tables have places before the first position, of which the config tells.
    return min([model.config.max_position_embeddings, *map(longest, tables)]) if tables else sys.maxsize


def load(name: str) -> Any:
    """Returns a Hugging Face model whose attention is ours, in evaluation mode."""
    from transformers import AutoConfig, AutoModel

    from lagwise.hf import NAME, from_pretrained_relative
    from lagwise.hf.bert import TYPES

    config = AutoConfig.from_pretrained(name)
    if getattr(config, "position_embedding_type", None) in TYPES:
        return from_pretrained_relative(name, AutoModel).eval()
    return AutoModel.from_pretrained(name, attn_implementation=NAME).eval()


def ranges_of(model: "nn.Module") -> "dict[str, Tensor]":
    """Returns the dependency ranges of each AT5 of a model, by its name."""
    from lagwise.encodings import AT5
    from lagwise.lens import dependency_ranges

    return {name: dependency_ranges(module).cpu() for name, module in model.named_modules() if isinstance(module, AT5)}


def edges_of(model: "nn.Module | None") -> "dict[str, Tensor]":
    """Returns where the buckets of each T5 and AT5 of a model begin, by its name; those of Hugging Face count too."""
    from lagwise.encodings import AT5, T5
    from lagwise.lens import bucket_edges

    found = {}
    for name, module in () if model is None else model.named_modules():
        if isinstance(module, AT5 | T5):
            found[name] = bucket_edges(module).cpu()
        elif hasattr(module, "relative_attention_bias"):
            found[name] = bucket_edges(with_buckets_of(module))
    return found


def with_buckets_of(module: Any) -> "T5":
    """Returns an encoding with the buckets of a layer of Hugging Face's T5, or of its MPNet, which has always the same."""
    from lagwise.encodings import T5
    from lagwise.hf.mpnet import BUCKETS, MAX_LAG

    buckets = getattr(module, "relative_attention_num_buckets", BUCKETS)
    max_lag = getattr(module, "relative_attention_max_distance", MAX_LAG)
    return T5(heads=1, buckets=buckets, max_lag=max_lag, causal=bool(getattr(module, "is_decoder", False)))


def kernels_of(model: "nn.Module", length: int) -> "tuple[dict[str, Kernels], list[str]]":
    """Returns the kernels of each stochastic encoding of a model by its name, and in words which have none."""
    from lagwise.encodings import StochasticEncoding
    from lagwise.lens import Kernels, spe_kernels

    found, without = {}, []
    for name, module in model.named_modules():
        if isinstance(module, StochasticEncoding):
            try:
                found[name] = Kernels(*(values.cpu() for values in spe_kernels(module, length)))
            except ValueError as error:
                without.append(f"{name} shows no kernels: {error}")
    return found, without


def untrained(session: "Session") -> "nn.Module | None":
    """Returns the model of a run as it was before its training; None for one that started from another run."""
    import torch

    config = session.config
    if session.run is not None and session.run.config.start:
        return None
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        return session.task.model(config)


def lengths_of(session: "Session", metric: str) -> "Lengths | None":
    """Returns how a run does at other lengths; None for one that was not evaluated there, or is not complete."""
    from lagwise.lab.curves import extrapolation
    from lagwise.lens.page import Lengths

    result = None if session.run is None else session.run.result
    if result is None or not result["lengths"]:
        return None
    return Lengths(f"test {metric}", extrapolation(result, metric), session.task.length)
