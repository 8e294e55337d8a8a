"""Sentences and their translations as tokens, in buckets of about one length."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from lagwise.lab.tasks.base import SPLITS, Batch, Examples, Sequences, Split

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ENCODED = 4096
"""Sentences that are encoded at a time."""


def encode_sentences(tokenizer: "Tokenizer", texts: Sequence[str], end: int) -> dict[str, Any]:
    """Returns the `tokens` of sentences end to end, each with an end behind it, and where each sentence `ends`."""
    parts = [
        np.array([*found.ids, end], dtype=np.int32)
        for start in range(0, len(texts), ENCODED)
        for found in tokenizer.encode_batch(list(texts[start : start + ENCODED]), add_special_tokens=False)
    ]
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    return {"tokens": torch.from_numpy(np.concatenate(parts)), "ends": torch.from_numpy(ends)}


class Buckets(Examples):
    """Pairs of sentences in groups of about one length; each group is one example, so that batches have about as many tokens.

    A batch has

        tokens, lengths     the source, padded on the right, and its lengths
        inputs              the target one place later, after an end
        chosen, targets     where its tokens are in all rows end to end, and what they are
        limits              how many tokens a translation may have
        numbers             split and number of each pair

    Several examples are padded to the longest of them.
    """

    def __init__(
        self, source: Sequences, target: Sequences, groups: Sequence[Tensor], *, split: Split, end: int, limit: int, longer: int
    ):  # fmt: skip
        self.source, self.target, self.groups = source, target, groups
        self.split, self.end, self.limit, self.longer = SPLITS.index(split), end, limit, longer

    def __len__(self) -> int:
        return len(self.groups)

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = torch.cat([self.groups[index] for index in indices])
        source, target = self.source.batch(rows.tolist()), self.target.batch(rows.tolist())
        there = torch.arange(target["tokens"].shape[1]) < target["lengths"][:, None]
        chosen = there.flatten().nonzero()[:, 0]
        return {
            **source,
            "inputs": F.pad(target["tokens"], (1, 0), value=self.end)[:, :-1],
            "chosen": chosen,
            "targets": target["tokens"].flatten()[chosen],
            "limits": (source["lengths"] + self.longer).clamp(max=self.limit),
            "numbers": torch.stack([torch.full_like(rows, self.split), rows], dim=1),
        }


def group_by_size(sizes: Int[np.ndarray, " rows"], tokens: int, rng: torch.Generator) -> list[Int[np.ndarray, " group"]]:
    """Returns groups of rows of about one size, each with at most so many tokens when it is padded, in a mixed order.

    A row that has more is a group of its own.

    >>> groups = group_by_size(np.array([2, 5, 2, 3, 2]), 6, torch.Generator().manual_seed(0))
    >>> sorted(sorted(group.tolist()) for group in groups)
    [[0, 2, 4], [1], [3]]
    """
    mixed = torch.randperm(len(sizes), generator=rng).numpy()
    order = mixed[np.argsort(sizes[mixed], kind="stable")]
    ascending, start, groups = sizes[order], 0, []
    while start < len(order):
        window = ascending[start : start + max(1, tokens // int(ascending[start]))]
        count = max(1, int((window * np.arange(1, len(window) + 1) <= tokens).sum()))
        groups.append(order[start : start + count])
        start += count
    return [groups[index] for index in torch.randperm(len(groups), generator=rng).tolist()]
