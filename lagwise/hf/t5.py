"""T5's bias as a table of lags instead of a matrix of positions.

The attention classes of the T5 family make a bias [1, heads, queries, keys] in their first layer, and one full of zeros for
cross-attention, and hand both on from layer to layer. With the implementation "lagwise" they make a table [heads, lags] instead,
and for cross-attention one without lags. A tensor as before, it goes through gradient checkpointing, sharding and models that are
split between devices as the matrix did.
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.longt5.modeling_longt5 import LongT5Attention, LongT5PreTrainedModel
from transformers.models.mt5.modeling_mt5 import MT5Attention, MT5PreTrainedModel
from transformers.models.pop2piano.modeling_pop2piano import Pop2PianoAttention, Pop2PianoPreTrainedModel
from transformers.models.t5.modeling_t5 import T5Attention, T5PreTrainedModel
from transformers.models.umt5.modeling_umt5 import UMT5Attention, UMT5PreTrainedModel

from lagwise.encodings.buckets import check_buckets, near_lags, t5_bucket
from lagwise.hf.masks import NAME
from lagwise.kept import over_lags
from lagwise.lags import LagTable
from lagwise.terms import Terms

CLASSES = (T5Attention, MT5Attention, UMT5Attention, LongT5Attention, Pop2PianoAttention)
"""Whose bias becomes a table. The encoders of LongT5 are not on the attention interface and stay as they are."""

MODELS = (T5PreTrainedModel, MT5PreTrainedModel, UMT5PreTrainedModel, LongT5PreTrainedModel, Pop2PianoPreTrainedModel)
"""The models made of them."""

Layer: TypeAlias = T5Attention | MT5Attention | UMT5Attention | LongT5Attention | Pop2PianoAttention


def install() -> None:
    """Lets the classes make a table where their model asks for "lagwise", and what they always made where it does not."""
    for kind in CLASSES:
        if not hasattr(kind.compute_bias, "__wrapped__"):
            kind.compute_bias = table_instead(kind.compute_bias)
            kind.forward = without_zeros(kind.forward)
    for model in MODELS:
        if not hasattr(model.set_attn_implementation, "__wrapped__"):
            model.set_attn_implementation = reaching_the_stacks(model.set_attn_implementation)


def table_instead(compute_bias: Callable) -> Callable:
    """Wraps the method that makes the bias."""

    @wraps(compute_bias)
    def wrapped(self: Layer, *args: Any, **options: Any) -> Tensor:
        return bias_of(self) if is_ours(self) else compute_bias(self, *args, **options)

    return wrapped


def without_zeros(forward: Callable) -> Callable:
    """Wraps the method that makes zeros where a layer has no bias, and calls `compute_bias` where it has one."""

    @wraps(forward)
    def wrapped(self: Layer, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        if not is_ours(self) or self.has_relative_attention_bias:
            return forward(self, *args, **options)
        self.has_relative_attention_bias = True
        try:
            return forward(self, *args, **options)
        finally:
            self.has_relative_attention_bias = False

    return wrapped


def reaching_the_stacks(set_attn_implementation: Callable) -> Callable:
    """Wraps the method that, up to some version of transformers, leaves out the stacks, which have configs of their own."""

    @wraps(set_attn_implementation)
    def wrapped(self: PreTrainedModel, *args: Any, **options: Any) -> None:
        set_attn_implementation(self, *args, **options)
        for module in self.modules():
            if isinstance(module, MODELS) and (is_ours(self) or is_ours(module)):
                module.config._attn_implementation = self.config._attn_implementation

    return wrapped


def is_ours(module: Any) -> bool:
    """Says whether a module's model computes attention with this library."""
    return module.config._attn_implementation == NAME


def bias_of(module: Layer) -> Float[Tensor, "heads lags"]:
    """Returns a layer's table; one without lags for a layer that has no bias."""
    if not hasattr(module, "relative_attention_bias"):
        return module.q.weight.new_zeros(module.n_heads, 0)
    sizes = module.relative_attention_num_buckets, module.relative_attention_max_distance
    return table_of(module.relative_attention_bias, *sizes, causal=module.is_decoder)


def table_of(embedding: nn.Embedding, buckets: int, max_lag: int, *, causal: bool) -> Float[Tensor, "heads lags"]:
    """Returns the bias of each lag up to those that share the last bucket."""
    device = embedding.weight.device
    if torch.compiler.is_compiling():
        return embedding(torch.tensor(buckets_of(buckets, max_lag, causal), device=device)).T
    # Not copied from the host in each pass, for which a GPU would be waited for.
    lags = len(buckets_made_once(buckets, max_lag, causal))
    first = 1 - lags if causal else -(lags // 2)
    (found,) = kept_buckets(first, first + lags - 1, device, buckets, max_lag, causal)
    return embedding(found).T


@over_lags
def kept_buckets(first: int, last: int, device: torch.device, buckets: int, max_lag: int, causal: bool) -> tuple[Tensor]:
    """Returns the buckets of lags."""
    return (t5_bucket(torch.arange(first, last + 1, device="cpu"), buckets, max_lag, causal).to(device),)


@torch.compiler.assume_constant_result
def buckets_of(buckets: int, max_lag: int, causal: bool) -> tuple[int, ...]:
    """Returns the buckets of the table's lags, which end with 0 if causal and else lie around it."""
    return buckets_made_once(buckets, max_lag, causal)


@lru_cache
def buckets_made_once(buckets: int, max_lag: int, causal: bool) -> tuple[int, ...]:
    """Makes what `buckets_of` returns."""
    check_buckets(buckets, max_lag, causal)
    return tuple(t5_bucket(near_lags(buckets, max_lag, causal), buckets, max_lag, causal).tolist())


def terms_of(module: Any, position_bias: Tensor) -> Terms:
    """Returns the terms of a table that a module was given; raises for a bias that is no table."""
    if position_bias.ndim != 2:
        raise ValueError(
            f"position_bias must be a table of lags, which {', '.join(kind.__name__ for kind in CLASSES)} make, but "
            f"{type(module).__name__} has made a tensor of shape {tuple(position_bias.shape)}: load the model with "
            "attn_implementation='sdpa' or 'eager'"
        )
    lags = position_bias.shape[1]
    return (
        Terms(bias=LagTable(position_bias, 1 - lags if getattr(module, "is_decoder", False) else (1 - lags) // 2))
        if lags
        else Terms()
    )
