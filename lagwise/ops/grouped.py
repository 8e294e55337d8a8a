"""Grouped heads: fewer key and value heads than query heads."""

from torch import Tensor


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """Repeats grouped heads, [batch, kv_heads, ...], until each query head has its own."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def per_key_head(x: Tensor, heads: int) -> Tensor:
    """Sums what several query heads give to the key head that they share."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)
