"""Texts as streams of tokens: bytes, or the pieces of a tokenizer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lagwise.lab.tasks.text.tokenization import ENDS, special_token

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES = 256
BYTE_END, BYTE_MASK = 0xFF, 0xFE
"""Bytes that no UTF-8 text has, so that they can stand for the end of a document and for a hidden byte."""

MASKS = ("[MASK]", "<mask>")

ENCODED = 256
"""Documents that are encoded at a time."""


class Stream(NamedTuple):
    """A text as tokens, with an end before each document."""

    tokens: Int[Tensor, " tokens"]
    sizes: Int[Tensor, " tokens"] | None
    """How many bytes each token stands for; None: one, and none for an end."""


class Alphabet(NamedTuple):
    """What is to know of the tokens of a text."""

    symbols: int
    end: int
    mask: int
    special: Bool[Tensor, " symbols"]
    begins_inside: Bool[Tensor, " symbols"]
    """Whether a token can go on with the word of the one before it."""
    ends_inside: Bool[Tensor, " symbols"]
    """Whether the word of a token can go on."""


def alphabet_of_bytes() -> Alphabet:
    """Returns what is to know of bytes; letters, digits and bytes of longer characters make words."""
    special = torch.zeros(BYTES, dtype=torch.bool)
    special[[BYTE_END, BYTE_MASK]] = True
    inside = torch.tensor([in_word(code) for code in range(BYTES)]) & ~special
    return Alphabet(BYTES, BYTE_END, BYTE_MASK, special, inside, inside)


def in_word(code: int) -> bool:
    """Says whether a byte is part of a word."""
    return code >= 0x80 or chr(code).isalnum()


def alphabet_of(tokenizer: "Tokenizer") -> Alphabet:
    """Returns what is to know of the tokens of a tokenizer."""
    words = [tokenizer.id_to_token(code) or "" for code in range(tokenizer.get_vocab_size())]
    special = torch.zeros(len(words), dtype=torch.bool)
    special[[code for code, token in tokenizer.get_added_tokens_decoder().items() if token.special]] = True
    if any(word.startswith("##") for word in words):
        begins, ends = torch.tensor([word.startswith("##") for word in words]), ~special
    else:
        # Tokens of bytes are written with one letter for each byte; those of spaces and marks are no letters or these two.
        begins = torch.tensor([bool(word) and word_letter(word[0]) for word in words]) & ~special
        ends = torch.tensor([bool(word) and word_letter(word[-1]) for word in words]) & ~special
    end, mask = (special_token(tokenizer, names) for names in (ENDS, MASKS))
    return Alphabet(len(words), end, mask, special, begins, ends)


def word_letter(letter: str) -> bool:
    """Says whether a letter of a token of bytes stands for part of a word."""
    return letter.isalnum() if letter.isascii() else letter not in "ĠĊĉč"


def encode_bytes(documents: Sequence[str], packed: bool) -> Stream:
    """Returns texts as bytes, with an end before each, or before the first alone where they are not packed.

    >>> encode_bytes(["a", "b"], packed=True).tokens.tolist()
    [255, 97, 255, 98, 255]
    """
    mark = bytes([BYTE_END])
    joined = (mark if packed else b"").join(document.encode() for document in documents)
    return Stream(torch.frombuffer(bytearray(mark + joined + mark), dtype=torch.uint8), None)


def encode_stream(tokenizer: "Tokenizer", documents: Sequence[str], end: int, packed: bool) -> Stream:
    """Returns the tokens of texts as `encode_bytes` does, and the bytes of each, which add up to those of the texts."""
    tokens, sizes = [np.array([end])], [np.array([0])]
    for start in range(0, len(documents), ENCODED):
        some = documents[start : start + ENCODED]
        for text, found in zip(some, tokenizer.encode_batch(some, add_special_tokens=False), strict=True):
            own, left = bytes_of_tokens(text, np.array([last for _, last in found.offsets], dtype=np.int64))
            tokens.append(np.array(found.ids, dtype=np.int64))
            sizes.append(own)
            if packed:
                tokens.append(np.array([end]))
                sizes.append(np.array([left]))
            else:
                sizes[-1][-1:] += left
    if not packed:
        tokens.append(np.array([end]))
        sizes.append(np.array([0]))
    return Stream(*(torch.from_numpy(np.concatenate(column).astype(np.int32)) for column in (tokens, sizes)))


def bytes_of_tokens(text: str, ends: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns how many bytes lie between the end of each token and that of the one before, and how many after the last.

    >>> bytes_of_tokens("é  x ", np.array([1, 4]))
    (array([2, 3]), 1)
    """
    raw = np.frombuffer(text.encode(), dtype=np.uint8)
    # Each character but those bytes that go on with one begins a place.
    places = np.append(np.flatnonzero((raw & 0xC0) != 0x80), len(raw))
    reached = np.maximum.accumulate(places[ends]) if len(ends) else ends
    return np.diff(reached, prepend=0), len(raw) - (int(reached[-1]) if len(reached) else 0)
