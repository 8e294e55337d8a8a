"""Attention tile by tile in plain PyTorch: any device, every option, no tensor with two full time axes."""

import torch
from torch import Tensor

from lagwise.ops.lowering import Gradients, Lowered, contiguous_gradients, parts_of
from lagwise.ops.tiling import sweep


def forward(call: Lowered) -> list[Tensor]:
    """Returns the output and the log-sum-exp."""
    compute = torch.promote_types(call.q.dtype, torch.float32)
    out = torch.zeros(*call.q.shape[:3], call.v.shape[3], dtype=call.q.dtype, device=call.q.device)
    lse = torch.full(call.q.shape[:3], -torch.inf, dtype=compute, device=call.q.device)
    for batch, time, part in parts_of(call):
        part_out, part_lse = sweep.forward(part, part.first, part.last)
        out[batch, :, time] = part_out.to(out.dtype)
        lse[batch, :, time] = part_lse
    return [out, lse]


def backward(call: Lowered, saved: list[Tensor], dout: Tensor, dlse: Tensor | None) -> list[Tensor]:
    """Returns the gradients of the tensors that the call has."""
    out, lse = saved
    gradients = Gradients.zeros(call)
    delta = sweep.delta(dout, out, dlse)
    for batch, time, part in parts_of(call):
        sweep.backward(
            part, part.first, part.last,
            dout[batch, :, time], lse[batch, :, time], delta[batch, :, time], gradients.cut(batch, time),
        )  # fmt: skip
    return gradients.flat(call)


def outputs(call: Lowered) -> list[Tensor]:
    """Returns empty tensors like those of `forward`, for tracing."""
    compute = torch.promote_types(call.q.dtype, torch.float32)
    return [
        call.q.new_empty(*call.q.shape[:3], call.v.shape[3]),
        call.q.new_empty(call.q.shape[:3], dtype=compute),
    ]


def backward_outputs(call: Lowered) -> list[Tensor]:
    """Returns empty tensors like those of `backward`, for tracing."""
    return contiguous_gradients(call)
