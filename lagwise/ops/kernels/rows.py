"""Small kernels on rows: the normalisation's share of a gradient, and what `split` does with its three parts.

A far field has some rows of the call, [batch, heads, rows, ...]: the past's the last ones, the future's the first ones in reverse
order of time. Its tails are the first or the last column of a table, [heads or 1, lags, ...].
"""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

import triton
import triton.language as tl

from lagwise.ops.kernels.tiles import head_rows, load_gain, load_rows, store_rows


@triton.jit(do_not_specialize=["heads", "queries"])
def delta_kernel(
    Out, Dout, Dlse, Delta, dout_batch, dout_head, dout_time, heads, queries,
    value_dim: tl.constexpr, VALUE_WIDTH: tl.constexpr, ROWS: tl.constexpr, DLSE: tl.constexpr, OUT_BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Computes delta = dout . out - dlse per row."""
    index, count = tl.program_id(0), tl.cdiv(queries, ROWS)
    block, pair = index % count, index // count
    base = pair.to(tl.int64) * queries
    row = block * ROWS + tl.arange(0, ROWS)
    here = Dout + (pair // heads).to(tl.int64) * dout_batch + (pair % heads).to(tl.int64) * dout_head
    home, apart = head_rows(Out, pair, heads, queries, value_dim, OUT_BY_TOKEN)
    out = load_rows(home, row, queries, apart, value_dim, VALUE_WIDTH, False)
    dout = load_rows(here, row, queries, dout_time, value_dim, VALUE_WIDTH, False)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if DLSE:
        delta -= tl.load(Dlse + base + row, mask=row < queries, other=0.0)
    tl.store(Delta + base + row, delta, mask=row < queries)


@triton.jit
def far_index(row, queries, past_rows, future_rows, SIDE: tl.constexpr):
    """Returns where a far field has the rows: the past's has the last ones, the future's the first ones in reverse."""
    if SIDE == 0:
        return row - (queries - past_rows)
    else:
        return future_rows - 1 - row


@triton.jit
def tail_shift(
    TailBias, tail_bias_head, tail_bias_last, q, TailQuery, tail_query_head, tail_query_last, row, head, scale,
    head_dim: tl.constexpr, WIDTH: tl.constexpr, SIDE: tl.constexpr, BIAS: tl.constexpr, QUERY: tl.constexpr,
):  # fmt: skip
    """Returns what a side's tails add to the log-sum-exp of the rows, scale q . query + bias.

    Both passes compute it here, so that they weigh alike, rounding included.
    """
    shift = tl.zeros(row.shape, tl.float32)
    if QUERY:
        channel = tl.arange(0, WIDTH)
        tail = TailQuery + head * tail_query_head + SIDE * tail_query_last
        shift += scale * tl.sum(q * tl.load(tail + channel, mask=channel < head_dim, other=0.0).to(tl.float32)[None, :], 1)
    if BIAS:
        shift += tl.load(TailBias + head * tail_bias_head + SIDE * tail_bias_last).to(tl.float32)
    return shift


@triton.jit
def load_queries(
    RawQ, raw_q_batch, raw_q_head, raw_q_time, pair, heads, row, queries,
    head_dim: tl.constexpr, WIDTH: tl.constexpr, QUERY: tl.constexpr,
):  # fmt: skip
    """Loads the queries that a tail is multiplied with, in float32; where there is none, nothing."""
    if QUERY:
        here = RawQ + (pair // heads).to(tl.int64) * raw_q_batch + (pair % heads).to(tl.int64) * raw_q_head
        return load_rows(here, row, queries, raw_q_time, head_dim, WIDTH, False).to(tl.float32)
    else:
        return 0.0


@triton.jit
def load_field(
    FarOut, FarLse, TailValue, tail_value_head, tail_value_last, index, count, shift, pair, head,
    value_dim: tl.constexpr, VALUE_WIDTH: tl.constexpr, SIDE: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Loads a far field's output and log-sum-exp, with what its tails add to them; rows that it has not have minus infinity."""
    there = (index >= 0) & (index < count)
    base = pair.to(tl.int64) * count
    lse = tl.load(FarLse + base + index, mask=there, other=-float("inf")) + shift
    out = load_rows(FarOut + base * value_dim, index, count, value_dim, value_dim, VALUE_WIDTH, False).to(tl.float32)
    if VALUE:
        channel = tl.arange(0, VALUE_WIDTH)
        tail = TailValue + head * tail_value_head + SIDE * tail_value_last
        out += tl.load(tail + channel, mask=channel < value_dim, other=0.0).to(tl.float32)[None, :]
    return out, lse


ROW_NUMBERS = [
    "heads", "queries", "past_rows", "future_rows", "tail_bias_head", "tail_bias_last", "tail_query_head", "tail_query_last",
    "tail_value_head", "tail_value_last", "scale",
]  # fmt: skip


@triton.jit(do_not_specialize=ROW_NUMBERS)
def merge_kernel(
    Near, NearLse, PastOut, PastLse, FutureOut, FutureLse, Out, Lse, RawQ, TailBias, TailQuery, TailValue,
    raw_q_batch, raw_q_head, raw_q_time, heads, queries, past_rows, future_rows,
    tail_bias_head, tail_bias_last, tail_query_head, tail_query_last, tail_value_head, tail_value_last, scale,
    head_dim: tl.constexpr, value_dim: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, ROWS: tl.constexpr,
    SIDES: tl.constexpr, BIAS: tl.constexpr, QUERY: tl.constexpr, VALUE: tl.constexpr, OUT_BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Merges the near band with the far fields by their log-sum-exps.

    out = sum exp(lse_part - lse) out_part,      lse = log sum exp(lse_part)
    """
    index, count = tl.program_id(0), tl.cdiv(queries, ROWS)
    block, pair = index % count, index // count
    head = pair % heads
    base = pair.to(tl.int64) * queries
    row = block * ROWS + tl.arange(0, ROWS)
    there = row < queries
    lse = tl.load(NearLse + base + row, mask=there, other=-float("inf"))
    near, apart = head_rows(Near, pair, heads, queries, value_dim, OUT_BY_TOKEN)
    out = load_rows(near, row, queries, apart, value_dim, VALUE_WIDTH, False).to(tl.float32)
    q = load_queries(RawQ, raw_q_batch, raw_q_head, raw_q_time, pair, heads, row, queries, head_dim, WIDTH, QUERY)
    for SIDE in tl.static_range(SIDES):
        shift = tail_shift(
            TailBias, tail_bias_head, tail_bias_last, q, TailQuery, tail_query_head, tail_query_last, row, head, scale,
            head_dim, WIDTH, SIDE, BIAS, QUERY,
        )  # fmt: skip
        far_out, far_lse = load_field(
            PastOut if SIDE == 0 else FutureOut, PastLse if SIDE == 0 else FutureLse, TailValue, tail_value_head, tail_value_last,
            far_index(row, queries, past_rows, future_rows, SIDE), past_rows if SIDE == 0 else future_rows, shift, pair, head,
            value_dim, VALUE_WIDTH, SIDE, VALUE,
        )  # fmt: skip
        peak = tl.maximum(lse, far_lse)
        # A row that sees nothing has minus infinity everywhere.
        peak = tl.where(peak == -float("inf"), 0.0, peak)
        weight, far_weight = tl.exp(lse - peak), tl.exp(far_lse - peak)
        total = weight + far_weight
        some = tl.where(total > 0.0, total, 1.0)
        out = out * (weight / some)[:, None] + far_out * (far_weight / some)[:, None]
        lse = tl.where(total > 0.0, peak + tl.log(some), -float("inf"))
    merged, apart = head_rows(Out, pair, heads, queries, value_dim, OUT_BY_TOKEN)
    store_rows(merged, row, queries, apart, out, value_dim, VALUE_WIDTH)
    tl.store(Lse + base + row, lse, mask=there)


@triton.jit(do_not_specialize=ROW_NUMBERS)
def far_ends_kernel(
    Out, Lse, Dout, Dlse, PastOut, PastLse, FutureOut, FutureLse, RawQ, TailBias, TailQuery, TailValue,
    Delta, Changes, Masses, PlainPastLse, PlainFutureLse,
    dout_batch, dout_head, dout_time, raw_q_batch, raw_q_head, raw_q_time, heads, queries, past_rows, future_rows,
    tail_bias_head, tail_bias_last, tail_query_head, tail_query_last, tail_value_head, tail_value_last, scale,
    head_dim: tl.constexpr, value_dim: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, ROWS: tl.constexpr,
    SIDES: tl.constexpr, DLSE: tl.constexpr, BIAS: tl.constexpr, QUERY: tl.constexpr, VALUE: tl.constexpr,
    OUT_BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Computes delta of each row, and each far field's mass and sum of dlogit in it, both [batch, heads, queries, 2].

    delta = dout . out - dlse,      mass = exp(lse_far - lse),      change = mass * (dout . out_far - delta)

    `PlainPastLse` and `PlainFutureLse` get the log-sum-exp less the shift of a side, in its order of time: with it, plain
    attention has the weights of the whole softmax.
    """
    index, count = tl.program_id(0), tl.cdiv(queries, ROWS)
    block, pair = index % count, index // count
    head = pair % heads
    base = pair.to(tl.int64) * queries
    row = block * ROWS + tl.arange(0, ROWS)
    there = row < queries
    here = Dout + (pair // heads).to(tl.int64) * dout_batch + head.to(tl.int64) * dout_head
    dout = load_rows(here, row, queries, dout_time, value_dim, VALUE_WIDTH, False).to(tl.float32)
    merged, apart = head_rows(Out, pair, heads, queries, value_dim, OUT_BY_TOKEN)
    out = load_rows(merged, row, queries, apart, value_dim, VALUE_WIDTH, False).to(tl.float32)
    delta = tl.sum(dout * out, 1)
    if DLSE:
        delta -= tl.load(Dlse + base + row, mask=there, other=0.0)
    tl.store(Delta + base + row, delta, mask=there)
    lse = tl.load(Lse + base + row, mask=there, other=0.0)
    lse = tl.where(lse == -float("inf"), 0.0, lse)
    q = load_queries(RawQ, raw_q_batch, raw_q_head, raw_q_time, pair, heads, row, queries, head_dim, WIDTH, QUERY)
    for SIDE in tl.static_range(2):
        mass = tl.zeros([ROWS], tl.float32)
        change = tl.zeros([ROWS], tl.float32)
        if SIDE < SIDES:
            rows = past_rows if SIDE == 0 else future_rows
            at = far_index(row, queries, past_rows, future_rows, SIDE)
            shift = tail_shift(
                TailBias, tail_bias_head, tail_bias_last, q, TailQuery, tail_query_head, tail_query_last, row, head, scale,
                head_dim, WIDTH, SIDE, BIAS, QUERY,
            )  # fmt: skip
            far_out, far_lse = load_field(
                PastOut if SIDE == 0 else FutureOut, PastLse if SIDE == 0 else FutureLse, TailValue,
                tail_value_head, tail_value_last, at, rows, shift, pair, head, value_dim, VALUE_WIDTH, SIDE, VALUE,
            )  # fmt: skip
            mass = tl.exp(far_lse - lse)
            change = mass * (tl.sum(dout * far_out, 1) - delta)
            plain = PlainPastLse if SIDE == 0 else PlainFutureLse
            tl.store(plain + pair.to(tl.int64) * rows + at, lse - shift, mask=there & (at >= 0) & (at < rows))
        tl.store(Masses + 2 * (base + row) + SIDE, mass, mask=there)
        tl.store(Changes + 2 * (base + row) + SIDE, change, mask=there)


@triton.jit(do_not_specialize=["heads", "rows", "first", "end_gains_head", "tail_key_head"])
def far_queries_kernel(
    Q, FarQ, EndGains, TailKey, q_batch, q_head, q_time, heads, rows, first, end_gains_head, tail_key_head,
    head_dim: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    GAIN: tl.constexpr, CHANNELS: tl.constexpr, KEY: tl.constexpr,
):  # fmt: skip
    """Computes the queries that make a far field plain attention, gain * q + key, from row `first` on in steps of 1 or -1."""
    index, count = tl.program_id(0), tl.cdiv(rows, ROWS)
    block, pair = index % count, index // count
    head = pair % heads
    row = block * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, WIDTH)
    here = Q + (pair // heads).to(tl.int64) * q_batch + head.to(tl.int64) * q_head
    there = (row < rows)[:, None] & (channel < head_dim)[None, :]
    at = first + STEP * row
    q = tl.load(here + at.to(tl.int64)[:, None] * q_time + channel[None, :], mask=there, other=0.0).to(tl.float32)
    q *= load_gain(EndGains + head * end_gains_head, head_dim, WIDTH, GAIN, CHANNELS)
    if KEY:
        q += tl.load(TailKey + head * tail_key_head + channel, mask=channel < head_dim, other=0.0).to(tl.float32)[None, :]
    store_rows(FarQ + pair.to(tl.int64) * rows * head_dim, row, rows, head_dim, q, head_dim, WIDTH)
