"""Gradients of queries, keys and values in two passes over the pairs, and those of the tables behind scores."""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lagwise.ops.grouped import per_query_head
from lagwise.ops.kernels.bias_gradient import diagonal_sums, scalar_gradients
from lagwise.ops.kernels.channel_gain import channel_ends, channel_gradients
from lagwise.ops.kernels.logits import (
    NUMBERS,
    content_product,
    end_queries,
    key_range,
    load_statistics,
    near_stretch,
    tile_gradient,
    tile_logits,
)
from lagwise.ops.kernels.plan import Plan, blocks, strides
from lagwise.ops.kernels.scores import add_ends, ends_of, per_pair, products, score, summed_products
from lagwise.ops.kernels.tiles import (
    FUTURE,
    NEAR,
    PAST,
    after,
    before,
    clear_scores,
    dropout_state,
    head_rows,
    load_gain,
    load_keys,
    load_rows,
    product,
    put_lag_scores,
    store_ends,
    store_rows,
)
from lagwise.ops.lowering import empty_laid_out
from lagwise.terms import Terms


@triton.jit
def load_far(
    X, batch_stride, head_stride, time_stride, batch, head, index, count, dim: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Loads rows of a gradient that others computed for a far field, [batch, heads, count, dim], zero where it has none."""
    here = X + batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride
    return load_rows(here, index, count, time_stride, dim, WIDTH, False).to(tl.float32)


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


class FarEnds(NamedTuple):
    """What the far fields of `split` add to the ends of tables, per row: [batch, heads, queries, 2]."""

    changes: Tensor  # sums of dlogit
    masses: Tensor  # sums of weights


def differentiate(
    plan: Plan, dout: Tensor, lse: Tensor, delta: Tensor, far: FarEnds | None = None
) -> tuple[dict[str, Tensor], Terms]:
    """Returns the gradients of q, k, v and of the raw q and k by name, those of k and v per query head, and those of the tables.

    The ends come from the kernels, or from the far fields where the plan has only the band.
    """
    plan.hide_keys()
    score(plan)
    zeros: dict[str, Any] = {name: table.zeros(torch.float32) for name, table in plan.tables.tables().items()}
    tables = Terms(**zeros)
    given: dict[str, Any] = {"Dout": dout, **strides("dout", dout), "Lse": lse, "Delta": delta}
    if plan.tables.value is not None:
        given["ValueScores"] = products(dout, plan.arguments["Value"], plan.room)
        given["ValueEnds"] = ends_of(given["ValueScores"])
    sums = diagonal_sums(plan, given)
    if plan.tables.key is not None:
        # Gradients stand where the scores were, unless there are columns or pairs that no program looks at.
        scores = plan.arguments["KeyScores"]
        whole = plan.band_first >= plan.first and not (plan.arguments["MASK"] or plan.arguments["PACKED"])
        given["DKeyScores"] = scores if whole else torch.zeros_like(scores)
    found, key_ends = _key_gradients(plan, given)
    found["q"], rows = _query_gradients(plan, given)
    if plan.tables.value is not None and tables.value is not None:
        masses = rows["ValueMasses"] if far is None else far.masses
        weights = add_ends(given.pop("ValueScores"), masses)
        plan.tables.value.fold(summed_products(weights, dout, tables.value.heads), plan.value_first, tables.value)
    if plan.scored:
        _score_gradients(plan, given, key_ends, rows["DQueryEnds"] if far is None else far.changes, found, tables)
    if plan.channels:
        channel_ends(plan, rows["DGainEnds"], tables)
    scalar_gradients(plan, sums, rows["DScalarEnds"] if far is None else far.changes[:, :, None], tables)
    return found, tables


def _add(found: dict[str, Tensor], name: str, raw: Tensor | None, dscores: Tensor, table: Tensor, scale: float) -> None:
    """Adds scores' share of the gradient of the raw q or k to that of the transformed one where they are the same tensor."""
    if raw is not None:
        found[f"raw_{name}"] = scale * (dscores @ table)
    elif len(table) == 1:
        found[name].flatten(0, 2).addmm_(dscores.flatten(0, 2), table[0], alpha=scale)
    else:
        found[name].flatten(0, 1).baddbmm_(dscores.flatten(0, 1), per_pair(table, dscores), alpha=scale)


def _key_gradients(plan: Plan, given: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor | None]:
    """Returns dk and dv per query head, and the gradients of the keys' ends, which a band has not."""
    shape, by_token = (plan.batch, plan.heads, plan.keys), plan.arguments["DK_BY_TOKEN"]
    dk, dv = (empty_laid_out(by_token, x, *shape, x.shape[3]) for x in (plan.k, plan.v))
    more = {}
    if plan.tables.key is not None and plan.only is None:
        more["DKeyEnds"] = torch.empty(*shape, 2, dtype=torch.float32, device=dk.device)
    plan.launch(key_gradient_kernel, "key", Dk=dk, Dv=dv, **given, **more)
    return {"k": dk, "v": dv}, more.get("DKeyEnds")


def _query_gradients(plan: Plan, given: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns dq and what the same kernel finds for the ends of the tables; scores turn into their gradients."""
    lse = given["Lse"]
    dq = empty_laid_out(plan.arguments["DQ_BY_TOKEN"], plan.q, *plan.q.shape)

    def ends(*shape: int) -> Tensor:
        return torch.empty(*lse.shape[:2], *shape, lse.shape[2], 2, dtype=torch.float32, device=lse.device)

    rows = {"DScalarEnds": ends(3), "DQueryEnds": ends(), "ValueMasses": ends()} if plan.only is None else {}
    if plan.channels:
        count = blocks(plan.queries, plan.tile("query")[0])
        rows["DGainEnds"] = torch.empty(*lse.shape[:2], count, 2, plan.arguments["WIDTH"], device=lse.device)
    plan.launch(query_gradient_kernel, "query", Dq=dq, **given, **rows)
    return dq, rows


def _score_gradients(
    plan: Plan, given: dict[str, Any], key_ends: Tensor | None, query_ends: Tensor, found: dict[str, Tensor], tables: Terms
) -> None:
    """Adds the gradients of the tables behind the scores, and their shares of dq and dk."""
    scale = plan.call.scale
    if plan.tables.key is not None and tables.key is not None:
        dscores = given["DKeyScores"]
        if key_ends is not None:
            add_ends(dscores, key_ends)
        gradient = scale * summed_products(dscores, per_query_head(plan.raw_k, plan.heads), tables.key.heads)
        plan.tables.key.fold(gradient, plan.band_first, tables.key)
        _add(found, "k", plan.lowered.raw_k, dscores, plan.table("key"), scale)
    dscores = plan.arguments.pop("BandScores")
    if plan.channels:
        channel_gradients(plan, dscores, found, tables)
    if plan.tables.query is not None and tables.query is not None:
        add_ends(dscores, query_ends)
        gradient = scale * summed_products(dscores, plan.raw_q, tables.query.heads)
        plan.tables.query.fold(gradient, plan.band_first, tables.query)
        _add(found, "q", plan.lowered.raw_q, dscores, plan.table("query"), scale)
