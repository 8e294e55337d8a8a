"""Encodings that add one scalar per head and lag to the logits: a prior over attended positions."""

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lagwise.encodings.absolute import inverse_frequencies
from lagwise.encodings.base import Encoding
from lagwise.encodings.buckets import check_buckets, near_lags, t5_bucket
from lagwise.encodings.shared import Shared
from lagwise.errors import (
    require_choice,
    require_even,
    require_floats,
    require_lag,
    require_past_only,
    require_sizes,
    require_switches,
)
from lagwise.kept import distances, over_lags
from lagwise.lags import LagTable
from lagwise.ops.register import torch_transforms, transforms_are_active
from lagwise.terms import Terms

# Of T5 and of nearly all its relatives.
USUAL_BUCKETS = 32


class T5(Encoding):
    """Adds one learned scalar per head and lag bucket to the attention logits.

        logit(i, j) += weight[head, bucket(j - i)]

    Small lags have a bucket each, larger ones share buckets of growing width, and all lags from the last
    bucket on share one value: the table ends there. With the defaults that is lag 91 in both directions,
    or 113 when `causal`, not `max_lag`. Raffel et al. (2020), section 2.1.

    Args:
        heads: Number of query heads.
        buckets: Number of buckets, over both directions unless `causal`.
        max_lag: Scale of the logarithmic buckets; the paper's maximum distance.
        causal: Spend all buckets on the past; the encoding then needs `attention(..., causal=True)`.

    >>> T5(heads=8, causal=True).terms(-4096, 0, scale=1.0).bias.values.shape      # lags -113 .. 0
    torch.Size([8, 114])
    """

    def __init__(self, *, heads: int, buckets: int = 32, max_lag: int = 128, causal: bool = False):
        super().__init__()
        require_sizes(heads=heads)
        check_buckets(buckets, max_lag, causal)
        lags = near_lags(buckets, max_lag, causal)
        self.first, self.causal = int(lags[0]), causal
        self.weight = nn.Parameter(torch.zeros(heads, buckets))
        self.shared = Shared(t5_bucket(lags, buckets, max_lag, causal), count=buckets, device=self.weight.device)

    @property
    def bucket(self) -> Int[Tensor, " lags"]:
        """The bucket of each lag from `first` on."""
        return self.shared.place

    @classmethod
    def from_weight(
        cls,
        weight: Float[Tensor, "buckets heads"],
        *,
        heads: int | None = None,
        buckets: int | None = None,
        max_lag: int = 128,
        causal: bool = False,
    ) -> "T5":
        """Makes the encoding from the weight of a Hugging Face `relative_attention_bias`, [buckets, heads].

        A weight that is turned around has a legal shape too. With `heads` or `buckets` given it is refused, and without them
        it is if it has 32 columns and not 32 rows, since nearly every model has 32 buckets.

        >>> T5.from_weight(torch.randn(32, 12)).weight.shape
        torch.Size([12, 32])
        """
        rows, columns = checked_weight(weight, heads, buckets)
        encoding = cls(heads=columns, buckets=rows, max_lag=max_lag, causal=causal)
        encoding.weight.data = weight.detach().T.clone()
        return encoding

    def terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        if self.causal:
            require_past_only(self, last)
        # The gather stays in autograd, so kernels see and differentiate a table, never buckets.
        return Terms(bias=LagTable(self.shared.table(self.weight), self.first))

    def make_neutral(self) -> bool:
        nn.init.zeros_(self.weight)
        return True


def checked_weight(weight: Tensor, heads: int | None, buckets: int | None) -> tuple[int, int]:
    """Returns the shape of a weight, [buckets, heads], and raises where it has another, as far as that can be told."""
    require_floats("weight", weight, "[buckets, heads]")
    shape = tuple(weight.shape)
    if len(shape) != 2:
        raise ValueError(f"weight must be [buckets, heads], but has shape {shape}")
    for name, axis, expected in (("buckets", 0, buckets), ("heads", 1, heads)):
        if expected is not None:
            require_sizes(**{name: expected})
            if shape[axis] != expected:
                raise ValueError(f"weight must be [buckets, heads] with {name}={expected}, but has shape {shape}")
    if heads is None and buckets is None and shape[1] == USUAL_BUCKETS != shape[0]:
        raise ValueError(
            f"weight must be [buckets, heads], but its shape {shape} looks like [heads, buckets]: pass weight.T, "
            f"or buckets={shape[0]} if that is meant"
        )
    return shape


class T5Free(Encoding):
    """Adds one learned scalar per head and lag: T5 without buckets, the first paper's ablation "T5-NoB".

        logit(i, j) += weight[head, clip(j - i, -max_lag, max_lag)]

    Args:
        heads: Number of query heads.
        max_lag: Where the table ends; lags beyond share the last value.
        causal: Have no values for the future; the encoding then needs `attention(..., causal=True)`.

    >>> T5Free(heads=2, max_lag=3).terms(-100, 100, scale=1.0).bias.values.shape
    torch.Size([2, 7])
    """

    def __init__(self, *, heads: int, max_lag: int = 128, causal: bool = False):
        super().__init__()
        require_sizes(heads=heads)
        require_switches(causal=causal)
        self.max_lag, self.causal = require_lag(max_lag), causal
        self.weight = nn.Parameter(torch.zeros(heads, max_lag + 1 if causal else 2 * max_lag + 1))

    def terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        if self.causal:
            require_past_only(self, last)
        return Terms(bias=LagTable(self.weight, -self.max_lag))

    def make_neutral(self) -> bool:
        nn.init.zeros_(self.weight)
        return True


class ALiBi(Encoding):
    """Subtracts a fixed multiple of the distance from the logits.

        logit(i, j) -= slope[head] * |j - i|          slope[h] = 2^(-8 (h + 1) / heads) for heads a power of two

    For another number of heads, the slopes of the largest power of two below come first, then every second one of twice that
    power. Press, Smith, Lewis (2022), section 3; without `causal` the future counts like the past.

    Args:
        heads: Number of query heads.

    >>> ALiBi(heads=8).slope[:3]
    tensor([0.5000, 0.2500, 0.1250])
    """

    slope: Tensor
    zeros: Tensor

    def __init__(self, *, heads: int):
        super().__init__()
        require_sizes(heads=heads)
        power = 2 ** int(math.log2(heads))
        slopes = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
        slopes += [2.0 ** (-4.0 * (2 * h + 1) / power) for h in range(heads - power)]
        self.register_buffer("slope", torch.tensor(slopes), persistent=False)
        self.register_buffer("zeros", torch.zeros(heads, 1), persistent=False)

    def terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        return Terms(bias=LagTable(self.zeros, 0, slopes=(self.slope, -self.slope)))


class Projected(torch.autograd.Function):
    """Clips a parameter to a range, as if it were put back into it after each step of the optimizer.

    A gradient that would move it back inside passes, one that would move it farther out does not. That of `torch.clamp` is zero
    either way, so that a parameter which one step has taken outside would stay there for ever.
    """

    # With a `setup_context` torch reads the signature of `forward` in each call, which takes longer than the rest of it.
    @staticmethod
    def forward(ctx, x, low, high):
        ctx.low, ctx.high = low, high
        ctx.save_for_backward(x)
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        # A step goes against the gradient.
        gradient = torch.where(x < ctx.low, gradient.clamp(max=0.0), gradient)
        if ctx.high < math.inf:
            gradient = torch.where(x > ctx.high, gradient.clamp(min=0.0), gradient)
        return gradient, None, None


def projected(x: Tensor, low: float, high: float = math.inf) -> Tensor:
    """Clips a parameter; under transforms that have no rule for `Projected` with the gradient of `torch.clamp`."""
    transformed = transforms_are_active() or torch_transforms()
    return x.clamp(low, high) if transformed else Projected.apply(x, low, high)


class Kerple(Encoding):
    """Subtracts a learned logarithm or power of the distance from the logits.

        log:    logit(i, j) -= p ln(1 + a |j - i|)
        power:  logit(i, j) -= a |j - i|^p               0 < p <= 2

    Chi, Fan, Ramadge, Rudnicky (2022), with their first values p ~ U(0, 2), a ~ U(0, 1). Values below 0.01 count as 0.01, and
    a power above 2 as 2; gradients that lead back into that range reach the parameters there too.

    Args:
        heads: Number of query heads.
        kind: "log" or "power".

    >>> Kerple(heads=4).terms(-9, 0, scale=1.0).bias.values.shape
    torch.Size([4, 10])
    """

    def __init__(self, *, heads: int, kind: Literal["log", "power"] = "log"):
        super().__init__()
        require_sizes(heads=heads)
        require_choice("kind", kind, ("log", "power"))
        self.kind = kind
        self.p = nn.Parameter(torch.empty(heads).uniform_(0.0, 2.0))
        self.a = nn.Parameter(torch.empty(heads).uniform_(0.0, 1.0))

    def terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        distance = distances(first, last, self.p)
        p = projected(self.p[:, None], 0.01, math.inf if self.kind == "log" else 2.0)
        a = projected(self.a[:, None], 0.01)
        bias = -p * torch.log1p(a * distance) if self.kind == "log" else -a * distance**p
        return Terms(bias=LagTable(bias.to(self.p.dtype), first))


class Sandwich(Encoding):
    """Adds the products of sinusoidal position vectors, less their largest value, with a fixed weight per head.

        logit(i, j) += (sum_c cos((j - i) / 10000^(2c / head_dim)) - head_dim / 2) / (8 (h + 1) / heads)

    with c = 1 .. head_dim / 2 and heads h counted from 0.

    Chi, Fan, Rudnicky, Ramadge (2023). Nothing is learned.

    Args:
        heads: Number of query heads.
        head_dim: Number of channels of the position vectors; even.

    >>> Sandwich(heads=4, head_dim=8).terms(0, 0, scale=1.0).bias.values[:, 0]
    tensor([0., 0., 0., 0.])
    """

    weight: Tensor

    def __init__(self, *, heads: int, head_dim: int):
        super().__init__()
        require_sizes(heads=heads)
        self.head_dim = require_even("head_dim", head_dim)
        self.register_buffer("weight", heads / (8.0 * torch.arange(1, heads + 1)), persistent=False)

    def terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        (curve,) = sandwich_curve(first, last, self.weight.device, self.head_dim, self.weight.dtype)
        return Terms(bias=LagTable(self.weight[:, None] * curve, first))


@over_lags
def sandwich_curve(first: int, last: int, device: torch.device, head_dim: int, dtype: torch.dtype) -> tuple[Tensor]:
    """Returns the products of position vectors, less their largest value, which heads weight."""
    lags = torch.arange(first, last + 1, device=device)
    frequencies = inverse_frequencies(head_dim, device) * 10000.0 ** (-2.0 / head_dim)
    return (((lags[:, None] * frequencies).cos().sum(-1) - head_dim / 2).to(dtype),)
