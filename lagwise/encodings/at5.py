"""AT5: a bias that is a learned function of a soft, learned bucket of the lag."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lagwise import noise
from lagwise.encodings.base import Encoding
from lagwise.encodings.scalar import distances
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
from lagwise.ops.register import without_autocast
from lagwise.terms import Terms

ACTIVATIONS = {"relu": torch.relu, "sigmoid": torch.sigmoid}


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
        if self.max_lag is not None and torch.compiler.is_exporting():
            # One table for all lengths that the program may be called with.
            first, last = -self.max_lag, 0 if self.causal else self.max_lag
        elif self.max_lag is not None:
            # Lags that the call cannot reach, or that share the last value, need no column.
            first, last = (min(max(lag, -self.max_lag), self.max_lag) for lag in (first, last))
        if first <= 0 < last:
            # Both directions take as many lags as the longer of them has, so that one batch computes both.
            size = max(1 - first, last)
            past, future = self._values(1 - size, size, range(2), seed).unbind()
            values = torch.cat([past[:, size - (1 - first) :], future[:, :last]], dim=1)
        else:
            # A call that looks one way only has no lags on the other side, whose MLP is then not evaluated.
            values = self._values(first, last, range(1) if last <= 0 else range(1, 2), seed).squeeze(0)
        return Terms(bias=LagTable(values, first))

    def make_neutral(self) -> bool:
        return self.readout.make_neutral()

    def _values(self, first: int, last: int, directions: range, seed: Tensor | None) -> Float[Tensor, "directions heads lags"]:
        """Evaluates g(f(n)) at the lags from `first` to `last`, an equal number of them in each direction."""
        slope = take(self.slope, directions)
        distance = distances(first, last, slope).view(slope.shape[0], 1, -1)
        # On |n| alone the exponent is never positive, so that no slope and no lag overflows.
        exponent = torch.relu(slope)[..., None] * (distance / -self.reach)
        # 1 - exp(exponent), exact near 0 too: the negative branch of an ELU, a single operation forward and backward.
        bucket = nn.functional.elu(exponent, alpha=-1.0).to(slope.dtype)
        return self.readout(bucket, first, directions, seed)


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
        values = self.readout(torch.sigmoid(self.weight)[None], -self.max_lag, range(1), seed)
        return Terms(bias=LagTable(values.squeeze(0), -self.max_lag))

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

    def forward(
        self, x: Float[Tensor, "directions heads lags"], first: int, directions: range, seed: Tensor | None
    ) -> Float[Tensor, "directions heads lags"]:
        """Evaluates the MLPs of some directions at x, whose columns are the lags from `first` on, through all directions."""
        # The table is exact under autocast too, which would compute the products in half precision.
        with without_autocast(x):
            return self._evaluate(x, first, directions, seed)

    def make_neutral(self) -> bool:
        """Lets the MLPs return 0, from where gradients reach the last layer, and the others after its first step."""
        nn.init.zeros_(self.weight3)
        nn.init.zeros_(self.offset3)
        return True

    def _evaluate(self, x: Tensor, first: int, directions: range, seed: Tensor | None) -> Tensor:
        act = ACTIVATIONS[self.activation]
        # A product of matrices although w1 has one row: unlike that of numbers, its gradients are not summed in a second step.
        hidden = act(x[..., None] @ take(self.weight1, directions) + take(self.offset1, directions))
        if self.training and self.dropout > 0.0:
            if seed is None:
                raise ValueError("seed must be given to draw the dropout of AT5 in training, but is None")
            lags = torch.arange(first, first + x.shape[0] * x.shape[2], device=x.device).view(x.shape[0], 1, -1, 1)
            heads, units = (torch.arange(size, device=x.device) for size in (hidden.shape[1], hidden.shape[3]))
            kept = noise.keep(self.dropout, seed, Stream.AT5, heads[:, None, None], lags, units)
            hidden = hidden * kept / (1.0 - self.dropout)
        hidden = act(hidden @ take(self.weight2, directions) + take(self.offset2, directions))
        return (hidden @ take(self.weight3, directions) + take(self.offset3, directions)).squeeze(-1)


def take(parameter: Tensor, directions: range) -> Tensor:
    """Returns the part of a parameter that belongs to some directions."""
    # All of it is taken without an operation, because the gradient of a slice is a copy into zeros.
    return parameter if len(directions) == parameter.shape[0] else parameter[directions.start : directions.stop]
