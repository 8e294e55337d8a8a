"""A transformer layer."""

from collections.abc import Callable
from typing import Any, Literal

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from typing_extensions import Unpack

from lagwise import noise
from lagwise.call import MASKS, Masks, check_keys, takes
from lagwise.encodings import Encoding
from lagwise.errors import (
    keywords_of,
    refuse_keywords,
    require_choice,
    require_probability,
    require_sizes,
    require_switches,
    shown,
)
from lagwise.nn.caches import LayerCache
from lagwise.nn.relative import RelativeAttention, check_input
from lagwise.noise import Stream
from lagwise.terms import Terms

ACTIVATIONS = {"gelu": nn.GELU, "relu": nn.ReLU}


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

    >>> import torch
    >>> Layer(64, heads=4)(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    # nn.Module's own annotation makes every call Any.
    __call__: Callable[..., Tensor]

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
        **options: Any,
    ):
        super().__init__()
        refuse_keywords(options.keys() - keywords_of(RelativeAttention), Layer, RelativeAttention)
        require_sizes(dim=dim)
        require_switches(cross=cross)
        require_choice("norm", norm, ("pre", "post"))
        require_choice("activation", activation, ACTIVATIONS)
        require_probability("dropout", dropout)
        require_probability("attention_dropout", attention_dropout)
        hidden = 4 * dim if hidden is None else hidden
        require_sizes(hidden=hidden)
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

    @takes(Masks)
    def forward(
        self,
        x: Float[Tensor, "batch time dim"],
        context: Float[Tensor, "batch keys dim"] | None = None,
        *,
        terms: Terms | None = None,
        cache: LayerCache | None = None,
        cross_cache: LayerCache | None = None,
        context_lengths: Int[Tensor, " batch"] | None = None,
        context_mask: Bool[Tensor, "batch keys"] | None = None,
        seed: Int[Tensor, ""] | None = None,
        **masks: Unpack[Masks],
    ) -> Float[Tensor, "batch time dim"]:
        """Applies the layer; the arguments are those of `RelativeAttention`, with masks of their own for the context."""
        refuse_keywords([name for name in masks if name not in MASKS], Layer.forward)
        # Before anything is added to a cache.
        check_input("x", x, self.attention.dim)
        if (self.cross is None) != (context is None):
            raise ValueError(
                "context must be given to a layer with cross-attention, and to no other, but "
                + ("is missing" if context is None else "this layer has no cross-attention")
            )
        self._check_context(context, cross_cache=cross_cache, context_lengths=context_lengths, context_mask=context_mask)
        if seed is None:
            seed = noise.draw_seed(self.training, x.device)

        def attend(y: Tensor) -> Tensor:
            return self.attention(y, terms=terms, cache=cache, seed=seed, **masks)

        x = self._part(x, self.attention_norm, attend)
        if self.cross is not None and self.cross_norm is not None:
            cross, across = self.cross, noise.bits(seed, Stream.LAYER)

            def attend_context(y: Tensor) -> Tensor:
                return cross(y, context, cache=cross_cache, lengths=context_lengths, key_mask=context_mask, seed=across)

            x = self._part(x, self.cross_norm, attend_context)
        return self._part(x, self.feed_norm, self.feed)

    def _check_context(self, context: Tensor | None, **options: Any) -> None:
        """Raises for options of a context that do not fit it, or that has none."""
        if context is not None:
            check_input("context", context, self.attention.dim)
            batch, keys, _ = context.shape
            names = ("context_lengths", "context_mask")
            check_keys(batch, keys, options[names[0]], options[names[1]], context.device, names)
            return
        for name, option in options.items():
            if option is not None:
                raise ValueError(f"{name} must be None in a layer without cross-attention, but is {shown(option)}")

    def _part(self, x: Tensor, norm: nn.LayerNorm, part) -> Tensor:
        if self.norm == "pre":
            return x + self.dropout(part(norm(x)))
        return norm(x + self.dropout(part(x)))
