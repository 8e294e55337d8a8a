"""AT5: a bias that is a learned function of a soft, learned bucket of the lag."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lagwise import noise
from lagwise.encodings.base import Encoding
from lagwise.errors import (
    is_number,
    is_pair,
    is_whole,
    refuse,
    require_choice,
    require_lag,
    require_past_only,
    require_positive,
    require_probability,
    require_sizes,
    require_switches,
)
from lagwise.lags import LagTable
from lagwise.noise import Stream
from lagwise.ops.register import is_exporting, without_autocast
from lagwise.ops.soft_buckets import ACTIVATIONS, Drop, Weights, bias, read_out
from lagwise.terms import Terms


class AT5(Encoding):
    """Adds a learned function of a soft, learned bucket of the lag: T5 with buckets that adapt to the dependency range.

        f(n)         = 1 - exp(-relu(slope) / reach * |n|)              slope per head and direction
        logit(i, j) += g(f(j - i))                                      an MLP 1 -> a -> b -> 1 per head and direction
        g(x)         = w3 . act(W2 dropout(act(w1 x + c1)) + c2) + c3

    Wu, Zhang, Mao, Chen (2021), as released; lag 0 belongs to the past. The dropout is drawn once per lag, where the
    release draws it per pair of positions and so loses the Toeplitz form.

    Args:
        heads: Number of query heads.
        max_lag: Where the table ends; lags beyond share the last value. None computes every lag of the sequence, as released.
        reach: The slope's unit, the release's L_max: a head with slope 1 has a dependency range of `reach` lags. None
            takes `max_lag`, or 512 where that is None too.
        widths: The widths a and b of the hidden layers.
        slopes: The range from which slopes are drawn at the start; the text models used (1, 10).
        activation: "relu" (text and questions) or "sigmoid" (translation).
        dropout: Probability of dropping a unit of the first hidden layer in training.
        std: Standard deviation of the first weights, and the first value of the MLP's offsets.
        causal: Have no values for the future; the encoding then needs `attention(..., causal=True)`.

    >>> AT5(heads=8, max_lag=None).terms(-99, 99, scale=1.0).bias.values.shape
    torch.Size([8, 199])
    """

    def __init__(
        self,
        *,
        heads: int,
        max_lag: int | None = 512,
        reach: int | None = None,
        widths: tuple[int, int] = (32, 4),
        slopes: tuple[float, float] = (1.0, 10.0),
        activation: Literal["relu", "sigmoid"] = "relu",
        dropout: float = 0.0,
        std: float = 0.1,
        causal: bool = False,
    ):
        super().__init__()
        require_sizes(heads=heads)
        require_switches(causal=causal)
        if not is_pair(slopes, is_number) or slopes[0] > slopes[1]:
            refuse("slopes", "two finite numbers, the lower one first", slopes)
        self.max_lag, self.causal = None if max_lag is None else require_lag(max_lag), causal
        self.reach = (max_lag or 512) if reach is None else reach
        require_positive(reach=self.reach)
        # Directions are ordered past, future.
        directions = 1 if causal else 2
        self.slope = nn.Parameter(torch.empty(directions, heads).uniform_(*slopes))
        self.readout = Readout(directions, heads, widths, activation, dropout, std)
        self.random = dropout > 0.0

    def terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        if self.causal:
            require_past_only(self, last)
        if self.max_lag is not None and is_exporting():
            # One table for all lengths that the program may be called with.
            first, last = -self.max_lag, 0 if self.causal else self.max_lag
        elif self.max_lag is not None:
            # Lags that the call cannot reach, or that share the last value, need no column.
            first, last = (min(max(lag, -self.max_lag), self.max_lag) for lag in (first, last))
        values = self.readout.of_buckets(self.slope, first, last, float(self.reach), seed)
        return Terms(bias=LagTable(values, first))

    def make_neutral(self) -> bool:
        return self.readout.make_neutral()


class AT5Free(Encoding):
    """Adds a learned function of one free scalar per head and lag: AT5 without the soft bucket, the ablation "AT5-NoB".

        logit(i, j) += g(sigmoid(weight[head, clip(j - i, -max_lag, max_lag)]))        an MLP 1 -> a -> b -> 1 per head

    Wu, Zhang, Mao, Chen (2021); the release's text model has one hidden layer less and a ReLU at the end.

    Args:
        heads: Number of query heads.
        max_lag: Where the table ends; lags beyond share the last value.
        widths: The widths a and b of the hidden layers.
        activation: "relu" or "sigmoid".
        dropout: Probability of dropping a unit of the first hidden layer in training.
        std: Standard deviation of the first weights, and the first value of the MLP's offsets.
        causal: Have no values for the future; the encoding then needs `attention(..., causal=True)`.

    >>> AT5Free(heads=8, max_lag=4).terms(-99, 99, scale=1.0).bias.values.shape
    torch.Size([8, 9])
    """

    def __init__(
        self,
        *,
        heads: int,
        max_lag: int = 128,
        widths: tuple[int, int] = (32, 4),
        activation: Literal["relu", "sigmoid"] = "relu",
        dropout: float = 0.0,
        std: float = 0.1,
        causal: bool = False,
    ):
        super().__init__()
        require_sizes(heads=heads)
        require_switches(causal=causal)
        self.max_lag, self.causal = require_lag(max_lag), causal
        self.weight = nn.Parameter(torch.empty(heads, max_lag + 1 if causal else 2 * max_lag + 1).normal_())
        self.readout = Readout(1, heads, widths, activation, dropout, std)
        self.random = dropout > 0.0

    def terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        if self.causal:
            require_past_only(self, last)
        values = self.readout(torch.sigmoid(self.weight), -self.max_lag, seed)
        return Terms(bias=LagTable(values, -self.max_lag))

    def make_neutral(self) -> bool:
        return self.readout.make_neutral()


class Readout(nn.Module):
    """The MLPs of AT5, 1 -> a -> b -> 1, one for each direction and head."""

    def __init__(self, directions: int, heads: int, widths: tuple[int, int], activation: str, dropout: float, std: float):
        super().__init__()
        require_choice("activation", activation, ACTIVATIONS)
        require_probability("dropout", dropout)
        if not is_pair(widths, is_whole) or min(widths) < 1:
            refuse("widths", "two whole numbers of at least 1", widths)
        require_positive(std=std)
        a, b = widths

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(nn.init.trunc_normal_(torch.empty(directions, heads, *shape), std=std, a=-2 * std, b=2 * std))

        def offset(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.full((directions, heads, *shape), std))

        self.weight1, self.offset1 = weight(1, a), offset(1, a)
        self.weight2, self.offset2 = weight(a, b), offset(1, b)
        self.weight3, self.offset3 = weight(b, 1), offset(1, 1)
        self.activation, self.dropout = activation, dropout

    def forward(self, x: Float[Tensor, "heads lags"], first: int, seed: Tensor | None) -> Float[Tensor, "heads lags"]:
        """Evaluates the MLPs of the only direction at x, whose columns are the lags from `first` on."""
        # The table is exact under autocast too, which would compute the products in half precision.
        with without_autocast(x):
            return read_out(x[None], self._weights(), self.activation, first, self._drop(seed)).squeeze(0)

    def of_buckets(
        self, slope: Float[Tensor, "directions heads"], first: int, last: int, reach: float, seed: Tensor | None
    ) -> Float[Tensor, "heads lags"]:
        """Evaluates the MLPs at the soft buckets of the lags from `first` to `last`."""
        with without_autocast(slope):
            return bias(slope, self._weights(), first, last, reach=reach, activation=self.activation, drop=self._drop(seed))

    def make_neutral(self) -> bool:
        """Lets the MLPs return 0, from where gradients reach the last layer, and the others after its first step."""
        nn.init.zeros_(self.weight3)
        nn.init.zeros_(self.offset3)
        return True

    def _weights(self) -> Weights:
        return Weights(self.weight1, self.offset1, self.weight2, self.offset2, self.weight3, self.offset3)

    def _drop(self, seed: Tensor | None) -> Drop | None:
        """Returns a function that drops units in training, from hidden layers of lags."""
        if not self.training or self.dropout == 0.0:
            return None
        if seed is None:
            raise ValueError("seed must be given to draw the dropout of AT5 in training, but is None")

        def drop(hidden: Tensor, first: int) -> Tensor:
            directions, heads, lags, units = (torch.arange(size, device=hidden.device) for size in hidden.shape)
            lags = first + lags + len(lags) * directions[:, None]
            kept = noise.keep(self.dropout, seed, Stream.AT5, heads[:, None, None], lags[:, None, :, None], units)
            return hidden * kept / (1.0 - self.dropout)

        return drop
