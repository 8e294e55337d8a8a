"""Small kernels on rows: the normalisation's share of a gradient, and what `split` does with its three parts."""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

import triton
import triton.language as tl

from lagwise.impl.triton.tiles import load_rows, store_rows


@triton.jit(do_not_specialize=["heads", "queries"])
def delta_kernel(
    Out, Dout, Dlse, Delta, dout_batch, dout_head, dout_time, heads, queries,
    value_dim: tl.constexpr, VALUE_WIDTH: tl.constexpr, ROWS: tl.constexpr, DLSE: tl.constexpr,
):  # fmt: skip
    """Computes delta = dout . out - dlse per row."""
    index, count = tl.program_id(0), tl.cdiv(queries, ROWS)
    block, pair = index % count, index // count
    base = pair.to(tl.int64) * queries
    row = block * ROWS + tl.arange(0, ROWS)
    here = Dout + (pair // heads).to(tl.int64) * dout_batch + (pair % heads).to(tl.int64) * dout_head
    out = load_rows(Out + base * value_dim, row, queries, value_dim, value_dim, VALUE_WIDTH, False)
    dout = load_rows(here, row, queries, dout_time, value_dim, VALUE_WIDTH, False)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if DLSE:
        delta -= tl.load(Dlse + base + row, mask=row < queries, other=0.0)
    tl.store(Delta + base + row, delta, mask=row < queries)


@triton.jit
def shifted_lse(FarLse, Shifts, row, queries, base, pairs, SIDE: tl.constexpr, SIDES: tl.constexpr, SHIFTED: tl.constexpr):
    """Loads a far field's log-sum-exp, [sides, pairs, queries], with what its tails add to it, [pairs, sides, queries]."""
    there = row < queries
    lse = tl.load(FarLse + SIDE * pairs * queries + base + row, mask=there, other=-float("inf"))
    if SHIFTED:
        lse += tl.load(Shifts + SIDES * base + SIDE * queries + row, mask=there, other=0.0)
    return lse


@triton.jit(do_not_specialize=["heads", "queries"])
def merge_kernel(
    Near, NearLse, FarOut, FarLse, Out, Lse, Shifts, FarValue, heads, queries,
    value_dim: tl.constexpr, VALUE_WIDTH: tl.constexpr, ROWS: tl.constexpr,
    SIDES: tl.constexpr, SHIFTED: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Merges the near band with the far fields by their log-sum-exps.

    lse_far += shift,      out = sum exp(lse_part - lse) (out_part + value),      lse = log sum exp(lse_part)
    """
    index, count = tl.program_id(0), tl.cdiv(queries, ROWS)
    block, pair, pairs = index % count, index // count, (tl.num_programs(0) // count).to(tl.int64)
    head = pair % heads
    base = pair.to(tl.int64) * queries
    row = block * ROWS + tl.arange(0, ROWS)
    there = row < queries
    channel = tl.arange(0, VALUE_WIDTH)
    near_lse = tl.load(NearLse + base + row, mask=there, other=0.0)
    peak = near_lse
    for SIDE in tl.static_range(SIDES):
        peak = tl.maximum(peak, shifted_lse(FarLse, Shifts, row, queries, base, pairs, SIDE, SIDES, SHIFTED))
    # A row that sees nothing has minus infinity everywhere.
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    weight = tl.exp(near_lse - peak)
    total = weight
    out = load_rows(Near + base * value_dim, row, queries, value_dim, value_dim, VALUE_WIDTH, False) * weight[:, None]
    for SIDE in tl.static_range(SIDES):
        weight = tl.exp(shifted_lse(FarLse, Shifts, row, queries, base, pairs, SIDE, SIDES, SHIFTED) - peak)
        here = FarOut + (SIDE * pairs * queries + base) * value_dim
        far = load_rows(here, row, queries, value_dim, value_dim, VALUE_WIDTH, False).to(tl.float32)
        if VALUE:
            far += tl.load(FarValue + (SIDE * heads + head) * value_dim + channel, mask=channel < value_dim, other=0.0)[None, :]
        out += far * weight[:, None]
        total += weight
    some = tl.where(total > 0.0, total, 1.0)
    store_rows(Out + base * value_dim, row, queries, value_dim, out / some[:, None], value_dim, VALUE_WIDTH)
    tl.store(Lse + base + row, tl.where(total > 0.0, peak + tl.log(some), -float("inf")), mask=there)


@triton.jit(do_not_specialize=["heads", "queries"])
def far_ends_kernel(
    Dout, Lse, Delta, FarOut, FarLse, Shifts, FarValue, Changes, Masses, dout_batch, dout_head, dout_time, heads, queries,
    value_dim: tl.constexpr, VALUE_WIDTH: tl.constexpr, ROWS: tl.constexpr,
    SIDES: tl.constexpr, SHIFTED: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Computes each far field's share of a row: its mass, and the sum of dlogit over it, both [batch, heads, 2, queries].

    mass = exp(lse_far - lse),      change = mass * (dout . (out_far + value) - delta)
    """
    index, count = tl.program_id(0), tl.cdiv(queries, ROWS)
    block, pair, pairs = index % count, index // count, (tl.num_programs(0) // count).to(tl.int64)
    head = pair % heads
    base = pair.to(tl.int64) * queries
    row = block * ROWS + tl.arange(0, ROWS)
    there = row < queries
    channel = tl.arange(0, VALUE_WIDTH)
    here = Dout + (pair // heads).to(tl.int64) * dout_batch + head.to(tl.int64) * dout_head
    dout = load_rows(here, row, queries, dout_time, value_dim, VALUE_WIDTH, False).to(tl.float32)
    lse = tl.load(Lse + base + row, mask=there, other=0.0)
    lse = tl.where(lse == -float("inf"), 0.0, lse)
    delta = tl.load(Delta + base + row, mask=there, other=0.0)
    for SIDE in tl.static_range(2):
        mass = tl.zeros([ROWS], tl.float32)
        change = tl.zeros([ROWS], tl.float32)
        if SIDE < SIDES:
            mass = tl.exp(shifted_lse(FarLse, Shifts, row, queries, base, pairs, SIDE, SIDES, SHIFTED) - lse)
            source = FarOut + (SIDE * pairs * queries + base) * value_dim
            far = load_rows(source, row, queries, value_dim, value_dim, VALUE_WIDTH, False).to(tl.float32)
            if VALUE:
                tail = FarValue + (SIDE * heads + head) * value_dim
                far += tl.load(tail + channel, mask=channel < value_dim, other=0.0)[None, :]
            change = mass * (tl.sum(dout * far, 1) - delta)
        tl.store(Masses + 2 * base + SIDE * queries + row, mass, mask=there)
        tl.store(Changes + 2 * base + SIDE * queries + row, change, mask=there)


@triton.jit(do_not_specialize=["heads", "count", "past_first", "past_rows", "future_first", "future_rows"])
def add_rows_kernel(
    X, Past, past_batch, past_head, past_time, Future, future_batch, future_head, future_time, Factor,
    heads, count, past_first, past_rows, future_first, future_rows,
    dim: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Adds to X, [.., count, dim], the rows of the far past and those of the far future, which come in reverse order.

    Each has its first row in X and a number of rows. With FACTOR, [2, heads, dim], they are multiplied by it.
    """
    index, tiles = tl.program_id(0), tl.cdiv(count, ROWS)
    block, pair = index % tiles, index // tiles
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, WIDTH)
    X += pair.to(tl.int64) * count * dim
    x = load_rows(X, row, count, dim, dim, WIDTH, False).to(tl.float32)
    here = Past + batch * past_batch + head * past_head
    y = load_rows(here, row - past_first, past_rows, past_time, dim, WIDTH, False).to(tl.float32)
    if FACTOR:
        y *= tl.load(Factor + head * dim + channel, mask=channel < dim, other=0.0)[None, :]
    x += y
    here = Future + batch * future_batch + head * future_head
    last = future_first + future_rows - 1
    y = load_rows(here, last - row, future_rows, future_time, dim, WIDTH, False).to(tl.float32)
    if FACTOR:
        y *= tl.load(Factor + (heads + head) * dim + channel, mask=channel < dim, other=0.0)[None, :]
    store_rows(X, row, count, dim, x + y, dim, WIDTH)
