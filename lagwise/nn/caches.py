"""What layers keep of earlier tokens while a decoder goes from token to token."""

from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from lagwise.linear import State


@dataclass
class Cache:
    """Keys and values of one attention layer that later queries see again.

    Keys are kept after the encoding's transform, so that it is not redone; the raw ones are kept too where a table reads
    them beside a transform.
    """

    k: Tensor | None = None
    v: Tensor | None = None
    raw_k: Tensor | None = None

    @property
    def length(self) -> int:
        """The number of keys so far."""
        return 0 if self.v is None else self.v.shape[2]

    @property
    def batch(self) -> int | None:
        """The number of rows, None before the first key."""
        return None if self.v is None else self.v.shape[0]

    def append(self, k: Tensor, v: Tensor, raw_k: Tensor | None) -> None:
        """Adds the keys and values of new tokens."""
        self.k, self.v, self.raw_k = (
            new if old is None or new is None else torch.cat([old, new], dim=2)
            for old, new in ((self.k, k), (self.v, v), (self.raw_k, raw_k))
        )

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keeps these rows of the batch, in this order, as beam search needs it."""
        self.k, self.v, self.raw_k = (None if x is None else x[rows] for x in (self.k, self.v, self.raw_k))


@dataclass
class LinearCache:
    """The state of one layer of linear attention, which does not grow with the number of tokens.

    Keys are in its sums as they were masked when they came: later masks tell about later keys alone.
    """

    state: State | None = None

    @property
    def length(self) -> int:
        """The number of keys so far."""
        return 0 if self.state is None else self.state.length

    @property
    def batch(self) -> int | None:
        """The number of rows, None before the first key."""
        return None if self.state is None else self.state.kv.shape[0]

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keeps these rows of the batch, in this order, as beam search needs it."""
        self.state = None if self.state is None else self.state.select(rows)


LayerCache: TypeAlias = Cache | LinearCache
"""The cache of one layer of softmax or of linear attention."""


@dataclass
class DecoderCache:
    """The caches of a decoder: those of self-attention, and those of cross-attention, which are filled once."""

    self_attention: list[LayerCache] = field(default_factory=list)
    cross_attention: list[LayerCache] = field(default_factory=list)

    @property
    def length(self) -> int:
        """The number of tokens so far."""
        return self.self_attention[0].length

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keeps these rows of the batch, in this order."""
        for cache in (*self.self_attention, *self.cross_attention):
            cache.select(rows)
