"""The two passes over the pairs of a backward pass: for the gradients of queries, and for those of keys and values."""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

import triton
import triton.language as tl

from lagwise.ops.kernels.arguments import Bands, Sizes
from lagwise.ops.kernels.bias_gradient import add_diagonals, clear_sums
from lagwise.ops.kernels.logits import (
    NUMBERS,
    content_product,
    end_queries,
    head_pointers,
    is_within,
    key_stretches,
    load_row_ends,
    load_statistics,
    query_start_of,
    query_stretches,
    stretch_of,
    tile_at,
    tile_gradient,
    tile_logits,
)
from lagwise.ops.kernels.tiles import (
    FAR_SIDES,
    PAST,
    STRETCHES,
    after,
    before,
    dropout_state,
    has_future,
    has_past,
    head_of,
    is_near,
    is_taken,
    load_gain,
    load_keys,
    load_rows,
    place_from_keys,
    place_of,
    product,
    put_scores,
    store_rows,
    tile_indices,
    turned,
)


@triton.jit
def by_key(x, TURNED: tl.constexpr):
    """Returns a tile as [keys, queries]."""
    return x if TURNED else tl.trans(x)


@triton.jit
def load_far(x, batch, head, index, count, dim: tl.constexpr, WIDTH: tl.constexpr):
    """Loads rows of a gradient that others computed for a far field, [batch, heads, count, dim], zero where it has none."""
    return load_rows(head_of(x, batch, head), index, count, x.time, dim, WIDTH, False).to(tl.float32)


@triton.jit(do_not_specialize=NUMBERS)
def query_gradient_kernel(
    q, k, v, out, dout, dlse, lse, delta, found, far, tables, scores, seen,
    heads, group, queries, keys, query_start, first, last, near_first, near_last, low, high,
    table_first, table_lags, band_first, band_lags, scale, dropped, first_batch, first_head, past_count, future_count,
    PATCH: tl.constexpr, flags: tl.constexpr,
):  # fmt: skip
    """Computes for a block of queries dq, the gradients of its scores and ends, and its shares of the scalar tables' gradients.

    dq = scale sum_j gain(n) dlogit(i, j) k_j

    Gradients are written over the scores, those of queries and those of keys, and weights over the value scores, which nobody
    needs any more. Dlogit of near tiles goes to a patch of PATCH keys at a time, whose diagonals are then summed.

    Where SIDES far fields were computed by others, their dq, of the gain of its end column times q, comes in too: the past's for
    the last `past_count` queries, the future's for the first `future_count`, in reverse order of time.

    `found.ends`, [batch, heads, blocks, 2, 3], gets the sums of dlogit, of dlogit times content and of dlogit times the distance
    beyond the end in far tiles.
    """
    ROWS: tl.constexpr = flags.ROWS
    KEYS: tl.constexpr = flags.KEYS
    WIDTH: tl.constexpr = flags.WIDTH
    BIAS_LEARNED: tl.constexpr = flags.BIAS and flags.LEARNED
    GAIN_LEARNED: tl.constexpr = flags.GAIN and flags.LEARNED
    SUMMED: tl.constexpr = BIAS_LEARNED or GAIN_LEARNED
    sizes = Sizes(heads, group, queries, keys, first, last)
    bands = Bands(near_first, near_last, low, high, table_first, table_lags, band_first, band_lags)
    block, pair, batch, head = place_of(queries, heads, ROWS)
    base, program = pair.to(tl.int64), tl.program_id(0).to(tl.int64)
    row_start = block * ROWS
    index = tl.arange(0, ROWS)
    row = row_start + index
    start = query_start_of(seen, batch, query_start, flags)
    own = head_pointers(tables, scores, seen, pair, sizes, bands, flags)
    K, V = head_of(k, batch, head // group), head_of(v, batch, head // group)
    limits = key_stretches(row_start, start, batch, seen, sizes, bands, flags)
    state = dropout_state(seen.seed, batch + first_batch, head + first_head) if flags.DROPOUT else 0

    q_rows = load_rows(head_of(q, batch, head), row, queries, q.time, flags.head_dim, WIDTH, flags.WHOLE)
    dout_rows = load_rows(head_of(dout, batch, head), row, queries, dout.time, flags.value_dim, flags.VALUE_WIDTH, flags.WHOLE)
    Delta = delta + base * queries
    if flags.DELTA:
        out_rows = load_rows(head_of(out, batch, head), row, queries, out.time, flags.value_dim, flags.VALUE_WIDTH, flags.WHOLE)
        row_delta = tl.sum(out_rows.to(tl.float32) * dout_rows.to(tl.float32), 1)
        if flags.DLSE:
            row_delta -= tl.load(dlse + base * queries + row, mask=row < queries, other=0.0)
        tl.store(Delta + row, row_delta, mask=row < queries)
        row_lse, _delta = load_statistics(lse + base * queries, lse + base * queries, row, queries, flags)
    else:
        row_lse, row_delta = load_statistics(lse + base * queries, Delta, row, queries, flags)
    q_past, q_future, past_gain, future_gain = end_queries(q_rows, own.ends, flags)
    ends = load_row_ends(own, row, sizes, flags.VALUE, flags)
    if flags.CHANNELS:
        dq_future = tl.zeros([ROWS, WIDTH], tl.float32)
    dq = tl.zeros([ROWS, WIDTH], tl.float32)
    past_bias, future_bias = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    past_gains, future_gains = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    past_slope, future_slope = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    past_query, future_query = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    past_mass, future_mass = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    Patch = found.patches + program * ((2 if BIAS_LEARNED and GAIN_LEARNED else 1) * ROWS * PATCH)
    GainPatch = Patch + (ROWS * PATCH if BIAS_LEARNED else 0)
    # Near tiles hold lags that far beyond the near ones.
    sum_first, sum_lags = near_first - (ROWS + KEYS), near_last - near_first + 1 + 2 * (ROWS + KEYS)
    BiasSums, GainSums = found.bias + program * sum_lags, found.gain + program * sum_lags
    if BIAS_LEARNED:
        clear_sums(BiasSums, sum_lags, PATCH)
    if GAIN_LEARNED:
        clear_sums(GainSums, sum_lags, PATCH)
    for SIDE in tl.static_range(STRETCHES):
        if is_taken(SIDE, flags):
            stretch = stretch_of(limits, SIDE)
            # Without a patch it is one stretch.
            step = PATCH if SUMMED and is_near(SIDE) else tl.maximum(stretch.end - stretch.first, 1)
            for patch_start in range(stretch.first, stretch.end, step):
                patch_end = tl.minimum(patch_start + step, stretch.end)
                for key_start in range(patch_start, patch_end, KEYS):
                    key = tile_indices(tile_at(key_start, stretch, SIDE), KEYS, flags.SCORED)
                    is_past = key_start < stretch.middle
                    lag = key[None, :] - row[:, None] - start
                    k_rows = load_keys(K, own.key_mask, key, keys, k.time, flags.head_dim, WIDTH, flags.WHOLE, flags.HIDE)
                    v_rows = load_keys(
                        V, own.key_mask, key, keys, v.time, flags.value_dim, flags.VALUE_WIDTH, flags.WHOLE, flags.HIDE
                    )
                    content = content_product(q_past, q_future, k_rows, lag, bands, SIDE, False, flags)
                    logits, gain = tile_logits(
                        content, lag, row, key, start, own, ends, seen, sizes, bands, scale, is_past, SIDE, False, flags
                    )
                    weights, dlogits = tile_gradient(
                        logits, row_lse, row_delta, product(dout_rows, tl.trans(v_rows)), lag, row, key, start,
                        own, ends, sizes, bands, state, dropped, SIDE, False, flags,
                    )  # fmt: skip
                    if flags.VALUE:
                        if has_past(SIDE, flags):
                            past_mass += tl.sum(before(weights, lag, bands, SIDE), 1)
                        if has_future(SIDE, flags):
                            future_mass += tl.sum(after(weights, lag, bands, SIDE), 1)
                        if is_near(SIDE):
                            put_scores(
                                own.value_scores, weights, row, queries, key, keys, band_first + start, band_lags,
                                is_within(SIDE, flags),
                            )  # fmt: skip
                    if flags.SCORES and is_near(SIDE):
                        put_scores(
                            own.query, dlogits, row, queries, key, keys, band_first + start, band_lags,
                            is_within(SIDE, flags),
                        )  # fmt: skip
                    if flags.KEY and is_near(SIDE):
                        put_scores(
                            own.key, tl.trans(dlogits), key, keys, row, queries, 1 - band_first - band_lags - start, band_lags,
                            is_within(SIDE, flags),
                        )  # fmt: skip
                    if flags.QUERY and has_past(SIDE, flags):
                        past_query += tl.sum(before(dlogits, lag, bands, SIDE), 1)
                    if flags.QUERY and has_future(SIDE, flags):
                        future_query += tl.sum(after(dlogits, lag, bands, SIDE), 1)
                    if SUMMED and is_near(SIDE):
                        place = index[:, None] * PATCH + (key_start - patch_start) // KEYS * KEYS + tl.arange(0, KEYS)[None, :]
                        if BIAS_LEARNED:
                            tl.store(Patch + place, dlogits.to(Patch.dtype.element_ty))
                        if GAIN_LEARNED:
                            tl.store(GainPatch + place, (dlogits * content * scale).to(Patch.dtype.element_ty))
                    elif SUMMED:
                        if SIDE == FAR_SIDES:
                            change = tl.sum(dlogits, 1)
                            past_bias += tl.where(is_past, change, 0.0)
                            future_bias += tl.where(is_past, 0.0, change)
                            if GAIN_LEARNED:
                                change = tl.sum(dlogits * content, 1)
                                past_gains += tl.where(is_past, change, 0.0)
                                future_gains += tl.where(is_past, 0.0, change)
                        elif SIDE == PAST:
                            past_bias += tl.sum(dlogits, 1)
                            if flags.SLOPES:
                                past_slope += tl.sum(dlogits * (lag - low).to(tl.float32), 1)
                            if GAIN_LEARNED:
                                past_gains += tl.sum(dlogits * content, 1)
                        else:
                            future_bias += tl.sum(dlogits, 1)
                            if flags.SLOPES:
                                future_slope += tl.sum(dlogits * (lag - high).to(tl.float32), 1)
                            if GAIN_LEARNED:
                                future_gains += tl.sum(dlogits * content, 1)
                    if flags.GAIN:
                        dlogits = dlogits * gain
                    if flags.CHANNELS:
                        if has_past(SIDE, flags):
                            dpast = before(dlogits, lag, bands, SIDE)
                            dq += product(dpast.to(k_rows.dtype), k_rows)
                        if has_future(SIDE, flags):
                            dfuture = after(dlogits, lag, bands, SIDE)
                            dq_future += product(dfuture.to(k_rows.dtype), k_rows)
                    else:
                        dq += product(dlogits.to(k_rows.dtype), k_rows)
                if SUMMED and is_near(SIDE):
                    filled = (patch_end - patch_start + KEYS - 1) // KEYS * KEYS
                    corner = patch_start - row_start - start - sum_first
                    # All threads have written before any of them reads what others wrote, and the other way round.
                    tl.debug_barrier()
                    if BIAS_LEARNED:
                        add_diagonals(Patch, BiasSums, corner, filled, sum_lags, ROWS, PATCH)
                    if GAIN_LEARNED:
                        add_diagonals(GainPatch, GainSums, corner, filled, sum_lags, ROWS, PATCH)
                    tl.debug_barrier()
    if flags.CHANNELS:
        channel = tl.arange(0, WIDTH)
        entry = found.gain_ends + program * 2 * WIDTH
        tl.store(entry + channel, tl.sum(dq * q_rows.to(tl.float32), 0) * scale)
        tl.store(entry + WIDTH + channel, tl.sum(dq_future * q_rows.to(tl.float32), 0) * scale)
        dq = dq * past_gain + dq_future * future_gain
    dq = dq * scale
    if flags.SIDES > 0:
        gains = far.gains + head.to(tl.int64) * far.gains_head
        share = load_far(far.past, batch, head, row - (queries - past_count), past_count, flags.head_dim, WIDTH)
        dq += share * load_gain(gains, flags.head_dim, WIDTH, flags.GAIN, flags.CHANNELS)
    if flags.SIDES > 1:
        share = load_far(far.future, batch, head, future_count - 1 - row, future_count, flags.head_dim, WIDTH)
        dq += share * load_gain(gains + far.gains_last, flags.head_dim, WIDTH, flags.GAIN, flags.CHANNELS)
    store_rows(head_of(found.q, batch, head), row, queries, found.q.time, dq, flags.head_dim, WIDTH)
    if flags.VALUE and flags.FAR:
        tl.store(found.value_masses + base * 2 * queries + row, past_mass, mask=row < queries)
        tl.store(found.value_masses + base * 2 * queries + queries + row, future_mass, mask=row < queries)
    if flags.QUERY and flags.FAR:
        tl.store(found.query_ends + base * 2 * queries + row, past_query, mask=row < queries)
        tl.store(found.query_ends + base * 2 * queries + queries + row, future_query, mask=row < queries)
    if SUMMED and flags.FAR:
        Ends = found.ends + program * 6
        tl.store(Ends, tl.sum(past_bias, 0))
        tl.store(Ends + 1, tl.sum(past_gains, 0) * scale)
        tl.store(Ends + 2, tl.sum(past_slope, 0))
        tl.store(Ends + 3, tl.sum(future_bias, 0))
        tl.store(Ends + 4, tl.sum(future_gains, 0) * scale)
        tl.store(Ends + 5, tl.sum(future_slope, 0))


@triton.jit(do_not_specialize=NUMBERS)
def key_gradient_kernel(
    q, k, v, dout, lse, delta, found, far, tables, scores, seen,
    heads, group, queries, keys, query_start, first, last, near_first, near_last, low, high,
    table_first, table_lags, band_first, band_lags, scale, dropped, first_batch, first_head, past_count, future_count,
    flags: tl.constexpr,
):  # fmt: skip
    """Computes for a block of keys dk and dv, from one query head, and the gradients of their ends.

    dk_j = scale sum_i gain(n) dlogit(i, j) q_i,   dv_j = sum_i p(i, j) dout_i

    Seen from a key, queries of the far future come first: their keys' lags are the largest. Key heads that several query heads
    share get their sum on the host: a loop over them here would spill registers. With scores tiles are turned,
    [keys, queries]: weights are then the left factors of products, which need not leave the registers.

    Where SIDES far fields were computed by others, their dk and dv come in too, once per key head: the past's for the first
    `past_count` keys, the future's for the last `future_count`, in reverse order of time.
    """
    ROWS: tl.constexpr = flags.ROWS
    KEYS: tl.constexpr = flags.KEYS
    WIDTH: tl.constexpr = flags.WIDTH
    VALUE_WIDTH: tl.constexpr = flags.VALUE_WIDTH
    TURNED: tl.constexpr = flags.SCORED
    AXIS: tl.constexpr = flags.SCORED * 1
    sizes = Sizes(heads, group, queries, keys, first, last)
    bands = Bands(near_first, near_last, low, high, table_first, table_lags, band_first, band_lags)
    block, pair, batch, head = place_of(keys, heads, KEYS, flags.SCORED)
    base = pair.to(tl.int64)
    key_start = block * KEYS
    key = key_start + tl.arange(0, KEYS)
    start = query_start_of(seen, batch, query_start, flags)
    own = head_pointers(tables, scores, seen, pair, sizes, bands, flags)
    Q, Dout = head_of(q, batch, head), head_of(dout, batch, head)
    limits = query_stretches(key_start, start, seen, sizes, bands, flags)
    state = dropout_state(seen.seed, batch + first_batch, head + first_head) if flags.DROPOUT else 0

    k_rows = load_rows(head_of(k, batch, head // group), key, keys, k.time, flags.head_dim, WIDTH, flags.WHOLE)
    v_rows = load_keys(
        head_of(v, batch, head // group), own.key_mask, key, keys, v.time,
        flags.value_dim, VALUE_WIDTH, flags.WHOLE, flags.HIDE,
    )  # fmt: skip
    dk = tl.zeros([KEYS, WIDTH], tl.float32)
    dv = tl.zeros([KEYS, VALUE_WIDTH], tl.float32)
    past_key, future_key = tl.zeros([KEYS], tl.float32), tl.zeros([KEYS], tl.float32)
    for SIDE in tl.static_range(STRETCHES - 1, -1, -1):
        if is_taken(SIDE, flags):
            stretch = stretch_of(limits, place_from_keys(SIDE))
            for place in range(stretch.first, stretch.end, ROWS):
                row = tile_indices(tile_at(place, stretch, SIDE), ROWS, flags.SCORED)
                is_past = place >= stretch.middle
                lag = turned(key, not TURNED) - turned(row, TURNED) - start
                q_rows = load_rows(Q, row, queries, q.time, flags.head_dim, WIDTH, flags.WHOLE)
                dout_rows = load_rows(Dout, row, queries, dout.time, flags.value_dim, VALUE_WIDTH, flags.WHOLE)
                row_lse, row_delta = load_statistics(lse + base * queries, delta + base * queries, row, queries, flags)
                q_past, q_future, _past, _future = end_queries(q_rows, own.ends, flags)
                ends = load_row_ends(own, row, sizes, flags.VALUE, flags)
                content = content_product(q_past, q_future, k_rows, lag, bands, SIDE, TURNED, flags)
                logits, gain = tile_logits(
                    content, lag, row, key, start, own, ends, seen, sizes, bands, scale, is_past, SIDE, TURNED, flags
                )
                dweights = product(v_rows, tl.trans(dout_rows)) if TURNED else product(dout_rows, tl.trans(v_rows))
                weights, dlogits = tile_gradient(
                    logits, row_lse, row_delta, dweights, lag, row, key, start,
                    own, ends, sizes, bands, state, dropped, SIDE, TURNED, flags,
                )  # fmt: skip
                dv += product(by_key(weights.to(dout_rows.dtype), TURNED), dout_rows)
                if flags.KEY and has_past(SIDE, flags):
                    past_key += tl.sum(before(dlogits, lag, bands, SIDE), AXIS)
                if flags.KEY and has_future(SIDE, flags):
                    future_key += tl.sum(after(dlogits, lag, bands, SIDE), AXIS)
                if flags.GAIN:
                    dlogits = dlogits * gain
                if flags.CHANNELS:
                    if has_past(SIDE, flags):
                        dpast = before(dlogits, lag, bands, SIDE)
                        dk += product(by_key(dpast.to(q_rows.dtype), TURNED), q_past)
                    if has_future(SIDE, flags):
                        dfuture = after(dlogits, lag, bands, SIDE)
                        dk += product(by_key(dfuture.to(q_rows.dtype), TURNED), q_future)
                else:
                    dk += product(by_key(dlogits.to(q_rows.dtype), TURNED), q_rows)
    if flags.KEY and flags.FAR:
        tl.store(found.key_ends + base * 2 * keys + key, past_key, mask=key < keys)
        tl.store(found.key_ends + base * 2 * keys + keys + key, future_key, mask=key < keys)
    dk = dk * scale
    if flags.SIDES > 0:
        owner, once = head // group, head % group == 0
        at = tl.where(once, key, -1)
        dk += load_far(far.past_k, batch, owner, at, past_count, flags.head_dim, WIDTH)
        dv += load_far(far.past_v, batch, owner, at, past_count, flags.value_dim, VALUE_WIDTH)
    if flags.SIDES > 1:
        at = tl.where(once, keys - 1 - key, -1)
        dk += load_far(far.future_k, batch, owner, at, future_count, flags.head_dim, WIDTH)
        dv += load_far(far.future_v, batch, owner, at, future_count, flags.value_dim, VALUE_WIDTH)
    store_rows(head_of(found.k, batch, head), key, keys, found.k.time, dk, flags.head_dim, WIDTH)
    store_rows(head_of(found.v, batch, head), key, keys, found.v.time, dv, flags.value_dim, VALUE_WIDTH)
