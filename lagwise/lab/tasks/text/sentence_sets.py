"""The six sets of sentences of the paper on scalar encodings (Wu, Zhang, Mao, Chen 2021), MR, SUBJ, CR, MPQA, SST-2 and TREC,
and IMDb."""

import re
from collections.abc import Iterable, Sequence
from math import ceil
from pathlib import Path
from typing import Any, ClassVar

from lagwise.lab.tasks.base import HUB, SPLITS, Facts, Split
from lagwise.lab.tasks.choices import Chooser
from lagwise.lab.tasks.files import binary_label, fixed_order, from_hub, nonempty, required_file, table_rows
from lagwise.lab.tasks.lra.byte_text import Text, read_reviews
from lagwise.lab.tasks.text.glue import SHARE
from lagwise.lab.tasks.text.glue_files import columns_of, first_line, part_file
from lagwise.lab.tasks.text.glue_sample import sample_texts
from lagwise.lab.tasks.text.glue_tasks import Sst2
from lagwise.lab.tasks.text.sentences import FOLDS, LabelledSentence, Sentences

NO_NUMBERS = "none found for the paper itself (Wu et al. 2021)"
FOLD_WORDS = "ten fixed folds: one (option fold) is tested, the next is for validation"


def sentence_presets(train: int) -> dict[str, dict[str, Any]]:
    """Returns the paper's configurations for a set with so many training sentences: 100 epochs, without its early stop."""
    paper = {
        "task_options": {"input_dropout": 0.4, "first_only": True}, "dim": 300, "layers": 5, "heads": 6, "hidden": 600,
        "norm": "post", "activation": "gelu", "dropout": 0.1, "attention_dropout": 0.3, "batch": 64, "rate": 2e-4,
        "schedule": "constant", "warmup": 0, "clip": 0.0, "steps": 100 * ceil(train / 64), "evaluate_every": ceil(train / 64),
    }  # fmt: skip
    at5 = {"widths": [16, 4], "std": 0.01, "slopes": [1.0, 10.0], "dropout": 0.4}
    return {"paper": paper, "paper-at5": {**paper, "encoding": "at5", "encoding_options": at5}}


class Folded(Sentences):
    """A set of two classes in two files, a sentence in each line, without splits of its own: ten folds instead."""

    names: ClassVar[tuple[str, str]]
    """The files of the two classes."""
    source: ClassVar[str]
    hub_splits: ClassVar[tuple[str, ...]] = ()
    relations: ClassVar[tuple[str, str]] = ("bad", "good")
    classes = 2

    def read(self) -> dict[Split, list[LabelledSentence]]:
        # Sorted, so that the folds do not depend on where the sentences come from.
        found = sorted(self.read_all())
        if len(found) < FOLDS:
            raise ValueError(f"data must have {FOLDS} sentences at least, one for each fold, but has {len(found)}")
        folds: list[list[LabelledSentence]] = [[] for _ in range(FOLDS)]
        for place, index in enumerate(fixed_order(len(found))):
            folds[place % FOLDS].append(found[index])
        test = self.options.fold
        validation = (test + 1) % FOLDS
        train = [each for number, fold in enumerate(folds) if number not in (test, validation) for each in fold]
        return {"train": train, "validation": folds[validation], "test": folds[test]}

    def read_all(self) -> list[LabelledSentence]:
        """Returns all sentences."""
        if self.data is None:
            return sample_sentences(self.relations, 200)
        if self.data == HUB:
            return [each for split in self.hub_splits for each in hub_sentences(self.facts.hub, split)]
        return [
            each
            for label, name in enumerate(self.names)
            for each in class_sentences(required_file(self.data, name, self.source), label)
        ]


def class_sentences(path: Path, label: int) -> list[LabelledSentence]:
    """Returns the sentences of a file of one class; these old files are in Latin-1."""
    return [
        LabelledSentence(nonempty(place, line.strip()).decode("latin-1"), label)
        for place, (line,) in table_rows(path, "sentence")
    ]


def hub_sentences(name: str, split: str) -> list[LabelledSentence]:
    """Returns a split of a set of the Hub."""
    found = from_hub(name, split)
    return [LabelledSentence(text, label) for text, label in zip(found["text"], found["label"], strict=True)]


def sample_sentences(relations: Sequence[str], count: int) -> list[LabelledSentence]:
    """Returns made-up sentences, as many of each class."""
    one_of = Chooser(count)
    classes = range(len(relations))
    return [
        LabelledSentence(sample_texts(relations[label], one_of)[-1], label)
        for _ in range(count // len(relations))
        for label in classes
    ]


def folded_facts(words: str, source: str, size: str, names: Sequence[str], *, licence: str, hub: str = "") -> Facts:
    """Returns the facts of a set in folds."""
    files = f"{names[0]} and {names[1]}, plain or as .xz or .gz"
    return Facts(words, "accuracy", source, f"{size}; {FOLD_WORDS}", licence, NO_NUMBERS, files, hub)


class Mr(Folded):
    """Does a sentence of a review praise the film?"""

    names = ("rt-polarity.neg", "rt-polarity.pos")
    source = "unpack rt-polaritydata.tar.gz of https://www.cs.cornell.edu/people/pabo/movie-review-data/ and give its folder"
    hub_splits = ("train", "validation", "test")
    facts: ClassVar[Facts] = folded_facts(
        "does a sentence of a review praise the film?",
        "movie reviews (Pang and Lee 2005)",
        "10,662 sentences",
        names,
        licence="none stated; cite Pang and Lee 2005",
        hub="cornell-movie-review-data/rotten_tomatoes",
    )
    presets = sentence_presets(8_530)


class Subj(Folded):
    """Is a sentence an opinion on a film, or a part of its plot?"""

    names = ("plot.tok.gt9.5000", "quote.tok.gt9.5000")
    source = "unpack rotten_imdb.tar.gz of https://www.cs.cornell.edu/people/pabo/movie-review-data/ and give its folder"
    hub_splits = ("train", "test")
    relations = ("plain", "good")
    facts: ClassVar[Facts] = folded_facts(
        "is a sentence an opinion on a film (1), or of its plot (0)?",
        "subjectivity (Pang and Lee 2004)",
        "10,000 sentences",
        names,
        licence="none stated; cite Pang and Lee 2004",
        hub="SetFit/subj",
    )
    presets = sentence_presets(8_000)


class Cr(Folded):
    """Does a customer praise a product?"""

    names = ("custrev.neg", "custrev.pos")
    source = "put the negative and the positive sentences, one in each line, into these two files"
    hub_splits = ("train", "test")
    facts: ClassVar[Facts] = folded_facts(
        "does a sentence of a customer's review praise the product?",
        "customer reviews (Hu and Liu 2004)",
        "about 3,775 sentences",
        names,
        licence="none stated; cite Hu and Liu 2004",
        hub="SetFit/CR",
    )
    presets = sentence_presets(3_020)


class Mpqa(Folded):
    """Is a phrase of the news positive?"""

    names = ("mpqa.neg", "mpqa.pos")
    source = "put the negative and the positive phrases, one in each line, into these two files"
    facts: ClassVar[Facts] = folded_facts(
        "is a phrase of the news positive?",
        "MPQA (Wiebe et al. 2005)",
        "about 10,606 phrases",
        names,
        licence="that of the MPQA corpus; cite Wiebe et al. 2005",
    )
    presets = sentence_presets(8_484)


def with_validation(train: Sequence[LabelledSentence], test: Iterable[LabelledSentence]) -> dict[Split, list[LabelledSentence]]:
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
    presets = sentence_presets(6_920)

    def read(self) -> dict[Split, list[LabelledSentence]]:
        if self.data is None:
            return with_validation(sample_sentences(("bad", "good"), 160), sample_sentences(("bad", "good"), 40))
        if self.data == HUB:
            return {split: hub_sentences(self.facts.hub, split) for split in SPLITS}
        parts = {"train": "train", "validation": "dev", "test": "test"}
        paths = {split: part_file(Sst2.layout, self.data, part) for split, part in parts.items()}
        if "index" in first_line(paths["test"]):
            return with_validation(read_table(paths["train"]), read_table(paths["validation"]))
        return {split: read_table(paths[split]) for split in SPLITS}


def read_table(path: Path) -> list[LabelledSentence]:
    """Returns the sentences of a table of sentence and label, with or without a first line that says so."""
    names = () if first_line(path) == ["sentence", "label"] else ("sentence", "label")
    found = columns_of(path, ("sentence", "label"), names, None)
    return [LabelledSentence(text, binary_label(place, label.encode())) for place, (text, label) in found]


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

    def read(self) -> dict[Split, list[LabelledSentence]]:
        if self.data is None:
            return with_validation(sample_sentences(("bad", "good"), 160), sample_sentences(("bad", "good"), 40))
        return with_validation(imdb_sentences(self.data, "train"), imdb_sentences(self.data, "test"))


def imdb_sentences(data: Path | str, part: str) -> list[LabelledSentence]:
    """Returns the reviews of a part, with spaces between words and signs, and without the marks of new lines."""
    found = ((text.decode().replace("<br />", " "), label) for text, label in read_reviews(data, part))
    return [LabelledSentence(" ".join(WORD.findall(text)), label) for text, label in found]


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
    presets = sentence_presets(4_907)

    def read(self) -> dict[Split, list[LabelledSentence]]:
        if self.data is None:
            return with_validation(sample_questions(20), sample_questions(6))
        source = "get train_5500.label and TREC_10.label from https://cogcomp.seas.upenn.edu/Data/QA/QC/"
        train, test = (required_file(self.data, name, source) for name in ("train_5500.label", "TREC_10.label"))
        return with_validation(read_questions(train), read_questions(test))


def read_questions(path: Path) -> list[LabelledSentence]:
    """Returns the questions of a file with `COARSE:fine question` in each line, in Latin-1."""
    found = []
    for place, (line,) in table_rows(path, "COARSE:fine question"):
        label, _, text = line.decode("latin-1").partition(" ")
        coarse, colon, _ = label.partition(":")
        if coarse not in Trec.kinds or not colon or not text.strip():
            expected = f"COARSE:fine and a question, COARSE being one of {', '.join(Trec.kinds)}"
            raise ValueError(f"{place}: begins with {line[:40].decode('latin-1')!r}, but expected is {expected}")
        found.append(LabelledSentence(text.strip(), Trec.kinds.index(coarse)))
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


def sample_questions(count: int) -> list[LabelledSentence]:
    """Returns made-up questions, so many of each class."""
    one_of = Chooser(count)
    return [
        LabelledSentence(form.format(one_of(LETTERS), one_of(NOUNS), one_of(TOWNS)), label)
        for _ in range(count)
        for label, form in enumerate(QUESTIONS)
    ]
