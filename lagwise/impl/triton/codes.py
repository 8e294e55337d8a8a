"""Stochastic features by kernels: those of waves or of filters."""

from collections.abc import Sequence

from torch import Tensor

from lagwise.impl.codes import Filters, Recipe, Waves
from lagwise.impl.triton import filters, waves


def forward(recipe: Recipe, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> list[Tensor]:
    """Returns the features of q and k, [batch, heads, time, realizations]."""
    sides = ((q, q_positions), (k, k_positions))
    if isinstance(recipe, Waves):
        return waves.forward(recipe, sides)
    assert isinstance(recipe, Filters)
    return filters.forward(recipe, sides)


def backward(
    recipe: Recipe, douts: Sequence[Tensor], q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
) -> list[Tensor]:
    """Returns the gradients of q, of k, and of the parameters."""
    sides = ((q, q_positions), (k, k_positions))
    if isinstance(recipe, Waves):
        return waves.backward(recipe, sides, douts)
    assert isinstance(recipe, Filters)
    return filters.backward(recipe, sides, douts)
