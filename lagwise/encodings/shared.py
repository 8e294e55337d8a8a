"""Tables in which several lags share a value."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lagwise.ops.register import Operator, torch_transforms, transforms_are_active


class Gathered(torch.autograd.Function):
    """The values of all lags. Their gradient is one sum in a fixed order, which that of an index is not."""

    # With a `setup_context` torch reads the signature of `forward` in each call, which takes longer than the rest of it.
    @staticmethod
    def forward(ctx, weight, place, lags, starts):
        ctx.save_for_backward(place, lags, starts)
        return weight.index_select(1, place)

    @staticmethod
    def backward(ctx, gradient):
        place, lags, starts = ctx.saved_tensors
        if torch_transforms():
            found = gradient.new_zeros(gradient.shape[0], len(starts)).index_add(1, place, gradient)
        else:
            found = sums(gradient, lags, starts)
        return found, None, None, None


# Not `Gathered.apply`, which looks for transforms in each argument: `table` knows that there are none.
gathered: Callable[..., Tensor] = super(torch.autograd.Function, Gathered).apply  # pyright: ignore[reportAttributeAccessIssue]


def sums(gradient: Float[Tensor, "heads lags"], lags: Tensor, starts: Tensor) -> Float[Tensor, "heads count"]:
    """Returns the sums over the lags that share a value."""
    return torch.embedding_bag(gradient.T, lags, starts, mode=0)[0].T


def derivative(
    arguments: list[Any], results: Sequence[Tensor], gradients: Sequence[Tensor | None], needed: Sequence[bool]
) -> Sequence[Tensor | None]:
    """Returns the gradient of the values that lags share."""
    _, _, lags, starts = arguments
    (gradient,) = gradients
    return [None if gradient is None else sums(gradient, lags, starts)]


GATHER = Operator(
    "gather", "Tensor weight, Tensor place, Tensor lags, Tensor starts",
    compute=lambda weight, place, *_: [weight.index_select(1, place)],
    outputs=lambda weight, place, *_: [weight.new_empty(weight.shape[0], place.shape[0])],
    derivative=derivative,
)  # fmt: skip
"""The same for compilers: torch's cache of autograd graphs takes none that has a function of autograd."""


class Shared(nn.Module):
    """Makes a table with a value for each lag out of values that lags share.

    Args:
        place: The number of each lag's value.
        count: The number of values.
        device: Where they are.

    >>> Shared(torch.tensor([1, 0, 1]), count=2, device="cpu").table(torch.tensor([[1.0, 2.0]]))
    tensor([[2., 1., 2.]])
    """

    place: Tensor
    lags: Tensor
    starts: Tensor

    def __init__(self, place: Int[Tensor, " lags"], *, count: int, device: torch.device | str):
        super().__init__()
        # The lags sorted by the number of their value, and where those of each value start.
        lags = place.argsort(stable=True)
        starts = torch.searchsorted(place[lags], torch.arange(count, device=place.device))
        for name, x in dict(place=place, lags=lags, starts=starts).items():
            self.register_buffer(name, x.to(device), persistent=False)

    def table(self, weight: Float[Tensor, "heads count"]) -> Float[Tensor, "heads lags"]:
        """Returns the values of all lags."""
        if transforms_are_active() or torch_transforms():
            return weight.index_select(1, self.place)
        if torch.compiler.is_compiling():
            return GATHER(weight, self.place, self.lags, self.starts)[0]
        return gathered(weight, self.place, self.lags, self.starts)
