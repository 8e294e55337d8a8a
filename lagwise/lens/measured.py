"""What was measured of a trained model, as the page and the plots take it: a metric by length, the loss by position."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor


class Extrapolation(NamedTuple):
    """A metric at lengths other than those of the training."""

    lengths: Int[Tensor, " lengths"]
    values: Float[Tensor, " lengths"]
    trained: float
    """The metric at the lengths of the training."""
    refused: dict[int, str]
    """The lengths that the model does not take, and why."""


class Losses(NamedTuple):
    """The mean loss in bins of positions."""

    positions: Int[Tensor, " bins"]
    """The first position of each bin."""
    nats: Float[Tensor, " bins"]
    tokens: Int[Tensor, " bins"]
