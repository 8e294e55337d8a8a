"""Texts of two languages, sentence by sentence: from files, from the Hub, or made up."""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from lagwise.lab.tasks.base import HUB, SPLITS, Split
from lagwise.lab.tasks.files import from_hub, required_file
from lagwise.lab.tasks.text.corpora import text_of

FILES: dict[Split, str] = {"train": "train", "validation": "valid", "test": "test"}
"""The names of the splits in the names of files."""

HUB_NAME = "wmt/wmt17"
SOURCE = "give a folder with train.SOURCE and train.TARGET, valid.* and test.*, such as train.en and train.de, a sentence a line"

Languages = tuple[str, str]
"""The language that is read, and the one that is written."""


class Parallel(NamedTuple):
    """Sentences and their translations."""

    source: list[str]
    target: list[str]


def read_parallel(data: Path | str | None, split: Split, languages: Languages) -> Parallel:
    """Returns the sentences of a split and their translations, without the pairs of which one side is empty."""
    if data is None:
        return sample_parallel(split)
    found = read_hub(split, languages) if data == HUB else read_files(data, split, languages)
    kept = [(source, target) for source, target in zip(*found, strict=True) if source.strip() and target.strip()]
    dropped = len(found.source) - len(kept)
    if not kept:
        raise ValueError(f"data must have sentences for {split}, but all {dropped} pairs of lines in {data} have an empty side")
    if dropped:
        warnings.warn(f"{dropped} of {len(found.source)} pairs of {split} have an empty side and are left out", stacklevel=2)
    return Parallel([source for source, _ in kept], [target for _, target in kept])


def read_files(data: Path | str, split: Split, languages: Languages) -> Parallel:
    """Returns the lines of two files, which must have as many."""
    paths = [required_file(data, f"{FILES[split]}.{language}", SOURCE) for language in languages]
    source, target = (read_lines(path) for path in paths)
    if len(source) != len(target):
        shorter, longer = sorted(zip(paths, (len(source), len(target)), strict=True), key=lambda each: each[1])
        raise ValueError(
            f"{shorter[0]}, line {shorter[1] + 1}: is missing, as the file has {shorter[1]} lines and {longer[0]} {longer[1]}, "
            "but expected are as many: a line is the translation of the same line of the other file"
        )
    return Parallel(source, target)


def read_lines(path: Path) -> list[str]:
    """Returns the lines of a file, plain or compressed; nothing but a line feed ends one."""
    text = text_of(path)
    return text.removesuffix("\n").split("\n") if text else []


def read_hub(split: Split, languages: Languages) -> Parallel:
    """Returns the pairs of WMT17 from the Hugging Face Hub, which has English on one side."""
    if "en" not in languages:
        raise ValueError(f"source or target must be 'en' with data='hub', but they are {languages[0]!r} and {languages[1]!r}")
    other = next(language for language in languages if language != "en")
    pairs = from_hub(HUB_NAME, split, f"{other}-en")["translation"]
    rows = [(pair[languages[0]], pair[languages[1]]) for pair in pairs]
    return Parallel([source for source, _ in rows], [target for _, target in rows])


SAMPLE_SIZES: dict[Split, int] = {"train": 2000, "validation": 100, "test": 100}
SAMPLE_WORDS = 30


def invented_words(syllables: Sequence[str]) -> list[str]:
    """Returns words of two syllables, no two of them equal.

    >>> invented_words(["ba", "du"])[:3]
    ['baba', 'badu', 'duba']
    """
    return [first + second for first in syllables for second in syllables][:SAMPLE_WORDS]


def sample_parallel(split: Split) -> Parallel:
    """Returns sentences of an invented language, and their translations into another: other words, the last one first."""
    read, written = invented_words(["ka", "mo", "ti", "re", "su", "lin"]), invented_words(["dor", "fe", "gu", "wy", "zan", "hob"])
    rng = torch.Generator().manual_seed(SPLITS.index(split))

    def sentences() -> Iterator[list[int]]:
        for size in torch.randint(2, 8, (SAMPLE_SIZES[split],), generator=rng).tolist():
            yield torch.randint(SAMPLE_WORDS, (size,), generator=rng).tolist()

    rows = list(sentences())
    return Parallel(
        [" ".join(read[word] for word in row) for row in rows],
        [" ".join(written[word] for word in reversed(row)) for row in rows],
    )
