"""Layers: attention with projections, transformer layers, encoder and decoder stacks with a key-value cache.

>>> encoder = Encoder(64, layers=2, heads=4, encoding="at5")
>>> encoder(torch.randn(2, 10, 64)).shape
torch.Size([2, 10, 64])
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lagwise import noise
from lagwise.attention import attention, check_dropout, check_ends, check_window
from lagwise.encodings import ENCODINGS, Encoding, NoEncoding, make, options_of
from lagwise.lags import reachable_lags
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
class DecoderCache:
    """The caches of a decoder: those of self-attention, and those of cross-attention, which are filled once."""

    self_attention: list[Cache] = field(default_factory=list)
    cross_attention: list[Cache] = field(default_factory=list)

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
        impl: Who computes, see `lagwise.attention`.

    >>> layer = RelativeAttention(64, heads=4, encoding="shaw")
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
    ):
        super().__init__()
        self.head_dim = width_of_head(dim, heads, head_dim)
        self.dim, self.heads, self.kv_heads = dim, heads, heads if kv_heads is None else kv_heads
        if self.kv_heads < 1 or heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, but heads={heads} and kv_heads={kv_heads}")
        self.causal, self.window, self.dropout, self.impl = causal, check_window(window), check_dropout(dropout), impl
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.encoding = named(encoding, dim=dim, heads=heads, head_dim=self.head_dim, causal=causal)
        if self.encoding is not None and self.encoding.absolute:
            raise ValueError(
                f"encoding {type(self.encoding).__name__} is absolute and acts on the model's input: give it to an Encoder "
                "or Decoder, or call its `embed` on the input"
            )
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
        cache: Cache | None = None,
        lengths: Int[Tensor, " batch"] | None = None,
        key_mask: Bool[Tensor, "batch keys"] | None = None,
        cu_seqlens: Int[Tensor, " ends"] | None = None,
        seed: Int[Tensor, ""] | None = None,
    ) -> Float[Tensor, "batch queries dim"]:
        """Attends to x, or to the context.

        Args:
            x: What asks.
            context: What is attended to, x unless given.
            terms: The position terms; those of the layer's own encoding unless given.
            cache: Keys and values of earlier tokens, to which those of x are added. With a context it is filled once and then
                used instead of the context.
            lengths: Number of keys that exist in each row, those of the cache counted.
            key_mask: Which keys may be attended to, those of the cache included.
            cu_seqlens: Ends of packed sequences.
            seed: Where random numbers start; drawn afresh in training unless given.
        """
        for name, given in (("x", x), ("context", context)):
            if given is not None and (given.ndim != 3 or given.shape[2] != self.dim):
                raise ValueError(f"{name} must be [batch, time, {self.dim}], but has shape {tuple(given.shape)}")
        if cache is not None and cu_seqlens is not None:
            raise ValueError("cu_seqlens cannot be combined with a cache, which holds one sequence per row")
        if (
            cache is not None
            and context is not None
            and (self.encoding is not None or terms is not None or self.window or self.causal)
        ):
            raise ValueError(
                "cache cannot be combined with a context in attention with positions (encoding, terms, causal or window): "
                "it does not know where the queries of later calls stand"
            )
        if seed is None:
            seed = noise.draw_seed(self.training, x.device)
        q = self._split(self.q(x), self.heads)
        start = 0 if cache is None or context is not None else cache.length
        # The keys and values of a context are computed once.
        known = context is not None and cache is not None and cache.length > 0
        k, v = (None, None) if known else self._keys_and_values(x if context is None else context)
        keys = cache.length if cache is not None and k is None else start + (x if context is None else context).shape[1]
        if terms is None:
            first, last = reachable_lags(x.shape[1], keys, query_start=start, causal=self.causal, window=self.window)
            terms = Terms() if self.encoding is None else self.encoding.terms(first, last, scale=self.scale, seed=seed)
        if cache is not None:
            q, k, v, terms = self._through_cache(q, k, v, terms, cache, start)
        assert k is not None and v is not None
        out = attention(
            q, k, v, terms, causal=self.causal, window=self.window, query_start=start, scale=self.scale,
            lengths=lengths, key_mask=key_mask, cu_seqlens=cu_seqlens,
            dropout=self.dropout if self.training else 0.0, seed=seed, impl=self.impl,
        )  # fmt: skip
        return self.out(out.transpose(1, 2).flatten(2))

    def _keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._split(self.k(x), self.kv_heads), self._split(self.v(x), self.kv_heads)

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)

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
            dim, heads=heads, encoding=encoding, causal=causal, window=window, dropout=attention_dropout, **options
        )
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
        cache: Cache | None = None,
        cross_cache: Cache | None = None,
        lengths: Int[Tensor, " batch"] | None = None,
        key_mask: Bool[Tensor, "batch keys"] | None = None,
        cu_seqlens: Int[Tensor, " ends"] | None = None,
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
                y, terms=terms, cache=cache, lengths=lengths, key_mask=key_mask, cu_seqlens=cu_seqlens, seed=seed
            )

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
    evaluation, so that layers that share an encoding share its random numbers.
    """

    def __init__(
        self,
        dim: int,
        *,
        layers: int,
        heads: int,
        encoding: Encoding | str | Sequence[Encoding] | None,
        per_layer: bool,
        causal: bool,
        norm: Literal["pre", "post"],
        head_dim: int | None,
        **options,
    ):
        super().__init__()
        if layers < 1:
            raise ValueError(f"layers must be at least 1, but is {layers}")
        self.dim, self.causal = dim, causal
        width = width_of_head(dim, heads, head_dim)
        own: list[Encoding | None] = [None] * layers
        shared: Encoding | None = None
        if isinstance(encoding, Sequence) and not isinstance(encoding, str):
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
        self.encoding: Encoding = NoEncoding() if shared is None else shared
        self.layers = nn.ModuleList(
            Layer(dim, heads=heads, head_dim=head_dim, causal=causal, norm=norm, encoding=layer_encoding, **options)
            for layer_encoding in own
        )
        self.norm = nn.LayerNorm(dim) if norm == "pre" else nn.Identity()

    @property
    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def _run(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None,
        caches: list[Cache] | None,
        cross_caches: list[Cache] | None,
        **options,
    ) -> Tensor:
        if x.ndim != 3 or x.shape[2] != self.dim:
            raise ValueError(f"x must be [batch, time, {self.dim}], but has shape {tuple(x.shape)}")
        if caches is not None and len(caches) != len(self.layers):
            raise ValueError(
                f"cache must come from this stack's new_cache(), for {len(self.layers)} layers, but has {len(caches)}"
            )
        start = 0 if caches is None else caches[0].length
        positions = start + torch.arange(x.shape[1], device=x.device)
        if cu_seqlens is not None:
            # Before positions are read from it.
            check_ends(cu_seqlens, x.shape[1])
            positions = positions - cu_seqlens[torch.searchsorted(cu_seqlens, positions, right=True) - 1]
        x = self.encoding.embed(x, positions)
        seed = noise.draw_seed(self.training, x.device)
        attends = self._layers[0].attention
        first, last = reachable_lags(x.shape[1], start + x.shape[1], query_start=start, causal=self.causal, window=attends.window)
        shared = None
        if not isinstance(self.encoding, NoEncoding):
            shared = self.encoding.terms(first, last, scale=attends.scale, seed=seed)
        for number, layer in enumerate(self._layers):
            x = layer(
                x, terms=shared, cu_seqlens=cu_seqlens,
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
        per_layer: With a name, make one encoding for each layer.
        causal: Let tokens see no later one; a decoder without a context is the same with a cache.
        norm: "pre" or "post", see `Layer`.
        head_dim: Width of a head; `dim / heads` unless given.
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
        per_layer: bool = False,
        causal: bool = False,
        norm: Literal["pre", "post"] = "pre",
        head_dim: int | None = None,
        **options,
    ):
        super().__init__(
            dim, layers=layers, heads=heads, encoding=encoding, per_layer=per_layer, causal=causal, norm=norm,
            head_dim=head_dim, **options,
        )  # fmt: skip

    def forward(
        self,
        x: Float[Tensor, "batch time dim"],
        *,
        lengths: Int[Tensor, " batch"] | None = None,
        key_mask: Bool[Tensor, "batch time"] | None = None,
        cu_seqlens: Int[Tensor, " ends"] | None = None,
    ) -> Float[Tensor, "batch time dim"]:
        """Encodes x; masks are those of `lagwise.attention`."""
        return self._run(x, cu_seqlens=cu_seqlens, caches=None, cross_caches=None, lengths=lengths, key_mask=key_mask)


class Decoder(Stack):
    """A stack of causal layers, with cross-attention if asked for, that can go on token by token.

    Cross-attention has no position terms, as in T5.

    Args:
        dim: Width of input and output.
        layers: Number of layers.
        heads: Number of query heads.
        encoding: The position encoding: its name, an encoding for all layers, a list with one for each, or None.
        per_layer: With a name, make one encoding for each layer.
        cross: Attend to a context, the encoder's output.
        norm: "pre" or "post", see `Layer`.
        head_dim: Width of a head; `dim / heads` unless given.
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
        per_layer: bool = False,
        cross: bool = False,
        norm: Literal["pre", "post"] = "pre",
        head_dim: int | None = None,
        **options,
    ):
        super().__init__(
            dim, layers=layers, heads=heads, encoding=encoding, per_layer=per_layer, causal=True, norm=norm,
            head_dim=head_dim, cross=cross, **options,
        )  # fmt: skip
        self.cross = cross

    def new_cache(self) -> DecoderCache:
        """Returns an empty cache for one generation."""
        count = len(self.layers)
        return DecoderCache([Cache() for _ in range(count)], [Cache() for _ in range(count if self.cross else 0)])

    def forward(
        self,
        x: Float[Tensor, "batch time dim"],
        context: Float[Tensor, "batch keys dim"] | None = None,
        *,
        cache: DecoderCache | None = None,
        lengths: Int[Tensor, " batch"] | None = None,
        key_mask: Bool[Tensor, "batch keys"] | None = None,
        cu_seqlens: Int[Tensor, " ends"] | None = None,
        context_lengths: Int[Tensor, " batch"] | None = None,
        context_mask: Bool[Tensor, "batch keys"] | None = None,
    ) -> Float[Tensor, "batch time dim"]:
        """Decodes x, which follows what is in the cache; masks are those of `lagwise.attention`, the cached keys included."""
        return self._run(
            x, context=context, cu_seqlens=cu_seqlens,
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
