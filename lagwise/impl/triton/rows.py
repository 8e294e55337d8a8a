"""Small kernels on rows: the term that the normalisation takes from each row's gradients."""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from lagwise.impl.triton.tiles import load_rows


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
