"""A gain per channel: the content product of the band, lag by lag, and its gradients.

    score(i, n) = sum_c gain_c(n) q_ic k_(i+n)c
    dq_ic = scale sum_n dscore(i, n) gain_c(n) k_(i+n)c         dk_jc = scale sum_n dscore(j-n, n) gain_c(n) q_(j-n)c
    dgain_c(n) = scale sum_i dscore(i, n) q_ic k_(i+n)c

Each lag has its own weights of the channels, so that this is no matrix product: the ordinary units do two operations per row,
lag and channel, and every other instruction counts. A program holds RUNS runs of LENGTH consecutive rows, as LENGTH tensors
[RUNS, WIDTH], and takes STEP lags at a time, a divisor of the lags of the band: the LENGTH + STEP - 1 rows that these pair with a
run are loaded and turned to float32 once, for LENGTH * STEP uses in registers.
"""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lagwise.ops.kernels.bias_gradient import DIAGONAL_PROGRAMS
from lagwise.ops.kernels.launches import run
from lagwise.ops.kernels.logits import query_start_of
from lagwise.ops.kernels.plan import Plan, blocks
from lagwise.ops.kernels.tiles import DIRECT, head_of, load_rows, place_of, store_rows
from lagwise.terms import Terms

# Of the kernels for a gain per channel: the rows of a run, and those where the gradient of the gain is computed, the lags of a
# step, which divides every band, the lags of a program that scores, and the channels of all runs that a warp holds. The
# interpreter takes time by the operation.
LENGTH, GAIN_LENGTH, STEP = (4, 8, 8) if DIRECT.value else (2, 2, 4)
LAGS, WARP_CHANNELS = 64, 256

NUMBERS = ["heads", "group", "queries", "keys", "query_start", "band_first", "band_lags", "chunks", "scale"]


@triton.jit
def widened(x):
    """Turns numbers to float32.

    By itself the compiler takes two instructions for the second bfloat16 of a register; one is enough.
    """
    if DIRECT and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(tl.float32)


@triton.jit
def load_runs(X, index, count, stride, dim: tl.constexpr, WIDTH: tl.constexpr, LENGTH: tl.constexpr):
    """Loads LENGTH rows from each index on, as that many tensors [index, WIDTH] in float32, with zeros beyond the ends."""
    channel = tl.arange(0, WIDTH)
    pointers = X + index.to(tl.int64)[:, None] * stride + channel[None, :]
    rows = ()
    for place in tl.static_range(LENGTH):
        there = (index >= -place)[:, None] & (index < count - place)[:, None]
        if dim != WIDTH:
            there = there & (channel < dim)[None, :]
        rows += (widened(tl.load(pointers, mask=there, other=0.0)),)
        pointers += stride
    return rows


@triton.jit
def lag_gain(pointer, dim: tl.constexpr, WIDTH: tl.constexpr):
    """Loads the weights of the channels at a lag, [1, WIDTH]."""
    channel = tl.arange(0, WIDTH)
    return tl.load(pointer + channel, mask=channel < dim, other=0.0)[None, :]


@triton.jit
def load_words(pointers, there, COUNT: tl.constexpr):
    """Loads COUNT numbers from each pointer on, as that many tensors [pointers, 1] in float32, several to an access."""
    kind: tl.constexpr = pointers.dtype.element_ty
    BITS: tl.constexpr = kind.primitive_bitwidth
    PER_WORD: tl.constexpr = 64 // BITS
    words = pointers.to(tl.pointer_type(tl.int64))
    numbers = ()
    for word in tl.static_range(COUNT // PER_WORD):
        found = tl.load(words + word, mask=there, other=0)
        for place in tl.static_range(PER_WORD):
            bits = (found >> place * BITS).to(tl.int16 if BITS == 16 else tl.int32)
            numbers += (bits.to(kind, bitcast=True).to(tl.float32)[:, None],)
    return numbers


@triton.jit
def stacked(columns):
    """Joins tensors, a power of two of them, along a new last axis."""
    if len(columns) == 1:
        return columns[0]
    else:
        return tl.join(stacked(columns[0::2]), stacked(columns[1::2]))


@triton.jit(do_not_specialize=NUMBERS)
def channel_scores_kernel(
    q, k, tables, scores, seen, heads, group, queries, keys, query_start, band_first, band_lags, flags: tl.constexpr
):  # fmt: skip
    """Writes the content product of LAGS lags to the scores of a block of queries, or adds it to those of a query table."""
    WIDTH: tl.constexpr = flags.WIDTH
    RUNS: tl.constexpr = flags.RUNS
    LENGTH: tl.constexpr = flags.LENGTH
    STEP: tl.constexpr = flags.STEP
    index, count, lag_blocks = tl.program_id(0), tl.cdiv(queries, RUNS * LENGTH), tl.cdiv(band_lags, flags.LAGS)
    block, lag_block, pair = index % count, index // count % lag_blocks, index // (count * lag_blocks)
    batch, head = pair // heads, pair % heads
    run = block * RUNS * LENGTH + tl.arange(0, RUNS) * LENGTH
    row = block * RUNS * LENGTH + tl.arange(0, RUNS * LENGTH)
    start = query_start_of(seen, batch, query_start, flags)
    Q = head_of(q, batch, head)
    K = head_of(k, batch, head // group)
    ChannelGain = tables.channel_gain + head * band_lags * flags.head_dim
    entry = scores.band + pair.to(tl.int64) * queries * band_lags + row.to(tl.int64)[:, None] * band_lags
    q_runs = load_runs(Q, run, queries, q.time, flags.head_dim, WIDTH, LENGTH)
    for lag in range(lag_block * flags.LAGS, min(lag_block * flags.LAGS + flags.LAGS, band_lags), STEP):
        met = run + start + band_first + lag
        k_runs = load_runs(K, met, keys, k.time, flags.head_dim, WIDTH, LENGTH + STEP - 1)
        columns = ()
        for step in tl.static_range(STEP):
            gain = lag_gain(ChannelGain + lag * flags.head_dim + step * flags.head_dim, flags.head_dim, WIDTH)
            column = ()
            for place in tl.static_range(LENGTH):
                column += (tl.sum(q_runs[place] * gain * k_runs[place + step], 1),)
            columns += (stacked(column),)
        found = tl.reshape(stacked(columns), [RUNS * LENGTH, STEP])
        entries = entry + lag + tl.arange(0, STEP)[None, :]
        if flags.QUERY:
            found += tl.load(entries, mask=(row < queries)[:, None], other=0.0).to(tl.float32)
        tl.store(entries, found.to(scores.band.dtype.element_ty), mask=(row < queries)[:, None])


@triton.jit(do_not_specialize=NUMBERS)
def channel_query_gradient_kernel(
    k, tables, scores, seen, dq, heads, group, queries, keys, query_start, band_first, band_lags, scale, flags: tl.constexpr
):  # fmt: skip
    """Adds the band's share to dq of a block of queries."""
    WIDTH: tl.constexpr = flags.WIDTH
    RUNS: tl.constexpr = flags.RUNS
    LENGTH: tl.constexpr = flags.LENGTH
    STEP: tl.constexpr = flags.STEP
    block, pair, batch, head = place_of(queries, heads, RUNS * LENGTH)
    run = block * RUNS * LENGTH + tl.arange(0, RUNS) * LENGTH
    start = query_start_of(seen, batch, query_start, flags)
    K = head_of(k, batch, head // group)
    dscores = scores.band + pair.to(tl.int64) * queries * band_lags + run.to(tl.int64) * band_lags
    ChannelGain = tables.channel_gain + head * band_lags * flags.head_dim
    changes = (tl.zeros([RUNS, WIDTH], tl.float32),) * LENGTH
    for lag in range(0, band_lags, STEP):
        met = run + start + band_first + lag
        k_runs = load_runs(K, met, keys, k.time, flags.head_dim, WIDTH, LENGTH + STEP - 1)
        dscore = ()
        for place in tl.static_range(LENGTH):
            dscore += (load_words(dscores + place * band_lags + lag, run + place < queries, STEP),)
        for step in tl.static_range(STEP):
            gain = lag_gain(ChannelGain + lag * flags.head_dim + step * flags.head_dim, flags.head_dim, WIDTH)
            changed = ()
            for place in tl.static_range(LENGTH):
                changed += (changes[place] + dscore[place][step] * gain * k_runs[place + step],)
            changes = changed
    Dq = dq + pair.to(tl.int64) * queries * flags.head_dim
    for place in tl.static_range(LENGTH):
        before = load_rows(Dq, run + place, queries, flags.head_dim, flags.head_dim, WIDTH, False).to(tl.float32)
        store_rows(Dq, run + place, queries, flags.head_dim, changes[place] * scale + before, flags.head_dim, WIDTH)


@triton.jit(do_not_specialize=NUMBERS)
def channel_key_gradient_kernel(
    q, tables, scores, seen, dk, heads, queries, keys, query_start, band_first, band_lags, scale, flags: tl.constexpr
):  # fmt: skip
    """Adds the band's share to dk of a block of keys, from one query head."""
    WIDTH: tl.constexpr = flags.WIDTH
    RUNS: tl.constexpr = flags.RUNS
    LENGTH: tl.constexpr = flags.LENGTH
    STEP: tl.constexpr = flags.STEP
    block, pair, batch, head = place_of(keys, heads, RUNS * LENGTH)
    run = block * RUNS * LENGTH + tl.arange(0, RUNS) * LENGTH
    start = query_start_of(seen, batch, query_start, flags)
    Q = head_of(q, batch, head)
    dscores = scores.band + pair.to(tl.int64) * queries * band_lags
    ChannelGain = tables.channel_gain + head * band_lags * flags.head_dim
    changes = (tl.zeros([RUNS, WIDTH], tl.float32),) * LENGTH
    for lag in range(0, band_lags, STEP):
        # The query of a run's first key at the last lag: that of key `place` at lag `step` is `place + STEP - 1 - step` later.
        first = run - start - band_first - lag - (STEP - 1)
        q_runs = load_runs(Q, first, queries, q.time, flags.head_dim, WIDTH, LENGTH + STEP - 1)
        pointers = dscores + first.to(tl.int64) * band_lags + lag
        dscore = ()
        for place in tl.static_range(LENGTH + STEP - 1):
            dscore += (load_words(pointers, (first + place >= 0) & (first + place < queries), STEP),)
            pointers += band_lags
        for step in tl.static_range(STEP):
            gain = lag_gain(ChannelGain + lag * flags.head_dim + step * flags.head_dim, flags.head_dim, WIDTH)
            changed = ()
            for place in tl.static_range(LENGTH):
                changed += (changes[place] + dscore[place + STEP - 1 - step][step] * gain * q_runs[place + STEP - 1 - step],)
            changes = changed
    Dk = dk + pair.to(tl.int64) * keys * flags.head_dim
    for place in tl.static_range(LENGTH):
        before = load_rows(Dk, run + place, keys, flags.head_dim, flags.head_dim, WIDTH, False).to(tl.float32)
        store_rows(Dk, run + place, keys, flags.head_dim, changes[place] * scale + before, flags.head_dim, WIDTH)


@triton.jit(do_not_specialize=NUMBERS)
def channel_gain_gradient_kernel(
    q, k, scores, seen, dgain, heads, group, queries, keys, query_start, band_first, band_lags, chunks, scale,
    flags: tl.constexpr,
):  # fmt: skip
    """Writes the share of dgain that a chunk of the queries gives to STEP lags, [chunks, lags, head_dim] per pair."""
    WIDTH: tl.constexpr = flags.WIDTH
    RUNS: tl.constexpr = flags.RUNS
    LENGTH: tl.constexpr = flags.LENGTH
    STEP: tl.constexpr = flags.STEP
    index, lag_blocks = tl.program_id(0), band_lags // STEP
    lag, chunk, pair = index % lag_blocks * STEP, index // lag_blocks % chunks, index // (lag_blocks * chunks)
    batch, head = pair // heads, pair % heads
    start = query_start_of(seen, batch, query_start, flags)
    Q = head_of(q, batch, head)
    K = head_of(k, batch, head // group)
    dscores = scores.band + pair.to(tl.int64) * queries * band_lags + lag
    sums = (tl.zeros([RUNS, WIDTH], tl.float32),) * STEP
    for block in range(chunk * RUNS * LENGTH, queries, chunks * RUNS * LENGTH):
        run = block + tl.arange(0, RUNS) * LENGTH
        q_runs = load_runs(Q, run, queries, q.time, flags.head_dim, WIDTH, LENGTH)
        met = run + start + band_first + lag
        k_runs = load_runs(K, met, keys, k.time, flags.head_dim, WIDTH, LENGTH + STEP - 1)
        pointers = dscores + run.to(tl.int64) * band_lags
        for place in tl.static_range(LENGTH):
            dscore = load_words(pointers, run + place < queries, STEP)
            pointers += band_lags
            changed = ()
            for step in tl.static_range(STEP):
                changed += (sums[step] + dscore[step] * q_runs[place] * k_runs[place + step],)
            sums = changed
    share = dgain + ((pair.to(tl.int64) * chunks + chunk) * band_lags + lag) * flags.head_dim
    channel = tl.arange(0, WIDTH)
    for step in tl.static_range(STEP):
        tl.store(share + step * flags.head_dim + channel, tl.sum(sums[step], 0) * scale, mask=channel < flags.head_dim)


def channel_scores(plan: Plan) -> None:
    """Adds the content product of a plan's band to its scores, or writes it where there are none."""
    sizes, rows, warps = runs(plan, loads_gain=True)
    grid = (blocks(plan.queries, rows), blocks(plan.numbers["band_lags"], LAGS), plan.batch * plan.heads)
    run(channel_scores_kernel, grid, plan.arguments(**sizes), warps, stages=1)


def runs(plan: Plan, *, loads_gain: bool) -> tuple[dict[str, int], int, int]:
    """Returns the sizes of the kernels here, the rows of a program, and its warps.

    To fewer warps Triton would hand the gains of a wide head through shared memory.
    """
    warps, length = (max(4, plan.flags["WIDTH"] // 16), LENGTH) if loads_gain else (4, GAIN_LENGTH)
    count = warps * WARP_CHANNELS // plan.flags["WIDTH"]
    return {"RUNS": count, "LENGTH": length, "STEP": STEP, "LAGS": LAGS}, count * length, warps


def channel_gradients(plan: Plan, found: dict[str, Tensor], tables: Terms) -> None:
    """Adds the shares of a gain per channel to dq and dk, and its gradient in the band, from gradients in place of the scores."""
    assert plan.tables.gain is not None and tables.gain is not None
    sizes, rows, warps = runs(plan, loads_gain=True)
    pairs, lags = plan.batch * plan.heads, plan.numbers["band_lags"]
    arguments = plan.arguments(**sizes, dq=found["q"], dk=found["k"])
    run(channel_query_gradient_kernel, (blocks(plan.queries, rows), pairs), arguments, warps, stages=1)
    run(channel_key_gradient_kernel, (blocks(plan.keys, rows), pairs), arguments, warps, stages=1)
    sizes, rows, warps = runs(plan, loads_gain=False)
    chunks = min(blocks(DIAGONAL_PROGRAMS, lags // STEP * pairs), blocks(plan.queries, rows))
    shares = torch.empty(plan.batch, plan.heads, chunks, lags, plan.q.shape[3], dtype=torch.float32, device=plan.q.device)
    arguments = plan.arguments(**sizes, dgain=shares, chunks=chunks)
    run(channel_gain_gradient_kernel, (lags // STEP, chunks, pairs), arguments, warps, stages=1)
    plan.tables.gain.fold(shares.sum((0, 2)), plan.band_first, tables.gain)


def channel_ends(plan: Plan, ends: Tensor, tables: Terms) -> None:
    """Adds the gradient of a gain per channel beyond the band."""
    if plan.only is None and tables.gain is not None:
        past, future = ends[..., : plan.q.shape[3]].sum((0, 2)).unbind(1)
        for column, gradient in ((0, past), (-1, future)):
            tables.gain.values[:, column] += gradient.sum(0, keepdim=True) if tables.gain.heads == 1 else gradient
