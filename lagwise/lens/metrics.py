"""Numbers for distributions over lags and for attention maps."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lagwise.lens.inversions import violations

SHARES = (0.5, 0.9, 0.99)
"""The shares of the probability whose lags are asked for."""


def entropy(probability: Float[Tensor, "*rows places"]) -> Float[Tensor, "*rows"]:
    """Returns the entropy of each row in nats; its exponential is the number of places that a row is spread over.

    >>> entropy(torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]])).exp()
    tensor([4., 1.])
    """
    return torch.special.entr(probability).sum(-1)


def kl(p: Float[Tensor, "*rows places"], q: Float[Tensor, "*rows places"]) -> Float[Tensor, "*rows"]:
    """Returns KL(p || q) of each row in nats, infinite where q excludes what p has; see also `Parts.divergence`.

    >>> kl(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]))
    tensor(0.6931)
    """
    return (torch.special.xlogy(p, p) - torch.special.xlogy(p, q)).sum(-1)


def effective_range(
    probability: Float[Tensor, "*rows lags"], lags: Int[Tensor, " lags"], shares: Sequence[float] = SHARES
) -> Int[Tensor, "shares ..."]:
    """Returns how far each row reaches: the smallest d for which the lags from -d to d hold each share of the probability.

    The interval is symmetric around 0, so that a head that looks at lag -20 alone reaches 20; `effective_size` is 1 for it.

    >>> effective_range(torch.tensor([[0.1, 0.2, 0.4, 0.3]]), torch.tensor([-2, -1, 0, 1]))
    tensor([[1],
            [1],
            [2]])
    """
    distance = lags.abs()
    mass = probability.new_zeros(*probability.shape[:-1], int(distance.max()) + 1, dtype=torch.float64)
    return _places_for(mass.index_add_(-1, distance, probability.double()), shares) - 1


def effective_size(probability: Float[Tensor, "*rows places"], shares: Sequence[float] = SHARES) -> Int[Tensor, "shares ..."]:
    """Returns how many places hold each share of a row's probability: the size of the smallest such set.

    >>> effective_size(torch.tensor([0.1, 0.2, 0.4, 0.3]))
    tensor([2, 3, 4])
    """
    return _places_for(probability.double().sort(-1, descending=True).values, shares)


def _places_for(mass: Tensor, shares: Sequence[float]) -> Tensor:
    """Returns how many places from the first on hold each share of a row."""
    if not shares or not all(0.0 < share <= 1.0 for share in shares):
        raise ValueError(f"shares must be above 0 and at most 1, but are {tuple(shares)}: 0.9 asks for 90 %")
    held = mass.cumsum(-1) / mass.sum(-1, keepdim=True)
    # What is missing by rounding counts as held.
    return torch.stack([(held < share - 1e-6).sum(-1) + 1 for share in shares])


def translation_invariance(
    maps: Float[Tensor, "*maps queries keys"], visible: Bool[Tensor, "*broadcast queries keys"] | None = None
) -> Float[Tensor, "*maps"]:
    """Returns how much of the variance of each map lies along its diagonals: 0 if it depends on the lag alone, at most 1.

        sum over diagonals of size * variance along it / (size of all * variance of all)

    Wang et al. (2021), as the third paper measures causal attention. A map that is the same everywhere gives 0.

    Args:
        maps: Attention weights, or scores.
        visible: Which pairs count, all unless given: those that a query may see, `parts.visible[:, None]`.

    >>> lags = torch.arange(5) - torch.arange(5)[:, None]
    >>> translation_invariance(torch.exp(-lags.abs().float()))
    tensor(0., dtype=torch.float64)
    """
    queries, keys = maps.shape[-2:]
    values = maps.double().flatten(-2)
    weight = torch.ones_like(values) if visible is None else visible.expand(maps.shape).flatten(-2).double()
    values = values.masked_fill(weight == 0.0, 0.0)
    diagonal = (torch.arange(keys) - torch.arange(queries)[:, None] + queries - 1).flatten().to(maps.device)

    def along(x: Tensor) -> Tensor:
        """The sums of the diagonals."""
        return x.new_zeros(*x.shape[:-1], queries + keys - 1).index_add_(-1, diagonal, x)

    # A second pass after the mean: the difference of squares would lose the small variances.
    means = along(values) / along(weight).clamp(min=1.0)
    within = (weight * (values - means[..., diagonal]) ** 2).sum(-1)
    mean = values.sum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp(min=1.0)
    total = (weight * (values - mean) ** 2).sum(-1)
    same = total <= 1e-24 * (values**2).sum(-1)
    return torch.where(same, 0.0, within / total)


def monotonicity_violation(
    maps: Float[Tensor, "*maps queries keys"],
    visible: Bool[Tensor, "*broadcast queries keys"] | None = None,
    *,
    query_start: int = 0,
) -> Float[Tensor, "*maps"]:
    """Returns the share of pairs of keys in which the one nearer to the query has the smaller value, over all queries of a map.

    Wang et al. (2021), as the third paper measures causal attention; keys before and behind the query are not compared with each
    other, and the query's own position counts on both sides. A map without a pair gives NaN. A value that is NaN is smaller and
    larger than none.

    Args:
        maps: Attention weights, or scores.
        visible: Which pairs of query and key count, all unless given: those that a query may see, `parts.visible[:, None]`.
        query_start: Position of the first query.

    >>> lags = torch.arange(5) - torch.arange(5)[:, None]
    >>> monotonicity_violation(torch.exp(-lags.abs().float())), monotonicity_violation(lags.abs().float())
    (tensor(0., dtype=torch.float64), tensor(1., dtype=torch.float64))
    """
    queries, keys = maps.shape[-2:]
    lags = torch.arange(keys) - (query_start + torch.arange(queries)[:, None])
    counts = torch.ones_like(lags, dtype=torch.bool) if visible is None else visible.cpu()
    values = maps.detach().cpu().to(torch.promote_types(maps.dtype, torch.float32))
    # One map at a time: all of them at once would be several copies of them.
    each = zip(*(x.expand(maps.shape).reshape(-1, queries, keys).numpy() for x in (values, counts)), strict=True)
    found = [violations(value, count, lags.numpy()) for value, count in each]
    return torch.tensor(found, dtype=torch.float64, device=maps.device).view(maps.shape[:-2])
