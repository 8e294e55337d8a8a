"""What the kernels of a call return: empty tensors for it, gradients in their places, and what a gradient starts from."""

import torch
from torch import Tensor

from lagwise.ops.grouped import per_key_head
from lagwise.ops.kernels.arguments import flags, view
from lagwise.ops.kernels.launches import run
from lagwise.ops.kernels.plan import ROWS, blocks, width
from lagwise.ops.kernels.rows import delta_kernel
from lagwise.ops.lowering import DIFFERENTIABLE, Lowered, empty_laid_out, is_by_token
from lagwise.terms import Terms


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
