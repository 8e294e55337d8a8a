"""Long-Range Arena's retrieval task: whether two documents belong together, from their bytes, read apart by one encoder."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lagwise.errors import require_sizes
from lagwise.lab.config import Config
from lagwise.lab.tasks.base import SPLITS, Batch, Classification, Examples, Facts, Sequences, Split
from lagwise.lab.tasks.choices import Chooser
from lagwise.lab.tasks.files import binary_label, find_file, fixed_order, nonempty, required_file, table_rows
from lagwise.lab.tasks.lra.byte_text import SYMBOLS, byte_names, pack_bytes
from lagwise.lab.tasks.lra.presets import largest_rate, lra_presets, suited_options
from lagwise.lab.tasks.models import Classifier, Pooling, check_pooling

COLUMNS = ("label", "id1", "id2", "text1", "text2")
SOURCE = "the files are in lra_release.gz of https://github.com/google-research/long-range-arena"
PARTS: dict[Split, str] = {"train": "train", "validation": "eval", "test": "test"}
"""What the files call the splits."""


class Pairs(NamedTuple):
    """Documents, and of each pair their two numbers and its class."""

    documents: list[bytes]
    members: Int[Tensor, "pairs two"]
    label: Int[Tensor, " pairs"]


class PairExamples(Examples):
    """Pairs of documents: a batch has `tokens` [batch, 2, time], `lengths` [batch, 2] and `label` [batch]."""

    def __init__(self, documents: Sequences, members: Int[Tensor, "pairs two"], label: Int[Tensor, " pairs"]):
        self.documents, self.members, self.label = documents, members, label

    def __len__(self) -> int:
        return len(self.label)

    def batch(self, indices: Sequence[int]) -> Batch:
        pairs = torch.as_tensor(indices)
        both = self.documents.batch(self.members[pairs].flatten().tolist())
        return {name: column.unflatten(0, (-1, 2)) for name, column in both.items()} | {"label": self.label[pairs]}


class TwoTowers(Classifier):
    """One encoder for both documents, and scores [batch, classes] of what it makes of them.

    The head reads both vectors, their product and their difference, and has two hidden layers, as in the Long-Range Arena.
    """

    def __init__(self, config: Config, *, classes: int, pooling: Pooling = "first"):
        super().__init__(config, symbols=SYMBOLS, classes=classes, pooling=pooling)
        hidden = config.hidden or 4 * config.dim
        self.choice = nn.Sequential(
            nn.Linear(4 * config.dim, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden // 2),
            nn.ReLU(),
            nn.Linear(hidden // 2, classes),
        )

    def forward(self, batch: Batch) -> Float[Tensor, "batch classes"]:
        documents = {name: batch[name].flatten(0, 1) for name in ("tokens", "lengths")}
        x, y = self.pooled(documents).unflatten(0, (-1, 2)).unbind(1)
        return self.choice(torch.cat([x, y, x * y, x - y], dim=-1))


@dataclass(frozen=True)
class RetrievalOptions:
    """What can be chosen of the retrieval task.

    Args:
        length: How many bytes of each document are read.
        pooling: How the vectors of a document's bytes become one: "first", a learned vector before them as published, their
            "mean", with which small models learn sooner, or the "last".
    """

    length: int = 4000
    pooling: Pooling = "first"

    def __post_init__(self) -> None:
        require_sizes(length=self.length)
        check_pooling(self.pooling)


class Retrieval(Classification):
    """Pairs of documents as bytes, in two classes."""

    classes = 2
    facts: ClassVar[Facts] = Facts(
        words="do two documents belong together? Each is read apart, as bytes",
        metric="accuracy",
        source=(
            "ACL Anthology Network: does one paper cite the other? As in the Long-Range Arena (Tay et al. 2021). Also a "
            "SUBSTITUTE, whose numbers compare with nothing published: does one Wikipedia article link to the other?"
        ),
        size="the pairs of the official files, the first 4,000 bytes of each document; substitute: 32,000, 4,000 and 4,000 pairs",
        licence="none stated; substitute: GFDL / CC BY-SA",
        published=(
            "Liutkus et al. 2021, mean and deviation of the released runs: Performer 59.84 ± 1.46 (absolute), 60.00 ± 1.20 "
            "(sines), 57.22 (convolutions, one run); ReLU 58.78 ± 0.93 (absolute), 62.39 ± 0.59 (sines), "
            "61.13 (convolutions, one run)"
        ),
        files=(
            "new_aan_pairs.{train,eval,test}.tsv of label, id1, id2, text1 and text2; substitute: docs.tsv of id, title and "
            "text, and pairs.{train,eval,test}.tsv of label, id1 and id2; plain or as .xz or .gz"
        ),
    )
    defaults: ClassVar[dict[str, Any]] = {
        "dim": 64, "layers": 2, "batch": 16, "steps": 500, "warmup": 50, "evaluate_examples": 1000,
        "task_options": {"length": 256},
    }  # fmt: skip
    presets = lra_presets(
        realizations=64, task_options={"length": 4000}, layers=4, heads=4, dim=128, hidden=512, batch=8,
        rate=largest_rate(0.005, 3000), schedule="rsqrt", warmup=3000, steps=15_000, weight_decay=0.1, dropout=0.1,
    )  # fmt: skip
    Options = RetrievalOptions

    def __init__(self, data: Path | str | None = None, *, seed: int = 0, **options: Any):
        super().__init__(data, seed=seed, **options)
        self.pairs: dict[Split, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def examples(self, split: Split, length: int | None = None) -> PairExamples:
        if split not in self.pairs:
            documents, members, label = sample_pairs(split) if self.data is None else read_pairs(Path(self.data), split)
            order = fixed_order(len(label))
            self.pairs[split] = (*pack_bytes(documents), members[order], label[order])
        tokens, ends, members, label = self.pairs[split]
        documents = Sequences(tokens, ends, max_length=self.options.length if length is None else length)
        return PairExamples(documents, members, label)

    def model(self, config: Config) -> TwoTowers:
        return TwoTowers(config, classes=self.classes, pooling=self.options.pooling)

    def encoding_options(self, encoding: str) -> dict[str, Any]:
        return suited_options(encoding, self.presets, self.options.length)

    def token_names(self, tokens: Sequence[int]) -> list[str]:
        return byte_names(tokens)


def read_pairs(folder: Path, split: Split) -> Pairs:
    """Returns the pairs of a split of the official files, or of the substitute where there are none."""
    official = f"new_aan_pairs.{PARTS[split]}.tsv"
    if find_file(folder, official) is None and find_file(folder, "docs.tsv") is not None:
        warnings.warn(
            f"{folder} holds links between articles, a SUBSTITUTE for the retrieval task: no published number compares with it",
            stacklevel=2,
        )
        return read_substitute(folder, PARTS[split])
    return read_official(required_file(folder, official, SOURCE))


def read_official(path: Path) -> Pairs:
    """Returns the pairs of an official file, each document once."""
    numbers: dict[bytes, int] = {}
    members, labels = [], []
    for place, (label, _, _, *texts) in table_rows(path, *COLUMNS):
        labels.append(binary_label(place, label))
        members.append([numbers.setdefault(nonempty(place, text), len(numbers)) for text in texts])
    return Pairs(list(numbers), torch.tensor(members), torch.tensor(labels))


def read_substitute(folder: Path, part: str) -> Pairs:
    """Returns the pairs of a part of the substitute."""
    documents: list[bytes] = []
    numbers: dict[bytes, int] = {}
    for place, (key, _, text) in table_rows(required_file(folder, "docs.tsv", SOURCE), "id", "title", "text"):
        if key in numbers:
            raise ValueError(f"{place}: the id {key.decode()} was there before, but expected is a new one in each line")
        numbers[key] = len(documents)
        documents.append(nonempty(place, text))
    members, labels = [], []
    for place, (label, *keys) in table_rows(required_file(folder, f"pairs.{part}.tsv", SOURCE), "label", "id1", "id2"):
        for key in keys:
            if key not in numbers:
                raise ValueError(f"{place}: the id {key.decode()} is unknown, but expected is one of docs.tsv")
        labels.append(binary_label(place, label))
        members.append([numbers[key] for key in keys])
    return Pairs(documents, torch.tensor(members), torch.tensor(labels))


TOPICS = (
    ("glacier", "snow", "ridge", "valley", "summit", "moraine"),
    ("oven", "flour", "yeast", "crust", "butter", "loaf"),
    ("sail", "harbour", "anchor", "tide", "rudder", "mast"),
    ("violin", "tempo", "chord", "melody", "choir", "rhythm"),
)
SAMPLE_PAIRS = {"train": 64, "validation": 32, "test": 32}


def sample_pairs(split: Split) -> Pairs:
    """Returns pairs of made-up notes: of one topic, where the first refer to the second (1), or of two topics (0)."""
    one_of = Chooser(SPLITS.index(split))

    def words(topic: int, count: int) -> list[str]:
        return [one_of(TOPICS[topic]) for _ in range(count)]

    def pair(label: int) -> list[bytes]:
        first = one_of(range(len(TOPICS)))
        second = first if label else (first + one_of(range(1, len(TOPICS)))) % len(TOPICS)
        title = " and ".join(words(second, 2))
        reference = f" [See: {title}] [{title}]" if label else ""
        return [f"{', '.join(words(first, 8))}.{reference}".encode(), f"On {title}: {', '.join(words(second, 8))}.".encode()]

    labels = [index % 2 for index in range(SAMPLE_PAIRS[split])]
    documents = [document for label in labels for document in pair(label)]
    return Pairs(documents, torch.arange(len(documents)).view(-1, 2), torch.tensor(labels))
