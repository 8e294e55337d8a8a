"""The logits of a tile, their gradient, and which tiles a block of queries has: what all passes over pairs share.

A tile is [queries, keys], or TURNED [keys, queries]: `row` and `key` are the indices along its axes, `lag` is the tile of lags.
"""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lagwise.ops.kernels.arguments import HeadPointers
from lagwise.ops.kernels.tiles import (
    FAR_SIDES,
    FUTURE,
    INNER,
    LOG2E,
    PAST,
    add_ends,
    add_scores,
    after,
    at_lags,
    before,
    is_near,
    kept,
    load_end,
    product,
    slab_of,
    turned,
    visible,
)

# Numbers of a call: a kernel is not compiled anew for each of them.
NUMBERS = [
    "heads", "group", "queries", "keys", "query_start", "first", "last", "near_first", "near_last", "low", "high",
    "table_first", "table_lags", "band_first", "band_lags", "scale", "dropped", "first_batch", "first_head",
    "past_count", "future_count",
]  # fmt: skip


class RowEnds(NamedTuple):
    """What lags before the columns and after them see of the queries' scores, and of those of values; of some rows."""

    past: Any
    future: Any
    past_value: Any
    future_value: Any


@triton.jit
def query_start_of(seen, batch, query_start, flags: tl.constexpr):
    """Returns the position of the first query of a row of the batch."""
    return tl.load(seen.starts + batch).to(tl.int32) if flags.STARTS else query_start


@triton.jit
def head_pointers(tables, scores, seen, pair, sizes, bands, flags: tl.constexpr):
    """Returns where a head has its tables, scores and mask."""
    batch, head, base = pair // sizes.heads, pair % sizes.heads, pair.to(tl.int64)
    row = head.to(tl.int64) * (bands.table_lags + 2)
    return HeadPointers(
        bias=tables.bias + row,
        gain=tables.gain + row,
        ends=tables.ends + head * 2 * flags.head_dim,
        value=tables.value + head.to(tl.int64) * bands.lags * flags.value_dim,
        query=scores.query + base * slab_of(sizes.queries, sizes.keys, bands.lags),
        key=scores.key + base * slab_of(sizes.keys, sizes.queries, bands.lags),
        value_scores=scores.value + base * slab_of(sizes.queries, sizes.keys, bands.lags),
        query_ends=scores.query_ends + base * 2 * sizes.queries,
        key_ends=scores.key_ends + base * 2 * sizes.keys,
        value_ends=scores.value_ends + base * 2 * sizes.queries,
        key_mask=seen.key_mask + batch.to(tl.int64) * sizes.keys,
    )


@triton.jit
def load_row_ends(own, row, sizes, VALUE: tl.constexpr, flags: tl.constexpr):
    """Loads the ends of rows; zero where there are none."""
    past, future, past_value, future_value = 0.0, 0.0, 0.0, 0.0
    if flags.QUERY and flags.FAR:
        past = load_end(own.query_ends, row, sizes.queries, 0, flags.WHOLE)
        future = load_end(own.query_ends, row, sizes.queries, 1, flags.WHOLE)
    if VALUE and flags.FAR:
        past_value = load_end(own.value_ends, row, sizes.queries, 0, flags.WHOLE)
        future_value = load_end(own.value_ends, row, sizes.queries, 1, flags.WHOLE)
    return RowEnds(past, future, past_value, future_value)


@triton.constexpr_function
def is_within(SIDE, flags):
    """Says whether all pairs of a stretch's tiles have a column of the scores."""
    return flags.FAR and flags.WHOLE and SIDE == INNER


@triton.jit
def add_tile_scores(
    x, row, key, lag, start, own, ends, sizes, bands, SIDE: tl.constexpr, TURNED: tl.constexpr, flags: tl.constexpr
):  # fmt: skip
    """Adds to a tile its scores: those of its queries and those of its keys."""
    WITHIN: tl.constexpr = is_within(SIDE, flags)
    if is_near(SIDE) and flags.SCORES:
        x = add_scores(x, own.query, row, sizes.queries, key, sizes.keys, bands.first + start, bands.lags, TURNED, WITHIN)
    if is_near(SIDE) and flags.KEY:
        offset = 1 - bands.first - bands.lags - start
        x = add_scores(x, own.key, key, sizes.keys, row, sizes.queries, offset, bands.lags, not TURNED, WITHIN)
    if flags.FAR and SIDE != INNER:
        past, future = 0.0, 0.0
        if flags.QUERY:
            past, future = turned(ends.past, TURNED), turned(ends.future, TURNED)
        if flags.KEY:
            past += turned(load_end(own.key_ends, key, sizes.keys, 0, flags.WHOLE), not TURNED)
            future += turned(load_end(own.key_ends, key, sizes.keys, 1, flags.WHOLE), not TURNED)
        if flags.QUERY or flags.KEY:
            x = add_ends(x, past, future, lag, bands, SIDE, flags)
    return x


@triton.jit
def end_number(Table, bands, is_past, SIDE: tl.constexpr):
    """Loads the number of a table of scalars that far tiles see."""
    past, future = Table + (bands.near_first - bands.table_first), Table + (bands.near_last - bands.table_first)
    if SIDE == PAST:
        return tl.load(past)
    elif SIDE == FUTURE:
        return tl.load(future)
    else:
        return tl.where(is_past, tl.load(past), tl.load(future))


@triton.jit
def tile_logits(
    content, lag, row, key, start, own, ends, seen, sizes, bands, scale, is_past,
    SIDE: tl.constexpr, TURNED: tl.constexpr, flags: tl.constexpr,
):  # fmt: skip
    """Returns the logits of a tile, minus infinity where nothing may be seen, and its gain.

    Without FAR a tile has no lags that may be seen beyond the columns of the tables. Of FAR_SIDES `is_past` says which one it is.
    """
    end = bands.near_first if SIDE == PAST else bands.near_last
    x = content
    gain = 1.0
    if flags.GAIN:
        gain = at_lags(own.gain, lag, bands.table_first) if is_near(SIDE) else end_number(own.gain, bands, is_past, SIDE)
        x = x * gain
    if flags.SCORES or flags.KEY:
        x = add_tile_scores(x, row, key, lag, start, own, ends, sizes, bands, SIDE, TURNED, flags)
    x = x * scale
    if flags.BIAS:
        x += at_lags(own.bias, lag, bands.table_first) if is_near(SIDE) else end_number(own.bias, bands, is_past, SIDE)
    if flags.SLOPES and not is_near(SIDE):
        slope = tl.load(own.bias + bands.table_lags + (0 if SIDE == PAST else 1))
        x += slope * (lag - end).to(tl.float32)
    MASKED: tl.constexpr = flags.NEAR_MASKED if is_near(SIDE) else flags.FAR_MASKED
    if MASKED:
        shown = visible(lag, row, key, own.key_mask, seen, sizes, not flags.WHOLE, TURNED, flags)
        x = tl.where(shown, x, -float("inf"))
    return x, gain


@triton.jit
def tile_gradient(
    logits, lse, delta, dweights, lag, row, key, start, own, ends, sizes, bands, state, dropped,
    SIDE: tl.constexpr, TURNED: tl.constexpr, flags: tl.constexpr,
):  # fmt: skip
    """Returns the weights after dropout and the gradient of the logits, from dout . v.

    p = exp(logit - lse),      dlogit = p * (dout_i . (v_j + value(n)) - delta_i)
    """
    weights = tl.exp2((logits - turned(lse, TURNED)) * LOG2E)
    if flags.VALUE:
        if is_near(SIDE):
            dweights = add_scores(
                dweights, own.value_scores, row, sizes.queries, key, sizes.keys, bands.first + start, bands.lags,
                TURNED, is_within(SIDE, flags),
            )  # fmt: skip
        if flags.FAR and SIDE != INNER:
            past, future = turned(ends.past_value, TURNED), turned(ends.future_value, TURNED)
            dweights = add_ends(dweights, past, future, lag, bands, SIDE, flags)
    delta = turned(delta, TURNED)
    if flags.DROPOUT:
        keep = kept(state, turned(row, TURNED), turned(key, not TURNED), dropped)
        larger = 1.0 / (1.0 - dropped.to(tl.float32) / 16777216.0)
        dlogits = weights * (tl.where(keep, dweights * larger, 0.0) - delta)
        weights = tl.where(keep, weights * larger, 0.0)
    else:
        dlogits = weights * (dweights - delta)
    return weights, dlogits


@triton.jit
def load_statistics(Lse, Delta, row, queries, flags: tl.constexpr):
    """Loads log-sum-exp and delta; rows that see nothing, or are none, get weights exp(logit - inf) = 0."""
    if flags.WHOLE:
        lse, delta = tl.load(Lse + row), tl.load(Delta + row)
    else:
        lse = tl.load(Lse + row, mask=row < queries, other=float("inf"))
        delta = tl.load(Delta + row, mask=row < queries, other=0.0)
    if flags.BIAS or flags.NEAR_MASKED or flags.FAR_MASKED:
        lse = tl.where(lse == -float("inf"), float("inf"), lse)
    return lse, delta


@triton.jit
def end_queries(q, Ends, flags: tl.constexpr):
    """Returns q times the gain of the end columns, [2, head_dim], rounded once, and these gains; without CHANNELS q and ones."""
    if flags.CHANNELS:
        channel = tl.arange(0, flags.WIDTH)
        past = tl.load(Ends + channel, mask=channel < flags.head_dim, other=0.0)[None, :]
        future = tl.load(Ends + flags.head_dim + channel, mask=channel < flags.head_dim, other=0.0)[None, :]
        return (q.to(tl.float32) * past).to(q.dtype), (q.to(tl.float32) * future).to(q.dtype), past, future
    else:
        return q, q, 1.0, 1.0


@triton.jit
def content_product(q_past, q_future, k, lag, bands, SIDE: tl.constexpr, TURNED: tl.constexpr, flags: tl.constexpr):
    """Returns the content product of a tile that scores do not hold."""
    if not flags.CHANNELS or SIDE == PAST:
        return product(k, tl.trans(q_past)) if TURNED else product(q_past, tl.trans(k))
    elif SIDE == FUTURE:
        return product(k, tl.trans(q_future)) if TURNED else product(q_future, tl.trans(k))
    elif SIDE == INNER:
        return tl.zeros(lag.shape, tl.float32)
    else:
        past = product(k, tl.trans(q_past)) if TURNED else product(q_past, tl.trans(k))
        future = product(k, tl.trans(q_future)) if TURNED else product(q_future, tl.trans(k))
        return before(past, lag, bands, SIDE) + after(future, lag, bands, SIDE)


@triton.jit
def stretches(begin, end, origin, near_from, near_until, inner_from, inner_until, flags: tl.constexpr, STEP: tl.constexpr):
    """Returns where stretches of tiles that start at `begin` begin, in the order of their numbers, and the end.

    Tiles that start after `near_from` and before `near_until`, counted from `origin`, are near, and those from `inner_from` to
    `inner_until` among them lie within the band. Without FAR, and without scores, all near tiles are taken for such.
    """
    if flags.FAR:
        near = begin + tl.maximum(origin + near_from - begin + STEP, 0) // STEP * STEP
        beyond = begin + (tl.maximum(origin + near_until - begin, 0) + STEP - 1) // STEP * STEP
        near, beyond = tl.minimum(near, end), tl.minimum(tl.maximum(beyond, near), end)
        inner, outer = near, beyond
        if flags.SCORES or flags.KEY or flags.VALUE:
            inner = near + (tl.maximum(origin + inner_from - near, 0) + STEP - 1) // STEP * STEP
            outer = near + tl.maximum(origin + inner_until - near + STEP, 0) // STEP * STEP
            inner = tl.minimum(inner, beyond)
            outer = tl.minimum(tl.maximum(outer, inner), beyond)
        return begin, near, inner, outer, beyond, end
    else:
        return begin, begin, begin, end, end, end


class Stretch(NamedTuple):
    """Tiles from `first` to `end`, without `skipped` numbers of rows or keys from `middle` on."""

    first: Any
    middle: Any
    skipped: Any
    end: Any


@triton.jit
def stretch_of(limits, PLACE: tl.constexpr):
    """Returns the tiles of a stretch by its place among `limits`; those on both sides of the near ones are one."""
    if PLACE == FAR_SIDES:
        near, beyond, end = limits[1], limits[4], limits[5]
        return Stretch(limits[0], near, beyond - near, end - (beyond - near))
    else:
        return Stretch(limits[PLACE], limits[PLACE + 1], 0, limits[PLACE + 1])


@triton.jit
def tile_at(place, stretch, PLACE: tl.constexpr):
    """Returns where a tile of a stretch begins."""
    if PLACE == FAR_SIDES:
        return place + tl.where(place < stretch.middle, 0, stretch.skipped)
    else:
        return place


@triton.jit
def key_stretches(row_start, start, batch, seen, sizes, bands, flags: tl.constexpr):
    """Returns the stretches of keys that a block of queries can see."""
    position = row_start + start
    begin, end = tl.maximum(position + sizes.first, 0), tl.minimum(position + flags.ROWS + sizes.last, sizes.keys)
    if flags.MASK:
        begin = tl.maximum(begin, tl.load(seen.spans + 2 * batch))
        end = tl.minimum(end, tl.load(seen.spans + 2 * batch + 1))
    if flags.PACKED:
        begin = tl.maximum(begin, tl.load(seen.spans + row_start))
        end = tl.minimum(end, tl.load(seen.spans + sizes.keys + tl.minimum(row_start + flags.ROWS, sizes.queries) - 1))
    return stretches(
        begin // flags.KEYS * flags.KEYS, end, position, bands.near_first - flags.KEYS, bands.near_last + flags.ROWS,
        bands.first + flags.ROWS - 1, bands.first + bands.lags - flags.KEYS, flags, flags.KEYS,
    )  # fmt: skip


@triton.jit
def query_stretches(key_start, start, seen, sizes, bands, flags: tl.constexpr):
    """Returns the stretches of queries that can see a block of keys: those of the future first."""
    begin = tl.maximum(key_start - start - sizes.last, 0)
    end = tl.minimum(key_start + flags.KEYS - start - sizes.first, sizes.queries)
    if flags.PACKED:
        begin = tl.maximum(begin, tl.load(seen.spans + key_start))
        end = tl.minimum(end, tl.load(seen.spans + sizes.keys + tl.minimum(key_start + flags.KEYS, sizes.keys) - 1))
    return stretches(
        begin // flags.ROWS * flags.ROWS, end, key_start - start, -bands.near_last - flags.ROWS, flags.KEYS - bands.near_first,
        flags.KEYS - bands.first - bands.lags, 1 - bands.first - flags.ROWS, flags, flags.ROWS,
    )  # fmt: skip
