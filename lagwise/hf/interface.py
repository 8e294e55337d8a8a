"""What transformers calls: an attention function and a mask function, both under the name "lagwise"."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from lagwise import noise
from lagwise.feature_maps import FeatureMap
from lagwise.hf import t5
from lagwise.hf.masks import NAME, OTHERWISE, Mask, at_length, make_mask
from lagwise.lags import reachable_lags
from lagwise.linear import linear_attention
from lagwise.ops.register import without_autocast
from lagwise.softmax import attention
from lagwise.terms import Terms

UNHONOURED = {
    "softcap": "caps the logits",
    "s_aux": "adds attention sinks to the softmax",
    "output_attentions": "asks for the attention weights, which are never made",
    "cache": "asks for paged attention",
    "cu_seq_lens_q": "packs sequences",
}
"""Keywords that change what attention computes, and that we do not have."""


def install() -> None:
    """Tells transformers the attention function and the mask function."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)


def attention_forward(
    module: nn.Module,
    query: Float[Tensor, "batch heads queries dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    attention_mask: Mask | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "batch queries heads value_dim"], None]:
    """Computes attention for a module of a model, for transformers' `AttentionInterface`.

    Args:
        module: The attention layer. Its `lagwise_terms(first, last, *, scale, seed)`, if it has one, makes the position terms,
            from random numbers unless its `lagwise_random` denies it, and with a `lagwise_feature_map` its attention is linear.
        query: Queries.
        key: Keys.
        value: Values.
        attention_mask: What `make_mask` made. None means that there is no padding.
        scaling: Factor of the content product.
        dropout: Probability of dropping an attention weight.
        is_causal: Without a mask: whether queries see no later key; what the module says unless given.
        sliding_window: Without a mask: how many keys up to its own a query may see.
        position_bias: The table that `lagwise.hf.t5` makes of a T5 layer's bias.
        **options: What other implementations understand.
    """
    check_options(module, options)
    queries, keys = query.shape[2], key.shape[2]
    if isinstance(attention_mask, Tensor):
        raise ValueError(
            "attention_mask must be [batch, keys] where it is given to the model, but the attention layer got a tensor of shape "
            f"{tuple(attention_mask.shape)}: {OTHERWISE}"
        )
    mask = unmasked(module, queries, keys, is_causal, sliding_window) if attention_mask is None else attention_mask
    if mask.keys > keys:
        raise ValueError(f"attention_mask must tell about the keys that there are, {keys}, but tells about {mask.keys}")
    key_mask = mask.key_mask
    if mask.keys < keys and not mask.causal:
        key_mask = query.new_ones(len(query), mask.keys, dtype=torch.bool) if key_mask is None else key_mask
    key_mask = None if key_mask is None else at_length(key_mask, keys)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    seen: dict[str, Any] = dict(key_mask=key_mask, lengths=mask.lengths)
    place: dict[str, Any] = dict(causal=mask.causal, window=mask.window, query_start=mask.query_start)
    # A layer with a table of its own was not converted.
    converted = position_bias is None
    make: Callable[..., Terms] | None = getattr(module, "lagwise_terms", None) if converted else None
    # Eager attention without dropout leaves the default generator alone, and so does this.
    random = dropout > 0.0 or (make is not None and getattr(module, "lagwise_random", True))
    seed = noise.draw_seed(module.training, query.device) if random else None
    if position_bias is not None:
        terms = t5.terms_of(module, position_bias)
    elif make is not None:
        first, last = reachable_lags(queries, keys, **place)
        with without_autocast(query):
            terms = make(first, last, scale=scale, seed=seed)
    else:
        terms = Terms()
    if attention_mask is None and queries != keys and terms.tables():
        raise ValueError(
            "attention_mask must be given where positions matter and there are other keys than the queries' own, because it "
            f"tells where the queries stand, but is None for {queries} queries and {keys} keys"
        )
    feature_map: FeatureMap | None = getattr(module, "lagwise_feature_map", None) if converted else None
    if feature_map is None:
        out = attention(query, key, value, terms, scale=scale, dropout=dropout, seed=seed, **seen, **place)
    else:
        require_no_dropout(dropout)
        require_all_pairs(mask, queries, keys)
        out = linear_attention(query, key, value, terms, feature_map=feature_map, scale=scale, **seen)
    return out.transpose(1, 2).contiguous(), None


def require_all_pairs(mask: Mask, queries: int, keys: int) -> None:
    """Raises for a mask that linear attention does not have in these models."""
    if mask.causal or mask.window is not None or queries != keys:
        raise ValueError(
            "the attention of a model that was converted with attention='linear' must let every token see every other, but its "
            "mask is causal or has a window, or there is a cache: convert with attention='softmax'"
        )


def require_no_dropout(dropout: float) -> None:
    """Raises for dropout of the weights of linear attention."""
    if dropout > 0.0:
        raise ValueError(
            f"dropout of attention weights must be 0 with attention='linear', which never makes them, but is {dropout}: load the "
            "model with from_pretrained(..., attention_probs_dropout_prob=0.0), or attention_dropout=0.0 in DistilBERT. Dropout "
            "after the layers stays"
        )


def check_options(module: nn.Module, options: dict[str, Any]) -> None:
    """Raises for what a model asks of attention and would not get."""
    config = getattr(module, "config", None)
    asked = {"output_attentions": getattr(config, "output_attentions", False), **options}
    for name in UNHONOURED.keys() & asked.keys():
        if asked[name] is not None and asked[name] is not False:
            words = f"{name} {UNHONOURED[name]}, and attn_implementation={NAME!r} does not do that"
            raise ValueError(f"{words}: leave it out, or {OTHERWISE}")
    kind = getattr(config, "position_embedding_type", None)
    # Cross-attention never had relative positions.
    relative = isinstance(kind, str) and kind.startswith("relative") and "CrossAttention" not in type(module).__name__
    if relative and not hasattr(module, "lagwise_terms"):
        raise ValueError(
            f"position_embedding_type is {kind!r}, but {type(module).__name__} carries no relative positions, which "
            "transformers 5 drops without a word: load the model with lagwise.hf.from_pretrained_relative"
        )


def unmasked(module: nn.Module, queries: int, keys: int, is_causal: bool | None, sliding_window: int | None) -> Mask:
    """Returns the mask of a model that gives none, by transformers' rules: one query alone is the last and sees all keys."""
    causal = queries > 1 and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = None if sliding_window is None else (sliding_window - 1, 0 if causal else sliding_window - 1)
    return Mask(keys, causal=causal, window=window, query_start=keys - 1 if queries == 1 else 0)
