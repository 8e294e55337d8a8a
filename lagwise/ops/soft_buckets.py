"""AT5's bias: small networks of soft buckets, by torch's own functions, and as one operator where there is a kernel."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lagwise.kept import distances
from lagwise.ops.register import Operator, refusing, torch_transforms, transforms_are_active
from lagwise.ops.support import HAS_TRITON

ACTIVATIONS = {"relu": torch.relu, "sigmoid": torch.sigmoid}

# Wider layers do not fit into the registers of a kernel.
WIDEST = (128, 32)

Drop = Callable[[Tensor, int], Tensor]
"""Drops units of the first hidden layer, [directions, heads, lags, units], whose lags start with the given one."""


class Weights(NamedTuple):
    """MLPs 1 -> a -> b -> 1, one for each direction and head."""

    weight1: Float[Tensor, "directions heads 1 a"]
    offset1: Float[Tensor, "directions heads 1 a"]
    weight2: Float[Tensor, "directions heads a b"]
    offset2: Float[Tensor, "directions heads 1 b"]
    weight3: Float[Tensor, "directions heads b 1"]
    offset3: Float[Tensor, "directions heads 1 1"]


def bias(
    slope: Float[Tensor, "directions heads"], weights: Weights, first: int, last: int, *, reach: float, activation: str,
    drop: Drop | None = None,
) -> Float[Tensor, "heads lags"]:  # fmt: skip
    """Returns the bias of the lags from `first` to `last`; those up to 0 are of the first direction.

        bias(n) = MLP(1 - exp(-relu(slope) / reach * |n|))

    Args:
        slope: How fast buckets change with the distance.
        weights: The MLPs.
        first: The first lag.
        last: The last one; at most 0 if there is one direction.
        reach: The slope's unit.
        activation: A name in `ACTIVATIONS`.
        drop: Drops units, where that is wanted.
    """
    if drop is None and has_kernel(slope, weights):
        return BIAS(slope, *weights, first, last, float(reach), activation)[0]
    return by_torch(slope, weights, first, last, reach, activation, drop)


def has_kernel(slope: Tensor, weights: Weights) -> bool:
    """Says whether a kernel can compute it; a compiler makes its own of torch's functions."""
    if not slope.is_cuda or not HAS_TRITON or slope.dtype == torch.float64 or torch.compiler.is_compiling():
        return False
    a, b = weights.weight2.shape[2:]
    return a <= WIDEST[0] and b <= WIDEST[1] and not transforms_are_active() and not torch_transforms()


def by_torch(
    slope: Tensor, weights: Weights, first: int, last: int, reach: float, activation: str, drop: Drop | None = None
) -> Tensor:
    """Returns what `bias` does, by torch's functions."""

    def values(first: int, last: int, directions: slice) -> Tensor:
        own, distance = take(slope, directions), distances(first, last, slope)
        # On |n| alone the exponent is never positive, so that no slope and no lag overflows.
        exponent = torch.relu(own)[..., None] * (distance / -reach).view(len(own), 1, -1)
        # 1 - exp(exponent), exact near 0 too: the negative branch of an ELU, a single operation forward and backward.
        bucket = nn.functional.elu(exponent, alpha=-1.0).to(slope.dtype)
        return read_out(bucket, Weights(*(take(x, directions) for x in weights)), activation, first, drop)

    if not first <= 0 < last:
        # A call that looks one way only has no lags on the other side, whose MLP is then not evaluated.
        return values(first, last, slice(0, 1) if last <= 0 else slice(1, 2)).squeeze(0)
    # Both directions take as many lags as the longer of them has, so that one batch computes both.
    size = max(1 - first, last)
    past, future = values(1 - size, size, slice(0, 2)).unbind()
    return torch.cat([past[:, size - (1 - first) :], future[:, :last]], dim=1)


def read_out(
    x: Float[Tensor, "directions heads lags"], weights: Weights, activation: str, first: int, drop: Drop | None
) -> Float[Tensor, "directions heads lags"]:
    """Evaluates the MLPs at x, whose columns are the lags from `first` on, through all directions."""
    act = ACTIVATIONS[activation]
    # A product of matrices although w1 has one row: unlike that of numbers, its gradients are not summed in a second step.
    hidden = act(layer(x[..., None], weights.weight1, weights.offset1))
    hidden = act(layer(hidden if drop is None else drop(hidden, first), weights.weight2, weights.offset2))
    return layer(hidden, weights.weight3, weights.offset3).squeeze(-1)


def layer(x: Tensor, weight: Tensor, offset: Tensor) -> Tensor:
    """Returns `x @ weight + offset` as one operation."""
    return torch.baddbmm(offset.flatten(0, 1), x.flatten(0, 1), weight.flatten(0, 1)).unflatten(0, x.shape[:2])


def take(parameter: Tensor, directions: slice) -> Tensor:
    """Returns the part of a parameter that belongs to some directions."""
    # All of it is taken without an operation, because the gradient of a slice is a copy into zeros.
    return parameter if directions.stop - directions.start == len(parameter) else parameter[directions]


ARGUMENTS = (
    "Tensor slope, Tensor weight1, Tensor offset1, Tensor weight2, Tensor offset2, Tensor weight3, Tensor offset3, "
    "SymInt first, SymInt last, float reach, str activation"
)


def compute(slope: Tensor, *arguments: Any) -> list[Tensor]:
    """Returns the bias, by the kernel."""
    from lagwise.ops.kernels import soft_buckets, tape

    given, facts = (slope, *arguments[:6]), arguments[6:]
    return tape.taped("soft buckets", given, facts, lambda: [soft_buckets.forward(slope, Weights(*arguments[:6]), *facts)])


def compute_backward(gradient: Tensor, slope: Tensor, *arguments: Any) -> list[Tensor]:
    """Returns the gradients of the slope and of the weights, by the kernel."""
    from lagwise.ops.kernels import soft_buckets, tape

    given, weights, facts = (gradient, slope, *arguments[:6]), Weights(*arguments[:6]), arguments[6:]
    return tape.taped("soft buckets back", given, facts, lambda: soft_buckets.backward(gradient, slope, weights, *facts))


BIAS_BACKWARD = Operator(
    "soft_buckets_backward", f"Tensor gradient, {ARGUMENTS}", compute=compute_backward,
    outputs=lambda gradient, *arguments: [torch.empty_like(x, memory_format=torch.contiguous_format) for x in arguments[:7]],
    derivative=refusing("the gradients of AT5 by its kernel have no derivative"),
)  # fmt: skip


def derivative(
    arguments: list[Any], results: Sequence[Tensor], gradients: Sequence[Tensor | None], needed: Sequence[bool]
) -> Sequence[Tensor | None]:
    """Returns the gradients; those that will be differentiated again by torch's functions."""
    (gradient,) = gradients
    if gradient is None:
        return []
    if not torch.is_grad_enabled():
        return BIAS_BACKWARD(gradient, *arguments)
    slope, *weights = arguments[:7]
    return torch.autograd.grad(
        by_torch(slope, Weights(*weights), *arguments[7:]), arguments[:7], gradient, create_graph=True, allow_unused=True
    )


BIAS = Operator(
    "soft_buckets", ARGUMENTS, compute=compute, derivative=derivative,
    outputs=lambda slope, *arguments: [slope.new_empty(slope.shape[1], arguments[7] - arguments[6] + 1)],
)  # fmt: skip
