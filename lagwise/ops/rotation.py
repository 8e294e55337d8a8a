"""Rotation of channel pairs as one operator, whose derivative is the rotation back."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lagwise.ops.register import Operator, torch_transforms
from lagwise.ops.support import HAS_TRITON


def compute(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> list[Tensor]:
    """Returns the rotation, by a kernel where there is one."""
    if x.is_cuda and HAS_TRITON and x.dtype != torch.float64:
        from lagwise.ops.kernels.channel_pairs import turn

        return [turn(x, cos, sin, interleaved)]
    axis, sizes = (-1, (-1, 2)) if interleaved else (-2, (2, -1))
    out = torch.empty_like(x)
    even, odd = x.unflatten(-1, sizes).unbind(axis)
    first, second = out.unflatten(-1, sizes).unbind(axis)
    # Factors of float32 or more: sums are in their type, and are rounded once.
    first.copy_((even * cos).addcmul_(odd, sin, value=-1.0))
    second.copy_((even * sin).addcmul_(odd, cos))
    return [out]


def derivative(
    arguments: list[Any], results: Sequence[Tensor], gradients: Sequence[Tensor | None], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Returns the gradient of x, the rotation back."""
    _, cos, sin, interleaved = arguments
    (dout,) = gradients
    return [None if dout is None else turn(dout, cos, -sin, interleaved=interleaved)]


TURN = Operator(
    "turn", "Tensor x, Tensor cos, Tensor sin, bool interleaved",
    compute=compute, outputs=lambda x, *others: [torch.empty_like(x)], derivative=derivative,
)  # fmt: skip


def turn(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Returns x, [batch, heads, time, dim], with each channel pair (a, b) as (a cos - b sin, a sin + b cos).

    The sums are taken in the type of the factors and rounded once. There are no gradients of the factors.

    Args:
        x: The tensor; the result lies in memory as it does.
        cos: Factors, [time, dim / 2] or [batch, 1, time, dim / 2], of float32, or float64 if x is.
        sin: As `cos`.
        interleaved: Pairs are channels 2c and 2c + 1, and otherwise c and c + dim / 2.
    """
    if torch_transforms():
        return turned(x, cos, sin, interleaved)
    return TURN(x, cos, sin, interleaved)[0]


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Does so by torch's own functions, which have all derivatives and take any batch."""
    axis, sizes = (-1, (-1, 2)) if interleaved else (-2, (2, -1))
    even, odd = x.unflatten(-1, sizes).unbind(axis)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), axis).flatten(-2).to(x.dtype)
