"""Stochastic features by kernels: those of sines or of filters."""

from collections.abc import Sequence

from torch import Tensor

from lagwise.ops.spe import conv, sine
from lagwise.ops.spe.recipes import Filters, Recipe, Sines


def forward(recipe: Recipe, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> list[Tensor]:
    """Returns the features of q and k, [batch, heads, time, realizations]."""
    sides = ((q, q_positions), (k, k_positions))
    if isinstance(recipe, Sines):
        return sine.forward(recipe, sides)
    assert isinstance(recipe, Filters)
    return conv.forward(recipe, sides)


def backward(
    recipe: Recipe, douts: Sequence[Tensor], q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
) -> list[Tensor]:
    """Returns the gradients of q, of k, and of the parameters."""
    sides = ((q, q_positions), (k, k_positions))
    if isinstance(recipe, Sines):
        return sine.backward(recipe, sides, douts)
    assert isinstance(recipe, Filters)
    return conv.backward(recipe, sides, douts)
