"""Rotation of channel pairs in one pass: each number is read and written once."""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lagwise.ops.kernels.arguments import view
from lagwise.ops.kernels.launches import run
from lagwise.ops.kernels.plan import blocks
from lagwise.ops.kernels.tape import taped
from lagwise.ops.kernels.tiles import head_of, place_of

ROWS = 32


@triton.jit(do_not_specialize=["heads", "time"])
def turn_kernel(
    x, cos, sin, out, angle_batch, heads, time,
    HALF: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Turns the channel pairs of some rows of one head, or turns them BACK."""
    block, _pair, batch, head = place_of(time, heads, ROWS)
    row, channel = (block * ROWS + tl.arange(0, ROWS))[:, None], tl.arange(0, WIDTH)[None, :]
    there = (row < time) & (channel < HALF)
    angle = batch.to(tl.int64) * angle_batch + row.to(tl.int64) * HALF + channel
    cosine, sine = tl.load(cos + angle, mask=there, other=0.0), tl.load(sin + angle, mask=there, other=0.0)
    if BACK:
        sine = -sine
    if INTERLEAVED:
        first, second = 2 * channel, 2 * channel + 1
    else:
        first, second = channel, channel + HALF
    here = head_of(x, batch, head) + row.to(tl.int64) * x.time
    a = tl.load(here + first, mask=there, other=0.0).to(tl.float32)
    b = tl.load(here + second, mask=there, other=0.0).to(tl.float32)
    there_out = head_of(out, batch, head) + row.to(tl.int64) * out.time
    tl.store(there_out + first, (a * cosine - b * sine).to(out.data.dtype.element_ty), mask=there)
    tl.store(there_out + second, (a * sine + b * cosine).to(out.data.dtype.element_ty), mask=there)


def turn_both(
    q: Tensor, k: Tensor, rows: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor], interleaved: bool, back: bool
) -> list[Tensor]:
    """Returns the rotations of q and k, or those back, by their own factors."""

    def compute() -> list[Tensor]:
        return [turn(q, *rows, interleaved, back), turn(k, *keys, interleaved, back)]

    return taped("turn", (q, k, *rows, *keys), (interleaved, back), compute)


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    """Returns the rotation of x, or the one back, see `lagwise.ops.rotation.turn`."""
    x = x if x.stride(3) == 1 else x.contiguous()
    out = torch.empty_like(x)
    batch, heads, time, width = x.shape
    half = width // 2
    arguments = {
        "x": view(x), "cos": cos.contiguous(), "sin": sin.contiguous(), "out": view(out),
        "angle_batch": time * half if cos.ndim == 4 and cos.shape[0] > 1 else 0, "heads": heads, "time": time,
        "HALF": half, "WIDTH": triton.next_power_of_2(half), "ROWS": ROWS, "INTERLEAVED": interleaved,
        "BACK": back,
    }  # fmt: skip
    run(turn_kernel, (blocks(time, ROWS), batch * heads), arguments, warps=4, stages=1)
    return out
