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

import torch
import triton
import triton.language as tl
from torch import Tensor

from lagwise.ops.kernels.arguments import Bands, Sizes
from lagwise.ops.kernels.logits import (
    NUMBERS,
    content_product,
    end_queries,
    head_pointers,
    key_range,
    query_start_of,
    tile_logits,
)
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
    head_of,
    head_rows,
    kept,
    load_columns,
    load_keys,
    load_rows,
    place_of,
    product,
    put_lag_scores,
    store_rows,
)
from lagwise.ops.lowering import is_by_token


@triton.jit(do_not_specialize=NUMBERS)
def forward_kernel(
    q, k, v, out, lse, band_logits, tables, scores, seen,
    heads, group, queries, keys, query_start, first, last, near_first, near_last, low, high,
    band_first, band_lags, value_first, value_lags, scale, dropped, flags: tl.constexpr,
):  # fmt: skip
    """Computes output and log-sum-exp of a block of queries.

    The value table's share, sum_n exp(logit(i, n) - lse(i)) value(n), is a matrix product in the coordinates of lags: the band's
    logits are written to memory in these, and read again when all tiles are done.
    """
    ROWS: tl.constexpr = flags.ROWS
    VALUE_WIDTH: tl.constexpr = flags.VALUE_WIDTH
    sizes = Sizes(heads, group, queries, keys, first, last)
    bands = Bands(near_first, near_last, low, high, band_first, band_lags, value_first, value_lags)
    block, pair, batch, head = place_of(queries, heads, ROWS)
    base = pair.to(tl.int64)
    row_start = block * ROWS
    row = row_start + tl.arange(0, ROWS)
    start = query_start_of(seen, batch, query_start, flags)
    own = head_pointers(tables, scores, seen, pair, sizes, bands, flags)
    K, V = head_of(k, batch, head // group), head_of(v, batch, head // group)
    BandLogits = band_logits + base * queries * value_lags
    begin, near, beyond, end = key_range(row_start, start, batch, seen, sizes, bands, flags)
    state = dropout_state(seen.seed, batch, head) if flags.DROPOUT else 0
    larger = 1.0 / (1.0 - dropped.to(tl.float32) / 16777216.0)

    queries_here = load_rows(head_of(q, batch, head), row, queries, q.time, flags.head_dim, flags.WIDTH, flags.WHOLE)
    q_past, q_future, _past, _future = end_queries(queries_here, own.gain, flags)
    peak = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    past_mass, future_mass = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    for SIDE in tl.static_range(3):
        if flags.FAR or SIDE == NEAR:
            lower = begin if SIDE == PAST else (near if SIDE == NEAR else beyond)
            upper = near if SIDE == PAST else (beyond if SIDE == NEAR else end)
            for key_start in range(lower, upper, flags.KEYS):
                key = key_start + tl.arange(0, flags.KEYS)
                lag = key[None, :] - row[:, None] - start
                columns = load_columns(K, key, keys, k.time, flags.head_dim, flags.WIDTH, flags.WHOLE)
                content = content_product(q_past, q_future, columns, lag, bands, SIDE, flags)
                logits, _gain = tile_logits(
                    content, lag, row[:, None], key[None, :], own, seen, sizes, bands, scale,
                    SIDE, flags.NEAR_MASKED if SIDE == NEAR else flags.FAR_MASKED, not flags.WHOLE, flags.SLOPES, flags,
                )  # fmt: skip
                higher = tl.maximum(peak, tl.max(logits, 1))
                shrink = tl.exp2((peak - higher) * LOG2E)
                weights = tl.exp2((logits - higher[:, None]) * LOG2E)
                total = total * shrink + tl.sum(weights, 1)
                if flags.DROPOUT:
                    keep = kept(state, row[:, None], key[None, :], dropped)
                    weights = tl.where(keep, weights * larger, 0.0)
                    logits = tl.where(keep, logits + tl.log2(larger) * LN2, -float("inf"))
                if flags.VALUE:
                    past_mass, future_mass = past_mass * shrink, future_mass * shrink
                    if SIDE == PAST:
                        past_mass += tl.sum(weights, 1)
                    elif SIDE == FUTURE:
                        future_mass += tl.sum(weights, 1)
                    else:
                        past_mass += tl.sum(before(weights, lag, value_first), 1)
                        future_mass += tl.sum(after(weights, lag, value_first + value_lags - 1), 1)
                        put_lag_scores(BandLogits, row[:, None], queries, lag, value_first, value_lags, logits)
                values = load_keys(V, own.key_mask, key, keys, v.time, flags.value_dim, VALUE_WIDTH, flags.WHOLE, flags.HIDE)
                sums = sums * shrink[:, None] + product(weights.to(values.dtype), values)
                peak = higher
    some = tl.where(total > 0.0, total, 1.0)
    log_sum = peak + tl.log2(some) * LN2
    if flags.VALUE:
        channel = tl.arange(0, VALUE_WIDTH)
        there = channel < flags.value_dim
        value = tl.load(own.value + channel, mask=there, other=0.0).to(tl.float32)
        sums += past_mass[:, None] * value[None, :]
        value = tl.load(own.value + (value_lags - 1) * flags.value_dim + channel, mask=there, other=0.0).to(tl.float32)
        sums += future_mass[:, None] * value[None, :]
    sums = sums / some[:, None]
    if flags.VALUE:
        clear_scores(
            BandLogits, row, queries, 1, start + value_first, near, beyond, value_lags, value_lags, -float("inf"), flags.KEYS
        )
        # All threads have written before any of them reads what others wrote.
        tl.debug_barrier()
        for lag_start in range(0, value_lags, flags.KEYS):
            column = lag_start + tl.arange(0, flags.KEYS)
            entries = (row < queries)[:, None] & (column < value_lags)[None, :]
            logits = tl.load(
                BandLogits + row.to(tl.int64)[:, None] * value_lags + column[None, :], mask=entries, other=-float("inf")
            )
            values = load_rows(own.value, column, value_lags, flags.value_dim, flags.value_dim, VALUE_WIDTH, False)
            sums += product(tl.exp2((logits - log_sum[:, None]) * LOG2E).to(values.dtype), values)
    home, apart = head_rows(out, pair, heads, queries, flags.value_dim, flags.OUT_BY_TOKEN)
    store_rows(home, row, queries, apart, sums, flags.value_dim, VALUE_WIDTH)
    tl.store(lse + base * queries + row, tl.where(total > 0.0, log_sum, -float("inf")), mask=row < queries)


def attend(plan: Plan, out: Tensor, lse: Tensor) -> None:
    """Writes the output and the log-sum-exp of a plan."""
    score(plan)
    logits = out
    if plan.tables.value is not None:
        logits = torch.empty(*lse.shape, plan.numbers["value_lags"], dtype=torch.float32, device=out.device)
    plan.launch(forward_kernel, "forward", out=out, lse=lse, band_logits=logits, OUT_BY_TOKEN=is_by_token(out))
