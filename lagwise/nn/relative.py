"""Attention with projections, over itself or over a context."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import Unpack

from lagwise import feature_maps, noise
from lagwise.call import (
    MASKS,
    Call,
    LinearOptions,
    Masks,
    check_keys,
    check_longest,
    check_scale,
    check_window,
    takes,
    visible_keys,
)
from lagwise.encodings import Encoding, canonical_name, make, options_of
from lagwise.errors import (
    refuse,
    refuse_keywords,
    require_choice,
    require_floats,
    require_probability,
    require_seed,
    require_sizes,
    require_switches,
)
from lagwise.feature_maps import Favor, FeatureMap
from lagwise.linear import check_tables, linear_attention, prefill, recall, step, summary
from lagwise.nn.caches import Cache, LayerCache, LinearCache
from lagwise.ops import support
from lagwise.ops.grouped import per_query_head
from lagwise.ops.register import without_autocast
from lagwise.softmax import attention as softmax_attention
from lagwise.terms import Terms


class RelativeAttention(nn.Module):
    """Multi-head attention with projections and a relative encoding, over itself or over a context.

    Args:
        dim: Width of input and output.
        heads: Number of query heads.
        head_dim: Width of a head; `dim / heads` unless given.
        kv_heads: Number of key and value heads; that of the queries unless given.
        encoding: An encoding, or the name of one, or None: then positions come with `terms`, or not at all.
        causal: Let queries see no later key.
        window: How many lags into the past and into the future a query may see.
        dropout: Probability of dropping an attention weight in training.
        bias: Give the projections offsets.
        scale: Factor of the content product; `head_dim ** -0.5` unless given.
        impl: Who computes, see `lagwise.attention` and `lagwise.linear_attention`.
        attention: "softmax", or "linear", which has neither window nor dropout of weights.
        feature_map: Of linear attention: "favor" (unless given), "relu", "elu", or a `FeatureMap`. A name makes the layer's own;
            the projection of "favor" is drawn once, like the first values of weights, until `feature_map.redraw()`.
        content_dim: Of linear attention with given `terms`: the width of queries and keys after their transform, for "favor".

    >>> layer = RelativeAttention(64, heads=4, encoding="shaw")
    >>> layer(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    >>> layer = RelativeAttention(64, heads=4, encoding="sine-spe", attention="linear", feature_map="relu")
    >>> layer(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    # nn.Module's own annotation makes every call Any.
    __call__: Callable[..., Tensor]

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        encoding: Encoding | str | None = None,
        causal: bool = False,
        window: tuple[int, int] | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        scale: float | None = None,
        impl: str = "auto",
        attention: Literal["softmax", "linear"] = "softmax",
        feature_map: FeatureMap | str | None = None,
        content_dim: int | None = None,
        **unknown: Any,
    ):
        super().__init__()
        refuse_keywords(unknown, RelativeAttention)
        require_switches(causal=causal, bias=bias)
        self.head_dim = width_of_head(dim, heads, head_dim)
        self.dim, self.heads, self.kv_heads = dim, heads, heads if kv_heads is None else kv_heads
        require_sizes(kv_heads=self.kv_heads)
        if heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, but heads={heads} and kv_heads={kv_heads}")
        self.causal, self.window, self.impl = causal, check_window(window), impl
        self.dropout, self.scale = require_probability("dropout", dropout), check_scale(scale, self.head_dim)
        self.encoding = named(encoding, dim=dim, heads=heads, head_dim=self.head_dim, causal=causal)
        check_encoding(self.encoding, attention)
        if self.encoding is not None and self.encoding.absolute:
            raise ValueError(
                f"encoding {type(self.encoding).__name__} is absolute and acts on the model's input: give it to an Encoder "
                "or Decoder, or call its `embed` on the input"
            )
        self.feature_map: FeatureMap | None = None
        if content_dim is not None:
            require_sizes(content_dim=content_dim)
        if attention == "linear":
            width = content_width(self.encoding, heads, self.head_dim) if content_dim is None else content_dim
            self.feature_map = self._linear_map(feature_map, width)
        elif feature_map is not None:
            raise ValueError(f"feature_map belongs to linear attention, but attention is {attention!r}: pass attention='linear'")
        else:
            require_choice("impl", impl, ("auto", *support.IMPLEMENTATIONS))
        self.q = nn.Linear(dim, heads * self.head_dim, bias=bias)
        self.k = nn.Linear(dim, self.kv_heads * self.head_dim, bias=bias)
        self.v = nn.Linear(dim, self.kv_heads * self.head_dim, bias=bias)
        self.out = nn.Linear(heads * self.head_dim, dim, bias=bias)

    @takes(Masks)
    def forward(
        self,
        x: Float[Tensor, "batch queries dim"],
        context: Float[Tensor, "batch keys dim"] | None = None,
        *,
        terms: Terms | None = None,
        cache: LayerCache | None = None,
        seed: Int[Tensor, ""] | None = None,
        **masks: Unpack[Masks],
    ) -> Float[Tensor, "batch queries dim"]:
        """Attends to x, or to the context.

        Args:
            x: What asks.
            context: What is attended to, x unless given.
            terms: The position terms; those of the layer's own encoding unless given.
            cache: What is kept of earlier tokens, from `new_cache`; x is added. With a context it is filled once and then used
                instead of the context.
            seed: Where random numbers start; drawn afresh in training unless given.

        The others are masks of `lagwise.attention`; the keys of the cache count.
        """
        refuse_keywords([name for name in masks if name not in MASKS], RelativeAttention.forward)
        check_input("x", x, self.dim)
        if context is not None:
            check_input("context", context, self.dim)
        if terms is not None and not isinstance(terms, Terms):
            refuse("terms", "Terms or None", terms)
        if cache is not None:
            if masks.get("cu_seqlens") is not None:
                raise ValueError("cu_seqlens cannot be combined with a cache, which holds one sequence per row")
            self._check_cache(cache, len(x), across=context is not None, positions=self.encoding is not None or terms is not None)
        require_seed(seed)
        if seed is None:
            seed = noise.draw_seed(self.training, x.device)
        q = self._split(self.q(x), self.heads)
        start = 0 if cache is None or context is not None else cache.length
        # The keys and values of a context are computed once.
        known = context is not None and cache is not None and cache.length > 0
        k, v = (None, None) if known else self._keys_and_values(x if context is None else context)
        keys = cache.length if cache is not None and k is None else start + (x if context is None else context).shape[1]
        if terms is None:
            check_longest(masks.get("cu_seqlens"), masks.get("max_seqlen"))
            place = Call(causal=self.causal, window=self.window, query_start=start, max_seqlen=masks.get("max_seqlen"))
            first, last = place.reachable_lags(x.shape[1], keys)
            terms = Terms() if self.encoding is None else self.terms_of(self.encoding, first, last, seed)
        if isinstance(cache, LinearCache):
            lengths, key_mask = masks.get("lengths"), masks.get("key_mask")
            check_keys(len(x), keys, lengths, key_mask, x.device)
            visible = visible_keys(keys, lengths, key_mask)
            out = self._through_state(q, k, v, terms, cache, None if visible is None else visible[:, start:])
            return self.out(out.transpose(1, 2).flatten(2))
        if cache is not None:
            q, k, v, terms = self._through_cache(q, k, v, terms, cache, start)
        assert k is not None and v is not None
        options: LinearOptions = {**masks, "causal": self.causal, "scale": self.scale, "seed": seed}
        if self.feature_map is not None:
            out = linear_attention(q, k, v, terms, feature_map=self.feature_map, impl=self.impl, **options)
        else:
            dropout = self.dropout if self.training else 0.0
            out = softmax_attention(
                q, k, v, terms, window=self.window, query_start=start, dropout=dropout, impl=self.impl, **options
            )
        return self.out(out.transpose(1, 2).flatten(2))

    def new_cache(self) -> LayerCache:
        """Returns an empty cache for one generation."""
        return Cache() if self.feature_map is None else LinearCache()

    def terms_of(self, encoding: Encoding, first: int, last: int, seed: Tensor) -> Terms:
        """Returns the terms of an encoding for this kind of attention."""
        terms = encoding.terms if self.feature_map is None else encoding.linear_terms
        with without_autocast(seed):
            return terms(first, last, scale=self.scale, seed=seed)

    def _check_cache(self, cache: LayerCache, batch: int, *, across: bool, positions: bool) -> None:
        """Raises for a cache that does not fit; `across` means a context, `positions` that there are terms of positions."""
        own = type(self.new_cache())
        if not isinstance(cache, own):
            raise ValueError(
                f"cache must be a {own.__name__} in this attention, but is a {type(cache).__name__}: take it from new_cache()"
            )
        if cache.batch not in (None, batch):
            raise ValueError(
                f"cache must have the batch of x, {batch}, but has {cache.batch}: take new_cache(), or choose its rows by select"
            )
        if across and (positions or self.window or self.causal):
            raise ValueError(
                "cache cannot be combined with a context in attention with positions (encoding, terms, causal or window): "
                "it does not know where the queries of later calls stand"
            )
        if isinstance(cache, LinearCache) and not across and not self.causal:
            raise ValueError("cache needs causal=True in linear attention, whose state goes from token to token")

    def _linear_map(self, feature_map: FeatureMap | str | None, width: int) -> FeatureMap:
        """Returns the feature map, and raises for options that linear attention does not have."""
        if self.dropout > 0.0:
            raise ValueError(
                f"dropout of attention weights must be 0 with attention='linear', which never makes them, but is {self.dropout}: "
                "drop units of the layers instead"
            )
        if self.window is not None:
            raise ValueError(
                f"window must be None with attention='linear', but is {self.window}: take attention='softmax', or an encoding "
                "whose weights decay, such as 'alibi'"
            )
        phi = own_map("favor" if feature_map is None else feature_map, width)
        # One token: raises for an `impl` or a width that does not fit.
        x = zeros_beside(phi, 1, self.heads, 1, width)
        linear_attention(x, x, x, feature_map=phi, causal=self.causal, scale=self.scale, impl=self.impl)
        return phi

    def _keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._split(self.k(x), self.kv_heads), self._split(self.v(x), self.kv_heads)

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)

    def _through_state(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, terms: Terms, cache: LinearCache, visible: Tensor | None
    ) -> Tensor:
        """Adds new keys and values to the state, and returns linear attention to all of them."""
        assert self.feature_map is not None
        if k is not None and v is not None and self.causal:
            if cache.state is None:
                out, cache.state = prefill(q, k, v, terms, feature_map=self.feature_map, key_mask=visible, scale=self.scale)
            else:
                out, cache.state = step(
                    q, k, v, cache.state, terms, feature_map=self.feature_map, key_mask=visible, scale=self.scale
                )
            return out
        if k is not None and v is not None:
            cache.state = summary(k, v, feature_map=self.feature_map, key_mask=visible, scale=self.scale)
        assert cache.state is not None
        return recall(q, cache.state, feature_map=self.feature_map, scale=self.scale)

    def _through_cache(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, terms: Terms, cache: Cache, start: int
    ) -> tuple[Tensor, Tensor, Tensor, Terms]:
        """Adds new keys and values to the cache, transformed, and returns all of them with terms for transformed keys."""
        transformed_q = q
        positions = start + torch.arange(q.shape[2], device=q.device)
        raw = terms.transform is not None and (terms.query is not None or terms.key is not None)
        if k is not None and v is not None:
            transformed_k = k
            if terms.transform is not None:
                key_positions = start + torch.arange(k.shape[2], device=k.device)
                transformed_q, transformed_k = terms.content(q, k, positions, key_positions)
            # A transform with codes per query head leaves more key heads than value heads; raw keys have as many.
            if not raw:
                v = per_query_head(v, transformed_k.shape[1])
            cache.append(transformed_k, v, k if raw else None)
        elif terms.transform is not None:
            transformed_q, _ = terms.transform(q, q, positions, positions)
        assert cache.k is not None and cache.v is not None
        if not raw:
            return transformed_q, cache.k, cache.v, replace(terms, transform=None)
        ready = (transformed_q, cache.k)
        assert cache.raw_k is not None
        return q, cache.raw_k, cache.v, replace(terms, transform=lambda *_: ready)


def named(encoding: Encoding | str | None, *, dim: int, heads: int, head_dim: int, causal: bool) -> Encoding | None:
    """Makes an encoding that is given by name; one that has a `causal` form takes it in a causal model."""
    if encoding is not None and not isinstance(encoding, Encoding | str):
        refuse("encoding", "an Encoding, the name of one or None", encoding)
    if not isinstance(encoding, str):
        return encoding
    options = {"causal": True} if causal and "causal" in options_of(canonical_name(encoding)) else {}
    return make(encoding, dim=dim, heads=heads, head_dim=head_dim, **options)


def check_encoding(encoding: Encoding | None, attention: str) -> None:
    """Raises for an unknown kind of attention, and for an encoding that it cannot use."""
    require_choice("attention", attention, ("softmax", "linear"))
    if attention == "softmax" and encoding is not None and encoding.linear_only:
        raise ValueError(
            f"encoding {type(encoding).__name__} acts on the features of linear attention, which softmax attention does not "
            "have: pass attention='linear'"
        )


def content_width(encoding: Encoding | None, heads: int, head_dim: int) -> int:
    """Returns the width of queries after an encoding's transform, and raises for one that has no linear form."""
    if encoding is None:
        return head_dim
    x = zeros_beside(encoding, 1, heads, 1, head_dim)
    position = torch.zeros(1, dtype=torch.int64, device=x.device)
    terms = encoding.linear_terms(0, 0, scale=1.0, seed=position[0])
    check_tables(terms)
    return terms.content(x, x, position, position)[0].shape[3]


def zeros_beside(module: nn.Module, *shape: int) -> Tensor:
    """Returns zeros on the device and in the dtype of a module's first floating-point tensor, if it has one."""
    tensors = (x for x in chain(module.parameters(), module.buffers()) if x.is_floating_point())
    return next(tensors, torch.zeros(())).new_zeros(shape)


def own_map(feature_map: FeatureMap | str, width: int) -> FeatureMap:
    """Makes a feature map that is given by name, with a projection from the default generator."""
    if isinstance(feature_map, FeatureMap):
        return feature_map
    phi = deepcopy(feature_maps.named(feature_map, width, torch.get_default_device()))
    if isinstance(phi, Favor):
        phi.redraw()
    return phi


def width_of_head(dim: int, heads: int, head_dim: int | None) -> int:
    """Returns the width of a head, which must divide the width of the model unless it is given."""
    require_sizes(dim=dim, heads=heads)
    if head_dim is not None:
        require_sizes(head_dim=head_dim)
        return head_dim
    if dim % heads:
        raise ValueError(f"dim must be a multiple of heads, but dim={dim} and heads={heads}: or pass head_dim")
    return dim // heads


def check_input(name: str, x: Tensor, dim: int) -> None:
    """Raises for anything but a tensor of tokens of a width."""
    require_floats(name, x, f"[batch, time, {dim}]")
    if x.ndim != 3 or x.shape[2] != dim:
        raise ValueError(f"{name} must be [batch, time, {dim}], but has shape {tuple(x.shape)}")
