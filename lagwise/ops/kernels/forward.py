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

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lagwise.ops.kernels.logits import NUMBERS, content_product, end_queries, key_range, tile_logits
from lagwise.ops.kernels.plan import Plan
from lagwise.ops.kernels.scores import score
from lagwise.ops.kernels.tiles import (
    FUTURE,
    LN2,
    LOG2E,
    LOWEST,
    NEAR,
    PAST,
    after,
    before,
    clear_scores,
    dropout_state,
    head_rows,
    kept,
    load_columns,
    load_keys,
    load_rows,
    product,
    put_lag_scores,
    store_rows,
)
from lagwise.ops.lowering import is_by_token


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


def attend(plan: Plan, out: Tensor, lse: Tensor) -> None:
    """Writes the output and the log-sum-exp of a plan."""
    score(plan)
    given: dict[str, Any] = {"Out": out, "Lse": lse, "OUT_BY_TOKEN": is_by_token(out)}
    if plan.tables.value is not None:
        given["BandLogits"] = torch.empty(*lse.shape, plan.arguments["value_lags"], dtype=torch.float32, device=out.device)
    plan.launch(forward_kernel, "forward", **given)
