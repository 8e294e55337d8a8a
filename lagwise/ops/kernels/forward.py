"""Attention with lag tables in one pass: output, gradient of the queries, gradient of the keys and values.

    logit(i, j) = scale * (gain(n) q_i . k_j + score(i, n)) + bias(n)        n = j - i
    out(i)      = sum_j softmax_j(logit(i, j)) * (v_j + value(n))

Each program owns a block of queries (or keys) and walks over tiles of the others in three stretches: the far past and the far
future, where every table is its end column, and the near tiles between them, which look up each pair's own lag.

    block of queries     past  past | near near near | future future
                         -----------+----------------+---------------> keys

`score(i, n) = q_i . query(n) + k_(i+n) . key(n)` is there for the lags of the band, as [queries, lags] and [keys, lags]; before
and after it, it is the sum of a number per query and a number per key, the `ends`. The gradients of scores and ends are written
by the program that owns them, so that nothing needs atomics. With CHANNELS, a gain per channel, scores hold the content product
too, and beyond the band it is q * gain of the end column.
"""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

import triton
import triton.language as tl

from lagwise.ops.kernels.tiles import (
    FUTURE,
    LN2,
    LOG2E,
    LOWEST,
    NEAR,
    PAST,
    after,
    at_lags,
    before,
    clear_scores,
    dropout_state,
    head_rows,
    kept,
    lag_scores,
    load_columns,
    load_ends,
    load_gain,
    load_keys,
    load_numbers,
    load_rows,
    product,
    put_lag_scores,
    store_ends,
    store_rows,
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
def load_far(
    X, batch_stride, head_stride, time_stride, batch, head, index, count, dim: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Loads rows of a gradient that others computed for a far field, [batch, heads, count, dim], zero where it has none."""
    here = X + batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride
    return load_rows(here, index, count, time_stride, dim, WIDTH, False).to(tl.float32)


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


@triton.jit(do_not_specialize=NUMBERS)
def forward_kernel(
    Q, K, V, Out, Lse, Bias, Slopes, Gain, BandScores, KeyScores, QueryEnds, KeyEnds, BandLogits, Value,
    KeyMask, Bounds, SequenceStart, SequenceEnd, Starts, Seed,
    q_batch, q_head, q_time, k_batch, k_head, k_time, v_batch, v_head, v_time,
    heads, group, queries, keys, query_start, first, last, near_first, near_last, table_first, table_lags,
    band_first, band_lags, value_first, value_lags, scale, dropped,
    head_dim: tl.constexpr, value_dim: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
    BIAS: tl.constexpr, SLOPES: tl.constexpr, GAIN: tl.constexpr, CHANNELS: tl.constexpr, SCORES: tl.constexpr,
    QUERY: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, MASK: tl.constexpr, HIDE: tl.constexpr,
    PACKED: tl.constexpr, STARTS: tl.constexpr, DROPOUT: tl.constexpr, FAR: tl.constexpr, NEAR_MASKED: tl.constexpr,
    FAR_MASKED: tl.constexpr, LIMITED: tl.constexpr, WHOLE: tl.constexpr, OUT_BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Computes output and log-sum-exp of a block of queries.

    The value table's share, sum_n exp(logit(i, n) - lse(i)) value(n), is a matrix product in the coordinates of lags: the band's
    logits are written to memory in these, and read again when all tiles are done.
    """
    index, count = tl.program_id(0), tl.cdiv(queries, ROWS)
    block, pair = index % count, index // count
    batch, head = pair // heads, pair % heads
    base = pair.to(tl.int64)
    row_start = block * ROWS
    row = row_start + tl.arange(0, ROWS)
    start = tl.load(Starts + batch).to(tl.int32) if STARTS else query_start
    Q += batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
    K += batch.to(tl.int64) * k_batch + (head // group).to(tl.int64) * k_head
    V += batch.to(tl.int64) * v_batch + (head // group).to(tl.int64) * v_head
    Bias += head * table_lags
    Gain += head * (2 * head_dim if CHANNELS else table_lags)
    BandScores += base * queries * band_lags
    KeyScores += base * keys * band_lags
    BandLogits += base * queries * value_lags
    KeyMask += batch.to(tl.int64) * keys
    begin, near, beyond, end = key_range(
        row_start, start, batch, queries, keys, first, last, near_first, near_last, Bounds, SequenceStart, SequenceEnd,
        ROWS, KEYS, MASK, PACKED, FAR,
    )  # fmt: skip
    state = dropout_state(Seed, batch, head) if DROPOUT else 0
    larger = 1.0 / (1.0 - dropped.to(tl.float32) / 16777216.0)

    q = load_rows(Q, row, queries, q_time, head_dim, WIDTH, WHOLE)
    q_past, q_future, _past, _future = end_queries(q, Gain, head_dim, WIDTH, CHANNELS)
    peak = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    past_mass, future_mass = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    for SIDE in tl.static_range(3):
        if FAR or SIDE == NEAR:
            lower = begin if SIDE == PAST else (near if SIDE == NEAR else beyond)
            upper = near if SIDE == PAST else (beyond if SIDE == NEAR else end)
            for key_start in range(lower, upper, KEYS):
                key = key_start + tl.arange(0, KEYS)
                lag = key[None, :] - row[:, None] - start
                k = load_columns(K, key, keys, k_time, head_dim, WIDTH, WHOLE)
                content = content_product(q_past, q_future, k, lag, band_first, band_lags, SIDE, CHANNELS)
                logits, _gain = tile_logits(
                    content, lag, row[:, None], key[None, :], head, scale, Bias, Slopes, Gain, table_first, near_first, near_last,
                    heads, BandScores, KeyScores, band_first, band_lags, QueryEnds + base * 2 * queries,
                    KeyEnds + base * 2 * keys, queries, keys, first, last, KeyMask, SequenceStart, SequenceEnd,
                    SIDE, BIAS, SLOPES, GAIN, SCORES, QUERY, KEY, NEAR_MASKED if SIDE == NEAR else FAR_MASKED, LIMITED, WHOLE,
                    MASK, PACKED, FAR,
                )  # fmt: skip
                higher = tl.maximum(peak, tl.max(logits, 1))
                shrink = tl.exp2((peak - higher) * LOG2E)
                weights = tl.exp2((logits - higher[:, None]) * LOG2E)
                total = total * shrink + tl.sum(weights, 1)
                if DROPOUT:
                    keep = kept(state, row[:, None], key[None, :], dropped)
                    weights = tl.where(keep, weights * larger, 0.0)
                    logits = tl.where(keep, logits + tl.log2(larger) * LN2, -float("inf"))
                if VALUE:
                    past_mass, future_mass = past_mass * shrink, future_mass * shrink
                    if SIDE == PAST:
                        past_mass += tl.sum(weights, 1)
                    elif SIDE == FUTURE:
                        future_mass += tl.sum(weights, 1)
                    else:
                        past_mass += tl.sum(before(weights, lag, value_first), 1)
                        future_mass += tl.sum(after(weights, lag, value_first + value_lags - 1), 1)
                        put_lag_scores(BandLogits, row[:, None], queries, lag, value_first, value_lags, logits)
                v = load_keys(V, KeyMask, key, keys, v_time, value_dim, VALUE_WIDTH, WHOLE, HIDE)
                out = out * shrink[:, None] + product(weights.to(v.dtype), v)
                peak = higher
    some = tl.where(total > 0.0, total, 1.0)
    lse = peak + tl.log2(some) * LN2
    if VALUE:
        channel = tl.arange(0, VALUE_WIDTH)
        Value += head * value_lags * value_dim
        value = tl.load(Value + channel, mask=channel < value_dim, other=0.0).to(tl.float32)
        out += past_mass[:, None] * value[None, :]
        value = tl.load(Value + (value_lags - 1) * value_dim + channel, mask=channel < value_dim, other=0.0).to(tl.float32)
        out += future_mass[:, None] * value[None, :]
    out = out / some[:, None]
    if VALUE:
        clear_scores(BandLogits, row, queries, 1, start + value_first, near, beyond, value_lags, value_lags, -float("inf"), KEYS)
        # All threads have written before any of them reads what others wrote.
        tl.debug_barrier()
        for lag_start in range(0, value_lags, KEYS):
            column = lag_start + tl.arange(0, KEYS)
            there = (row < queries)[:, None] & (column < value_lags)[None, :]
            logits = tl.load(
                BandLogits + row.to(tl.int64)[:, None] * value_lags + column[None, :], mask=there, other=-float("inf")
            )
            values = load_rows(Value, column, value_lags, value_dim, value_dim, VALUE_WIDTH, False)
            out += product(tl.exp2((logits - lse[:, None]) * LOG2E).to(values.dtype), values)
    home, apart = head_rows(Out, pair, heads, queries, value_dim, OUT_BY_TOKEN)
    store_rows(home, row, queries, apart, out, value_dim, VALUE_WIDTH)
    tl.store(Lse + base * queries + row, tl.where(total > 0.0, lse, -float("inf")), mask=row < queries)


@triton.jit(do_not_specialize=NUMBERS)
def query_gradient_kernel(
    Q, K, V, Dout, Lse, Delta, Dq, Bias, Slopes, Gain, BandScores, KeyScores, QueryEnds, KeyEnds, ValueScores, ValueEnds,
    DKeyScores, DQueryEnds, ValueMasses, DScalarEnds, DGainEnds, DqPast, DqFuture, EndGains,
    KeyMask, Bounds, SequenceStart, SequenceEnd, Starts, Seed,
    q_batch, q_head, q_time, k_batch, k_head, k_time, v_batch, v_head, v_time, dout_batch, dout_head, dout_time,
    dq_past_batch, dq_past_head, dq_past_time, dq_future_batch, dq_future_head, dq_future_time, end_gains_head, end_gains_last,
    heads, group, queries, keys, query_start, first, last, near_first, near_last, table_first, table_lags, low, high,
    band_first, band_lags, value_first, value_lags, past_rows, future_rows, scale, dropped,
    head_dim: tl.constexpr, value_dim: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
    BIAS: tl.constexpr, SLOPES: tl.constexpr, GAIN: tl.constexpr, CHANNELS: tl.constexpr, SCORES: tl.constexpr,
    QUERY: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, MASK: tl.constexpr, HIDE: tl.constexpr,
    PACKED: tl.constexpr, STARTS: tl.constexpr, DROPOUT: tl.constexpr, FAR: tl.constexpr, NEAR_MASKED: tl.constexpr,
    FAR_MASKED: tl.constexpr, LIMITED: tl.constexpr, WHOLE: tl.constexpr, SIDES: tl.constexpr, DQ_BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Computes for a block of queries dq, the gradients of its scores and ends, and its shares of the scalar tables' ends.

    dq = scale sum_j gain(n) dlogit(i, j) k_j

    Gradients are written over the scores, those of queries and those of keys, and weights over the value scores, which nobody
    needs any more.

    Where SIDES far fields were computed by others, their dq, of the gain of its end column times q, comes in too: the past's for
    the last `past_rows` queries, the future's for the first `future_rows`, in reverse order of time.

    `DScalarEnds`, [batch, heads, 3, queries, 2], gets the sums of dlogit, of dlogit times content and of dlogit times the
    distance beyond the end, before `low` and after `high`.
    """
    index, count = tl.program_id(0), tl.cdiv(queries, ROWS)
    block, pair = index % count, index // count
    batch, head = pair // heads, pair % heads
    base = pair.to(tl.int64)
    row_start = block * ROWS
    row = row_start + tl.arange(0, ROWS)
    start = tl.load(Starts + batch).to(tl.int32) if STARTS else query_start
    Q += batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
    K += batch.to(tl.int64) * k_batch + (head // group).to(tl.int64) * k_head
    V += batch.to(tl.int64) * v_batch + (head // group).to(tl.int64) * v_head
    Dout += batch.to(tl.int64) * dout_batch + head.to(tl.int64) * dout_head
    Bias += head * table_lags
    Gain += head * (2 * head_dim if CHANNELS else table_lags)
    BandScores += base * queries * band_lags
    KeyScores += base * keys * band_lags
    DKeyScores += base * keys * band_lags
    ValueScores += base * queries * value_lags
    KeyMask += batch.to(tl.int64) * keys
    begin, near, beyond, end = key_range(
        row_start, start, batch, queries, keys, first, last, near_first, near_last, Bounds, SequenceStart, SequenceEnd,
        ROWS, KEYS, MASK, PACKED, FAR,
    )  # fmt: skip
    state = dropout_state(Seed, batch, head) if DROPOUT else 0

    q = load_rows(Q, row, queries, q_time, head_dim, WIDTH, WHOLE)
    dout = load_rows(Dout, row, queries, dout_time, value_dim, VALUE_WIDTH, WHOLE)
    lse, delta = load_statistics(Lse + base * queries, Delta + base * queries, row, queries, PAST)
    q_past, q_future, past_gain, future_gain = end_queries(q, Gain, head_dim, WIDTH, CHANNELS)
    if CHANNELS:
        dq_future = tl.zeros([ROWS, WIDTH], tl.float32)
    dq = tl.zeros([ROWS, WIDTH], tl.float32)
    past_bias, future_bias = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    past_gains, future_gains = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    past_slope, future_slope = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    past_query, future_query = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    past_mass, future_mass = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for SIDE in tl.static_range(3):
        if FAR or SIDE == NEAR:
            lower = begin if SIDE == PAST else (near if SIDE == NEAR else beyond)
            upper = near if SIDE == PAST else (beyond if SIDE == NEAR else end)
            for key_start in range(lower, upper, KEYS):
                key = key_start + tl.arange(0, KEYS)
                lag = key[None, :] - row[:, None] - start
                k = load_keys(K, KeyMask, key, keys, k_time, head_dim, WIDTH, WHOLE, HIDE)
                v = load_keys(V, KeyMask, key, keys, v_time, value_dim, VALUE_WIDTH, WHOLE, HIDE)
                content = content_product(q_past, q_future, tl.trans(k), lag, band_first, band_lags, SIDE, CHANNELS)
                logits, gain = tile_logits(
                    content, lag, row[:, None], key[None, :], head, scale, Bias, Slopes, Gain, table_first, near_first, near_last,
                    heads, BandScores, KeyScores, band_first, band_lags, QueryEnds + base * 2 * queries,
                    KeyEnds + base * 2 * keys, queries, keys, first, last, KeyMask, SequenceStart, SequenceEnd,
                    SIDE, BIAS, SLOPES, GAIN, SCORES, QUERY, KEY, NEAR_MASKED if SIDE == NEAR else FAR_MASKED, LIMITED, WHOLE,
                    MASK, PACKED, FAR,
                )  # fmt: skip
                weights, dlogits = tile_gradient(
                    logits, lse, delta, product(dout, tl.trans(v)), lag, row[:, None], key[None, :], state, dropped,
                    ValueScores, ValueEnds + base * 2 * queries, value_first, value_lags, queries, SIDE, VALUE, DROPOUT,
                )  # fmt: skip
                if VALUE:
                    if SIDE == PAST:
                        past_mass += tl.sum(weights, 1)
                    elif SIDE == FUTURE:
                        future_mass += tl.sum(weights, 1)
                    else:
                        past_mass += tl.sum(before(weights, lag, value_first), 1)
                        future_mass += tl.sum(after(weights, lag, value_first + value_lags - 1), 1)
                        put_lag_scores(ValueScores, row[:, None], queries, lag, value_first, value_lags, weights)
                if SCORES and SIDE == NEAR:
                    put_lag_scores(BandScores, row[:, None], queries, lag, band_first, band_lags, dlogits)
                if KEY and SIDE == NEAR:
                    put_lag_scores(DKeyScores, key[None, :], keys, lag, band_first, band_lags, dlogits)
                if QUERY and FAR:
                    if SIDE == PAST:
                        past_query += tl.sum(dlogits, 1)
                    elif SIDE == FUTURE:
                        future_query += tl.sum(dlogits, 1)
                    else:
                        past_query += tl.sum(before(dlogits, lag, band_first), 1)
                        future_query += tl.sum(after(dlogits, lag, band_first + band_lags - 1), 1)
                if (BIAS or GAIN) and FAR:
                    if SIDE != FUTURE:
                        dpast = dlogits if SIDE == PAST else before(dlogits, lag, low)
                        if BIAS:
                            past_bias += tl.sum(dpast, 1)
                        if SLOPES:
                            past_slope += tl.sum(dpast * (lag - low).to(tl.float32), 1)
                        if GAIN:
                            past_gains += tl.sum(dpast * content, 1)
                    if SIDE != PAST:
                        dfuture = dlogits if SIDE == FUTURE else after(dlogits, lag, high)
                        if BIAS:
                            future_bias += tl.sum(dfuture, 1)
                        if SLOPES:
                            future_slope += tl.sum(dfuture * (lag - high).to(tl.float32), 1)
                        if GAIN:
                            future_gains += tl.sum(dfuture * content, 1)
                if GAIN:
                    dlogits = dlogits * gain
                if CHANNELS:
                    if SIDE != FUTURE:
                        dpast = dlogits if SIDE == PAST else before(dlogits, lag, band_first)
                        dq += product(dpast.to(k.dtype), k)
                    if SIDE != PAST:
                        dfuture = dlogits if SIDE == FUTURE else after(dlogits, lag, band_first + band_lags - 1)
                        dq_future += product(dfuture.to(k.dtype), k)
                else:
                    dq += product(dlogits.to(k.dtype), k)
    if CHANNELS:
        channel = tl.arange(0, WIDTH)
        entry = DGainEnds + (base * count + block) * 2 * WIDTH
        tl.store(entry + channel, tl.sum(dq * q.to(tl.float32), 0) * scale)
        tl.store(entry + WIDTH + channel, tl.sum(dq_future * q.to(tl.float32), 0) * scale)
        dq = dq * past_gain + dq_future * future_gain
    dq = dq * scale
    if SIDES > 0:
        gains = EndGains + head.to(tl.int64) * end_gains_head
        at = row - (queries - past_rows)
        far = load_far(DqPast, dq_past_batch, dq_past_head, dq_past_time, batch, head, at, past_rows, head_dim, WIDTH)
        dq += far * load_gain(gains, head_dim, WIDTH, GAIN, CHANNELS)
    if SIDES > 1:
        at = future_rows - 1 - row
        far = load_far(DqFuture, dq_future_batch, dq_future_head, dq_future_time, batch, head, at, future_rows, head_dim, WIDTH)
        dq += far * load_gain(gains + end_gains_last, head_dim, WIDTH, GAIN, CHANNELS)
    home, apart = head_rows(Dq, pair, heads, queries, head_dim, DQ_BY_TOKEN)
    store_rows(home, row, queries, apart, dq, head_dim, WIDTH)
    if SCORES:
        clear_scores(BandScores, row, queries, 1, start + band_first, near, beyond, band_lags, band_lags, 0.0, KEYS)
    if VALUE:
        clear_scores(ValueScores, row, queries, 1, start + value_first, near, beyond, value_lags, value_lags, 0.0, KEYS)
    if VALUE and FAR:
        store_ends(ValueMasses + base * 2 * queries, row, queries, past_mass, future_mass)
    if QUERY and FAR:
        store_ends(DQueryEnds + base * 2 * queries, row, queries, past_query, future_query)
    DScalarEnds += base * 6 * queries
    if BIAS and FAR:
        store_ends(DScalarEnds, row, queries, past_bias, future_bias)
    if GAIN and FAR:
        store_ends(DScalarEnds + 2 * queries, row, queries, past_gains * scale, future_gains * scale)
    if SLOPES:
        store_ends(DScalarEnds + 4 * queries, row, queries, past_slope, future_slope)


@triton.jit(do_not_specialize=NUMBERS)
def key_gradient_kernel(
    Q, K, V, Dout, Lse, Delta, Dk, Dv, Bias, Slopes, Gain, BandScores, KeyScores, QueryEnds, KeyEnds, ValueScores, ValueEnds,
    DKeyScores, DKeyEnds, DkPast, DkFuture, DvPast, DvFuture,
    KeyMask, SequenceStart, SequenceEnd, Starts, Seed,
    q_batch, q_head, q_time, k_batch, k_head, k_time, v_batch, v_head, v_time, dout_batch, dout_head, dout_time,
    dk_past_batch, dk_past_head, dk_past_time, dk_future_batch, dk_future_head, dk_future_time,
    dv_past_batch, dv_past_head, dv_past_time, dv_future_batch, dv_future_head, dv_future_time,
    heads, group, queries, keys, query_start, first, last, near_first, near_last, table_first, table_lags,
    band_first, band_lags, value_first, value_lags, past_keys, future_keys, scale, dropped,
    head_dim: tl.constexpr, value_dim: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
    BIAS: tl.constexpr, SLOPES: tl.constexpr, GAIN: tl.constexpr, CHANNELS: tl.constexpr, SCORES: tl.constexpr,
    QUERY: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, MASK: tl.constexpr, HIDE: tl.constexpr,
    PACKED: tl.constexpr, STARTS: tl.constexpr, DROPOUT: tl.constexpr, FAR: tl.constexpr, NEAR_MASKED: tl.constexpr,
    FAR_MASKED: tl.constexpr, LIMITED: tl.constexpr, WHOLE: tl.constexpr, SIDES: tl.constexpr, DK_BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Computes for a block of keys dk and dv, from one query head, and the gradients of their ends; those of scores are zero
    where a key has no query, and the queries' kernel knows the others.

    dk_j = scale sum_i gain(n) dlogit(i, j) q_i,   dv_j = sum_i p(i, j) dout_i

    Seen from a key, queries of the far future come first: their keys' lags are the largest. Key heads that several query heads
    share get their sum on the host: a loop over them here would spill registers.

    Where SIDES far fields were computed by others, their dk and dv come in too, once per key head: the past's for the first
    `past_keys` keys, the future's for the last `future_keys`, in reverse order of time.
    """
    index, count = tl.program_id(0), tl.cdiv(keys, KEYS)
    block, pair = index % count, index // count
    batch, head = pair // heads, pair % heads
    base = pair.to(tl.int64)
    key_start = block * KEYS
    key = key_start + tl.arange(0, KEYS)
    start = tl.load(Starts + batch).to(tl.int32) if STARTS else query_start
    Q += batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
    K += batch.to(tl.int64) * k_batch + (head // group).to(tl.int64) * k_head
    V += batch.to(tl.int64) * v_batch + (head // group).to(tl.int64) * v_head
    Dout += batch.to(tl.int64) * dout_batch + head.to(tl.int64) * dout_head
    Bias += head * table_lags
    Gain += head * (2 * head_dim if CHANNELS else table_lags)
    BandScores += base * queries * band_lags
    KeyScores += base * keys * band_lags
    DKeyScores += base * keys * band_lags
    ValueScores += base * queries * value_lags
    KeyMask += batch.to(tl.int64) * keys
    begin, end = tl.maximum(key_start - start - last, 0), tl.minimum(key_start + KEYS - start - first, queries)
    if PACKED:
        begin = tl.maximum(begin, tl.load(SequenceStart + key_start))
        end = tl.minimum(end, tl.load(SequenceEnd + tl.minimum(key_start + KEYS, keys) - 1))
    begin = begin // ROWS * ROWS
    near, beyond = near_stretch(
        begin, end, key_start - ROWS - start - near_last, key_start + KEYS - start - near_first, FAR, ROWS
    )
    state = dropout_state(Seed, batch, head) if DROPOUT else 0

    k = load_rows(K, key, keys, k_time, head_dim, WIDTH, WHOLE)
    v = load_keys(V, KeyMask, key, keys, v_time, value_dim, VALUE_WIDTH, WHOLE, HIDE)
    dk = tl.zeros([KEYS, WIDTH], tl.float32)
    dv = tl.zeros([KEYS, VALUE_WIDTH], tl.float32)
    # Sums over queries go across warps; as a product with ones they cost less.
    ones = tl.full([ROWS, 16], 1.0, Q.dtype.element_ty)
    past_key, future_key = tl.zeros([KEYS, 16], tl.float32), tl.zeros([KEYS, 16], tl.float32)
    for SIDE in tl.static_range(2, -1, -1):
        if FAR or SIDE == NEAR:
            lower = begin if SIDE == FUTURE else (near if SIDE == NEAR else beyond)
            upper = near if SIDE == FUTURE else (beyond if SIDE == NEAR else end)
            for row_start in range(lower, upper, ROWS):
                row = row_start + tl.arange(0, ROWS)
                lag = key[None, :] - row[:, None] - start
                q = load_rows(Q, row, queries, q_time, head_dim, WIDTH, WHOLE)
                dout = load_rows(Dout, row, queries, dout_time, value_dim, VALUE_WIDTH, WHOLE)
                lse, delta = load_statistics(Lse + base * queries, Delta + base * queries, row, queries, SIDE)
                q_past, q_future, _past, _future = end_queries(q, Gain, head_dim, WIDTH, CHANNELS)
                content = content_product(q_past, q_future, tl.trans(k), lag, band_first, band_lags, SIDE, CHANNELS)
                logits, gain = tile_logits(
                    content, lag, row[:, None], key[None, :], head, scale, Bias, Slopes, Gain, table_first, near_first, near_last,
                    heads, BandScores, KeyScores, band_first, band_lags, QueryEnds + base * 2 * queries,
                    KeyEnds + base * 2 * keys, queries, keys, first, last, KeyMask, SequenceStart, SequenceEnd,
                    SIDE, BIAS, SLOPES, GAIN, SCORES, QUERY, KEY, NEAR_MASKED if SIDE == NEAR else FAR_MASKED, LIMITED, WHOLE,
                    MASK, PACKED, FAR,
                )  # fmt: skip
                weights, dlogits = tile_gradient(
                    logits, lse, delta, product(dout, tl.trans(v)), lag, row[:, None], key[None, :], state, dropped,
                    ValueScores, ValueEnds + base * 2 * queries, value_first, value_lags, queries, SIDE, VALUE, DROPOUT,
                )  # fmt: skip
                dv += product(tl.trans(weights.to(dout.dtype)), dout)
                if KEY and FAR:
                    if SIDE != FUTURE:
                        dpast = dlogits if SIDE == PAST else before(dlogits, lag, band_first)
                        past_key += product(tl.trans(dpast.to(q.dtype)), ones)
                    if SIDE != PAST:
                        dfuture = dlogits if SIDE == FUTURE else after(dlogits, lag, band_first + band_lags - 1)
                        future_key += product(tl.trans(dfuture.to(q.dtype)), ones)
                if GAIN:
                    dlogits = dlogits * gain
                if CHANNELS:
                    if SIDE != FUTURE:
                        dpast = dlogits if SIDE == PAST else before(dlogits, lag, band_first)
                        dk += product(tl.trans(dpast.to(q.dtype)), q_past)
                    if SIDE != PAST:
                        dfuture = dlogits if SIDE == FUTURE else after(dlogits, lag, band_first + band_lags - 1)
                        dk += product(tl.trans(dfuture.to(q.dtype)), q_future)
                else:
                    dk += product(tl.trans(dlogits.to(q.dtype)), q)
    if KEY:
        seen = last - band_first + 1
        clear_scores(DKeyScores, key, keys, -1, start + band_first, 0, queries, seen, band_lags, 0.0, ROWS)
    if KEY and FAR:
        store_ends(DKeyEnds + base * 2 * keys, key, keys, tl.sum(past_key, 1) / 16.0, tl.sum(future_key, 1) / 16.0)
    dk = dk * scale
    if SIDES > 0:
        owner, once = head // group, head % group == 0
        at = tl.where(once, key, -1)
        dk += load_far(DkPast, dk_past_batch, dk_past_head, dk_past_time, batch, owner, at, past_keys, head_dim, WIDTH)
        dv += load_far(DvPast, dv_past_batch, dv_past_head, dv_past_time, batch, owner, at, past_keys, value_dim, VALUE_WIDTH)
    if SIDES > 1:
        at = tl.where(once, keys - 1 - key, -1)
        dk += load_far(DkFuture, dk_future_batch, dk_future_head, dk_future_time, batch, owner, at, future_keys, head_dim, WIDTH)
        dv += load_far(
            DvFuture, dv_future_batch, dv_future_head, dv_future_time, batch, owner, at, future_keys, value_dim, VALUE_WIDTH
        )
    home, apart = head_rows(Dk, pair, heads, keys, head_dim, DK_BY_TOKEN)
    store_rows(home, key, keys, apart, dk, head_dim, WIDTH)
    home, apart = head_rows(Dv, pair, heads, keys, value_dim, DK_BY_TOKEN)
    store_rows(home, key, keys, apart, dv, value_dim, VALUE_WIDTH)
