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

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from lagwise.lags import LagTable
from lagwise.ops.kernels.arguments import Scores, Seen, Tables, view
from lagwise.ops.kernels.logits import query_start_of, slab_of
from lagwise.ops.kernels.plan import Plan, blocks
from lagwise.ops.kernels.tiles import DIRECT, head_of, home_of, load_rows, place_of, store_rows

if TYPE_CHECKING:
    from lagwise.ops.kernels.inputs import Inputs

# Of the kernels for a gain per channel: the rows of a run, and those where the gradient of the gain is computed, the lags of a
# step, which divides every band, the lags of a program that scores, and the channels of all runs that a warp holds. The
# interpreter takes time by the operation.
LENGTH, GAIN_LENGTH, STEP = (4, 8, 8) if DIRECT.value else (2, 2, 4)
LAGS, WARP_CHANNELS = 64, 256
# Programs that sum the gradient of the gain, enough to fill a GPU.
GAIN_PROGRAMS = 2048

NUMBERS = [
    "heads",
    "group",
    "queries",
    "keys",
    "query_start",
    "first",
    "last",
    "band_first",
    "band_lags",
    "stretch",
    "chunks",
    "scale",
]


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
def score_rows(scores, pair, queries, start, band_first, stretch, row):
    """Returns where rows of scores have their first column."""
    offset = band_first + start
    home = scores.query + pair.to(tl.int64) * slab_of(queries, stretch) + offset + home_of(offset)
    return home + row.to(tl.int64) * stretch


@triton.jit
def load_gradients(
    pointers, row, met, seen, batch, queries, keys, start, first, last, COUNT: tl.constexpr, flags: tl.constexpr
):  # fmt: skip
    """Loads the gradients of COUNT columns of some rows, as that many tensors [rows, 1] in float32; `met` is the first one's key.

    Pairs that nobody looked at hold whatever was there before.
    """
    there = (row >= 0) & (row < queries)
    begin, end = tl.maximum(row + start + first, 0), tl.minimum(row + start + last + 1, keys)
    if flags.MASK:
        begin = tl.maximum(begin, tl.load(seen.spans + 2 * batch))
        end = tl.minimum(end, tl.load(seen.spans + 2 * batch + 1))
    if flags.PACKED:
        begin = tl.maximum(begin, tl.load(seen.spans + row, mask=there, other=0))
        end = tl.minimum(end, tl.load(seen.spans + keys + row, mask=there, other=0))
    numbers = ()
    for place in tl.static_range(COUNT):
        looked_at = there & (met + place >= begin) & (met + place < end)
        numbers += (tl.load(pointers + place, mask=looked_at, other=0.0).to(tl.float32)[:, None],)
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
    q, k, tables, scores, seen, heads, group, queries, keys, query_start, band_first, band_lags, stretch, flags: tl.constexpr
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
    entry = score_rows(scores, pair, queries, start, band_first, stretch, row)[:, None]
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
        tl.store(entries, found.to(scores.query.dtype.element_ty), mask=(row < queries)[:, None])


@triton.jit(do_not_specialize=NUMBERS)
def channel_query_gradient_kernel(
    k, tables, scores, seen, dq, heads, group, queries, keys, query_start, first, last, band_first, band_lags, stretch, scale,
    flags: tl.constexpr,
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
    dscores = score_rows(scores, pair, queries, start, band_first, stretch, run)
    ChannelGain = tables.channel_gain + head * band_lags * flags.head_dim
    changes = (tl.zeros([RUNS, WIDTH], tl.float32),) * LENGTH
    for lag in range(0, band_lags, STEP):
        met = run + start + band_first + lag
        k_runs = load_runs(K, met, keys, k.time, flags.head_dim, WIDTH, LENGTH + STEP - 1)
        dscore = ()
        for place in tl.static_range(LENGTH):
            pointers = dscores + place * stretch + lag
            dscore += (
                load_gradients(pointers, run + place, met + place, seen, batch, queries, keys, start, first, last, STEP, flags),
            )
        for step in tl.static_range(STEP):
            gain = lag_gain(ChannelGain + lag * flags.head_dim + step * flags.head_dim, flags.head_dim, WIDTH)
            changed = ()
            for place in tl.static_range(LENGTH):
                changed += (changes[place] + dscore[place][step] * gain * k_runs[place + step],)
            changes = changed
    Dq = head_of(dq, batch, head)
    for place in tl.static_range(LENGTH):
        before = load_rows(Dq, run + place, queries, dq.time, flags.head_dim, WIDTH, False).to(tl.float32)
        store_rows(Dq, run + place, queries, dq.time, changes[place] * scale + before, flags.head_dim, WIDTH)


@triton.jit(do_not_specialize=NUMBERS)
def channel_key_gradient_kernel(
    q, tables, scores, seen, dk, heads, group, queries, keys, query_start, first, last, band_first, band_lags, stretch, scale,
    flags: tl.constexpr,
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
    ChannelGain = tables.channel_gain + head * band_lags * flags.head_dim
    changes = (tl.zeros([RUNS, WIDTH], tl.float32),) * LENGTH
    for lag in range(0, band_lags, STEP):
        # The query of a run's first key at the last lag: that of key `place` at lag `step` is `place + STEP - 1 - step` later.
        query = run - start - band_first - lag - (STEP - 1)
        q_runs = load_runs(Q, query, queries, q.time, flags.head_dim, WIDTH, LENGTH + STEP - 1)
        pointers = score_rows(scores, pair, queries, start, band_first, stretch, query) + lag
        dscore = ()
        for place in tl.static_range(LENGTH + STEP - 1):
            met = query + place + start + band_first + lag
            dscore += (load_gradients(pointers, query + place, met, seen, batch, queries, keys, start, first, last, STEP, flags),)
            pointers += stretch
        for step in tl.static_range(STEP):
            gain = lag_gain(ChannelGain + lag * flags.head_dim + step * flags.head_dim, flags.head_dim, WIDTH)
            changed = ()
            for place in tl.static_range(LENGTH):
                changed += (changes[place] + dscore[place + STEP - 1 - step][step] * gain * q_runs[place + STEP - 1 - step],)
            changes = changed
    Dk = head_of(dk, batch, head)
    for place in tl.static_range(LENGTH):
        before = load_rows(Dk, run + place, keys, dk.time, flags.head_dim, WIDTH, False).to(tl.float32)
        store_rows(Dk, run + place, keys, dk.time, changes[place] * scale + before, flags.head_dim, WIDTH)


@triton.jit(do_not_specialize=NUMBERS)
def channel_gain_gradient_kernel(
    q, k, scores, seen, dgain, heads, group, queries, keys, query_start, first, last, band_first, band_lags, stretch, chunks,
    scale, flags: tl.constexpr,
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
    sums = (tl.zeros([RUNS, WIDTH], tl.float32),) * STEP
    for block in range(chunk * RUNS * LENGTH, queries, chunks * RUNS * LENGTH):
        run = block + tl.arange(0, RUNS) * LENGTH
        q_runs = load_runs(Q, run, queries, q.time, flags.head_dim, WIDTH, LENGTH)
        met = run + start + band_first + lag
        k_runs = load_runs(K, met, keys, k.time, flags.head_dim, WIDTH, LENGTH + STEP - 1)
        pointers = score_rows(scores, pair, queries, start, band_first, stretch, run) + lag
        for place in tl.static_range(LENGTH):
            dscore = load_gradients(
                pointers, run + place, met + place, seen, batch, queries, keys, start, first, last, STEP, flags
            )
            pointers += stretch
            changed = ()
            for step in tl.static_range(STEP):
                changed += (sums[step] + dscore[step] * q_runs[place] * k_runs[place + step],)
            sums = changed
    share = dgain + ((pair.to(tl.int64) * chunks + chunk) * band_lags + lag) * flags.head_dim
    channel = tl.arange(0, WIDTH)
    for step in tl.static_range(STEP):
        tl.store(share + step * flags.head_dim + channel, tl.sum(sums[step], 0) * scale, mask=channel < flags.head_dim)


def channel_scores(plan: Plan, q: Tensor, k: Tensor, tables: Tables, scores: Scores, seen: Seen) -> None:
    """Adds the content product of a plan's band to its scores, or writes it where there are none."""
    sizes, rows, warps = runs(plan, loads_gain=True)
    grid = (blocks(plan.queries, rows), blocks(plan.band_lags, LAGS), plan.pairs)
    values = (
        view(q), view(k), tables, scores, seen, *plan.numbers[:5], plan.band_first, plan.band_lags, plan.stretch,
        plan.flags_at("channels", **sizes),
    )  # fmt: skip
    plan.launch("channel scores", channel_scores_kernel, grid, values, warps)


def runs(plan: Plan, *, loads_gain: bool) -> tuple[dict[str, int], int, int]:
    """Returns the sizes of the kernels here, the rows of a program, and its warps.

    To fewer warps Triton would hand the gains of a wide head through shared memory.
    """
    warps, length = (max(4, plan.flags["WIDTH"] // 16), LENGTH) if loads_gain else (4, GAIN_LENGTH)
    count = warps * WARP_CHANNELS // plan.flags["WIDTH"]
    return {"RUNS": count, "LENGTH": length, "STEP": STEP, "LAGS": LAGS}, count * length, warps


def channel_gradients(
    inputs: "Inputs", scores: Scores, ends: Tensor, found: dict[str, Tensor], *, learned: bool, dtype: torch.dtype
) -> None:
    """Adds the shares of a gain per channel to dq and dk, and finds its gradient: in the band from gradients in place of the
    scores, beyond it from the ends that the pass over queries summed."""
    plan, lowered = inputs.plan, inputs.lowered
    assert lowered.gain is not None
    sizes, rows, warps = runs(plan, loads_gain=True)
    flags = plan.flags_at("channels", **sizes)
    numbers = (*plan.numbers[:7], plan.band_first, plan.band_lags, plan.stretch, plan.kind.scale)
    given = (inputs.tables, scores, inputs.visible)
    dq, dk = found["q"], found["k"]
    grid = (blocks(plan.queries, rows), plan.pairs)
    values = (view(inputs.k), *given, view(dq), *numbers, flags)
    plan.launch("channel queries", channel_query_gradient_kernel, grid, values, warps)
    grid = (blocks(plan.keys, rows), plan.pairs)
    values = (view(inputs.q), *given, view(dk), *numbers, flags)
    plan.launch("channel keys", channel_key_gradient_kernel, grid, values, warps)
    if not learned:
        return
    sizes, rows, warps = runs(plan, loads_gain=False)
    lag_blocks = plan.band_lags // STEP
    chunks = min(blocks(GAIN_PROGRAMS, lag_blocks * plan.pairs), blocks(plan.queries, rows))
    shape = (plan.batch, plan.heads, chunks, plan.band_lags, plan.head_dim)
    shares = torch.empty(shape, dtype=torch.float32, device=dq.device)
    values = (
        view(inputs.q), view(inputs.k), scores, inputs.visible, shares, *numbers[:-1], chunks, plan.kind.scale,
        plan.flags_at("channels", **sizes),
    )  # fmt: skip
    plan.launch("channel gain", channel_gain_gradient_kernel, (lag_blocks, chunks, plan.pairs), values, warps)
    table = LagTable(lowered.gain, plan.firsts["gain"])
    gradient = table.zeros(torch.float32)
    table.fold(shares.sum((0, 2)), plan.band_first, gradient)
    if plan.only is None:
        past, future = ends[..., : plan.head_dim].sum((0, 2)).unbind(1)
        for column, change in ((0, past), (-1, future)):
            gradient.values[:, column] += change.sum(0, keepdim=True) if table.heads == 1 else change
    found["gain"] = gradient.values.to(dtype)
