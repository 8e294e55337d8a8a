"""What the kernels of a call return: empty tensors for it, gradients in their places, and what a gradient starts from."""

import torch
from torch import Tensor

from lagwise.ops.grouped import per_key_head
from lagwise.ops.kernels.arguments import flags, view
from lagwise.ops.kernels.launches import run
from lagwise.ops.kernels.plan import ROWS, blocks, table_window, width
from lagwise.ops.kernels.rows import delta_kernel
from lagwise.ops.kernels.tables import is_copied
from lagwise.ops.lowering import Lowered, empty_laid_out, is_by_token, wanted_gradients
from lagwise.terms import TABLES


def gradients(lowered: Lowered, found: dict[str, Tensor], learned: bool) -> list[Tensor]:
    """Returns the gradients that are wanted, in their order and in the types of what they belong to; key heads get their sums."""
    found |= {name: per_key_head(found[name], lowered.k.shape[1]) for name in ("k", "v", "raw_k") if name in found}
    placed = []
    for name, x in wanted_gradients(lowered, learned):
        gradient = found[name] if found[name].dtype == x.dtype else found[name].to(x.dtype)
        if like_tokens(x) and not like_tokens(gradient):
            gradient = gradient.transpose(1, 2).contiguous().transpose(1, 2)
        placed.append(gradient)
    return placed


def like_tokens(x: Tensor) -> bool:
    """Says whether the gradient of a tensor lies token by token, as the tensor does: q, k and v may, tables do not."""
    return x.ndim == 4 and is_by_token(x)


def delta_of(dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    """Returns `dout . out - dlse` per row: what each row's logits lose to the normalisation."""
    found = torch.empty(out.shape[:3], dtype=torch.float32, device=out.device)
    arguments = {
        "out": out, "dout": view(dout), "dlse": out if dlse is None else dlse, "delta": found,
        "heads": out.shape[1], "queries": out.shape[2],
        "flags": flags(
            head_dim=0, value_dim=out.shape[3], WIDTH=0, VALUE_WIDTH=width(out.shape[3]), ROWS=ROWS,
            DLSE=dlse is not None, OUT_BY_TOKEN=is_by_token(out),
        ),
    }  # fmt: skip
    run(delta_kernel, (blocks(out.shape[2], ROWS), out.shape[0] * out.shape[1]), arguments, warps=4, stages=1)
    return found


def prepared_outputs(lowered: Lowered) -> list[Tensor]:
    """Returns empty tensors like those that are prepared of a call's tables and masks."""
    found, call, q = [], lowered.call, lowered.q
    tables = zip(TABLES, lowered.firsts, strict=True)
    columns = [(first, values.shape[1]) for name, first in tables if (values := getattr(lowered, name)) is not None]
    scalars = int(lowered.bias is not None) + int(lowered.gain is not None and lowered.gain.shape[2] == 1)
    if scalars:
        _, lags = table_window(columns, call.causal)
        found.append(q.new_empty((scalars, q.shape[1], lags + 2), dtype=torch.float32))
    vectors = [table for table in (lowered.query, lowered.key, lowered.value) if table is not None]
    found += [q.new_empty(table.shape) for table in vectors if is_copied(table, q.dtype)]
    if call.key_mask is not None:
        found.append(q.new_empty((q.shape[0], 2), dtype=torch.int32))
    elif call.cu_seqlens is not None:
        found.append(q.new_empty((2, lowered.k.shape[2]), dtype=torch.int32))
    return found


def outputs(lowered: Lowered) -> list[Tensor]:
    """Returns an empty output and log-sum-exp."""
    return [
        empty_laid_out(is_by_token(lowered.q), lowered.q, *lowered.q.shape[:3], lowered.v.shape[3]),
        lowered.q.new_empty(lowered.q.shape[:3], dtype=torch.float32),
    ]
