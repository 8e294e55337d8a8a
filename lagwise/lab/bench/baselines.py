"""What people run without us: plain attention, a dense bias, FlexAttention, the eager code of old BERTs, SPE as published."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from lagwise.encodings import T5, ConvSPE, Encoding, HuangM4, Shaw, SineSPE
from lagwise.lab.bench.contenders import Contender, Entry

# How far the baselines go whose memory or time grows with the square of the length.
DENSE_BIAS_UP_TO, BUCKETS_UP_TO, EAGER_M4_UP_TO = 16384, 2048, 2048
SOFTMAX_UP_TO = {"cpu": 16384, "cuda": 65536}

# What published codes may take: this share of a GPU's free memory, and on a CPU as many bytes. The peak of a
# training step is about as many codes of one side: of queries and keys, before and after the gate, and their gradients.
CODES_SHARE, CODES_BYTES, CODES_HELD = 0.6, 4 * 10**9, 8

# Tokens of a chunk of causal linear attention.
CHUNK = 128

TILES: list[dict[str, int]] = [
    {},
    {"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64, "bwd_num_stages": 2, "bwd_num_warps": 4},
    {
        "fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_stages": 2, "fwd_num_warps": 4,
        "bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 32, "bwd_num_stages": 1, "bwd_num_warps": 4,
    },
    {
        "fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 1, "fwd_num_warps": 4,
        "bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 32, "bwd_BLOCK_M2": 32, "bwd_BLOCK_N2": 32, "bwd_num_stages": 1, "bwd_num_warps": 4,
    },
]  # fmt: skip
"""FlexAttention's tiles in the order in which they are tried: its own, then ever smaller ones, which need less shared memory."""


def plain_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, backend: SDPBackend | None = None) -> Tensor:
    """Attention without positions on torch's fastest kernel, or on a given one: the ceiling."""
    if backend is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def dense_bias(q: Tensor, k: Tensor, v: Tensor, encoding: T5, *, causal: bool) -> Tensor:
    """The bias of T5 as a tensor [1, heads, queries, keys] for torch's attention, gathered from a table of the lag."""
    time, lags = q.shape[2], pairwise_lags(q)
    table = encoding.terms(-time, 0 if causal else time, scale=1.0).bias
    assert table is not None
    # Not an index, whose gradient sorts all pairs.
    values = table.window(1 - time, time - 1).to(q.dtype).index_select(1, (lags + time - 1).flatten())
    return biased_attention(q, k, v, values.unflatten(1, lags.shape), lags, causal=causal)


def dense_bias_by_bucket(q: Tensor, k: Tensor, v: Tensor, encoding: T5, *, causal: bool) -> Tensor:
    """The bias of T5 as Hugging Face makes it: the bucket of each pair of positions, and its row of an embedding."""
    lags = pairwise_lags(q)
    # The rule for buckets is read from its table.
    buckets = encoding.bucket[(lags - encoding.first).clamp(0, len(encoding.bucket) - 1)]
    rows = F.embedding(buckets, encoding.weight.T.to(q.dtype))
    return biased_attention(q, k, v, rows.permute(2, 0, 1), lags, causal=causal)


def biased_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, lags: Tensor, *, causal: bool) -> Tensor:
    """Torch's attention with a bias [heads, queries, keys]."""
    if causal:
        bias = bias.masked_fill(lags > 0, -math.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])


def eager_m4(q: Tensor, k: Tensor, v: Tensor, encoding: HuangM4, *, causal: bool) -> Tensor:
    """Method 4 with a vector for each pair of positions written out, as BERT of transformers 4 computes it."""
    lags = pairwise_lags(q)
    end = encoding.max_lag
    vectors = encoding.weight[0][lags.clamp(-end, end) + end].to(q.dtype)
    logits = m4_logits(q, k, vectors)
    if causal:
        logits = logits.masked_fill(lags > 0, -math.inf)
    return torch.softmax(logits, dim=-1) @ v


def m4_logits(q: Tensor, k: Tensor, vectors: Tensor) -> Tensor:
    """Returns the logits of method 4 for vectors [queries, keys, head_dim]."""
    logits = q @ k.mT + torch.einsum("bhld,lrd->bhlr", q, vectors) + torch.einsum("bhrd,lrd->bhlr", k, vectors)
    return logits / math.sqrt(q.shape[3])


def pairwise_lags(q: Tensor) -> Tensor:
    """Returns the lag of each pair of positions, [queries, keys]."""
    positions = torch.arange(q.shape[2], device=q.device)
    return positions[None, :] - positions[:, None]


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: T5 | Shaw | HuangM4,
    *,
    kernel: Callable[..., Any] = flex_attention,
    tiles: dict[str, int] | None = None,
) -> Tensor:
    """FlexAttention with the terms of an encoding added to its scores.

        score(i, j) += bias[h, j - i] + scale * (rows[b, h, i, c] + columns[b, h, j, c])      c = clip(j - i)

    `bias` has a column for every lag, so that the gradients of far pairs do not all meet in one number; `rows` and `columns` are
    the products of queries and keys with the vectors of all lags, made beforehand. The vectors are shared by all heads.
    """
    time, scale = q.shape[2], q.shape[3] ** -0.5
    terms = encoding.terms(1 - time, time - 1, scale=scale)
    bias = None if terms.bias is None else terms.bias.window(1 - time, time - 1)
    rows = None if terms.query is None else F.linear(q, terms.query.values[0].to(q.dtype))
    columns = None if terms.key is None else F.linear(k, terms.key.values[0].to(k.dtype))
    end = 0 if terms.query is None else terms.query.last

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if bias is not None:
            score = score + bias[h, j - i + (time - 1)]
        column = (j - i).clamp(-end, end) + end
        if rows is not None:
            score = score + scale * rows[b, h, i, column]
        if columns is not None:
            score = score + scale * columns[b, h, j, column]
        return score

    return kernel(q, k, v, score_mod=score_mod, kernel_options=tiles)


def plain_contenders(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, eager: bool = False) -> dict[str, Entry]:
    """Returns attention without positions by name; the first is what ratios are taken to.

    With `eager` it is torch's own choice of a kernel: to name one takes the host some time of its own.
    """
    if eager or q.device.type != "cuda":
        return {"plain": [Contender(lambda: plain_attention(q, k, v, causal=causal))]}
    return {
        "plain cuDNN": [Contender(lambda: plain_attention(q, k, v, causal=causal, backend=SDPBackend.CUDNN_ATTENTION))],
        "plain flash": [Contender(lambda: plain_attention(q, k, v, causal=causal, backend=SDPBackend.FLASH_ATTENTION))],
    }


def dense_contender(q: Tensor, k: Tensor, v: Tensor, encoding: T5, *, causal: bool) -> Entry:
    """Returns the dense bias, as far as it fits into memory."""
    if q.shape[2] > DENSE_BIAS_UP_TO:
        return f"left out: a bias for each of {q.shape[2]:,} x {q.shape[2]:,} pairs does not fit into memory"
    return [Contender(lambda: dense_bias(q, k, v, encoding, causal=causal), tuple(encoding.parameters()))]


def baselines_of(q: Tensor, k: Tensor, v: Tensor, encoding: Encoding, *, causal: bool) -> dict[str, Entry]:
    """Returns the baselines that compute the same as an encoding, by name."""
    gpu, time, learned = q.device.type == "cuda", q.shape[2], tuple(encoding.parameters())
    found: dict[str, Entry] = {}
    if isinstance(encoding, T5):
        found["dense bias"] = dense_contender(q, k, v, encoding, causal=causal)
        if gpu and time <= BUCKETS_UP_TO:
            found["dense bias, by bucket"] = [Contender(lambda: dense_bias_by_bucket(q, k, v, encoding, causal=causal), learned)]
        elif gpu:
            found["dense bias, by bucket"] = (
                "left out: the gradient of an embedding per pair, 18 ms at T = 512, grows with the square of the length"
            )
    if isinstance(encoding, HuangM4):
        found["eager M4"] = (
            [Contender(lambda: eager_m4(q, k, v, encoding, causal=causal), learned)]
            if time <= EAGER_M4_UP_TO
            else f"left out: a vector for each of {time:,} x {time:,} pairs does not fit into memory"
        )
    if gpu and not causal and (isinstance(encoding, T5 | HuangM4) or (isinstance(encoding, Shaw) and encoding.values is None)):
        found["FlexAttention"] = flex_contender(q, k, v, encoding)
    return found


def flex_contender(q: Tensor, k: Tensor, v: Tensor, encoding: T5 | Shaw | HuangM4) -> Entry:
    """Returns FlexAttention, compiled for the shapes at hand, with one attempt for each choice of tiles."""
    # What other cases compiled counts towards the number of versions after which the compiler gives up.
    torch.compiler.reset()
    kernel = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return [
        Contender(
            lambda tiles=tiles: flex(q, k, v, encoding, kernel=kernel, tiles=tiles),
            tuple(encoding.parameters()),
            {"tiles": tiles or "default"},
        )
        for tiles in TILES
    ]


def plain_linear(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Linear attention without positions, with the features relu(x) + 0.001, as one writes it down."""
    q, k = (torch.relu(x) + 1e-3 for x in (q, k))
    if not causal:
        return (q @ (k.mT @ v)) / (q @ k.sum(2)[..., None])
    # Pairs are written out within a chunk; a chunk sees those before it through their sum.
    q, k, v = (x.unflatten(2, (-1, math.gcd(x.shape[2], CHUNK))) for x in (q, k, v))
    scores = (q @ k.mT).tril()
    kv, mass = k.mT @ v, k.sum(3)[..., None]
    kv_before, mass_before = kv.cumsum(2) - kv, mass.cumsum(2) - mass
    return ((scores @ v + q @ kv_before) / (scores.sum(-1, keepdim=True) + q @ mass_before)).flatten(2, 3)


def published_spe(q: Tensor, k: Tensor, v: Tensor, encoding: SineSPE | ConvSPE, *, causal: bool) -> Tensor:
    """Linear attention with SPE as its paper says, the codes of all positions written out.

    A transcription of the equations, not the released code, which was measured to be slower and larger than this.
    """
    norm = (q.shape[3] * encoding.realizations) ** -0.25
    both = zip((q, k), published_codes(encoding, q.shape[2]), strict=True)
    q, k = (norm * torch.einsum("bhtd,hdtr->bhtr", x, codes.to(x.dtype)) for x, codes in both)
    return plain_linear(q, k, v, causal=causal)


def published_codes(encoding: SineSPE | ConvSPE, time: int) -> tuple[Tensor, Tensor]:
    """Returns codes of queries and of keys, [heads, head_dim, time, realizations], from normal noise, after the gate."""
    codes_q, codes_k = sine_codes(encoding, time) if isinstance(encoding, SineSPE) else conv_codes(encoding, time)
    if encoding.gate is None:
        return codes_q, codes_k
    delta = torch.sigmoid(encoding.gate)[..., None, None]
    constant = delta.sqrt() * torch.randn(*encoding.gate.shape, 1, encoding.realizations, device=delta.device)
    keep = (1.0 - delta).sqrt()
    return keep * codes_q + constant, keep * codes_k + constant


def sine_codes(encoding: SineSPE, time: int) -> tuple[Tensor, Tensor]:
    """Mixtures of sinusoids: [cos, sin] of all positions times noise that each sinusoid scales by its gain."""
    heads, dim, sines = encoding.freq.shape
    turns = torch.sigmoid(encoding.freq)[:, :, None] / 2.0 * torch.arange(time, device=encoding.freq.device)[:, None]
    phases = 2.0 * math.pi * turns
    omega_q, omega_k = (
        torch.stack([angles.cos(), angles.sin()], dim=-1).flatten(3) for angles in (phases + encoding.offset[:, :, None], phases)
    )
    noise = torch.randn(heads, dim, 2 * sines, encoding.realizations, device=phases.device) / math.sqrt(2 * sines)
    noise = noise * F.softplus(encoding.gain).repeat_interleave(2, dim=2)[..., None]
    return omega_q @ noise, omega_k @ noise


def conv_codes(encoding: ConvSPE, time: int) -> tuple[Tensor, Tensor]:
    """Two filters of the same noise, which is longer than it has to be, as in the paper's code."""
    _, heads, dim, taps = encoding.taps.shape
    noise = torch.randn(encoding.realizations, heads * dim, 4 * taps + time, device=encoding.taps.device)
    codes_q, codes_k = (
        F.conv1d(noise, weight.reshape(heads * dim, 1, taps), groups=heads * dim)[..., taps : taps + time]
        for weight in encoding.taps
    )
    return codes_q.permute(1, 2, 0).unflatten(0, (heads, dim)), codes_k.permute(1, 2, 0).unflatten(0, (heads, dim))


def softmax_contender(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Entry:
    """Returns softmax attention without positions, as far as its time allows."""
    time, most = q.shape[2], SOFTMAX_UP_TO[q.device.type]
    if time > most:
        return f"left out: the time of softmax attention grows with the square of the length, here {time:,}; it ends at {most:,}"
    return [Contender(lambda: plain_attention(q, k, v, causal=causal))]


def published_contender(q: Tensor, k: Tensor, v: Tensor, encoding: SineSPE | ConvSPE, *, causal: bool) -> Entry:
    """Returns SPE as published, as far as its codes fit into memory."""
    time, learned = q.shape[2], tuple(encoding.parameters())
    needed = 4 * CODES_HELD * encoding.heads * encoding.head_dim * encoding.realizations * time
    if needed > free_bytes(q.device):
        return f"left out: codes for {time:,} positions take about {needed / 10**9:,.0f} GB in training: too much for memory"
    return [Contender(lambda: published_spe(q, k, v, encoding, causal=causal), learned)]


def free_bytes(device: torch.device) -> float:
    """Returns how many bytes published codes may take."""
    if device.type != "cuda":
        return CODES_BYTES
    # What torch keeps for later is free too.
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return CODES_SHARE * (torch.cuda.mem_get_info(device)[0] + kept)
