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
from lagwise.ops.kernels.arguments import Bands, KeyGradients, QueryGradients, Sizes, view
from lagwise.ops.kernels.bias_gradient import diagonal_sums, scalar_gradients
from lagwise.ops.kernels.channel_gain import channel_ends, channel_gradients
from lagwise.ops.kernels.logits import (
    NUMBERS,
    content_product,
    end_queries,
    head_pointers,
    key_range,
    load_statistics,
    near_stretch,
    query_start_of,
    tile_gradient,
    tile_logits,
)
from lagwise.ops.kernels.plan import Plan, blocks
from lagwise.ops.kernels.scores import add_ends, ends_of, per_pair, products, score, summed_products
from lagwise.ops.kernels.tiles import (
    FUTURE,
    NEAR,
    PAST,
    after,
    before,
    clear_scores,
    dropout_state,
    head_of,
    head_rows,
    load_gain,
    load_keys,
    load_rows,
    place_of,
    product,
    put_lag_scores,
    store_ends,
    store_rows,
)
from lagwise.ops.lowering import empty_laid_out
from lagwise.terms import Terms


@triton.jit
def load_far(x, batch, head, index, count, dim: tl.constexpr, WIDTH: tl.constexpr):
    """Loads rows of a gradient that others computed for a far field, [batch, heads, count, dim], zero where it has none."""
    return load_rows(head_of(x, batch, head), index, count, x.time, dim, WIDTH, False).to(tl.float32)


@triton.jit(do_not_specialize=NUMBERS)
def query_gradient_kernel(
    q, k, v, dout, lse, delta, found, far, tables, scores, seen,
    heads, group, queries, keys, query_start, first, last, near_first, near_last, low, high,
    band_first, band_lags, value_first, value_lags, past_count, future_count, scale, dropped, flags: tl.constexpr,
):  # fmt: skip
    """Computes for a block of queries dq, the gradients of its scores and ends, and its shares of the scalar tables' ends.

    dq = scale sum_j gain(n) dlogit(i, j) k_j

    Gradients are written over the scores, those of queries and those of keys, and weights over the value scores, which nobody
    needs any more.

    Where SIDES far fields were computed by others, their dq, of the gain of its end column times q, comes in too: the past's for
    the last `past_count` queries, the future's for the first `future_count`, in reverse order of time.

    `found.scalar_ends`, [batch, heads, 3, queries, 2], gets the sums of dlogit, of dlogit times content and of dlogit times the
    distance beyond the end, before `low` and after `high`.
    """
    ROWS: tl.constexpr = flags.ROWS
    WIDTH: tl.constexpr = flags.WIDTH
    sizes = Sizes(heads, group, queries, keys, first, last)
    bands = Bands(near_first, near_last, low, high, band_first, band_lags, value_first, value_lags)
    block, pair, batch, head = place_of(queries, heads, ROWS)
    base = pair.to(tl.int64)
    row_start = block * ROWS
    row = row_start + tl.arange(0, ROWS)
    start = query_start_of(seen, batch, query_start, flags)
    own = head_pointers(tables, scores, seen, pair, sizes, bands, flags)
    K, V = head_of(k, batch, head // group), head_of(v, batch, head // group)
    DKeyScores = found.key_scores + base * keys * band_lags
    begin, near, beyond, end = key_range(row_start, start, batch, seen, sizes, bands, flags)
    state = dropout_state(seen.seed, batch, head) if flags.DROPOUT else 0

    q_rows = load_rows(head_of(q, batch, head), row, queries, q.time, flags.head_dim, WIDTH, flags.WHOLE)
    dout_rows = load_rows(head_of(dout, batch, head), row, queries, dout.time, flags.value_dim, flags.VALUE_WIDTH, flags.WHOLE)
    row_lse, row_delta = load_statistics(lse + base * queries, delta + base * queries, row, queries, PAST)
    q_past, q_future, past_gain, future_gain = end_queries(q_rows, own.gain, flags)
    if flags.CHANNELS:
        dq_future = tl.zeros([ROWS, WIDTH], tl.float32)
    dq = tl.zeros([ROWS, WIDTH], tl.float32)
    past_bias, future_bias = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    past_gains, future_gains = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    past_slope, future_slope = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    past_query, future_query = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    past_mass, future_mass = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for SIDE in tl.static_range(3):
        if flags.FAR or SIDE == NEAR:
            lower = begin if SIDE == PAST else (near if SIDE == NEAR else beyond)
            upper = near if SIDE == PAST else (beyond if SIDE == NEAR else end)
            for key_start in range(lower, upper, flags.KEYS):
                key = key_start + tl.arange(0, flags.KEYS)
                lag = key[None, :] - row[:, None] - start
                k_rows = load_keys(K, own.key_mask, key, keys, k.time, flags.head_dim, WIDTH, flags.WHOLE, flags.HIDE)
                v_rows = load_keys(
                    V, own.key_mask, key, keys, v.time, flags.value_dim, flags.VALUE_WIDTH, flags.WHOLE, flags.HIDE
                )
                content = content_product(q_past, q_future, tl.trans(k_rows), lag, bands, SIDE, flags)
                logits, gain = tile_logits(
                    content, lag, row[:, None], key[None, :], own, seen, sizes, bands, scale,
                    SIDE, flags.NEAR_MASKED if SIDE == NEAR else flags.FAR_MASKED, not flags.WHOLE, flags.SLOPES, flags,
                )  # fmt: skip
                weights, dlogits = tile_gradient(
                    logits, row_lse, row_delta, product(dout_rows, tl.trans(v_rows)), lag, row[:, None], key[None, :],
                    own, sizes, bands, state, dropped, SIDE, flags,
                )  # fmt: skip
                if flags.VALUE:
                    if SIDE == PAST:
                        past_mass += tl.sum(weights, 1)
                    elif SIDE == FUTURE:
                        future_mass += tl.sum(weights, 1)
                    else:
                        past_mass += tl.sum(before(weights, lag, value_first), 1)
                        future_mass += tl.sum(after(weights, lag, value_first + value_lags - 1), 1)
                        put_lag_scores(own.value_scores, row[:, None], queries, lag, value_first, value_lags, weights)
                if flags.SCORES and SIDE == NEAR:
                    put_lag_scores(own.band, row[:, None], queries, lag, band_first, band_lags, dlogits)
                if flags.KEY and SIDE == NEAR:
                    put_lag_scores(DKeyScores, key[None, :], keys, lag, band_first, band_lags, dlogits)
                if flags.QUERY and flags.FAR:
                    if SIDE == PAST:
                        past_query += tl.sum(dlogits, 1)
                    elif SIDE == FUTURE:
                        future_query += tl.sum(dlogits, 1)
                    else:
                        past_query += tl.sum(before(dlogits, lag, band_first), 1)
                        future_query += tl.sum(after(dlogits, lag, band_first + band_lags - 1), 1)
                if (flags.BIAS or flags.GAIN) and flags.FAR:
                    if SIDE != FUTURE:
                        dpast = dlogits if SIDE == PAST else before(dlogits, lag, low)
                        if flags.BIAS:
                            past_bias += tl.sum(dpast, 1)
                        if flags.SLOPES:
                            past_slope += tl.sum(dpast * (lag - low).to(tl.float32), 1)
                        if flags.GAIN:
                            past_gains += tl.sum(dpast * content, 1)
                    if SIDE != PAST:
                        dfuture = dlogits if SIDE == FUTURE else after(dlogits, lag, high)
                        if flags.BIAS:
                            future_bias += tl.sum(dfuture, 1)
                        if flags.SLOPES:
                            future_slope += tl.sum(dfuture * (lag - high).to(tl.float32), 1)
                        if flags.GAIN:
                            future_gains += tl.sum(dfuture * content, 1)
                if flags.GAIN:
                    dlogits = dlogits * gain
                if flags.CHANNELS:
                    if SIDE != FUTURE:
                        dpast = dlogits if SIDE == PAST else before(dlogits, lag, band_first)
                        dq += product(dpast.to(k_rows.dtype), k_rows)
                    if SIDE != PAST:
                        dfuture = dlogits if SIDE == FUTURE else after(dlogits, lag, band_first + band_lags - 1)
                        dq_future += product(dfuture.to(k_rows.dtype), k_rows)
                else:
                    dq += product(dlogits.to(k_rows.dtype), k_rows)
    if flags.CHANNELS:
        channel = tl.arange(0, WIDTH)
        entry = found.gain_ends + (base * tl.cdiv(queries, ROWS) + block) * 2 * WIDTH
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
    home, apart = head_rows(found.q, pair, heads, queries, flags.head_dim, flags.DQ_BY_TOKEN)
    store_rows(home, row, queries, apart, dq, flags.head_dim, WIDTH)
    if flags.SCORES:
        clear_scores(own.band, row, queries, 1, start + band_first, near, beyond, band_lags, band_lags, 0.0, flags.KEYS)
    if flags.VALUE:
        clear_scores(
            own.value_scores, row, queries, 1, start + value_first, near, beyond, value_lags, value_lags, 0.0, flags.KEYS
        )
    if flags.VALUE and flags.FAR:
        store_ends(found.value_masses + base * 2 * queries, row, queries, past_mass, future_mass)
    if flags.QUERY and flags.FAR:
        store_ends(found.query_ends + base * 2 * queries, row, queries, past_query, future_query)
    DScalarEnds = found.scalar_ends + base * 6 * queries
    if flags.BIAS and flags.FAR:
        store_ends(DScalarEnds, row, queries, past_bias, future_bias)
    if flags.GAIN and flags.FAR:
        store_ends(DScalarEnds + 2 * queries, row, queries, past_gains * scale, future_gains * scale)
    if flags.SLOPES:
        store_ends(DScalarEnds + 4 * queries, row, queries, past_slope, future_slope)


@triton.jit(do_not_specialize=NUMBERS)
def key_gradient_kernel(
    q, k, v, dout, lse, delta, found, far, tables, scores, seen,
    heads, group, queries, keys, query_start, first, last, near_first, near_last, low, high,
    band_first, band_lags, value_first, value_lags, past_count, future_count, scale, dropped, flags: tl.constexpr,
):  # fmt: skip
    """Computes for a block of keys dk and dv, from one query head, and the gradients of their ends; those of scores are zero
    where a key has no query, and the queries' kernel knows the others.

    dk_j = scale sum_i gain(n) dlogit(i, j) q_i,   dv_j = sum_i p(i, j) dout_i

    Seen from a key, queries of the far future come first: their keys' lags are the largest. Key heads that several query heads
    share get their sum on the host: a loop over them here would spill registers.

    Where SIDES far fields were computed by others, their dk and dv come in too, once per key head: the past's for the first
    `past_count` keys, the future's for the last `future_count`, in reverse order of time.
    """
    ROWS: tl.constexpr = flags.ROWS
    KEYS: tl.constexpr = flags.KEYS
    WIDTH: tl.constexpr = flags.WIDTH
    VALUE_WIDTH: tl.constexpr = flags.VALUE_WIDTH
    sizes = Sizes(heads, group, queries, keys, first, last)
    bands = Bands(near_first, near_last, low, high, band_first, band_lags, value_first, value_lags)
    block, pair, batch, head = place_of(keys, heads, KEYS)
    base = pair.to(tl.int64)
    key_start = block * KEYS
    key = key_start + tl.arange(0, KEYS)
    start = query_start_of(seen, batch, query_start, flags)
    own = head_pointers(tables, scores, seen, pair, sizes, bands, flags)
    Q, Dout = head_of(q, batch, head), head_of(dout, batch, head)
    begin = tl.maximum(key_start - start - last, 0)
    end = tl.minimum(key_start + KEYS - start - first, queries)
    if flags.PACKED:
        begin = tl.maximum(begin, tl.load(seen.sequence_start + key_start))
        end = tl.minimum(end, tl.load(seen.sequence_end + tl.minimum(key_start + KEYS, keys) - 1))
    begin = begin // ROWS * ROWS
    near, beyond = near_stretch(
        begin, end, key_start - ROWS - start - near_last, key_start + KEYS - start - near_first,
        flags.FAR, ROWS,
    )  # fmt: skip
    state = dropout_state(seen.seed, batch, head) if flags.DROPOUT else 0

    k_rows = load_rows(head_of(k, batch, head // group), key, keys, k.time, flags.head_dim, WIDTH, flags.WHOLE)
    v_rows = load_keys(
        head_of(v, batch, head // group), own.key_mask, key, keys, v.time,
        flags.value_dim, VALUE_WIDTH, flags.WHOLE, flags.HIDE,
    )  # fmt: skip
    dk = tl.zeros([KEYS, WIDTH], tl.float32)
    dv = tl.zeros([KEYS, VALUE_WIDTH], tl.float32)
    # Sums over queries go across warps; as a product with ones they cost less.
    ones = tl.full([ROWS, 16], 1.0, Q.dtype.element_ty)
    past_key, future_key = tl.zeros([KEYS, 16], tl.float32), tl.zeros([KEYS, 16], tl.float32)
    for SIDE in tl.static_range(2, -1, -1):
        if flags.FAR or SIDE == NEAR:
            lower = begin if SIDE == FUTURE else (near if SIDE == NEAR else beyond)
            upper = near if SIDE == FUTURE else (beyond if SIDE == NEAR else end)
            for row_start in range(lower, upper, ROWS):
                row = row_start + tl.arange(0, ROWS)
                lag = key[None, :] - row[:, None] - start
                q_rows = load_rows(Q, row, queries, q.time, flags.head_dim, WIDTH, flags.WHOLE)
                dout_rows = load_rows(Dout, row, queries, dout.time, flags.value_dim, VALUE_WIDTH, flags.WHOLE)
                row_lse, row_delta = load_statistics(lse + base * queries, delta + base * queries, row, queries, SIDE)
                q_past, q_future, _past, _future = end_queries(q_rows, own.gain, flags)
                content = content_product(q_past, q_future, tl.trans(k_rows), lag, bands, SIDE, flags)
                logits, gain = tile_logits(
                    content, lag, row[:, None], key[None, :], own, seen, sizes, bands, scale,
                    SIDE, flags.NEAR_MASKED if SIDE == NEAR else flags.FAR_MASKED, not flags.WHOLE, flags.SLOPES, flags,
                )  # fmt: skip
                weights, dlogits = tile_gradient(
                    logits, row_lse, row_delta, product(dout_rows, tl.trans(v_rows)), lag, row[:, None], key[None, :],
                    own, sizes, bands, state, dropped, SIDE, flags,
                )  # fmt: skip
                dv += product(tl.trans(weights.to(dout_rows.dtype)), dout_rows)
                if flags.KEY and flags.FAR:
                    if SIDE != FUTURE:
                        dpast = dlogits if SIDE == PAST else before(dlogits, lag, band_first)
                        past_key += product(tl.trans(dpast.to(q_rows.dtype)), ones)
                    if SIDE != PAST:
                        dfuture = dlogits if SIDE == FUTURE else after(dlogits, lag, band_first + band_lags - 1)
                        future_key += product(tl.trans(dfuture.to(q_rows.dtype)), ones)
                if flags.GAIN:
                    dlogits = dlogits * gain
                if flags.CHANNELS:
                    if SIDE != FUTURE:
                        dpast = dlogits if SIDE == PAST else before(dlogits, lag, band_first)
                        dk += product(tl.trans(dpast.to(q_rows.dtype)), q_past)
                    if SIDE != PAST:
                        dfuture = dlogits if SIDE == FUTURE else after(dlogits, lag, band_first + band_lags - 1)
                        dk += product(tl.trans(dfuture.to(q_rows.dtype)), q_future)
                else:
                    dk += product(tl.trans(dlogits.to(q_rows.dtype)), q_rows)
    if flags.KEY:
        DKeyScores = found.key_scores + base * keys * band_lags
        clear_scores(DKeyScores, key, keys, -1, start + band_first, 0, queries, last - band_first + 1, band_lags, 0.0, ROWS)
    if flags.KEY and flags.FAR:
        past, future = tl.sum(past_key, 1) / 16.0, tl.sum(future_key, 1) / 16.0
        store_ends(found.key_ends + base * 2 * keys, key, keys, past, future)
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
    home, apart = head_rows(found.k, pair, heads, keys, flags.head_dim, flags.DK_BY_TOKEN)
    store_rows(home, key, keys, apart, dk, flags.head_dim, WIDTH)
    home, apart = head_rows(found.v, pair, heads, keys, flags.value_dim, flags.DK_BY_TOKEN)
    store_rows(home, key, keys, apart, dv, flags.value_dim, VALUE_WIDTH)


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
    given: dict[str, Any] = {"dout": view(dout), "lse": lse, "delta": delta}
    if plan.tables.value is not None:
        value_scores = products(dout, plan.table_values.value, plan.room)
        plan.scores = plan.scores._replace(value=value_scores, value_ends=ends_of(value_scores))
    sums = diagonal_sums(plan, given)
    dkey_scores = plan.scores.key
    # Gradients stand where the scores were, unless there are columns or pairs that no program looks at.
    if plan.tables.key is not None and (plan.band_first < plan.first or plan.flags["MASK"] or plan.flags["PACKED"]):
        dkey_scores = torch.zeros_like(dkey_scores)
    found, key_ends = _key_gradients(plan, given, dkey_scores)
    found["q"], rows = _query_gradients(plan, given, dkey_scores)
    if plan.tables.value is not None and tables.value is not None:
        weights = add_ends(plan.scores.value, rows.value_masses if far is None else far.masses)
        plan.tables.value.fold(summed_products(weights, dout, tables.value.heads), plan.value_first, tables.value)
    if plan.scored:
        _score_gradients(plan, dkey_scores, key_ends, rows.query_ends if far is None else far.changes, found, tables)
    if plan.channels:
        channel_ends(plan, rows.gain_ends, tables)
    scalar_gradients(plan, sums, rows.scalar_ends if far is None else far.changes[:, :, None], tables)
    return found, tables


def _add(found: dict[str, Tensor], name: str, raw: Tensor | None, dscores: Tensor, table: Tensor, scale: float) -> None:
    """Adds scores' share of the gradient of the raw q or k to that of the transformed one where they are the same tensor."""
    if raw is not None:
        found[f"raw_{name}"] = scale * (dscores @ table)
    elif len(table) == 1:
        found[name].flatten(0, 2).addmm_(dscores.flatten(0, 2), table[0], alpha=scale)
    else:
        found[name].flatten(0, 1).baddbmm_(dscores.flatten(0, 1), per_pair(table, dscores), alpha=scale)


def _key_gradients(plan: Plan, given: dict[str, Any], dkey_scores: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
    """Returns dk and dv per query head, and the gradients of the keys' ends, which a band has not."""
    shape, by_token = (plan.batch, plan.heads, plan.keys), plan.flags["DK_BY_TOKEN"]
    dk, dv = (empty_laid_out(by_token, x, *shape, x.shape[3]) for x in (plan.k, plan.v))
    ends = None
    if plan.tables.key is not None and plan.only is None:
        ends = torch.empty(*shape, 2, dtype=torch.float32, device=dk.device)
    found = KeyGradients(dk, dv, dkey_scores, dk if ends is None else ends)
    plan.launch(key_gradient_kernel, "key", found=found, far=plan.far_keys, **plan.far_key_counts, **given)
    return {"k": dk, "v": dv}, ends


def _query_gradients(plan: Plan, given: dict[str, Any], dkey_scores: Tensor) -> tuple[Tensor, QueryGradients]:
    """Returns dq and what the same kernel finds for the ends of the tables; scores turn into their gradients."""
    lse = given["lse"]
    dq = empty_laid_out(plan.flags["DQ_BY_TOKEN"], plan.q, *plan.q.shape)

    def ends(*shape: int) -> Tensor:
        # Those of a band are none.
        if plan.only is not None:
            return dq
        return torch.empty(*lse.shape[:2], *shape, lse.shape[2], 2, dtype=torch.float32, device=lse.device)

    gain_ends = dq
    if plan.channels:
        count = blocks(plan.queries, plan.tile("query")[0])
        gain_ends = torch.empty(*lse.shape[:2], count, 2, plan.flags["WIDTH"], device=lse.device)
    found = QueryGradients(dq, dkey_scores, ends(), ends(), ends(3), gain_ends)
    plan.launch(query_gradient_kernel, "query", found=found, far=plan.far_queries, **plan.far_query_counts, **given)
    return dq, found


def _score_gradients(
    plan: Plan, dkey_scores: Tensor, key_ends: Tensor | None, query_ends: Tensor, found: dict[str, Tensor], tables: Terms
) -> None:
    """Adds the gradients of the tables behind the scores, and their shares of dq and dk."""
    scale = plan.call.scale
    if plan.tables.key is not None and tables.key is not None:
        if key_ends is not None:
            add_ends(dkey_scores, key_ends)
        gradient = scale * summed_products(dkey_scores, per_query_head(plan.raw_k, plan.heads), tables.key.heads)
        plan.tables.key.fold(gradient, plan.band_first, tables.key)
        _add(found, "k", plan.lowered.raw_k, dkey_scores, plan.table("key"), scale)
    dscores = plan.scores.band
    if plan.channels:
        channel_gradients(plan, found, tables)
    if plan.tables.query is not None and tables.query is not None:
        add_ends(dscores, query_ends)
        gradient = scale * summed_products(dscores, plan.raw_q, tables.query.heads)
        plan.tables.query.fold(gradient, plan.band_first, tables.query)
        _add(found, "q", plan.lowered.raw_q, dscores, plan.table("query"), scale)
