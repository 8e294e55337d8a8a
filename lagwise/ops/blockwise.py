"""Attention tile by tile in plain PyTorch: any device, every option, no tensor with two full time axes."""

import torch
from torch import Tensor

from lagwise.ops.lowering import Gradients, Lowered, contiguous_gradients, parts_of
from lagwise.ops.tiling import sweep


def forward(lowered: Lowered) -> list[Tensor]:
    """Returns the output and the log-sum-exp."""
    compute = torch.promote_types(lowered.q.dtype, torch.float32)
    out = torch.zeros(*lowered.q.shape[:3], lowered.v.shape[3], dtype=lowered.q.dtype, device=lowered.q.device)
    lse = torch.full(lowered.q.shape[:3], -torch.inf, dtype=compute, device=lowered.q.device)
    for place, part in parts_of(lowered):
        part_out, part_lse = sweep.forward(part, part.first, part.last)
        out[place.rows] = part_out.to(out.dtype)
        lse[place.rows] = part_lse
    return [out, lse]


def backward(lowered: Lowered, saved: list[Tensor], dout: Tensor, dlse: Tensor | None, learned: bool) -> list[Tensor]:
    """Returns the gradients of the tensors that the call has; of tables where they are `learned`."""
    out, lse = saved
    gradients = Gradients.zeros(lowered)
    delta = sweep.delta(dout, out, dlse)
    for place, part in parts_of(lowered):
        sweep.backward(part, part.first, part.last, dout[place.rows], lse[place.rows], delta[place.rows], gradients.cut(place))
    return gradients.flat(lowered, learned)


def outputs(lowered: Lowered) -> list[Tensor]:
    """Returns empty tensors like those of `forward`, for tracing."""
    compute = torch.promote_types(lowered.q.dtype, torch.float32)
    return [
        lowered.q.new_empty(*lowered.q.shape[:3], lowered.v.shape[3]),
        lowered.q.new_empty(lowered.q.shape[:3], dtype=compute),
    ]


def backward_outputs(lowered: Lowered, learned: bool) -> list[Tensor]:
    """Returns empty tensors like those of `backward`, for tracing."""
    return contiguous_gradients(lowered, learned)
