"""The logits of a tile, their gradient, and which tiles a block of queries has: what all passes over pairs share."""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

import triton
import triton.language as tl

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

# Numbers of a call: a kernel is not compiled anew for each of them.
NUMBERS = [
    "heads", "group", "queries", "keys", "query_start", "first", "last", "near_first", "near_last", "table_first", "table_lags",
    "low", "high", "band_first", "band_lags", "value_first", "value_lags", "past_rows", "future_rows", "past_keys", "future_keys",
    "scale", "dropped",
]  # fmt: skip


@triton.jit
def tile_logits(
    content, lag, row, key, head, scale, Bias, Slopes, Gain, table_first, near_first, near_last, heads,
    BandScores, KeyScores, band_first, band_lags, QueryEnds, KeyEnds, queries, keys, first, last,
    KeyMask, SequenceStart, SequenceEnd,
    SIDE: tl.constexpr, BIAS: tl.constexpr, SLOPES: tl.constexpr, GAIN: tl.constexpr, SCORES: tl.constexpr,
    QUERY: tl.constexpr, KEY: tl.constexpr, MASKED: tl.constexpr, LIMITED: tl.constexpr, WHOLE: tl.constexpr,
    MASK: tl.constexpr, PACKED: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Returns the logits of a tile, minus infinity where nothing may be seen, and its gain.

    Without FAR a tile has no lags that may be seen beyond the columns of the tables.
    """
    end = near_first if SIDE == PAST else near_last
    x = content
    gain = 1.0
    if GAIN:
        gain = at_lags(Gain, lag, table_first) if SIDE == NEAR else tl.load(Gain + (end - table_first))
        x = x * gain
    if SCORES and SIDE == NEAR:
        scores = lag_scores(BandScores, row, queries, lag, band_first, band_lags)
        if FAR:
            past, future = load_ends(QueryEnds, row, queries, QUERY)
            scores = with_ends(scores, past, future, lag, band_first, band_lags)
        x += scores
    elif QUERY:
        past, future = load_ends(QueryEnds, row, queries, QUERY)
        x += past if SIDE == PAST else future
    if KEY:
        past, future = load_ends(KeyEnds, key, keys, FAR)
        if SIDE == NEAR:
            scores = lag_scores(KeyScores, key, keys, lag, band_first, band_lags)
            x += with_ends(scores, past, future, lag, band_first, band_lags) if FAR else scores
        else:
            x += past if SIDE == PAST else future
    x = x * scale
    if BIAS:
        x += at_lags(Bias, lag, table_first) if SIDE == NEAR else tl.load(Bias + (end - table_first))
    if SLOPES and SIDE != NEAR:
        slope = tl.load(Slopes + (0 if SIDE == PAST else heads) + head)
        x += slope * (lag - end).to(tl.float32)
    if MASKED:
        seen = visible(
            lag, row, key, queries, keys, first, last, KeyMask, SequenceStart, SequenceEnd, LIMITED, not WHOLE, MASK, PACKED
        )
        x = tl.where(seen, x, -float("inf"))
    return x, gain


@triton.jit
def tile_gradient(
    logits, lse, delta, dweights, lag, row, key, state, dropped, ValueScores, ValueEnds, value_first, value_lags, queries,
    SIDE: tl.constexpr, VALUE: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Returns the weights after dropout and the gradient of the logits, from dout . v.

    p = exp(logit - lse),      dlogit = p * (dout_i . (v_j + value(n)) - delta_i)
    """
    weights = tl.exp2((logits - lse) * LOG2E)
    if VALUE:
        past, future = load_ends(ValueEnds, row, queries, VALUE)
        if SIDE == NEAR:
            scores = lag_scores(ValueScores, row, queries, lag, value_first, value_lags)
            dweights += with_ends(scores, past, future, lag, value_first, value_lags)
        else:
            dweights += past if SIDE == PAST else future
    if DROPOUT:
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
def end_queries(q, Gain, head_dim: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr):
    """Returns q times the gain of the end columns, [2, head_dim], rounded once, and these gains; without CHANNELS q and ones."""
    if CHANNELS:
        channel = tl.arange(0, WIDTH)
        past = tl.load(Gain + channel, mask=channel < head_dim, other=0.0)[None, :]
        future = tl.load(Gain + head_dim + channel, mask=channel < head_dim, other=0.0)[None, :]
        return (q.to(tl.float32) * past).to(q.dtype), (q.to(tl.float32) * future).to(q.dtype), past, future
    else:
        return q, q, 1.0, 1.0


@triton.jit
def content_product(q_past, q_future, k, lag, band_first, band_lags, SIDE: tl.constexpr, CHANNELS: tl.constexpr):
    """Returns the content product of a tile that scores do not hold, from keys as columns."""
    if not CHANNELS or SIDE == PAST:
        return product(q_past, k)
    elif SIDE == FUTURE:
        return product(q_future, k)
    else:
        return before(product(q_past, k), lag, band_first) + after(product(q_future, k), lag, band_first + band_lags - 1)


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
def key_range(
    row_start, start, batch, queries, keys, first, last, near_first, near_last, Bounds, SequenceStart, SequenceEnd,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MASK: tl.constexpr, PACKED: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Returns the keys that a block of queries can see, begin and end, and where the near tiles among them begin and end."""
    position = row_start + start
    begin, end = tl.maximum(position + first, 0), tl.minimum(position + ROWS + last, keys)
    if MASK:
        begin, end = tl.maximum(begin, tl.load(Bounds + 2 * batch)), tl.minimum(end, tl.load(Bounds + 2 * batch + 1))
    if PACKED:
        begin = tl.maximum(begin, tl.load(SequenceStart + row_start))
        end = tl.minimum(end, tl.load(SequenceEnd + tl.minimum(row_start + ROWS, queries) - 1))
    begin = begin // KEYS * KEYS
    near, beyond = near_stretch(begin, end, near_first + position - KEYS, near_last + position + ROWS, FAR, KEYS)
    return begin, near, beyond, end
