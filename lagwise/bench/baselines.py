"""What people run without us: plain attention, a dense bias, and the eager code of old BERTs."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lagwise.encodings import T5, Encoding, HuangM4


def plain(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Attention without positions on torch's fastest kernel: the ceiling."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def dense_bias(q: Tensor, k: Tensor, v: Tensor, encoding: T5, *, causal: bool) -> Tensor:
    """The bias of T5 as a tensor [1, heads, queries, keys] for torch's attention, gathered from a table of the lag."""
    positions = torch.arange(q.shape[2], device=q.device)
    lags = positions[None, :] - positions[:, None]
    table = encoding.terms(-q.shape[2], 0 if causal else q.shape[2], scale=1.0).bias
    assert table is not None
    bias = table.at(lags)[None]
    if causal:
        bias = bias.masked_fill(lags > 0, -math.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))


def eager_m4(q: Tensor, k: Tensor, v: Tensor, encoding: HuangM4, *, causal: bool) -> Tensor:
    """Method 4 with a vector for each pair of positions written out, as BERT of transformers 4 computes it."""
    positions = torch.arange(q.shape[2], device=q.device)
    lags = positions[None, :] - positions[:, None]
    end = encoding.max_lag
    vectors = encoding.weight[0][lags.clamp(-end, end) + end].to(q.dtype)
    logits = q @ k.mT + torch.einsum("bhld,lrd->bhlr", q, vectors) + torch.einsum("bhrd,lrd->bhlr", k, vectors)
    logits = logits / math.sqrt(q.shape[3])
    if causal:
        logits = logits.masked_fill(lags > 0, -math.inf)
    return torch.softmax(logits, dim=-1) @ v


def baselines_of(encoding: Encoding, time: int) -> dict[str, Callable[..., Tensor]]:
    """Returns the baselines that compute the same as an encoding, by name, as far as they fit into memory at this length."""
    if isinstance(encoding, T5):
        return {"dense bias": dense_bias} if time <= 16384 else {}
    if isinstance(encoding, HuangM4):
        return {"eager M4": eager_m4} if time <= 2048 else {}
    return {}
