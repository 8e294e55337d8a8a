"""Texts as words: the six sets of the paper on scalar encodings (Wu, Zhang, Mao, Chen 2021), MR, SUBJ, CR, MPQA, SST-2 and
TREC, and IMDb."""

import re
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lagwise.errors import require_sizes
from lagwise.lab.config import Config
from lagwise.lab.tasks.base import HUB, SPLITS, Batch, Classification, Facts, Sequences, Split
from lagwise.lab.tasks.choices import Chooser
from lagwise.lab.tasks.files import binary_label, fixed_order, from_hub, nonempty, required_file, table_rows
from lagwise.lab.tasks.lra.byte_text import Text, read_reviews
from lagwise.lab.tasks.models import encoder_of, pool
from lagwise.lab.tasks.text.glue import SHARE
from lagwise.lab.tasks.text.glue_files import columns_of, first_line, part_file
from lagwise.lab.tasks.text.glue_models import FIRST_STD
from lagwise.lab.tasks.text.glue_sample import sample_texts
from lagwise.lab.tasks.text.glue_tasks import Sst2
from lagwise.lab.tasks.text.words import PADDING, SPECIAL, Vocabulary, frequent_words, read_vectors

FOLDS = 10
NO_NUMBERS = "none found for the paper itself (Wu et al. 2021)"
FOLD_WORDS = "ten fixed folds: one (option fold) is tested, the next is for validation"


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


class Labelled(NamedTuple):
    """A sentence and its class."""

    text: str
    label: int


def presets_of(train: int) -> dict[str, dict[str, Any]]:
    """Returns the paper's configurations for a set with so many training sentences: 100 epochs, without its early stop."""
    paper = {
        "task_options": {"input_dropout": 0.4, "first_only": True}, "dim": 300, "layers": 5, "heads": 6, "hidden": 600,
        "norm": "post", "activation": "gelu", "dropout": 0.1, "attention_dropout": 0.3, "batch": 64, "rate": 2e-4,
        "schedule": "constant", "warmup": 0, "clip": 0.0, "steps": 100 * ceil(train / 64), "evaluate_every": ceil(train / 64),
    }  # fmt: skip
    at5 = {"widths": [16, 4], "std": 0.01, "slopes": [1.0, 10.0], "dropout": 0.4}
    return {"paper": paper, "paper-at5": {**paper, "encoding": "at5", "encoding_options": at5}}


class Sentences(Classification):
    """Sentences in some classes, with words as tokens."""

    defaults: ClassVar[dict[str, Any]] = {
        "dim": 96, "layers": 2, "heads": 6, "hidden": 192, "batch": 64, "steps": 300, "warmup": 30, "dropout": 0.1,
        "evaluate_batch": 256, "task_options": {"input_dropout": 0.4},
    }  # fmt: skip
    Options: ClassVar[type] = SentenceOptions
    options: SentenceOptions

    @abstractmethod
    def read(self) -> dict[Split, list[Labelled]]:
        """Returns the sentences of all splits from files, from the Hub, or of the built-in sample."""

    @cached_property
    def sentences(self) -> dict[Split, list[Labelled]]:
        """The sentences of all splits, in small letters if asked for."""
        change = str.lower if self.options.lowercase else str
        return {split: [Labelled(change(text), label) for text, label in found] for split, found in self.read().items()}

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
        return WordClassifier(config, self.options, symbols=len(self.vocabulary), classes=self.classes, vectors=vectors)

    def encoding_options(self, encoding: str) -> dict[str, Any]:
        return {"learned": {"length": self.options.length}, "at5": {"reach": self.options.length}}.get(encoding, {})

    def token_names(self, tokens: Sequence[int]) -> list[str]:
        return [self.vocabulary.name(token) for token in tokens]

    def text_batch(self, text: str) -> Batch:
        words = text.lower() if self.options.lowercase else text
        return Sequences.of([torch.tensor(self.vocabulary.encode(words))]).batch([0])


class WordClassifier(nn.Module):
    """Vectors of words, a stack of layers, and scores [batch, classes] of the last word's vector.

    Vectors from a file have zeros for padding and for unknown words. Those that are learnt from the start begin small and are
    normalised, as in `lagwise.lab.tasks.text.glue`.
    """

    def __init__(
        self, config: Config, options: SentenceOptions, *, symbols: int, classes: int, vectors: Float[Tensor, "words dim"] | None
    ):
        super().__init__()
        if vectors is None:
            self.embedding = nn.Embedding(symbols, config.dim)
            nn.init.normal_(self.embedding.weight, std=FIRST_STD)
        elif vectors.shape[1] != config.dim:
            raise ValueError(f"dim must be the {vectors.shape[1]} of the vectors, but is {config.dim}: dim={vectors.shape[1]}")
        else:
            table = torch.cat([vectors.new_zeros(SPECIAL, config.dim), vectors])
            self.embedding = nn.Embedding.from_pretrained(table, freeze=options.frozen)
        self.norm = nn.LayerNorm(config.dim) if vectors is None else nn.Identity()
        self.dropout = nn.Dropout(options.input_dropout)
        self.encoder = encoder_of(config, first_only=options.first_only)
        self.choice = nn.Linear(config.dim, classes)

    def forward(self, batch: Batch) -> Float[Tensor, "batch classes"]:
        x = self.dropout(self.norm(self.embedding(batch["tokens"])))
        return self.choice(pool(self.encoder(x, lengths=batch["lengths"]), batch["lengths"], "last"))


class Folded(Sentences):
    """A set of two classes in two files, a sentence in each line, without splits of its own: ten folds instead."""

    names: ClassVar[tuple[str, str]]
    """The files of the two classes."""
    source: ClassVar[str]
    hub_splits: ClassVar[tuple[str, ...]] = ()
    relations: ClassVar[tuple[str, str]] = ("bad", "good")
    classes = 2

    def read(self) -> dict[Split, list[Labelled]]:
        # Sorted, so that the folds do not depend on where the sentences come from.
        found = sorted(self.read_all())
        if len(found) < FOLDS:
            raise ValueError(f"data must have {FOLDS} sentences at least, one for each fold, but has {len(found)}")
        folds: list[list[Labelled]] = [[] for _ in range(FOLDS)]
        for place, index in enumerate(fixed_order(len(found))):
            folds[place % FOLDS].append(found[index])
        test = self.options.fold
        validation = (test + 1) % FOLDS
        train = [each for number, fold in enumerate(folds) if number not in (test, validation) for each in fold]
        return {"train": train, "validation": folds[validation], "test": folds[test]}

    def read_all(self) -> list[Labelled]:
        """Returns all sentences."""
        if self.data is None:
            return sample_sentences(self.relations, 200)
        if self.data == HUB:
            return [each for split in self.hub_splits for each in hub_sentences(self.facts.hub, split)]
        return [
            each for label, name in enumerate(self.names) for each in lines(required_file(self.data, name, self.source), label)
        ]


def lines(path: Path, label: int) -> list[Labelled]:
    """Returns the sentences of a file of one class; these old files are in Latin-1."""
    return [Labelled(nonempty(place, line.strip()).decode("latin-1"), label) for place, (line,) in table_rows(path, "sentence")]


def hub_sentences(name: str, split: str) -> list[Labelled]:
    """Returns a split of a set of the Hub."""
    found = from_hub(name, split)
    return [Labelled(text, label) for text, label in zip(found["text"], found["label"], strict=True)]


def sample_sentences(relations: Sequence[str], count: int) -> list[Labelled]:
    """Returns made-up sentences, as many of each class."""
    one_of = Chooser(count)
    classes = range(len(relations))
    return [
        Labelled(sample_texts(relations[label], one_of)[-1], label) for _ in range(count // len(relations)) for label in classes
    ]


class Mr(Folded):
    """Does a sentence of a review praise the film?"""

    names = ("rt-polarity.neg", "rt-polarity.pos")
    source = "unpack rt-polaritydata.tar.gz of https://www.cs.cornell.edu/people/pabo/movie-review-data/ and give its folder"
    hub_splits = ("train", "validation", "test")
    facts: ClassVar[Facts] = Facts(
        words="does a sentence of a review praise the film?",
        metric="accuracy",
        source="movie reviews (Pang and Lee 2005)",
        size=f"10,662 sentences; {FOLD_WORDS}",
        licence="none stated; cite Pang and Lee 2005",
        published=NO_NUMBERS,
        files="rt-polarity.neg and rt-polarity.pos, plain or as .xz or .gz",
        hub="cornell-movie-review-data/rotten_tomatoes",
    )
    presets = presets_of(8_530)


class Subj(Folded):
    """Is a sentence an opinion on a film, or a part of its plot?"""

    names = ("plot.tok.gt9.5000", "quote.tok.gt9.5000")
    source = "unpack rotten_imdb.tar.gz of https://www.cs.cornell.edu/people/pabo/movie-review-data/ and give its folder"
    hub_splits = ("train", "test")
    relations = ("plain", "good")
    facts: ClassVar[Facts] = Facts(
        words="is a sentence an opinion on a film (1), or of its plot (0)?",
        metric="accuracy",
        source="subjectivity (Pang and Lee 2004)",
        size=f"10,000 sentences; {FOLD_WORDS}",
        licence="none stated; cite Pang and Lee 2004",
        published=NO_NUMBERS,
        files="plot.tok.gt9.5000 and quote.tok.gt9.5000, plain or as .xz or .gz",
        hub="SetFit/subj",
    )
    presets = presets_of(8_000)


class Cr(Folded):
    """Does a customer praise a product?"""

    names = ("custrev.neg", "custrev.pos")
    source = "put the negative and the positive sentences, one in each line, into these two files"
    hub_splits = ("train", "test")
    facts: ClassVar[Facts] = Facts(
        words="does a sentence of a customer's review praise the product?",
        metric="accuracy",
        source="customer reviews (Hu and Liu 2004)",
        size=f"about 3,775 sentences; {FOLD_WORDS}",
        licence="none stated; cite Hu and Liu 2004",
        published=NO_NUMBERS,
        files="custrev.neg and custrev.pos, plain or as .xz or .gz",
        hub="SetFit/CR",
    )
    presets = presets_of(3_020)


class Mpqa(Folded):
    """Is a phrase of the news positive?"""

    names = ("mpqa.neg", "mpqa.pos")
    source = "put the negative and the positive phrases, one in each line, into these two files"
    facts: ClassVar[Facts] = Facts(
        words="is a phrase of the news positive?",
        metric="accuracy",
        source="MPQA (Wiebe et al. 2005)",
        size=f"about 10,606 phrases; {FOLD_WORDS}",
        licence="that of the MPQA corpus; cite Wiebe et al. 2005",
        published=NO_NUMBERS,
        files="mpqa.neg and mpqa.pos, plain or as .xz or .gz",
    )
    presets = presets_of(8_484)


def kept_apart(train: Sequence[Labelled], test: Iterable[Labelled]) -> dict[Split, list[Labelled]]:
    """Returns the splits of a set that has none for validation: a fixed tenth of the training sentences."""
    order = fixed_order(len(train))
    count = max(1, len(train) // SHARE)
    return {
        "train": [train[index] for index in sorted(order[count:])],
        "validation": [train[index] for index in order[:count]],
        "test": list(test),
    }


class SstWords(Sentences):
    """SST-2 with words as tokens: does a sentence praise a film?"""

    classes = 2
    facts: ClassVar[Facts] = Facts(
        words="does a sentence praise a film? SST-2 with words as tokens",
        metric="accuracy",
        source="Stanford Sentiment Treebank (Socher et al. 2013), two classes",
        size=(
            "6,920 / 872 / 1,821 sentences; in GLUE's files 67,349 phrases to train on, where a tenth is for validation, "
            "and dev to test on, as GLUE's test has no labels"
        ),
        licence="none stated; cite Socher et al. 2013",
        published=NO_NUMBERS,
        files="{train,dev,test}.tsv of sentence and label, or those of GLUE's SST-2, plain or as .xz or .gz",
        hub="SetFit/sst2",
    )
    presets = presets_of(6_920)

    def read(self) -> dict[Split, list[Labelled]]:
        if self.data is None:
            return kept_apart(sample_sentences(("bad", "good"), 160), sample_sentences(("bad", "good"), 40))
        if self.data == HUB:
            return {split: hub_sentences(self.facts.hub, split) for split in SPLITS}
        parts = {"train": "train", "validation": "dev", "test": "test"}
        paths = {split: part_file(Sst2.layout, self.data, part) for split, part in parts.items()}
        if "index" in first_line(paths["test"]):
            return kept_apart(table(paths["train"]), table(paths["validation"]))
        return {split: table(paths[split]) for split in SPLITS}


def table(path: Path) -> list[Labelled]:
    """Returns the sentences of a table of sentence and label, with or without a first line that says so."""
    names = () if first_line(path) == ["sentence", "label"] else ("sentence", "label")
    found = columns_of(path, ("sentence", "label"), names, None)
    return [Labelled(text, binary_label(place, label.encode())) for place, (text, label) in found]


class ImdbWords(Sentences):
    """IMDb with words as tokens: does a film review praise the film?"""

    classes = 2
    facts: ClassVar[Facts] = Facts(
        words="does a film review praise the film? IMDb with words as tokens",
        metric="accuracy",
        source="IMDb reviews (Maas et al. 2011)",
        size="25,000 reviews to train on, of which a fixed tenth is for validation, and 25,000 to test on; 256 words of each",
        licence=Text.facts.licence,
        published="none of the papers has it",
        files=Text.facts.files,
        hub=Text.facts.hub,
    )
    defaults: ClassVar[dict[str, Any]] = {**Sentences.defaults, "task_options": {"input_dropout": 0.4, "length": 256, "least": 5}}

    def read(self) -> dict[Split, list[Labelled]]:
        if self.data is None:
            return kept_apart(sample_sentences(("bad", "good"), 160), sample_sentences(("bad", "good"), 40))
        return kept_apart(imdb_sentences(self.data, "train"), imdb_sentences(self.data, "test"))


def imdb_sentences(data: Path | str, part: str) -> list[Labelled]:
    """Returns the reviews of a part, with spaces between words and signs, and without the marks of new lines."""
    found = ((text.decode().replace("<br />", " "), label) for text, label in read_reviews(data, part))
    return [Labelled(" ".join(WORD.findall(text)), label) for text, label in found]


WORD = re.compile(r"\w+(?:'\w+)*|[^\w\s]")
"""A word, with apostrophes in it, or a sign."""


class Trec(Sentences):
    """What kind of answer does a question ask for?"""

    kinds: ClassVar[tuple[str, ...]] = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")
    classes = len(kinds)
    facts: ClassVar[Facts] = Facts(
        words="which of six kinds of thing does a question ask for?",
        metric="accuracy",
        source="TREC questions (Li and Roth 2002), six coarse classes",
        size="5,452 questions to train on, of which a fixed tenth is for validation, and 500 to test on",
        licence="none stated; cite Li and Roth 2002",
        published=NO_NUMBERS,
        files="train_5500.label and TREC_10.label, plain or as .xz or .gz",
    )
    presets = presets_of(4_907)

    def read(self) -> dict[Split, list[Labelled]]:
        if self.data is None:
            return kept_apart(sample_questions(20), sample_questions(6))
        source = "get train_5500.label and TREC_10.label from https://cogcomp.seas.upenn.edu/Data/QA/QC/"
        train, test = (required_file(self.data, name, source) for name in ("train_5500.label", "TREC_10.label"))
        return kept_apart(questions(train), questions(test))


def questions(path: Path) -> list[Labelled]:
    """Returns the questions of a file with `COARSE:fine question` in each line, in Latin-1."""
    found = []
    for place, (line,) in table_rows(path, "COARSE:fine question"):
        label, _, text = line.decode("latin-1").partition(" ")
        coarse, colon, _ = label.partition(":")
        if coarse not in Trec.kinds or not colon or not text.strip():
            expected = f"COARSE:fine and a question, COARSE being one of {', '.join(Trec.kinds)}"
            raise ValueError(f"{place}: begins with {line[:40].decode('latin-1')!r}, but expected is {expected}")
        found.append(Labelled(text.strip(), Trec.kinds.index(coarse)))
    return found


QUESTIONS = (
    "What do the letters {0} stand for ?",
    "Why does a {1} float ?",
    "Which {1} do people keep at home ?",
    "Who painted the {1} in {2} ?",
    "Where is the {1} of {2} ?",
    "How many {1}s are there in {2} ?",
)
LETTERS = ("ABC", "RSVP", "ETA", "VIP", "DIY", "FAQ")
NOUNS = ("boat", "tower", "bridge", "lamp", "barrel", "statue", "kite")
TOWNS = ("Lisbon", "Oslo", "Kyoto", "Quito", "Dakar", "Perth")


def sample_questions(count: int) -> list[Labelled]:
    """Returns made-up questions, so many of each class."""
    one_of = Chooser(count)
    return [
        Labelled(form.format(one_of(LETTERS), one_of(NOUNS), one_of(TOWNS)), label)
        for _ in range(count)
        for label, form in enumerate(QUESTIONS)
    ]
