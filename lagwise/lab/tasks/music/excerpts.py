"""Excerpts of pieces of music as examples, whose next tokens are asked for."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from lagwise.lab.tasks.base import Batch, Examples
from lagwise.lab.tasks.music.music_files import Piece


class Excerpts(Examples):
    """Excerpts of pieces. Those of one length make rows [batch, time]; others are packed, one behind the other [1, time].

    A batch has `tokens`, `targets` (one token further) and `positions`, and `cu_seqlens` where it is packed.
    """

    def __init__(
        self, pieces: Sequence[Piece], places: Int[Tensor, "excerpts 3"], shifts: Int[Tensor, "shifts symbols"], length: int
    ):  # fmt: skip
        self.stream = torch.from_numpy(np.concatenate([piece.tokens for piece in pieces]).astype(np.int32))
        self.places, self.shifts, self.length = places, shifts, length

    def __len__(self) -> int:
        return len(self.places)

    def batch(self, indices: Sequence[int]) -> Batch:
        chosen = self.places[torch.as_tensor(indices)].tolist()
        rows = [self.shifts[shift][self.stream[start : start + size + 1]] for start, size, shift in chosen]
        sizes = [size for _, size, _ in chosen]
        packed = len(set(sizes)) > 1
        join: Callable[[list[Tensor]], Tensor] = (lambda parts: torch.cat(parts)[None]) if packed else torch.stack
        found = {
            "tokens": join([row[:-1] for row in rows]),
            "targets": join([row[1:] for row in rows]),
            "positions": join([torch.arange(size) for size in sizes]),
        }
        return {**found, "cu_seqlens": torch.tensor([0, *sizes]).cumsum(0)} if packed else found


def excerpt_places(bars: Int[np.ndarray, " bars"], size: int, length: int) -> list[tuple[int, int]]:
    """Returns where the training excerpts of a piece of `size` tokens begin, and how many tokens are predicted in each.

    Each begins with a bar where the one before it ended; the last one ends with the piece and is as long as the others.

    >>> excerpt_places(np.array([0, 4, 9]), 13, 6)
    [(0, 6), (4, 6), (6, 6)]
    """
    last, found = max(0, size - 1 - length), []
    start = 0
    while start < last:
        found.append((start, length))
        bar = int(bars[np.searchsorted(bars, start + length, side="right") - 1])
        start = bar if bar > start else start + length
    return [*found, (last, size - 1 - last)]
