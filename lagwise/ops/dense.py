"""The specification: attention written out, with every table gathered to [queries, keys].

Slow, literal, in the dtype of its inputs, differentiable by autograd as often as needed. The fast implementations are tested
against it in float64 and share no code with it.
"""

import torch
from torch import Tensor

from lagwise import noise
from lagwise.call import Call
from lagwise.lags import LagTable
from lagwise.noise import Stream
from lagwise.terms import Terms


def dense_attention(q: Tensor, k: Tensor, v: Tensor, terms: Terms, call: Call) -> tuple[Tensor, Tensor]:
    """Returns the output, [batch, heads, queries, value_dim], and the log-sum-exp of the logits, [batch, heads, queries].

        logit(i, j) = scale * (sum_c gain_c(n) q'_ic k'_jc + q_i . query(n) + k_j . key(n)) + bias(n)      n = j - i
        out(i)      = sum_j softmax_j(logit(i, j)) * (v_j + value(n))

    A row whose visible logits are all minus infinity, or that sees no key, gives zeros and minus infinity. Hidden keys may hold
    anything, also NaN. Tables are gathered in float32 at least, so that their gradients are summed in it.
    """
    terms = terms.to(torch.promote_types(q.dtype, torch.float32))
    call = call.with_key_mask(k.shape[2])
    if call.key_mask is not None:
        hidden = ~call.key_mask[:, None, :, None]
        k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
    lags, visible = geometry(q, k, call)
    logit = logits(q, k, terms, lags, call.scale, positions(q, k, call))
    return attend(logit, v, terms, lags, visible, call)


def geometry(q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Returns the lag of each pair, [batch or 1, queries, keys], and whether the query may see the key, broadcastable to it."""
    i = torch.arange(q.shape[2], device=q.device)
    j = torch.arange(k.shape[2], device=q.device)
    start = torch.as_tensor(call.query_start, device=q.device).view(-1, 1, 1)
    lags = j - (start + i[:, None])
    visible = torch.ones_like(lags, dtype=torch.bool)
    if call.causal:
        visible = visible & (lags <= 0)
    if call.window is not None:
        visible = visible & (lags >= -call.window[0]) & (lags <= call.window[1])
    if call.key_mask is not None:
        visible = visible & call.key_mask[:, None, :]
    if call.cu_seqlens is not None:
        sequence = torch.searchsorted(call.cu_seqlens, i, right=True)
        visible = visible & (sequence[:, None] == sequence)
    return lags, visible


def positions(q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Returns the absolute positions of queries and keys; in packed sequences they restart."""
    j = torch.arange(k.shape[2], device=q.device)
    if call.cu_seqlens is not None:
        starts = call.cu_seqlens[torch.searchsorted(call.cu_seqlens, j, right=True) - 1]
        return j - starts, j - starts
    i = torch.arange(q.shape[2], device=q.device)
    if isinstance(call.query_start, Tensor) and call.query_start.ndim == 1:
        return call.query_start[:, None] + i, j
    return call.query_start + i, j


def logits(q: Tensor, k: Tensor, terms: Terms, lags: Tensor, scale: float, position: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the logits of all pairs, visible or not, [batch, heads, queries, keys]."""
    heads = q.shape[1]
    content_q, content_k = terms.content(q, k, *position)
    content_k, k = per_query_head(content_k, heads), per_query_head(k, heads)
    if terms.gain is None:
        result = content_q @ content_k.mT
    elif terms.gain.values.shape[2] == 1:
        result = gathered(terms.gain, lags, q).squeeze(-1) * (content_q @ content_k.mT)
    else:
        product = content_q[:, :, :, None, :] * content_k[:, :, None, :, :]
        result = (product * gathered(terms.gain, lags, q)).sum(-1)
    if terms.query is not None:
        result = result + (q[:, :, :, None, :] * gathered(terms.query, lags, q)).sum(-1)
    if terms.key is not None:
        result = result + (k[:, :, None, :, :] * gathered(terms.key, lags, q)).sum(-1)
    result = scale * result
    if terms.bias is not None:
        result = result + gathered(terms.bias, lags, q)
    return result


def gathered(table: LagTable, lags: Tensor, like: Tensor) -> Tensor:
    """Returns a table at the lag of each pair, [batch, heads, queries, keys, ...], in the dtype of another tensor."""
    return table.at(lags).transpose(0, 1).to(like.dtype)


def attend(logit: Tensor, v: Tensor, terms: Terms, lags: Tensor, visible: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Returns the output and the log-sum-exp for given logits."""
    heads = logit.shape[1]
    logit = logit.masked_fill(~visible[:, None], -torch.inf)
    # Rows of minus infinities are computed with zeros in their place: their softmax and its derivative are not numbers.
    empty = (logit == -torch.inf).all(-1, keepdim=True)
    logit = logit.masked_fill(empty, 0.0)
    lse = torch.logsumexp(logit, dim=-1).masked_fill(empty.squeeze(-1), -torch.inf)
    probability = torch.softmax(logit, dim=-1).masked_fill(empty, 0.0)
    if call.dropout > 0.0:
        assert call.seed is not None
        counters = torch.meshgrid(*(torch.arange(size, device=v.device) for size in logit.shape), indexing="ij")
        keep = noise.keep(call.dropout, call.seed, Stream.ATTENTION_DROPOUT, *counters)
        probability = probability * keep / (1.0 - call.dropout)
    out = probability @ per_query_head(v, heads)
    if terms.value is not None:
        out = out + (probability[..., None] * gathered(terms.value, lags, v)).sum(-2)
    return out, lse


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """Repeats grouped key or value heads, [batch, kv_heads, ...], until each query head has its own."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)
