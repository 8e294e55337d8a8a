"""Gradients of tables of scalars: sums of dlogit along the diagonals of [queries, keys].

    dbias(n) = sum_i dlogit(i, i + n),      dgain(n) = scale sum_i dlogit(i, i + n) q_i . k_(i + n)

A program walks along one block diagonal, on which every tile has the same lags:

    queries |  A B . .
            |  . A B .        A: lags around one offset, B: those around the next
            |  . . A B
            +-----------> keys

so that tiles are added up entry by entry, and only their sum is summed along its diagonals, once per program. Programs write
partial sums, and a second kernel adds them up: no atomics, the same bits each time.
"""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lagwise.lags import LagTable
from lagwise.ops.kernels.arguments import Bands, Sizes
from lagwise.ops.kernels.launches import run
from lagwise.ops.kernels.logits import (
    NUMBERS,
    content_product,
    end_queries,
    head_pointers,
    load_statistics,
    query_start_of,
    tile_gradient,
    tile_logits,
)
from lagwise.ops.kernels.plan import Plan, blocks
from lagwise.ops.kernels.tiles import NEAR, dropout_state, head_of, load_keys, load_rows, product
from lagwise.terms import Terms

# Programs of the diagonal sums, enough to fill a GPU, and how many of their sums and columns a program adds up at a time.
DIAGONAL_PROGRAMS = 2048
PARTS, COLUMNS = 32, 32


@triton.jit
def sums_of_diagonals(x, SIZE: tl.constexpr):
    """Returns the sums of a square tile along its 2 SIZE - 1 diagonals, lower left first, and a zero."""
    row = tl.arange(0, SIZE)[:, None]
    column = row + tl.arange(0, 2 * SIZE)[None, :] - (SIZE - 1)
    inside = (column >= 0) & (column < SIZE)
    skewed = tl.gather(x, tl.minimum(tl.maximum(column, 0), SIZE - 1), 1)
    return tl.sum(tl.where(inside, skewed, 0.0), 0)


@triton.jit(do_not_specialize=[*NUMBERS, "chunks"])
def scalar_gradient_kernel(
    q, k, v, dout, lse, delta, dbias, dgain, tables, scores, seen,
    heads, group, queries, keys, query_start, first, last, near_first, near_last, low, high,
    band_first, band_lags, value_first, value_lags, scale, dropped, chunks, flags: tl.constexpr,
):  # fmt: skip
    """Sums dlogit over one of the `chunks` of a block diagonal; they have all lags from `low` to `high`, and some more.

    Tiles are squares of ROWS queries.
    """
    ROWS: tl.constexpr = flags.ROWS
    sizes = Sizes(heads, group, queries, keys, first, last)
    bands = Bands(near_first, near_last, low, high, band_first, band_lags, value_first, value_lags)
    part, diagonals = tl.program_id(0), tl.cdiv(high - low + ROWS, ROWS)
    diagonal, chunk, pair = part % diagonals, part // diagonals % chunks, part // (diagonals * chunks)
    batch, head, base = pair // heads, pair % heads, pair.to(tl.int64)
    index = tl.arange(0, ROWS)
    offset = low + diagonal * ROWS
    lag = offset + index[None, :] - index[:, None]
    bias_sums = tl.zeros([ROWS, ROWS], tl.float32)
    gain_sums = tl.zeros([ROWS, ROWS], tl.float32)
    start = query_start_of(seen, batch, query_start, flags)
    own = head_pointers(tables, scores, seen, pair, sizes, bands, flags)
    Q, Dout = head_of(q, batch, head), head_of(dout, batch, head)
    K, V = head_of(k, batch, head // group), head_of(v, batch, head // group)
    state = dropout_state(seen.seed, batch, head) if flags.DROPOUT else 0
    # The tiles of the diagonal that have keys, and this chunk's share of them.
    begin = tl.maximum(-start - offset, 0) // ROWS
    end = (tl.minimum(tl.maximum(keys - start - offset, 0), queries) + ROWS - 1) // ROWS
    share = (tl.maximum(end - begin, 0) + chunks - 1) // chunks
    for tile in range(begin + chunk * share, tl.minimum(begin + (chunk + 1) * share, end)):
        row = tile * ROWS + index
        key = row + start + offset
        some_key = tl.maximum(key, 0)[None, :]
        q_rows = load_rows(Q, row, queries, q.time, flags.head_dim, flags.WIDTH, False)
        k_rows = load_keys(K, own.key_mask, key, keys, k.time, flags.head_dim, flags.WIDTH, False, flags.HIDE)
        v_rows = load_keys(V, own.key_mask, key, keys, v.time, flags.value_dim, flags.VALUE_WIDTH, False, flags.HIDE)
        dout_rows = load_rows(Dout, row, queries, dout.time, flags.value_dim, flags.VALUE_WIDTH, False)
        row_lse, row_delta = load_statistics(lse + base * queries, delta + base * queries, row, queries, NEAR)
        q_past, q_future, _past, _future = end_queries(q_rows, own.gain, flags)
        content = content_product(q_past, q_future, tl.trans(k_rows), lag, bands, NEAR, flags)
        logits, _gain = tile_logits(
            content, lag, row[:, None], some_key, own, seen, sizes, bands, scale,
            NEAR, flags.LIMITED or flags.MASK or flags.PACKED, False, False, flags,
        )  # fmt: skip
        logits += tl.where((key >= 0) & (key < keys), 0.0, -float("inf"))[None, :]
        _weights, dlogits = tile_gradient(
            logits, row_lse, row_delta, product(dout_rows, tl.trans(v_rows)), lag, row[:, None], some_key,
            own, sizes, bands, state, dropped, NEAR, flags,
        )  # fmt: skip
        if flags.BIAS:
            bias_sums += dlogits
        if flags.GAIN:
            gain_sums += dlogits * content
    entry = part.to(tl.int64) * 2 * ROWS
    lags = tl.arange(0, 2 * ROWS)
    if flags.BIAS:
        tl.store(dbias + entry + lags, sums_of_diagonals(bias_sums, ROWS))
    if flags.GAIN:
        tl.store(dgain + entry + lags, sums_of_diagonals(gain_sums, ROWS) * scale)


@triton.jit
def lag_sums(
    Sums, lag, head, batch, heads, chunks, diagonals, low, high,
    SIZE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Adds up the partial sums [batch, heads, chunks, diagonals, 2 SIZE] of some lags, zero outside `low` to `high`.

    Each lag is in the upper half of one block diagonal and in the lower half of the next.
    """
    place = lag - low + SIZE - 1
    inside = ((lag >= low) & (lag <= high))[None, :]
    diagonal, entry = (place // SIZE)[None, :], (place % SIZE)[None, :]
    total = tl.zeros(lag.shape, tl.float32)
    for start in range(0, batch * chunks, PARTS):
        part = start + tl.arange(0, PARTS)[:, None]
        there = inside & (part < batch * chunks)
        base = ((part // chunks * heads + head) * chunks + part % chunks).to(tl.int64) * diagonals * (2 * SIZE)
        lower = tl.load(Sums + base + diagonal * (2 * SIZE) + entry, mask=there & (diagonal < diagonals), other=0.0)
        upper = tl.load(Sums + base + (diagonal - 1) * (2 * SIZE) + SIZE + entry, mask=there & (diagonal > 0), other=0.0)
        total += tl.sum(lower + upper, 0)
    return total


@triton.jit(do_not_specialize=["batch", "heads", "chunks", "diagonals", "low", "high", "first", "lags"])
def fold_kernel(
    Sums, Ends, SlopeEnds, Dtable, Dslopes, ends_head, batch, heads, chunks, diagonals, low, high, first, lags,
    SIZE: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, SHARED: tl.constexpr, ENDS: tl.constexpr,
    SLOPES: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of a table [heads or 1, lags] from the sums of the lags, those beyond its columns at its ends.

    `Ends` and `SlopeEnds`, [heads, .., 2], hold what lags before `low` and after `high` add to the ends and to the slopes of the
    table. With SHARED the table is that of all heads.
    """
    index, count = tl.program_id(0), tl.cdiv(lags, COLUMNS)
    block, owner = index % count, index // count
    step = tl.arange(0, COLUMNS)
    column = block * COLUMNS + step
    # Lags before the columns are left to the first block, those after them to the last.
    past_end = tl.where(block == 0, tl.minimum(first, high + 1), low)
    future_start = tl.where(block == count - 1, tl.maximum(first + lags, low), high + 1)
    total = tl.zeros([COLUMNS], tl.float32)
    past, future = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    past_slope, future_slope = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    for head in range(0 if SHARED else owner, heads if SHARED else owner + 1):
        found = lag_sums(Sums, first + column, head, batch, heads, chunks, diagonals, low, high, SIZE, PARTS)
        total += tl.where(column < lags, found, 0.0)
        for start in range(low, past_end, COLUMNS):
            beyond = start + step - first
            found = lag_sums(Sums, start + step, head, batch, heads, chunks, diagonals, low, high, SIZE, PARTS)
            found = tl.where(beyond < 0, found, 0.0)
            past += tl.sum(found, 0)
            past_slope += tl.sum(found * beyond.to(tl.float32), 0)
        for start in range(future_start, high + 1, COLUMNS):
            beyond = start + step - (first + lags - 1)
            found = lag_sums(Sums, start + step, head, batch, heads, chunks, diagonals, low, high, SIZE, PARTS)
            future += tl.sum(found, 0)
            future_slope += tl.sum(found * beyond.to(tl.float32), 0)
        if ENDS:
            past_change, future_change = tl.load(Ends + head * ends_head), tl.load(Ends + head * ends_head + 1)
            past += past_change
            future += future_change
            if SLOPES:
                # The ends count distances from `low` and `high`.
                past_slope += past_change * tl.minimum(low - first, 0).to(tl.float32)
                future_slope += future_change * tl.maximum(high - (first + lags - 1), 0).to(tl.float32)
                past_slope += tl.load(SlopeEnds + head * ends_head)
                future_slope += tl.load(SlopeEnds + head * ends_head + 1)
    total += tl.where(column == 0, past, 0.0) + tl.where(column == lags - 1, future, 0.0)
    tl.store(Dtable + owner * lags + column, total, mask=column < lags)
    if SLOPES:
        tl.store(Dslopes + owner, past_slope, mask=block == 0)
        tl.store(Dslopes + tl.num_programs(0) // count + owner, future_slope, mask=block == count - 1)


class DiagonalSums(NamedTuple):
    """Partial sums of the gradients of bias and of a gain of scalars, [batch, heads, chunks, diagonals, 2 size] each."""

    size: int
    chunks: int
    diagonals: int
    sums: dict[str, Tensor]


def diagonal_sums(plan: Plan, given: dict[str, Any]) -> DiagonalSums:
    """Computes the gradients of tables of scalars in the band, spread over the programs."""
    size, _, warps, stages = plan.tile("scalar")
    diagonals = blocks(plan.high - plan.low + size, size)
    chunks = min(blocks(DIAGONAL_PROGRAMS, diagonals * plan.heads * plan.batch), blocks(plan.queries, size))
    shape = (plan.batch, plan.heads, chunks, diagonals, 2 * size)
    wanted = [name for name in ("bias", "gain") if plan.flags[name.upper()]]
    sums = {name: torch.empty(shape, dtype=torch.float32, device=plan.q.device) for name in wanted}
    if wanted:
        arguments = plan.arguments(
            **given, dbias=sums.get("bias", plan.q), dgain=sums.get("gain", plan.q), chunks=chunks, ROWS=size
        )
        run(scalar_gradient_kernel, (diagonals, chunks, plan.batch * plan.heads), arguments, warps, stages)
    return DiagonalSums(size, chunks, diagonals, sums)


def scalar_gradients(plan: Plan, found: DiagonalSums, ends: Tensor, tables: Terms) -> None:
    """Writes the gradients of bias, slopes and a gain of scalars: in the band from diagonals, beyond it from the rows.

    `ends` is [batch, heads, bias or gain or slope, queries, past or future]; far fields have those of the bias only.
    """
    if not found.sums:
        return
    beyond = ends.sum((0, 3))
    for index, name in enumerate(("bias", "gain")):
        if name not in found.sums:
            continue
        table: LagTable = getattr(tables, name)
        lags = table.values.shape[1]
        sloped = table.slopes is not None
        slopes = torch.empty(2, table.heads, dtype=torch.float32, device=plan.q.device) if sloped else beyond
        given = {
            "Sums": found.sums[name], "Ends": beyond[:, index] if index < beyond.shape[1] else beyond, "Dtable": table.values,
            "SlopeEnds": beyond[:, -1], "Dslopes": slopes, "ends_head": beyond.stride(0), "batch": plan.batch,
            "heads": plan.heads, "chunks": found.chunks, "diagonals": found.diagonals, "low": plan.low, "high": plan.high,
            "first": table.first, "lags": lags, "SIZE": found.size, "PARTS": PARTS, "COLUMNS": COLUMNS,
            "SHARED": table.heads == 1, "ENDS": index < beyond.shape[1], "SLOPES": sloped,
        }  # fmt: skip
        run(fold_kernel, (blocks(lags, COLUMNS), table.heads), given, warps=4, stages=1)
        if table.slopes is not None:
            for slope, gradient in zip(table.slopes, slopes, strict=True):
                slope.copy_(gradient)
