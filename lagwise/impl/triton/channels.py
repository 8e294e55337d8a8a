"""A gain per channel: the content product of the band, lag by lag, and its gradients.

    score(i, n) = sum_c gain_c(n) q_ic k_(i+n)c
    dq_ic = scale sum_n dscore(i, n) gain_c(n) k_(i+n)c         dk_jc = scale sum_n dscore(j-n, n) gain_c(n) q_(j-n)c
    dgain_c(n) = scale sum_i dscore(i, n) q_ic k_(i+n)c

Each lag has its own weights of the channels, so that this is no matrix product: a program holds a block of rows and
walks over the lags.
"""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

import triton
import triton.language as tl

from lagwise.impl.triton.tiles import load_rows, store_rows

NUMBERS = ["heads", "group", "queries", "keys", "query_start", "band_first", "band_lags", "scale"]


@triton.jit(do_not_specialize=NUMBERS)
def channel_scores_kernel(
    Q, K, ChannelGain, BandScores, Starts,
    q_batch, q_head, q_time, k_batch, k_head, k_time,
    heads, group, queries, keys, query_start, band_first, band_lags,
    head_dim: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, LAGS: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    """Adds the content product of LAGS lags to the scores of a block of queries."""
    index, count, lag_blocks = tl.program_id(0), tl.cdiv(queries, ROWS), tl.cdiv(band_lags, LAGS)
    block, lag_block, pair = index % count, index // count % lag_blocks, index // (count * lag_blocks)
    batch, head = pair // heads, pair % heads
    row = block * ROWS + tl.arange(0, ROWS)
    start = tl.load(Starts + batch).to(tl.int32) if STARTS else query_start
    Q += batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
    K += batch.to(tl.int64) * k_batch + (head // group).to(tl.int64) * k_head
    channel = tl.arange(0, WIDTH)
    q = load_rows(Q, row, queries, q_time, head_dim, WIDTH, False).to(tl.float32)
    column = lag_block * LAGS + tl.arange(0, LAGS)
    scores = tl.zeros([ROWS, LAGS], tl.float32)
    for step in range(LAGS):
        lag = lag_block * LAGS + step
        there = (channel < head_dim) & (lag < band_lags)
        gain = tl.load(ChannelGain + (head * band_lags + lag) * head_dim + channel, mask=there, other=0.0)
        k = load_rows(K, row + start + band_first + lag, keys, k_time, head_dim, WIDTH, False).to(tl.float32)
        found = tl.sum(q * gain[None, :] * k, 1)
        scores = tl.where((column == lag)[None, :], found[:, None], scores)
    entry = BandScores + pair.to(tl.int64) * queries * band_lags + row.to(tl.int64)[:, None] * band_lags + column[None, :]
    there = (row < queries)[:, None] & (column < band_lags)[None, :]
    scores += tl.load(entry, mask=there, other=0.0).to(tl.float32)
    tl.store(entry, scores.to(BandScores.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=NUMBERS)
def channel_query_gradient_kernel(
    Q, K, ChannelGain, DBandScores, Dq, DChannelGain, Starts,
    q_batch, q_head, q_time, k_batch, k_head, k_time,
    heads, group, queries, keys, query_start, band_first, band_lags, scale,
    head_dim: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    """Adds the band's share to dq of a block of queries, and writes the block's share of dgain, [lags, head_dim]."""
    index, count = tl.program_id(0), tl.cdiv(queries, ROWS)
    block, pair = index % count, index // count
    batch, head = pair // heads, pair % heads
    row = block * ROWS + tl.arange(0, ROWS)
    start = tl.load(Starts + batch).to(tl.int32) if STARTS else query_start
    Q += batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
    K += batch.to(tl.int64) * k_batch + (head // group).to(tl.int64) * k_head
    channel = tl.arange(0, WIDTH)
    q = load_rows(Q, row, queries, q_time, head_dim, WIDTH, False).to(tl.float32)
    dq = tl.zeros([ROWS, WIDTH], tl.float32)
    dscores = DBandScores + pair.to(tl.int64) * queries * band_lags + row.to(tl.int64) * band_lags
    share = DChannelGain + (pair.to(tl.int64) * count + block) * band_lags * head_dim
    for lag in range(0, band_lags):
        gain = tl.load(ChannelGain + (head * band_lags + lag) * head_dim + channel, mask=channel < head_dim, other=0.0)
        k = load_rows(K, row + start + band_first + lag, keys, k_time, head_dim, WIDTH, False).to(tl.float32)
        dscore = tl.load(dscores + lag, mask=row < queries, other=0.0).to(tl.float32)
        change = dscore[:, None] * k
        dq += change * gain[None, :]
        tl.store(share + lag * head_dim + channel, tl.sum(change * q, 0) * scale, mask=channel < head_dim)
    before = load_rows(Dq + pair.to(tl.int64) * queries * head_dim, row, queries, head_dim, head_dim, WIDTH, False)
    dq = dq * scale + before.to(tl.float32)
    store_rows(Dq + pair.to(tl.int64) * queries * head_dim, row, queries, head_dim, dq, head_dim, WIDTH)


@triton.jit(do_not_specialize=NUMBERS)
def channel_key_gradient_kernel(
    Q, ChannelGain, DBandScores, Dk, Starts,
    q_batch, q_head, q_time,
    heads, queries, keys, query_start, band_first, band_lags, scale,
    head_dim: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    """Adds the band's share to dk of a block of keys, from one query head."""
    index, count = tl.program_id(0), tl.cdiv(keys, ROWS)
    block, pair = index % count, index // count
    batch, head = pair // heads, pair % heads
    key = block * ROWS + tl.arange(0, ROWS)
    start = tl.load(Starts + batch).to(tl.int32) if STARTS else query_start
    Q += batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
    channel = tl.arange(0, WIDTH)
    dk = tl.zeros([ROWS, WIDTH], tl.float32)
    dscores = DBandScores + pair.to(tl.int64) * queries * band_lags
    for lag in range(0, band_lags):
        gain = tl.load(ChannelGain + (head * band_lags + lag) * head_dim + channel, mask=channel < head_dim, other=0.0)
        row = key - start - band_first - lag
        q = load_rows(Q, row, queries, q_time, head_dim, WIDTH, False).to(tl.float32)
        there = (row >= 0) & (row < queries)
        dscore = tl.load(dscores + row.to(tl.int64) * band_lags + lag, mask=there, other=0.0).to(tl.float32)
        dk += dscore[:, None] * (q * gain[None, :])
    before = load_rows(Dk + pair.to(tl.int64) * keys * head_dim, key, keys, head_dim, head_dim, WIDTH, False)
    dk = dk * scale + before.to(tl.float32)
    store_rows(Dk + pair.to(tl.int64) * keys * head_dim, key, keys, head_dim, dk, head_dim, WIDTH)
