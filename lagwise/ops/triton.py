"""`impl="triton"`: scores of vector tables, one pass of the kernels each way, the gradients of the tables."""

from typing import Any

import torch
from torch import Tensor

from lagwise.lags import LagTable
from lagwise.ops.kernels.backward import differentiate
from lagwise.ops.kernels.forward import attend
from lagwise.ops.kernels.plan import Plan
from lagwise.ops.kernels.results import backward_outputs, delta, gradients, outputs
from lagwise.ops.lowering import Lowered, tables_of
from lagwise.ops.merge import merge_into
from lagwise.terms import Terms

__all__ = ["backward", "backward_outputs", "forward", "outputs"]

# The most lags of tables of vectors whose scores are in memory at a time.
WIDEST = 1024


def lag_ranges(lowered: Lowered, tables: Terms) -> list[tuple[int, int] | None]:
    """Returns the ranges of lags that are computed one after the other, so that the scores of a range fit into memory.

    None stands for all lags. Each range has at most WIDEST columns of the tables of vectors; the first and the last reach beyond.
    """
    vectors = tables.vector_tables()
    if not vectors:
        return [None]
    first, last = lowered.call.visible_lags(lowered.q.shape[2], lowered.k.shape[2])
    low, high = max(first, min(table.first for table in vectors)), min(last, max(table.last for table in vectors))
    if high - low < WIDEST:
        return [None]
    starts = [first, *range(low + WIDEST, high + 1, WIDEST)]
    return list(zip(starts, [*(start - 1 for start in starts[1:]), last], strict=True))


def forward(lowered: Lowered) -> list[Tensor]:
    """Returns the output and the log-sum-exp."""
    out, lse = outputs(lowered)
    tables = tables_of(lowered)
    ranges = lag_ranges(lowered, tables)
    if len(ranges) == 1:
        attend(Plan(lowered, tables), out, lse)
        return [out, lse]
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    lse.fill_(-torch.inf)
    for lags in ranges:
        range_out, range_lse = outputs(lowered)
        attend(Plan(lowered, tables, lags=lags), range_out, range_lse)
        merge_into(total, lse, range_out, range_lse)
    return [out.copy_(total), lse]


def backward(lowered: Lowered, saved: list[Tensor], dout: Tensor, dlse: Tensor | None) -> list[Tensor]:
    """Returns the gradients of the tensors that the call has."""
    out, lse = saved
    dout = dout if dout.stride(3) == 1 else dout.contiguous()
    deltas, tables = delta(dout, out, dlse), tables_of(lowered)
    found: dict[str, Tensor] = {}
    learned: Terms | None = None
    for lags in lag_ranges(lowered, tables):
        more, gradient = differentiate(Plan(lowered, tables, lags=lags), dout, lse, deltas)
        # Ranges are added up in float32.
        found = {name: found[name] + x if name in found else x if lags is None else x.float() for name, x in more.items()}
        learned = gradient if learned is None else summed(learned, gradient)
    assert learned is not None
    return gradients(lowered, found, learned)


def summed(a: Terms, b: Terms) -> Terms:
    """Returns the sum of two gradients of tables."""
    others = b.tables()
    tables: dict[str, Any] = {}
    for name, table in a.tables().items():
        mine, theirs = table.slopes, others[name].slopes
        slopes = (mine[0] + theirs[0], mine[1] + theirs[1]) if mine is not None and theirs is not None else None
        tables[name] = LagTable(table.values + others[name].values, table.first, slopes)
    return Terms(**tables)
