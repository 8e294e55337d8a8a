"""A call as a near band and two far fields, for every device: which pairs belong to which, and how they are merged.

Beyond its last column each table is constant, so that a side with tail (bias b, gain g, query a, key c, value u) is
plain attention with

    q_eff = g * q + c,     log-sum-exp shifted by scale q . a + b,     output shifted by u

and parts of a softmax are merged by their log-sum-exps. docs/mathematics.md derives the backward pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lagwise.lags import LagTable
from lagwise.ops.lowering import Lowered, Part, tables_of
from lagwise.terms import TABLES, Terms


class Piece(NamedTuple):
    """A rectangle of queries and keys in which all pairs are seen, or with `causal` those of a square's lower triangle."""

    rows: slice
    keys: slice
    causal: bool


def pieces(queries: int, keys: int, limit: int) -> Iterator[Piece]:
    """Cuts the region `key - row <= limit` into rectangles and one square triangle, none of which has an empty row.

        limit 2, row 0      # # \\ . . .          limit -1, row 0     . . . .      no piece
                 row 1      # # \\ \\ . .                    row 1     \\ . . .
                 row 2      # # \\ \\ \\ .                    row 2     \\ \\ . .
                 row 3      # # \\ \\ \\ \\
                 row 4      = = = = = =

    `#` is a rectangle beside the triangle `\\`, and `=` are rows that see every key.
    """
    start = min(max(0, -limit), queries)
    full = min(max(keys - limit, start), queries)
    beside = start + limit
    if full > start:
        if beside > 0:
            yield Piece(slice(start, full), slice(0, beside), causal=False)
        yield Piece(slice(start, full), slice(beside, beside + full - start), causal=True)
    if queries > full:
        yield Piece(slice(full, queries), slice(0, keys), causal=False)


def extent(queries: int, keys: int, limit: int) -> tuple[int, int]:
    """Returns how many rows the region `key - row <= limit` has, the last ones, and how many keys, the first ones."""
    return max(0, min(queries, queries + limit)), max(0, min(keys, queries + limit))


@dataclass(frozen=True)
class Side:
    """One far field: the pieces of `key - row <= limit`, on time-reversed tensors where it is the future's."""

    tables: Terms
    limit: int
    mirrored: bool

    @property
    def index(self) -> int:
        """Which of the far fields this is: the past's comes first."""
        return 1 if self.mirrored else 0

    @property
    def column(self) -> int:
        """Which column of the tables is constant here."""
        return -1 if self.mirrored else 0

    def seen(self, x: Tensor) -> Tensor:
        """Returns a tensor, [batch, heads, time, ...], in this side's order of time."""
        return flipped(x) if self.mirrored else x

    def first(self, x: Tensor, count: int) -> Tensor:
        """Returns the start of a tensor's time as this side sees it."""
        return self.seen(x.narrow(2, x.shape[2] - count if self.mirrored else 0, count))

    def last(self, x: Tensor, count: int) -> Tensor:
        """Returns the end of a tensor's time as this side sees it."""
        return self.seen(x.narrow(2, 0 if self.mirrored else x.shape[2] - count, count))

    def original(self, time: slice, count: int) -> slice:
        """Returns a slice of this side's time in the call's order of time."""
        return slice(count - time.stop, count - time.start) if self.mirrored else time

    @property
    def shifts(self) -> bool:
        """Whether the tails shift the log-sum-exp or the output."""
        return any(getattr(self.tables, name) is not None for name in ("bias", "query", "value"))

    def tail(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Returns the tail of a table, [heads, 1] or [heads, 1, channels]."""
        table: LagTable | None = getattr(self.tables, name)
        return None if table is None else table.values[:, self.column, None].to(dtype)

    def add(self, gradients: Terms, name: str, gradient: Tensor) -> None:
        """Adds a gradient, [heads] or [heads, channels], to a table's tail."""
        column = getattr(gradients, name).values[:, self.column]
        column += gradient.sum(0, keepdim=True) if column.shape[0] == 1 else gradient

    def queries(self, q: Tensor, compute: torch.dtype) -> Tensor:
        """Returns the queries that make this side plain attention, summed in a type and rounded once."""
        gain, key = self.tail("gain", compute), self.tail("key", compute)
        if gain is None and key is not None:
            return torch.add(q, key, out=torch.empty_like(q))
        if gain is None:
            return q
        return (q * gain if key is None else torch.addcmul(key, q.to(compute), gain)).to(q.dtype)

    def shift(self, part: Part) -> Tensor:
        """Returns what the tails add to the log-sum-exp, broadcastable to [batch, heads, queries]."""
        query, bias = self.tail("query", part.compute), self.tail("bias", part.compute)
        shift = torch.zeros((), dtype=part.compute, device=part.q.device)
        if query is not None:
            shift = shift + part.call.scale * (part.raw_q.to(part.compute) @ query.mT).squeeze(-1)
        return shift if bias is None else shift + bias


def flipped(x: Tensor) -> Tensor:
    """Reverses the time of a tensor [batch, heads, time, ...].

    torch moves one number at a time, so that rows of half precision go as numbers of 16 bytes where they can.
    """
    step = 16 // x.element_size()
    wide = x.ndim == 4 and x.stride(3) == 1 and x.shape[3] % step == 0 and x.storage_offset() % step == 0
    if wide and all(stride % step == 0 for stride in x.stride()[:3]):
        return x.view(torch.complex128).flip(2).view(x.dtype)
    return x.flip(2)


def near_band(tables: Terms) -> tuple[int, int] | None:
    """Returns the first and the last lag of the tables' band, or None where every table is constant."""
    found = list(tables.tables().values())
    if all(table.constant for table in found):
        return None
    return min(table.first for table in found), max(table.last for table in found)


def is_plain(lowered: Lowered) -> bool:
    """Says whether a call is what the vendor's kernel computes by itself, so that nothing is to be merged."""
    aligned = lowered.query_start == 0 and (not lowered.call.causal or lowered.q.shape[2] == lowered.k.shape[2])
    tables = any(getattr(lowered, name) is not None for name in TABLES)
    whole = lowered.call.key_mask is None and lowered.call.cu_seqlens is None
    return not tables and lowered.call.window is None and aligned and whole


def layout(part: Part) -> tuple[tuple[int, int], list[Side]]:
    """Returns the lags of the band, first and last, and the far fields on either side of it."""
    queries, keys = part.q.shape[2], part.k.shape[2]
    if part.call.window is not None:
        return (part.first, part.last), []
    band = near_band(part.tables)
    if band is None:
        # All pairs are one plain attention, and the band is empty.
        return (1, 0), [Side(part.tables, part.query_start + part.last, mirrored=False)]
    low, high = band
    # A causal call sees only part of a tail that starts in the past; its band goes on to the last lag instead.
    high = part.last if part.call.causal else high
    sides = [
        Side(part.tables, part.query_start + min(low - 1, part.last), mirrored=False),
        Side(part.tables, keys - queries - part.query_start - (high + 1), mirrored=True),
    ]
    return (low, min(high, part.last)), sides[: 1 if part.call.causal else 2]


def far_sides(lowered: Lowered) -> int:
    """Returns how many far fields a call can have, by its kind alone, whatever its lengths."""
    if lowered.call.window is not None:
        return 0
    return 1 if lowered.call.causal or near_band(tables_of(lowered)) is None else 2


def merge_into(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor, shift: Tensor | None = None) -> None:
    """Merges into an attention that of the same queries over other keys, whose output is shifted, in place."""
    both = torch.logaddexp(lse, other_lse)
    finite = torch.where(both == -torch.inf, 0.0, both)
    other = torch.exp(other_lse - finite)[..., None]
    out.mul_(torch.exp(lse - finite)[..., None])
    out.addcmul_(other_out.to(out.dtype), other)
    if shift is not None:
        out.addcmul_(shift, other)
    lse.copy_(both)
