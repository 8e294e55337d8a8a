"""Models of the tasks: something that makes vectors of a batch, a stack of layers, and a head."""

from typing import Any, Literal, TypeVar, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

import lagwise
from lagwise.encodings import ENCODINGS, NoEncoding, options_of
from lagwise.feature_maps import Favor
from lagwise.lab.config import Config
from lagwise.lab.tasks.base import Batch

Stack = TypeVar("Stack", bound=nn.Module)

Pooling = Literal["mean", "last", "first"]
"""How vectors of all times become one: their mean, the last of them, or that of a learned vector put before them."""


def encoder_of(config: Config, *, causal: bool = False, first_only: bool = False) -> lagwise.nn.Encoder:
    """Returns the stack of layers that a config describes; with `first_only`, its first layer alone has the encoding."""
    options = stack_options(config, causal=causal, first_only=first_only)
    return with_features(lagwise.nn.Encoder(config.dim, causal=causal, **options), config.features)


def decoder_of(config: Config, *, cross: bool = False, first_only: bool = False) -> lagwise.nn.Decoder:
    """Returns the stack of causal layers that a config describes, with cross-attention if asked for; see `encoder_of`."""
    options = stack_options(config, causal=True, first_only=first_only)
    return with_features(lagwise.nn.Decoder(config.dim, cross=cross, **options), config.features)


def stack_options(config: Config, *, causal: bool, first_only: bool) -> dict[str, Any]:
    """Returns what encoders and decoders are made with."""
    if first_only and (config.per_layer or config.tied):
        raise ValueError("first_only must be false where layers share weights or have encodings of their own, but is true")
    return dict(
        layers=config.layers, heads=config.heads, head_dim=config.head_dim, hidden=config.hidden or 4 * config.dim,
        encoding=layer_encodings(config, causal=causal, first_only=first_only),
        per_layer="gate" if config.per_layer == "gate" else False, norm=config.norm,
        tied=config.tied, activation=config.activation, dropout=config.dropout, attention_dropout=config.attention_dropout,
        attention=config.attention, feature_map=config.feature_map if config.attention == "linear" else None,
    )  # fmt: skip


def layer_encodings(config: Config, *, causal: bool, first_only: bool) -> lagwise.Encoding | list[lagwise.Encoding]:
    """Returns the encoding of all layers, or one for each of them; absolute ones act on the input, once."""

    def encoding() -> lagwise.Encoding:
        return lagwise.make(
            config.encoding, heads=config.heads, head_dim=config.head_dim or config.dim // config.heads, dim=config.dim,
            **causal_option(config.encoding, causal), **config.encoding_options,
        )  # fmt: skip

    absolute = ENCODINGS[config.encoding].absolute
    if first_only and not absolute:
        return [encoding(), *(NoEncoding() for _ in range(config.layers - 1))]
    if config.per_layer is True and not absolute:
        return [encoding() for _ in range(config.layers)]
    return encoding()


def with_features(stack: Stack, features: int | None) -> Stack:
    """Gives the "favor" maps of a stack another number of random features, and returns the stack; None leaves them."""
    if features is not None:
        for layer in stack.modules():
            if isinstance(layer, lagwise.nn.RelativeAttention) and isinstance(layer.feature_map, Favor):
                layer.feature_map = Favor(layer.feature_map.projection.shape[1], features=features)
                layer.feature_map.redraw()
    return stack


def causal_option(encoding: str, causal: bool) -> dict[str, bool]:
    """Returns `causal` for the encodings that take it."""
    return {"causal": causal} if "causal" in options_of(encoding) else {}


class Classifier(nn.Module):
    """Tokens or vectors, a stack of layers, one vector of all times, and scores [batch, classes].

    A batch has `tokens` [batch, time], or `values` [batch, time, channels] where `symbols` is None, and may have `lengths`.

    Args:
        config: Sizes of the stack.
        symbols: Number of different tokens, or None for values.
        classes: Number of scores.
        channels: Number of channels of values.
        pooling: "mean" over the tokens that exist, the "last" of them, or "first", a learned vector put before them.
    """

    def __init__(
        self, config: Config, *, symbols: int | None, classes: int, channels: int = 1,
        pooling: Pooling = "mean",
    ):  # fmt: skip
        super().__init__()
        self.embedding = nn.Linear(channels, config.dim) if symbols is None else nn.Embedding(symbols, config.dim)
        self.encoder = encoder_of(config)
        self.choice = nn.Linear(config.dim, classes)
        self.pooling: Pooling = pooling
        self.first = nn.Parameter(torch.randn(config.dim)) if pooling == "first" else None

    def forward(self, batch: Batch) -> Float[Tensor, "batch classes"]:
        return self.choice(self.pooled(batch))

    def pooled(self, batch: Batch) -> Float[Tensor, "batch dim"]:
        """Returns one vector for each example."""
        x = self.embedding(batch["tokens"] if "tokens" in batch else batch["values"])
        lengths = batch.get("lengths")
        if self.first is not None:
            x = torch.cat([self.first.expand(len(x), 1, -1), x], dim=1)
            lengths = None if lengths is None else lengths + 1
        return pool(self.encoder(x, lengths=lengths), lengths, self.pooling)


def check_pooling(pooling: str) -> None:
    """Raises for a pooling that there is not."""
    if pooling not in get_args(Pooling):
        raise ValueError(f"pooling must be one of {', '.join(get_args(Pooling))}, but is {pooling!r}")


def pool(
    x: Float[Tensor, "batch time dim"], lengths: Int[Tensor, " batch"] | None, pooling: Pooling
) -> Float[Tensor, "batch dim"]:
    """Returns one vector of all times that exist."""
    if pooling == "first":
        return x[:, 0]
    if lengths is None:
        return x.mean(1) if pooling == "mean" else x[:, -1]
    if pooling == "last":
        return x[torch.arange(len(x), device=x.device), lengths - 1]
    there = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    return (x * there[..., None]).sum(1) / lengths[:, None]


def sides_of(batch: Batch) -> Int[Tensor, "batch time"]:
    """Returns 0 for the first text of a pair and 1 from `first` on, where the second begins."""
    time = torch.arange(batch["tokens"].shape[1], device=batch["tokens"].device)
    return (time >= batch["first"][:, None]).long()


class TokenModel(nn.Module):
    """Tokens, a stack of layers, and scores of all symbols: what models of tokens share.

    A batch has `tokens` [batch, time]. With `cu_seqlens` it is packed: all rows are one, in which sequences end there, and
    nothing attends across an end.

    Args:
        config: Sizes of the stack.
        symbols: Number of different tokens.
        tied: The scores are products with the embedding; otherwise they have weights of their own.
    """

    encoder: lagwise.nn.Encoder | lagwise.nn.Decoder

    def __init__(self, config: Config, *, symbols: int, tied: bool = True):
        super().__init__()
        self.embedding = nn.Embedding(symbols, config.dim)
        self.choice = None if tied else nn.Linear(config.dim, symbols)

    def hidden(self, batch: Batch) -> Float[Tensor, "batch time dim"]:
        """Returns one vector for each token."""
        x, ends = self.embedding(batch["tokens"]), batch.get("cu_seqlens")
        if ends is None:
            return self.encoder(x)
        # No sequence goes on from one row to the next.
        longest = x.shape[1] if len(x) > 1 else None
        return self.encoder(x.flatten(0, 1)[None], cu_seqlens=ends, max_seqlen=longest).view_as(x)

    def scores(self, x: Float[Tensor, "*items dim"]) -> Float[Tensor, "*items symbols"]:
        """Returns the scores of all symbols."""
        if self.choice is not None:
            return self.choice(x)
        # Embeddings are about one in size, as layers want them; the scores should start so too.
        return F.linear(x * x.shape[-1] ** -0.5, self.embedding.weight)


class CausalModel(TokenModel):
    """A model that tells the next token from those before it."""

    encoder: lagwise.nn.Decoder

    def __init__(self, config: Config, *, symbols: int, tied: bool = True):
        super().__init__(config, symbols=symbols, tied=tied)
        self.encoder = decoder_of(config)

    def forward(self, batch: Batch) -> Float[Tensor, "batch time symbols"]:
        return self.scores(self.hidden(batch))

    def step(self, tokens: Int[Tensor, "batch time"], cache: lagwise.nn.DecoderCache) -> Float[Tensor, "batch symbols"]:
        """Returns the scores after some more tokens, which are added to the cache."""
        return self.scores(self.encoder(self.embedding(tokens), cache=cache)[:, -1])


class MaskedModel(TokenModel):
    """A model that tells hidden tokens from those around them: of those in `chosen`, places in all rows end to end."""

    encoder: lagwise.nn.Encoder

    def __init__(self, config: Config, *, symbols: int, tied: bool = True):
        super().__init__(config, symbols=symbols, tied=tied)
        self.encoder = encoder_of(config)

    def forward(self, batch: Batch) -> Float[Tensor, "chosen symbols"]:
        return self.scores(self.hidden(batch).flatten(0, 1)[batch["chosen"]])
