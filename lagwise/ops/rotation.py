"""Rotation of channel pairs as one operator, whose derivative is the rotation back."""

from importlib import import_module

import torch
from torch import Tensor

from lagwise.ops.register import torch_transforms, transforms_are_active
from lagwise.ops.support import HAS_TRITON

torch.library.define("lagwise::turn", "(Tensor x, Tensor cos, Tensor sin, bool interleaved) -> Tensor")


@torch.library.impl("lagwise::turn", "CompositeExplicitAutograd")
def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    if x.is_cuda and HAS_TRITON and x.dtype != torch.float64:
        return import_module("lagwise.ops.kernels.rotation").turn(x, cos, sin, interleaved)
    axis, sizes = (-1, (-1, 2)) if interleaved else (-2, (2, -1))
    out = torch.empty_like(x)
    even, odd = x.unflatten(-1, sizes).unbind(axis)
    first, second = out.unflatten(-1, sizes).unbind(axis)
    # Factors of float32 or more: sums are in their type, and are rounded once.
    first.copy_((even * cos).addcmul_(odd, sin, value=-1.0))
    second.copy_((even * sin).addcmul_(odd, cos))
    return out


@torch.library.register_fake("lagwise::turn")
def _fake(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return torch.empty_like(x)


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.lagwise.turn(x, cos, sin, interleaved)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, cos, sin, ctx.interleaved = inputs
        ctx.save_for_backward(cos, sin)

    @staticmethod
    def backward(ctx, dout: Tensor):
        cos, sin = ctx.saved_tensors
        return turn(dout, cos, -sin, interleaved=ctx.interleaved), None, None, None


@torch.library.impl("lagwise::turn", "Autograd")
def _autograd(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return _Turned.apply(x, cos, sin, interleaved)


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
    return (_Turned.apply if transforms_are_active() else torch.ops.lagwise.turn)(x, cos, sin, interleaved)


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Does so by torch's own functions, which have all derivatives and take any batch."""
    axis, sizes = (-1, (-1, 2)) if interleaved else (-2, (2, -1))
    even, odd = x.unflatten(-1, sizes).unbind(axis)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), axis).flatten(-2).to(x.dtype)
