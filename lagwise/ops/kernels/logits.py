"""The logits of a tile, their gradient, and which tiles a block of queries has: what all passes over pairs share."""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

import triton
import triton.language as tl

from lagwise.ops.kernels.arguments import HeadPointers
from lagwise.ops.kernels.tiles import (
    FUTURE,
    LOG2E,
    NEAR,
    PAST,
    after,
    at_lags,
    before,
    kept,
    lag_scores,
    load_ends,
    load_numbers,
    product,
    visible,
    with_ends,
)

# Entries that a padded table has beyond the near lags: tiles that touch them and have at most so many queries and keys together
# stay inside.
PADDING = tl.constexpr(256)

# Numbers of a call: a kernel is not compiled anew for each of them.
NUMBERS = [
    "heads", "group", "queries", "keys", "query_start", "first", "last", "near_first", "near_last", "low", "high",
    "band_first", "band_lags", "value_first", "value_lags", "past_count", "future_count", "scale", "dropped",
]  # fmt: skip


@triton.jit
def query_start_of(seen, batch, query_start, flags: tl.constexpr):
    """Returns the position of the first query of a row of the batch."""
    return tl.load(seen.starts + batch).to(tl.int32) if flags.STARTS else query_start


@triton.jit
def head_pointers(tables, scores, seen, pair, sizes, bands, flags: tl.constexpr):
    """Returns where a head has its tables, scores and mask."""
    batch, head, base = pair // sizes.heads, pair % sizes.heads, pair.to(tl.int64)
    lags = bands.near_last - bands.near_first + 1 + 2 * PADDING
    return HeadPointers(
        bias=tables.bias + head * lags,
        slopes=tables.slopes + head,
        gain=tables.gain + head * (2 * flags.head_dim if flags.CHANNELS else lags),
        value=tables.value + head * bands.value_lags * flags.value_dim,
        band=scores.band + base * sizes.queries * bands.lags,
        key=scores.key + base * sizes.keys * bands.lags,
        query_ends=scores.query_ends + base * 2 * sizes.queries,
        key_ends=scores.key_ends + base * 2 * sizes.keys,
        value_scores=scores.value + base * sizes.queries * bands.value_lags,
        value_ends=scores.value_ends + base * 2 * sizes.queries,
        key_mask=seen.key_mask + batch.to(tl.int64) * sizes.keys,
    )


@triton.jit
def tile_logits(
    content, lag, row, key, own, seen, sizes, bands, scale,
    SIDE: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr, SLOPES: tl.constexpr, flags: tl.constexpr,
):  # fmt: skip
    """Returns the logits of a tile, minus infinity where nothing may be seen, and its gain.

    Without FAR a tile has no lags that may be seen beyond the columns of the tables.
    """
    end = bands.near_first if SIDE == PAST else bands.near_last
    padded_first = bands.near_first - PADDING
    x = content
    gain = 1.0
    if flags.GAIN:
        gain = at_lags(own.gain, lag, padded_first) if SIDE == NEAR else tl.load(own.gain + (end - padded_first))
        x = x * gain
    if flags.SCORES and SIDE == NEAR:
        scores = lag_scores(own.band, row, sizes.queries, lag, bands.first, bands.lags)
        if flags.FAR:
            past, future = load_ends(own.query_ends, row, sizes.queries, flags.QUERY)
            scores = with_ends(scores, past, future, lag, bands.first, bands.lags)
        x += scores
    elif flags.QUERY:
        past, future = load_ends(own.query_ends, row, sizes.queries, flags.QUERY)
        x += past if SIDE == PAST else future
    if flags.KEY:
        past, future = load_ends(own.key_ends, key, sizes.keys, flags.FAR)
        if SIDE == NEAR:
            scores = lag_scores(own.key, key, sizes.keys, lag, bands.first, bands.lags)
            x += with_ends(scores, past, future, lag, bands.first, bands.lags) if flags.FAR else scores
        else:
            x += past if SIDE == PAST else future
    x = x * scale
    if flags.BIAS:
        x += at_lags(own.bias, lag, padded_first) if SIDE == NEAR else tl.load(own.bias + (end - padded_first))
    if SLOPES and SIDE != NEAR:
        slope = tl.load(own.slopes + (0 if SIDE == PAST else sizes.heads))
        x += slope * (lag - end).to(tl.float32)
    if MASKED:
        x = tl.where(visible(lag, row, key, own.key_mask, seen, sizes, RAGGED, flags), x, -float("inf"))
    return x, gain


@triton.jit
def tile_gradient(
    logits, lse, delta, dweights, lag, row, key, own, sizes, bands, state, dropped, SIDE: tl.constexpr, flags: tl.constexpr
):  # fmt: skip
    """Returns the weights after dropout and the gradient of the logits, from dout . v.

    p = exp(logit - lse),      dlogit = p * (dout_i . (v_j + value(n)) - delta_i)
    """
    weights = tl.exp2((logits - lse) * LOG2E)
    if flags.VALUE:
        past, future = load_ends(own.value_ends, row, sizes.queries, flags.VALUE)
        if SIDE == NEAR:
            scores = lag_scores(own.value_scores, row, sizes.queries, lag, bands.value_first, bands.value_lags)
            dweights += with_ends(scores, past, future, lag, bands.value_first, bands.value_lags)
        else:
            dweights += past if SIDE == PAST else future
    if flags.DROPOUT:
        keep = kept(state, row, key, dropped)
        larger = 1.0 / (1.0 - dropped.to(tl.float32) / 16777216.0)
        dlogits = weights * (tl.where(keep, dweights * larger, 0.0) - delta)
        weights = tl.where(keep, weights * larger, 0.0)
    else:
        dlogits = weights * (dweights - delta)
    return weights, dlogits


@triton.jit
def load_statistics(Lse, Delta, row, queries, SIDE: tl.constexpr):
    """Loads log-sum-exp and delta; rows that see nothing, or are none, get weights exp(logit - inf) = 0."""
    if SIDE == NEAR:
        lse, delta = load_numbers(Lse, row, queries), load_numbers(Delta, row, queries)
        lse = tl.where(row < queries, lse, float("inf"))
    else:
        lse = tl.load(Lse + row, mask=row < queries, other=float("inf"))
        delta = tl.load(Delta + row, mask=row < queries, other=0.0)
    return tl.where(lse == -float("inf"), float("inf"), lse)[:, None], delta[:, None]


@triton.jit
def end_queries(q, Gain, flags: tl.constexpr):
    """Returns q times the gain of the end columns, [2, head_dim], rounded once, and these gains; without CHANNELS q and ones."""
    if flags.CHANNELS:
        channel = tl.arange(0, flags.WIDTH)
        past = tl.load(Gain + channel, mask=channel < flags.head_dim, other=0.0)[None, :]
        future = tl.load(Gain + flags.head_dim + channel, mask=channel < flags.head_dim, other=0.0)[None, :]
        return (q.to(tl.float32) * past).to(q.dtype), (q.to(tl.float32) * future).to(q.dtype), past, future
    else:
        return q, q, 1.0, 1.0


@triton.jit
def content_product(q_past, q_future, k, lag, bands, SIDE: tl.constexpr, flags: tl.constexpr):
    """Returns the content product of a tile that scores do not hold, from keys as columns."""
    if not flags.CHANNELS or SIDE == PAST:
        return product(q_past, k)
    elif SIDE == FUTURE:
        return product(q_future, k)
    else:
        beyond = after(product(q_future, k), lag, bands.first + bands.lags - 1)
        return before(product(q_past, k), lag, bands.first) + beyond


@triton.jit
def near_stretch(begin, end, past_until, future_from, FAR: tl.constexpr, STEP: tl.constexpr):
    """Returns where the near tiles begin and end among tiles that start at `begin`.

    Those that start at `past_until` or before lie in the far past, those from `future_from` on in the far future. Without FAR all
    tiles are near.
    """
    if FAR:
        near = begin + tl.maximum(past_until - begin + STEP, 0) // STEP * STEP
        beyond = begin + (tl.maximum(future_from - begin, 0) + STEP - 1) // STEP * STEP
        return tl.minimum(near, end), tl.minimum(tl.maximum(beyond, near), end)
    else:
        return begin, end


@triton.jit
def key_range(row_start, start, batch, seen, sizes, bands, flags: tl.constexpr):
    """Returns the keys that a block of queries can see, begin and end, and where the near tiles among them begin and end."""
    position = row_start + start
    begin, end = tl.maximum(position + sizes.first, 0), tl.minimum(position + flags.ROWS + sizes.last, sizes.keys)
    if flags.MASK:
        begin = tl.maximum(begin, tl.load(seen.bounds + 2 * batch))
        end = tl.minimum(end, tl.load(seen.bounds + 2 * batch + 1))
    if flags.PACKED:
        begin = tl.maximum(begin, tl.load(seen.sequence_start + row_start))
        end = tl.minimum(end, tl.load(seen.sequence_end + tl.minimum(row_start + flags.ROWS, sizes.queries) - 1))
    begin = begin // flags.KEYS * flags.KEYS
    near, beyond = near_stretch(
        begin, end, bands.near_first + position - flags.KEYS, bands.near_last + position + flags.ROWS, flags.FAR, flags.KEYS
    )
    return begin, near, beyond, end
