"""Texts as words, in some classes: what the sets of sentences share."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lagwise.errors import require_sizes
from lagwise.lab.config import Config
from lagwise.lab.tasks.base import SPLITS, Batch, Classification, Sequences, Split
from lagwise.lab.tasks.text.word_classifier import WordClassifier
from lagwise.lab.tasks.text.words import PADDING, Vocabulary, frequent_words, read_vectors

FOLDS = 10


@dataclass(frozen=True)
class SentenceOptions:
    """What can be chosen of the six sets.

    Args:
        fold: Which of the ten folds is tested, in MR, SUBJ, CR and MPQA.
        length: Most words of a sentence; the rest is cut off.
        vectors: A file with vectors of words, such as GloVe's: `word number number ...` in each line. The words are then those of
            the whole set that the file has.
        frozen: Leave the vectors of the file as they are.
        lowercase: Make all letters small.
        least: How often a word must occur in the training sentences to be known, where there are no vectors.
        input_dropout: Dropout of the words' vectors.
        first_only: Only the first layer has the position encoding, as in the paper.
    """

    fold: int = 0
    length: int = 128
    vectors: str = ""
    frozen: bool = True
    lowercase: bool = True
    least: int = 2
    input_dropout: float = 0.0
    first_only: bool = False

    def __post_init__(self) -> None:
        require_sizes(length=self.length, least=self.least)
        if self.fold not in range(FOLDS):
            raise ValueError(f"fold must be from 0 to {FOLDS - 1}, but is {self.fold}")
        if not 0.0 <= self.input_dropout < 1.0:
            raise ValueError(f"input_dropout must be at least 0 and less than 1, but is {self.input_dropout}")


class LabelledSentence(NamedTuple):
    """A sentence and its class."""

    text: str
    label: int


class Sentences(Classification):
    """Sentences in some classes, with words as tokens."""

    defaults: ClassVar[dict[str, Any]] = {
        "dim": 96, "layers": 2, "heads": 6, "hidden": 192, "batch": 64, "steps": 300, "warmup": 30, "dropout": 0.1,
        "evaluate_batch": 256, "task_options": {"input_dropout": 0.4},
    }  # fmt: skip
    Options: ClassVar[type] = SentenceOptions
    options: SentenceOptions

    @abstractmethod
    def read(self) -> dict[Split, list[LabelledSentence]]:
        """Returns the sentences of all splits from files, from the Hub, or of the built-in sample."""

    @cached_property
    def sentences(self) -> dict[Split, list[LabelledSentence]]:
        """The sentences of all splits, in small letters if asked for."""
        change = str.lower if self.options.lowercase else str
        return {split: [LabelledSentence(change(text), label) for text, label in found] for split, found in self.read().items()}

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The words that are known."""
        if self.options.vectors:
            return Vocabulary(self.vectors[0])
        return Vocabulary(frequent_words((text for text, _ in self.sentences["train"]), self.options.least))

    @cached_property
    def vectors(self) -> tuple[list[str], Float[Tensor, "words dim"]]:
        """Words of the set and their vectors, from a file."""
        wanted = {word for split in SPLITS for text, _ in self.sentences[split] for word in text.split()}
        return read_vectors(self.options.vectors, wanted)

    def examples(self, split: Split, length: int | None = None) -> Sequences:
        found = self.sentences[split]
        tokens = [torch.tensor(self.vocabulary.encode(text)) for text, _ in found]
        label = torch.tensor([label for _, label in found])
        return Sequences.of(tokens, padding=PADDING, max_length=self.options.length if length is None else length, label=label)

    def model(self, config: Config) -> nn.Module:
        vectors = self.vectors[1] if self.options.vectors else None
        return WordClassifier(
            config, symbols=len(self.vocabulary), classes=self.classes, vectors=vectors, frozen=self.options.frozen,
            input_dropout=self.options.input_dropout, first_only=self.options.first_only,
        )  # fmt: skip

    def encoding_options(self, encoding: str) -> dict[str, Any]:
        return {"learned": {"length": self.options.length}, "at5": {"reach": self.options.length}}.get(encoding, {})

    def token_names(self, tokens: Sequence[int]) -> list[str]:
        return [self.vocabulary.name(token) for token in tokens]

    def text_batch(self, text: str) -> Batch:
        words = text.lower() if self.options.lowercase else text
        return Sequences.of([torch.tensor(self.vocabulary.encode(words))]).batch([0])
