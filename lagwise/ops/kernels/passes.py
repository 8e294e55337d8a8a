"""`impl="triton"`, the two passes of a call: scores of vector tables, the kernels, the gradients of the tables."""

from typing import Any

import torch
from torch import Tensor

from lagwise.lags import LagTable
from lagwise.ops.grouped import per_key_head
from lagwise.ops.kernels.arguments import flags, view
from lagwise.ops.kernels.backward import differentiate
from lagwise.ops.kernels.forward import attend
from lagwise.ops.kernels.launches import run
from lagwise.ops.kernels.plan import ROWS, Plan, blocks, width
from lagwise.ops.kernels.rows import delta_kernel
from lagwise.ops.lowering import DIFFERENTIABLE, Lowered, empty_laid_out, is_by_token, tables_of
from lagwise.ops.merge import merge_into
from lagwise.terms import Terms

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


def gradients(lowered: Lowered, found: dict[str, Tensor], tables: Terms) -> list[Tensor]:
    """Returns gradients in the order of DIFFERENTIABLE and in the types of what they belong to; key heads get their sums."""
    found |= {name: per_key_head(found[name], lowered.k.shape[1]) for name in ("k", "v", "raw_k") if name in found}
    found |= {name: table.values for name, table in tables.tables().items()}
    if tables.bias is not None and tables.bias.slopes is not None:
        found["slopes"] = torch.stack(tables.bias.slopes)
    present = ((x, found[name].to(x.dtype)) for name in DIFFERENTIABLE if (x := getattr(lowered, name)) is not None)
    return [
        gradient.transpose(1, 2).contiguous().transpose(1, 2) if like_tokens(x) else gradient.contiguous()
        for x, gradient in present
    ]


def like_tokens(x: Tensor) -> bool:
    """Says whether the gradient of a tensor lies token by token, as the tensor does: q, k and v may, tables do not."""
    return x.ndim == 4 and is_by_token(x)


def delta(dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    """Returns `dout . out - dlse` per row: what each row's logits lose to the normalisation."""
    found = torch.empty(out.shape[:3], dtype=torch.float32, device=out.device)
    arguments = {
        "out": out, "dout": view(dout), "dlse": out if dlse is None else dlse.contiguous(), "delta": found,
        "heads": out.shape[1], "queries": out.shape[2],
        "flags": flags(
            head_dim=0, value_dim=out.shape[3], WIDTH=0, VALUE_WIDTH=width(out.shape[3]), ROWS=ROWS,
            DLSE=dlse is not None, OUT_BY_TOKEN=is_by_token(out),
        ),
    }  # fmt: skip
    run(delta_kernel, (blocks(out.shape[2], ROWS), out.shape[0] * out.shape[1]), arguments, warps=4, stages=1)
    return found


def outputs(lowered: Lowered) -> list[Tensor]:
    """Returns empty tensors like those of `forward`."""
    return [
        empty_laid_out(is_by_token(lowered.q), lowered.q, *lowered.q.shape[:3], lowered.v.shape[3]),
        lowered.q.new_empty(lowered.q.shape[:3], dtype=torch.float32),
    ]


def backward_outputs(lowered: Lowered) -> list[Tensor]:
    """Returns empty tensors like those of `backward`."""
    present = (x for name in DIFFERENTIABLE if (x := getattr(lowered, name)) is not None)
    return [empty_laid_out(True, x, *x.shape) if like_tokens(x) else x.new_empty(x.shape) for x in present]
