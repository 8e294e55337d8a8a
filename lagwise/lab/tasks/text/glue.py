"""GLUE: nine tasks on sentences and pairs of sentences (Wang, Singh, Michael, Hill, Levy, Bowman 2019)."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import BinaryF1Score, BinaryMatthewsCorrCoef
from torchmetrics.regression import PearsonCorrCoef, SpearmanCorrCoef

from lagwise.errors import require_sizes
from lagwise.lab.config import Config
from lagwise.lab.tasks.base import HUB, Batch, Classification, Facts, Sampling, Sequences, Split
from lagwise.lab.tasks.files import fixed_order, write_whole
from lagwise.lab.tasks.models import Pooling, check_pooling, encoder_of, pool, sides_of
from lagwise.lab.tasks.text.glue_files import HUB_NAME, Item, Layout, file_items, hub_items
from lagwise.lab.tasks.text.glue_sample import sample_items
from lagwise.lab.tasks.text.pretrained import EncoderOptions, Pretrained
from lagwise.lab.tasks.text.tokenization import TokenizerTask, load_tokenizer, piece_names, trained_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPLIT_WORDS = "test is GLUE's dev, whose labels are public; validation is a fixed tenth of train"
LICENCE = "each task has its sources' own, see https://gluebenchmark.com"
PUBLISHED = "none found: Huang et al. 2020 evaluate on GLUE, but their numbers were not to be had"

SHARE = 10
"""One of so many training examples is kept for validation."""


@dataclass(frozen=True)
class GlueOptions(EncoderOptions):
    """What can be chosen of GLUE beside `EncoderOptions`.

    Args:
        length: Most tokens of an example; the longer text of a pair is cut first.
        pooling: How the encoder's vectors become one: their "mean", the "last", or the "first".
    """

    length: int = 128
    pooling: Pooling = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sizes(length=self.length)
        check_pooling(self.pooling)


class Glue(TokenizerTask, Classification):
    """A task of GLUE. `label` of a batch is the class, and `first` is where the second text begins."""

    layout: ClassVar[Layout]
    defaults: ClassVar[dict[str, Any]] = {
        "dim": 128, "layers": 2, "batch": 32, "steps": 500, "warmup": 50, "dropout": 0.1, "evaluate_batch": 64,
    }  # fmt: skip
    Options: ClassVar[type] = GlueOptions
    options: GlueOptions

    def __init__(self, data: Path | str | None = None, *, seed: int = 0, **options: Any):
        super().__init__(data, seed=seed, **options)
        self.encoded: dict[tuple[Split, int], Sequences] = {}

    def find_tokenizer(self) -> "Tokenizer":
        """Returns the tokenizer that is named, or one that is trained on the training text."""
        if named := self.options.tokenizer or self.options.path:
            return load_tokenizer(named)
        texts = [text for item in self.training_items["train"] for text in item.texts]
        return trained_tokenizer("wordpiece", texts, self.options.vocabulary)

    @cached_property
    def training_items(self) -> dict[Split, list[Item]]:
        """The official training examples, of which a fixed share is kept for validation."""
        found = self.read("train", labelled=True)
        kept = set(fixed_order(len(found))[: max(1, len(found) // SHARE)])
        if len(found) < 2:
            raise ValueError(f"data must have two training examples at least, one for validation, but has {len(found)}")
        return {
            "train": [item for index, item in enumerate(found) if index not in kept],
            "validation": [found[index] for index in sorted(kept)],
        }

    @cached_property
    def parts(self) -> list[list[Item]]:
        """The official parts that are evaluated."""
        return [self.read(part, labelled=True) for part in self.layout.dev]

    def items(self, split: Split) -> list[Item]:
        """Returns the examples of a split."""
        return self.parts[0] if split == "test" else self.training_items[split]

    def read(self, part: str, *, labelled: bool) -> list[Item]:
        """Returns an official part: from its file, from the Hub, or the built-in sample in its place."""
        if self.data is None:
            return sample_items(self.layout, part)
        if self.data == HUB:
            return hub_items(self.layout, part.replace("dev", "validation"))
        return file_items(self.layout, self.data, part, labelled=labelled)

    def examples(self, split: Split, length: int | None = None) -> Sequences:
        """Returns the examples of a split; with `length`, texts are cut to that number of tokens."""
        key = split, self.options.length if length is None else length
        if key not in self.encoded:
            items = self.items(split)
            label = torch.tensor([item.label for item in items])
            columns = {"label": label.long() if self.layout.labels else label, **self.columns(split)}
            self.encoded[key] = encoded(self.tokenizer, [item.texts for item in items], key[1], **columns)
        return self.encoded[key]

    def columns(self, split: Split) -> dict[str, Tensor]:
        """Returns more columns of the examples of a split."""
        return {}

    def model(self, config: Config) -> nn.Module:
        options = self.options
        symbols = max(self.tokenizer.get_vocab().values()) + 1
        if options.model == "encoder":
            model = SentenceEncoder(config, symbols=symbols, outputs=self.classes, pooling=options.pooling)
            if not self.layout.labels:
                # Scores start in the middle of their range, and not below it.
                nn.init.constant_(model.choice.bias, 2.5)
            return model
        return HuggingFaceChoice(config, options, symbols=symbols, num_labels=self.classes)

    def answers(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return outputs.argmax(1), batch["label"]

    def predicted(self, outputs: Float[Tensor, "batch outputs"]) -> list[float]:
        """Returns classes, or scores."""
        return outputs.argmax(1).tolist()

    @torch.no_grad()
    def generate(self, model: nn.Module, prompt: str | None, sampling: Sampling, out: Path) -> list[Path]:
        """Writes predictions for the official test part, whose labels are secret, in the leaderboard's format.

        Nothing is drawn, and nothing goes on from a prompt: both do not matter.
        """
        names = self.layout.predictions or (self.layout.folder,)
        device = next(model.parameters()).device
        written = []
        for part, name in zip(self.layout.test, names, strict=True):
            items = self.read(part, labelled=False)
            examples = encoded(self.tokenizer, [item.texts for item in items], self.options.length)
            predictions: list[float] = []
            for start in range(0, len(items), PREDICTED):
                batch = examples.batch(range(start, min(start + PREDICTED, len(items))))
                predictions += self.predicted(model({column: x.to(device) for column, x in batch.items()}))
            written.append(write_predictions(out / f"{name}.tsv", [self.layout.words_of(each) for each in predictions]))
        return written

    def encoding_options(self, encoding: str) -> dict[str, Any]:
        return {"length": self.options.length} if encoding == "learned" else {}

    def token_names(self, tokens: Sequence[int]) -> list[str]:
        return piece_names(self.tokenizer, tokens)

    def text_batch(self, text: str) -> Batch:
        if len(self.layout.texts) > 1:
            return super().text_batch(text)
        length = self.options.length
        found = encoded(self.tokenizer, [(text,)], length + 1).batch([0])
        if int(found["lengths"]) > length:
            raise ValueError(f"text must have at most {length} tokens, the run's length, but has more: shorten it")
        return found


PREDICTED = 64
"""Examples that are predicted at a time."""


def write_predictions(path: Path, predictions: Sequence[str]) -> Path:
    """Writes a table of the numbers of the test examples, from 0, and their predictions, and returns its path."""
    lines = ["index\tprediction", *(f"{index}\t{prediction}" for index, prediction in enumerate(predictions))]
    write_whole(path, "\n".join(lines) + "\n")
    return path


def facts_of(words: str, metric: str, source: str, size: str, layout: Layout, note: str = SPLIT_WORDS) -> Facts:
    """Returns the facts of a task of GLUE."""
    names = ("train", *layout.dev, *layout.test)
    files = f"{layout.folder}/{{{','.join(names)}}}.tsv or the same without the folder, plain or as .xz or .gz"
    return Facts(words, metric, source, f"{size}; {note}", LICENCE, PUBLISHED, files, f"{HUB_NAME} ({layout.hub})")


def presets_of(train: int) -> dict[str, dict[str, Any]]:
    """Returns the presets of a task with so many official training examples."""
    # What the paper used for GLUE was not found: rate, batch and two epochs are those of its SQuAD runs.
    return {
        "paper2-base": {
            "task_options": {"model": "hf", "path": "google-bert/bert-base-uncased"}, "encoding": "huang4",
            "encoding_options": {"max_lag": 511}, "per_layer": True, "dropout": 0.1, "attention_dropout": 0.1, "batch": 48,
            "rate": 3e-5, "schedule": "linear", "warmup": 0, "steps": 2 * ceil((train - train // SHARE) / 48),
        }
    }  # fmt: skip


class Cola(Glue):
    """Is a sentence English that a speaker accepts?"""

    layout = Layout(
        "CoLA", "cola", ("sentence",), "label", ("0", "1"), ("shuffled", "plain"),
        columns=("source", "label", "mark", "sentence"),
    )  # fmt: skip
    facts: ClassVar[Facts] = facts_of(
        "is a sentence grammatical?", "matthews", "CoLA (Warstadt et al. 2019) in GLUE", "8,551 train, 1,043 dev", layout
    )
    classes = 2
    presets = presets_of(8_551)

    def metrics(self) -> dict[str, Metric]:
        return {"matthews": BinaryMatthewsCorrCoef(), **super().metrics()}


class Sst2(Glue):
    """Does a sentence, or a part of one, praise a film?"""

    layout = Layout("SST-2", "sst2", ("sentence",), "label", ("0", "1"), ("bad", "good"))
    facts: ClassVar[Facts] = facts_of(
        "does a phrase of a review praise the film?", "accuracy", "SST-2 (Socher et al. 2013) in GLUE", "67,349 train, 872 dev",
        layout, f"{SPLIT_WORDS}, and easier: many of its phrases are parts of sentences of which other parts are trained on",
    )  # fmt: skip
    classes = 2
    presets = presets_of(67_349)


class Paraphrases(Glue):
    """Do two texts mean the same? Most of the data has one answer, and so F1 counts first."""

    classes = 2

    def metrics(self) -> dict[str, Metric]:
        return {"f1": BinaryF1Score(), **super().metrics()}


class Mrpc(Paraphrases):
    """Do two sentences of the news mean the same?"""

    layout = Layout(
        "MRPC", "mrpc", ("#1 String", "#2 String"), "Quality", ("0", "1"), ("other", "same"), ("sentence1", "sentence2")
    )
    facts: ClassVar[Facts] = facts_of(
        "do two sentences of the news mean the same?", "f1", "MRPC (Dolan and Brockett 2005) in GLUE", "3,668 train, 408 dev",
        layout,
    )  # fmt: skip
    presets = presets_of(3_668)


class Qqp(Paraphrases):
    """Do two questions ask the same?"""

    layout = Layout("QQP", "qqp", ("question1", "question2"), "is_duplicate", ("0", "1"), ("other", "same"), broken=10)
    facts: ClassVar[Facts] = facts_of(
        "do two questions ask the same?", "f1", "Quora Question Pairs in GLUE", "363,846 train, 40,430 dev", layout
    )
    presets = presets_of(363_846)


class Stsb(Glue):
    """How much do two sentences mean the same, from 0 to 5?"""

    layout = Layout("STS-B", "stsb", ("sentence1", "sentence2"), "score", (), ("other", "near", "same"))
    facts: ClassVar[Facts] = facts_of(
        "how much do two sentences mean the same, from 0 to 5?", "pearson", "STS benchmark (Cer et al. 2017) in GLUE",
        "5,749 train, 1,500 dev", layout,
    )  # fmt: skip
    classes = 1
    presets = presets_of(5_749)

    def loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return F.mse_loss(outputs[:, 0].float(), batch["label"], reduction="sum"), outputs.new_tensor(len(outputs))

    def metrics(self) -> dict[str, Metric]:
        with warnings.catch_warnings():
            # Spearman's ranks need all predictions, and there are not many.
            warnings.filterwarnings("ignore", "Metric `SpearmanCorrcoef` will save", UserWarning)
            return {"pearson": Correlation(), "spearman": SpearmanCorrCoef()}

    def answers(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return outputs[:, 0].float(), batch["label"]

    def predicted(self, outputs: Float[Tensor, "batch outputs"]) -> list[float]:
        return outputs[:, 0].tolist()


class Correlation(PearsonCorrCoef):
    """Pearson's, of which a higher one is better here; torchmetrics leaves that open, since -1 is a perfect relation too."""

    higher_is_better = True


class Mnli(Glue):
    """Does a sentence follow from another one? Dev has texts of the genres of train (matched), and of others (mismatched)."""

    layout = Layout(
        "MNLI", "mnli", ("sentence1", "sentence2"), "gold_label", ("entailment", "neutral", "contradiction"),
        ("same", "other", "opposite"), ("premise", "hypothesis"), dev=("dev_matched", "dev_mismatched"),
        test=("test_matched", "test_mismatched"), predictions=("MNLI-m", "MNLI-mm"),
    )  # fmt: skip
    facts: ClassVar[Facts] = facts_of(
        "does a sentence follow from another, contradict it, or neither?", "matched", "MultiNLI (Williams et al. 2018) in GLUE",
        "392,702 train, 9,815 dev matched, 9,832 dev mismatched", layout,
        "test is both parts of dev by turns, whose labels are public; validation is a fixed tenth of train, all of it matched",
    )  # fmt: skip
    classes = 3
    presets = presets_of(392_702)

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """Which example of which part of dev comes when: by turns, so that any first ones stand for both."""
        return sorted(
            ((part, index) for part, items in enumerate(self.parts) for index in range(len(items))), key=lambda p: p[::-1]
        )

    def items(self, split: Split) -> list[Item]:
        return [self.parts[part][index] for part, index in self.places] if split == "test" else super().items(split)

    def columns(self, split: Split) -> dict[str, Tensor]:
        parts = [part for part, _ in self.places] if split == "test" else [0] * len(self.training_items[split])
        return {"part": torch.tensor(parts)}

    def metrics(self) -> dict[str, Metric]:
        return {"matched": PartAccuracy(0), "mismatched": PartAccuracy(1)}

    def answers(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return outputs.argmax(1), torch.stack([batch["label"], batch["part"]], dim=1)


class PartAccuracy(MeanMetric):
    """The accuracy on the examples of one part; NaN where there are none of it.

    >>> metric = PartAccuracy(1)
    >>> metric.update(torch.tensor([2, 0, 1]), torch.tensor([[2, 1], [1, 0], [0, 1]]))
    >>> metric.compute()
    tensor(0.5000)
    """

    higher_is_better = True

    def __init__(self, part: int):
        super().__init__()
        self.part = part

    def update(self, classes: Int[Tensor, " batch"], targets: Int[Tensor, "batch 2"]) -> None:
        """Takes predicted classes, and rows of the right class and the part."""
        super().update((classes == targets[:, 0])[targets[:, 1] == self.part].float())


class Qnli(Glue):
    """Does a sentence have the answer to a question?"""

    layout = Layout("QNLI", "qnli", ("question", "sentence"), "label", ("entailment", "not_entailment"), ("same", "other"))
    facts: ClassVar[Facts] = facts_of(
        "does a sentence answer a question?", "accuracy", "QNLI, made of SQuAD 1.1 (Rajpurkar et al. 2016), in GLUE",
        "104,743 train, 5,463 dev", layout,
    )  # fmt: skip
    classes = 2
    presets = presets_of(104_743)


class Rte(Glue):
    """Does a sentence follow from a text?"""

    layout = Layout("RTE", "rte", ("sentence1", "sentence2"), "label", ("entailment", "not_entailment"), ("same", "other"))
    facts: ClassVar[Facts] = facts_of(
        "does a sentence follow from a text?", "accuracy", "RTE 1, 2, 3 and 5 in GLUE", "2,490 train, 277 dev", layout
    )
    classes = 2
    presets = presets_of(2_490)


class Wnli(Glue):
    """Does a sentence follow from a text, whose pronoun has to be understood?"""

    layout = Layout("WNLI", "wnli", ("sentence1", "sentence2"), "label", ("0", "1"), ("other", "same"))
    facts: ClassVar[Facts] = facts_of(
        "who is meant by a pronoun? A sentence names one: is it so?", "accuracy",
        "Winograd schemas (Levesque et al. 2011) in GLUE", "635 train, 71 dev", layout,
        f"{SPLIT_WORDS}. Dev is adversarial: its sentences are those of train with the other answer, so that a model that learns "
        "train by heart is below chance",
    )  # fmt: skip
    classes = 2
    presets = presets_of(635)


# Models: a batch in, scores [batch, outputs] out


FIRST_STD = 0.02


class SentenceEncoder(nn.Module):
    """A stack of layers over one or two texts, which a learned vector tells apart, and scores of the pooled vectors.

    Embeddings start small, so that a few hundred steps turn them where they have to be, and are normalised, so that all encodings
    find vectors of the same size.
    """

    def __init__(self, config: Config, *, symbols: int, outputs: int, pooling: Pooling):
        super().__init__()
        self.embedding = nn.Embedding(symbols, config.dim)
        self.side = nn.Embedding(2, config.dim)
        for table in (self.embedding, self.side):
            nn.init.normal_(table.weight, std=FIRST_STD)
        self.norm = nn.LayerNorm(config.dim)
        self.encoder = encoder_of(config)
        self.dropout = nn.Dropout(config.dropout)
        self.choice = nn.Linear(config.dim, outputs)
        self.pooling: Pooling = pooling

    def forward(self, batch: Batch) -> Float[Tensor, "batch outputs"]:
        x = self.dropout(self.norm(self.embedding(batch["tokens"]) + self.side(sides_of(batch))))
        return self.choice(self.dropout(pool(self.encoder(x, lengths=batch["lengths"]), batch["lengths"], self.pooling)))


class HuggingFaceChoice(Pretrained):
    """An encoder of Hugging Face with its head for classes."""

    head = "AutoModelForSequenceClassification"

    def forward(self, batch: Batch) -> Float[Tensor, "batch outputs"]:
        return self.outputs(batch).logits


# Tokens

CHUNK = 4096
"""Examples that become tokens at a time."""


def encoded(tokenizer: "Tokenizer", texts: Sequence[tuple[str, ...]], length: int, **columns: Tensor) -> Sequences:
    """Returns texts and pairs of texts in tokens, with special ones around them, and where the second text of each begins."""
    tokenizer.enable_truncation(length)
    tokens, sizes, first = [], [], []
    for start in range(0, len(texts), CHUNK):
        # A single text is no pair of one for the library.
        some: list[Any] = [pair if len(pair) > 1 else "".join(pair) for pair in texts[start : start + CHUNK]]
        found = tokenizer.encode_batch_fast(some)
        tokens.append(torch.tensor([token for each in found for token in each.ids], dtype=torch.int32))
        sizes += [len(each.ids) for each in found]
        first += [second_text(each.sequence_ids) for each in found]
    every: dict[str, Any] = {"first": torch.tensor(first), **columns}
    return Sequences(torch.cat(tokens), torch.tensor(sizes).cumsum(0), **every)


def second_text(sides: Sequence[int | None]) -> int:
    """Returns where the second text begins, or the number of tokens if there is none.

    >>> second_text([None, 0, 0, None, 1, None]), second_text([None, 0, None])
    (4, 3)
    """
    return sides.index(1) if 1 in sides else len(sides)
