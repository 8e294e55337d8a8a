"""The one step from `Terms` and a `Call` to what the fast implementations read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lagwise.call import Call
from lagwise.kept import positions
from lagwise.lags import LagTable
from lagwise.terms import TABLES, Terms


class Lowered(NamedTuple):
    """A call as tensors and numbers: what is multiplied, the tables, and the options.

    `q` and `k` are the operands of the content product, after the transform; `raw_q` and `raw_k` are what `query` and `key` read
    and are None where that is `q` and `k` themselves. `firsts` holds the first lags of `bias`, `gain`, `query`, `key` and
    `value`. Of the options, lengths are in the mask of keys.
    """

    q: Tensor  # [batch, heads, queries, content_dim]
    k: Tensor  # [batch, k_heads, keys, content_dim]
    v: Tensor  # [batch, v_heads, keys, value_dim]
    raw_q: Tensor | None  # [batch, heads, queries, head_dim]
    raw_k: Tensor | None  # [batch, kv_heads, keys, head_dim]
    bias: Tensor | None  # [heads or 1, lags]
    past_slope: Tensor | None  # [heads or 1]
    future_slope: Tensor | None
    gain: Tensor | None  # [heads or 1, lags, content_dim or 1]
    query: Tensor | None  # [heads or 1, lags, head_dim]
    key: Tensor | None  # [heads or 1, lags, head_dim]
    value: Tensor | None  # [heads or 1, lags, value_dim]
    firsts: list[int]
    call: Call
    plans: dict[Any, Any] | None = None  # what an implementation decides of the call, for both of its passes

    @property
    def starts(self) -> Tensor | None:
        """The position of the first query of each row, [batch], where it is not one number for all."""
        return self.call.query_start if isinstance(self.call.query_start, Tensor) else None

    @property
    def query_start(self) -> int:
        """The position of the first query, 0 where it is one per row."""
        return 0 if isinstance(self.call.query_start, Tensor) else self.call.query_start

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All that may be tensors: the fields of DIFFERENTIABLE, then `key_mask`, `cu_seqlens`, `starts` and `seed`."""
        call, start = self.call, self.call.query_start
        return *self[:12], call.key_mask, call.cu_seqlens, start if isinstance(start, Tensor) else None, call.seed


DIFFERENTIABLE = ("q", "k", "v", "raw_q", "raw_k", "bias", "past_slope", "future_slope", "gain", "query", "key", "value")
"""The fields of `Lowered` that gradients flow to, in order; they come first."""

ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? raw_q, Tensor? raw_k, Tensor? bias, Tensor? past_slope, Tensor? future_slope, "
    "Tensor? gain, Tensor? query, Tensor? key, Tensor? value, SymInt[] firsts, Tensor? key_mask, Tensor? cu_seqlens, "
    "Tensor? starts, SymInt query_start, bool causal, SymInt[]? window, float scale, float dropout, Tensor? seed, "
    "SymInt? max_seqlen"
)
"""What `flat` returns, in the words of an operator's schema."""


def flat(lowered: Lowered) -> tuple[Any, ...]:
    """Returns a call as an operator takes it."""
    call = lowered.call
    window = None if call.window is None else list(call.window)
    options = (call.key_mask, call.cu_seqlens, lowered.starts, lowered.query_start, call.causal, window, call.scale, call.dropout)
    return (*lowered[:13], *options, call.seed, call.max_seqlen)


def unflattened(arguments: Sequence[Any]) -> Lowered:
    """Returns the call that an operator was given."""
    key_mask, cu_seqlens, starts, query_start, causal, window, scale, dropout, seed, max_seqlen = arguments[13:]
    call = Call(
        causal=causal, key_mask=key_mask, cu_seqlens=cu_seqlens, window=None if window is None else (window[0], window[1]),
        query_start=query_start if starts is None else starts, scale=scale, dropout=dropout, seed=seed, max_seqlen=max_seqlen,
    )  # fmt: skip
    return Lowered._make((*arguments[:13], call, None))


def lower(q: Tensor, k: Tensor, v: Tensor, terms: Terms, call: Call) -> Lowered:
    """Applies the transform and flattens the tables."""
    raw_q = raw_k = None
    if terms.transform is not None:
        raw_q = q if terms.query is not None else None
        raw_k = k if terms.key is not None else None
        q, k = terms.content(q, k, *token_positions(q, k, call))
    tables = terms.tables()
    slopes = (terms.bias.slopes if terms.bias is not None else None) or (None, None)
    call = call.with_key_mask(k.shape[2])
    if call.seed is not None and call.dropout == 0.0:
        # Nobody reads it any more, and it would be saved for the backward pass.
        call = replace(call, seed=None)
    if isinstance(call.query_start, Tensor):
        call = replace(call, query_start=call.query_start.expand(q.shape[0]).clone())
    return Lowered(
        q, k, v, raw_q, raw_k,
        bias=tables["bias"].values if "bias" in tables else None,
        past_slope=slopes[0],
        future_slope=slopes[1],
        gain=tables["gain"].values if "gain" in tables else None,
        query=tables["query"].values if "query" in tables else None,
        key=tables["key"].values if "key" in tables else None,
        value=tables["value"].values if "value" in tables else None,
        firsts=[tables[name].first if name in tables else 0 for name in TABLES],
        call=call,
        plans={},
    )  # fmt: skip


OPERANDS = DIFFERENTIABLE[:5]
"""Those of them that are no tables, whose gradients are always computed."""


def wanted_gradients(lowered: Lowered, learned: bool) -> Iterator[tuple[str, Tensor]]:
    """Yields the fields of DIFFERENTIABLE that a call has, with their names; tables only where they are learned."""
    for name in DIFFERENTIABLE if learned else OPERANDS:
        x = getattr(lowered, name)
        if x is not None:
            yield name, x


def contiguous_gradients(lowered: Lowered, learned: bool) -> list[Tensor]:
    """Returns empty gradients of the fields that are wanted."""
    return [x.new_empty(x.shape) for _, x in wanted_gradients(lowered, learned)]


def laid_out_gradients(lowered: Lowered, learned: bool) -> list[Tensor]:
    """Returns empty gradients of the fields that are wanted, those of operands with the layout of these."""
    return [
        empty_laid_out(True, x, *x.shape) if name in OPERANDS and is_by_token(x) else x.new_empty(x.shape)
        for name, x in wanted_gradients(lowered, learned)
    ]


def is_by_token(x: Tensor) -> bool:
    """Says whether the heads of a token lie side by side, [batch, time, heads, dim], as a projection leaves them."""
    return x.stride(3) == 1 and x.stride(1) < x.stride(2)


def empty_laid_out(by_token: bool, x: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Returns an empty tensor [batch, heads, time, dim] of the type of x, with the heads of a token side by side or not."""
    batch, heads, time, dim = shape
    kind = x.dtype if dtype is None else dtype
    return x.new_empty((batch, time, heads, dim), dtype=kind).transpose(1, 2) if by_token else x.new_empty(shape, dtype=kind)


def token_positions(q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Returns the positions that a transform sees: those of the queries, then those of the keys, as one where they are equal."""
    keys, start = positions(0, k.shape[2] - 1, k.device), call.query_start
    if call.cu_seqlens is not None:
        sequence = torch.searchsorted(call.cu_seqlens, keys, right=True) - 1
        return keys - call.cu_seqlens[sequence], keys - call.cu_seqlens[sequence]
    if not isinstance(start, Tensor) and start == 0 and q.shape[2] == k.shape[2]:
        return keys, keys
    if not isinstance(start, Tensor):
        return positions(start, start + q.shape[2] - 1, q.device), keys
    rows = torch.arange(q.shape[2], device=q.device)
    return (start[:, None] if start.ndim == 1 else start) + rows, keys


class Place(NamedTuple):
    """Where a part lies in its call: slices of the batch, of the queries' time and of the keys' time."""

    batch: slice
    queries: slice
    keys: slice

    @property
    def rows(self) -> tuple[slice, slice, slice]:
        """The part's queries as an index of [batch, heads, queries, ...]."""
        return self.batch, slice(None), self.queries


EVERYWHERE = Place(slice(None), slice(None), slice(None))


@dataclass(frozen=True)
class Part:
    """One rectangle of a call in which row r stands at position `query_start + r`, key j at position j, for all of the batch."""

    q: Tensor
    k: Tensor
    v: Tensor
    raw_q: Tensor
    raw_k: Tensor
    tables: Terms
    call: Call  # of this part alone, with its position of the first query
    first: int  # the first and the last lag that may be seen
    last: int
    origin: tuple[int, int, int]  # where batch, queries and keys start in the whole call; dropout counts from there

    @property
    def compute(self) -> torch.dtype:
        """The type in which sums are taken."""
        return torch.promote_types(self.q.dtype, torch.float32)

    @property
    def query_start(self) -> int:
        """The position of the first query."""
        assert not isinstance(self.call.query_start, Tensor)
        return self.call.query_start


def tables_of(lowered: Lowered) -> Terms:
    """Returns the tables of a call as terms without a transform; one with slopes in the type of the sums, in which it is one."""
    tables: dict[str, Any] = {
        name: LagTable(values, first)
        for name, first in zip(TABLES, lowered.firsts, strict=True)
        if (values := getattr(lowered, name)) is not None
    }
    if lowered.past_slope is not None and lowered.future_slope is not None:
        bias = replace(tables["bias"], slopes=(lowered.past_slope, lowered.future_slope))
        tables["bias"] = bias.to(torch.promote_types(lowered.q.dtype, torch.float32))
    return Terms(**tables)


def part_at(lowered: Lowered, place: Place, query_start: int, key_mask: Tensor | None = None) -> Part:
    """Returns the part of a call at some place: one sequence for each row there, with a mask of its keys."""

    def cut(x: Tensor, time: slice) -> Tensor:
        return x if place == EVERYWHERE else x[place.batch, :, time]

    call = replace(lowered.call, query_start=query_start, cu_seqlens=None, key_mask=key_mask)
    q, k = cut(lowered.q, place.queries), cut(lowered.k, place.keys)
    first, last = call.visible_lags(q.shape[2], k.shape[2])
    return Part(
        q, k, cut(lowered.v, place.keys),
        q if lowered.raw_q is None else cut(lowered.raw_q, place.queries),
        k if lowered.raw_k is None else cut(lowered.raw_k, place.keys),
        tables=tables_of(lowered), call=call, first=first, last=last,
        origin=(place.batch.start or 0, place.queries.start or 0, place.keys.start or 0),
    )  # fmt: skip


def parts_of(lowered: Lowered, *, trimmed: bool = False) -> Iterator[tuple[Place, Part]]:
    """Yields the parts of a call with their places: one, or one per packed sequence, row of `starts`, or length.

    Sequences, rows and lengths are read on the host, which on a GPU waits for the device. Those without a key are left out.

    Args:
        lowered: The call.
        trimmed: Leave out the keys that a mask hides, which must be the last ones of each row.
    """
    everything, mask = slice(None), lowered.call.key_mask
    if lowered.call.cu_seqlens is not None:
        for start, stop in pairwise(lowered.call.cu_seqlens.tolist()):
            if stop > start:
                place = Place(everything, slice(start, stop), slice(start, stop))
                yield place, part_at(lowered, place, 0)
    elif lowered.starts is not None:
        for row, start in enumerate(lowered.starts.tolist()):
            place = Place(slice(row, row + 1), everything, everything)
            yield place, part_at(lowered, place, start, None if mask is None else mask[place.batch])
    elif trimmed and mask is not None:
        lengths = mask.sum(1).tolist()
        # Neighbours of one length are one part.
        for length, group in groupby(range(len(lengths)), key=lengths.__getitem__):
            rows = list(group)
            if length > 0:
                place = Place(slice(rows[0], rows[-1] + 1), everything, slice(0, length))
                yield place, part_at(lowered, place, lowered.query_start)
    else:
        yield EVERYWHERE, part_at(lowered, EVERYWHERE, lowered.query_start, mask)


@dataclass
class Gradients:
    """Where the backward pass of a call adds up, in the type of the sums. The names are those of `Lowered`."""

    q: Tensor
    k: Tensor
    v: Tensor
    raw_q: Tensor
    raw_k: Tensor
    tables: Terms

    @classmethod
    def zeros(cls, lowered: Lowered) -> "Gradients":
        compute = torch.promote_types(lowered.q.dtype, torch.float32)

        def like(x: Tensor) -> Tensor:
            return torch.zeros(x.shape, dtype=compute, device=x.device)

        q, k = like(lowered.q), like(lowered.k)
        tables: dict[str, Any] = {name: table.zeros(compute) for name, table in tables_of(lowered).tables().items()}
        return cls(
            q, k, like(lowered.v),
            q if lowered.raw_q is None else like(lowered.raw_q), k if lowered.raw_k is None else like(lowered.raw_k),
            Terms(**tables),
        )  # fmt: skip

    def cut(self, place: Place) -> "Gradients":
        """Returns views on one part's share."""
        batch, queries, keys = place
        return replace(
            self, q=self.q[batch, :, queries], k=self.k[batch, :, keys], v=self.v[batch, :, keys],
            raw_q=self.raw_q[batch, :, queries], raw_k=self.raw_k[batch, :, keys],
        )  # fmt: skip

    def flat(self, lowered: Lowered, learned: bool) -> list[Tensor]:
        """Returns the gradients that are wanted, in their order and in the types of what they belong to."""
        tables = self.tables.tables()
        found: dict[str, Tensor] = {
            "q": self.q, "k": self.k, "v": self.v, "raw_q": self.raw_q, "raw_k": self.raw_k,
            **{name: table.values for name, table in tables.items()},
        }  # fmt: skip
        if "bias" in tables and tables["bias"].slopes is not None:
            found["past_slope"], found["future_slope"] = tables["bias"].slopes
        return [found[name].to(x.dtype).contiguous() for name, x in wanted_gradients(lowered, learned)]
