"""A look through the lens at the model of a run, which reads a text or an example of the test split."""

from pathlib import Path

import torch
from torch import nn

from lagwise.lab.curves import extrapolation
from lagwise.lab.look import Look, check_text, edges_of, linear_notes, ranges_of
from lagwise.lab.loop import Session, Settings, to_device
from lagwise.lab.run import load_trained
from lagwise.lab.tasks.base import Batch, Task
from lagwise.lab.tasks.models import Classifier
from lagwise.lens import Ablation, ablate, capture
from lagwise.lens.model_page import Lengths


def look_at_run(folder: Path, text: str | None, example: int, settings: Settings, ablation: bool) -> Look:
    """Lets the model of a run read a text, or an example of the test split."""
    session = load_trained(folder, settings)
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
    calls = [call.first_row() for call in calls]
    read = f"example {example} of the test split" if text is None else "the given text"
    notes = [f"The model has seed {config.seed} and was trained for {session.step:,} steps. It reads {read}."]
    notes += [f"The example is a group of {texts} texts, of which this is the first."] if texts > 1 else []
    notes += linear_notes(calls)
    notes += ["The data is the small built-in sample: these numbers mean little. Pass --data."] if task.is_sample else []
    name, tokens = f"{config.task} with {config.encoding}", token_words(task, model, batch)
    metric, found = next(iter(task.metrics())), ablation_of(session) if ablation else None
    before = edges_of(untrained_model(session)) if ranges_of(model) else None
    return Look(name, model, calls, tokens, notes, found, f"validation {metric}", before, lengths_of(session, metric))


def ablation_of(session: Session) -> Ablation:
    """Evaluates the model of a run with the priors of more and more heads."""
    metric = next(iter(session.task.metrics()))
    return ablate(session.model.eval(), lambda: session.evaluate("validation")[metric])


def batch_of(task: Task, text: str) -> Batch:
    """Returns a text as a batch of one, for tasks that read text."""
    check_text(text)
    return task.text_batch(text)


def token_words(task: Task, model: nn.Module, batch: Batch) -> list[str]:
    """Returns what the page calls the tokens of the first text of a batch, as the task names them.

    They are called by their places where there are no tokens, and where a decoder reads as many other ones as the encoder, since
    the page knows one text by its number of tokens.
    """
    before = ["[first]"] if isinstance(model, Classifier) and model.first is not None else []
    values = batch["tokens"] if "tokens" in batch else next(iter(batch.values()))
    if "tokens" not in batch or ("inputs" in batch and batch["inputs"].shape[-1] == values.shape[-1]):
        return [*before, *(str(place) for place in range(values.shape[1]))]
    # Those of a pair of texts have one more axis.
    return [*before, *task.token_names(values.flatten(0, -2)[0].tolist())]


def untrained_model(session: Session) -> nn.Module | None:
    """Returns the model of a run as it was before its training; None for one that started from another run."""
    config = session.config
    if session.run is not None and session.run.config.start:
        return None
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        return session.task.model(config)


def lengths_of(session: Session, metric: str) -> Lengths | None:
    """Returns how a run does at other lengths; None for one that was not evaluated there, or is not complete."""
    result = None if session.run is None else session.run.result
    if result is None or not result["lengths"]:
        return None
    return Lengths(f"test {metric}", extrapolation(result, metric), session.task.length)
