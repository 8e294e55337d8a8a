"""Rows of a text as examples: with the next tokens, or with tokens that are hidden, as targets."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lagwise import noise
from lagwise.lab.tasks.base import SPLITS, Batch, Examples, Split
from lagwise.lab.tasks.text.streams import Alphabet, Stream

COPIES = 10
"""How many different masks each row of the training text has, as in BERT's own data."""


class Rows(Examples):
    """Rows of a text. What is left at its end, less than a row, is left out."""

    def __init__(self, stream: Stream, alphabet: Alphabet, length: int, *, packed: bool, split: Split):
        self.stream, self.alphabet, self.length, self.packed, self.split = stream, alphabet, length, packed, split
        self.count = (len(stream.tokens) - 1) // length
        if not self.count:
            raise ValueError(
                f"length must be less than the {len(stream.tokens)} tokens of the {split} text, but is {length}: "
                "choose a shorter one, or give more text"
            )

    def __len__(self) -> int:
        return self.count

    def cut(self, column: Tensor, rows: Sequence[int]) -> Int[Tensor, "batch length+1"]:
        """Returns rows of a column, each with the first entry of the next one."""
        return torch.stack([column[row * self.length : (row + 1) * self.length + 1] for row in rows]).long()

    def sizes(self, tokens: Int[Tensor, "batch length+1"], rows: Sequence[int]) -> Int[Tensor, "batch length+1"]:
        """Returns how many bytes the tokens of rows stand for."""
        return (tokens != self.alphabet.end).long() if self.stream.sizes is None else self.cut(self.stream.sizes, rows)

    def places(self, tokens: Int[Tensor, "batch length"]) -> tuple[Int[Tensor, "batch length"], Batch]:
        """Returns the position of each token in its sequence, and the sequences' ends if they are packed."""
        time = torch.arange(tokens.shape[1]).expand_as(tokens)
        if not self.packed:
            return time, {}
        begins = tokens == self.alphabet.end
        begins[:, 0] = True
        first = torch.where(begins, time, 0).cummax(1).values
        ends = torch.cat([begins.flatten().nonzero()[:, 0], torch.tensor([tokens.numel()])])
        return time - first, {"cu_seqlens": ends}


class CausalRows(Rows):
    """Rows whose targets are the tokens one further: each token of the text but the first is a target once."""

    def batch(self, indices: Sequence[int]) -> Batch:
        tokens = self.cut(self.stream.tokens, indices)
        inputs = tokens[:, :-1].contiguous()
        positions, ends = self.places(inputs)
        sizes = self.sizes(tokens, indices)[:, 1:]
        return {"tokens": inputs, "targets": tokens[:, 1:], "sizes": sizes, "positions": positions, **ends}


class MaskedRows(Rows):
    """Rows in which some tokens are hidden: of those that are asked for 80 % are masks, 10 % any token, 10 % themselves.

    What is hidden depends on the seed and the number of the example. Training rows come with several masks.

    Args:
        stream: The text.
        alphabet: Of its tokens.
        length: Tokens of a row.
        seed: Where random numbers start.
        hidden: The share of tokens that are asked for.
        whole_words: Hide all tokens of a word or none.
        rows: Options of all rows.
    """

    def __init__(
        self, stream: Stream, alphabet: Alphabet, length: int, *, seed: int, hidden: float, whole_words: bool, **rows: Any
    ):  # fmt: skip
        super().__init__(stream, alphabet, length, **rows)
        self.seed, self.hidden, self.whole_words = torch.tensor(seed), hidden, whole_words

    def __len__(self) -> int:
        return self.count * COPIES if self.split == "train" else self.count

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = [index % self.count for index in indices]
        whole = self.cut(self.stream.tokens, rows)
        tokens = whole[:, :-1].contiguous()
        positions, ends = self.places(tokens)
        draws = self.draws(indices)
        asked = self.asked(tokens, draws[0])
        hidden, other = asked & (draws[1] < 0.8), asked & (draws[1] >= 0.9)
        inputs = torch.where(hidden, self.alphabet.mask, tokens)
        ordinary = (~self.alphabet.special).nonzero()[:, 0]
        inputs = torch.where(other, ordinary[(draws[2] * len(ordinary)).long()], inputs)
        chosen = asked.flatten().nonzero()[:, 0]
        columns = {"targets": tokens, "sizes": self.sizes(whole, rows)[:, :-1], "positions": positions}
        return {"tokens": inputs, "chosen": chosen, **{name: x.flatten()[chosen] for name, x in columns.items()}, **ends}

    def draws(self, indices: Sequence[int]) -> Float[Tensor, "3 batch length"]:
        """Returns numbers from 0 to 1: whether a token is asked for, what becomes of it, and by what it is replaced."""
        stream = noise.bits(self.seed, SPLITS.index(self.split))
        counters = torch.arange(3)[:, None, None], torch.as_tensor(indices)[:, None], torch.arange(self.length)
        # 24 bits are exact in float32.
        return ((noise.bits(stream, *counters) >> 40) & (2**24 - 1)).float() / 2**24

    def asked(self, tokens: Int[Tensor, "batch length"], draws: Float[Tensor, "batch length"]) -> Bool[Tensor, "batch length"]:
        """Returns which tokens are asked for: in each row at least one that is not special."""
        special = self.alphabet.special[tokens]
        if self.whole_words:
            draws = draws.gather(1, self.first_of_word(tokens))
        draws = draws.masked_fill(special, 1.0)
        least = draws.amin(1, keepdim=True)
        return (draws <= least.clamp(min=self.hidden)) & ~special

    def first_of_word(self, tokens: Int[Tensor, "batch length"]) -> Int[Tensor, "batch length"]:
        """Returns for each token where its word begins."""
        goes_on = self.alphabet.begins_inside[tokens]
        goes_on[:, 1:] &= self.alphabet.ends_inside[tokens[:, :-1]]
        goes_on[:, 0] = False
        return torch.where(goes_on, 0, torch.arange(tokens.shape[1])).cummax(1).values
