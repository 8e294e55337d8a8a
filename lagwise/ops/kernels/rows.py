"""Small kernels on rows: the normalisation's share of a gradient, and what `split` does with its three parts.

A far field has some rows of the call, [batch, heads, rows, ...]: the past's the last ones, the future's the first ones in reverse
order of time. Its tails are the first or the last column of a table, [heads or 1, lags, ...].
"""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lagwise.ops.kernels.tiles import head_of, head_rows, load_gain, load_rows, place_of, store_rows


class FarFields(NamedTuple):
    """Outputs and log-sum-exps of the far fields, without what their tails add."""

    past_out: Any
    past_lse: Any
    future_out: Any
    future_lse: Any


class Tails(NamedTuple):
    """Tables whose first and last columns are tails; any tensor stands for one that a call has not."""

    bias: Any
    query: Any
    value: Any


class TailSteps(NamedTuple):
    """How far apart heads and the first and the last column are in the tables of `Tails`."""

    bias_head: Any
    bias_last: Any
    query_head: Any
    query_last: Any
    value_head: Any
    value_last: Any


@triton.jit(do_not_specialize=["heads", "queries"])
def delta_kernel(out, dout, dlse, delta, heads, queries, flags: tl.constexpr):
    """Computes delta = dout . out - dlse per row."""
    block, pair, batch, head = place_of(queries, heads, flags.ROWS)
    base = pair.to(tl.int64) * queries
    row = block * flags.ROWS + tl.arange(0, flags.ROWS)
    home, apart = head_rows(out, pair, heads, queries, flags.value_dim, flags.OUT_BY_TOKEN)
    out_rows = load_rows(home, row, queries, apart, flags.value_dim, flags.VALUE_WIDTH, False)
    here = head_of(dout, batch, head)
    dout_rows = load_rows(here, row, queries, dout.time, flags.value_dim, flags.VALUE_WIDTH, False)
    found = tl.sum(out_rows.to(tl.float32) * dout_rows.to(tl.float32), 1)
    if flags.DLSE:
        found -= tl.load(dlse + base + row, mask=row < queries, other=0.0)
    tl.store(delta + base + row, found, mask=row < queries)


@triton.jit
def far_index(row, queries, past_rows, future_rows, SIDE: tl.constexpr):
    """Returns where a far field has the rows: the past's has the last ones, the future's the first ones in reverse."""
    if SIDE == 0:
        return row - (queries - past_rows)
    else:
        return future_rows - 1 - row


@triton.jit
def tail_shift(q, row, head, scale, tails, steps, SIDE: tl.constexpr, flags: tl.constexpr):
    """Returns what a side's tails add to the log-sum-exp of the rows, scale q . query + bias.

    Both passes compute it here, so that they weigh alike, rounding included.
    """
    shift = tl.zeros(row.shape, tl.float32)
    if flags.QUERY:
        channel = tl.arange(0, flags.WIDTH)
        tail = tails.query + head * steps.query_head + SIDE * steps.query_last
        vector = tl.load(tail + channel, mask=channel < flags.head_dim, other=0.0).to(tl.float32)
        shift += scale * tl.sum(q * vector[None, :], 1)
    if flags.BIAS:
        shift += tl.load(tails.bias + head * steps.bias_head + SIDE * steps.bias_last).to(tl.float32)
    return shift


@triton.jit
def load_queries(raw_q, pair, heads, row, queries, flags: tl.constexpr):
    """Loads the queries that a tail is multiplied with, in float32; where there is none, nothing."""
    if flags.QUERY:
        here = head_of(raw_q, pair // heads, pair % heads)
        return load_rows(here, row, queries, raw_q.time, flags.head_dim, flags.WIDTH, False).to(tl.float32)
    else:
        return 0.0


@triton.jit
def load_field(far, index, count, shift, pair, head, tails, steps, SIDE: tl.constexpr, flags: tl.constexpr):
    """Loads a far field's output and log-sum-exp, with what its tails add to them; rows that it has not have minus infinity."""
    FarOut, FarLse = far.past_out if SIDE == 0 else far.future_out, far.past_lse if SIDE == 0 else far.future_lse
    there = (index >= 0) & (index < count)
    base = pair.to(tl.int64) * count
    lse = tl.load(FarLse + base + index, mask=there, other=-float("inf")) + shift
    home = FarOut + base * flags.value_dim
    out = load_rows(home, index, count, flags.value_dim, flags.value_dim, flags.VALUE_WIDTH, False).to(tl.float32)
    if flags.VALUE:
        channel = tl.arange(0, flags.VALUE_WIDTH)
        tail = tails.value + head * steps.value_head + SIDE * steps.value_last
        out += tl.load(tail + channel, mask=channel < flags.value_dim, other=0.0).to(tl.float32)[None, :]
    return out, lse


ROW_NUMBERS = ["heads", "queries", "past_rows", "future_rows", *TailSteps._fields, "scale"]


@triton.jit(do_not_specialize=ROW_NUMBERS)
def merge_kernel(
    near, near_lse, far, out, lse, raw_q, tails, heads, queries, past_rows, future_rows,
    bias_head, bias_last, query_head, query_last, value_head, value_last, scale, flags: tl.constexpr,
):  # fmt: skip
    """Merges the near band with the far fields by their log-sum-exps.

    out = sum exp(lse_part - lse) out_part,      lse = log sum exp(lse_part)
    """
    SIDES: tl.constexpr = flags.SIDES
    steps = TailSteps(bias_head, bias_last, query_head, query_last, value_head, value_last)
    block, pair, _batch, head = place_of(queries, heads, flags.ROWS)
    base = pair.to(tl.int64) * queries
    row = block * flags.ROWS + tl.arange(0, flags.ROWS)
    there = row < queries
    total_lse = tl.load(near_lse + base + row, mask=there, other=-float("inf"))
    home, apart = head_rows(near, pair, heads, queries, flags.value_dim, flags.OUT_BY_TOKEN)
    sums = load_rows(home, row, queries, apart, flags.value_dim, flags.VALUE_WIDTH, False).to(tl.float32)
    q = load_queries(raw_q, pair, heads, row, queries, flags)
    for SIDE in tl.static_range(SIDES):
        shift = tail_shift(q, row, head, scale, tails, steps, SIDE, flags)
        at = far_index(row, queries, past_rows, future_rows, SIDE)
        far_out, far_lse = load_field(
            far, at, past_rows if SIDE == 0 else future_rows, shift, pair, head, tails, steps, SIDE, flags
        )
        peak = tl.maximum(total_lse, far_lse)
        # A row that sees nothing has minus infinity everywhere.
        peak = tl.where(peak == -float("inf"), 0.0, peak)
        weight, far_weight = tl.exp(total_lse - peak), tl.exp(far_lse - peak)
        total = weight + far_weight
        some = tl.where(total > 0.0, total, 1.0)
        sums = sums * (weight / some)[:, None] + far_out * (far_weight / some)[:, None]
        total_lse = tl.where(total > 0.0, peak + tl.log(some), -float("inf"))
    home, apart = head_rows(out, pair, heads, queries, flags.value_dim, flags.OUT_BY_TOKEN)
    store_rows(home, row, queries, apart, sums, flags.value_dim, flags.VALUE_WIDTH)
    tl.store(lse + base + row, total_lse, mask=there)


class FarShares(NamedTuple):
    """What `far_ends_kernel` writes, see there."""

    delta: Any
    changes: Any
    masses: Any
    past_lse: Any
    future_lse: Any


@triton.jit(do_not_specialize=ROW_NUMBERS)
def far_ends_kernel(
    out, lse, dout, dlse, far, found, raw_q, tails, heads, queries, past_rows, future_rows,
    bias_head, bias_last, query_head, query_last, value_head, value_last, scale, flags: tl.constexpr,
):  # fmt: skip
    """Computes delta of each row, and each far field's mass and sum of dlogit in it, both [batch, heads, 2, queries].

    delta = dout . out - dlse,      mass = exp(lse_far - lse),      change = mass * (dout . out_far - delta)

    `found.past_lse` and `found.future_lse` get the log-sum-exp less the shift of a side, in its order of time: with it, plain
    attention has the weights of the whole softmax.
    """
    ROWS: tl.constexpr = flags.ROWS
    steps = TailSteps(bias_head, bias_last, query_head, query_last, value_head, value_last)
    block, pair, batch, head = place_of(queries, heads, ROWS)
    base = pair.to(tl.int64) * queries
    row = block * ROWS + tl.arange(0, ROWS)
    there = row < queries
    here = head_of(dout, batch, head)
    dout_rows = load_rows(here, row, queries, dout.time, flags.value_dim, flags.VALUE_WIDTH, False).to(tl.float32)
    home, apart = head_rows(out, pair, heads, queries, flags.value_dim, flags.OUT_BY_TOKEN)
    out_rows = load_rows(home, row, queries, apart, flags.value_dim, flags.VALUE_WIDTH, False).to(tl.float32)
    delta = tl.sum(dout_rows * out_rows, 1)
    if flags.DLSE:
        delta -= tl.load(dlse + base + row, mask=there, other=0.0)
    tl.store(found.delta + base + row, delta, mask=there)
    row_lse = tl.load(lse + base + row, mask=there, other=0.0)
    row_lse = tl.where(row_lse == -float("inf"), 0.0, row_lse)
    q = load_queries(raw_q, pair, heads, row, queries, flags)
    for SIDE in tl.static_range(2):
        mass = tl.zeros([ROWS], tl.float32)
        change = tl.zeros([ROWS], tl.float32)
        if SIDE < flags.SIDES:
            rows = past_rows if SIDE == 0 else future_rows
            at = far_index(row, queries, past_rows, future_rows, SIDE)
            shift = tail_shift(q, row, head, scale, tails, steps, SIDE, flags)
            far_out, far_lse = load_field(far, at, rows, shift, pair, head, tails, steps, SIDE, flags)
            mass = tl.exp(far_lse - row_lse)
            change = mass * (tl.sum(dout_rows * far_out, 1) - delta)
            plain = found.past_lse if SIDE == 0 else found.future_lse
            tl.store(plain + pair.to(tl.int64) * rows + at, row_lse - shift, mask=there & (at >= 0) & (at < rows))
        tl.store(found.masses + 2 * base + SIDE * queries + row, mass, mask=there)
        tl.store(found.changes + 2 * base + SIDE * queries + row, change, mask=there)


@triton.jit(do_not_specialize=["heads", "rows", "first", "gains_head", "tail_key_head"])
def far_queries_kernel(
    q, found, end_gains, tail_key, heads, rows, first, gains_head, tail_key_head, FUTURE: tl.constexpr, flags: tl.constexpr
):  # fmt: skip
    """Computes the queries that make a far field plain attention, gain * q + key, from row `first` on, FUTURE ones backwards."""
    block, pair, batch, head = place_of(rows, heads, flags.ROWS)
    row = block * flags.ROWS + tl.arange(0, flags.ROWS)
    channel = tl.arange(0, flags.WIDTH)
    there = (row < rows)[:, None] & (channel < flags.head_dim)[None, :]
    at = first - row if FUTURE else first + row
    here = head_of(q, batch, head) + at.to(tl.int64)[:, None] * q.time + channel[None, :]
    changed = tl.load(here, mask=there, other=0.0).to(tl.float32)
    changed *= load_gain(end_gains + head * gains_head, flags.head_dim, flags.WIDTH, flags.GAIN, flags.CHANNELS)
    if flags.KEY:
        vector = tl.load(tail_key + head * tail_key_head + channel, mask=channel < flags.head_dim, other=0.0)
        changed += vector.to(tl.float32)[None, :]
    home = found + pair.to(tl.int64) * rows * flags.head_dim
    store_rows(home, row, rows, flags.head_dim, changed, flags.head_dim, flags.WIDTH)


@triton.jit(do_not_specialize=["count", "time", "apart"])
def segments_kernel(
    ends, lengths, query_ends, key_ends, count, time, apart,
    PACKED: tl.constexpr, MIRRORED: tl.constexpr, WHOLE: tl.constexpr, REST: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Cuts the tokens of a batch into the runs of a far field: for each sequence its own, between runs that see nothing.

    A sequence has the tokens from `start` to `stop`, in the field's order of time, and its keys from `first` to `last`.

        WHOLE     every query and every key
        REST      queries at least `apart` after the last key, and every key: those of padding
        else      a square below the diagonal: queries from `apart` on, and as many keys
    """
    number = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    there = number < count
    if PACKED:
        at = count - 1 - number if MIRRORED else number
        before, after = tl.load(ends + at, mask=there, other=0), tl.load(ends + at + 1, mask=there, other=0)
        start, stop = (time - after, time - before) if MIRRORED else (before, after)
        first, last = start, stop
    else:
        length = tl.load(lengths + number, mask=there, other=0)
        start = number * time
        stop = start + time
        first, last = (stop - length, stop) if MIRRORED else (start, start + length)
    if WHOLE:
        query, query_stop, key, key_stop = start, stop, first, last
    elif REST:
        query, query_stop, key, key_stop = tl.minimum(last + apart, stop), stop, first, last
    elif MIRRORED:
        # Where a sequence has no square, its place is one that leaves no run between squares longer than the time axis.
        key_stop = tl.maximum(stop - apart, start)
        key = tl.minimum(first, key_stop)
        query, query_stop = stop - (key_stop - key), stop
    else:
        query, query_stop = tl.minimum(start + apart, stop), tl.minimum(last + apart, stop)
        key, key_stop = start, start + (query_stop - query)
    # Run 3n has the queries before the square of sequence n, run 3n + 1 the keys before it, and run 3n + 2 is the square.
    tl.store(query_ends + 3 * number + 1, query.to(tl.int32), mask=there)
    tl.store(query_ends + 3 * number + 2, query.to(tl.int32), mask=there)
    tl.store(query_ends + 3 * number + 3, query_stop.to(tl.int32), mask=there)
    tl.store(key_ends + 3 * number + 2, key.to(tl.int32), mask=there)
    tl.store(key_ends + 3 * number + 3, key_stop.to(tl.int32), mask=there)
    tl.store(key_ends + 3 * number + 4, key_stop.to(tl.int32), mask=there)
    if tl.program_id(0) == 0:
        total = time if PACKED else count * time
        tl.store(query_ends, 0)
        tl.store(key_ends, 0)
        tl.store(key_ends + 1, 0)
        tl.store(query_ends + 3 * count + 1, total)
        tl.store(query_ends + 3 * count + 2, total)
        tl.store(key_ends + 3 * count + 2, total)
