"""Attention with lag tables in one pass: output, gradient of the queries, gradient of the keys and values.

    logit(i, j) = scale * (gain(n) q_i . k_j + score(i, n)) + bias(n)        n = j - i
    out(i)      = sum_j softmax_j(logit(i, j)) * (v_j + value(n))

Each program owns a block of queries (or keys) and walks over tiles of the others in three stretches: the far past and the far
future, where every table is its end column, and the near tiles between them, which look up each pair's own lag.

    block of queries     past  past | near near near | future future
                         -----------+----------------+---------------> keys

`score(i, n) = q_i . query(n) + k_(i+n) . key(n)` is there for the lags of the band, see `lagwise.ops.kernels.score_kernels`;
before and after it, it is the sum of a number per query and a number per key, the `ends`. With CHANNELS, a gain per channel,
scores hold the content product too, and beyond the band it is q * gain of the end column.
"""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lagwise.ops.kernels.arguments import Bands, Scores, Sizes, view
from lagwise.ops.kernels.inputs import Inputs
from lagwise.ops.kernels.logits import (
    NUMBERS,
    content_product,
    end_queries,
    head_pointers,
    is_within,
    key_stretches,
    load_row_ends,
    query_start_of,
    stretch_of,
    tile_at,
    tile_logits,
)
from lagwise.ops.kernels.scores import empty_scores
from lagwise.ops.kernels.tables import band_values
from lagwise.ops.kernels.tiles import (
    LN2,
    LOG2E,
    LOWEST,
    STRETCHES,
    after,
    before,
    dropout_state,
    has_future,
    has_past,
    head_of,
    is_near,
    is_taken,
    kept,
    load_keys,
    load_rows,
    place_of,
    product,
    put_scores,
    slab_of,
    step_of,
    store_rows,
    tile_indices,
)


@triton.jit(do_not_specialize=NUMBERS)
def forward_kernel(
    q, k, v, out, lse, band_logits, tables, scores, seen,
    heads, group, queries, keys, query_start, first, last, near_first, near_last, low, high,
    table_first, table_lags, band_first, band_lags, scale, dropped, first_batch, first_head, flags: tl.constexpr,
):  # fmt: skip
    """Computes output and log-sum-exp of a block of queries.

    The value table's share, sum_n exp(logit(i, n) - lse(i)) value(n), is a matrix product in the coordinates of lags: the band's
    logits are written to memory as scores are, and read again when all tiles are done.
    """
    ROWS: tl.constexpr = flags.ROWS
    KEYS: tl.constexpr = flags.KEYS
    VALUE_WIDTH: tl.constexpr = flags.VALUE_WIDTH
    sizes = Sizes(heads, group, queries, keys, first, last)
    bands = Bands(near_first, near_last, low, high, table_first, table_lags, band_first, band_lags)
    block, pair, batch, head = place_of(queries, heads, ROWS, flags.SCORED)
    base = pair.to(tl.int64)
    row_start = block * ROWS
    row = row_start + tl.arange(0, ROWS)
    start = query_start_of(seen, batch, query_start, flags)
    own = head_pointers(tables, scores, seen, pair, sizes, bands, flags)
    K, V = head_of(k, batch, head // group), head_of(v, batch, head // group)
    BandLogits = band_logits + base * slab_of(queries, keys, band_lags)
    limits = key_stretches(row_start, start, batch, seen, sizes, bands, flags)
    state = dropout_state(seen.seed, batch + first_batch, head + first_head) if flags.DROPOUT else 0
    larger = 1.0 / (1.0 - dropped.to(tl.float32) / 16777216.0)

    queries_here = load_rows(head_of(q, batch, head), row, queries, q.time, flags.head_dim, flags.WIDTH, flags.WHOLE)
    q_past, q_future, _past, _future = end_queries(queries_here, own.ends, flags)
    ends = load_row_ends(own, row, sizes, False, flags)
    peak = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    past_mass, future_mass = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    for SIDE in tl.static_range(STRETCHES):
        if is_taken(SIDE, flags):
            stretch = stretch_of(limits, SIDE)
            for place in range(stretch.first, stretch.end, KEYS):
                key = tile_indices(tile_at(place, stretch, SIDE), KEYS, flags.SCORED)
                is_past = place < stretch.middle
                lag = key[None, :] - row[:, None] - start
                k_rows = load_rows(K, key, keys, k.time, flags.head_dim, flags.WIDTH, flags.WHOLE)
                content = content_product(q_past, q_future, k_rows, lag, bands, SIDE, False, flags)
                logits, _gain = tile_logits(
                    content, lag, row, key, start, own, ends, seen, sizes, bands, scale, is_past, SIDE, False, flags
                )
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
                    if has_past(SIDE, flags):
                        past_mass += tl.sum(before(weights, lag, bands, SIDE), 1)
                    if has_future(SIDE, flags):
                        future_mass += tl.sum(after(weights, lag, bands, SIDE), 1)
                    if is_near(SIDE):
                        put_scores(
                            BandLogits, logits, row, queries, key, keys, band_first + start, band_lags,
                            is_within(SIDE, flags),
                        )  # fmt: skip
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
        value = tl.load(own.value + (band_lags - 1) * flags.value_dim + channel, mask=there, other=0.0).to(tl.float32)
        sums += future_mass[:, None] * value[None, :]
    sums = sums / some[:, None]
    if flags.VALUE:
        # All threads have written before any of them reads what others wrote.
        tl.debug_barrier()
        step = step_of(band_lags, keys) + 1
        Own = BandLogits + tl.minimum(row, queries - 1).to(tl.int64)[:, None] * step + band_first + start
        for lag_start in range(0, band_lags, KEYS):
            column = lag_start + tl.arange(0, KEYS)
            met = row[:, None] + start + band_first + column[None, :]
            looked_at = (met >= limits[1]) & (met < limits[4]) & (column < band_lags)[None, :] & (row < queries)[:, None]
            logits = tl.load(Own + column[None, :], mask=looked_at, other=-float("inf"))
            values = load_rows(own.value, column, band_lags, flags.value_dim, flags.value_dim, VALUE_WIDTH, False)
            sums += product(tl.exp2((logits - log_sum[:, None]) * LOG2E).to(values.dtype), values)
    store_rows(head_of(out, batch, head), row, queries, out.time, sums, flags.value_dim, VALUE_WIDTH)
    tl.store(lse + base * queries + row, tl.where(total > 0.0, log_sum, -float("inf")), mask=row < queries)


def attend(inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    """Writes the output and the log-sum-exp of a call."""
    plan = inputs.plan
    logits, tables, none = out, inputs.tables, inputs.q
    scores = inputs.scores() if plan.scored else Scores(none, none, none, none, none, none)
    if inputs.lowered.value is not None:
        logits = empty_scores(plan, "value", torch.float32)
        tables = tables._replace(value=band_values(plan, inputs.lowered.value))
    values = (
        view(inputs.q), view(inputs.k), view(inputs.v), view(out), lse, logits, tables, scores, inputs.seen,
        *plan.numbers, plan.flags_at("forward"),
    )  # fmt: skip
    plan.launch_tiles("forward", "forward", forward_kernel, values)
