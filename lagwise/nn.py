"""Layers: attention with projections, transformer layers, encoder and decoder stacks with a cache.

>>> encoder = Encoder(64, layers=2, heads=4, encoding="at5")
>>> encoder(torch.randn(2, 10, 64)).shape
torch.Size([2, 10, 64])
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lagwise import feature_maps, noise
from lagwise.attention import attention as softmax_attention
from lagwise.attention import check_dropout, check_ends, check_keys, check_longest, check_window
from lagwise.encodings import ENCODINGS, Encoding, NoEncoding, StochasticEncoding, make, options_of
from lagwise.feature_maps import Favor, FeatureMap
from lagwise.impl.operators import without_autocast
from lagwise.lags import reachable_lags
from lagwise.linear import State, check_tables, linear_attention, prefill, recall, step, summary, visible_keys
from lagwise.noise import Stream
from lagwise.terms import Terms

ACTIVATIONS = {"gelu": nn.GELU, "relu": nn.ReLU}


@dataclass
class Cache:
    """Keys and values of one attention layer that later queries see again.

    Keys are kept after the encoding's transform, so that it is not redone; the raw ones are kept too where a table reads
    them beside a transform.
    """

    k: Tensor | None = None
    v: Tensor | None = None
    raw_k: Tensor | None = None

    @property
    def length(self) -> int:
        """The number of keys so far."""
        return 0 if self.v is None else self.v.shape[2]

    def append(self, k: Tensor, v: Tensor, raw_k: Tensor | None) -> None:
        """Adds the keys and values of new tokens."""
        self.k, self.v, self.raw_k = (
            new if old is None or new is None else torch.cat([old, new], dim=2)
            for old, new in ((self.k, k), (self.v, v), (self.raw_k, raw_k))
        )

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keeps these rows of the batch, in this order, as beam search needs it."""
        self.k, self.v, self.raw_k = (None if x is None else x[rows] for x in (self.k, self.v, self.raw_k))


@dataclass
class LinearCache:
    """The state of one layer of linear attention, which does not grow with the number of tokens.

    Keys are in its sums as they were masked when they came: later masks tell about later keys alone.
    """

    state: State | None = None

    @property
    def length(self) -> int:
        """The number of keys so far."""
        return 0 if self.state is None else self.state.length

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keeps these rows of the batch, in this order, as beam search needs it."""
        self.state = None if self.state is None else self.state.select(rows)


LayerCache: TypeAlias = Cache | LinearCache
"""The cache of one layer of softmax or of linear attention."""


@dataclass
class DecoderCache:
    """The caches of a decoder: those of self-attention, and those of cross-attention, which are filled once."""

    self_attention: list[LayerCache] = field(default_factory=list)
    cross_attention: list[LayerCache] = field(default_factory=list)

    @property
    def length(self) -> int:
        """The number of tokens so far."""
        return self.self_attention[0].length

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keeps these rows of the batch, in this order."""
        for cache in (*self.self_attention, *self.cross_attention):
            cache.select(rows)


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
    ):
        super().__init__()
        self.head_dim = width_of_head(dim, heads, head_dim)
        self.dim, self.heads, self.kv_heads = dim, heads, heads if kv_heads is None else kv_heads
        if self.kv_heads < 1 or heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, but heads={heads} and kv_heads={kv_heads}")
        self.causal, self.window, self.dropout, self.impl = causal, check_window(window), check_dropout(dropout), impl
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.encoding = named(encoding, dim=dim, heads=heads, head_dim=self.head_dim, causal=causal)
        check_encoding(self.encoding, attention)
        if self.encoding is not None and self.encoding.absolute:
            raise ValueError(
                f"encoding {type(self.encoding).__name__} is absolute and acts on the model's input: give it to an Encoder "
                "or Decoder, or call its `embed` on the input"
            )
        self.feature_map: FeatureMap | None = None
        if attention == "linear":
            width = content_width(self.encoding, heads, self.head_dim) if content_dim is None else content_dim
            self.feature_map = self._linear_map(feature_map, width)
        elif feature_map is not None:
            raise ValueError(f"feature_map belongs to linear attention, but attention is {attention!r}: pass attention='linear'")
        self.q = nn.Linear(dim, heads * self.head_dim, bias=bias)
        self.k = nn.Linear(dim, self.kv_heads * self.head_dim, bias=bias)
        self.v = nn.Linear(dim, self.kv_heads * self.head_dim, bias=bias)
        self.out = nn.Linear(heads * self.head_dim, dim, bias=bias)

    def forward(
        self,
        x: Float[Tensor, "batch queries dim"],
        context: Float[Tensor, "batch keys dim"] | None = None,
        *,
        terms: Terms | None = None,
        cache: LayerCache | None = None,
        lengths: Int[Tensor, " batch"] | None = None,
        key_mask: Bool[Tensor, "batch keys"] | None = None,
        cu_seqlens: Int[Tensor, " ends"] | None = None,
        max_seqlen: int | None = None,
        seed: Int[Tensor, ""] | None = None,
    ) -> Float[Tensor, "batch queries dim"]:
        """Attends to x, or to the context.

        Args:
            x: What asks.
            context: What is attended to, x unless given.
            terms: The position terms; those of the layer's own encoding unless given.
            cache: What is kept of earlier tokens, from `new_cache`; x is added. With a context it is filled once and then used
                instead of the context.
            lengths: Number of keys that exist in each row, those of the cache counted.
            key_mask: Which keys may be attended to, those of the cache included.
            cu_seqlens: Ends of packed sequences.
            max_seqlen: The most tokens of one of them, see `lagwise.attention`.
            seed: Where random numbers start; drawn afresh in training unless given.
        """
        for name, given in (("x", x), ("context", context)):
            if given is not None and (given.ndim != 3 or given.shape[2] != self.dim):
                raise ValueError(f"{name} must be [batch, time, {self.dim}], but has shape {tuple(given.shape)}")
        if cache is not None and cu_seqlens is not None:
            raise ValueError("cu_seqlens cannot be combined with a cache, which holds one sequence per row")
        if cache is not None and not isinstance(cache, type(self.new_cache())):
            raise ValueError(
                f"cache must be a {type(self.new_cache()).__name__} in this attention, but is a {type(cache).__name__}: "
                "take it from new_cache()"
            )
        if (
            cache is not None
            and context is not None
            and (self.encoding is not None or terms is not None or self.window or self.causal)
        ):
            raise ValueError(
                "cache cannot be combined with a context in attention with positions (encoding, terms, causal or window): "
                "it does not know where the queries of later calls stand"
            )
        if isinstance(cache, LinearCache) and context is None and not self.causal:
            raise ValueError("cache needs causal=True in linear attention, whose state goes from token to token")
        if seed is None:
            seed = noise.draw_seed(self.training, x.device)
        q = self._split(self.q(x), self.heads)
        start = 0 if cache is None or context is not None else cache.length
        # The keys and values of a context are computed once.
        known = context is not None and cache is not None and cache.length > 0
        k, v = (None, None) if known else self._keys_and_values(x if context is None else context)
        keys = cache.length if cache is not None and k is None else start + (x if context is None else context).shape[1]
        if terms is None:
            check_longest(cu_seqlens, max_seqlen)
            sizes = (size if max_seqlen is None else min(size, max_seqlen) for size in (x.shape[1], keys))
            first, last = reachable_lags(*sizes, query_start=start, causal=self.causal, window=self.window)
            terms = Terms() if self.encoding is None else self.terms_of(self.encoding, first, last, seed)
        if isinstance(cache, LinearCache):
            check_keys(len(x), keys, lengths, key_mask)
            visible = visible_keys(keys, lengths, key_mask)
            out = self._through_state(q, k, v, terms, cache, None if visible is None else visible[:, start:])
            return self.out(out.transpose(1, 2).flatten(2))
        if cache is not None:
            q, k, v, terms = self._through_cache(q, k, v, terms, cache, start)
        assert k is not None and v is not None
        if self.feature_map is not None:
            out = linear_attention(
                q, k, v, terms, feature_map=self.feature_map, causal=self.causal, scale=self.scale,
                lengths=lengths, key_mask=key_mask, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, seed=seed, impl=self.impl,
            )  # fmt: skip
        else:
            out = softmax_attention(
                q, k, v, terms, causal=self.causal, window=self.window, query_start=start, scale=self.scale,
                lengths=lengths, key_mask=key_mask, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen,
                dropout=self.dropout if self.training else 0.0, seed=seed, impl=self.impl,
            )  # fmt: skip
        return self.out(out.transpose(1, 2).flatten(2))

    def new_cache(self) -> LayerCache:
        """Returns an empty cache for one generation."""
        return Cache() if self.feature_map is None else LinearCache()

    def terms_of(self, encoding: Encoding, first: int, last: int, seed: Tensor) -> Terms:
        """Returns the terms of an encoding for this kind of attention."""
        terms = encoding.terms if self.feature_map is None else encoding.linear_terms
        with without_autocast(seed):
            return terms(first, last, scale=self.scale, seed=seed)

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
                v = v.repeat_interleave(transformed_k.shape[1] // v.shape[1], dim=1)
            cache.append(transformed_k, v, k if raw else None)
        elif terms.transform is not None:
            transformed_q, _ = terms.transform(q, q, positions, positions)
        assert cache.k is not None and cache.v is not None
        if not raw:
            return transformed_q, cache.k, cache.v, replace(terms, transform=None)
        ready = (transformed_q, cache.k)
        assert cache.raw_k is not None
        return q, cache.raw_k, cache.v, replace(terms, transform=lambda *_: ready)


class Layer(nn.Module):
    """A transformer layer: self-attention, cross-attention if asked for, and a feed-forward network.

    Args:
        dim: Width of input and output.
        heads: Number of query heads.
        hidden: Width of the feed-forward network; `4 dim` unless given.
        cross: Also attend to a context.
        norm: "pre" normalises the input of each part, "post" the sum after it, as in the first transformers.
        activation: "gelu" or "relu".
        dropout: Probability of dropping a unit after each part and inside the feed-forward network, in training.
        attention_dropout: Probability of dropping an attention weight, in training.
        encoding: The layer's own encoding, if it has one.
        causal: Let queries see no later token.
        window: How many lags into the past and into the future a token may see; the context is seen as a whole.
        content_dim: Of self-attention with given `terms`, see `RelativeAttention`.
        options: More options of `RelativeAttention`.

    >>> Layer(64, heads=4)(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        hidden: int | None = None,
        cross: bool = False,
        norm: Literal["pre", "post"] = "pre",
        activation: Literal["gelu", "relu"] = "gelu",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        encoding: Encoding | str | None = None,
        causal: bool = False,
        window: tuple[int, int] | None = None,
        content_dim: int | None = None,
        **options,
    ):
        super().__init__()
        if norm not in ("pre", "post"):
            raise ValueError(f"norm must be 'pre' or 'post', but is {norm!r}")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, but is {activation!r}")
        hidden = 4 * dim if hidden is None else hidden
        self.norm = norm
        self.attention = RelativeAttention(
            dim, heads=heads, encoding=encoding, causal=causal, window=window, dropout=attention_dropout,
            content_dim=content_dim, **options,
        )  # fmt: skip
        self.attention_norm = nn.LayerNorm(dim)
        self.cross = RelativeAttention(dim, heads=heads, dropout=attention_dropout, **options) if cross else None
        self.cross_norm = nn.LayerNorm(dim) if cross else None
        self.feed = nn.Sequential(nn.Linear(dim, hidden), ACTIVATIONS[activation](), nn.Dropout(dropout), nn.Linear(hidden, dim))
        self.feed_norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "batch time dim"],
        context: Float[Tensor, "batch keys dim"] | None = None,
        *,
        terms: Terms | None = None,
        cache: LayerCache | None = None,
        cross_cache: LayerCache | None = None,
        lengths: Int[Tensor, " batch"] | None = None,
        key_mask: Bool[Tensor, "batch keys"] | None = None,
        cu_seqlens: Int[Tensor, " ends"] | None = None,
        max_seqlen: int | None = None,
        context_lengths: Int[Tensor, " batch"] | None = None,
        context_mask: Bool[Tensor, "batch keys"] | None = None,
        seed: Int[Tensor, ""] | None = None,
    ) -> Float[Tensor, "batch time dim"]:
        """Applies the layer; the arguments are those of `RelativeAttention`, with masks of their own for the context."""
        # Before anything is added to a cache.
        if (self.cross is None) != (context is None):
            raise ValueError(
                "context must be given to a layer with cross-attention, and to no other, but "
                + ("is missing" if context is None else "this layer has no cross-attention")
            )
        if seed is None:
            seed = noise.draw_seed(self.training, x.device)

        def attend(y: Tensor) -> Tensor:
            return self.attention(
                y, terms=terms, cache=cache, lengths=lengths, key_mask=key_mask, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen,
                seed=seed,
            )  # fmt: skip

        x = self._part(x, self.attention_norm, attend)
        if self.cross is not None and self.cross_norm is not None:
            cross, across = self.cross, noise.bits(seed, Stream.LAYER)

            def attend_context(y: Tensor) -> Tensor:
                return cross(y, context, cache=cross_cache, lengths=context_lengths, key_mask=context_mask, seed=across)

            x = self._part(x, self.cross_norm, attend_context)
        return self._part(x, self.feed_norm, self.feed)

    def _part(self, x: Tensor, norm: nn.LayerNorm, part) -> Tensor:
        if self.norm == "pre":
            return x + self.dropout(part(norm(x)))
        return norm(x + self.dropout(part(x)))


class Stack(nn.Module):
    """What encoders and decoders share: layers, and one encoding for all of them or one for each.

    An absolute encoding acts on the input once. One seed is drawn per forward pass, fresh in training and always the same in
    evaluation, so that layers that share an encoding, or all of it but the gate, share its random numbers.
    """

    def __init__(
        self,
        dim: int,
        *,
        layers: int,
        heads: int,
        encoding: Encoding | str | Sequence[Encoding] | None,
        per_layer: bool | Literal["gate"],
        causal: bool,
        norm: Literal["pre", "post"],
        head_dim: int | None,
        attention: Literal["softmax", "linear"],
        feature_map: FeatureMap | str | None,
        tied: bool,
        **options,
    ):
        super().__init__()
        if layers < 1:
            raise ValueError(f"layers must be at least 1, but is {layers}")
        if tied and not (per_layer is False and (encoding is None or isinstance(encoding, Encoding | str))):
            raise ValueError("tied layers share one encoding: leave per_layer out, and pass one encoding or its name")
        self.dim, self.causal, self.depth = dim, causal, layers
        layers = 1 if tied else layers
        width = width_of_head(dim, heads, head_dim)
        own: list[Encoding | None] = [None] * layers
        shared: Encoding | None = None
        if per_layer not in (False, True, "gate"):
            raise ValueError(f"per_layer must be False, True or 'gate', but is {per_layer!r}")
        if per_layer == "gate":
            if not isinstance(encoding, Encoding | str):
                raise ValueError(f"per_layer='gate' needs one encoding or its name, but encoding is {type(encoding).__name__}")
            own = with_gates(named(encoding, dim=dim, heads=heads, head_dim=width, causal=causal), layers)
        elif isinstance(encoding, Sequence) and not isinstance(encoding, str):
            if len(encoding) != layers:
                raise ValueError(f"encoding must be one, or one for each of {layers} layers, but {len(encoding)} were given")
            own = list(encoding)
        elif per_layer:
            if not isinstance(encoding, str):
                raise ValueError(
                    f"per_layer needs the name of an encoding, but encoding is {type(encoding).__name__}: "
                    "or pass a list with one encoding for each layer"
                )
            own = [named(encoding, dim=dim, heads=heads, head_dim=width, causal=causal) for _ in range(layers)]
        else:
            shared = named(encoding, dim=dim, heads=heads, head_dim=width, causal=causal)
        check_encoding(shared, attention)
        self.encoding: Encoding = NoEncoding() if shared is None else shared
        self.shares_codes = per_layer == "gate"
        content_dim = content_width(shared, heads, width) if shared is not None and attention == "linear" else None
        self.layers = nn.ModuleList(
            Layer(
                dim, heads=heads, head_dim=head_dim, causal=causal, norm=norm, encoding=layer_encoding, attention=attention,
                feature_map=feature_map, content_dim=content_dim, **options,
            )
            for layer_encoding in own
        )  # fmt: skip
        self.norm = nn.LayerNorm(dim) if norm == "pre" else nn.Identity()

    def redraw(self) -> None:
        """Draws another projection for each "favor" map, from the default generator; nothing else ever does.

        A cache that was filled before does not fit afterwards.
        """
        for module in self.modules():
            if isinstance(module, Favor):
                module.redraw()

    @property
    def _layers(self) -> list[Layer]:
        """The layers in the order in which they are passed; tied ones are one and the same."""
        return [layer for layer in self.layers if isinstance(layer, Layer)] * (self.depth // len(self.layers))

    def _run(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
        caches: list[LayerCache] | None,
        cross_caches: list[LayerCache] | None,
        **options,
    ) -> Tensor:
        if x.ndim != 3 or x.shape[2] != self.dim:
            raise ValueError(f"x must be [batch, time, {self.dim}], but has shape {tuple(x.shape)}")
        if caches is not None and len(caches) != self.depth:
            raise ValueError(f"cache must come from this stack's new_cache(), for {self.depth} layers, but has {len(caches)}")
        start = 0 if caches is None else caches[0].length
        positions = start + torch.arange(x.shape[1], device=x.device)
        if cu_seqlens is not None:
            # Before positions are read from it.
            check_ends(cu_seqlens, x.shape[1])
            positions = positions - cu_seqlens[torch.searchsorted(cu_seqlens, positions, right=True) - 1]
        x = self.encoding.embed(x, positions)
        seed = noise.draw_seed(self.training, x.device)
        attends = self._layers[0].attention
        check_longest(cu_seqlens, max_seqlen)
        longest = x.shape[1] if max_seqlen is None else min(x.shape[1], max_seqlen)
        first, last = reachable_lags(longest, start + longest, query_start=start, causal=self.causal, window=attends.window)
        shared = None
        if not isinstance(self.encoding, NoEncoding):
            shared = attends.terms_of(self.encoding, first, last, seed)
        for number, layer in enumerate(self._layers):
            own = layer.attention.encoding
            x = layer(
                x, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen,
                terms=attends.terms_of(own, first, last, seed) if self.shares_codes and own is not None else shared,
                cache=None if caches is None else caches[number],
                cross_cache=None if cross_caches is None else cross_caches[number],
                seed=noise.bits(seed, Stream.LAYER, number), **options,
            )  # fmt: skip
        return self.norm(x)


class Encoder(Stack):
    """A stack of layers in which every token sees every other.

    Args:
        dim: Width of input and output.
        layers: Number of layers.
        heads: Number of query heads.
        encoding: The position encoding: its name, an encoding for all layers, a list with one for each, or None.
        per_layer: With a name, make one encoding for each layer. With "gate", all layers share a stochastic encoding and its
            random numbers, and each has its own gate.
        causal: Let tokens see no later one; a decoder without a context is the same with a cache.
        norm: "pre" or "post", see `Layer`.
        head_dim: Width of a head; `dim / heads` unless given.
        attention: "softmax" or "linear".
        feature_map: Of linear attention: a name, "favor" unless given, makes one for each layer; a `FeatureMap` is shared.
            `redraw` draws the projections of "favor" anew.
        tied: Pass one layer `layers` times.
        options: More options of `Layer`: hidden, activation, dropout, attention_dropout, kv_heads, window, scale, impl.

    >>> Encoder(64, layers=2, heads=4, encoding="sinusoidal")(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        dim: int,
        *,
        layers: int,
        heads: int,
        encoding: Encoding | str | Sequence[Encoding] | None = None,
        per_layer: bool | Literal["gate"] = False,
        causal: bool = False,
        norm: Literal["pre", "post"] = "pre",
        head_dim: int | None = None,
        attention: Literal["softmax", "linear"] = "softmax",
        feature_map: FeatureMap | str | None = None,
        tied: bool = False,
        **options,
    ):
        super().__init__(
            dim, layers=layers, heads=heads, encoding=encoding, per_layer=per_layer, causal=causal, norm=norm,
            head_dim=head_dim, attention=attention, feature_map=feature_map, tied=tied, **options,
        )  # fmt: skip

    def forward(
        self,
        x: Float[Tensor, "batch time dim"],
        *,
        lengths: Int[Tensor, " batch"] | None = None,
        key_mask: Bool[Tensor, "batch time"] | None = None,
        cu_seqlens: Int[Tensor, " ends"] | None = None,
        max_seqlen: int | None = None,
    ) -> Float[Tensor, "batch time dim"]:
        """Encodes x; masks are those of `lagwise.attention`."""
        return self._run(
            x, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, caches=None, cross_caches=None, lengths=lengths, key_mask=key_mask
        )


class Decoder(Stack):
    """A stack of causal layers, with cross-attention if asked for, that can go on token by token.

    Cross-attention has no position terms, as in T5. With linear attention it is linear too, and caches have one size: they hold
    sums over the tokens and over the context.

    Args:
        dim: Width of input and output.
        layers: Number of layers.
        heads: Number of query heads.
        encoding: The position encoding: its name, an encoding for all layers, a list with one for each, or None.
        per_layer: With a name, make one encoding for each layer. With "gate", all layers share a stochastic encoding and its
            random numbers, and each has its own gate.
        cross: Attend to a context, the encoder's output.
        norm: "pre" or "post", see `Layer`.
        head_dim: Width of a head; `dim / heads` unless given.
        attention: "softmax" or "linear".
        feature_map: Of linear attention: a name, "favor" unless given, makes one for each layer; a `FeatureMap` is shared.
            `redraw` draws the projections of "favor" anew.
        tied: Pass one layer `layers` times.
        options: More options of `Layer`: hidden, activation, dropout, attention_dropout, kv_heads, window, scale, impl.

    >>> decoder = Decoder(64, layers=2, heads=4, encoding="rotary").eval()
    >>> x, cache = torch.randn(1, 10, 64), decoder.new_cache()
    >>> steps = torch.cat([decoder(x[:, :7], cache=cache), decoder(x[:, 7:], cache=cache)], dim=1)
    >>> torch.allclose(steps, decoder(x), atol=1e-5)
    True
    """

    def __init__(
        self,
        dim: int,
        *,
        layers: int,
        heads: int,
        encoding: Encoding | str | Sequence[Encoding] | None = None,
        per_layer: bool | Literal["gate"] = False,
        cross: bool = False,
        norm: Literal["pre", "post"] = "pre",
        head_dim: int | None = None,
        attention: Literal["softmax", "linear"] = "softmax",
        feature_map: FeatureMap | str | None = None,
        tied: bool = False,
        **options,
    ):
        super().__init__(
            dim, layers=layers, heads=heads, encoding=encoding, per_layer=per_layer, causal=True, norm=norm,
            head_dim=head_dim, attention=attention, feature_map=feature_map, tied=tied, cross=cross, **options,
        )  # fmt: skip
        self.cross = cross

    def new_cache(self) -> DecoderCache:
        """Returns an empty cache for one generation."""
        crosses = [layer.cross for layer in self._layers if layer.cross is not None]
        return DecoderCache([layer.attention.new_cache() for layer in self._layers], [attends.new_cache() for attends in crosses])

    def forward(
        self,
        x: Float[Tensor, "batch time dim"],
        context: Float[Tensor, "batch keys dim"] | None = None,
        *,
        cache: DecoderCache | None = None,
        lengths: Int[Tensor, " batch"] | None = None,
        key_mask: Bool[Tensor, "batch keys"] | None = None,
        cu_seqlens: Int[Tensor, " ends"] | None = None,
        max_seqlen: int | None = None,
        context_lengths: Int[Tensor, " batch"] | None = None,
        context_mask: Bool[Tensor, "batch keys"] | None = None,
    ) -> Float[Tensor, "batch time dim"]:
        """Decodes x, which follows what is in the cache; masks are those of `lagwise.attention`, the cached keys included."""
        return self._run(
            x, context=context, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen,
            caches=None if cache is None else cache.self_attention,
            cross_caches=cache.cross_attention if cache is not None and self.cross else None,
            lengths=lengths, key_mask=key_mask, context_lengths=context_lengths, context_mask=context_mask,
        )  # fmt: skip


def named(encoding: Encoding | str | None, *, dim: int, heads: int, head_dim: int, causal: bool) -> Encoding | None:
    """Makes an encoding that is given by name; one that has a `causal` form takes it in a causal model."""
    if encoding is not None and not isinstance(encoding, Encoding | str):
        raise ValueError(f"encoding must be an Encoding, the name of one or None, but is {type(encoding).__name__}")
    if not isinstance(encoding, str):
        return encoding
    options = {"causal": True} if causal and encoding in ENCODINGS and "causal" in options_of(encoding) else {}
    return make(encoding, dim=dim, heads=heads, head_dim=head_dim, **options)


def check_encoding(encoding: Encoding | None, attention: str) -> None:
    """Raises for an unknown kind of attention, and for an encoding that it cannot use."""
    if attention not in ("softmax", "linear"):
        raise ValueError(f"attention must be 'softmax' or 'linear', but is {attention!r}")
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


def with_gates(encoding: Encoding | None, layers: int) -> list[Encoding | None]:
    """Returns a stochastic encoding and copies of it that share all but the gate and its noise, one for each layer."""
    if not isinstance(encoding, StochasticEncoding) or encoding.gate is None:
        raise ValueError(
            "per_layer='gate' needs a stochastic encoding, 'sine-spe' or 'conv-spe', with gated=True, "
            f"but encoding is {type(encoding).__name__}"
        )
    encodings: list[Encoding | None] = [encoding]
    for number in range(1, layers):
        shared = {id(parameter): parameter for name, parameter in encoding.named_parameters() if name != "gate"}
        other = deepcopy(encoding, shared)
        assert other.gate is not None
        nn.init.normal_(other.gate)
        other.gate_number = number
        encodings.append(other)
    return encodings


def width_of_head(dim: int, heads: int, head_dim: int | None) -> int:
    """Returns the width of a head, which must divide the width of the model unless it is given."""
    for name, size in (("dim", dim), ("heads", heads), ("head_dim", head_dim)):
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1, but is {size}")
    if head_dim is not None:
        return head_dim
    if dim % heads:
        raise ValueError(f"dim must be a multiple of heads, but dim={dim} and heads={heads}: or pass head_dim")
    return dim // heads
