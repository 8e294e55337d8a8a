"""Attention taken apart: which share of a logit comes from the lag, which from the content, and what each does alone."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import Unpack

from lagwise.call import WEIGHT_OPTIONS, Call, WeightOptions, check_call, takes
from lagwise.encodings import Encoding
from lagwise.feature_maps import FeatureMap
from lagwise.lags import LagTable
from lagwise.linear import check_causal, linear_terms, prepare
from lagwise.ops import dense
from lagwise.softmax import terms_of
from lagwise.terms import Terms


@dataclass(frozen=True)
class Parts:
    """The logits of one call of attention by what they come from, in nats.

        posterior_ij = softmax_j(prior score + context score) = prior_ij likelihood_ij / sum_j' prior_ij' likelihood_ij'

    Prior, likelihood and posterior are probabilities over the keys that a query may see, and zero elsewhere: the likelihood is
    normalised too. A query that sees no key has zeros.

    Linear attention has the same parts: its weights are exp(bias) times a product of features, whose logarithm is the content.
    It is minus infinity where that product is 0, as the weight is then, and each query may have a constant of its own, which
    feature maps leave open because it cancels.

    Args:
        scores: The parts that are there: "content" (the product of q and k, with gain and transform; of linear attention the
            logarithm of the product of features), "query", "key" and "bias".
        lags: The lag of each pair, [batch or 1, queries, keys].
        visible: Whether the query may see the key, of the same shape.
    """

    scores: dict[str, Float[Tensor, "batch heads queries keys"]]
    lags: Int[Tensor, "rows queries keys"]
    visible: Bool[Tensor, "rows queries keys"]

    @property
    def prior_score(self) -> Float[Tensor, "batch heads queries keys"]:
        """The bias, which knows the lag alone; zeros where there is none."""
        return self.scores["bias"] if "bias" in self.scores else torch.zeros_like(self.scores["content"])

    @property
    def context_score(self) -> Float[Tensor, "batch heads queries keys"]:
        """The sum of all that depends on the content."""
        return torch.stack([score for name, score in self.scores.items() if name != "bias"]).sum(0)

    @property
    def final_score(self) -> Float[Tensor, "batch heads queries keys"]:
        """The logit, the sum of all parts."""
        return self.prior_score + self.context_score

    @property
    def prior(self) -> Float[Tensor, "batch heads queries keys"]:
        """The attention of the bias alone."""
        return self._log_softmax(self.prior_score).exp()

    @property
    def likelihood(self) -> Float[Tensor, "batch heads queries keys"]:
        """The attention without the bias."""
        return self._log_softmax(self.context_score).exp()

    @property
    def posterior(self) -> Float[Tensor, "batch heads queries keys"]:
        """The attention itself."""
        return self._log_softmax(self.final_score).exp()

    def divergence(self) -> Float[Tensor, "batch heads queries"]:
        """Returns KL(posterior || prior) in nats: how far the content moves each query's attention from where the bias put it.

        It is taken from logarithms, so that a prior too small for a number does not make it infinite.
        """
        after, before = self._log_softmax(self.final_score), self._log_softmax(self.prior_score)
        return (after.exp() * (after - before).nan_to_num()).sum(-1)

    def _log_softmax(self, score: Tensor) -> Tensor:
        """Returns logarithms over the visible keys, and minus infinity elsewhere and where the score is that."""
        score = score.masked_fill(~self.visible[:, None], -torch.inf)
        return torch.log_softmax(score, dim=-1).masked_fill(score == -torch.inf, -torch.inf)


@takes(WeightOptions)
@torch.no_grad()
def attention_parts(
    q: Float[Tensor, "batch heads queries dim"],
    k: Float[Tensor, "batch kv_heads keys dim"],
    encoding: Encoding | Terms | None = None,
    *,
    feature_map: FeatureMap | str | None = None,
    **options: Unpack[WeightOptions],
) -> Parts:
    """Returns the parts of the logits of `lagwise.attention`, whose arguments these are, in float32 at least.

    With a feature map they are those of `lagwise.linear_attention`, and the posterior is its weights. Rotary is refused beside
    "relu" and "elu": it turns their features in the numerator alone, so that weights may be negative and do not sum to one.

    >>> import lagwise
    >>> q = k = torch.randn(1, 8, 10, 64)
    >>> parts = attention_parts(q, k, lagwise.ALiBi(heads=8), causal=True)
    >>> sorted(parts.scores), parts.posterior.shape
    (['bias', 'content'], torch.Size([1, 8, 10, 10]))
    """
    call = check_call(attention_parts, q, k, k, options, WEIGHT_OPTIONS).with_key_mask(k.shape[2])
    if feature_map is not None:
        _check_linear(q, k, call)
        terms, _ = linear_terms(encoding, q, k, *call.reachable_lags(q.shape[2], k.shape[2]), call)
        scores = {"content": _log_kernel(q, k, terms, feature_map, replace(call, key_mask=None))}
        return _parts(q, scores, terms, *dense.geometry(q, k, call))
    terms = terms_of(encoding, q, k, call)
    if terms.features is not None:
        raise ValueError(
            "encoding must act on softmax attention, but maps the features of linear attention: pass its feature_map"
        )
    replace(terms, value=None).check_fit(q, k)
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, terms = q.to(dtype), k.to(dtype), terms.to(dtype)
    lags, visible = dense.geometry(q, k, call)
    places, scale = dense.positions(q, k, call), call.scale
    content = terms.content(q, k, *places)
    scores = {"content": _scores(*content, "gain", terms.gain, lags, scale, places)}
    # A term that meets one side alone is the logit of that side with nothing on the other.
    if terms.query is not None:
        scores["query"] = _scores(q, torch.zeros_like(k), "query", terms.query, lags, scale, places)
    if terms.key is not None:
        scores["key"] = _scores(torch.zeros_like(q), k, "key", terms.key, lags, scale, places)
    return _parts(q, scores, terms, lags, visible)


def _parts(q: Tensor, scores: dict[str, Tensor], terms: Terms, lags: Tensor, visible: Tensor) -> Parts:
    """Adds the bias to the scores of the content."""
    if terms.bias is not None:
        bias = terms.bias.to(scores["content"].dtype)
        scores = {**scores, "bias": bias.at(lags).transpose(0, 1).expand(len(q), q.shape[1], -1, -1)}
    # Windows, masks and packed sequences may leave the mask narrower than the lags.
    rows = torch.broadcast_shapes(lags.shape, visible.shape)
    return Parts(scores, lags.expand(rows), visible.expand(rows))


def _check_linear(q: Tensor, k: Tensor, call: Call) -> None:
    """Raises for what linear attention does not have."""
    check_causal(q, k, call.causal)
    if call.window is not None or call.per_row or call.query_start != 0:
        raise ValueError(
            f"window and query_start must be left out with a feature_map, but are {call.window} and {call.query_start}: linear "
            "attention has neither"
        )


def _log_kernel(q: Tensor, k: Tensor, terms: Terms, feature_map: FeatureMap | str, call: Call) -> Tensor:
    """Returns the logarithm of the products of features as linear attention makes them, [batch, heads, queries, keys]."""
    if call.cu_seqlens is not None:
        found = q.new_full((1, q.shape[1], q.shape[2], k.shape[2]), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
        for start, end in pairwise(call.cu_seqlens.tolist()):
            own = slice(start, end)
            found[:, :, own, own] = _log_kernel(q[:, :, own], k[:, :, own], terms, feature_map, replace(call, cu_seqlens=None))
        return found
    prepared = prepare(q, k, k, terms, feature_map, call)
    if prepared.plain_q is not None:
        raise ValueError(
            "encoding must keep the weights of linear attention probabilities, but Rotary turns features in the numerator alone: "
            "weights may be negative and do not sum to one, so that there is no posterior to show. With 'favor' there is one"
        )
    kernel = prepared.q @ prepared.keys.features.mT
    if bool((kernel < 0.0).any()):
        raise ValueError(
            "feature_map must make features that are not negative, but products of its features are, which are no weights: "
            "use one whose features are positive"
        )
    return kernel.log() + prepared.keys.weights()[:, :, None]


def _scores(
    q: Tensor, k: Tensor, name: str, table: LagTable | None, lags: Tensor, scale: float, places: tuple[Tensor, Tensor]
) -> Tensor:
    """Returns the logits with one table alone, head by head: a table of vectors is written out for all pairs."""
    if table is None:
        return dense.logits(q, k, Terms(), lags, scale, places)
    k = dense.per_query_head(k, q.shape[1])
    found = []
    for head in range(q.shape[1]):
        own = table.values[head : head + 1] if table.heads > 1 else table.values
        only = replace(Terms(), **{name: LagTable(own, table.first)})
        found.append(dense.logits(q[:, head : head + 1], k[:, head : head + 1], only, lags, scale, places))
    return torch.cat(found, dim=1)


@dataclass(frozen=True)
class ByLag:
    """A mean over all pairs with the same lag, and how many pairs there were. `a + b` is the mean over both.

    Args:
        first: The lag of the first column.
        total: The sum over the pairs with each lag, of each head.
        count: The number of pairs with each lag; zero where there was none.
    """

    first: int
    total: Float[Tensor, "heads lags"]
    count: Int[Tensor, " lags"]

    @property
    def lags(self) -> Int[Tensor, " lags"]:
        """The lags."""
        return torch.arange(self.first, self.first + len(self.count), device=self.count.device)

    @property
    def mean(self) -> Float[Tensor, "heads lags"]:
        """The mean of each head at each lag, NaN where there was no pair."""
        return self.total / self.count

    def __add__(self, other: "ByLag") -> "ByLag":
        if not isinstance(other, ByLag):
            return NotImplemented
        if len(self.total) != len(other.total):
            raise ValueError(
                f"means that are added must be of the same heads, but have {len(self.total)} and {len(other.total)}: add those "
                "of one layer"
            )
        first = min(self.first, other.first)
        last = max(self.first + len(self.count), other.first + len(other.count))
        total, count = self.total.new_zeros(len(self.total), last - first), self.count.new_zeros(last - first)
        for part in (self, other):
            columns = slice(part.first - first, part.first - first + len(part.count))
            total[:, columns] += part.total
            count[columns] += part.count
        return ByLag(first, total, count)


def mean_by_lag(
    values: Float[Tensor, "batch heads queries keys"],
    lags: Int[Tensor, "rows queries keys"],
    visible: Bool[Tensor, "rows queries keys"],
) -> ByLag:
    """Returns the mean of something over all visible pairs with the same lag, summed in float64.

    >>> lags = torch.tensor([[[0, 1], [-1, 0]]])
    >>> found = mean_by_lag(torch.tensor([[[[1.0, 5.0], [7.0, 3.0]]]]), lags, lags <= 0)
    >>> found.lags, found.mean, found.count
    (tensor([-1,  0]), tensor([[7., 2.]], dtype=torch.float64), tensor([1, 2]))
    """
    shape = (len(values), *values.shape[2:])
    lags, visible = lags.expand(shape), visible.expand(shape)
    seen = lags[visible]
    if not len(seen):
        raise ValueError("visible must leave at least one pair of query and key, but leaves none")
    first = int(seen.min())
    count = torch.bincount(seen - first)
    total = torch.zeros(values.shape[1], len(count), dtype=torch.float64, device=values.device)
    total.index_add_(1, seen - first, values.transpose(0, 1)[:, visible].double())
    return ByLag(first, total, count)


def expected_logits(calls: Iterable[Parts]) -> dict[str, ByLag]:
    """Returns the mean logit by lag over data, as "logit", and each of its parts, which sum to it.

    This is what a prior becomes for encodings whose terms meet the content: an exact prior has the same bias at each pair.

    Args:
        calls: The parts of calls of one layer, for example `call.parts()` of what `capture` found.
    """
    found: dict[str, ByLag] = {}
    for number, parts in enumerate(calls):
        new = {name: mean_by_lag(score, parts.lags, parts.visible) for name, score in parts.scores.items()}
        new["logit"] = mean_by_lag(parts.final_score, parts.lags, parts.visible)
        if number and found.keys() != new.keys():
            raise ValueError(
                f"calls must have the same parts, but have {', '.join(found)} and {', '.join(new)}: take those of one layer"
            )
        found = {name: found[name] + mean if number else mean for name, mean in new.items()}
    if not found:
        raise ValueError("calls must hold the parts of at least one call, but are empty")
    return found


def average_attention(calls: Iterable[Parts]) -> ByLag:
    """Returns the mean attention weight by lag over the calls of one layer, over all pairs that a query may see."""
    means = [mean_by_lag(parts.posterior, parts.lags, parts.visible) for parts in calls]
    if not means:
        raise ValueError("calls must hold the parts of at least one call, but are empty")
    return sum(means[1:], means[0])
