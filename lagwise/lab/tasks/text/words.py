"""Words as tokens: a vocabulary of texts that are words with spaces between, and vectors of words from a file."""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from lagwise.lab.tasks.files import open_bytes

PADDING, UNKNOWN = 0, 1
"""Two tokens before those of the words."""

SPECIAL = 2


class Vocabulary:
    """Words and their numbers; a word that is not among them is `UNKNOWN`.

    >>> Vocabulary(["a", "sea"]).encode("a red sea")
    [2, 1, 3]
    """

    def __init__(self, words: Sequence[str]):
        self.words = words
        self.numbers = {word: number for number, word in enumerate(words, SPECIAL)}

    def __len__(self) -> int:
        return SPECIAL + len(self.words)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text; one without words is a single unknown one."""
        return [self.numbers.get(word, UNKNOWN) for word in text.split()] or [UNKNOWN]

    def name(self, token: int) -> str:
        """Returns the word of a token."""
        return self.words[token - SPECIAL] if token >= SPECIAL else {PADDING: "[padding]", UNKNOWN: "[unknown]"}[token]


def frequent_words(texts: Iterable[str], least: int) -> list[str]:
    """Returns the words that occur so often at least, the most frequent first, and equal ones in the order of letters.

    >>> frequent_words(["to be or not", "to be"], least=2)
    ['be', 'to']
    """
    counts = Counter(word for text in texts for word in text.split())
    return sorted((word for word, count in counts.items() if count >= least), key=lambda word: (-counts[word], word))


def read_vectors(path: Path | str, wanted: Set[str]) -> tuple[list[str], Float[Tensor, "words dim"]]:
    """Returns those of some words that a file has, in its order, and their vectors.

    A line is a word and its numbers with spaces between, as in the files of GloVe. Words of which the file has several lines have
    the first.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"vectors must be a file with a word and its numbers in each line, but {path} is none")
    found: dict[str, list[float]] = {}
    width = 0
    with open_bytes(path) as file:
        for number, line in enumerate(file, 1):
            line = line.rstrip()
            size = line.count(b" ")
            width = width or size
            if size < max(width, 2):
                raise ValueError(
                    f"{path}, line {number}: has {size} numbers, but expected are a word and {max(width, 2)} numbers"
                )
            word = line[: line.index(b" ")].decode(errors="replace")
            # A few words of the largest file of GloVe have spaces in them, and so are none of these.
            if size == width and word in wanted and word not in found:
                found[word] = parse_numbers(f"{path}, line {number}", line.split(b" ")[1:])
    if not found:
        raise ValueError(f"vectors must be a file with words of the data, but {path} has none of {len(wanted):,}")
    return list(found), torch.tensor(list(found.values()))


def parse_numbers(place: str, fields: Sequence[bytes]) -> list[float]:
    """Returns the numbers of a line."""
    try:
        return [float(field) for field in fields]
    except ValueError as error:
        raise ValueError(f"{place}: {error}, but expected are a word and {len(fields)} numbers") from error
