"""Encoders and decoders: layers one after the other, with one encoding or one for each."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from inspect import signature
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from typing_extensions import Unpack

from lagwise import noise
from lagwise.call import MASKS, Call, Masks, check_ends, check_longest, showing, takes
from lagwise.encodings import Encoding, NoEncoding, StochasticEncoding
from lagwise.errors import keywords_of, refuse, refuse_keywords, require_sizes, require_switches
from lagwise.feature_maps import Favor, FeatureMap
from lagwise.nn.caches import DecoderCache, LayerCache
from lagwise.nn.layer import Layer
from lagwise.nn.relative import RelativeAttention, check_encoding, check_input, content_width, named, width_of_head
from lagwise.noise import Stream


class Stack(nn.Module):
    """What encoders and decoders share: layers, and one encoding for all of them or one for each.

    An absolute encoding acts on the input once. One seed is drawn per forward pass, fresh in training and always the same in
    evaluation, so that layers that share an encoding, or all of it but the gate, share its random numbers.
    """

    takes_context = False

    # nn.Module's own annotation makes every call Any.
    __call__: Callable[..., Tensor]

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
        **options: Any,
    ):
        super().__init__()
        handed_on = (Layer, RelativeAttention)
        if not self.takes_context and options.get("cross", False) is not False:
            raise ValueError(f"{type(self).__name__} takes no context to attend to, so that cross must be False: use a Decoder")
        refuse_keywords([name for name in options if name not in keywords_of(*handed_on)], type(self), *handed_on)
        require_sizes(layers=layers)
        require_switches(causal=causal, tied=tied)
        if not isinstance(per_layer, bool) and per_layer != "gate":
            refuse("per_layer", "False, True or 'gate'", per_layer)
        if tied and not (per_layer is False and (encoding is None or isinstance(encoding, Encoding | str))):
            raise ValueError("tied layers share one encoding: leave per_layer out, and pass one encoding or its name")
        self.dim, self.causal, self.depth = dim, causal, layers
        layers = 1 if tied else layers
        width = width_of_head(dim, heads, head_dim)
        own: list[Encoding | None] = [None] * layers
        shared: Encoding | None = None
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
        masks: Masks,
        *,
        caches: list[LayerCache] | None = None,
        cross_caches: list[LayerCache] | None = None,
        **options: Any,
    ) -> Tensor:
        check_input("x", x, self.dim)
        if caches is not None and len(caches) != self.depth:
            raise ValueError(f"cache must come from this stack's new_cache(), for {self.depth} layers, but has {len(caches)}")
        start = 0 if caches is None else caches[0].length
        positions = start + torch.arange(x.shape[1], device=x.device)
        cu_seqlens, longest = masks.get("cu_seqlens"), masks.get("max_seqlen")
        if cu_seqlens is not None:
            # Before positions are read from it.
            check_ends(cu_seqlens, x.shape[1])
            positions = positions - cu_seqlens[torch.searchsorted(cu_seqlens, positions, right=True) - 1]
        x = self.encoding.embed(x, positions)
        seed = noise.draw_seed(self.training, x.device)
        attends = self._layers[0].attention
        check_longest(cu_seqlens, longest)
        place = Call(causal=self.causal, window=attends.window, query_start=start, max_seqlen=longest)
        first, last = place.reachable_lags(x.shape[1], start + x.shape[1])
        shared = None
        if not isinstance(self.encoding, NoEncoding):
            shared = attends.terms_of(self.encoding, first, last, seed)
        seeds = layer_seeds(seed, self.depth)
        for number, layer in enumerate(self._layers):
            own = layer.attention.encoding
            x = layer(
                x,
                terms=attends.terms_of(own, first, last, seed) if self.shares_codes and own is not None else shared,
                cache=None if caches is None else caches[number],
                cross_cache=None if cross_caches is None else cross_caches[number],
                seed=seeds[number], **masks, **options,
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

    @takes(Masks)
    def forward(
        self,
        x: Float[Tensor, "batch time dim"],
        **masks: Unpack[Masks],
    ) -> Float[Tensor, "batch time dim"]:
        """Encodes x; masks are `lengths`, `key_mask`, `cu_seqlens` and `max_seqlen` of `lagwise.attention`."""
        refuse_keywords([name for name in masks if name not in MASKS], Encoder.forward)
        return self._run(x, masks)


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

    takes_context = True

    def __init__(self, dim: int, *, layers: int, heads: int, cross: bool = False, **options: Any):
        if "causal" in options:
            raise ValueError("Decoder has no option 'causal': it is always causal. Take an Encoder where tokens see later ones")
        super().__init__(dim, layers=layers, heads=heads, causal=True, cross=cross, **options)
        self.cross = cross

    def new_cache(self) -> DecoderCache:
        """Returns an empty cache for one generation."""
        crosses = [layer.cross for layer in self._layers if layer.cross is not None]
        return DecoderCache([layer.attention.new_cache() for layer in self._layers], [attends.new_cache() for attends in crosses])

    @takes(Masks)
    def forward(
        self,
        x: Float[Tensor, "batch time dim"],
        context: Float[Tensor, "batch keys dim"] | None = None,
        *,
        cache: DecoderCache | None = None,
        context_lengths: Int[Tensor, " batch"] | None = None,
        context_mask: Bool[Tensor, "batch keys"] | None = None,
        **masks: Unpack[Masks],
    ) -> Float[Tensor, "batch time dim"]:
        """Decodes x, which follows what is in the cache.

        Masks are `lengths`, `key_mask`, `cu_seqlens` and `max_seqlen` of `lagwise.attention`, the cached keys included.
        """
        refuse_keywords([name for name in masks if name not in MASKS], Decoder.forward)
        if cache is not None and not isinstance(cache, DecoderCache):
            refuse("cache", "a DecoderCache, from new_cache()", cache)
        return self._run(
            x, masks, caches=None if cache is None else cache.self_attention,
            cross_caches=cache.cross_attention if cache is not None and self.cross else None,
            context=context, context_lengths=context_lengths, context_mask=context_mask,
        )  # fmt: skip


# What a decoder takes like every stack, but for `causal`, which it is.
showing(
    Decoder.__init__, [each for each in signature(Stack.__init__).parameters.values() if each.name not in ("causal", "options")],
    rest=True,
)  # fmt: skip


def layer_seeds(seed: Tensor, layers: int) -> list[Tensor]:
    """Returns a seed for each layer, all of them by the same few operations.

    They lie 16 bytes apart: what lies closer has another alignment in every second layer, and kernels of its own.
    """
    numbers = torch.arange(layers, device=seed.device)[:, None].expand(-1, 2)
    return list(noise.bits(seed, Stream.LAYER, numbers)[:, 0].unbind())


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
