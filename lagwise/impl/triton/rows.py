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
    pair = tl.program_id(1)
    base = pair.to(tl.int64) * queries
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = Dout + (pair // heads).to(tl.int64) * dout_batch + (pair % heads).to(tl.int64) * dout_head
    out = load_rows(Out + base * value_dim, row, queries, value_dim, value_dim, VALUE_WIDTH, False)
    dout = load_rows(here, row, queries, dout_time, value_dim, VALUE_WIDTH, False)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if DLSE:
        delta -= tl.load(Dlse + base + row, mask=row < queries, other=0.0)
    tl.store(Delta + base + row, delta, mask=row < queries)


@triton.jit(do_not_specialize=["heads", "queries"])
def merge_kernel(
    Near, NearLse, FarOut, FarLse, Out, Lse, FarBias, QueryEnds, FarValue, heads, queries, scale,
    value_dim: tl.constexpr, VALUE_WIDTH: tl.constexpr, ROWS: tl.constexpr,
    SIDES: tl.constexpr, BIAS: tl.constexpr, QUERY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Merges the near band with the far fields by their log-sum-exps.

    lse_far += bias + scale q . query,      out = sum exp(lse_part - lse) (out_part + value),      lse = log sum exp(lse_part)

    `FarLse`, [sides, batch, heads, queries], keeps the shift for the backward pass.
    """
    pair = tl.program_id(1)
    head = pair % heads
    base = pair.to(tl.int64) * queries
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < queries
    channel = tl.arange(0, VALUE_WIDTH)
    side_size = tl.num_programs(1).to(tl.int64) * queries
    near_lse = tl.load(NearLse + base + row, mask=there, other=0.0)
    peak = near_lse
    for SIDE in tl.static_range(SIDES):
        far_lse = tl.load(FarLse + SIDE * side_size + base + row, mask=there, other=0.0)
        if BIAS:
            far_lse += tl.load(FarBias + SIDE * heads + head)
        if QUERY:
            far_lse += scale * tl.load(QueryEnds + (2 * base + SIDE * queries) + row, mask=there, other=0.0)
        tl.store(FarLse + SIDE * side_size + base + row, far_lse, mask=there)
        peak = tl.maximum(peak, far_lse)
    # A row that sees nothing has minus infinity everywhere.
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    weight = tl.exp(near_lse - peak)
    total = weight
    out = load_rows(Near + base * value_dim, row, queries, value_dim, value_dim, VALUE_WIDTH, False) * weight[:, None]
    # Each thread reads back what it has stored itself.
    for SIDE in tl.static_range(SIDES):
        weight = tl.exp(tl.load(FarLse + SIDE * side_size + base + row, mask=there, other=0.0) - peak)
        far = load_rows(
            FarOut + (SIDE * side_size + base) * value_dim, row, queries, value_dim, value_dim, VALUE_WIDTH, False
        ).to(tl.float32)
        if VALUE:
            far += tl.load(FarValue + (SIDE * heads + head) * value_dim + channel, mask=channel < value_dim, other=0.0)[None, :]
        out += far * weight[:, None]
        total += weight
    some = tl.where(total > 0.0, total, 1.0)
    store_rows(Out + base * value_dim, row, queries, value_dim, out / some[:, None], value_dim, VALUE_WIDTH)
    tl.store(Lse + base + row, tl.where(total > 0.0, peak + tl.log(some), -float("inf")), mask=there)


@triton.jit(do_not_specialize=["heads", "queries"])
def far_ends_kernel(
    Dout, Lse, Delta, FarOut, FarLse, FarValue, Changes, Masses, dout_batch, dout_head, dout_time, heads, queries,
    value_dim: tl.constexpr, VALUE_WIDTH: tl.constexpr, ROWS: tl.constexpr, SIDES: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Computes each far field's share of a row: its mass, and the sum of dlogit over it, both [batch, heads, 2, queries].

    mass = exp(lse_far - lse),      change = mass * (dout . (out_far + value) - delta)
    """
    pair = tl.program_id(1)
    head = pair % heads
    base = pair.to(tl.int64) * queries
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < queries
    channel = tl.arange(0, VALUE_WIDTH)
    side_size = tl.num_programs(1).to(tl.int64) * queries
    here = Dout + (pair // heads).to(tl.int64) * dout_batch + head.to(tl.int64) * dout_head
    dout = load_rows(here, row, queries, dout_time, value_dim, VALUE_WIDTH, False).to(tl.float32)
    lse = tl.load(Lse + base + row, mask=there, other=0.0)
    lse = tl.where(lse == -float("inf"), 0.0, lse)
    delta = tl.load(Delta + base + row, mask=there, other=0.0)
    for SIDE in tl.static_range(2):
        mass = tl.zeros([ROWS], tl.float32)
        change = tl.zeros([ROWS], tl.float32)
        if SIDE < SIDES:
            mass = tl.exp(tl.load(FarLse + SIDE * side_size + base + row, mask=there, other=-float("inf")) - lse)
            far = load_rows(
                FarOut + (SIDE * side_size + base) * value_dim, row, queries, value_dim, value_dim, VALUE_WIDTH, False
            ).to(tl.float32)
            if VALUE:
                far += tl.load(FarValue + (SIDE * heads + head) * value_dim + channel, mask=channel < value_dim, other=0.0)[
                    None, :
                ]
            change = mass * (tl.sum(dout * far, 1) - delta)
        tl.store(Masses + (2 * base + SIDE * queries) + row, mass, mask=there)
        tl.store(Changes + (2 * base + SIDE * queries) + row, change, mask=there)


@triton.jit(do_not_specialize=["heads", "count", "first", "rows"])
def add_rows_kernel(
    X, Y, y_batch, y_head, y_time, Factor, heads, count, first, rows,
    dim: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, FLIP: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Adds to rows `first ..` of X, [.., count, dim], those of Y, [.., rows, dim], in reverse order with FLIP."""
    pair = tl.program_id(1)
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    source = rows - 1 - index if FLIP else index
    here = Y + (pair // heads).to(tl.int64) * y_batch + (pair % heads).to(tl.int64) * y_head
    y = load_rows(here, source, rows, y_time, dim, WIDTH, False).to(tl.float32)
    if FACTOR:
        channel = tl.arange(0, WIDTH)
        y *= tl.load(Factor + (pair % heads) * dim + channel, mask=channel < dim, other=0.0)[None, :]
    X += (pair.to(tl.int64) * count + first) * dim
    store_rows(X, index, rows, dim, load_rows(X, index, rows, dim, dim, WIDTH, False).to(tl.float32) + y, dim, WIDTH)
