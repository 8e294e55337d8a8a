"""Rotation of channel pairs as one operator, whose derivative is the rotation back."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lagwise.ops.register import Operator, torch_transforms
from lagwise.ops.support import HAS_TRITON


def compute(
    q: Tensor, k: Tensor, q_cos: Tensor, q_sin: Tensor, k_cos: Tensor | None, k_sin: Tensor | None, interleaved: bool, back: bool
) -> list[Tensor]:
    """Returns both rotations; the factors of k are those of q unless given."""
    keys = keys_of(q_cos, q_sin, k_cos, k_sin)
    if q.is_cuda and HAS_TRITON and q.dtype != torch.float64:
        from lagwise.ops.kernels.channel_pairs import turn_both

        return turn_both(q, k, (q_cos, q_sin), keys, interleaved, back)
    return [compute_one(q, q_cos, q_sin, interleaved, back), compute_one(k, *keys, interleaved, back)]


def keys_of(q_cos: Tensor, q_sin: Tensor, k_cos: Tensor | None, k_sin: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the factors of k."""
    return (q_cos, q_sin) if k_cos is None or k_sin is None else (k_cos, k_sin)


def compute_one(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    """Returns the rotation of one tensor, or the one back."""
    sign = -1.0 if back else 1.0
    axis, sizes = (-1, (-1, 2)) if interleaved else (-2, (2, -1))
    out = torch.empty_like(x)
    even, odd = x.unflatten(-1, sizes).unbind(axis)
    first, second = out.unflatten(-1, sizes).unbind(axis)
    # Factors of float32 or more: sums are in their type, and are rounded once.
    first.copy_((even * cos).addcmul_(odd, sin, value=-sign))
    second.copy_((odd * cos).addcmul_(even, sin, value=sign))
    return out


def derivative(
    arguments: list[Any], results: Sequence[Tensor], gradients: Sequence[Tensor | None], needed: Sequence[bool]
) -> Sequence[Tensor | None]:
    """Returns the gradients of q and k, the rotations back."""
    q_cos, q_sin, k_cos, k_sin, interleaved, back = arguments[2:]
    dq, dk = (torch.zeros_like(x) if d is None else d for d, x in zip(gradients, results, strict=True))
    keys = None if k_cos is None else (k_cos, k_sin)
    return turn(dq, dk, (q_cos, q_sin), keys, interleaved=interleaved, back=not back)


TURN = Operator(
    "turn", "Tensor q, Tensor k, Tensor q_cos, Tensor q_sin, Tensor? k_cos, Tensor? k_sin, bool interleaved, bool back",
    compute=compute, outputs=lambda q, k, *others: [torch.empty_like(q), torch.empty_like(k)], derivative=derivative,
)  # fmt: skip


def turn(
    q: Tensor, k: Tensor, rows: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor] | None = None, *, interleaved: bool,
    back: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns q and k, [batch, heads, time, dim], with each channel pair (a, b) as (a cos - b sin, a sin + b cos).

    The sums are taken in the type of the factors and rounded once. There are no gradients of the factors. Both are one
    operator, since an operator takes a GPU's host longer than the kernel.

    Args:
        q: Queries; the result lies in memory as they do.
        k: Keys, likewise.
        rows: Factors of q, cosines and sines, [time, dim / 2] or [batch, 1, time, dim / 2], of float32, or float64 if q is.
        keys: Factors of k; those of q unless given.
        interleaved: Pairs are channels 2c and 2c + 1, and otherwise c and c + dim / 2.
        back: Turn by the opposite angles.
    """
    k_cos, k_sin = (None, None) if keys is None else keys
    if torch_transforms():
        return turned(q, *rows, interleaved, back), turned(k, *keys_of(*rows, k_cos, k_sin), interleaved, back)
    found = TURN(q, k, *rows, k_cos, k_sin, interleaved, back)
    return found[0], found[1]


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    """Turns one of them by torch's own functions, which have all derivatives and take any batch."""
    sin = -sin if back else sin
    axis, sizes = (-1, (-1, 2)) if interleaved else (-2, (2, -1))
    even, odd = x.unflatten(-1, sizes).unbind(axis)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), axis).flatten(-2).to(x.dtype)
