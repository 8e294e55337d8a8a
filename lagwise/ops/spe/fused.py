"""Stochastic features by kernels: those of sines or of filters."""

from collections.abc import Sequence

from torch import Tensor

from lagwise.ops.spe import conv, sine
from lagwise.ops.spe.recipes import Filters, Recipe, Sines


def forward(recipe: Recipe, sides: Sequence[tuple[Tensor, Tensor | int]]) -> list[Tensor]:
    """Returns the features of queries and keys, given with their positions or the first of consecutive ones."""
    if isinstance(recipe, Sines):
        return sine.forward(recipe, sides)
    assert isinstance(recipe, Filters)
    return conv.forward(recipe, sides)


def backward(recipe: Recipe, sides: Sequence[tuple[Tensor, Tensor | int]], douts: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradients of queries, of keys, and of what is learned."""
    if isinstance(recipe, Sines):
        return sine.backward(recipe, sides, douts)
    assert isinstance(recipe, Filters)
    return conv.backward(recipe, sides, douts)
