"""GLUE (Wang, Singh, Michael, Hill, Levy, Bowman 2019): what its tasks on sentences and pairs of sentences share."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lagwise.errors import require_sizes
from lagwise.lab.config import Config
from lagwise.lab.tasks.base import HUB, Batch, Classification, Sampling, Sequences, Split, batches_on
from lagwise.lab.tasks.files import fixed_order, write_whole
from lagwise.lab.tasks.models import Pooling, check_pooling
from lagwise.lab.tasks.text.glue_files import Item, Layout, file_items, hub_items
from lagwise.lab.tasks.text.glue_models import HuggingFaceChoice, SentenceEncoder
from lagwise.lab.tasks.text.glue_sample import sample_items
from lagwise.lab.tasks.text.pretrained import EncoderOptions
from lagwise.lab.tasks.text.tokenization import TokenizerTask, load_tokenizer, piece_names, trained_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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
            self.encoded[key] = encode_texts(self.tokenizer, [item.texts for item in items], key[1], **columns)
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
            examples = encode_texts(self.tokenizer, [item.texts for item in items], self.options.length)
            batches = batches_on(device, examples, PREDICTED)
            predictions = [self.layout.prediction(each) for batch in batches for each in self.predicted(model(batch))]
            written.append(write_predictions(out / f"{name}.tsv", predictions))
        return written

    def encoding_options(self, encoding: str) -> dict[str, Any]:
        return {"length": self.options.length} if encoding == "learned" else {}

    def token_names(self, tokens: Sequence[int]) -> list[str]:
        return piece_names(self.tokenizer, tokens)

    def text_batch(self, text: str) -> Batch:
        if len(self.layout.texts) > 1:
            return super().text_batch(text)
        length = self.options.length
        found = encode_texts(self.tokenizer, [(text,)], length + 1).batch([0])
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


CHUNK = 4096
"""Examples that become tokens at a time."""


def encode_texts(tokenizer: "Tokenizer", texts: Sequence[tuple[str, ...]], length: int, **columns: Tensor) -> Sequences:
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
