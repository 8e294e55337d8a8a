"""The one step from `Terms` and the options of a call to what the fast implementations read."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lagwise.lags import LagTable, visible_lags
from lagwise.terms import TABLES, Terms


class Lowered(NamedTuple):
    """A call as flat tensors and numbers, in the order of the registered operators' arguments.

    `q` and `k` are the operands of the content product, after the transform; `raw_q` and `raw_k` are what `query` and `key` read
    and are None where that is `q` and `k` themselves. `firsts` holds the first lags of `bias`, `gain`, `query`, `key` and
    `value`. A `query_start` per row is in `starts`, otherwise in `query_start`.
    """

    q: Tensor  # [batch, heads, queries, content_dim]
    k: Tensor  # [batch, k_heads, keys, content_dim]
    v: Tensor  # [batch, v_heads, keys, value_dim]
    raw_q: Tensor | None  # [batch, heads, queries, head_dim]
    raw_k: Tensor | None  # [batch, kv_heads, keys, head_dim]
    bias: Tensor | None  # [heads or 1, lags]
    slopes: Tensor | None  # [2, heads or 1], past and future
    gain: Tensor | None  # [heads or 1, lags, content_dim or 1]
    query: Tensor | None  # [heads or 1, lags, head_dim]
    key: Tensor | None  # [heads or 1, lags, head_dim]
    value: Tensor | None  # [heads or 1, lags, value_dim]
    firsts: list[int]
    key_mask: Tensor | None  # [batch, keys], true = may be attended
    cu_seqlens: Tensor | None  # [sequences + 1]
    starts: Tensor | None  # [batch]
    query_start: int
    causal: bool
    window: list[int] | None
    scale: float
    dropout: float
    seed: Tensor | None


DIFFERENTIABLE = ("q", "k", "v", "raw_q", "raw_k", "bias", "slopes", "gain", "query", "key", "value")
"""The fields of `Lowered` that gradients flow to, in order; they come first."""


def lower(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, *,
    scale: float, causal: bool, window: tuple[int, int] | None, query_start: int | Tensor,
    key_mask: Tensor | None, cu_seqlens: Tensor | None, dropout: float, seed: Tensor | None,
) -> Lowered:  # fmt: skip
    """Applies the transform and flattens the tables."""
    raw_q = raw_k = None
    if terms.transform is not None:
        raw_q = q if terms.query is not None else None
        raw_k = k if terms.key is not None else None
        q, k = terms.content(q, k, *token_positions(q, k, query_start, cu_seqlens))
    tables = terms.tables()
    slopes = terms.bias.slopes if terms.bias is not None else None
    per_row = isinstance(query_start, Tensor)
    return Lowered(
        q, k, v, raw_q, raw_k,
        bias=tables["bias"].values if "bias" in tables else None,
        slopes=torch.stack(slopes) if slopes is not None else None,
        gain=tables["gain"].values if "gain" in tables else None,
        query=tables["query"].values if "query" in tables else None,
        key=tables["key"].values if "key" in tables else None,
        value=tables["value"].values if "value" in tables else None,
        firsts=[tables[name].first if name in tables else 0 for name in TABLES],
        key_mask=key_mask, cu_seqlens=cu_seqlens,
        starts=query_start.expand(q.shape[0]).clone() if per_row else None,
        query_start=0 if per_row else query_start,
        causal=causal, window=None if window is None else list(window),
        scale=scale, dropout=dropout, seed=seed,
    )  # fmt: skip


def contiguous_gradients(call: Lowered) -> list[Tensor]:
    """Returns empty gradients of the fields that a call has, in the order of DIFFERENTIABLE."""
    return [x.new_empty(x.shape) for name in DIFFERENTIABLE if (x := getattr(call, name)) is not None]


def is_by_token(x: Tensor) -> bool:
    """Says whether the heads of a token lie side by side, [batch, time, heads, dim], as a projection leaves them."""
    return x.stride(3) == 1 and x.stride(1) < x.stride(2)


def empty_laid_out(by_token: bool, x: Tensor, *shape: int) -> Tensor:
    """Returns an empty tensor [batch, heads, time, dim] of the type of x, with the heads of a token side by side or not."""
    batch, heads, time, dim = shape
    return x.new_empty(batch, time, heads, dim).transpose(1, 2) if by_token else x.new_empty(shape)


def token_positions(q: Tensor, k: Tensor, query_start: int | Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the positions that a transform sees: those of the queries, then those of the keys, as one where they are equal."""
    keys = torch.arange(k.shape[2], device=k.device)
    if cu_seqlens is None and not isinstance(query_start, Tensor) and query_start == 0 and q.shape[2] == k.shape[2]:
        return keys, keys
    rows = torch.arange(q.shape[2], device=q.device)
    if cu_seqlens is not None:
        sequence = torch.searchsorted(cu_seqlens, keys, right=True) - 1
        return keys - cu_seqlens[sequence], keys - cu_seqlens[sequence]
    if isinstance(query_start, Tensor) and query_start.ndim == 1:
        return query_start[:, None] + rows, keys
    return query_start + rows, keys


@dataclass(frozen=True)
class Part:
    """One rectangle of a call in which row r stands at position `query_start + r`, key j at position j, for all of the batch."""

    q: Tensor
    k: Tensor
    v: Tensor
    raw_q: Tensor
    raw_k: Tensor
    tables: Terms
    key_mask: Tensor | None
    query_start: int
    first: int  # the first and the last lag that may be seen
    last: int
    scale: float
    dropout: float
    seed: Tensor | None
    origin: tuple[int, int, int]  # where batch, queries and keys start in the whole call; dropout counts from there

    @property
    def compute(self) -> torch.dtype:
        """The type in which sums are taken."""
        return torch.promote_types(self.q.dtype, torch.float32)


def tables_of(call: Lowered) -> Terms:
    """Returns the tables of a call as terms without a transform; one with slopes in the type of the sums, in which it is one."""
    tables: dict[str, Any] = {
        name: LagTable(values, first)
        for name, first in zip(TABLES, call.firsts, strict=True)
        if (values := getattr(call, name)) is not None
    }
    if call.slopes is not None:
        bias = replace(tables["bias"], slopes=(call.slopes[0], call.slopes[1]))
        tables["bias"] = bias.to(torch.promote_types(call.q.dtype, torch.float32))
    return Terms(**tables)


def parts_of(call: Lowered) -> Iterator[tuple[slice, slice, Part]]:
    """Yields the parts of a call with their slice of the batch and of time: one, or one per packed sequence or row of `starts`.

    Packed sequences and rows are read on the host, which on a GPU waits for the device.
    """
    window = None if call.window is None else (call.window[0], call.window[1])
    everything = slice(None)

    def part(batch: slice, time: slice, query_start: int) -> Part:
        def cut(x: Tensor) -> Tensor:
            return x if batch == time == everything else x[batch, :, time]

        q, k = cut(call.q), cut(call.k)
        first, last = visible_lags(q.shape[2], k.shape[2], query_start=query_start, causal=call.causal, window=window)
        return Part(
            q, k, cut(call.v),
            q if call.raw_q is None else cut(call.raw_q), k if call.raw_k is None else cut(call.raw_k),
            tables=tables_of(call),
            key_mask=None if call.key_mask is None else call.key_mask[batch],
            query_start=query_start, first=first, last=last,
            scale=call.scale, dropout=call.dropout, seed=call.seed,
            origin=(batch.start or 0, time.start or 0, time.start or 0),
        )  # fmt: skip

    if call.cu_seqlens is not None:
        ends = call.cu_seqlens.tolist()
        for start, stop in pairwise(ends):
            if stop > start:
                yield everything, slice(start, stop), part(everything, slice(start, stop), 0)
    elif call.starts is not None:
        for row, start in enumerate(call.starts.tolist()):
            yield slice(row, row + 1), everything, part(slice(row, row + 1), everything, start)
    else:
        yield everything, everything, part(everything, everything, call.query_start)


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
    def zeros(cls, call: Lowered) -> "Gradients":
        compute = torch.promote_types(call.q.dtype, torch.float32)

        def like(x: Tensor) -> Tensor:
            return torch.zeros(x.shape, dtype=compute, device=x.device)

        q, k = like(call.q), like(call.k)
        tables: dict[str, Any] = {name: table.zeros(compute) for name, table in tables_of(call).tables().items()}
        return cls(
            q, k, like(call.v),
            q if call.raw_q is None else like(call.raw_q), k if call.raw_k is None else like(call.raw_k),
            Terms(**tables),
        )  # fmt: skip

    def cut(self, batch: slice, time: slice) -> "Gradients":
        """Returns views on one part's share."""
        return replace(
            self, q=self.q[batch, :, time], k=self.k[batch, :, time], v=self.v[batch, :, time],
            raw_q=self.raw_q[batch, :, time], raw_k=self.raw_k[batch, :, time],
        )  # fmt: skip

    def flat(self, call: Lowered) -> list[Tensor]:
        """Returns the gradients of the fields that the call has, in the order of DIFFERENTIABLE and in their types."""
        tables = self.tables.tables()
        found: dict[str, Tensor] = {
            "q": self.q, "k": self.k, "v": self.v, "raw_q": self.raw_q, "raw_k": self.raw_k,
            **{name: table.values for name, table in tables.items()},
        }  # fmt: skip
        if call.slopes is not None and tables["bias"].slopes is not None:
            found["slopes"] = torch.stack(tables["bias"].slopes)
        return [found[name].to(x.dtype).contiguous() for name in DIFFERENTIABLE if (x := getattr(call, name)) is not None]
