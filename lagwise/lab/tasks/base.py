"""The interface of a task: its data, the model's head, a loss and a metric. `lagwise.lab.tasks` names them all."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from lagwise.errors import nearest
from lagwise.lab.config import Config

Batch: TypeAlias = dict[str, Tensor]
Split: TypeAlias = Literal["train", "validation", "test"]

SPLITS: tuple[Split, ...] = ("train", "validation", "test")

HUB = "hub"
"""The value of `data` that asks for a download through Hugging Face `datasets`."""


@dataclass(frozen=True)
class Facts:
    """What `lagwise tasks` tells about a task."""

    words: str
    """What is asked, in one line."""
    metric: str
    """The name of the metric that counts, the first of `Task.metrics`."""
    source: str
    """Where the data comes from: how it is generated, or the official files."""
    size: str
    licence: str
    published: str = ""
    """Published numbers with their papers."""
    files: str = ""
    """What `--data DIR` must hold; empty for generated data."""
    hub: str = ""
    """The name on the Hugging Face Hub that `--data hub` downloads; empty if there is none."""


@dataclass(frozen=True)
class Sampling:
    """How sequences are drawn from a model.

    Args:
        count: How many.
        length: How many tokens each has, the prompt included.
        temperature: Below 1 likely tokens become likelier; 0 takes the likeliest.
        nucleus: Only the likeliest tokens that together have this probability are drawn.
        seed: Where random numbers start.
    """

    count: int = 1
    length: int = 256
    temperature: float = 1.0
    nucleus: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class NoOptions:
    """The options of a task that has none."""


class Examples(ABC):
    """The examples of one split."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, indices: Sequence[int]) -> Batch:
        """Returns some examples as one batch, with tensors of the batch in their first axis."""


class Tensors(Examples):
    """Examples of one shape, as tensors with an axis of examples."""

    def __init__(self, **columns: Tensor):
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = torch.as_tensor(indices)
        return {name: column[rows] for name, column in self.columns.items()}


class Sequences(Examples):
    """Sequences of different lengths, end to end in one tensor, and columns with one entry for each.

    A batch has `tokens` [batch, time] as int64, padded with `padding` on the right to the longest of them, and `lengths` [batch].
    """

    def __init__(self, tokens: Tensor, ends: Tensor, *, padding: int = 0, max_length: int | None = None, **columns: Tensor):
        self.tokens, self.padding, self.columns = tokens, padding, columns
        self.starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        sizes = ends - self.starts
        self.sizes = sizes if max_length is None else sizes.clamp(max=max_length)

    @classmethod
    def of(cls, rows: Sequence[Tensor], **options: Any) -> "Sequences":
        """Makes them of a list of sequences."""
        ends = torch.tensor([len(row) for row in rows]).cumsum(0)
        return cls(torch.cat(list(rows)) if rows else torch.empty(0, dtype=torch.int64), ends, **options)

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = torch.as_tensor(indices)
        lengths, starts = self.sizes[rows], self.starts[rows]
        # Whole slices are copied many times faster than single tokens are gathered.
        slices = [self.tokens[start : start + size] for start, size in zip(starts.tolist(), lengths.tolist(), strict=True)]
        tokens = pad_sequence(slices, batch_first=True, padding_value=self.padding).long()
        return {"tokens": tokens, "lengths": lengths, **{name: column[rows] for name, column in self.columns.items()}}


def batches_on(device: torch.device, examples: Examples, size: int, limit: int | None = None) -> Iterator[Batch]:
    """Yields all examples in their order, or the first ones up to a limit, as batches on a device."""
    numbers = range(len(examples) if limit is None else min(limit, len(examples)))
    for start in numbers[::size]:
        yield {name: x.to(device) for name, x in examples.batch(numbers[start : start + size]).items()}


class Task(ABC):
    """A task: where its examples come from, what model solves it, how it is trained and measured.

    Args:
        data: The folder of the official files, "hub" for a download, or None: generated data, or the small built-in sample.
        seed: Where the random numbers of generated data start.
        options: Values of the fields of `Options`.
    """

    facts: ClassVar[Facts]

    defaults: ClassVar[Mapping[str, Any]] = {}
    """Fields of `lagwise.lab.config.Config` that differ for this task."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Named configurations of the papers: fields of `Config` beside the defaults."""

    Options: ClassVar[type] = NoOptions
    """A frozen dataclass of the task's own options, with defaults."""

    def __init__(self, data: Path | str | None = None, *, seed: int = 0, **options: Any):
        known = [field.name for field in fields(self.Options)]
        for name in options:
            if name not in known:
                raise ValueError(f"{name!r} is no option of the task{nearest(name, known)}")
        self.options = self.Options(**options)
        self.data, self.seed = data, seed
        if data == HUB and not self.facts.hub:
            raise ValueError("data must be a folder or left out, but is 'hub', and this task is not on the Hub")

    @property
    def is_sample(self) -> bool:
        """Whether the examples are the small built-in sample, whose numbers mean nothing."""
        return self.data is None and bool(self.facts.files)

    @property
    def length(self) -> int | None:
        """The length of the training examples, or the most that they have; None where the task has no such option."""
        length = getattr(self.options, "length", None)
        return length if isinstance(length, int) else None

    @abstractmethod
    def examples(self, split: Split, length: int | None = None) -> Examples:
        """Returns the examples of a split; with `length`, as long as that instead of the task's own length.

        A task that cannot make longer ones raises a ValueError that says so.
        """

    @abstractmethod
    def model(self, config: Config) -> nn.Module:
        """Returns a model whose forward pass takes a batch (a dict of tensors) and returns its outputs."""

    @abstractmethod
    def loss(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the sum of the loss over the items of a batch, and their number, both scalars."""

    @abstractmethod
    def metrics(self) -> dict[str, Metric]:
        """Returns fresh metrics by name; the first one counts."""

    @abstractmethod
    def answers(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns predictions and targets, for the metrics."""

    def measured(self, model: nn.Module, outputs: Any, batch: Batch) -> tuple[Any, ...]:
        """Returns what each metric is updated with; a task whose metrics need more than the outputs asks the model for it."""
        return self.answers(outputs, batch)

    def generate(self, model: nn.Module, prompt: str | None, sampling: Sampling, out: Path) -> list[Path]:
        """Draws sequences that go on from a prompt, writes them to a folder, and returns the files."""
        raise ValueError("the task has nothing to generate: its models classify or measure what they are given")

    def attach(self, folder: Path) -> None:
        """Is told the folder of a run before its model is made: what the model needs beside its weights is kept there."""
        return

    def curves(self, model: nn.Module, split: Split, length: int | None, *, batch: int, limit: int | None) -> dict[str, Any]:
        """Returns what an evaluation stores beside single numbers, such as the loss at each position, as JSON knows it."""
        return {}

    def encoding_options(self, encoding: str) -> dict[str, Any]:
        """Returns options of an encoding that suit the task, such as the paper's; given ones count more."""
        return {}

    def token_names(self, tokens: Sequence[int]) -> list[str]:
        """Returns what people call the tokens of a text; their numbers where the task knows no better."""
        return [str(token) for token in tokens]

    def text_batch(self, text: str) -> Batch:
        """Returns a text as a batch of one, where the examples of the task are plain texts."""
        raise ValueError("--text must be left out for a run of this task, whose examples are not plain text: pass --example")

    def tokens(self, batch: Batch) -> int:
        """Returns how many tokens a batch has, for the speed; without padding."""
        if "lengths" in batch:
            return int(batch["lengths"].sum())
        first = next(iter(batch.values()))
        return first.shape[0] * first.shape[1]


class Classification(Task):
    """A task with one of some classes for each example: `label` [batch] in a batch, and scores [batch, classes] as outputs."""

    classes: ClassVar[int]

    def loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(outputs, batch["label"], reduction="sum"), outputs.new_tensor(len(outputs))

    def metrics(self) -> dict[str, Metric]:
        return {"accuracy": MulticlassAccuracy(self.classes, average="micro")}

    def answers(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return outputs, batch["label"]
